"""Who runs when in a queue of requests, by counting alone: ``core.schedule.refill`` without its plan.

The executor's own account (``RunningBatch``) looks at every mini-batch in every iteration. Here only the iterations
count in which somebody leaves or steps back, so that ten thousand requests take a fraction of a second. Left out: that
blocks come in runs, and that a request is passed over for one behind it more often than once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flexhybrid.core.context.blocks import ceil_blocks
from flexhybrid.core.context.packing import longest_piece
from flexhybrid.core.schedule.refill import LOOKED_AT, MOST_FAILURES, AnswerLengths, joins_singly
from flexhybrid.core.wave import Wave
from flexhybrid.core.workload import Workload


@dataclass(frozen=True)
class Stints:
    """When requests run; arrays [stints]. A request that steps back has a stint more."""

    request: np.ndarray  #: index in the queue
    mini_batch: np.ndarray
    prompt_tokens: np.ndarray  #: with the tokens that it had before it stepped back
    joined: np.ndarray  #: iteration that computes the prompt
    left: np.ndarray  #: first iteration without it
    surplus: np.ndarray  #: whether its last step is for nothing: an end is known an iteration late

    @property
    def num_iterations(self) -> int:
        return int(self.left.max())

    def per_iteration(self, weights: np.ndarray | None = None) -> np.ndarray:
        """Sum ``weights`` (1) over the stints of each iteration."""
        weights = np.ones(len(self.request)) if weights is None else weights
        size = self.num_iterations + 1
        change = np.bincount(self.joined, weights, size) - np.bincount(self.left, weights, size)
        return np.cumsum(change)[:-1]

    def joining(self, weights: np.ndarray) -> np.ndarray:
        """Sum ``weights`` over those who join in each iteration."""
        return np.bincount(self.joined, weights, self.num_iterations)


def stints(wave: Wave, workload: Workload) -> Stints:
    """Return when the requests of ``workload`` run in a batch that was just opened for them (``open_batch``)."""
    return _Queue(wave, workload).run()


class _Member(NamedTuple):
    """A request that runs."""

    request: int
    joined: int
    left: int  #: iteration in which it will be gone
    blocks: int  #: of its whole context: what it is padded to is the longest of its mini-batch


class _Queue:
    def __init__(self, wave: Wave, workload: Workload):
        self.wave, self.entries, self.singly = wave, wave.entries, joins_singly(wave.policy)
        self.prompts, self.limits, self.ends = (
            of.copy() for of in (workload.prompt_tokens, workload.max_tokens, workload.answers)
        )
        self.learned = AnswerLengths(wave.expected_share, int(self.limits.max()))
        self.waiting = list(range(workload.num_requests - 1, wave.workload.num_requests - 1, -1))  # the next one last
        self.running: list[list[_Member]] = [[] for _ in wave.mini_batches]
        self.changes: list[tuple[int, int]] = []  # (iteration, mini-batch) in which somebody leaves or steps back
        self.rows: list[tuple] = []  # of the stints
        self.not_before: dict[int, int] = {}  # request that has stepped back -> first iteration of its return
        self.pools = np.array([[part.pools[entry].num_blocks for entry in self.entries.names] for part in wave.blocks])
        groups = [wave.workload.select(group) for group in wave.mini_batches]
        alone = int(ceil_blocks(workload.cached_tokens).max())
        self.most_padded = max(alone, *(len(g.max_tokens) * int(ceil_blocks(g.cached_tokens).max()) for g in groups))
        self.most_rows = max(len(g.max_tokens) * longest_piece(wave.policy, g.prompt_tokens) for g in groups)
        self.reserved = self.entries.most_blocks(self.prompts, workload.cached_tokens)  # where blocks do not grow

    def run(self) -> Stints:
        for k, group in enumerate(self.wave.mini_batches):
            self._enter(k, group.tolist(), 0)
        while self.changes:
            iteration, k = heapq.heappop(self.changes)
            while self.changes and self.changes[0] == (iteration, k):
                heapq.heappop(self.changes)
            self._leave(k, iteration)
            if self.wave.grows:
                self._step_back(k, iteration)
            if self.waiting and (self.singly or not self.running[k]):
                self._join(k, iteration)
            if self.wave.grows:
                self._foresee(k, iteration)
        columns = [np.array(column) for column in zip(*self.rows, strict=True)]
        return Stints(*columns)

    def _enter(self, k: int, requests: list[int], iteration: int) -> None:
        for request in requests:
            end = int(self.ends[request])
            left = iteration + end + (end < self.limits[request])  # its last step is for nothing
            blocks = int(ceil_blocks(self.prompts[request] + self.limits[request] - 1))
            self.running[k].append(_Member(request, iteration, left, blocks))
            heapq.heappush(self.changes, (left, k))

    def _leave(self, k: int, iteration: int) -> None:
        for request, joined, left, _ in self.running[k]:
            if left <= iteration:
                surplus = self.ends[request] < self.limits[request]
                self.rows.append((request, k, self.prompts[request], joined, left, surplus))
                self.learned.end(int(self.ends[request]))
        self.running[k] = [member for member in self.running[k] if member.left > iteration]

    def _step_back(self, k: int, iteration: int) -> None:
        """Let the youngest wait again, before all others, while blocks are too few."""
        while len(self.running[k]) > 1 and not self._fits(k, iteration):
            request, joined, _, _ = self.running[k].pop()
            self.rows.append((request, k, self.prompts[request], joined, iteration, False))
            given = iteration - joined
            self.prompts[request] += given
            self.limits[request] -= given
            self.ends[request] = max(1, self.ends[request] - given)
            self.waiting.append(request)
            self.not_before[request] = iteration + 1

    def _fits(self, k: int, iteration: int) -> bool:
        """Return whether the pools of a mini-batch hold what its members need in an iteration."""
        requests, joined = np.array([member[:2] for member in self.running[k]]).T
        held = self.entries.held(self.prompts[requests] + iteration - joined).sum(axis=0)
        return bool((held <= self.pools[k]).all())

    def _foresee(self, k: int, iteration: int) -> None:
        """Note the first iteration in which blocks are too few, where it comes before somebody leaves."""
        leave = min((member.left for member in self.running[k]), default=0)
        if len(self.running[k]) < 2 or leave <= iteration + 1 or self._fits(k, leave - 1):
            return
        first = bisect_left(range(iteration + 1, leave - 1), True, key=lambda later: not self._fits(k, later))
        heapq.heappush(self.changes, (iteration + 1 + first, k))

    def _join(self, k: int, iteration: int) -> None:
        """Let those who wait join in their turn; after one that does not fit, only shorter ones may."""
        group = self.running[k]
        room = self.pools[k] - (self._expected(group, iteration) if group else 0)
        free, padded = len(self.wave.mini_batches[k]) - len(group), max((m.blocks for m in group), default=0)
        rows, failures = 0, 0
        first = [r for r in self.waiting[: -1 - max(LOOKED_AT, free) : -1] if self.not_before.get(r, 0) <= iteration]
        cached = self.prompts[first] + self.limits[first] - 1
        blocks, expected = ceil_blocks(cached).tolist(), self._expected_of(first, np.zeros(len(first), np.int64))
        joining: list[int] = []
        ready = list(range(len(first)))
        while ready and len(joining) < free and failures < MOST_FAILURES:
            place = ready.pop(0)
            request = first[place]
            count = len(group) + len(joining) + 1
            piece = longest_piece(self.wave.policy, self.prompts[[request]])
            if joining and max(rows, piece) * (len(joining) + 1) > self.most_rows:
                heapq.heappush(self.changes, (iteration + 1, k))  # it may join in the next iteration
                break
            if count > 1 and (count * max(padded, blocks[place]) > self.most_padded or (expected[place] > room).any()):
                failures, prompt = failures + 1, self.prompts[request]
                ready = [at for at in ready if self.prompts[first[at]] < prompt or cached[at] < cached[place]]
                if failures == 1:  # the shortest comes next: without room for that there is none for any
                    ready.sort(key=lambda at: cached[at])
                continue
            joining.append(request)
            room, padded, rows = room - expected[place], max(padded, blocks[place]), max(rows, piece)
        if not joining and not group or len(first) < min(len(self.waiting), max(LOOKED_AT, free)):
            heapq.heappush(self.changes, (iteration + 1, k))
        taken = set(joining)
        tail = len(self.waiting) - max(LOOKED_AT, free) if len(self.waiting) > max(LOOKED_AT, free) else 0
        self.waiting[tail:] = [request for request in self.waiting[tail:] if request not in taken]
        self._enter(k, joining, iteration)

    def _expected(self, group: list[_Member], iteration: int) -> np.ndarray:
        """Return the blocks of each entry that a mini-batch is expected to hold."""
        requests, joined = np.array([member[:2] for member in group]).T
        return self._expected_of(requests, iteration - joined).sum(axis=0)

    def _expected_of(self, requests, ages: np.ndarray) -> np.ndarray:
        """Return the blocks that requests are reserved, or where they take them as needed those that they hold half-way
        to the ends that are expected of them: [requests, entry]."""
        if not self.wave.grows:
            return self.reserved[requests]
        return self.entries.held(self.learned.halfway(self.prompts[requests], ages, self.limits[requests]))
