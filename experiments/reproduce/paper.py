"""A paper that is reproduced: its title, the numbers of its text, its constants, and rows and records made of them.

Files beside this one hold what needs no code: ``experiments.csv`` (one row an experiment, in the order of the report:
name, function, title, what the paper did), ``constants.csv`` (unit, physical range and reason of every constant that no
paper states), and ``notes/`` (each experiment's notes and mismatches, with {facts} that it computes).
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from experiments import reference
from experiments.reproduce.experiment import (
    ASIDE,
    FAR,
    Constant,
    Experiment,
    Figure,
    Row,
    is_compared,
    is_judged,
    summary,
    table,
)
from sim import catalogue

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


#: Systems by the words that rows have for them.
SYSTEMS = ("act_only", "hybrid_static", "hybrid_full", "DeepSpeed", "Accelerate", "FlexGen", "KVPR", "H2O", "INT4")
SYSTEMS += ("InfiniGen", "UVM")


@dataclass(frozen=True)
class Paper:
    """A paper by its key: its experiments are called ``<key>-…``, its constants are those of the testbed ``<key>`` in
    constants.csv, and the numbers of its text are the reference table ``<key>_headlines``.
    """

    key: str
    title: str
    machines: tuple[str, ...]  #: the catalogue's entries that it is computed on
    system: str  #: its own system: of rows that name none
    cited_as: str = ""  #: how sources in its reference tables begin; rows leave it out

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

    def system_of(self, quantity: str) -> str:
        """Return the system that a row is about: the first that its text names before "over" or "than"."""
        text = re.split(" over | than ", quantity)[0]
        return min((name for name in SYSTEMS if name in text), key=text.index, default=self.system)

    def verdict(self, rows: pd.DataFrame) -> tuple[list[str], list[str]]:
        """Return what of the paper holds, and what does not and why: notes/<key>.md under "Verdict".

        ``rows``: ``compared`` of all its experiments. Their numbers fill the texts: {ch020[ours]} is a row by its id,
        {FlexGen[median]} is of the summary of a system's rows, {kvpr-fig6[mean]} of an experiment's. Raises KeyError
        for a number that is not among them.
        """
        groups = [group for column in ("system", "experiment") for group in rows.groupby(column)]
        facts: dict[str, object] = {str(name): summary(of_group)._asdict() for name, of_group in groups}
        facts |= {row["source"].split()[0]: row for row in reversed(rows.to_dict("records")) if row["source"]}
        holds, fails = ([text.format(**facts) for text in texts] for texts in _remarks(self.key)["Verdict"])
        return holds, fails

    def constant(self, name: str, value: float, testbed: str | None = None) -> Constant:
        """Return a constant with its unit, range and reason from constants.csv; by default of the paper's testbed. A
        machine that a reader has changed may have any value."""
        known = _ranges()[testbed or self.key, name]
        if catalogue.FOLDER != catalogue.SHIPPED:
            known = {**known, "low": min(known["low"], value), "high": max(known["high"], value)}
        return Constant(value=value, **known)

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
    ("rtx4090-capture",),
    "hybrid_full",
)
KVPR = Paper(
    "kvpr",
    "KVPR: Efficient LLM Inference with I/O-Aware KV Cache Partial Recomputation, Findings of ACL 2025",
    ("a100-kvpr", "rtx5000-kvpr"),
    "KVPR",
    cited_as="kvpr",
)
INFINIGEN = Paper(
    "infinigen",
    "InfiniGen: Efficient Generative Inference of LLMs with Dynamic KV Cache Management, OSDI 2024",
    ("a6000-infinigen",),
    "InfiniGen",
    cited_as="infinigen",
)
CASCADE = Paper(
    "cascade",
    "HybridServe: Efficient Serving of Large AI Models with Confidence-Based Cascade Routing, Edinburgh, ICDCS 2025",
    ("t4",),
    "HybridServe (Edinburgh)",
    cited_as="hybridserve_cascade",
)
FLEXGEN = Paper(
    "flexgen",
    "FlexGen: High-Throughput Generative Inference of LLMs with a Single GPU, ICML 2023",
    ("t4-flexgen", "t4"),
    "FlexGen",
)
PAPERS = {paper.key: paper for paper in (CAPTURE, KVPR, INFINIGEN, CASCADE, FLEXGEN)}


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


#: Columns of the table of all rows that have a number of the paper.
COMPARED = ("experiment", "what", "system", "paper", "ours", "unit", "error", "role", ASIDE, "source")


def compared(experiments: Iterable[Experiment]) -> pd.DataFrame:
    """Return the rows of experiments that have a number of the paper, without context: columns COMPARED."""
    tables = []
    for one in experiments:
        rows, paper = one.rows, PAPERS.get(one.name.partition("-")[0])
        rows = rows.loc[is_compared(rows)]
        systems = [paper.system_of(str(what)) if paper else "" for what in rows["what"]]
        rows = rows.assign(experiment=one.name, system=systems, aside=rows.get(ASIDE, ""))
        tables.append(rows.loc[:, list(COMPARED)])
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=list(COMPARED))


def explanations(paper: str) -> dict[tuple[str, str], str]:
    """Return (experiment, row) -> why that row is far off: notes/<paper>.md under "Beyond 30 %", where an item is
    "experiment | row | why"."""
    items, _ = _remarks(paper).get("Beyond 30 %", ([], [])) if paper in PAPERS else ([], [])
    parts = ([part.strip() for part in item.split(" | ", 2)] for item in items)
    return {(name, what): why for name, what, why in parts}


def far_off(experiments: Iterable[Experiment]) -> list[dict]:
    """Return the held-out rows whose |error| is beyond FAR, worst first: experiment, what, paper, ours, unit, error and
    ``why``, the explanation; "" where there is none.

    Numbers fill the explanations: {ours}, {paper} and {error} are the row's own, {row[quantity]} is ours of another row
    of its experiment, context too. Raises KeyError for a row that is not there.
    """
    found = []
    for one in experiments:
        known = explanations(one.name.partition("-")[0])
        ours = dict(zip(reversed(one.rows["what"].tolist()), reversed(one.rows["ours"].tolist()), strict=True))
        held_out = one.rows.loc[is_judged(one.rows) & (one.rows["role"] == "validate").to_numpy()]
        for row in held_out.loc[held_out["error"].abs() > FAR].to_dict("records"):
            cells = {name: row[name] for name in ("what", "paper", "ours", "unit", "error")}
            why = known.get((one.name, row["what"]), "").format(row=ours, **cells)
            found.append({"experiment": one.name, **cells, "why": why})
    return sorted(found, key=lambda row: -abs(row["error"]))


def unexplained(experiments: Sequence[Experiment]) -> list[str]:
    """Return the rows beyond FAR without an explanation, and the explanations of rows that are not, or no more."""
    far = {(row["experiment"], row["what"]): row["why"] for row in far_off(experiments)}
    names = {one.name for one in experiments}
    known = {key for paper in {name.partition("-")[0] for name in names} for key in explanations(paper)}
    found = [f"beyond 30 % without an explanation: {', '.join(key)}" for key, why in far.items() if not why]
    stale = sorted(key for key in known if key[0] in names and key not in far)
    return found + [f"explained, but not beyond 30 %: {', '.join(key)}" for key in stale]


def as_csv(rows: pd.DataFrame) -> str:
    """Return compared rows as summary.csv has them."""
    return rows.to_csv(index=False, lineterminator="\n", float_format="%.5g")


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
