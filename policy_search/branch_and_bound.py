"""Branch and bound: keep the incumbent, the best policy so far, and look for a better one.

A policy is walked if the array clock prices it with waiting. The effect of each constant was measured on 30 searches,
those of ``tests/search`` and four of OPT-13B and OPT-30B. "Slower" means more seconds per token of the policy found.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from flexhybrid.core.policy import Policy
from policy_search.grid import ChoiceGrid
from policy_search.lower_bound import INFEASIBLE, OPTIMAL, LowerBounds
from policy_search.lp import solve
from policy_search.rounding import (
    EvaluatedPolicy,
    Evaluator,
    UnplacedPolicy,
    round_shares,
    with_cache_fixed,
)
from policy_search.search_problem import Option, SearchProblem, distinct_pairs, pairs_of
from sim.candidate_memory import peak_bytes
from sim.candidates import num_mini_batches, padded_width
from sim.presets import resident

#: Programs with a lower bound within this share of the incumbent are solved. At 0.01, 2 searches end 2 to 3 % slower.
NEAR = 0.03
#: A policy is walked only if it could be faster by more than this share. At 0, 27 % more are walked; the results are at
#: most 0.06 % faster.
GAIN = 1e-3
#: Most programs solved together. Without a limit, OPT-13B on an RTX 5000 with a disk has 4,042 solved, not 2,224.
MOST_NEAR = 1024
#: A policy is walked if it would be the best with the waiting known for its structure or family, reduced by this share.
WAIT_SLACK = {"structure": 0.005, "family": 0.015}
#: From this number of mini-batches on, the waiting does not depend on their number (``sim.template_run``).
ALIKE_MINI_BATCHES = 6
#: New structures in a round of walks. Without a limit, 28 % more policies are walked; at 1, there are more rounds.
STRUCTURES_AT_ONCE = 3
#: New structures are no longer tried after this many without a better policy. Without a limit, 1 % more policies are
#: walked, and 2 searches end 2 to 3 % faster.
PATIENCE = 6
#: If no rounded policy near the bound fits, the bound is raised by this factor. Any factor above 1 works.
WIDER = 1.25
#: Options that are tried with batches between the grid's steps.
FINER_OPTIONS = 4
#: Batches of only full mini-batches are tried up to this share below and above the best batch. At 0, 1 search ends
#: 0.15 % slower.
AROUND = 0.25
#: Best policies with different entries whose other fields are tried with both(…) entries.
TRIED_BOTH = 2
#: On the device, one in this many pairs of batch and mini-batch is walked first; its speed then bounds the others.
COARSE = 8


_seconds = attrgetter("seconds")


class RoundedPolicy(NamedTuple):
    """A rounded policy and the optimum of its program with these cache shares."""

    unplaced: UnplacedPolicy
    lower_bound: float  #: seconds per token without waiting
    tiers: tuple[bool, ...]  #: whether each tier holds weights


@dataclass
class BranchAndBound:
    """State of one search."""

    problem: SearchProblem
    deadline: float = np.inf  #: time at which the search ends, on ``time.perf_counter``
    prune: bool = True  #: False tries every choice
    best: EvaluatedPolicy | None = None  #: the incumbent
    evaluated: list[EvaluatedPolicy] = field(default_factory=list)
    lower_bounds: list[LowerBounds] = field(default_factory=list)  #: of each explored grid
    num_solved: int = 0  #: choices with solved programs
    num_lps: int = 0  #: solved programs; a choice has two if a layer may be cut between tiers
    complete: bool = True  #: False if the deadline ended the search
    #: the best policy with everything on the device, whose ``seconds`` are reduced by ``margin``
    favoured: EvaluatedPolicy | None = None
    margin: float = 0.0
    evaluator: Evaluator = field(init=False)

    def __post_init__(self):
        self.evaluator = Evaluator(self.problem)

    @property
    def seconds(self) -> float:
        """Return the incumbent's seconds per token, reduced by the margin if it is the favoured policy."""
        return np.inf if self.best is None else self.best.seconds

    def gaps(self) -> dict[str, float]:
        """Return place of attention -> optimality gap: the largest share by which an explored choice could be faster
        than the incumbent. A place is absent if nothing fits there."""
        seconds, gaps = self.seconds * (1.0 + self.margin if self.stays else 1.0), {}
        for known in self.lower_bounds:
            least = known.value.reshape(len(known.grid.options), -1).min(axis=1)
            for option, bound in zip(known.grid.options, least.tolist(), strict=True):
                if np.isfinite(bound):
                    gaps[option.attention] = max(gaps.get(option.attention, 0.0), seconds / bound - 1)
        return gaps

    @property
    def stays(self) -> bool:
        """Return whether the incumbent is the favoured policy."""
        return self.best is not None and self.best is self.favoured

    def _late(self) -> bool:
        """Return whether the deadline has passed and there is an incumbent."""
        late = self.best is not None and time.perf_counter() > self.deadline
        self.complete &= not late
        return late

    def take(self, evaluated: list[EvaluatedPolicy]) -> list[EvaluatedPolicy]:
        """Record the policies that keep the latency limits, update the incumbent, and return the recorded policies."""
        in_time = [known for known in evaluated if known.in_time]
        self.evaluated += in_time
        self.best = min([*in_time, *([self.best] if self.best else [])], key=_seconds, default=None)
        return in_time

    def seed(self, seeds: Iterable[Policy], batches: np.ndarray, mini_batch_tokens: int | None) -> None:
        """Evaluate given policies whose lower bound is below the incumbent. Their batch is the given one, else their
        own ``max_batch``, else each power of two in ``batches``."""
        for policy in seeds:
            if not self.problem.allows(policy):
                continue
            if len(batches) == 1 or policy.max_batch is None:
                sizes = batches[np.log2(batches) % 1 == 0] if len(batches) > 1 else batches
            else:
                sizes = np.array([min(policy.max_batch, batches.max())])
            policy = replace(policy, max_mini_batch_tokens=mini_batch_tokens or policy.max_mini_batch_tokens)
            self.take(self.evaluator.evaluate_policy(policy, sizes, self.seconds))

    def favour_resident(self, batches: np.ndarray, mini_batch_tokens, margin: float) -> None:
        """Make the policy with everything on the device the incumbent if it is allowed and fits.

        It gets its best batch and mini-batches. Another policy must then be faster by more than ``margin``, a share of
        the incumbent's speed.
        """
        problem = self.problem
        policy = replace(resident(), **dict(problem.space.kept))
        smallest = problem.candidates(policy, *np.array([[min(batches)], [min(mini_batch_tokens)]], dtype=float))
        if not problem.allows(policy) or not problem.effective_budgets.hold(peak_bytes(problem, smallest))[0]:
            return
        option, staying = Option.of(policy), list[EvaluatedPolicy]()

        def evaluate(batch: np.ndarray, tokens: np.ndarray) -> None:
            pairs = zip(batch, tokens, strict=True)
            unplaced = [UnplacedPolicy.of(option, *pair, dict(policy.cache)) for pair in pairs]
            for some in (unplaced[::COARSE], unplaced):
                evaluated = self.evaluator.evaluate(some, min(map(_seconds, staying), default=np.inf))
                staying.extend(known for known in self.take(evaluated) if known.policy.stays_on_device)

        evaluate(*pairs_of(problem, batches, mini_batch_tokens))
        fastest = min(staying, key=_seconds, default=None)
        if fastest is None or fastest.unplaced is None:
            return
        evaluate(*_between(problem, fastest.unplaced, batches, mini_batch_tokens))
        best = min(staying, key=_seconds)
        named = replace(best.policy, name=policy.name if margin else best.policy.name)
        favoured = replace(best, policy=named, seconds=best.seconds / (1.0 + margin))
        self.favoured, self.margin = favoured, margin
        self.take([favoured])

    def explore(self, grid: ChoiceGrid, near_share: float = NEAR) -> None:
        """Bound all choices of a grid, solve those within ``near_share`` of the incumbent, and walk their roundings."""
        known = LowerBounds.of(grid)
        self.lower_bounds.append(known)
        limit = known.find_best(near_share) if self.prune else np.inf
        solved = np.zeros(grid.num_choices, dtype=bool)
        while not self._late():
            limit = min(limit, self.seconds)
            cutoff = limit / (1 - near_share)
            known.tighten(cutoff)
            near = np.flatnonzero(~solved & (known.state == OPTIMAL) & (known.value <= cutoff))
            if len(near):
                near = near[np.argsort(known.value[near], kind="stable")][:MOST_NEAR]
                solved[near] = True
                self.num_solved += len(near)
                self._walk(self._rounded(known, near))
            elif limit >= self.seconds or np.all(solved | (known.state == INFEASIBLE)):
                return
            else:  # extend the search to the incumbent, or step by step if nothing has fitted yet
                limit = self.seconds if np.isfinite(self.seconds) else limit * WIDER

    def _rounded(self, known: LowerBounds, near: np.ndarray) -> list[RoundedPolicy]:
        """Return the rounded policies of the optima of these choices, the least lower bound first."""
        grid, problem = known.grid, self.problem
        device = known.weights[near] @ np.array(problem.placements)[:, 0]
        cut = (device > 1e-6) & (device < 1 - 1e-6) & (problem.weights_device is None)
        less_bytes = np.where(cut, grid.cut_bytes[grid.split(near)[1]], 0.0)
        optima = list(zip(near, solve(grid, near, less_bytes).cache, strict=True))
        if cut.any() and len(problem.placements) > 1:  # without a cut layer, less memory is needed
            optima += zip(near[cut], solve(grid, near[cut], all_streamed=True).cache, strict=True)
        self.num_lps += len(optima)
        origin: dict[UnplacedPolicy, tuple[int, np.ndarray]] = {}
        for choice, shares in optima:
            for unplaced, way in round_shares(grid, int(choice), shares):
                origin.setdefault(unplaced, (int(choice), way))
        choices, ways = (np.array(column) for column in zip(*origin.values(), strict=True))
        seconds, weights = with_cache_fixed(grid, choices, ways)
        order, unplaced = np.argsort(seconds, kind="stable"), list(origin)
        return [
            RoundedPolicy(unplaced[i], float(seconds[i]), tuple((weights[i] > 1e-6).tolist()))
            for i in order[np.isfinite(seconds[order])]
        ]

    def _walk(self, rounded: list[RoundedPolicy]) -> None:
        """Evaluate policies in the order of their lower bounds, until none can be faster by GAIN.

        Policies of one structure or family have nearly the same waiting (WAIT_SLACK), as a factor on the lower bound.
        One is walked first; others are walked only if this factor would make them faster than the incumbent.
        """
        if not self.prune:
            self.take(self.evaluator.evaluate([policy.unplaced for policy in rounded]))
            return
        least = np.array([policy.lower_bound for policy in rounded])
        groups = [self._structure_and_family(policy) for policy in rounded]
        left, waiting, without_gain = np.ones(len(rounded), dtype=bool), {}, 0
        while not self._late():
            target = self.seconds * (1 - GAIN)
            chosen, begun = [], set()
            for i in np.flatnonzero(left & (least < target)):
                structure, family = groups[i]
                may_begin = len(begun) < STRUCTURES_AT_ONCE and without_gain < PATIENCE and structure not in begun
                if structure not in waiting and not may_begin:
                    continue
                slack = WAIT_SLACK["structure" if structure in waiting else "family"]
                if least[i] * waiting.get(structure, waiting.get(family, 1.0)) * (1 - slack) < target:
                    begun |= {structure} - waiting.keys()
                    chosen.append(i)
            if not chosen:
                return
            left[chosen] = False
            before = self.seconds
            evaluated = self.evaluator.evaluate([rounded[i].unplaced for i in chosen])
            self.take(evaluated)
            seconds = {policy.unplaced: policy.seconds for policy in evaluated}
            for i in chosen:
                for group in groups[i]:
                    factor = seconds.get(rounded[i].unplaced, np.inf) / least[i]
                    waiting[group] = min(factor, waiting.get(group, np.inf))
            without_gain = 0 if self.seconds < before * (1 - GAIN) else without_gain + len(begun)

    def _structure_and_family(self, policy: RoundedPolicy) -> tuple[tuple, tuple]:
        """Return (structure, family) of a policy, which decide its waiting. Policies of a family may differ in bits and
        hidden states."""
        lengths, unplaced = (self.problem.prompt_tokens, self.problem.max_tokens), policy.unplaced
        count, _ = num_mini_batches(unplaced.batch, *lengths, unplaced.mini_batch_tokens)
        common = unplaced.entries, policy.tiers, min(int(count), ALIKE_MINI_BATCHES)
        return (unplaced.option, *common), (unplaced.option.schedule, unplaced.option.attention, *common)

    def finer_batches(self, batches: np.ndarray, mini_batch_tokens) -> None:
        """Explore choices near the best policy that the grid lacks: batches between its steps, and batches of full
        mini-batches if the mini-batch size is free."""
        ranked = self._ranked()
        if not ranked:
            return
        options = list(dict.fromkeys(policy.option for policy in ranked))[:FINER_OPTIONS]
        pairs = [_between(self.problem, ranked[0], batches, mini_batch_tokens)]
        if len(mini_batch_tokens) > 1:
            pairs.append(_full_mini_batches(self.problem, ranked[0], batches))
        batch, tokens = distinct_pairs(self.problem, *np.concatenate(pairs, axis=1))
        if len(batch):
            self.explore(ChoiceGrid(self.problem, options, batch, tokens), GAIN)

    def refine(self, batches: np.ndarray, mini_batch_tokens) -> None:
        """Look for better policies near the results of the grids."""
        if self.prune:
            self.finer_batches(batches, mini_batch_tokens)
        self.try_both()
        self.leave_the_disk()

    def absorb(self, problem: SearchProblem, batches: np.ndarray, mini_batch_tokens) -> None:
        """Search a narrower problem for policies that are better than the incumbent."""
        part = BranchAndBound(problem, self.deadline, self.prune)
        part.take([self.best] if self.best else [])
        part.explore(ChoiceGrid(problem, problem.options, *pairs_of(problem, batches, mini_batch_tokens)))
        part.refine(batches, mini_batch_tokens)
        self.take(part.evaluated)
        self.complete &= part.complete

    def _ranked(self) -> list[UnplacedPolicy]:
        """Return the evaluated policies except seeds, the fastest first."""
        return [policy.unplaced for policy in sorted(self.evaluated, key=_seconds) if policy.unplaced]

    def try_both(self) -> None:
        """Try both(…) entries, which the programs lack, with the other fields of the best policies."""
        best: dict[tuple, UnplacedPolicy] = {}
        for policy in self._ranked():
            best.setdefault((policy.option, policy.entries), policy)
        for policy in [*best.values()][:TRIED_BOTH]:
            if policy.option.attention == "device" and self._can_move(policy) and not self._late():
                both = [replace(policy, cache=((entry, 1.0),)) for entry in self.problem.both]
                self.take(self.evaluator.evaluate(both, self.seconds * (1 - GAIN)))

    def leave_the_disk(self) -> None:
        """Move the best policy's cache from the disk to the host if it is not slower by more than GAIN. The prediction
        can be equal if the disk is not the bottleneck."""
        best = self.best.unplaced if self.best else None
        if best is None or not any("@disk" in entry for entry in best.entries) or not self._can_move(best):
            return
        mix: dict[str, float] = {}
        for entry, share in best.cache:
            entry = entry.replace("@disk", "@host")
            mix[entry] = mix.get(entry, 0.0) + share
        if mix.keys() <= {*self.problem.entries}:
            moved = UnplacedPolicy.of(best.option, best.batch, best.mini_batch_tokens, mix)
            self.take(self.evaluator.evaluate([moved]))
            known = next((known for known in self.evaluated if known.unplaced == moved), None)
            if known and known.seconds <= self.seconds * (1 + GAIN):
                self.best = known

    def _can_move(self, policy: UnplacedPolicy) -> bool:
        """Return whether cache shares are free and all entries of the policy are in the programs."""
        free = self.problem.space.mix is None
        return free and all(entry in self.problem.entries for entry in policy.entries)


def _between(problem: SearchProblem, best: UnplacedPolicy, batches: np.ndarray, mini_batch_tokens) -> np.ndarray:
    """Return (batch, mini-batch tokens), [2, pairs], for the batches between the grid's steps next to the best's."""
    low = batches[batches < best.batch].max(initial=0 if len(batches) > 1 else best.batch)
    high = min(batches[batches > best.batch], default=best.batch)
    return np.array(pairs_of(problem, np.setdiff1d(np.arange(low + 1, high), batches), mini_batch_tokens))


def _full_mini_batches(problem: SearchProblem, best: UnplacedPolicy, batches: np.ndarray) -> np.ndarray:
    """Return (batch, mini-batch tokens), [2, pairs], for batches of full mini-batches. A mini-batch has half to twice
    the best policy's requests. Batches are those given, or, if there are several, those within AROUND of the best
    policy's batch."""
    _, size = num_mini_batches(best.batch, problem.prompt_tokens, problem.max_tokens, best.mini_batch_tokens)
    pairs = []
    for requests in range(max(1, int(size) // 2), min(best.batch, 2 * int(size)) + 1):
        sizes = batches
        if len(batches) > 1:
            low, high = best.batch * (1 - AROUND), min(best.batch * (1 + AROUND), batches.max())
            sizes = np.arange(-(-low // requests), high // requests + 1) * requests
        tokens = requests * padded_width(problem.prompt_tokens, problem.max_tokens)
        pairs.append(np.stack([sizes, np.full(len(sizes), tokens)]))
    return np.concatenate(pairs, axis=1)
