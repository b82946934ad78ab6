"""Traces: the times of tasks, a check that every read saw the right version, and files for Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import NamedTuple

from flexhybrid.core.files import write_by_rename
from flexhybrid.core.hardware import LINKS
from flexhybrid.core.schedule.dependencies import Dependencies
from flexhybrid.core.task import Task


class TraceEvent(NamedTuple):
    """A task and the time at which it ran, in seconds from the trace's start. Traces have events in stream order."""

    task: Task
    start_s: float
    end_s: float


@dataclass
class LaneTimes:
    """The times of a lane's thread in a run."""

    tasks: int = 0  #: number of tasks
    planned_late_s: float = 0.0  #: idle time in which a task's dependencies had ended, but it was not planned yet
    hand_over_s: float = 0.0  #: idle time in which a planned task could have started
    busy_s: float = 0.0  #: from the tasks' starts to their ends
    cpu_s: float = 0.0  #: part of ``busy_s`` on a processor
    paced_s: float = 0.0  #: part of ``busy_s`` that was slept, to imitate the rate of a link or a disk
    queued_s: float | None = None  #: time, also between tasks, in which the thread was ready but no processor was free
    wake_ups: int | None = None  #: number of times that the thread slept
    preemptions: int | None = None  #: number of times that another thread took its processor

    @property
    def held_up_s(self) -> float:
        """Return the part of ``busy_s`` spent waiting: for a processor, the interpreter's lock, other threads of a
        kernel, or a disk."""
        return max(0.0, self.busy_s - self.cpu_s - self.paced_s)


@dataclass
class LineTimes:
    """Sums of work and time over tasks that one line of a machine prices."""

    tasks: int = 0
    flops: float = 0.0
    num_bytes: float = 0.0  #: link bytes for tasks of a link, else memory bytes
    calls: int = 0
    seconds: float = 0.0

    def add(self, task: Task, seconds: float) -> None:
        """Add a task."""
        work = task.work
        self.tasks += 1
        self.flops += work.flops
        self.num_bytes += work.link_bytes if task.resource in LINKS else work.memory_bytes
        self.calls += work.calls
        self.seconds += seconds

    def since(self, before: LineTimes) -> LineTimes:
        """Return the sums over tasks that were added since the copy ``before``."""
        return LineTimes(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


LineKey = tuple[str, str, str]  #: verb, resource and ``Work.line``: the arguments of ``Hardware.line``


def check_trace(trace: Iterable[TraceEvent], tolerance_s: float = 0.0) -> list[str]:
    """Return violations of the stream's order, as sentences; empty if every read saw the right version.

    The check replays memory in time order, independently of how dependencies are derived. Each elementary cell has the
    version of its last finished write, and the write in progress. A read is right if, at its start and end, every cell
    has the version of the stream's order and no write is in progress there. A write is right if it overlaps no other
    access and no later write came before it. ``tolerance_s`` shortens every event at its end, because a device's clock
    resolves half a microsecond.
    """
    events = list(trace)
    cells = _elementary_cells(event.task for event in events)
    expected = _expected_versions((event.task for event in events), cells)
    moments = []
    for index, event in enumerate(events):
        end = max(event.start_s, event.end_s - tolerance_s)
        # At equal times, ends come before starts, except for an empty interval, whose start comes first.
        moments.append((event.start_s, 1 if end > event.start_s else 0, index, "start"))
        moments.append((end, 0, index, "end"))
    moments.sort(key=lambda m: (m[0], m[1], m[2], m[3] == "end"))

    version: dict[tuple, int] = {}
    writing: dict[tuple, int] = {}
    violations: list[str] = []

    def complain(index: int, text: str) -> None:
        violations.append(f"{events[index].task.label()}: {text}")

    for _, _, index, moment in moments:
        task = events[index].task
        for access in task.reads:
            for cell in cells[access]:
                if cell in writing and writing[cell] != index:
                    complain(index, f"reads {cell} while {events[writing[cell]].task.label()} writes it")
                elif version.get(cell, -1) != expected[index, cell]:
                    complain(index, f"reads {cell} at version {version.get(cell, -1)}, not {expected[index, cell]}")
        for access in task.writes:
            for cell in cells[access]:
                if moment == "start":
                    if cell in writing:
                        complain(index, f"writes {cell} while {events[writing[cell]].task.label()} does")
                    writing[cell] = index
                else:
                    if version.get(cell, -1) > index:
                        complain(index, f"overwrites {cell} after the later {events[version[cell]].task.label()}")
                    writing.pop(cell, None)
                    version[cell] = index
    return violations


def _elementary_cells(tasks: Iterable[Task]) -> dict:
    """Return access -> the elementary cells that it covers. A cell is (space, lo) of the finest partition that all
    accesses make."""
    accesses = {access for task in tasks for access in (*task.reads, *task.writes)}
    bounds: dict[tuple, set[int]] = {}
    for access in accesses:
        bounds.setdefault(access.space, set()).update((access.lo, access.hi))
    ordered = {space: sorted(points) for space, points in bounds.items()}
    return {
        access: [(access.space, point) for point in ordered[access.space] if access.lo <= point < access.hi]
        for access in accesses
    }


def _expected_versions(tasks: Iterable[Task], cells: dict) -> dict:
    """Return (number of a reading task, cell) -> number of the task whose write it must see; -1 for initial data."""
    version: dict[tuple, int] = {}
    expected = {}
    for number, task in enumerate(tasks):
        for access in task.reads:
            for cell in cells[access]:
                expected[number, cell] = version.get(cell, -1)
        for access in task.writes:
            for cell in cells[access]:
                version[cell] = number
    return expected


def busy_seconds(trace: Iterable[TraceEvent]) -> dict[str, float]:
    """Return resource -> sum of its tasks' seconds."""
    busy: dict[str, float] = {}
    for task, start, end in trace:
        busy[task.resource] = busy.get(task.resource, 0.0) + end - start
    return busy


def idle_though_ready(trace: Iterable[TraceEvent], resource: str = "compute") -> list[tuple[TraceEvent, float]]:
    """Return a resource's events in stream order, each with the idle seconds before it in which it could have run.

    An event could run once the resource's previous task and all its dependencies had ended. The idle seconds are the
    cost of planning, launching and handing over. The trace must begin with its stream.
    """
    dependencies, ends, idle = Dependencies(), defaultdict(list), []
    for event in trace:
        task, start, end = event
        marks = dependencies.add(task)
        own = ends[task.resource]
        if task.resource == resource:
            ready = max((*own[-1:], *(ends[other][ordinal] for other, ordinal in marks)), default=0.0)
            idle.append((event, max(0.0, start - ready)))
        own.append(end)
    return idle


def iteration_ends(trace: Iterable[TraceEvent]) -> list[float]:
    """Return the time at which the last sample task of each iteration ended, in the order of iterations."""
    ends: dict[int, float] = {}
    for task, _, end in trace:
        if task.verb == "sample":
            ends[task.iteration] = max(end, ends.get(task.iteration, 0.0))
    return [ends[i] for i in sorted(ends)]


class TraceWindow:
    """A part of a trace: from the end of its first iteration to the end of iteration ``last``.

    ``last``: index, negative from the end; -2 excludes the last iteration, which has no loads for a next one. The first
    iteration is excluded because nothing comes before it to overlap with. An event at an edge counts by its share
    inside, because loads run ahead of their iteration. Raise ValueError if there is no iteration between these ends.
    """

    def __init__(self, trace: list[TraceEvent], last: int = -1):
        ends = iteration_ends(trace)
        self.num_iterations = len(ends) + last
        if self.num_iterations < 1:
            raise ValueError(f"a trace of {len(ends)} iterations has no window that ends at iteration {last}")
        self.trace, self.begin_s, self.end_s = trace, ends[0], ends[last]

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def inside_s(self, event: TraceEvent) -> float:
        """Return the seconds of an event inside the window."""
        return max(0.0, min(event.end_s, self.end_s) - max(event.start_s, self.begin_s))

    def busy_s(self, resource: str) -> float:
        """Return the seconds that a resource worked inside the window."""
        return sum(self.inside_s(event) for event in self.trace if event.task.resource == resource)

    def moved_bytes(self, resource: str) -> float:
        """Return the bytes that a link or a disk moved inside the window."""
        moved = 0.0
        for event in self.trace:
            task, start, end = event
            if task.resource == resource and end > self.begin_s and start < self.end_s:
                moved += task.work.link_bytes * (self.inside_s(event) / (end - start) if end > start else 1.0)
        return moved

    def idle_share(self) -> float:
        """Return the share of the window in which compute was idle although its next task could have run."""
        idle = idle_though_ready(self.trace)
        return sum(idle_s for event, idle_s in idle if self.begin_s < event.end_s <= self.end_s) / self.seconds


#: Column of ``lane_table`` -> field of ``LaneTimes``, in seconds.
LANE_COLUMNS = {
    "busy": "busy_s", "on a processor": "cpu_s", "paced": "paced_s", "held up": "held_up_s",
    "handed over": "hand_over_s", "planned late": "planned_late_s", "queued for a processor": "queued_s",
}  # fmt: skip


def lane_table(lanes: Mapping[str, LaneTimes]) -> list[list[str]]:
    """Return a table's head, and a row for each lane: milliseconds and counts of ``LaneTimes``."""
    table = [["lane", "tasks", *(f"{name}, ms" for name in LANE_COLUMNS), "slept", "lost its processor"]]
    for name, times in lanes.items():
        seconds = [getattr(times, field) for field in LANE_COLUMNS.values()]
        cells = ["" if value is None else f"{1e3 * value:.1f}" for value in seconds]
        counts = ["" if count is None else f"{count:,}" for count in (times.wake_ups, times.preemptions)]
        table.append([name, f"{times.tasks:,}", *cells, *counts])
    return table


def save_chrome_trace(
    path: str | Path, traces: dict[str, list[TraceEvent]], lanes: Mapping[str, LaneTimes] = {}
) -> None:
    """Write traces as Chrome trace events, which ui.perfetto.dev opens: a process for each trace, a row for each
    resource. ``lanes``: times of measured lanes, written as the file's other data."""
    events = []
    for pid, (name, trace) in enumerate(traces.items(), start=1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
        rows: dict[str, int] = {}
        for task, start, end in trace:
            if task.resource not in rows:
                rows[task.resource] = len(rows) + 1
                events.append(
                    {"ph": "M", "name": "thread_name", "pid": pid, "tid": rows[task.resource],
                     "args": {"name": task.resource}}
                )  # fmt: skip
            events.append(
                {"ph": "X", "name": task.verb, "pid": pid, "tid": rows[task.resource],
                 "ts": start * 1e6, "dur": (end - start) * 1e6,
                 "args": {"iteration": task.iteration, "layer": task.layer, "mini_batch": task.mini_batch,
                          **task.work._asdict()}}
            )  # fmt: skip
    other = {name: asdict(times) for name, times in lanes.items()}
    written = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"lanes": other}}
    write_by_rename(Path(path), json.dumps(written))
