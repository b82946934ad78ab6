"""A paper that is reproduced: its title, the numbers of its text, its constants, and rows and records made of them.

Files beside this one hold what needs no code: ``experiments.csv`` (one row an experiment, in the order of the report:
name, function, title, what the paper did), ``constants.csv`` (unit, physical range and reason of every constant that no
paper states), and ``notes/`` (each experiment's notes and mismatches, with {facts} that it computes).
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from experiments import reference
from experiments.reproduce.experiment import ASIDE, Constant, Experiment, Figure, Row, table

_FOLDER = Path(__file__).parent


Series = Mapping[str, Sequence[float] | np.ndarray]  #: numbers over some xs, by name


@cache
def listing() -> dict[str, dict[str, str]]:
    """Every experiment's row of experiments.csv by its name."""
    rows = reference.read_table(_FOLDER / "experiments.csv", "name:key function title description")
    return {row["name"]: row for row in rows.to_dict("records")}


@cache
def _ranges() -> dict[tuple[str, str], dict]:
    """(testbed, name) -> unit, low, high, why."""
    rows = reference.read_table(_FOLDER / "constants.csv", "testbed name unit low:number high:number why")
    return {(row.pop("testbed"), row["name"]): row for row in rows.to_dict("records")}


@cache
def _remarks(paper: str) -> dict[str, tuple[list[str], list[str]]]:
    """Return heading -> (notes, mismatches) of notes/<paper>.md: list items, as formats of the experiment's facts."""
    remarks = {}
    for section in re.split("^# ", (_FOLDER / "notes" / f"{paper}.md").read_text(encoding="utf-8"), flags=re.M)[1:]:
        heading, _, text = section.partition("\n")
        items = (re.split("^- ", part, flags=re.M)[1:] for part in (text + "## Mismatches").split("## Mismatches")[:2])
        notes, mismatches = ([" ".join(item.split()) for item in part] for part in items)
        remarks[heading] = notes, mismatches
    return remarks


def _filled(texts: Sequence[str], facts: Mapping[str, object]) -> list[str]:
    """Fill the facts into the texts; a text that is one fact, and that fact a list, becomes its items."""
    filled: list[str] = []
    for text in texts:
        fact = facts.get(text.strip("{}"))
        filled += fact if isinstance(fact, list) else [text.format(**facts)]
    return filled


@dataclass(frozen=True)
class Paper:
    """A paper by its key: the testbed in constants.csv, and ``<key>_headlines`` of the reference numbers.

    ``cited_as`` begins the sources of the paper's reference tables; rows leave it out.
    """

    key: str
    title: str
    cited_as: str = ""

    def value(self, row_id: str) -> float:
        """Return a number of the paper's text."""
        return reference.value(f"{self.key}_headlines", id=row_id)

    def headline(self, row_id: str, ours: float, quantity: str, **more) -> Row:
        """Return the row that compares ``ours`` with a number of the paper's text, in that number's unit and role."""
        record = reference.row(f"{self.key}_headlines", id=row_id)
        place = record["source"].removeprefix(f"{self.cited_as} ")
        return printed(record, ours, quantity, f"{row_id} ({place})", **more)

    def headlines(self, row_ids: str, ours: float, quantity: str, **more) -> list[Row]:
        """Return a row for each place that prints a number (ids separated by blanks); one value is judged once."""
        rows: list[Row] = []
        for row_id in row_ids.split():
            row = self.headline(row_id, ours, quantity, **more)
            if first := next((other for other in rows if other["paper"] == row["paper"]), None):
                row.setdefault(ASIDE, f"the number of {first['source'].split()[0]} again")
            rows.append(row)
        return rows

    def beside(self, row_id: str, ours: float, quantity: str, **more) -> Row:
        """Return a context row that shows ``ours`` beside a number of the paper's text."""
        record = reference.row(f"{self.key}_headlines", id=row_id)
        return context(quantity, ours, record["unit"], record["value"], row_id, **more)

    def constant(self, name: str, value: float, testbed: str | None = None) -> Constant:
        """Return a constant with its unit, range and reason from constants.csv; by default of the paper's testbed."""
        return Constant(value=value, **_ranges()[testbed or self.key, name])

    def experiment(
        self,
        name: str,
        rows: Sequence[Row] | pd.DataFrame,
        figures: Sequence[Figure] = (),
        constants: Sequence[Constant] = (),
        **facts: object,
    ) -> Experiment:
        """Return the experiment of this name: title and description from experiments.csv, remarks from notes/.

        ``facts`` fill the remarks. A remark may also be the heading of other notes of its file, "{heading}".
        """
        remarks = _remarks(self.key)
        facts = {heading: notes for heading, (notes, _) in remarks.items()} | facts
        notes, mismatches = (tuple(_filled(texts, facts)) for texts in remarks.get(name, ((), ())))
        return Experiment(
            name=name,
            paper=self.title,
            **{field: listing()[name][field] for field in ("title", "description")},
            rows=rows if isinstance(rows, pd.DataFrame) else table(rows),
            figures=tuple(figures),
            constants=tuple(constants),
            notes=notes,
            mismatches=mismatches,
        )


CAPTURE = Paper(
    "capture",
    "CAPTURE: Throughput-Oriented LLM Inference via KV-Activation Hybrid Caching with a Single GPU, IEEE CAL 2025; "
    "HybridServe, arXiv 2501.01792",
)
KVPR = Paper(
    "kvpr",
    "KVPR: Efficient LLM Inference with I/O-Aware KV Cache Partial Recomputation, Findings of ACL 2025",
    cited_as="kvpr",
)
INFINIGEN = Paper(
    "infinigen",
    "InfiniGen: Efficient Generative Inference of LLMs with Dynamic KV Cache Management, OSDI 2024",
    cited_as="infinigen",
)
CASCADE = Paper(
    "cascade",
    "HybridServe: Efficient Serving of Large AI Models with Confidence-Based Cascade Routing, Edinburgh, ICDCS 2025",
    cited_as="hybridserve_cascade",
)
FLEXGEN = Paper("flexgen", "FlexGen: High-Throughput Generative Inference of LLMs with a Single GPU, ICML 2023")


# ---- rows


def judged(quantity: str, ours: float, paper: float, unit: str, source: str, **more) -> Row:
    """Return a held-out row: ``ours`` is judged by the paper's number."""
    return {"what": quantity, "paper": paper, "ours": ours, "unit": unit, "role": "validate", "source": source, **more}


def printed(record, ours: float, quantity: str, source: str, **more) -> Row:
    """Return the row that compares ``ours`` with a record of a reference table, in the record's unit and role."""
    return judged(quantity, float(ours), record["value"], record["unit"], source) | {"role": record["role"]} | more


def context(quantity: str, ours: float, unit: str = "", paper: float = math.nan, source: str = "", **more) -> Row:
    """Return a row that is shown and not judged."""
    return judged(quantity, float(ours), paper, unit, source) | {"role": "context"} | more


def contexts(series: Series, xs: Collection, quantity: str, unit: str) -> list[Row]:
    """Return a context row for each point of some series; ``quantity`` is a format of {series} and {x}."""
    return [
        context(quantity.format(series=label, x=x), number, unit)
        for label, numbers in series.items()
        for x, number in zip(xs, numbers, strict=True)
    ]


def values_of(constants: Sequence[Constant]) -> dict[str, float]:
    """Return the constants' values by name."""
    return {constant.name: constant.value for constant in constants}


def points(series: Series, xs: Collection, x: str, y: str, name: str) -> pd.DataFrame:
    """Return a figure's frame, with columns ``x``, ``y`` and ``name``: one point for each series and each of ``xs``."""
    return pd.DataFrame(
        [
            {x: position, y: float(number), name: label}
            for label, numbers in series.items()
            for position, number in zip(xs, numbers, strict=True)
        ]
    )
