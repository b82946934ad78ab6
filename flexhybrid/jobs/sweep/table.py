"""The sweep job: points of a grid, evaluated on all cores into one CSV table.

    GRID.json|toml ──read_points──▶ [point, …] ──run_sweep──▶ OUT.csv

It knows no simulator: the caller gives the function that evaluates points (``simulated.evaluate``). Rows are written as
they come. Points whose rows the table has already are not evaluated again.
"""

import csv
import io
import itertools
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from flexhybrid.core.errors import InputError, check, file_errors, is_integer
from flexhybrid.core.files import check_new_file, lock_file

#: Takes points, returns a row of plain numbers and text for each; {"error": why} for a point that cannot run.
#: Importable by name (workers load it).
Evaluate = Callable[[list[dict]], list[dict]]

ERROR = "error"  #: the last column: why a point cannot run
MAX_PART = 1024  #: points that are evaluated at once
PARTS = 8  #: of each worker, or more


@dataclass(frozen=True)
class SweepSummary:
    """``num_resumed``: points whose rows the table had before. ``num_errors``: rows with a text in column ``error``."""

    num_points: int
    num_resumed: int
    num_errors: int
    seconds: float
    path: Path


class SweepTable:
    """A CSV file that this process alone writes. Columns: ``keys`` of the points, the results' names, ``error``."""

    def __init__(self, path: Path, keys: Sequence[str], fresh: bool) -> None:
        """Open the file and keep its whole rows, unless ``fresh``. Raise InputError if it has other keys, if another
        sweep writes it, or if it cannot be written."""
        with file_errors(f"write {path}", "; choose another --out"):
            path.parent.mkdir(parents=True, exist_ok=True)
            check_new_file(path)
            self.file = open(path, "a+b")  # noqa: SIM115 (``run_sweep`` closes it)
        lock_file(self.file.fileno(), f"another sweep is writing {path}; wait for it, or choose another --out")
        if fresh:
            self.file.truncate(0)
        self.keys, self.columns = list(keys), [*keys, ERROR]
        self.num_errors = 0
        self.cells_of_points: set[tuple[str, ...]] = set()
        self.file.seek(0)
        content = self.file.read()
        whole = content[: content.rfind(b"\n") + 1]  # a kill may have torn the last row
        try:
            lines = list(csv.reader(io.StringIO(whole.decode(errors="replace"), newline="")))
        except csv.Error:  # another kind of file
            lines = []
        columns = lines[0] if lines else []
        is_table = columns[: len(keys)] == self.keys and columns[-1] == ERROR
        if content and not (is_table and all(len(line) == len(columns) for line in lines)):
            raise InputError(
                f"{path} is not a table of this grid's keys ({', '.join(keys)}); choose another --out, or overwrite "
                "it with --overwrite"
            )
        self.file.truncate(len(whole))
        if lines:
            self.columns = columns
            self._count(lines[1:])

    def append(self, rows: list[dict]) -> None:
        """Write rows with the points' keys and flush them. New columns come before ``error``."""
        columns = [*dict.fromkeys(name for name in itertools.chain(self.columns, *rows) if name != ERROR), ERROR]
        if columns != self.columns or not self.cells_of_points:
            self.file.seek(0)
            before = list(csv.DictReader(io.StringIO(self.file.read().decode(), newline="")))
            self.file.truncate(0)
            self.columns = columns
            self._write([columns, *([row.get(name) for name in columns] for row in before)])
        lines = [[cell(row.get(name)) for name in columns] for row in rows]
        self._write(lines)
        self._count(lines)

    def _write(self, lines: Iterable[Iterable]) -> None:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(lines)
        self.file.write(text.getvalue().encode())
        self.file.flush()

    def _count(self, lines: list[list[str]]) -> None:
        self.cells_of_points.update(tuple(line[: len(self.keys)]) for line in lines)
        self.num_errors += sum(bool(line[-1]) for line in lines)


def run_sweep(
    points: list[dict],
    out: Path,
    evaluate: Evaluate,
    workers: int | None = None,
    fresh: bool = False,
    quiet: bool = False,
) -> SweepSummary:
    """Evaluate every point that the table ``out`` does not have yet; write the rows in the points' order.

    ``workers``: processes (None: all cores; 1: this process); ``fresh``: overwrite the table; ``quiet``: no progress
    bar. Raises InputError before any work for a wrong output or number of workers and for a table of other keys, and
    where a worker process dies.
    """
    began = time.perf_counter()
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    check("workers", workers, is_integer(workers) and workers >= 1, "a whole number >= 1")
    if out.suffix.lower() != ".csv":
        raise InputError(f"--out {out}: a table is a .csv file, not {out.suffix or 'one without a suffix'}")
    table = SweepTable(out, list(dict.fromkeys(itertools.chain(*points))), fresh)
    known = table.cells_of_points
    todo = [point for point in points if tuple(cell(point.get(key)) for key in table.keys) not in known]
    hidden = quiet or not sys.stderr.isatty()
    bar = tqdm(total=len(todo), desc="sweep", unit="point", disable=hidden, leave=False)
    try:
        with table.file, bar, _evaluated(evaluate, todo, workers) as parts:
            for part, rows in parts:
                table.append([{**row, **point} for row, point in zip(rows, part, strict=True)])
                bar.update(len(rows))
    except BrokenProcessPool:
        raise InputError(
            f"sweep stopped: a worker process died; was memory short? The same command computes what {out} lacks"
        ) from None
    return SweepSummary(len(points), len(points) - len(todo), table.num_errors, time.perf_counter() - began, out)


def cell(value) -> str:
    """Return a value as the table holds it, in one line; nothing for None and NaN."""
    return "" if value is None or value != value else str(value).replace("\n", " ")


@contextmanager
def _evaluated(
    evaluate: Evaluate, points: list[dict], workers: int
) -> Iterator[Iterator[tuple[list[dict], list[dict]]]]:
    """Yield an iterator over (points, their rows), part by part.

    Worker processes compute them and end with the block. They are spawned, not forked: this process may have threads.
    """
    size = min(MAX_PART, math.ceil(len(points) / (PARTS * workers))) or 1
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    if min(workers, len(parts)) <= 1:
        yield zip(parts, map(evaluate, parts), strict=True)
        return
    pool = ProcessPoolExecutor(min(workers, len(parts)), multiprocessing.get_context("spawn"), _prepare_worker)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers inherit this: Ctrl-C is for this process
    try:
        results = pool.map(evaluate, parts)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield zip(parts, results, strict=True)
    finally:
        for process in multiprocessing.active_children():
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
