"""What is left of a batch that runs: foretold by the pace that was predicted and the answers that have ended."""

from __future__ import annotations

import heapq
import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from flexhybrid.core.workload import Workload
from sim.answer_lengths import ObservedAnswers, with_mean
from sim.queue_clock import Pace
from sim.queue_counts import Stints

TRUSTED_S = 1.0  #: seconds of the predicted pace that count beside those that are measured
KEPT_BUSY = 4096  #: iterations whose resources' busy seconds are kept
KEPT_ENDS = 2**17  #: iterations whose ends are kept: more than any window has
LEAST_BUSY = 0.2  #: share of the time; how a resource fares that is busy for less says nothing
RECENT = 64  #: iterations whose largest number of requests at a time is taken for the places


class ChangeCosts(NamedTuple):
    """Seconds of what is left of the requests that run."""

    stay_s: float  #: others take the places that they leave
    drain_s: float  #: nobody does
    move_s: float  #: in another batch, their contexts computed anew; others take their places there


def change_costs(rest: Stints, before: Pace, after: Pace) -> ChangeCosts:
    """Return what it costs to end requests in a batch of one pace, or in one of another. ``rest``: ``Outlook.rest``."""
    old, new = (
        pace.seconds(replace(rest, mini_batch=rest.request % pace.num_mini_batches)) for pace in (before, after)
    )
    full_iterations = float((rest.left - 1).mean())
    return ChangeCosts(full_iterations * old[1], float(old[1:].sum()), float(new[0] + full_iterations * new[1]))


class Outlook:
    """Hears of the requests of a batch, by their index in its queue, and of its iterations.

    ``given`` [requests]: tokens that they have from batches before. ``mean_answer``: tokens expected of an answer
    before others have ended; None: as many as it may have. ``seen``: answers of batches before this one, which count as
    well.
    """

    def __init__(
        self,
        pace: Pace,
        workload: Workload,
        given: np.ndarray | None = None,
        mean_answer: float | None = None,
        seen: ObservedAnswers | None = None,
    ):
        self.pace, self.workload = pace, workload
        self.given = np.zeros(workload.num_requests, np.int64) if given is None else given
        longest = int(workload.max_tokens.max())
        self.answers = ObservedAnswers(longest, mean_answer)
        #: lengths of answers that the policy in use was chosen for
        self.assumed = workload.max_tokens if mean_answer is None else with_mean(workload, mean_answer).answers
        if seen and len(seen.ended) > longest:
            self.answers = seen
            self.assumed = self._expected(np.arange(workload.num_requests), self.given)
        self.begun_in = np.full(workload.num_requests, -1)  #: iteration; -1: it waits
        self.ended_in = np.full(workload.num_requests, -1)  #: iteration; -1: it has not ended
        self.num_iterations = 0
        self.busy: dict[int, dict[str, float]] = {}  #: iteration -> resource -> busy seconds until its end
        self.running: list[int] = []  #: requests in each of the last iterations
        self.began = self.latest = time.monotonic()
        self.ends = {0: self.began}  #: number of iterations -> when the last one of them ended

    def note_busy(self, seconds: dict[str, float]) -> None:
        """Take the seconds for which each resource was busy so far."""
        self.busy[self.num_iterations + 1] = seconds
        self.busy.pop(self.num_iterations - KEPT_BUSY, None)

    def begin(self, request: int) -> None:
        """Take a request that joins; one that has stepped back joins again."""
        if self.begun_in[request] < 0:
            self.begun_in[request] = self.num_iterations

    def end(self, request: int, tokens: int) -> None:
        """Take a request that has ended, with the length of its answer."""
        self.ended_in[request] = self.num_iterations
        self.answers.end(tokens, int(self.workload.max_tokens[request]))

    def advance(self, num_tokens: int) -> None:
        """Take the end of an iteration with its number of tokens."""
        self.num_iterations += 1
        self.latest = time.monotonic()
        self.ends[self.num_iterations] = self.latest
        self.ends.pop(self.num_iterations - KEPT_ENDS, None)
        self.running = [*self.running[1 - RECENT :], num_tokens]

    def seconds_left(self) -> float | None:
        """Return the seconds until the last answer; None before the first iteration."""
        now, elapsed = self.num_iterations, self.latest - self.began
        if not now:
            return None
        seconds = self.pace.seconds(self.stints(), self.workload.prefixes)
        past, left = float(seconds[:now].sum()), float(seconds[now:].sum())
        slower = (elapsed + TRUSTED_S) / (past + TRUSTED_S)
        return max(0.0, left * slower - (time.monotonic() - self.latest))

    def slower(self, first: int) -> float:
        """Return how many times as long the iterations from ``first`` on took as is predicted of what was done in them;
        who ran is known, so the lengths of answers have no part in it."""
        now = self.num_iterations
        predicted = float(self.pace.seconds(self._ran(), self.workload.prefixes)[first:now].sum())
        return (self.ends[now] - self.ends[first]) / max(predicted, 1e-300)

    def slower_resources(self, first: int) -> dict[str, float]:
        """Return likewise how many times as long each resource was busy, of those that were so for long; nothing where
        that is not measured."""
        now = self.num_iterations
        before, busy = self.busy.get(first, {}), self.busy.get(now, {})
        predicted = self.pace.work(self._ran(), self.workload.prefixes)
        return {
            resource: (busy[resource] - before.get(resource, 0.0)) / max(float(work[first:now].sum()), 1e-300)
            for resource, work in predicted.items()
            if busy.get(resource, 0.0) - before.get(resource, 0.0) > LEAST_BUSY * (self.ends[now] - self.ends[first])
        }

    def _ran(self) -> Stints:
        """Return who has run when, as far as is known."""
        begun, now = np.flatnonzero(self.begun_in >= 0), self.num_iterations
        last = np.where(self.ended_in[begun] < 0, now - 1, self.ended_in[begun])
        return self._stints(begun, self.begun_in[begun], np.maximum(last, self.begun_in[begun]) + 1)

    def waiting(self) -> tuple[np.ndarray, np.ndarray]:
        """Return those who wait, and the lengths that their answers are expected to have by those that have ended."""
        waits = np.flatnonzero(self.begun_in < 0)
        runs = np.flatnonzero((self.begun_in >= 0) & (self.ended_in < 0))
        ages = np.r_[self.given[waits], self.given[runs] + self.num_iterations - self.begun_in[runs]]
        return waits, self._expected(np.r_[waits, runs], ages)[: len(waits)]

    def rest(self) -> Stints | None:
        """Return what is left of those who run, their contexts computed at once; None where nobody runs."""
        runs = np.flatnonzero((self.begun_in >= 0) & (self.ended_in < 0))
        if not len(runs):
            return None
        ages = self.given[runs] + self.num_iterations - self.begun_in[runs]
        more = self._expected(runs, ages) - ages
        prompts = self.workload.prompt_tokens[runs] + ages
        places = np.arange(len(runs))
        shared = self.workload.shared_tokens[runs]
        return Stints(places, places, prompts, 0 * places, 1 + np.maximum(more, 1), places < 0, shared, shared)

    def _expected(self, requests: np.ndarray, ages: np.ndarray) -> np.ndarray:
        """Return the lengths of answers that have ``ages`` tokens, as far as others show them."""
        limits = self.workload.max_tokens[requests]
        return self.answers.expected(limits, np.minimum(ages, limits - 1))

    def stints(self) -> Stints:
        """Return who has run when, and who is expected to run when: each place is taken by who is next."""
        now, begun, ended, workload = self.num_iterations, self.begun_in.copy(), self.ended_in.copy(), self.workload
        running = np.flatnonzero((begun >= 0) & (ended < 0))
        waiting = np.flatnonzero(begun < 0)
        begun[running] = np.minimum(begun[running], now - 1)
        open_requests = np.concatenate([running, waiting])
        ages = self.given[open_requests] + np.r_[now - begun[running], 0 * waiting]
        lengths = self._expected(open_requests, ages)
        more = lengths - ages + (lengths < workload.max_tokens[open_requests])
        places = max(self.running)
        free = (now + more[: len(running)]).tolist()
        ended[running] = free
        free = sorted(free, reverse=True)[:places]
        free += [now] * (places - len(free))
        heapq.heapify(free)
        for request, length in zip(waiting.tolist(), more[len(running) :].tolist(), strict=True):
            begun[request] = free[0]
            ended[request] = free[0] + length
            heapq.heapreplace(free, free[0] + length)
        return self._stints(np.arange(workload.num_requests), begun, np.maximum(ended, begun + 1))

    def _stints(self, requests: np.ndarray, begun: np.ndarray, ended: np.ndarray) -> Stints:
        shared = self.workload.shared_tokens[requests]  # by all but the first
        return Stints(
            request=requests,
            mini_batch=requests % self.pace.num_mini_batches,
            prompt_tokens=self.workload.prompt_tokens[requests] + self.given[requests],
            joined=begun,
            left=ended,
            surplus=np.zeros(len(requests), bool),
            shared_tokens=shared,
            found_tokens=shared,
        )
