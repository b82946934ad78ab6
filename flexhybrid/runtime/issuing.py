"""Lanes that enqueue on CUDA streams, and the one thread that does it for all of them.

Waiting on an event that has not been recorded does nothing on CUDA, so a task may be enqueued only after its
predecessors on other stream lanes are *enqueued* (its stream is then made to wait for their events) and its
predecessors on host lanes are *complete*. A host lane waits for the event itself, on its own thread. Every task gets an
event for which nobody waits any more. Nothing ever synchronises the whole device.

A thread for each stream would spend more time on the interpreter's lock than on its calls (bench: launch).
"""

from __future__ import annotations

import queue
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from flexhybrid.core.task import Task
from flexhybrid.runtime.clock import Aborted, Lane, Perform, Worker
from flexhybrid.runtime.cuda import CudaStream, Recorded

#: Tasks of a stream lane that may wait in its queue or on its stream. A CUDA stream takes about 1,000 calls before the
#: thread that issues the next one blocks; a task has some five kernels or copies, and two to four calls of events.
STREAM_LOOKAHEAD_TASKS = 64


class Issuer(Worker):
    """The thread that enqueues the tasks of all stream lanes, each lane's in their order, as soon as they may be.

    Its inbox holds the tasks that are submitted, and calls of host lanes that have completed what a task waits for: a
    lane whose next task waits keeps no other from being fed.
    """

    def __init__(self, thread: ThreadPoolExecutor | None = None):
        super().__init__("issue", thread)
        self.lanes: list[StreamLane] = []
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._current: StreamLane | None = None  #: whose stream is the thread's

    def start(self) -> None:
        if not self._ended:  # each lane starts it
            self.fail = self.lanes[0].fail
            super().start()

    def loop(self) -> None:
        before_s = time.thread_time()
        super().loop()
        self.lanes[0].enqueuing_s = time.thread_time() - before_s

    def _run_tasks(self) -> None:
        """Enqueue until no lane gets more tasks, or one fails."""
        open_lanes = len(self.lanes)
        while open_lanes or any(lane.queued for lane in self.lanes):
            item = self.inbox.get()
            if self.lanes[0].failed:
                return
            if item is ENDS:
                open_lanes -= 1
            elif item is not COMPLETED:
                lane, *queued = item
                lane.queued.append(queued)
                if len(lane.queued) > 1:
                    continue
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


ENDS, COMPLETED = "ends", "completed"  #: in the inbox: a lane gets no more tasks; what a task waited for is complete


class StreamLane(Lane):
    """A lane that enqueues on a stream. ``passed`` counts its enqueued tasks: other stream lanes may build on them.
    ``times`` counts its tasks, and in a run that keeps a trace what enqueuing them takes of a processor.

    Events of tasks whose spans are not kept are dropped when older than the lookahead: the planner has waited for them
    before it went on, so there is nothing left to wait for. The stream records them anew once nobody holds them.
    """

    lookahead = STREAM_LOOKAHEAD_TASKS

    def __init__(self, name: str, perform: Perform, stream: CudaStream, issuer: Issuer):
        super().__init__(name, perform, thread=issuer.thread)
        self.stream, self.issuer = stream, issuer
        self.queued: deque[tuple[Task, list]] = deque()  #: of the issuer's thread alone
        self._asked: tuple[str, int] | None = None  #: host lane and ordinal whose completion the issuer will be told of
        self._begins: list[Recorded] = []
        self._ends: dict[int, Recorded] = {}
        issuer.lanes.append(self)

    def start(self) -> None:
        self.issuer.start()

    def submit(self, task: Task, waits) -> int:
        ordinal = self.submitted
        self.submitted += 1
        self.issuer.inbox.put((self, task, waits))
        return ordinal

    def finish(self) -> None:
        self.issuer.inbox.put(ENDS)

    def join(self) -> None:
        self.issuer.join()

    def abort(self) -> None:
        super().abort()
        self.issuer.inbox.put(COMPLETED)

    def may_enqueue(self, waits) -> bool:
        """Return whether all that a task waits for is enqueued or complete; else the issuer is told of a host lane's
        task when it is complete, of a stream lane's it knows."""
        for resource, ordinal in waits:
            lane = self.lanes[resource]
            if lane.passed > ordinal:
                continue
            if not isinstance(lane, StreamLane) and self._asked != (resource, ordinal):
                self._asked = resource, ordinal
                lane.call_when_passed(ordinal, partial(self.issuer.inbox.put, COMPLETED))
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
        self.issuer.lanes, self.issuer.fail = [], self.fail
