"""The formats of input files: each is read as lines of bytes, a request a line."""

import csv
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from flexhybrid.core.errors import InputError, file_errors, unknown

#: Format -> the endings of its files.
FORMATS = {
    "jsonl": (".jsonl", ".json", ".ndjson"), "text": (".txt", ".text"), "csv": (".csv",), "parquet": (".parquet",),
}  # fmt: skip
MAX_LINE_BYTES = 1 << 24  #: longer lines are refused, so that a file without line ends is never read whole


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
