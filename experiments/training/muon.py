"""Muon, an optimizer for the matrices of hidden layers (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

Each update is the momentum with its singular values brought near to 1, by five steps of a Newton-Schulz iteration.
Scaled as Liu et al. (2025, arXiv 2502.16982, Eq. 4), it goes with AdamW's learning rate and weight decay. torch's own
Muon multiplies in bfloat16, which is slow on a CPU without instructions for it; this one multiplies matrices of one
shape together, in float32.
"""

from __future__ import annotations

import torch

MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x³ and x⁵: steep at zero, near 1 from 0.7 to 1.2 (Jordan et al.)
RMS = 0.2  # of an update's entries, over the learning rate: about AdamW's (Liu et al.)


@torch.no_grad()
def near_orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices [n, rows, columns] with their singular vectors, and singular values of about 1."""
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if is_tall := x.shape[-2] > x.shape[-1]:
        x = x.mT
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Muon for groups of parameters that are matrices; each has ``lr`` and ``weight_decay``."""

    def __init__(self, parameters: list[dict], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in shapes.items():
                update = near_orthogonal(torch.stack([self._direction(p) for p in parameters]))
                scale = group["lr"] * RMS * max(shape) ** 0.5
                for parameter, change in zip(parameters, update, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=scale)

    def _direction(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the momentum of Nesterov."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(parameter.grad, 1 - MOMENTUM)
        return parameter.grad.lerp(state["momentum"], MOMENTUM)
