"""Test confidences: temperatures against a scan, calibration errors against their definition, and the three tasks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from flexhybrid.cascade.thresholds.confidence import (
    BELOW_ONE,
    OUTSIDE,
    Scored,
    calibrate,
    calibration_error,
    confidence,
    fit_temperature,
    label_loss,
    right_or_wrong_loss,
    top_k_logits,
)
from flexhybrid.core.errors import InputError


def drawn(num: int, num_classes: int, temperature: float, seed: int = 0, slots: int = 1) -> Scored:
    """Return logits and labels drawn from softmax(logits / temperature), the temperature to find."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(num, slots, num_classes)) * 4
    sums = softmax(logits / temperature, axis=-1).cumsum(axis=-1)
    labels = (generator.random((num, slots, 1)) > sums).sum(axis=-1)
    return Scored(logits, labels, np.ones((num, slots), dtype=bool))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("generated", [False, True])
def test_the_temperature_of_the_data_is_found(temperature, generated):
    scored = drawn(20_000, 10, temperature)
    found = fit_temperature(scored, generated)
    assert found == pytest.approx(temperature, rel=0.05)
    loss = right_or_wrong_loss if generated else label_loss
    scan = [loss(scored, value) for value in np.geomspace(0.05, 20, 60)]
    assert loss(scored, found) <= min(scan) + 1e-6


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 40), st.integers(2, 5))
def test_no_fit_makes_the_calibration_error_larger(seed, num, num_classes):
    done = calibrate(drawn(num, num_classes, 1.3, seed))
    assert done.ece_after <= done.ece_before


def test_calibration_error_by_hand():
    # two bins of ten: (0.75, 0.75, right, wrong) is off by 0.25, (0.15, wrong) by 0.15
    sure = np.array([0.75, 0.75, 0.15])
    assert calibration_error(sure, np.array([True, False, False]), 10) == pytest.approx((2 * 0.25 + 0.15) / 3)
    assert calibration_error(np.array([1.0, 0.0]), np.array([True, False])) == 0.0


def test_an_answer_has_the_confidence_of_its_weakest_slot():
    logits = np.log(np.array([[[0.9, 0.1], [0.6, 0.4], [0.5, 0.5]]]))
    assert confidence(logits) == pytest.approx([0.5])
    assert confidence(logits, np.array([[True, True, False]])) == pytest.approx([0.6])
    assert confidence(logits[:, :1], temperature=1e-3).tolist() == [BELOW_ONE]  # a threshold of 1 lets nobody answer


def test_top_k_keeps_the_largest_in_order():
    logits = np.array([[3.0, 1.0, 2.0, 5.0]])
    assert top_k_logits(logits, 2).tolist() == [[5.0, 3.0]]
    assert top_k_logits(logits, None) is logits and top_k_logits(logits, 9) is logits


def test_generated_tokens_after_a_wrong_one_do_not_count():
    """The first request's second token continues another text than the label's."""
    logits = np.log(np.array([[[0.9, 0.1], [0.8, 0.2]], [[0.7, 0.3], [0.6, 0.4]]]))
    labels = np.array([[OUTSIDE, 0], [0, 0]])
    scored = Scored(logits, labels, np.array([[True, True], [True, True]]))
    assert right_or_wrong_loss(scored, 1.0) == pytest.approx(-np.log([0.1, 0.7, 0.6]).mean())
    assert scored.correct.tolist() == [False, True]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_give_no_confidence(bad):
    found = confidence(np.array([[[1.0, bad, 0.0]], [[-np.inf] * 3], [[1.0, 0.0, 0.0]]]))
    assert np.isnan(found).tolist() == [True, True, False]


def test_shapes_that_do_not_match_are_refused():
    with pytest.raises(InputError, match="do not match"):
        Scored(np.zeros((3, 1, 2)), np.zeros((2, 1), dtype=int), np.ones((3, 1), dtype=bool))
