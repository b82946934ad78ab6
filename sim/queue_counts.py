"""Counts which requests of a queue run when: ``core.schedule.scheduler`` without its plan.

The executor's ``Scheduler`` visits every mini-batch in every iteration. Only iterations in which a request leaves or is
preempted count here: 10,000 requests take a fraction of a second. Left out: contiguous runs of blocks, and requests
passed over more than once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, fields
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.core.context.packing import chunk_tokens, longest_piece, num_chunks
from flexhybrid.core.context.prefixes import PrefixOrder
from flexhybrid.core.schedule.buffer_sizes import SharedLengths, first_builds, holds_lengths
from flexhybrid.core.schedule.positions import num_awaited
from flexhybrid.core.schedule.scheduler import (
    LOOKED_AT,
    MOST_FAILURES,
    AnswerLengths,
    buffers_hold,
    computed_together,
    joins_singly,
    shorter,
    stores_exactly,
)
from flexhybrid.core.wave import Wave
from flexhybrid.core.workload import Prefixes, Workload


@dataclass(frozen=True)
class RunIntervals:
    """When requests run; arrays [intervals]. A preempted request has one interval more."""

    request: np.ndarray  #: index in the queue
    mini_batch: np.ndarray
    prompt_tokens: np.ndarray  #: with the tokens from before its preemption
    joined: np.ndarray  #: iteration that computes the prompt
    left: np.ndarray  #: first iteration without it
    surplus: np.ndarray  #: its last step is wasted: its end is known one iteration late
    shared_tokens: np.ndarray  #: prompt tokens in shared blocks
    found_tokens: np.ndarray  #: of these, computed for other requests

    @property
    def num_iterations(self) -> int:
        return int(self.left.max())

    @property
    def returned(self) -> np.ndarray:
        """Return whether an interval follows a preemption."""
        returned = np.ones(len(self.request), bool)
        returned[np.unique(self.request, return_index=True)[1]] = False  # intervals are ordered by their ends
        return returned

    def per_iteration(self, weights: np.ndarray | None = None) -> np.ndarray:
        """Sum ``weights`` (1) over the intervals of each iteration."""
        weights = np.ones(len(self.request)) if weights is None else weights
        size = self.num_iterations + 1
        change = np.bincount(self.joined, weights, size) - np.bincount(self.left, weights, size)
        return np.cumsum(change)[:-1]

    def joining(self, weights: np.ndarray) -> np.ndarray:
        """Sum ``weights`` over the joining requests of each iteration."""
        return np.bincount(self.joined, weights, self.num_iterations)

    def select(self, chosen: np.ndarray) -> RunIntervals:
        """Return the chosen ones."""
        return RunIntervals(*(getattr(self, field.name)[chosen] for field in fields(self)))

    def loads_of_shared(self, prefixes: Prefixes | None) -> np.ndarray:
        """Return the shared-block tokens that each iteration loads, [iterations]: those of a mini-batch once while it
        decodes, and once more for requests that join it."""
        changes, sharing = np.zeros(self.num_iterations + 1), np.flatnonzero(self.shared_tokens)
        if prefixes is None or not len(sharing):
            return changes[:-1]
        last = prefixes.of_request[self.request[sharing]].tolist()
        chains = {prefix: prefixes.chain(prefix) for prefix in set(last)}
        each = np.repeat(sharing, [len(chains[prefix]) for prefix in last])
        part = np.concatenate([chains[prefix] for prefix in last])
        before = (prefixes.num_blocks - prefixes.own_blocks)[part] * BLOCK_TOKENS
        each, part = (of[self.shared_tokens[each] > before] for of in (each, part))
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
    """A batch in progress; requests are indices of its queue."""

    running: list[list[int]]  #: members of each mini-batch with computed contexts, oldest first
    waiting: list[int]  #: in joining order


def intervals(wave: Wave, workload: Workload, under_way: UnderWay | None = None) -> RunIntervals:
    """Return when the requests of ``workload`` run in a batch just opened for them (``open_batch``).

    ``under_way``: running and waiting requests of a batch in progress (None: it begins); ``workload`` then has what
    remains of each request, and iterations count from there. Changes ``wave.sharing``.
    """
    return _Queue(wave, workload, under_way).run()


class _Member(NamedTuple):
    """A request that runs."""

    request: int
    joined: int
    left: int  #: first iteration without it; one later if its end is known late
    place: int
    prefills: bool  #: its prompt is computed in the iteration in which it joins
    surplus: bool = False  #: its end is known late

    def computes_prompt(self, iteration: int) -> bool:
        """Return whether its prompt is computed then."""
        return self.joined == iteration and self.prefills


class _Queue:
    def __init__(self, wave: Wave, workload: Workload, under_way: UnderWay | None = None):
        self.wave, self.entries, self.singly = wave, wave.entries, joins_singly(wave.policy)
        self.prompts, self.limits, self.ends = (
            of.copy() for of in (workload.prompt_tokens, workload.max_tokens, workload.answers)
        )
        self.given = np.zeros_like(self.ends)  # tokens from before a preemption, part of their prompts
        count, queue = wave.workload.num_requests, wave.queue
        self.learned = AnswerLengths(wave.expected_share, int(self.limits.max()), queue.ended if queue else None)
        begin = UnderWay([group.tolist() for group in wave.mini_batches], list(range(count, workload.num_requests)))
        self.begin, self.is_under_way = under_way or begin, under_way is not None
        self.waiting = self.begin.waiting[::-1]  # in reverse order
        self.running: list[list[_Member]] = [[] for _ in wave.mini_batches]
        self.changes: list[tuple[int, int]] = []  # (iteration, mini-batch) in which a request leaves or is preempted
        self.rows: list[tuple] = []  # of the intervals
        self.not_before: dict[int, int] = {}  # preempted request -> first iteration of its return
        self.full = [False] * len(wave.mini_batches)  # of a mini-batch: no request fits before one leaves
        self.pools = np.array([[part.pools[pool.name].num_blocks for pool in wave.pools] for part in wave.blocks])
        self.first = groups = [wave.workload.select(group) for group in wave.mini_batches]
        alone = int(ceil_blocks(workload.cached_tokens).max())
        self.reserved = self.entries.most_blocks(self.prompts, workload.cached_tokens)  # if blocks do not grow
        self.places = [group.tolist() for group in wave.mini_batches]  # that are free
        self.sharing, self.now = wave.sharing, 0  # the iteration of its builds
        self.unknown: set[tuple[int, bool]] = set()  # earlier steps whose tokens are not awaited: ``_unknown``
        self.steering = PrefixOrder(wave.sharing.tree) if wave.sharing else None
        self.exact, self.piece = stores_exactly(wave.policy), chunk_tokens(wave.policy.max_mini_batch_tokens)
        self.depth, self.found = np.zeros((2, workload.num_requests), dtype=np.int64)  # shared by running requests
        self.common: list[Counter[int]] = [Counter() for _ in groups]  # of each mini-batch: shared block -> members
        if self.sharing:
            self.common_blocks = np.zeros((len(groups), len(self.entries.names)), dtype=np.int64)  # of each entry
            most = int(workload.prompt_tokens.max()) // BLOCK_TOKENS + 1
            self.entry_of = self.entries.entry_of(np.arange(most) * BLOCK_TOKENS)
        self.most_padded = max(alone, *(len(g.max_tokens) * int(ceil_blocks(g.cached_tokens).max()) for g in groups))

    def run(self) -> RunIntervals:
        if self.sharing:
            for place in np.concatenate(self.wave.mini_batches)[::-1].tolist():
                self.sharing.detach(place)
        for k, members in enumerate(self.begin.running):
            places = [self._attach(k, request) for request in members]
            self._enter(k, members, places, 0, prefills=not self.is_under_way)
            heapq.heappush(self.changes, (0, k))
        if self.sharing and self.is_under_way:
            self.sharing.take_builds(range(len(self.sharing.depth)))
            self.found = self.depth.copy()
        while self.changes:
            iteration, k = heapq.heappop(self.changes)
            while self.changes and self.changes[0] == (iteration, k):
                heapq.heappop(self.changes)
            if iteration > self.now:
                if self.sharing:
                    self.sharing.take_builds(range(len(self.sharing.depth)))
                self.now, self.unknown = iteration, self._unknown(iteration - 1)
            self._leave(k, iteration)
            if self.wave.grows:
                self._preempt(k, iteration)
            if self.waiting and not self.full[k] and (self.singly or not self.running[k]):
                self._join(k, iteration)
            if self.wave.grows:
                self._foresee(k, iteration)
        columns = [np.array(column) for column in zip(*self.rows, strict=True)]
        return RunIntervals(*columns)

    def _enter(self, k: int, requests: list[int], places: list[int], iteration: int, prefills: bool = True) -> None:
        for request, place in zip(requests, places):
            left = iteration + int(self.ends[request])
            self.running[k].append(_Member(request, iteration, left, place, prefills))
            heapq.heappush(self.changes, (left, k))

    def _buffers_hold(self, k: int, requests: list[int], joining: list[int]) -> bool:
        """Return whether the buffers hold these members of a mini-batch, including ``joining``."""
        cached = self.prompts[requests] + self.limits[requests] - 1
        if not self.singly:  # each is padded to the longest
            return len(requests) * int(ceil_blocks(cached.max())) <= self.most_padded
        shared = None
        if not self.sharing and holds_lengths(self.first[k], cached, self.prompts[joining], self.piece):
            return True
        if self.sharing:
            shared = SharedLengths(self.depth[requests], self.depth[joining] * self.exact, self.common_blocks[k])
        return buffers_hold(self.wave, cached, self.prompts[joining], shared)

    def _unknown(self, iteration: int) -> set[tuple[int, bool]]:
        """Return the steps, as (mini-batch, computes prompts), whose tokens are not awaited before the next iteration
        is settled; no request has left since. Left out: steps that compute shared blocks."""
        decode, pieces = [], {}
        for k, group in enumerate(self.running):  # the latest to join is last
            latest = [*takewhile(lambda member: member.joined == iteration, reversed(group))]
            joining = [member for member in latest if member.prefills]
            if len(joining) < len(group):
                decode.append(k)
            if joining:
                pieces[k] = self._num_pieces(joining)
        if self.wave.policy.schedule == "row":  # the last group is the last mini-batch's
            last = max([*decode, *pieces], default=-1)
            decode, pieces = [k for k in decode if k == last], {k: count for k, count in pieces.items() if k == last}
        steps = [(0, k, False) for k in decode]  # ``MiniBatchStep.chunk``, mini-batch, whether it computes prompts
        steps += [((k in decode) + piece, k, True) for k, count in pieces.items() for piece in range(count)]
        last_at = {(k, prompts): at for at, (_, k, prompts) in enumerate(sorted(steps))}
        return {step for step, at in last_at.items() if at >= num_awaited(len(steps))}

    def _num_pieces(self, joining: list[_Member]) -> int:
        """Return in how many pieces prompts that join together are computed."""
        requests = [member.request for member in joining]
        own = self.prompts[requests] - BLOCK_TOKENS * self.found[requests] * self.exact
        return num_chunks(self.wave.policy, own)

    def _end_interval(self, k: int, member: _Member, left: int, surplus: bool) -> None:
        request, shared = member.request, BLOCK_TOKENS * np.array([self.depth, self.found])[:, member.request]
        self.rows.append((request, k, self.prompts[request], member.joined, left, surplus, *shared))
        self._detach(k, request, member.place)

    def _attach(self, k: int, request: int) -> int:
        """Give a request a free place of a mini-batch and its blocks; return the place."""
        place = self.places[k].pop(0)
        if self.sharing:
            num_builds = len(self.sharing.builds)
            self.sharing.attach(place, self.sharing.tree.shared(request))
            self.depth[request] = self.found[request] = self.sharing.depth[place]
            for build in self.sharing.builds[num_builds : num_builds + 1]:
                self.found[request] = build.first
            self._count_common(k, place, 1)
        return place

    def _count_common(self, k: int, place: int, step: int) -> None:
        """Add (1) or remove (-1) the shared blocks of a member."""
        common = self.common[k]
        for at, block in enumerate(self.wave.shared.path(place)):
            before = common[block]
            common[block] = before + step
            if not before or not common[block]:
                self.common_blocks[k, self.entry_of[at]] += step

    def _detach(self, k: int, request: int, place: int) -> None:
        self.places[k].append(place)
        if self.sharing:
            self._count_common(k, place, -1)
            self.sharing.detach(place)
            self.depth[request] = self.found[request] = 0

    def _leave(self, k: int, iteration: int) -> None:
        stay = []
        for member in self.running[k]:
            request = member.request
            ended_early = member.left == iteration and self.ends[request] < self.limits[request]
            if ended_early and not member.surplus and (k, member.computes_prompt(iteration - 1)) in self.unknown:
                member = member._replace(left=iteration + 1, surplus=True)
                heapq.heappush(self.changes, (iteration + 1, k))
            if member.left > iteration:
                stay.append(member)
                continue
            self.full[k] = False
            self._end_interval(k, member, member.left, member.surplus)
            self.learned.end(int(self.given[request] + self.ends[request]))
            if self.sharing:
                self.sharing.tree.forget(request)
        self.running[k] = stay

    def _preempt(self, k: int, iteration: int) -> None:
        """Preempt the youngest requests while blocks are too few."""
        while len(self.running[k]) > 1 and not self._fits(k, iteration):
            member = self.running[k].pop()
            self._end_interval(k, member, iteration, False)
            request, given = member.request, iteration - member.joined
            self.given[request] += given
            self.prompts[request] += given
            self.limits[request] -= given
            self.ends[request] = max(1, self.ends[request] - given)
            self.waiting.append(request)
            self.not_before[request] = iteration + 1
            for other in range(len(self.running)):  # another mini-batch may have room
                self._try_again(other, iteration)

    def _fits(self, k: int, iteration: int) -> bool:
        """Return whether a mini-batch's pools hold what its members need in an iteration."""
        requests, joined = np.array([member[:2] for member in self.running[k]]).T
        held = self.entries.held(self.prompts[requests] + iteration - joined) - self._dealt(requests)
        return bool((self.wave.by_pool(held).sum(axis=0) <= self.pools[k]).all())

    def _dealt(self, requests) -> np.ndarray | int:
        """Return the shared blocks of each entry: [requests, entry]."""
        return self.entries.dealt(self.depth[requests]) if self.sharing else 0

    def _foresee(self, k: int, iteration: int) -> None:
        """Record the first iteration with too few blocks, if before a request leaves."""
        leave = min((member.left for member in self.running[k]), default=0)
        if len(self.running[k]) < 2 or leave <= iteration + 1 or self._fits(k, leave - 1):
            return
        first = bisect_left(range(iteration + 1, leave - 1), True, key=lambda later: not self._fits(k, later))
        heapq.heappush(self.changes, (iteration + 1 + first, k))

    def _join(self, k: int, iteration: int) -> None:
        """Let waiting requests join in order; after one that does not fit, only shorter ones may."""
        group, self.full[k] = self.running[k], True
        room = self.pools[k] - (self._expected(group, iteration) if group else 0)
        free, failures = len(self.wave.mini_batches[k]) - len(group), 0
        members = [member.request for member in group]
        first = [r for r in self.waiting[: -1 - max(LOOKED_AT, free) : -1] if self.not_before.get(r, 0) <= iteration]
        if self.sharing and self.steering:
            for request in first:
                self.sharing.tree.path(request)
            first = self.steering.order(first, self.common[k])
        expected = self._expected_of(first, np.zeros(len(first), np.int64))
        joining: list[int] = []
        places: list[int] = []
        ready = list(range(len(first)))
        while ready and len(joining) < free and failures < MOST_FAILURES:
            at = ready.pop(0)
            request = first[at]
            places.append(self._attach(k, request))
            needed = self.wave.by_pool(expected[at] - self._dealt(request))
            if joining and not self._prefills([*joining, request], places):
                self._detach(k, request, places.pop())
                self._try_again(k, iteration)
                break
            fits = not (needed > room).any() and self._buffers_hold(
                k, [*members, *joining, request], [*joining, request]
            )
            if not fits and (members or joining):
                self._detach(k, request, places.pop())
                ready = self._shorter([at, *ready], first, failures)
                failures += 1
                continue
            joining.append(request)
            room = room - needed
        if not joining and not group or len(first) < min(len(self.waiting), max(LOOKED_AT, free)):
            self._try_again(k, iteration)
        taken = set(joining)
        tail = len(self.waiting) - max(LOOKED_AT, free) if len(self.waiting) > max(LOOKED_AT, free) else 0
        self.waiting[tail:] = [request for request in self.waiting[tail:] if request not in taken]
        if self.steering:
            self.steering.join(joining)
        self._enter(k, joining, places, iteration)

    def _try_again(self, k: int, iteration: int) -> None:
        """Let waiting requests join in the next iteration, whether or not one leaves."""
        self.full[k] = False
        heapq.heappush(self.changes, (iteration + 1, k))

    def _prefills(self, joining: list[int], places: list[int]) -> bool:
        """Return whether an iteration computes the prompts that join in these places."""
        own = self.prompts[joining] - BLOCK_TOKENS * self.depth[joining] * self.exact
        if not self.singly:
            return len(joining) * longest_piece(self.wave.policy, own) <= self.wave.limits.step_rows
        return computed_together(self.wave, own, first_builds(self.wave, np.array(places)) if self.sharing else [])

    def _shorter(self, places: list[int], first: list[int], failures: int) -> list[int]:
        """Return which ``places`` of ``first`` have requests that may join where the first one may not."""
        requests = [first[place] for place in places]
        prompts, cached = self.prompts[requests], self.prompts[requests] + self.limits[requests] - 1
        if self.sharing:
            shared = BLOCK_TOKENS * np.array([len(self.sharing.tree.shared(request)) for request in requests])
            prompts, cached = prompts - (shared if self.exact else 0), cached - shared
        return [places[i] for i in shorter(prompts, cached, not failures)]

    def _expected(self, group: list[_Member], iteration: int) -> np.ndarray:
        """Return the blocks of each pool that a mini-batch is expected to hold."""
        requests, joined = np.array([member[:2] for member in group]).T
        return self.wave.by_pool(self._expected_of(requests, iteration - joined)).sum(axis=0)

    def _expected_of(self, requests, ages: np.ndarray) -> np.ndarray:
        """Return the blocks reserved for requests, or, on demand, those held half-way to their expected ends:
        [requests, entry]."""
        if not self.wave.grows:
            return self.reserved[requests] - self._dealt(requests)
        given = self.given[requests]
        prompts, limits = self.prompts[requests] - given, self.limits[requests] + given
        tokens = self.learned.halfway(prompts, ages + given, limits)
        return self.entries.held(tokens) - self._dealt(requests)
