"""Group-wise asymmetric quantisation of rows to 8, 4, 2 or 1 bits (FlexGen, section 4.3; ``Bits`` of ``core.policy``).

``group`` consecutive elements of a row share a scale and a minimum, both float16. An element is
``minimum + scale * code`` with a code of 0 … 2**bits - 1. A quantized ("packed") row of n elements, with G = n / group
groups, is one run of bytes, so that a block of rows is moved in one copy:

    n * bits / 8 bytes of codes | G pairs (scale, minimum)

Byte j holds the codes of elements j, j + n * bits / 8, j + 2 * n * bits / 8, …, the first in its lowest bits.

**Error.** The minimum is rounded down and the scale to the nearest float16. Codes are computed from these rounded
values, so that every code is in range. With s the stored scale, x within ±``limit``, u the unit roundoff of the
result's dtype (2**-24 float32, 2**-8 bfloat16, 2**-11 float16) and x' the dequantised value,

    |x' - x| <= max(s * (1/2 + 2**-14), (2**bits - 1) * 2**-25) + u' * |x'|,   u' = u + 2**-24

The term 2**-14 is for float32 arithmetic. The second entry matters only if s is subnormal in float16 (< 2**-16).
float16 adds 2**-25 to subnormal results. s is at most
((max - min) + |min| * 2**-10 + 2**-24) / (2**bits - 1) * (1 + 2**-11) + 2**-25.

**Edges.** A constant group is restored exactly if float16 has its value. Values beyond ±``limit`` (also infinite ones)
saturate near it. With this limit, dequantising to float16 cannot overflow. A NaN makes its whole group NaN.

**Repetition.** In float32, quantising a dequantised row gives equal bytes for each group that has elements of both
signs (or a zero) and a scale >= 2**-16. Any other group stays within the bound above. A 16-bit dtype rounds in between.

**Kernels.** A CPU uses kernels compiled by numba (``kernels.rows_numba``). CUDA uses Triton's kernels
(``kernels.quantize_triton``), which are chosen by counting bytes and not yet measured: to dequantise 4 bits to
bfloat16, they move 2.6 bytes per element, plain torch 29. Kernels give the same bytes as plain torch, which is used if
a compiler is missing or if a trial at first use gives other bits. Plain torch makes passes in float32 over chunks of
rows that fit a CPU's caches. Slower alternatives, measured: scaling in bfloat16 (1.2 to 2 times as long), addcmul (1.2
to 2.5 times: no vector path for two broadcast operands), aminmax (6 times amin and amax), batch_norm as a fused scale
and add, embedding_bag_4bit_unpack (FBGEMM) and torch.compile (3 times or more each).
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import torch

from flexhybrid.core.errors import InputError
from flexhybrid.core.memory import PACKING_ELEMENTS
from flexhybrid.core.policy import BITS, GROUP_ELEMENTS
from flexhybrid.runtime.kernels import compiled
from flexhybrid.runtime.kernels.compiled import Share, demand

#: Largest magnitude before saturation. LIMIT * (1 + 2**-10) <= 65504, the largest float16, so a scale may round up.
LIMIT = 65440.0


def limit(bits: int) -> float:
    """Return the largest magnitude before saturation: LIMIT, but half of it for 1 bit, whose scale is max - min."""
    return LIMIT if bits > 1 else LIMIT / 2


WORK_ELEMENTS = PACKING_ELEMENTS

#: Type of device -> module of its kernels
KERNELS = {"cuda": "quantize_triton", "cpu": "rows_numba"}


@cache
def row_unit(bits: int | str, group: int = GROUP_ELEMENTS) -> int:
    """Return the number that must divide a row's length: whole groups, and codes in whole pairs of bytes.

    Pairs, because float16 numbers follow the codes. Raise InputError for unknown bits.
    """
    if not isinstance(bits, int) or bits not in BITS:
        known = ", ".join(map(str, BITS[1:]))
        raise InputError(f"quantisation to {bits!r} bits is not known; it must be one of {known}")
    return math.lcm(group, 16 // bits)


@cache
def packed_bytes(elements: int, bits: int | str, group: int = GROUP_ELEMENTS) -> int:
    """Return the bytes of a packed row. Raise InputError if ``row_unit`` does not divide its length."""
    unit = row_unit(bits, group)
    if elements < 1 or elements % unit:
        raise InputError(
            f"a row of {elements} elements cannot be quantised to {bits} bits in groups of {group}: its length must be "
            f'a multiple of {unit}; use bits "native" for this model'
        )
    return elements * int(bits) // 8 + 4 * (elements // group)


def quantize(
    rows: torch.Tensor, bits: int, out: torch.Tensor | None = None, group: int = GROUP_ELEMENTS, share: Share = map
) -> torch.Tensor:
    """Pack rows [..., n] of float32, bfloat16 or float16 to uint8 [..., packed_bytes(n, bits, group)].

    ``out`` takes the result if given. Leading axes may be strided; packed rows are contiguous and begin at even
    addresses. ``share`` divides rows among threads, for compiled kernels on a CPU.
    """
    shape = (*rows.shape[:-1], packed_bytes(rows.shape[-1], bits, group))
    out = torch.empty(shape, dtype=torch.uint8, device=rows.device) if out is None else _checked(out, shape, "out")
    if kernels := _kernels_for(rows, bits, group):
        kernels.quantize(rows, bits, out, group, limit(bits), *_shared(rows, share))
    else:
        _quantize(rows, bits, out, group)
    return out


def dequantize(
    packed: torch.Tensor,
    bits: int,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    group: int = GROUP_ELEMENTS,
    share: Share = map,
) -> torch.Tensor:
    """Unpack uint8 [..., packed_bytes(n, bits, group)] to [..., n] of ``dtype``, into ``out`` if given.

    Strides and ``share`` as for ``quantize``.
    """
    elements = _elements(packed.shape[-1], bits, group)
    shape = (*packed.shape[:-1], elements)
    _checked(packed, packed.shape, "packed")
    out = torch.empty(shape, dtype=dtype, device=packed.device) if out is None else _checked(out, shape, "out", dtype)
    if kernels := _kernels_for(out, bits, group):
        kernels.dequantize(packed, bits, out, group, *_shared(out, share))
    else:
        _dequantize(packed, bits, out, group)
    return out


def check_packed(kernel: str, rows: torch.Tensor, packed: torch.Tensor, size: int) -> None:
    """Raise ValueError unless a kernel can convert between these rows and these packed rows of ``size`` bytes."""
    typed, fits = packed.dtype == torch.uint8, packed.shape == (*rows.shape[:-1], size)
    whole = rows.stride(-1) == 1 and rows.dtype in (torch.float32, torch.bfloat16, torch.float16)
    demand(kernel, rows=whole, packed=typed and fits and packed.stride(-1) == 1 and packed.device == rows.device)


def _quantize(rows: torch.Tensor, bits: int, out: torch.Tensor, group: int = GROUP_ELEMENTS) -> None:
    """Quantize in plain torch."""
    levels, extreme, wide = 2**bits - 1, limit(bits), _workspace(rows, torch.float32)
    code_space = _workspace(rows, torch.uint8) if bits < 8 else None
    for chunk, packed in _chunks(rows, out):
        codes, parameters = _parts(packed, chunk.shape[-1], bits)
        work = _like(chunk, wide)
        groups = _groups(work.copy_(chunk), group)
        # Adding 0.0 turns -0.0 into 0.0, so that equal values give equal bytes.
        lowest = groups.amin(-1, keepdim=True).clamp_(-extreme, extreme).add_(0.0)
        highest = groups.amax(-1, keepdim=True).clamp_(-extreme, extreme).add_(0.0)
        minimum = _round_down(lowest)
        # Divide by a tensor: by a number, CUDA would multiply by its reciprocal, and give other bytes than a CPU.
        scale = ((highest - minimum) / lowest.new_full((), levels)).half()
        parameters[..., :1], parameters[..., 1:] = scale, minimum
        # A group of equal values has scale 0. Any code will do, except NaN (infinity · 0).
        inverse = torch.where(scale == 0, torch.finfo(torch.float32).tiny, 1 / scale.float())
        groups.sub_(minimum).mul_(inverse)
        values = work.clamp_(0, levels).round_()
        # Through int8: torch converts float32 to uint8 one element at a time, which takes twelve times as long.
        if code_space is None:
            codes.view(torch.int8).copy_(values.sub_(128))
            codes.bitwise_xor_(128)
        else:
            unpacked = _like(chunk, code_space)
            unpacked.view(torch.int8).copy_(values)
            lowest_bits, *others, highest_bits = unpacked.tensor_split(8 // bits, dim=-1)
            torch.bitwise_left_shift(highest_bits, bits, out=codes)
            # Mask, because processors convert NaN differently. The highest codes' excess bits are shifted out.
            for part in reversed(others):
                codes.bitwise_or_(part.bitwise_and_(levels)).bitwise_left_shift_(bits)
            codes.bitwise_or_(lowest_bits.bitwise_and_(levels))


def _dequantize(packed: torch.Tensor, bits: int, out: torch.Tensor, group: int = GROUP_ELEMENTS) -> None:
    """Dequantize in plain torch."""
    code_space, levels = _workspace(out, torch.uint8) if bits < 8 else None, 2**bits - 1
    wide = _workspace(out, torch.float32) if out.dtype != torch.float32 else None
    for chunk, source in _chunks(out, packed):
        codes, parameters = _parts(source, chunk.shape[-1], bits)
        parameters = parameters.float()
        if code_space is not None:
            unpacked = _like(chunk, code_space)
            lowest_bits, *others, highest_bits = unpacked.tensor_split(8 // bits, dim=-1)
            torch.bitwise_and(codes, levels, out=lowest_bits)
            for place, part in enumerate(others, 1):
                torch.bitwise_right_shift(codes, place * bits, out=part).bitwise_and_(levels)
            torch.bitwise_right_shift(codes, 8 - bits, out=highest_bits)
            codes = unpacked
        values = chunk if wide is None else _like(chunk, wide)
        _groups(values.copy_(codes), group).mul_(parameters[..., :1]).add_(parameters[..., 1:])
        if values is not chunk:
            chunk.copy_(values)


def _shared(values: torch.Tensor, share: Share) -> tuple[Share, ...]:
    """Return the additional arguments for the kernels of a CPU."""
    return (share,) if KERNELS[values.device.type] == "rows_numba" else ()


def _kernels_for(values: torch.Tensor, bits: int, group: int) -> Any:
    """Return the module with kernels for these values; None for plain torch, which also takes strided rows."""
    name = KERNELS.get(values.device.type)
    if name is None or not values.numel() or values.stride(-1) != 1:
        return None
    if name == "rows_numba" and not (compiled.has_numba() and compiled.converts_float16()):
        return None
    return _proven_kernels(name, values.device, values.dtype, bits, group)


@lru_cache
def _proven_kernels(name: str, device: torch.device, dtype: torch.dtype, bits: int, group: int) -> Any:
    """Return the kernels if their bits equal plain torch's on this device; otherwise warn and return None.

    Blocks until the device has finished, and until the kernels are compiled if they are not in the cache.
    """
    try:
        kernels = importlib.import_module(f"flexhybrid.runtime.kernels.{name}")
        _prove(kernels, _trial_rows(dtype, bits, group).to(device), bits, group)
    except Exception as error:  # no compiler, no driver, an unknown processor, or wrong bits
        reason, maker = (str(error).splitlines() or [type(error).__name__])[0], name.split("_")[1].title()
        warnings.warn(f"packing and unpacking in plain torch, slower than {maker}'s kernels: {reason}", stacklevel=2)
        return None
    return kernels


def _prove(kernels: Any, rows: torch.Tensor, bits: int, group: int) -> None:
    """Pack and unpack trial rows; raise ArithmeticError if a bit differs from plain torch's."""
    size = packed_bytes(rows.shape[1], bits, group)
    packed, restored = rows.new_empty(len(rows), size, dtype=torch.uint8), torch.empty_like(rows)
    _quantize(rows, bits, packed, group)
    _dequantize(packed, bits, restored, group)
    for gap in (-size % 16, 2):  # rows at multiples of 16 bytes, and others, use different variants of the kernels
        slots, ours = packed.new_zeros(len(rows), size + gap)[:, :size], torch.zeros_like(rows)
        kernels.quantize(rows, bits, slots, group, limit(bits))
        kernels.dequantize(slots, bits, ours, group)
        # The last row has a NaN, whose bytes differ between processors.
        same_bits = torch.equal(slots[:-1], packed[:-1]) and torch.equal(
            ours[:-1].view(torch.uint8), restored[:-1].view(torch.uint8)
        )
        if not same_bits or not torch.equal(ours.isnan(), restored.isnan()):
            raise ArithmeticError("on trial rows its results differ from plain torch's")


def _trial_rows(dtype: torch.dtype, bits: int, group: int) -> torch.Tensor:
    """Return rows [28, 33 groups] of all magnitudes for a trial, with edge values, and a NaN in the last row.

    Rows have 48 groups if the codes of 33 do not fill pairs of bytes. 33 groups do not fit one program of a kernel, and
    are no multiple of the codes in a byte. Edge values are next to other values, and alone in groups.
    """
    generator, columns = torch.Generator().manual_seed(0), 33 * group if 33 * group * bits % 16 == 0 else 48 * group
    rows = torch.randn(28, columns, generator=generator, dtype=torch.float32)
    rows *= 2.0 ** torch.arange(-32, 24, 2, dtype=torch.float32).unsqueeze(1)
    edges = rows.new_tensor([0.0, -0.0, 1e-40, -1e-40, 1 / 3, LIMIT, -1e5, 3e38, torch.inf, -torch.inf])
    beside_others = rows[:, :: group + 5][:, : len(edges)]
    beside_others.copy_(edges[: beside_others.shape[1]])
    _groups(rows[20], group)[: len(edges)] = edges.unsqueeze(1)
    rows[-1, group + group // 2] = torch.nan
    return rows.to(dtype)


def _round_down(lowest: torch.Tensor) -> torch.Tensor:
    """Round to the largest float16 that is not above."""
    minimum = lowest.half()
    bits = minimum.view(torch.int16)
    # float16 stores sign and magnitude. One step down adds 1 to the bits of a negative number, else subtracts 1.
    bits.sub_((minimum > lowest) * (bits >> 15 | 1))
    return minimum


def _groups(rows: torch.Tensor, group: int) -> torch.Tensor:
    return rows.unflatten(-1, (-1, group))


def _parts(packed: torch.Tensor, elements: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of packed rows: codes uint8 [..., n * bits / 8], and (scale, minimum) float16 [..., G, 2]."""
    code_bytes = elements * bits // 8
    return packed[..., :code_bytes], packed[..., code_bytes:].view(torch.float16).unflatten(-1, (-1, 2))


@cache
def _elements(num_bytes: int, bits: int, group: int) -> int:
    """Return the elements of a packed row of this many bytes. Raise InputError if there is no such row."""
    unit = row_unit(bits, group)
    unit_bytes = packed_bytes(unit, bits, group)
    if num_bytes < 1 or num_bytes % unit_bytes:
        raise InputError(
            f"{num_bytes} bytes are not a packed row of {bits} bits: {unit} elements take {unit_bytes} bytes"
        )
    return num_bytes // unit_bytes * unit


def _workspace(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    elements = min(rows.numel(), max(WORK_ELEMENTS[rows.device.type], rows.shape[-1]))
    return torch.empty(elements, dtype=dtype, device=rows.device)


def _like(chunk: torch.Tensor, workspace: torch.Tensor) -> torch.Tensor:
    return workspace[: chunk.numel()].view(chunk.shape)


def _chunks(rows: torch.Tensor, packed: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views of corresponding rows and packed rows, up to WORK_ELEMENTS elements (or one row) at a time."""
    limit = WORK_ELEMENTS[rows.device.type]
    if rows.dim() == 1 or rows.numel() <= limit:
        yield rows, packed
    elif (fitting := limit * rows.shape[0] // rows.numel()) >= 1:
        yield from zip(rows.split(fitting), packed.split(fitting))
    else:
        for part, its_packed in zip(rows, packed):
            yield from _chunks(part, its_packed)


def _checked(tensor: torch.Tensor, shape, name: str, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return the tensor. Raise InputError if its shape or dtype is wrong."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise InputError(f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be {dtype} {list(shape)}")
    return tensor
