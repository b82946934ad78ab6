"""Enqueues the tasks of CUDA stream lanes on the planning thread.

Waiting for an unrecorded event does nothing on CUDA. So a task is enqueued when its predecessors on other stream lanes
are *enqueued* (its stream then waits for their events) and its predecessors on host lanes are *complete*. A host lane
waits for a stream lane's event on its own thread. Each task gets an event that no thread waits for any more. The whole
device is never synchronized.

Tasks that may be **launched together** are enqueued in one call, with one event. A task is held until the next task
cannot join it, or until something waits for it.

Separate enqueuing threads would spend more time on the interpreter's lock than on their calls (bench: launch).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from flexhybrid.core.task import Task
from flexhybrid.core.trace import LineKey, LineTimes
from flexhybrid.runtime.clock import LOOK_UP_S, Aborted, Around, Lane, Perform
from flexhybrid.runtime.cuda import CudaStream, Recorded

#: Limit of a stream lane's submitted and incomplete tasks. A CUDA stream accepts about 1,000 calls before the next call
#: blocks. A task has about five kernels or copies, and two to four calls for events.
STREAM_LOOKAHEAD_TASKS = 64
Waits = tuple[tuple[str, int], ...]  #: (lane, ordinal) of each awaited task
Launch = tuple[list[Task], Waits]  #: tasks that are enqueued together, and their awaited tasks
#: While the planning thread waits for an event and other tasks wait for host lanes, it checks the event after this
#: many seconds. The event comes half a lookahead before the device would be idle.
LOOK_S = 2e-4


class JointCall(Protocol):
    """Launches several tasks in one call (``verbs.graphed.JointLaunch``)."""

    patient: Sequence[str]  #: verbs whose predecessors earlier tasks of the call may wait for
    most: int  #: maximum of tasks in a call that covers several positions; 0: no call does

    def next_key(self, task: Task) -> tuple | None:
        """Return the key of the only task that may join this one in its launch; None if no task may."""

    def perform(self, tasks: Sequence[Task]) -> None:
        """Launch tasks. Each is the ``next_key`` of the one before."""


class Issuer:
    """Enqueues the tasks of all stream lanes on the planning thread, while it submits tasks and while it waits.

    Each lane keeps its order. A waiting lane does not block others.
    """

    def __init__(self, around: Around = lambda tasks: tasks()):
        self.around = around  #: calls the function that plans and enqueues
        self.lanes: list[StreamLane] = []
        self.wake = threading.Event()  #: set when a host lane completes an awaited task, or a lane fails
        self._current: StreamLane | None = None  #: lane whose stream is the thread's current one

    def enqueue(self) -> None:
        """Enqueue all ready tasks, except held ones."""
        while any([self.feed(lane) for lane in self.lanes if lane.queued]):
            pass

    def feed(self, lane: StreamLane) -> bool:
        """Enqueue the launches of a lane up to the first that must wait; return whether any was enqueued."""
        before = lane.passed
        while lane.queued and lane.may_enqueue(lane.queued[0][1]):
            if self._current is not lane:
                lane.stream.enter()
                self._current = lane
            lane.enqueue(*lane.queued.popleft())
        return lane.passed > before

    def enqueue_until(self, lane: Lane, ordinal: int) -> None:
        """Enqueue tasks until a lane's task is complete. Raise Aborted if a lane has failed.

        On a stream lane, stop when the task is enqueued and no task is left that waits for a host lane.
        """
        if isinstance(lane, StreamLane):
            lane.queue_if_held(ordinal)
        else:
            lane.call_when_passed(ordinal, self.wake.set)
        self._enqueue_awaited()
        while lane.passed <= ordinal:
            self._sleep(lane, LOOK_UP_S)
        if isinstance(lane, StreamLane) and (event := lane.wait_enqueued(ordinal)):
            while any(other.queued for other in self.lanes) and not event.is_complete():
                self._sleep(lane, LOOK_S)

    def _sleep(self, lane: Lane, seconds: float) -> None:
        """Sleep until a host lane completes an awaited task, at most ``seconds``; then enqueue ready tasks."""
        self.wake.wait(seconds)
        self.wake.clear()
        if lane.failed:
            raise Aborted
        self._enqueue_awaited()

    def _enqueue_awaited(self) -> None:
        """Enqueue all ready tasks, including held ones that a host lane waits for."""
        for lane in self.lanes:
            for ordinal in lane.awaited():
                lane.queue_if_held(ordinal)
        self.enqueue()


class StreamLane(Lane):
    """A lane whose tasks are enqueued on a stream. A task passes when it is enqueued.

    ``times`` counts tasks, and in a traced run the processor time of enqueuing. ``together``: decides which tasks are
    launched together (default: none); tasks with stored spans are launched alone. A task joins held tasks if this
    stream already waits for its predecessors, or if the verb is ``patient`` and its predecessors have passed. The
    lookahead is more than three launches; otherwise the planning thread could wait for one launch while the next is
    held.

    Events without stored spans are dropped when older than the lookahead, because the planning thread has waited for
    them. The stream then reuses them.
    """

    lookahead = STREAM_LOOKAHEAD_TASKS
    issuer: Issuer

    def __init__(
        self, name: str, perform: Perform, stream: CudaStream, issuer: Issuer, together: JointCall | None = None
    ):
        super().__init__(name, perform)
        self.stream, self.issuer, self.together = stream, issuer, together
        self.queued: deque[Launch] = deque()  #: launches that are not enqueued yet
        self._held: Launch | None = None  #: the latest tasks, which the next task may join
        self._joining: tuple | None = None  #: key of the task that may join
        self._latest: dict[str, int] = {}  #: lane -> latest task there that this lane's tasks wait for
        self._asked: tuple[str, int] | None = None  #: host lane and ordinal that the issuer waits for
        self._begins: list[Recorded] = []
        self._ends: dict[int, Recorded] = {}
        self._timing: deque[tuple[Task, Recorded, Recorded]] = deque()  #: tasks of timed iterations, begins and ends
        self.room = self.lookahead = max(self.lookahead, 4 * together.most if together else 0)
        issuer.lanes.append(self)

    def submit(self, task: Task, waits: Waits) -> int:
        ordinal = self.submitted
        self.submitted += 1
        if self.together is None:
            self.queued.append(([task], waits))
        else:
            self._hold(self.together, task, waits)
        self.issuer.enqueue()
        return ordinal

    def _hold(self, together: JointCall, task: Task, waits: Waits) -> None:
        """Add a task to the held ones, or queue these; hold the task if another may join it."""
        latest, held = self._latest, self._held
        late = [(lane, ordinal) for lane, ordinal in waits if latest.get(lane, -1) < ordinal]
        may_wait = task.verb in together.patient and all([self.lanes[lane].passed > ordinal for lane, ordinal in late])
        if held and self._joining == task.key and (may_wait or not late):
            held[0].append(task)
            self._held = held[0], (*held[1], *late)
        else:
            self.queue_held()
            self._held = [task], waits
        latest.update(waits)
        alone = self.submitted <= self.num_spans or task.iteration < self.timed_iterations
        self._joining = None if alone else together.next_key(task)
        if self._joining is None:
            self.queue_held()

    def queue_held(self) -> None:
        """Queue the held tasks."""
        if self._held:
            self.queued.append(self._held)
            self._held = None

    def queue_if_held(self, ordinal: int) -> bool:
        """Queue the held tasks if this task is one of them; return whether it is.

        Otherwise keep them: if launches depended on when the planning thread waits, each case would need its own graph.
        """
        if self._held is None or ordinal < self.submitted - len(self._held[0]):
            return False
        self.queue_held()
        return True

    def call_when_passed(self, ordinal: int, call: Callable[[], object]) -> None:
        super().call_when_passed(ordinal, call)
        self.issuer.wake.set()  # the task may be held

    def abort(self) -> None:
        super().abort()
        self.issuer.wake.set()

    def may_enqueue(self, waits: Waits) -> bool:
        """Return whether all awaited tasks have passed; if one of a host lane has not, ask it to notify the issuer."""
        for resource, ordinal in waits:
            lane = self.lanes[resource]
            if lane.passed > ordinal:
                continue
            if isinstance(lane, StreamLane):
                if lane.queue_if_held(ordinal) and self.issuer.feed(lane) and lane.passed > ordinal:
                    continue
            elif self._asked != (resource, ordinal):
                self._asked = resource, ordinal
                lane.call_when_passed(ordinal, self.issuer.wake.set)
                if lane.passed > ordinal:
                    continue
            return False
        return True

    def enqueue(self, tasks: list[Task], waits: Waits) -> None:
        """Enqueue tasks, after their awaited tasks."""
        for resource, ordinal in waits:
            lane = self.lanes[resource]
            if not isinstance(lane, StreamLane):
                lane.wait_complete(ordinal)
            elif event := lane.wait_enqueued(ordinal):
                self.stream.wait(event)
        traced = self.passed < self.num_spans
        timed = tasks[0].iteration < self.timed_iterations
        before_s = time.thread_time() if traced else 0.0
        begin = self.stream.record() if traced or timed else None
        if self.together and len(tasks) > 1:
            self.together.perform(tasks)
        else:
            self.perform(tasks[0])
        event = self.stream.record(timed=begin is not None)
        self.times.tasks += len(tasks)
        if begin and traced:
            self._begins.append(begin)
            self.times.cpu_s += time.thread_time() - before_s
        if begin and timed:
            self._timing.append((tasks[0], begin, event))
        for _ in tasks:
            self._ends[self.passed] = event
            if (old := self.passed - 2 * self.lookahead) >= self.num_spans:
                self._ends.pop(old, None)
            self._pass()

    def read_times(self) -> dict[LineKey, LineTimes]:
        while self._timing and self._timing[0][2].is_complete():
            task, begin, end = self._timing.popleft()
            self._note_time(task, self.stream.seconds_between(begin, end))
        return super().read_times()

    def wait_enqueued(self, ordinal: int) -> Recorded | None:
        """Block until a task is enqueued; return its event, or None if the event was dropped."""
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
