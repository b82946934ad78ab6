"""RMSNorm, number for number as transformers has it."""

import torch


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return rows [..., n] of mean square 1, scaled by weight [n]: the mean in float32, rounded to the rows' dtype
    before the scale."""
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(rows.dtype)
