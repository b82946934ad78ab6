"""Numbers that the papers print, as tables: read strictly, asked for by column, kept apart by role.

README.md beside this file says which paper each table is from, what the columns mean, and where the papers contradict
themselves (numbered notes). A constant may be fitted on ``calibrate`` rows only, ``validate`` rows are only compared
against, ``context`` rows are neither; ``check_role`` guards that.
"""

import csv
import re
from collections.abc import Callable
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
    "published": "id:key paper system model bits batch:count? gpu_batch:count? num_gpu_batches:count? prompt_len:count "
    "gen_len:count metric value:number unit gpu host_mem_gb:count link source role:role note",
}

#: The column that ``value`` reads, where it is not "value".
VALUE_COLUMN = {"capture_table3": "tokens_per_s"}

_DTYPES = {"count": "int64", "count?": "Int64", "number": "float64", "number?": "float64", "flag": "bool"}
#: kind -> what a cell must be, as a pattern and in words, and how it is read.
_CELLS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "key": (".+", "text", str),
    "text": (".+", "text", str),
    "count": ("0*[1-9][0-9]*", "a whole number > 0", int),
    "number": (r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", "a number", float),
    "flag": ("true|false", "true or false", "true".__eq__),
    "role": ("|".join(ROLES), f"one of {', '.join(ROLES)}", str),
}
_BLANK = {"text?": "", "number?": np.nan, "count?": pd.NA}
_SHOWN_VALUES = 20


def load(name: str) -> pd.DataFrame:
    """A table by its name, "kvpr_table5": one row a measurement, in the file's order.

    Text is text, "" where the cell is blank; counts are int64 (Int64 where some are blank), numbers float64 (NaN where
    blank), flags bool. Raises InputError for a name that is no table, and for a broken file (file, row and column).
    """
    if name not in TABLES:
        raise unknown("reference table", name, TABLES)
    return _read_once(FOLDER / f"{name}.csv", TABLES[name]).copy()


def rows(name: str, /, **equals) -> pd.DataFrame:
    """Return the rows of a table whose columns equal the given cells; None is a blank cell.

    ``rows("kvpr_table3_4", model="OPT-13B", method="KVPR")``. Raises InputError where no row matches; it names the
    column that left none and that column's values in the rows that matched until then.
    """
    frame: Any = load(name)
    chosen, before = np.ones(len(frame), dtype=bool), ""
    for column, wanted in equals.items():
        if column not in frame.columns:
            raise unknown(f"column of {name}", column, frame.columns)
        if not (wanted is None or isinstance(wanted, (str, bool, int, float, np.generic))):
            raise InputError(f"{name}: {column} is compared with one value, not with {wanted!r}")
        cells, condition = frame[column], f"{column} = {wanted!r}"
        if wanted is None:
            matches = _is_blank(cells)
        else:  # 1 is not true
            matches = (cells == wanted).fillna(False).astype(bool) & (isinstance(wanted, bool) == (cells.dtype == bool))
        matching = chosen & matches.to_numpy()
        if not matching.any():
            raise InputError(f"{name}: no row has {condition}{before}; {_values(cells[chosen])}")
        chosen, before = matching, f"{before}, {condition}" if before else f" where {condition}"
    return frame.loc[chosen].reset_index(drop=True)


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
    records = rows(name, **equals).to_dict("records")
    if len(records) > 1:
        ignored = VALUE_COLUMN.get(name, "value")
        differing = [c for c in records[0] if c != ignored and len({str(record[c]) for record in records}) > 1]
        reason = f"they differ in {', '.join(map(str, differing))}" if differing else "they are alike"
        where = ", ".join(f"{column} = {wanted!r}" for column, wanted in equals.items()) or "anything"
        raise InputError(f"{name}: {len(records)} rows match where {where}, not one; {reason}")
    return {str(column): cell for column, cell in records[0].items()}


def value(name: str, /, **equals) -> float:
    """Return the number that ``equals`` picks, in the unit of its row; InputError unless exactly one row matches."""
    column = VALUE_COLUMN.get(name, "value")
    record = row(name, **equals)
    if column not in record:
        raise InputError(f"{name} has no column of values: take row({name!r}, …) and the column")
    return float(record[column])


def check_role(frame: pd.DataFrame, role: str) -> pd.DataFrame:
    """Return the frame itself if every row has this role; else raise InputError with the first row that has another.

    ``fit(check_role(rows(…), "calibrate"))`` can never be fitted on what it is later compared with.
    """
    if role not in ROLES:
        raise unknown("role", role, ROLES)
    if frame.empty:
        raise InputError(f"no rows are given where {role} rows are needed")
    wrong = frame.loc[frame["role"] != role]
    if len(wrong):
        first = f"the first is {wrong['role'].iloc[0]}, of {wrong['source'].iloc[0]}"
        raise InputError(f"{len(wrong)} of {len(frame)} rows are not {role} rows: {first}")
    return frame


def read_table(path: Path, columns: str) -> pd.DataFrame:
    """Read a CSV that has just these columns (noted as in TABLES), in any order; InputError names file, row, column."""
    kinds = {name: kind or "text" for name, _, kind in (column.partition(":") for column in columns.split())}
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


_read_once = cache(read_table)


def _parse(cell: str, kind: str):
    """A cell's value; ValueError with the reason."""
    if not cell and kind in _BLANK:
        return _BLANK[kind]
    pattern, wanted, read = _CELLS[kind.removesuffix("?")]
    if not re.fullmatch(pattern, cell, re.DOTALL):
        raise ValueError(f"{cell!r} is not {wanted}" if cell else f"it is blank, but a {kind} is needed")
    return read(cell)


def _is_blank(cells) -> pd.Series:
    return cells.isna() | (cells == "").fillna(False).astype(bool)


def _values(cells) -> str:
    """Describe the values of a column."""
    blank = _is_blank(cells)
    known = list(map(str, cells[~blank].unique()))
    if not known:
        return f"{cells.name} is blank there"
    more = f", … ({len(known)} values)" if len(known) > _SHOWN_VALUES else ""
    return f"{cells.name} is one of {', '.join(known[:_SHOWN_VALUES])}{more}{' or blank' if blank.any() else ''}"
