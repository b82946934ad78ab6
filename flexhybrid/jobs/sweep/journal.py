"""A sweep's journal: results on the disk as they come, keyed by their points, so that a killed sweep continues.

One JSON object a line. The first names the grid and the version of the project; every other holds a point's hash and
its row.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from flexhybrid.core.errors import InputError
from flexhybrid.core.files import lock_file

MARK = b'{"format": "flexhybrid-sweep-1"'
#: Larger files that a grid names (weights) are no settings and are not read.
MAX_SETTING_BYTES = 1 << 24


@dataclass(frozen=True)
class JobResult:
    """What a job gave: journal lines in the order of its points, or why it failed."""

    lines: list[bytes] = field(default_factory=list)
    columns: dict[tuple[str, ...], int] = field(default_factory=dict)  #: a row's keys -> first line that has them
    num_errors: int = 0
    failure: str = ""
    details: str = ""


@dataclass
class Journal:
    """Results on disk as they come. ``offsets``: of every point's line, -1 where it is not done."""

    path: Path
    file: BinaryIO
    offsets: array
    columns: dict[tuple[str, ...], int] = field(default_factory=dict)  #: a row's keys -> first point that has them
    num_done: int = 0
    num_errors: int = 0

    def append(self, indices: list[int], outcome: JobResult) -> None:
        """Write a job's lines and wait until they are on the disk."""
        offset = self.file.seek(0, os.SEEK_END)
        self.file.write(b"".join(outcome.lines))
        self.file.flush()
        os.fsync(self.file.fileno())
        for index, line in zip(indices, outcome.lines, strict=True):
            self.offsets[index] = offset
            offset += len(line)
        for columns, position in outcome.columns.items():
            self._saw(columns, indices[position])
        self.num_done += len(indices)
        self.num_errors += outcome.num_errors

    def found(self, index: int, offset: int, row: dict) -> None:
        """Note a line that an earlier run left."""
        self.num_done += self.offsets[index] < 0
        self.num_errors += bool(row.get("error"))
        self.offsets[index] = offset
        self._saw(tuple(row), index)

    def _saw(self, columns: tuple[str, ...], index: int) -> None:
        self.columns[columns] = min(index, self.columns.get(columns, index))

    def row(self, index: int) -> dict:
        self.file.seek(self.offsets[index])
        return json.loads(self.file.readline())["row"]

    def close(self) -> None:
        self.file.close()


def open_journal(out: Path, identity: dict, ids: list[str], fresh: bool) -> Journal:
    """The journal of this sweep, opened for one process; what an earlier run left in it is taken over.

    A torn tail (a kill while writing) is cut off. Raises InputError where the file is another sweep's.
    """
    path = out.with_name(out.name + ".partial")
    header = {**json.loads(MARK + b"}"), **identity}
    try:
        file = open(path, "a+b")  # noqa: SIM115 (the journal's owner closes it)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; choose another --out") from None
    try:
        lock_file(file.fileno(), f"another sweep is writing {path}; wait for it, or choose another --out")
        file.seek(0)
        first = file.readline()
        if fresh or not first or (not first.endswith(b"\n") and MARK.startswith(first[: len(MARK)])):
            file.truncate(0)
            file.write(json.dumps(header).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        else:
            _check_header(path, first, header)
        journal = Journal(path, file, array("q", [-1]) * len(ids))
        _read_journal(journal, {point: index for index, point in enumerate(ids)})
        return journal
    except BaseException:
        file.close()
        raise


def _check_header(path: Path, first: bytes, header: dict) -> None:
    try:
        earlier = json.loads(first)
    except ValueError:
        earlier = None
    if not isinstance(earlier, dict) or earlier.get("format") != header["format"]:
        raise InputError(f"{path} is not a sweep's journal; move it away, or overwrite it with --fresh")
    for key, origin in (
        ("grid", "of another grid, or of other files that it names"),
        ("version", "of another version of the project"),
    ):
        if earlier.get(key) != header[key]:
            raise InputError(
                f"{path} holds results {origin}; finish that sweep, choose another --out, or discard them with --fresh"
            )


def _read_journal(journal: Journal, index_of: dict[str, int]) -> None:
    file = journal.file
    file.seek(0)
    end = len(file.readline())
    for line in file:
        try:
            entry = json.loads(line)
            index, row = index_of[entry["point"]], entry["row"]
            complete = line.endswith(b"\n") and isinstance(row, dict)
        except (ValueError, KeyError, TypeError):
            complete = False
        if not complete:
            break
        journal.found(index, end, row)
        end += len(line)
    file.truncate(end)


def grid_hash(points: list[dict], ids: list[str]) -> str:
    """Of the points, and of the small files that they name: a changed hardware file makes another grid."""
    digest = sha256("".join(sorted(ids)).encode())
    named = {value for point in points for value in point.values() if isinstance(value, str)}
    for value in sorted(named):
        for path in (Path(value), Path(value) / "config.json"):
            if len(value) < 256 and path.is_file() and path.stat().st_size <= MAX_SETTING_BYTES:
                digest.update(value.encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def version_hash(evaluate: Callable) -> str:
    """Of the sources that results come from, and of the function's name."""
    import flexhybrid

    root = Path(flexhybrid.__file__).parent.parent
    digest = sha256(flexhybrid.__version__.encode())
    for folder in ("flexhybrid/core", "flexhybrid/jobs", "sim", "policy_search"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    function = getattr(evaluate, "func", evaluate)  # a functools.partial's
    digest.update(f"{function.__module__}.{function.__qualname__}".encode())
    return digest.hexdigest()[:24]
