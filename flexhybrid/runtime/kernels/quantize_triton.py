"""The quantiser's kernels for CUDA: rows are read once and written once (layout and terms: ``kernels.quantize``).

A group of 64 elements is two **halves** of 32; half h of a row is its elements 32·h … 32·h + 31. A program works on
``HALVES`` runs of 32 code bytes of one row. With G groups, run h holds

    8 bits: half h        (2·G runs)
    4 bits: half h below and half h + G above   (G runs; for odd G the upper one begins inside a group)

so that a program reads full runs on one side and writes full runs on the other, whatever G. A half needs the minimum
and maximum of its group, and so the elements of its neighbour, half h ^ 1. The same program reads them, except at the
ends, so that memory is read once and a cache again.

**Sizes**, by counting: 32 runs of 32 bytes among 128 threads are eight codes a thread, and eight 16-bit elements are
the 16 bytes of the widest access. Rows that do not all begin at multiples of 16 bytes (those of a width that is no
multiple of 256 lie so in a pool) are read and written piecemeal, by the variant with WIDE = False.

**Bits.** Equal to those of plain torch: divisions round to nearest (``div_rn``); no sum could be contracted with a
product but in dequantising, and there the product of 8 and 11 bits is exact; ``tl.min`` and ``tl.max`` skip NaN, which
is tested for by itself; conversions to 16 bits round to nearest even.

**Parameters.** The kernels have 9 or 10 of them: a kernel takes pointers, strides and constants one by one.
"""

# Triton's stubs have dtypes as values, and a jitted function as one that never returns.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

HALF = tl.constexpr(32)
TINY = tl.constexpr(2.0**-126)  #: float32's smallest normal number, as in plain torch
HALVES = 32
ALIGNED_BYTES = tl.constexpr(16)
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
#: Arguments that change from call to call: their values do not make Triton compile variants.
NUMBERS = ("values_stride", "packed_stride", "groups")
POINTERS = ("values", "codes", "parameters")


def quantize(rows: torch.Tensor, bits: int, out: torch.Tensor, limit: float) -> None:
    """Pack rows [..., n] to ``out`` [..., packed_bytes(n, bits)]; both are contiguous along the last axis."""
    for values, packed in _evenly_spaced(rows, out):
        _launch(_quantize_kernel, values, packed, bits, LIMIT=limit)


def dequantize(packed: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Unpack to ``out`` [..., n]."""
    for values, its_packed in _evenly_spaced(out, packed):
        _launch(_dequantize_kernel, values, its_packed, bits)


def _evenly_spaced(values: torch.Tensor, packed: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield equal rows of both as [R, ·], in as few parts as strides allow: one for the tensors of the executor."""
    try:
        yield values.view(-1, values.shape[-1]), packed.view(-1, packed.shape[-1])
    except RuntimeError:
        for part, its_packed in zip(values, packed):
            yield from _evenly_spaced(part, its_packed)


def _launch(kernel, values: torch.Tensor, packed: torch.Tensor, bits: int, **constants) -> None:
    groups = values.shape[1] // (2 * HALF.value)
    steps = (values.stride(0) * values.itemsize, packed.stride(0))
    wide = not any(n % ALIGNED_BYTES.value for n in (values.data_ptr(), packed.data_ptr(), *steps))
    programs = len(values) * triton.cdiv(groups * bits // 4, HALVES)
    with torch.cuda.device_of(values):
        kernel[(programs,)](
            values,
            codes=packed,
            parameters=packed.view(torch.float16),
            values_stride=values.stride(0),
            packed_stride=packed.stride(0),
            groups=groups,
            BITS=bits,
            WIDE=wide,
            HALVES=HALVES,
            **constants,
            **OPTIONS,
        )


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _quantize_kernel(  # noqa: PLR0913 (a kernel takes pointers and constants)
    values, codes, parameters, values_stride: tl.int64, packed_stride: tl.int64, groups: tl.int32,
    BITS: tl.constexpr, WIDE: tl.constexpr, HALVES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    values, codes, parameters, half, present = _place(
        values, codes, parameters, values_stride, packed_stride, groups, BITS=BITS, WIDE=WIDE, HALVES=HALVES
    )
    packed = _quantize_halves(values, parameters, half, present, 2**BITS - 1, LIMIT)
    if BITS == 4:
        packed |= _quantize_halves(values, parameters, half + groups, present, 2**BITS - 1, LIMIT) << 4
    tl.store(codes + _elements(half), packed.to(tl.uint8), mask=present[:, None])


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _dequantize_kernel(  # noqa: PLR0913 (a kernel takes pointers and constants)
    values, codes, parameters, values_stride: tl.int64, packed_stride: tl.int64, groups: tl.int32,
    BITS: tl.constexpr, WIDE: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    values, codes, parameters, half, present = _place(
        values, codes, parameters, values_stride, packed_stride, groups, BITS=BITS, WIDE=WIDE, HALVES=HALVES
    )
    packed = tl.load(codes + _elements(half), mask=present[:, None])
    if BITS == 8:
        _dequantize_halves(packed, values, parameters, half, present)
    else:
        _dequantize_halves(packed & 15, values, parameters, half, present)
        _dequantize_halves(packed >> 4, values, parameters, half + groups, present)


@triton.jit
def _place(  # noqa: PLR0913 (a kernel takes pointers and constants)
    values, codes, parameters, values_stride, packed_stride, groups,
    BITS: tl.constexpr, WIDE: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Return a program's row of values, codes and parameters, its runs of codes [HALVES], and which are present."""
    runs = groups * (BITS // 4)
    chunks = tl.cdiv(runs, HALVES)
    row = tl.program_id(0) // chunks
    half = tl.program_id(0) % chunks * HALVES + tl.arange(0, HALVES)
    values += row * values_stride
    codes += row * packed_stride
    if WIDE:
        values, codes = tl.multiple_of(values, ALIGNED_BYTES), tl.multiple_of(codes, ALIGNED_BYTES)
    parameters += row * (packed_stride // 2) + runs * (HALF // 2)
    return values, codes, parameters, half, half < runs


@triton.jit
def _elements(half):
    """[HALVES, 32]"""
    return half[:, None] * HALF + tl.arange(0, HALF)[None, :]


@triton.jit
def _quantize_halves(values, parameters, half, present, LEVELS: tl.constexpr, LIMIT: tl.constexpr):
    """Return the codes [HALVES, 32] int32 of the halves; the first half of a group writes its scale and minimum."""
    own = tl.load(values + _elements(half), mask=present[:, None], other=0.0).to(tl.float32)
    other = tl.load(values + _elements(half ^ 1), mask=present[:, None], other=0.0).to(tl.float32)
    has_nan = tl.max(((own != own) | (other != other)).to(tl.int32), axis=1) != 0
    # Adding 0.0 makes 0.0 of -0.0: equal values give equal bytes.
    lowest = tl.clamp(tl.min(tl.minimum(own, other), axis=1), -LIMIT, LIMIT) + 0.0
    highest = tl.clamp(tl.max(tl.maximum(own, other), axis=1), -LIMIT, LIMIT) + 0.0
    minimum = _round_down(tl.where(has_nan, float("nan"), lowest))
    scale = tl.div_rn(highest - minimum.to(tl.float32), LEVELS * 1.0).to(tl.float16)
    writes = present & (half % 2 == 0)
    tl.store(parameters + half, scale, mask=writes)
    tl.store(parameters + half + 1, minimum, mask=writes)
    inverse = tl.where(scale == 0, TINY, tl.div_rn(1.0, scale.to(tl.float32)))
    values = (own - minimum.to(tl.float32)[:, None]) * inverse[:, None]
    # A sum of 2**23 has no fraction: adding rounds to the nearest even, and the low bits are the integer.
    return (tl.clamp(values, 0.0, LEVELS * 1.0) + 8388608.0).to(tl.int32, bitcast=True) & LEVELS


@triton.jit
def _round_down(lowest):
    """Return the largest float16 that is not above."""
    minimum = lowest.to(tl.float16)
    bits = minimum.to(tl.int16, bitcast=True)
    # float16 is sign and magnitude: one step down adds one to the bits of a negative number, else takes one off.
    below = tl.where(bits < 0, bits + 1, bits - 1)
    return tl.where(minimum.to(tl.float32) > lowest, below, bits).to(tl.float16, bitcast=True)


@triton.jit
def _dequantize_halves(packed, values, parameters, half, present):
    """Write the values of the halves with these codes [HALVES, 32]."""
    pair = parameters + half // 2 * 2
    scale = tl.load(pair, mask=present).to(tl.float32)
    minimum = tl.load(pair + 1, mask=present).to(tl.float32)
    restored = packed.to(tl.float32) * scale[:, None] + minimum[:, None]
    tl.store(values + _elements(half), restored.to(values.dtype.element_ty), mask=present[:, None])
