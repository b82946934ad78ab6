"""The virtual clock: run the executor's own stream of tasks in virtual time.

Each resource runs its tasks first in, first out. A task starts when its resource is free and its dependencies have
ended. The executor derives dependencies with the same function. Tasks are launched one after another; each launch takes
``Hardware.launch_s``.

Not modelled: the limit on launched tasks, waits for stops before an iteration is settled, and what ``task_seconds``
does not model.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from flexhybrid.core.hardware import LINKS, Hardware, Line, task_seconds
from flexhybrid.core.plan import stream
from flexhybrid.core.schedule.dependencies import HAZARDS, Dependencies
from flexhybrid.core.schedule.positions import Stops
from flexhybrid.core.task import RESOURCES, Task
from flexhybrid.core.trace import TraceEvent, iteration_ends
from flexhybrid.core.wave import Wave


def run(
    tasks: Iterable[Task],
    hardware: Hardware,
    hazards: Iterable[str] = HAZARDS,
    seconds_of: Callable[[Task], float] | None = None,
) -> list[TraceEvent]:
    """Run tasks, such as ``stream(wave)``, in virtual time from second 0; return their events in stream order.

    ``hazards``: those that make dependencies, as in ``Dependencies``. ``seconds_of``: price of a task (default: from
    the hardware's lines). Raise InputError for a task without a line.
    """
    dependencies = Dependencies(hazards)
    ends: dict[str, list[float]] = {resource: [] for resource in RESOURCES}
    lines: dict[tuple[str, str, str], Line] = {}
    trace: list[TraceEvent] = []
    launch_s, launched = hardware.launch_s, 0.0
    for task in tasks:
        resource, key = task.resource, (task.verb, task.resource, task.work.line)
        line = lines.get(key)
        if line is None:
            line = lines[key] = hardware.line(*key)
        own = ends[resource]
        start = own[-1] if own else 0.0
        launched += launch_s
        if launched > start:
            start = launched
        for other, ordinal in dependencies.add(task):
            end = ends[other][ordinal]
            if end > start:
                start = end
        end = start + (seconds_of(task) if seconds_of else task_seconds(line, resource, task.work))
        own.append(end)
        trace.append(TraceEvent(task, start, end))
    return trace


def answered(wave: Wave, answer_tokens: np.ndarray) -> Iterator[Task]:
    """Return the stream of a batch whose requests end after ``answer_tokens``, [requests of its queue]. As in the
    executor, the end of an answer is known when the next iteration is settled, or one iteration later."""
    num_sampled: Counter[int] = Counter()
    ended: list[list[int]] = []  # sampling step -> requests that end with it
    known, counted = set(), 0  # requests that ended in the first ``counted`` steps

    def until(_iteration: int, num_steps: int) -> Collection[int]:
        nonlocal counted
        known.update(*ended[counted:num_steps])
        counted = num_steps
        return known

    limits = (wave.queue.workload if wave.queue else wave.workload).max_tokens
    stops = Stops(until, lambda requests: bool((answer_tokens < limits).any()) and bool(requests))
    for task in stream(wave, stops):
        if task.verb == "sample":
            requests = task.payload.step.queued.tolist()
            num_sampled.update(requests)
            ended.append([request for request in requests if num_sampled[request] == answer_tokens[request]])
        yield task


class BusyResources:
    """A run with the busy share of each resource."""

    busy: dict[str, float]

    @property
    def binding(self) -> str:
        """Return the busiest resource."""
        return max(self.busy, key=lambda resource: self.busy[resource])


@dataclass(frozen=True)
class RunSummary(BusyResources):
    """Times, tokens and traffic of a run, from its trace. Simulated and measured runs have subclasses of their own.

    The prefill ends with the last sample of the first iteration. The decode lasts from there to the last sample of the
    last iteration that ``summarize`` counts. If a trace starts with a decode iteration, that iteration is called the
    prefill.
    """

    total_s: float  #: from the first task's start to the last sample's end
    prefill_s: float
    decode_s: float
    num_iterations: int  #: iterations in the trace, with the prefill
    num_decoded: int  #: iterations of the decode
    generated_tokens: int
    tokens_per_s: float  #: generated tokens / total_s
    decode_tokens_per_s: float  #: generated tokens of the decode's iterations / decode_s; 0 without a decode
    link_bytes: dict[str, dict[str, int]]  #: each of LINKS -> verb -> bytes over the whole run
    decode_link_bytes: dict[str, dict[str, int]]  #: the same for iterations 1, 2, …, with the weights that they load
    busy: dict[str, float]  #: resource -> busy share of the decode (of the whole run without a decode)


class SimulatedSummary(RunSummary):
    """Summary of a run in virtual time."""


class MeasuredSummary(RunSummary):
    """Summary of a run of the executor."""


Summary = TypeVar("Summary", bound=RunSummary)


def summarize(trace: list[TraceEvent], last: int = -1) -> SimulatedSummary:
    """Summarize the trace of ``run``. ``last``: index of the decode's last iteration, negative from the end (-1: the
    trace's last). Raise ValueError if the trace has no events or no such iteration."""
    return _summarize(trace, last, SimulatedSummary)


def summarize_measured(trace: list[TraceEvent], last: int = -1) -> MeasuredSummary:
    """Summarize the trace of the executor, as ``summarize`` does."""
    return _summarize(trace, last, MeasuredSummary)


def _summarize(trace: list[TraceEvent], last: int, kind: type[Summary]) -> Summary:
    if not trace:
        raise ValueError("a trace without events has no summary")
    begin = min(event.start_s for event in trace)
    ends = iteration_ends(trace)
    if len(ends) + last < 0:
        raise ValueError(f"a trace of {len(ends)} iterations has no summary that ends at iteration {last}")
    tokens: dict[int, int] = {}
    link_bytes: dict[str, dict[str, int]] = {link: {} for link in LINKS}
    decode_link_bytes: dict[str, dict[str, int]] = {link: {} for link in LINKS}
    for task, _, _ in trace:
        if task.verb == "sample":
            tokens[task.iteration] = tokens.get(task.iteration, 0) + task.work.tokens
        if task.resource in link_bytes:
            for total in (link_bytes, decode_link_bytes) if task.iteration else (link_bytes,):
                by_verb = total[task.resource]
                by_verb[task.verb] = by_verb.get(task.verb, 0) + task.work.link_bytes
    prefill_end, end = ends[0], max(ends)
    decode_end = max(ends[: len(ends) + last + 1])
    total_s, prefill_s, decode_s = end - begin, prefill_end - begin, decode_end - prefill_end
    window = (prefill_end, decode_end) if decode_s > 0 else (begin, end)
    busy: dict[str, float] = {}
    for task, start, stop in trace:
        inside = min(stop, window[1]) - max(start, window[0])
        busy[task.resource] = busy.get(task.resource, 0.0) + max(0.0, inside)
    span = max(window[1] - window[0], 1e-300)
    generated = sum(tokens.values())
    decoded = sum(tokens[iteration] for iteration in sorted(tokens)[1 : len(ends) + last + 1])
    return kind(
        total_s=total_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        num_iterations=len(ends),
        num_decoded=len(ends) + last,
        generated_tokens=generated,
        tokens_per_s=generated / max(total_s, 1e-300),
        decode_tokens_per_s=decoded / decode_s if decode_s > 0 else 0.0,
        link_bytes=link_bytes,
        decode_link_bytes=decode_link_bytes,
        busy={resource: seconds / span for resource, seconds in busy.items()},
    )
