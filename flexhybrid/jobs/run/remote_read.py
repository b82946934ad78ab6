"""Reads batches of a job's input in a Ray worker. A module of its own, as importing torch would take seconds."""

from pathlib import Path

import pyarrow as pa

#: A batch before it is read: line numbers, and the first byte and the end of each line in the input.
BATCH = pa.schema([(name, pa.list_(pa.int64())) for name in ("numbers", "starts", "ends")])
#: A batch after it is read: line numbers and lines.
LINES = pa.schema([("numbers", pa.list_(pa.int64())), ("lines", pa.list_(pa.large_binary()))])


def read_lines(batch: pa.Table, path: Path) -> pa.Table:
    """Read the lines of a batch, on the machine that holds the input."""
    (row,) = batch.to_pylist()
    with open(path, "rb") as file:
        lines = []
        for start, end in zip(row["starts"], row["ends"], strict=True):
            file.seek(start)
            lines.append(file.read(end - start))
    return pa.table([[row["numbers"]], [lines]], LINES)
