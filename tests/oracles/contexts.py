"""Contexts whose keys and values lie in blocks, anywhere in a memory, and policies whose attention reads them there."""

import numpy as np
import torch

from flexhybrid.core.context.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.core.policy import Bits, Policy
from flexhybrid.runtime.kernels.attention import Extent

POLICIES = {
    "every tier": Policy(cache={"kv@device": 0.25, "kv@host": 0.25, "act@device": 0.25, "act@host": 0.25}),
    "disk": Policy(cache={"kv@disk": 0.5, "act@disk": 0.5}),
    "both": "kvpr_row",
    "few bits": Policy(cache={"kv@host": 0.4, "kv@device": 0.3, "act@host": 0.3}, bits=Bits(kv=8)),
    "static": Policy(cache={"kv@host": 0.5, "act@device": 0.5}, static_cache=True),
}


def laid_out(generator, dtype, groups, d, tokens, head_major):
    """Keys and values [tokens, 2, G, d] of requests, their blocks' extent in a memory of NaN, that memory."""
    counts = ceil_blocks(np.array(tokens))
    order = torch.randperm(int(counts.sum()) + 3, generator=generator).numpy()
    memory = torch.full((len(order), 2, groups, BLOCK_TOKENS, d), float("nan"), dtype=dtype)
    table = np.zeros((len(tokens), max(1, counts.max())), np.int64)
    contexts, taken = [], 0
    for request, length in enumerate(tokens):
        blocks = order[taken : taken + counts[request]]
        table[request, : len(blocks)], taken = blocks, taken + len(blocks)
        context = torch.randn(length, 2, groups, d, generator=generator).to(dtype)
        for token in range(length):
            memory[blocks[token // BLOCK_TOKENS], :, :, token % BLOCK_TOKENS] = context[token]
        contexts.append(context)
    size, width = 2 * groups * d, groups * d
    strides = (d, BLOCK_TOKENS * d, BLOCK_TOKENS * width) if head_major else (size, d, width)
    if not head_major:
        memory = memory.permute(0, 3, 1, 2, 4).contiguous()
    return contexts, Extent(table * BLOCK_TOKENS * size, np.array(tokens, np.int64), *strides), memory
