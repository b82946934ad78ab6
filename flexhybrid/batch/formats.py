"""The formats of input files: each is read as lines of bytes, a request a line. Importing this does not load torch."""

import csv
import gzip
import io
import json
import shlex
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from flexhybrid.core.errors import InputError, file_errors, unknown
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

Row = tuple[object, object]


@dataclass(frozen=True)
class Columns:
    """Columns of a table: of the prompts, and of the custom_ids (None: line numbers)."""

    prompt: str
    custom_id: str | None = None

    def places(self, path: Path, header: list[str]) -> tuple[int, int | None]:
        """Return the places of both in a header. Raise InputError, with the names of all, where one is missing."""
        for name in (self.prompt, self.custom_id):
            if name is not None and name not in header:
                raise unknown(f"column of {path}", name, header)
        return header.index(self.prompt), None if self.custom_id is None else header.index(self.custom_id)


def check_commas(path: Path, header: list[str]) -> None:
    """Raise InputError, with a way out, for the header of a CSV file that other signs than commas separate."""
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
    variables: dict | None = None  #: of the template, where a line's chat_template_kwargs does not name them


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


def open_lines(path: Path, file_format: str, columns: Columns | None = None) -> BinaryIO:
    """Return the requests as lines: the file itself, or a temporary file with what it holds.

    The line of a table's row is its prompt as JSON, with an id column [id, prompt].
    """
    if columns is None and file_format in TABLES:
        header = header_of(path, file_format)
        if file_format == "csv":
            check_commas(path, header)
        names = ", ".join(header) or "none"
        raise InputError(f"a {file_format} file needs --column; columns of {path}: {names}")
    if columns is not None and file_format not in TABLES:
        raise InputError(f"a {file_format} file has no --column")
    with file_errors(f"read {path}"):
        if columns is None:
            return _plain(path)
        lines = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
        for custom_id, prompt in _rows(path, file_format, columns):
            value = prompt if columns.custom_id is None else [custom_id, prompt]
            lines.write(json.dumps(value).encode() + b"\n")
        lines.flush()
        return lines


def _plain(path: Path) -> BinaryIO:
    """Return a file that can be read more than once; packed ones and the standard input are copied."""
    if path == STDIN:
        return _copy(sys.stdin.buffer, path)
    if path.exists() and not path.is_file():
        raise InputError(f"cannot read {path}: it is not a regular file, and a run reads it more than once")
    if path.suffix.lower() != ".gz":
        return open(path, "rb")
    with gzip.open(path) as packed:
        return _copy(packed, path)


def _copy(source, path: Path) -> BinaryIO:
    copy = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    try:
        shutil.copyfileobj(source, copy, 1 << 20)
    except (EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    copy.seek(0)
    return copy


def header_of(path: Path, file_format: str) -> list[str]:
    """Return the names of a table's columns."""
    with file_errors(f"read {path}"):
        if file_format == "csv":
            with _plain(path) as file, _csv_text(file) as text:
                return next(csv.reader(text), [])
        return _read_arrow(path, lambda: _arrow_file(path, file_format)[0])


def _rows(path: Path, file_format: str, columns: Columns) -> Iterator[Row]:
    """Yield (custom_id, prompt) of each row."""
    if file_format == "csv":
        yield from _csv_rows(path, columns)
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


def _csv_rows(path: Path, columns: Columns) -> Iterator[Row]:
    csv.field_size_limit(MAX_LINE_BYTES)
    with _plain(path) as file, _csv_text(file) as text:
        rows = csv.reader(text, strict=True)  # else a quote that is never closed swallows the rows after it
        try:
            header = next(rows, [])
            if columns.prompt not in header:
                check_commas(path, header)
            places = columns.places(path, header)
            for row in rows:
                if row:  # the module's own readers skip blank lines too
                    prompt, custom_id = (None if i is None or i >= len(row) else row[i] for i in places)
                    yield custom_id, prompt
        except csv.Error as error:
            message = f"{path}, line {rows.line_num}: {error} (a quote not closed, or not doubled?)"
            raise InputError(message) from None


def _arrow_file(path: Path, file_format: str, columns: Columns | None = None) -> tuple[list[str], Iterable]:
    """Return the names of all columns, and record batches of those that are wanted."""
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
