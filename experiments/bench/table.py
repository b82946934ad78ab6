"""The table of a bench: figures with their bars, as they come and in bench.json."""

from __future__ import annotations

import json
from pathlib import Path

from tqdm import tqdm

from flexhybrid.core.hardware import write_by_rename


class Table:
    """Collects rows and prints them as they come."""

    def __init__(self):
        self.rows: dict[str, dict] = {}
        self.part = ""  #: of the bench that is at work

    def renew(self, part: str) -> None:
        """Forget a part's rows: what it adds now takes their place."""
        self.part = part
        self.rows = {name: row for name, row in self.rows.items() if row.get("part") != part}

    def add(self, name: str, value: float, bar: float, unit: str, at_least: bool = True, **more) -> None:
        """``more``: conditions of the figure, kept beside it."""
        ok = bool(value >= bar if at_least else value <= bar)
        self.rows[name] = {"value": float(value), "bar": bar, "unit": unit, "ok": ok, "part": self.part, **more}
        tqdm.write(f"{'ok  ' if ok else 'MISS'} {name:58s} {value:14.4g} {'>=' if at_least else '<='} {bar:g} {unit}")

    def save(self, path: Path) -> None:
        write_by_rename(path, json.dumps(self.rows, indent=1))
