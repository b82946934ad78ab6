"""Unpack matrices that a checkpoint stores in few bits (``core.model.packing.FORMATS``) to the compute dtype.

Every format is ``scale · (code - zero point)`` with a scale that a block of elements shares. The product is computed in
float32 and rounded once to the compute dtype. Plain torch is the reference; a CPU uses kernels compiled by numba
(``kernels.compiled.unpack``), CUDA uses Triton's (``kernels.unpack_triton``), with equal bits.

- **MXFP4**: codes are 4-bit floats (E2M1), the lower half of a byte first. A scale is ``2**(byte - 127)``.
- **FP8, int8**: a code is a byte. A scale belongs to a block of rows and columns, a row, or the tensor.
- **pack-quantized**: a code is an unsigned integer in a 32-bit word, lowest bits first. Its zero point is
  ``2**(bits - 1)``, or stored like the codes, but along the rows.
- **GPTQ**: words run along the columns, and matrices are stored column by column. Zero points run along the rows; they
  are stored less 1. ``g_idx`` has the group of each column.
- **AWQ**: words run along the rows, in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from flexhybrid.core.model.packing import PackedRun, Packing, default_packing
from flexhybrid.runtime.kernels.compiled import Share, has_numba, spread

#: dtype in safetensors -> torch's
TYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
}
#: Values of the 4-bit floats E2M1 (OCP Microscaling Formats 1.0, section 5.3.3).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

Parts = dict[str, torch.Tensor]  #: suffix -> [matrices, *size]


class Operands(NamedTuple):
    """The parts of matrices as arithmetic needs them: an element is (code - zero) · scale."""

    codes: torch.Tensor  #: as stored
    scales: torch.Tensor  #: float32 [matrices, blocks of rows, blocks of columns]
    zeros: torch.Tensor | None  #: float32, with the strides of the scales; None: all are ``zero``
    zero: float
    index: torch.Tensor | None  #: block of each column, [matrices, columns]; None: in order


def typed(run: PackedRun, parts: Sequence[torch.Tensor]) -> Parts:
    """Return a run's parts with their dtypes and sizes. ``parts``: their bytes, uint8 [bytes], with or without gaps."""
    views = {}
    for part, flat in zip(run.packing.parts, parts, strict=True):
        flat = flat[: run.count * part.num_bytes]
        views[part.suffix] = flat.view(TYPES[part.dtype]).view(run.count, *part.size)
    return views


def unpack(packing: Packing, parts: Parts, out: torch.Tensor, share: Share = map) -> None:
    """Unpack matrices to ``out`` [matrices, rows, columns], whose rows follow each other.

    ``share`` divides rows among threads, for compiled kernels on a CPU.
    """
    operands = _operands(packing, parts)
    if out.is_cuda and (kernels := _triton(out.device)):
        kernels.unpack(packing, operands, out)
    elif not out.is_cuda and has_numba() and out.dtype in (torch.float32, torch.bfloat16):
        _unpack_compiled(packing, operands, out, share)
    else:
        plain_unpack(packing, operands, out)


def plain_unpack(m: Packing, operands: Operands, out: torch.Tensor) -> None:
    """Unpack matrices in plain torch, one at a time: the reference."""
    for n, target in enumerate(out):
        codes = _codes(m, operands.codes[n]).float()
        if operands.index is None:
            columns = torch.arange(m.cols, dtype=torch.int64, device=codes.device) // m.block[1]
        else:
            columns = operands.index[n].long()
        rows = torch.arange(m.rows, dtype=torch.int64, device=codes.device) // m.block[0]
        scales = operands.scales[n][rows][:, columns]
        zeros = operands.zero if operands.zeros is None else operands.zeros[n][rows][:, columns]
        target.copy_((codes - zeros) * scales)


def _operands(m: Packing, parts: Parts) -> Operands:
    codes, *others = parts.values()
    if m.format == "mxfp4":
        scales = torch.index_select(_powers(codes.device), 0, others[0].flatten().int()).view(others[0].shape)
        return Operands(codes, scales, None, 0.0, None)
    if m.format in ("block", "scaled"):
        return Operands(codes, others[0].float().view(-1, *m.grid), None, 0.0, None)
    if m.format == "grouped":
        zeros, scales = parts.get(".weight_zero_point"), parts[".weight_scale"].float().view(-1, *m.grid)
        zeros = None if zeros is None else _integers(zeros, m.bits, 1)[:, : m.rows].float().contiguous()
        return Operands(codes, scales, zeros, float(1 << (m.bits - 1)), parts.get(".weight_g_idx"))
    zeros = _awq(parts[".qzeros"]) if m.format == "awq" else _integers(parts[".qzeros"], m.bits, 2)
    zeros = (zeros[..., : m.rows] + m.zero_offset).float().transpose(1, 2)
    return Operands(codes, parts[".scales"].float().transpose(1, 2), zeros, 0.0, parts.get(".g_idx"))


@cache
def _powers(device: torch.device) -> torch.Tensor:
    """Return 2**(byte - 127) for every byte, float32 [256], on a device."""
    return (2.0 ** (torch.arange(256, dtype=torch.float64) - 127)).float().to(device)


def _codes(m: Packing, codes: torch.Tensor) -> torch.Tensor:
    """Return the codes [rows, columns] of a matrix."""
    if m.format == "mxfp4":
        table = torch.tensor(E2M1, dtype=torch.float32, device=codes.device)
        return torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], dim=-1).view(m.rows, m.cols)
    if m.format == "grouped":
        return _integers(codes, m.bits, 1)[:, : m.cols]
    if m.format == "gptq":
        return _integers(codes, m.bits, 0)[: m.cols].t()
    return _awq(codes).t() if m.format == "awq" else codes


def _integers(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Return the unsigned integers in 32-bit words along an axis, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    words = words.movedim(axis, -1)
    spread_out = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return spread_out.flatten(-2).movedim(-1, axis)


def _awq(words: torch.Tensor) -> torch.Tensor:
    """Return the integers in AWQ's words, along the last axis."""
    return _integers(words, 4, words.dim() - 1).unflatten(-1, (-1, 2, 4)).transpose(-1, -2).flatten(-3)


def _unpack_compiled(m: Packing, operands: Operands, out: torch.Tensor, share: Share) -> None:
    kernels: Any = importlib.import_module("flexhybrid.runtime.kernels.compiled.unpack")
    codes = operands.codes.view(len(out), -1).view(torch.uint8)
    of_bytes = {"F8_E4M3": kernels.FP8, "I8": kernels.SIGNED}.get(m.parts[0].dtype, kernels.BYTES)
    orders = {"gptq": kernels.COLUMN_WORDS, "awq": kernels.AWQ_WORDS}
    order = orders.get(m.format, kernels.NIBBLES if m.bits == 4 else of_bytes)
    step = out.stride(0) if len(out) > 1 else 0
    flat = out.as_strided(((len(out) - 1) * step + m.rows * m.cols,), (1,))
    wide, narrow = (flat, flat[:0]) if out.dtype == torch.float32 else (flat[:0], flat)
    zeros = operands.zeros
    if zeros is None:
        zeros = torch.full((1, 1, 1), operands.zero, dtype=torch.float32).expand(operands.scales.shape)
    index = torch.empty(0, 0, dtype=torch.int32) if operands.index is None else operands.index
    arguments = (
        order,
        (codes.view(-1).numpy(), _table(m.format), operands.scales.numpy(), zeros.numpy(), index.numpy()),
        (m.rows, m.cols, *m.block, m.bits, codes.shape[1] // m.rows, step),
        (wide.view(torch.float32).numpy(), narrow.view(torch.int16).numpy().view("uint16")),
    )
    num_bytes = codes.numel() + out.numel() * out.itemsize
    spread(lambda first, end: kernels.unpack(*arguments, first, end), len(out) * m.rows, num_bytes, share)


@cache
def _table(form: str) -> Any:
    """Return the values of each byte's codes, one or two float32 as one uint64, numpy [256]. A table also serves FP8:
    its arithmetic would need subnormal numbers, which are slow."""
    every = torch.arange(256, dtype=torch.int64)
    if form in ("block", "scaled"):
        values = every.to(torch.uint8).view(torch.float8_e4m3fn).float()
        pairs = torch.stack([values, torch.zeros_like(values)], dim=-1)
    else:
        values = torch.tensor(E2M1 if form == "mxfp4" else range(16), dtype=torch.float32)
        pairs = torch.stack([values[every & 15], values[every >> 4]], dim=-1)
    return pairs.view(torch.int64).numpy().view("uint64").ravel()


#: Format, bits and dtype of codes of each matrix of ``trial``.
TRIALS = (
    *(("block", 8, "F8_E4M3"), ("scaled", 8, "I8"), ("mxfp4", 4, "U8"), ("grouped", 4, "I32"), ("grouped", 8, "I32")),
    *(("gptq", 4, "I32"), ("gptq", 8, "I32"), ("awq", 4, "I32")),
)


def trial(
    device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[Packing, Operands, torch.Tensor]]:
    """Yield two random matrices of every kind of codes, with their elements by plain torch."""
    generator = torch.Generator().manual_seed(0)
    for form, bits, codes in TRIALS:
        block = (16, 32) if form == "block" else (1, 32)
        packing = default_packing(Packing(form, 24, 160, bits, block), "F32", form == "grouped", bits == 8)
        first, *others = packing.parts
        packing = packing._replace(parts=(first._replace(dtype=codes), *others))
        run, parts = PackedRun(packing, 2), {}
        for part in packing.parts:
            flat = torch.randint(0, 255, (2 * part.num_bytes,), generator=generator, dtype=torch.uint8)
            parts[part.suffix] = flat[: 2 * part.num_bytes]
            if part.suffix.endswith("g_idx"):
                of = torch.randint(0, 5, (2, 160), generator=generator, dtype=torch.int32)
                parts[part.suffix] = of.view(-1).view(torch.uint8)
            elif part.dtype == "F32":
                of = torch.randn(2 * part.num_bytes // 4, generator=generator, dtype=torch.float32)
                parts[part.suffix] = of.view(torch.uint8)
            elif codes == "F8_E4M3":
                parts[part.suffix][(flat & 127) == 127] = 0  # the bits of NaN differ between processors
        operands = _operands(packing, typed(run, [of.to(device) for of in parts.values()]))
        expected = torch.empty(2, 24, 160, dtype=dtype, device=device)
        plain_unpack(packing, operands, expected)
        yield packing, operands, expected


@lru_cache
def _triton(device: torch.device) -> Any:
    """Return the module of Triton's kernels if they work on this device; otherwise warn and return None."""
    try:
        kernels = importlib.import_module("flexhybrid.runtime.kernels.unpack_triton")
        kernels.prove(device)
    except Exception as error:  # no compiler, no driver, an unknown processor, or wrong bits
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(f"unpacking weights in plain torch, slower than Triton's kernels: {reason}", stacklevel=3)
        return None
    return kernels
