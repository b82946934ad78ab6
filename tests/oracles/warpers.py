"""What may be drawn, by transformers' own logits processors."""

from __future__ import annotations

import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


def warped(logits_V: torch.Tensor, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0) -> torch.Tensor:
    """Logits of one row, those of tokens that may not be drawn at -inf; in vLLM's order."""
    scores = logits_V[None].float()
    warpers = [
        TemperatureLogitsWarper(float(temperature)),
        *([MinPLogitsWarper(float(min_p))] if min_p > 0 else []),
        *([TopKLogitsWarper(int(top_k))] if top_k > 0 else []),
        *([TopPLogitsWarper(float(top_p))] if top_p < 1 else []),
    ]
    for warper in warpers:
        scores = warper(None, scores)
    return scores[0]
