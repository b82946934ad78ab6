"""Test skips and dropped models: the paper's rules by hand, and fitted ones against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cascade_thresholds import small_answers, some_answers

from flexhybrid.cascade.routes import Cascade, CascadeModel
from flexhybrid.cascade.thresholds.curve import Answers, accuracy_preserving, cautious
from flexhybrid.cascade.thresholds.exact import exact_curve
from flexhybrid.cascade.thresholds.skips import (
    _cuts,
    best_subset,
    drop_by_benefit,
    energy_benefit,
    even_skips,
    fitted_skips,
    route,
)


def test_the_paper_s_skips_cut_in_equal_parts():
    """The paper's f is the squared softmax: 0.64 is cut into three parts, and 0.49 into two."""
    first, second, third = even_skips((0.8, 0.7, 0.6))
    assert [skip.below for skip in (*first, *second)] == pytest.approx(np.sqrt([0.64 / 3, 0.64 * 2 / 3, 0.49 / 2]))
    assert [skip.to for skip in (*first, *second)] == [3, 2, 3] and len(second) == 1 and third == ()
    assert even_skips((0.0, 0.5)) == ((), ())  # who answers everything skips nothing


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5))
def test_requests_skip_as_in_the_paper_s_own_confidence(seed, num_models):
    """Each request is walked alone on f = softmax²; the lowest part of 0 .. t² goes to the largest model."""
    generator = np.random.default_rng(seed)
    thresholds = generator.uniform(0.1, 1.0, num_models - 1)
    confidence = generator.random((num_models, 50))
    models = tuple(CascadeModel(str(i)) for i in range(num_models))
    answered, visited = Cascade(models, tuple(thresholds.tolist()), even_skips(thresholds.tolist())).walk(confidence)
    for request in range(50):
        i, passed = 0, [0]
        while i < num_models - 1 and confidence[i, request] ** 2 < thresholds[i] ** 2:
            successors = num_models - 1 - i
            part = int(confidence[i, request] ** 2 / (thresholds[i] ** 2 / successors))
            i = num_models - 1 - part
            passed.append(i)
        assert answered[request] == i and np.flatnonzero(visited[:, request]).tolist() == passed


def test_benefit_is_that_of_the_paper_s_formula():
    # 100 % reach the first, 40 % the second: 0.6 x 4 - 1 = 1.4; 30 % the third: 0.1 x 16 - 0.4 x 4 = 0
    assert energy_benefit(np.array([1.0, 0.4, 0.3]), np.array([1.0, 4.0, 16.0])) == pytest.approx([1.4, 0.0])


def test_a_model_without_benefit_is_dropped_and_the_search_begins_anew():
    answers = some_answers(3, 60)
    seen = []

    def choose(part: Answers) -> np.ndarray:
        seen.append(part.num_models)
        return np.ones(part.num_models - 1)  # nobody answers but the largest: the others are a loss

    assert drop_by_benefit(answers, choose) == [2]
    assert seen == [3, 2]
    assert drop_by_benefit(answers, lambda part: np.zeros(part.num_models - 1)) == [0, 2]  # the first answers all


@settings(max_examples=30, deadline=None)
@given(small_answers())
def test_the_best_subset_beats_every_subset(answers):
    """The point AP is chosen: as many right answers as the largest model alone."""
    least = int(answers.correct[-1].sum())
    pick = lambda part, curve: cautious(part, curve, [accuracy_preserving(curve, least)], least, 1.0)  # noqa: E731
    kept, curve, choice = best_subset(answers, exact_curve, pick)
    last = answers.num_models - 1
    for size in range(last + 1):
        for smaller in itertools.combinations(range(last), size):
            other = exact_curve(answers.only([*smaller, last]))
            enough = other.num_correct >= least  # one that is never unsure may stand in the way
            assert not enough.any() or choice.cost <= other.cost[enough].min() + 1e-9
    found = route(answers.only(kept), curve.thresholds[choice.point])
    assert found.num_correct == choice.num_correct and found.cost == pytest.approx(choice.cost)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_cuts_are_as_good_as_brute_force(data):
    num, parts = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 4))
    confidence = np.sort(data.draw(st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.4]), min_size=num, max_size=num)))
    loss = np.array(data.draw(st.lists(st.lists(st.integers(0, 5), min_size=num, max_size=num), min_size=parts,
                                       max_size=parts)), dtype=float).reshape(parts, num)  # fmt: skip

    def sum_of(place_of) -> float:
        return sum(loss[place_of(c), i] for i, c in enumerate(confidence))

    values = [0.0, *sorted(set(confidence)), 0.5]
    best = min(
        sum_of(lambda c, bounds=bounds: parts - 1 - sum(c >= b for b in bounds))
        for bounds in itertools.combinations_with_replacement(values, parts - 1)
    )
    skips = _cuts(np.asarray(confidence), loss, 1, 0.5)
    assert [skip.below for skip in skips] == sorted({skip.below for skip in skips})

    def by_skips(c: float) -> int:
        return next((skip.to - 1 for skip in skips if c < skip.below), 0)

    assert sum_of(by_skips) == best


@settings(max_examples=40, deadline=None)
@given(small_answers(), st.data())
def test_fitted_skips_cost_no_more_and_lose_no_answer(answers, data):
    size = answers.num_models - 1
    thresholds = data.draw(st.lists(st.floats(0, 1), min_size=size, max_size=size))
    plain, fitted = route(answers, thresholds), route(answers, thresholds, fitted_skips(answers, thresholds))
    assert fitted.cost <= plain.cost + 1e-9
    assert fitted.num_correct >= plain.num_correct
