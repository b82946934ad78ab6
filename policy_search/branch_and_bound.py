"""The incumbent, and everything that looks for a better one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from flexhybrid.core.policy import Policy
from policy_search.grid import Grid, Question, distinct_pairs, pairs_of
from policy_search.lower_bound import INFEASIBLE, OPTIMAL, Bounds
from policy_search.lp import solve
from policy_search.rounding import (
    Draft,
    Evaluator,
    Priced,
    deals_near,
    drafts_of,
    exchanges,
    final_blocks,
    with_cache_fixed,
)  # fmt: skip
from sim.candidates import num_mini_batches, padded_width

NEAR = 0.03  #: programs are solved where the bound is within this share of the incumbent
GAIN = 1e-3  #: a policy that could be better by no more than this share is not walked
#: Drafts of one kind (option, entries, tiers of the weights, how many mini-batches) wait alike, those of a family
#: (kinds that differ in bits and hidden states) nearly so: one is walked first, the others where its waiting, less this
#: share, would do.
LUCK = {"kind": 0.005, "family": 0.015}
KINDS_AT_ONCE = 3
PATIENCE = 6  #: kinds in a row without a better policy, after which no further kind is begun
MOST_ALIKE = 6  #: this many mini-batches and more are alike (``sim.tiny_run``)
ROUND = 256  #: drafts walked together at most
MOST_NEAR = 1024  #: programs solved together
WIDER = 1.25  #: where nothing near fits once it is rounded, choices worse by this factor are tried
FINER = 4  #: options tried at the batches and mini-batches between the grid's steps
FINER_NEAR = 1e-3  #: of these, programs are solved where the bound is within this share of the incumbent
AROUND = 0.25  #: batches that are full mini-batches are tried up to this share below and above the best
EXCHANGED = 2  #: policies of different entries around which blocks are exchanged, round after round
STAIRS = 0.02  #: by what share of a block's worth a policy can be better than the sums at its shares say
MOST_ROUNDS = 4
MOST_MIXES = 3  #: sets of entries that the exchanges of a round may make


class Rounded(NamedTuple):
    """A draft and what its program says of it."""

    draft: Draft
    least: float  #: seconds per token without waiting
    tiers: tuple[bool, ...]  #: which of them hold weights


@dataclass
class Hunt:
    """State of one search. ``prune`` False tries every choice."""

    question: Question
    deadline: float = np.inf  #: on ``time.perf_counter``
    prune: bool = True
    best: Priced | None = None
    found: list[Priced] = field(default_factory=list)
    bounds: list[Bounds] = field(default_factory=list)  #: of every grid explored
    num_solved: int = 0  #: choices whose programs HiGHS solved
    num_lps: int = 0  #: those programs; two where a layer may be cut between tiers
    complete: bool = True  #: until the deadline cuts it short
    evaluator: Evaluator = field(init=False)

    def __post_init__(self):
        self.evaluator = Evaluator(self.question)

    @property
    def seconds(self) -> float:
        """The incumbent's, per token."""
        return np.inf if self.best is None else self.best.seconds

    def gap(self) -> float:
        """By what share a policy of the choices explored could be faster at most."""
        least = min(float(bounds.value.min()) for bounds in self.bounds)
        return max(0.0, self.seconds / least - 1)

    def _late(self) -> bool:
        late = self.best is not None and time.perf_counter() > self.deadline
        self.complete &= not late
        return late

    def take(self, priced: list[Priced]) -> None:
        """Remember what was found, and the best of it."""
        self.found += priced
        self.best = min([*priced, *([self.best] if self.best else [])], key=lambda one: one.seconds, default=None)

    def seed(self, seeds: Iterable[Policy], batches: np.ndarray, bound: int | None) -> None:
        """Price given policies where their bound allows that they are better: on the batch asked for, else on their
        own, else on powers of two."""
        for policy in seeds:
            if not self.question.space.allows(policy):
                continue
            if len(batches) == 1 or policy.max_batch is None:
                sizes = batches[np.log2(batches) % 1 == 0] if len(batches) > 1 else batches
            else:
                sizes = np.array([min(policy.max_batch, batches.max())])
            policy = replace(policy, max_mini_batch_tokens=bound or policy.max_mini_batch_tokens)
            self.take(self.evaluator.price_policy(policy, sizes, self.seconds))

    def explore(self, grid: Grid, near_share: float = NEAR) -> None:
        """Bound all choices of a grid, solve those within ``near_share`` of the incumbent, walk what they round to."""
        bounds = Bounds.of(grid)
        self.bounds.append(bounds)
        limit = bounds.find_best(near_share) if self.prune else np.inf
        solved = np.zeros(grid.num_choices, dtype=bool)
        while not self._late():
            limit = min(limit, self.seconds)
            cutoff = limit / (1 - near_share)
            bounds.tighten(cutoff)
            near = np.flatnonzero(~solved & (bounds.state == OPTIMAL) & (bounds.value <= cutoff))
            if len(near):
                near = near[np.argsort(bounds.value[near], kind="stable")][:MOST_NEAR]
                solved[near] = True
                self.num_solved += len(near)
                self._walk(self._rounded(bounds, near))
            elif limit >= self.seconds or np.all(solved | (bounds.state == INFEASIBLE)):
                return
            else:  # up to what was found; where nothing near fits once it is rounded, step by step
                limit = self.seconds if np.isfinite(self.seconds) else limit * WIDER

    def _rounded(self, bounds: Bounds, near: np.ndarray) -> list[Rounded]:
        """What the near choices' optima round to, the most promising first."""
        grid, q = bounds.grid, self.question
        device = bounds.weights[near] @ np.array(q.placements)[:, 0]
        cut = (device > 1e-6) & (device < 1 - 1e-6) & (q.weights_device is None)
        less_bytes = np.where(cut, grid.cut_bytes[grid.split(near)[1]], 0.0)
        optima = list(zip(near, solve(grid, near, less_bytes).cache, strict=True))
        if cut.any() and len(q.placements) > 1:  # a layer that is not cut needs less
            optima += zip(near[cut], solve(grid, near[cut], all_streamed=True).cache, strict=True)
        self.num_lps += len(optima)
        said: dict[Draft, tuple[int, np.ndarray]] = {}
        for choice, shares in optima:
            for draft, way in drafts_of(grid, int(choice), shares):
                said.setdefault(draft, (int(choice), way))
        choices, ways = (np.array(column) for column in zip(*said.values(), strict=True))
        return _sorted(list(said), *with_cache_fixed(grid, choices, ways))

    def _walk(self, rounded: list[Rounded]) -> None:
        """Price drafts, the most promising first, until none can be better by GAIN."""
        if not self.prune:
            self.take(self.evaluator.price([one.draft for one in rounded]))
            return
        least = np.array([one.least for one in rounded])
        names = [self._names(one) for one in rounded]
        left, waiting, barren = np.ones(len(rounded), dtype=bool), {}, 0
        while not self._late():
            target = self.seconds * (1 - GAIN)
            chosen, begun = [], set()
            for i in np.flatnonzero(left & (least < target)):
                kind, family = names[i]
                if kind in waiting:
                    begin, luck = len(chosen) < ROUND, LUCK["kind"]
                else:
                    begin, luck = kind not in begun and len(begun) < KINDS_AT_ONCE and barren < PATIENCE, LUCK["family"]
                if begin and least[i] * waiting.get(kind, waiting.get(family, 1.0)) * (1 - luck) < target:
                    begun |= {kind} - waiting.keys()
                    chosen.append(i)
            if not chosen:
                return
            left[chosen] = False
            before = self.seconds
            priced = self.evaluator.price([rounded[i].draft for i in chosen])
            self.take(priced)
            seconds = {one.draft: one.seconds for one in priced}
            for i in chosen:
                for name in names[i]:
                    waiting[name] = min(seconds.get(rounded[i].draft, np.inf) / least[i], waiting.get(name, np.inf))
            barren = 0 if self.seconds < before * (1 - GAIN) else barren + len(begun)

    def _names(self, one: Rounded) -> tuple[tuple, tuple]:
        """(kind, family) of a draft."""
        q, draft = self.question, one.draft
        count, _ = num_mini_batches(draft.batch, q.prompt_tokens, q.max_tokens, draft.bound)
        alike = draft.kinds, one.tiers, min(int(count), MOST_ALIKE)
        return (draft.option, *alike), (draft.option.schedule, draft.option.attention, *alike)

    def finer_batches(self, batches: np.ndarray, bounds) -> None:
        """What the grid leaves out around the best, for the best options so far: the batches between its steps, and,
        where the bound of a mini-batch is free, full mini-batches of every size."""
        drafts = [one.draft for one in self._ranked()]
        if not drafts:
            return
        options = list(dict.fromkeys(draft.option for draft in drafts))[:FINER]
        pairs = [_between(self.question, drafts[0], batches, bounds)]
        if len(bounds) > 1:
            pairs.append(_full_mini_batches(self.question, drafts[0], batches))
        batch, bound = np.concatenate(pairs, axis=1)
        if len(batch):
            self.explore(Grid(self.question, options, *distinct_pairs(self.question, batch, bound)), FINER_NEAR)

    def _ranked(self) -> list[Priced]:
        """What was found from drafts, the best first."""
        return sorted((one for one in self.found if one.draft), key=lambda one: one.seconds)

    def exchange(self) -> None:
        """Move blocks between entries around the best policies, or keep both copies, until nothing gets better."""
        tried: set[Draft] = set()
        for _ in range(MOST_ROUNDS):
            best: dict[tuple, Draft] = {}
            for one in self._ranked():
                best.setdefault((one.draft.option, one.draft.kinds), one.draft)
            new = [draft for draft in list(best.values())[:EXCHANGED] if draft not in tried and self._can_mix(draft)]
            if not new or self._late():
                return
            tried.update(new)
            for draft in new:
                self.take(self.evaluator.price(self._exchanges(draft)[:ROUND]))
                both = [Draft(draft.option, draft.batch, draft.bound, ((kind, 1.0),)) for kind in self.question.both]
                self.take(self.evaluator.price(both, self.seconds * (1 - GAIN)))

    def finer_shares(self) -> None:
        """Try every way of dealing blocks near the best mix of two entries: shares that end at the same blocks may deal
        them in another order, and so differ while the context grows."""
        best = self.best.draft if self.best else None
        if best is None or len(best.cache) != 2 or not self._can_mix(best) or "tok" in best.kinds:
            return
        (first, share), (second, _) = best.cache
        drafts = [
            Draft.of(best.option, best.batch, best.bound, {first: one, second: 1.0 - one})
            for one in deals_near(self.question, share)
        ]
        self.take(self.evaluator.price(drafts, self.seconds))

    def _can_mix(self, draft: Draft) -> bool:
        return draft.option.attention == "device" and all(kind in self.question.entries for kind in draft.kinds)

    def _grid_of(self, draft: Draft) -> Grid:
        """The draft's choice as a grid of its own."""
        for grid in (bounds.grid for bounds in self.bounds):
            pair = np.flatnonzero((grid.batch == draft.batch) & (grid.bound == draft.bound))
            if draft.option in grid.options and len(pair):
                return grid.narrowed(grid.options.index(draft.option) * len(grid.batch) + int(pair[0]))
        return Grid(self.question, [draft.option], np.array([float(draft.batch)]), np.array([float(draft.bound)]))

    def _exchanges(self, draft: Draft) -> list[Draft]:
        """Drafts that differ from one in the shares of two entries, of the mixes that promise most, the best first."""
        entries = self.question.entries
        grid = self._grid_of(draft)
        shares = dict(draft.cache)
        ways = exchanges(self.question, np.array([shares.get(entry, 0.0) for entry in entries]))
        least, _ = with_cache_fixed(grid, np.zeros(len(ways), dtype=int), ways)
        order = np.argsort(least, kind="stable")
        order = order[least[order] < self.seconds * (1 - GAIN + STAIRS / final_blocks(self.question))]
        mixes = list(dict.fromkeys(map(tuple, ways[order] > 0)))[:MOST_MIXES]
        return [
            Draft.of(draft.option, draft.batch, draft.bound, dict(zip(entries, ways[i], strict=True)))
            for i in order
            if tuple(ways[i] > 0) in mixes
        ]


def _between(q: Question, best: Draft, batches: np.ndarray, bounds) -> np.ndarray:
    """[2, pairs]: (batch, bound of a mini-batch) of the batches between the steps of the grid around the best's."""
    low = batches[batches < best.batch].max(initial=0 if len(batches) > 1 else best.batch)
    high = batches[batches > best.batch].min(initial=best.batch)
    return np.array(pairs_of(q, np.setdiff1d(np.arange(low + 1, high), batches), bounds))


def _full_mini_batches(q: Question, best: Draft, batches: np.ndarray) -> np.ndarray:
    """[2, pairs]: (batch, bound) of mini-batches of half to twice as many requests as the best's, so many of them that
    they make up about its batch where that is free, and all of them full."""
    _, size = num_mini_batches(best.batch, q.prompt_tokens, q.max_tokens, best.bound)
    pairs = []
    for requests in range(max(1, int(size) // 2), min(best.batch, 2 * int(size)) + 1):
        some = batches
        if len(batches) > 1:
            low, high = best.batch * (1 - AROUND), min(best.batch * (1 + AROUND), batches.max())
            some = np.arange(-(-low // requests), high // requests + 1) * requests
        pairs.append(np.stack([some, np.full(len(some), requests * padded_width(q.prompt_tokens, q.max_tokens))]))
    return np.concatenate(pairs, axis=1)


def _sorted(drafts: list[Draft], least: np.ndarray, weights: np.ndarray) -> list[Rounded]:
    """Those that fit somewhere, the most promising first."""
    order = np.argsort(least, kind="stable")
    return [
        Rounded(drafts[i], float(least[i]), tuple((weights[i] > 1e-6).tolist()))
        for i in order[np.isfinite(least[order])]
    ]
