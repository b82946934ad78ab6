"""The programs of the choices that are left, by scipy's HiGHS: one call for all of them, side by side.

Alone, a program of a dozen columns costs 1.5 ms, nearly all of it on the way to the solver; as blocks of one large
program it costs a tenth of that. A program may need more memory than there is (a layer cut between two tiers needs
workspace that the bound does not charge): what it lacks is a column of its own, at a price that no saving repays, so
that one infeasible block does not spoil the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import block_diag

from flexhybrid.core.context.cache_entries import TIERS
from policy_search.grid import NUM_TIME_ROWS, ROWS, Grid, Program

LACK_PRICE = 1e4  #: of a whole budget's worth of bytes, in units of the program's own seconds


@dataclass(frozen=True)
class Solution:
    """Optima of programs, arrays [programs]."""

    value: np.ndarray  #: seconds per token; infinity where a tier lacks memory
    lacking: np.ndarray  #: of the budget, by the tier that lacks most
    cache: np.ndarray  #: shares, [programs, entries]
    weights: np.ndarray  #: shares, [programs, placements]


def solve(
    grid: Grid, choices: np.ndarray, less_bytes: np.ndarray | None = None, all_streamed: bool = False
) -> Solution:
    """The optimum of each choice's program; ``less_bytes`` [choices] are taken from the device's budget.

    ``all_streamed`` keeps the weights out of their first placement, the device.
    """
    programs = grid.programs(choices, less_bytes)
    if all_streamed:
        last = -programs.G[:, -1:]
        programs = replace(
            programs, G=np.concatenate([programs.G, last], axis=1),
            h=np.concatenate([programs.h, np.full((len(last), 1), -1.0)], axis=1),
        )  # fmt: skip
    count, rows, columns = programs.G.shape
    scale = np.maximum(-programs.h[:, :NUM_TIME_ROWS].min(axis=1), 1e-300)  # seconds near 1, whatever the machine
    G, h = programs.G.copy(), programs.h.copy()
    G[:, :NUM_TIME_ROWS, :-2] /= scale[:, None, None]
    h[:, :NUM_TIME_ROWS] /= scale[:, None]
    lack = np.zeros((count, rows, 1))
    lack[:, NUM_TIME_ROWS : len(ROWS)] = -1.0
    blocks = np.concatenate([G, lack], axis=2)
    c = np.tile(np.append(programs.c, LACK_PRICE), count)
    found = linprog(c, block_diag(list(blocks), format="csc"), h.reshape(-1), method="highs-ds")
    if found.status != 0:
        raise RuntimeError(f"HiGHS ended with status {found.status}: {found.message}")
    z = found.x.reshape(count, columns + 1)
    value = z[:, :columns] @ programs.c * scale
    cache, weights = grid.shares(programs, z[:, :columns])
    lacking = np.maximum(0.0, z[:, columns])
    return Solution(np.where(lacking > 1e-7, np.inf, value), lacking, cache, weights)


def least_memory(grid: Grid, choices: np.ndarray, tiers: tuple[str, ...]) -> Solution:
    """What each choice lacks at the least where only ``tiers`` may be larger and time does not matter. ``value`` is
    what it lacks, in budgets; infinity where another tier lacks too."""
    programs = grid.programs(choices, grid.cut_bytes[grid.split(choices)[1]])
    G, h = programs.G[:, NUM_TIME_ROWS:, :-2], programs.h[:, NUM_TIME_ROWS:]
    count, rows, columns = G.shape
    more = np.zeros((count, rows, 2))
    more[:, [TIERS.index(tier) for tier in tiers], 0] = -1.0
    more[:, : len(TIERS), 1] = -1.0  # of any tier, at a price
    each = np.zeros(columns + 2)
    each[-2:] = 1.0, LACK_PRICE
    blocks = block_diag(list(np.concatenate([G, more], axis=2)), format="csc")
    found = linprog(np.tile(each, count), blocks, h.reshape(-1), method="highs-ds")
    if found.status != 0:
        raise RuntimeError(f"HiGHS ended with status {found.status}: {found.message}")
    z = found.x.reshape(count, columns + 2)
    lacking = np.where(z[:, -1] > 1e-7, np.inf, z[:, -2])
    return Solution(lacking, z[:, -2], *grid.shares(programs, z))


def solve_one(program: Program) -> tuple[float, dict[str, float], dict[tuple, float]]:
    """(seconds, cache shares, weight shares) of one program as it is spelt out, simplices as equations.

    Raises ValueError where it is infeasible.
    """
    cache, weights = list(program.cache), list(program.weights)
    terms = np.stack([*program.cache.values(), *program.weights.values()], axis=1)  # [rows, shares]
    A, b = [], []
    scale = max(float(program.constant[:NUM_TIME_ROWS].max()), 1e-300)
    for row, (phase, name) in enumerate(ROWS):
        if phase == "memory":
            budget = program.budgets[name]
            if np.isfinite(budget):
                unit = max(budget, 1.0)
                A.append([*terms[row] / unit, 0.0, 0.0])
                b.append((budget - program.constant[row]) / unit)
        else:
            A.append([*terms[row] / scale, -1.0 * (phase == "prefill"), -1.0 * (phase == "decode")])
            b.append(-program.constant[row] / scale)
    ones = [
        [1.0] * len(cache) + [0.0] * len(weights) + [0.0] * 2,
        [0.0] * len(cache) + [1.0] * len(weights) + [0.0] * 2,
    ]
    c = [0.0] * terms.shape[1] + list(program.counted)
    found = linprog(c, A, b, ones, [1.0, 1.0], method="highs")
    if found.status != 0:
        raise ValueError(f"HiGHS: {found.message}")
    shares = np.clip(found.x, 0.0, None)
    return (
        float(found.fun) * scale,
        dict(zip(cache, shares.tolist(), strict=False)),
        dict(zip(weights, shares[len(cache) :].tolist(), strict=False)),
    )
