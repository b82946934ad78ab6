"""Lanes whose tasks are enqueued on CUDA streams, by the thread that plans them.

Waiting on an event that has not been recorded does nothing on CUDA, so a task may be enqueued only after its
predecessors on other stream lanes are *enqueued* (its stream is then made to wait for their events) and its
predecessors on host lanes are *complete*. A host lane waits for the event itself, on its own thread. Every task gets an
event for which nobody waits any more. Nothing ever synchronises the whole device.

Threads that enqueue, one for each stream or one for all, would spend more time on the interpreter's lock than on their
calls (bench: launch).
"""

from __future__ import annotations

import threading
import time
from collections import deque

from flexhybrid.core.task import Task
from flexhybrid.runtime.clock import LOOK_UP_S, Aborted, Around, Lane, Perform
from flexhybrid.runtime.cuda import CudaStream, Recorded

#: Tasks of a stream lane that may wait in its queue or on its stream. A CUDA stream takes about 1,000 calls before the
#: thread that issues the next one blocks; a task has some five kernels or copies, and two to four calls of events.
STREAM_LOOKAHEAD_TASKS = 64
#: Seconds between two looks at an event that the planning thread waits for while tasks wait for host lanes. The event
#: is half of a lane's lookahead away from the device's idling.
LOOK_S = 2e-4


class Issuer:
    """Enqueues the tasks of all stream lanes, each lane's in their order, as soon as they may be: on the planning
    thread, as it submits tasks and while it waits. A lane whose next task waits keeps no other from being fed.
    """

    def __init__(self, around: Around = lambda tasks: tasks()):
        self.around = around  #: calls what plans and enqueues
        self.lanes: list[StreamLane] = []
        self.told = threading.Event()  #: a host lane has completed what a task waits for, or a lane has failed
        self._current: StreamLane | None = None  #: whose stream is the thread's

    def enqueue(self) -> None:
        """Enqueue all tasks that may be."""
        while any([self._enqueue(lane) for lane in self.lanes if lane.queued]):
            pass

    def _enqueue(self, lane: StreamLane) -> bool:
        """Enqueue tasks of a lane up to the first that waits; return whether there was one."""
        before = lane.passed
        while lane.queued and lane.may_enqueue(lane.queued[0][1]):
            if self._current is not lane:
                lane.stream.enter()
                self._current = lane
            lane.enqueue(*lane.queued.popleft())
        return lane.passed > before

    def enqueue_until(self, lane: Lane, ordinal: int) -> None:
        """Enqueue tasks until that one of a lane is complete, or of a stream lane until it is enqueued and no task is
        left that waits for a host lane. Raises Aborted when a lane has failed."""
        if not isinstance(lane, StreamLane):
            lane.call_when_passed(ordinal, self.told.set)
        self.enqueue()
        while lane.passed <= ordinal:
            self._sleep(lane, LOOK_UP_S)
        if isinstance(lane, StreamLane) and (event := lane.wait_enqueued(ordinal)):
            while any(other.queued for other in self.lanes) and not event.is_complete():
                self._sleep(lane, LOOK_S)

    def _sleep(self, lane: Lane, seconds: float) -> None:
        """Sleep until a host lane has completed what a task waits for, at most so long; enqueue what may be then."""
        self.told.wait(seconds)
        self.told.clear()
        if lane.failed:
            raise Aborted
        self.enqueue()


class StreamLane(Lane):
    """A lane whose tasks are enqueued on a stream; those have passed that are enqueued: other stream lanes may build on
    them. ``times`` counts them, and in a run that keeps a trace what enqueuing them takes of a processor.

    Events of tasks whose spans are not kept are dropped when older than the lookahead: the planner has waited for them
    before it went on, so there is nothing left to wait for. The stream records them anew once nobody holds them.
    """

    lookahead = STREAM_LOOKAHEAD_TASKS
    issuer: Issuer

    def __init__(self, name: str, perform: Perform, stream: CudaStream, issuer: Issuer):
        super().__init__(name, perform)
        self.stream, self.issuer = stream, issuer
        self.queued: deque[tuple[Task, list]] = deque()  #: submitted, and not enqueued yet
        self._asked: tuple[str, int] | None = None  #: host lane and ordinal whose completion the issuer will be told of
        self._begins: list[Recorded] = []
        self._ends: dict[int, Recorded] = {}
        issuer.lanes.append(self)

    def submit(self, task: Task, waits) -> int:
        ordinal = self.submitted
        self.submitted += 1
        self.queued.append((task, waits))
        self.issuer.enqueue()
        return ordinal

    def abort(self) -> None:
        super().abort()
        self.issuer.told.set()

    def may_enqueue(self, waits) -> bool:
        """Return whether all that a task waits for is enqueued or complete; else the issuer is told of a host lane's
        task when it is complete, of a stream lane's it knows."""
        for resource, ordinal in waits:
            lane = self.lanes[resource]
            if lane.passed > ordinal:
                continue
            if not isinstance(lane, StreamLane) and self._asked != (resource, ordinal):
                self._asked = resource, ordinal
                lane.call_when_passed(ordinal, self.issuer.told.set)
                if lane.passed > ordinal:
                    continue
            return False
        return True

    def enqueue(self, task: Task, waits) -> None:
        """Enqueue a task behind what it waits for."""
        for resource, ordinal in waits:
            lane = self.lanes[resource]
            if not isinstance(lane, StreamLane):
                lane.wait_complete(ordinal)
            elif event := lane.wait_enqueued(ordinal):
                self.stream.wait(event)
        traced = self.passed < self.num_spans
        before_s = time.thread_time() if traced else 0.0
        if traced:
            self._begins.append(self.stream.record())
        self.perform(task)
        self._ends[self.passed] = self.stream.record(timed=traced)
        self.times.tasks += 1
        if traced:
            self.times.cpu_s += time.thread_time() - before_s
        if (old := self.passed - 2 * self.lookahead) >= self.num_spans:
            self._ends.pop(old, None)
        self._pass()

    def wait_enqueued(self, ordinal: int) -> Recorded | None:
        """Block until that task is enqueued; return its event, or None when it was dropped as long complete."""
        self._block(ordinal)
        return self._ends.get(ordinal)

    def wait_complete(self, ordinal: int) -> float:
        if event := self.wait_enqueued(ordinal):
            event.synchronize()
        if self.failed:
            raise Aborted
        return time.perf_counter()

    def span(self, ordinal: int) -> tuple[float, float]:
        return self.stream.seconds(self._begins[ordinal]), self.stream.seconds(self._ends[ordinal])

    def drain(self) -> None:
        self.stream.synchronize()

    def release(self) -> None:
        super().release()
        self.issuer.lanes = []
