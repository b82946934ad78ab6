"""A file of requests: its lines, their requests, and a census of all lines that is small beside the file.

Every format is read as lines of bytes. The census keeps where a line starts; the line is read again when its turn
comes.
"""

import csv
import json
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from typing import BinaryIO

import numpy as np

from flexhybrid.batch.openai import COMPLETIONS, URLS, ReadLine, Refused, Request, json_object, prompt_ids, utf8
from flexhybrid.batch.openai import read_request as read_batch_request
from flexhybrid.core.errors import InputError, file_errors, unknown
from flexhybrid.core.workload import Workload
from flexhybrid.requests import RequestCodec
from flexhybrid.sampling_params import SamplingParams

#: Format -> the endings of its files.
FORMATS = {
    "jsonl": (".jsonl", ".json", ".ndjson"), "text": (".txt", ".text"), "csv": (".csv",), "parquet": (".parquet",),
}  # fmt: skip
MAX_LINE_BYTES = 1 << 24  #: longer lines are refused, so that a file without line ends is never read whole


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


def format_of(path: Path, name: str = "auto") -> str:
    """Return the input's format, by name or by the file's ending."""
    if name != "auto":
        if name not in FORMATS:
            raise unknown("input format", name, FORMATS)
        return name
    for file_format, endings in FORMATS.items():
        if path.suffix.lower() in endings:
            return file_format
    raise InputError(f"cannot tell the format of {path} from its ending: say --format {'|'.join(FORMATS)}")


def open_lines(path: Path, file_format: str, column: str | None) -> BinaryIO:
    """Return the requests as lines: the file itself, or a temporary file with a column's values as JSON, one a line."""
    if (column is not None) != (file_format in ("csv", "parquet")):
        raise InputError(f"a {file_format} file {'needs' if column is None else 'has no'} --column")
    with file_errors(f"read {path}"):
        if path.exists() and not path.is_file():
            raise InputError(f"cannot read {path}: it is not a regular file, and a run reads it more than once")
        if column is None:
            return open(path, "rb")
        values = _csv_values(path, column) if file_format == "csv" else _parquet_values(path, column)
        lines = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
        lines.writelines(json.dumps(value).encode() + b"\n" for value in values)
        lines.flush()
        return lines


def _csv_values(path: Path, column: str) -> Iterator[str | None]:
    csv.field_size_limit(MAX_LINE_BYTES)
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file, strict=True)  # else a quote that is never closed swallows the rows after it
        try:
            header = next(rows, [])
            place = _place(path, column, header)
            for row in rows:
                if row:  # the module's own readers skip blank lines too
                    yield row[place] if place < len(row) else None
        except csv.Error as error:
            message = f"{path}, line {rows.line_num}: {error} (a quote not closed, or not doubled?)"
            raise InputError(message) from None


def _parquet_values(path: Path, column: str) -> Iterator[str | None]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError("reading parquet needs pyarrow: pip install pyarrow") from None
    try:
        file = parquet.ParquetFile(path)
        _place(path, column, file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=1024, columns=[column]):
            yield from map(_text_or_none, batch.column(0))
    except InputError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: names that are not UTF-8
        raise InputError(f"cannot read {path}: {str(error).splitlines()[0]}") from None


def _text_or_none(scalar) -> str | None:
    try:
        value = scalar.as_py()
    except ValueError:  # no UTF-8, or a time that Python cannot hold
        return None
    return value if isinstance(value, str) else None


def _place(path: Path, column: str, header: list[str]) -> int:
    if column not in header:
        raise unknown(f"column of {path}", column, header)
    return header.index(column)


def file_url(lines: BinaryIO, file_format: str) -> str | None:
    """Return the first endpoint that a line of the file names; None when no line names one."""
    if file_format != "jsonl":
        return COMPLETIONS
    lines.seek(0)
    for raw, _ in split_lines(lines):
        try:
            url = json_object(raw).get("url")
        except Refused:
            continue
        if url in URLS:
            return url
    return None


@dataclass(frozen=True)
class LineRules:
    """How the lines of an input become requests."""

    file_format: str  #: a key of FORMATS
    url: str | None  #: endpoint of the file (``file_url``)
    sampling: dict  #: sampling parameters of lines that do not name them
    seed: int

    def reader(self, codec: RequestCodec) -> ReadLine:
        """Return the function that makes a request of a line's bytes and number (from 1); it raises Refused."""
        read = self._read_batch if self.file_format == "jsonl" else self._read_prompt

        def read_line(raw: bytes, number: int) -> Request:
            if len(raw) > MAX_LINE_BYTES:
                raise Refused("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
            return read(raw, {"seed": line_seed(self.seed, number), **self.sampling}, number, codec)

        return read_line

    def _read_batch(self, raw: bytes, sampling: dict, _number: int, codec: RequestCodec) -> Request:
        return read_batch_request(json_object(raw), self.url, codec, sampling)

    def _read_prompt(self, raw: bytes, sampling: dict, number: int, codec: RequestCodec) -> Request:
        custom_id = f"line-{number}"
        try:
            text = utf8(raw).rstrip("\r\n") if self.file_format == "text" else json.loads(raw)
            if text is None:
                raise Refused("missing_required_parameter", "the column holds no text here", "prompt")
            if not text.strip():
                raise Refused("empty_line", "the prompt is empty", "prompt")
            params = SamplingParams(**sampling)
            token_ids = prompt_ids(text, params, codec)
            return Request(custom_id, token_ids, params, codec.shape.name, codec.tokenizer is None)
        except Refused as refused:
            refused.custom_id = custom_id
            raise


def line_seed(seed: int, number: int) -> int:
    """Return the seed of a line without one, so that its random numbers do not depend on the lines around it; it is the
    same on every machine."""
    return int.from_bytes(blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little")


def split_lines(lines: BinaryIO, digest=None) -> Iterator[tuple[bytes, int]]:
    """Yield (bytes, length) of each line, at most the first MAX_LINE_BYTES + 1 bytes. ``digest`` is fed all bytes."""
    while raw := lines.readline(MAX_LINE_BYTES + 1):
        length, piece = len(raw), raw
        while True:
            if digest:
                digest.update(piece)
            if len(piece) <= MAX_LINE_BYTES or piece.endswith(b"\n"):
                break
            piece = lines.readline(MAX_LINE_BYTES + 1)
            length += len(piece)
            if not piece:
                break
        yield raw, length


def take_census(
    lines: BinaryIO, read: ReadLine, max_context: int, on_line: Callable[[int], object] | None = None
) -> Census:
    """Count the file in one pass. ``on_line(bytes)`` is called after each line."""
    offsets, prompts, limits, answers = array("q", [0]), array("i"), array("i"), array("h")
    low, high, digest = array("Q"), array("Q"), sha256()  # the halves of custom_ids' hashes; zeros: no custom_id
    lines.seek(0)
    for number, (raw, length) in enumerate(split_lines(lines, digest), 1):
        try:
            request = read(raw, number)
            custom_id, prompt, num_answers = request.custom_id, len(request.token_ids), request.params.n
            limit = min(request.params.max_tokens or max_context, max_context - prompt)
        except Refused as refused:
            custom_id, prompt, limit, num_answers = refused.custom_id, 0, 0, 1
        hashed = bytes(16)
        if custom_id is not None:
            hashed = blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        low.append(int.from_bytes(hashed[:8], "little"))
        high.append(int.from_bytes(hashed[8:], "little"))
        offsets.append(offsets[-1] + length)
        prompts.append(prompt)
        limits.append(limit)
        answers.append(num_answers)
        if on_line:
            on_line(length)
    duplicates = _repeated(np.frombuffer(low, np.uint64), np.frombuffer(high, np.uint64))
    prompt_tokens = np.frombuffer(prompts, np.int32)  # no copies: files are long
    prompt_tokens[duplicates] = 0
    return Census(
        offsets=np.frombuffer(offsets, np.int64),
        prompt_tokens=prompt_tokens,
        max_tokens=np.frombuffer(limits, np.int32),
        num_answers=np.frombuffer(answers, np.int16),
        duplicates=duplicates,
        sha256=digest.hexdigest(),
    )


def _repeated(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return [entries] whether an earlier entry has the same two halves; zeros stand for no name. To save memory,
    only the low halves are sorted; the few entries whose low halves repeat are compared in full."""
    order = np.argsort(low, kind="stable")
    ordered = low[order]
    same_low = ordered[1:] == ordered[:-1]
    del ordered
    repeated = np.zeros(len(low), dtype=bool)
    repeated[order[1:][same_low]] = repeated[order[:-1][same_low]] = True
    del order, same_low
    repeated &= (low != 0) | (high != 0)
    if not repeated.any():
        return repeated
    places = np.flatnonzero(repeated)
    first = np.unique(np.stack([low[places], high[places]], axis=1), axis=0, return_index=True)[1]
    repeated[places[first]] = False
    return repeated


@dataclass(frozen=True)
class RequestFile:
    """An open file of requests, counted, whose lines are read again when their turn comes."""

    path: Path
    state: tuple[int, int]  #: ``file_state`` before the census
    lines: BinaryIO
    census: Census
    rules: LineRules
    read: ReadLine  #: of ``rules``

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
    """Return (bytes, time of change); it differs once the file was written to."""
    with file_errors(f"read {path}"):
        stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
