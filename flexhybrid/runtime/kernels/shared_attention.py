"""Attention to shared contexts: the keys of a shared part are read once for all its requests.

A request attends separately to its own context and to each shared part. The results are combined by the softmaxes'
denominators (Juravsky et al. 2024, "Hydragen", eq. 3 and 5). Shapes as in ``attention``; g shared parts, each of m
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from flexhybrid.runtime.buffers import SharedPart
from flexhybrid.runtime.kernels.attention import PREFILL_QUERIES, Assembled, ScoreRule, SlidingWindow, Weighed

#: A CPU's attention in one pass over the keys. It sums in float32, and also returns log(denominator).
_in_one_pass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend_in_parts(
    q_BNHd: torch.Tensor,
    own: Assembled,
    shared: Sequence[SharedPart],
    rule: ScoreRule,
    window: SlidingWindow | None = None,
) -> torch.Tensor:
    """Attend like a ``Path`` to ``own`` and ``shared`` contexts, by any rule and in any window: [B, N, H·d]."""
    keys, values, mask_B11T = own
    batch, new, heads, d = q_BNHd.shape
    q = grouped(q_BNHd, keys.shape[1])
    attended = torch.empty_like(q, memory_format=torch.contiguous_format)
    for start in range(0, new, PREFILL_QUERIES):
        part = slice(start, start + PREFILL_QUERIES)
        queries, seen = q[:, :, :, part], slice(keys.shape[2] - max(0, new - start - PREFILL_QUERIES))
        mask, at = None if mask_B11T is None else mask_B11T[..., seen], None
        if window is not None:
            outside, at = window.mask(part, seen, q.dtype), window._replace(queries_BN=window.queries_BN[:, part])
            mask = outside if mask is None else mask + outside
        total = attend_and_sum(queries, keys[:, :, seen], values[:, :, seen], mask, rule)
        add_shared(total, queries, shared, rule, at)
        rule.with_sinks(total)
        attended[:, :, :, part] = total[0].unflatten(2, queries.shape[2:4])
    return attended.permute(0, 3, 1, 2, 4).reshape(batch, new, heads * d)


def grouped(q_BNHd: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the queries by key head: [B, G, r, N, d]."""
    return q_BNHd.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)


def attend_and_sum(
    q_BGrNd: torch.Tensor, k_BGTd: torch.Tensor, v_BGTd: torch.Tensor, mask: torch.Tensor | None, rule: ScoreRule
) -> Weighed:
    """Attend causally with few new tokens; Q = r · N. ``mask``: added to scores."""
    repeats, new, tokens = *q_BGrNd.shape[2:4], k_BGTd.shape[2]
    if new > 1:
        causal = q_BGrNd.new_full((new, tokens), -torch.inf).triu_(tokens - new + 1)
        mask = (causal[None, None] if mask is None else mask + causal).repeat(1, 1, repeats, 1)
    return weigh(q_BGrNd.flatten(2, 3), k_BGTd, v_BGTd, mask, rule)


def add_shared(
    own: Weighed,
    q_BGrNd: torch.Tensor,
    shared: Sequence[SharedPart],
    rule: ScoreRule,
    window: SlidingWindow | None = None,
) -> None:
    """Add attention to ``shared`` contexts to ``own``, the attention to the requests' own contexts (Q = r · N)."""
    for rows, keys, values, columns in shared:
        added = None
        if window is not None and columns is not None:
            hidden = columns[:, None, None] <= window.queries_BN[rows][..., None] - window.tokens  # [g, m, N, T]
            hidden = hidden[:, :, None].expand(-1, -1, q_BGrNd.shape[2], -1, -1).flatten(1, 3)
            added = torch.zeros(hidden.shape, device=hidden.device, dtype=torch.float32)
            added = added.masked_fill_(hidden, -torch.inf)[:, None]
        sees_some = added is None
        attend = partial(weigh, k_BGTd=keys, v_BGTd=values, added=added, rule=rule, sees_some=sees_some)
        add_part(own, q_BGrNd, rows, attend)


def add_part(
    own: Weighed, q_BGrNd: torch.Tensor, rows: torch.Tensor, attend: Callable[[torch.Tensor], Weighed]
) -> None:
    """Add attention to shared parts to rows [g, m] of ``own``. ``attend`` takes their queries [g, G, m · r · N, d]."""
    attended, sums = attend(q_BGrNd[rows].transpose(1, 2).flatten(2, 4))
    attended, sums = (part.unflatten(2, (rows.shape[1], -1)).transpose(1, 2).flatten(0, 1) for part in (attended, sums))
    merge(own, (attended, sums), rows.flatten())


def weigh(
    q_BGQd: torch.Tensor,
    k_BGTd: torch.Tensor,
    v_BGTd: torch.Tensor,
    added: torch.Tensor | None,
    rule: ScoreRule,
    *,
    sees_some: bool = True,
) -> Weighed:
    """Attend. ``added``: mask of the scores [B, G, Q, T]; ``sees_some``: it leaves each query at least one token.

    A query that sees nothing gets zeros, and -inf as log(denominator).
    """
    if q_BGQd.device.type == "cpu" and rule.softcap is None and sees_some:
        attended, sums = _in_one_pass(q_BGQd, k_BGTd, v_BGTd, attn_mask=added, scale=rule.scaling)
        return attended.float(), sums
    scores = rule.capped(torch.matmul(q_BGQd * rule.scaling, k_BGTd.transpose(-1, -2)).float())
    if added is not None:
        scores += added
    sums = torch.logsumexp(scores, dim=-1)
    least = torch.finfo(torch.float32).min  # hidden scores stay -inf, not NaN
    weights = scores.sub_(sums.clamp(min=least)[..., None]).exp_().to(v_BGTd.dtype)
    return torch.matmul(weights, v_BGTd).float(), sums


def merge(own: Weighed, other: Weighed, rows: torch.Tensor | slice = slice(None)) -> None:
    """Combine attention to another part, ``other``, with rows of ``own``; a denominator of 0 adds nothing."""
    attended, sums = own
    before = sums[rows]
    share = torch.sigmoid(other[1] - before)
    sums[rows] = torch.logaddexp(before, other[1])
    attended[rows] = attended[rows].lerp(other[0], share[..., None])
