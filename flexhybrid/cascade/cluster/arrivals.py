"""Arrival times of requests: Poisson, or a trace file."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np

from flexhybrid.cascade.placement.instances import check_rate
from flexhybrid.core.errors import InputError, is_integer

COLUMN = "arrival_s"


def poisson(rate: float, count: int, seed: int = 0) -> np.ndarray:
    """Return the seconds at which ``count`` requests arrive, ``rate`` a second on average [count]."""
    check_rate(rate)
    if not is_integer(count) or count < 1:
        raise InputError(f"the number of requests is {count!r}; it must be a whole number >= 1")
    return np.cumsum(np.random.default_rng([seed, 1]).exponential(1 / rate, count))


def read_trace(path: str | Path) -> np.ndarray:
    """Read seconds of arrival, from 0 on, from a CSV file's column ``arrival_s`` [requests].

    Raises InputError with the row of a cell that is no number, negative, or before the one above it.
    """
    seconds: list[float] = []
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if COLUMN not in (reader.fieldnames or ()):
                raise InputError(f"{path}: the header has no column {COLUMN!r}; it has {reader.fieldnames or 'none'}")
            for row in reader:
                last = seconds[-1] if seconds else 0.0
                seconds.append(_seconds(row[COLUMN] or "", last, f"{path}, row {reader.line_num}"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if not seconds:
        raise InputError(f"{path}: there is no request in it")
    return np.array(seconds)


def _seconds(cell: str, last: float, where: str) -> float:
    try:
        value = float(cell)
    except (TypeError, ValueError):
        raise InputError(f"{where}: {cell!r} is no time in seconds") from None
    if not math.isfinite(value) or value < 0:
        raise InputError(f"{where}: {cell!r} is no time in seconds from 0 on")
    if value < last:
        raise InputError(f"{where}: {value:g} s comes after {last:g} s; arrivals must not go back in time")
    return value
