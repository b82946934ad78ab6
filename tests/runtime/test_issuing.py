"""Stream lanes, which the planning thread feeds, on streams that only note what they are asked."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexhybrid.core.task import Access, Task, Work
from flexhybrid.runtime.clock import Clock, HostLane, Lane
from flexhybrid.runtime.issuing import Issuer, StreamLane

STREAMS, HOST = ("compute", "h2d", "d2h"), ("host_compute", "disk_read")
WAIT_S = 60.0  #: longer than any test takes; a lane that is not fed fails instead of hanging


class NotedStream:
    """A stream that notes what it is given: (stream, "waits", the task behind which an event was recorded)."""

    def __init__(self, name: str, notes: list, current: list[str]):
        self.name, self.notes, self.current = name, notes, current

    def enter(self) -> None:
        self.current[:] = [self.name]

    def wait(self, event) -> None:
        self.notes.append((self.name, "waits", event.task))

    def record(self, timed: bool = True):
        last = next(task for name, what, task in reversed(self.notes) if (name, what) == (self.name, "runs"))
        synchronize = lambda: self.notes.append((threading.get_ident(), "waits", last))  # noqa: E731
        return SimpleNamespace(task=last, synchronize=synchronize, is_complete=lambda: False)

    def synchronize(self) -> None: ...


def lanes_of(perform) -> tuple[list[Lane], list]:
    """Return a lane of each resource, and what will happen: (stream or thread of the host, "waits", "begins", "runs" or
    "done", task)."""
    notes, current, issuer = [], [], Issuer()

    def noted(task: Task) -> None:
        on_host = task.resource in HOST
        assert on_host or current == [task.resource]  # the thread's stream is the lane's own
        who = threading.get_ident() if on_host else task.resource
        notes.append((who, "begins", task.iteration))
        perform(task)
        notes.append((who, "done" if on_host else "runs", task.iteration))

    of_streams = [StreamLane(name, noted, NotedStream(name, notes, current), issuer) for name in STREAMS]
    return [*of_streams, *(HostLane(name, noted) for name in HOST)], notes


def task_of(number: int, resource: str, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> Task:
    spaces = (tuple(Access(("cell",), cell, cell + 1) for cell in cells) for cells in (reads, writes))
    return Task(number, 0, 0, "work", resource, Work(), *spaces)


def run_before(notes: list) -> dict[int, set[int]]:
    """Return of each task those that have run when it begins, on a device that does nothing before it must: those
    before it on its stream, those behind whose events its stream or thread waited, and what the host had completed."""
    known, before, complete = defaultdict(set), {}, set()
    for who, what, task in notes:
        if what == "waits":
            known[who] |= before[task] | {task}
        elif what == "begins":
            before[task] = known[who] | complete
        else:
            known[who] |= before[task] | {task}
            if what == "done":
                complete |= known[who]
    return before


CELLS = st.lists(st.integers(0, 4), max_size=2, unique=True).map(tuple)
TASKS = st.lists(st.tuples(st.sampled_from((*STREAMS, *HOST)), CELLS, CELLS), min_size=1, max_size=60)


@settings(deadline=None, max_examples=60)
@given(TASKS)
def test_each_task_begins_when_all_that_it_conflicts_with_have_run(drawn):
    """By brute force over pairs of tasks that touch a cell, at least one of which writes it."""
    made, notes = lanes_of(lambda task: None)
    Clock(made).run([task_of(i, *of) for i, of in enumerate(drawn)], keep_trace=False)
    before = run_before(notes)
    assert len(before) == len(drawn)
    for name in STREAMS:
        own = [task for who, what, task in notes if (who, what) == (name, "runs")]
        assert own == sorted(own)
    for later, (_, reads, writes) in enumerate(drawn):
        for earlier, (_, others, other_writes) in enumerate(drawn[:later]):
            if {*writes} & {*others, *other_writes} or {*reads} & {*other_writes}:
                assert earlier in before[later]


@pytest.mark.parametrize("blocked", STREAMS)
def test_a_lane_that_waits_for_the_host_keeps_no_other_from_being_fed(blocked):
    """The host's task ends when the last task of the other lanes is enqueued; the blocked lane's comes first."""
    others, fed, all_fed = [name for name in STREAMS if name != blocked], [], threading.Event()

    def perform(task: Task) -> None:
        if task.resource in HOST:
            assert all_fed.wait(WAIT_S)
        elif task.resource in others:
            fed.append(task.iteration)
            if len(fed) == 20:
                all_fed.set()

    tasks = [task_of(0, "host_compute", writes=(0,)), task_of(1, blocked, reads=(0,))]
    tasks += [task_of(2 + i, others[i % 2]) for i in range(20)]
    made, notes = lanes_of(perform)
    Clock(made).run(tasks, keep_trace=False)
    ended = [task for _, what, task in notes if what in ("runs", "done")]
    assert len(ended) == 22 and ended.index(1) > ended.index(0) > 18  # of 20 the last one may not be noted yet


@pytest.mark.parametrize("failing", ["host_compute", "compute", "the plan"])
def test_an_error_ends_lanes_that_wait_for_it(failing):
    """A stream lane waits for a host lane's task, and a host lane for a stream lane's, that never come; or the host
    lane's comes when the plan has broken."""
    planned = threading.Event()

    def perform(task: Task) -> None:
        if task.resource == failing:
            raise ValueError(f"{failing} broke")
        if task.resource == "host_compute" and failing == "the plan":
            assert planned.wait(WAIT_S)

    def tasks():
        first, other = (failing, "host_compute") if failing == "compute" else ("host_compute", "compute")
        yield from (task_of(0, first, writes=(0,)), task_of(1, other, reads=(0,)), task_of(2, "h2d", reads=(0,)))
        if failing == "the plan":
            planned.set()
            raise ValueError("the plan broke")

    made, _ = lanes_of(perform)
    with pytest.raises(ValueError, match=f"{failing} broke"):
        Clock(made).run(tasks(), keep_trace=False)
    assert not any(lane.lanes for lane in made)
    assert not made[0].issuer.lanes
