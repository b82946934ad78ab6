"""``flexhybrid sweep``: what a grid file may hold, and its points simulated."""

from dataclasses import replace
from pathlib import Path

from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import DTYPE_BYTES
from flexhybrid.jobs.paths import shape_to_simulate
from flexhybrid.jobs.simulate import run_simulate, setting_of
from flexhybrid.jobs.sweep.grid import one_of, positive_integer, read_points
from flexhybrid.jobs.sweep.job import SweepOptions, SweepSummary, run_sweep
from policy_search.systems import check, system
from sim import catalogue
from sim.simulate import CLOCKS, SimulatedRun, simulate_many


def _model(value: str) -> str:
    shape_to_simulate(value)
    return value


def _hardware(value: str) -> str:
    catalogue.load(value)
    return value


#: Key of a grid file -> what checks its values.
KEYS = {
    "system": check,
    "model": _model,
    "hardware": _hardware,
    "batch": positive_integer,
    "prompt_len": positive_integer,
    "gen_len": positive_integer,
    "dtype": one_of("dtype", tuple(DTYPE_BYTES)),
    "clock": one_of("clock", CLOCKS),
}
REQUIRED = ("system", "model", "hardware", "batch", "prompt_len", "gen_len")


def group_of(point: dict) -> tuple:
    """Return what the points that are evaluated together have in common."""
    return tuple(str(point.get(key)) for key in ("system", "model", "hardware", "dtype", "clock"))


def evaluate(points: list[dict]) -> list[dict]:
    """Return a row a point of one group. A point that cannot run gets its error; alone, it raises InputError."""
    systems = [system(point["system"], setting_of(point)) for point in points]
    outcomes: list[SimulatedRun | InputError] = [InputError("not simulated")] * len(points)
    together: dict[str, list[int]] = {}
    for index, (point, made) in enumerate(zip(points, systems, strict=True)):
        if point.get("clock", "closed") == "virtual":
            outcomes[index] = run_simulate(point)
        else:
            together.setdefault(f"{made.policy.to_json()}{made.hardware.lines}", []).append(index)
    for indices in together.values():
        setting, first = setting_of(points[indices[0]]), systems[indices[0]]
        lengths = [(points[i]["batch"], points[i]["prompt_len"], points[i]["gen_len"]) for i in indices]
        simulated = simulate_many(replace(setting.problem, hardware=first.hardware), first.policy, lengths)
        for index, outcome in zip(indices, simulated, strict=True):
            outcomes[index] = outcome
    if len(points) == 1 and isinstance(outcomes[0], InputError):
        raise outcomes[0]
    kind = systems[0].hardware.rates["kind"]  # points of a group have one machine
    return [{"error": str(row)} if isinstance(row, InputError) else _flat(row) | {"rates": kind} for row in outcomes]


def _flat(o: SimulatedRun) -> dict:
    names = ("tokens_per_s", "decode_tokens_per_s", "prefill_s", "decode_s", "num_waves", "num_mini_batches")
    row = {name: getattr(o, name) for name in names} | {"bound_by": o.binding}
    row |= {f"{tier}_peak_bytes": size for tier, size in o.peak_bytes.items()}
    row |= {f"{link}_{kind}_bytes": size for link, kinds in o.traffic_bytes.items() for kind, size in kinds.items()}
    row |= {f"{resource}_busy": share for resource, share in o.busy.items()}
    return row


def sweep_grid(grid: Path, out: Path, options: SweepOptions) -> SweepSummary:
    """Simulate all points of a grid file into one table. Raise InputError, before any work, for a wrong grid."""
    return run_sweep(read_points(grid, KEYS, REQUIRED), out, evaluate, group_of, options)
