"""The output file, the only truth about what is done: one line a request, appended and never changed.

An answer and its done mark are the same line, keyed by the input's line number in ``id``. Lines are written in groups,
each by a single write to a file opened for appending; what a failed write leaves is cut off again. A process that dies
in the middle of a write leaves at most a torn last line, which the next one cuts once, when it opens the file.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from flexhybrid.batch.replies import parse_answer
from flexhybrid.core.errors import InputError, file_errors
from flexhybrid.core.files import lock_file

SYNC_RESULTS, SYNC_S = 256, 1.0  #: results, or seconds, after which what was written is waited for
PENDING, ANSWERED, FAILED = 0, 1, 2  #: of a line: not done, an answer, an error


class AnswerFile:
    """An output file, locked by this process until it is closed or dead. Before the first ``append``: ``clear``, or
    ``check`` and ``repair``."""

    def __init__(self, path: Path):
        """Raises InputError where it cannot be written, or another process is writing it."""
        self.path = path
        self._size, self._lacks_end, self._unsynced, self._synced_at = 0, False, 0, time.monotonic()
        with file_errors(f"write {path}"):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            self._lock()
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        """One writer a file."""
        lock_file(self._fd, f"another run is writing {self.path}; wait for it, or choose another output")
        # Its writer may have put an ordered file in the place of the one opened here.
        if not self.path.exists() or os.fstat(self._fd).st_ino != self.path.stat().st_ino:
            raise InputError(f"another run has just ended and replaced {self.path}; try again")

    @property
    def is_empty(self) -> bool:
        return os.fstat(self._fd).st_size == 0

    def check(self, states: np.ndarray) -> None:
        """Enter what is done into ``states`` [lines], which may hold what other files have answered.

        Raises InputError for a whole line that is no answer to a line of the input, or for a second answer to one.
        """
        size, ends_line = 0, True
        with open(self.path, "rb") as file:
            for number, raw in enumerate(file, 1):
                ends_line = raw.endswith(b"\n")
                answer = parse_answer(raw)
                if answer is None and not ends_line:
                    ends_line = True
                    break  # torn: of a valid line no shorter piece is valid
                where = f"{self.path}, line {number}"
                again = "nothing was changed: move the file away, or begin anew with --restart"
                if answer is None or not 1 <= answer[0] <= len(states):
                    raise InputError(f"{where} is not an answer to a line of the input; {again}")
                if states[answer[0] - 1] != PENDING:
                    raise InputError(f"{where} answers line {answer[0]} of the input again; {again}")
                states[answer[0] - 1] = ANSWERED if answer[1] else FAILED
                size += len(raw)
        self._size, self._lacks_end = size, not ends_line

    def repair(self) -> None:
        """Cut the torn tail that ``check`` found, or end a last line that lacks nothing else."""
        with file_errors(f"write {self.path}"):
            os.ftruncate(self._fd, self._size)
            if self._lacks_end:
                self._size += os.write(self._fd, b"\n")
        self.sync()

    def clear(self) -> None:
        """Begin anew."""
        with file_errors(f"write {self.path}"):
            os.ftruncate(self._fd, 0)
        self._size = 0
        self.sync()

    def append(self, lines: list[bytes]) -> None:
        """Write whole lines. Raise InputError where that fails; the lines that were written whole are kept."""
        if not lines:
            return
        data, written = b"".join(lines), 0
        try:
            while written < len(data):  # a disk that is nearly full takes a part, and says why with the next
                written += os.write(self._fd, data[written:])
        except OSError as error:
            whole = data.rfind(b"\n", 0, written) + 1
            with contextlib.suppress(OSError):  # else the next run cuts it
                os.ftruncate(self._fd, self._size + whole)
                self._size += whole
            raise InputError(
                f"cannot write {self.path}: {error.strerror}; what was written before is whole: make room and give the "
                "same command again"
            ) from None
        self._size += len(data)
        self._unsynced += len(lines)
        self.sync_if_due()

    def sync_if_due(self) -> None:
        """Wait for the disk now and then, so that a power failure costs little."""
        overdue = time.monotonic() - self._synced_at >= SYNC_S
        if self._unsynced >= SYNC_RESULTS or (self._unsynced and overdue):
            self.sync()

    def sync(self) -> None:
        with file_errors(f"write {self.path}"):
            os.fsync(self._fd)
        self._unsynced, self._synced_at = 0, time.monotonic()

    def close(self) -> None:
        """Let the file and its lock go."""
        os.close(self._fd)

    def sort(self, num_lines: int) -> None:
        """Put the lines in the input's order, in a new file that takes this one's place at once."""
        places = np.full(num_lines, -1, dtype=np.int64)
        offset, last, ordered = 0, 0, True
        with open(self.path, "rb") as file:
            for raw in file:
                if (answer := parse_answer(raw)) is None:
                    raise InputError(f"{self.path} was changed while it was put in order")
                number = answer[0]
                places[number - 1] = offset
                ordered, last, offset = ordered and number > last, number, offset + len(raw)
            if ordered:
                return
            write_durably((_line_at(file, place) for place in places[places >= 0].tolist()), self.path)


def _line_at(file, offset: int) -> bytes:
    file.seek(offset)
    return file.readline()


def write_durably(pieces: Iterable[bytes], path: Path) -> None:
    """Write ``path`` through a file beside it: it is whole, on the disk, or not changed."""
    with durable_file(path) as file:
        file.writelines(pieces)


@contextlib.contextmanager
def durable_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that takes the place of ``path`` when the block ends without an error: whole, on the disk."""
    partial = path.with_name(path.name + ".partial")
    with contextlib.ExitStack() as stack, file_errors(f"write {path}"):
        stack.callback(partial.unlink, missing_ok=True)
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        stack.callback(os.close, folder)
        os.fsync(folder)
