"""Contexts whose keys and values lie in scattered blocks, policies that read them in place, and plain results."""

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
    """Return keys and values [tokens, 2, G, d] of requests, the extent of their blocks, and the memory, else NaN."""
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


def hidden_at_random(generator, extent: Extent) -> Extent:
    """Return the extent with the first tokens of some blocks hidden by a window, or all of them."""
    hidden = torch.randint(-8, 25, extent.blocks.shape, generator=generator).clamp(0, BLOCK_TOKENS)
    return extent._replace(hidden=hidden.numpy())


def seen_by(pieces, request: int) -> torch.Tensor:
    """Return the keys and values [tokens, 2, G, d] that a request sees in the pieces of ``laid_out``."""
    seen = []
    for contexts, extent, _ in pieces:
        place = np.arange(len(contexts[request]))
        first = 0 if extent.hidden is None else extent.hidden[request, place // BLOCK_TOKENS]
        seen.append(contexts[request][place % BLOCK_TOKENS >= first])
    return torch.cat(seen)


def plain_attention(query_Hd, context, rule) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results [H, d] of one query over keys and values [tokens, 2, G, d], and log-sums [H], in float64."""
    (heads, d), groups = query_Hd.shape, context.shape[2]
    keys, values = context.double().permute(1, 2, 0, 3)  # [G, tokens, d]
    scores = query_Hd.double().view(groups, -1, d) @ keys.transpose(1, 2) * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if rule.sinks_H is not None:
        scores = torch.cat([scores, rule.sinks_H.double().view(groups, -1, 1)], dim=-1)
    attended = torch.softmax(scores, -1)[..., : len(context)] @ values
    return attended.view(heads, d), torch.logsumexp(scores, -1).flatten()
