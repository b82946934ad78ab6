"""How a request's context is kept: cache entries, blocks, packing, split points, selections."""
