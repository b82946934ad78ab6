"""``flexhybrid cascade run``: a file of requests through a cascade of local models.

A chunk of requests goes through the models from small to large; each model gets those that are on their way to it. Of
a model that raises, or whose logits are no numbers, no answer is taken: its requests go on to the next larger model,
and are counted. Requests of a batch that raised are tried one by one first, so that one does not carry all along.
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

import numpy as np

from flexhybrid.cascade.confidence import confidence, top_k_logits
from flexhybrid.cascade.data import read_requests
from flexhybrid.cascade.models import Model, load_model, named_path, named_policies
from flexhybrid.cascade.routes import ANSWERED, Cascade
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
    visited: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  #: models that raised, or gave logits that are no numbers

    def line(self) -> str:
        return json.dumps(self.__dict__, ensure_ascii=False)


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
            outputs, sure = judge(cascade, i, model, _pick(requests, here))
            at[here] = note(cascade, i, [answers[m] for m in here], outputs, sure)
    return answers


def _pick(requests: Sequence, places: np.ndarray) -> Sequence:
    return requests[places] if isinstance(requests, np.ndarray) else [requests[i] for i in places]


def judge(cascade: Cascade, i: int, model: Model, requests: Sequence) -> tuple[list, np.ndarray]:
    """What model i answers to each of N requests, and how sure it is [N]: NaN where it raised, or gave logits that are
    no numbers."""
    try:
        found = model.predict(requests)
        if len(found.outputs) != len(requests) or len(found.logits) != len(requests):
            raise ValueError(f"{len(found.outputs)} outputs for {len(requests)} requests")
    except Exception:  # whatever a black box raises
        if len(requests) == 1:
            return [None], np.array([np.nan])
        alone = [judge(cascade, i, model, requests[j : j + 1]) for j in range(len(requests))]
        return [outputs[0] for outputs, _ in alone], np.concatenate([sure for _, sure in alone])
    logits = top_k_logits(found.logits, cascade.top_k)
    return found.outputs, confidence(logits, found.counted, cascade.models[i].temperature)


def note(cascade: Cascade, i: int, answers: list[Answer], outputs: list, sure: np.ndarray) -> np.ndarray:
    """Put down what model i said; returns where each request waits next (len(models): nowhere)."""
    name, over = cascade.names[i], len(cascade.models)
    to = cascade.next_model(i, sure)
    for place, answer in enumerate(answers):
        answer.visited.append(name)
        if np.isnan(sure[place]):
            answer.failed.append(name)
            to[place] = i + 1
        elif to[place] == ANSWERED:
            answer.output, answer.model = outputs[place], name
            answer.confidence = float(sure[place])
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
    on_progress: Callable[[int], None] | None = None


def run(options: RunOptions, say: Callable[[str], None] = print) -> dict:
    """The command: a line of JSON a request, in the input's order, and a record of who answered what.

    Raises InputError, before any request is served, for models that are not to be found.
    """
    if (options.input is None) != (options.output is None) or (options.input is None and options.engine != "ray"):
        raise InputError("-i and -o name the requests and the answers; only --engine ray serves without a file")
    cascade = Cascade.load(options.cascade)
    sources = {model.name: model.source for model in cascade.models}
    for text in options.models:
        name, source = named_path(text)
        if name not in sources:
            raise InputError(f"{options.cascade} has no model {name!r}; it has {', '.join(sources)}")
        sources[name] = source
    if missing := [name for name, source in sources.items() if source is None]:
        raise InputError(f"where is model {missing[0]}? Say it with --models {missing[0]}=PATH")
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
    from flexhybrid.cascade.serve import deployed, sizes_of

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
        self.num_requests, self.num_right = 0, 0
        self.has_labels = True

    def add(self, answers: list[Answer], labels) -> None:
        self.num_requests += len(answers)
        self.has_labels &= labels is not None
        for place, answer in enumerate(answers):
            self.answered[answer.model] += 1
            self.visited.update(answer.visited)
            self.failed.update(answer.failed)
            if labels is not None:
                self.num_right += _is_right(answer.output, labels[place])

    def record(self) -> dict:
        cascade = self.cascade
        rows = [
            {"name": name, "answered": self.answered[name], "visited": self.visited[name], "failed": self.failed[name]}
            for name in cascade.names
        ]  # fmt: skip
        expected = cascade.expected
        return {
            "num_requests": self.num_requests, "unanswered": self.answered[None], "models": rows,
            "accuracy": self.num_right / self.num_requests if self.has_labels else None,
            "expected_accuracy": expected.accuracy if expected else None, "cost": cascade.cost,
            "cost_per_request": sum(row["visited"] * c for row, c in zip(rows, cascade.costs)) / self.num_requests,
            "share_of_largest": sum(row["visited"] * c for row, c in zip(rows, cascade.costs))
            / (self.num_requests * float(cascade.costs[-1])),
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
        lines.append(f"{row['name']:16s} {row['visited'] / num:9.1%} {row['answered'] / num:8.1%} {row['failed']:7d}")
    right = "" if result["accuracy"] is None else f"accuracy {result['accuracy']:.2%}, "
    lines.append(
        f"\n{num} requests, {result['unanswered']} unanswered: {right}{result['cost']} of a request "
        f"{result['cost_per_request']:.4g}, {result['share_of_largest']:.1%} of the largest's: {result['path']}"
    )
    return "\n".join(lines)
