"""Decode attention on a CPU that reads keys and values in place: in pools, loaded slots and recomputed rows.

Contexts are neither assembled nor padded: a mini-batch may hold requests of any lengths. The kernels are in
``compiled.attention``; importing this module imports numba.

Shapes: B requests, G key/value heads, r query heads for each, d head size. An item is a request and a key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.runtime.kernels.attention import Extent, Weighed
from flexhybrid.runtime.kernels.compiled import Share, demand
from flexhybrid.runtime.kernels.compiled.attention import KINDS, LANES, attend_items

#: Products of query and key elements below which one thread does all. Handing over takes about 90 us; in 200 us, of
#: which a second thread would save half, a thread of an AMD EPYC (Zen 3) does 0.5 million if each query has its own
#: keys, 1.5 million if eight share them.
SHARED_PRODUCTS = 1 << 20


class Parts(NamedTuple):
    """The places of contexts, part by part: the same in every layer of a step."""

    tokens: np.ndarray  #: [parts, B] int64
    blocks: np.ndarray  #: [2, ·] the blocks of all extents, one after the other, and their hidden tokens
    #: [parts, 5] int64: of an extent its first place in ``blocks``, the places of a request, and its three strides
    strides: np.ndarray
    bounds: list[int]  #: of the ranges of items that threads take
    groups: int
    reach: list[int]  #: ``Extent.reach`` of each part


def layout_of(extents: Sequence[Extent], groups: int, num_threads: int, width: int = 0) -> Parts:
    """Return the layout of contexts that have a part in each extent, for ``num_threads`` threads; ``width``: elements
    of the queries of a key head, where there are several threads."""
    first, strides, reach = 0, [], [extent.reach("attend_items", groups) for extent in extents]
    for extent in extents:
        strides.append((first, extent.blocks.shape[1], extent.token_stride, extent.head_stride, extent.values))
        first += extent.blocks.size
    tokens = np.array([extent.tokens for extent in extents], dtype=np.int64)
    blocks = np.zeros((2, first), dtype=np.int64)
    np.concatenate([extent.blocks.ravel() for extent in extents], out=blocks[0])
    for extent, (begin, *_) in zip(extents, strides, strict=True):
        if extent.hidden is not None:
            blocks[1, begin : begin + extent.hidden.size] = extent.hidden.ravel()
    bounds = bounds_of(tokens.sum(0), groups, num_threads, width)
    return Parts(tokens, blocks, np.array(strides, np.int64), bounds, groups, reach)


def attend(
    q_BHd: torch.Tensor, memories: Sequence[torch.Tensor], layout: Parts, share: Share, scaling: float | None = None
) -> torch.Tensor:
    """Attend with one query a request over its whole context; return [B, H·d] in the queries' dtype.

    ``memories``: of each of the layout's parts a contiguous tensor that holds it, all of one dtype of KINDS. ``share``
    deals ranges of items to threads. ``scaling`` is the factor of scores; None: d^-0.5.
    """
    return attend_and_sum(q_BHd, memories, layout, share, scaling)[0].view(len(q_BHd), -1).to(q_BHd.dtype)


def attend_and_sum(
    q_BHd: torch.Tensor, memories: Sequence[torch.Tensor], layout: Parts, share: Share, scaling: float | None = None
) -> Weighed:
    """Attend as ``attend`` does; return float32 [B, G, r, d], and the logarithm of what it was divided by [B, G, r]."""
    (batch, heads, d), groups = q_BHd.shape, layout.groups
    asks = batch == layout.tokens.shape[1] and not heads % groups and q_BHd.is_cpu and q_BHd.dtype in KINDS
    kind, alike = memories[0].dtype, len(memories) == len(layout.reach)
    for memory, last in zip(memories, layout.reach, strict=False):
        alike = alike and memory.dtype == kind and memory.is_cpu and memory.is_contiguous()
        alike = alike and memory.numel() >= last + d
    shared = min(layout.bounds) == 0 and max(layout.bounds) == batch * groups
    demand("attend_items", query=asks, memories=alike and kind in KINDS, bounds=shared)
    query = q_BHd if q_BHd.stride()[1:] == (d, 1) else q_BHd.contiguous()
    attended = torch.empty(batch, groups, heads // groups, d, dtype=torch.float32)
    sums = torch.empty(attended.shape[:3], dtype=torch.float32)
    strides = query.stride(0) * query.element_size(), groups, heads // groups, d
    source = query.data_ptr(), *strides, np.float32(scaling or d**-0.5)
    kinds, target = (KINDS[memories[0].dtype], KINDS[query.dtype]), (attended.data_ptr(), sums.data_ptr())
    addresses = np.array([memory.data_ptr() for memory in memories])

    def of_items(first: int, end: int) -> None:
        attend_items(*kinds, source, addresses, layout[:3], target, first, end)

    others = share(of_items, layout.bounds[1:-1], layout.bounds[2:]) if len(layout.bounds) > 2 else ()
    of_items(*layout.bounds[:2])
    for _ in others:
        pass
    return attended, sums


def bounds_of(tokens_B: np.ndarray, groups: int, num_threads: int, width: int) -> list[int]:
    """Return bounds of ranges of items with about equal tokens, one per thread."""
    if num_threads == 1 or tokens_B.sum() * groups * width < SHARED_PRODUCTS:
        return [0, len(tokens_B) * groups]
    until = np.cumsum(np.repeat(tokens_B, groups))
    cuts = np.searchsorted(until, until[-1] * np.arange(1, num_threads) / num_threads) + 1
    return sorted({0, *np.minimum(cuts, len(until)).tolist(), len(until)})


@cache
def compile_for(dtype: torch.dtype) -> None:
    """Compile the kernels for a compute dtype, or load compiled ones: about 10 seconds, or 1."""
    block = torch.zeros(2, BLOCK_TOKENS, LANES, dtype=dtype)
    extent = Extent(np.zeros((1, 1), np.int64), np.ones(1, np.int64), LANES, 0, BLOCK_TOKENS * LANES)
    attend(torch.zeros(1, 1, LANES, dtype=torch.float32), [block], layout_of([extent], 1, 1), map)
