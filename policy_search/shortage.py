"""What a search that found nothing says: which tier lacks how much, and the smallest change that would do; where the
machine has not so much, what else may help."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import gib
from flexhybrid.core.policy import Policy
from policy_search.grid import NATIVE, Grid, Question, batch_grid, pairs_of
from policy_search.lower_bound import CHUNK, OPTIMAL, solve_side_by_side
from policy_search.lp import least_memory
from policy_search.rounding import WEIGHT_STEPS, candidates_of, drafts_of, place_weights
from sim.candidates import peak_bytes

MOST_TRIED = 12  #: choices whose programs are rounded to policies, of those that lack least
MIB = 2**20


@dataclass(frozen=True)
class Tightest:
    """The policy that goes over the fewest budgets, and by the smallest factor."""

    policy: Policy
    peaks: dict[str, float]  #: tier -> bytes
    lacking: tuple[str, ...]  #: tiers that are too small; none: it fits


def tightest(question: Question, batch: int, bounds) -> Tightest | None:
    """What needs the least memory, whatever it costs in time; None where nothing may be said at all."""
    q = question
    grid = Grid(q, q.options, *pairs_of(q, np.array([batch]), bounds))
    choices, best, least = np.arange(grid.num_choices), None, (len(TIERS) + 1, np.inf)
    for tiers in (*((tier,) for tier in q.tiers), q.tiers):
        found = least_memory(grid, choices, tiers)
        for choice in np.argsort(found.value, kind="stable")[:MOST_TRIED]:
            if not np.isfinite(found.value[choice]):
                break
            weights = found.weights[choice] @ np.array(q.placements)
            for policy, peaks in _peaks(grid, int(choice), found.cache[choice], weights):
                factors = {tier: peaks[tier] / max(q.budgets[tier], 1.0) for tier in peaks}
                lacking = tuple(tier for tier in factors if peaks[tier] > q.budgets[tier])
                if (change := (len(lacking), max(factors.values()))) < least:
                    best, least = Tightest(policy, peaks, lacking), change
    return best


def _peaks(grid: Grid, choice: int, shares: np.ndarray, weights: np.ndarray):
    """(policy, bytes of every tier) of what a program's shares round to."""
    q = grid.question
    for draft, _ in drafts_of(grid, choice, shares):
        device, disk, _ = place_weights(q, candidates_of(q, [draft]))
        less = np.floor(weights[:1] * WEIGHT_STEPS) / WEIGHT_STEPS
        for kept, moved in ((device, disk), (less, weights[2:])):
            placed = candidates_of(q, [draft], None, kept, moved)
            peaks = peak_bytes(q.shape, q.hardware, q.bytes_per_element, placed)
            yield draft.policy(kept[0], moved[0]), {tier: float(peaks[tier][0]) for tier in q.tiers}


def shortage(question: Question, batch: int, bounds, found: Tightest | None) -> str:
    """Why nothing fits ``batch`` requests, in one line for people. ``found``: their tightest policy."""
    q = question
    requests = f"{batch} request{'s' * (batch > 1)} computed in {8 * q.bytes_per_element} bits"
    if found is None:
        return f"no policy fits {requests}: what may be said leaves no place for the weights or the cache"
    bits = found.policy.bits
    kept = "" if bits.native else f" with bits {bits.weights}/{bits.kv}/{bits.act}"
    parts = [
        f"{tier} memory: the least that would do{kept} is {gib(found.peaks[tier])}, the budget is "
        f"{gib(q.budgets[tier])} ({gib(found.peaks[tier] - q.budgets[tier])} short)"
        for tier in found.lacking
    ]
    lack = f"no policy fits {requests}: {'; '.join(parts)}"
    change = " and ".join(f"{tier} memory to {-(-int(found.peaks[tier]) // MIB)}MiB" for tier in found.lacking)
    fewer = _most_that_fit(q, batch, bounds)
    if _machine_has(q.hardware, found):
        return f"{lack}. Raise {change}{f', or lower the batch to {fewer}' if fewer else ''}"
    ways = [f"lower the batch to {fewer}"] if fewer else ["a smaller model"]
    ways += ["fewer bits"] * (q.space.weights_bits == (NATIVE,)) + ["a disk"] * ("disk" not in q.tiers)
    return f"{lack}, more than the machine has. What may help: {', '.join(ways)}"


def _machine_has(hardware: Hardware, found: Tightest) -> bool:
    """Whether the policy would fit with budgets as large as the machine's memory, as far as that is known."""
    sizes = {tier: size for tier in found.peaks if (size := hardware.usable_memory(tier)) is not None}
    if hardware.device == "cpu":  # one memory, of which each of the two tiers has a part
        both = [tier for tier in ("device", "host") if tier in sizes]
        has = sum(sizes.pop(tier) for tier in both)
        if both and found.peaks["device"] + found.peaks["host"] > has:
            return False
    return all(found.peaks[tier] <= size for tier, size in sizes.items())


def _most_that_fit(q: Question, batch: int, bounds) -> int:
    """The largest smaller batch for which a policy fits, as far as the batches tried show; 0 where there is none."""
    grid = batch_grid(batch - 1) if batch > 1 else np.array([], dtype=int)
    low = _largest_fitting(q, grid, bounds)
    between = np.arange(low + 1, min(grid[grid > low], default=batch))
    return _largest_fitting(q, between, bounds) or low


def _largest_fitting(q: Question, batches: np.ndarray, bounds) -> int:
    """The largest of some batches for which a policy fits; 0: none. Programs tell which are worth a try."""
    if not len(batches):
        return 0
    grid = Grid(q, q.options, *pairs_of(q, batches, bounds))
    batch_of = grid.batch[grid.split(np.arange(grid.num_choices))[1]]
    order = np.argsort(-batch_of, kind="stable")
    tried: list[int] = []
    for start in range(0, len(order), CHUNK):
        choices = order[start : start + CHUNK]
        programs = grid.programs(choices)
        solved = solve_side_by_side(replace(programs, c=0.0 * programs.c))
        for one in np.unique(batch_of[choices[solved.state == OPTIMAL]])[::-1]:
            if int(one) not in tried:
                tried.append(int(one))
                found = tightest(q, int(one), bounds)
                if found and not found.lacking:
                    return int(one)
            if len(tried) >= MOST_TRIED:
                return 0
    return 0
