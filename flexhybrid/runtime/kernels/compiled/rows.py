"""Kernels that quantize, dequantize, gather and scatter rows in a CPU's memory. ``kernels.rows_numba`` calls them.

``kernels.quantize`` defines the format of quantized ("packed") rows and every rounding. Results are equal bit for bit.
Each row is read from memory once and written once.

A group's elements are read twice, the second time from the first-level cache: once for their minimum and maximum, for
which floats are compared as integers (``_key``), and once for their codes. A group of GROUP_ELEMENTS is one LLVM
vector, which LLVM splits into the processor's own vectors. Groups of other sizes, and groups that extend from one part
of a row into the next, are processed by loops over elements. LLVM can vectorize these loops, because every load and
store in them is an offset from a constant pointer.

numba compiles the kernels and stores the results next to this file, or in the user's cache folder. numba's cache
notices a change in the kernel's own file only. So everything that is compiled together is in one file, apart from the
helpers that ``compiled.attention`` imports from here.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, cast

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import extending
from numba.core import cgutils, types

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.policy import GROUP_ELEMENTS

#: dtype -> a value whose type tells numba how to load and store an element
KINDS: dict[torch.dtype, Any] = {torch.float32: np.uint32(0), torch.bfloat16: np.uint16(0), torch.float16: np.int16(0)}

#: No "fastmath": results must equal plain torch's, bit for bit.
NUMBA: dict[str, Any] = {"nogil": True, "error_model": "numpy", "cache": True}
PART: dict[str, Any] = {
    **NUMBA,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}  #: for functions that only kernels call

intrinsic: Any = extending.intrinsic  #: kernels call a decorated function without its first parameter


# ---- instructions

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT, HALF = ir.FloatType(), ir.HalfType()


def typed(result, arguments, emit):
    """Return (signature, code generator) as numba's @intrinsic expects; the generator calls emit(builder, *values)."""

    def generate(context, builder, _signature, values):
        value = emit(builder, *values)
        return context.get_dummy_value() if result == types.void else value

    return result(*arguments), generate


def emitted(result, emit):
    """Return an intrinsic with this result type, for which ``emit(builder, *values)`` writes the code."""

    def operation(_context, *arguments):
        return typed(result, arguments, emit)

    cast("Any", operation).__signature__ = signature(emit)  # numba needs the number of arguments
    return intrinsic(operation)


_pointer = emitted(types.voidptr, lambda builder, address: builder.inttoptr(address, ir.PointerType(I8)))


def _at(builder, pointer, index, bits):
    """Return a pointer to the element with this index; elements have ``bits`` bits."""
    whole = ir.IntType(bits)
    return builder.gep(builder.bitcast(pointer, ir.PointerType(whole)), [index], source_etype=whole)


@intrinsic
def _get(_context, kind, pointer, index):
    def emit(builder, _, pointer, index):
        value = builder.load(_at(builder, pointer, index, kind.bitwidth), typ=ir.IntType(kind.bitwidth))
        value.align = 1
        return value

    return typed(kind, (kind, pointer, index), emit)


def _emit_set(builder, pointer, index, bits):
    builder.store(bits, _at(builder, pointer, index, bits.type.width)).align = 1


_set = emitted(types.void, _emit_set)


def _keys(builder, value):
    """Return the keys (``_key``) of elements, given as their bits."""
    of = value.type.element if isinstance(value.type, ir.VectorType) else value.type
    sign = builder.ashr(value, _all(value.type, of.width - 1))
    return builder.xor(value, builder.lshr(sign, _all(value.type, 1)))


@intrinsic
def _key(_context, bits):
    """Map the bits of a float to a signed integer (its key) that has the same order, or a key back to the bits.

    Keys of NaN are above the key of infinity, or below the key of minus infinity.
    """
    result = types.int32 if bits.bitwidth == 32 else types.int16

    return typed(result, (bits,), _keys)


def _chosen(relation):
    """Return an intrinsic that returns the first of two integers if the relation holds, else the second."""

    @intrinsic
    def of_two(_context, one, other):
        def emit(builder, one, other):
            return builder.select(builder.icmp_signed(relation, one, other), one, other)

        return typed(one, (one, other), emit)

    return of_two


_lower, _higher = _chosen("<"), _chosen(">")


def _as(scalar, like):
    """Return a type of ``scalar`` elements that has as many elements as the value ``like``."""
    return ir.VectorType(scalar, like.type.count) if isinstance(like.type, ir.VectorType) else scalar


def _all(of, value):
    """Return a constant of a type whose elements all equal ``value``."""
    return ir.Constant(of, [value] * of.count if isinstance(of, ir.VectorType) else value)


def _wide(builder, kind, bits):
    """Convert the bits of elements of a kind to float32."""
    floats, words = _as(FLOAT, bits), _as(I32, bits)
    if kind == types.uint32:
        return builder.bitcast(bits, floats)
    if kind == types.int16:
        return builder.fpext(builder.bitcast(bits, _as(HALF, bits)), floats)
    return builder.bitcast(builder.shl(builder.zext(bits, words), _all(words, 16)), floats)


def _narrow(builder, kind, value, numbers=False):
    """Convert float32 to the bits of a kind, rounded to nearest even. ``numbers``: none of the values is NaN."""
    words, halves = _as(I32, value), _as(I16, value)
    if kind == types.uint32:
        return builder.bitcast(value, words)
    if kind == types.int16:
        return builder.bitcast(builder.fptrunc(value, _as(HALF, value)), halves)
    bits = builder.bitcast(value, words)
    odd = builder.and_(builder.lshr(bits, _all(words, 16)), _all(words, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _all(words, 0x7FFF))), _all(words, 16))
    if not numbers:
        rounded = builder.select(builder.fcmp_unordered("uno", value, value), _all(words, 0x7FC0), rounded)
    return builder.trunc(rounded, halves)


def _coded(builder, kind, bits, numbers):
    """Return the codes of elements, shifted to their position in a byte; the code of NaN is 0."""
    minimum, inverse, levels, shift = numbers
    value = builder.fmul(builder.fsub(_wide(builder, kind, bits), minimum), inverse)
    zero, words = _all(value.type, 0.0), _as(I32, bits)
    value = builder.select(builder.fcmp_ordered(">", value, zero), value, zero)
    value = builder.select(builder.fcmp_ordered("<", value, levels), value, levels)
    # A sum of 2**23 has no fraction: adding rounds to the nearest even, and the low bits are the integer.
    code = builder.bitcast(builder.fadd(value, _all(value.type, 8388608.0)), words)
    return builder.trunc(builder.shl(code, shift), _as(I8, bits))


def _decoded(builder, kind, byte, place, scaling, numbers=False):
    """Return the bits of the elements whose codes are at a position (``place``: shift, highest code) of each byte."""
    (shift, levels), (scale, minimum) = place, scaling
    code = builder.lshr(builder.zext(byte, _as(I32, byte)), shift)
    code = builder.sitofp(builder.and_(code, levels), _as(FLOAT, byte))
    return _narrow(builder, kind, builder.fadd(builder.fmul(code, scale), minimum), numbers)


@intrinsic
def _float(_context, kind, bits):
    """Convert an element's bits to float32."""
    return typed(types.float32, (kind, bits), lambda builder, _, value: _wide(builder, kind, value))


#: Converts float32 to the bits of the nearest float16.
_half = emitted(types.int16, lambda builder, value: _narrow(builder, types.int16, value))


@intrinsic
def _code(_context, kind, bits, minimum, inverse, levels, shift):
    """Return the code of one element, shifted to its position in a byte."""

    def emit(builder, _, bits, minimum, inverse, levels, shift):
        return _coded(builder, kind, bits, (minimum, inverse, levels, builder.trunc(shift, I32)))

    return typed(types.uint8, (kind, bits, minimum, inverse, levels, shift), emit)


@intrinsic
def _value(_context, kind, byte, shift, levels, scale, minimum):
    """Return the bits of the element whose code is in ``byte``, at ``shift``."""

    def emit(builder, _, byte, shift, levels, scale, minimum):
        shift, levels = builder.trunc(shift, I32), builder.trunc(levels, I32)
        return _decoded(builder, kind, byte, (shift, levels), (scale, minimum))

    return typed(kind, (kind, byte, shift, levels, scale, minimum), emit)


def _group_at(builder, place, bits):
    """Return a pointer to the group at a place (pointer, index), and its type; elements have ``bits`` bits."""
    pointer, index = cgutils.unpack_tuple(builder, place, 2)
    group = ir.VectorType(ir.IntType(bits), GROUP_ELEMENTS)
    return builder.bitcast(_at(builder, pointer, index, bits), ir.PointerType(group)), group


def _group(builder, place, bits):
    at, group = _group_at(builder, place, bits)
    value = builder.load(at, typ=group)
    value.align = 1
    return value


def _to_all(builder, value):
    """Return a vector of GROUP_ELEMENTS elements that all equal ``value``."""
    vector = builder.insert_element(ir.Constant(ir.VectorType(value.type, GROUP_ELEMENTS), ir.Undefined), value, I32(0))
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, GROUP_ELEMENTS), [0] * GROUP_ELEMENTS))


def _folded(name):
    """Return an intrinsic that reduces the keys of a group to the lowest ("smin") or highest ("smax") key."""

    @intrinsic
    def of_group(_context, kind, place):
        def emit(builder, _, place):
            keys = _keys(builder, _group(builder, place, kind.bitwidth))
            function = ir.FunctionType(keys.type.element, [keys.type])
            name_of = f"llvm.vector.reduce.{name}.v{GROUP_ELEMENTS}i{kind.bitwidth}"
            return builder.call(cgutils.get_or_insert_function(builder.module, function, name_of), [keys])

        return typed(types.int32 if kind.bitwidth == 32 else types.int16, (kind, place), emit)

    return of_group


_lowest, _highest = _folded("smin"), _folded("smax")


@intrinsic
def _pack_group(_context, kind, group, codes, numbers, shift):
    """Write the codes of a group into bytes whose lower bits hold the codes of earlier parts.

    ``group`` and ``codes``: (pointer, index). ``numbers``: the group's minimum, 1 / scale, and the highest code.
    """

    def emit(builder, _, group, codes, numbers, shift):
        place, _ = _group_at(builder, codes, 8)
        first = builder.icmp_signed("==", shift, shift.type(0))
        numbers = [*cgutils.unpack_tuple(builder, numbers, 3), builder.trunc(shift, I32)]
        numbers = [_to_all(builder, number) for number in numbers]
        elements = _group(builder, group, kind.bitwidth)
        own = _coded(builder, kind, elements, numbers)
        before = _group(builder, codes, 8)
        before = builder.select(first, _all(before.type, 0), before)
        builder.store(builder.or_(own, before), place).align = 1

    return typed(types.void, (kind, group, codes, numbers, shift), emit)


@intrinsic
def _unpack_group(_context, kind, codes, group, place, scaling):
    """Write the group whose codes are at a position (``place``: shift, highest code) of each byte.

    ``scaling``: scale and minimum; both are finite.
    """

    def emit(builder, _, codes, group, place, scaling):
        to, _ = _group_at(builder, group, kind.bitwidth)
        place = [_to_all(builder, builder.trunc(of, I32)) for of in cgutils.unpack_tuple(builder, place, 2)]
        scaling = [_to_all(builder, of) for of in cgutils.unpack_tuple(builder, scaling, 2)]
        value = _decoded(builder, kind, _group(builder, codes, 8), place, scaling, numbers=True)
        builder.store(value, to).align = 1

    return typed(types.void, (kind, codes, group, place, scaling), emit)


def _emit_copy(builder, target, source, num_bytes):
    byte = ir.PointerType(I8)
    cgutils.raw_memcpy(builder, builder.inttoptr(target, byte), builder.inttoptr(source, byte), num_bytes, 1)


def _emit_lines(builder, target, source, num_bytes):
    """Copy whole cache lines, bypassing the caches. Through them, a processor would read each line before writing."""
    line = ir.VectorType(I64, 8)
    with cgutils.for_range_slice(builder, I64(0), num_bytes, I64(64)) as (at, _):
        to, from_ = (builder.inttoptr(builder.add(one, at), ir.PointerType(line)) for one in (target, source))
        value = builder.load(from_, typ=line)
        value.align = 1
        stored = builder.store(value, to)
        stored.align = 64
        stored.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))


def emit_prefetch(builder, address, level, to_write=0):
    """Emit a prefetch of a cache line. ``level``: 3 for the first-level cache, 2 for the second."""
    byte = ir.PointerType(I8)
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    builder.call(function, [builder.inttoptr(address, byte), I32(to_write), I32(level), I32(1)])


_or = emitted(types.uint8, lambda builder, one, other: builder.or_(one, other))
copy, _put_lines = emitted(types.void, _emit_copy), emitted(types.void, _emit_lines)
_prefetch = emitted(types.void, lambda builder, address: emit_prefetch(builder, address, 3))
_prefetch_to_write = emitted(types.void, lambda builder, address: emit_prefetch(builder, address, 3, to_write=1))
#: Makes all writes that bypassed the caches visible to other threads.
_finish = emitted(types.void, lambda builder: builder.fence("seq_cst"))


# ---- kernels

#: Number of bytes prefetched of a later row or piece, and the distance from the copied row.
EARLY_BYTES, AHEAD_BYTES = 512, 4096
#: Writes bypass the caches for pieces up to PAST_BYTES; memcpy is as fast for longer pieces. Targets without places
#: must also have FAR_BYTES or more, because a smaller target is soon read from a cache.
PAST_BYTES, FAR_BYTES = 512, 4 << 20
IN_ORDER = np.zeros(0, np.int64)
HALVES, BYTES = np.int16(0), np.uint8(0)
TINY = np.float32(2.0**-126)  #: smallest normal float32, as in ``kernels.quantize``


@numba.njit(**NUMBA)
def pack(kind, addresses, sizes, extreme, first, end):
    """Quantize rows [first, end).

    ``addresses``: addresses of the rows and of the packed rows. ``sizes``: elements per row, elements per group, bits.
    """
    (sources, targets), (elements, group, bits) = addresses, sizes
    part, levels = elements * bits // 8, np.float32(2**bits - 1)
    for row in range(first, end):
        values, codes, parameters = _pointer(sources[row]), _pointer(targets[row]), _pointer(targets[row] + part)
        # A loop of its own: computing parameters is a long dependent chain, and the chains of several groups overlap.
        for place in range(elements // group):
            begin = place * group
            if group == GROUP_ELEMENTS:
                low, high = _lowest(kind, (values, begin)), _highest(kind, (values, begin))
            else:
                low, high = _extremes(kind, values, begin, group)
            low, high = _float(kind, _key(low)), _float(kind, _key(high))
            scale, minimum = _parameters(low, high, extreme, levels)
            _set(parameters, 2 * place, scale)
            _set(parameters, 2 * place + 1, minimum)
        behind = 0  # part of the row that the group is in
        for place in range(elements // group):
            begin = place * group
            scale = _float(HALVES, _get(HALVES, parameters, 2 * place))
            least = _float(HALVES, _get(HALVES, parameters, 2 * place + 1))
            inverse = np.float32(1) / scale if scale != np.float32(0) else TINY
            if group == GROUP_ELEMENTS and part % group == 0:
                behind += begin == (behind + 1) * part
                at, shift = (codes, begin - behind * part), behind * bits
                _pack_group(kind, (values, begin), at, (least, inverse, levels), shift)
            else:
                _pack_odd(kind, values, codes, (begin, begin + group, part, bits), (least, inverse, levels))


@numba.njit(**PART)
def _pack_odd(kind, values, codes, sizes, numbers):
    """Write the codes of elements [at, end), which may extend from one part of the row into the next."""
    at, end, part, bits = sizes
    least, inverse, levels = numbers
    while at < end:
        behind = at // part
        until, shift, before = min(end, (behind + 1) * part), behind * bits, behind * part
        if behind:
            for i in range(at - before, until - before):
                code = _code(kind, _get(kind, values, before + i), least, inverse, levels, shift)
                _set(codes, i, _or(_get(BYTES, codes, i), code))
        else:
            for i in range(at, until):
                _set(codes, i, _code(kind, _get(kind, values, i), least, inverse, levels, 0))
        at = until


@numba.njit(**PART)
def _extremes(kind, values, begin, group):
    """Return the lowest and the highest key of a group. If the group has a NaN, one of them is its key."""
    low = high = _key(_get(kind, values, begin))
    for i in range(begin + 1, begin + group):
        key = _key(_get(kind, values, i))
        low, high = _lower(low, key), _higher(high, key)
    return low, high


@numba.njit(**PART)
def _parameters(low, high, extreme, levels):
    """Return the bits of a group's scale and minimum in float16."""
    if low != low or high != high:
        return _half(np.float32(np.nan)), _half(np.float32(np.nan))
    # Adding 0.0 turns -0.0 into 0.0, so that equal values give equal bytes.
    low = min(max(low, -extreme), extreme) + np.float32(0)
    high = min(max(high, -extreme), extreme) + np.float32(0)
    minimum = _half(low)
    # The minimum must not be above ``low``. Half of all minima round up, so a branch would often be mispredicted.
    # float16 stores sign and magnitude.
    minimum = np.int16(minimum - np.int64(_float(HALVES, minimum) > low) * ((minimum >> 15) | 1))
    return _half((high - _float(HALVES, minimum)) / levels), minimum


@numba.njit(**NUMBA)
def unpack(kind, addresses, sizes, first, end):
    """Dequantize rows [first, end). ``addresses``: addresses of the packed rows and of the rows."""
    (sources, targets), (elements, group, bits) = addresses, sizes
    part, levels = elements * bits // 8, 2**bits - 1
    for row in range(first, end):
        codes, parameters, values = _pointer(sources[row]), _pointer(sources[row] + part), _pointer(targets[row])
        behind = 0
        for place in range(elements // group):
            scale = _float(HALVES, _get(HALVES, parameters, 2 * place))
            minimum = _float(HALVES, _get(HALVES, parameters, 2 * place + 1))
            at, end_of_group = place * group, (place + 1) * group
            behind += at == (behind + 1) * part
            if group == GROUP_ELEMENTS and part % group == 0 and np.isfinite(scale + minimum):
                bytes_of = codes, at - behind * part
                _unpack_group(kind, bytes_of, (values, at), (behind * bits, levels), (scale, minimum))
                at = end_of_group
            while at < end_of_group:  # a group may extend from one part of the row into the next
                here = at // part
                until, shift, before = min(end_of_group, (here + 1) * part), here * bits, here * part
                for i in range(at - before, until - before):
                    _set(values, before + i, _value(kind, _get(BYTES, codes, i), shift, levels, scale, minimum))
                at = until


@numba.njit(**NUMBA)
def copy_places(target, source, pieces, first, end):
    """Copy rows [first, end) and return the number of rows outside of a memory, which are skipped.

    ``target`` and ``source``: (places of the rows, or none if consecutive; (address, bytes per place, offset of the
    last row)). ``pieces``: bytes of a piece, pieces per row, bytes between a row's pieces in target and source.
    Rows of neighbouring tokens of a block are copied piece by piece. Processors cannot predict arbitrary places, so
    later rows are prefetched.
    """
    num_bytes, count, target_step, source_step = pieces
    outside, row, places = 0, first, target[0]
    early = min(num_bytes, EARLY_BYTES)
    ahead = max(1, AHEAD_BYTES // num_bytes)
    later_rows, later_pieces = ahead // count, ahead % count
    address, unit, _ = target[1]
    read_later = len(places) > 0 or (end - first) * count * num_bytes >= FAR_BYTES
    past = read_later and num_bytes <= PAST_BYTES and (address | unit | target_step | num_bytes) % 64 == 0
    fetches_target, fetches_source = len(places) > 0 and not past, len(source[0]) > 0
    while row < end:
        behind = row + 1
        while (
            count > 1
            and len(places)
            and behind < min(end, row + BLOCK_TOKENS)
            and places[behind] == places[behind - 1] + 1
        ):
            behind += 1
        if behind == row + 1:
            to, from_ = _place(target, row), _place(source, row)
            is_outside = to < 0 or from_ < 0
            outside += is_outside
            # The pieces to prefetch are in a later row, and after its last piece in the row after that.
            cut = count - later_pieces
            for begin, behind_last, coming in ((0, cut, row + later_rows), (cut, count, row + later_rows + 1)):
                soon_to = soon_from = np.int64(0)
                if coming < end and begin < behind_last:
                    shift = later_pieces if begin == 0 else -cut
                    soon_to = max(0, _place(target, coming)) + shift * target_step
                    soon_from = max(0, _place(source, coming)) + shift * source_step
                for piece in range(begin, behind_last):
                    if soon_to:
                        if fetches_target:
                            _fetch(soon_to + piece * target_step, early, True)
                        if fetches_source:
                            _fetch(soon_from + piece * source_step, early, False)
                    if not is_outside:
                        _copy_piece(to + piece * target_step, from_ + piece * source_step, num_bytes, past)
        else:
            for piece in range(count):
                for token in range(row, behind):
                    to, from_ = _place(target, token), _place(source, token)
                    if to < 0 or from_ < 0:
                        outside += piece == 0
                    else:
                        _copy_piece(to + piece * target_step, from_ + piece * source_step, num_bytes, past)
        row = behind
    if past:
        _finish()
    return outside


@numba.njit(**PART)
def _copy_piece(target, source, num_bytes, past):
    if past:
        _put_lines(target, source, num_bytes)
    else:
        copy(target, source, num_bytes)


@numba.njit(**PART)
def _fetch(address, num_bytes, to_write):
    """Prefetch bytes. A processor ignores the prefetch of an invalid address."""
    for at in range(0, num_bytes, 64):
        if to_write:
            _prefetch_to_write(address + at)
        else:
            _prefetch(address + at)


@numba.njit(**PART)
def _place(rows, row):
    """Return the address of a row; -1 if it is outside of the memory."""
    places, (address, unit, last) = rows
    at = unit * (places[row] if len(places) else row)
    return address + at if 0 <= at <= last else -1
