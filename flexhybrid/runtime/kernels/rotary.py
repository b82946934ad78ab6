"""Rotary positions: tables of cosines and sines, and the rotation, with exactly transformers' results.

Shapes: P positions, R rows (tokens), d head size. Frequencies, cosines and sines are computed in float32 on the CPU, so
that they are equal on every device, and then rounded to the compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flexhybrid.core.model.rope import Rope
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.runtime.kernels.norms import kernels_for, rms_norm


def rotary_tables(
    shape: ModelShape, num_positions: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin) of positions 0 … P-1, each [P, d]; the second half of a row repeats the first."""
    frequencies, factor = inverse_frequencies(shape.rope, shape.head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return cos.to(dtype).to(device), sin.to(dtype).to(device)


def rotate_(x: torch.Tensor, cos_Rd: torch.Tensor, sin_Rd: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys x [..., R, heads, d] in place, each row by the angles of its position; return x.

    Element i of a head is paired with element i + d/2. The products and sums are those of transformers'
    apply_rotary_pos_emb, each rounded to the dtype of x.
    """
    half = x.shape[-1] // 2
    cos, sin = cos_Rd[:, None, :half], sin_Rd[:, None, :half]
    first, second = x[..., :half], x[..., half:]
    turned = first * cos - second * sin
    second.mul_(cos).add_(first * sin)
    first.copy_(turned)
    return x


def norm_and_rotate_(
    heads: torch.Tensor, norm: tuple[torch.Tensor, ...] | None, eps: float, rotation: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Norm queries or keys [R, heads, d] in place, then rotate them to their positions; return them.

    ``norm``: the weight [d] as one part; None: the model has no such norm. ``rotation``: cosines and sines, each [R,
    d].
    """
    if norm is not None:
        heads.copy_(rms_norm(heads, norm[0], eps))
    return rotate_(heads, *rotation)


def norm_and_rotate_rows_(
    rows: torch.Tensor,
    heads: Sequence[tuple[int, int, tuple[torch.Tensor, ...] | None]],
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Norm and rotate heads of rows [R, ·] in place. ``heads``: (first element, number of heads, norm) of each span."""
    d = rotation[0].shape[1]
    views = [rows[:, first : first + count * d].unflatten(1, (count, d)) for first, count, _ in heads]
    if kernels := kernels_for(rows):
        for view, (_, _, norm) in zip(views, heads, strict=True):
            if norm is not None:
                view.copy_(rms_norm(view, norm[0], eps))
        kernels.rotate_(rows, tuple((first, count) for first, count, _ in heads), rotation)
        return
    for view, (_, _, norm) in zip(views, heads, strict=True):
        norm_and_rotate_(view, norm, eps, rotation)


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return the angle per position of each pair of elements [d/2], and the factor of cosines and sines.

    "dynamic" equals "default" here: its frequencies differ only beyond the model's maximum length, which the executor
    does not exceed.
    """
    turns = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.type == "linear":
        return 1.0 / turns / rope.factor, 1.0
    if rope.type == "yarn":
        return _yarn(rope, head_dim, turns)
    if rope.type == "llama3":
        return _llama3(rope, 1.0 / turns), 1.0
    return 1.0 / turns, 1.0


def _yarn(rope: Rope, head_dim: int, turns: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the angles and factor of YaRN (Peng et al. 2023, arXiv 2309.00071).

    Fast pairs keep their angle, slow ones are slowed by ``rope.factor``, with a ramp in between.
    """
    (original,) = _settings(rope, "original_max_positions")

    def dimension(rotations: float) -> float:
        """Return the (fractional) index of the pair that makes this many turns within the original context."""
        wavelength = original / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    def magnitude(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    factor = rope.attention_factor
    if factor is None and rope.mscale and rope.mscale_all_dim:
        factor = magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    elif factor is None:
        factor = magnitude(1.0)
    low, high = dimension(rope.beta_fast or 32), dimension(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0  # avoids a division by zero
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * turns) * (1 - kept) + 1.0 / turns * kept, factor


def _llama3(rope: Rope, frequencies: torch.Tensor) -> torch.Tensor:
    """Return Llama 3.1's angles: divided by ``rope.factor`` for wavelengths beyond the original context."""
    original, slow, fast = _settings(rope, "original_max_positions", "low_freq_factor", "high_freq_factor")
    rotations = original * frequencies / (2 * math.pi)
    smooth = (rotations - slow) / (fast - slow)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(rotations < slow, frequencies / rope.factor, between)
    return torch.where(rotations > fast, frequencies, scaled)


def _settings(rope: Rope, *names: str) -> list[float]:
    """Return settings that a type of rotation requires. Raise ValueError if one is missing."""
    values = [getattr(rope, name) for name in names]
    if None in values:
        raise ValueError(f"rotary positions of type {rope.type} need {', '.join(names)}")
    return values
