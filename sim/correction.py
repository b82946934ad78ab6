"""Correct a machine's lines by the measured times of a few iterations of a job (trials).

Each line is scaled by its tasks' measured seconds. If tasks of very different sizes have different ratios, the line's
overhead and slope are fitted again. A step may still take longer than on the virtual clock with the corrected lines.
This waiting has no line; it becomes one factor on the resource that limits the step.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from flexhybrid.core.hardware import ALONE_SUFFIX, CALL_S, Hardware, Line, resource_of_line, task_seconds
from flexhybrid.core.policy import Policy
from flexhybrid.core.trace import LineKey, LineTimes, TraceEvent
from sim import virtual_clock

TRIALS = "corrected by trials"  #: key of a record's notes: measured / known seconds by line and by resource
OUTLIER = 2.0  #: a task counts as disturbed if its measured / known seconds exceed this multiple of the line's median
APART = 1.5  #: ratio of the largest to the smallest task, in known seconds, above which a line is fitted again
ALIKE = 0.03  #: relative difference up to which measured / known ratios count as equal
LEAST_REPORTED, MOST_REPORTED = 0.03, 3  #: least change of a line that is reported, and number of reported lines

Run = tuple[Policy, Mapping[LineKey, LineTimes]]  #: a policy and the times of its iterations


class _Point(NamedTuple):
    """The mean task of a line in a run."""

    work_s: float  #: seconds by the known line, without its overhead
    known_s: float  #: seconds by the known line
    measured_s: float
    sample: tuple[float, float, float]  #: (flops, bytes, measured seconds)
    tasks: int


def times_of(trace: list[TraceEvent], hardware: Hardware) -> dict[LineKey, LineTimes]:
    """Return the times of each line in a trace, without the first iteration and disturbed tasks (OUTLIER)."""
    first = min(event.task.iteration for event in trace)
    events: dict[LineKey, list[tuple[TraceEvent, float]]] = {}
    for event in trace:
        task, start, end = event
        if task.iteration > first:
            key = task.verb, task.resource, task.work.line
            known_s = task_seconds(hardware.line(*key), task.resource, task.work)
            events.setdefault(key, []).append((event, (end - start) / max(known_s, 1e-9)))
    times = {key: LineTimes() for key in events}
    for key, of_line in events.items():
        limit = OUTLIER * statistics.median(ratio for _, ratio in of_line)
        for (task, start, end), ratio in of_line:
            if ratio <= limit:
                times[key].add(task, end - start)
    return times


def corrected(hardware: Hardware, runs: Iterable[Run]) -> Hardware:
    """Return the machine with its lines corrected by these runs. Lines without tasks scale like the others of their
    resource. The notes (TRIALS) list the factors, largest effect first. The corrected lines include contention."""
    hardware = hardware.contended
    points, known = _points_by_line(hardware, runs)
    lines = {name: _refitted(known[name], of_line) for name, of_line in points.items()}
    changes = {name: _change(of_line) for name, of_line in points.items()}
    others = hardware.scaled({resource: _change(of_all)[1] for resource, of_all in _by_resource(points).items()})
    ordered = sorted(changes, key=lambda name: -abs(changes[name][0]))
    note = {"lines": {name: changes[name][1] for name in ordered}, "waiting": {}}
    return replace(hardware, lines={**others.lines, **lines}, notes={**hardware.notes, TRIALS: note})


def resource_ratios(hardware: Hardware, run: Run, least_s: float) -> dict[str, float]:
    """Return measured over known seconds of each resource whose tasks took ``least_s`` or more."""
    by_resource = _by_resource(_points_by_line(hardware.contended, [run])[0])
    seconds = {resource: sum(p.tasks * p.measured_s for p in points) for resource, points in by_resource.items()}
    return {resource: _change(points)[1] for resource, points in by_resource.items() if seconds[resource] >= least_s}


def _points_by_line(hardware: Hardware, runs: Iterable[Run]) -> tuple[dict[str, list[_Point]], dict[str, Line]]:
    """Return, by name of a line, the mean task of each run that has some, and the known line."""
    points: dict[str, list[_Point]] = {}
    known: dict[str, Line] = {}
    for policy, times in runs:
        at_work = hardware.at_work(policy)
        for key, of_line in times.items():
            line, name = at_work.line(*key), key[0] + key[2]
            if policy.stays_on_device and name + ALONE_SUFFIX in hardware.lines:
                name += ALONE_SUFFIX
            if of_line.tasks and (point := _mean_task(line, of_line)).known_s > 0 and point.measured_s > 0:
                points.setdefault(name, []).append(point)
                known[name] = line
    return points, known


def _by_resource(points: Mapping[str, list[_Point]]) -> dict[str, list[_Point]]:
    resources: dict[str, list[_Point]] = {}
    for name, of_line in points.items():
        resources.setdefault(resource_of_line(name) or "", []).extend(of_line)
    return resources


def _mean_task(line: Line, times: LineTimes) -> _Point:
    flops, num_bytes = times.flops / times.tasks, times.num_bytes / times.tasks
    known_s, measured_s = line.at(flops, num_bytes), (times.seconds - CALL_S * times.calls) / times.tasks
    return _Point(known_s - line.overhead_s, known_s, measured_s, (flops, num_bytes, measured_s), times.tasks)


def _change(points: list[_Point]) -> tuple[float, float]:
    """Return (measured - known, measured / known) seconds of all tasks of a line."""
    known, measured = (sum(p.tasks * s for p, s in zip(points, column)) for column in zip(*(p[1:3] for p in points)))
    return measured - known, measured / known


def _refitted(line: Line, points: list[_Point]) -> Line:
    """Return the line scaled to the points, or with overhead and slope fitted to them (APART, ALIKE)."""
    from scipy.optimize import nnls  # takes 0.25 s to load

    work_s, known_s, measured_s = (np.array(column) for column in zip(*(point[:3] for point in points)))
    times, ratios = _change(points)[1], measured_s / known_s
    overhead_s, slope = times * line.overhead_s, times
    if np.ptp(ratios) > ALIKE * times and work_s.max() > APART * work_s.min():
        rows = np.stack([np.ones_like(work_s), work_s], axis=1) / measured_s[:, None]
        (overhead_s, slope), _ = nnls(rows, np.ones_like(work_s))
    terms = {"s_per_flop": float(slope) * line.s_per_flop, "s_per_byte": float(slope) * line.s_per_byte}
    return Line(overhead_s=float(overhead_s), **terms, samples=(*line.samples, *(point.sample for point in points)))


def with_waiting(hardware: Hardware, traces: Iterable[tuple[Policy, list[TraceEvent]]], last: int) -> Hardware:
    """Return the machine with the tasks of each limiting resource slowed by a factor, which stands for waiting.

    The factor is the median of measured / virtual decode seconds over the runs that the resource limits. ``last``: see
    ``virtual_clock.summarize``.
    """
    ratios: dict[str, list[float]] = {}
    for policy, trace in traces:
        walked = virtual_clock.run((event.task for event in trace), hardware.at_work(policy))
        predicted, measured = virtual_clock.summarize(walked, last), virtual_clock.summarize_measured(trace, last)
        ratios.setdefault(predicted.binding, []).append(measured.decode_s / predicted.decode_s)
    waiting = {resource: statistics.median(of_resource) for resource, of_resource in ratios.items()}
    hardware = hardware.scaled(waiting)
    return replace(hardware, notes={**hardware.notes, TRIALS: {**hardware.notes[TRIALS], "waiting": waiting}})


def in_words(hardware: Hardware) -> str:
    """Return in words what trials changed: the most changed lines, and the waiting of resources."""
    note = hardware.notes[TRIALS]
    changed = [f"{name} takes {of:.2f}" for name, of in note["lines"].items() if abs(of - 1) > LEAST_REPORTED]
    most = ", ".join(changed[:MOST_REPORTED])
    parts = [f"{most} of the profile's time" if changed else "tasks take the profile's time"]
    parts += [
        f"a step limited by {resource} takes {of:.2f} of what its tasks explain"
        for resource, of in note["waiting"].items()
        if abs(of - 1) > LEAST_REPORTED
    ]
    return "; ".join(parts)
