"""``flexhybrid cascade search``: finds a cascade of fitted models, with thresholds, skips and expected shares."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flexhybrid.arguments import options_from
from flexhybrid.cascade.options import SearchOptions
from flexhybrid.cascade.routes import COSTS, Cascade, Expected
from flexhybrid.cascade.thresholds.curve import Answers, Choice, Curve, accuracy_preserving, cautious, energy_optimal
from flexhybrid.cascade.thresholds.exact import exact_curve
from flexhybrid.cascade.thresholds.fit import Fitted
from flexhybrid.cascade.thresholds.sampling import sampled_curve
from flexhybrid.cascade.thresholds.skips import Route, best_subset, drop_by_benefit, even_skips, fitted_skips
from flexhybrid.core.errors import InputError, file_errors


@dataclass(frozen=True)
class SearchedCascade:
    """A cascade found by a search."""

    cascade: Cascade
    expected: Expected  #: cascade.expected
    kept: list[int]  #: indices of its models among the fitted ones
    curve: Curve  #: curve of these models
    point: int  #: chosen point of the curve, before caution and skips
    without_skips: Route  #: routes of the validation set without skips
    route: Route  #: routes of the validation set


def search(fitted: Fitted, options: SearchOptions = SearchOptions()) -> SearchedCascade:  # noqa: B008  frozen
    """Return the cascade, among subsets of models and thresholds, that costs least after caution.

    Raise InputError if a cost is unknown, the accuracy cannot be reached, or the cascade costs more than the largest
    model alone.
    """
    answers = fitted.answers(options.cost)
    find = exact_curve if options.method == "exact" else functools.partial(sampled_curve, seed=options.seed)
    pick = picker(answers, options)
    if options.drop == "best":
        kept, curve, choice = best_subset(answers, find, pick)
    else:
        kept = list(range(answers.num_models))
        if options.drop == "paper":
            kept = drop_by_benefit(answers, lambda part: pick(part, find(part)).thresholds)
        curve = find(answers.only(kept))
        choice = pick(answers.only(kept), curve)
    thresholds = tuple(choice.thresholds.tolist())
    part, models = answers.only(kept), tuple(fitted.models[i] for i in kept)
    plain = Route(part, Cascade(models, thresholds))
    skips = ()
    if options.skips != "none":
        skips = even_skips(thresholds) if options.skips == "paper" else fitted_skips(part, thresholds)
    route = Route(part, Cascade(models, thresholds, skips))
    _check_pays(answers, route, options)
    more = {name: getattr(fitted, name) for name in ("task", "top_k", "x_dtype")}
    more |= {"cost": options.cost, "note": _note(options, curve)}
    shares = tuple(route.shares.tolist()), tuple(route.visited.tolist())
    expected = Expected(*shares, float(route.correct.mean()), len(route.correct))
    cascade = Cascade(models, thresholds, skips, expected=expected, **more)
    return SearchedCascade(cascade, expected, kept, curve, choice.point, without_skips=plain, route=route)


def picker(answers: Answers, options: SearchOptions) -> Callable[[Answers, Curve], Choice]:
    """Return the rule that chooses a point from the answers and the curve of some models.

    The required number of right answers follows from the options, or from the largest and second-largest of all models.
    The chosen thresholds have that number before and after caution, and are the cheapest after it.
    """
    right = answers.correct.sum(axis=1)
    least = int(right[-1])
    if options.accuracy is not None:
        least = int(np.ceil(options.accuracy * answers.num_requests - 1e-9))
    elif options.mode == "eo":
        least = int(right[-2:][0])

    def pick(part: Answers, curve: Curve) -> Choice:
        if options.mode == "eo" and options.accuracy is None:
            points = [energy_optimal(curve, least, int(right[-1]))]
        else:
            points = range(accuracy_preserving(curve, least), len(curve))[: 1 if options.caution == 1 else None]
        return cautious(part, curve, points, least, options.caution)

    return pick


def _check_pays(answers: Answers, route: Route, options: SearchOptions) -> None:
    """Raise InputError if the largest model alone is cheaper than the routes, and accurate enough."""
    largest, accuracy = float(answers.cost[-1]), float(answers.correct[-1].mean())
    if route.cost <= largest * (1 + 1e-9) or (options.accuracy or 0.0) > accuracy + 1e-9:
        return
    dearer = (
        (options.drop != "best", "--drop best"),
        (options.skips == "paper", "--skips fitted"),
        (options.caution > 1, f"a --caution below {options.caution:g}"),
    )
    advice = ", ".join(["serve the largest alone", *(words for applies, words in dearer if applies)])
    unit = COSTS[options.cost]
    raise InputError(
        f"the cascade does not pay: a request costs {route.cost:.4g} {unit}, and {largest:.4g} {unit} with the "
        f"largest model alone ({route.correct.mean():.2%} and {accuracy:.2%} of the answers right): {advice}"
    )


def _note(options: SearchOptions, curve: Curve) -> str:
    """Return a description of how the thresholds were chosen."""
    chosen = options.mode if options.accuracy is None else f"accuracy {options.accuracy:g}"
    method = "exact" if curve.exact else "sampled" if options.method == "sampling" else "on a grid of confidences"
    return f"{chosen}, {method}, caution {options.caution:g}, dropped: {options.drop}, skips: {options.skips}"


def run_search(fitted_file: Path, out: Path, options: SearchOptions, curve_file: Path | None = None) -> dict:
    """Search a cascade, write it (and the curve as CSV); return a record of it."""
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
    """Write the curve as CSV: thresholds, accuracy, mean cost, and 1 for the chosen point."""
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
        alone = "" if result["thresholds"] else "; no cascade of these models pays, so the largest answers alone"
        rows.append(f"dropped, as they add only cost: {', '.join(result['dropped'])}{alone}")
    rows.append(
        f"\naccuracy {result['accuracy']:.2%} (the largest alone {result['largest_accuracy']:.2%}), "
        f"{result['cost']} per request {result['cost_per_request']:.4g}: {result['share_of_largest']:.1%} of the "
        f"largest's; without skips {result['cost_without_skips']:.4g}\n{result['note']}: {result['path']}"
    )
    return "\n".join(rows)


def command(args) -> dict:
    """Run the command ``search``."""
    result = run_search(args.fitted, args.out, options_from(SearchOptions, args), args.curve)
    args.show(describe_search(result))
    return result
