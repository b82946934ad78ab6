"""Write the linear program of a choice as a file that people can read, with named variables and rows, by PuLP.

Row names are, for example, ``decode_h2d_within_T`` (the loads of the decode end within its seconds),
``device_memory_fits`` and ``cache_shares_add_up``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.errors import InputError, file_errors
from policy_search.grid import NUM_TIME_ROWS, PHASES, ROWS, Program

if TYPE_CHECKING:
    import pulp

GIB = 2**30


def state(program: Program) -> pulp.LpProblem:
    """Return the program as a PuLP problem in seconds, GiB and shares 0..1. Raise InputError if PuLP is not
    installed."""
    try:
        import pulp
    except ImportError:
        raise InputError("writing a linear program needs PuLP: pip install 'pulp[highs]'") from None
    name = f"batch_{program.batch}_mini_batch_{program.mini_batch_tokens}_{program.option.schedule}"
    problem = pulp.LpProblem(name, pulp.LpMinimize)
    seconds = {phase: problem.add_variable(f"T_{phase}", 0) for phase in PHASES}
    cache = {entry: problem.add_variable(f"cache_{entry.replace('@', '_on_')}", 0) for entry in program.cache}
    weights = {placement: problem.add_variable(f"weights_{_name_of(placement)}", 0) for placement in program.weights}
    problem += pulp.lpSum(w * seconds[phase] for w, phase in zip(program.counted, PHASES, strict=True)), "seconds"
    problem += pulp.lpSum(cache.values()) == 1, "cache_shares_add_up"
    problem += pulp.lpSum(weights.values()) == 1, "weight_shares_add_up"
    terms = [(cache[entry], program.cache[entry]) for entry in cache]
    terms += [(weights[placement], program.weights[placement]) for placement in weights]
    for row, (phase, name) in enumerate(ROWS):
        if not program.constant[row] and not any(term[row] for _, term in terms):
            continue
        unit = 1 if row < NUM_TIME_ROWS else GIB
        total = pulp.lpSum(variable * float(term[row] / unit) for variable, term in terms)
        total += float(program.constant[row] / unit)
        if phase != "memory":
            problem += total <= seconds[phase], f"{phase}_{name}_within_T"
        elif np.isfinite(program.limits[name]):
            problem += total <= program.limits[name] / unit, f"{name}_memory_fits"
    for phase in PHASES:
        if np.isfinite(program.limits[phase]):
            problem += seconds[phase] <= program.limits[phase], f"{phase}_within_its_limit"
    return problem


def _name_of(placement: tuple[float, float, float]) -> str:
    """Return the name of a placement of the weights, such as ``on_host``."""
    return "_and_".join(
        f"on_{tier}" if share == 1 else f"{share:g}_on_{tier}".replace(".", "p")
        for tier, share in zip(TIERS, placement, strict=True)
        if share
    )


def write_lp(program: Program, path: str | Path) -> Path:
    """Write the program as a ``.lp`` file. Raise InputError if PuLP is not installed or the file cannot be written."""
    problem = state(program)
    with file_errors(f"write the linear program to {path}"):
        problem.writeLP(str(path))
    return Path(path)
