"""Confidence intervals over a sample of texts: a bootstrap that draws whole texts, the same for both sides of a pair.

The unit is what was drawn independently: a text, or a document that several texts were cut from. Its tokens and
questions depend on each other, so callers pass one number per text (its mean). Two policies are compared on the same
texts: the paired difference excludes the texts' own difficulty.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
RESAMPLES = 4999
MOST_DRAWN = 4_000_000  #: numbers drawn at a time


class Interval(NamedTuple):
    """A figure and its confidence interval; the ends are nan for fewer than two texts."""

    value: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Return whether the figure differs from ``value``: False inside the interval, or without one."""
        return self.low > value or self.high < value

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def mean(values, weights=None) -> Interval:
    """Return the mean of ``values`` [N], one per text; ``weights`` [N]: tokens or pieces of each."""
    if weights is None:
        return interval(lambda v, axis=-1: v.mean(axis), values)
    return ratio_of_means(np.asarray(values, float) * weights, weights)


def mean_difference(ours, others, weights=None) -> Interval:
    """Return the mean of ours - others; [N] each, pairs by text; ``weights`` as in ``mean``."""
    return mean(np.asarray(ours, float) - np.asarray(others, float), weights)


def ratio_of_means(ours, others) -> Interval:
    """Return the mean of ours over the mean of others; [N] each, pairs by text. Others' means must be positive."""
    return interval(lambda a, b, axis=-1: a.mean(axis) / b.mean(axis), ours, others)


def perplexity_ratio(ours, others, weights=None) -> Interval:
    """Return the perplexity of ours over others', from mean log-probabilities of a token [N], pairs by text;
    ``weights`` as in ``mean``."""
    return Interval(*(math.exp(end) for end in mean_difference(others, ours, weights)))


def interval(statistic: Callable[..., np.ndarray], *samples, level: float = LEVEL, seed: int = 0) -> Interval:
    """Return ``statistic(*samples)`` and its interval; samples [N] are paired, drawn together.

    ``statistic`` takes arrays [..., N] and ``axis``. The method is BCa (Efron 1987), of a level that is widened so
    that the interval of a mean of normal numbers is as wide as Student's t (Hesterberg 2015, "expanded percentile"):
    N = 20 texts would otherwise give 93 % for 95 %. Raise ValueError for samples of different lengths.
    """
    from scipy import stats

    drawn = np.stack([np.asarray(sample, float) for sample in samples])
    value, size = float(statistic(*drawn, axis=-1)), drawn.shape[-1]
    if size < 2:
        return Interval(value, math.nan, math.nan)
    if (drawn == drawn[:, :1]).all():
        return Interval(value, value, value)
    tail = stats.norm.cdf(math.sqrt(size / (size - 1)) * stats.t.ppf((1 - level) / 2, size - 1))
    options = {
        "paired": True, "vectorized": True, "n_resamples": RESAMPLES, "confidence_level": 1 - 2 * tail,
        "batch": max(1, MOST_DRAWN // drawn.size),
    }  # fmt: skip
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings(), np.errstate(invalid="ignore"):  # a sample that is the other, scaled
            warnings.simplefilter("ignore", stats.DegenerateDataWarning)
            done = stats.bootstrap(drawn, statistic, method=method, rng=np.random.default_rng(seed), **options)
        low, high = done.confidence_interval
        if low <= value <= high:  # not so: BCa has no bias correction where hardly any text differs
            break
    return Interval(value, float(low), float(high))
