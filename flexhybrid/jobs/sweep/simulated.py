"""Checks the fields of a sweep's grid file, and simulates its points."""

import csv
import json
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from flexhybrid.core.errors import InputError, is_number
from flexhybrid.core.model.shape import DTYPE_BYTES
from flexhybrid.core.policy import Policy
from flexhybrid.core.units import parse_bytes
from flexhybrid.jobs.paths import shape_to_simulate
from flexhybrid.jobs.rates import RATES, costs, pace_of_link
from flexhybrid.jobs.simulate import AUTO, LENGTHS, MEMORIES, POLICY_FIELDS, fields_of, is_policy_file
from flexhybrid.jobs.sweep.grid import Checker, one_of, positive_integer, read_points
from flexhybrid.jobs.sweep.side_by_side import SystemRun, answers, check_plot, draw_rows
from flexhybrid.jobs.sweep.table import SweepSummary, cell, run_sweep
from policy_search.systems import parse
from sim import catalogue
from sim.catalogue.hosts import HOSTS
from sim.simulate import CLOCKS, SimulatedRun


def _memory(value):
    if parse_bytes(value) is None:
        raise InputError("must be a size, like 24GiB")
    return value


def _rate(value):
    if not is_number(value) or not value > 0:
        raise InputError("must be a number > 0")
    return value


def _batch(value):
    return value if value == AUTO else positive_integer(value)


def _checked_by(use: Callable[[Any], object]) -> Checker:
    """Return a checker that accepts a value if ``use(value)`` raises no error."""
    return lambda value: (use(value), value)[1]


ANY_POLICY = Policy(cache={"kv@host": 0.5, "act@host": 0.5})  #: policy on which values of POLICY_FIELDS are tested
#: Key of a grid file -> checker of its values.
KEYS = {
    "system": _checked_by(lambda v: Policy.load(v) if isinstance(v, str) and is_policy_file(v) else parse(v)),
    "model": _checked_by(shape_to_simulate),
    "hardware": _checked_by(catalogue.load),
    "host": one_of("host", tuple(HOSTS)),
    "batch": _batch,
    "prompt_len": positive_integer,
    "gen_len": positive_integer,
    "dtype": one_of("dtype", tuple(DTYPE_BYTES)),
    "clock": one_of("clock", CLOCKS),
    **dict.fromkeys(MEMORIES, _memory),
    **dict.fromkeys(RATES, _rate),
    **{field: _checked_by(partial(ANY_POLICY.with_field, field)) for field in POLICY_FIELDS},
    "attention": one_of("attention", ("device", "host")),  # shares of it are those of cache.attended(kv@host)
}
REQUIRED = ("system", "model", "hardware", *LENGTHS)


def evaluate(points: list[dict]) -> list[dict]:
    """Return a row for each point; {"error": reason} for a point that cannot run."""
    return [_row(answer) for answer in answers(points)]


def _row(answer: SystemRun) -> dict:
    o, made, setting = answer.run, answer.made, answer.setting
    if not isinstance(o, SimulatedRun) or made is None or setting is None:
        return {"error": answer.error}
    names = ("tokens_per_s", "decode_tokens_per_s", "prefill_s", "decode_s", "ttft_s", "tpot_s")
    names += ("num_waves", "num_mini_batches")
    row = {name: getattr(o, name) for name in names} | {"bound_by": o.binding}
    row |= {f"{tier}_peak_bytes": size for tier, size in o.peak_bytes.items()}
    row |= {f"{link}_{kind}_bytes": size for link, kinds in o.traffic_bytes.items() for kind, size in kinds.items()}
    row |= {f"{resource}_busy": share for resource, share in o.busy.items()}
    row |= {"policy": json.dumps(made.policy.to_dict()), "bits": "/".join(map(str, astuple(made.policy.bits)))}
    row |= costs(setting.machine, o.tokens_per_s)
    row |= {"rates": "; ".join(filter(None, (made.hardware.rates["kind"], pace_of_link(made.hardware))))}
    return row | ({"num_requests": o.batch} if answer.point["batch"] == AUTO else {})


def sweep_grid(
    grid: Path, out: Path, workers: int | None, fresh: bool, quiet: bool, plot: Path | None = None
) -> SweepSummary:
    """Simulate all points of a grid file into a table; draw tokens/s over the first key with several numbers.
    Raise InputError, before any work, for a wrong grid, or a figure that cannot be drawn or written."""
    points = read_points(grid, KEYS, REQUIRED)
    for point in points:
        fields_of(point)
    varied = {key: list(dict.fromkeys(point.get(key) for point in points)) for key in dict.fromkeys(chain(*points))}
    axis = next((key for key, of in varied.items() if len(of) > 1 and all(map(is_number, of))), None)
    check_plot(plot, axis, "give one of the grid's keys several numbers")
    summary = run_sweep(points, out, evaluate, workers, fresh, quiet)
    if plot and axis:
        own = {tuple(cell(point.get(key)) for key in varied) for point in points}  # the table may have more points
        with open(out, encoding="utf-8", newline="") as table:
            rows = [row for row in csv.DictReader(table) if tuple(row[key] for key in varied) in own]
        found = [row for row in rows if not row["error"]]
        names = [key for key, of in varied.items() if len(of) > 1 and key != axis]
        drawn = [(", ".join(row[key] for key in names), float(row[axis]), float(row["tokens_per_s"])) for row in found]
        draw_rows(drawn, axis, ", ".join(str(of[0]) for of in varied.values() if len(of) == 1), plot)
    return summary
