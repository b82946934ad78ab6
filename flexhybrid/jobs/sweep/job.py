"""The sweep job: a grid of settings, evaluated on all cores into one tidy table.

    GRID.json|toml ──read_points──▶ [point, …] ──run_sweep──▶ OUT.csv|parquet

It knows no simulator: the caller gives the function that evaluates points (``simulated.evaluate``). While it runs,
every result is in a journal beside the output (OUT.partial, JSON lines), so that a killed sweep continues from it.
"""

import csv
import functools
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import connection as pipes
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

from tqdm import tqdm

from flexhybrid.core.errors import InputError, check, file_errors, is_integer, shown
from flexhybrid.jobs.ray_cluster import cluster
from flexhybrid.jobs.sweep.grid import point_id
from flexhybrid.jobs.sweep.journal import JobResult, Journal, grid_hash, open_journal, version_hash

#: Takes points of one group, gives one row of plain numbers and text for each. Importable by name (workers load it).
Evaluate = Callable[[list[dict]], list[dict]]

Pipe = pipes.Connection

#: Most points between two writes of the journal: what a kill costs at most, a worker.
MAX_CHUNK = 4096


@dataclass(frozen=True)
class SweepOptions:
    """How a sweep runs. Its table depends on none of this."""

    workers: int | None = None  #: processes; None: all cores; 1: this process
    engine: str = "local"  #: "ray": the processes are those of a Ray cluster
    fresh: bool = False  #: drop the journal of a sweep that was stopped
    quiet: bool = False  #: no progress bar
    chunk: int | None = None  #: most points of a job; None: a 16th of a worker's part, up to MAX_CHUNK


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
    group_of: Callable[[dict], Hashable],
    options: SweepOptions = SweepOptions(),  # noqa: B008  frozen
) -> SweepSummary:
    """Evaluate every point that the journal does not hold yet, once; write the table.

    ``evaluate`` takes points of one group (``group_of``) at a time. Where it raises InputError its points are tried in
    ever smaller parts, and those that raise alone become rows with ``error``. Any other exception stops the sweep
    (InputError naming it). Rows are in the points' order, columns: the points' keys, the results', ``error``. Raises
    InputError before any work for a wrong output or number of workers.
    """
    began = time.perf_counter()
    out = Path(out)
    for name, value in (("workers", options.workers), ("chunk", options.chunk)):
        check(name, value, value is None or is_integer(value) and value >= 1, "a whole number >= 1")
    _check_output(out)
    ids = [point_id(point) for point in points]
    identity = {"grid": grid_hash(points, ids), "version": version_hash(evaluate), "points": len(points)}
    with (
        closing(open_journal(out, identity, ids, options.fresh)) as journal,
        _workers(options.engine, options.workers) as num_workers,
    ):
        num_resumed = journal.num_done
        todo = [index for index, offset in enumerate(journal.offsets) if offset < 0]
        size = options.chunk or min(MAX_CHUNK, max(1, math.ceil(len(todo) / (16 * num_workers))))
        jobs = _jobs(points, todo, group_of, size)
        hidden = options.quiet or not sys.stderr.isatty()
        bar = tqdm(total=len(points), initial=num_resumed, desc="sweep", unit="point", disable=hidden, leave=False)
        try:
            num_workers = min(num_workers, max(1, len(jobs)))
            with bar, closing(_outcomes(points, jobs, evaluate, num_workers, options.engine)) as outcomes:
                for job, outcome in outcomes:
                    journal.append([index for group in job for index in group], outcome.lines)
                    bar.update(sum(map(len, job)))
            num_errors = _write_table(out, points, journal)
        except KeyboardInterrupt:
            print(f"flexhybrid: sweep stopped: {_kept(journal)}", file=sys.stderr)
            raise
        except _Stopped as stop:
            reason, details = stop.args
            error = InputError(f"sweep stopped: {reason}\n{_kept(journal)}")
            error.add_note(details)
            raise error from None
        except OSError as error:
            raise InputError(f"sweep stopped: {error}\n{_kept(journal)}") from None
        journal.path.unlink()
    return SweepSummary(len(points), num_resumed, num_errors, time.perf_counter() - began, out)


class _Stopped(Exception):
    """A sweep cannot go on. Its arguments: the reason for the user, and details for a developer."""


def _kept(journal: Journal) -> str:
    total = len(journal.offsets)
    return f"{journal.num_done} of {total} points are kept in {journal.path}; the same command goes on from there"


@contextmanager
def _workers(engine: str, workers: int | None) -> Iterator[int]:
    """Yield the number of processes: ``workers``, or one a core. A Ray cluster is connected meanwhile."""
    if engine == "ray":
        with cluster(functools.partial(print, file=sys.stderr)) as ray:
            yield workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
    elif workers is None and hasattr(os, "sched_getaffinity"):
        yield len(os.sched_getaffinity(0))
    else:
        yield workers or os.cpu_count() or 1


def _check_output(out: Path) -> None:
    """Make the folder of the table. Raise InputError where the table could not be written."""
    if out.suffix.lower() not in (".csv", ".parquet"):
        raise InputError(f"--out {out}: a table is a .csv or .parquet file, not {out.suffix or 'one without a suffix'}")
    if out.is_dir():
        raise InputError(f"--out {out} is a folder; name a file")
    if out.suffix.lower() == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise InputError(f"--out {out}: parquet needs pyarrow (pip install pyarrow); or write a .csv")
    with file_errors(f"write {out}", "; choose another --out"):
        out.parent.mkdir(parents=True, exist_ok=True)  # whether a file can be made there the journal will tell


def _jobs(
    points: list[dict], todo: list[int], group_of: Callable[[dict], Hashable], size: int
) -> list[list[list[int]]]:
    """Return jobs of at most ``size`` points; a job is a list of parts of a group, a part a list of point indices."""
    groups: dict[Hashable, list[int]] = {}
    for index in todo:
        groups.setdefault(group_of(points[index]), []).append(index)
    jobs, room = [], 0
    for group in groups.values():
        for start in range(0, len(group), size):
            part = group[start : start + size]
            if len(part) > room:
                jobs.append([])
                room = size
            jobs[-1].append(part)
            room -= len(part)
    return jobs


def job_result(evaluate: Evaluate, groups: list[list[dict]]) -> JobResult:
    """Evaluate the groups of a job; an exception other than InputError becomes a failure that any process can read."""
    lines = []
    for group in groups:
        try:
            rows = _rows(evaluate, group)
        except Exception as error:  # whatever the caller's function raises ends the sweep, with its words
            reason = f"{type(error).__name__}: {error} (at {shown(group[0])}{' …' if len(group) > 1 else ''})"
            return JobResult(failure=reason, details=traceback.format_exc())
        for point, row in zip(group, rows, strict=True):
            lines.append(json.dumps({"point": point_id(point), "row": row}).encode() + b"\n")
    return JobResult(lines)


def _rows(evaluate: Evaluate, points: list[dict]) -> list[dict]:
    """Return a plain row a point. Where the points cannot be served together, try halves: few bad ones cost little."""
    try:
        rows = evaluate([dict(point) for point in points])
    except InputError as error:
        if len(points) == 1:
            return [{"error": str(error)}]
        middle = len(points) // 2
        return _rows(evaluate, points[:middle]) + _rows(evaluate, points[middle:])
    if len(rows) != len(points):
        raise ValueError(f"evaluate gave {len(rows)} rows for {len(points)} points")
    return [_plain(point, row) for point, row in zip(points, rows, strict=True)]


def _plain(point: dict, row: dict) -> dict:
    """Return the row as JSON scalars, without the keys of the point."""
    plain = {}
    for key, value in row.items():
        if hasattr(value, "item"):  # a numpy scalar
            value = value.item()
        if not isinstance(key, str) or not isinstance(value, (str, int, float, bool, type(None))):
            raise TypeError(f"evaluate gave {key!r} = {shown(value)}; a table holds numbers and text")
        if key not in point:
            plain[key] = value
        elif point[key] != value:
            raise ValueError(f"evaluate gave {key} = {shown(value)} for a point with {key} = {shown(point[key])}")
    return plain


# --- the table -------------------------------------------------------------------------------------------------------


def _write_table(out: Path, points: list[dict], journal: Journal) -> int:
    """Write the rows of the journal in the order of the points, by rename; return the number of rows with an error."""
    keys, num_errors = dict.fromkeys(itertools.chain(*points)), 0
    for row in map(journal.row, range(len(points))):
        keys |= dict.fromkeys(row)
        num_errors += bool(row.get("error"))
    columns = [*(key for key in keys if key != "error"), "error"]
    rows = ({**journal.row(index), **point} for index, point in enumerate(points))
    part = out.with_name(out.name + ".table")
    try:
        if out.suffix.lower() == ".parquet":
            _write_parquet(part, columns, rows)
        else:
            with open(part, "w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(columns)
                for row in rows:
                    values = map(row.get, columns)
                    writer.writerow("" if value is None or value != value else value for value in values)
                file.flush()
                os.fsync(file.fileno())
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return num_errors


def _write_parquet(path: Path, columns: list[str], rows: Iterator[dict]) -> None:
    import pandas as pd

    values: dict[str, list] = {key: [] for key in columns}
    for row in rows:
        for key in columns:
            values[key].append(row.get(key))
    pd.DataFrame({key: _column(pd, column) for key, column in values.items()}).to_parquet(path, index=False)


def _column(pd, values: list):
    """Return a series of one type: whole numbers and flags may have gaps; numbers beside text become text."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) > 1 and kinds != {int, float}:
        return pd.Series([None if value is None else str(value) for value in values], dtype="object")
    dtype = {frozenset({int}): "Int64", frozenset({bool}): "boolean", frozenset({str}): "object"}
    return pd.Series(values, dtype=dtype.get(frozenset(kinds), "float64" if kinds else "object"))


# --- processes ------------------------------------------------------------------------------------------------------


def _outcomes(
    points: list[dict], jobs: list, evaluate: Evaluate, num_workers: int, engine: str
) -> Generator[tuple[list, JobResult]]:
    """Yield every job with its result, as they end. Raise _Stopped when one fails. Closing it ends the workers."""
    waiting = ((job, [[points[index] for index in group] for group in job]) for job in jobs)
    if engine == "ray":
        from flexhybrid.jobs.sweep.remote import results_on

        results = results_on(waiting, job_result, evaluate, num_workers)
    elif num_workers == 1:
        results = ((job, job_result(evaluate, groups)) for job, groups in waiting)
    else:
        results = _worker_results(waiting, evaluate, num_workers)
    with closing(results):
        for job, result in results:
            if result.failure:
                raise _Stopped(result.failure, result.details)
            yield job, result


def _worker_results(
    waiting: Iterator[tuple[list, list]], evaluate: Evaluate, num_workers: int
) -> Generator[tuple[list, JobResult]]:
    """Yield (job, its result) of jobs given as (job, payload), computed by worker processes.

    Workers are spawned, not forked, and read jobs from a pipe of their own, so that either side sees at once that the
    other has died.
    """
    busy: dict[Pipe, list] = {}
    crew: dict[Pipe, BaseProcess] = {}

    def send_next(pipe: Pipe) -> None:
        if (job := next(waiting, None)) is not None:
            pipe.send(job[1])
            busy[pipe] = job[0]

    try:
        _start(crew, num_workers)
        for pipe in crew:
            pipe.send(evaluate)
            send_next(pipe)
        while busy:
            ready = set(pipes.wait(list(busy)))
            for pipe in [pipe for pipe in busy if pipe in ready]:
                result = pipe.recv()
                done = busy.pop(pipe)
                send_next(pipe)
                yield done, result
    except (EOFError, ConnectionError):
        ended = pipes.wait([process.sentinel for process in crew.values()], 5)
        dead = next((process for process in crew.values() if process.sentinel in ended), None)
        if dead:
            dead.join(5)  # its exit code is known a moment later
        code = dead.exitcode if dead else None
        raise _Stopped(f"a worker process died (exit code {code}); was memory short?", "") from None
    finally:
        for pipe, process in crew.items():
            pipe.close()
            process.terminate()
            process.join()


def _start(crew: dict[Pipe, BaseProcess], num_workers: int) -> None:
    context = multiprocessing.get_context("spawn")
    with _sigint_held_back():
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()  # so that a worker's death closes its pipe
            crew[ours] = process


def _work(pipe: Pipe) -> None:
    """Run a worker: take the function, then jobs until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent decides
    os.environ["OMP_NUM_THREADS"] = "1"  # before the function's modules are loaded: there is a process a core
    trouble = None
    try:
        try:
            evaluate = pipe.recv()
        except (ImportError, AttributeError) as error:
            trouble = JobResult(failure=f"a worker cannot load the function: {error}", details=traceback.format_exc())
        while True:
            job = pipe.recv()
            pipe.send(trouble or job_result(evaluate, job))
    except (EOFError, ConnectionError):
        return  # the parent is done, or gone


@contextmanager
def _sigint_held_back():
    """Hold SIGINT back: processes started inside never see it, this process gets it afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # its start, left to the first process's, would let SIGINT through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
