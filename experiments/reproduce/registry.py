"""All experiments by name, and the command that runs them."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path

import numpy as np

from experiments.reproduce.experiment import Experiment, is_judged, num_aside, summary
from flexhybrid.core.errors import InputError, unknown

#: Modules in the order of the report; each has ``EXPERIMENTS``: name -> function() -> Experiment.
MODULES = (
    "capture.chapter",
    "kvpr.chapter",
    "infinigen.performance",
    "infinigen.accuracy",
    "cascade.chapter",
    "cascade.confidence",
    "flexgen",
)


def experiments() -> dict[str, Callable[[], Experiment]]:
    """Every experiment's function by its name."""
    found: dict[str, Callable[[], Experiment]] = {}
    for module in MODULES:
        found.update(import_module(f"experiments.reproduce.{module}").EXPERIMENTS)
    return found


def names() -> list[str]:
    return list(experiments())


def run(name: str) -> Experiment:
    """One experiment."""
    return experiments()[name]()


def reproduce(only: Sequence[str] | None, out: Path, workers: int | None = None, quiet: bool = False) -> dict:
    """Run experiments on all cores, write tables, pictures and report.html. Raises InputError for an unknown name."""
    from tqdm import tqdm

    from experiments.reproduce import report

    known = names()
    for name in only or ():
        if name not in known:
            raise unknown("experiment", name, known)
    chosen = [name for name in known if not only or name in only]
    if workers is not None and workers < 1:
        raise InputError(f"workers is {workers}; it must be a whole number >= 1")
    _check_folder(out)
    done: dict[str, Experiment] = {}
    context = multiprocessing.get_context("spawn")  # numpy's and scipy's threads do not survive a fork
    workers = min(workers or multiprocessing.cpu_count(), len(chosen))
    with (
        ProcessPoolExecutor(workers, mp_context=context) as pool,
        tqdm(total=len(chosen), desc="reproduce", file=sys.stderr, disable=quiet or None, leave=False) as bar,
    ):
        futures = _submit(pool, chosen)
        try:
            for future in as_completed(futures):
                done[futures[future]] = future.result()
                bar.update()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    path = report.write([done[name] for name in chosen], out)
    found = [done[name] for name in chosen]
    return {
        "report": str(path), "summary": str(path.with_name(report.SUMMARY)), "held_out": _held_out(found),
        "experiments": [_row(one) for one in found],
    }  # fmt: skip


def _submit(pool: ProcessPoolExecutor, chosen: Sequence[str]) -> dict:
    """Start the workers deaf to Ctrl-C: it is for the parent, which cancels what they have not begun."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return {pool.submit(run, name): name for name in chosen}
    finally:
        signal.signal(signal.SIGINT, before)


def _check_folder(out: Path) -> None:
    """Refuse a folder that cannot be written before any work."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"cannot write into {out}: {error.strerror or error}") from None


def _row(experiment: Experiment) -> dict:
    """Errors are over the held-out rows: what was fitted on proves nothing."""
    held_out, fitted = summary(experiment.rows, "validate"), summary(experiment.rows, "calibrate")
    return {
        "name": experiment.name, "title": experiment.title, "num_held_out": held_out.num_rows,
        "num_fitted": fitted.num_rows, "num_aside": num_aside(experiment.rows), "median_error": held_out.median,
        "worst_error": held_out.worst_error, "worst": held_out.worst_what,
    }  # fmt: skip


def describe(result: dict) -> str:
    """A table for people."""
    heads = f"{'held out':>8s} {'fitted':>6s} {'aside':>5s} {'median':>8s} {'worst':>8s}"
    lines = [f"{'experiment':20s} {heads}  worst row"]
    for row in result["experiments"]:
        counts = f"{row['num_held_out']:8d} {row['num_fitted']:6d} {row['num_aside']:5d}"
        if row["num_held_out"]:
            figures = f"{row['median_error']:8.1%} {row['worst_error']:+8.1%}  {row['worst']}"
        else:
            figures = f"{'–':>8s} {'–':>8s}"
        lines.append(f"{row['name']:20s} {counts} {figures}")
    every = result["held_out"]
    if every["num_rows"]:
        lines.append(
            f"\nAll {every['num_rows']} held-out rows: median |error| {every['median_error']:.1%}; "
            f"{every['within_10_percent']} within 10 %, {every['beyond_30_percent']} beyond 30 %."
        )
    return "\n".join([*lines, LEGEND, "", f"Report: {result['report']}", f"All rows: {result['summary']}"])


#: What the columns of the table mean.
LEGEND = """held out: numbers that nothing was fitted on; median and worst of |ours / paper - 1| are of these.
fitted: rows that constants were fitted on. aside: not judged, with its reason in the report: the same number printed
again, arithmetic that tests no model, or a number that the paper itself contradicts. Context is in the report alone."""


def _held_out(experiments: Sequence[Experiment]) -> dict:
    """Over the held-out rows of all experiments together."""
    judged = [one.rows[is_judged(one.rows) & (one.rows["role"] == "validate")] for one in experiments]
    rows = [rows["error"].dropna() for rows in judged]
    sizes = np.abs(np.concatenate(rows)) if rows else np.array([])
    return {
        "num_rows": len(sizes), "median_error": float(np.median(sizes)) if len(sizes) else None,
        "within_10_percent": int((sizes <= 0.1).sum()), "beyond_30_percent": int((sizes > 0.3).sum()),
    }  # fmt: skip
