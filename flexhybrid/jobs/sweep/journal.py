"""A sweep's journal: results on the disk as they come, keyed by their points, so that a killed sweep continues.

One JSON object a line. The first names the grid and the version of the project; every other holds a point's hash and
its row.
"""

import json
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from flexhybrid.core.errors import InputError, file_errors
from flexhybrid.core.files import lock_file

MARK = b'{"format": "flexhybrid-sweep-1"'
#: Larger files that a grid names (weights) are no settings and are not read.
MAX_SETTING_BYTES = 1 << 24


@dataclass(frozen=True)
class JobResult:
    """The journal lines of a job in the order of its points, or why it failed."""

    lines: list[bytes] = field(default_factory=list)
    failure: str = ""
    details: str = ""


@dataclass
class Journal:
    """The results on disk. ``offsets``: where the line of each point begins, -1 where the point is not done."""

    path: Path
    file: BinaryIO
    offsets: array

    @property
    def num_done(self) -> int:
        return len(self.offsets) - self.offsets.count(-1)

    def append(self, indices: list[int], lines: list[bytes]) -> None:
        """Write the lines of the points at ``indices`` and wait until they are on the disk."""
        offset = self.file.seek(0, os.SEEK_END)
        self.file.write(b"".join(lines))
        self.file.flush()
        os.fsync(self.file.fileno())
        for index, line in zip(indices, lines, strict=True):
            self.offsets[index] = offset
            offset += len(line)

    def row(self, index: int) -> dict:
        self.file.seek(self.offsets[index])
        return json.loads(self.file.readline())["row"]

    def close(self) -> None:
        self.file.close()


def open_journal(out: Path, identity: dict, ids: list[str], fresh: bool) -> Journal:
    """Open the journal of a sweep for this process alone, with the results that an earlier run left in it.

    Cut off a torn last line (a kill while writing). Raise InputError where the file belongs to another sweep.
    """
    path = out.with_name(out.name + ".partial")
    header = {**json.loads(MARK + b"}"), **identity}
    with file_errors(f"write {path}", "; choose another --out"):
        file = open(path, "a+b")  # noqa: SIM115 (the journal's owner closes it)
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
            index = index_of[entry["point"]]
            if not line.endswith(b"\n") or not isinstance(entry["row"], dict):
                break
        except (ValueError, KeyError, TypeError):
            break
        journal.offsets[index] = end
        end += len(line)
    file.truncate(end)


def grid_hash(points: list[dict], ids: list[str]) -> str:
    """Return a hash of the points and of the small files that they name: a changed hardware file makes another grid."""
    digest = sha256("".join(sorted(ids)).encode())
    named = {value for point in points for value in point.values() if isinstance(value, str)}
    for value in sorted(named):
        for path in (Path(value), Path(value) / "config.json"):
            if len(value) < 256 and path.is_file() and path.stat().st_size <= MAX_SETTING_BYTES:
                digest.update(value.encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def version_hash(evaluate: Callable) -> str:
    """Return a hash of the sources that results come from, and of the name of ``evaluate``."""
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
