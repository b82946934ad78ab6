"""Decode attention on a CPU that reads keys and values where they are: in pools, loaded slots and recomputed rows.

Contexts are not copied or padded, so a mini-batch may have requests of any lengths. numba's kernels attend
(``compiled.attention``). Plain torch attends if numba is missing or if the scores have a softcap.

Shapes: B requests, G key/value heads, r query heads per key head, d head size. An item is a request and a key head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from flexhybrid.core.context.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.core.memory import WIDENED_ELEMENTS
from flexhybrid.runtime.kernels.attention import Extent, ScoreRule, Weighed
from flexhybrid.runtime.kernels.compiled import Share, deal, demand
from flexhybrid.runtime.kernels.shared_attention import weigh

#: Fewer products of query and key elements than this are left to one thread. A second thread would save half of 200 µs,
#: but handing work to it takes about 90 µs. In 200 µs, a thread of an AMD EPYC (Zen 3) computes 0.5 million products if
#: each query has its own keys, 1.5 million if eight queries share keys.
SHARED_PRODUCTS = 1 << 20

OfItems = Callable[[int, int], None]  #: attends with the queries of items [first, end)


class Parts(NamedTuple):
    """Where the parts of each context are in memory; the same for every layer of a step.

    The methods take ``memories``: one contiguous tensor per part, all of the same dtype.
    """

    tokens: np.ndarray  #: [parts, B] int64
    blocks: np.ndarray  #: [2, ·] first elements of the blocks of all extents, and hidden tokens of each block
    #: [parts, 5] int64: first column in ``blocks``, columns per request, strides of token and head, distance to values
    strides: np.ndarray
    bounds: list[int]  #: bounds of the threads' ranges of items
    groups: int
    reach: list[int]  #: ``Extent.reach`` of each part
    share: Share = map  #: deals ranges of items to threads
    by_kernels: bool = True  #: False: plain torch attends

    def attend(
        self, q_BHd: torch.Tensor, memories: Sequence[torch.Tensor], rule: ScoreRule, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend with one query per request to its whole context and to the rule's sinks.

        Return [B, H·d] in the queries' dtype, in ``out`` if given.
        """
        weighed = self.attend_and_sum(q_BHd, memories, rule)
        rule.with_sinks(weighed)
        attended = weighed[0].view(len(q_BHd), -1).to(q_BHd.dtype)
        return attended if out is None else out.copy_(attended)

    def attend_and_sum(self, q_BHd: torch.Tensor, memories: Sequence[torch.Tensor], rule: ScoreRule) -> Weighed:
        """Attend without sinks. Return the results [B, G, r, d] and log(denominator of the softmax) [B, G, r].

        Both are float32.
        """
        (batch, heads, d), groups = q_BHd.shape, self.groups
        query = q_BHd if q_BHd.stride()[1:] == (d, 1) else q_BHd.contiguous()
        attended = torch.empty(batch, groups, heads // groups, d, dtype=torch.float32)
        weighed = attended, torch.empty(attended.shape[:3], dtype=torch.float32)
        of_items = (self._by_kernels if self.by_kernels else self._by_torch)(query, memories, rule, weighed)
        deal(of_items, self.bounds, self.share)
        return weighed

    def _by_kernels(
        self, query: torch.Tensor, memories: Sequence[torch.Tensor], rule: ScoreRule, out: Weighed
    ) -> OfItems:
        """Return a function that attends by numba's kernels. Raise ValueError if they would access other memory.

        The kernels get addresses, so the caller must keep all tensors alive.
        """
        from flexhybrid.runtime.kernels.compiled.attention import KINDS, attend_items

        (batch, heads, d), groups = query.shape, self.groups
        asks = batch == self.tokens.shape[1] and not heads % groups and query.is_cpu and query.dtype in KINDS
        kind, alike = memories[0].dtype, len(memories) == len(self.reach)
        for memory, last in zip(memories, self.reach, strict=False):
            alike = alike and memory.dtype == kind and memory.is_cpu and memory.is_contiguous()
            alike = alike and memory.numel() >= last + d
        shared = min(self.bounds) == 0 and max(self.bounds) == batch * groups
        demand("attend_items", query=asks, memories=alike and kind in KINDS, bounds=shared)
        strides = query.stride(0) * query.element_size(), groups, heads // groups, d
        source = query.data_ptr(), *strides, np.float32(rule.scaling)
        kinds, target = (KINDS[kind], KINDS[query.dtype]), (out[0].data_ptr(), out[1].data_ptr())
        addresses = np.array([memory.data_ptr() for memory in memories])
        return lambda first, end: attend_items(*kinds, source, addresses, self[:3], target, first, end)

    def _by_torch(
        self, query: torch.Tensor, memories: Sequence[torch.Tensor], rule: ScoreRule, out: Weighed
    ) -> OfItems:
        """Return a function that attends by plain torch.

        It copies a request's keys and values to float32, for as many heads at a time as WIDENED_ELEMENTS allow.
        """
        d, (attended, sums) = query.shape[-1], out
        queries = query.unflatten(1, (self.groups, -1)).float()
        rows = [memory.view(-1, d).view(torch.uint8).numpy() for memory in memories]

        @torch.inference_mode()  # the mode is per thread, and a pool has other threads
        def of_items(first: int, end: int) -> None:
            for request in range(first // self.groups, -(-end // self.groups)):
                item, places = request * self.groups, self._tokens_of(request)
                until, num_tokens = min(end - item, self.groups), sum(len(of_part) for of_part, *_ in places)
                step = max(1, WIDENED_ELEMENTS // (num_tokens * d))
                for head in range(max(first - item, 0), until, step):
                    heads = np.arange(head, min(head + step, until))[:, None]
                    keys, values = [], []
                    for memory, (of_part, head_stride, behind) in zip(rows, places, strict=True):
                        index = of_part + head_stride * heads
                        keys.append(memory[index // d])
                        values.append(memory[(index + behind) // d])
                    sides = (torch.from_numpy(np.concatenate(side, axis=1)) for side in (keys, values))
                    k_GTd, v_GTd = (side.view(memories[0].dtype).float() for side in sides)
                    own = slice(head, head + len(heads))
                    found = weigh(queries[None, request, own], k_GTd[None], v_GTd[None], None, rule)
                    attended[request, own], sums[request, own] = found[0][0], found[1][0]

        return of_items

    def _tokens_of(self, request: int) -> list[tuple[np.ndarray, int, int]]:
        """Return, for each part, the first elements of a request's visible tokens [T], head stride, and ``values``."""
        found, inside = [], np.arange(BLOCK_TOKENS)
        for tokens, (begin, most, token_stride, *strides) in zip(self.tokens[:, request], self.strides, strict=True):
            begin, count = begin + request * most, ceil_blocks(tokens)
            blocks, hidden = self.blocks[:, begin : begin + count, None]
            is_seen = (inside >= hidden) & (inside + BLOCK_TOKENS * np.arange(count)[:, None] < tokens)
            found.append(((blocks + inside * token_stride)[is_seen], *strides))
        return found


def layout_of(
    extents: Sequence[Extent],
    groups: int,
    num_threads: int,
    width: int = 0,
    share: Share = map,
    by_kernels: bool = True,
) -> Parts:
    """Return the layout of contexts that have a part in each extent.

    ``groups``: number of key heads. ``num_threads``: number of threads, which ``share`` hands items to. ``width``:
    elements of a key head's queries (r · d); needed only with several threads.
    """
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
    places = tokens, blocks, np.array(strides, np.int64)
    return Parts(*places, bounds, groups, reach, share=share, by_kernels=by_kernels)


def bounds_of(tokens_B: np.ndarray, groups: int, num_threads: int, width: int) -> list[int]:
    """Return the bounds of one range of items per thread; ranges have about equal numbers of tokens."""
    if num_threads == 1 or tokens_B.sum() * groups * width < SHARED_PRODUCTS:
        return [0, len(tokens_B) * groups]
    until = np.cumsum(np.repeat(tokens_B, groups))
    cuts = np.searchsorted(until, until[-1] * np.arange(1, num_threads) / num_threads) + 1
    return sorted({0, *np.minimum(cuts, len(until)).tolist(), len(until)})


@cache
def compile_for(dtype: torch.dtype) -> None:
    """Compile the kernels for a compute dtype (about 10 s), or load compiled ones (about 1 s)."""
    from flexhybrid.runtime.kernels.compiled.attention import LANES

    block = torch.zeros(2, BLOCK_TOKENS, LANES, dtype=dtype)
    extent = Extent(np.zeros((1, 1), np.int64), np.ones(1, np.int64), LANES, 0, BLOCK_TOKENS * LANES)
    query = torch.zeros(1, 1, LANES, dtype=torch.float32)
    layout_of([extent], 1, 1).attend(query, [block], ScoreRule(LANES**-0.5))
