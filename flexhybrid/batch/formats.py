"""The formats of input files: each is read as lines of bytes, a request a line. Importing this does not load torch."""

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

#: Format -> the endings of its files, which gzip may have packed (".jsonl.gz"); a dataset is a folder.
FORMATS = {
    "jsonl": (".jsonl", ".json", ".ndjson"), "text": (".txt", ".text"), "csv": (".csv",), "parquet": (".parquet",),
    "dataset": (),
}  # fmt: skip
TABLES = ("csv", "parquet", "dataset")  #: have columns
STDIN = Path("-")  #: stands for the standard input
DATASET_STATE = "state.json"  #: of a folder written by ``save_to_disk`` of Hugging Face datasets
MAX_LINE_BYTES = 1 << 24  #: longer lines are refused, so that a file without line ends is never read whole
BLOCK_BYTES = 1 << 20  #: of an input that are read at once
WIDE_ZEROS = 0.2  #: share of the bytes at even or odd places that are zero in UTF-16 or UTF-32, and never in UTF-8
codecs.register_error("mark", lambda error: ("\udcff", getattr(error, "end", 0)))  # half a pair: no UTF-8 holds it

Row = tuple[object, object]


@dataclass(frozen=True)
class Columns:
    """Columns of a table: of the prompts, and of the custom_ids (None: line numbers)."""

    prompt: str
    custom_id: str | None = None

    def places(self, path: Path, header: list[str]) -> tuple[int, int | None]:
        """Return the places of both in a header. Raise InputError with all names if one is missing."""
        for name in (self.prompt,) if self.custom_id is None else (self.prompt, self.custom_id):
            if name not in header:
                raise unknown(f"column of {path}", name, header)
            if header.count(name) > 1:
                raise InputError(f"{path} has {header.count(name)} columns {name!r}: rename all of them but one")
        return header.index(self.prompt), None if self.custom_id is None else header.index(self.custom_id)


def check_header(path: Path, header: list[str]) -> None:
    """Raise InputError, with a way out, for the header of a CSV file that is not UTF-8, or that other signs than commas
    separate."""
    if "".join(header) != "".join(header).encode("utf-8", "replace").decode():
        raise InputError(f"the header of {path} is not UTF-8: name the encoding, like --encoding cp1252 for Excel's")
    if len(header) == 1 and (separator := next((sign for sign in ";\t|" if sign in header[0]), None)):
        words = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}[separator]
        raise InputError(
            f"{path} has {words} between its columns, and a CSV file is read with commas: export it so, or convert it, "
            f'python3 -c "import csv, sys; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, '
            f'delimiter={separator!r}))" < {shlex.quote(str(path))} > commas.csv'
        )


@dataclass(frozen=True)
class ChatRules:
    """How prompts become chats."""

    prompts: bool = False  #: whether those of texts and tables are messages of a user
    system: str | None = None  #: message of the system before them
    template: str | None = None  #: Jinja text in place of the tokenizer's own template
    variables: dict | None = None  #: of the template, unless a line's chat_template_kwargs name them


def format_of(path: Path, name: str = "auto") -> str:
    """Return the input's format, by name or by the file's ending."""
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
    """Raise InputError for the name of no encoding of text."""
    try:
        io.TextIOWrapper(io.BytesIO(), name)
    except (LookupError, ValueError):
        check("--encoding", name, False, "an encoding of text that Python knows, like utf-16, cp1252 or shift_jis")


def encoding_of(path: Path, head: bytes) -> str | None:
    """Return the encoding of a byte order mark; None for UTF-8. Raise InputError if zeros show UTF-16 or UTF-32 without
    a mark."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        return "utf-32" if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)) else "utf-16"
    even, odd = (2 * head[place::2].count(0) / max(len(head), 1) for place in (0, 1))
    if max(even, odd) >= WIDE_ZEROS:
        name = f"utf-{32 if min(even, odd) >= WIDE_ZEROS else 16}-{'le' if odd > even else 'be'}"
        raise InputError(f"{path} seems to be {name.upper()}, without a byte order mark: give --encoding {name}")
    return None


def open_lines(path: Path, file_format: str, columns: Columns | None = None, encoding: str | None = None) -> BinaryIO:
    """Return the requests as lines: the file itself, or a temporary file with what it holds. ``encoding``: of text, CSV
    and JSON lines; None: UTF-8, or what a byte order mark names.

    The line of a table's row is its prompt as JSON, with an id column [id, prompt].
    """
    if encoding is not None and file_format in ("parquet", "dataset"):
        raise InputError(f"--encoding is of text, CSV and JSON lines; a {file_format} file needs none")
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
    """Return a file in UTF-8 that can be read more than once: itself, or a copy. A byte that is not of ``encoding``
    leaves a line that is not UTF-8."""
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
    """Yield the parts of an input. Raise InputError if it cannot be read."""
    with file_errors(f"read {path}"):
        try:
            yield from parts
        except (EOFError, zlib.error) as error:
            raise InputError(f"cannot read {path}: {error}") from None


def _temporary(parts: Iterable[bytes]) -> BinaryIO:
    """Return a file that is gone when it is closed."""
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
    """Yield (custom_id, prompt) of each row."""
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
    if len(line) > MAX_LINE_BYTES:
        raise InputError(f"{path} has a line longer than {MAX_LINE_BYTES} characters")
    return line


def _csv_rows(path: Path, columns: Columns, encoding: str | None) -> Iterator[Row]:
    csv.field_size_limit(MAX_LINE_BYTES)
    with _plain(path, encoding) as file, _csv_text(file) as text:
        lines = (_short(path, line) for line in iter(lambda: text.readline(MAX_LINE_BYTES + 1), ""))
        rows = csv.reader(lines, strict=True)  # else a quote that is never closed swallows the rows after it
        try:
            header = next(rows, [])
            if not {columns.prompt, columns.custom_id or columns.prompt} <= set(header):
                check_header(path, header)
            places = columns.places(path, header)
            for row in rows:
                if row:  # the module's own readers skip blank lines too
                    prompt, custom_id = (None if i is None or i >= len(row) else row[i] for i in places)
                    yield custom_id, prompt
        except csv.Error as error:
            message = f"{path}, line {rows.line_num}: {error} (a quote not closed, or not doubled?)"
            raise InputError(message) from None


def _arrow_file(path: Path, file_format: str, columns: Columns | None = None) -> tuple[list[str], Iterable]:
    """Return the names of all columns, and record batches of the wanted ones."""
    from pyarrow import ipc, memory_map, parquet

    if file_format == "parquet":
        file = parquet.ParquetFile(path)
        wanted = [name for name in (columns.prompt, columns.custom_id) if name is not None] if columns else []
        return file.schema_arrow.names, file.iter_batches(batch_size=1024, columns=list(dict.fromkeys(wanted)))
    state = path / DATASET_STATE
    if not state.is_file():
        splits = sorted(inner.parent.name for inner in path.glob(f"*/{DATASET_STATE}"))
        advice = f"name one of its splits, {' or '.join(str(path / split) for split in splits)}"
        advice = advice if splits else f"it holds no {DATASET_STATE}, as save_to_disk of datasets writes it"
        raise InputError(f"cannot read {path}: {advice}")
    described = load_json(state)
    if described.get("_indices_data_files"):
        raise InputError(f"cannot read {path}: its rows are chosen by an index; save dataset.flatten_indices()")
    files = [path / one["filename"] for one in described["_data_files"]]
    readers = [ipc.open_stream(memory_map(str(file))) for file in files]
    return readers[0].schema.names if readers else [], (batch for reader in readers for batch in reader)


def _read_arrow(path: Path, read):
    """Return what ``read`` returns. Raise InputError for a file that Arrow cannot read."""
    try:
        import pyarrow
    except ImportError:
        raise InputError(f"reading {path} needs pyarrow: pip install pyarrow") from None
    try:
        return read()
    except InputError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # ValueError: names that are not UTF-8; the others: a state of another form
        raise InputError(f"cannot read {path}: {str(error).splitlines()[0]}") from None


def _value(scalar) -> object:
    """Return a text, a number or a list as Python's; None for what JSON cannot hold."""
    try:
        value = scalar.as_py()
        if not isinstance(value, str):
            json.dumps(value)
    except (ValueError, TypeError):  # no UTF-8, a time
        return None
    return value
