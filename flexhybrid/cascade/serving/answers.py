"""How a request goes through a cascade: a model judges it, and its answer stands or the request goes on.

A model that raises, or whose logits are not numbers, gives no answer: its requests go on to the next larger model, and
are counted. Requests of a batch that raised are first tried one by one, so that one bad request does not fail the
others. Where no larger model is left, the surest answer of the smaller ones stands, marked as a fallback.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flexhybrid.cascade.models import Model, first_line
from flexhybrid.cascade.routes import ANSWERED, Cascade
from flexhybrid.cascade.thresholds.confidence import confidence, top_k_logits

BATCH = 64  #: requests given to a model at once


@dataclass
class Answer:
    """The answer to one request, and the models that it passed."""

    index: int
    output: object = None
    model: str | None = None  #: the model that answered; None: none could
    confidence: float | None = None
    is_fallback: bool = False  #: below that model's threshold, but all larger models failed
    tokens: int = 0  #: or slots, that the answer has
    visited: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  #: model -> reason

    def line(self) -> str:
        return json.dumps(self.__dict__, ensure_ascii=False)


class Judgement(NamedTuple):
    """A model's outputs for N requests, its confidence in them, and its failures."""

    outputs: list  #: [N]
    sure: np.ndarray  #: [N] NaN where it failed
    reasons: list[str | None]  #: [N] of the failures
    tokens: list[int]  #: [N] of each output


def serve(
    cascade: Cascade, models: Sequence[Model], requests: Sequence | np.ndarray, first_index: int = 0
) -> list[Answer]:
    """Send requests through the cascade's models (in its order, one a name)."""
    answers = [Answer(first_index + i) for i in range(len(requests))]
    at = np.zeros(len(requests), dtype=int)  # the model at which each request waits; len(models): answered
    for i, model in enumerate(models):
        waiting = np.flatnonzero(at == i)
        for start in range(0, len(waiting), BATCH):
            members = waiting[start : start + BATCH]
            batch_requests = requests[members] if isinstance(requests, np.ndarray) else [requests[m] for m in members]
            judgement = judge(cascade, i, model, batch_requests)
            at[members] = note(cascade, i, [answers[m] for m in members], judgement)
    return answers


def judge(cascade: Cascade, i: int, model: Model, requests: Sequence | np.ndarray) -> Judgement:
    """Return model i's outputs for requests and its confidence in them. Raises nothing that the model raises."""
    try:
        outputs = model.predict(requests)
        if len(outputs.outputs) != len(requests) or len(outputs.logits) != len(requests):
            raise ValueError(f"{len(outputs.outputs)} outputs for {len(requests)} requests")
        sure = confidence(top_k_logits(outputs.logits, cascade.top_k), outputs.counted, cascade.models[i].temperature)
    except Exception as error:  # any that a black box raises, or that its logits cause
        if len(requests) == 1:
            return Judgement([None], np.array([np.nan]), [f"{type(error).__name__}: {first_line(error)}"], [0])
        singles = [judge(cascade, i, model, requests[j : j + 1]) for j in range(len(requests))]
        return Judgement(
            [output for single in singles for output in single.outputs],
            np.concatenate([single.sure for single in singles]),
            [reason for single in singles for reason in single.reasons],
            [count for single in singles for count in single.tokens],
        )
    reasons = ["logits that are no numbers" if bad else None for bad in np.isnan(sure)]
    return Judgement(outputs.outputs, sure, reasons, outputs.counted.sum(axis=1).tolist())


def note(cascade: Cascade, i: int, answers: list[Answer], judgement: Judgement) -> np.ndarray:
    """Record model i's judgement; return the model at which each request waits next (len(models): none)."""
    name, end = cascade.names[i], len(cascade.models)
    to = cascade.next_model(i, judgement.sure)
    for j, (answer, output, sure, reason, tokens) in enumerate(zip(answers, *judgement, strict=True)):
        answer.visited.append(name)
        if np.isnan(sure):
            answer.failed[name] = reason or "no reason"
            to[j] = i + 1
        elif to[j] == ANSWERED or answer.confidence is None or sure > answer.confidence:
            answer.output, answer.model, answer.confidence, answer.tokens = output, name, float(sure), tokens
            answer.is_fallback = bool(to[j] != ANSWERED)  # until a larger model answers
    return np.where(to == ANSWERED, end, to)
