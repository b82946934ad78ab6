"""Numbers that the papers print, as tables: read strictly, asked for by column, kept apart by role.

README.md beside this file says which paper each table is from, what the columns mean, and where the papers contradict
themselves (numbered notes). A constant may be fitted on ``calibrate`` rows only, ``validate`` rows are only compared
against, ``context`` rows are neither; ``check_role`` guards that.
"""

from __future__ import annotations

import csv
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flexhybrid.core.errors import InputError, unknown

FOLDER = Path(__file__).parent

ROLES = ("calibrate", "validate", "context")

_HEADLINES = (
    "id:key paper quantity subject:text? baseline:text? model:text? batch:count? prompt_len:count? context_len:count? "
    "gen_len:count? condition:text? statistic:text? value:number unit kind role:role source quote note:text?"
)

#: table -> its columns in the file's order, "name:kind". Kinds: text (the default), key (text, unique), count (a
#: whole number > 0), number, flag, role; with "?" a cell may be blank.
TABLES = {
    "capture_headlines": _HEADLINES,
    "capture_table3": "paper model variant batch:count prompt_len:count gen_len:count tokens_per_s:number unit "
    "printed_speedup_over_act_only:number? gpu link source role:role",
    "cascade_headlines": _HEADLINES,
    "cascade_tables": "paper table family model mode metric dataset:text? value:number unit source role:role "
    "note:text?",
    "hardware": "paper testbed gpu gpus_per_host:count hosts:count gpu_mem_gb:number? host host_mem_gb:number? "
    "link:text? link_gb_per_s:number? gpu_fp16_tflops_stated:number? source role:role note",
    "infinigen_headlines": _HEADLINES,
    "infinigen_tables": "paper table:count model metric item dataset seq_len:count value:number unit source role:role",
    "kvpr_headlines": _HEADLINES,
    "kvpr_table1": "paper model hidden:count batch:count seq_len:count dtype metric value:number unit source role:role "
    "note:text?",
    "kvpr_table2": "paper model method:text? batch:count prompt_len:count gen_len:count metric value:number unit "
    "unit_as_printed source role:role note:text?",
    "kvpr_table3_4": "paper table:count model method batch:count prompt_len:count gen_len:count metric value:number "
    "unit source role:role",
    "kvpr_table5": "paper model method batch:count batch_as_printed prompt_len:count gen_len:count metric value:number "
    "unit gpu link source role:role note",
    "models": "name:key layers:count hidden:count heads:count kv_heads:count ffn:count vocab:count max_positions:count "
    "gated_mlp:flag positional source role:role",
    "powerinfer_table": "paper system model batch:count prompt_len:count metric value:number unit source role:role",
}

#: The column that ``value`` reads, where it is not "value".
VALUE_COLUMN = {"capture_table3": "tokens_per_s"}

_DTYPES = {"count": "int64", "count?": "Int64", "number": "float64", "number?": "float64", "flag": "bool"}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_SHOWN_VALUES = 20


def load(name: str) -> pd.DataFrame:
    """A table by its name, "kvpr_table5": one row a measurement, in the file's order.

    Text is text, "" where the cell is blank; counts are int64 (Int64 where some are blank), numbers float64 (NaN where
    blank), flags bool. Raises InputError for a name that is no table, and for a broken file (file, row and column).
    """
    if not isinstance(name, str) or name not in TABLES:
        raise unknown("reference table", name, TABLES)
    return _load_once(name).copy()


@cache
def _load_once(name: str) -> pd.DataFrame:
    return read_table(FOLDER / f"{name}.csv", TABLES[name])


def rows(name: str, /, **equals) -> pd.DataFrame:
    """Return the rows of a table whose columns equal the given cells; None is a blank cell.

    ``rows("kvpr_table3_4", model="OPT-13B", method="KVPR")``. Raises InputError where no row matches; it names the
    column that left none and that column's values in the rows that matched until then.
    """
    frame = load(name)
    for column, wanted in equals.items():
        if column not in frame.columns:
            raise unknown(f"column of {name}", column, frame.columns)
        if not (wanted is None or isinstance(wanted, (str, bool, int, float, np.generic))):
            raise InputError(f"{name}: {column} is compared with one value, not with {wanted!r}")
        cells = frame[column].tolist()
        matches = np.array([_equals(cell, wanted) for cell in cells], dtype=bool)
        if not matches.any():
            condition = f"{column} = {wanted!r}{_until(equals, column)}"
            raise InputError(f"{name}: no row has {condition}; {_values(column, cells)}")
        frame = frame.loc[matches]
    return frame.reset_index(drop=True)


@cache
def notes() -> dict[int, str]:
    """Return the numbered notes of README.md, one line each: where the papers contradict themselves or each other."""
    texts: dict[int, str] = {}
    last = None
    for line in (FOLDER / "README.md").read_text(encoding="utf-8").splitlines():
        if begins := re.match(r"(\d+)\. +(.*)", line):
            last = int(begins[1])
            texts[last] = begins[2]
        elif last is not None and line.startswith("   "):
            texts[last] += " " + line.strip()
        else:
            last = None
    return texts


def row(name: str, /, **equals) -> dict[str, Any]:
    """Return the one row that ``equals`` picks, by column; InputError unless exactly one row matches."""
    return _only_row(name, rows(name, **equals), equals)


def _only_row(name: str, frame: pd.DataFrame, equals: dict) -> dict[str, Any]:
    records = frame.to_dict("records")
    if len(records) > 1:
        ignored = VALUE_COLUMN.get(name, "value")
        differing = [c for c in records[0] if c != ignored and len({str(record[c]) for record in records}) > 1]
        reason = f"they differ in {', '.join(map(str, differing))}" if differing else "they are alike"
        raise InputError(f"{name}: {len(records)} rows match{_until(equals, None)}, not one; {reason}")
    return {str(column): cell for column, cell in records[0].items()}


def value(name: str, /, **equals) -> float:
    """Return the number that ``equals`` picks, in the unit of its row; InputError unless exactly one row matches."""
    column = VALUE_COLUMN.get(name, "value")
    frame = rows(name, **equals)
    if column not in frame.columns:
        raise InputError(f"{name} has no column of values: take rows({name!r}, …) and the column")
    return float(_only_row(name, frame, equals)[column])


def check_role(frame: pd.DataFrame, role: str) -> pd.DataFrame:
    """Return the frame itself if every row has this role; else raise InputError with the first row that has another.

    ``fit(check_role(rows(…), "calibrate"))`` can never be fitted on what it is later compared with.
    """
    if role not in ROLES:
        raise unknown("role", role, ROLES)
    if frame.empty:
        raise InputError(f"no rows are given where {role} rows are needed")
    wrong = [record for record in frame.to_dict("records") if record["role"] != role]
    if wrong:
        first = wrong[0]
        raise InputError(
            f"{len(wrong)} of {len(frame)} rows are not {role} rows: the first is {first['role']}, of {first['source']}"
        )
    return frame


def read_table(path: Path, columns: str) -> pd.DataFrame:
    """Read a CSV that has just these columns (noted as in TABLES), in any order; InputError names file, row, column."""
    kinds = dict(_split(column) for column in columns.split())
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            lines = [(reader.line_num, cells) for cells in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if missing := [column for column in kinds if column not in header]:
        raise InputError(f"{path}: the column {missing[0]!r} is missing")
    if strange := [column for column in header if column not in kinds]:
        raise InputError(f"{path}: {unknown('column', strange[0], kinds)}")
    if len(header) != len(kinds):
        raise InputError(f"{path}: a column is there twice: {', '.join(header)}")
    table: dict[str, list] = {column: [] for column in header}
    for line, cells in lines:
        if len(cells) != len(header):
            raise InputError(f"{path}, row {line}: {len(cells)} cells where the header has {len(header)}")
        for column, cell in zip(header, cells):
            try:
                table[column].append(_parse(cell, kinds[column]))
            except ValueError as error:
                raise InputError(f"{path}, row {line}, column {column}: {error}") from None
            if kinds[column] == "key" and cell in table[column][:-1]:
                raise InputError(f"{path}, row {line}, column {column}: {cell!r} is there twice")
    frame = pd.DataFrame(table, columns=header)
    return frame.astype({column: _DTYPES[kind] for column, kind in kinds.items() if kind in _DTYPES})


def _split(column: str) -> tuple[str, str]:
    name, _, kind = column.partition(":")
    return name, kind or "text"


def _parse(cell: str, kind: str):
    """A cell's value; ValueError with the reason."""
    if not cell:
        if kind.endswith("?"):
            return {"text?": "", "number?": np.nan, "count?": pd.NA}[kind]
        raise ValueError(f"it is blank, but a {kind} is needed")
    kind = kind.removesuffix("?")
    if kind == "count":
        if not cell.isascii() or not cell.isdigit() or int(cell) < 1:
            raise ValueError(f"{cell!r} is not a whole number > 0")
        return int(cell)
    if kind == "number":
        if not _NUMBER.fullmatch(cell):
            raise ValueError(f"{cell!r} is not a number")
        return float(cell)
    if kind == "flag":
        if cell not in ("true", "false"):
            raise ValueError(f"{cell!r} is neither true nor false")
        return cell == "true"
    if kind == "role" and cell not in ROLES:
        raise ValueError(str(unknown("role", cell, ROLES)))
    return cell


def _equals(cell, wanted) -> bool:
    if wanted is None:
        return _is_blank(cell)
    return _sort_of(cell) == _sort_of(wanted) and bool(cell == wanted)


def _sort_of(cell) -> str:
    """Return the sort within which cells are compared: "1" is not 1, nor is true."""
    if isinstance(cell, (bool, np.bool_)):
        return "flag"
    if isinstance(cell, (int, float, np.number)):
        return "number"
    return "text" if isinstance(cell, str) else "blank"


def _is_blank(cell) -> bool:
    return cell is pd.NA or cell in ("", None) or cell != cell


def _until(equals: dict, last: str | None) -> str:
    """Describe the conditions before ``last``."""
    before = []
    for column, wanted in equals.items():
        if column == last:
            break
        before.append(f"{column} = {wanted!r}")
    return f" where {', '.join(before)}" if before else ""


def _values(column: str, cells: list) -> str:
    """Describe the values of a column."""
    known = list(dict.fromkeys(str(cell) for cell in cells if not _is_blank(cell)))
    if not known:
        return f"{column} is blank there"
    blank = " or blank" if any(map(_is_blank, cells)) else ""
    more = f", … ({len(known)} values)" if len(known) > _SHOWN_VALUES else ""
    return f"{column} is one of {', '.join(known[:_SHOWN_VALUES])}{more}{blank}"
