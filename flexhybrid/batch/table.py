"""Writes the answers of a finished job as a table, CSV or Parquet, from its journal, the file of answers."""

import csv
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from flexhybrid.batch.replies import parse_answer
from flexhybrid.core.errors import file_errors
from flexhybrid.core.files import new_file

ROWS = 4096  #: rows of a row group, which is held in memory
#: Column -> Arrow type. "response" is OpenAI's object of the endpoint, as JSON.
COLUMNS = {
    "line": "int64", "custom_id": "string", "status_code": "int16", "text": "string", "finish_reason": "string",
    "prompt_tokens": "int32", "completion_tokens": "int32", "error": "string", "response": "string",
}  # fmt: skip


def write_table(journal: Path, path: Path) -> None:
    """Write a row for each line of the journal, in its order, as CSV or Parquet by the path's ending. If that fails, an
    existing table stays as it is."""
    with new_file(path) as file:
        if path.suffix.lower() == ".csv":
            text = io.TextIOWrapper(file, encoding="utf-8", newline="")
            rows = csv.DictWriter(text, list(COLUMNS))
            rows.writeheader()
            for group in _groups(journal):
                rows.writerows(group)
            text.detach()
        else:
            _write_parquet(journal, file)


def _write_parquet(journal: Path, file: IO[bytes]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in COLUMNS.items()])
    with parquet.ParquetWriter(file, schema) as writer:
        for group in _groups(journal):
            writer.write_table(pa.Table.from_pylist(group, schema))


def _groups(journal: Path) -> Iterator[list[dict]]:
    """Yield the rows of the table in groups of ROWS."""
    with file_errors(f"read {journal}"), open(journal, "rb") as lines:
        rows = map(_row, lines)
        while group := list(itertools.islice(rows, ROWS)):
            yield group


def _row(raw: bytes) -> dict:
    """Return the columns of a journal's line, with the text of the first choice."""
    answer, line = parse_answer(raw), json.loads(raw)
    body, row = line["response"]["body"], {"line": answer and answer.number, "custom_id": line["custom_id"]}
    row |= {"status_code": line["response"]["status_code"], "response": json.dumps(body, ensure_ascii=False)}
    if "error" in body:
        row["error"] = body["error"]["message"]
    else:
        choice = body["choices"][0]
        row["text"] = choice["text"] if "text" in choice else choice["message"]["content"]
        row |= {"finish_reason": choice["finish_reason"]}
        row |= {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    # Halves of surrogate pairs, which UTF-8 cannot encode, become question marks.
    return {k: v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for k, v in row.items()}
