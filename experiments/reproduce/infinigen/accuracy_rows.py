"""What the accuracy experiments of InfiniGen share: the stored studies, and rows and points with intervals.

A study is measured on texts of different documents. Intervals are 95 %, a bootstrap over documents; of two policies the
difference is paired, text by text. A difference is called one where its interval excludes none (``shown``).
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

from experiments.reproduce.experiment import Row
from experiments.reproduce.infinigen import accuracy_policies as studied
from experiments.reproduce.paper import context
from flexhybrid.jobs.accuracy import bootstrap
from flexhybrid.jobs.accuracy.bootstrap import Interval

Study = dict  #: what ``experiments.studies.accuracy_study`` has written of a model


@cache
def studies() -> dict[str, Study]:
    """Return model -> its measurements, for all models that were measured."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(studied.RESULTS.glob("*.json"))}


def beside(folder: Path) -> dict[str, dict]:
    """Return model -> what another study has written of it into ``folder``, of the models with a study of accuracy."""
    paths = {model: folder / f"{model}.json" for model in studies()}
    return {model: json.loads(path.read_text(encoding="utf-8")) for model, path in paths.items() if path.is_file()}


def by_policy(part: dict) -> dict[str, dict]:
    """Return policy -> its row, of a part of a study."""
    return {row["policy"]: row for row in part["policies"]}


def cell(row: dict, name: str) -> Interval:
    """Return a figure of a stored row with its interval."""
    ends = (row[name], row[f"{name}_low"], row[f"{name}_high"])
    return Interval(*(math.nan if end is None else end for end in ends))


def row(quantity: str, found: Interval, unit: str = "", times: float = 1.0, **more) -> Row:
    """Return a context row of a figure with its interval, in a unit that is so many times its own."""
    ends = {"low": times * found.low, "high": times * found.high}
    return context(quantity, times * found.value, unit) | ends | more


def point(found: Interval, x: str, at: object, series: str, times: float = 1.0) -> dict:
    """Return the point of a figure, with its interval as an error bar."""
    value, low, high = (times * number for number in found)
    return {x: at, "y": value, "series": series, "low": low, "high": high}


def against(part: dict, ours: dict, others: dict) -> Interval:
    """Return the perplexity of a policy over another one's of the same texts."""
    name = "logprob_by_document"
    return bootstrap.perplexity_ratio(ours[name], others[name], part["texts_by_document"])


def comparison(quantity: str, part: dict, ours: dict, others: dict) -> tuple[Row, str]:
    """Return the row of a paired comparison, and what it says in words."""
    found = against(part, ours, others)
    is_shown = found.excludes(1.0)
    verdict = "no difference shown" if not is_shown else "worse" if found.value > 1 else "better"
    return row(
        quantity, found, shown=verdict
    ), f"{quantity}: {found.value:.3f} [{found.low:.3f}, {found.high:.3f}], {verdict}"
