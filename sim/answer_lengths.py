"""How long answers are expected to be: from those that have ended and those that still run, or from a mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flexhybrid.core.workload import Workload

GOLDEN = (5**0.5 - 1) / 2  #: multiples of it, less their whole parts, are spread evenly over 0 … 1
PRIOR_ANSWERS = 2.0  #: as many answers as a mean that was given counts for at each length
TOGETHER = 1 << 16  #: answers whose lengths are computed at once: those of a long file would take much memory
FEW = 4  #: answers; a length that fewer have reached ends as the longer half of the answers do


class ObservedAnswers:
    """Lengths of answers as they end. Kaplan and Meier's estimate, J. Am. Stat. Assoc. 53 (1958): an answer that still
    runs, or has reached its limit, counts as one that is longer.

    ``longest``: no answer has more tokens. ``mean``: expected before any has ended; None: all are as long as they may
    be.
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
        """Return the share of the answers that are longer than 0, 1, … tokens; ``ages``: tokens of those that run."""
        longest = len(self.ended) - 1
        seen = self.ended + self.cut + np.bincount(np.minimum(ages, longest), minlength=longest + 1)
        reached = np.cumsum(seen[::-1])[::-1].astype(float)  # this length, at least
        behind = np.arange(longest + 1) >= np.searchsorted(np.cumsum(self.ended), self.ended.sum() / 2)
        pooled = self.ended[behind].sum() / max(reached[behind].sum(), 1.0)
        hazard = np.where(reached >= FEW, self.ended / np.maximum(reached, 1.0), pooled)
        if self.hazard is not None:
            hazard = (self.ended + PRIOR_ANSWERS * self.hazard) / (reached + PRIOR_ANSWERS)
        return np.cumprod(1.0 - hazard)

    def expected(self, limits: np.ndarray, ages: np.ndarray | None = None) -> np.ndarray:
        """Return lengths for answers with these limits that have ``ages`` tokens (0), spread as those of the others:
        they stand for the answers to come. ``ages`` count as answers that run."""
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
    """Return the workload with answers of this mean, as far as their limits allow: each token ends an answer with the
    same probability."""
    limits = workload.max_tokens
    low, high = 1.0, 64.0 * float(limits.max())
    for _ in range(40):  # the mean before the limits cut
        middle = (low * high) ** 0.5
        observed = ObservedAnswers(int(limits.max()), middle)
        answers = observed.expected(limits)
        low, high = (middle, high) if answers.mean() < mean else (low, middle)
    return replace(workload, answer_tokens=answers)
