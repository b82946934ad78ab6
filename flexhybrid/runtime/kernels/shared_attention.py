"""Attention where requests share a part of their context: over the common keys once for all of them.

A request attends to its own context and to each part that it shares with others by itself; what the parts give is
weighed by the sums of their exponentials (Juravsky et al. 2024, "Hydragen", eq. 3 and 5). Shapes as in ``attention``;
of g common parts m requests have each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from flexhybrid.runtime.kernels.attention import PREFILL_QUERIES, Weighed

#: Of g common parts: the rows [g, m] that have them, their keys and their values [g, G, T, d].
SharedPart = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

#: On a CPU: attends in one pass over the keys, sums in float32, and gives the logarithms of the sums too.
_in_one_pass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend_with_shared(
    q_BNHd: torch.Tensor,
    k_BGTd: torch.Tensor,
    v_BGTd: torch.Tensor,
    mask_B11T: torch.Tensor | None,
    shared: Sequence[SharedPart],
) -> torch.Tensor:
    """Attend as a ``Path`` does over own keys and values, and over ``shared`` ones. Returns [B, N, H·d]."""
    batch, new, heads, d = q_BNHd.shape
    q = grouped(q_BNHd, k_BGTd.shape[1])
    attended = torch.empty_like(q, memory_format=torch.contiguous_format)
    for start in range(0, new, PREFILL_QUERIES):
        queries = q[:, :, :, start : start + PREFILL_QUERIES]
        seen = k_BGTd.shape[2] - max(0, new - start - PREFILL_QUERIES)
        hidden = None if mask_B11T is None else mask_B11T[..., :seen]
        own = attend_and_sum(queries, k_BGTd[:, :, :seen], v_BGTd[:, :, :seen], hidden)
        add_shared(own, queries, shared)
        attended[:, :, :, start : start + PREFILL_QUERIES] = own[0].unflatten(2, queries.shape[2:4])
    return attended.permute(0, 3, 1, 2, 4).reshape(batch, new, heads * d)


def grouped(q_BNHd: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the queries by key head: [B, G, r, N, d]."""
    return q_BNHd.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)


def attend_and_sum(
    q_BGrNd: torch.Tensor, k_BGTd: torch.Tensor, v_BGTd: torch.Tensor, mask_B11T: torch.Tensor | None
) -> Weighed:
    """Attend as a ``Path`` does, with few new tokens; Q = r · N."""
    repeats, new, tokens = *q_BGrNd.shape[2:4], k_BGTd.shape[2]
    if new > 1:
        causal = q_BGrNd.new_full((new, tokens), -torch.inf).triu_(tokens - new + 1).repeat(repeats, 1)
        mask_B11T = causal[None, None] if mask_B11T is None else mask_B11T + causal
    return _attended(q_BGrNd.flatten(2, 3), k_BGTd, v_BGTd, mask_B11T)


def add_shared(own: Weighed, q_BGrNd: torch.Tensor, shared: Sequence[SharedPart]) -> None:
    """Add to what queries get of their own contexts (Q = r · N) what they get of ``shared`` ones."""
    for rows, keys, values in shared:
        add_part(own, q_BGrNd, rows, partial(_attended, k_BGTd=keys, v_BGTd=values))


def add_part(
    own: Weighed, q_BGrNd: torch.Tensor, rows: torch.Tensor, attend: Callable[[torch.Tensor], Weighed]
) -> None:
    """Add to rows [g, m] of ``own`` what ``attend`` gives for their queries, [g, G, m · r · N, d]: over a part that the
    m requests share."""
    attended, sums = attend(q_BGrNd[rows].transpose(1, 2).flatten(2, 4))
    attended, sums = (part.unflatten(2, (rows.shape[1], -1)).transpose(1, 2).flatten(0, 1) for part in (attended, sums))
    _merge(own, rows.flatten(), (attended, sums))


def _attended(
    q_BGQd: torch.Tensor, k_BGTd: torch.Tensor, v_BGTd: torch.Tensor, added: torch.Tensor | None = None
) -> Weighed:
    """Attend; ``added`` to the scores [B, G, Q, T], of which every query has a finite one."""
    if q_BGQd.device.type == "cpu":
        attended, sums = _in_one_pass(q_BGQd, k_BGTd, v_BGTd, attn_mask=added)
        return attended.float(), sums
    scores = torch.matmul(q_BGQd * q_BGQd.shape[-1] ** -0.5, k_BGTd.transpose(-1, -2)).float()
    if added is not None:
        scores += added
    sums = torch.logsumexp(scores, dim=-1)
    weights = scores.sub_(sums[..., None]).exp_().to(v_BGTd.dtype)
    return torch.matmul(weights, v_BGTd).float(), sums


def _merge(own: Weighed, rows: torch.Tensor, other: Weighed) -> None:
    """Add to rows of ``own`` what ``other`` gives."""
    attended, sums = own
    before = sums[rows]
    share = torch.sigmoid(other[1] - before)
    sums[rows] = torch.logaddexp(before, other[1])
    attended[rows] = attended[rows].lerp(other[0], share[..., None])
