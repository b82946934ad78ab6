"""Evaluates the points of a grid on all cores into one CSV table.

    GRID.json|toml ──read_points──▶ [point, …] ──run_sweep──▶ OUT.csv

The caller gives the function that evaluates points (``simulated.evaluate``). Rows are written as they come. Points that
the table already has are not evaluated again.
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

#: Returns a row of numbers and texts for each point; {"error": reason} for a point that cannot run. A module's
#: function, as workers import it by name.
Evaluate = Callable[[list[dict]], list[dict]]

ERROR = "error"  #: the last column: reason why a point cannot run
MAX_PART = 1024  #: most points of a part, which a worker evaluates in one call
PARTS = 8  #: least parts per worker


@dataclass(frozen=True)
class SweepSummary:
    """The counts of a sweep."""

    num_points: int
    num_resumed: int  #: points that were in the table before
    num_errors: int  #: rows with a text in column ``error``
    seconds: float
    path: Path


class SweepTable:
    """A locked CSV file with the columns ``keys`` of the points, the names of the results, and ``error``."""

    def __init__(self, path: Path, keys: Sequence[str], fresh: bool) -> None:
        """Open the file and keep its complete rows, unless ``fresh``.
        Raise InputError if it has other keys, if another sweep writes it, or if it cannot be written."""
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
        whole = content[: content.rfind(b"\n") + 1]  # without a last row that a kill left incomplete
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
        """Write and flush rows that include the points' keys. New columns are inserted before ``error``."""
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

    ``workers``: number of processes (None: all cores; 1: only this process). ``fresh``: overwrite the table.
    ``quiet``: no progress bar. Raise InputError, before any work, for a wrong output or number of workers or a table
    with other keys; and if a worker process dies.
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
            f"sweep stopped: a worker process died, perhaps for lack of memory. The same command continues {out}"
        ) from None
    return SweepSummary(len(points), len(points) - len(todo), table.num_errors, time.perf_counter() - began, out)


def cell(value) -> str:
    """Return a value as the one-line text of a table cell; "" for None and NaN."""
    return "" if value is None or value != value else str(value).replace("\n", " ")


@contextmanager
def _evaluated(
    evaluate: Evaluate, points: list[dict], workers: int
) -> Iterator[Iterator[tuple[list[dict], list[dict]]]]:
    """Yield an iterator over (points, their rows), part by part.

    Worker processes, which end with the block, compute the rows. They are spawned, as this process may have threads.
    """
    size = min(MAX_PART, math.ceil(len(points) / (PARTS * workers))) or 1
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    if min(workers, len(parts)) <= 1:
        yield zip(parts, map(evaluate, parts), strict=True)
        return
    pool = ProcessPoolExecutor(min(workers, len(parts)), multiprocessing.get_context("spawn"), _prepare_worker)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers inherit this: only this process handles Ctrl-C
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
    """Limit this worker to one thread, and end it when its parent is killed: it would wait for work forever."""
    os.environ["OMP_NUM_THREADS"] = "1"  # set before numpy is loaded; there is one process per core

    def end_with_parent() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
