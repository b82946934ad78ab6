"""Test the search of cascades: the least cost after caution, and refusals of cascades that do not pay."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.walks import walked
from strategies import calibrated_answers

from flexhybrid.cascade.routes import CascadeModel
from flexhybrid.cascade.thresholds.curve import Answers
from flexhybrid.cascade.thresholds.exact import exact_curve
from flexhybrid.cascade.thresholds.fit import Fitted
from flexhybrid.cascade.thresholds.search import SearchOptions, search
from flexhybrid.core.errors import InputError


def fitted_of(answers: Answers) -> Fitted:
    models = tuple(CascadeModel(f"m{i}", energy_j=float(cost)) for i, cost in enumerate(answers.cost))
    return Fitted(models, "classification", None, answers.correct, answers.confidence, np.zeros((len(models), 2)))


def least_cost(answers: Answers, least: int, caution: float) -> float:
    """Return the least mean cost after caution over all subsets with the largest model, and all points of their
    curves."""
    last, costs = answers.num_models - 1, []
    for size in range(last + 1):
        for smaller in itertools.combinations(range(last), size):
            part = answers.only([*smaller, last])
            curve = exact_curve(part)
            for thresholds, num_correct in zip(curve.thresholds, curve.num_correct, strict=True):
                right, cost = walked(part, 1 - (1 - thresholds) / caution if caution > 1 else thresholds)
                if num_correct >= least and right >= least:
                    costs.append(cost)
    return min(costs)


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.integers(2, 3), st.sampled_from((1.0, 2.0, 30.0)))
def test_the_cascade_costs_least_after_caution(seed, num_models, caution):
    answers = calibrated_answers(num_models, 30, seed)
    searched = search(fitted_of(answers), SearchOptions(caution=caution, skips="none"))
    assert searched.route.cost == pytest.approx(least_cost(answers, int(answers.correct[-1].sum()), caution))
    right, cost = walked(answers.only(searched.kept), searched.cascade.thresholds)
    assert searched.route.cost == pytest.approx(cost) and cost <= answers.cost[-1] + 1e-9
    assert right == searched.route.num_correct >= answers.correct[-1].sum()


#: Three models so alike in cost that those with small ones in front of the largest are dear.
DEAR = Answers(
    np.array([[True, False] * 20, [True, True, False, True] * 10, [True] * 40]),
    np.tile(np.linspace(0.2, 0.8, 40), (3, 1)),
    np.array([3.0, 3.5, 4.0]),
)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (SearchOptions(drop="none"), "serve the largest alone, --drop best"),
        (SearchOptions(drop="none", skips="paper", caution=30.0), "--drop best, --skips fitted, a --caution below 30"),
    ],
)
def test_a_cascade_that_does_not_pay_is_refused_with_the_figures(options, advice):
    fitted = fitted_of(DEAR)
    with pytest.raises(InputError, match="does not pay") as refused:
        search(fitted, options)
    costs = re.search(r"a request costs ([\d.]+) J, and ([\d.]+) J with the largest model alone", str(refused.value))
    assert costs and float(costs[1]) > float(costs[2]) == 4.0 and str(refused.value).endswith(advice)
    assert search(fitted, SearchOptions(caution=options.caution)).kept == [2]  # the largest alone is what pays


def test_answers_lost_by_caution_are_not_promised():
    """The small model is right where the largest is wrong; stricter thresholds lose those answers."""
    correct = np.array([[True] * 20, [True] * 15 + [False] * 5])
    confidence = np.array([[0.6] * 20, [0.5] * 20])
    fitted = fitted_of(Answers(correct, confidence, np.array([1.0, 4.0])))
    assert search(fitted, SearchOptions(accuracy=1.0)).expected.accuracy == 1.0
    with pytest.raises(InputError, match="with a caution of 9 no thresholds answer 20 of 20 .* the best answer 15"):
        search(fitted, SearchOptions(accuracy=1.0, caution=9.0))
