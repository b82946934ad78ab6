"""Expected lengths of answers: from ended and running ones, or from a mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flexhybrid.core.workload import Workload

GOLDEN = (5**0.5 - 1) / 2  #: the fractional parts of its multiples are spread evenly over 0 … 1
PRIOR_ANSWERS = 2.0  #: number of observed answers that a given mean counts as
TOGETHER = 1 << 16  #: answers computed at once, to bound the memory
FEW = 4  #: answers; lengths that fewer reach take the upper half's distribution


class ObservedAnswers:
    """Distribution of answer lengths by Kaplan and Meier's estimate (J. Am. Stat. Assoc. 53, 1958): an unfinished
    answer, or one at its limit, counts as longer than it is.

    ``longest``: the most tokens of an answer. ``mean``: expected before any has ended; None: every answer reaches its
    limit.
    """

    def __init__(self, longest: int, mean: float | None = None):
        self.ended = np.zeros(longest + 1, np.int64)  #: by tokens, answers that ended by themselves
        self.cut = np.zeros(longest + 1, np.int64)  #: by tokens, answers that ended at their limit
        self.hazard = None if mean is None else 1.0 / max(mean, 1.0)

    def end(self, tokens: int, limit: int) -> None:
        """Take an answer's length."""
        (self.ended if tokens < limit else self.cut)[tokens] += 1

    @property
    def num_ended(self) -> int:
        return int(self.ended.sum() + self.cut.sum())

    def survival(self, ages: np.ndarray) -> np.ndarray:
        """Return the share of the answers longer than 0, 1, … tokens; ``ages``: tokens of running ones."""
        longest = len(self.ended) - 1
        seen = self.ended + self.cut + np.bincount(np.minimum(ages, longest), minlength=longest + 1)
        reached = np.cumsum(seen[::-1])[::-1].astype(float)  # of at least this length
        behind = np.arange(longest + 1) >= np.searchsorted(np.cumsum(self.ended), self.ended.sum() / 2)
        pooled = self.ended[behind].sum() / max(reached[behind].sum(), 1.0)
        hazard = np.where(reached >= FEW, self.ended / np.maximum(reached, 1.0), pooled)
        if self.hazard is not None:
            hazard = (self.ended + PRIOR_ANSWERS * self.hazard) / (reached + PRIOR_ANSWERS)
        return np.cumprod(1.0 - hazard)

    def expected(self, limits: np.ndarray, ages: np.ndarray | None = None) -> np.ndarray:
        """Return lengths for answers with these limits that have ``ages`` tokens (0), spread like the observed ones.
        ``ages`` count as running answers."""
        begun = np.zeros(0, np.int64) if ages is None else np.minimum(ages[ages > 0], len(self.ended) - 1)
        survival, expected = self.survival(begun), np.empty(len(limits), np.int64)
        for first in range(0, len(limits), TOGETHER):
            part = slice(first, first + TOGETHER)
            limit = limits[part]
            age = np.zeros(len(limit), np.int64) if ages is None else np.minimum(ages[part], len(self.ended) - 1)
            shares = np.modf(GOLDEN * (1 + first + np.arange(len(limit))))[0] * survival[age]
            lengths = np.searchsorted(-survival, -shares)  # the first length that fewer exceed
            expected[part] = np.clip(lengths, np.minimum(age + 1, limit), limit)
        return expected


def with_mean(workload: Workload, mean: float) -> Workload:
    """Return the workload with answers of this mean, within their limits: each token ends an answer with equal
    probability."""
    limits = workload.max_tokens
    low, high = 1.0, 64.0 * float(limits.max())
    for _ in range(40):  # the mean before the limits apply
        middle = (low * high) ** 0.5
        observed = ObservedAnswers(int(limits.max()), middle)
        answers = observed.expected(limits)
        low, high = (middle, high) if answers.mean() < mean else (low, middle)
    return replace(workload, answer_tokens=answers)
