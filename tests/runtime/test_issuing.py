"""Stream lanes, which the planning thread feeds, on streams that only note what they are asked."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

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
        ran = (task for name, what, task in reversed(self.notes) if (name, what) == (self.name, "runs"))
        last = next(ran, None)
        synchronize = lambda: self.notes.append((threading.get_ident(), "waits", last))  # noqa: E731
        return SimpleNamespace(task=last, synchronize=synchronize, is_complete=lambda: False)

    def synchronize(self) -> None: ...


ORDER = {"first": "second", "second": "third"}  #: verbs that may be launched together, one behind the other


class Next(NamedTuple):
    """Equals the keys of tasks of a layer that have a verb; iterations number tasks."""

    layer: int
    verb: str

    def __eq__(self, key) -> bool:
        return isinstance(key, tuple) and (key[1], key[3]) == (self.layer, self.verb)


def lanes_of(perform, joint: list[list[int]] | None = None) -> tuple[list[Lane], list]:
    """Return a lane of each resource, and what will happen: (stream or thread of the host, "waits", "begins", "runs" or
    "done", task). ``joint`` takes the tasks that are launched together; None: none may be."""
    notes, current, issuer = [], [], Issuer()

    def noted(task: Task) -> None:
        on_host = task.resource in HOST
        assert on_host or current == [task.resource]  # the thread's stream is the lane's own
        who = threading.get_ident() if on_host else task.resource
        notes.append((who, "begins", task.iteration))
        perform(task)
        notes.append((who, "done" if on_host else "runs", task.iteration))

    def perform_together(tasks: Sequence[Task]) -> None:
        assert joint is not None
        joint.append([task.iteration for task in tasks])
        for task in tasks:
            noted(task)

    together = SimpleNamespace(
        most=0,
        patient=("third",),
        next_key=lambda task: Next(task.layer, ORDER[task.verb]) if task.verb in ORDER else None,
        perform=perform_together,
    )
    of_streams = [
        StreamLane(name, noted, NotedStream(name, notes, current), issuer, together if joint is not None else None)
        for name in STREAMS
    ]
    return [*of_streams, *(HostLane(name, noted) for name in HOST)], notes


def task_of(
    number: int, resource: str, reads: tuple[int, ...] = (), writes: tuple[int, ...] = (), verb="work", payload=None
) -> Task:
    spaces = (tuple(Access(("cell",), cell, cell + 1) for cell in cells) for cells in (reads, writes))
    return Task(number, id(payload), 0, verb, resource, Work(), *spaces, payload)


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
VERBS = st.sampled_from(("first", "second", "third"))
TASKS = st.lists(st.tuples(st.sampled_from((*STREAMS, *HOST)), CELLS, CELLS, VERBS), min_size=1, max_size=60)


@settings(deadline=None, max_examples=60)
@given(TASKS, st.booleans())
def test_each_task_begins_when_all_that_it_conflicts_with_have_run(drawn, may_join):
    """By brute force over pairs of tasks that touch a cell, at least one of which writes it."""
    joint = [] if may_join else None
    made, notes = lanes_of(lambda task: None, joint)
    Clock(made).run([task_of(i, *of) for i, of in enumerate(drawn)], keep_trace=False)
    before = run_before(notes)
    assert len(before) == len(drawn)
    for name in STREAMS:
        own = [task for who, what, task in notes if (who, what) == (name, "runs")]
        assert own == sorted(own)
    for later, (_, reads, writes, _) in enumerate(drawn):
        for earlier, (_, others, other_writes, _) in enumerate(drawn[:later]):
            if {*writes} & {*others, *other_writes} or {*reads} & {*other_writes}:
                assert earlier in before[later]
    for tasks in joint or ():
        verbs = [drawn[task][3] for task in tasks]
        assert len(tasks) > 1 and all(ORDER.get(verb) == after for verb, after in pairwise(verbs))


def test_tasks_of_a_position_with_nothing_between_them_are_launched_together(monkeypatch):
    """Not after an own wait, with another position, or while spans are kept; a waiting task admits others later."""
    here, there = object(), object()
    of = partial(task_of, resource="compute")
    tasks = [
        of(0, verb="first", payload=here),
        of(1, verb="second", payload=here),
        of(2, verb="third", payload=here),  # the first three
        task_of(3, "h2d", writes=(1,)),
        of(4, verb="first", reads=(1,), payload=there),
        task_of(5, "h2d", writes=(2,)),
        of(6, verb="second", reads=(2,), payload=there),  # waits
        of(7, verb="third", reads=(1,), payload=there),  # waits no more
        of(8, verb="first", writes=(3,), payload=here),
        task_of(9, "d2h", reads=(3,)),  # waits for it
        of(10, verb="second", payload=here),
        of(11, verb="third", payload=there),  # of another position
        of(12, verb="first", payload=here),
        of(13, verb="third", payload=here),  # not the next one
    ]
    joint: list[list[int]] = []
    made, notes = lanes_of(lambda task: None, joint)
    Clock(made).run(tasks, keep_trace=False)
    assert joint == [[0, 1, 2], [6, 7]]
    own = [task for who, what, task in notes if (who, what) == ("compute", "runs")]
    assert own == [0, 1, 2, 4, 6, 7, 8, 10, 11, 12, 13]
    waits = [(who, task) for who, what, task in notes if what == "waits" and who in STREAMS]
    assert waits == [("compute", 3), ("compute", 5), ("d2h", 8)]
    monkeypatch.setattr(StreamLane, "span", lambda lane, ordinal: (0.0, 0.0))
    for num_kept, launched in ((True, []), (5, [[6, 7]])):
        joint.clear()
        Clock(lanes_of(lambda task: None, joint)[0]).run(tasks, keep_trace=num_kept)
        assert joint == launched


@pytest.mark.parametrize("awaited", [False, True])
def test_joint_launches_do_not_depend_on_when_the_plan_waits(awaited):
    """It waits for another lane's task; if that one depends on the held task, the held one is issued alone."""
    joint: list[list[int]] = []
    made, notes = lanes_of(lambda task: None, joint)
    clock, here = Clock(made), object()

    def tasks():
        yield task_of(0, "compute", writes=(1,), verb="first", payload=here)
        yield task_of(1, "host_compute", reads=(1,) if awaited else (), writes=(2,))
        yield task_of(2, "h2d", reads=(2,))
        clock.wait("h2d", 0)
        assert (("compute", "runs", 0) in notes) == awaited
        yield task_of(3, "compute", verb="second", payload=here)

    clock.run(tasks(), keep_trace=False)
    assert joint == ([] if awaited else [[0, 3]])
    assert [task for who, what, task in notes if (who, what) == ("compute", "runs")] == [0, 3]


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
    """Stream and host lanes wait for each other's tasks that never come, or come after the plan broke."""
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
