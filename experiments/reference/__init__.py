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

import numpy as np
import pandas as pd

from flexhybrid.core.errors import InputError, unknown

FOLDER = Path(__file__).parent

ROLES = ("calibrate", "validate", "context")

_HEADLINES = (
    "id:key paper quantity subject:text? baseline:text? model:text? batch:count? prompt_len:count? context_len:count? "
    "gen_len:count? condition:text? statistic:text? value:number unit kind role:role source quote note:text?"
)

#: table -> its columns in the file's order, "name:kind". Kinds: text (the default), key (text, no two alike), count (a
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
    """The rows of a table whose columns equal what is asked for; None asks for a blank cell.

    ``rows("kvpr_table3_4", model="OPT-13B", method="KVPR")``. There is at least one: where none matches, InputError
    names the column that left none and the values it has in the rows that matched until there.
    """
    frame = load(name)
    for column, wanted in equals.items():
        if column not in frame.columns:
            raise unknown(f"column of {name}", column, frame.columns)
        cells = frame[column]
        if wanted is None:
            found = _blank(cells)
        elif isinstance(wanted, (str, bool, int, float, np.generic)):
            found = np.array(
                [_sort_of(cell) == _sort_of(wanted) and bool(cell == wanted) for cell in cells], dtype=bool
            )
        else:
            raise InputError(f"{name}: {column} is compared with one value, not with {wanted!r}")
        if not found.any():
            raise InputError(
                f"{name}: no row has {column} = {wanted!r}{_until(equals, column)}; {_values(column, cells)}"
            )
        frame = frame[found]
    return frame.reset_index(drop=True)


@cache
def notes() -> dict[int, str]:
    """The numbered notes of README.md, one line each: where the papers contradict themselves or each other."""
    found: dict[int, str] = {}
    last = None
    for line in (FOLDER / "README.md").read_text(encoding="utf-8").splitlines():
        if begins := re.match(r"(\d+)\. +(.*)", line):
            last = int(begins[1])
            found[last] = begins[2]
        elif last is not None and line.startswith("   "):
            found[last] += " " + line.strip()
        else:
            last = None
    return found


def value(name: str, /, **equals) -> float:
    """The one number that ``equals`` picks, in the unit of its row; InputError unless exactly one row matches."""
    column = VALUE_COLUMN.get(name, "value")
    found = rows(name, **equals)
    if column not in found.columns:
        raise InputError(f"{name} has no column of values: take rows({name!r}, …) and the column")
    if len(found) > 1:
        apart = [each for each in found.columns if each != column and found[each].nunique(dropna=False) > 1]
        how = f"they differ in {', '.join(apart)}" if apart else "they are alike"
        raise InputError(f"{name}: {len(found)} rows match{_until(equals, None)}, not one; {how}")
    return float(found[column].iloc[0])


def check_role(frame: pd.DataFrame, role: str) -> pd.DataFrame:
    """The frame itself, if every row has this role; else InputError with the first row that has another.

    ``fit(check_role(rows(…), "calibrate"))`` can never be fitted on what it is later compared with.
    """
    if role not in ROLES:
        raise unknown("role", role, ROLES)
    if frame.empty:
        raise InputError(f"no rows are given where {role} rows are needed")
    wrong = frame[frame["role"] != role]
    if len(wrong):
        first = wrong.iloc[0]
        raise InputError(
            f"{len(wrong)} of {len(frame)} rows are not {role} rows: the first is {first['role']}, of {first['source']}"
        )
    return frame


def read_table(path: Path, columns: str) -> pd.DataFrame:
    """Read a CSV that has just these columns (noted as in TABLES), in any order; InputError names file, row, column."""
    kinds = dict(_split(each) for each in columns.split())
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            lines = [(reader.line_num, cells) for cells in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if missing := [each for each in kinds if each not in header]:
        raise InputError(f"{path}: the column {missing[0]!r} is missing")
    if strange := [each for each in header if each not in kinds]:
        raise InputError(f"{path}: {unknown('column', strange[0], kinds)}")
    if len(header) != len(kinds):
        raise InputError(f"{path}: a column is there twice: {', '.join(header)}")
    table: dict[str, list] = {each: [] for each in header}
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


def _sort_of(cell) -> str:
    """What equals what: "1" is not 1, nor is true."""
    if isinstance(cell, (bool, np.bool_)):
        return "flag"
    if isinstance(cell, (int, float, np.number)):
        return "number"
    return "text" if isinstance(cell, str) else "blank"


def _blank(cells: pd.Series) -> np.ndarray:
    return np.array([cell is pd.NA or cell in ("", None) or cell != cell for cell in cells], dtype=bool)


def _until(equals: dict, last: str | None) -> str:
    """The conditions before ``last`` in words."""
    before = []
    for column, wanted in equals.items():
        if column == last:
            break
        before.append(f"{column} = {wanted!r}")
    return f" where {', '.join(before)}" if before else ""


def _values(column: str, cells: pd.Series) -> str:
    """What a column has, in words."""
    blank = _blank(cells)
    known = [str(each) for each in cells[~blank].unique()]
    if not known:
        return f"{column} is blank there"
    more = f", … ({len(known)} values)" if len(known) > _SHOWN_VALUES else ""
    return f"{column} is one of {', '.join(known[:_SHOWN_VALUES])}{more}{' or blank' if blank.any() else ''}"
