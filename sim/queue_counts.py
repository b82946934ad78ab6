"""Count which requests of a queue run in which iterations. The lengths of their answers are given.

The executor's scheduler decides (``core.schedule.scheduler.Scheduler``). It is asked only in iterations in which a
request may join, end or need one more block. So ten thousand requests take a second or two.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from flexhybrid.core.admission import batch_size, open_batch
from flexhybrid.core.context.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.schedule.positions import num_awaited
from flexhybrid.core.schedule.scheduler import Scheduler
from flexhybrid.core.wave import RequestQueue, Wave, leave_place
from flexhybrid.core.workload import Prefixes, Workload


@dataclass(frozen=True)
class RunIntervals:
    """Intervals of iterations in which requests run; arrays [intervals]. A preempted request has several."""

    request: np.ndarray  #: index in the queue
    mini_batch: np.ndarray
    prompt_tokens: np.ndarray  #: prompt, with the tokens generated before a preemption
    joined: np.ndarray  #: iteration that computes the prompt
    left: np.ndarray  #: first iteration without the request
    surplus: np.ndarray  #: True if the last step is wasted, because the end is known one iteration late
    shared_tokens: np.ndarray  #: prompt tokens in shared blocks
    found_tokens: np.ndarray  #: shared tokens that were computed for other requests

    @property
    def num_iterations(self) -> int:
        return int(self.left.max())

    @property
    def returned(self) -> np.ndarray:
        """Return whether each interval follows a preemption, [intervals]."""
        returned = np.ones(len(self.request), bool)
        returned[np.unique(self.request, return_index=True)[1]] = False  # intervals are ordered by their ends
        return returned

    def per_iteration(self, weights: np.ndarray | None = None) -> np.ndarray:
        """Return the sum of ``weights`` (default: 1 each) over the requests that run in each iteration."""
        weights = np.ones(len(self.request)) if weights is None else weights
        size = self.num_iterations + 1
        return np.cumsum(np.bincount(self.joined, weights, size) - np.bincount(self.left, weights, size))[:-1]

    def joining(self, weights: np.ndarray) -> np.ndarray:
        """Return the sum of ``weights`` over the requests that join in each iteration."""
        return np.bincount(self.joined, weights, self.num_iterations)

    def select(self, chosen: np.ndarray) -> RunIntervals:
        """Return the chosen intervals, by index or mask."""
        return RunIntervals(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def followed_by(self, more: RunIntervals, begin: int, num_mini_batches: int) -> RunIntervals:
        """Return these intervals followed by ``more``, whose iteration 0 is iteration ``begin`` here. Mini-batches of
        ``more`` are renumbered modulo ``num_mini_batches``."""
        more = replace(more, mini_batch=more.mini_batch % num_mini_batches)
        more = replace(more, joined=more.joined + begin, left=more.left + begin)
        pairs = ((getattr(self, field.name), getattr(more, field.name)) for field in fields(self))
        return RunIntervals(*map(np.concatenate, pairs))

    def loads_of_shared(self, prefixes: Prefixes | None) -> np.ndarray:
        """Return the tokens in shared blocks that each iteration loads, [iterations]. A mini-batch loads each shared
        block once for its decoding requests and once for its joining ones."""
        changes, sharing = np.zeros(self.num_iterations + 1), np.flatnonzero(self.shared_tokens)
        if prefixes is None or not len(sharing):
            return changes[:-1]
        last = prefixes.of_request[self.request[sharing]].tolist()
        chains = {prefix: prefixes.chain(prefix) for prefix in set(last)}
        each = np.repeat(sharing, [len(chains[prefix]) for prefix in last])
        part = np.concatenate([chains[prefix] for prefix in last])
        before = (prefixes.num_blocks - prefixes.own_blocks)[part] * BLOCK_TOKENS
        each, part = (column[self.shared_tokens[each] > before] for column in (each, part))
        joined, group, count = self.joined[each], 2 * self.mini_batch[each], len(prefixes.tokens)
        key = np.concatenate([group + 1, group, group + 1, group]) * count + np.tile(part, 4)
        at = np.concatenate([joined, joined + 1, joined + 1, self.left[each]])
        order = np.lexsort((at, key))
        key, at = key[order], at[order]
        members = np.cumsum(np.repeat([1, -1], 2 * len(each))[order])  # 0 after the last of each key
        final = np.append((key[1:] != key[:-1]) | (at[1:] != at[:-1]), True)
        change = np.diff((members[final] > 0).astype(np.int64), prepend=0)
        np.add.at(changes, at[final], change * BLOCK_TOKENS * prefixes.own_blocks[key[final] % count])
        return np.cumsum(changes)[:-1]


@dataclass(frozen=True)
class UnderWay:
    """A batch in progress; requests are given as indices in its queue."""

    running: list[list[int]]  #: requests of each mini-batch, oldest first; their contexts are computed
    waiting: list[int]  #: waiting requests, in the order in which they join


def intervals(wave: Wave, workload: Workload, under_way: UnderWay | None = None) -> RunIntervals:
    """Return when the requests of ``workload`` run in a batch that was just opened for them (``open_batch``).

    ``under_way``: a batch in progress, from which iterations count; ``workload`` then has the remaining tokens of each
    request. None: the batch begins. The wave changes, as in a run.
    """
    batch = Scheduler(wave) if under_way is None else _resumed(wave, workload, under_way)
    counted = _Forecast(batch, workload.answers).run()
    if batch.wave.queue is None or batch.wave.queue.is_empty:
        return counted
    left = batch.wave.queue.waiting
    # The batch's buffers are too small for these requests. They run in a later batch, as in the executor.
    rest, at_most = workload.select(left), wave.workload.num_requests
    later = open_batch(wave.problem, wave.policy, rest, batch_size(wave.problem, wave.policy, rest, at_most))
    more = intervals(later, rest)
    more = replace(more, request=left[more.request])
    return counted.followed_by(more, counted.num_iterations, len(wave.mini_batches))


class _Member(NamedTuple):
    """A running request; fields without a comment are those of ``RunIntervals``."""

    request: int
    mini_batch: int
    place: int  #: index in the wave's workload
    prompt_tokens: int
    joined: int
    last: int  #: iteration that generates its last token
    shared_tokens: int
    found_tokens: int


class _Forecast:
    """Runs a batch's scheduler, only in iterations in which the running requests may change."""

    def __init__(self, batch: Scheduler, answers: np.ndarray):
        self.batch, self.wave, self.answers = batch, batch.wave, answers
        self.members: list[dict[int, _Member]] = [{} for _ in batch.groups]  # mini-batch -> place -> member
        self.rows: list[tuple] = []  # finished intervals, with the fields of RunIntervals
        self.iterations = [0]  # heap of the iterations in which members may change
        self.due = {0: {*range(len(batch.groups))}}  # iteration -> mini-batches whose members may change
        self.ends: dict[int, list[_Member]] = {}  # iteration -> members that end in it before their limits
        self.known_ends: dict[int, list[int]] = {}  # iteration -> requests whose end is known then

    def run(self) -> RunIntervals:
        stopped: set[int] = set()
        while self.iterations:
            iteration = heapq.heappop(self.iterations)
            due = self.due.pop(iteration)
            stopped.update(self.known_ends.pop(iteration, ()))
            steps = [*self.batch.steps(iteration, stopped, due)]
            for k in due:
                self._change(k, iteration)
                if self.wave.grows and len(self.batch.groups[k]):
                    self._ask(self._grows_at(k, iteration), k)
            if not steps:  # no request runs
                break
            self._end(iteration, steps)
            self._try_to_join(iteration + 1)
        return RunIntervals(*(np.array(column) for column in zip(*self.rows, strict=True)))

    def _ask(self, iteration: int, k: int) -> None:
        """Add an iteration in which the members of mini-batch ``k`` may change."""
        if iteration not in self.due:
            self.due[iteration] = set()
            heapq.heappush(self.iterations, iteration)
        self.due[iteration].add(k)

    def _change(self, k: int, iteration: int) -> None:
        """Record the requests that have left and joined mini-batch ``k``."""
        before, places = self.members[k], self.batch.groups[k]
        joined = self.wave.joined[places]
        if len(places) == len(before) and not (joined == iteration).any():
            return
        pairs = zip(places.tolist(), joined.tolist(), strict=True)
        stay = {place for place, at in pairs if place in before and at < iteration}
        now = {place: before[place] if place in stay else self._open(k, place) for place in places.tolist()}
        for member in before.values():
            if now.get(member.place) is not member:
                request, _, _, prompt, since, last, *tokens = member
                self.rows.append((request, k, prompt, since, iteration, iteration > last + 1, *tokens))
        self.members[k] = now

    def _open(self, k: int, place: int) -> _Member:
        """Return the request that has joined in a place, and record when it ends."""
        wave, joined = self.wave, int(self.wave.joined[place])
        # ``early``: a request of a batch in progress, whose last token is already in its context.
        request, early = int(wave.request[place]), int(joined < 0)
        given = wave.queue.given.get(request, 0) if wave.queue else 0
        left, most = max(1, int(self.answers[request]) - given), int(wave.workload.max_tokens[place]) - early
        shared, found = (wave.sharing.depth[place], wave.sharing.stored_before[place]) if wave.sharing else (0, 0)
        prompt, joined = int(wave.workload.prompt_tokens[place]) + early, max(joined, 0)
        tokens = BLOCK_TOKENS * int(shared), BLOCK_TOKENS * int(shared if early else found)
        member = _Member(request, k, place, prompt, joined, joined + left - 1, *tokens)
        self._ask(member.last + 1, k)
        if left < most:
            self.ends.setdefault(member.last, []).append(member)
            if member.last > joined:  # otherwise it ends in the current iteration
                self._ask(member.last, k)
        return member

    def _end(self, iteration: int, steps: list[tuple]) -> None:
        """Record when the answers that end in an iteration are known to have ended: before the next iteration, or one
        later if the tokens of their step are not awaited (``core.schedule.positions``)."""
        ending = self.ends.pop(iteration, ())
        if not ending:
            return
        by_row = self.wave.policy.schedule == "row"  # then the last layer group has only the last mini-batch
        in_turn = [s for s in steps if s[0] == steps[-1][0]] if by_row else sorted(steps, key=lambda step: step[1])
        late = [(k, set(places.tolist())) for k, _, _, _, places in in_turn[num_awaited(len(in_turn)) :]]
        for member in ending:
            k, place = member.mini_batch, member.place
            if self.members[k].get(place) is member:  # otherwise it was preempted
                known = iteration + 1 + any(k == other and place in places for other, places in late)
                self.known_ends.setdefault(known, []).append(member.request)
                self._ask(known, k)

    def _try_to_join(self, iteration: int) -> None:
        """Add an iteration for mini-batches that a queued request may join although nothing else changes."""
        batch, queue = self.batch, self.wave.queue
        if queue is not None and not queue.is_closed:
            for k, (is_full, group) in enumerate(zip(batch.full, batch.groups, strict=True)):
                if not is_full and (batch.singly or not len(group)):
                    self._ask(iteration, k)

    def _grows_at(self, k: int, iteration: int) -> int:
        """Return the first iteration in which a request of mini-batch ``k`` needs more blocks than it has."""
        wave, entries, places = self.wave, self.wave.entries, self.batch.groups[k]
        prompts, lengths = wave.workload.prompt_tokens[places], wave.workload.cached_tokens[places]
        dealt = entries.dealt(np.arange(int(ceil_blocks(lengths.max())) + 1))  # [blocks, entry]
        shared = entries.dealt(wave.shared_blocks(places))
        blocks = np.full(len(places), len(dealt))
        for i, pool in enumerate(wave.pools):
            entry, have = i % len(entries.names), wave.num_blocks[pool.name][places]
            enough = np.searchsorted(dealt[:, entry], have + shared[:, entry], side="right") - 1
            if pool.window is not None:  # a ring needs no more
                enough = np.where(have < entries.in_window(pool.window)[entry], enough, len(dealt))
            blocks = np.minimum(blocks, enough)
        return max(int((wave.joined[places] + blocks * BLOCK_TOKENS - prompts).min()), iteration) + 1


def _resumed(wave: Wave, workload: Workload, under_way: UnderWay) -> Scheduler:
    """Return the scheduler of a batch in progress, whose running requests have their contexts. A running request that
    does not fit waits, before all other waiting requests."""
    for k, group in enumerate(wave.mini_batches):
        for place in group[::-1].tolist():
            leave_place(wave, k, place)
    lengths = Workload(wave.workload.prompt_tokens.copy(), wave.workload.max_tokens.copy())
    ended, whole = wave.queue.ended if wave.queue else None, wave.whole and replace(wave.whole, workload=lengths)
    queue = RequestQueue(workload, workload.num_requests, [*under_way.waiting], ended=ended)
    wave = replace(wave, workload=lengths, whole=whole, queue=queue, limits=buffer_sizes(wave))
    batch = Scheduler(wave)
    for k, members in enumerate(under_way.running):
        batch.resume(k, members)
    return batch
