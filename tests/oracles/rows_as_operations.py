"""``kernels.rows_triton`` and ``quantize_triton`` without Triton: each kernel is one operation of torch."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

from flexhybrid.runtime.kernels import norms, rotary
from flexhybrid.runtime.kernels import quantize as packing

LIBRARY = torch.library.Library("flexhybrid_rows", "DEF")


def _norm(rows, added, weight, bias, later, eps, normed) -> None:
    wide = rows.double() + added.double()
    summed = wide.to(rows.dtype).double()
    apart = summed - summed.mean(1, keepdim=True)
    normed.copy_(apart / (apart.square().mean(1, keepdim=True) + eps).sqrt() * weight.double() + bias.double())
    rows.copy_(wide + later.double())


def _scale(rows, weight, eps, normed) -> None:
    wide = rows.float()
    normed.copy_(weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(rows.dtype))


def _add_and_scale(rows, added, weight, eps, normed) -> None:
    _scale(rows.add_(added), weight, eps, normed)


def _rotate(rows, spans, cos, sin) -> None:
    d = cos.shape[1]
    c, s = (of[: len(rows), None, : d // 2] for of in (cos, sin))
    for first, count in zip(spans[::2], spans[1::2], strict=True):
        heads = rows[:, first : first + count * d].unflatten(1, (count, 2, d // 2))
        a, b = heads.unbind(2)
        turned = a * c - b * s, b * c + a * s
        a.copy_(turned[0])
        b.copy_(turned[1])


def _gate(gate, up) -> None:
    gate.copy_(F.silu(gate) * up)


def _pack(rows, bits, out, group) -> None:
    packing._quantize(rows, bits, out, group)


def _unpack(packed, bits, out, group) -> None:
    packing._dequantize(packed, bits, out, group)


_KERNELS = (
    (_norm, "Tensor(a!) rows, Tensor added, Tensor weight, Tensor bias, Tensor later, float eps, Tensor(b!) normed"),
    (_scale, "Tensor rows, Tensor weight, float eps, Tensor(a!) normed"),
    (_add_and_scale, "Tensor(a!) rows, Tensor added, Tensor weight, float eps, Tensor(b!) normed"),
    (_rotate, "Tensor(a!) rows, int[] spans, Tensor cos, Tensor sin"),
    (_gate, "Tensor(a!) gate, Tensor up"),
    (_pack, "Tensor rows, int bits, Tensor(a!) out, int group"),
    (_unpack, "Tensor packed, int bits, Tensor(a!) out, int group"),
)
for _function, _arguments in _KERNELS:
    LIBRARY.define(f"{_function.__name__[1:]}({_arguments}) -> ()")
    LIBRARY.impl(_function.__name__[1:], _function, "CPU")
OPERATIONS = torch.ops.flexhybrid_rows


def norm(rows, added, weight, eps, biases=None):
    normed = torch.empty_like(rows)
    if biases:
        OPERATIONS.norm(rows, added, weight, *biases, eps, normed)
    elif added is None:
        OPERATIONS.scale(rows, weight, eps, normed)
    else:
        OPERATIONS.add_and_scale(rows, added, weight, eps, normed)
    return normed


def rotate_(rows, spans, rotation) -> None:
    OPERATIONS.rotate(rows, [number for span in spans for number in span], *rotation)


def gate_(gate, up):
    OPERATIONS.gate(gate, up)
    return gate


def quantize(rows, bits, out, group, _limit) -> None:
    OPERATIONS.pack(rows, bits, out, group)


def dequantize(packed, bits, out, group) -> None:
    OPERATIONS.unpack(packed, bits, out, group)


def install(monkeypatch) -> None:
    """Replace the kernels for rows on a GPU."""
    kernels = sys.modules[__name__]
    for module in (norms, rotary):
        monkeypatch.setattr(module, "kernels_for", lambda rows: kernels if rows.is_cuda and rows.numel() else None)
    kernels_for, shared = packing._kernels_for, packing._shared

    def packers(values, bits, group):
        whole = values.is_cuda and values.numel() and values.stride(-1) == 1
        return kernels if whole else kernels_for(values, bits, group)

    monkeypatch.setattr(packing, "_kernels_for", packers)
    monkeypatch.setattr(packing, "_shared", lambda values, share: () if values.is_cuda else shared(values, share))
