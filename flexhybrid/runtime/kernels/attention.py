"""Attention kernels. Shapes: B requests, H query heads, G key/value heads, T context, N new tokens, d head size.

Keys and values are head-major, [B, G, T, d]: decode attention over token-major views is 3 to 12 times slower. The H/G
query heads that share a key head are folded into the query axis, so that grouped-query attention is one product.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.memory import WIDENED_ELEMENTS
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.schedule.steps import BlockRun
from flexhybrid.runtime.buffers import run_view


def split_heads(shape: ModelShape, kvq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of projected rows [..., 2·G·d + H·d]: keys and values [..., G, d], queries [..., H, d]."""
    half = shape.kv_width // 2
    keys, values, queries = kvq.split((half, half, shape.query_width), dim=-1)
    return tuple(part.unflatten(-1, (-1, shape.head_dim)) for part in (keys, values, queries))


def attend_decode(
    q_BHd: torch.Tensor, k_BGTd: torch.Tensor, v_BGTd: torch.Tensor, mask_B11T: torch.Tensor | None
) -> torch.Tensor:
    """One query a request over its whole context -> [B, H·d]. The mask adds -inf where a column is padding."""
    batch, heads, d = q_BHd.shape
    groups = k_BGTd.shape[1]
    folded = q_BHd.view(batch, groups, heads // groups, d)
    if folded.device.type == "cpu" and folded.dtype != torch.float32:
        attended = _by_products(folded, k_BGTd, v_BGTd, mask_B11T)
    else:
        attended = F.scaled_dot_product_attention(folded, k_BGTd, v_BGTd, attn_mask=mask_B11T)
    return attended.reshape(batch, heads * d)


def _by_products(q, k, v, mask) -> torch.Tensor:
    """Two matrix products around a softmax; d ** -0.5 goes into the query, which is the smallest operand.

    Measured on two CPU cores that multiply bfloat16 (8 requests, 517 columns): 0.73 of the memory's bandwidth, where
    scaled_dot_product_attention reaches 0.12 and a float32 softmax between the products costs a third. In float32 it is
    the other way round (two cores of an AMD EPYC, Zen 3): 0.26 to 0.52 against 0.26 to 0.58.
    """
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    if mask is not None:
        scores += mask
    return torch.matmul(torch.softmax(scores, dim=-1), v)


def attend_and_weigh(
    q_BHd: torch.Tensor, k_BGTd: torch.Tensor, v_BGTd: torch.Tensor, mask_B11T: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attend_decode``, and how much each of the r query heads of a group looks at each token: [B, G, r, T]."""
    batch, heads, d = q_BHd.shape
    folded = q_BHd.view(batch, k_BGTd.shape[1], -1, d)
    scores = torch.matmul(folded * d**-0.5, k_BGTd.transpose(-1, -2))
    if mask_B11T is not None:
        scores += mask_B11T
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, v_BGTd).reshape(batch, heads * d), weights


PREFILL_QUERIES = 128  #: whose scores a CPU's caches hold


def looked_at(q_BNHd: torch.Tensor, k_BNGd: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """How much the tokens of a prompt, all query heads of a group together, look at each: float32 [B, G, N].

    Prompts are padded on the right to N; padding looks at nothing.
    """
    batch, new, heads, d = q_BNHd.shape
    groups = k_BNGd.shape[2]
    keys = k_BNGd.permute(0, 2, 3, 1)[:, :, None]  # [B, G, 1, d, N]
    queries = q_BNHd.view(batch, new, groups, heads // groups, d).permute(0, 2, 3, 1, 4) * d**-0.5
    positions = torch.arange(new, device=q_BNHd.device)
    sums = torch.zeros(batch, groups, new, dtype=torch.float32, device=q_BNHd.device)
    for start in range(0, new, PREFILL_QUERIES):
        some = positions[start : start + PREFILL_QUERIES]
        scores = torch.matmul(queries[:, :, :, some], keys).float()
        scores.masked_fill_(positions > some[:, None], -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        real = (some < lengths_B[:, None])[:, None, None, :, None]
        sums += (weights * real).sum((2, 3))
    return sums


def attend_blocks(
    q_BHd: torch.Tensor,
    blocks: torch.Tensor,
    runs: tuple[BlockRun, ...],
    tokens_B: np.ndarray,
    out_BHd: torch.Tensor,
    share: Callable = map,
) -> None:
    """One query a request over its blocks where they lie, [blocks, 2, G, 16, d]: attention on the host, in float32.

    ``tokens_B`` says how many of a request's block places are filled. Each key and value is read once, and nothing is
    written but scores and, of 16-bit blocks, a few heads in float32. ``share`` is map, or that of a pool of threads
    with one torch thread each, which take a request at a time. Measured on two threads of an AMD EPYC (Zen 3), heads
    of 128 with a query each: 2 times as fast as torch operations cut in two, and either 3.6 times (float32) or 2 times
    (16 bits) as fast as products of keys and values that are laid side by side first.
    """
    batch, heads, d = q_BHd.shape
    query = (q_BHd * d**-0.5).view(batch, blocks.shape[2], -1, d).float()
    out = out_BHd.view(query.shape)
    own = [(row, its) for run in runs for row, its in enumerate(run_view(blocks, run), start=run.row)]

    @torch.inference_mode()  # of the calling thread alone, and a pool's threads are others
    def attend_request(row: int, its_blocks: torch.Tensor) -> None:
        _attend_request(query[row], its_blocks, int(tokens_B[row]), out[row])

    for _ in share(attend_request, *zip(*own, strict=True)):
        pass


def _attend_request(q_GRd: torch.Tensor, blocks: torch.Tensor, tokens: int, out_GRd: torch.Tensor) -> None:
    """Blocks [n, 2, G, 16, d] of float32 in place, narrower ones a few heads at a time."""
    num_blocks, _, groups, _, d = blocks.shape
    some = groups
    if blocks.dtype != torch.float32:
        some = max(1, WIDENED_ELEMENTS // (num_blocks * BLOCK_TOKENS * d))
    for start in range(0, groups, some):
        part = slice(start, start + some)
        wide = blocks[:, :, part].to(torch.float32, memory_format=torch.contiguous_format)
        _attend_in_place(q_GRd[part], wide, tokens, out_GRd[part])


def _attend_in_place(q_GRd: torch.Tensor, blocks: torch.Tensor, tokens: int, out_GRd: torch.Tensor) -> None:
    """Block by block. numpy's products take strided blocks as they are; torch would lay them side by side first, and
    its products of 16 keys each take two to three times as long."""
    keys, values = blocks.numpy().swapaxes(0, 1)
    scores = torch.from_numpy(np.matmul(q_GRd.numpy(), keys.swapaxes(-1, -2)))  # [n, G, R, 16]
    scores = scores.permute(1, 2, 0, 3).flatten(2)
    scores[..., tokens:] = -torch.inf
    weights = torch.softmax(scores, dim=-1).unflatten(-1, (-1, BLOCK_TOKENS)).permute(2, 0, 1, 3)
    out_GRd.copy_(torch.from_numpy(np.matmul(weights.numpy(), values).sum(0)))


def attend_prefill(q_BNHd: torch.Tensor, k_BNGd: torch.Tensor, v_BNGd: torch.Tensor) -> torch.Tensor:
    """Causal attention of new tokens over themselves -> [B, N, H·d].

    Prompts are padded on the right: a real token never looks at padding, and rows of padding are never used.
    """
    batch, new, heads, d = q_BNHd.shape
    groups = k_BNGd.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_BNHd, k_BNGd, v_BNGd))
    if groups != heads:
        k, v = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attended.transpose(1, 2).reshape(batch, new, heads * d)


def attend_chunk(
    q_BNHd: torch.Tensor, k_BGTd: torch.Tensor, v_BGTd: torch.Tensor, mask_B11T: torch.Tensor | None
) -> torch.Tensor:
    """New tokens over what is cached, as the mask allows, and causally over themselves -> [B, N, H·d].

    Their own columns are the last ones. By blocks of queries over the columns before their end, so that the scores are
    never there as a whole.
    """
    batch, new, heads, d = q_BNHd.shape
    groups, tokens = k_BGTd.shape[1:3]
    q = q_BNHd.view(batch, new, groups, heads // groups, d).permute(0, 2, 3, 1, 4) * d**-0.5
    above = q.new_full((min(PREFILL_QUERIES, new),) * 2, -torch.inf).triu_(1)
    attended = torch.empty_like(q)
    for start in range(0, new, PREFILL_QUERIES):
        count = min(PREFILL_QUERIES, new - start)
        seen = tokens - new + start + count
        folded = q[:, :, :, start : start + count].reshape(batch, groups, -1, d)
        scores = torch.matmul(folded, k_BGTd[:, :, :seen].transpose(-1, -2))
        grid = scores.view(batch, groups, heads // groups, count, seen)
        grid[..., seen - count :] += above[:count, :count]
        if mask_B11T is not None:
            grid += mask_B11T[:, :, None, :, :seen]
        product = torch.matmul(torch.softmax(scores, dim=-1), v_BGTd[:, :, :seen])
        attended[:, :, :, start : start + count] = product.view(batch, groups, heads // groups, count, d)
    return attended.permute(0, 3, 1, 2, 4).reshape(batch, new, heads * d)
