"""Decode attention on a CPU that reads keys and values where they lie: in pools, loaded slots and recomputed rows.

No context is laid side by side, and none is padded: a mini-batch may hold requests of any lengths. numba compiles the
kernels (https://numba.pydata.org); the results are kept beside this file, or in the user's cache folder. numba's cache
looks at the file of a kernel alone, so all that is compiled together stands here. Importing this module imports numba.

The scores of CHUNK_BLOCKS blocks are computed first, then their softmax, then the sum of their values (the running
softmax of Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", a chunk at a time). Kernels compute
in float32 with vectors of 8 elements (``Lanes``), which LLVM maps to what the processor has, from memory addresses.

Shapes: B requests, G key/value heads, r query heads for each of them, d head size. An item is a request and a key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import extending
from numba.core import cgutils, types
from numba.extending import models, register_model

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.runtime.kernels.attention import Extent, Weighed
from flexhybrid.runtime.kernels.compiled import Share, converts_float16

#: By dtype of keys and values: a value of the type by which numba chooses how the kernels load them.
KINDS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
if converts_float16():
    KINDS[torch.float16] = np.int16(0)
LOWEST = np.float32(-3e38)
#: Products of elements of queries and keys, below which one thread does it all. To hand ranges over takes some 90 us;
#: in 200 us, of which a second thread would save half, one thread of an AMD EPYC (Zen 3) does half a million where a
#: query reads its own keys, and 1.5 million where eight read the same ones.
SHARED_PRODUCTS = 1 << 20
CHUNK_BLOCKS = 8  #: whose scores are kept at a time
UNIT = 16  #: elements of a head that are loaded at a time, as two vectors
VECTOR_BYTES = 32  #: of 8 float32
ROW_BYTES = CHUNK_BLOCKS * BLOCK_TOKENS * 4  #: of a query's scores
#: Queries, and elements of them, that pass over a chunk together: their scores and sums stay in a core's first cache,
#: while the memory of several heads is read in a row.
TILE_QUERIES, TILE_ELEMENTS = 16, 1024

#: No "fastmath": it would let LLVM drop the rounding in ``_exp``. Sums are vectors by hand, products and sums fuse.
NUMBA: dict[str, Any] = {"nogil": True, "error_model": "numpy", "cache": True}
PART: dict[str, Any] = {
    **NUMBA,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}  #: kernels call it, Python cannot

intrinsic: Any = extending.intrinsic  #: a kernel calls what it decorates without the context


class Layout(NamedTuple):
    """Where contexts lie, part by part: the same in every layer of a step."""

    tokens: np.ndarray  #: [parts, B] int64
    blocks: np.ndarray  #: [2, ·] the blocks of all extents, one after the other, and their hidden tokens
    #: [parts, 5] int64: of an extent its first place in ``blocks``, the places of a request, and its three strides
    strides: np.ndarray
    bounds: list[int]  #: of the ranges of items that threads take


def layout_of(extents: Sequence[Extent], groups: int, num_threads: int, width: int = 0) -> Layout:
    """Return the layout of contexts that have a part in each extent, for ``num_threads`` threads; ``width``: elements
    of the queries of a key head, where there are several threads."""
    first, strides = 0, []
    for extent in extents:
        strides.append((first, extent.blocks.shape[1], extent.token_stride, extent.head_stride, extent.values))
        first += extent.blocks.size
    tokens = np.array([extent.tokens for extent in extents], dtype=np.int64)
    blocks = np.zeros((2, first), dtype=np.int64)
    np.concatenate([extent.blocks.ravel() for extent in extents], out=blocks[0])
    for extent, (begin, *_) in zip(extents, strides, strict=True):
        if extent.hidden is not None:
            blocks[1, begin : begin + extent.hidden.size] = extent.hidden.ravel()
    return Layout(tokens, blocks, np.array(strides, np.int64), bounds_of(tokens.sum(0), groups, num_threads, width))


def attend(
    q_BHd: torch.Tensor, memories: Sequence[torch.Tensor], layout: Layout, share: Share, scaling: float | None = None
) -> torch.Tensor:
    """Attend with one query a request over its whole context; return [B, H·d] in the queries' dtype.

    ``memories``: of each of the layout's parts a contiguous tensor that holds it, all of one dtype of KINDS. ``share``
    deals ranges of items to threads. ``scaling`` is the factor of scores; None: d^-0.5.
    """
    return attend_and_sum(q_BHd, memories, layout, share, scaling)[0].view(len(q_BHd), -1).to(q_BHd.dtype)


def attend_and_sum(
    q_BHd: torch.Tensor, memories: Sequence[torch.Tensor], layout: Layout, share: Share, scaling: float | None = None
) -> Weighed:
    """Attend as ``attend`` does; return float32 [B, G, r, d], and the logarithm of what it was divided by [B, G, r]."""
    (batch, heads, d), groups = q_BHd.shape, layout.bounds[-1] // len(q_BHd)
    query = q_BHd.float()
    if query.stride()[1:] != (d, 1):
        query = query.contiguous()
    attended, sums = torch.empty(batch, groups, heads // groups, d), torch.empty(batch, groups, heads // groups)
    factor = np.float32(scaling or d**-0.5)
    source = query.data_ptr(), query.stride(0) * 4, groups, heads // groups, d, factor
    addresses = np.array([memory.data_ptr() for memory in memories])
    kind, target = KINDS[memories[0].dtype], (attended.data_ptr(), sums.numpy().reshape(-1))

    def of_items(first: int, end: int) -> None:
        _attend(kind, source, addresses, layout[:3], target, first, end)

    others = share(of_items, layout.bounds[1:-1], layout.bounds[2:]) if len(layout.bounds) > 2 else ()
    of_items(*layout.bounds[:2])
    for _ in others:
        pass
    return attended, sums


def bounds_of(tokens_B: np.ndarray, groups: int, num_threads: int, width: int) -> list[int]:
    """Return bounds of ranges of items, a range a thread, that hold about as many tokens each."""
    if num_threads == 1 or tokens_B.sum() * groups * width < SHARED_PRODUCTS:
        return [0, len(tokens_B) * groups]
    until = np.cumsum(np.repeat(tokens_B, groups))
    cuts = np.searchsorted(until, until[-1] * np.arange(1, num_threads) / num_threads) + 1
    return sorted({0, *np.minimum(cuts, len(until)).tolist(), len(until)})


@cache
def compile_for(dtype: torch.dtype) -> None:
    """Compile the kernels for a compute dtype, or load what was compiled before: some 10 seconds, or 1."""
    block = torch.zeros(2, BLOCK_TOKENS, UNIT, dtype=dtype)
    extent = Extent(np.zeros((1, 1), np.int64), np.ones(1, np.int64), UNIT, 0, BLOCK_TOKENS * UNIT)
    attend(torch.zeros(1, 1, UNIT), [block], layout_of([extent], 1, 1), map)


FLOATS, WORDS, HALVES = (ir.VectorType(of, 8) for of in (ir.FloatType(), ir.IntType(32), ir.HalfType()))
FLOAT, FUSED = ir.FloatType(), ("contract",)


class Lanes(types.Type):
    """Type of a vector of 8 float32, in kernels alone."""

    def __init__(self):
        super().__init__("Lanes")


LANES = Lanes()


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    """A vector register."""

    def __init__(self, manager, lanes):
        super().__init__(manager, lanes, FLOATS)


def _typed(result, arguments, emit):
    """Return what numba asks of an intrinsic: its signature, and what writes its code: emit(builder, *values)."""

    def generate(context, builder, _signature, values):
        value = emit(builder, *values)
        return context.get_dummy_value() if result == types.void else value

    return result(*arguments), generate


def _words(*values):
    return ir.Constant(ir.VectorType(ir.IntType(32), len(values)), values)


def _floats(value):
    return ir.Constant(FLOATS, [float(np.float32(value))] * 8)


def _read(builder, address, vector):
    loaded = builder.load(builder.inttoptr(address, ir.PointerType(vector)), typ=vector)
    loaded.align = 4 if vector in (FLOATS, FLOAT) else 2
    return loaded


def _write(builder, address, value):
    builder.store(value, builder.inttoptr(address, ir.PointerType(value.type))).align = 4


@intrinsic
def _load(_context, address):
    return _typed(LANES, (address,), lambda builder, address: _read(builder, address, FLOATS))


@intrinsic
def _store(_context, address, lanes):
    return _typed(types.void, (address, lanes), _write)


@intrinsic
def _store_parts(_context, first, second, lanes):
    """Store four lanes at one address, and four at another."""

    def emit(builder, first, second, value):
        for address, lane in ((first, 0), (second, 4)):
            _write(builder, address, builder.shuffle_vector(value, value, _words(*range(lane, lane + 4))))

    return _typed(types.void, (first, second, lanes), emit)


@intrinsic
def _fill(_context, value):
    def emit(builder, value):
        vector = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(vector, vector, _words(*[0] * 8))

    return _typed(LANES, (value,), emit)


@intrinsic
def _value_at(_context, address):
    return _typed(types.float32, (address,), lambda builder, address: _read(builder, address, FLOAT))


@intrinsic
def _put(_context, address, value):
    return _typed(types.void, (address, value), _write)


@intrinsic
def _add(_context, lanes, others):
    return _typed(LANES, (lanes, others), lambda builder, *values: builder.fadd(*values))


@intrinsic
def _scale(_context, lanes, factors):
    return _typed(LANES, (lanes, factors), lambda builder, *values: builder.fmul(*values))


def _fuse(builder, factor, other, added):
    return builder.fadd(builder.fmul(factor, other, flags=FUSED), added, flags=FUSED)


@intrinsic
def _fused(_context, factors, others, added):
    """Return factors · others + added, in one instruction where the processor has it."""
    return _typed(LANES, (factors, others, added), _fuse)


def _larger(builder, one, other):
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


@intrinsic
def _highest(_context, lanes, others):
    return _typed(LANES, (lanes, others), _larger)


def _folded(result, fold):
    """Return an intrinsic that folds the 8 lanes of a vector to one value."""

    def emit(builder, value):
        for distance in (4, 2, 1):
            value = fold(
                builder, value, builder.shuffle_vector(value, value, _words(*range(distance, 8), *[0] * distance))
            )
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    @intrinsic
    def of_lanes(_context, lanes):
        return _typed(result, (lanes,), emit)

    return of_lanes


_total = _folded(types.float32, lambda builder, one, other: builder.fadd(one, other))
_peak = _folded(types.float32, _larger)


def _shuffled(*lanes):
    """Return an intrinsic that takes these lanes of two vectors' sixteen."""

    @intrinsic
    def of_two(_context, one, other):
        return _typed(LANES, (one, other), lambda builder, *values: builder.shuffle_vector(*values, _words(*lanes)))

    return of_two


_even, _odd = _shuffled(*range(0, 16, 2)), _shuffled(*range(1, 16, 2))
_first_pairs, _last_pairs = (
    _shuffled(*np.arange(16).reshape(2, 8).T.ravel()[half].tolist()) for half in (slice(8), slice(8, 16))
)


@intrinsic
def _sums_of(_context, a, b, c, d, e, f, g, h):
    """Return the sum of each of eight vectors, in their order: neighbours are added, three times."""

    def emit(builder, *vectors):
        def added(one, other, lanes, next_lanes):
            return builder.fadd(*(builder.shuffle_vector(one, other, _words(*of)) for of in (lanes, next_lanes)))

        for _ in range(2):  # within each half of a vector, as processors do it
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [
                added(one, other, (0, 2, 8, 10, 4, 6, 12, 14), (1, 3, 9, 11, 5, 7, 13, 15)) for one, other in pairs
            ]
        one, other = vectors
        return added(one, other, (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))

    return _typed(LANES, (a, b, c, d, e, f, g, h), emit)


#: Of (e^x - 1 - x) / x², from the highest power down, for |x| <= log(2) / 2 (Cephes, expf; 1e-7 relative).
EXP_TERMS = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1
LOG_2_PARTS = 0.693359375, -2.12194440e-4  #: their sum, the first one exact in few bits
ROUNDING = 1.5 * 2**23  #: a float32 so large that adding to it rounds to an integer, in its lowest bits


@intrinsic
def _exp(_context, lanes):
    """Return e^x for x <= 0; 0 for x < -87.7, not a number for what is none."""

    def emit(builder, x):
        x = builder.select(builder.fcmp_ordered("<", x, _floats(-88)), _floats(-88), x)
        shifted = _fuse(builder, x, _floats(1 / np.log(2)), _floats(ROUNDING))
        power = builder.fsub(shifted, _floats(ROUNDING))
        for part in LOG_2_PARTS:
            x = _fuse(builder, power, _floats(-part), x)
        series = _floats(EXP_TERMS[0])
        for term in EXP_TERMS[1:]:
            series = _fuse(builder, series, x, _floats(term))
        series = builder.fadd(_fuse(builder, series, builder.fmul(x, x), x), _floats(1))
        exponent = builder.add(builder.bitcast(shifted, WORDS), _words(*[127] * 8))
        return builder.fmul(series, builder.bitcast(builder.shl(exponent, _words(*[23] * 8)), FLOATS))

    return _typed(LANES, (lanes,), emit)


@intrinsic
def _prefetch(_context, address):
    def emit(builder, address):
        byte, flag = ir.PointerType(ir.IntType(8)), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(function, [builder.inttoptr(address, byte), flag(0), flag(2), flag(1)])  # to read, second cache

    return _typed(types.void, (address,), emit)


@intrinsic
def _copy(_context, target, source, num_bytes):
    def emit(builder, target, source, num_bytes):
        byte = ir.PointerType(ir.IntType(8))
        cgutils.raw_memcpy(builder, builder.inttoptr(target, byte), builder.inttoptr(source, byte), num_bytes, 1)

    return _typed(types.void, (target, source, num_bytes), emit)


#: How to load one half of UNIT elements, by kind: the even bfloat16 (a lower half of a word, shifted up, is a
#: float32) and the odd ones (the upper half), else, of float32 and float16, the first and the last.
LOADS = {
    types.float32: (
        lambda builder, at: _read(builder, at, FLOATS),
        lambda builder, at: _read(builder, builder.add(at, at.type(VECTOR_BYTES)), FLOATS),
    ),
    types.uint16: (
        lambda builder, at: builder.bitcast(builder.shl(_read(builder, at, WORDS), _words(*[16] * 8)), FLOATS),
        lambda builder, at: builder.bitcast(builder.and_(_read(builder, at, WORDS), _words(*[-(2**16)] * 8)), FLOATS),
    ),
    types.int16: (
        lambda builder, at: builder.fpext(_read(builder, at, HALVES), FLOATS),
        lambda builder, at: builder.fpext(_read(builder, builder.add(at, at.type(VECTOR_BYTES // 2)), HALVES), FLOATS),
    ),
}


@intrinsic
def _low(_context, kind, address):
    return _typed(LANES, (kind, address), lambda builder, _, at: LOADS[kind][0](builder, at))


@intrinsic
def _high(_context, kind, address):
    return _typed(LANES, (kind, address), lambda builder, _, at: LOADS[kind][1](builder, at))


@intrinsic
def _size_of(_context, kind):
    """Return the bytes of an element."""
    return _typed(types.int64, (kind,), lambda builder, _: ir.IntType(64)(kind.bitwidth // 8))


@intrinsic
def _alternates(_context, kind):
    """Return whether ``_low`` loads the even elements."""
    return _typed(types.boolean, (kind,), lambda builder, _: ir.IntType(1)(kind == types.uint16))


@numba.njit(**NUMBA)
def _attend(kind, source, memories, layout, target, first, end):
    """Attend with the queries of items [first, end). ``source``: address of the queries, bytes from a request to the
    next, G, r, d, factor of scores. ``target``: address of what is attended, and an array for the logarithms of the
    sums."""
    groups, queries, d, factor = source[2:]
    units = (d + UNIT - 1) // UNIT
    heads = max(1, min(TILE_QUERIES, TILE_ELEMENTS // d) // queries)
    rows, row = heads * queries, 2 * VECTOR_BYTES * units
    scores = np.empty(rows * ROW_BYTES, np.uint8)
    taken, sums = np.empty(rows * row, np.uint8), np.empty(rows * row, np.uint8)
    softmax, padded = np.empty((2, rows), np.float32), np.zeros((BLOCK_TOKENS + 2) * row, np.uint8)
    tile = _address_of(scores), _address_of(taken), _address_of(sums), _address_of(padded)
    sizes = units, queries, d * _size_of(kind), units * UNIT * _size_of(kind)
    begin, behind = first // groups, (end + groups - 1) // groups
    most = 1
    for request in range(begin, behind):
        most = max(most, _num_blocks(layout[0], request))
    found = np.empty((most + 1, 6), np.int64)
    for request in range(begin, behind):
        total = _find_blocks(layout, memories, request, _size_of(kind), found)
        until = min(end - request * groups, groups)
        for head in range(max(first - request * groups, 0), until, heads):
            count = min(heads, until - head)
            at = (request * groups + head) * queries
            _take(kind, source[0] + request * source[1] + head * queries * d * 4, tile, count * queries, (d, factor))
            _begin(tile[2], softmax, count * queries, row)
            for block in range(0, total, CHUNK_BLOCKS):
                chunk = block, min(total, block + CHUNK_BLOCKS)
                _score(kind, found, tile, sizes, chunk, (head, head + count))
                for query in range(count * queries):
                    _soften(tile[0] + query * ROW_BYTES, chunk[1] - block, softmax, query, tile[2] + query * row, units)
                _weigh(kind, found, tile, sizes, chunk, (head, head + count))
            _give(kind, target[0] + at * d * 4, tile, softmax, count * queries, d)
            for query in range(count * queries):
                target[1][at + query] = softmax[0, query] + np.log(softmax[1, query])
    scores[0] = taken[0] = sums[0] = padded[0] = 0  # until here they are in use


@numba.njit(**PART)
def _address_of(array):
    return np.int64(array.ctypes.data)  # numba adds an unsigned and a signed number to a float


@numba.njit(**PART)
def _num_blocks(tokens, request):
    total = 0
    for part in range(len(tokens)):
        total += (tokens[part, request] + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    return total


@numba.njit(**PART)
def _find_blocks(layout, memories, request, size, found):
    """Write of each block of a request: address of its first head's keys, bytes from a token, a head, and from keys to
    values, filled tokens, hidden ones among them; behind the last one the first again. Return how many there are."""
    tokens, blocks, strides = layout
    total = 0
    for part in range(len(memories)):
        first = strides[part, 0] + request * strides[part, 1]
        for block in range((tokens[part, request] + BLOCK_TOKENS - 1) // BLOCK_TOKENS):
            if blocks[1, first + block] == BLOCK_TOKENS:
                continue
            found[total, 0] = memories[part] + size * blocks[0, first + block]
            for i in range(1, 4):
                found[total, i] = size * strides[part, 1 + i]
            found[total, 4] = min(BLOCK_TOKENS, tokens[part, request] - block * BLOCK_TOKENS)
            found[total, 5] = blocks[1, first + block]
            total += 1
    for i in range(6):
        found[total, i] = found[0, i]
    return total


@numba.njit(**PART)
def _begin(sums, softmax, count, row):
    """Let no token be attended to yet."""
    for at in range(0, count * row, VECTOR_BYTES):
        _store(sums + at, _fill(np.float32(0)))
    for query in range(count):
        softmax[0, query], softmax[1, query] = LOWEST, np.float32(0)


@numba.njit(**PART)
def _take(kind, source, tile, count, size_factor):
    """Lay queries side by side, scaled, padded to units and in the order in which elements are loaded."""
    d = size_factor[0]
    size = (d + UNIT - 1) // UNIT * 2 * VECTOR_BYTES
    factor, row = _fill(size_factor[1]), tile[3] + BLOCK_TOKENS * size
    for query in range(count):
        _copy(row, source + query * d * 4, d * 4)
        for at in range(0, size, 2 * VECTOR_BYTES):
            low, high = _scale(_load(row + at), factor), _scale(_load(row + at + VECTOR_BYTES), factor)
            to = tile[1] + query * size + at
            if _alternates(kind):
                _store(to, _even(low, high))
                _store(to + VECTOR_BYTES, _odd(low, high))
            else:
                _store(to, low)
                _store(to + VECTOR_BYTES, high)


@numba.njit(**PART)
def _give(kind, target, tile, softmax, count, d):
    """Write the weighted values of queries, divided by the sums of their weights, in the order of a head's elements."""
    size = (d + UNIT - 1) // UNIT * 2 * VECTOR_BYTES
    row = tile[3] + (BLOCK_TOKENS + 1) * size
    for query in range(count):
        factor = _fill(np.float32(1) / softmax[1, query])
        for at in range(0, size, 2 * VECTOR_BYTES):
            source = tile[2] + query * size + at
            low, high = _scale(_load(source), factor), _scale(_load(source + VECTOR_BYTES), factor)
            if _alternates(kind):
                _store(row + at, _first_pairs(low, high))
                _store(row + at + VECTOR_BYTES, _last_pairs(low, high))
            else:
                _store(row + at, low)
                _store(row + at + VECTOR_BYTES, high)
        _copy(target + query * d * 4, row, d * 4)


@numba.njit(**PART)
def _ahead(found, block, chunk, of_values, head):
    """Return what is prefetched beside a block's keys, or values: the next block's; behind a chunk's last keys its
    first values, behind its last values the next keys. Address, bytes from a token to the next, tokens."""
    first, end = chunk
    following, values = block + 1, of_values
    if following == end:
        values = not of_values
        following = end if of_values else first
    address = found[following, 0] + head * found[following, 2]
    return (address + found[following, 3] if values else address), found[following, 1], found[following, 4]


@numba.njit(**PART)
def _fetch(coming, head_bytes, turn, turns):
    """Prefetch one of ``turns`` parts of the rows of a head in a block."""
    address, stride, count = coming
    rows = (BLOCK_TOKENS + turns - 1) // turns
    for token in range(turn * rows, min(count, (turn + 1) * rows)):
        for at in range(0, head_bytes, 64):
            _prefetch(address + token * stride + at)


@numba.njit(**PART)
def _rows(rows, count, sizes, padded):
    """Return the address and stride of a head's rows in a block: themselves, or copies that zeros fill to units."""
    address, stride = rows
    _, _, head_bytes, unit_bytes = sizes
    if head_bytes == unit_bytes:
        return rows
    for token in range(count):
        _copy(padded + token * unit_bytes, address + token * stride, head_bytes)
    return padded, unit_bytes


@numba.njit(**PART)
def _score(kind, found, tile, sizes, chunk, heads):
    """Write the scores of a chunk's tokens with the queries of some heads."""
    units, queries, head_bytes, _ = sizes
    row = 2 * VECTOR_BYTES * units
    for block in range(*chunk):
        count = found[block, 4]
        for head in range(*heads):
            coming = _ahead(found, block, chunk, False, head)
            keys, step = _rows((found[block, 0] + head * found[block, 2], found[block, 1]), count, sizes, tile[3])
            query = 0
            while query < queries:
                place = (head - heads[0]) * queries + query
                scores, taken = (
                    tile[0] + place * ROW_BYTES + (block - chunk[0]) * BLOCK_TOKENS * 4,
                    tile[1] + place * row,
                )
                _fetch(coming, head_bytes, query, queries)
                if query + 1 < queries:
                    _fetch(coming, head_bytes, query + 1, queries)
                    for token in range(0, count, 4):
                        _score_two(kind, taken, keys + token * step, step, units, scores + 4 * token)
                    _hide(scores + ROW_BYTES, found[block, 5], count)
                else:
                    for token in range(0, count, 8):
                        _score_one(kind, taken, keys + token * step, step, units, scores + 4 * token)
                _hide(scores, found[block, 5], count)
                query += 2


@numba.njit(**PART)
def _hide(scores, first, count):
    """Let a block's tokens before the first one and behind the last one weigh nothing."""
    for token in range(first):
        _put(scores + 4 * token, LOWEST)
    for token in range(count, BLOCK_TOKENS):
        _put(scores + 4 * token, LOWEST)


@numba.njit(**PART)
def _score_one(kind, query, keys, stride, units, scores):
    """Write the scores of 8 tokens with a query."""
    a = b = c = d = e = f = g = h = _fill(np.float32(0))
    for _ in range(units):
        first, second, more = _load(query), _load(query + VECTOR_BYTES), keys + 4 * stride
        a = _fused(second, _high(kind, keys), _fused(first, _low(kind, keys), a))
        b = _fused(second, _high(kind, keys + stride), _fused(first, _low(kind, keys + stride), b))
        c = _fused(second, _high(kind, keys + 2 * stride), _fused(first, _low(kind, keys + 2 * stride), c))
        d = _fused(second, _high(kind, keys + 3 * stride), _fused(first, _low(kind, keys + 3 * stride), d))
        e = _fused(second, _high(kind, more), _fused(first, _low(kind, more), e))
        f = _fused(second, _high(kind, more + stride), _fused(first, _low(kind, more + stride), f))
        g = _fused(second, _high(kind, more + 2 * stride), _fused(first, _low(kind, more + 2 * stride), g))
        h = _fused(second, _high(kind, more + 3 * stride), _fused(first, _low(kind, more + 3 * stride), h))
        query, keys = query + 2 * VECTOR_BYTES, keys + UNIT * _size_of(kind)
    _store(scores, _sums_of(a, b, c, d, e, f, g, h))


@numba.njit(**PART)
def _score_two(kind, query, keys, stride, units, scores):
    """Write the scores of 4 tokens with a query and with the next one."""
    a = b = c = d = e = f = g = h = _fill(np.float32(0))
    next_query = query + 2 * VECTOR_BYTES * units
    for _ in range(units):
        one, two = _load(query), _load(next_query)
        k, m, n, p = (
            _low(kind, keys),
            _low(kind, keys + stride),
            _low(kind, keys + 2 * stride),
            _low(kind, keys + 3 * stride),
        )
        a, b, c, d = _fused(one, k, a), _fused(one, m, b), _fused(one, n, c), _fused(one, p, d)
        e, f, g, h = _fused(two, k, e), _fused(two, m, f), _fused(two, n, g), _fused(two, p, h)
        one, two = _load(query + VECTOR_BYTES), _load(next_query + VECTOR_BYTES)
        k, m, n, p = (
            _high(kind, keys),
            _high(kind, keys + stride),
            _high(kind, keys + 2 * stride),
            _high(kind, keys + 3 * stride),
        )
        a, b, c, d = _fused(one, k, a), _fused(one, m, b), _fused(one, n, c), _fused(one, p, d)
        e, f, g, h = _fused(two, k, e), _fused(two, m, f), _fused(two, n, g), _fused(two, p, h)
        query, next_query = query + 2 * VECTOR_BYTES, next_query + 2 * VECTOR_BYTES
        keys += UNIT * _size_of(kind)
    _store_parts(scores, scores + ROW_BYTES, _sums_of(a, b, c, d, e, f, g, h))


@numba.njit(**PART)
def _soften(scores, blocks, softmax, query, sums, units):
    """Turn a query's scores of a chunk into weights, relative to the highest score so far; scale what was summed with
    others. ``softmax``: of each query the highest score, and the sum of its weights."""
    size, highest = blocks * BLOCK_TOKENS * 4, _load(scores)
    for at in range(VECTOR_BYTES, size, VECTOR_BYTES):
        highest = _highest(highest, _load(scores + at))
    peak = _peak(highest)
    if peak > softmax[0, query]:
        scale = np.exp(softmax[0, query] - peak)
        softmax[0, query], softmax[1, query] = peak, softmax[1, query] * scale
        for at in range(0, 2 * VECTOR_BYTES * units, VECTOR_BYTES):
            _store(sums + at, _scale(_load(sums + at), _fill(scale)))
    less, total = _fill(-softmax[0, query]), _fill(np.float32(0))
    for at in range(0, size, VECTOR_BYTES):
        weights = _exp(_add(_load(scores + at), less))
        _store(scores + at, weights)
        total = _add(total, weights)
    softmax[1, query] += _total(total)


@numba.njit(**PART)
def _weigh(kind, found, tile, sizes, chunk, heads):
    """Add a chunk's values, by their weights, to the sums of the queries of some heads."""
    units, queries, head_bytes, _ = sizes
    row = 2 * VECTOR_BYTES * units
    for block in range(*chunk):
        count = found[block, 4]
        for head in range(*heads):
            coming, first = _ahead(found, block, chunk, True, head), found[block, 0] + head * found[block, 2]
            values, step = _rows((first + found[block, 3], found[block, 1]), count, sizes, tile[3])
            query = 0
            while query < queries:
                place = (head - heads[0]) * queries + query
                weights, sums = (
                    tile[0] + place * ROW_BYTES + (block - chunk[0]) * BLOCK_TOKENS * 4,
                    tile[2] + place * row,
                )
                _fetch(coming, head_bytes, query, queries)
                if query + 1 < queries:
                    _fetch(coming, head_bytes, query + 1, queries)
                    _weigh_two(kind, weights, values, step, sums, (units, count))
                else:
                    _weigh_one(kind, weights, values, step, sums, (units, count))
                query += 2


@numba.njit(**PART)
def _weigh_one(kind, weights, values, stride, sums, sizes):
    """Add values, each by its weight, to a query's sums: 64 elements in a pass over the tokens, then 16."""
    units, count = sizes
    step, unit = UNIT * _size_of(kind), 0
    while unit + 4 <= units:
        to, at = sums + 64 * unit, values + step * unit
        a, b, c, d = _load(to), _load(to + 32), _load(to + 64), _load(to + 96)
        e, f, g, h = _load(to + 128), _load(to + 160), _load(to + 192), _load(to + 224)
        for token in range(count):
            weight = _fill(_value_at(weights + 4 * token))
            a, b = _fused(weight, _low(kind, at), a), _fused(weight, _high(kind, at), b)
            c, d = _fused(weight, _low(kind, at + step), c), _fused(weight, _high(kind, at + step), d)
            e, f = _fused(weight, _low(kind, at + 2 * step), e), _fused(weight, _high(kind, at + 2 * step), f)
            g, h = _fused(weight, _low(kind, at + 3 * step), g), _fused(weight, _high(kind, at + 3 * step), h)
            at += stride
        _store_four(to, a, b, c, d)
        _store_four(to + 128, e, f, g, h)
        unit += 4
    while unit < units:
        to, at, token = sums + 64 * unit, values + step * unit, 0
        a, b, c, d = _load(to), _load(to + 32), _fill(np.float32(0)), _fill(np.float32(0))
        while token + 2 <= count:
            weight, other = _fill(_value_at(weights + 4 * token)), _fill(_value_at(weights + 4 * token + 4))
            a, b = _fused(weight, _low(kind, at), a), _fused(weight, _high(kind, at), b)
            c, d = _fused(other, _low(kind, at + stride), c), _fused(other, _high(kind, at + stride), d)
            at, token = at + 2 * stride, token + 2
        if token < count:
            weight = _fill(_value_at(weights + 4 * token))
            a, b = _fused(weight, _low(kind, at), a), _fused(weight, _high(kind, at), b)
        _store(to, _add(a, c))
        _store(to + 32, _add(b, d))
        unit += 1


@numba.njit(**PART)
def _weigh_two(kind, weights, values, stride, sums, sizes):
    """Add values to the sums of a query and of the next one: 32 elements in a pass over the tokens, then 16."""
    units, count = sizes
    step, unit, behind = UNIT * _size_of(kind), 0, 64 * units
    while unit + 2 <= units:
        to, at = sums + 64 * unit, values + step * unit
        a, b, c, d = _load(to), _load(to + 32), _load(to + 64), _load(to + 96)
        e, f, g, h = _load(to + behind), _load(to + behind + 32), _load(to + behind + 64), _load(to + behind + 96)
        for token in range(count):
            one, two = _fill(_value_at(weights + 4 * token)), _fill(_value_at(weights + 4 * token + ROW_BYTES))
            k, m, n, p = _low(kind, at), _high(kind, at), _low(kind, at + step), _high(kind, at + step)
            a, b, c, d = _fused(one, k, a), _fused(one, m, b), _fused(one, n, c), _fused(one, p, d)
            e, f, g, h = _fused(two, k, e), _fused(two, m, f), _fused(two, n, g), _fused(two, p, h)
            at += stride
        _store_four(to, a, b, c, d)
        _store_four(to + behind, e, f, g, h)
        unit += 2
    if unit < units:
        to, at = sums + 64 * unit, values + step * unit
        a, b, e, f = _load(to), _load(to + 32), _load(to + behind), _load(to + behind + 32)
        for token in range(count):
            one, two = _fill(_value_at(weights + 4 * token)), _fill(_value_at(weights + 4 * token + ROW_BYTES))
            k, m = _low(kind, at), _high(kind, at)
            a, b, e, f = _fused(one, k, a), _fused(one, m, b), _fused(two, k, e), _fused(two, m, f)
            at += stride
        _store(to, a)
        _store(to + 32, b)
        _store(to + behind, e)
        _store(to + behind + 32, f)


@numba.njit(**PART)
def _store_four(address, a, b, c, d):
    _store(address, a)
    _store(address + 32, b)
    _store(address + 64, c)
    _store(address + 96, d)
