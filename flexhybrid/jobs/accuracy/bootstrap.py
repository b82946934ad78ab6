"""Confidence intervals over a sample of texts, by a bootstrap that draws whole texts.

The tokens of a text depend on each other, so callers pass one number per text, its mean. If several texts were cut from
one document, the document is the unit. Two policies are compared on the same texts: paired differences do not depend
on how difficult the texts are.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

LEVEL = 0.95  #: confidence level
RESAMPLES = 4999
MOST_DRAWN = 4_000_000  #: most numbers in memory at a time


class Interval(NamedTuple):
    """An estimate and its confidence interval, whose ends are nan for fewer than two texts."""

    value: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Return whether ``value`` lies outside the interval; False without an interval."""
        return self.low > value or self.high < value

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def mean(values, weights=None) -> Interval:
    """Return the mean of ``values`` [N], one per text. ``weights`` [N]: number of tokens, or of parts, of each text."""
    if weights is None:
        return interval(lambda v, axis=-1: v.mean(axis), values)
    return ratio_of_means(np.asarray(values, float) * weights, weights)


def mean_difference(ours, others, weights=None) -> Interval:
    """Return the mean of ``ours`` - ``others`` [N], paired by text. ``weights``: as in ``mean``."""
    return mean(np.asarray(ours, float) - np.asarray(others, float), weights)


def ratio_of_means(ours, others) -> Interval:
    """Return the ratio of the mean of ``ours`` [N] to that of ``others`` [N], paired by text. ``others``: positive."""
    return interval(lambda a, b, axis=-1: a.mean(axis) / b.mean(axis), ours, others)


def perplexity_ratio(ours, others, weights=None) -> Interval:
    """Return the ratio of two perplexities, from each text's mean log-probability of a token [N].
    ``weights``: as in ``mean``."""
    return Interval(*(math.exp(end) for end in mean_difference(others, ours, weights)))


def interval(statistic: Callable[..., np.ndarray], *samples, level: float = LEVEL, seed: int = 0) -> Interval:
    """Return ``statistic(*samples)`` and its interval. The samples [N] are paired: they are drawn together.

    ``statistic`` takes arrays [..., N] and ``axis``. The method is BCa (Efron 1987). Its level is raised so that the
    interval of a mean of normal numbers is as wide as Student's t (Hesterberg 2015, "expanded percentile"): otherwise,
    a 95 % interval of N = 20 texts would cover 93 %. Raise ValueError for samples of different lengths.
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
        with warnings.catch_warnings(), np.errstate(invalid="ignore"):  # if one sample is a multiple of the other
            warnings.simplefilter("ignore", stats.DegenerateDataWarning)
            done = stats.bootstrap(drawn, statistic, method=method, rng=np.random.default_rng(seed), **options)
        low, high = done.confidence_interval
        if low <= value <= high:  # BCa may fail if hardly any text differs: then take the percentiles
            break
    return Interval(value, float(low), float(high))
