"""``flexhybrid sweep``: what a grid file may hold, and its points simulated."""

import json
from dataclasses import astuple, replace
from pathlib import Path

from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.errors import InputError, is_number
from flexhybrid.core.model.shape import DTYPE_BYTES
from flexhybrid.core.policy import Policy
from flexhybrid.core.units import parse_bytes
from flexhybrid.jobs.paths import shape_to_simulate
from flexhybrid.jobs.rates import RATES, Budgets, costs, pace_of_link
from flexhybrid.jobs.simulate import is_policy_file, named_system, setting_of, simulate_system
from flexhybrid.jobs.sweep.grid import one_of, positive_integer, read_points
from flexhybrid.jobs.sweep.job import SweepOptions, SweepSummary, run_sweep
from policy_search.systems import Setting, System, check
from sim import catalogue
from sim.simulate import CLOCKS, SimulatedRun, simulate_many


def _system(value: str) -> str:
    if isinstance(value, str) and is_policy_file(value):
        Policy.load(value)
        return value
    return check(value)


def _memory(value):
    if parse_bytes(value) is None:
        raise InputError("must be a size, like 24GiB")
    return value


def _rate(value):
    if not is_number(value) or not value > 0:
        raise InputError("must be a number > 0")
    return value


def _model(value: str) -> str:
    shape_to_simulate(value)
    return value


def _hardware(value: str) -> str:
    catalogue.load(value)
    return value


#: Key of a grid file -> what checks its values.
KEYS = {
    "system": _system,
    "model": _model,
    "hardware": _hardware,
    "batch": positive_integer,
    "prompt_len": positive_integer,
    "gen_len": positive_integer,
    "dtype": one_of("dtype", tuple(DTYPE_BYTES)),
    "clock": one_of("clock", CLOCKS),
    **{f"{tier}_memory": _memory for tier in TIERS},
    **dict.fromkeys(RATES, _rate),
}
OF_GROUP = ("system", "model", "hardware", "dtype", "clock", *(f"{tier}_memory" for tier in TIERS), *RATES)
REQUIRED = ("system", "model", "hardware", "batch", "prompt_len", "gen_len")


def group_of(point: dict) -> tuple:
    """Return what the points that are evaluated together have in common."""
    return tuple(str(point.get(key)) for key in OF_GROUP)


def _budgets(point: dict) -> Budgets:
    sizes = {tier: point.get(f"{tier}_memory") for tier in TIERS}
    return {tier: None if size is None else str(size) for tier, size in sizes.items()}


def evaluate(points: list[dict]) -> list[dict]:
    """Return a row a point of one group. A point that cannot run gets its error; alone, it raises InputError."""
    settings = [setting_of(point, _budgets(point)) for point in points]
    systems = [named_system(point["system"], setting) for point, setting in zip(points, settings, strict=True)]
    outcomes: list[SimulatedRun | InputError] = [InputError("not simulated")] * len(points)
    together: dict[str, list[int]] = {}
    for index, (point, made) in enumerate(zip(points, systems, strict=True)):
        if point.get("clock", "closed") == "virtual":
            outcomes[index] = simulate_system(settings[index], made, "virtual")
        else:
            together.setdefault(f"{made.policy.to_json()}{made.hardware.lines}", []).append(index)
    for indices in together.values():
        setting, first = settings[indices[0]], systems[indices[0]]
        lengths = [(points[i]["batch"], points[i]["prompt_len"], points[i]["gen_len"]) for i in indices]
        simulated = simulate_many(replace(setting.problem, hardware=first.hardware), first.policy, lengths)
        for index, outcome in zip(indices, simulated, strict=True):
            outcomes[index] = outcome
    if len(points) == 1 and isinstance(outcomes[0], InputError):
        raise outcomes[0]
    rows = zip(settings, systems, outcomes, strict=True)
    return [
        {"error": str(run)} if isinstance(run, InputError) else _flat(setting, made, run) for setting, made, run in rows
    ]


def _flat(setting: Setting, made: System, o: SimulatedRun) -> dict:
    names = ("tokens_per_s", "decode_tokens_per_s", "prefill_s", "decode_s", "num_waves", "num_mini_batches")
    row = {name: getattr(o, name) for name in names} | {"bound_by": o.binding}
    row |= {f"{tier}_peak_bytes": size for tier, size in o.peak_bytes.items()}
    row |= {f"{link}_{kind}_bytes": size for link, kinds in o.traffic_bytes.items() for kind, size in kinds.items()}
    row |= {f"{resource}_busy": share for resource, share in o.busy.items()}
    row |= {"policy": json.dumps(made.policy.to_dict()), "bits": "/".join(map(str, astuple(made.policy.bits)))}
    rates = "; ".join(filter(None, (made.hardware.rates["kind"], pace_of_link(made.hardware))))
    return row | costs(setting.machine, o.tokens_per_s) | {"rates": rates}


def sweep_grid(grid: Path, out: Path, options: SweepOptions) -> SweepSummary:
    """Simulate all points of a grid file into one table. Raise InputError, before any work, for a wrong grid."""
    return run_sweep(read_points(grid, KEYS, REQUIRED), out, evaluate, group_of, options)
