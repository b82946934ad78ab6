"""What is left of a batch that runs: foretold by the pace that was predicted and the answers that have ended."""

from __future__ import annotations

import heapq
import time

import numpy as np

from flexhybrid.core.workload import Workload
from sim.answer_lengths import ObservedAnswers
from sim.queue_clock import Pace
from sim.queue_counts import Stints

TRUSTED_S = 1.0  #: seconds of the predicted pace that count beside those that are measured
RECENT = 64  #: iterations whose largest number of requests at a time is taken for the places


class Outlook:
    """Hears of the requests of a batch, by their index in its queue, and of its iterations.

    ``mean_answer``: tokens expected of an answer before others have ended; None: as many as it may have.
    """

    def __init__(self, pace: Pace, workload: Workload, mean_answer: float | None = None):
        self.pace, self.workload = pace, workload
        self.answers = ObservedAnswers(int(workload.max_tokens.max()), mean_answer)
        self.begun_in = np.full(workload.num_requests, -1)  #: iteration; -1: it waits
        self.ended_in = np.full(workload.num_requests, -1)  #: iteration; -1: it has not ended
        self.num_iterations = 0
        self.running: list[int] = []  #: requests in each of the last iterations
        self.began = self.latest = time.monotonic()

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
        self.running = [*self.running[1 - RECENT :], num_tokens]

    def seconds_left(self) -> float | None:
        """Return the seconds until the last answer; None before the first iteration."""
        now, elapsed = self.num_iterations, self.latest - self.began
        if not now:
            return None
        seconds = self.pace.seconds(self.stints())
        past, left = float(seconds[:now].sum()), float(seconds[now:].sum())
        slower = (elapsed + TRUSTED_S) / (past + TRUSTED_S)
        return max(0.0, left * slower - (time.monotonic() - self.latest))

    def stints(self) -> Stints:
        """Return who has run when, and who is expected to run when: each place is taken by who is next."""
        now, begun, ended, workload = self.num_iterations, self.begun_in.copy(), self.ended_in.copy(), self.workload
        running = np.flatnonzero((begun >= 0) & (ended < 0))
        waiting = np.flatnonzero(begun < 0)
        begun[running] = np.minimum(begun[running], now - 1)
        open_requests = np.concatenate([running, waiting])
        ages = np.concatenate([now - begun[running], np.zeros(len(waiting), np.int64)])
        limits = workload.max_tokens[open_requests]
        lengths = self.answers.expected(limits, np.minimum(ages, limits - 1))
        more = lengths - ages + (lengths < limits)
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
        everybody = np.arange(workload.num_requests)
        ended = np.maximum(ended, begun + 1)
        return Stints(
            request=everybody,
            mini_batch=everybody % self.pace.num_mini_batches,
            prompt_tokens=workload.prompt_tokens,
            joined=begun,
            left=ended,
            surplus=np.zeros(len(everybody), bool),
        )
