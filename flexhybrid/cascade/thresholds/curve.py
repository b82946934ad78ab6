"""The curve of accuracy against cost, and its two points AP and EO (HybridServe, Sec. IV-B).

Shapes: M models, N requests of the validation set, P points or sets of thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flexhybrid.core.errors import InputError


@dataclass(frozen=True)
class Answers:
    """Every model's answer to every request of a validation set, and the cost of a request on each model."""

    correct: np.ndarray  #: [M, N] bool
    confidence: np.ndarray  #: [M, N] in 0 .. 1; the last model's is not used
    cost: np.ndarray  #: [M] of a request, > 0

    def __post_init__(self):
        if self.correct.ndim != 2 or self.correct.shape != self.confidence.shape or not self.correct.size:
            raise InputError(f"correct {self.correct.shape} and confidence {self.confidence.shape} must be one shape")
        if self.cost.shape != (self.num_models,) or not (np.isfinite(self.cost) & (self.cost > 0)).all():
            raise InputError(f"{self.num_models} models need as many costs above 0, not {self.cost}")
        if not ((self.confidence >= 0) & (self.confidence <= 1)).all():
            raise InputError("confidences must be numbers between 0 and 1")

    @property
    def num_models(self) -> int:
        return self.correct.shape[0]

    @property
    def num_requests(self) -> int:
        return self.correct.shape[1]

    def only(self, models: list[int]) -> Answers:
        """Return the answers of some of the models."""
        return Answers(self.correct[models], self.confidence[models], self.cost[models])


@dataclass(frozen=True)
class Curve:
    """Sets of thresholds of which none is as accurate as another and cheaper: accuracy and cost grow together."""

    thresholds: np.ndarray  #: [P, M − 1]
    num_correct: np.ndarray  #: [P] requests answered right, growing
    cost: np.ndarray  #: [P] mean of a request, growing
    num_requests: int
    exact: bool  #: whether no set of thresholds lies above the curve

    def __len__(self) -> int:
        return len(self.cost)

    @property
    def accuracy(self) -> np.ndarray:
        return self.num_correct / self.num_requests


class Choice(NamedTuple):
    """A point of a curve, and what its thresholds do after caution."""

    point: int
    thresholds: np.ndarray  #: [M − 1]
    num_correct: int
    cost: float  #: mean of a request


def evaluate(answers: Answers, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (right answers [P], mean cost of a request [P]) for sets of thresholds [P, M − 1], without skips."""
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
    """Return the indices of the points that no other beats, by growing accuracy; one of equal points."""
    order = np.lexsort((-num_correct, cost))  # cheapest first
    best_before = np.maximum.accumulate(np.concatenate([[-1], num_correct[order]]))[:-1]
    return order[num_correct[order] > best_before]


def accuracy_preserving(curve: Curve, num_correct: int) -> int:
    """Return the cheapest point with at least ``num_correct`` right answers (AP: as many as the largest model has).

    Raises InputError if no point has as many.
    """
    places = np.flatnonzero(curve.num_correct >= num_correct)
    if not len(places):
        raise InputError(
            f"no thresholds answer {num_correct} of {curve.num_requests} requests right; the best answer "
            f"{curve.num_correct[-1]}, an accuracy of {curve.accuracy[-1]:.2%}"
        )
    return int(places[0])


def energy_optimal(curve: Curve, least: int, most: int) -> int:
    """Return EO: the point with the largest second difference of cost over accuracy, beyond which accuracy is dear.

    It is one of the points with ``least`` .. ``most`` requests right (the paper: the second-largest and the largest
    model's). Between neighbouring points one request apart the second difference is noise, so it is taken on the lower
    convex hull, with the hull's uneven steps. Without an inner point of the hull it is the cheapest point.
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
    """Return the choice among ``points`` whose thresholds cost least once caution has divided the doubt 1 − t.

    Raises InputError where none has ``least`` requests right after caution.
    """
    thresholds = curve.thresholds[points]
    thresholds = thresholds + (1 - thresholds) * (1 - 1 / caution)  # with caution 1 the same to the last digit
    num_correct, cost = evaluate(answers, thresholds)
    best = int(np.where(num_correct >= least, cost, np.inf).argmin())
    if num_correct[best] < least:
        raise InputError(
            f"with a caution of {caution:g} no thresholds answer {least} of {curve.num_requests} requests right; the "
            f"best answer {num_correct.max()}: give a smaller caution"
        )
    return Choice(int(points[best]), thresholds[best], int(num_correct[best]), float(cost[best]))


def lower_hull(x: np.ndarray, y: np.ndarray) -> list[int]:
    """Return the indices of the corners of the lower convex hull of points with growing x (Andrew's monotone chain)."""
    hull: list[int] = []
    for i in range(len(x)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (x[b] - x[a]) * (y[i] - y[a]) > (x[i] - x[a]) * (y[b] - y[a]):
                break
            hull.pop()
        hull.append(i)
    return hull
