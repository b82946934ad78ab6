"""Fit a testbed's constants to a paper's calibrate rows, each inside a physical range."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from experiments.reproduce.experiment import Constant

MOST_CONSTANTS = 6  #: of one testbed, priors included

#: What of PCIe's standard long copies from page-locked memory reach, on every testbed but the T4, whose owners have
#: their own fit. It is the most that packets and flow control leave of PCIe 4.0 (26.5 of 31.5 GB/s). Alone CAPTURE's
#: calibrate rows would have 0.831 and KVPR's 0.862; either share costs the other paper's rows less than half a point.
PCIE_SHARE = 0.84


def fit(
    free: tuple[Constant, ...], ours: Callable[[dict[str, float]], np.ndarray], paper: np.ndarray, rows: str
) -> tuple[Constant, ...]:
    """Return the constants, moved from their values to where ``ours(values)`` comes nearest to the paper's numbers.

    Least squares of log(ours / paper), so that every row counts the same whatever its size. ``free``: starting values
    with their ranges (value and low above 0). ``rows`` describes the rows fitted on. Raises ValueError for more
    constants than rows.
    """
    if len(free) > len(paper):
        raise ValueError(f"{len(free)} constants cannot be fitted to {len(paper)} rows")
    low, high = (np.log([getattr(constant, name) for constant in free]) for name in ("low", "high"))
    start = np.clip(np.log([constant.value for constant in free]), low + 1e-6, high - 1e-6)

    def values(logs) -> dict[str, float]:
        return {constant.name: float(np.exp(x)) for constant, x in zip(free, logs, strict=True)}

    def residuals(logs) -> np.ndarray:
        return np.log(np.asarray(ours(values(logs))) / paper)

    optimum = values(least_squares(residuals, start, bounds=(low, high), diff_step=1e-3, xtol=1e-6).x)
    inside = {c.name: min(max(optimum[c.name], c.low), c.high) for c in free}
    return tuple(replace(constant, value=inside[constant.name], fitted_on=rows) for constant in free)
