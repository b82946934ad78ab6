"""From a program's shares to policies and their seconds: whole blocks, weights that fit, the walk.

Shares are rounded to blocks of the final context. Weights fill the rest exactly: on the device what fits, on the disk
only what exceeds the host. The prediction is then of the policy itself, with its waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations, compress

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.core.context.cache_entries import representation_of
from flexhybrid.core.model.layout import LayerLayout, kind_layouts
from flexhybrid.core.policy import Bits, Placement, Policy
from policy_search.grid import ChoiceGrid, Programs
from policy_search.lower_bound import solve_side_by_side
from policy_search.search_problem import Option, SearchProblem
from sim.array_clock import Prediction, predict
from sim.candidate_memory import peak_bytes
from sim.candidates import Candidates

WEIGHT_STEPS = 10_000  #: weight shares are multiples of 1 over this
SHARE_STEPS = 128  #: of an exchange between two entries, besides whole blocks
LEAST_BLOCKS = 0.75  #: an entry with fewer blocks than this is also left out


@dataclass(frozen=True)
class UnplacedPolicy:
    """A policy before its weights are placed. Equal policies are equal values: see ``of``."""

    option: Option
    batch: int
    mini_batch_tokens: int
    cache: tuple[tuple[str, float], ...]  #: entries with their shares, sorted, none of zero

    @staticmethod
    def of(option: Option, batch, mini_batch_tokens, shares: dict[str, float]) -> UnplacedPolicy:
        """Drop shares of zero, and make the bits of representations that are not stored native."""
        cache = tuple(sorted((entry, float(share)) for entry, share in shares.items() if share > 0))
        stored = option.storing(entry for entry, _ in cache)
        return UnplacedPolicy(stored, int(batch), int(mini_batch_tokens), cache)

    @property
    def entries(self) -> tuple[str, ...]:
        return tuple(entry for entry, _ in self.cache)

    @property
    def keeps_both(self) -> bool:
        """Return whether an entry keeps two copies of a token; their split depends on where the weights are."""
        return "both" in map(representation_of, self.entries)

    def policy(self, device: float, disk: float) -> Policy:
        """Return the policy with its weights placed: shares of each layer's bytes."""
        device, disk = round(float(device), 6), round(float(disk), 6)
        weights = Placement(device, max(0.0, round(1.0 - device - disk, 6)), disk)
        sizes = {"max_mini_batch_tokens": self.mini_batch_tokens, "max_batch": self.batch}
        return self.option.policy(dict(self.cache), weights, **sizes)


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A policy that fits, and its objective by the closed form with waiting: seconds per token."""

    policy: Policy
    batch: int  #: ``policy.max_batch``
    seconds: float
    unplaced: UnplacedPolicy | None = None
    in_time: bool = True  #: whether it keeps the limits of latency


@dataclass
class Evaluator:
    """Evaluates policies, each once."""

    problem: SearchProblem
    num_walked: int = 0
    seen: set[UnplacedPolicy] = field(default_factory=set)

    def evaluate(self, policies: list[UnplacedPolicy], limit: float = np.inf) -> list[EvaluatedPolicy]:
        """Return the new policies that fit and whose bound is below ``limit`` (seconds per token)."""
        groups: dict[tuple, list[UnplacedPolicy]] = {}
        for policy in policies:
            if policy not in self.seen:
                self.seen.add(policy)
                group = policy.option, policy.entries, policy if policy.keeps_both else None
                groups.setdefault(group, []).append(policy)
        return [evaluated for group in groups.values() for evaluated in self._evaluate_group(group, limit)]

    def _evaluate_group(self, unplaced: list[UnplacedPolicy], limit: float) -> list[EvaluatedPolicy]:
        """Evaluate policies of one option with the same entries."""
        problem = self.problem
        device, disk, fits = place_weights(problem, candidates_of(problem, unplaced))
        if not fits.any():
            return []
        unplaced, device, disk = list(compress(unplaced, fits)), device[fits], disk[fits]
        policies = [policy.policy(a, b) for policy, a, b in zip(unplaced, device, disk, strict=True)]
        if unplaced[0].keeps_both:
            batch = np.array([policies[0].max_batch])
            return [replace(e, unplaced=unplaced[0]) for e in self.evaluate_policy(policies[0], batch, limit)]
        candidates = candidates_of(problem, unplaced, policies[0], device, disk)
        if np.isfinite(limit):
            bound = predict(problem, candidates, walk=False)
            near = _may_be_below(problem, bound, np.asarray(candidates.batch), limit)
            if not near.any():
                return []
            policies, unplaced = list(compress(policies, near)), list(compress(unplaced, near))
            candidates = candidates_of(problem, unplaced, policies[0], device[near], disk[near])
        return self._walk(policies, candidates, unplaced)

    def evaluate_policy(self, policy: Policy, batches: np.ndarray, limit: float = np.inf) -> list[EvaluatedPolicy]:
        """Return a placed policy on several batches: those that fit, with a bound below ``limit``."""
        problem = self.problem
        candidates = problem.candidates(policy, batches.astype(np.float64))
        bound = predict(problem, candidates, walk=False)
        near = _fits(problem, bound.peak_bytes) & _may_be_below(problem, bound, batches, limit)
        batches = batches[near]
        if not len(batches):
            return []
        policies = [replace(policy, max_batch=int(batch)) for batch in batches]
        return self._walk(policies, replace(candidates, batch=batches.astype(np.float64)), [None] * len(batches))

    def _walk(self, policies: list[Policy], candidates: Candidates, origins: Iterable) -> list[EvaluatedPolicy]:
        """Evaluate fitting policies with waiting; return each with its origin."""
        self.num_walked += len(policies)
        prediction, batch = predict(self.problem, candidates), np.asarray(candidates.batch, dtype=int)
        seconds, in_time = counted_seconds(self.problem, prediction, batch), self.problem.in_time(prediction)
        columns = policies, batch.tolist(), seconds.tolist(), origins, in_time.tolist()
        return [EvaluatedPolicy(*row) for row in zip(*columns, strict=True)]


def _may_be_below(problem: SearchProblem, bound: Prediction, batch: np.ndarray, limit: float) -> np.ndarray:
    """Return whether seconds per token with waiting can be below ``limit``, within the limits of latency."""
    return problem.may_be_in_time(bound.prefill_s, bound.decode_s) & (counted_seconds(problem, bound, batch) < limit)


def counted_seconds(problem: SearchProblem, prediction: Prediction, batch: np.ndarray) -> np.ndarray:
    """Return the seconds of a prediction that the objective counts, per token; of a run never less than the bound."""
    prefill, decode = problem.counted
    run_s = prefill * prediction.prefill_s + decode * prediction.decode_s
    return (np.maximum(run_s, prediction.bound_s) if prefill and decode else run_s) / problem.tokens(batch)


def _fits(problem: SearchProblem, peak: dict[str, np.ndarray]) -> np.ndarray:
    """Return whether peaks in bytes, tier -> [candidates], are within the limits."""
    return np.all([peak[tier] <= limit for tier, limit in problem.limits.items()], axis=0)


def candidates_of(
    problem: SearchProblem, unplaced: list[UnplacedPolicy], policy: Policy | None = None, device=None, disk=None
) -> Candidates:
    """Return policies of one option with equal entries as candidates; ``policy`` has their common fields."""
    first = unplaced[0]
    if policy is None:
        policy = first.option.policy(dict(first.cache), Placement(host=1.0))
    shares = np.array([[share for _, share in policy.cache] for policy in unplaced]).T
    cache = dict(zip(first.entries, shares, strict=True))
    batch, tokens = np.array([[policy.batch, policy.mini_batch_tokens] for policy in unplaced], dtype=float).T
    return problem.candidates(policy, batch, tokens, cache=cache, weights_device=device, weights_disk=disk)


#: Steps towards the most of the weights that fit: each leaves a thirtieth of what the one before it was off.
PLACING_STEPS = 3


def place_weights(problem: SearchProblem, candidates: Candidates) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (device share, disk share, fits), [candidates]: the most weights on the device, the least on the disk.

    A resident byte of a layer costs one byte in each of L layers and saves two slots, so the rest divides evenly. With
    several kinds of layers the mean counts, and the largest one's slots.
    """
    bits, shape = problem.stored(candidates.policy.bits), problem.shape
    layouts = kind_layouts(shape, bits.weights, problem.bytes_per_element)

    def mean_of(value: Callable[[LayerLayout], int]) -> float:
        values = zip(shape.weights_counts, layouts, strict=True)
        return sum(count * value(layout) for count, layout in values) / shape.num_layers

    size, total = np.shape(candidates.batch), mean_of(lambda layout: layout.total_bytes)
    slope = max(shape.num_layers - 2 * max(layout.total_bytes for layout in layouts) / total, 0)
    row = max((spot.row_bytes for of in layouts for spot in of.spots if spot.cols), default=0)  # a share is rounded
    steps = whole_tensors(problem, [candidates.policy.bits.weights])

    def peaks(device, disk) -> dict[str, np.ndarray]:
        device, disk = np.broadcast_to(device, size), np.broadcast_to(disk, size)
        placed = replace(candidates, weights_device=device, weights_disk=disk)
        return peak_bytes(problem, placed)

    most = 1.0 - (problem.weights_disk or 0.0)  # of the weights, what the disk leaves
    if problem.weights_device is not None:
        device = np.full(size, float(problem.weights_device))
    elif "device" not in problem.space.weights:
        device = np.zeros(size)
    elif np.isinf(problem.limits["device"]):
        device = np.ones(size)
    elif len(steps):
        device = _largest(steps, size, lambda share: peaks(share, 0.0)["device"] <= problem.limits["device"])
        device = np.where(peaks(1.0, 0.0)["device"] <= problem.limits["device"], 1.0, device)
    else:
        all_fit = peaks(1.0, 0.0)["device"] <= problem.limits["device"]
        vectors = mean_of(lambda layout: layout.vectors_end)
        device = np.full(size, 0.5)
        kept = np.full(size, mean_of(lambda layout: layout.resident_prefix(0.5)), dtype=float)
        for step in range(PLACING_STEPS):  # in segments of the allocator a byte takes somewhat more than a byte
            room = problem.limits["device"] - peaks(device, 0.0)["device"]
            done = (room >= 0) if step else np.zeros(size, dtype=bool)
            kept = np.where(done, kept, kept + room / max(slope, 1) - row)
            share = np.floor(kept / total * WEIGHT_STEPS) / WEIGHT_STEPS
            share = np.where((kept > vectors) & (slope > 0), np.clip(share, 0.0, 1.0 - 1.0 / WEIGHT_STEPS), 0.0)
            device = np.where(done, device, share)
        device = np.where(all_fit, 1.0, device)
    device = np.minimum(device, most)
    disk = np.full(size, problem.weights_disk or 0.0)
    may_spill = problem.weights_disk is None and "disk" in problem.tiers and "disk" in problem.space.weights
    if may_spill and np.isfinite(problem.limits["host"]):
        limit = problem.limits["host"]
        if len(steps):
            stays = _largest(steps, size, lambda share: peaks(device, 1 - np.maximum(share, device))["host"] <= limit)
            disk = 1.0 - np.maximum(stays, device)
            return device, disk, _fits(problem, peaks(device, disk))
        over = peaks(device, disk)["host"] - limit
        moved = np.ceil((over / max(slope, 1) + row) / total * WEIGHT_STEPS) / WEIGHT_STEPS
        disk = np.where(over > 0, np.minimum(moved if slope else 1.0, 1.0 - device), 0.0)
    return device, disk, _fits(problem, peaks(device, disk))


def whole_tensors(problem: SearchProblem, weights_bits: Iterable[str | int], apart: float = 0.0) -> np.ndarray:
    """Return the shares of a layer that can be placed where its tensors are not cut, in order from 0 to 1; of those
    less than ``apart`` from one another the largest. Empty where any row may be the last."""
    stored = (problem.stored(Bits(bits)).weights for bits in weights_bits)
    layouts = (of for width in stored for of in kind_layouts(problem.shape, width, problem.bytes_per_element))
    shares = sorted({min(1.0, round(cut / of.total_bytes + 5e-7, 6)) for of in layouts for cut in of.cuts})
    return np.array([share for share, after in zip(shares, [*shares[1:], 2.0]) if after - share > apart])


def _largest(steps: np.ndarray, size: tuple[int, ...], fits: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the largest of the ``steps`` that fits, of candidates [size]; the first where none does."""
    low, high = np.zeros(size, dtype=int), np.full(size, len(steps) - 1)
    while np.any(low < high):
        middle = (low + high + 1) // 2
        fit = fits(steps[middle])
        low, high = np.where(fit, middle, low), np.where(fit, high, middle - 1)
    return steps[low]


def round_shares(grid: ChoiceGrid, choice: int, shares: np.ndarray) -> list[tuple[UnplacedPolicy, np.ndarray]]:
    """Return a choice with its program's cache shares [entries] in whole blocks: policies, each with its shares."""
    index, pair = grid.split(choice)
    option, batch, tokens = grid.options[index], grid.batch[pair], grid.mini_batch_tokens[pair]
    if grid.problem.space.mix:
        return [(UnplacedPolicy.of(option, batch, tokens, dict(grid.problem.space.mix)), shares)]
    entries, blocks = grid.problem.entries, final_blocks(grid.problem)
    ways = [
        way
        for rounded in roundings(grid.fold(option, shares), blocks)
        for way in _with_newest(rounded, entries, blocks)
    ]
    return [(UnplacedPolicy.of(option, batch, tokens, dict(zip(entries, way, strict=True))), way) for way in ways]


def _with_newest(way: np.ndarray, entries: tuple[str, ...], blocks: int) -> list[np.ndarray]:
    """Return ``way`` with a cached entry for the newest block if it holds only token ids."""
    if "tok" not in entries or way[entries.index("tok")] < 1:
        return [way]
    others = [np.eye(len(entries))[i] for i, entry in enumerate(entries) if entry != "tok"]
    return [way + (other - way) / blocks for other in others] if blocks > 1 else []


def final_blocks(problem: SearchProblem) -> int:
    """Return the blocks of a request's final context."""
    return int(ceil_blocks(problem.prompt_tokens + problem.max_tokens - 1))


def roundings(shares: np.ndarray, blocks: int) -> np.ndarray:
    """Return ``shares`` [entries] in whole blocks, [ways, entries]: every rounding of each entry down or up that adds
    up, with and without the entries of fewer than LEAST_BLOCKS blocks, and the largest entry alone."""
    ways = {tuple(np.eye(len(shares))[shares.argmax()])}
    kept = np.where(shares * blocks >= LEAST_BLOCKS, shares, 0.0)
    for exact in (shares * blocks, kept / max(kept.sum(), 1e-12) * blocks):
        down = np.floor(exact + 1e-6)
        missing = int(round(blocks - down.sum()))
        broken = np.flatnonzero(exact - down > 1e-6)
        if missing > len(broken):
            continue
        for up in combinations(broken, missing):
            counts = down.copy()
            counts[list(up)] += 1
            ways.add(tuple(counts / blocks))
    return np.array(sorted(ways))


def exchange_steps(problem: SearchProblem) -> np.ndarray:
    """Return the shares that an exchange between two entries tries, sorted, from 0 to 1: whole blocks of the first and
    of the final context, and multiples of 1/SHARE_STEPS."""
    steps = {step / SHARE_STEPS for step in range(SHARE_STEPS + 1)}
    for tokens in (problem.prompt_tokens, problem.prompt_tokens + problem.max_tokens - 1):
        blocks = -(-tokens // BLOCK_TOKENS)
        if blocks <= 2 * SHARE_STEPS:
            steps |= {count / blocks for count in range(blocks + 1)}
    return np.array(sorted(steps))


def exchanges(problem: SearchProblem, shares: np.ndarray) -> np.ndarray:
    """Return shares [ways, entries] in which one entry of ``shares`` has given any part to another, or taken it."""
    steps, ways, least = exchange_steps(problem), [], 0.5 / final_blocks(problem)  # less is never a whole block
    count = len(shares)
    for giver in np.flatnonzero(shares > 0):
        for taker in range(count):
            if taker == giver:
                continue
            both = shares[giver] + shares[taker]
            moved = steps[steps <= both + 1e-12]
            exchanged = np.repeat(shares[None, :], len(moved) + 1, axis=0)
            kept = np.append(moved, both)
            kept = np.where(kept < least, 0.0, np.where(both - kept < least, both, kept))
            exchanged[:, giver], exchanged[:, taker] = kept, both - kept
            ways.append(exchanged)
    if not ways:
        return shares[None, :]
    ways = np.concatenate(ways)
    if "tok" in problem.entries:  # the newest tokens need a share of something else
        ways = ways[ways[:, problem.entries.index("tok")] < 0.95]
    return np.unique(np.round(ways, 9), axis=0)


def with_cache_fixed(grid: ChoiceGrid, choices: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (least seconds per token [choices], weights' placement [choices, tiers]) at these cache ``shares``
    [choices, entries]; infinity if no placement fits."""
    programs = grid.programs(choices)
    nc = programs.num_cache
    h = programs.h - np.einsum("nij,nj->ni", programs.G[:, :, : nc - 1], shares[:, 1:])
    of_weights = Programs(np.ascontiguousarray(programs.G[:, :, nc - 1 :]), h, programs.c[nc - 1 :], 1)
    solved = solve_side_by_side(of_weights)
    return solved.value, grid.shares(of_weights, solved.z)[1] @ np.array(grid.problem.placements)
