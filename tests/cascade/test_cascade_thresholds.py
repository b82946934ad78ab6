"""Test thresholds: exact search against brute force, sampling against exact search, and the two default points."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.walks import walked

from flexhybrid.cascade.thresholds.curve import (
    Answers,
    Curve,
    accuracy_preserving,
    energy_optimal,
    evaluate,
    lower_hull,
    pareto,
)
from flexhybrid.cascade.thresholds.exact import candidates, exact_curve
from flexhybrid.cascade.thresholds.sampling import EPSILON, sampled_curve
from flexhybrid.core.errors import InputError


@st.composite
def small_answers(draw) -> Answers:
    """Draw up to four models and nine requests, with equal confidences and the values 0 and 1."""
    num_models, num_requests = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    cells = st.lists(
        st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.6, 0.75, 0.99, 1.0]), min_size=num_requests, max_size=num_requests
    )
    answers = st.lists(st.booleans(), min_size=num_requests, max_size=num_requests)
    return Answers(
        np.array([draw(answers) for _ in range(num_models)]),
        np.array([draw(cells) for _ in range(num_models)]),
        np.array([draw(st.integers(1, 9)) for _ in range(num_models)], dtype=float),
    )


def some_answers(num_models: int, num_requests: int, seed: int = 0) -> Answers:
    """Return models of growing accuracy and cost, whose confidences partly tell when they are right."""
    generator = np.random.default_rng(seed)
    skill = np.linspace(0.5, 0.9, num_models)[:, None]
    confidence = generator.random((num_models, num_requests))
    correct = generator.random((num_models, num_requests)) < skill * (0.4 + 0.6 * confidence)
    return Answers(correct, confidence * 0.999, 4.0 ** np.arange(num_models))


def brute_force(answers: Answers) -> dict[int, float]:
    """Return for each reachable number of right answers the least mean cost."""
    every = [sorted({0.0, 1.0, *row, *np.nextafter(row, 1.0)}) for row in answers.confidence[:-1]]
    best: dict[int, float] = {}
    for right, cost in (walked(answers, thresholds) for thresholds in itertools.product(*every)):
        best[right] = min(best.get(right, np.inf), cost)
    return best


@settings(max_examples=60, deadline=None)
@given(small_answers())
def test_the_exact_curve_is_brute_force_s(answers):
    curve, best = exact_curve(answers), brute_force(answers)
    front = {right: cost for right, cost in best.items()
             if all(cost < other - 1e-9 for more, other in best.items() if more > right)}  # fmt: skip
    assert curve.exact
    assert dict(zip(curve.num_correct.tolist(), curve.cost.tolist())) == pytest.approx(front)
    # and the thresholds given do what is said of them
    right, cost = evaluate(answers, curve.thresholds)
    assert right.tolist() == curve.num_correct.tolist() and cost == pytest.approx(curve.cost)


@settings(max_examples=40, deadline=None)
@given(small_answers(), st.integers(0, 3))
def test_sampling_is_never_better(answers, seed):
    exact = exact_curve(answers)
    sampled = sampled_curve(answers, seed, num_samples=16, max_rounds=4)
    for right, cost in zip(sampled.num_correct, sampled.cost):
        assert exact.cost[accuracy_preserving(exact, right)] <= cost + 1e-9


def test_only_thresholds_above_an_error_are_candidates():
    confidence, correct = np.array([0.2, 0.4, 0.6, 0.6, 0.8]), np.array([True, False, True, False, True])
    assert candidates(confidence, correct) == pytest.approx([0.0, 0.5, 0.7])
    assert candidates(confidence, ~correct) == pytest.approx([0.0, 0.3, 0.7, 1.0])
    neighbours = np.array([0.5, np.nextafter(0.5, 1)])
    assert candidates(neighbours, np.array([False, True])).tolist() == [0.0, neighbours[1]]


def test_a_thinned_search_is_reported_and_no_better():
    answers = some_answers(4, 120)
    exact, thinned = exact_curve(answers), exact_curve(answers, max_sets=2000)
    assert exact.exact and not thinned.exact
    for right, cost in zip(thinned.num_correct, thinned.cost):
        assert exact.cost[accuracy_preserving(exact, right)] <= cost + 1e-9


def curve_of(points: list[tuple[int, float]]) -> Curve:
    right, cost = zip(*points)
    return Curve(np.zeros((len(points), 1)), np.array(right), np.array(cost), 100, True)


def test_ap_is_the_cheapest_that_is_as_accurate():
    curve = curve_of([(50, 1.0), (80, 2.0), (90, 4.0), (95, 9.0)])
    assert [accuracy_preserving(curve, right) for right in (10, 80, 81, 95)] == [0, 1, 2, 3]
    with pytest.raises(InputError, match="answer 96 of 100 requests right; the best answer 95, an accuracy of 95.00%"):
        accuracy_preserving(curve, 96)


def test_eo_is_the_corner_of_the_curve():
    corner = [(right, 1.0 + 0.02 * (right - 50)) for right in range(50, 81)]
    curve = curve_of(corner + [(right, 1.6 + 0.5 * (right - 80)) for right in range(81, 91)])
    assert curve.num_correct[energy_optimal(curve, 50, 90)] == 80
    assert curve.num_correct[energy_optimal(curve, 85, 90)] == 85  # a straight piece: its cheapest
    noisy = curve_of([(50, 1.0), (51, 1.9), (60, 2.0), (70, 3.0), (71, 8.0), (72, 8.1)])
    assert noisy.num_correct[energy_optimal(noisy, 50, 72)] == 70
    assert energy_optimal(curve_of([(50, 1.0), (90, 2.0)]), 60, 70) == 1  # nothing between: the next above


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30)), min_size=1, max_size=12))
def test_pareto_and_hull_against_their_definitions(points):
    right, cost = (np.array(column) for column in zip(*points))
    kept = [(right[i], cost[i]) for i in pareto(right, cost)]
    beaten = {p for p in points for q in points if q[0] >= p[0] and q[1] <= p[1] and q != p}
    assert kept == sorted(set(points) - beaten)
    x, y = (np.array(column, dtype=float) for column in zip(*kept))
    hull = lower_hull(x, y)
    for i in range(len(x)):  # no point lies below the hull
        assert np.interp(x[i], x[hull], y[hull]) <= y[i] + 1e-9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cost": np.array([1.0, 0.0])}, "costs above 0"),
        ({"confidence": np.array([[0.5, np.nan], [0.5, 0.5]])}, "between 0 and 1"),
        ({"confidence": np.array([[0.5, 1.5], [0.5, 0.5]])}, "between 0 and 1"),
        ({"correct": np.ones((2, 3), dtype=bool)}, "one shape"),
    ],
)
def test_impossible_answers_are_refused(change, words):
    with pytest.raises(InputError, match=words):
        Answers(**{"correct": np.ones((2, 2), dtype=bool), "confidence": np.full((2, 2), 0.5),
                   "cost": np.array([1.0, 2.0]), **change})  # fmt: skip


def test_samples_are_spread_evenly_in_the_paper_s_own_confidence():
    """Each request is walked by f = softmax², for thresholds of f drawn in the paper's order."""
    answers = some_answers(3, 60)
    in_f = Answers(answers.correct, answers.confidence**2, answers.cost)
    right = np.sort(answers.correct.sum(axis=1)[-2:])
    generator = np.random.default_rng(7)
    first = generator.random((8, 2))
    drawn = [np.ones(2), *first]
    tried = [walked(in_f, squares) for squares in first]
    good = first[[right[0] <= num_correct <= right[1] for num_correct, _ in tried]]
    if len(good):
        near = good[generator.integers(len(good), size=8)] + generator.uniform(-EPSILON, EPSILON, (8, 2))
        drawn += list(np.clip(near, 0, 1))
    points = {walked(in_f, squares) for squares in drawn}
    best = {a for a in points if not any(b[0] >= a[0] and b[1] <= a[1] and b != a for b in points)}
    sampled = sampled_curve(answers, 7, num_samples=8, max_rounds=1)
    found = list(zip(sampled.num_correct.tolist(), sampled.cost.tolist(), strict=True))
    assert len(good) and found == [(right, pytest.approx(cost)) for right, cost in sorted(best)]


def test_any_sample_is_as_accurate_as_the_largest_model():
    answers = some_answers(4, 200)
    largest = int(answers.correct[-1].sum())
    for seed in range(5):
        sampled = sampled_curve(answers, seed, num_samples=1, max_rounds=1)
        point = accuracy_preserving(sampled, largest)
        assert sampled.num_correct[point] >= largest
