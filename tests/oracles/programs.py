"""A program of the search solved twice more: by HiGHS on the program as it is spelt out, and through PuLP."""

from __future__ import annotations

import numpy as np
import pulp
from scipy.optimize import linprog

from policy_search.audit import state
from policy_search.grid import NUM_TIME_ROWS, ROWS, Program


def solve_alone(program: Program) -> tuple[float, dict[str, float], dict[tuple, float]]:
    """Return (seconds, cache shares, weight shares) of one program as it is spelt out, simplices as equations.

    Raise ValueError when it is infeasible.
    """
    cache, weights = list(program.cache), list(program.weights)
    terms = np.stack([*program.cache.values(), *program.weights.values()], axis=1)  # [rows, shares]
    A, b = [], []
    scale = max(float(program.constant[:NUM_TIME_ROWS].max()), 1e-300)
    for row, (phase, name) in enumerate(ROWS):
        if phase == "memory":
            limit = program.limits[name]
            if np.isfinite(limit):
                unit = max(limit, 1.0)
                A.append([*terms[row] / unit, 0.0, 0.0])
                b.append((limit - program.constant[row]) / unit)
        else:
            A.append([*terms[row] / scale, -1.0 * (phase == "prefill"), -1.0 * (phase == "decode")])
            b.append(-program.constant[row] / scale)
    for column, phase in ((-2, "prefill"), (-1, "decode")):
        if np.isfinite(program.limits[phase]):
            A.append([0.0] * (terms.shape[1] + 2))
            A[-1][column] = scale / program.limits[phase]
            b.append(1.0)
    sums = np.zeros((2, len(cache) + len(weights) + 2))
    sums[0, : len(cache)] = sums[1, len(cache) : -2] = 1.0
    c = [0.0] * terms.shape[1] + list(program.counted)
    answer = linprog(c, A, b, sums, [1.0, 1.0], method="highs")
    if answer.status != 0:
        raise ValueError(f"HiGHS: {answer.message}")
    shares = np.clip(answer.x, 0.0, None)
    return (
        float(answer.fun) * scale,
        dict(zip(cache, shares.tolist(), strict=False)),
        dict(zip(weights, shares[len(cache) :].tolist(), strict=False)),
    )


def solve_with_pulp(program: Program) -> float:
    """Return the seconds of the optimum, by HiGHS through PuLP. Raise ValueError when there is none."""
    problem = state(program)
    status = problem.solve(pulp.HiGHS(msg=False))
    if pulp.LpStatus[status] != "Optimal":
        raise ValueError(f"PuLP: {pulp.LpStatus[status]}")
    seconds = pulp.value(problem.objective)
    assert isinstance(seconds, float)
    return seconds
