"""Norms and gated activation with exactly transformers' results.

On CUDA, Triton's kernels (``kernels.rows_triton``) are used if they give plain torch's results.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from types import ModuleType

import torch
import torch.nn.functional as F

#: Allowed relative error of a kernel: a few units in the last place of each dtype.
CLOSE = {torch.float32: 4 * 2.0**-23, torch.bfloat16: 2 * 2.0**-7, torch.float16: 2 * 2.0**-10}

SMALL = 1e-5  #: allowed absolute error of a LayerNorm, for rows of variance 1


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm of rows [..., n]: computed in float32, rounded to their dtype, then scaled by weight [n]."""
    if rows.dim() == 2 and (kernels := kernels_for(rows)):
        return kernels.norm(rows, None, weight, eps)
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(rows.dtype)


def add_and_norm_(rows_Rn: torch.Tensor, added_Rn: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add ``added_Rn`` to the rows in place, and return the ``rms_norm`` of the sum."""
    if kernels := kernels_for(rows_Rn):
        return kernels.norm(rows_Rn, added_Rn, weight, eps)
    return rms_norm(rows_Rn.add_(added_Rn), weight, eps)


def add_and_layer_norm_(
    rows_Rn: torch.Tensor,
    added_Rn: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    later: torch.Tensor,
) -> torch.Tensor:
    """Return the LayerNorm of rows + added; set the rows to rows + added + ``later`` [n]. ``norm``: weight, bias."""
    if kernels := kernels_for(rows_Rn):
        return kernels.norm(rows_Rn, added_Rn, norm[0], eps, (norm[1], later))
    wide = rows_Rn.float() + added_Rn
    summed = wide.to(rows_Rn.dtype)
    rows_Rn.copy_(wide + later)  # rounded once, because the product that is added next is not rounded
    return F.layer_norm(summed, summed.shape[-1:], *norm, eps)


def gate_(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Set the gate to silu(gate) · up, and return it."""
    if gate.is_contiguous() and up.is_contiguous() and (kernels := kernels_for(gate)):
        return kernels.gate_(gate, up)
    return F.silu(gate, inplace=True).mul_(up)


def kernels_for(rows: torch.Tensor) -> ModuleType | None:
    """Return Triton's kernels if they run on these rows, else None."""
    if not rows.is_cuda or rows.stride(-1) != 1 or not rows.numel():
        return None
    return _proven_kernels(rows.device, rows.dtype)


@lru_cache
def _proven_kernels(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return Triton's kernels if their results equal plain torch's on this device; otherwise warn and return None.

    Blocks until the device has finished, and until the kernels are compiled if they are not in Triton's cache.
    """
    if not torch.cuda.is_available():
        return None
    try:
        from flexhybrid.runtime.kernels import rows_triton

        prove(rows_triton, device, dtype)
    except Exception as error:  # no compiler, no driver, an unknown GPU, or wrong results
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(f"norms and rotations in plain torch, slower than Triton's kernels: {reason}", stacklevel=2)
        return None
    return rows_triton


def prove(kernels: ModuleType, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ArithmeticError if the kernels' results on trial rows differ from plain torch's on the CPU.

    Residuals and rotations must be equal, other results within CLOSE, and a LayerNorm within CLOSE and SMALL.
    """
    generator = torch.Generator().manual_seed(0)
    rows, added, factors = torch.randn(3, 3, 3 * 80, generator=generator, dtype=torch.float32).to(dtype)
    cos, sin = torch.randn(2, 3, 80, generator=generator, dtype=torch.float32).to(dtype)
    there, added_there, weights = (tensor.to(device) for tensor in (rows, added, factors))
    summed, residual, turned = there.clone(), there.clone(), there.clone()
    normed = kernels.norm(summed, added_there, weights[0], 1e-5)
    layer = kernels.norm(residual, added_there, weights[0], 1e-5, (weights[1], weights[2]))
    kernels.rotate_(turned, ((0, 1), (160, 1)), (cos.to(device), sin.to(device)))
    wanted_turned = rows.clone()
    a, b = wanted_turned.view(3, 3, 2, 40)[:, ::2].unbind(2)
    c, s = cos[:, None, :40], sin[:, None, :40]
    turned_a, turned_b = a * c - b * s, b * c + a * s
    a.copy_(turned_a)
    b.copy_(turned_b)
    wanted, wanted_residual = rows.clone(), rows.clone()
    wanted_normed = add_and_norm_(wanted, added, factors[0], 1e-5)
    wanted_layer = add_and_layer_norm_(wanted_residual, added, (factors[0], factors[1]), 1e-5, factors[2])
    same = (summed, wanted), (turned, wanted_turned), (residual, wanted_residual)
    pairs = ((normed, wanted_normed), (kernels.gate_(there.clone(), added_there), gate_(rows.clone(), added)))
    exact = all(torch.equal(ours.cpu(), theirs) for ours, theirs in same)
    close = all(torch.allclose(ours.cpu(), theirs, CLOSE[dtype], 0) for ours, theirs in pairs)
    if not (exact and close and torch.allclose(layer.cpu(), wanted_layer, CLOSE[dtype], SMALL)):
        raise ArithmeticError("on trial rows its results differ from plain torch's")
