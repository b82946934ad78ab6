"""Fit a testbed's constants to a paper's calibrate rows, each inside a physical range."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.optimize import least_squares

from experiments.reproduce.experiment import Constant

MOST_CONSTANTS = 6  #: of one testbed, priors included


def fit(
    free: tuple[Constant, ...], ours: Callable[[dict[str, float]], np.ndarray], paper: np.ndarray, rows: str
) -> tuple[Constant, ...]:
    """The constants, moved from their values to where ``ours(values)`` comes nearest to the paper's numbers.

    Least squares of log(ours / paper), so that a row counts the same whatever its size. ``free``: starting values with
    their ranges (value and low above 0). ``rows`` says in words which rows these are. Raises ValueError for more
    constants than rows.
    """
    if len(free) > len(paper):
        raise ValueError(f"{len(free)} constants cannot be fitted to {len(paper)} rows")
    low, high = (np.log([getattr(c, name) for c in free]) for name in ("low", "high"))
    start = np.clip(np.log([c.value for c in free]), low + 1e-6, high - 1e-6)

    def values(logs) -> dict[str, float]:
        return {c.name: float(np.exp(x)) for c, x in zip(free, logs, strict=True)}

    found = least_squares(
        lambda logs: np.log(np.asarray(ours(values(logs))) / paper), start, bounds=(low, high), diff_step=1e-3
    )
    fitted = values(found.x)
    return tuple(
        Constant(c.name, min(max(fitted[c.name], c.low), c.high), c.unit, c.low, c.high, c.why, rows) for c in free
    )
