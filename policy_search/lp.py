"""Solve the programs of a few choices to their optimum.

They are pivoted together (``lower_bound``). Programs that this leaves open, and programs of least memory, go to scipy's
HiGHS as blocks of one large program: a program of a dozen columns takes 1.5 ms in a call of its own, mostly on the way
to the solver, and a tenth of that as a block.

A program may exceed a limit of bytes or seconds, for example because a layer cut between tiers needs workspace that the
lower bound ignores. The excess is a column of its own, at a price above any saving. So every program has a solution,
and one infeasible block does not make the large program infeasible.
"""

from dataclasses import dataclass

import numpy as np

from flexhybrid.core.context.cache_entries import TIERS
from policy_search.grid import NUM_TIME_ROWS, ROWS, ChoiceGrid, Programs
from policy_search.lower_bound import OPTIMAL, solve_side_by_side

LACK_PRICE = 1e4  #: price of exceeding a limit by 100 %, in the program's scaled seconds


@dataclass(frozen=True)
class Solution:
    """The optimal solutions of several linear programs: arrays with one element per program."""

    value: np.ndarray  #: seconds per token; infinity if a limit is exceeded
    lacking: np.ndarray  #: largest excess over a limit (a tier's bytes or a phase's seconds), as a share of the limit
    cache: np.ndarray  #: shares, [programs, entries]
    weights: np.ndarray  #: shares, [programs, placements]


def solve(
    grid: ChoiceGrid, choices: np.ndarray, less_bytes: np.ndarray | None = None, all_streamed: bool = False
) -> Solution:
    """Return the optimum of each choice's program. ``less_bytes`` [choices] reduces the device's limit.
    ``all_streamed``: no weights in their first placement, the device."""
    programs = grid.programs(choices, less_bytes)
    phases = slice(len(ROWS) + 2, programs.G.shape[1])  # rows that limit a phase's seconds
    G, h = programs.G.copy(), programs.h.copy()
    if all_streamed:
        last = -programs.G[:, -1:]
        G = np.concatenate([G, last], axis=1)
        h = np.concatenate([h, np.full((len(last), 1), -1.0)], axis=1)
    count, rows, columns = G.shape
    scale = np.maximum(-h[:, :NUM_TIME_ROWS].min(axis=1), 1e-300)  # makes seconds about 1 on any machine
    G[:, :NUM_TIME_ROWS, :-2] /= scale[:, None, None]
    h[:, :NUM_TIME_ROWS] /= scale[:, None]
    h[:, phases] /= scale[:, None]
    missing = np.zeros((count, rows, 1))
    missing[:, NUM_TIME_ROWS : len(ROWS)] = missing[:, phases] = -1.0
    G, costs = np.concatenate([G, missing], axis=2), np.append(programs.c, LACK_PRICE)
    solved = solve_side_by_side(Programs(G, h, costs, programs.num_cache))
    z, left = solved.z, solved.state != OPTIMAL
    if left.any():
        z[left] = _solve_blocks(G[left], h[left], costs)
    cache, weights = programs.shares(z[:, :columns])
    lacking = np.maximum(0.0, z[:, columns])
    value = z[:, :columns] @ programs.c * scale
    return Solution(np.where(lacking > 1e-7, np.inf, value), lacking, cache, weights)


def least_memory(grid: ChoiceGrid, choices: np.ndarray, tiers: tuple[str, ...]) -> Solution:
    """Return each choice's least shortage of memory at any speed, if only ``tiers`` may grow. ``value`` is the missing
    share of a limit; infinity if another tier is also too small."""
    programs = grid.programs(choices, grid.cut_bytes[grid.split(choices)[1]])
    of_memory = slice(NUM_TIME_ROWS, len(ROWS) + 2)
    G, h = programs.G[:, of_memory, :-2], programs.h[:, of_memory]
    count, rows, columns = G.shape
    more = np.zeros((count, rows, 2))
    more[:, [TIERS.index(tier) for tier in tiers], 0] = -1.0
    more[:, : len(TIERS), 1] = -1.0  # any tier may grow at a price
    costs = np.zeros(columns + 2)
    costs[-2:] = 1.0, LACK_PRICE
    z = _solve_blocks(np.concatenate([G, more], axis=2), h, costs)
    lacking = np.where(z[:, -1] > 1e-7, np.inf, z[:, -2])
    return Solution(lacking, z[:, -2], *programs.shares(z))


def _solve_blocks(G: np.ndarray, h: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Return the solutions, [programs, columns], of programs with the same costs [columns]."""
    from scipy.optimize import linprog  # takes 0.25 s to load, and most searches do not need it
    from scipy.sparse import block_diag

    count, _, columns = G.shape
    answer = linprog(np.tile(costs, count), block_diag(list(G), format="csc"), h.reshape(-1), method="highs-ds")
    if answer.status != 0:
        raise RuntimeError(f"HiGHS ended with status {answer.status}: {answer.message}")
    return answer.x.reshape(count, columns)
