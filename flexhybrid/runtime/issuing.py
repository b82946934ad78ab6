"""Enqueues the tasks of CUDA stream lanes on the planning thread.

Waiting on an unrecorded event does nothing on CUDA. So a task is enqueued after its predecessors on other stream lanes
are *enqueued* (its stream then waits for their events) and its predecessors on host lanes are *complete*. A host lane
waits for the event itself, on its own thread. Every task gets an event that no thread still waits for. The whole device
is never synchronized.

Tasks that may be **launched together** are enqueued in one call, with one event. A task is held until one comes that
cannot join it, or something waits for it.

One or more enqueuing threads would spend more time on the interpreter's lock than on their calls (bench: launch).
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

#: Tasks of a stream lane that may wait in its queue or on its stream. A CUDA stream takes about 1,000 calls before the
#: thread that issues the next one blocks; a task has some five kernels or copies, and two to four calls of events.
STREAM_LOOKAHEAD_TASKS = 64
Waits = tuple[tuple[str, int], ...]  #: lanes, and ordinals of tasks that are awaited there
Launch = tuple[list[Task], Waits]  #: tasks that are enqueued together, and what they wait for
#: Seconds between two looks at an event that the planning thread waits for while tasks wait for host lanes. The event
#: is half of a lane's lookahead away from the device's idling.
LOOK_S = 2e-4


class JointCall(Protocol):
    """Launches several tasks in one call (``verbs.graphed.JointLaunch``)."""

    patient: Sequence[str]  #: verbs whose waits earlier tasks may share
    most: int  #: tasks of a call that is held from one position to the next; 0: none is

    def next_key(self, task: Task) -> tuple | None:
        """Return the key of the task that may be launched together with this one, if it comes next; None: none may."""

    def perform(self, tasks: Sequence[Task]) -> None:
        """Launch tasks, each with the ``next_key`` of the one before."""


class Issuer:
    """Enqueues the tasks of all stream lanes, in each lane's order, as soon as possible: on the planning thread, while
    it submits tasks and while it waits. A waiting lane does not block others."""

    def __init__(self, around: Around = lambda tasks: tasks()):
        self.around = around  #: calls what plans and enqueues
        self.lanes: list[StreamLane] = []
        self.told = threading.Event()  #: a host lane has completed what a task waits for, or a lane has failed
        self._current: StreamLane | None = None  #: lane whose stream is the thread's current one

    def enqueue(self) -> None:
        """Enqueue all ready tasks, except those held for others to join."""
        while any([self.feed(lane) for lane in self.lanes if lane.queued]):
            pass

    def feed(self, lane: StreamLane) -> bool:
        """Enqueue launches of a lane up to the first that waits; return whether there was one."""
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
        if isinstance(lane, StreamLane):
            lane.let_go(ordinal)
        else:
            lane.call_when_passed(ordinal, self.told.set)
        self._enqueue_awaited()
        while lane.passed <= ordinal:
            self._sleep(lane, LOOK_UP_S)
        if isinstance(lane, StreamLane) and (event := lane.wait_enqueued(ordinal)):
            while any(other.queued for other in self.lanes) and not event.is_complete():
                self._sleep(lane, LOOK_S)

    def _sleep(self, lane: Lane, seconds: float) -> None:
        """Sleep until a host lane completes an awaited task, up to a limit; enqueue what is then ready."""
        self.told.wait(seconds)
        self.told.clear()
        if lane.failed:
            raise Aborted
        self._enqueue_awaited()

    def _enqueue_awaited(self) -> None:
        """Enqueue all tasks that may be, those as well that are held and that a host lane waits for."""
        for lane in self.lanes:
            for ordinal in lane.awaited():
                lane.let_go(ordinal)
        self.enqueue()


class StreamLane(Lane):
    """A lane whose tasks are enqueued on a stream; enqueued tasks have passed, for other stream lanes. ``times`` counts
    them, and in a traced run the processor time of enqueuing.

    ``together``: which tasks may launch together, and how; None: one by one, as are tasks with kept spans. A task joins
    earlier ones if it waits for nothing more than they do (or did on this stream), or if they may wait for the rest too
    and it is enqueued. The lookahead exceeds three launches, or the planner would wait for one while the next is held.

    Events of tasks without kept spans are dropped when older than the lookahead, because the planner has waited for
    them. The stream reuses them once they are unreferenced.
    """

    lookahead = STREAM_LOOKAHEAD_TASKS
    issuer: Issuer

    def __init__(
        self, name: str, perform: Perform, stream: CudaStream, issuer: Issuer, together: JointCall | None = None
    ):
        super().__init__(name, perform)
        self.stream, self.issuer, self.together = stream, issuer, together
        self.queued: deque[Launch] = deque()  #: submitted, and not enqueued yet
        self._held: Launch | None = None  #: the latest tasks, which others may join
        self._joining: tuple | None = None  #: the key of the task that may
        self._latest: dict[str, int] = {}  #: by lane the latest task that one of this lane waits for
        self._asked: tuple[str, int] | None = None  #: host lane and ordinal whose completion the issuer awaits
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
        """Join a task to the held ones, or queue them; hold it if another may join."""
        latest, held = self._latest, self._held
        late = [(lane, ordinal) for lane, ordinal in waits if latest.get(lane, -1) < ordinal]
        may_wait = task.verb in together.patient and all([self.lanes[lane].passed > ordinal for lane, ordinal in late])
        if held and self._joining == task.key and (may_wait or not late):
            held[0].append(task)
            self._held = held[0], (*held[1], *late)
        else:
            self.hold_no_longer()
            self._held = [task], waits
        latest.update(waits)
        alone = self.submitted <= self.num_spans or task.iteration < self.timed_iterations
        self._joining = None if alone else together.next_key(task)
        if self._joining is None:
            self.hold_no_longer()

    def hold_no_longer(self) -> None:
        """Close the latest tasks to others."""
        if self._held:
            self.queued.append(self._held)
            self._held = None

    def let_go(self, ordinal: int) -> bool:
        """Release the latest tasks if this task is one of them; return whether it is. Others stay held: what launches
        together must not depend on when the planner waits, or each case would need its own graph."""
        if self._held is None or ordinal < self.submitted - len(self._held[0]):
            return False
        self.hold_no_longer()
        return True

    def call_when_passed(self, ordinal: int, call: Callable[[], object]) -> None:
        super().call_when_passed(ordinal, call)
        self.issuer.told.set()  # it may be held

    def abort(self) -> None:
        super().abort()
        self.issuer.told.set()

    def may_enqueue(self, waits: Waits) -> bool:
        """Return whether all that a task waits for is enqueued or complete; otherwise ask to be notified of host lanes'
        tasks."""
        for resource, ordinal in waits:
            lane = self.lanes[resource]
            if lane.passed > ordinal:
                continue
            if isinstance(lane, StreamLane):
                if lane.let_go(ordinal) and self.issuer.feed(lane) and lane.passed > ordinal:
                    continue
            elif self._asked != (resource, ordinal):
                self._asked = resource, ordinal
                lane.call_when_passed(ordinal, self.issuer.told.set)
                if lane.passed > ordinal:
                    continue
            return False
        return True

    def enqueue(self, tasks: list[Task], waits: Waits) -> None:
        """Enqueue tasks after what they wait for."""
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
        """Block until the task is enqueued; return its event, or None if it was dropped as complete."""
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
