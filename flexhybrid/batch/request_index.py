"""A file of requests, and an index of its lines that is much smaller than the file.

The index has the offset of each line and the length of its request; a line is read again when its request runs.
Counting means reading a line and counting its tokens. A long file is counted for some seconds, and the rest of it
while the first requests are answered.
"""

import contextlib
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import numpy as np

from flexhybrid.batch.beginnings import Beginnings
from flexhybrid.batch.formats import MAX_LINE_BYTES, STDIN, open_lines
from flexhybrid.batch.openai import Draft, Refused, Request, json_object, url_of
from flexhybrid.batch.requests import LineReader, LineRules, line_digest
from flexhybrid.core.errors import InputError, file_errors
from flexhybrid.core.workload import Workload
from flexhybrid.requests import RequestCodec, load_tokenizer
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.sampling_params import noted_bytes

CHUNK_LINES, CHUNK_BYTES = 1024, 1 << 22  #: most lines and bytes that are encoded together
PACE = 0.25  #: share of the time that the thread of ``count_meanwhile`` works
_READING = threading.Lock()  # held by the thread that seeks and reads in a file
BLOCK_BYTES = 1 << 20  #: bytes of the file that are searched for line ends at once
FIRST_URLS = 64  #: number of endpoints that ``first_urls`` reads


@dataclass
class RequestIndex:
    """Arrays over the lines of a file, indexed by place (line number minus one).
    They take 16 bytes per line. Lines with several answers, log probabilities, a repeated custom_id or a shared prefix
    take 15 more (pages of zeros take no memory before they are written), and each shared prefix takes 8."""

    offsets: np.ndarray  #: [lines + 1] int64, offset of each line's first byte, and the file's size
    prompt_tokens: np.ndarray  #: [lines] int32; 0: the line is refused, or not counted yet
    max_tokens: np.ndarray  #: [lines] int32
    more_answers: np.ndarray  #: [lines] int16, answers beyond the first
    noted: np.ndarray  #: [lines] int64, bytes of each line's log probabilities (``noted_bytes``)
    duplicates: np.ndarray  #: [lines] bool: whether an earlier line has the same custom_id
    beginning: np.ndarray  #: [lines] int32, number of its longest shared prefix plus one (``beginnings``); 0: none
    sha256: str  #: hash of the file
    beginnings: Beginnings | None = None
    counted: int = 0  #: number of leading lines that are counted
    noted_token: int = 0  #: bytes of a token's log probabilities, the maximum over all lines
    num_beyond: int = 0  #: counted lines whose prompt and max_tokens exceed the model's context
    _rest: Iterator[int] | None = None  #: counts the next lines
    _grown: threading.Condition = field(default_factory=threading.Condition)
    _error: BaseException | None = None  #: exception that ended the thread of ``count_meanwhile``

    @staticmethod
    def of(lines: BinaryIO) -> "RequestIndex":
        """Return the index of a file whose lines are not counted yet."""
        offsets, digest = find_lines(lines)
        num_lines = len(offsets) - 1
        prompts, limits, beginning = np.zeros((3, num_lines), np.int32)
        more, noted, duplicates = (np.zeros(num_lines, dtype) for dtype in (np.int16, np.int64, bool))
        return RequestIndex(offsets, prompts, limits, more, noted, duplicates, beginning=beginning, sha256=digest)

    @property
    def num_lines(self) -> int:
        return len(self.prompt_tokens)

    @property
    def complete(self) -> bool:
        return self.counted == self.num_lines

    def workload(self, places: np.ndarray) -> Workload:
        """Return the lengths of the requests at ``places``, an entry for each of their answers."""
        each, prefixes = per_answer(places, self.num_answers(places)), None
        if self.beginnings and self.beginnings.tokens:
            prefixes = self.beginnings.prefixes(self.beginning[each] - 1)
        noted = self.noted_token if (of_line := int(self.noted[places].max())) else 0, of_line
        return Workload(self.prompt_tokens[each], self.max_tokens[each], prefixes=prefixes, noted=noted)

    def num_answers(self, places: np.ndarray | slice) -> np.ndarray:
        """Return the number of answers (``n``) of each line at ``places``."""
        return self.more_answers[places] + np.int16(1)

    @property
    def valid(self) -> np.ndarray:
        """[lines] bool: whether the line is counted and can be served."""
        return self.prompt_tokens > 0

    def wait(self, counted: int) -> bool:
        """Wait until more than ``counted`` lines are counted; return False if there are no more."""
        with self._grown:
            self._grown.wait_for(lambda: self.counted > counted or self.complete or self._error)
        if self._error:
            raise self._error
        return self.counted > counted

    @contextlib.contextmanager
    def count_meanwhile(self, read: LineReader) -> Iterator[None]:
        """Count the remaining lines in a thread until the block ends. ``read``: the reader of the first ones.

        The thread works only PACE of the time, because the answers need the cores.
        """
        ended = threading.Event()

        def count() -> None:
            try:
                while self._rest and not ended.is_set():
                    began = time.monotonic()
                    self.count_on()
                    ended.wait((time.monotonic() - began) * (1 / PACE - 1))
            except BaseException as error:
                with self._grown:
                    self._error = error
                    self._grown.notify_all()

        if self.complete:
            yield
            return
        read.take_own_tokenizer()
        thread = threading.Thread(target=count, name="request index", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def count_on(self) -> int:
        """Count the next lines; return the number of their bytes, 0 at the end."""
        size = next(self._rest, 0) if self._rest else 0
        if not size:
            self._rest = None
        with self._grown:
            self._grown.notify_all()
        return size


def per_answer(places: np.ndarray, num_answers: np.ndarray) -> np.ndarray:
    """Return each of ``places`` [lines] once per answer; the same array if each line has one answer."""
    return places if num_answers.max(initial=1) == 1 else np.repeat(places, num_answers)


def find_lines(lines: BinaryIO) -> tuple[np.ndarray, str]:
    """Return the offsets of all lines and of the file's end, [lines + 1] int64, and the file's sha256."""
    starts, digest, size = array("q", [0]), sha256(), 0
    while block := _read_at(lines, size, BLOCK_BYTES):
        digest.update(block)
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + (size + 1)
        starts.frombytes(ends.astype(np.int64).tobytes())
        size += len(block)
    if starts[-1] != size:
        starts.append(size)
    return np.frombuffer(starts, np.int64), digest.hexdigest()


def _read_at(lines: BinaryIO, start: int, size: int) -> bytes:
    """Return bytes of a file that several threads read."""
    name = getattr(lines, "name", None)
    with _READING, file_errors(f"read {name if isinstance(name, str) else 'a temporary file'}"):
        lines.seek(start)
        return lines.read(size)


def read_lines(lines: BinaryIO, offsets: np.ndarray, first: int, last: int) -> Iterator[list[bytes]]:
    """Yield the lines at places ``first`` … ``last`` - 1, in lists of at most CHUNK_LINES lines and CHUNK_BYTES bytes.
    A longer line comes alone, cut to MAX_LINE_BYTES + 1 bytes."""
    while first < last:
        start = int(offsets[first])
        behind = int(np.searchsorted(offsets[: last + 1], start + CHUNK_BYTES, side="right")) - 1
        end = min(max(behind, first + 1), first + CHUNK_LINES)
        if end == first + 1:
            yield [_read_at(lines, start, min(int(offsets[end]) - start, MAX_LINE_BYTES + 1))]
        else:
            data = _read_at(lines, start, int(offsets[end]) - start)
            places = (offsets[first : end + 1] - start).tolist()
            yield [data[here:there] for here, there in zip(places, places[1:])]
        first = end


def index_requests(
    lines: BinaryIO,
    read: LineReader,
    max_context: int,
    on_bytes: Callable[[int], object] = lambda _: None,
    seconds: float = math.inf,
) -> RequestIndex:
    """Return the index of a file, after one pass that finds its lines and one that counts their tokens.

    ``on_bytes``: called with the number of bytes counted. Counting pauses after ``seconds``, but not before it has
    found a request that can be served.
    """
    index, began = RequestIndex.of(lines), time.monotonic()
    index._rest = _counting(index, lines, read, max_context)
    while size := index.count_on():
        on_bytes(size)
        if time.monotonic() - began >= seconds and index.valid.any():
            break
    return index


def _counting(index: RequestIndex, lines: BinaryIO, read: LineReader, max_context: int) -> Iterator[int]:
    """Count the lines of a file, chunk by chunk; yield the number of bytes of each chunk."""

    def again(number: int) -> str | None:
        return _draft(read, next(read_lines(lines, index.offsets, number - 1, number))[0], number)[1]

    names, index.beginnings = CustomIds(index.num_lines, again), Beginnings(read.prompt_tokens)
    for chunk in read_lines(lines, index.offsets, 0, index.num_lines):
        drafts: dict[int, Draft] = {}
        for place, raw in enumerate(chunk, index.counted):
            draft, custom_id = _draft(read, raw, place + 1)
            if custom_id is not None and names.stands_before(custom_id, place + 1):
                index.duplicates[place] = True
            elif draft is not None:
                drafts[place] = draft
        for (place, draft), size in zip(drafts.items(), read.prompt_tokens(list(drafts.values()))):
            if size:
                room = max_context - size
                index.num_beyond += (draft.params.max_tokens or 0) > room
                limit = min(draft.params.max_tokens or room, room)
                index.prompt_tokens[place], index.max_tokens[place] = size, limit
                if draft.params.n > 1:
                    index.more_answers[place] = draft.params.n - 1
                if any(noted := noted_bytes(draft.params, size, limit)):
                    index.noted_token, index.noted[place] = max(index.noted_token, noted[0]), noted[1]
        served = {place: draft for place, draft in drafts.items() if index.prompt_tokens[place]}
        for place, beginning in zip(served, index.beginnings.find(list(served.values())), strict=True):
            if beginning >= 0:
                index.beginning[place] = beginning + 1
        first, index.counted = index.counted, index.counted + len(chunk)
        yield int(index.offsets[index.counted] - index.offsets[first])


def _draft(read: LineReader, raw: bytes, number: int) -> tuple[Draft | None, str | None]:
    """Return a line's request (None if refused) and its custom_id (None if unreadable)."""
    try:
        draft = read.draft(raw, number)
    except Refused as refused:
        return None, refused.custom_id
    return draft, draft.custom_id


class CustomIds:
    """Finds repeated custom_ids with 14 to 20 bytes per line.

    It is a hash table of line numbers with open addressing and a 64-bit hash per line. If two hashes are equal, the
    earlier line is read again to compare the custom_ids.
    """

    def __init__(self, num_lines: int, custom_id: Callable[[int], str | None]):
        """``custom_id(number)`` reads the custom_id of a line."""
        size = 1 << (num_lines + num_lines // 2).bit_length()
        self._mask, self._custom_id = size - 1, custom_id
        self._numbers = array("I", bytes(4 * size))  # 0: free
        self._hashes = array("q", bytes(8 * (num_lines + 1)))

    def stands_before(self, custom_id: str, number: int) -> bool:
        """Return whether an earlier line has this custom_id; if not, add it for line ``number``."""
        hashed = hash(custom_id)
        place = hashed & self._mask
        while earlier := self._numbers[place]:
            if self._hashes[earlier] == hashed and self._custom_id(earlier) == custom_id:
                return True
            place = (place + 1) & self._mask
        self._numbers[place], self._hashes[number] = number, hashed
        return False


def first_urls(lines: BinaryIO) -> set[str]:
    """Return the endpoints in a Batch file's first lines."""
    urls: list[str] = []
    for raw in _read_at(lines, 0, MAX_LINE_BYTES).split(b"\n"):
        if len(urls) == FIRST_URLS:
            break
        with contextlib.suppress(Refused):
            urls += filter(None, [url_of(json_object(raw))])
    return set(urls)


@dataclass(frozen=True)
class RequestFile:
    """An open file of requests with its index. Lines are read again when needed."""

    path: Path
    state: tuple[int, int]  #: ``file_state`` before the file was indexed
    lines: BinaryIO
    index: RequestIndex
    rules: LineRules
    read: LineReader  #: reader with ``rules``

    def request(self, number: int) -> Request:
        """Return the request of a line, counted from 1. Raise Refused if the index has it as refused."""
        start, end = self.index.offsets[number - 1 : number + 1].tolist()
        request = self.read(_read_at(self.lines, start, min(end - start, MAX_LINE_BYTES + 1)), number)
        if self.index.duplicates[number - 1]:
            custom_id, message = request.custom_id, f"an earlier line has the same custom_id, {request.custom_id!r}"
            raise Refused("duplicate_custom_id", message, "custom_id", custom_id)
        return request

    def digests(self) -> np.ndarray:
        """Return the hash of each line [lines] uint64."""
        chunks = read_lines(self.lines, self.index.offsets, 0, self.index.num_lines)
        return np.fromiter((int(line_digest(raw), 16) for chunk in chunks for raw in chunk), np.uint64)

    def custom_id(self, number: int) -> str | None:
        """Return the custom_id of a line, counted from 1."""
        return _draft(self.read, next(read_lines(self.lines, self.index.offsets, number - 1, number))[0], number)[1]

    def refusals(self, numbers: Iterable[int]) -> Iterator[tuple[int, Refused]]:
        """Yield (line number, reason) for lines that are refused."""
        for number in numbers:
            try:
                self.request(number)
            except Refused as refused:
                yield number, refused
            else:
                yield number, Refused("invalid_value", "the line could not be read when the tokens were counted")

    def check_unchanged(self) -> None:
        """Raise InputError if the file was written to after it was opened."""
        if file_state(self.path) != self.state:
            raise InputError(f"{self.path} was changed while the job ran; answers written so far are kept")


def count_requests(path: Path, model: Path) -> Workload:
    """Return the lengths of a Batch file's requests that a checkpoint can serve. Raise InputError if there is none."""
    shape = Checkpoint(model).shape
    with contextlib.closing(open_lines(path, "jsonl")) as lines:
        rules = LineRules("jsonl", {}, 0)
        read = LineReader(rules, RequestCodec(shape, model, load_tokenizer(model)))
        index = index_requests(lines, read, shape.max_context)
        if not index.valid.any():
            requests = RequestFile(path, file_state(path), lines, index, rules, read)
            reason = next(requests.refusals([1]))[1].message
            raise InputError(f"{path} has no request that can be served; line 1: {reason}")
    return index.workload(np.flatnonzero(index.valid))


def file_state(path: Path) -> tuple[int, int]:
    """Return total size and latest change time of a file or of a folder's files; (0, 0) for the standard input.
    Two results differ if a file was written to in between."""
    if path == STDIN:
        return 0, 0
    with file_errors(f"read {path}"):
        stats = [file.stat() for file in (path.iterdir() if path.is_dir() else [path])]
    return sum(stat.st_size for stat in stats), max((stat.st_mtime_ns for stat in stats), default=0)
