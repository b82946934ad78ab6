"""The table of a sweep: a CSV file with a header and one row per point, in the order of the points."""

import contextlib
import csv
import io
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from flexhybrid.core.errors import InputError, file_errors
from flexhybrid.core.files import lock_file, new_file

ERROR = "error"  #: the last column: why a point cannot run


class Table:
    """A CSV file that this process alone writes. At any time it holds the rows of the first ``num_rows`` points."""

    def __init__(self, path: Path, points: list[dict], fresh: bool) -> None:
        """Open the file and keep the rows of an earlier run, except a torn last one. ``fresh``: drop them all.

        Raise InputError if the file is not of this sweep, if another sweep writes it, or if it cannot be written.
        """
        self.path, self.points = path, points
        self.keys = list(dict.fromkeys(itertools.chain(*points)))
        self.columns: list[str] = []
        self.num_rows = self.num_errors = 0
        #: index of a point -> its kept row; together they have every text of the kept points
        self.samples: dict[int, dict[str, str]] = {}
        self._sampled: set[str] = set()
        self.file = _locked(path)
        self.file.truncate(0 if fresh else self._read())

    def append(self, rows: list[dict]) -> None:
        """Write the rows of the next points and flush them, so that a kill of this process loses none of them."""
        columns = dict.fromkeys(itertools.chain(self.columns or self.keys, *rows))
        columns = [*(name for name in columns if name != ERROR), ERROR]
        if columns != self.columns:
            self._write_header(columns)
        points = self.points[self.num_rows : self.num_rows + len(rows)]
        whole = [{**row, **point} for row, point in zip(rows, points, strict=True)]
        self.file.write(_csv([map(row.get, columns) for row in whole]))
        self.file.flush()
        self.num_rows += len(rows)
        self.num_errors += sum(bool(row.get(ERROR)) for row in rows)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, which ``append`` has raised already
            self.file.close()

    def _write_header(self, columns: list[str]) -> None:
        """Give the table other columns. The file is replaced at once: a kill leaves the old one or the new one."""
        with new_file(self.path, durable=False) as wider:
            wider.write(_csv([columns]))
            self.file.seek(0)
            for row in csv.DictReader(line.decode() for line in self.file):
                wider.write(_csv([map(row.get, columns)]))
            self.file.close()
        self.file, self.columns = _locked(self.path), columns

    def _read(self) -> int:
        """Read the header and the rows of the file; return the bytes up to the end of its last whole line."""
        expected = ([cell(point.get(key)) for key in self.keys] for point in self.points)
        end = 0
        self.file.seek(0)
        for number, line in enumerate(self.file, start=1):
            is_whole = line.endswith(b"\n")
            if end and not is_whole:
                break  # torn by a kill; the header never is
            row = _cells(line) if is_whole else []
            values = next(expected, None) if end else self.keys
            if row[: len(self.keys)] != values or len(row) != len(self.columns or row):
                raise InputError(
                    f"{self.path} is not a table of this sweep (line {number} differs); choose another --out, or "
                    "overwrite it with --fresh"
                )
            if end:
                self._keep(dict(zip(self.columns, row, strict=True)))
            else:
                self.columns = row
            end += len(line)
        return end

    def _keep(self, row: dict[str, str]) -> None:
        """Count the row of the next point; make it a sample if its point has a text that no sample has yet."""
        texts = {value for value in self.points[self.num_rows].values() if isinstance(value, str)}
        if not texts <= self._sampled:
            self._sampled |= texts
            self.samples[self.num_rows] = row
        self.num_rows += 1
        self.num_errors += bool(row.get(ERROR))


def cell(value) -> str:
    """Return a value as the table holds it, in one line; nothing for None and NaN."""
    return "" if value is None or value != value else str(value).replace("\n", " ")


def _cells(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode(errors="replace")]))
    except csv.Error:  # another kind of file
        return []


def _csv(rows: Iterable[Iterable]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(map(cell, row) for row in rows)
    return text.getvalue().encode()


def _locked(path: Path) -> BinaryIO:
    """Open a file to read and append; no other process may."""
    with file_errors(f"write {path}", "; choose another --out"):
        file = open(path, "a+b")  # noqa: SIM115 (``Table.close`` closes it)
    lock_file(file.fileno(), f"another sweep is writing {path}; wait for it, or choose another --out")
    return file
