"""Traces: what ran when, the proof that every read saw its version, and the file that Perfetto opens."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from flexhybrid.core.schedule.dependencies import Dependencies
from flexhybrid.core.task import Task


class TraceEvent(NamedTuple):
    """A task with the time it ran, in seconds from the trace's start. A trace lists events in stream order."""

    task: Task
    start_s: float
    end_s: float


def check_trace(trace: Iterable[TraceEvent], tolerance_s: float = 0.0) -> list[str]:
    """Violations of the stream's meaning, as sentences; empty when every read saw the version it should.

    Independent of how dependencies are derived: memory is replayed in time order. Each elementary cell carries the
    version that the last finished write left and the writes under way. A read is right if, at its start and at its
    end, every cell it covers has the version that the stream's order gives it and nobody is writing there; a write is
    right if it neither overlaps another access that writes, nor overtakes an earlier write. ``tolerance_s`` shortens
    every interval at its end (clocks of a device resolve half a microsecond).
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
    """(task number, cell) -> number of the task whose write it must see; -1 for data that was there before."""
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
    """Seconds each resource was at work; tasks of one resource never overlap."""
    busy: dict[str, float] = {}
    for task, start, end in trace:
        busy[task.resource] = busy.get(task.resource, 0.0) + end - start
    return busy


def idle_though_ready(trace: Iterable[TraceEvent], resource: str = "compute") -> list[tuple[TraceEvent, float]]:
    """A resource's events in stream order, each with the seconds between the moment when it could have begun and its
    start.

    It could begin when the resource's task before it, and all that it must wait for, had ended (at 0 where there is
    nothing before it): what is left is what planning, launching and handing over cost. The trace is of a stream from
    its beginning.
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


class Window:
    """A stretch of a trace: from the end of its first iteration to the end of a later one, ``last`` (as a list index).

    The first iteration is left out because nothing runs before it that it could overlap with. ``last=-2`` leaves the
    last iteration out as well, whose loads end early because no iteration follows. An event at an edge counts with the
    share of its time that lies inside: loads run ahead of the iteration they are for. Raises ValueError for a trace
    that has no iteration between these ends.
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
        """Seconds of an event that lie inside the window."""
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


def save_chrome_trace(path: str | Path, traces: dict[str, list[TraceEvent]]) -> None:
    """Write traces as Chrome trace events (ui.perfetto.dev opens them), one process a trace, one row a resource."""
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
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
