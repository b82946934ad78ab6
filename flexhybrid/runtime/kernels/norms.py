"""RMSNorm, number for number as transformers has it."""

import torch


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return rows [..., n] of mean square 1, scaled by weight [n]: the mean in float32, rounded to the rows' dtype
    before the scale."""
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(rows.dtype)


def norm_heads_(heads: torch.Tensor, weight: tuple[torch.Tensor, ...] | None, eps: float) -> torch.Tensor:
    """Norm each head [..., d] in place, before its rotation, where the model does (``weight``: one part, [d])."""
    return heads if weight is None else heads.copy_(rms_norm(heads, weight[0], eps))
