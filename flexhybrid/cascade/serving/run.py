"""``flexhybrid cascade run``: a file of requests through a cascade of local models.

A chunk of requests goes through the models from small to large; each model gets those that are on their way to it. Of
a model that raises, or whose logits are no numbers, no answer is taken: its requests go on to the next larger model,
and are counted. Requests of a batch that raised are tried one by one first, so that one does not carry all along. Where
there is no larger model, the surest answer of the smaller ones stands, marked as a fallback.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flexhybrid.cascade.data import read_requests
from flexhybrid.cascade.models import Model, check_source, first_line, load_model, named_path, named_policies
from flexhybrid.cascade.routes import ANSWERED, Cascade
from flexhybrid.cascade.thresholds.confidence import confidence, top_k_logits
from flexhybrid.core.errors import InputError

CHUNK = 1024  #: requests on their way through the models together
BATCH = 64  #: of these, given to a model at once


@dataclass
class Answer:
    """What became of one request."""

    index: int
    output: object = None
    model: str | None = None  #: who answered; None: nobody could
    confidence: float | None = None
    is_fallback: bool = False  #: below that model's threshold, but all that came after it failed
    visited: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  #: model -> why

    def line(self) -> str:
        return json.dumps(self.__dict__, ensure_ascii=False)


class Judgement(NamedTuple):
    """What a model says of N requests."""

    outputs: list  #: [N]
    sure: np.ndarray  #: [N] NaN where it failed
    why: list[str | None]  #: [N] of those


def serve(
    cascade: Cascade, models: Sequence[Model], requests: Sequence, first_index: int = 0, batch: int = BATCH
) -> list[Answer]:
    """Send requests through the cascade's models (in its order, one a name)."""
    answers = [Answer(first_index + i) for i in range(len(requests))]
    at = np.zeros(len(requests), dtype=int)  # where each request waits; len(models): over
    for i, model in enumerate(models):
        waiting = np.flatnonzero(at == i)
        for start in range(0, len(waiting), batch):
            here = waiting[start : start + batch]
            judged = judge(cascade, i, model, _pick(requests, here))
            at[here] = note(cascade, i, [answers[m] for m in here], judged)
    return answers


def _pick(requests: Sequence, places: np.ndarray) -> Sequence:
    return requests[places] if isinstance(requests, np.ndarray) else [requests[i] for i in places]


def judge(cascade: Cascade, i: int, model: Model, requests: Sequence) -> Judgement:
    """What model i answers to requests, and how sure it is. Raises nothing that the model does."""
    try:
        found = model.predict(requests)
        if len(found.outputs) != len(requests) or len(found.logits) != len(requests):
            raise ValueError(f"{len(found.outputs)} outputs for {len(requests)} requests")
        sure = confidence(top_k_logits(found.logits, cascade.top_k), found.counted, cascade.models[i].temperature)
    except Exception as error:  # whatever a black box raises, or gives for logits
        if len(requests) == 1:
            return Judgement([None], np.array([np.nan]), [f"{type(error).__name__}: {first_line(error)}"])
        alone = [judge(cascade, i, model, requests[j : j + 1]) for j in range(len(requests))]
        outputs, sure, why = zip(*alone)
        return Judgement(sum(outputs, []), np.concatenate(sure), sum(why, []))
    return Judgement(found.outputs, sure, ["logits that are no numbers" if bad else None for bad in np.isnan(sure)])


def note(cascade: Cascade, i: int, answers: list[Answer], judged: Judgement) -> np.ndarray:
    """Put down what model i said; returns where each request waits next (len(models): nowhere)."""
    name, over = cascade.names[i], len(cascade.models)
    to = cascade.next_model(i, judged.sure)
    for place, (answer, output, sure, why) in enumerate(zip(answers, *judged, strict=True)):
        answer.visited.append(name)
        if np.isnan(sure):
            answer.failed[name] = why
            to[place] = i + 1
        elif to[place] == ANSWERED or answer.confidence is None or sure > answer.confidence:
            answer.output, answer.model, answer.confidence = output, name, float(sure)
            answer.is_fallback = bool(to[place] != ANSWERED)  # until a larger model answers
    return np.where(to == ANSWERED, over, to)


@dataclass(frozen=True)
class RunOptions:
    """What the command was asked."""

    cascade: Path
    input: Path | None  #: None with Ray: requests come to the endpoint alone, until Ctrl-C
    output: Path | None
    models: Sequence[str] = ()  #: NAME=PATH, in place of where the cascade says they are
    max_tokens: int = 1
    policies: Sequence[str] = ()  #: NAME=POLICY, of language models
    engine: str = "local"  #: or "ray"
    plan: Path | None = None  #: Ray: what `flexhybrid cascade plan` wrote; None: a replica of each model
    port: int = 8000  #: Ray: of the endpoint
    restart: bool = False  #: over the answers of an earlier run
    on_progress: Callable[[int], None] | None = None


def run(options: RunOptions, say: Callable[[str], None] = print) -> dict:
    """The command: a line of JSON a request, in the input's order, and a record of who answered what.

    Raises InputError, before any request is served, for models that are not to be found.
    """
    if (options.input is None) != (options.output is None) or (options.input is None and options.engine != "ray"):
        raise InputError("-i and -o name the requests and the answers; only --engine ray serves without a file")
    if options.output is not None and options.output.exists() and not options.restart:
        raise InputError(f"{options.output} is there already: name another file, or write over it with --restart")
    cascade = Cascade.load(options.cascade)
    sources = {model.name: model.source for model in cascade.models}
    for text in options.models:
        name, source = named_path(text)
        if name not in sources:
            raise InputError(f"{options.cascade} has no model {name!r}; it has {', '.join(sources)}")
        sources[name] = source
    if missing := [name for name, source in sources.items() if source is None]:
        raise InputError(f"where is model {missing[0]}? Say it with --models {missing[0]}=PATH")
    for name, source in sources.items():
        check_source(name, source, cascade.task)
    policies = named_policies(options.policies, cascade.names, cascade.task)
    loads = [
        functools.partial(
            load_model, name, source, cascade.task, options.max_tokens, cascade.top_k, **policies.get(name, {})
        )
        for name, source in sources.items()
    ]
    opened = _on_ray(cascade, loads, options, say) if options.engine == "ray" else _here(cascade, loads)
    if options.input is None:
        return _until_stopped(opened, options)
    requests, labels = read_requests(options.input, cascade.task)
    counts = _Counts(cascade)
    try:
        with opened as answer, options.output.open("w", encoding="utf-8") as out:
            for start in range(0, len(requests), CHUNK):
                answers = answer(requests[start : start + CHUNK], start)
                out.writelines(one.line() + "\n" for one in answers)
                counts.add(answers, None if labels is None else labels[start : start + CHUNK])
                if options.on_progress:
                    options.on_progress(len(answers))
    except OSError as error:
        raise InputError(f"cannot write {options.output}: {error.strerror or error}") from None
    return {"path": str(options.output), **counts.record()}


#: Takes requests and the index of the first, gives their answers.
AnswerAll = Callable[[Sequence, int], list[Answer]]


@contextlib.contextmanager
def _here(cascade: Cascade, loads: Sequence[Callable[[], Model]]) -> Iterator[AnswerAll]:
    """The models in this process."""
    models = [load() for load in loads]
    try:
        yield functools.partial(serve, cascade, models)
    finally:
        for model in models:
            if hasattr(model, "close"):
                model.close()


def _on_ray(cascade: Cascade, loads: Sequence[Callable[[], Model]], options: RunOptions, say):
    """The models as deployments of Ray Serve."""
    from flexhybrid.cascade.serving.ray_serve import deployed, sizes_of

    return deployed(cascade, loads, sizes_of(cascade, options.plan), options.port, say)


def _until_stopped(opened, options: RunOptions) -> dict:
    with opened, contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)
    return {"port": options.port}


class _Counts:
    """Who computed, answered and failed how often."""

    def __init__(self, cascade: Cascade):
        self.cascade = cascade
        self.answered, self.visited, self.failed = Counter(), Counter(), Counter()
        self.first_failure: dict[str, str] = {}  # why, by model
        self.num_requests, self.num_right, self.num_fallbacks = 0, 0, 0
        self.has_labels = True

    def add(self, answers: list[Answer], labels) -> None:
        self.num_requests += len(answers)
        self.has_labels &= labels is not None
        for place, answer in enumerate(answers):
            self.answered[answer.model] += 1
            self.visited.update(answer.visited)
            self.failed.update(answer.failed.keys())
            self.first_failure = answer.failed | self.first_failure
            self.num_fallbacks += answer.is_fallback
            if labels is not None:
                self.num_right += _is_right(answer.output, labels[place])

    def record(self) -> dict:
        cascade = self.cascade
        rows = [
            {"name": name, "answered": self.answered[name], "visited": self.visited[name], "failed": self.failed[name],
             "first_failure": self.first_failure.get(name)}
            for name in cascade.names
        ]  # fmt: skip
        expected, cost, share = cascade.expected, None, None
        if all(getattr(model, cascade.cost) is not None for model in cascade.models):  # a run needs no costs
            cost = sum(row["visited"] * c for row, c in zip(rows, cascade.costs.tolist())) / self.num_requests
            share = cost / float(cascade.costs[-1])
        return {
            "num_requests": self.num_requests, "unanswered": self.answered[None], "fallbacks": self.num_fallbacks,
            "models": rows, "accuracy": self.num_right / self.num_requests if self.has_labels else None,
            "expected_accuracy": expected.accuracy if expected else None, "cost": cascade.cost,
            "cost_per_request": cost, "share_of_largest": share,
        }  # fmt: skip


def _is_right(output, label) -> bool:
    """Against a class, the positions of an extractive answer, or a text."""
    if isinstance(label, np.ndarray):
        return output is not None and np.array_equal(np.atleast_1d(output), label)
    return output.strip() == label.strip() if isinstance(output, str) and isinstance(label, str) else output == label


def describe_run(result: dict) -> str:
    """For people."""
    num = result["num_requests"]
    lines = [f"{'model':16s} {'computes':>9s} {'answers':>8s} {'failed':>7s}"]
    for row in result["models"]:
        why = f"  first: {row['first_failure']}" if row["failed"] else ""
        lines.append(
            f"{row['name']:16s} {row['visited'] / num:9.1%} {row['answered'] / num:8.1%} {row['failed']:7d}{why}"
        )
    said = [f"{num} requests, {result['unanswered']} unanswered"]
    if result["fallbacks"]:
        said.append(f"{result['fallbacks']} by a model that was not sure, since all larger ones failed")
    if result["accuracy"] is not None:
        said.append(f"accuracy {result['accuracy']:.2%}")
    if result["cost_per_request"] is not None:
        said.append(
            f"{result['cost']} of a request {result['cost_per_request']:.4g}, {result['share_of_largest']:.1%} of the "
            "largest's"
        )
    return "\n".join([*lines, f"\n{', '.join(said)}: {result['path']}"])
