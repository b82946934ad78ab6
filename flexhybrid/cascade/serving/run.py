"""``flexhybrid cascade run``: a file of requests through a cascade of local models, or of deployments of Ray Serve.

A chunk of requests goes through the models from small to large (``answers``); each model gets those that reach it.
"""

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flexhybrid.cascade.data import read_requests
from flexhybrid.cascade.models import Model, check_source, load_model, named_path, named_policies
from flexhybrid.cascade.routes import Cascade
from flexhybrid.cascade.serving.answers import Answer, serve
from flexhybrid.core.errors import InputError, file_errors

CHUNK = 1024  #: requests on their way through the models together


@dataclass(frozen=True)
class CascadeRunOptions:
    """The options of ``flexhybrid cascade run``."""

    cascade: Path
    input: Path | None = None  #: None with Ray: requests come to the endpoint alone, until Ctrl-C
    output: Path | None = None
    models: Sequence[str] = ()  #: NAME=PATH, in place of the cascade's own paths
    max_tokens: int = 1
    policies: Sequence[str] = ()  #: NAME=POLICY, of language models
    engine: str = "local"  #: or "ray"
    plan: Path | None = None  #: Ray: the file of `flexhybrid cascade plan`; None: a replica of each model
    port: int = 8000  #: Ray: of the endpoint
    restart: bool = False  #: over the answers of an earlier run
    on_progress: Callable[[int], object] | None = None


def run(options: CascadeRunOptions, say: Callable[[str], None] = print) -> dict:
    """Write a line of JSON a request, in the input's order; return a record of the models' answers.

    Raises InputError, before any request is served, for models that cannot be found.
    """
    files = (options.input, options.output)
    if None in files and (files != (None, None) or options.engine != "ray"):
        raise InputError("-i and -o name the requests and the answers; only --engine ray serves without a file")
    if options.output is not None and options.output.exists() and not options.restart:
        raise InputError(f"{options.output} is there already: name another file, or write over it with --restart")
    cascade = Cascade.load(options.cascade)
    loads = _loads(cascade, options)
    if options.engine == "ray":
        from flexhybrid.cascade.serving.ray_serve import deployed, sizes_of

        opened = deployed(cascade, loads, sizes_of(cascade, options.plan), options.port, say)
    else:
        opened = _here(cascade, loads)
    if options.input is None or options.output is None:
        with opened, contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)
        return {"port": options.port}
    requests, labels = read_requests(options.input, cascade.task)
    counts = _Counts(cascade)
    with file_errors(f"write {options.output}"), opened as answer, options.output.open("w", encoding="utf-8") as out:
        for start in range(0, len(requests), CHUNK):
            answers = answer(requests[start : start + CHUNK], start)
            out.writelines(line.line() + "\n" for line in answers)
            counts.add(answers, None if labels is None else labels[start : start + CHUNK])
            if options.on_progress:
                options.on_progress(len(answers))
    return {"path": str(options.output), **counts.record()}


def _loads(cascade: Cascade, options: CascadeRunOptions) -> list[Callable[[], Model]]:
    """Return a function for each model that loads it; raises InputError for a model that cannot be found."""
    sources = {model.name: model.source for model in cascade.models}
    for text in options.models:
        name, source = named_path(text)
        if name not in sources:
            raise InputError(f"{options.cascade} has no model {name!r}; it has {', '.join(sources)}")
        sources[name] = source
    if missing := [name for name, source in sources.items() if source is None]:
        raise InputError(f"where is model {missing[0]}? Say it with --models {missing[0]}=PATH")
    policies, loads = named_policies(options.policies, cascade.names, cascade.task), []
    for name, source in sources.items():
        check_source(name, source or "", cascade.task)
        more = policies.get(name, {})
        load = functools.partial(load_model, name, source, cascade.task, options.max_tokens, cascade.top_k, **more)
        loads.append(load)
    return loads


#: Takes requests and the index of the first, returns their answers.
AnswerAll = Callable[[Sequence | np.ndarray, int], list[Answer]]


@contextlib.contextmanager
def _here(cascade: Cascade, loads: Sequence[Callable[[], Model]]) -> Iterator[AnswerAll]:
    """Hold the models in this process."""
    with contextlib.ExitStack() as stack:
        models = []
        for load in loads:
            models.append(load())
            stack.callback(models[-1].close)
        yield functools.partial(serve, cascade, models)


class _Counts:
    """How often each model computed, answered and failed."""

    def __init__(self, cascade: Cascade):
        self.cascade = cascade
        self.answered, self.visited, self.failed = Counter(), Counter(), Counter()
        self.first_failure: dict[str, str] = {}  # reason, by model
        self.num_requests, self.num_right, self.num_fallbacks = 0, 0, 0
        self.has_labels = True

    def add(self, answers: list[Answer], labels) -> None:
        self.num_requests += len(answers)
        self.has_labels &= labels is not None
        for i, answer in enumerate(answers):
            self.answered[answer.model] += 1
            self.visited.update(answer.visited)
            self.failed.update(answer.failed.keys())
            self.first_failure = answer.failed | self.first_failure
            self.num_fallbacks += answer.is_fallback
            if labels is not None:
                self.num_right += _is_right(answer.output, labels[i])

    def record(self) -> dict:
        cascade, expected = self.cascade, self.cascade.expected
        counters = {"answered": self.answered, "visited": self.visited, "failed": self.failed}
        rows = []
        for name in cascade.names:
            counts = {key: counter[name] for key, counter in counters.items()}
            rows.append({"name": name, **counts, "first_failure": self.first_failure.get(name)})
        cost, share = None, None
        if all(getattr(model, cascade.cost) is not None for model in cascade.models):  # a run needs no costs
            cost = sum(row["visited"] * c for row, c in zip(rows, cascade.costs.tolist())) / self.num_requests
            share = cost / float(cascade.costs[-1])
        return {
            "num_requests": self.num_requests,
            "unanswered": self.answered[None],
            "fallbacks": self.num_fallbacks,
            "models": rows,
            "accuracy": self.num_right / self.num_requests if self.has_labels else None,
            "expected_accuracy": expected.accuracy if expected else None,
            "cost": cascade.cost,
            "cost_per_request": cost,
            "share_of_largest": share,
        }


def _is_right(output, label) -> bool:
    """Compare an output with a class, the positions of an extractive answer, or a text."""
    if isinstance(label, np.ndarray):
        return output is not None and np.array_equal(np.atleast_1d(output), label)
    return output.strip() == label.strip() if isinstance(output, str) and isinstance(label, str) else output == label


def describe_run(result: dict) -> str:
    """Return the record of a run as text."""
    num = result["num_requests"]
    lines = [f"{'model':16s} {'computes':>9s} {'answers':>8s} {'failed':>7s}"]
    for row in result["models"]:
        reason = f"  first: {row['first_failure']}" if row["failed"] else ""
        lines.append(
            f"{row['name']:16s} {row['visited'] / num:9.1%} {row['answered'] / num:8.1%} {row['failed']:7d}{reason}"
        )
    totals = [f"{num} requests, {result['unanswered']} unanswered"]
    if result["fallbacks"]:
        totals.append(f"{result['fallbacks']} by a model that was not sure, since all larger ones failed")
    if result["accuracy"] is not None:
        totals.append(f"accuracy {result['accuracy']:.2%}")
    if result["cost_per_request"] is not None:
        totals.append(
            f"{result['cost']} of a request {result['cost_per_request']:.4g}, {result['share_of_largest']:.1%} of the "
            "largest's"
        )
    return "\n".join([*lines, f"\n{', '.join(totals)}: {result['path']}"])
