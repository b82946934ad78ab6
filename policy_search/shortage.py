"""Explain why no policy fits: the tiers that are too small, their shortages, and the smallest sufficient change."""

from typing import NamedTuple

import numpy as np

from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.policy import Policy
from flexhybrid.core.units import gib
from policy_search.grid import ChoiceGrid
from policy_search.lp import Solution, least_memory
from policy_search.rounding import WEIGHT_STEPS, candidates_of, place_weights, round_shares
from policy_search.search_problem import NATIVE, SearchProblem, pairs_of
from sim.candidate_memory import peak_bytes
from sim.cost import hardware_of

MOST_TRIED = 12  #: choices, those with the smallest shortage, whose programs are rounded to policies
MIB = 2**20


class TightestPolicy(NamedTuple):
    """The policy that exceeds the fewest limits, by the smallest factor."""

    policy: Policy
    peaks: dict[str, float]  #: tier -> bytes
    lacking: tuple[str, ...]  #: tiers that are too small; empty: the policy fits


def tightest(problem: SearchProblem, batch: int, mini_batch_tokens) -> TightestPolicy | None:
    """Return the policy that needs the least memory, at any speed; None if the space has no policy."""
    grid = ChoiceGrid(problem, problem.options, *pairs_of(problem, np.array([batch]), mini_batch_tokens))
    choices, best, least = np.arange(grid.num_choices), None, (len(TIERS) + 1, np.inf)
    for tiers in (*((tier,) for tier in problem.tiers), problem.tiers):
        solution = least_memory(grid, choices, tiers)
        tried = np.argsort(solution.value, kind="stable")[:MOST_TRIED]
        for policy, peaks in _peaks(grid, tried[np.isfinite(solution.value[tried])], solution):
            factors = {tier: peaks[tier] / max(problem.limits[tier], 1.0) for tier in peaks}
            lacking = tuple(tier for tier in peaks if peaks[tier] > problem.limits[tier])
            if (change := (len(lacking), max(factors.values()))) < least:
                best, least = TightestPolicy(policy, peaks, lacking), change
    return best


def _peaks(grid: ChoiceGrid, choices: np.ndarray, solution: Solution):
    """Yield policies with their peak bytes by tier, from the solved program of each choice, rounded to whole blocks.

    Each rounded policy comes twice: with weights placed so that they fit, if possible, and with the program's own
    placement.
    """
    problem, groups = grid.problem, {}
    for choice in choices:
        for unplaced, _ in round_shares(grid, int(choice), solution.cache[choice]):
            group = unplaced.option, unplaced.entries, unplaced if unplaced.keeps_both else None
            groups.setdefault(group, []).append((unplaced, choice))
    for group in groups.values():
        unplaced, origins = ([*column] for column in zip(*group, strict=True))
        device, disk, _ = place_weights(problem, candidates_of(problem, unplaced))
        weights = solution.weights[origins] @ np.array(problem.placements)
        less = np.floor(weights[:, 0] * WEIGHT_STEPS) / WEIGHT_STEPS
        for kept, moved in ((device, disk), (less, weights[:, 2])):
            peaks = peak_bytes(problem, candidates_of(problem, unplaced, None, kept, moved))
            for i, policy in enumerate(unplaced):
                yield policy.policy(kept[i], moved[i]), {tier: float(peaks[tier][i]) for tier in problem.tiers}


def shortage(problem: SearchProblem, batch: int, mini_batch_tokens, best: TightestPolicy | None) -> str:
    """Return why nothing fits ``batch`` requests, in one line for people. ``best``: their tightest policy."""
    requests = f"{batch} request{'s' * (batch > 1)} computed in {8 * problem.bytes_per_element} bits"
    if best is None:
        return f"no policy fits {requests}: the allowed choices leave no place for the weights or the cache"
    peaks, bits, limits = best.peaks, best.policy.bits, problem.limits
    kept = "" if bits.native else f" with bits {bits.weights}/{bits.kv}/{bits.act}"
    lacking, short = [(tier,) for tier in best.lacking], _short_of_machine(problem, peaks)
    if problem.device == "cpu" and "host" in short and np.isfinite(limits["device"] + limits["host"]):
        lacking = [("device", "host")]  # parts of one memory
    sizes = [
        (" and ".join(tiers), sum(peaks[tier] for tier in tiers), sum(limits[tier] for tier in tiers))
        for tiers in lacking
    ]
    missing = "; ".join(
        f"{where} memory: at least {gib(needed)} is needed{kept}, the budget is {gib(size)} "
        f"({gib(needed - size)} short)"
        for where, needed, size in sizes
    )
    change = " and ".join(f"{tier} memory to {-(-int(peaks[tier]) // MIB)}MiB" for tier in best.lacking)
    fewer = _most_that_fit(problem, batch, mini_batch_tokens)
    if not short:
        change += f", or lower the batch to {fewer}" if fewer else ""
        return f"no policy fits {requests}: {missing}. Raise {change}"
    ways = [f"lower the batch to {fewer}" if fewer else "a smaller model"]
    ways += ["fewer bits"] * (problem.space.weights_bits == (NATIVE,))
    ways += ["a disk"] * ("disk" not in problem.tiers and "host" in short)  # a disk holds data of the host only
    return f"no policy fits {requests}: {missing}, more than the machine has. What may help: {', '.join(ways)}"


def _short_of_machine(problem: SearchProblem, peaks: dict[str, float]) -> list[str]:
    """Return the tiers in which ``peaks`` exceed the machine's memory, if its size is known."""
    owned = ((tier, hardware_of(problem).own_memory(tier)) for tier in peaks)
    sizes, short = {tier: size for tier, size in owned if size is not None}, []
    if problem.device == "cpu":  # device and host are parts of one memory
        shared = [sizes.pop(tier) for tier in ("device", "host") if tier in sizes]
        if shared and peaks["device"] + peaks["host"] > sum(shared):
            short = ["device", "host"]
    return [*short, *(tier for tier, size in sizes.items() if peaks[tier] > size)]


def _most_that_fit(problem: SearchProblem, batch: int, mini_batch_tokens) -> int:
    """Return the largest smaller batch for which a policy fits; 0 without one."""
    fitting, too_large = 0, batch
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        best = tightest(problem, middle, mini_batch_tokens)
        fitting, too_large = (middle, too_large) if best and not best.lacking else (fitting, middle)
    return fitting
