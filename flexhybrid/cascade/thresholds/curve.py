"""The curve of accuracy against cost, and its points AP and EO (HybridServe, Sec. IV-B).

Shapes: M models, N requests of the validation set, P points, which are sets of thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flexhybrid.core.errors import InputError


@dataclass(frozen=True)
class Answers:
    """The answers of every model to every request of a validation set."""

    correct: np.ndarray  #: [M, N] bool: whether the answer is right
    confidence: np.ndarray  #: [M, N] in 0 .. 1; the last model's is not used
    cost: np.ndarray  #: [M] cost of a request, > 0

    def __post_init__(self):
        if self.correct.ndim != 2 or self.correct.shape != self.confidence.shape or not self.correct.size:
            raise InputError(f"correct {self.correct.shape} and confidence {self.confidence.shape} must be one shape")
        if self.cost.shape != (self.num_models,) or not (np.isfinite(self.cost) & (self.cost > 0)).all():
            raise InputError(f"{self.num_models} models need {self.num_models} costs above 0, not {self.cost}")
        if not ((self.confidence >= 0) & (self.confidence <= 1)).all():
            raise InputError("confidences must be numbers between 0 and 1")

    @property
    def num_models(self) -> int:
        return self.correct.shape[0]

    @property
    def num_requests(self) -> int:
        return self.correct.shape[1]

    def only(self, models: list[int]) -> Answers:
        """Return the answers of some models, given by index."""
        return Answers(self.correct[models], self.confidence[models], self.cost[models])


@dataclass(frozen=True)
class Curve:
    """Pareto-optimal sets of thresholds, by growing accuracy and cost."""

    thresholds: np.ndarray  #: [P, M − 1]
    num_correct: np.ndarray  #: [P] number of right answers, growing
    cost: np.ndarray  #: [P] mean cost of a request, growing
    num_requests: int
    exact: bool  #: whether all sets of thresholds were considered

    def __len__(self) -> int:
        return len(self.cost)

    @property
    def accuracy(self) -> np.ndarray:
        return self.num_correct / self.num_requests


class Choice(NamedTuple):
    """A point of a curve, with its thresholds and results after caution."""

    point: int  #: index in the curve
    thresholds: np.ndarray  #: [M − 1]
    num_correct: int
    cost: float  #: mean cost of a request


def evaluate(answers: Answers, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of right answers [P] and the mean cost [P] of sets of thresholds [P, M − 1], without skips."""
    thresholds = np.asarray(thresholds, dtype=float)
    shape = (len(thresholds), answers.num_requests)
    going_on, num_correct = np.ones(shape, dtype=bool), np.zeros(len(thresholds), dtype=int)
    cost = np.full(len(thresholds), answers.cost[0])
    for i in range(answers.num_models):
        stays = going_on
        if i < answers.num_models - 1:
            stays = going_on & (answers.confidence[i] >= thresholds[:, i, None])
            going_on = going_on & ~stays
            cost = cost + answers.cost[i + 1] * going_on.sum(axis=1) / answers.num_requests
        num_correct += (stays & answers.correct[i]).sum(axis=1)
    return num_correct, cost


def pareto(num_correct: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Return the indices of the Pareto-optimal points by growing accuracy, and one of equal points."""
    order = np.lexsort((-num_correct, cost))  # cheapest first
    best_before = np.maximum.accumulate(np.concatenate([[-1], num_correct[order]]))[:-1]
    return order[num_correct[order] > best_before]


def accuracy_preserving(curve: Curve, num_correct: int) -> int:
    """Return the cheapest point with at least ``num_correct`` right answers (for AP: those of the largest model).

    Raise InputError if there is none.
    """
    places = np.flatnonzero(curve.num_correct >= num_correct)
    if not len(places):
        raise InputError(
            f"no thresholds answer {num_correct} of {curve.num_requests} requests right; the best answer "
            f"{curve.num_correct[-1]}, an accuracy of {curve.accuracy[-1]:.2%}"
        )
    return int(places[0])


def energy_optimal(curve: Curve, least: int, most: int) -> int:
    """Return EO, the point with the largest second difference of cost over accuracy, after which accuracy is expensive.

    Candidates are the points with ``least`` to ``most`` right answers (in the paper, those of the second-largest and of
    the largest model). Second differences of neighbouring points are noise, so they are taken on the lower convex hull,
    with its uneven steps. If the hull has no inner point, return the cheapest candidate.
    """
    inside = np.flatnonzero((curve.num_correct >= least) & (curve.num_correct <= max(most, least)))
    if not len(inside):
        return accuracy_preserving(curve, least)
    hull = inside[lower_hull(curve.num_correct[inside], curve.cost[inside])]
    if len(hull) < 3:
        return int(inside[0])
    x, y = curve.accuracy[hull], curve.cost[hull]
    slope = np.diff(y) / np.diff(x)
    second = 2 * np.diff(slope) / (x[2:] - x[:-2])
    return int(hull[1 + second.argmax()])


def cautious(answers: Answers, curve: Curve, points: Sequence[int], least: int, caution: float) -> Choice:
    """Return the choice among ``points`` that costs least after 1 − t of each threshold t is divided by ``caution``.

    Raise InputError if none has ``least`` right answers after that.
    """
    thresholds = curve.thresholds[points]
    thresholds = thresholds + (1 - thresholds) * (1 - 1 / caution)  # exactly equal for caution 1
    num_correct, cost = evaluate(answers, thresholds)
    best = int(np.where(num_correct >= least, cost, np.inf).argmin())
    if num_correct[best] < least:
        raise InputError(
            f"with a caution of {caution:g} no thresholds answer {least} of {curve.num_requests} requests right; the "
            f"best answer {num_correct.max()}: give a smaller caution"
        )
    return Choice(int(points[best]), thresholds[best], int(num_correct[best]), float(cost[best]))


def lower_hull(x: np.ndarray, y: np.ndarray) -> list[int]:
    """Return the indices of the lower convex hull's corners, for points with growing x (Andrew's monotone chain)."""
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (x[b] - x[a]) * (y[i] - y[a]) > (x[i] - x[a]) * (y[b] - y[a]):
                break
            hull.pop()
        hull.append(i)
    return hull
