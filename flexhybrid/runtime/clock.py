"""The real clock: one thread a resource, first in, first out, held back only by what each task must wait for.

A *lane* runs one resource's tasks in stream order. There are two kinds, and the rules between them are all of the
launcher:

- A **host lane** (CPU compute, paced links, host_compute) is done with a task when its function returns.
- A **stream lane** (CUDA compute and copies) only enqueues. Waiting on an event that has not been recorded does nothing
  on CUDA, so a stream lane may enqueue a task only after its predecessors on other stream lanes are *enqueued* (it then
  makes its stream wait for their events) and its predecessors on host lanes are *complete*. A host lane waits for the
  event itself, on its own thread. Every task gets a fresh event. Nothing ever synchronises the whole device.

Each lane waits on its own thread, so waiting for a host task never keeps another resource from being fed. Streams come
in through ``StreamFace``: the CUDA one is in flexhybrid.runtime.cuda; tests bring one with the same meaning and random
delays.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from flexhybrid.core.schedule.dependencies import KINDS, Dependencies
from flexhybrid.core.task import Task
from flexhybrid.core.trace import TraceEvent

#: Tasks of one lane that may wait in its queue: far enough ahead to never starve, small enough to bound memory.
LOOKAHEAD_TASKS = 256

#: Seconds between two forced switches of Python threads while lanes run: the default 5 ms would let a busy planner
#: hold back a copy that is due.
SWITCH_INTERVAL_S = 5e-4


class Aborted(Exception):
    """Raised inside a lane when another one has failed: it only ends the thread."""


class Event(Protocol):
    """A mark on a stream."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


class StreamFace(Protocol):
    """What a stream lane needs of a stream. ``wait`` on an event that was never recorded does nothing."""

    def wait(self, event: Event) -> None: ...

    def record(self, timed: bool = True) -> Event: ...

    def enter(self) -> None:
        """Called once, on the lane's thread, which issues to this stream from then on."""

    def run(self, function: Callable[[], None]) -> None:
        """Enqueue the work that ``function`` issues; returns at once."""

    def synchronize(self) -> None:
        """Wait for all that was enqueued: for the end of a failed run, before its memory goes."""

    def seconds(self, event: Event) -> float:
        """When a recorded, finished event happened, on the clock of ``time.perf_counter``."""


Perform = Callable[[Task], None]


class Lane:
    """A resource's thread. ``complete`` counts finished tasks, ``enqueued`` those that others may build on."""

    asynchronous = False

    def __init__(self, name: str, perform: Perform, on_start: Callable[[], None] | None = None):
        self.name = name
        self.perform = perform
        self.lanes: dict[str, Lane] = {}
        self.fail: Callable[[BaseException], None] = lambda error: None
        self.failed = False
        self.complete = 0
        self.submitted = 0
        self.num_spans = math.inf  #: spans are kept of so many tasks, the first ones
        self._spans: list[tuple[float, float]] = []
        self._on_start = on_start
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name=f"flexhybrid-{name}")

    def start(self) -> None:
        self._thread.start()

    def submit(self, task: Task, waits) -> int:
        ordinal = self.submitted
        self.submitted += 1
        self._queue.put((task, waits))
        return ordinal

    def finish(self) -> None:
        self._queue.put(None)

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def abort(self) -> None:
        self.failed = True
        self._queue.put(None)
        with self._changed:
            self._changed.notify_all()

    def wait_complete(self, ordinal: int) -> None:
        """Block until the task with this ordinal is complete."""
        if self.complete > ordinal:
            return
        with self._changed:
            while self.complete <= ordinal:
                if self.failed:
                    raise Aborted
                self._changed.wait()

    def _loop(self) -> None:
        try:
            if self._on_start:
                self._on_start()
            while (item := self._queue.get()) is not None:
                if self.failed:
                    return
                self._run(*item)
        except Aborted:
            pass
        except BaseException as error:  # handed to whoever called run(); a thread must not die silently
            self.fail(error)

    def _run(self, task: Task, waits) -> None:
        for resource, ordinal in waits:
            self.lanes[resource].wait_complete(ordinal)
        start = time.perf_counter()
        self.perform(task)
        if self.complete < self.num_spans:
            self._spans.append((start, time.perf_counter()))
        with self._changed:
            self.complete += 1
            self._changed.notify_all()

    def span(self, ordinal: int) -> tuple[float, float]:
        """(start, end) of a finished task whose span is kept."""
        return self._spans[ordinal]

    def drain(self) -> None:
        """Wait for what a failed run left behind: nothing, on a host lane."""

    def release(self) -> None:
        """Forget the other lanes once all have ended: in a circle they would keep the run's buffers alive."""
        self.lanes, self.fail = {}, lambda error: None


class StreamLane(Lane):
    """A lane that enqueues on a stream.

    Events of tasks whose spans are not kept are dropped when older than the lookahead: the planner has waited for them
    before it went on, so whoever asks for one gets None, nothing to wait for.
    """

    asynchronous = True

    def __init__(self, name: str, perform: Perform, stream: StreamFace):
        super().__init__(name, perform, on_start=stream.enter)
        self.stream = stream
        self.enqueued = 0
        self._begins: list[Event] = []
        self._ends: dict[int, Event] = {}

    def wait_enqueued(self, ordinal: int) -> Event | None:
        """Block until that task is enqueued; its event, None when it is long complete."""
        if self.enqueued <= ordinal:
            with self._changed:
                while self.enqueued <= ordinal:
                    if self.failed:
                        raise Aborted
                    self._changed.wait()
        return self._ends.get(ordinal)

    def wait_complete(self, ordinal: int) -> None:
        if event := self.wait_enqueued(ordinal):
            event.synchronize()
        if self.failed:
            raise Aborted

    def _run(self, task: Task, waits) -> None:
        for resource, ordinal in waits:
            lane = self.lanes[resource]
            if not lane.asynchronous:
                lane.wait_complete(ordinal)
            elif event := lane.wait_enqueued(ordinal):
                self.stream.wait(event)
        traced = self.enqueued < self.num_spans
        if traced:
            self._begins.append(self.stream.record())
        self.stream.run(lambda: self.perform(task))
        self._ends[self.enqueued] = self.stream.record(timed=traced)
        if (old := self.enqueued - 2 * LOOKAHEAD_TASKS) >= self.num_spans:
            self._ends.pop(old, None)
        with self._changed:
            self.enqueued += 1
            self._changed.notify_all()

    def span(self, ordinal: int) -> tuple[float, float]:
        return self.stream.seconds(self._begins[ordinal]), self.stream.seconds(self._ends[ordinal])

    def drain(self) -> None:
        self.stream.synchronize()


class Clock:
    """Runs a stream of tasks on lanes. One use: lanes are joined when ``run`` returns or raises.

    ``on_fail`` is called at the first error, on the thread that met it, before lanes are joined: it makes what a lane
    may be waiting for (a paced link, a disk) end soon.
    """

    def __init__(
        self,
        lanes: Iterable[Lane],
        dependency_kinds: Iterable[str] = KINDS,
        on_fail: Callable[[], None] = lambda: None,
    ):
        self.lanes = {lane.name: lane for lane in lanes}
        self.began_s = math.nan  #: the trace's zero, on the clock of ``time.perf_counter``
        self._on_fail = on_fail
        self._dependencies = Dependencies(dependency_kinds)
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

    def wait(self, resource: str, ordinal: int) -> None:
        """Block the calling (planning) thread until that task is complete; raises the error that stopped a lane."""
        try:
            self.lanes[resource].wait_complete(ordinal)
        except Aborted:
            raise self._error or RuntimeError("the run was stopped") from None

    def run(
        self,
        tasks: Iterable[Task],
        on_submit: Callable[[Task, int], None] | None = None,
        keep_trace: bool | int = True,
    ) -> list[TraceEvent]:
        """Submit every task in stream order, wait for the end, return the trace (seconds from the start): of all tasks,
        of none, or of the first ``keep_trace``.

        ``on_submit(task, ordinal)`` is called on this thread as each task goes out. The first error of any lane, or of
        the stream itself, is raised here after all threads have ended.
        """
        submitted: list[tuple[Task, Lane, int]] = []
        num_traced = math.inf if keep_trace is True else int(keep_trace)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.began_s = time.perf_counter()
        try:
            for lane in self.lanes.values():
                lane.num_spans = math.inf if num_traced else 0
                lane.start()
            for task in tasks:
                lane = self.lanes[task.resource]
                if lane.submitted >= LOOKAHEAD_TASKS:
                    self.wait(task.resource, lane.submitted - LOOKAHEAD_TASKS)
                if self._error:
                    break
                ordinal = lane.submit(task, self._dependencies.add(task))
                if len(submitted) < num_traced:
                    submitted.append((task, lane, ordinal))
                    if len(submitted) == num_traced:
                        for one in self.lanes.values():
                            one.num_spans = one.submitted
                if on_submit:
                    on_submit(task, ordinal)
            for lane in self.lanes.values():
                if lane.submitted:
                    self.wait(lane.name, lane.submitted - 1)
        except BaseException as error:
            self._fail(error)
        finally:
            for lane in self.lanes.values():
                lane.finish()
            for lane in self.lanes.values():
                lane.join()
                if self._error:
                    lane.drain()
            sys.setswitchinterval(interval)
            for lane in self.lanes.values():
                lane.release()
        if self._error:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: a circle would keep the buffers until the next collection
        trace = []
        for task, lane, ordinal in submitted:
            start, end = lane.span(ordinal)
            trace.append(TraceEvent(task, start - self.began_s, end - self.began_s))
        return trace
