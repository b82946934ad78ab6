"""From logits to tokens: greedy, or by counter-based uniforms of (seed, request, position)."""

from __future__ import annotations

import numpy as np
import torch


def uniforms(seed: int, requests: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One uniform in [0, 1) a request: the same for a (seed, request, position) whatever else is in the batch."""
    draws = [
        np.random.Generator(
            np.random.Philox(key=np.array([seed, request], dtype=np.uint64), counter=int(position))
        ).random()
        for request, position in zip(requests, positions, strict=True)
    ]
    return np.array(draws)


GREEDY_BELOW = 1e-5  #: temperatures too small to divide logits by mean greedy, as in vLLM


def choose(logits_BV: torch.Tensor, temperature: float, uniforms_B: torch.Tensor | None) -> torch.Tensor:
    """Token ids [B]. A temperature of (almost) 0 takes the largest logit; else uniforms pick from the softmax."""
    if temperature < GREEDY_BELOW:
        return logits_BV.argmax(dim=-1)
    probabilities = torch.softmax(logits_BV.float() / temperature, dim=-1)
    cumulated = probabilities.double().cumsum(dim=-1)
    target = uniforms_B.to(cumulated.device).unsqueeze(1) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, target, right=True).squeeze(1).clamp_(max=logits_BV.shape[-1] - 1)
