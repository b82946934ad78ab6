"""CUDA kernels that process each row separately: norm with the residual before it, rotation, gated activation.

``kernels.norms`` and ``kernels.rotary`` choose between these kernels and plain torch.

**Bits.** Every product and sum is rounded to the rows' dtype where plain torch rounds it, and nothing is fused.
Residuals and rotations have plain torch's bits. Norms and activations may differ in the last bit, because squares are
added up in another order, and the exponential is the GPU's own.
"""

# Triton's stubs declare dtypes as values, and jitted functions as never returning.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flexhybrid.runtime.kernels.compiled import demand

ELEMENTS = 1024  #: number of gate elements per program
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def norm(
    rows_Rn: torch.Tensor,
    added_Rn: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the RMSNorm of the rows, or of rows + ``added_Rn``, which then also replaces the rows.

    ``biases``: return a LayerNorm with the first bias instead, and add the second bias to the replaced rows.
    """
    n, normed = rows_Rn.shape[1], torch.empty_like(rows_Rn, memory_format=torch.contiguous_format)
    added, (bias, later) = rows_Rn if added_Rn is None else added_Rn, biases or (weight, weight)
    alike = added.shape == rows_Rn.shape and added.dtype == rows_Rn.dtype and added.stride(1) == 1
    factors = all(of.shape == (n,) and of.is_contiguous() for of in (weight, bias, later))
    demand("norm", rows=rows_Rn.stride(1) == 1, added=alike, weight=factors)
    width = triton.next_power_of_2(n)
    options = OPTIONS | {"num_warps": min(16, max(1, width // 512))}
    constants = {"N": n, "WIDTH": width, "ADDS": added_Rn is not None, "BIASES": biases is not None}
    pointers, strides = (rows_Rn, added, weight, bias, later, normed), (rows_Rn.stride(0), added.stride(0))
    with torch.cuda.device_of(rows_Rn):
        _norm_kernel[(len(rows_Rn),)](*pointers, *strides, eps, **constants, **options)
    return normed


def rotate_(
    rows: torch.Tensor, spans: tuple[tuple[int, int], ...], rotation: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Rotate heads of rows [R, ·] in place. ``spans``: one or two of (first element, number of heads).

    ``rotation``: cosines and sines, each [R, d].
    """
    cos_Rd, sin_Rd = rotation
    (first, count), (other, others) = (*spans, (0, 0))[:2]
    d, heads = cos_Rd.shape[1], triton.next_power_of_2(count + others)
    inside = all(first >= 0 and first + count * d <= rows.shape[1] for first, count in spans)
    turns = all(len(of) >= len(rows) and of.shape[1] == d and of.stride(1) == 1 for of in rotation)
    demand("rotate", rows=rows.stride(1) == 1, spans=inside, rotation=turns)
    tensors, sizes = (rows, cos_Rd, sin_Rd), {"D": d, "HEADS": heads, "WIDTH": triton.next_power_of_2(d // 2)}
    constants = {"FIRST": first, "COUNT": count, "OTHER": other, "ALL": count + others}
    with torch.cuda.device_of(rows):
        _rotate_kernel[(len(rows),)](*tensors, *(of.stride(0) for of in tensors), **constants, **sizes, **OPTIONS)


def gate_(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Set the gate to silu(gate) · up, and return it. Both must be contiguous."""
    alike = up.shape == gate.shape and up.dtype == gate.dtype and up.is_contiguous()
    demand("gate", gate=gate.is_contiguous(), up=alike)
    with torch.cuda.device_of(gate):
        _gate_kernel[(triton.cdiv(gate.numel(), ELEMENTS),)](gate, up, gate.numel(), ELEMENTS=ELEMENTS, **OPTIONS)
    return gate


@triton.jit(do_not_specialize=["rows_stride", "added_stride"])
def _norm_kernel(  # noqa: PLR0913 (a kernel takes pointers and constants)
    rows, added, weight, bias, later, normed, rows_stride: tl.int64, added_stride: tl.int64, eps: tl.float32,
    N: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr, BIASES: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    own = tl.load(rows + row * rows_stride + at, mask=at < N, other=0.0)
    if ADDS:
        other = tl.load(added + row * added_stride + at, mask=at < N, other=0.0)
        total = own.to(tl.float32) + other.to(tl.float32)
        own = total.to(rows.dtype.element_ty)
        if BIASES:  # rounded once, because the product that is added next is not rounded
            total += tl.load(later + at, mask=at < N, other=0.0).to(tl.float32)
        tl.store(rows + row * rows_stride + at, total.to(rows.dtype.element_ty), mask=at < N)
    wide = own.to(tl.float32)
    if BIASES:
        wide = tl.where(at < N, wide - tl.sum(wide, 0) * (1.0 / N), 0.0)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) * (1.0 / N) + eps)
    factor = tl.load(weight + at, mask=at < N, other=0.0).to(tl.float32)
    if BIASES:
        scaled = factor * scaled + tl.load(bias + at, mask=at < N, other=0.0).to(tl.float32)
    else:
        scaled = factor * scaled.to(rows.dtype.element_ty).to(tl.float32)
    tl.store(normed + row * N + at, scaled.to(normed.dtype.element_ty), mask=at < N)


@triton.jit(do_not_specialize=["rows_stride", "cos_stride", "sin_stride"])
def _rotate_kernel(  # noqa: PLR0913 (a kernel takes pointers and constants)
    rows, cos, sin, rows_stride: tl.int64, cos_stride: tl.int64, sin_stride: tl.int64,
    FIRST: tl.constexpr, COUNT: tl.constexpr, OTHER: tl.constexpr, ALL: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    row, head, at = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS), tl.arange(0, WIDTH)
    first = rows + row * rows_stride + tl.where(head < COUNT, FIRST + head * D, OTHER + (head - COUNT) * D)
    here = (head < ALL)[:, None] & (at < HALF)[None, :]
    a = tl.load(first[:, None] + at[None, :], mask=here, other=0.0).to(tl.float32)
    b = tl.load(first[:, None] + (at + HALF)[None, :], mask=here, other=0.0).to(tl.float32)
    c = tl.load(cos + row * cos_stride + at, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * sin_stride + at, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    turned = _rounded(a * c, rows) - _rounded(b * s, rows)
    other = _rounded(b * c, rows) + _rounded(a * s, rows)
    tl.store(first[:, None] + at[None, :], turned.to(rows.dtype.element_ty), mask=here)
    tl.store(first[:, None] + (at + HALF)[None, :], other.to(rows.dtype.element_ty), mask=here)


@triton.jit
def _rounded(values, like):
    """Round float32 values to the dtype that ``like`` points to."""
    return values.to(like.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["count"])
def _gate_kernel(gate, up, count: tl.int64, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    own = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    active = _rounded(tl.div_rn(own, 1.0 + tl.exp(-own)), gate)
    other = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(gate + at, (active * other).to(gate.dtype.element_ty), mask=at < count)
