"""Recall of facts that are asked for after the eviction, from what ``experiments.studies.recall_study`` measured.

A text has M facts in its prompt and asks for them in the decode alone (multi-query associative recall). A policy that
evicts after the prompt does not know what will be asked. A head that keeps K places holds at most K of the M facts,
since each is read at a place of its own; S heads with choices of their own hold at most S · K. Answers to other facts
are right by chance, 1 / V of them: each number is drawn evenly from V.
"""

from __future__ import annotations

import json
from functools import cache

import numpy as np

from experiments.reproduce.experiment import Experiment, Figure, Row, lines
from experiments.reproduce.infinigen.accuracy_policies import RESULTS as ACCURACY
from experiments.reproduce.paper import INFINIGEN, context
from flexhybrid.jobs.accuracy import bootstrap

RESULTS = ACCURACY / "recall"
WHOLE_LAYERS = 2  #: of the figure's policies

RIGHT, KEPT = "right answers, %", "tokens kept or fetched in thinned layers, % of the prompt"


def most_held(places: float, facts: int, sets: int = 1) -> float:
    """Return the largest share of the facts that ``sets`` sets of ``places`` can hold."""
    return min(1.0, sets * places / facts)


def most_right(held: float, chance: float) -> float:
    """Return the share of right answers, in the mean, where a share ``held`` of the facts is read without an error."""
    return held + (1 - held) * chance


@cache
def studies() -> dict[str, dict]:
    """Return model -> its measurements, for all models that were measured."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}


def num_reading(study: dict) -> int:
    """Return how many heads behind layer 0 read facts, each from a set of places of its own."""
    return sum(head["reads"] for head in study["heads"])


def bound(study: dict, places: int) -> float:
    """Return the largest mean share of right answers of a cache that has evicted all but ``places`` of every head's."""
    return most_right(most_held(places, study["facts"], num_reading(study)), 1 / study["values"])


def _label(row: dict) -> str:
    """Return the method of a policy's row as a figure's legend has it."""
    if row["method"] == "infinigen":
        return "InfiniGen" if row["checkpoint"] == "skewed" else "InfiniGen, not skewed"
    return {"h2o": "H2O", "full": "full cache"}.get(row["method"], f"{row.get('bits')} bits")


def _only_places(row: dict) -> bool:
    """Return whether a policy's row is of a number of places, and of nothing else that sets it apart."""
    return "places" in row and not {"partial_ratio", "columns"} & row.keys()


def _whole(row: dict) -> str:
    return "layers 0 and 1 whole" if row["whole_layers"] == 2 else "layer 0 whole"


def _quantity(model: str, row: dict) -> str:
    words = [f"{name.replace('_', ' ')} {row[name]:g}" for name in ("alpha", "places", "partial_ratio") if name in row]
    words += ["columns of each request"] if "columns" in row else []
    words += [_whole(row)] if row["whole_layers"] else []
    return f"{model}: {', '.join([_label(row), *words])}"


def recall() -> Experiment:
    """Right answers against the tokens kept, with the bound of an evicting cache."""
    rows: list[Row] = []
    for model, study in studies().items():
        full = np.array(next(row["right_by_text"] for row in study["policies"] if row["method"] == "full"))
        for row in study["policies"]:
            right, lost = _right(row), bootstrap.mean_difference(100 * np.array(row["right_by_text"]), 100 * full)
            cells: Row = {"low": right.low, "high": right.high, "less_full": lost.value, "less_full_low": lost.low}
            cells |= {"less_full_high": lost.high, "seen": row["seen"], "looked_at": row["looked_at"]}
            moved = row["moved"] * (2 if row["method"] == "bits" else 1)  # over a cache of 16 bits; it ran in 32
            rows.append(context(_quantity(model, row), right.value, "%", moved=moved, **cells))
        for tokens, share in study["one_token"].items():
            rows.append(context(f"{model}: layers 1 and later see only the {tokens} of facts", 100 * share, "%"))
        for head in study["heads"]:
            quantity = f"{model}: layer {head['layer']}, head {head['head']}, alone sees the facts"
            rows.append(context(quantity, 100 * head["alone"], "%", without_it=100 * head["without"]))
        for row in study["kept"]:
            right, words = _right(row), f"{row['facts']} facts kept ({row['which']}), {_whole(row)}"
            rows.append(context(f"{model}: {words}", right.value, "%", low=right.low, high=right.high))
        for places in _places_of_h2o(study):
            rows.append(
                context(f"{model}: bound of an evicting cache, places {places}", 100 * bound(study, places), "%")
            )
    figures = [_over_places(model, study) for model, study in studies().items()]
    return INFINIGEN.experiment("infinigen-accuracy-recall", rows, figures)


def _right(row: dict) -> bootstrap.Interval:
    """Return the percentage of right answers, over texts."""
    return _interval(tuple(row["right_by_text"]))


@cache
def _interval(shares: tuple[float, ...]) -> bootstrap.Interval:
    return bootstrap.mean(100 * np.array(shares))


def _places_of_h2o(study: dict) -> list[int]:
    return sorted({row["places"] for row in study["policies"] if row["method"] == "h2o"})


def _over_places(model: str, study: dict) -> Figure:
    """Return right answers against places, of policies with layers 0 and 1 whole, and the bounds of evicting caches."""
    prompt, chance = 1 + 2 * study["facts"] + study["filler"], 1 / study["values"]
    points = []

    def add(series: str, places: int, right: bootstrap.Interval) -> None:
        ends = {"low": right.low, "high": right.high}
        points.append({"share": 100 * places / prompt, "right": right.value, "series": series} | ends)

    chosen = [row for row in study["policies"] if _only_places(row) and row["whole_layers"] == WHOLE_LAYERS]
    for row in chosen:
        add(_label(row), row["places"], _right(row))
    for row in study["kept"]:
        if row["which"] == "random" and row["facts"] and row["whole_layers"] == WHOLE_LAYERS:
            add("K facts at random", row["facts"], _right(row))
    name = "bound of an evicting cache" + (", K / M" if num_reading(study) == 1 else "")
    for places in _places_of_h2o(study):
        add(name, places, _exactly(bound(study, places)))
    for row in chosen:
        if row["method"] == "h2o":
            add("facts that H2O still sees", row["places"], _exactly(most_right(row["seen"], chance)))
    return lines(f"{model.lower()}-places", points, f"{model}: M = {study['facts']} facts", KEPT, RIGHT)


def _exactly(share: float) -> bootstrap.Interval:
    """Return a share that was computed, in percent, as an interval without a width."""
    return bootstrap.Interval(100 * share, 100 * share, 100 * share)
