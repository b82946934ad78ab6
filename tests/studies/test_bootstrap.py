"""Test intervals over texts against Student's t, known coverage and cases by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from flexhybrid.jobs.accuracy import bootstrap
from flexhybrid.jobs.accuracy.bootstrap import mean, mean_difference, perplexity_ratio, ratio_of_means


@pytest.mark.parametrize("size", [5, 20, 200])
def test_the_interval_of_normal_numbers_is_student_s(size):
    """Numbers that are symmetric about their mean need no correction."""
    values = 3 + stats.norm.ppf((np.arange(size) + 0.5) / size)
    found, half = mean(values), stats.t.ppf(0.975, size - 1) * values.std(ddof=1) / math.sqrt(size)
    assert found.value == pytest.approx(3)
    tolerance = 0.2 if size == 5 else 0.06
    assert found.high - 3 == pytest.approx(half, rel=tolerance) and 3 - found.low == pytest.approx(half, rel=tolerance)


@pytest.mark.parametrize("draw", ["normal", "exponential"])
def test_intervals_of_twenty_texts_hold_the_truth_in_their_share_of_cases(monkeypatch, draw):
    """400 samples of 20: 95 % coverage for normal numbers, within chance; for skewed ones t itself has 92 %."""
    monkeypatch.setattr(bootstrap, "RESAMPLES", 999)
    generator, truth = np.random.default_rng(1), {"normal": 0.0, "exponential": 1.0}[draw]
    samples = getattr(generator, draw)(size=(400, 20))
    held = np.mean([not mean(values).excludes(truth) for values in samples])
    assert 0.92 <= held <= 0.98


def test_pairs_are_drawn_together():
    """The texts' difficulties differ far more than the policies, so unpaired draws would show no difference."""
    generator = np.random.default_rng(2)
    difficulty = generator.normal(3.0, 1.0, 20)
    ours = difficulty + generator.normal(0.05, 0.01, 20)
    found = mean_difference(ours, difficulty)
    assert found.excludes(0) and found.high - found.low < 0.02
    assert not mean_difference(generator.permutation(ours), difficulty).excludes(0)
    ratio = perplexity_ratio(-ours, -difficulty)
    assert ratio == pytest.approx([math.exp(end) for end in found]) and ratio.low < math.exp(0.05) < ratio.high


def test_a_ratio_is_of_means_and_not_a_mean_of_ratios():
    found = ratio_of_means([1, 30], [2, 20])
    assert found.value == pytest.approx(31 / 22)
    same = ratio_of_means([2, 4, 6], [1, 2, 3])
    assert same == pytest.approx((2, 2, 2))


def test_ends_are_seeded_and_never_lie_on_one_side():
    values = [1.0] * 19 + [0.0]
    first, again = mean(values), mean(values)
    assert first == again and first.low < 0.95 <= first.high <= 1
    assert mean([0.25] * 7) == (0.25, 0.25, 0.25) and not mean([0.25] * 7).excludes(0.25)
    alone = mean([4.0])
    assert alone.value == 4 and math.isnan(alone.low) and not alone.excludes(0)
    with pytest.raises(ValueError, match="shape"):
        mean_difference([1, 2, 3], [1, 2])
