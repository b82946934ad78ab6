"""Round the shares of linear programs to policies, and predict the policies' times.

Cache shares are rounded to whole blocks of the final context. The weights then fill the device; only what exceeds the
host goes to the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations, compress

import numpy as np

from flexhybrid.core.context.blocks import ceil_blocks
from flexhybrid.core.context.cache_entries import representation_of
from flexhybrid.core.model.layout import LayerLayout, kind_layouts
from flexhybrid.core.policy import Bits, Placement, Policy
from policy_search.grid import ChoiceGrid, Programs
from policy_search.lower_bound import solve_side_by_side
from policy_search.search_problem import Option, SearchProblem
from sim.array_clock import Prediction, predict
from sim.candidate_memory import peak_bytes
from sim.candidates import Candidates

WEIGHT_STEPS = 10_000  #: weight shares are multiples of 1 / WEIGHT_STEPS
LEAST_BLOCKS = 0.75  #: roundings are also tried without entries of fewer blocks


@dataclass(frozen=True)
class UnplacedPolicy:
    """A policy before its weights are placed, in the unique form that ``of`` makes."""

    option: Option
    batch: int
    mini_batch_tokens: int
    cache: tuple[tuple[str, float], ...]  #: (entry, share) pairs, sorted; shares are above 0

    @staticmethod
    def of(option: Option, batch, mini_batch_tokens, shares: dict[str, float]) -> UnplacedPolicy:
        """Return the policy without zero shares, and with native bits for representations that it does not store."""
        cache = tuple(sorted((entry, float(share)) for entry, share in shares.items() if share > 0))
        stored = option.storing(entry for entry, _ in cache)
        return UnplacedPolicy(stored, int(batch), int(mini_batch_tokens), cache)

    @property
    def entries(self) -> tuple[str, ...]:
        return tuple(entry for entry, _ in self.cache)

    @property
    def keeps_both(self) -> bool:
        """Return whether an entry keeps two copies of a token. How both(…) splits depends on the weights' placement."""
        return "both" in map(representation_of, self.entries)

    def policy(self, device: float, disk: float) -> Policy:
        """Return the policy with these shares of each layer's bytes on the device and the disk."""
        device, disk = round(float(device), 6), round(float(disk), 6)
        weights = Placement(device, max(0.0, round(1.0 - device - disk, 6)), disk)
        sizes = {"max_mini_batch_tokens": self.mini_batch_tokens, "max_batch": self.batch}
        return self.option.policy(dict(self.cache), weights, **sizes)


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A policy that fits, and its predicted objective with waiting."""

    policy: Policy
    batch: int  #: ``policy.max_batch``
    seconds: float  #: seconds per token
    unplaced: UnplacedPolicy | None = None  #: the policy before its weights were placed; None for a given policy
    in_time: bool = True  #: whether it keeps the latency limits


@dataclass
class Evaluator:
    """Evaluates policies, each one only once."""

    problem: SearchProblem
    num_walked: int = 0
    seen: set[UnplacedPolicy] = field(default_factory=set)

    def evaluate(self, policies: list[UnplacedPolicy], limit: float = np.inf) -> list[EvaluatedPolicy]:
        """Evaluate the policies that are new, fit, and have a lower bound below ``limit`` (seconds per token)."""
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
        """Evaluate a placed policy with each batch that fits and has a lower bound below ``limit``."""
        problem = self.problem
        candidates = problem.candidates(policy, batches.astype(np.float64))
        bound = predict(problem, candidates, walk=False)
        near = problem.effective_budgets.hold(bound.peak_bytes) & _may_be_below(problem, bound, batches, limit)
        batches = batches[near]
        if not len(batches):
            return []
        policies = [replace(policy, max_batch=int(batch)) for batch in batches]
        return self._walk(policies, replace(candidates, batch=batches.astype(np.float64)), [None] * len(batches))

    def _walk(self, policies: list[Policy], candidates: Candidates, origins: Iterable) -> list[EvaluatedPolicy]:
        """Evaluate fitting policies with waiting. ``origins``: the ``unplaced`` of each policy."""
        self.num_walked += len(policies)
        prediction, batch = predict(self.problem, candidates), np.asarray(candidates.batch, dtype=int)
        seconds, in_time = counted_seconds(self.problem, prediction, batch), self.problem.in_time(prediction)
        columns = policies, batch.tolist(), seconds.tolist(), origins, in_time.tolist()
        return [EvaluatedPolicy(*row) for row in zip(*columns, strict=True)]


def _may_be_below(problem: SearchProblem, bound: Prediction, batch: np.ndarray, limit: float) -> np.ndarray:
    """Return whether candidates can take less than ``limit`` seconds per token within the latency limits."""
    return problem.may_be_in_time(bound.prefill_s, bound.decode_s) & (counted_seconds(problem, bound, batch) < limit)


def counted_seconds(problem: SearchProblem, prediction: Prediction, batch: np.ndarray) -> np.ndarray:
    """Return the seconds per token that the objective counts, [candidates]. If it counts the whole run, the result is
    at least the bound."""
    prefill, decode = problem.counted
    run_s = prefill * prediction.prefill_s + decode * prediction.decode_s
    return (np.maximum(run_s, prediction.bound_s) if prefill and decode else run_s) / problem.tokens(batch)


def candidates_of(
    problem: SearchProblem, unplaced: list[UnplacedPolicy], policy: Policy | None = None, device=None, disk=None
) -> Candidates:
    """Return policies of one option with equal entries as candidates. ``policy``: a policy with their common fields
    (default: made of the first). ``device``, ``disk``: weight shares."""
    first = unplaced[0]
    if policy is None:
        policy = first.option.policy(dict(first.cache), Placement(host=1.0))
    shares = np.array([[share for _, share in policy.cache] for policy in unplaced]).T
    cache = dict(zip(first.entries, shares, strict=True))
    batch, tokens = np.array([[policy.batch, policy.mini_batch_tokens] for policy in unplaced], dtype=float).T
    return problem.candidates(policy, batch, tokens, cache=cache, weights_device=device, weights_disk=disk)


#: Steps of the iteration for the most weights that fit; each reduces the error to a thirtieth.
PLACING_STEPS = 3


def place_weights(problem: SearchProblem, candidates: Candidates) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (device share, disk share, fits), [candidates]: the most weights on the device, the least on the disk.

    A byte that becomes resident in each of L layers takes L bytes and saves two bytes of the streaming slots. For
    several kinds of layers, use their mean bytes, and the slots of the largest.
    """
    bits, shape = problem.stored(candidates.policy.bits), problem.shape
    layouts = kind_layouts(shape, bits.weights, problem.bytes_per_element)

    def mean_of(value: Callable[[LayerLayout], int]) -> float:
        values = zip(shape.weights_counts, layouts, strict=True)
        return sum(count * value(layout) for count, layout in values) / shape.num_layers

    size, total = np.shape(candidates.batch), mean_of(lambda layout: layout.total_bytes)
    slope = max(shape.num_layers - 2 * max(layout.total_bytes for layout in layouts) / total, 0)
    # A share of a layer is rounded to whole rows.
    row = max((spot.row_bytes for layout in layouts for spot in layout.spots if spot.cols), default=0)
    steps = whole_tensors(problem, [candidates.policy.bits.weights])

    def peaks(device, disk) -> dict[str, np.ndarray]:
        device, disk = np.broadcast_to(device, size), np.broadcast_to(disk, size)
        return peak_bytes(problem, replace(candidates, weights_device=device, weights_disk=disk))

    most = 1.0 - (problem.weights_disk or 0.0)  # share of the weights that is not on the disk
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
        for step in range(PLACING_STEPS):  # a byte takes slightly more than a byte in segments of the allocator
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
        else:
            over = peaks(device, disk)["host"] - limit
            moved = np.ceil((over / max(slope, 1) + row) / total * WEIGHT_STEPS) / WEIGHT_STEPS
            disk = np.where(over > 0, np.minimum(moved if slope else 1.0, 1.0 - device), 0.0)
    return device, disk, problem.effective_budgets.hold(peaks(device, disk))


def whole_tensors(problem: SearchProblem, weights_bits: Iterable[str | int], apart: float = 0.0) -> np.ndarray:
    """Return the possible shares of a layer if its tensors must not be cut, sorted from 0 to 1. Of shares that differ
    by less than ``apart``, only the largest is kept. The result is empty if tensors may be cut at any row."""
    stored = (problem.stored(Bits(bits)).weights for bits in weights_bits)
    layouts = (one for width in stored for one in kind_layouts(problem.shape, width, problem.bytes_per_element))
    shares = sorted({min(1.0, round(cut / one.total_bytes + 5e-7, 6)) for one in layouts for cut in one.cuts})
    return np.array([share for share, after in zip(shares, [*shares[1:], 2.0]) if after - share > apart])


def _largest(steps: np.ndarray, size: tuple[int, ...], fits: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the largest of the ``steps`` that fits each candidate, [size]; the first step if none fits."""
    low, high = np.zeros(size, dtype=int), np.full(size, len(steps) - 1)
    while np.any(low < high):
        middle = (low + high + 1) // 2
        fit = fits(steps[middle])
        low, high = np.where(fit, middle, low), np.where(fit, high, middle - 1)
    return steps[low]


def round_shares(grid: ChoiceGrid, choice: int, shares: np.ndarray) -> list[tuple[UnplacedPolicy, np.ndarray]]:
    """Return the roundings of a choice's cache shares [entries] to whole blocks: (policy, its shares) pairs."""
    index, pair = grid.split(choice)
    option, batch, tokens = grid.options[index], grid.batch[pair], grid.mini_batch_tokens[pair]
    if grid.problem.space.mix:
        return [(UnplacedPolicy.of(option, batch, tokens, dict(grid.problem.space.mix)), shares)]
    entries, blocks = grid.problem.entries, final_blocks(grid.problem)
    shares = grid.fold(option, shares)
    ways = [way for rounded in roundings(shares, blocks) for way in _with_newest(rounded, entries, blocks)]
    return [(UnplacedPolicy.of(option, batch, tokens, dict(zip(entries, way, strict=True))), way) for way in ways]


def _with_newest(way: np.ndarray, entries: tuple[str, ...], blocks: int) -> list[np.ndarray]:
    """Return variants of the shares ``way`` that store the newest block, if all shares are token ids; else [way]."""
    if "tok" not in entries or way[entries.index("tok")] < 1:
        return [way]
    others = [np.eye(len(entries))[i] for i, entry in enumerate(entries) if entry != "tok"]
    return [way + (other - way) / blocks for other in others] if blocks > 1 else []


def final_blocks(problem: SearchProblem) -> int:
    """Return the number of blocks in a request's final context."""
    return int(ceil_blocks(problem.prompt_tokens + problem.max_tokens - 1))


def roundings(shares: np.ndarray, blocks: int) -> np.ndarray:
    """Return all roundings of ``shares`` [entries] to whole blocks, [ways, entries]. Each entry is rounded down or up
    so that the sum is kept, with and without entries of fewer than LEAST_BLOCKS blocks. A last way has only the largest
    entry."""
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


def with_cache_fixed(grid: ChoiceGrid, choices: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (least seconds per token [choices], weight shares [choices, tiers]) for given cache shares. ``shares``:
    [choices, entries]. The seconds are infinite if no placement of the weights fits."""
    programs = grid.programs(choices)
    nc = programs.num_cache
    h = programs.h - np.einsum("nij,nj->ni", programs.G[:, :, : nc - 1], shares[:, 1:])
    of_weights = Programs(np.ascontiguousarray(programs.G[:, :, nc - 1 :]), h, programs.c[nc - 1 :], 1)
    solved = solve_side_by_side(of_weights)
    return solved.value, of_weights.shares(solved.z)[1] @ np.array(grid.problem.placements)
