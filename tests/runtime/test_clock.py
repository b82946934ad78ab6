"""Test the launcher with threads: tokens, clean traces, errors, lookahead and times; fake_cuda tests streams."""

import gc
import threading
import time
from collections import Counter

import pytest
import torch
from runs import admitted, engine_of
from tiny_models import greedy

from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.task import Task, Work
from flexhybrid.core.trace import LaneTimes, check_trace
from flexhybrid.runtime import clock as lanes
from flexhybrid.runtime.clock import Clock, HostLane
from flexhybrid.runtime.engine import RunControl
from flexhybrid.runtime.kernels.sampling import greedy_plan
from flexhybrid.runtime.links import TURN
from flexhybrid.runtime.profiling.cpu_use import ThreadAccount
from flexhybrid.runtime.storage.loader import Checkpoint

pytestmark = pytest.mark.usefixtures("every_core")

PROMPTS = [[5, 9, 11], list(range(3, 40)), [7] * 17, list(range(10, 26))]
MAX_TOKENS = 12

HYBRID = Policy(cache={"act@host": 0.5, "kv@host": 0.5}, max_mini_batch_tokens=100)


@pytest.fixture(scope="module")
def checkpoint(tiny_opt):
    return Checkpoint(tiny_opt[0]), greedy(tiny_opt[1], PROMPTS, MAX_TOKENS)


def run(checkpoint, policy, **control):
    """Return the result of a run of the prompts under a policy."""
    with engine_of(checkpoint, wave := admitted(checkpoint.shape, policy, PROMPTS, MAX_TOKENS)) as engine:
        return engine.run(engine.executor(wave, PROMPTS, greedy_plan(len(PROMPTS))), RunControl(**control))


def test_a_trace_may_end_before_its_wave(checkpoint):
    """The first tasks are those of a whole trace; the rest of the run is unchanged."""
    source, expected = checkpoint
    whole = run(source, HYBRID, keep_trace=True)
    for count in (1, 100, len(whole.trace) + 1):
        part = run(source, HYBRID, keep_trace=count)
        assert part.tokens == whole.tokens == expected
        assert [e.task.key for e in part.trace] == [e.task.key for e in whole.trace[:count]]
        assert check_trace(part.trace) == []


@pytest.mark.parametrize("lookahead", (1, 2, 16))
def test_a_planner_ahead_of_its_lane_waits_for_half_a_queue(monkeypatch, lookahead):
    """The planner is woken once for many tasks; no more than a queue of them waits for the lane."""
    monkeypatch.setattr(HostLane, "lookahead", lookahead)
    waits, ahead = [], []
    wait = Clock.wait
    monkeypatch.setattr(Clock, "wait", lambda self, *of: (waits.append(of), wait(self, *of)))
    lane = HostLane("compute", lambda task: time.sleep(1e-4))
    tasks = [Task(i, 0, 0, "work", "compute", Work(), (), ()) for i in range(160)]
    trace = Clock([lane]).run(tasks, on_submit=lambda task, ordinal: ahead.append(ordinal + 1 - lane.passed))
    assert len(trace) == 160 and max(ahead) <= lookahead
    assert len(waits) <= 160 / max(1, lookahead // 2) + 2


def test_a_trace_leaves_older_objects_out_of_collections():
    thresholds, lanes_of = [], lambda: [HostLane("compute", lambda task: thresholds.append(gc.get_threshold()))]
    tasks = [Task(0, 0, 0, "work", "compute", Work(), (), ())]
    before, kept = gc.get_threshold(), gc.get_freeze_count()
    for keep_trace in (True, False):
        Clock(lanes_of()).run(tasks, keep_trace=keep_trace)
    assert thresholds[0][2] > 1 << 20 and thresholds[1] == before == gc.get_threshold()
    assert gc.get_freeze_count() == kept


def test_a_task_that_ends_before_its_wait_is_noted_is_seen(monkeypatch):
    """A lane wakes only threads that it has seen waiting; a new waiter checks for itself once it is in the list."""
    monkeypatch.setattr("flexhybrid.runtime.clock.LOOK_UP_S", 60.0)
    lane = HostLane("compute", lambda task: None)

    class PassesFirst(list):
        def append(self, waiting):
            lane.passed += 1  # as the lane does, which has found no one in the list
            super().append(waiting)

    lane._waiting = PassesFirst()
    waited = threading.Thread(target=lane.wait_complete, args=(0,), daemon=True)
    waited.start()
    waited.join(timeout=30)
    assert not waited.is_alive()


def test_an_error_in_the_stream_of_tasks_ends_every_thread(checkpoint):
    before = threading.active_count()

    def broken():
        yield Task(0, 0, 0, "load", "h2d", Work(), (), ())
        raise ValueError("planning failed")

    clock = Clock([HostLane(name, lambda task: None) for name in ("h2d", "compute")])
    with pytest.raises(ValueError, match="planning failed"):
        clock.run(broken())
    assert threading.active_count() == before


def test_views_of_buffers_are_kept_up_to_a_number(checkpoint, monkeypatch):
    """The number is 1 here, so that each view replaces another."""
    monkeypatch.setattr("flexhybrid.runtime.buffers.MOST_VIEWS", 1)
    monkeypatch.setattr("flexhybrid.runtime.links.CpuCopies.MOST_KNOWN", 1)
    source, expected = checkpoint
    with engine_of(source, wave := admitted(source.shape, HYBRID, PROMPTS, MAX_TOKENS)) as engine:
        assert engine.run(engine.executor(wave, PROMPTS, greedy_plan(len(PROMPTS)))).tokens == expected
        assert len(engine.buffers._views) == 1 == len(engine.copies._known)


def test_decode_can_be_repeated_from_a_filled_cache(checkpoint):
    source, expected = checkpoint
    with engine_of(source, wave := admitted(source.shape, HYBRID, PROMPTS, MAX_TOKENS)) as engine:
        executor = engine.executor(wave, PROMPTS, greedy_plan(len(PROMPTS)))
        engine.run(executor)
        for _ in range(2):
            again = engine.run(executor, RunControl(keep_trace=True), stream(wave, first_iteration=1))
            assert again.tokens == [answer[1:] for answer in expected]
            assert check_trace(again.trace) == []


def test_each_lane_computes_with_its_own_number_of_threads(checkpoint):
    source, _ = checkpoint
    wave = admitted(source.shape, HYBRID, PROMPTS, MAX_TOKENS)
    with engine_of(source, wave, num_threads=3) as engine:
        executor = engine.executor(wave, PROMPTS, greedy_plan(len(PROMPTS)))
        perform, seen = executor.perform, {"compute": set(), "host_compute": set()}

        def watched(task):
            perform(task)
            if task.resource in seen:
                seen[task.resource].add(torch.get_num_threads())

        executor.perform = watched
        engine.run(executor)
    assert seen == {"compute": {3}, "host_compute": {1}}


class SetTime:
    """Wall time and processor time that only the test advances."""

    def __init__(self):
        self.now = self.cpu = 0.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.cpu


def test_times_of_a_lane_are_split_by_what_it_waited_for(monkeypatch):
    """Tasks run one by one on this thread; all seconds are given, and sums are computed by hand."""
    time, ready = SetTime(), []
    monkeypatch.setattr(lanes, "time", time)
    monkeypatch.setattr(TURN, "ready_s", None)
    #          resource, waits, planned at, begins at, seconds, on a processor, asleep for a pace
    tasks = (
        ("h2d", (), 0.0, 1.0, 5.0, 2.0, 3.0),  # handed over 1 late
        ("compute", (("h2d", 0),), 0.0, 8.0, 4.0, 4.0, 0.0),  # ready at 6, handed over 2 late
        ("compute", (), 15.0, 16.0, 1.0, 0.25, 0.0),  # compute is free from 12 on: planned 3 late, handed over 1 late
        ("h2d", (("compute", 0),), 10.0, 17.5, 2.0, 1.0, 0.5),  # ready at 12, handed over 5.5 late
    )
    given = iter(tasks)

    def perform(_task):
        *_, seconds, cpu_s, paced_s = next(given)
        ready.append(TURN.ready_s)
        time.now, time.cpu, TURN.paced_s = time.now + seconds, time.cpu + cpu_s, TURN.paced_s + paced_s

    made = Clock([HostLane("h2d", perform), HostLane("compute", perform)]).lanes
    for resource, waits, planned, begins, *_ in tasks:
        time.now = begins
        made[resource]._run(Task(0, 0, 0, "work", resource, Work(), (), ()), waits, planned)
    assert made["h2d"].times == LaneTimes(2, 0.0, 6.5, 7.0, 3.0, 3.5) and made["h2d"].times.held_up_s == 0.5
    assert made["compute"].times == LaneTimes(2, 3.0, 3.0, 5.0, 4.25, 0.0)
    assert ready == [0.0, 6.0, 15.0, 12.0]


def test_a_thread_that_waits_for_a_task_sleeps_through_those_before_it():
    """Threads wait for tasks 100 and 101 of 101: each is woken once, not by every task."""
    lane, account = HostLane("h2d", lambda task: None), {}

    def wait(ordinal):
        before = ThreadAccount.now()
        lane.wait_complete(ordinal)
        account[ordinal] = before, ThreadAccount.now(), lane.passed

    threads = [threading.Thread(target=wait, args=(ordinal,)) for ordinal in (99, 100)]
    for thread in threads:
        thread.start()
    while len(lane._waiting) < 2:
        time.sleep(0.001)
    for ordinal in range(101):
        assert len(account) <= max(0, ordinal - 98)
        lane._pass()
        time.sleep(0.0005)
    for thread in threads:
        thread.join()
    for ordinal, (before, after, passed) in account.items():
        assert passed > ordinal
        assert before is None or after.wake_ups - before.wake_ups < 50


def test_a_run_with_a_trace_gives_the_times_of_its_lanes(checkpoint):
    source, _ = checkpoint
    for keep_trace in (True, False):
        result = run(source, HYBRID, keep_trace=keep_trace)
        counts = Counter(event.task.resource for event in result.trace)
        assert {name: times.tasks for name, times in result.lanes.items()} == counts
        for name, times in result.lanes.items():
            spans = sum(event.end_s - event.start_s for event in result.trace if event.task.resource == name)
            assert times.busy_s == pytest.approx(spans)
            assert min(times.hand_over_s, times.planned_late_s, times.paced_s, times.cpu_s) >= 0
