"""A file of requests: where its lines are, and a census of them that is small beside the file.

The census keeps where a line starts and how long its request is; the line is read again when its turn comes.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import numpy as np

from flexhybrid.batch.formats import MAX_LINE_BYTES, STDIN
from flexhybrid.batch.openai import URLS, Draft, Refused, Request, json_object
from flexhybrid.batch.requests import LineReader, LineRules
from flexhybrid.core.errors import InputError, file_errors
from flexhybrid.core.workload import Workload

CHUNK_LINES, CHUNK_BYTES = 1024, 1 << 22  #: of lines that are encoded together, at most
BLOCK_BYTES = 1 << 20  #: of the file that are searched for line ends at once


@dataclass(frozen=True)
class Census:
    """Counts of all lines of a file, by line number less one; 19 bytes a line."""

    offsets: np.ndarray  #: [lines + 1] int64, of the first byte of each line
    prompt_tokens: np.ndarray  #: [lines] int32; 0: the line is refused
    max_tokens: np.ndarray  #: [lines] int32
    num_answers: np.ndarray  #: [lines] int16, at least 1
    duplicates: np.ndarray  #: [lines] bool: an earlier line has the same custom_id
    sha256: str

    @property
    def num_lines(self) -> int:
        return len(self.prompt_tokens)

    def workload(self, places: np.ndarray) -> Workload:
        """Return the lengths of all answers of the lines at ``places`` (line numbers less one)."""
        each = np.repeat(places, self.num_answers[places])
        return Workload(self.prompt_tokens[each], self.max_tokens[each])

    @property
    def valid(self) -> np.ndarray:
        """[lines] whether it can be served."""
        return self.prompt_tokens > 0


def find_lines(lines: BinaryIO) -> tuple[np.ndarray, str]:
    """Return the offsets of the first bytes of all lines and of the file's end [lines + 1], and the file's sha256."""
    starts, digest, size = array("q", [0]), sha256(), 0
    lines.seek(0)
    while block := lines.read(BLOCK_BYTES):
        digest.update(block)
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + (size + 1)
        starts.frombytes(ends.astype(np.int64).tobytes())
        size += len(block)
    if starts[-1] != size:
        starts.append(size)
    return np.frombuffer(starts, np.int64), digest.hexdigest()


def read_lines(lines: BinaryIO, offsets: np.ndarray, first: int, last: int) -> Iterator[list[bytes]]:
    """Yield the lines ``first`` … ``last`` - 1 (numbers less one) in lists of at most CHUNK_LINES and CHUNK_BYTES; of a
    line beyond that, which stands alone, the first MAX_LINE_BYTES + 1 bytes."""
    while first < last:
        start = int(offsets[first])
        behind = int(np.searchsorted(offsets[: last + 1], start + CHUNK_BYTES, side="right")) - 1
        end = min(max(behind, first + 1), first + CHUNK_LINES)
        lines.seek(start)
        if end == first + 1:
            yield [lines.read(min(int(offsets[end]) - start, MAX_LINE_BYTES + 1))]
        else:
            data, places = lines.read(int(offsets[end]) - start), (offsets[first : end + 1] - start).tolist()
            yield [data[here:there] for here, there in zip(places, places[1:])]
        first = end


def take_census(
    lines: BinaryIO, read: LineReader, max_context: int, on_bytes: Callable[[int], object] | None = None
) -> Census:
    """Count the file: one pass for its lines, one for their requests, during which ``on_bytes(n)`` is called."""
    offsets, digest = find_lines(lines)
    num_lines = len(offsets) - 1
    prompts, limits = np.zeros(num_lines, np.int32), np.zeros(num_lines, np.int32)
    answers, duplicates = np.ones(num_lines, np.int16), np.zeros(num_lines, bool)

    def again(number: int) -> str | None:
        return _draft(read, next(read_lines(lines, offsets, number - 1, number))[0], number)[1]

    names, first = CustomIds(num_lines, again), 0
    for chunk in read_lines(lines, offsets, 0, num_lines):
        drafts: dict[int, Draft] = {}
        for place, raw in enumerate(chunk, first):
            draft, custom_id = _draft(read, raw, place + 1)
            duplicates[place] = custom_id is not None and names.stands_before(custom_id, place + 1)
            if draft is not None and not duplicates[place]:
                drafts[place] = draft
        for (place, draft), size in zip(drafts.items(), read.prompt_tokens(list(drafts.values()))):
            if size:
                limit = min(draft.params.max_tokens or max_context, max_context - size)
                prompts[place], limits[place], answers[place] = size, limit, draft.params.n
        first += len(chunk)
        if on_bytes:
            on_bytes(int(offsets[first] - offsets[first - len(chunk)]))
    return Census(offsets, prompts, limits, answers, duplicates, digest)


def _draft(read: LineReader, raw: bytes, number: int) -> tuple[Draft | None, str | None]:
    """Return what a line asks for, None where it is refused; and its custom_id, None where it cannot be read."""
    try:
        draft = read.draft(raw, number)
    except Refused as refused:
        return None, refused.custom_id
    return draft, draft.custom_id


class CustomIds:
    """The custom_ids of the lines so far; 14 to 20 bytes a line.

    A hash table with open addressing of line numbers, with 64 bits of each line's hash. Where they agree, the earlier
    line is read again: different names never count as one.
    """

    def __init__(self, num_lines: int, custom_id: Callable[[int], str | None]):
        """``custom_id(number)`` reads that of a line."""
        size = 1 << (num_lines + num_lines // 2).bit_length()
        self._mask, self._custom_id = size - 1, custom_id
        self._numbers = array("I", bytes(4 * size))  # 0: free
        self._hashes = array("q", bytes(8 * (num_lines + 1)))

    def stands_before(self, custom_id: str, number: int) -> bool:
        """Return whether an earlier line has this name; else enter it as that of line ``number``."""
        hashed = hash(custom_id)
        place = hashed & self._mask
        while earlier := self._numbers[place]:
            if self._hashes[earlier] == hashed and self._custom_id(earlier) == custom_id:
                return True
            place = (place + 1) & self._mask
        self._numbers[place], self._hashes[number] = number, hashed
        return False


def first_url(lines: BinaryIO) -> str | None:
    """Return the first endpoint that a line of a Batch file names; None when no line names one."""
    lines.seek(0)
    while raw := lines.readline(MAX_LINE_BYTES):
        try:
            url = json_object(raw).get("url")
        except Refused:
            continue
        if url in URLS:
            return url
    return None


@dataclass(frozen=True)
class RequestFile:
    """An open file of requests, counted, whose lines are read again when their turn comes."""

    path: Path
    state: tuple[int, int]  #: ``file_state`` before the census
    lines: BinaryIO
    census: Census
    rules: LineRules
    read: LineReader  #: of ``rules``

    def request(self, number: int) -> Request:
        """Return the request of a line, counted from 1. Raise Refused as the census did."""
        start, end = self.census.offsets[number - 1 : number + 1].tolist()
        self.lines.seek(start)
        request = self.read(self.lines.read(min(end - start, MAX_LINE_BYTES + 1)), number)
        if self.census.duplicates[number - 1]:
            custom_id, message = request.custom_id, f"custom_id {request.custom_id!r} stands on an earlier line"
            raise Refused("duplicate_custom_id", message, "custom_id", custom_id)
        return request

    def refusals(self, numbers: Iterable[int]) -> Iterator[tuple[int, Refused]]:
        """Yield (line number, reason) for lines that are refused."""
        for number in numbers:
            try:
                self.request(number)
            except Refused as refused:
                yield number, refused
            else:
                raise InputError(f"the input has changed: line {number} can be read now, and could not before")

    def check_unchanged(self) -> None:
        """Raise InputError when the file was written to after it was opened."""
        if file_state(self.path) != self.state:
            raise InputError(f"{self.path} was changed while the job ran; answers written so far are kept")


def file_state(path: Path) -> tuple[int, int]:
    """Return (bytes, time of change) of a file or of a folder's files, which differ once one was written to; (0, 0) of
    the standard input."""
    if path == STDIN:
        return 0, 0
    with file_errors(f"read {path}"):
        stats = [file.stat() for file in (path.iterdir() if path.is_dir() else [path])]
    return sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)
