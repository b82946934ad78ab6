"""Which tokens may be drawn, by transformers' own logits processors and plain definitions."""

from __future__ import annotations

import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def warped(logits_V: torch.Tensor, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0) -> torch.Tensor:
    """Return the logits of one row, with -inf for tokens that may not be drawn; in vLLM's order."""
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


def changed(  # noqa: PLR0913 (what a request may ask)
    logits_V: torch.Tensor,
    prompt: list[int],
    output: list[int],
    *,
    frequency=0.0,
    presence=0.0,
    repetition=1.0,
    bias=None,
    allowed=None,
    never=(),
    bad_words=(),
) -> torch.Tensor:
    """Return the logits of a row before the temperature, in vLLM's order. ``never``: excluded ids; ``bias``: by id."""
    scores, vocab = logits_V[None].float(), len(logits_V)
    never = {*never, *(() if allowed is None else set(range(vocab)) - set(allowed))}
    never |= {word[-1] for word in bad_words if list(word[:-1]) == output[len(output) - len(word) + 1 :]}
    processors = [
        *([SequenceBiasLogitsProcessor([[[token], float(value)] for token, value in bias.items()])] if bias else []),
        *([RepetitionPenaltyLogitsProcessor(float(repetition))] if repetition != 1 else []),
    ]
    for processor in processors:
        scores = processor(torch.tensor([prompt + output]), scores)
    scores = scores[0].clone()
    for token in set(output):  # vLLM's definition
        scores[token] -= torch.tensor(frequency, dtype=torch.float32) * output.count(token)
        scores[token] -= torch.tensor(presence, dtype=torch.float32)
    return SuppressTokensLogitsProcessor(sorted(never))(None, scores[None])[0] if never else scores
