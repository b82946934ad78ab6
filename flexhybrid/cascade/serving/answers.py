"""Sends requests through a cascade: each model answers them, or passes them on if it is not confident.

If a model raises, or its logits are not numbers, its requests go on to the next larger model, and are counted as
failed. Before that, each request of the batch is tried alone, so that one bad request does not fail the others. If all
larger models fail, the most confident answer so far is returned, marked as a fallback.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flexhybrid.cascade.models import Model, first_line
from flexhybrid.cascade.routes import ANSWERED, Cascade
from flexhybrid.cascade.thresholds.confidence import confidence, top_k_logits

BATCH = 64  #: most requests that a model gets at once


@dataclass
class Answer:
    """The answer to a request, and its way through the models."""

    index: int  #: index of the request
    output: object = None
    model: str | None = None  #: the model that answered; None: all failed
    confidence: float | None = None
    is_fallback: bool = False  #: whether the confidence is below the threshold, and all larger models failed
    tokens: int = 0  #: number of tokens, or slots, of the answer
    visited: list[str] = field(default_factory=list)  #: names of the models that computed it
    failed: dict[str, str] = field(default_factory=dict)  #: model -> reason

    def line(self) -> str:
        """Return the answer as a line of JSON."""
        return json.dumps(self.__dict__, ensure_ascii=False)


class Judgement(NamedTuple):
    """A model's outputs for N requests, with its confidence and failures."""

    outputs: list  #: [N]
    sure: np.ndarray  #: [N] confidence; NaN for failures
    reasons: list[str | None]  #: [N] reasons of failures
    tokens: list[int]  #: [N] number of tokens


def serve(
    cascade: Cascade, models: Sequence[Model], requests: Sequence | np.ndarray, first_index: int = 0
) -> list[Answer]:
    """Return the answers to requests. ``models``: in the cascade's order. ``first_index``: of the first request."""
    answers = [Answer(first_index + i) for i in range(len(requests))]
    at = np.zeros(len(requests), dtype=int)  # next model of each request; len(models): answered
    for i, model in enumerate(models):
        waiting = np.flatnonzero(at == i)
        for start in range(0, len(waiting), BATCH):
            members = waiting[start : start + BATCH]
            batch_requests = requests[members] if isinstance(requests, np.ndarray) else [requests[m] for m in members]
            judgement = judge(cascade, i, model, batch_requests)
            at[members] = note(cascade, i, [answers[m] for m in members], judgement)
    return answers


def judge(cascade: Cascade, i: int, model: Model, requests: Sequence | np.ndarray) -> Judgement:
    """Return model i's outputs for requests and its confidence in them. Its exceptions become failures."""
    try:
        outputs = model.predict(requests)
        if len(outputs.outputs) != len(requests) or len(outputs.logits) != len(requests):
            raise ValueError(f"{len(outputs.outputs)} outputs for {len(requests)} requests")
        sure = confidence(top_k_logits(outputs.logits, cascade.top_k), outputs.counted, cascade.models[i].temperature)
    except Exception as error:  # a model may raise anything, and so may computing with its logits
        if len(requests) == 1:
            return Judgement([None], np.array([np.nan]), [f"{type(error).__name__}: {first_line(error)}"], [0])
        singles = [judge(cascade, i, model, requests[j : j + 1]) for j in range(len(requests))]
        outputs, sure, reasons, tokens = zip(*singles, strict=True)
        return Judgement(sum(outputs, []), np.concatenate(sure), sum(reasons, []), sum(tokens, []))
    reasons = ["logits that are no numbers" if bad else None for bad in np.isnan(sure)]
    return Judgement(outputs.outputs, sure, reasons, outputs.counted.sum(axis=1).tolist())


def note(cascade: Cascade, i: int, answers: list[Answer], judgement: Judgement) -> np.ndarray:
    """Record model i's judgement in the answers; return the next model of each request (len(models): none)."""
    name, end = cascade.names[i], len(cascade.models)
    to = cascade.next_model(i, judgement.sure)
    for j, (answer, output, sure, reason, tokens) in enumerate(zip(answers, *judgement, strict=True)):
        answer.visited.append(name)
        if np.isnan(sure):
            answer.failed[name] = reason or "no reason"
            to[j] = i + 1
        elif to[j] == ANSWERED or answer.confidence is None or sure > answer.confidence:
            answer.output, answer.model, answer.confidence, answer.tokens = output, name, float(sure), tokens
            answer.is_fallback = bool(to[j] != ANSWERED)  # reset if a larger model answers
    return np.where(to == ANSWERED, end, to)
