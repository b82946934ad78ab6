"""Decode attention on CUDA that reads keys and values in place: in pools, loaded slots, recomputed and projected rows.

It copies and pads no context, and makes no mask.

A **table** on the device has the place of each request's blocks of 16 tokens. It is made once per step, for all layers.
A **program** processes one request, one key head, a tile of its queries, and an equal share of the request's blocks
(flash-decoding: Dao et al. 2023). It reads keys and values once, with the running softmax of Milakov and Gimelshein
2018. If several programs share a context, their results are stored in float32, and a second kernel adds them up. The
number of parts of a context depends on the step only, not on the GPU.

**Sizes** are the fastest of 72 measured on an H200, at a time when keys were loaded two bytes at a time; they were not
measured again. A key head with one query uses no tensor cores, which it would fill to 1/16. Its programs have one warp
and few blocks: more warps, which wait for each other at every sum, took nearly twice as long. Programs with several
queries load 16 KiB of keys and of values at a time, with two or more warps.

**Parameters.** A kernel takes pointers, strides and constants one by one.
"""

# Triton's stubs declare dtypes as values, and jitted functions as never returning.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.memory import PARTIAL_ROWS, partial_elements
from flexhybrid.runtime.kernels.attention import Assembled, Extent, ScoreRule, Weighed, attend_and_weigh
from flexhybrid.runtime.kernels.compiled import demand

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Limit of tensors with blocks of a step: pools of the device, a loaded slot, and recomputed, dequantized and projected
#: rows. A block's entry has 3 bits for its memory.
MEMORIES = tl.constexpr(7)
BLOCK = tl.constexpr(BLOCK_TOKENS)
ALIGNED_BYTES = tl.constexpr(16)  #: size of the widest load
#: Whether there is one query per key head -> programs that fill a large GPU, and minimum of blocks per program.
SPLITS = {True: (4096, 4), False: (1024, 8)}
MOST_PARTS = 128  #: limit of a context's parts
PARTS, PARTS_AT_A_TIME = tl.constexpr(MOST_PARTS), tl.constexpr(16)
TILE_ELEMENTS = 4096  #: limit of elements in a tile of queries
ALIGNMENT_VARIES = ("queries", "memories", "starts", "places", "kinds", "sinks", "target", "sums")
ADDING = {"num_warps": 4, "num_stages": 2}


class BlockTable(NamedTuple):
    """The places of a step's blocks, on the device."""

    starts: torch.Tensor  #: [B + 1] int64: index of each request's first block in ``places``; and the end
    places: torch.Tensor  #: [n] int64: a block's first element in its memory
    #: [n] int64: memory | filled tokens << 3 | hidden tokens << 8 | block is head-major << 13 | block consists of
    #: projected rows, which include queries << 14
    kinds: torch.Tensor
    groups: int  #: number of key heads
    most: int  #: maximum of a request's blocks
    parts: tuple[int, ...]  #: index of the first extent in each memory
    reach: tuple[int, ...] = ()  #: maximum of ``Extent.reach`` in each memory
    row: int = 0  #: elements of a row of projected queries, keys and values; 0 if the kernel reads no such rows

    def attend(
        self, q_BHd: torch.Tensor, memories: Sequence[torch.Tensor], rule: ScoreRule, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend with one query per request to its whole context and to the rule's sinks.

        ``memories``: for each extent of the table, the contiguous tensor that holds it. Return [B, H·d] in the queries'
        dtype, in ``out`` if given.
        """
        return _attended(q_BHd, memories, self, rule, None, out=out)[0].flatten(1)

    def attend_and_sum(
        self, q_BHd: torch.Tensor, memories: Sequence[torch.Tensor], rule: ScoreRule, parts: int | None = None
    ) -> Weighed:
        """Attend without sinks; return the results [B, G, r, d] and log(denominator) [B, G, r], both float32.

        ``parts``: number of parts of each context (default: ``num_parts``).
        """
        sums = q_BHd.new_empty(q_BHd.shape[:2], dtype=torch.float32)
        attended, _ = _attended(q_BHd, memories, self, rule._replace(sinks_H=None), sums, parts)
        by_head = (self.groups, q_BHd.shape[1] // self.groups)
        return attended.unflatten(1, by_head), sums.unflatten(1, by_head)


def table_of(
    extents: Sequence[Extent],
    names: Sequence[Hashable],
    sizes: tuple[int, int],
    to_device: Callable[[np.ndarray], torch.Tensor],
) -> BlockTable:
    """Return the table of contexts with a part in each extent.

    ``names``: a name for each extent's memory. ``sizes``: key heads, elements per head. Raise ValueError if the extents
    have more than MEMORIES memories.
    """
    groups, d = sizes
    order = list(dict.fromkeys(names))
    if len(order) > MEMORIES.value:
        raise ValueError(f"keys and values are in {len(order)} memories; kernels read {MEMORIES.value}")
    places, kinds, present = [], [], []
    for extent, name in zip(extents, names, strict=True):
        first = np.arange(extent.blocks.shape[1]) * BLOCK_TOKENS
        filled = np.clip(extent.tokens[:, None] - first, 0, BLOCK_TOKENS)
        hidden = np.zeros_like(filled) if extent.hidden is None else extent.hidden
        head_major, in_rows = extent.head_stride == BLOCK_TOKENS * d, extent.token_stride > 2 * groups * d
        places.append(extent.blocks)
        kinds.append(order.index(name) | filled << 3 | hidden << 8 | head_major << 13 | in_rows << 14)
        present.append(hidden < filled)
    here = np.concatenate(present, axis=1)
    counts = here.sum(axis=1)
    rows = [np.r_[0, np.cumsum(counts)], *(np.concatenate(of, axis=1)[here] for of in (places, kinds))]
    batch, total = len(counts), int(counts.sum())
    starts, of_places, of_kinds = to_device(np.concatenate(rows).astype(np.int64)).split((batch + 1, total, total))
    parts = tuple(names.index(name) for name in order)
    ends = [(name, extent.reach("attend", groups)) for name, extent in zip(names, extents, strict=True)]
    reach = tuple(max(end for of, end in ends if of == name) for name in order)
    row = max(extent.token_stride for extent in extents)
    row = row if row > 2 * groups * d else 0
    return BlockTable(starts, of_places, of_kinds, groups, int(counts.max()), parts, reach=reach, row=row)


def _attended(
    query: torch.Tensor,
    memories: Sequence[torch.Tensor],
    table: BlockTable,
    rule: ScoreRule,
    sums: torch.Tensor | None,
    parts: int | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the results of queries [B, H, d], in ``out`` [B, H·d] if given, and ``sums``.

    If ``sums`` [B, H] is given, it takes log(denominator), and the results are float32; else the queries' dtype.
    """
    batch, heads, d = query.shape
    if query.stride()[1:] != (d, 1):
        query = query.contiguous()
    parts = num_parts(batch, heads, table) if parts is None else parts
    if out is None:
        target = query.new_empty(batch, heads, d, dtype=query.dtype if sums is None else torch.float32)
    else:
        target = out.view(batch, heads, d)
    partial = None
    if parts > 1:
        partial = target.new_empty(batch * heads, parts, partial_elements(d), dtype=torch.float32)
    launch(query, [memories[part] for part in table.parts], table, rule, (target, sums), partial)
    return target, sums


def num_parts(batch: int, heads: int, table: BlockTable) -> int:
    """Return the number of parts in which programs read each request's context: more for fewer queries."""
    items = batch * table.groups
    programs, least = SPLITS[heads == table.groups]
    return max(1, min(programs // items, PARTIAL_ROWS // (batch * heads), table.most // least, MOST_PARTS))


def launch(
    query: torch.Tensor,
    memories: Sequence[torch.Tensor],
    table: BlockTable,
    rule: ScoreRule,
    given: tuple[torch.Tensor, torch.Tensor | None],
    partial: torch.Tensor | None,
) -> None:
    """Enqueue the kernels. ``given``: tensors for results [B, H, d] and, if wanted, log(denominator) [B, H].

    ``partial``: float32 [B · H, parts, ``partial_elements``], for the weighted values, highest score and sum of weights
    of each part; None if there is one part.
    """
    (batch, heads, d), (target, sums) = query.shape, given
    alike = all(of.dtype == query.dtype and of.is_contiguous() and of.device == query.device for of in memories)
    fits = all(map(lambda of, last: of.numel() >= last + d, memories, table.reach))
    asks = batch < len(table.starts) and heads % table.groups == 0 and table.row in (0, (2 * table.groups + heads) * d)
    demand("attend", query=asks, memories=alike and fits, target=target.is_contiguous())
    queries, width = heads // table.groups, triton.next_power_of_2(d)
    sizes, options = tile_sizes(queries, width, query.itemsize)
    sinks = target if rule.sinks_H is None else rule.sinks_H
    weighs = {"SUMS": sums is not None, "D": d, "WIDTH": width, "ROW": partial_elements(d)}
    unused = query if sums is None else sums
    aligned = math.gcd(ALIGNED_BYTES.value, d * query.itemsize, *(memory.data_ptr() for memory in memories))
    padded = (*memories, *[memories[0]] * (MEMORIES.value - len(memories)))
    parts = 1 if partial is None else partial.shape[1]
    by_table, numbers = (table.starts, table.places, table.kinds), (rule.scaling, rule.softcap or 1.0)
    counts = {"GROUPS": table.groups, "QUERIES": queries, "ALIGNED": aligned}
    flags = {"SOFTCAP": rule.softcap is not None, "WHOLE": partial is None, "SINKS": rule.sinks_H is not None}
    grid = batch * table.groups * triton.cdiv(queries, sizes["TILE"]), parts
    with torch.cuda.device_of(query):
        to = sinks, target if partial is None else partial, unused
        _attend_kernel[grid](
            query, padded, *by_table, *to, query.stride(0), *numbers, **counts, **flags, **sizes, **weighs, **options
        )
        if partial is not None:
            adds = weighs | {"SINKS": flags["SINKS"], "HEADS": heads} | ADDING
            _add_kernel[(batch * heads,)](partial, sinks, target, unused, parts, **adds)


def tile_sizes(queries: int, width: int, itemsize: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return a program's constants (padded queries, use of tensor cores, blocks at a time) and its options."""
    if queries == 1:
        blocks, warps = max(1, 2048 // (width * BLOCK_TOKENS)), max(1, width // 128)
        return {"TILE": 1, "PRODUCTS": False, "BLOCKS": blocks}, {"num_warps": warps, "num_stages": 2}
    tile = min(max(16, int(triton.next_power_of_2(queries))), max(16, TILE_ELEMENTS // width))
    blocks = max(1, (16384 // itemsize) // (width * BLOCK_TOKENS))
    return {"TILE": tile, "PRODUCTS": True, "BLOCKS": blocks}, {"num_warps": max(2, tile // 8), "num_stages": 2}


@triton.jit(do_not_specialize=["query_stride"], do_not_specialize_on_alignment=ALIGNMENT_VARIES)
def _attend_kernel(  # noqa: PLR0913 (a kernel takes pointers and constants)
    queries, memories, starts, places, kinds, sinks, target, sums,
    query_stride: tl.int64, scaling: tl.float32, softcap: tl.float32,
    GROUPS: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROW: tl.constexpr,
    TILE: tl.constexpr, BLOCKS: tl.constexpr, PRODUCTS: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    SUMS: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (QUERIES + TILE - 1) // TILE
    item = tl.program_id(0)
    head, request = item // TILES % GROUPS, item // TILES // GROUPS
    query, dim = item % TILES * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    real = (query < QUERIES)[:, None] & (dim < D)[None, :]
    row = request.to(tl.int64) * query_stride + head * QUERIES * D
    own = tl.load(queries + row + query[:, None] * D + dim[None, :], mask=real, other=0.0)
    if not PRODUCTS:
        own = own.to(tl.float32)
    begin, end = tl.load(starts + request).to(tl.int32), tl.load(starts + request + 1).to(tl.int32)
    share = tl.cdiv(tl.cdiv(end - begin, tl.num_programs(1)), BLOCKS) * BLOCKS
    first = begin + tl.program_id(1) * share
    last = tl.minimum(first + share, end)
    peak = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    attended = tl.zeros([TILE, WIDTH], tl.float32)
    column = tl.arange(0, BLOCKS * BLOCK)
    index = first + (tl.arange(0, BLOCKS) if BLOCKS <= 2 else column // BLOCK)
    next_kind, next_place = _entries(kinds, places, index, last)
    for _ in range(first, last, BLOCKS):
        kind, place = _by_token(next_kind, BLOCKS), _by_token(next_place, BLOCKS)
        base = tl.where((kind & 7) == 1, memories[1], memories[0])
        for memory in tl.static_range(2, MEMORIES):
            base = tl.where((kind & 7) == memory, memories[memory], base)
        head_major, token = (kind >> 13 & 1) != 0, column % BLOCK
        apart = tl.where((kind >> 14 & 1) != 0, (2 + QUERIES) * GROUPS * D, 2 * GROUPS * D)
        keys = base + place + tl.where(head_major, head * BLOCK * D + token * D, head * D + token * apart)
        values = keys + tl.where(head_major, GROUPS * BLOCK * D, GROUPS * D)
        # Hint here, next to the operation that makes the value: a hint inside a function is lost at its end.
        keys, values = tl.multiple_of(keys, [ALIGNED]), tl.multiple_of(values, [ALIGNED])
        seen = (token >= (kind >> 8 & 31)) & (token < (kind >> 3 & 31))
        read = seen[:, None] & (dim < D)[None, :]
        k = tl.load(keys[:, None] + dim[None, :], mask=read, other=0.0)
        v = tl.load(values[:, None] + dim[None, :], mask=read, other=0.0)
        index += BLOCKS  # load the next entries while keys are multiplied
        next_kind, next_place = _entries(kinds, places, index, last)
        if PRODUCTS:
            scores = tl.dot(own, tl.trans(k), input_precision="ieee") * scaling
        else:
            scores = tl.sum(own[:, None, :] * k.to(tl.float32)[None, :, :], 2) * scaling
        if SOFTCAP:  # softcap * tanh(scores / softcap)
            scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))
        scores = tl.where(seen[None, :], scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        finite = tl.where(highest == float("-inf"), 0.0, highest)  # hidden scores stay -inf, not NaN
        weights, scale = tl.exp(scores - finite[:, None]), tl.exp(peak - finite)
        peak, total = highest, total * scale + tl.sum(weights, 1)
        if PRODUCTS:
            attended = tl.dot(weights.to(v.dtype), v, attended * scale[:, None], input_precision="ieee")
        else:
            attended = attended * scale[:, None] + tl.sum(weights[:, :, None] * v.to(tl.float32)[None, :, :], 1)
    rows = (request * GROUPS + head) * QUERIES + query
    if WHOLE:
        given, asked = sinks + head * QUERIES + query, query < QUERIES
        _give(attended, peak, total, rows, asked, sinks=given, target=target, sums=sums, D=D, SINKS=SINKS, SUMS=SUMS)
    else:
        part = target + (rows.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * ROW
        part = tl.multiple_of(part, [ALIGNED_BYTES])
        tl.store(part[:, None] + dim[None, :], attended, mask=real)
        tl.store(part + D, peak, mask=query < QUERIES)
        tl.store(part + D + 1, total, mask=query < QUERIES)


@triton.jit
def _entries(kinds, places, index, last):
    """Load the kinds and places of the blocks with these indices. Blocks from index ``last`` on have no tokens and are
    not loaded."""
    kind = tl.load(kinds + index, mask=index < last, other=0).to(tl.int32)
    return kind, tl.load(places + index, mask=index < last, other=0)


@triton.jit
def _by_token(of, BLOCKS: tl.constexpr):
    """Repeat a value per block for each of its tokens. A value per token stays unchanged."""
    if of.shape[0] == BLOCKS:
        of = tl.reshape(tl.broadcast_to(of[:, None], [BLOCKS, BLOCK]), [BLOCKS * BLOCK])
    return of


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=ALIGNMENT_VARIES)
def _add_kernel(  # noqa: PLR0913 (a kernel takes pointers and constants)
    partial, sinks, target, sums, parts: tl.int32,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROW: tl.constexpr, SINKS: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Add up a query's results over the parts of a context."""
    row, dim = tl.program_id(0), tl.arange(0, WIDTH)
    of_row = partial + row.to(tl.int64) * parts * ROW
    part = tl.arange(0, PARTS)
    peaks = tl.load(of_row + part * ROW + D, mask=part < parts, other=float("-inf"))
    peak = tl.max(peaks, 0)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    totals = tl.load(of_row + part * ROW + D + 1, mask=part < parts, other=0.0)
    total = tl.sum(totals * tl.exp(peaks - finite), 0)
    attended = tl.zeros([WIDTH], tl.float32)
    for first in range(0, parts, PARTS_AT_A_TIME):
        some = first + tl.arange(0, PARTS_AT_A_TIME)
        scale = tl.exp(tl.load(of_row + some * ROW + D, mask=some < parts, other=float("-inf")) - finite)
        here = (some < parts)[:, None] & (dim < D)[None, :]
        given = tl.load(of_row + some[:, None] * ROW + dim[None, :], mask=here, other=0.0)
        attended += tl.sum(given * scale[:, None], 0)
    one = tl.arange(0, 1)
    peak, total = peak + tl.zeros([1], tl.float32), total + tl.zeros([1], tl.float32)
    given, attended = sinks + row % HEADS + one, attended[None, :]
    _give(
        attended, peak, total, row + one, one == 0, sinks=given, target=target, sums=sums, D=D, SINKS=SINKS, SUMS=SUMS
    )


@triton.jit
def _give(  # noqa: PLR0913 (a kernel takes pointers and constants)
    attended, peak, total, rows, real, sinks, target, sums, D: tl.constexpr, SINKS: tl.constexpr, SUMS: tl.constexpr
):
    """Write the weighted values divided by the sum of weights; zeros for a query that sees nothing."""
    if SINKS:  # a sink is a score without a value
        sink = tl.load(sinks, mask=real, other=0.0).to(tl.float32)
        highest = tl.maximum(peak, sink)
        scale = tl.exp(peak - highest)
        attended, total = attended * scale[:, None], total * scale + tl.exp(sink - highest)
    dim = tl.arange(0, attended.shape[1])
    divided = attended / tl.where(total == 0.0, 1.0, total)[:, None]
    place = target + rows.to(tl.int64)[:, None] * D + dim[None, :]
    tl.store(place, divided.to(target.dtype.element_ty), mask=real[:, None] & (dim < D)[None, :])
    if SUMS:
        tl.store(sums + rows, peak + tl.log(total), mask=real)


def prove(device: torch.device, dtype: torch.dtype, queries: int, d: int) -> None:
    """Raise RuntimeError if the kernels' results differ from plain torch's on this device.

    ``queries``: query heads per key head; ``d``: elements per head. Trials have all block layouts, hidden tokens, and
    one or two parts.
    """
    generator = torch.Generator().manual_seed(0)
    groups, tokens = 2, np.array([37, 5])
    width = groups * d
    rows = torch.randn(2, width * (2 + queries), generator=generator, dtype=torch.float32).to(dtype)
    pool = torch.randn(6, 2, groups, BLOCK_TOKENS, d, generator=generator, dtype=torch.float32).to(dtype)
    blocks, hidden = np.array([[4, 0, 2], [1, 1, 1]]), np.array([[7, 0, 0], [0, 0, 0]])
    own = Extent(np.arange(2)[:, None] * rows.shape[1], np.ones(2, np.int64), 0, d, width)
    strides = (d, BLOCK_TOKENS * d, BLOCK_TOKENS * width), (2 * width, d, width), ((2 + queries) * width, d, width)
    by_token = pool.transpose(1, 3).transpose(2, 3).contiguous()  # [6, 16, 2, G, d]
    in_rows = torch.cat([by_token.flatten(2), by_token.new_zeros(6, BLOCK_TOKENS, queries * width)], dim=2)
    for memory, of_tokens in zip((pool, by_token, in_rows), strides, strict=True):
        extent = Extent(blocks * memory[0].numel(), tokens, *of_tokens, hidden)
        table = table_of([own, extent], ["own", "pool"], (groups, d), lambda array: torch.from_numpy(array).to(device))
        there = rows.to(device), memory.to(device)
        query = there[0][:, 2 * width :].view(2, -1, d)
        for parts, sums in ((1, None), (2, torch.empty(2, groups * queries, device=device, dtype=torch.float32))):
            ours, _ = _attended(query, there, table, ScoreRule(d**-0.5), sums, parts)
            for request, count in enumerate(tokens):
                laid = pool[blocks[request]].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, hidden[request, 0] : count]
                own_tokens = rows[request, : 2 * width].view(2, groups, 1, d)
                keys, values = torch.cat([own_tokens, laid], dim=2).float()[:, None]
                of_request = rows[request, 2 * width :].view(1, -1, d).float()
                wanted = attend_and_weigh(of_request, Assembled(keys, values))[0]
                error = float((ours[request].float().flatten().cpu() - wanted[0]).abs().max())
                if not error < (1e-4 if dtype == torch.float32 else 3e-2):
                    raise RuntimeError(f"on trial contexts its results differ by {error:.2g}")
