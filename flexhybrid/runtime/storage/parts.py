"""Products with matrices whose rows are in two memories: a resident and a streamed part."""

import torch
import torch.nn.functional as F

#: The rows of a tensor in order: a resident and a streamed part, or a single part.
Parts = tuple[torch.Tensor, ...]


def linear(
    rows: torch.Tensor, parts: Parts, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return rows [R, in] · Wᵀ + bias, with W [out, in] in parts. ``out`` [R, out] takes the result if given."""
    if len(parts) == 1 and out is None:
        return F.linear(rows, parts[0], bias)
    if len(parts) == 1:
        matrix = parts[0].t()
        return torch.mm(rows, matrix, out=out) if bias is None else torch.addmm(bias, rows, matrix, out=out)
    product = torch.cat([F.linear(rows, part) for part in parts], dim=-1, out=out)
    return product if bias is None else product.add_(bias)


def linear_relu(rows: torch.Tensor, parts: Parts, bias: torch.Tensor) -> torch.Tensor:
    """Return relu(``linear``). On CUDA, one operation does both if W is a single part."""
    if len(parts) == 1 and rows.is_cuda:
        return torch.ops.aten._addmm_activation(bias, rows, parts[0].t())
    return F.relu_(linear(rows, parts, bias))


def add_linear_(total: torch.Tensor, rows: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Add rows · Wᵀ to a total [R, out] in place; return it. On CUDA, one operation does both and rounds once."""
    if not total.is_cuda:
        return total.add_(linear(rows, parts, None))
    first = 0
    for part in parts:
        total[:, first : first + len(part)].addmm_(rows, part.t())
        first += len(part)
    return total
