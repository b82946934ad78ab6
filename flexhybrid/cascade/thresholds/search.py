"""``flexhybrid cascade search``: fitted models in, a cascade with its thresholds, skips and expectations out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flexhybrid.cascade.routes import Cascade, Expected
from flexhybrid.cascade.thresholds.curve import Answers, Curve, accuracy_preserving, energy_optimal
from flexhybrid.cascade.thresholds.exact import exact_curve
from flexhybrid.cascade.thresholds.fit import Fitted
from flexhybrid.cascade.thresholds.sampling import sampled_curve
from flexhybrid.cascade.thresholds.skips import Route, best_subset, drop_by_benefit, even_skips, fitted_skips
from flexhybrid.core.errors import InputError, file_errors, unknown

MODES = ("ap", "eo")
DROPS = ("best", "paper", "none")
SKIPS = ("fitted", "paper", "none")
#: Doubts of AP are divided by this. The thresholds that were just enough on the validation set are the luckiest of
#: many: on other digits they lose half a point of accuracy. Of 1, 5, 10, 20, 30, 40 and 50 this is the least whose 95 %
#: interval showed no loss on ten splits of the digits (seeds 0 to 9; 10 to 19 had been looked at, too); ``make bench``
#: judges it on 20 to 29.
CAUTION = 30.0


@dataclass(frozen=True)
class SearchOptions:
    """The options of a search. ``accuracy`` asks for a share of right answers instead of a mode."""

    cost: str = "energy_j"
    mode: str = "ap"
    accuracy: float | None = None
    method: str = "exact"  #: or "sampling", the paper's
    drop: str = "best"
    skips: str = "fitted"
    caution: float | None = None  #: None: CAUTION for ap, 1 otherwise; 1 is the paper's
    seed: int = 0

    def __post_init__(self):
        for name, known in (("mode", MODES), ("method", ("exact", "sampling")), ("drop", DROPS), ("skips", SKIPS)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        if self.accuracy is not None and not 0 <= self.accuracy <= 1:
            raise InputError(f"accuracy is {self.accuracy:g}; it is a share of right answers, between 0 and 1")
        if self.caution is not None and not self.caution >= 1:
            raise InputError(f"caution is {self.caution:g}; it must be 1 (the paper's) or more")


@dataclass(frozen=True)
class SearchedCascade:
    """A searched cascade, and the curve it was chosen from."""

    cascade: Cascade
    expected: Expected  #: cascade.expected
    kept: list[int]  #: indices of its models among the fitted ones
    curve: Curve  #: of these models
    point: int  #: the curve's, before caution and skips
    without_skips: Route
    route: Route  #: on the validation set


def search(fitted: Fitted, options: SearchOptions = SearchOptions()) -> SearchedCascade:  # noqa: B008  frozen
    """Search a cascade. Raises InputError where a cost is not known or an accuracy is out of reach."""
    answers = fitted.answers(options.cost)
    find = exact_curve if options.method == "exact" else functools.partial(sampled_curve, seed=options.seed)
    pick = picker(answers, options)
    if options.drop == "best":
        kept, curve, point = best_subset(answers, find, pick)
    else:
        kept = list(range(answers.num_models))
        if options.drop == "paper":
            kept = drop_by_benefit(answers, lambda part: (part_curve := find(part)).thresholds[pick(part_curve)])
        curve = find(answers.only(kept))
        point = pick(curve)
    caution = options.caution or (CAUTION if options.mode == "ap" and options.accuracy is None else 1.0)
    thresholds = tuple(float(1 - (1 - t) / caution) for t in curve.thresholds[point])  # the doubt 1 - t is divided
    part, models = answers.only(kept), tuple(fitted.models[i] for i in kept)
    plain = Route(part, Cascade(models, thresholds))
    skips = ()
    if options.skips != "none":
        skips = even_skips(thresholds) if options.skips == "paper" else fitted_skips(part, thresholds)
    route = Route(part, Cascade(models, thresholds, skips))
    more = {"task": fitted.task, "cost": options.cost, "top_k": fitted.top_k, "note": _note(options, curve, caution)}
    shares = tuple(route.shares.tolist()), tuple(route.visited.tolist())
    expected = Expected(*shares, float(route.correct.mean()), len(route.correct))
    cascade = Cascade(models, thresholds, skips, expected=expected, **more)
    return SearchedCascade(cascade, expected, kept, curve, point, without_skips=plain, route=route)


def picker(answers: Answers, options: SearchOptions) -> Callable[[Curve], int]:
    """Return the rule that picks a point of a curve, whichever models the curve has.

    It compares with the right answers of the largest and the second-largest of all models.
    """
    right = answers.correct.sum(axis=1)
    if options.accuracy is not None:
        least = int(np.ceil(options.accuracy * answers.num_requests - 1e-9))
        return lambda curve: accuracy_preserving(curve, least)
    if options.mode == "ap":
        return lambda curve: accuracy_preserving(curve, int(right[-1]))
    second = int(right[-2]) if len(right) > 1 else int(right[-1])
    return lambda curve: energy_optimal(curve, second, int(right[-1]))


def _note(options: SearchOptions, curve: Curve, caution: float) -> str:
    chosen = options.mode if options.accuracy is None else f"accuracy {options.accuracy:g}"
    method = "exact" if curve.exact else "sampled" if options.method == "sampling" else "on a grid of confidences"
    return f"{chosen}, {method}, caution {caution:g}, dropped: {options.drop}, skips: {options.skips}"


def run_search(fitted_file: Path, out: Path, options: SearchOptions, curve_file: Path | None = None) -> dict:
    """Search a cascade, write it (and the curve as CSV), and return a record of it."""
    fitted = Fitted.load(fitted_file)
    searched = search(fitted, options)
    searched.cascade.save(out)
    if curve_file:
        write_curve(curve_file, searched)
    answers, cascade, expected = fitted.answers(options.cost), searched.cascade, searched.expected
    giant_cost, cost = float(answers.cost[-1]), searched.route.cost
    return {
        "path": str(out),
        "cost": options.cost,
        "note": cascade.note,
        "names": cascade.names,
        "dropped": [model.name for i, model in enumerate(fitted.models) if i not in searched.kept],
        "thresholds": list(cascade.thresholds),
        "answered": list(expected.answered),
        "visited": list(expected.visited),
        "accuracy": expected.accuracy,
        "largest_accuracy": float(answers.correct[-1].mean()),
        "cost_per_request": cost,
        "cost_without_skips": searched.without_skips.cost,
        "largest_cost": giant_cost,
        "share_of_largest": cost / giant_cost,
        "exact": searched.curve.exact,
        "num_points": len(searched.curve),
    }


def write_curve(path: Path, searched: SearchedCascade) -> None:
    """Write the curve as CSV: thresholds, accuracy, cost of a request, whether the point was chosen."""
    names = [model.name for model in searched.cascade.models[:-1]]
    lines, curve = [",".join([*(f"threshold_{name}" for name in names), "accuracy", "cost", "chosen"])], searched.curve
    for i, thresholds in enumerate(curve.thresholds):
        numbers = [f"{number:.9g}" for number in (*thresholds, curve.accuracy[i], curve.cost[i])]
        lines.append(",".join([*numbers, str(int(i == searched.point))]))
    with file_errors(f"write {path}"):
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def describe_search(result: dict) -> str:
    """Return the record of a search as text."""
    rows = [f"{'model':16s} {'threshold':>9s} {'computes':>9s} {'answers':>8s}"]
    thresholds = [*(f"{t:9.4f}" for t in result["thresholds"]), f"{'–':>9s}"]
    for name, threshold, visited, answered in zip(
        result["names"], thresholds, result["visited"], result["answered"], strict=True
    ):
        rows.append(f"{name:16s} {threshold} {visited:9.1%} {answered:8.1%}")
    if result["dropped"]:
        rows.append(f"dropped, as they only cost: {', '.join(result['dropped'])}")
    rows.append(
        f"\naccuracy {result['accuracy']:.2%} (the largest alone {result['largest_accuracy']:.2%}), "
        f"{result['cost']} of a request {result['cost_per_request']:.4g}: {result['share_of_largest']:.1%} of the "
        f"largest's; without skips {result['cost_without_skips']:.4g}\n{result['note']}: {result['path']}"
    )
    return "\n".join(rows)
