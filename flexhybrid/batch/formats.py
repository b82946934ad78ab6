"""Reads input files of each format as lines of bytes, one request per line. Importing this does not load torch."""

import codecs
import contextlib
import csv
import gzip
import io
import json
import shlex
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from flexhybrid.core.errors import InputError, check, file_errors, unknown
from flexhybrid.core.files import load_json

#: Format -> the endings of its files; ".gz" may follow (".jsonl.gz"). A dataset is a folder.
FORMATS = {
    "jsonl": (".jsonl", ".json", ".ndjson"), "text": (".txt", ".text"), "csv": (".csv",), "parquet": (".parquet",),
    "dataset": (),
}  # fmt: skip
TABLES = ("csv", "parquet", "dataset")  #: formats with columns
STDIN = Path("-")  #: represents the standard input
DATASET_STATE = "state.json"  #: file in a folder that ``save_to_disk`` of Hugging Face datasets has written
MAX_LINE_BYTES = 1 << 24  #: longer lines are refused, so that a file without line ends is never read whole
BLOCK_BYTES = 1 << 20  #: bytes of an input that are read at once
#: Share of zeros among the bytes at even or odd offsets from which a file counts as UTF-16 or UTF-32. UTF-8 has none.
WIDE_ZEROS = 0.2
#: Replaces bytes that cannot be decoded by half a surrogate pair. UTF-8 cannot encode it, so the line is refused.
codecs.register_error("mark", lambda error: ("\udcff", getattr(error, "end", 0)))

Row = tuple[object, object]  #: (custom_id, prompt)


@dataclass(frozen=True)
class Columns:
    """Names of the columns with the prompts and with the custom_ids (None: line numbers are the custom_ids)."""

    prompt: str
    custom_id: str | None = None

    def places(self, path: Path, header: list[str]) -> tuple[int, int | None]:
        """Return the indices of both columns. Raise InputError if one is missing or appears twice."""
        for name in (self.prompt,) if self.custom_id is None else (self.prompt, self.custom_id):
            if name not in header:
                raise unknown(f"column of {path}", name, header)
            if header.count(name) > 1:
                raise InputError(f"{path} has {header.count(name)} columns {name!r}: rename all but one of them")
        return header.index(self.prompt), None if self.custom_id is None else header.index(self.custom_id)


def check_header(path: Path, header: list[str]) -> None:
    """Raise InputError, with advice, if a CSV file's header is not UTF-8 or not separated by commas."""
    if "".join(header) != "".join(header).encode("utf-8", "replace").decode():
        raise InputError(f"the header of {path} is not UTF-8: name the encoding, like --encoding cp1252 for Excel's")
    if len(header) == 1 and (separator := next((sign for sign in ";\t|" if sign in header[0]), None)):
        words = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}[separator]
        raise InputError(
            f"{path} has {words} between its columns, not commas: export it with commas, or convert it, "
            f'python3 -c "import csv, sys; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, '
            f'delimiter={separator!r}))" < {shlex.quote(str(path))} > commas.csv'
        )


@dataclass(frozen=True)
class ChatRules:
    """Rules for chats."""

    prompts: bool = False  #: whether prompts of text and tables are user messages
    system: str | None = None  #: system message before these prompts
    template: str | None = None  #: Jinja text in place of the tokenizer's own template
    variables: dict | None = None  #: defaults of the template's variables


def format_of(path: Path, name: str) -> str:
    """Return the input's format, which is ``name``, or for "auto" follows from the file's ending.
    Raise InputError for an unknown name or ending."""
    if name != "auto":
        if name not in FORMATS:
            raise unknown("input format", name, FORMATS)
        return name
    if path == STDIN:
        return "jsonl"
    if path.is_dir():
        return "dataset"
    ending = (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()
    for file_format, endings in FORMATS.items():
        if ending in endings:
            return file_format
    raise InputError(f"cannot tell the format of {path} from its ending: say --format {'|'.join(FORMATS)}")


def check_encoding(name: str) -> None:
    """Raise InputError if Python knows no text encoding of this name."""
    try:
        io.TextIOWrapper(io.BytesIO(), name)
    except (LookupError, ValueError):
        check("--encoding", name, False, "an encoding of text that Python knows, like utf-16, cp1252 or shift_jis")


def encoding_of(path: Path, head: bytes) -> str | None:
    """Return the encoding of a byte order mark; None for UTF-8, or without a mark.
    Raise InputError if zeros show that the file is UTF-16 or UTF-32 without a mark."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        return "utf-32" if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)) else "utf-16"
    even, odd = (2 * head[place::2].count(0) / max(len(head), 1) for place in (0, 1))
    if max(even, odd) >= WIDE_ZEROS:
        name = f"utf-{32 if min(even, odd) >= WIDE_ZEROS else 16}-{'le' if odd > even else 'be'}"
        raise InputError(f"{path} seems to be {name.upper()}, without a byte order mark: give --encoding {name}")
    return None


def open_lines(path: Path, file_format: str, columns: Columns | None = None, encoding: str | None = None) -> BinaryIO:
    """Return a file with one request per line: the input itself, or a temporary file with its requests.

    The line of a table's row is the prompt as JSON, or [custom_id, prompt] with an id column. ``encoding``: of text,
    CSV and JSON lines; None: UTF-8, or by the byte order mark. Raise InputError if the input or the column is missing
    or unreadable.
    """
    if encoding is not None and file_format in ("parquet", "dataset"):
        raise InputError(f"--encoding is for text, CSV and JSON lines; a {file_format} file needs none")
    if columns is None and file_format in TABLES:
        header = header_of(path, file_format, encoding)
        if file_format == "csv":
            check_header(path, header)
        names = ", ".join(header) or "none"
        raise InputError(f"a {file_format} file needs --column; columns of {path}: {names}")
    if columns is not None and file_format not in TABLES:
        raise InputError(f"a {file_format} file has no --column")
    if columns is None:
        return _plain(path, encoding)
    rows = _read(path, _rows(path, file_format, columns, encoding))
    return _temporary(json.dumps(row if columns.custom_id else row[1]).encode() + b"\n" for row in rows)


def _plain(path: Path, encoding: str | None) -> BinaryIO:
    """Return the file, or a copy, in UTF-8 and readable more than once.
    A byte that is wrong in ``encoding`` gives a line that is not UTF-8."""
    with file_errors(f"read {path}"):
        if path == STDIN or path.suffix.lower() == ".gz":
            with contextlib.nullcontext(sys.stdin.buffer) if path == STDIN else gzip.open(path) as source:
                file = _temporary(_read(path, iter(lambda: source.read(BLOCK_BYTES), b"")))
        elif path.exists() and not path.is_file():
            raise InputError(f"cannot read {path}: it is not a regular file, and a run reads it more than once")
        else:
            file = open(path, "rb")  # noqa: SIM115 (the caller closes it)
        encoding = encoding or encoding_of(path, file.read(BLOCK_BYTES))
        file.seek(0)
        if encoding is None:
            return file
        with io.TextIOWrapper(file, encoding, "mark", newline="") as text:
            parts = _read(path, iter(lambda: text.read(BLOCK_BYTES), ""))
            return _temporary(part.encode("utf-8", "surrogatepass") for part in parts)


def _read(path: Path, parts: Iterator) -> Iterator:
    """Yield the parts of an input. Raise InputError if one cannot be read."""
    with file_errors(f"read {path}"):
        try:
            yield from parts
        except (EOFError, zlib.error) as error:
            raise InputError(f"cannot read {path}: {error}") from None


def _temporary(parts: Iterable[bytes]) -> BinaryIO:
    """Return a file with these parts that is deleted when it is closed."""
    with file_errors("write a temporary file", "; TMPDIR names its folder"):
        file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
        file.writelines(parts)
        file.seek(0)
    return file


def header_of(path: Path, file_format: str, encoding: str | None = None) -> list[str]:
    """Return the names of a table's columns."""
    with file_errors(f"read {path}"):
        if file_format == "csv":
            with _plain(path, encoding) as file, _csv_text(file) as text:
                return next(csv.reader(text), [])
        return _read_arrow(path, lambda: _arrow_file(path, file_format)[0])


def _rows(path: Path, file_format: str, columns: Columns, encoding: str | None) -> Iterator[Row]:
    """Yield custom_id and prompt of each row of a table."""
    if file_format == "csv":
        yield from _csv_rows(path, columns, encoding)
        return
    header, batches = _read_arrow(path, lambda: _arrow_file(path, file_format, columns))
    columns.places(path, header)
    batches = iter(batches)
    while (batch := _read_arrow(path, lambda: next(batches, None))) is not None:
        prompts = map(_value, batch.column(columns.prompt))
        ids = map(_value, batch.column(columns.custom_id)) if columns.custom_id else [None] * batch.num_rows
        yield from zip(ids, prompts)


def _csv_text(file: BinaryIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")


def _short(path: Path, line: str) -> str:
    """Return the line. Raise InputError if it is too long."""
    if len(line) > MAX_LINE_BYTES:
        raise InputError(f"{path} has a line longer than {MAX_LINE_BYTES} characters")
    return line


def _csv_rows(path: Path, columns: Columns, encoding: str | None) -> Iterator[Row]:
    """Yield custom_id and prompt of each row of a CSV file."""
    csv.field_size_limit(MAX_LINE_BYTES)
    with _plain(path, encoding) as file, _csv_text(file) as text:
        lines = (_short(path, line) for line in iter(lambda: text.readline(MAX_LINE_BYTES + 1), ""))
        rows = csv.reader(lines, strict=True)  # so that a quote that is not closed is an error
        try:
            header = next(rows, [])
            if not {columns.prompt, columns.custom_id or columns.prompt} <= set(header):
                check_header(path, header)
            places = columns.places(path, header)
            for row in rows:
                if row:  # skip blank lines, as csv.DictReader does
                    prompt, custom_id = (None if i is None or i >= len(row) else row[i] for i in places)
                    yield custom_id, prompt
        except csv.Error as error:
            message = f"{path}, line {rows.line_num}: {error} (a quote not closed, or not doubled?)"
            raise InputError(message) from None


def _arrow_file(path: Path, file_format: str, columns: Columns | None = None) -> tuple[list[str], Iterable]:
    """Return the names of all columns, and record batches with the columns ``columns``."""
    from pyarrow import ipc, memory_map, parquet

    if file_format == "parquet":
        file = parquet.ParquetFile(path)
        wanted = [name for name in (columns.prompt, columns.custom_id) if name is not None] if columns else []
        return file.schema_arrow.names, file.iter_batches(batch_size=1024, columns=list(dict.fromkeys(wanted)))
    state = path / DATASET_STATE
    if not state.is_file():
        splits = sorted(inner.parent.name for inner in path.glob(f"*/{DATASET_STATE}"))
        advice = f"name one of its splits, {' or '.join(str(path / split) for split in splits)}"
        advice = advice if splits else f"it has no {DATASET_STATE}, which save_to_disk of datasets writes"
        raise InputError(f"cannot read {path}: {advice}")
    described = load_json(state)
    if described.get("_indices_data_files"):
        raise InputError(f"cannot read {path}: its rows are selected by indices; save dataset.flatten_indices()")
    files = [path / one["filename"] for one in described["_data_files"]]
    readers = [ipc.open_stream(memory_map(str(file))) for file in files]
    return readers[0].schema.names if readers else [], (batch for reader in readers for batch in reader)


def _read_arrow(path: Path, read):
    """Return the result of ``read``. Raise InputError if Arrow cannot read the file."""
    try:
        import pyarrow
    except ImportError:
        raise InputError(f"reading {path} needs pyarrow: pip install pyarrow") from None
    try:
        return read()
    except InputError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # ValueError: names that are not UTF-8; KeyError, TypeError, AttributeError: an unknown form of DATASET_STATE
        raise InputError(f"cannot read {path}: {str(error).splitlines()[0]}") from None


def _value(scalar) -> object:
    """Return an Arrow value as a Python value; None if JSON cannot represent it."""
    try:
        value = scalar.as_py()
        if not isinstance(value, str):
            json.dumps(value)
    except (ValueError, TypeError):  # bytes that are not UTF-8; a type like time
        return None
    return value
