"""Test dependencies of tasks against a derivation by cells, and tasks of a layer step under each kind of ordering."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import wider_policies
from toy_machine import SHAPE, machine

from flexhybrid.core.plan import stream
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule import dependencies
from flexhybrid.core.schedule.dependencies import HAZARDS, Dependencies
from flexhybrid.core.schedule.positions import Position
from flexhybrid.core.task import RESOURCES, Access, Task, Work
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload


def by_cells(tasks: list[Task], hazards) -> list[dict[str, int]]:
    """Return the tasks each task waits for, the latest of each resource; each cell keeps its last writer and
    readers."""
    writer: dict[tuple, tuple[str, int]] = {}
    readers: dict[tuple, list[tuple[str, int]]] = {}
    issued: Counter[str] = Counter()
    waits = []
    for task in tasks:
        mark, awaited = (task.resource, issued[task.resource]), []
        issued[task.resource] += 1
        read, written = ([(a.space, i) for a in of for i in range(a.lo, a.hi)] for of in (task.reads, task.writes))
        if "read_after_write" in hazards:
            awaited += [writer[cell] for cell in read if cell in writer]
        if "write_after_write" in hazards:
            awaited += [writer[cell] for cell in written if cell in writer]
        if "write_after_read" in hazards:
            awaited += [reader for cell in written for reader in readers.get(cell, ())]
        for cell in read:
            readers.setdefault(cell, []).append(mark)
        for cell in written:
            writer[cell], readers[cell] = mark, []
        latest: dict[str, int] = {}
        for resource, ordinal in awaited:
            if resource != task.resource:
                latest[resource] = max(ordinal, latest.get(resource, -1))
        waits.append(latest)
    return waits


@st.composite
def streams(draw) -> list[Task]:
    """Draw tasks that repeat a few tuples of accesses, as forms do. Extents overlap, and a task may split its reads."""
    extents = st.sampled_from("ab"), st.integers(0, 6), st.integers(0, 5)
    access = st.builds(lambda space, lo, size: Access((space,), lo, lo + size), *extents)
    tuples = draw(st.lists(st.lists(access, max_size=3).map(tuple), min_size=1, max_size=6))
    pick, resource = st.integers(0, len(tuples) - 1), st.sampled_from(RESOURCES[:3])
    drawn = draw(st.lists(st.tuples(resource, pick, pick), max_size=40))
    return [Task(i, 0, 0, "any", lane, Work(), tuples[r], tuples[w]) for i, (lane, r, w) in enumerate(drawn)]


@settings(max_examples=300, deadline=None)
@given(streams(), st.sets(st.sampled_from(HAZARDS)), st.sampled_from((1, 3, 1 << 17)))
def test_tasks_wait_for_what_their_cells_say(tasks, hazards, most):
    derived, kept = Dependencies(hazards), dependencies.MOST_FOOTPRINTS
    dependencies.MOST_FOOTPRINTS = most
    try:
        assert [dict(derived.add(task)) for task in tasks] == by_cells(tasks, hazards)
    finally:
        dependencies.MOST_FOOTPRINTS = kept


def test_new_tuples_with_a_reused_identity_wait_too():
    """Footprints are found by identity, which another tuple may get after the first is freed."""
    derived, tasks = Dependencies(), []
    for i in range(300):
        accesses = [(Access(("a",), (i + k) % 7, (i + k) % 7 + 1 + i % 3),) for k in range(2)]
        tasks.append(Task(i, 0, 0, "any", RESOURCES[i % 3], Work(), *accesses))
    expected = by_cells(tasks, HAZARDS)
    for number in range(len(tasks)):
        task, tasks[number] = tasks[number], tasks[0]
        fresh = task._replace(reads=tuple(map(Access._make, task.reads)), writes=tuple(map(Access._make, task.writes)))
        assert dict(derived.add(fresh)) == expected[number]
        del fresh, task


def of_payload(task: Task):
    """Return the part of the payload that distinguishes tasks with equal keys: a prompt's chunk or a slice of
    weights."""
    return task.payload.step.chunk if isinstance(task.payload, Position) else task.payload


@pytest.mark.parametrize("overlap", ("step", "none"))
@pytest.mark.parametrize("num_layers", (1, 3))
def test_ordering_does_not_change_tasks(overlap, num_layers):
    """A position may load the stores of the one before it: its stores once came twice after a barrier."""
    shape, workload = replace(SHAPE, num_layers=num_layers), Workload(np.array([40, 70, 33]), np.array([3, 4, 4]))
    problem = Problem(shape=shape, dtype="float32", hardware=machine())
    for name, policy in wider_policies(1000, 200, 32).items():
        tasks = []
        for kept in ("full", overlap):
            of = stream(admit(problem, replace(policy, overlap=kept), workload))
            tasks.append(Counter((task.key, task.work, of_payload(task)) for task in of))
        assert tasks[0] == tasks[1] and tasks[0], name


@pytest.mark.parametrize("overlap", ("full", "step"))
def test_tasks_are_the_same_without_scripts(overlap, monkeypatch):
    """Scripts stand for tasks that would be worked out turn by turn."""
    workload = Workload(np.array([40, 70, 33, 20]), np.array([3, 40, 4, 20]))
    problem = Problem(shape=SHAPE, dtype="float32", hardware=machine())
    for name, policy in wider_policies(200, 120, 32).items():
        runs = []
        for most in (1 << 20, 0):
            monkeypatch.setattr("flexhybrid.core.plan.MOST_RECORDINGS", most)
            tasks = stream(admit(problem, replace(policy, overlap=overlap), workload))
            runs.append([(*task[:-1], of_payload(task)) for task in tasks])
        assert runs[0] == runs[1], name
