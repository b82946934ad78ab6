"""Attention kernels.

Shapes: B requests, H query heads, G key/value heads, r = H/G, T context, N new tokens, d head size. Keys and values are
head-major, [B, G, T, d]: decode attention over token-major views is 3 to 12 times slower. The r query heads that share
a key head are folded into the query axis, so that grouped-query attention is one product.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.memory import WIDENED_ELEMENTS
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.work import PREFILL_QUERIES
from flexhybrid.runtime.kernels.compiled import demand

#: Attention output [B, G, Q, d], and log(denominator of the softmax) [B, G, Q]; both float32.
Weighed = tuple[torch.Tensor, torch.Tensor]


class ScoreRule(NamedTuple):
    """How scores q·k change before the softmax: an ``AttentionKind`` with the values of a layer."""

    scaling: float
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None

    @property
    def changes_scores(self) -> bool:
        """Return whether the rule does more than scale; a ``Path`` can only scale."""
        return self.softcap is not None or self.sinks_H is not None

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """Apply the softcap to scores in place; return them."""
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def with_sinks(self, own: Weighed) -> None:
        """Add the sinks to the softmax of ``own`` (Q = r·…). Call this once, after all parts of a context."""
        if self.sinks_H is not None:
            attended, sums = own
            by_head = sums.unflatten(2, (len(self.sinks_H) // sums.shape[1], -1))
            sinks = self.sinks_H.to(sums).view(sums.shape[1], -1, 1)
            attended *= (by_head - sinks).sigmoid().flatten(2)[..., None]


class Extent(NamedTuple):
    """Where a part of each context is in a memory, in elements. A block has places for 16 tokens."""

    blocks: np.ndarray  #: [B, n] int64: the first element of each block of 16 tokens
    tokens: np.ndarray  #: [B] int64
    token_stride: int  #: distance from a token to the next token of its block
    head_stride: int  #: distance from a head's keys to the next head's keys
    values: int  #: distance from a token's keys to its values
    hidden: np.ndarray | None = None  #: [B, n] number of hidden first tokens in each block, 0 to 16; None: all 0

    @property
    def seen(self) -> np.ndarray:
        """Return the number of visible tokens of each request, [B]."""
        filled = np.clip(self.tokens[:, None] - np.arange(self.blocks.shape[1]) * BLOCK_TOKENS, 0, BLOCK_TOKENS)
        return np.maximum(filled - (0 if self.hidden is None else self.hidden), 0).sum(1)

    def of_rows(self, rows: np.ndarray) -> Extent:
        """Return the extent of some requests (``rows``)."""
        hidden = None if self.hidden is None else self.hidden[rows]
        return self._replace(blocks=self.blocks[rows], tokens=self.tokens[rows], hidden=hidden)

    def reach(self, kernel: str, groups: int) -> int:
        """Return the first element of the last head that a kernel may read; -1 if it reads nothing."""
        blocks, tokens, hidden = self.blocks, self.tokens, self.hidden
        most = int(tokens.max(initial=0))
        demand(
            kernel,
            blocks=blocks.dtype == np.int64 and blocks.min(initial=0) >= 0,
            tokens=tokens.dtype == np.int64 and tokens.min(initial=0) >= 0 and most <= blocks.shape[-1] * BLOCK_TOKENS,
            hidden=hidden is None or hidden.min(initial=0) >= 0 and hidden.max(initial=0) <= BLOCK_TOKENS,
            shapes=blocks.shape[:-1] == tokens.shape and (hidden is None or hidden.shape == blocks.shape),
            strides=min(self.token_stride, self.head_stride, self.values) >= 0,
        )
        last = (BLOCK_TOKENS - 1) * self.token_stride + (groups - 1) * self.head_stride + self.values
        return int(blocks.max()) + last if most else -1


def split_heads(shape: ModelShape, kvq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of projected rows [..., 2·G·d + H·d]: keys and values [..., G, d], queries [..., H, d]."""
    half, heads = shape.kv_width // 2, (-1, shape.head_dim)
    keys, values, queries = kvq.split((half, half, shape.query_width), dim=-1)
    return keys.unflatten(-1, heads), values.unflatten(-1, heads), queries.unflatten(-1, heads)


class Assembled(NamedTuple):
    """Contexts padded to equal length: keys and values [B, G, T, d]; the new tokens come last."""

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None = None  #: [B, 1, 1 or N, T], added to scores: -inf for padding and hidden tokens


class Path(Protocol):
    """A function that attends from new tokens to their context, causally among the new tokens: [B, N, H·d].

    ``scaling``: factor of scores (default: d^-0.5).
    """

    def __call__(self, q_BNHd: torch.Tensor, context: Assembled, scaling: float | None = None) -> torch.Tensor: ...


class SlidingWindow(NamedTuple):
    """A sliding window over columns in any order: a token sees the latest ``tokens`` positions, its own included."""

    tokens: int
    queries_BN: torch.Tensor  #: positions of the new tokens; [1, N] if all requests have the same
    columns_BT: torch.Tensor  #: positions of the columns; [1, T] if all requests have the same

    def mask(self, new: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return a mask to add to scores of new tokens and columns: [B or 1, 1, N, T]."""
        hidden = self.columns_BT[:, None, columns] <= self.queries_BN[:, new, None] - self.tokens
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, None]


def fused(q_BNHd: torch.Tensor, context: Assembled, scaling: float | None = None) -> torch.Tensor:
    """Attend by torch's scaled_dot_product_attention. A ``Path``."""
    k_BGTd, v_BGTd, mask = context
    (batch, new, heads, d), (groups, tokens) = q_BNHd.shape, k_BGTd.shape[1:3]
    if new == tokens and mask is None:
        q, k, v, in_groups = q_BNHd.transpose(1, 2), k_BGTd, v_BGTd, heads != groups
        if in_groups and not reads_groups(q, k, v):
            k, v, in_groups = k.repeat_interleave(heads // groups, 1), v.repeat_interleave(heads // groups, 1), False
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=in_groups)
        return attended.transpose(1, 2).reshape(batch, new, heads * d)
    folded = q_BNHd.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if new > 1:
        later = q_BNHd.new_full((new, tokens), -torch.inf).triu_(tokens - new + 1)
        later = later if mask is None else mask + later
        mask = later.repeat(*[1] * (later.dim() - 2), heads // groups, 1)
    attended = F.scaled_dot_product_attention(folded, k_BGTd, v_BGTd, attn_mask=mask, scale=scaling)
    return attended.unflatten(2, (-1, new)).permute(0, 3, 1, 2, 4).reshape(batch, new, heads * d)


def reads_groups(q_BHNd: torch.Tensor, k_BGNd: torch.Tensor, v_BGNd: torch.Tensor) -> bool:
    """Return whether CUDA's flash attention can attend causally and read a group's keys in place.

    Other kernels repeat keys for every query head, or store all scores. torch's check allows no causal mask for more
    columns than queries, so it is asked without one then.
    """
    if not q_BHNd.is_cuda:
        return False
    square = q_BHNd.shape[2] == k_BGNd.shape[2]
    return can_use_flash_attention(SDPAParams(q_BHNd, k_BGNd, v_BGNd, None, 0.0, square, True))


def attend_and_weigh(
    q_BHd: torch.Tensor, context: Assembled, scaling: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with one query per request by two matrix products around a softmax.

    Return the result [B, H·d] and the attention weights [B, G, r, T]. The query is scaled, as the smallest operand.
    """
    k_BGTd, v_BGTd, mask_B11T = context
    folded = q_BHd.view(len(q_BHd), k_BGTd.shape[1], -1, q_BHd.shape[-1])
    scores = torch.matmul(folded * (scaling or folded.shape[-1] ** -0.5), k_BGTd.transpose(-1, -2))
    if mask_B11T is not None:
        scores += mask_B11T
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, v_BGTd).reshape(len(q_BHd), -1), weights


def attention_sums(q_BNHd: torch.Tensor, k_BNGd: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Return the attention weights that each prompt token gets, summed over queries and query heads of a group.

    The result is float32 [B, G, N]. Prompts are padded on the right to N; queries of padding do not count.
    """
    batch, new, heads, d = q_BNHd.shape
    groups = k_BNGd.shape[2]
    keys = k_BNGd.permute(0, 2, 3, 1)[:, :, None]  # [B, G, 1, d, N]
    queries = q_BNHd.view(batch, new, groups, heads // groups, d).permute(0, 2, 3, 1, 4) * d**-0.5
    positions = torch.arange(new, device=q_BNHd.device, dtype=torch.int64)
    sums = torch.zeros(batch, groups, new, dtype=torch.float32, device=q_BNHd.device)
    for start in range(0, new, PREFILL_QUERIES):
        chunk = positions[start : start + PREFILL_QUERIES]
        scores = torch.matmul(queries[:, :, :, chunk], keys).float()
        scores.masked_fill_(positions > chunk[:, None], -torch.inf)
        weights = torch.softmax(scores, dim=-1)
        real = (chunk < lengths_B[:, None])[:, None, None, :, None]
        sums += (weights * real).sum((2, 3))
    return sums


def products(q_BNHd: torch.Tensor, context: Assembled, scaling: float | None = None) -> torch.Tensor:
    """Attend by two matrix products around a softmax. A ``Path``.

    Blocks of queries attend one after another, each to the columns before its end, so that not all scores are stored.
    """
    if q_BNHd.shape[1] == 1:
        return attend_and_weigh(q_BNHd[:, 0], context, scaling)[0][:, None]
    (k_BGTd, v_BGTd, mask), (batch, new, heads, d) = context, q_BNHd.shape
    groups, tokens = k_BGTd.shape[1:3]
    q = q_BNHd.view(batch, new, groups, heads // groups, d).permute(0, 2, 3, 1, 4) * (scaling or d**-0.5)
    above = q.new_full((min(PREFILL_QUERIES, new),) * 2, -torch.inf).triu_(1)
    attended = torch.empty_like(q)
    for start in range(0, new, PREFILL_QUERIES):
        count = min(PREFILL_QUERIES, new - start)
        seen = tokens - new + start + count
        folded = q[:, :, :, start : start + count].reshape(batch, groups, -1, d)
        scores = torch.matmul(folded, k_BGTd[:, :, :seen].transpose(-1, -2))
        grid = scores.view(batch, groups, heads // groups, count, seen)
        grid[..., seen - count :] += above[:count, :count]
        if mask is not None:
            rows = slice(start, start + count) if mask.shape[2] > 1 else slice(None)
            grid += mask[:, :, None, rows, :seen]
        product = torch.matmul(torch.softmax(scores, dim=-1), v_BGTd[:, :, :seen])
        attended[:, :, :, start : start + count] = product.view(batch, groups, heads // groups, count, d)
    return attended.permute(0, 3, 1, 2, 4).reshape(batch, new, heads * d)


def flash(q_BNHd: torch.Tensor, context: Assembled, scaling: float | None = None) -> torch.Tensor:
    """Attend by CUDA's flash attention, which stores no scores, if it can; otherwise by ``products``. A ``Path``."""
    q_BHNd, (k_BGTd, v_BGTd, mask) = q_BNHd.transpose(1, 2), context
    if mask is not None or q_BNHd.shape[-1] % 8 or not reads_groups(q_BHNd, k_BGTd, v_BGTd):
        return products(q_BNHd, context, scaling)
    # The call of causal_lower_right (torch.nn.attention.bias), without its tensor of 8 bytes per score.
    flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
    return flash_attention(q_BHNd, k_BGTd, v_BGTd, 0.0, True, scale=scaling)[0].transpose(1, 2).flatten(2)


def in_float32(path: Path) -> Path:
    """Return a path that computes in float32, for processors without 16-bit products.

    It converts WIDENED_ELEMENTS elements of keys at a time, which fit a CPU's caches.
    """

    def attend(q_BNHd: torch.Tensor, context: Assembled, scaling: float | None = None) -> torch.Tensor:
        (k_BGTd, v_BGTd, mask), (batch, groups, tokens, d) = context, context.keys.shape
        queries = q_BNHd.unflatten(2, (groups, -1))
        attended = torch.empty_like(queries, memory_format=torch.contiguous_format)
        row_step = max(1, WIDENED_ELEMENTS // (groups * tokens * d))
        head_step = min(groups, max(1, WIDENED_ELEMENTS // (tokens * d)))
        for row in range(0, batch, row_step):
            rows = slice(row, row + row_step)
            added = None if mask is None else (mask if len(mask) == 1 else mask[rows]).float()
            for head in range(0, groups, head_step):
                heads = slice(head, head + head_step)
                q = widened(queries[rows, :, heads]).flatten(2, 3)
                out = attended[rows, :, heads]
                wide = Assembled(widened(k_BGTd[rows, heads]), widened(v_BGTd[rows, heads]), added)
                out.copy_(path(q, wide, scaling).view(out.shape))
        return attended.flatten(2)

    return attend


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in contiguous float32; the tensor itself if it is that."""
    return tensor.to(torch.float32, memory_format=torch.contiguous_format)


def attend_in_window(
    path: Path, q_BNHd: torch.Tensor, context: Assembled, window: SlidingWindow, scaling: float | None = None
) -> torch.Tensor:
    """Attend by a path within a window.

    Blocks of queries attend one after another, each to the columns before its end. If all columns are new tokens,
    columns before the block's window are skipped.
    """
    new, tokens, attended = q_BNHd.shape[1], context.keys.shape[2], []
    for start in range(0, new, PREFILL_QUERIES):
        end = min(start + PREFILL_QUERIES, new)
        columns = slice(max(0, start - window.tokens + 1) if new == tokens else 0, tokens - new + end)
        mask = window.mask(slice(start, end), columns, q_BNHd.dtype)
        if context.mask is not None:
            mask = mask + context.mask[..., columns]
        seen = Assembled(context.keys[:, :, columns], context.values[:, :, columns], mask)
        attended.append(path(q_BNHd[:, start:end], seen, scaling))
    return attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)


#: The ways to attend, by name. The fastest one depends on the machine, its libraries and the dtype.
PATHS: dict[str, Path] = {
    "fused": fused,
    "products": products,
    "flash": flash,
    "fused in float32": in_float32(fused),
    "products in float32": in_float32(products),
}
