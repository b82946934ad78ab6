"""Kernels of decode attention on a CPU. ``kernels.in_place`` calls them.

``compiled.rows`` says how numba compiles and stores kernels. "fastmath" is off: LLVM would drop the rounding in
``_exp``. Instead, sums use vectors and fused operations explicitly.

The softmax runs over chunks of CHUNK_BLOCKS blocks (Milakov and Gimelshein 2018, "Online normalizer calculation for
softmax"). For each chunk, the kernels compute the scores, then their weights, then the weighted sum of the values.
They compute in float32 on vectors of the processor's width (``Lanes``) and address memory directly. Up to four queries
of a key head are processed together (``_pass``), so that each loaded key or value is converted once for all of them.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils, types
from numba.extending import models, register_model

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.runtime.kernels.compiled import converts_float16
from flexhybrid.runtime.kernels.compiled.rows import (
    FLOAT,
    HALF,
    I16,
    I32,
    I64,
    NUMBA,
    PART,
    copy,
    emit_prefetch,
    emitted,
    intrinsic,
    typed,
)

#: dtype of keys and values -> a value whose type tells numba how to load them
KINDS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
if converts_float16():
    KINDS[torch.float16] = np.int16(0)
LOWEST = np.float32(-3e38)
CHUNK_BLOCKS = 4  #: number of blocks in a chunk
LANES = 16 if get_host_cpu_features().get("avx512f") else 8  #: number of float32 elements in a vector
VECTOR_BYTES = 4 * LANES
ROW_BYTES = CHUNK_BLOCKS * BLOCK_TOKENS * 4  #: size of a query's scores
#: Limits of the queries, and of their elements, that are processed together. Their scores and sums then stay in a
#: core's caches, while the memory of several heads is read in order.
TILE_QUERIES, TILE_ELEMENTS = 64, 4096

LINE_BYTES = 64  #: size of a cache line
TOKENS_IN_TURN = min(4, LANES // 4)  #: number of tokens whose keys are read in turn, one cache line each
AHEAD_BYTES = 8192  #: distance of prefetching ahead of reading, within a block's keys or values

FLOATS, HALVES, SHORTS, WORDS = (ir.VectorType(of, LANES) for of in (FLOAT, HALF, I16, I32))
FUSED = ("contract",)


class Lanes(types.Type):
    """The numba type of a vector of LANES float32 elements. It exists only inside kernels."""

    def __init__(self):
        super().__init__("Lanes")


VECTOR = Lanes()


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    """Represent ``Lanes`` as a vector register."""

    def __init__(self, manager, lanes):
        super().__init__(manager, lanes, FLOATS)


def _words(*values):
    return ir.Constant(ir.VectorType(I32, len(values)), values)


def _floats(value):
    return ir.Constant(FLOATS, [float(np.float32(value))] * LANES)


def _read(builder, address, of):
    loaded = builder.load(builder.inttoptr(address, ir.PointerType(of)), typ=of)
    loaded.align = 2 if of in (SHORTS, HALVES) else 4
    return loaded


def _write(builder, address, value):
    builder.store(value, builder.inttoptr(address, ir.PointerType(value.type))).align = 4


def _to_all(builder, value):
    vector = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(vector, vector, _words(*[0] * LANES))


def _fuse(builder, factor, other, added):
    """Return factor · other + added, in one instruction if the processor has it."""
    return builder.fadd(builder.fmul(factor, other, flags=FUSED), added, flags=FUSED)


def _larger(builder, one, other):
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


_load = emitted(VECTOR, lambda builder, address: _read(builder, address, FLOATS))
_store = emitted(types.void, _write)  #: writes a vector or a number to an address
_fill = emitted(VECTOR, _to_all)
_add = emitted(VECTOR, lambda builder, lanes, others: builder.fadd(lanes, others))
_scale = emitted(VECTOR, lambda builder, lanes, factors: builder.fmul(lanes, factors))
_highest = emitted(VECTOR, _larger)


def _folded(fold):
    """Return an intrinsic that reduces the lanes of a vector to one value."""

    def emit(builder, value):
        distance = LANES // 2
        while distance:
            moved = builder.shuffle_vector(value, value, _words(*range(distance, LANES), *[0] * distance))
            value, distance = fold(builder, value, moved), distance // 2
        return builder.extract_element(value, I32(0))

    return emitted(types.float32, emit)


_total = _folded(lambda builder, one, other: builder.fadd(one, other))
_peak = _folded(_larger)


#: Coefficients of (e^x - 1 - x) / x² for |x| <= log(2) / 2, highest power first (Cephes, expf; relative error 1e-7).
EXP_TERMS = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1
LOG_2_PARTS = 0.693359375, -2.12194440e-4  #: two numbers whose sum is log(2); the first is exact in few bits
ROUNDING = 1.5 * 2**23  #: adding it to a float32 rounds that to an integer, held in the lowest bits


def _emit_exp(builder, x):
    """Emit e^x for x <= 0; 0 for x < -87.7; NaN for NaN."""
    x = builder.select(builder.fcmp_ordered("<", x, _floats(-88)), _floats(-88), x)
    shifted = _fuse(builder, x, _floats(1 / np.log(2)), _floats(ROUNDING))
    power = builder.fsub(shifted, _floats(ROUNDING))
    for part in LOG_2_PARTS:
        x = _fuse(builder, power, _floats(-part), x)
    series = _floats(EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        series = _fuse(builder, series, x, _floats(term))
    series = builder.fadd(_fuse(builder, series, builder.fmul(x, x), x), _floats(1))
    exponent = builder.add(builder.bitcast(shifted, WORDS), _words(*[127] * LANES))
    return builder.fmul(series, builder.bitcast(builder.shl(exponent, _words(*[23] * LANES)), FLOATS))


_exp = emitted(VECTOR, _emit_exp)


def _elements(builder, kind, address):
    """Load LANES elements of a kind as float32."""
    if kind == types.float32:
        return _read(builder, address, FLOATS)
    if kind == types.int16:
        return builder.fpext(_read(builder, address, HALVES), FLOATS)
    words = builder.zext(_read(builder, address, SHORTS), WORDS)  # the upper half of a float32 is a bfloat16
    return builder.bitcast(builder.shl(words, _words(*[16] * LANES)), FLOATS)


@intrinsic
def _convert(_context, kind, address):
    return typed(VECTOR, (kind, address), lambda builder, _, address: _elements(builder, kind, address))


def _prefetch(builder, address):
    """Prefetch a line into a core's second-level cache, which allows more pending lines than the first level."""
    emit_prefetch(builder, address, level=2)


def _sum_shuffles():
    """Return the shuffles with which ``_sums_of`` adds up LANES vectors, and the initial order of the vectors.

    Each step halves the number of vectors. It merges two neighbours into one vector by adding two shuffles of them: the
    first halves of groups of lanes, and the last halves. Steps with groups of 32 bytes or more combine whole vectors.
    Steps with smaller groups stay inside 16 bytes. So each shuffle is one processor instruction.
    """
    steps, owners, half = [], np.arange(LANES)[:, None].repeat(LANES, 1), LANES // 2
    while half:
        span = LANES if half >= 4 else 4
        lanes = np.arange(2 * LANES).reshape(2, LANES // span, span // (2 * half), 2, half).swapaxes(0, 1)
        steps.append([lanes[..., which, :].ravel() for which in range(2)])
        owners, half = owners.reshape(-1, 2 * LANES)[:, steps[-1][0]], half // 2
    return [[_words(*of.tolist()) for of in step] for step in steps], np.argsort(owners[0])


SUM_SHUFFLES, SUM_ORDER = _sum_shuffles()


def _sums_of(builder, vectors):
    """Return a vector whose elements are the sums of LANES vectors, in their order."""
    vectors = [vectors[i] for i in SUM_ORDER]
    for step in SUM_SHUFFLES:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.fadd(*(builder.shuffle_vector(*pair, lanes) for lanes in step)) for pair in pairs]
    return vectors[0]


def _offset(builder, address, index, step):
    """Return address + index · step; ``step`` is in bytes."""
    return builder.add(address, builder.mul(index, step if isinstance(step, ir.Value) else I64(step)))


def _accumulate(builder, sums, factor, other):
    """Add factor · other to the vector register ``sums``."""
    builder.store(_fuse(builder, factor, other, builder.load(sums)), sums)


def _pass(queries, emit):
    """Return an intrinsic that processes ``count`` tokens of a head for ``queries`` queries.

    ``tile``: address of the queries' scores (or weights), address of their elements (or sums), and bytes from one query
    to the next. ``rows``: address of the tokens' keys (or values), bytes from one token to the next, and bytes from the
    row that is read to the row that is prefetched. ``emit``: ``_emit_scores`` or ``_emit_sums``.
    """

    @intrinsic
    def of_head(_context, kind, tile, rows, count):
        def unpacked(builder, _, tile, rows, count):
            tile, rows = (cgutils.unpack_tuple(builder, one, 3) for one in (tile, rows))
            emit(builder, kind, queries, tile, rows, count)

        return typed(types.void, (kind, tile, rows, count), unpacked)

    return of_head


def _in_steps(builder, total, wide, step):
    """Emit a loop that calls step(first vector, number of vectors) on ``wide`` vectors at a time, then one by one."""
    end = builder.sub(total, builder.urem(total, I64(wide)))
    with cgutils.for_range_slice(builder, I64(0), end, I64(wide)) as (vector, _):
        step(vector, wide)
    with cgutils.for_range_slice(builder, end, total, I64(1)) as (vector, _):
        step(vector, 1)


def _emit_scores(builder, kind, queries, tile, rows, count):
    """Emit code that writes the scores of tokens, one vector at a time."""
    (scores, taken, row), (keys, step, ahead), tokens = tile, rows, LANES // queries
    with cgutils.for_range_slice(builder, I64(0), count, I64(tokens)) as (token, _):
        sums = [[cgutils.alloca_once_value(builder, _floats(0)) for _ in range(tokens)] for _ in range(queries)]
        for first in range(0, tokens, TOKENS_IN_TURN):
            own = [of_query[first : first + TOKENS_IN_TURN] for of_query in sums]
            at = _offset(builder, keys, builder.add(token, I64(first)), step)
            _emit_products(builder, kind, own, (taken, row), (at, step, ahead))
        total = _sums_of(builder, [builder.load(one) for of_query in sums for one in of_query])
        for query in range(queries):
            own = builder.shuffle_vector(total, total, _words(*range(query * tokens, (query + 1) * tokens)))
            _write(builder, builder.add(_offset(builder, scores, token, 4), I64(query * ROW_BYTES)), own)


def _emit_products(builder, kind, sums, taken, rows):
    """Emit code that adds products of queries and keys to vector sums [queries][tokens].

    It reads one cache line of each token in turn. It prefetches the same number of lines in the order of their
    addresses, which a processor's own prefetcher recognizes.
    """
    (taken, row), (keys, step, ahead), vector_bytes = taken, rows, LANES * kind.bitwidth // 8
    tokens, soon = len(sums[0]), cgutils.alloca_once_value(builder, builder.add(keys, ahead))

    def add(vector, vectors):
        at, following = _offset(builder, keys, vector, vector_bytes), builder.load(soon)
        for i in range(tokens):
            _prefetch(builder, builder.add(following, I64(i * LINE_BYTES)))
        builder.store(builder.add(following, I64(tokens * LINE_BYTES)), soon)
        for other in range(vectors):
            places = [builder.add(_offset(builder, at, I64(i), step), I64(other * vector_bytes)) for i in range(tokens)]
            elements = [_elements(builder, kind, place) for place in places]
            of_query = builder.add(_offset(builder, taken, vector, VECTOR_BYTES), I64(other * VECTOR_BYTES))
            for query, own_sums in enumerate(sums):
                own = _read(builder, _offset(builder, of_query, I64(query), row), FLOATS)
                for i in range(tokens):
                    _accumulate(builder, own_sums[i], own, elements[i])

    _in_steps(builder, builder.udiv(row, I64(VECTOR_BYTES)), LINE_BYTES // vector_bytes, add)


def _emit_sums(builder, kind, queries, tile, rows, count):
    """Emit code that adds weighted values to the sums.

    A pass over the tokens covers 64 elements, or fewer if the registers of all queries hold fewer. The remaining
    elements take one pass per vector.
    """
    (weights, sums, row), (values, step, ahead), element_bytes = tile, rows, kind.bitwidth // 8

    def add(vector, vectors):
        places = [
            builder.add(_offset(builder, _offset(builder, sums, vector, VECTOR_BYTES), I64(query), row), I64(offset))
            for query in range(queries)
            for offset in range(0, vectors * VECTOR_BYTES, VECTOR_BYTES)
        ]
        kept = [cgutils.alloca_once_value(builder, _read(builder, place, FLOATS)) for place in places]
        first = _offset(builder, values, vector, LANES * element_bytes)
        with cgutils.for_range(builder, count) as token:
            at = _offset(builder, first, token.index, step)
            for line in range(0, vectors * LANES * element_bytes, LINE_BYTES):
                _prefetch(builder, builder.add(builder.add(at, ahead), I64(line)))
            elements = [
                _elements(builder, kind, builder.add(at, I64(i * LANES * element_bytes))) for i in range(vectors)
            ]
            at = _offset(builder, weights, token.index, 4)
            for query in range(queries):
                weight = _to_all(builder, _read(builder, builder.add(at, I64(query * ROW_BYTES)), FLOAT))
                for i in range(vectors):
                    _accumulate(builder, kept[query * vectors + i], weight, elements[i])
        for place, one in zip(places, kept, strict=True):
            _write(builder, place, builder.load(one))

    _in_steps(builder, builder.udiv(row, I64(VECTOR_BYTES)), min(64 // LANES, LANES // queries), add)


_score_four, _score_two, _score_one = (_pass(queries, _emit_scores) for queries in (4, 2, 1))
_weigh_four, _weigh_two, _weigh_one = (_pass(queries, _emit_sums) for queries in (4, 2, 1))


@intrinsic
def _size_of(_context, kind):
    """Return the bytes of an element of a kind."""
    return typed(types.int64, (kind,), lambda builder, _: ir.IntType(64)(kind.bitwidth // 8))


@numba.njit(**NUMBA)
def attend_items(kind, of_query, source, memories, layout, target, first, end):
    """Attend with the queries of items [first, end). An item is a request and one of its key heads.

    ``source``: address of the queries (dtype of ``of_query``), bytes from one request to the next, G, r, d (as in
    ``kernels.in_place``), factor of the scores. ``memories``: addresses of the parts. ``layout``: the first three
    fields of ``Parts``. ``target``: addresses of the results, and of the logarithms of the softmax's denominators.
    """
    groups, queries, d, factor = source[2:]
    heads = max(1, min(TILE_QUERIES, TILE_ELEMENTS // d) // queries)
    rows, row = heads * queries, (d + LANES - 1) // LANES * VECTOR_BYTES
    scores = np.empty(rows * ROW_BYTES + LINE_BYTES, np.uint8)
    taken, sums = np.empty(rows * row + LINE_BYTES, np.uint8), np.empty(rows * row + LINE_BYTES, np.uint8)
    softmax, padded = np.empty((2, rows), np.float32), np.zeros((BLOCK_TOKENS + 2) * row + LINE_BYTES, np.uint8)
    tile = _first_line(scores), _first_line(taken), _first_line(sums), _first_line(padded)
    sizes = row, queries, d * _size_of(kind), row // 4 * _size_of(kind)
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
            first_query = source[0] + request * source[1] + head * queries * d * _size_of(of_query)
            _load_queries(of_query, first_query, tile, count * queries, (d, row, factor))
            _reset(tile[2], softmax, count * queries, row)
            for block in range(0, total, CHUNK_BLOCKS):
                chunk = block, min(total, block + CHUNK_BLOCKS)
                _pass_chunk(kind, found, tile, sizes, chunk, (head, head + count), of_values=False)
                for query in range(count * queries):
                    _update_softmax(
                        tile[0] + query * ROW_BYTES, chunk[1] - block, softmax, query, tile[2] + query * row, row
                    )
                _pass_chunk(kind, found, tile, sizes, chunk, (head, head + count), of_values=True)
            _write_results(target[0] + at * d * 4, tile, softmax, count * queries, (d, row))
            for query in range(count * queries):
                _store(target[1] + 4 * (at + query), softmax[0, query] + np.log(softmax[1, query]))
    scores[0] = taken[0] = sums[0] = padded[0] = 0  # a use at the end keeps the arrays, whose addresses are used above


@numba.njit(**PART)
def _first_line(array):
    """Return the address of an array's first cache line. A vector across two lines takes twice as long to load."""
    address = np.int64(array.ctypes.data)  # numba adds an unsigned and a signed number to a float
    return (address + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES


@numba.njit(**PART)
def _num_blocks(tokens, request):
    total = 0
    for part in range(len(tokens)):
        total += (tokens[part, request] + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    return total


@numba.njit(**PART)
def _find_blocks(layout, memories, request, size, found):
    """Write a row of ``found`` for each visible block of a request, and the first block again at the end.

    A row is: address of the first head's keys; bytes from one token to the next, from one head to the next, and from
    keys to values; number of filled tokens; number of hidden tokens among them. Return the number of blocks.
    """
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
def _reset(sums, softmax, count, row):
    """Reset the sums and the softmax of ``count`` queries."""
    for at in range(0, count * row, VECTOR_BYTES):
        _store(sums + at, _fill(np.float32(0)))
    for query in range(count):
        softmax[0, query], softmax[1, query] = LOWEST, np.float32(0)


@numba.njit(**PART)
def _load_queries(kind, source, tile, count, sizes):
    """Copy queries into the tile, scaled and padded to whole vectors."""
    d, row, factor = sizes
    padded, size = tile[3] + BLOCK_TOKENS * row, _size_of(kind)
    for query in range(count):
        copy(padded, source + query * d * size, d * size)
        for at in range(0, row // 4, LANES):
            _store(tile[1] + query * row + at * 4, _scale(_convert(kind, padded + at * size), _fill(factor)))


@numba.njit(**PART)
def _write_results(target, tile, softmax, count, sizes):
    """Write the results of ``count`` queries: their weighted sums of values, divided by the sums of the weights."""
    d, row = sizes
    for query in range(count):
        sums, factor = tile[2] + query * row, _fill(np.float32(1) / softmax[1, query])
        for at in range(0, row, VECTOR_BYTES):
            _store(sums + at, _scale(_load(sums + at), factor))
        copy(target + query * d * 4, sums, d * 4)


@numba.njit(**PART)
def _next_distance(found, block, chunk, of_values):
    """Return the distance in bytes from a block's keys (or values) to the ones of the same head that are read next.

    These are in the next block. After a chunk's last keys come its first values, after its last values the next keys.
    """
    first, end = chunk
    following, values = block + 1, of_values
    if following == end:
        values = not of_values
        following = end if of_values else first
    ahead = found[following, 0] - found[block, 0]
    return ahead + values * found[following, 3] - of_values * found[block, 3]


@numba.njit(**PART)
def _prefetch_distance(ahead, head, heads, step, head_bytes):
    """Return how many bytes ahead to prefetch while a head's keys (or values) are read.

    The target is a later head of the same block or, near the block's end, one of the first heads of the next block.
    ``ahead``: bytes from this block to the next; ``step``: bytes from one head to the next.
    """
    later, count = max(1, AHEAD_BYTES // (BLOCK_TOKENS * head_bytes)), heads[1] - heads[0]
    if head + later < heads[1]:
        return later * step
    return ahead + (min(later, count) - count) * step


@numba.njit(**PART)
def _rows(rows, count, sizes, padded):
    """Return the address and stride of a head's rows in a block, or of copies padded with zeros to whole units."""
    address, stride = rows
    _, _, head_bytes, unit_bytes = sizes
    if head_bytes == unit_bytes:
        return rows
    for token in range(count):
        copy(padded + token * unit_bytes, address + token * stride, head_bytes)
    return padded, unit_bytes


@numba.njit(**PART)
def _pass_chunk(kind, found, tile, sizes, chunk, heads, of_values):
    """Write the scores of a chunk's tokens for the queries of ``heads``; or add its weighted values to their sums."""
    row, queries, head_bytes, _ = sizes
    for block in range(*chunk):
        ahead, count, hidden = _next_distance(found, block, chunk, of_values), found[block, 4], found[block, 5]
        for head in range(*heads):
            first = found[block, 0] + head * found[block, 2] + of_values * found[block, 3]
            first, step = _rows((first, found[block, 1]), count, sizes, tile[3])
            rows = first, step, _prefetch_distance(ahead, head, heads, found[block, 2], head_bytes)
            place, query = (head - heads[0]) * queries, 0
            scores = tile[0] + place * ROW_BYTES + (block - chunk[0]) * BLOCK_TOKENS * 4
            while query < queries:
                own = scores + query * ROW_BYTES, tile[1 + of_values] + (place + query) * row, row
                if query + 4 <= queries:
                    _weigh_four(kind, own, rows, count) if of_values else _score_four(kind, own, rows, count)
                    query += 4
                elif query + 2 <= queries:
                    _weigh_two(kind, own, rows, count) if of_values else _score_two(kind, own, rows, count)
                    query += 2
                else:
                    _weigh_one(kind, own, rows, count) if of_values else _score_one(kind, own, rows, count)
                    query += 1
            if not of_values and (hidden or count < BLOCK_TOKENS):
                for query in range(queries):
                    _mask_tokens(scores + query * ROW_BYTES, hidden, count)


@numba.njit(**PART)
def _mask_tokens(scores, first, count):
    """Mask the scores of a block's first ``first`` tokens, and of those from ``count`` on."""
    for token in range(first):
        _store(scores + 4 * token, LOWEST)
    for token in range(count, BLOCK_TOKENS):
        _store(scores + 4 * token, LOWEST)


@numba.njit(**PART)
def _update_softmax(scores, blocks, softmax, query, sums, row):
    """Replace a query's scores of a chunk by weights, relative to its highest score so far.

    If the highest score changes, rescale the query's sums. ``softmax``: highest score and sum of weights of each query.
    """
    size, highest = blocks * BLOCK_TOKENS * 4, _load(scores)
    for at in range(VECTOR_BYTES, size, VECTOR_BYTES):
        highest = _highest(highest, _load(scores + at))
    peak = _peak(highest)
    if peak > softmax[0, query]:
        scale = np.exp(softmax[0, query] - peak)
        softmax[0, query], softmax[1, query] = peak, softmax[1, query] * scale
        for at in range(0, row, VECTOR_BYTES):
            _store(sums + at, _scale(_load(sums + at), _fill(scale)))
    less, total = _fill(-softmax[0, query]), _fill(np.float32(0))
    for at in range(0, size, VECTOR_BYTES):
        weights = _exp(_add(_load(scores + at), less))
        _store(scores + at, weights)
        total = _add(total, weights)
    softmax[1, query] += _total(total)
