"""Quantize, dequantize, gather and scatter rows in a CPU's memory by compiled kernels (``compiled.rows``), on threads.

This module imports numba. Quantizing needs a processor that converts float16 (``compiled.converts_float16``).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from flexhybrid.core.policy import GROUP_ELEMENTS
from flexhybrid.runtime.kernels.compiled import Share, demand, spread
from flexhybrid.runtime.kernels.compiled.rows import IN_ORDER, KINDS, copy_places, pack, unpack
from flexhybrid.runtime.kernels.quantize import check_packed, packed_bytes


class Rows(NamedTuple):
    """Rows in the memory of a tensor: row i begins at byte ``unit · places[i]``, or at ``unit · i`` without places."""

    memory: torch.Tensor
    unit: int
    places: np.ndarray | None = None


class Pieces(NamedTuple):
    """The pieces of a row in two memories: ``count`` pieces of ``num_bytes``. Steps: bytes from one to the next."""

    num_bytes: int
    count: int = 1
    target_step: int = 0
    source_step: int = 0


def quantize(rows: torch.Tensor, bits: int, out: torch.Tensor, group: int, limit: float, share: Share = map) -> None:
    """Pack rows [..., n] to ``out`` [..., packed_bytes(n, bits, group)]; both are contiguous along the last axis."""
    check_packed("quantize", rows, out, packed_bytes(rows.shape[-1], bits, group))
    addresses, sizes = (_addresses(rows), _addresses(out)), (rows.shape[-1], group, bits)
    kind, extreme = KINDS[rows.dtype], np.float32(limit)
    spread(
        lambda first, end: pack(kind, addresses, sizes, extreme, first, end),
        len(addresses[0]),
        rows.numel() * rows.itemsize + out.numel(),
        share,
    )


def dequantize(packed: torch.Tensor, bits: int, out: torch.Tensor, group: int, share: Share = map) -> None:
    """Unpack to ``out`` [..., n]."""
    check_packed("dequantize", out, packed, packed_bytes(out.shape[-1], bits, group))
    addresses, sizes = (_addresses(packed), _addresses(out)), (out.shape[-1], group, bits)
    kind = KINDS[out.dtype]
    spread(
        lambda first, end: unpack(kind, addresses, sizes, first, end),
        len(addresses[0]),
        packed.numel() + out.numel() * out.itemsize,
        share,
    )


def copy_rows(count: int, target: Rows, source: Rows, pieces: Pieces, share: Share = map) -> None:
    """Copy ``count`` rows between two memories. Skip rows outside of a memory, and raise IndexError at the end."""
    ends, outside = [], []

    def fits(rows: Rows) -> bool:
        inside = rows.places is None or rows.places.dtype.kind in "iu" and rows.places.size == count
        alike = rows.memory.is_cpu and rows.memory.dtype == source.memory.dtype
        return inside and alike and (rows.memory.numel() > 0 or not count)

    positive = min(pieces.num_bytes, pieces.count) > 0 and min(pieces) >= 0
    demand("copy_places", target=fits(target), source=fits(source), pieces=positive)
    for (memory, unit, places), step in ((target, pieces.target_step), (source, pieces.source_step)):
        last = sum((size - 1) * stride for size, stride in zip(memory.shape, memory.stride(), strict=True))
        behind = (last + 1) * memory.itemsize - (pieces.count - 1) * step - pieces.num_bytes
        where = IN_ORDER if places is None else places.astype(np.int64, copy=False).ravel()
        ends.append((where, (memory.data_ptr(), unit, behind)))

    to, from_ = ends

    def copy(first: int, end: int) -> None:
        outside.append(copy_places(to, from_, tuple(pieces), first, end))

    spread(copy, count, 2 * count * pieces.count * pieces.num_bytes, share)
    if any(outside):
        raise IndexError(f"{sum(outside)} of {count} rows are outside the memory that should hold them")


@cache
def compile_for(dtype: torch.dtype) -> None:
    """Compile the kernels for a dtype (about 1 s), or load compiled ones (about 0.01 s)."""
    row = torch.zeros(1, GROUP_ELEMENTS, dtype=dtype)
    packed = torch.zeros(1, GROUP_ELEMENTS + 4, dtype=torch.uint8)
    quantize(row, 8, packed, GROUP_ELEMENTS, 1.0)
    dequantize(packed, 8, row, GROUP_ELEMENTS)
    copy_rows(1, Rows(row, 1), Rows(row, 1), Pieces(1))


def _addresses(tensor: torch.Tensor) -> np.ndarray:
    """Return the addresses of a tensor's rows, [rows] int64."""
    at = np.array([tensor.data_ptr()])
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        at = (at[:, None] + np.arange(size) * (stride * tensor.itemsize)).ravel()
    return at
