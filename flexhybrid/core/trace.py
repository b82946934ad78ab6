"""Traces: what ran when, the proof that every read saw its version, and the file that Perfetto opens."""

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
    """A task with the time it ran, in seconds from the trace's start. A trace lists events in stream order."""

    task: Task
    start_s: float
    end_s: float


@dataclass
class LaneTimes:
    """The time of a lane's thread in a run. ``held_up_s`` of its tasks' time it waited for a processor, for the
    interpreter's lock, for other threads of its kernels, or for a disk."""

    tasks: int = 0
    planned_late_s: float = 0.0  #: all that a task waits for had ended, but the task was not planned yet
    hand_over_s: float = 0.0  #: the planned task could have begun, but the thread had not
    busy_s: float = 0.0  #: from the tasks' starts to their ends
    cpu_s: float = 0.0  #: of ``busy_s``: on a processor
    paced_s: float = 0.0  #: of ``busy_s``: asleep, as the pace of a link or a disk asks
    queued_s: float | None = None  #: in tasks and between them: ready to run, but no processor was free
    wake_ups: int | None = None  #: how often the thread went to sleep and came back
    preemptions: int | None = None  #: how often it lost its processor to another thread

    @property
    def held_up_s(self) -> float:
        return max(0.0, self.busy_s - self.cpu_s - self.paced_s)


@dataclass
class LineTimes:
    """Work and time of some tasks that one line of a machine prices, added up."""

    tasks: int = 0
    flops: float = 0.0
    num_bytes: float = 0.0  #: over the link, of a link's tasks; else of memory
    calls: int = 0
    seconds: float = 0.0

    def add(self, task: Task, seconds: float) -> None:
        """Take one more task."""
        work = task.work
        self.tasks += 1
        self.flops += work.flops
        self.num_bytes += work.link_bytes if task.resource in LINKS else work.memory_bytes
        self.calls += work.calls
        self.seconds += seconds

    def since(self, before: LineTimes) -> LineTimes:
        """Return what was added since an earlier copy of this."""
        return LineTimes(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


LineKey = tuple[str, str, str]  #: verb, resource and ``Work.line``: the arguments of ``Hardware.line``


def check_trace(trace: Iterable[TraceEvent], tolerance_s: float = 0.0) -> list[str]:
    """Return violations of the stream's meaning, as sentences; empty if every read saw the version that it should.

    Independent of how dependencies are derived: memory is replayed in time order. Each elementary cell has the version
    of its last finished write and the writes in progress. A read is right if, at its start and end, every cell has the
    version that the stream's order gives it and no write is in progress there. A write is right if it overlaps no other
    access and overtakes no earlier write. ``tolerance_s`` shortens every interval at its end (a device's clock resolves
    half a microsecond).
    """
    events = list(trace)
    cells = _elementary_cells(event.task for event in events)
    expected = _expected_versions((event.task for event in events), cells)
    moments = []
    for index, event in enumerate(events):
        end = max(event.start_s, event.end_s - tolerance_s)
        # At equal times ends come before starts, unless the interval is empty: then its own start comes first.
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
    """access -> the elementary cells it covers; a cell is (space, lo) of the finest partition of all accesses."""
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
    """Return (task number, cell) -> number of the task whose write it must see; -1 for initial data."""
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
    """Return the busy seconds of each resource; tasks of one resource never overlap."""
    busy: dict[str, float] = {}
    for task, start, end in trace:
        busy[task.resource] = busy.get(task.resource, 0.0) + end - start
    return busy


def idle_though_ready(trace: Iterable[TraceEvent], resource: str = "compute") -> list[tuple[TraceEvent, float]]:
    """Return a resource's events in stream order, each with the idle seconds before its start in which it could have
    run.

    It could run when the resource's previous task and all its dependencies had ended (from 0): what remains is the cost
    of planning, launching and handing over. The trace begins with its stream.
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
    """When the last sample task of each iteration ended, in order."""
    ends: dict[int, float] = {}
    for task, _, end in trace:
        if task.verb == "sample":
            ends[task.iteration] = max(end, ends.get(task.iteration, 0.0))
    return [ends[i] for i in sorted(ends)]


class TraceWindow:
    """A window of a trace: from the end of its first iteration to the end of iteration ``last`` (list index).

    The first iteration has nothing before it to overlap with. ``last=-2`` also excludes the last one, whose loads end
    early. An event at an edge counts by its share inside, because loads run ahead of their iteration. Raise ValueError
    for a trace without an iteration between these ends.
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
        """Seconds that a resource worked inside the window."""
        return sum(self.inside_s(event) for event in self.trace if event.task.resource == resource)

    def moved_bytes(self, resource: str) -> float:
        """Bytes that a link or a disk moved inside the window."""
        moved = 0.0
        for event in self.trace:
            task, start, end = event
            if task.resource == resource and end > self.begin_s and start < self.end_s:
                moved += task.work.link_bytes * (self.inside_s(event) / (end - start) if end > start else 1.0)
        return moved

    def idle_share(self) -> float:
        """Share of the window in which compute waited although all that its next task needs was there."""
        idle = idle_though_ready(self.trace)
        return sum(idle_s for event, idle_s in idle if self.begin_s < event.end_s <= self.end_s) / self.seconds


#: Column of ``lane_table`` -> the field of ``LaneTimes`` in seconds.
LANE_COLUMNS = {
    "busy": "busy_s", "on a processor": "cpu_s", "paced": "paced_s", "held up": "held_up_s",
    "handed over": "hand_over_s", "planned late": "planned_late_s", "queued for a processor": "queued_s",
}  # fmt: skip


def lane_table(lanes: Mapping[str, LaneTimes]) -> list[str]:
    """Return the rows of a Markdown table, one lane a row: milliseconds of ``LaneTimes``, and how often it slept."""
    lines = [f"| lane | tasks | {', ms | '.join(LANE_COLUMNS)}, ms | slept | lost its processor |"]
    lines += ["| --- |" + " ---: |" * (len(LANE_COLUMNS) + 3)]
    for name, times in lanes.items():
        seconds = [getattr(times, field) for field in LANE_COLUMNS.values()]
        cells = ["" if value is None else f"{1e3 * value:.1f}" for value in seconds]
        counts = ["" if count is None else f"{count:,}" for count in (times.wake_ups, times.preemptions)]
        lines.append(f"| {name} | {times.tasks:,} | {' | '.join([*cells, *counts])} |")
    return lines


def save_chrome_trace(
    path: str | Path, traces: dict[str, list[TraceEvent]], lanes: Mapping[str, LaneTimes] = {}
) -> None:
    """Write traces as Chrome trace events (ui.perfetto.dev opens them), one process a trace, one row a resource; and
    the times of measured lanes as the file's other data."""
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
