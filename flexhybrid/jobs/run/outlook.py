"""Estimates the rest of a running batch from the predicted iteration cost and the answers that have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from flexhybrid.core.admission import batch_size, open_batch
from flexhybrid.core.trace import LineKey, LineTimes
from flexhybrid.core.wave import Wave
from flexhybrid.core.workload import Workload
from flexhybrid.llm import LLM
from flexhybrid.runner import MOST_AT_A_TIME
from sim.answer_lengths import ObservedAnswers, with_mean
from sim.queue_clock import IterationCost, evenly_spaced
from sim.queue_counts import RunIntervals, UnderWay, intervals

TRUSTED_S = 0.3  #: measured seconds with which a ratio to the prediction gets the weight 3/4 (_slower)
KEPT_BUSY = 4096  #: number of latest iterations whose busy seconds are kept
KEPT_ENDS = 2**17  #: number of latest iterations whose end times are kept, more than any window needs
LEAST_BUSY = 0.2  #: busy share below which a resource's ratio is not used
MOST_COUNTED = 2048  #: most waiting requests of an estimate; a longer queue is sampled evenly
REST, LEAST_REST = 50, 3  #: most and least time between two estimates, as multiples of the time that one takes


def batches(llm: LLM, workload: Workload) -> Callable[[], Wave]:
    """Return a function that opens a new batch of these requests per call, as ``llm.answer`` does when it begins.
    Raise InputError if not even one request fits the budgets."""
    problem, policy = llm.problem, llm.settled_policy
    places = batch_size(problem, policy, workload, MOST_AT_A_TIME)
    return lambda: open_batch(problem, policy, workload, places)


class ChangeCosts(NamedTuple):
    """Seconds until the running requests end, in three cases."""

    stay_s: float  #: in this batch, which waiting requests join
    drain_s: float  #: in this batch, which no requests join
    restart_s: float  #: in another batch, which waiting requests join, if they begin again without their tokens


def change_costs(rest: RunIntervals, ages: np.ndarray, before: IterationCost, after: IterationCost) -> ChangeCosts:
    """Return the seconds until the running requests (``Outlook.rest``) end in the old batch or in a new one.
    ``before``, ``after``: cost of an iteration in the old and in the new batch."""
    again = replace(rest, prompt_tokens=rest.prompt_tokens - ages, left=rest.left + ages)
    old, new = (
        cost.seconds(replace(of, mini_batch=of.request % cost.num_mini_batches))
        for of, cost in ((rest, before), (again, after))
    )
    full_iterations = float((rest.left - 1).mean())
    restart_s = float(new[0] + (full_iterations + ages.mean()) * new[1])
    return ChangeCosts(full_iterations * float(old[1]), float(old[1:].sum()), restart_s)


class CountedQueue(NamedTuple):
    """An estimate of the iterations until the last answer."""

    seconds: np.ndarray  #: predicted for each iteration, with resources as slow as measured
    first: int  #: first iteration of the estimate
    now: int  #: iteration in which the estimate was made
    drains: int  #: iteration in which the last request joins
    times: float  #: factor on the iterations between ``now`` and ``drains``, for a sampled queue
    until: float = 0.0  #: time at which the next estimate is due

    def seconds_from(self, iteration: int) -> float:
        """Return the predicted seconds from an iteration to the last answer."""
        behind, joining = max(iteration - self.now, 0), max(self.drains - self.now, 0)
        at = min(iteration, self.now) + round(min(behind / self.times, joining) + max(behind - joining * self.times, 0))
        return float(self.seconds[at:].sum() + (self.times - 1) * self.seconds[max(at, self.now) : self.drains].sum())


def _slower(measured: float, predicted: float, trusted_s: float = 0.0) -> float:
    """Return the ratio of measured to predicted time, moved towards 1 if the measurement is short (TRUSTED_S)."""
    weight = 1 - (trusted_s / (trusted_s + measured)) ** 2 if trusted_s else 1.0
    return (measured / max(predicted, 1e-3 * measured)) ** weight if measured else 1.0


class Outlook:
    """Observes the requests and iterations of a batch, and estimates the time until its end.

    Requests are named by their index in the batch's queue. ``pace``: predicted cost of an iteration.
    ``mean_answer``: expected tokens of an answer before any answer has ended; None: max_tokens. ``seen``: lengths of
    answers in earlier batches. ``open_wave`` returns a new copy of the batch as it began; None: no estimate is needed.
    """

    def __init__(
        self,
        pace: IterationCost,
        workload: Workload,
        mean_answer: float | None = None,
        seen: ObservedAnswers | None = None,
        open_wave: Callable[[], Wave] | None = None,
    ):
        self.pace, self.workload, self.open_wave = pace, workload, open_wave
        longest = int(workload.max_tokens.max())
        self.answers = ObservedAnswers(longest, mean_answer)
        #: [requests] answer lengths for which the current policy was chosen
        self.assumed = workload.max_tokens if mean_answer is None else with_mean(workload, mean_answer).answers
        if seen and len(seen.ended) > longest:
            self.answers = seen
            self.assumed = self._expected(np.arange(workload.num_requests))
        # The arrays cover all lines of a file; pages that are never written take no memory.
        self.begun_in = np.full(workload.num_requests, -1, np.int32)  #: [requests] first iteration; -1: waiting
        self.mini_batch = np.zeros(workload.num_requests, np.int16)  #: [requests] mini-batch of running and ended ones
        self.ended_in = np.full(workload.num_requests, -1, np.int32)  #: [requests] last iteration; -1: not ended
        self.num_iterations = 0
        self.busy: dict[int, dict[str, float]] = {}  #: iteration -> resource -> busy seconds up to its end
        self.timed_iterations = 0  #: first iterations whose tasks a GPU times one by one
        self.line_times: Callable[[], dict[LineKey, LineTimes]] = dict  #: returns the lines' times so far; or nothing
        self._queue: CountedQueue | None = None
        self._counting = threading.Lock()  #: held by the thread that makes an estimate; others use the one before
        self.began = self.latest = time.monotonic()
        self.ends = {0: self.began}  #: number of iterations -> end time of the last one

    def note_busy(self, seconds: dict[str, float], line_times: Callable[[], dict[LineKey, LineTimes]]) -> None:
        """Note each resource's busy seconds so far, and a function that returns the lines' times so far."""
        self.line_times = line_times
        self.busy[self.num_iterations + 1] = seconds
        self.busy.pop(self.num_iterations - KEPT_BUSY, None)

    def begin(self, request: int, mini_batch: int = 0) -> None:
        """Note that a request joins, also one that was preempted."""
        self.mini_batch[request] = mini_batch
        if self.begun_in[request] < 0:
            self.begun_in[request] = self.num_iterations

    def end(self, request: int, tokens: int) -> None:
        """Note that a request has ended with an answer of ``tokens`` tokens."""
        self.ended_in[request] = self.num_iterations
        self.answers.end(tokens, int(self.workload.max_tokens[request]))

    def advance(self) -> None:
        """Note the end of an iteration."""
        self.num_iterations += 1
        self.latest = self.ends[self.num_iterations] = time.monotonic()
        self.ends.pop(self.num_iterations - KEPT_ENDS, None)

    def seconds_left(self) -> float | None:
        """Return the estimated seconds until the last answer; None before the first iteration.
        The queue is simulated from time to time; its cost is scaled to the measured speed at each call."""
        if not self.num_iterations or self.open_wave is None:
            return None
        asked, queue = time.monotonic(), self._queue
        if (queue is None or asked >= queue.until) and self._counting.acquire(blocking=False):
            try:
                queue = self._count()
                now = time.monotonic()
                spent, half = now - asked, min(self._left(queue) / 2, now - self.ends.get(1, self.began))
                self._queue = queue = queue._replace(until=now + max(LEAST_REST * spent, min(REST * spent, half)))
            finally:
                self._counting.release()
        return queue and self._left(queue)

    def _count(self) -> CountedQueue:
        """Return an estimate of the queue, with each resource's work scaled to its measured time.
        Scaling by resource matters at the end, when few requests run: another resource may then limit the speed."""
        first, now = self._recent(), self.num_iterations
        counted, times = self.intervals(first)
        seconds = self.pace.slowed(self.slower_resources(first, TRUSTED_S)).seconds(counted, self.workload.prefixes)
        return CountedQueue(seconds, first, now, 1 + int(counted.joined.max()), times)

    def _left(self, queue: CountedQueue) -> float:
        first, now, latest = max(queue.first, self._recent()), self.num_iterations, self.latest
        left = queue.seconds_from(now)
        slower = _slower(latest - self.ends.get(first, latest), queue.seconds_from(first) - left, TRUSTED_S)
        return max(0.0, left * slower - (time.monotonic() - latest))

    def _recent(self) -> int:
        """Return the first iteration of the window that measures the speed: the last half of the time.
        The very first iteration, which may compile kernels, is used only if there is no other."""
        now, ends = self.num_iterations, np.fromiter(list(self.ends.values()), float)
        first = now + 1 - len(ends) + int(np.searchsorted(ends, (self.began + self.latest) / 2))
        return max(first if first < now else min(1, now - 1), now - KEPT_BUSY + 1)

    def slower(self, first: int) -> float:
        """Return the ratio of measured to predicted time of the iterations from ``first`` on.
        The requests of these iterations are known, so estimated answer lengths have no influence."""
        now = self.num_iterations
        predicted = float(self.pace.seconds(self._ran(first), self.workload.prefixes)[first:now].sum())
        return (self.ends[now] - self.ends[first]) / max(predicted, 1e-300)

    def slower_resources(self, first: int, trusted_s: float = 0.0) -> dict[str, float]:
        """Return resource -> ratio of measured to predicted busy time since iteration ``first``.
        Resources that were busy for less than LEAST_BUSY of the time are left out. ``trusted_s``: see ``_slower``."""
        now = self.num_iterations
        before, busy = self.busy.get(first, {}), self.busy.get(now, {})
        predicted = self.pace.work(self._ran(first), self.workload.prefixes)
        return {
            resource: _slower(busy[resource] - before.get(resource, 0.0), float(work[first:now].sum()), trusted_s)
            for resource, work in predicted.items()
            if busy.get(resource, 0.0) - before.get(resource, 0.0) > LEAST_BUSY * (self.ends[now] - self.ends[first])
        }

    def _ran(self, first: int = 0) -> RunIntervals:
        """Return the run intervals so far of requests that ran in iteration ``first`` or later."""
        open_or_late = (self.ended_in < 0) | (self.ended_in >= first)
        begun, now = np.flatnonzero((self.begun_in >= 0) & open_or_late), self.num_iterations
        last = np.where(self.ended_in[begun] < 0, now - 1, self.ended_in[begun])
        return self._intervals(begun, self.begun_in[begun], np.maximum(last, self.begun_in[begun]) + 1)

    def waiting(self, most: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the waiting requests, and their expected answer lengths.
        ``most``: limit on their number; a longer queue is sampled evenly."""
        waits = np.flatnonzero(self.begun_in < 0)
        if most and len(waits) > most:
            waits = waits[evenly_spaced(len(waits), most, False)]
        runs, ages = self._running()
        return waits, self._expected(np.r_[waits, runs], np.r_[np.zeros_like(waits), ages])[: len(waits)]

    def _running(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the running requests, the oldest first, and the generated tokens of each."""
        runs = np.flatnonzero((self.begun_in >= 0) & (self.ended_in < 0))
        runs = runs[np.argsort(self.begun_in[runs], kind="stable")]
        return runs, self.num_iterations - self.begun_in[runs]

    def rest(self) -> tuple[RunIntervals, np.ndarray] | None:
        """Return (run intervals of the running requests from now on, tokens of each so far); None if no request runs.
        In the intervals, the tokens so far are part of the prompts."""
        runs, ages = self._running()
        if not len(runs):
            return None
        left = 1 + np.maximum(self._expected(runs, ages) - ages, 1)
        places, prompts = np.arange(len(runs)), self.workload.prompt_tokens[runs] + ages
        of_running = self._intervals(runs, 0 * places, left)
        return replace(of_running, request=places, mini_batch=places, prompt_tokens=prompts), ages

    def _expected(self, requests: np.ndarray, ages: np.ndarray | int = 0) -> np.ndarray:
        """Return the expected lengths of answers that have ``ages`` tokens."""
        limits = self.workload.max_tokens[requests]
        return self.answers.expected(limits, np.minimum(ages, limits - 1))

    def intervals(self, first: int = 0) -> tuple[RunIntervals, float]:
        """Return the run intervals since iteration ``first``, past and expected, and the sampling factor.
        The factor applies to the time until the last request joins; it is 1 if the queue was not sampled. Raise
        ValueError if ``open_wave`` is None."""
        if self.open_wave is None:
            raise ValueError("the batch is unknown")
        now, wave, workload = self.num_iterations, self.open_wave(), self.workload
        if wave.queue:
            wave.queue.ended = self.answers.ended + self.answers.cut
        groups, back = _members(wave, self._running()[0], self.mini_batch)
        runs = np.array([request for group in groups for request in group], dtype=np.int64)
        waits, times = np.r_[back, np.flatnonzero(self.begun_in < 0)].astype(np.int64), 1.0
        if len(waits) > MOST_COUNTED:
            chosen = waits[evenly_spaced(len(waits), MOST_COUNTED, workload.prefixes is not None)]
            waits, times = chosen, len(waits) / len(chosen)
        open_requests = np.r_[runs, waits]
        known = self._ran(first)
        if not len(open_requests):
            return known, times
        ages = np.r_[now - self.begun_in[runs], np.zeros(len(waits), np.int64)]
        ages = np.minimum(ages, workload.max_tokens[open_requests] - 1)
        answers = np.maximum(self._expected(open_requests, ages), 1)
        counted = _counted(wave, workload, UnderWay(groups, waits.tolist()), open_requests, ages, answers)
        goes_on = (counted.joined == 0) & np.isin(counted.request, runs)
        known.left[np.searchsorted(known.request, counted.request[goes_on])] = now + counted.left[goes_on]
        return known.followed_by(counted.select(~goes_on), now, self.pace.num_mini_batches), times

    def _intervals(self, requests: np.ndarray, begun: np.ndarray, ended: np.ndarray) -> RunIntervals:
        lengths = self.workload.select(requests)
        shared = lengths.shared_tokens  # tokens of blocks that an earlier request has computed
        return RunIntervals(
            request=requests,
            mini_batch=self.mini_batch[requests].astype(np.int64) % self.pace.num_mini_batches,
            prompt_tokens=lengths.prompt_tokens,
            joined=begun.astype(np.int64),
            left=ended.astype(np.int64),
            surplus=np.zeros(len(requests), bool),
            shared_tokens=shared,
            found_tokens=shared,
        )


def _members(wave: Wave, runs: np.ndarray, mini_batch: np.ndarray) -> tuple[list[list[int]], list[int]]:
    """Return the running requests by mini-batch, the oldest first, and those without a place, which are preempted.
    ``runs``: running requests by age. ``mini_batch`` [requests]: mini-batch of each."""
    groups: list[list[int]] = [[] for _ in wave.mini_batches]
    back = []
    for request in runs.tolist():
        free = [len(places) - len(group) for places, group in zip(wave.mini_batches, groups, strict=True)]
        k = int(mini_batch[request])
        if k >= len(groups) or not free[k]:  # shared blocks that became known may change the mini-batches
            k = int(np.argmax(free))
        (groups[k] if free[k] else back).append(request)
    return groups, back


def _counted(
    wave: Wave, workload: Workload, under_way: UnderWay, requests: np.ndarray, given: np.ndarray, answers: np.ndarray
) -> RunIntervals:
    """Return the run intervals of a queue of the open ``requests``, which are running or waiting.

    ``given``, ``answers`` [requests]: tokens of each so far, and in the end. Arrays over all requests of the workload
    are built only for shared prefixes.
    """
    if wave.sharing:
        given_of_all, answers_of_all = np.zeros_like(workload.max_tokens), np.ones_like(workload.max_tokens)
        given_of_all[requests], answers_of_all[requests] = given, answers
        return intervals(wave, replace(workload, answer_tokens=answers_of_all).behind(given_of_all), under_way)
    number = {request: place for place, request in enumerate(requests.tolist())}
    running = [[number[request] for request in group] for group in under_way.running]
    waiting = [number[request] for request in under_way.waiting]
    few = replace(workload.select(requests), answer_tokens=answers).behind(given)
    counted = intervals(wave, few, UnderWay(running, waiting))
    return replace(counted, request=requests[counted.request])
