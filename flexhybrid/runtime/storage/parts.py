"""Matrices in row parts: resident ones, and streamed ones."""

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


def linear_relu(rows: torch.Tensor, parts: Parts, bias: torch.Tensor) -> torch.Tensor:
    """Return what of ``linear`` is positive, else zeros; on CUDA the product of a whole matrix does that itself."""
    if len(parts) == 1 and rows.is_cuda:
        return torch.ops.aten._addmm_activation(bias, rows, parts[0].t())
    return F.relu_(linear(rows, parts, bias))


def add_linear_(total: torch.Tensor, rows: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Add rows · Wᵀ to a total [R, out] in place, and return it. On CUDA the product adds to it, and rounds once."""
    if not total.is_cuda:
        return total.add_(linear(rows, parts, None))
    first = 0
    for part in parts:
        total[:, first : first + len(part)].addmm_(rows, part.t())
        first += len(part)
    return total
