"""Quantisation kernels for CUDA; each row is read and written once. ``kernels.quantize`` defines layout and terms.

The codes of a row of n elements are n · bits / 8 bytes. The row's elements form 8 / bits parts of equal length: byte j
holds the codes of element j of each part. A **unit** is the longest run of elements inside one group and one part: the
greatest common divisor of both lengths, or 32 if that is 64. A program processes the code bytes of ``UNITS`` units of a
row, and therefore ``UNITS`` units of each part. So it reads and writes whole runs. A unit needs the minimum and maximum
of its group. The rest of the group is read by the same or a neighbouring program, so it comes from a cache.

**Sizes** are chosen by counting: 32 runs of 32 bytes on 128 threads are eight codes per thread, and eight 16-bit
elements are 16 bytes, the widest access. If some rows do not begin at a multiple of 16 bytes (as in pools whose width
is no multiple of 256), the variant with WIDE = False accesses them in smaller pieces. Units and groups whose size is no
power of two are masked.

**Bits** equal plain torch's. Divisions round to nearest (``div_rn``), conversions to 16 bits to nearest even. Only
dequantising has a product and a sum that could be fused, and there the product of 8 and 11 bits is exact. ``tl.min``
and ``tl.max`` skip NaN, so NaN is tested separately.

**Parameters.** The kernels have 9 or 10 parameters: a kernel takes pointers, strides and constants one by one.
"""

# Triton's stubs declare dtypes as values, and jitted functions as never returning.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from flexhybrid.runtime.kernels.quantize import check_packed, packed_bytes

TINY = tl.constexpr(2.0**-126)  #: smallest normal float32, as in ``kernels.quantize``
UNITS, UNIT_ELEMENTS = 32, 32
ALIGNED_BYTES = tl.constexpr(16)
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
#: Arguments that change from call to call. Triton compiles no variants for their values.
NUMBERS = ("values_stride", "packed_stride", "part")
POINTERS = ("values", "codes", "parameters")


def quantize(rows: torch.Tensor, bits: int, out: torch.Tensor, group: int, limit: float) -> None:
    """Pack rows [..., n] to ``out`` [..., packed_bytes(n, bits, group)]; both are contiguous along the last axis."""
    check_packed("quantize", rows, out, packed_bytes(rows.shape[-1], bits, group))
    for values, packed in _evenly_spaced(rows, out):
        _launch(_quantize_kernel, values, packed, bits, group, LIMIT=limit)


def dequantize(packed: torch.Tensor, bits: int, out: torch.Tensor, group: int) -> None:
    """Unpack to ``out`` [..., n]."""
    check_packed("dequantize", out, packed, packed_bytes(out.shape[-1], bits, group))
    for values, its_packed in _evenly_spaced(out, packed):
        _launch(_dequantize_kernel, values, its_packed, bits, group)


def _evenly_spaced(values: torch.Tensor, packed: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield corresponding rows of both as [R, ·], in as few parts as strides allow (one for the executor's tensors)."""
    try:
        yield values.view(-1, values.shape[-1]), packed.view(-1, packed.shape[-1])
    except RuntimeError:
        for part, its_packed in zip(values, packed):
            yield from _evenly_spaced(part, its_packed)


def _launch(kernel, values: torch.Tensor, packed: torch.Tensor, bits: int, group: int, **constants) -> None:
    part = values.shape[1] * bits // 8
    unit = math.gcd(group, part)
    unit = UNIT_ELEMENTS if unit == 2 * UNIT_ELEMENTS else unit
    steps = (values.stride(0) * values.itemsize, packed.stride(0))
    wide = not any(n % ALIGNED_BYTES.value for n in (values.data_ptr(), packed.data_ptr(), *steps))
    programs = len(values) * triton.cdiv(part // unit, UNITS)
    with torch.cuda.device_of(values):
        kernel[(programs,)](
            values,
            codes=packed,
            parameters=packed.view(torch.float16),
            values_stride=values.stride(0),
            packed_stride=packed.stride(0),
            part=part,
            BITS=bits,
            GROUP=group,
            UNIT=unit,
            WIDE=wide,
            UNITS=UNITS,
            **constants,
            **OPTIONS,
        )


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _quantize_kernel(  # noqa: PLR0913 (a kernel takes pointers and constants)
    values, codes, parameters, values_stride: tl.int64, packed_stride: tl.int64, part: tl.int32,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, UNITS: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    values, codes, parameters, first = _place(
        values, codes, parameters, values_stride, packed_stride, part, UNIT=UNIT, WIDE=WIDE, UNITS=UNITS
    )
    packed = _quantize_units(values, parameters, first, first < part, BITS=BITS, GROUP=GROUP, UNIT=UNIT, LIMIT=LIMIT)
    for place in range(1, 8 // BITS):  # not unrolled, to save registers
        begin = first + place * part
        unit = _quantize_units(values, parameters, begin, first < part, BITS=BITS, GROUP=GROUP, UNIT=UNIT, LIMIT=LIMIT)
        packed |= unit << place * BITS
    byte, present = _elements(first, first < part, UNIT)
    tl.store(codes + byte, packed.to(tl.uint8), mask=present)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=POINTERS)
def _dequantize_kernel(  # noqa: PLR0913 (a kernel takes pointers and constants)
    values, codes, parameters, values_stride: tl.int64, packed_stride: tl.int64, part: tl.int32,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    values, codes, parameters, first = _place(
        values, codes, parameters, values_stride, packed_stride, part, UNIT=UNIT, WIDE=WIDE, UNITS=UNITS
    )
    byte, present = _elements(first, first < part, UNIT)
    packed = tl.load(codes + byte, mask=present)
    for place in tl.static_range(8 // BITS):
        begin = first + place * part
        scale, minimum = _parameters(parameters, begin, first < part, GROUP)
        restored = (packed >> place * BITS & 2**BITS - 1).to(tl.float32) * scale[:, None] + minimum[:, None]
        tl.store(values + place * part + byte, restored.to(values.dtype.element_ty), mask=present)


@triton.jit
def _place(  # noqa: PLR0913 (a kernel takes pointers and constants)
    values, codes, parameters, values_stride, packed_stride, part,
    UNIT: tl.constexpr, WIDE: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Return pointers to a program's row of values, codes and parameters, and the first elements of its runs [UNITS].

    Runs beyond ``part`` are masked.
    """
    chunks = tl.cdiv(part, UNITS * UNIT)
    row = tl.program_id(0) // chunks
    first = (tl.program_id(0) % chunks * UNITS + tl.arange(0, UNITS)) * UNIT
    values += row * values_stride
    codes += row * packed_stride
    if WIDE:
        values, codes = tl.multiple_of(values, ALIGNED_BYTES), tl.multiple_of(codes, ALIGNED_BYTES)
    parameters += row * (packed_stride // 2) + part // 2
    return values, codes, parameters, first


@triton.jit
def _elements(first, present, SIZE: tl.constexpr):
    """Return the elements [UNITS, power of two] of runs that begin at ``first`` [UNITS], and their mask."""
    place = tl.arange(0, triton.next_power_of_2(SIZE))
    return first[:, None] + place[None, :], present[:, None] & (place < SIZE)[None, :]


@triton.jit
def _quantize_units(  # noqa: PLR0913 (a kernel takes pointers and constants)
    values, parameters, first, present,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Return the codes, int32 [UNITS, power of two], of the units that begin at ``first``.

    The first unit of each group writes the group's scale and minimum.
    """
    element, here = _elements(first, present, UNIT)
    own = tl.load(values + element, mask=here, other=0.0).to(tl.float32)
    least, most, has_nan = own, own, own != own
    begin = first // GROUP * GROUP
    for turn in range(1, GROUP // UNIT):  # the group's other units
        element, here = _elements(begin + (first - begin + turn * UNIT) % GROUP, present, UNIT)
        other = tl.load(values + element, mask=here, other=0.0).to(tl.float32)
        least, most, has_nan = tl.minimum(least, other), tl.maximum(most, other), has_nan | (other != other)
    has_nan = tl.max(has_nan.to(tl.int32), axis=1) != 0
    inside = (tl.arange(0, triton.next_power_of_2(UNIT)) < UNIT)[None, :]
    # Adding 0.0 turns -0.0 into 0.0, so that equal values give equal bytes.
    lowest = tl.clamp(tl.min(tl.where(inside, least, float("inf")), axis=1), -LIMIT, LIMIT) + 0.0
    highest = tl.clamp(tl.max(tl.where(inside, most, float("-inf")), axis=1), -LIMIT, LIMIT) + 0.0
    minimum = _round_down(tl.where(has_nan, float("nan"), lowest))
    LEVELS: tl.constexpr = 2**BITS - 1
    scale = tl.div_rn(highest - minimum.to(tl.float32), LEVELS * 1.0).to(tl.float16)
    writes = present & (first % GROUP == 0)
    tl.store(parameters + first // GROUP * 2, scale, mask=writes)
    tl.store(parameters + first // GROUP * 2 + 1, minimum, mask=writes)
    inverse = tl.where(scale == 0, TINY, tl.div_rn(1.0, scale.to(tl.float32)))
    values = (own - minimum.to(tl.float32)[:, None]) * inverse[:, None]
    # A sum of 2**23 has no fraction: adding rounds to the nearest even, and the low bits are the integer.
    return (tl.clamp(values, 0.0, LEVELS * 1.0) + 8388608.0).to(tl.int32, bitcast=True) & LEVELS


@triton.jit
def _round_down(lowest):
    """Round to the largest float16 that is not above."""
    minimum = lowest.to(tl.float16)
    bits = minimum.to(tl.int16, bitcast=True)
    # float16 stores sign and magnitude. One step down adds 1 to the bits of a negative number, else subtracts 1.
    below = tl.where(bits < 0, bits + 1, bits - 1)
    return tl.where(minimum.to(tl.float32) > lowest, below, bits).to(tl.float16, bitcast=True)


@triton.jit
def _parameters(parameters, first, present, GROUP: tl.constexpr):
    """Return the scales and minima, float32 [UNITS], of the groups of these elements."""
    pair = parameters + first // GROUP * 2
    return tl.load(pair, mask=present).to(tl.float32), tl.load(pair + 1, mask=present).to(tl.float32)
