"""Storage of weights and caches: checkpoints, host memory, scratch files."""
