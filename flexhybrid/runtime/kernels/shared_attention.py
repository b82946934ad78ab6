"""Attention where requests share a part of their context: over the common keys once for all of them.

A request attends to its own context and to each part that it shares with others by itself; what the parts give is
weighed by the sums of their exponentials (Juravsky et al. 2024, "Hydragen", eq. 3 and 5). Shapes as in ``attention``;
of g common parts m requests have each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from flexhybrid.core.memory import WIDENED_ELEMENTS
from flexhybrid.runtime.kernels.attention import PREFILL_QUERIES, Weighed, widened

#: Of g common parts: the rows [g, m] that have them, their keys and their values [g, G, T, d].
SharedPart = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attend_with_shared(
    q_BNHd: torch.Tensor,
    k_BGTd: torch.Tensor,
    v_BGTd: torch.Tensor,
    mask_B11T: torch.Tensor | None,
    shared: Sequence[SharedPart],
    in_float32: bool = False,
) -> torch.Tensor:
    """Attend as a ``Path`` does over own keys and values, and over ``shared`` ones. Returns [B, N, H·d].

    ``in_float32``: keys and values of 16 bits are widened, as ``attention.in_float32`` does and for the same reason.
    """
    batch, new, heads, d = q_BNHd.shape
    groups, tokens = k_BGTd.shape[1:3]
    q = q_BNHd.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4) * d**-0.5  # [B, G, r, N, d]
    attended = torch.empty_like(q, memory_format=torch.contiguous_format)
    above = torch.full((min(PREFILL_QUERIES, new),) * 2, -torch.inf, device=q.device).triu_(1)
    at_a_time = max(1, WIDENED_ELEMENTS // (groups * tokens * d)) if in_float32 else batch
    for start in range(0, new, PREFILL_QUERIES):
        count = min(PREFILL_QUERIES, new - start)
        seen = tokens - new + start + count
        queries = q[:, :, :, start : start + count]
        hidden = None if mask_B11T is None else mask_B11T[..., :seen].float()
        if new > 1:
            causal = torch.nn.functional.pad(above[:count, :count], (seen - count, 0)).repeat(heads // groups, 1)
            hidden = causal[None, None] if hidden is None else hidden + causal
        parts = []
        for row in range(0, batch, at_a_time):
            rows = slice(row, row + at_a_time)
            added = hidden if hidden is None or len(hidden) == 1 else hidden[rows]
            parts.append(
                _attended(
                    queries[rows].flatten(2, 3), k_BGTd[rows, :, :seen], v_BGTd[rows, :, :seen], added, in_float32
                )
            )
        own = parts[0] if len(parts) == 1 else (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))
        add_shared(own, queries, shared, in_float32)
        attended[:, :, :, start : start + count] = own[0].unflatten(2, (-1, count))
    return attended.permute(0, 3, 1, 2, 4).reshape(batch, new, heads * d)


def add_shared(own: Weighed, q_BGrNd: torch.Tensor, shared: Sequence[SharedPart], in_float32: bool) -> None:
    """Add to what scaled queries get of their own contexts (Q = r · N) what they get of ``shared`` ones."""
    for rows, keys, values in shared:
        add_part(own, q_BGrNd, rows, partial(_attended, k_BGTd=keys, v_BGTd=values, in_float32=in_float32))


def add_part(
    own: Weighed, q_BGrNd: torch.Tensor, rows: torch.Tensor, attend: Callable[[torch.Tensor], Weighed]
) -> None:
    """Add to rows [g, m] of ``own`` what ``attend`` gives for their queries, [g, G, m · r · N, d]: over a part that the
    m requests share."""
    attended, sums = attend(q_BGrNd[rows].transpose(1, 2).flatten(2, 4))
    attended, sums = (part.unflatten(2, (rows.shape[1], -1)).transpose(1, 2).flatten(0, 1) for part in (attended, sums))
    _merge(own, rows.flatten(), (attended, sums))


def _attended(
    q_BGQd: torch.Tensor,
    k_BGTd: torch.Tensor,
    v_BGTd: torch.Tensor,
    added: torch.Tensor | None = None,
    in_float32: bool = False,
) -> Weighed:
    """Attend with scaled queries; ``added`` to the scores, of which every query has a finite one."""
    if in_float32:
        q_BGQd, k_BGTd, v_BGTd = (widened(tensor) for tensor in (q_BGQd, k_BGTd, v_BGTd))
    scores = torch.matmul(q_BGQd, k_BGTd.transpose(-1, -2)).float()
    if added is not None:
        scores += added
    sums = torch.logsumexp(scores, dim=-1)
    weights = scores.sub_(sums[..., None]).exp_().to(v_BGTd.dtype)
    return torch.matmul(weights, v_BGTd).float(), sums


def _merge(own: Weighed, rows: torch.Tensor, other: Weighed) -> None:
    """Add to rows of ``own`` what ``other`` gives."""
    attended, sums = own
    together = torch.logaddexp(sums[rows], other[1])
    kept, added = ((part - together).exp()[..., None] for part in (sums[rows], other[1]))
    attended[rows] = attended[rows] * kept + other[0] * added
    sums[rows] = together
