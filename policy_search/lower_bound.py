"""Lower bounds on every choice's program at once: the dual simplex method on thousands of small tableaus side by side.

All programs have one form (``grid.Programs``) and costs that are not negative, so the empty basis is dual feasible and
no first phase is needed. After each pivot a tableau's objective is a valid lower bound: a program is given up as soon
as that is above the cutoff, long before it is solved. Those that stay are solved to their optimum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policy_search.grid import NUM_TIME_ROWS, ROWS, Grid, Programs

OPEN, OPTIMAL, INFEASIBLE = 0, 1, 2
TOLERANCE = 1e-9
MOST_PIVOTS = 80
CHUNK = 2048  #: programs pivoted together: their tableaus stay near the core


@dataclass(frozen=True)
class Solved:
    """Of each program: a lower bound on its optimum, whether it is the optimum, and z where it is."""

    value: np.ndarray  #: [programs]; infinity where nothing is feasible
    state: np.ndarray  #: OPEN where it was given up
    z: np.ndarray  #: [programs, columns]


def simple_bounds(grid: Grid) -> np.ndarray:
    """Seconds per token, [choices], that no policy of a choice is below: each resource alone, with everything where it
    costs that resource least. Infinity where a tier cannot hold even what it must."""
    counted = np.array(grid.counted)
    bounds = []
    for option in grid.options:
        least = grid.constant(option) + _least(grid.vertices(option)) + _least(grid.weight_vertices(option))
        phases = least[:, :NUM_TIME_ROWS].reshape(len(least), 2, -1).max(axis=2)
        fits = (least[:, NUM_TIME_ROWS:] <= grid.budgets * (1 + 1e-6)).all(axis=1)
        bounds.append(np.where(fits, phases @ counted * grid.unit, np.inf))
    return np.concatenate(bounds)


def _least(terms: list[np.ndarray]) -> np.ndarray:
    least = terms[0]
    for term in terms[1:]:
        least = np.minimum(least, term)
    return least


def solve_side_by_side(programs: Programs, cutoff=np.inf) -> Solved:
    """Solve all programs, but give up those whose bound passes ``cutoff`` (a number, or one for each)."""
    count, rows, columns = programs.G.shape
    limit = np.broadcast_to(np.asarray(cutoff, dtype=np.float64), (count,))
    value, state = np.zeros(count), np.full(count, OPEN)
    z = np.zeros((count, columns))
    tableau = np.zeros((count, rows + 1, columns + 1))
    tableau[:, :rows, :columns], tableau[:, :rows, columns] = programs.G, programs.h
    tableau[:, rows, :columns] = programs.c
    basic = np.broadcast_to(np.arange(columns, columns + rows), (count, rows)).copy()
    outside = np.broadcast_to(np.arange(columns), (count, columns)).copy()
    active = np.arange(count)
    for _ in range(MOST_PIVOTS):
        each = np.arange(len(active))
        out = tableau[:, :rows, columns].argmin(axis=1)  # the row that is violated most leaves
        row = tableau[each, out]
        optimal = row[:, columns] >= -TOLERANCE
        falls = row[:, :columns] < -TOLERANCE
        infeasible = ~optimal & ~falls.any(axis=1)
        value[active] = -tableau[:, rows, columns]
        state[active[optimal]], state[active[infeasible]] = OPTIMAL, INFEASIBLE
        _read(z, active[optimal], basic[optimal], tableau[optimal, :rows, columns])
        going = ~optimal & ~infeasible & (value[active] <= limit[active])
        if not going.any():
            break
        if not going.all():
            active, tableau, basic, outside = active[going], tableau[going], basic[going], outside[going]
            out, row, falls, each = out[going], row[going], falls[going], np.arange(len(active))
        enters = _entering(row[:, :columns], tableau[:, rows, :columns], falls)
        _pivot(tableau, each, out, enters)
        left = basic[each, out]
        basic[each, out], outside[each, enters] = outside[each, enters], left
    value[state == INFEASIBLE] = np.inf
    return Solved(value, state, z)


def _entering(row: np.ndarray, costs: np.ndarray, falls: np.ndarray) -> np.ndarray:
    """The column with the least cost per unit by which it mends the row; among equals the largest entry."""
    ratio = np.where(falls, costs / np.where(falls, -row, 1.0), np.inf)
    tied = falls & (ratio <= ratio.min(axis=1, keepdims=True) + 1e-12)
    return np.where(tied, -row, -1.0).argmax(axis=1)


def _pivot(tableau: np.ndarray, each, out, enters) -> None:
    """Exchange a basic and an outside variable in each tableau, in place (condensed form: outside columns alone)."""
    column = tableau[each, :, enters]
    pivot = column[each, out][:, None]
    row = tableau[each, out] / pivot
    tableau -= column[:, :, None] * row[:, None, :]
    tableau[each, out] = row
    tableau[each, :, enters] = -column / pivot
    tableau[each, out, enters] = 1.0 / pivot[:, 0]


def _read(z: np.ndarray, members: np.ndarray, basic: np.ndarray, values: np.ndarray) -> None:
    """Write the values of basic variables to the solutions; slacks have no place there."""
    columns = z.shape[1]
    every = np.zeros((len(members), columns + len(ROWS) + 2))
    np.put_along_axis(every, basic, values, axis=1)
    z[members] = every[:, :columns]


@dataclass
class Bounds:
    """What is known of every choice; ``tighten`` makes more of it known. Arrays [choices]."""

    grid: Grid
    value: np.ndarray  #: lower bound, seconds per token
    state: np.ndarray  #: of its program: OPEN, OPTIMAL, INFEASIBLE
    weights: np.ndarray  #: [choices, placements] of the programs solved

    @staticmethod
    def of(grid: Grid) -> Bounds:
        value = simple_bounds(grid)
        state = np.where(np.isfinite(value), OPEN, INFEASIBLE)
        return Bounds(grid, value, state, np.zeros((len(value), len(grid.question.placements))))

    def tighten(self, cutoff: float) -> None:
        """Solve every program that its bound so far does not put above the cutoff, the most promising first."""
        todo = np.flatnonzero((self.state == OPEN) & (self.value <= cutoff))
        todo = todo[np.argsort(self.value[todo], kind="stable")]
        for start in range(0, len(todo), CHUNK):
            self._solve(todo[start : start + CHUNK], cutoff)

    def find_best(self, slack: float) -> float:
        """Tighten up to the least bound of all and a share of it beyond; returns that least bound."""
        todo = np.flatnonzero(self.state == OPEN)
        todo = todo[np.argsort(self.value[todo], kind="stable")]
        start, size, best = 0, 256, np.inf
        while start < len(todo) and self.value[todo[start]] <= best * (1 + slack):
            self._solve(todo[start : start + size], best * (1 + slack))
            best = float(self.value[self.state == OPTIMAL].min(initial=np.inf))
            start, size = start + size, CHUNK
        return best

    def _solve(self, choices: np.ndarray, cutoff: float) -> None:
        programs = self.grid.programs(choices)
        solved = solve_side_by_side(programs, cutoff)
        self.value[choices] = np.maximum(self.value[choices], solved.value)
        self.state[choices] = solved.state
        self.weights[choices] = self.grid.shares(programs, solved.z)[1]
