"""The output file, with one line per answered or refused request. It alone records which requests are done.

Lines are appended and never changed; ``id`` has the line number in the input. Each group of lines is one write. After a
failed write, the file is cut to end with a complete line. A process that dies during a write leaves at most one
incomplete line, which the next run cuts. While the disk is full, lines wait in memory and the run continues.
"""

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
from tqdm import tqdm

from flexhybrid.batch.replies import parse_answer, renumbered
from flexhybrid.core.errors import FULL, InputError, file_error, file_errors
from flexhybrid.core.files import lock_file, new_file

SYNC_RESULTS, SYNC_S = 256, 1.0  #: number of lines, or seconds, after which written lines are synced to the disk
NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
RETRY_S = 2.0  #: seconds between attempts to write to a full disk
MOST_WAITING_BYTES = 1 << 28  #: most bytes of lines that wait in memory
ROOM_WAIT_S = 600.0  #: seconds that a run with all requests done waits for a full disk
MOST_TOKENS = 1 << 30  #: limit on a line's token count, against wrong numbers in the file
PENDING, ANSWERED, FAILED, BLANK = 0, 1, 2, 3  #: states of an input line: not done, answered, refused, empty


class Kept(NamedTuple):
    """The state of an output file. One tuple, so that it stays consistent if an interrupt comes at any statement."""

    size: int  #: bytes that are written and counted
    waiting: bytes = b""  #: complete lines to write after them


class AnswerFile:
    """An output file, locked by this process until it is closed.
    Before the first ``append``, call ``clear``, or ``check`` and ``repair``."""

    def __init__(self, path: Path):
        """Open and lock the file. Raise InputError if it cannot be written, or another process writes it."""
        self.path = path
        self._kept, self._lacks_end, self._unsynced, self._synced_at = Kept(0), False, 0, time.monotonic()
        self._retry_at = 0.0  # time of the next attempt to write to a full disk; 0: the disk is not full
        self._failure: InputError | None = None
        with file_errors(f"write {path}"):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o644)
            try:
                self._lock()
            except BaseException:
                self.close()
                raise

    def _lock(self) -> None:
        """Lock the open file. Raise InputError if another process has locked or replaced it."""
        lock_file(self._fd, f"another run is writing {self.path}; wait for it, or choose another output")
        # Another run may have replaced the file by a sorted one after it was opened here.
        if not self.path.exists() or os.fstat(self._fd).st_ino != self.path.stat().st_ino:
            raise InputError(f"another run has just ended and replaced {self.path}; try again")

    @property
    def is_empty(self) -> bool:
        return os.fstat(self._fd).st_size == 0

    def check(self, states: np.ndarray, num_tokens: np.ndarray | None = None) -> None:
        """Set ``states`` [lines] of done lines, and ``num_tokens`` [lines] of their answers.

        ``states`` may have entries from other files. Raise InputError for a complete line that does not answer a line
        of the input, or answers one a second time.
        """
        size, ends_line = 0, True
        with file_errors(f"read {self.path}"), open(self.path, "rb") as file:
            for number, raw in enumerate(file, 1):
                ends_line = raw.endswith(b"\n")
                answer = parse_answer(raw)
                if answer is None and not ends_line:
                    ends_line = True
                    break  # an incomplete line, which is never valid
                where = f"{self.path}, line {number}"
                again = "nothing was changed: move the file away, or start over with --overwrite"
                if answer is None or not 1 <= answer.number <= len(states):
                    raise InputError(f"{where} is not an answer to a line of the input; {again}")
                if states[answer.number - 1] != PENDING:
                    raise InputError(f"{where} answers line {answer.number} of the input again; {again}")
                states[answer.number - 1] = ANSWERED if answer.answered else FAILED
                if num_tokens is not None:
                    num_tokens[answer.number - 1] = min(max(answer.num_tokens, 0), MOST_TOKENS)
                size += len(raw)
        self._kept, self._lacks_end = Kept(size), not ends_line

    def repair(self) -> None:
        """Cut the incomplete last line that ``check`` found, or add the end of a line that lacks only that."""
        with file_errors(f"write {self.path}"):
            os.ftruncate(self._fd, self._kept.size)
            if self._lacks_end:
                self._kept = Kept(self._kept.size + os.write(self._fd, b"\n"))
        self.sync()

    def places_in(self, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each answer's offset in the file, and its place in another input; -1 if that lacks the line.
        ``lines`` [lines]: the hash of each line of the other input. Raise InputError for a complete line that is not
        an answer."""
        found, offset = [], 0
        with open(self.path, "rb") as file:
            for raw in file:
                if ((answer := parse_answer(raw)) is None or not answer.number) and raw.endswith(b"\n"):
                    raise InputError(f"{self.path} has other lines; move it away, or start over with --overwrite")
                if answer and answer.answered:
                    found.append((offset, answer.number - 1, answer.digest))
                offset += len(raw)
        offsets, numbers, digests = np.array(found, dtype=np.uint64).reshape(-1, 3).T
        return offsets.astype(np.int64), _places(numbers.astype(np.int64), digests, lines)

    def move_to(self, offsets: np.ndarray, places: np.ndarray, custom_id: Callable[[int], str | None]) -> Path:
        """Keep the answers to lines of another input, under its line numbers; move the others to a second file.
        ``offsets``, ``places``: result of ``places_in``. ``custom_id(number)`` returns the custom_id of a line of the
        other input. Return the path of the second file."""
        beside, pairs = self.path.with_name(self.path.name + ".removed"), list(zip(offsets.tolist(), places.tolist()))
        with open(self.path, "rb") as file, file_errors(f"write {beside}"):
            if (places < 0).any():
                with open(beside, "ab") as removed:
                    removed.writelines(_line_at(file, offset) for offset, place in pairs if place < 0)
            kept = ((_line_at(file, offset), place + 1) for offset, place in pairs if place >= 0)
            with new_file(self.path) as moved:
                moved.writelines(renumbered(raw, number, custom_id(number)) for raw, number in kept)
        self.close()
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | getattr(os, "O_CLOEXEC", 0))
        self._lock()
        return beside

    def clear(self) -> None:
        """Remove all lines."""
        with file_errors(f"write {self.path}"):
            os.ftruncate(self._fd, 0)
        self._kept = Kept(0)
        self.sync()

    def append(self, lines: list[bytes]) -> None:
        """Write complete lines, or keep them in memory while the disk is full.
        Raise InputError if writing fails for another reason, or if MOST_WAITING_BYTES wait. After that, the file keeps
        its complete lines, and every later write fails."""
        self._kept = self._kept._replace(waiting=self._kept.waiting + b"".join(lines))
        if self._kept.waiting and (not self._retry_at or time.monotonic() >= self._retry_at):
            self._write_waiting()
        if len(self._kept.waiting) > MOST_WAITING_BYTES:
            self._fail(NO_ROOM)
        self.sync_if_due()

    def finish(self) -> None:
        """Wait until all lines are on the disk. Raise InputError if the disk is full for ROOM_WAIT_S."""
        until = time.monotonic() + ROOM_WAIT_S
        while self._kept.waiting:
            self._write_waiting()
            if self._kept.waiting and time.monotonic() >= until:
                self._fail(NO_ROOM)
            if self._kept.waiting:
                time.sleep(RETRY_S)
        self.sync()

    def _write_waiting(self) -> None:
        """Write the waiting lines, or those that fit a full disk."""
        if self._failure:
            raise self._failure
        (size, data), full = self._kept, self._retry_at > 0
        written = self._written_before(size, data)
        try:
            while written < len(data):  # a nearly full disk takes a part; the next write then raises
                written += os.write(self._fd, data[written:])
        except OSError as error:
            written = data.rfind(b"\n", 0, written) + 1
            try:
                os.ftruncate(self._fd, size + written)
            except OSError:  # the next run will cut the file
                self._fail(error)
            if error.errno not in FULL:
                self._fail(error)
            if not full:
                self._say(f"cannot write {self.path}: {error.strerror}; answers wait in memory: make room")
            self._retry_at = time.monotonic() + RETRY_S
        else:
            if full:
                self._say(f"{self.path} can be written again: the waiting answers are written")
            self._retry_at = 0.0
        self._kept = Kept(size + written, data[written:])
        self._unsynced += data.count(b"\n", 0, written)

    def _written_before(self, size: int, data: bytes) -> int:
        """Return the number of bytes of ``data`` that the file has after ``size`` already.
        There are some if an interrupt (Ctrl-C) came between their write and their count."""
        with file_errors(f"read {self.path}"):
            written = os.fstat(self._fd).st_size - size
        if written and (written < 0 or os.pread(self._fd, written, size) != data[:written]):
            self._fail(OSError("another process has changed the file"))
        return written

    def _fail(self, error: OSError) -> NoReturn:
        """Raise the error as InputError, and make later writes raise it too."""
        self._failure = file_error(f"write {self.path}", error)
        raise self._failure from None

    def _say(self, text: str) -> None:
        """Print a line above a progress bar."""
        tqdm.write(f"flexhybrid: {text}", file=sys.stderr)

    def sync_if_due(self) -> None:
        """Sync the file to the disk from time to time, so that a power failure loses few answers."""
        overdue = time.monotonic() - self._synced_at >= SYNC_S
        if self._unsynced >= SYNC_RESULTS or (self._unsynced and overdue):
            self.sync()

    def sync(self) -> None:
        with file_errors(f"write {self.path}"):
            os.fsync(self._fd)
        self._unsynced, self._synced_at = 0, time.monotonic()

    def close(self) -> None:
        """Release the file and its lock."""
        os.close(self._fd)

    def sort(self, num_lines: int) -> None:
        """Replace the file by one with the lines in the input's order, in one step."""
        places = np.full(num_lines, -1, dtype=np.int64)
        offset, last, ordered = 0, 0, True
        with file_errors(f"sort {self.path}"), open(self.path, "rb") as file:
            for raw in file:
                if (answer := parse_answer(raw)) is None:
                    raise InputError(f"{self.path} was changed while it was sorted")
                number = answer.number
                places[number - 1] = offset
                ordered, last, offset = ordered and number > last, number, offset + len(raw)
            if ordered:
                return
            with new_file(self.path) as sorted_file:
                sorted_file.writelines(_line_at(file, place) for place in places[places >= 0].tolist())


def _places(numbers: np.ndarray, digests: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """Return each answer's place among the hashes of the new ``lines``, by its old place and hash; -1: none.
    Of equal lines, those that stay at their place keep their answer; the others keep the order of their answers."""
    same = numbers < len(lines)
    same[same] = lines[numbers[same]] == digests[same]
    places = np.where(same, numbers, -1)
    free = np.setdiff1d(np.arange(len(lines)), places)
    free = free[np.argsort(lines[free], kind="stable")]
    left = np.flatnonzero(~same)
    left = left[np.lexsort((numbers[left], digests[left]))]
    first, last = (np.searchsorted(lines[free], digests[left], side) for side in ("left", "right"))
    at = first + np.arange(len(left)) - np.searchsorted(digests[left], digests[left])
    places[left[at < last]] = free[at[at < last]]
    return places


def _line_at(file, offset: int) -> bytes:
    file.seek(offset)
    return file.readline()
