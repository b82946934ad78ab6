"""Two models of ten classes for a cascade on Ray, in a module that replicas load quickly."""

import torch


def scores(classes: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Return logits [B, 10]: ``size`` [B] for one class each [B], and 0 for the others."""
    return torch.where(classes[:, None] == torch.arange(10), size[:, None], 0.0)


class Small(torch.nn.Module):
    """Answer a request with its first number plus 1, with high confidence from 5 on; raise for a number below zero."""

    def forward(self, x):
        if (x < 0).any():
            raise RuntimeError("a model that breaks")
        return scores(x[:, 0] + 1, torch.where(x[:, 0] >= 5, 99.0, x[:, 0] / 5))


class Large(torch.nn.Module):
    """Answer with high confidence; for a number below zero, and for 2, the answer is NaN."""

    def forward(self, x):
        return scores(x[:, 0] + 1, torch.where((x[:, 0] < 0) | (x[:, 0] == 2), torch.nan, 99.0))
