"""From logits to tokens: greedy, or by counter-based uniforms of (seed, request, position)."""

from __future__ import annotations

import numpy as np
import torch


def uniforms(seed: int, requests: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One uniform in [0, 1) a request: the same for a (seed, request, position) whatever else is in the batch."""
    draws = [
        np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), int(request)], counter=int(position))).random()
        for request, position in zip(requests, positions, strict=True)
    ]
    return np.array(draws)


def choose(logits_BV: torch.Tensor, temperature: float, uniforms_B: torch.Tensor | None) -> torch.Tensor:
    """Token ids [B]. Temperature 0 takes the largest logit; else the uniform picks from the cumulated softmax."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    probabilities = torch.softmax(logits_BV.float() / temperature, dim=-1)
    cumulated = probabilities.double().cumsum(dim=-1)
    target = uniforms_B.to(cumulated.device).unsqueeze(1) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, target, right=True).squeeze(1).clamp_(max=logits_BV.shape[-1] - 1)
