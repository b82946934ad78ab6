"""The sweep job: a grid of settings, evaluated on all cores into one tidy table.

    GRID.json|toml ──read_points──▶ [point, …] ──run_sweep──▶ OUT.csv|parquet

It knows no simulator: the caller gives the function that evaluates points (``simulated.evaluate``). Rows are written as
they come, in the order of the points, so that a sweep that was stopped goes on after the last row of its table.
"""

import importlib.util
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

from tqdm import tqdm

from flexhybrid.core.errors import InputError, check, file_errors, is_integer, shown
from flexhybrid.core.files import check_new_file, new_file
from flexhybrid.jobs.sweep.table import ERROR, Table, cell

#: Takes points, gives one row of plain numbers and text for each; {"error": why} for a point that cannot run.
#: Importable by name (workers load it).
Evaluate = Callable[[list[dict]], list[dict]]

PARTS = 8  #: of the points of a worker, each evaluated at once
MAX_PART = 1024  #: points of a part: what a kill costs at most, a worker
SAME = 1e-9  #: relative difference of numbers that are evaluated twice: sums may take another order


@dataclass(frozen=True)
class SweepSummary:
    """What a sweep did. ``num_errors``: points that could not be served, rows with a text in column ``error``."""

    num_points: int
    num_resumed: int
    num_errors: int
    seconds: float
    path: Path


def run_sweep(
    points: list[dict],
    out: str | Path,
    evaluate: Evaluate,
    workers: int | None = None,
    fresh: bool = False,
    quiet: bool = False,
) -> SweepSummary:
    """Evaluate every point that the table does not hold yet; write the table.

    Rows are in the points' order, columns: the points' keys, the results', ``error``. The rows of a .parquet file are
    collected in a .csv file beside it. ``workers``: processes (None: all cores; 1: this process); ``fresh``: overwrite
    the table instead of continuing it; ``quiet``: no progress bar.

    An exception of ``evaluate`` stops the sweep (InputError naming it). Raises InputError before any work for a wrong
    output or number of workers, for a table of another sweep, and for a table whose rows would be different now.
    """
    began = time.perf_counter()
    out = Path(out)
    workers = _num_cores() if workers is None else workers
    check("workers", workers, is_integer(workers) and workers >= 1, "a whole number >= 1")
    _check_output(out)
    is_parquet = out.suffix.lower() == ".parquet"
    with closing(Table(out.with_name(out.name + ".csv") if is_parquet else out, points, fresh)) as table:
        _check_samples(table, evaluate)
        num_resumed = table.num_rows
        hidden = quiet or not sys.stderr.isatty()
        bar = tqdm(total=len(points), initial=num_resumed, desc="sweep", unit="point", disable=hidden, leave=False)
        try:
            with bar, _evaluated(evaluate, points[num_resumed:], workers) as results:
                for rows in results:
                    table.append(rows)
                    bar.update(len(rows))
        except KeyboardInterrupt:
            print(f"flexhybrid: sweep stopped: {_kept(table)}", file=sys.stderr)
            raise
        except Exception as error:  # whatever the caller's function raises ends the sweep, with its words
            reason = str(error)
            if isinstance(error, BrokenProcessPool):
                reason = "a worker process died; was memory short?"
            elif not isinstance(error, (InputError, OSError)):
                reason = f"{type(error).__name__}: {error} (from point {shown(points[table.num_rows])} on)"
            raise InputError(f"sweep stopped: {reason}\n{_kept(table)}") from error
        if is_parquet:
            _write_parquet(table.path, out)
            table.path.unlink()
    return SweepSummary(len(points), num_resumed, table.num_errors, time.perf_counter() - began, out)


def _kept(table: Table) -> str:
    total = len(table.points)
    return f"{table.num_rows} of {total} points are kept in {table.path}; the same command goes on from there"


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_output(out: Path) -> None:
    """Make the folder of the table. Raise InputError where the table could not be written."""
    if out.suffix.lower() not in (".csv", ".parquet"):
        raise InputError(f"--out {out}: a table is a .csv or .parquet file, not {out.suffix or 'one without a suffix'}")
    if out.suffix.lower() == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise InputError(f"--out {out}: parquet needs pyarrow (pip install pyarrow); or write a .csv")
    with file_errors(f"write {out}", "; choose another --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
    check_new_file(out)


def _check_samples(table: Table, evaluate: Evaluate) -> None:
    """Evaluate some kept points again: one for each system, model, machine and other text of the grid.

    Raise InputError if a number would be different now: a file of the grid or the project has changed.
    """
    for index, kept in table.samples.items():
        (row,) = evaluate([table.points[index]])
        now = {name: cell(value) for name, value in row.items() if isinstance(value, (int, float))}
        for name, value in {**now, ERROR: cell(row.get(ERROR))}.items():
            if not _same(kept.get(name, ""), value):
                raise InputError(
                    f"{table.path}, line {index + 2}: {name} is {kept.get(name, '')!r}, and would be {value!r} now: a "
                    "file of the grid or the project has changed. Choose another --out, or overwrite it with --fresh"
                )


def _same(kept: str, now: str) -> bool:
    try:
        return kept == now or math.isclose(float(kept), float(now), rel_tol=SAME)
    except ValueError:
        return False


def _write_parquet(table: Path, out: Path) -> None:
    import pandas as pd

    text = {"dtype": {ERROR: "string"}, "keep_default_na": False, "na_values": [""]}
    frame = pd.read_csv(table, dtype_backend="numpy_nullable", low_memory=False, **text)
    plain = {"Float64": "float64", "string": "object"}  # numbers and text as most tables have them
    frame = frame.astype({name: plain[str(kind)] for name, kind in frame.dtypes.items() if str(kind) in plain})
    with new_file(out) as file:
        frame.to_parquet(file, index=False)


@contextmanager
def _evaluated(evaluate: Evaluate, points: list[dict], workers: int) -> Iterator[Iterator[list[dict]]]:
    """Yield an iterator over the rows of the points, part by part.

    Worker processes compute them and end with the block. They are spawned, not forked: this process may have threads.
    """
    size = min(MAX_PART, math.ceil(len(points) / (PARTS * workers))) or 1
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    if min(workers, len(parts)) <= 1:
        yield map(evaluate, parts)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(min(workers, len(parts)), multiprocessing.get_context("spawn"), _prepare_worker)
    resource_tracker.ensure_running()  # its start, left to the first worker's, would let SIGINT through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # workers never see it
    try:
        try:
            results = pool.map(evaluate, parts)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield results
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        pool.shutdown(cancel_futures=True)


def _prepare_worker() -> None:
    """Set this process to one thread; end it when its parent is killed, since its queue would keep it waiting."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before the function's modules are loaded: there is a process a core

    def end_with_parent() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
