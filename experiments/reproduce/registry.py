"""All experiments by name, and the command that runs them."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path

from experiments.reproduce.experiment import Experiment, summary
from flexhybrid.core.errors import InputError, unknown

#: Modules in the order of the report; each has ``EXPERIMENTS``: name -> function() -> Experiment.
MODULES = ("capture", "kvpr", "infinigen", "flexgen")


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
    return {"report": str(path), "experiments": [_row(done[name]) for name in chosen]}


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
    held_out, every = summary(experiment.rows, "validate"), summary(experiment.rows)
    return {
        "name": experiment.name, "title": experiment.title, "num_compared": every.num_rows,
        "num_validate": held_out.num_rows, "median_error": every.median, "worst_error": every.worst_error,
        "worst": every.worst_what,
    }  # fmt: skip


def describe(result: dict) -> str:
    """A table for people."""
    lines = [f"{'experiment':26s} {'rows':>5s} {'median':>8s} {'worst':>8s}  worst row"]
    for row in result["experiments"]:
        if row["num_compared"]:
            figures = f"{row['median_error']:8.1%} {row['worst_error']:+8.1%}  {row['worst']}"
        else:
            figures = f"{'–':>8s} {'–':>8s}"
        lines.append(f"{row['name']:26s} {row['num_compared']:5d} {figures}")
    return "\n".join([*lines, "", f"Report: {result['report']}"])
