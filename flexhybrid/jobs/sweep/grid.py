"""Reads a grid, a JSON or TOML file with values for each key, and combines the values into points."""

import itertools
import json
import math
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flexhybrid.core.errors import InputError, file_errors, is_integer, shown, unknown
from flexhybrid.core.files import load_json, named_once

#: Converts a value of a grid file; raises InputError with the reason if it cannot be used.
Checker = Callable[[Any], Any]

MAX_POINTS = 5_000_000


def read_points(path: str | Path, keys: dict[str, Checker], required: Sequence[str] = ()) -> list[dict]:
    """Return the points of a grid file {key: value or list of values}, each once.

    The key "grids" may have a list of such tables; keys outside of it are defaults for each of them. The points are all
    combinations of a table's values, the last key varying fastest. Raise InputError that names file, key and value
    for a wrong value, and for more than MAX_POINTS.
    """
    data = _parse(Path(path))
    several = data.pop("grids", [{}])
    if not isinstance(several, list) or not several or not all(isinstance(value, dict) for value in several):
        raise InputError(f"{path}: grids must be a list of one or more tables, not {shown(several)}")
    grids = []
    for index, own in enumerate(several):
        where = f"{path}: " if several == [{}] else f"{path}, grids[{index}]: "
        axes = {key: _axis(where, key, value, keys) for key, value in {**_dotted(data), **_dotted(own)}.items()}
        if missing := next((key for key in required if key not in axes), None):
            raise InputError(f"{where}it lacks {missing!r}; every grid needs {', '.join(required)}")
        if not axes:
            raise InputError(f"{where}it has no keys; known: {', '.join(sorted(keys))}")
        grids.append(axes)
    if (count := sum(math.prod(map(len, axes.values())) for axes in grids)) > MAX_POINTS:
        raise InputError(f"{path}: {count:,} points; a sweep takes at most {MAX_POINTS:,}. Split the grid.")
    combined = (dict(zip(axes, values, strict=True)) for axes in grids for values in itertools.product(*axes.values()))
    return list({json.dumps(point, sort_keys=True): point for point in combined}.values())


def positive_integer(value) -> int:
    """Return the value as an integer; 8.0 counts as 8. Raise InputError if it is not a whole number >= 1."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not is_integer(value) or value < 1:
        raise InputError("must be a whole number >= 1")
    return int(value)


def one_of(subject: str, names: Sequence[str]) -> Checker:
    """Return a checker that accepts only ``names``; its error suggests similar ones."""

    def check(value):
        if not isinstance(value, str) or value not in names:
            raise unknown(subject, value, names)
        return value

    return check


def _dotted(table: dict) -> dict:
    """Return a table with nested keys joined: {"bits": {"kv": 8}}, as TOML reads bits.kv, becomes {"bits.kv": 8}."""
    flat = {}
    for key, value in table.items():
        inner = _dotted(value) if isinstance(value, dict) else {}
        flat |= {f"{key}.{part}": of_part for part, of_part in inner.items()} or {key: value}
    return flat


def _axis(where: str, key: str, value, keys: dict[str, Checker]) -> tuple:
    """Return the checked values of a key, each once. Raise InputError, which begins with ``where``, for a wrong one."""
    if key not in keys:
        raise InputError(f"{where}{unknown('key', key, sorted(keys))}")
    values = value if isinstance(value, list) else [value]
    if not values:
        raise InputError(f"{where}{key} = []: a list needs at least one value")
    checked = {}
    for element in values:
        try:
            if isinstance(element, float) and not math.isfinite(element):
                raise InputError("must be finite")
            checked_value = keys[key](element)
            checked[json.dumps(checked_value)] = checked_value
        except (ValueError, TypeError, OverflowError) as error:
            raise InputError(f"{where}{key} = {shown(element)}: {error}") from None
    return tuple(checked.values())


def _parse(path: Path) -> dict:
    """Return the table of a JSON or TOML file. Raise InputError with line and column for a syntax error."""
    if path.suffix.lower() not in (".json", ".toml"):
        raise InputError(f"{path}: a grid is a .json or .toml file, not {path.suffix or 'one without a suffix'}")
    if path.suffix.lower() == ".toml":
        data = _load_toml(path)
    else:
        data = load_json(path, "grid ", object_pairs_hook=named_once, parse_constant=_no_constant)
    if not isinstance(data, dict):
        raise InputError(f"{path}: a grid is a table of keys and values, not {shown(data)}")
    return data


def _no_constant(name: str):
    """Refuse JSON's NaN and Infinity."""
    raise ValueError(f"{name} is not allowed in a grid")


def _load_toml(path: Path) -> dict:
    """Return the table of a TOML file. Raise InputError with line and column for a syntax error."""
    with file_errors(f"read grid {path}"):
        content = path.read_text(encoding="utf-8-sig")
    try:
        return tomllib.loads(content)
    except (ValueError, RecursionError) as error:
        lines = content.split("\n")
        end = f"at line {len(lines)}, column {len(lines[-1]) + 1}, the end of the file"
        raise InputError(f"cannot read grid {path}: {str(error).replace('at end of document', end)}") from None
