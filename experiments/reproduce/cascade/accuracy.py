"""Accuracy of the cascade paper's shares (Table IV) and its curve of accuracy against energy (Fig. 6).

Both come from a model of requests: how hard a request is, which sizes get it right, how sure a size is of being right.
"""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.stats import norm

from experiments import reference
from experiments.reproduce.cascade import setup
from experiments.reproduce.cascade.setup import FAMILIES, Family
from experiments.reproduce.cascade.setup import family as family_of
from experiments.reproduce.experiment import Constant, Experiment, Row, lines
from experiments.reproduce.paper import CASCADE, context, judged
from flexhybrid.cascade.cluster.served import chain

REQUESTS = 40_000
COMMON = 0.7  #: correlation of two sizes' scores of a request
CURVE_SETS = 150  #: random thresholds of Fig. 6


@cache
def scores(name: str, common: float = COMMON) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (score, right, noise) of each size and request [models, requests].

    A score sums the request's ease, which all sizes share, and luck; a size is right where its score is above the
    threshold that leaves its published accuracy.
    """
    family, rng = family_of(name), np.random.default_rng(5)
    ease = rng.standard_normal(REQUESTS)
    luck, noise = rng.standard_normal((2, len(family.models), REQUESTS))
    score = math.sqrt(common) * ease + math.sqrt(1 - common) * luck
    return score, score > norm.ppf(1 - family.accuracy)[:, None], noise


def confidences(name: str, insight: float, common: float = COMMON) -> np.ndarray:
    """Return each size's confidence: its score seen through noise, ``insight`` their correlation [models, requests]."""
    score, _, noise = scores(name, common)
    return insight * score + math.sqrt(1 - insight**2) * noise


def accuracy(family: Family, shares: np.ndarray, insight: float, common: float = COMMON) -> float:
    """Return the accuracy (0..1) of the chain in which each size answers its share of the requests, surest first."""
    sure, right = confidences(family.name, insight, common), scores(family.name, common)[1]
    left, num_right = np.arange(REQUESTS), 0
    for i, share in enumerate(shares):
        count = len(left) if i == len(shares) - 1 else min(len(left), round(share * REQUESTS))
        order = np.argpartition(-sure[i, left], count - 1) if 0 < count < len(left) else np.arange(len(left))
        num_right += int(right[i, left[order[:count]]].sum())
        left = left[order[count:]]
    return num_right / REQUESTS


@cache
def insight_of(name: str, common: float = COMMON) -> float:
    """Return the insight with which AP's shares have the giant's accuracy, which is AP's definition (IV-B)."""
    family = family_of(name)
    shares, giant = family.shares("AP"), family.accuracy[-1]

    def gap(insight: float) -> float:
        return accuracy(family, shares, insight, common) - giant

    return float(np.asarray(brentq(gap, 0.0, 0.999, xtol=2e-3)))


def _printed(name: str, mode: str) -> float:
    return reference.value("cascade_tables", table="IV", family=name, mode=mode)


def _table4_rows(name: str) -> list[Row]:
    family, insight = family_of(name), insight_of(name)
    shares = {mode: family.shares(mode) for mode in setup.MODES}
    ours = {mode: 100 * accuracy(family, shares[mode], insight) for mode in setup.MODES}
    definition = "AP's own definition, by which insight is chosen"
    rows = [
        judged(f"{name}: HybridServe (EO)", ours["EO"], _printed(name, "EO"), "%", "Table IV"),
        judged(f"{name}: HybridServe (AP)", ours["AP"], _printed(name, "AP"), "%", "Table IV", aside=definition),
    ]
    for common in (0.5, 0.8):
        correlated = 100 * accuracy(family, shares["EO"], insight_of(name, common), common)
        rows.append(context(f"{name}: HybridServe (EO), sizes correlated {common:g}", correlated, "%"))
    inputs = dict(zip(family.models, family.accuracy, strict=True))
    again = "an input (Table II) printed again" + ", with another digit (note 40)" * (name == "ViT")
    for record in reference.rows("cascade_tables", table="IV", family=name).to_dict("records"):
        if record["model"] in inputs:
            quantity, percent = f"{name}: {record['model']} ({record['mode']})", 100 * inputs[record["model"]]
            rows.append(judged(quantity, percent, record["value"], "%", "Table IV", aside=again))
    second = 100 * family.accuracy[-2]
    above, paper = ours["EO"] - second, _printed(name, "EO") - second
    return [*rows, context(f"{name}: EO above the second largest size", above, "percentage points", paper)]


def table4() -> Experiment:
    """EO's accuracy from its shares."""
    rows = [row for name in FAMILIES for row in _table4_rows(name)]
    return CASCADE.experiment("cascade-table4", rows, constants=_constants())


def _constants() -> tuple[Constant, ...]:
    insights = []
    for name in FAMILIES:
        constant = CASCADE.constant("insight", insight_of(name))
        insights.append(replace(constant, name=f"insight-{name}", fitted_on="AP's definition: the giant's accuracy"))
    return (CASCADE.constant("common", COMMON), *insights)


# ---- Fig. 6


def curve(name: str) -> pd.DataFrame:
    """Return accuracy and energy (1 is the giant alone) of the random shares that no other set beats."""
    family, rng = family_of(name), np.random.default_rng(6)
    points = []
    for shares in rng.dirichlet(np.full(len(family.models), 0.5), CURVE_SETS):
        energy = float(chain(shares).visits @ family.relative)
        points.append((accuracy(family, shares, insight_of(name)), energy))
    points.append((family.accuracy[-1], 1.0))
    points = sorted(points, key=lambda point: (point[1], -point[0]))
    best, kept = -1.0, []
    for right, energy in points:
        if right > best:
            best = right
            kept.append({"energy": energy, "accuracy": 100 * right, "family": name})
    return pd.DataFrame(kept)


def figure6() -> Experiment:
    """The curve, and where AP and EO lie on it."""
    frames, rows = [], []
    for name in FAMILIES:
        family, best = family_of(name), curve(name)
        frames.append(best.assign(accuracy=best["accuracy"] - 100 * family.accuracy[-1]))
        for mode in setup.MODES:
            right = 100 * accuracy(family, family.shares(mode), insight_of(name))
            energy = 1 / setup.routing_ratio(family, mode)
            rows.append(context(f"{name}, {mode}: energy, the giant's is 1", energy, "x"))
            rows.append(context(f"{name}, {mode}: accuracy", right, "%"))
        quantity = f"{name}: best accuracy of {CURVE_SETS} sets of shares"
        rows.append(context(quantity, best["accuracy"].to_numpy().max(), "%"))
    title, x_label = "Accuracy against the giant's", "energy a request, the giant's is 1"
    figure = lines("curve", pd.concat(frames), title, x_label, "percentage points")
    return CASCADE.experiment("cascade-fig6", rows, [figure], _constants())
