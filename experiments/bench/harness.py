"""What every bench uses: the table of rows with their bars, timed calls, and rounds on a shared machine."""

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from tqdm import tqdm

from flexhybrid.core.files import write_by_rename
from flexhybrid.runtime.profiling.cpu_use import MOST_OTHERS, CpuUse

LIBRARIES = ("torch", "numpy", "scipy", "transformers")
EXTRA_ROUNDS = 5  #: rounds added while other processes disturb them

Result = TypeVar("Result")

#: Benches by part, in the order in which their modules are imported.
BENCHES: dict[str, list[Callable[["Table"], None]]] = {}


def bench(part: str) -> Callable:
    """Register a function that adds rows to a table: ``make bench ARGS="--only PART"`` runs it."""

    def register(function: Callable) -> Callable:
        BENCHES.setdefault(part, []).append(function)
        return function

    return register


class Table:
    """The rows of a bench, printed as they are added, and the file that they are saved to.

    The file holds {"header": {machine, commit, versions, date, parts}, "rows": {name: row}}; "parts" has the commit and
    date of each part's latest run. With a ``path`` it is written after each row. A row is {value, bar, unit, ok, part}
    with conditions of the figure and, where a figure has several rounds, their raw "samples", whose median or worst is
    the value. A figure without a bar has bar None; one that failed is {error, ok: False, part}. ``beside`` is called
    for each row, and its result joins the row.
    """

    def __init__(self, machine: str = "", path: Path | None = None, beside: Callable[[], dict] = dict):
        self.path, self.beside = path, beside
        self.rows: dict[str, dict] = {}
        self.part = ""  #: of the rows that are added now
        versions = {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES}
        self.header = {"machine": machine, "commit": commit(), "versions": versions, "date": _now(), "parts": {}}

    def read(self, path: Path, parts: Collection[str]) -> None:
        """Read the rows of these parts from a file, if it exists (files without a header too)."""
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            if "header" in content:
                self.header["parts"] = content["header"]["parts"]
                content = content["rows"]
            self.rows = {name: row for name, row in content.items() if row.get("part") in parts}

    def renew(self, part: str) -> None:
        """Drop the rows of a part; the rows that are added next belong to it."""
        self.part = part
        self.rows = {name: row for name, row in self.rows.items() if row.get("part") != part}
        self.header["parts"][part] = {"commit": self.header["commit"], "date": _now()}

    def at_least(self, name: str, value: float, bar: float, unit: str, **conditions) -> None:
        """Add a figure that must be at least ``bar``."""
        self._add(name, value, bar, unit, ">=", conditions)

    def at_most(self, name: str, value: float, bar: float, unit: str, **conditions) -> None:
        """Add a figure that must be at most ``bar``."""
        self._add(name, value, bar, unit, "<=", conditions)

    def tell(self, name: str, value: float, unit: str, **conditions) -> None:
        """Add a figure that has no bar."""
        row = {"value": float(value), "bar": None, "unit": unit, "ok": True, "part": self.part}
        self._keep(name, row | conditions, f"     {name:58s} {value:14.4g} {unit}")

    def failed(self, name: str, error: str, **conditions) -> None:
        """Add a row with the reason for a missing figure."""
        row = {"error": error, "ok": False, "part": self.part}
        self._keep(name, row | conditions, f"FAIL {name:58s} {error}")

    def _add(self, name: str, value: float, bar: float, unit: str, relation: str, conditions: dict) -> None:
        ok = bool(value >= bar if relation == ">=" else value <= bar)
        row = {"value": float(value), "bar": bar, "unit": unit, "ok": ok, "part": self.part}
        said = f"{'ok  ' if ok else 'MISS'} {name:58s} {value:14.4g} {relation} {bar:g} {unit}"
        self._keep(name, row | conditions, said)

    def _keep(self, name: str, row: dict, said: str) -> None:
        self.rows[name] = row | self.beside()
        if self.path:
            self.save(self.path)
        tqdm.write(said)

    def errors(self, name: str, errors: Sequence[float], median_bar: float | None, worst_bar: float) -> None:
        """Add the median (unless its bar is None) and the worst of relative errors, in percent like their bars."""
        percent = [100 * abs(float(error)) for error in errors]
        if median_bar is not None:
            self.at_most(f"{name}, median error", statistics.median(percent), median_bar, "%", samples=percent)
        self.at_most(f"{name}, worst error", max(percent), worst_bar, "%", samples=percent)

    def disturbed(self, name: str, shares: Sequence[float | None]) -> None:
        """Count the rounds in which other processes used more than MOST_OTHERS of the cores."""
        known = [share for share in shares if share is not None]
        count, where = sum(share > MOST_OTHERS for share in known), "with others on more than 5 % of the cores"
        self.at_most(f"{name} {where}", count, 0, "rounds", samples=known)

    def save(self, path: Path) -> None:
        write_by_rename(path, json.dumps({"header": self.header, "rows": self.rows}, indent=1))


def commit() -> str | None:
    """Return the commit of this working tree, "+" behind it where files differ from it; None outside of git."""
    folder = Path(__file__).parent
    try:
        command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def seconds_of(action: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def seconds_in_turn(
    calls: Mapping[str, Callable[[int], object]], turns: int, warm_up: int = 0
) -> dict[str, list[float]]:
    """Time the calls one after another, ``turns`` times, after ``warm_up`` untimed turns; each gets the turn's number.

    Side by side, a slow moment of the machine disturbs all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-warm_up, turns):
        for name, call in calls.items():
            start = time.perf_counter()
            call(turn)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


class Round(NamedTuple, Generic[Result]):
    """The result of a round, and the share of the cores that other processes used meanwhile."""

    others: float
    result: Result


def least_disturbed(action: Callable[[], Result], count: int) -> list[Round[Result]]:
    """Repeat ``action`` until ``count`` rounds were undisturbed, at most EXTRA_ROUNDS more; return the least disturbed.

    No prediction covers the processor time of other processes.
    """
    rounds: list[Round[Result]] = []
    while len(rounds) < count + EXTRA_ROUNDS and sum(done.others <= MOST_OTHERS for done in rounds) < count:
        before = CpuUse.now()
        result = action()
        rounds.append(Round(CpuUse.now().others_since(before) or 0.0, result))
    return sorted(rounds, key=lambda done: done.others)[:count]
