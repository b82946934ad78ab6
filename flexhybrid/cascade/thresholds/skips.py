"""Chooses the models of a cascade, and the models that requests skip (HybridServe, Edinburgh, Sec. IV-C, Algorithm 2).

Each of the paper's two rules has a fitted alternative. The paper drops models without benefit; the alternative searches
every set of models. The paper cuts the confidences below a threshold into equal parts; the alternative makes the cuts
that save most on the validation set.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from flexhybrid.cascade.routes import Cascade, CascadeModel, Skip
from flexhybrid.cascade.thresholds.curve import Answers, Choice, Curve
from flexhybrid.core.errors import InputError

Skips = tuple[tuple[Skip, ...], ...]


def energy_benefit(visited: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Return the benefit of each model except the last [M − 1] (Algorithm 2, line 1).

    It is the energy saved at the next model by a model's answers, minus the energy of all requests that reach the
    model: (rho_i − rho_i+1) e_i+1 − rho_i e_i. ``visited`` [M]: share rho of requests that reach each model.
    """
    return (visited[:-1] - visited[1:]) * cost[1:] - visited[:-1] * cost[:-1]


def drop_by_benefit(answers: Answers, choose: Callable[[Answers], np.ndarray]) -> list[int]:
    """Return the models that remain after dropping those without benefit (Algorithm 2, lines 2-4 and 7).

    The smallest model without benefit is dropped first. ``choose`` returns the thresholds [M − 1] of some models
    (Algorithm 1).
    """
    kept = list(range(answers.num_models))
    while len(kept) > 1:
        part = answers.only(kept)
        visited = route(part, choose(part)).visited
        useless = np.flatnonzero(energy_benefit(visited, part.cost) <= 0)
        if not len(useless):
            break
        kept.pop(int(useless[0]))
    return kept


def best_subset(
    answers: Answers, search: Callable[[Answers], Curve], pick: Callable[[Answers, Curve], Choice]
) -> tuple[list[int], Curve, Choice]:
    """Return the indices, curve and choice of the set of models with the cheapest choice.

    Each set includes the largest model. Among equal costs, the most accurate set wins. Sets for which ``pick`` raises
    InputError are left out; if no set is left, raise the last error.
    """
    last, best, reason = answers.num_models - 1, None, InputError("there is no model")
    for size in range(last + 1):
        for smaller in itertools.combinations(range(last), size):
            kept = [*smaller, last]
            part = answers.only(kept)
            curve = search(part)
            try:
                choice = pick(part, curve)
            except InputError as error:
                reason = error
                continue
            rank = (choice.cost, -choice.num_correct)
            if best is None or rank < best[0]:
                best = (rank, kept, curve, choice)
    if best is None:
        raise reason
    return best[1:]


class Route:
    """The routes of all requests of a validation set through a cascade, with their cost."""

    def __init__(self, answers: Answers, cascade: Cascade):
        self.answered, visited = cascade.walk(answers.confidence)
        self.correct = answers.correct[self.answered, np.arange(answers.num_requests)]  #: [N] bool
        self.visited = visited.mean(axis=1)  #: [M], share of the requests that reach each model
        self.shares = np.bincount(self.answered, minlength=answers.num_models) / answers.num_requests
        self.cost = float(self.visited @ answers.cost)  #: mean cost of a request

    @property
    def num_correct(self) -> int:
        return int(self.correct.sum())


def route(answers: Answers, thresholds: Sequence[float] | np.ndarray, skips: Skips = ()) -> Route:
    """Return the routes of a validation set under thresholds and skips."""
    models = tuple(CascadeModel(str(i)) for i in range(answers.num_models))
    return Route(answers, Cascade(models, tuple(map(float, thresholds)), skips))


def even_skips(thresholds: Sequence[float]) -> Skips:
    """Return the paper's skips, which cut confidences below a threshold into equal parts, one per successor.

    The lowest part goes to the largest model. Algorithm 2 has LogUniform(0, t), which is not a distribution, since
    log 0 is not finite. Its explanation, used here, says "uniformly partitioned into the number of successor models".
    The parts are equal in the paper's f, the square of our confidence (``confidence``).
    """
    last = len(thresholds)
    skips = []
    for i, threshold in enumerate(thresholds):
        parts = last - i
        bounds = [float(threshold) * (part / parts) ** 0.5 for part in range(1, parts)]
        skips.append(tuple(Skip(b, last - place) for place, b in enumerate(bounds) if b > 0))
    return tuple(skips)


def fitted_skips(answers: Answers, thresholds: Sequence[float]) -> Skips:
    """Return the skips that save most without reducing the number of right answers.

    Models are processed from the second-largest down. For every request that model i passes on, the cost and the answer
    after entering each successor are known. Dynamic programming finds the best cuts of model i's confidences, the
    lowest part for the largest model, at a given price of a wrong answer. The price grows from 0 until enough answers
    are right.
    """
    plain = route(answers, thresholds)
    no_skips: Skips = ((),) * len(thresholds)
    best, best_cost = no_skips, plain.cost
    total_cost = float(answers.cost.sum()) * answers.num_requests
    for price in (0.0, *np.geomspace(total_cost * 1e-6, total_cost, 25)):
        skips = _fit_at(answers, thresholds, price)
        candidate = route(answers, thresholds, skips)
        if candidate.num_correct >= plain.num_correct and candidate.cost < best_cost:
            best, best_cost = skips, candidate.cost
    return best


def _fit_at(answers: Answers, thresholds: Sequence[float], price: float) -> Skips:
    """Return the skips of least cost if a wrong answer costs ``price`` more."""
    last, num = answers.num_models - 1, answers.num_requests
    loss = np.empty((last + 1, num))  # cost of each request after entering at each model
    loss[last] = answers.cost[last] + price * ~answers.correct[last]
    skips: list[tuple[Skip, ...]] = [()] * last
    reached = np.ones((last + 1, num), dtype=bool)  # whether all smaller models pass the request on
    for i in range(last):
        reached[i + 1] = reached[i] & (answers.confidence[i] < thresholds[i])
    for i in reversed(range(last)):
        here = np.flatnonzero(reached[i + 1])
        here = here[np.argsort(answers.confidence[i, here], kind="stable")]
        skips[i] = _cuts(answers.confidence[i, here], loss[i + 1 :, here], i + 1, float(thresholds[i]))
        stays = answers.confidence[i] >= thresholds[i]
        to = np.full(num, i + 1)
        for skip in reversed(skips[i]):
            to[answers.confidence[i] < skip.below] = skip.to
        onward = loss[to, np.arange(num)]
        loss[i] = answers.cost[i] + np.where(stays, price * ~answers.correct[i], onward)
    return tuple(skips)


def _cuts(confidence: np.ndarray, loss: np.ndarray, first: int, threshold: float) -> tuple[Skip, ...]:
    """Return skips that cut growing confidences [n] into one part per successor with the least total ``loss``.

    The lowest part goes to the last successor. ``loss`` [successors, n]; successor 0 is the model ``first``.
    """
    num_parts, num = loss.shape
    if num_parts == 1 or num == 0:
        return ()
    sums = np.concatenate([np.zeros((num_parts, 1)), loss.cumsum(axis=1)], axis=1)  # [successors, k]: of the k lowest
    may_cut = np.concatenate([[True], np.diff(confidence) > 0, [True]])  # no cut between equal confidences
    # best[k]: least loss of the k lowest requests, split among this successor and the larger ones
    best, cut_of = sums[-1], []
    for part in reversed(range(num_parts - 1)):
        gain = np.where(may_cut, best - sums[part], np.inf)
        place = _running_argmin(gain)
        cut_of.append(place)
        best = sums[part] + gain[place]
    bounds, end = [], num
    for place in reversed(cut_of):  # from the nearest successor down to the largest
        end = int(place[end])
        bounds.append(end)
    skips, before = [], 0
    for part, end in enumerate(reversed(bounds)):
        if end > before:
            below = threshold if end == num else (confidence[end - 1] + confidence[end]) / 2
            below = below if below > confidence[end - 1] else float(confidence[end])  # for neighbouring floats
            skips.append(Skip(float(below), first + num_parts - 1 - part))
            before = end
    return tuple(skips)


def _running_argmin(values: np.ndarray) -> np.ndarray:
    """Return, for each place, the index of the least value up to it; the first one of equal values."""
    least = np.minimum.accumulate(values)
    is_new = np.concatenate([[True], least[1:] < least[:-1]])
    return np.maximum.accumulate(np.where(is_new, np.arange(len(values)), 0))
