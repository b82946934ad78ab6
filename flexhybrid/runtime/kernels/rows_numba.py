"""Kernels for rows in a CPU's memory, compiled by numba: packed, unpacked, gathered and scattered, each read once and
written once. What packed rows are, and every rounding, is said in ``kernels.quantize``; results are equal bit for bit.

A group's elements are read twice, the second time from the processor's first cache: for the minimum and maximum, by
which floats are compared as integers (``_key``), and for the codes. Loops are plain; LLVM makes vectors of them, for
which every load and store is an offset from a pointer that stays the same in the loop. numba keeps the compiled
kernels beside this file, or in the user's cache folder; its cache looks at the file of a kernel alone, so all that is
compiled together stands here. Importing this module imports numba. Packing needs a processor that converts float16
(``compiled.converts_float16``).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import extending
from numba.core import cgutils, types

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.policy import GROUP_ELEMENTS
from flexhybrid.runtime.kernels.compiled import Share, spread

#: By dtype: a value of the type by which numba chooses how the kernels load and store an element.
KINDS = {torch.float32: np.uint32(0), torch.bfloat16: np.uint16(0), torch.float16: np.int16(0)}

#: No "fastmath": results must equal plain torch's, bit for bit.
NUMBA: dict[str, Any] = {"nogil": True, "error_model": "numpy", "cache": True}
PART: dict[str, Any] = {
    **NUMBA,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}  #: kernels call it, Python cannot

intrinsic: Any = extending.intrinsic  #: a kernel calls what it decorates without the context


Rows = tuple[torch.Tensor, np.ndarray]  #: a memory that begins with a tensor, and of each row its first byte, int64


class Pieces(NamedTuple):
    """How a row lies in two memories: ``count`` pieces of ``num_bytes``, so many bytes from one to the next."""

    num_bytes: int
    count: int = 1
    target_step: int = 0
    source_step: int = 0


def quantize(rows: torch.Tensor, bits: int, out: torch.Tensor, group: int, limit: float, share: Share = map) -> None:
    """Pack rows [..., n] to ``out`` [..., packed_bytes(n, bits, group)]; both are contiguous along the last axis."""
    addresses, sizes = (_addresses(rows), _addresses(out)), (rows.shape[-1], group, bits)
    kind, extreme = KINDS[rows.dtype], np.float32(limit)
    spread(
        lambda first, end: _pack(kind, addresses, sizes, extreme, first, end),
        len(addresses[0]),
        rows.numel() * rows.itemsize + out.numel(),
        share,
    )


def dequantize(packed: torch.Tensor, bits: int, out: torch.Tensor, group: int, share: Share = map) -> None:
    """Unpack to ``out`` [..., n]."""
    addresses, sizes = (_addresses(packed), _addresses(out)), (out.shape[-1], group, bits)
    kind = KINDS[out.dtype]
    spread(
        lambda first, end: _unpack(kind, addresses, sizes, first, end),
        len(addresses[0]),
        packed.numel() + out.numel() * out.itemsize,
        share,
    )


def copy_rows(target: Rows, source: Rows, pieces: Pieces, share: Share = map) -> None:
    """Copy rows between two memories. Raises IndexError where a row lies outside of its memory, before anything is
    copied."""
    if not source[1].size:
        return
    begins = []
    for (memory, starts), step in ((target, pieces.target_step), (source, pieces.source_step)):
        last = sum((size - 1) * stride for size, stride in zip(memory.shape, memory.stride(), strict=True))
        size = (last + 1) * memory.itemsize
        if starts.min() < 0 or starts.max() + (pieces.count - 1) * step + pieces.num_bytes > size:
            raise IndexError(f"a row lies outside of the {size} bytes of its memory")
        begins.append(starts.ravel() + memory.data_ptr())
    spread(
        lambda first, end: _copy_rows(*begins, tuple(pieces), first, end),
        len(begins[0]),
        2 * len(begins[0]) * pieces.count * pieces.num_bytes,
        share,
    )


@cache
def compile_for(dtype: torch.dtype) -> None:
    """Compile the kernels for a dtype, or load what was compiled before: some 2 seconds, or a tenth of one."""
    row = torch.zeros(1, GROUP_ELEMENTS, dtype=dtype)
    packed = torch.zeros(1, GROUP_ELEMENTS + 4, dtype=torch.uint8)
    quantize(row, 8, packed, GROUP_ELEMENTS, 1.0)
    dequantize(packed, 8, row, GROUP_ELEMENTS)
    copy_rows((packed, np.zeros(1, np.int64)), (row, np.zeros(1, np.int64)), Pieces(1))


def _addresses(tensor: torch.Tensor) -> np.ndarray:
    """Return the addresses of a tensor's rows, [rows] int64."""
    at = np.array([tensor.data_ptr()])
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        at = (at[:, None] + np.arange(size) * (stride * tensor.itemsize)).ravel()
    return at


# ---- instructions

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT, HALF = ir.FloatType(), ir.HalfType()


def _typed(result, arguments, emit):
    """Return what numba asks of an intrinsic: its signature, and what writes its code: emit(builder, *values)."""

    def generate(context, builder, _signature, values):
        value = emit(builder, *values)
        return context.get_dummy_value() if result == types.void else value

    return result(*arguments), generate


@intrinsic
def _pointer(_context, address):
    return _typed(types.voidptr, (address,), lambda builder, at: builder.inttoptr(at, ir.PointerType(I8)))


def _at(builder, pointer, index, bits):
    """Return a pointer to an element of so many bits."""
    whole = ir.IntType(bits)
    return builder.gep(builder.bitcast(pointer, ir.PointerType(whole)), [index], source_etype=whole)


@intrinsic
def _get(_context, kind, pointer, index):
    """Return the bits of an element of this kind."""

    def emit(builder, _, pointer, index):
        value = builder.load(_at(builder, pointer, index, kind.bitwidth), typ=ir.IntType(kind.bitwidth))
        value.align = 1
        return value

    return _typed(kind, (kind, pointer, index), emit)


@intrinsic
def _set(_context, pointer, index, bits):
    def emit(builder, pointer, index, value):
        builder.store(value, _at(builder, pointer, index, value.type.width)).align = 1

    return _typed(types.void, (pointer, index, bits), emit)


@intrinsic
def _key(_context, bits):
    """Return the bits of a float as a signed integer that is in the order of floats; and back. NaN are beyond the
    infinities."""
    result = types.int32 if bits.bitwidth == 32 else types.int16

    def emit(builder, value):
        width = value.type.width
        sign = builder.ashr(value, value.type(width - 1))
        return builder.xor(value, builder.lshr(sign, value.type(1)))

    return _typed(result, (bits,), emit)


def _chosen(relation):
    """Return an intrinsic that takes one of two integers."""

    @intrinsic
    def of_two(_context, one, other):
        def emit(builder, one, other):
            return builder.select(builder.icmp_signed(relation, one, other), one, other)

        return _typed(one, (one, other), emit)

    return of_two


_lower, _higher = _chosen("<"), _chosen(">")


def _wide(builder, kind, bits):
    """Return the float32 of an element's bits."""
    if kind == types.uint32:
        return builder.bitcast(bits, FLOAT)
    if kind == types.int16:
        return builder.fpext(builder.bitcast(bits, HALF), FLOAT)
    return builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), FLOAT)


def _narrow(builder, kind, value):
    """Return the bits of a float32 in a kind, rounded to nearest even."""
    if kind == types.uint32:
        return builder.bitcast(value, I32)
    if kind == types.int16:
        return builder.bitcast(builder.fptrunc(value, HALF), I16)
    bits = builder.bitcast(value, I32)
    odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, I32(0x7FFF))), I32(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, I32(0x7FC0), rounded), I16)


@intrinsic
def _float(_context, kind, bits):
    """Return the float32 of an element, by its bits or its key's."""
    return _typed(types.float32, (kind, bits), lambda builder, _, value: _wide(builder, kind, value))


@intrinsic
def _half(_context, value):
    """Return the bits of the nearest float16."""
    return _typed(types.int16, (value,), lambda builder, value: _narrow(builder, types.int16, value))


@intrinsic
def _code(_context, kind, bits, minimum, inverse, levels, shift):
    """Return an element's code, shifted to its place in a byte; 0 for NaN."""

    def emit(builder, _, bits, minimum, inverse, levels, shift):
        value = builder.fmul(builder.fsub(_wide(builder, kind, bits), minimum), inverse)
        zero = ir.Constant(FLOAT, 0.0)
        value = builder.select(builder.fcmp_ordered(">", value, zero), value, zero)
        value = builder.select(builder.fcmp_ordered("<", value, levels), value, levels)
        # A sum of 2**23 has no fraction: adding rounds to the nearest even, and the low bits are the integer.
        code = builder.bitcast(builder.fadd(value, ir.Constant(FLOAT, 8388608.0)), I32)
        return builder.trunc(builder.shl(code, builder.trunc(shift, I32)), I8)

    return _typed(types.uint8, (kind, bits, minimum, inverse, levels, shift), emit)


@intrinsic
def _value(_context, kind, byte, shift, levels, scale, minimum):
    """Return the bits of an element whose code has a place in a byte."""

    def emit(builder, _, byte, shift, levels, scale, minimum):
        code = builder.lshr(builder.zext(byte, I32), builder.trunc(shift, I32))
        code = builder.sitofp(builder.and_(code, builder.trunc(levels, I32)), FLOAT)
        return _narrow(builder, kind, builder.fadd(builder.fmul(code, scale), minimum))

    return _typed(kind, (kind, byte, shift, levels, scale, minimum), emit)


@intrinsic
def _or(_context, one, other):
    return _typed(one, (one, other), lambda builder, one, other: builder.or_(one, other))


@intrinsic
def _copy(_context, target, source, num_bytes):
    def emit(builder, target, source, num_bytes):
        byte = ir.PointerType(I8)
        cgutils.raw_memcpy(builder, builder.inttoptr(target, byte), builder.inttoptr(source, byte), num_bytes, 1)

    return _typed(types.void, (target, source, num_bytes), emit)


# ---- kernels

HALVES, BYTES = np.int16(0), np.uint8(0)
TINY = np.float32(2.0**-126)  #: float32's smallest normal number, as in plain torch


@numba.njit(**NUMBA)
def _pack(kind, addresses, sizes, extreme, first, end):
    """Pack rows [first, end). ``addresses``: of rows and of packed rows; ``sizes``: elements of a row and of a group,
    bits."""
    (sources, targets), (elements, group, bits) = addresses, sizes
    part, levels = elements * bits // 8, np.float32(2**bits - 1)
    for row in range(first, end):
        values, codes, parameters = _pointer(sources[row]), _pointer(targets[row]), _pointer(targets[row] + part)
        for place in range(elements // group):
            begin = place * group
            low, high = _extremes(kind, values, begin, group)
            scale, minimum = _parameters(low, high, extreme, levels)
            _set(parameters, 2 * place, scale)
            _set(parameters, 2 * place + 1, minimum)
            least, inverse = _float(HALVES, minimum), TINY
            if _float(HALVES, scale) != np.float32(0):
                inverse = np.float32(1) / _float(HALVES, scale)
            at = begin
            while at < begin + group:  # a group may reach from one part of the row into the next
                behind = at // part
                until, shift, before = min(begin + group, (behind + 1) * part), behind * bits, behind * part
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
    """Return the lowest and the highest element of a group in float32; NaN in one of them where there is one."""
    low = high = _key(_get(kind, values, begin))
    if group == GROUP_ELEMENTS:  # a length that LLVM knows
        for i in range(GROUP_ELEMENTS):
            key = _key(_get(kind, values, begin + i))
            low, high = _lower(low, key), _higher(high, key)
    else:
        for i in range(begin, begin + group):
            key = _key(_get(kind, values, i))
            low, high = _lower(low, key), _higher(high, key)
    return _float(kind, _key(low)), _float(kind, _key(high))


@numba.njit(**PART)
def _parameters(low, high, extreme, levels):
    """Return the bits of a group's scale and minimum."""
    if low != low or high != high:
        return _half(np.float32(np.nan)), _half(np.float32(np.nan))
    # Adding 0.0 makes 0.0 of -0.0: equal values give equal bytes.
    low = min(max(low, -extreme), extreme) + np.float32(0)
    high = min(max(high, -extreme), extreme) + np.float32(0)
    minimum = _half(low)
    if _float(HALVES, minimum) > low:  # float16 is sign and magnitude
        minimum = np.int16(minimum + 1) if minimum < 0 else np.int16(minimum - 1)
    return _half((high - _float(HALVES, minimum)) / levels), minimum


@numba.njit(**NUMBA)
def _unpack(kind, addresses, sizes, first, end):
    """Unpack rows [first, end). ``addresses``: of packed rows and of rows."""
    (sources, targets), (elements, group, bits) = addresses, sizes
    part, levels = elements * bits // 8, 2**bits - 1
    for row in range(first, end):
        codes, parameters, values = _pointer(sources[row]), _pointer(sources[row] + part), _pointer(targets[row])
        for place in range(elements // group):
            scale = _float(HALVES, _get(HALVES, parameters, 2 * place))
            minimum = _float(HALVES, _get(HALVES, parameters, 2 * place + 1))
            at, end_of_group = place * group, (place + 1) * group
            while at < end_of_group:
                behind = at // part
                until, shift, before = min(end_of_group, (behind + 1) * part), behind * bits, behind * part
                for i in range(at - before, until - before):
                    _set(values, before + i, _value(kind, _get(BYTES, codes, i), shift, levels, scale, minimum))
                at = until


@numba.njit(**NUMBA)
def _copy_rows(targets, sources, pieces, first, end):
    """Copy rows [first, end): of the tokens of a block first one piece, then the next, which lies elsewhere."""
    num_bytes, count, target_step, source_step = pieces
    for begin in range(first, end, BLOCK_TOKENS):
        behind = min(end, begin + BLOCK_TOKENS)
        for piece in range(count):
            for row in range(begin, behind):
                _copy(targets[row] + piece * target_step, sources[row] + piece * source_step, num_bytes)
