"""Expected lengths of answers, estimated from ended and running answers or from a given mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flexhybrid.core.workload import Workload

GOLDEN = (5**0.5 - 1) / 2  #: the fractional parts of its multiples are spread evenly over 0 … 1
PRIOR_ANSWERS = 2.0  #: weight of a given mean, as a number of observed answers
TOGETHER = 1 << 16  #: answers computed at once, to bound the memory
FEW = 4  #: lengths that fewer answers reach have the mean hazard of the upper half of lengths


class ObservedAnswers:
    """Distribution of answer lengths, estimated after Kaplan and Meier (J. Am. Stat. Assoc. 53, 1958).

    Unfinished answers, and answers at their limit, count as longer than they are. ``longest``: most tokens of an
    answer. ``mean``: expected length before any answer has ended (None: every answer reaches its limit).
    """

    def __init__(self, longest: int, mean: float | None = None):
        self.ended = np.zeros(longest + 1, np.int64)  # number of answers by tokens that ended before their limit
        self.cut = np.zeros(longest + 1, np.int64)  # number of answers by tokens that ended at their limit
        self.hazard = None if mean is None else 1.0 / max(mean, 1.0)  # probability that an answer ends at a token

    def end(self, tokens: int, limit: int) -> None:
        """Record the length of an ended answer, and its limit."""
        (self.ended if tokens < limit else self.cut)[tokens] += 1

    @property
    def num_ended(self) -> int:
        return int(self.ended.sum() + self.cut.sum())

    def survival(self, ages: np.ndarray) -> np.ndarray:
        """Return the shares of answers with more than 0, 1, … tokens. ``ages``: tokens of running answers."""
        longest = len(self.ended) - 1
        seen = self.ended + self.cut + np.bincount(np.minimum(ages, longest), minlength=longest + 1)
        reached = np.cumsum(seen[::-1])[::-1].astype(float)  # number of answers with at least this length
        behind = np.arange(longest + 1) >= np.searchsorted(np.cumsum(self.ended), self.ended.sum() / 2)
        pooled = self.ended[behind].sum() / max(reached[behind].sum(), 1.0)
        hazard = np.where(reached >= FEW, self.ended / np.maximum(reached, 1.0), pooled)
        if self.hazard is not None:
            hazard = (self.ended + PRIOR_ANSWERS * self.hazard) / (reached + PRIOR_ANSWERS)
        return np.cumprod(1.0 - hazard)

    def expected(self, limits: np.ndarray, ages: np.ndarray | None = None) -> np.ndarray:
        """Return expected lengths, spread like the observed ones, for answers with these limits. ``ages``: tokens that
        they have now (default: 0); answers with tokens count as running ones."""
        begun = np.zeros(0, np.int64) if ages is None else np.minimum(ages[ages > 0], len(self.ended) - 1)
        survival, expected = self.survival(begun), np.empty(len(limits), np.int64)
        for first in range(0, len(limits), TOGETHER):
            part = slice(first, first + TOGETHER)
            limit = limits[part]
            age = np.zeros(len(limit), np.int64) if ages is None else np.minimum(ages[part], len(self.ended) - 1)
            shares = np.modf(GOLDEN * (1 + first + np.arange(len(limit))))[0] * survival[age]
            lengths = np.searchsorted(-survival, -shares)  # the first length whose survival is below the share
            expected[part] = np.clip(lengths, np.minimum(age + 1, limit), limit)
        return expected


def with_mean(workload: Workload, mean: float) -> Workload:
    """Return the workload with answers of this mean length. Each token ends an answer with equal probability; the
    limits cut answers."""
    limits = workload.max_tokens
    low, high = 1.0, 64.0 * float(limits.max())
    for _ in range(40):  # bisect the mean before the limits apply
        middle = (low * high) ** 0.5
        answers = ObservedAnswers(int(limits.max()), middle).expected(limits)
        low, high = (middle, high) if answers.mean() < mean else (low, middle)
    return replace(workload, answer_tokens=answers)
