"""Arrival times of requests, from a Poisson process or a trace file."""

import csv
import math
from pathlib import Path

import numpy as np

from flexhybrid.cascade.placement.instances import check_rate
from flexhybrid.core.errors import InputError, check, is_integer

COLUMN = "arrival_s"  #: column of a trace file


def poisson(rate: float, count: int, seed: int = 0) -> np.ndarray:
    """Return the arrival times in seconds [count] of a Poisson process with ``rate`` requests/s."""
    check_rate(rate)
    check("the number of requests", count, is_integer(count) and count >= 1, "a whole number >= 1")
    return np.cumsum(np.random.default_rng([seed, 1]).exponential(1 / rate, count))


def read_trace(path: str | Path) -> np.ndarray:
    """Return the arrival times in seconds [requests] of a CSV file's column ``arrival_s``.

    Raise InputError that names the row for a cell that is not a number, negative, or smaller than the one before.
    """
    seconds = [0.0]
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if COLUMN not in (reader.fieldnames or ()):
                raise InputError(f"{path}: the header has no column {COLUMN!r}; it has {reader.fieldnames or 'none'}")
            for row in reader:
                cell, where = row[COLUMN] or "", f"{path}, row {reader.line_num}"
                try:
                    seconds.append(float(cell))
                except ValueError:
                    seconds.append(math.nan)
                if not 0 <= seconds[-1] < math.inf:
                    raise InputError(f"{where}: {cell!r} is not a number of seconds >= 0")
                if seconds[-1] < seconds[-2]:
                    raise InputError(f"{where}: {cell} s comes after {seconds[-2]:g} s; times must not decrease")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if len(seconds) == 1:
        raise InputError(f"{path} has no requests")
    return np.array(seconds[1:])
