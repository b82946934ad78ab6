"""Matrices in row parts: what lies in resident memory, and what was streamed."""

import torch
import torch.nn.functional as F

#: The row ranges of a tensor, in order: a resident and a streamed part, or a single part.
Parts = tuple[torch.Tensor, ...]


def linear(
    rows: torch.Tensor, parts: Parts, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return rows · Wᵀ + bias, [R, in] -> [R, out], with W [out, in] given in row parts. ``out`` takes it."""
    if len(parts) == 1 and out is None:
        return F.linear(rows, parts[0], bias)
    if len(parts) == 1:
        matrix = parts[0].t()
        return torch.mm(rows, matrix, out=out) if bias is None else torch.addmm(bias, rows, matrix, out=out)
    product = torch.cat([F.linear(rows, part) for part in parts], dim=-1, out=out)
    return product if bias is None else product.add_(bias)
