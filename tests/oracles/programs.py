"""Solve a program of the search a second time, with PuLP."""

from __future__ import annotations

import pulp

from policy_search.audit import state
from policy_search.grid import Program


def solve_with_pulp(program: Program) -> float:
    """Return the seconds of the optimum, by HiGHS through PuLP. Raise ValueError when there is none."""
    problem = state(program)
    status = problem.solve(pulp.HiGHS(msg=False))
    if pulp.LpStatus[status] != "Optimal":
        raise ValueError(f"PuLP: {pulp.LpStatus[status]}")
    seconds = pulp.value(problem.objective)
    assert isinstance(seconds, float)
    return seconds
