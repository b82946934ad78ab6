"""The real clock: one lane per resource. A task waits only for the tasks that it depends on.

A *lane* runs the tasks of one resource in plan order. There are two kinds:

- A **host lane** (CPU compute, paced links, host_compute, disk) has a thread. A task is complete when its function
  returns.
- A **stream lane** (CUDA compute and copies: ``issuing.StreamLane``) only enqueues kernels and copies. The planning
  thread does this for all stream lanes (``issuing.Issuer``).

A waiting lane does not stop the planning thread from submitting tasks to other lanes.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Protocol

from flexhybrid.core.schedule.dependencies import HAZARDS, Dependencies
from flexhybrid.core.task import Task
from flexhybrid.core.trace import LaneTimes, LineKey, LineTimes, TraceEvent
from flexhybrid.runtime.links import TURN
from flexhybrid.runtime.process_settings import NO_OLD_GARBAGE, SHORT_SWITCH_INTERVAL
from flexhybrid.runtime.profiling.cpu_use import ThreadAccount

#: Limit of a lane's submitted and incomplete tasks: enough to keep the lane busy, few enough to bound memory.
LOOKAHEAD_TASKS = 256
#: A waiting thread wakes up after this many seconds. The system may send a signal to any thread of the process, but
#: Python handles it on the main thread, which must be awake.
LOOK_UP_S = 0.5


class Aborted(Exception):
    """Ends a lane's thread after another lane has failed. Not reported."""


Perform = Callable[[Task], None]
Around = Callable[[Callable[[], None]], None]  #: calls the function that runs a thread's tasks


class Enqueuer(Protocol):
    """Enqueues the tasks of stream lanes on the planning thread (``issuing.Issuer``)."""

    around: Around

    def enqueue_until(self, lane: Lane, ordinal: int) -> None:
        """Enqueue tasks until a lane's task is complete, or nothing is left to enqueue."""


class Lane:
    """Runs the tasks of a resource in plan order. A task's ordinal is its index among them.

    ``passed`` counts the tasks that others need not wait for any more. ``times`` sums how a traced run spends its time.
    """

    lookahead = LOOKAHEAD_TASKS
    issuer: Enqueuer | None = None

    def __init__(self, name: str, perform: Perform):
        self.name = name
        self.perform = perform
        self.lanes: dict[str, Lane] = {}
        self.fail: Callable[[BaseException], None] = lambda error: None
        self.failed = False
        self.passed = 0
        self.submitted = 0
        self.room = self.lookahead  #: number of tasks that may be submitted before waiting for some
        self.num_spans = math.inf  #: number of first tasks whose start and end are stored
        self.times = LaneTimes()
        self.timed_iterations = 0  #: a stream lane times the tasks of this many first iterations; a host lane times all
        self.busy_s = 0.0  #: sum of the tasks' times so far; 0 on a stream lane
        self.line_times: dict[LineKey, LineTimes] = {}  #: times of the timed tasks so far, by line
        self._waiting: list[tuple[int, Callable[[], object]]] = []  #: (awaited ordinal, function to call)
        self._awaited = math.inf  #: lowest awaited ordinal
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to run submitted tasks."""

    def submit(self, task: Task, waits) -> int:
        """Add a task that depends on tasks of other lanes, ``waits``: (resource, ordinal); return its ordinal."""
        raise NotImplementedError

    def finish(self) -> None:
        """Declare that no more tasks will be submitted."""

    def join(self) -> None:
        """Block until nothing runs."""

    def abort(self) -> None:
        """Run no more tasks, and wake all threads that wait for one."""
        self.failed = True
        self._wake(math.inf)

    def wait_complete(self, ordinal: int) -> float:
        """Block until a task is complete; return its end (``time.perf_counter``), or -inf if it is no longer stored."""
        raise NotImplementedError

    def _block(self, ordinal: int) -> None:
        """Sleep until a task has passed, without waking for earlier tasks. Raise Aborted if a lane has failed."""
        if self.passed > ordinal:
            return
        (woken := threading.Lock()).acquire()
        self.call_when_passed(ordinal, woken.release)
        while self.passed <= ordinal and not self.failed and not woken.acquire(timeout=LOOK_UP_S):
            pass
        if self.passed <= ordinal:
            raise Aborted

    def call_when_passed(self, ordinal: int, call: Callable[[], object]) -> None:
        """Call ``call`` when a task passes or a lane fails; not if the task has already passed.

        The lane first counts a passed task and then looks for functions to call. So callers must check ``passed`` after
        this call.
        """
        with self._lock:
            self._waiting.append((ordinal, call))
            self._awaited = min(self._awaited, ordinal)

    def awaited(self) -> list[int]:
        """Return the ordinals of the tasks that threads wait for."""
        with self._lock:
            return [ordinal for ordinal, _ in self._waiting]

    def _note_time(self, task: Task, seconds: float) -> None:
        key = task.verb, task.resource, task.work.line
        if (times := self.line_times.get(key)) is None:
            times = self.line_times[key] = LineTimes()
        times.add(task, seconds)

    def read_times(self) -> dict[LineKey, LineTimes]:
        """Return a copy of each line's times so far."""
        return {key: replace(times) for key, times in list(self.line_times.items())}

    def _pass(self) -> None:
        """Count a task as passed, and wake its waiters."""
        self.passed += 1  # no other thread writes it
        if self._awaited < self.passed:
            self._wake(self.passed)

    def _wake(self, passed: float) -> None:
        """Wake the threads that wait for a task with an ordinal below ``passed``."""
        with self._lock:
            reached = [call for ordinal, call in self._waiting if ordinal < passed]
            self._waiting = [(ordinal, call) for ordinal, call in self._waiting if ordinal >= passed]
            self._awaited = min((ordinal for ordinal, _ in self._waiting), default=math.inf)
        for call in reached:
            call()

    def span(self, ordinal: int) -> tuple[float, float]:
        """Return the start and end (``time.perf_counter``) of a complete task, one of the first ``num_spans``."""
        raise NotImplementedError

    def drain(self) -> None:
        """Wait for work that a failed run left on the device. A host lane has none."""

    def release(self) -> None:
        """Drop the references to other lanes after the run. A reference cycle would keep the run's buffers alive."""
        self.lanes, self.fail = {}, lambda error: None


class HostLane(Lane):
    """A lane with its own thread. A task passes when it is complete.

    ``thread``: a thread shared by several runs (``LaneThreads``); default: a new one, which ends with the run.
    """

    def __init__(
        self,
        name: str,
        perform: Perform,
        on_start: Callable[[], None] | None = None,
        thread: ThreadPoolExecutor | None = None,
        around: Around = lambda tasks: tasks(),
    ):
        super().__init__(name, perform)
        self._around = around
        self.thread, self._lent = thread or LaneThreads()[name], thread is not None
        self._spans: list[tuple[float, float]] = []
        self._end_s: dict[int, float] = {}  #: ends of the latest tasks, by ordinal
        self._on_start = on_start
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._ended: Future | None = None

    def start(self) -> None:
        self._ended = self.thread.submit(_loop, [self])

    def submit(self, task: Task, waits) -> int:
        ordinal = self.submitted
        self.submitted += 1
        self._queue.put((task, waits, time.perf_counter()))
        return ordinal

    def finish(self) -> None:
        self._queue.put(None)

    def join(self) -> None:
        if self._ended:
            self._ended.result()
        if not self._lent:
            self.thread.shutdown()

    def abort(self) -> None:
        super().abort()
        self._queue.put(None)

    def wait_complete(self, ordinal: int) -> float:
        self._block(ordinal)
        return self._end_s.get(ordinal, -math.inf)

    def loop(self) -> None:
        """Run tasks until the last one, or until a lane fails."""
        try:
            self._around(self._run_tasks)
        except Aborted:
            pass
        except BaseException as error:  # raised again by Clock.run(); a thread must not die silently
            self.fail(error)

    def _run_tasks(self) -> None:
        if self._on_start:
            self._on_start()
        before = ThreadAccount.now() if self.num_spans else None
        while (item := self._queue.get()) is not None:
            if self.failed:
                return
            self._run(*item)
        if before and (after := ThreadAccount.now()):
            self.times.queued_s = after.queued_s - before.queued_s
            self.times.wake_ups = after.wake_ups - before.wake_ups
            self.times.preemptions = after.preemptions - before.preemptions

    def _run(self, task: Task, waits, submitted_s: float) -> None:
        ended_s = -math.inf
        for resource, ordinal in waits:
            ended_s = max(ended_s, self.lanes[resource].wait_complete(ordinal))
        TURN.ready_s = max(submitted_s, ended_s)
        traced, number = self.num_spans, self.passed
        before = (time.thread_time(), TURN.paced_s) if traced else None
        start = time.perf_counter()
        self.perform(task)
        end = self._end_s[number] = time.perf_counter()
        cpu_s = time.thread_time() if traced else 0.0
        self._pass()  # wake waiting threads before updating statistics
        self.busy_s += end - start
        self._note_time(task, end - start)
        if before:
            ended_s = max(ended_s, self._end_s.get(number - 1, -math.inf))
            self.times.tasks += 1
            self.times.planned_late_s += max(0.0, submitted_s - ended_s) if ended_s > -math.inf else 0.0
            self.times.hand_over_s += start - max(submitted_s, ended_s)
            self.times.busy_s += end - start
            self.times.cpu_s += cpu_s - before[0]
            self.times.paced_s += TURN.paced_s - before[1]
            if number < self.num_spans:
                self._spans.append((start, end))
        self._end_s.pop(number - 2 * self.lookahead, None)

    def span(self, ordinal: int) -> tuple[float, float]:
        return self._spans[ordinal]


def _loop(lanes: list[HostLane]) -> None:
    """Run the only lane of a list, after removing it: a thread pool holds the arguments after the call ends."""
    lanes.pop().loop()


class LaneThreads(dict[str, ThreadPoolExecutor]):
    """One thread per resource, started at first use and shared by runs and engines.

    glibc keeps freed memory in one arena per thread. If each run had new threads, the memory of the compute lane could
    end up in every arena.
    """

    def __missing__(self, name: str) -> ThreadPoolExecutor:
        thread = self[name] = ThreadPoolExecutor(1, f"flexhybrid-{name}")
        return thread

    def end(self) -> None:
        """End the threads. Later runs start new ones."""
        while self:
            self.popitem()[1].shutdown()


class Clock:
    """Runs the tasks of a plan on lanes. It can run only once.

    ``on_fail`` is called at the first error, on the thread that raised it. It must end waits inside verbs (for a paced
    link or a disk), because the lanes are joined afterwards.
    """

    def __init__(
        self, lanes: Iterable[Lane], hazards: Iterable[str] = HAZARDS, on_fail: Callable[[], None] = lambda: None
    ):
        self.lanes = {lane.name: lane for lane in lanes}
        self._issuer = next((lane.issuer for lane in self.lanes.values() if lane.issuer), None)
        self.began_s = math.nan  #: start of the trace (``time.perf_counter``)
        #: processor seconds of the planning thread: planning, submitting, collecting tokens and enqueuing
        self.launch_s = 0.0
        self._on_fail = on_fail
        self._dependencies = Dependencies(hazards)
        self._error: BaseException | None = None
        self._error_lock = threading.Lock()
        for lane in self.lanes.values():
            lane.lanes = self.lanes
            lane.fail = self._fail

    def _fail(self, error: BaseException) -> None:
        with self._error_lock:
            if self._error is None:
                self._error = error
        for lane in self.lanes.values():
            lane.abort()
        self._on_fail()

    def line_times(self) -> dict[LineKey, LineTimes]:
        """Return a copy of all lines' times so far."""
        return {key: times for lane in self.lanes.values() for key, times in lane.read_times().items()}

    def wait(self, resource: str, ordinal: int) -> None:
        """Block the planning thread, which calls this, until a task is complete. Raise the error of a failed lane."""
        lane = self.lanes[resource]
        try:
            if self._issuer:
                self._issuer.enqueue_until(lane, ordinal)
            lane.wait_complete(ordinal)
        except Aborted:
            raise self._error or RuntimeError("the run was stopped") from None

    def run(
        self,
        tasks: Iterable[Task],
        on_submit: Callable[[Task, int], None] | None = None,
        keep_trace: bool | int = True,
        timed_iterations: int = 0,
    ) -> list[TraceEvent]:
        """Submit every task in plan order, wait for the end, and return the trace, in seconds from the start.

        ``keep_trace``: True for all tasks, False for none, or the number of first tasks. ``timed_iterations``: see
        ``Lane``. ``on_submit(task, ordinal)`` is called on this thread for each task. If a lane or the plan fails, its
        first error is raised here after all threads have ended.
        """
        submitted: list[tuple[Task, Lane, int]] = []
        num_traced = math.inf if keep_trace is True else int(keep_trace)
        plan = partial(self._plan, tasks, on_submit, num_traced, submitted)
        with SHORT_SWITCH_INTERVAL.held(), NO_OLD_GARBAGE.held() if num_traced else contextlib.nullcontext():
            self.began_s, before_s = time.perf_counter(), time.thread_time()
            try:
                for lane in self.lanes.values():
                    lane.num_spans = math.inf if num_traced else 0
                    lane.timed_iterations = timed_iterations
                    lane.start()
                self._issuer.around(plan) if self._issuer else plan()
                self.launch_s = time.thread_time() - before_s
            except BaseException as error:
                self._fail(error)
            finally:
                self._end_lanes()
        if self._error:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: a reference cycle, which would keep the buffers alive
        trace = []
        for task, lane, ordinal in submitted:
            start, end = lane.span(ordinal)
            trace.append(TraceEvent(task, start - self.began_s, end - self.began_s))
        return trace

    def _plan(
        self,
        tasks: Iterable[Task],
        on_submit: Callable[[Task, int], None] | None,
        num_traced: float,
        submitted: list[tuple[Task, Lane, int]],
    ) -> None:
        """Submit every task and wait for the end; append the first ``num_traced`` to ``submitted``."""
        for task in tasks:
            lane, ordinal = self._submit(task)
            if len(submitted) < num_traced:
                submitted.append((task, lane, ordinal))
                if len(submitted) == num_traced:
                    for other in self.lanes.values():
                        other.num_spans = other.submitted
            if on_submit:
                on_submit(task, ordinal)
        for lane in self.lanes.values():
            if lane.submitted:
                self.wait(lane.name, lane.submitted - 1)

    def _submit(self, task: Task) -> tuple[Lane, int]:
        """Submit a task after its lane's queue has room. Raise Aborted if a lane has failed.

        If a queue is full, wait until half of it is done. Waking the planning thread for each task would take several
        times as long, and would take the interpreter's lock from the lanes.
        """
        lane = self.lanes[task.resource]
        if lane.submitted >= lane.room:
            awaited = lane.submitted - max(1, lane.lookahead // 2)
            self.wait(task.resource, awaited)
            lane.room = awaited + lane.lookahead
        if self._error:
            raise Aborted
        return lane, lane.submit(task, self._dependencies.add(task))

    def _end_lanes(self) -> None:
        for lane in self.lanes.values():
            lane.finish()
        for lane in self.lanes.values():
            lane.join()
        for lane in self.lanes.values():
            if self._error:
                with contextlib.suppress(
                    Exception
                ):  # every call after a device error raises again; only the first is reported
                    lane.drain()
            lane.release()
