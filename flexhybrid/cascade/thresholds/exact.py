"""Finds the best thresholds: evaluates every set of thresholds that routes the validation set differently.

Thresholds between two neighbouring confidences give the same routes, so a model has one candidate more than distinct
confidences. Few of these matter. Lowering a threshold past requests that the model answers right adds right answers and
saves the cost of larger models, whatever the other thresholds are. So only 0 and thresholds just above a wrong answer
remain: a model with 20 errors has 21.

The thresholds of all models except the last two are enumerated. For these two, tables of cumulative sums have the
numbers of requests that pass both, and of those that the next model answers right.
"""

from dataclasses import dataclass

import numpy as np

from flexhybrid.cascade.thresholds.curve import Answers, Curve

#: Number of sets above which candidates are thinned out; a set takes about 10 ns.
MAX_SETS = 500_000_000


def candidates(confidence: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Return the candidate thresholds of a model [K], growing from 0, by its ``confidence`` [N] and ``correct`` [N].

    They are in the middle between neighbouring confidences. The last one is 1 (the model answers no request) if the
    most confident answer is wrong.
    """
    distinct, group = np.unique(confidence, return_inverse=True)
    has_error = np.bincount(group, ~correct, len(distinct)) > 0
    upper = np.append(distinct[1:], 1.0)
    middle = distinct + (upper - distinct) / 2
    middle[-1] = 1.0
    middle = np.where(middle > distinct, middle, upper)  # neighbouring floats have no middle
    return np.concatenate([[0.0], middle[has_error]])


def exact_curve(answers: Answers, max_sets: int = MAX_SETS) -> Curve:
    """Return the curve with the least cost for every reachable number of right answers.

    With more than ``max_sets`` sets of thresholds, every model keeps the same number of evenly spaced candidates, and
    the curve is marked as not exact. A request of confidence 1 is answered at every threshold.
    """
    all_candidates = [candidates(answers.confidence[i], answers.correct[i]) for i in range(answers.num_models - 1)]
    choices, exact = _thinned(all_candidates, max_sets)
    levels = [np.searchsorted(choices[i], answers.confidence[i], side="right") for i in range(len(choices))]
    search = _Search(answers, levels, [len(thresholds) for thresholds in choices])
    search.walk(0, np.ones(answers.num_requests, dtype=bool), 0, 0.0, ())
    right, chosen = search.front()
    thresholds = np.array([[choices[i][k] for i, k in enumerate(row)] for row in chosen]).reshape(len(right), -1)
    return Curve(thresholds, right, search.cost[right] / answers.num_requests, answers.num_requests, exact)


def _thinned(lists: list[np.ndarray], max_sets: int) -> tuple[list[np.ndarray], bool]:
    """Return the lists, the longest ones thinned out to at most ``max_sets`` combinations, and whether none was."""
    longest = max(map(len, lists), default=0)
    keep = longest
    while keep > 2 and np.prod([float(min(len(values), keep)) for values in lists]) > max_sets:
        keep -= 1
    if keep == longest:
        return lists, True
    kept = [np.unique(np.linspace(0, len(values) - 1, min(len(values), keep)).astype(int)) for values in lists]
    return [values[indices] for values, indices in zip(lists, kept, strict=True)], False


@dataclass
class _Search:
    """Enumerates sets of candidates."""

    answers: Answers
    levels: list[np.ndarray]  #: [model][request]: the model answers at candidates before this index
    sizes: list[int]  #: [model]: number of candidates

    def __post_init__(self):
        num = self.answers.num_requests
        self.cost = np.full(num + 1, np.inf)  #: [right answers]: least total cost
        self.chosen = np.zeros((num + 1, len(self.levels)), dtype=int)  #: [right answers, model]: its candidates

    def walk(self, i: int, alive: np.ndarray, right: int, cost: float, chosen: tuple[int, ...]) -> None:
        """Enumerate the thresholds of model i and later ones, for the requests ``alive`` [N] that reach model i.
        ``right``, ``cost``, ``chosen``: totals and candidates of the models before."""
        answers, left = self.answers, len(self.levels) - i
        if left == 0:
            right += int(answers.correct[i, alive].sum())
            self._note(np.array([[right]]), np.array([[cost + answers.cost[i] * alive.sum()]]), chosen, 0)
        elif left <= 2:
            self._tables(i, left, alive, right, cost, chosen)
        else:
            for place in range(self.sizes[i]):
                going_on = alive & (self.levels[i] <= place)
                more = int(answers.correct[i, alive & ~going_on].sum())
                self.walk(i + 1, going_on, right + more, cost + answers.cost[i] * alive.sum(), (*chosen, place))

    def _tables(self, i: int, left: int, alive: np.ndarray, right: int, cost: float, chosen: tuple[int, ...]) -> None:
        """Evaluate all candidates of the last two models with thresholds, a and b, at once.
        If only b is left, a is a model without cost that passes all requests on."""
        answers = self.answers
        b = i + left - 1
        level_b, size_b = self.levels[b][alive], self.sizes[b]
        of_b, of_c = (answers.correct[model, alive].astype(np.int64) for model in (b, b + 1))
        if left == 2:
            level_a, size_a, of_a = self.levels[i][alive], self.sizes[i], answers.correct[i, alive].astype(np.int64)
            cost += answers.cost[i] * len(level_a)
        else:
            level_a, size_a, of_a = np.zeros_like(level_b), 1, np.zeros_like(of_b)

        def passing(weights: np.ndarray) -> np.ndarray:
            """Return sums over the requests that pass both models, [candidates of a, candidates of b]."""
            cells = np.bincount(level_a * (size_b + 1) + level_b, weights, (size_a + 1) * (size_b + 1))
            table = cells.astype(np.int64).reshape(size_a + 1, size_b + 1)
            return table.cumsum(axis=0).cumsum(axis=1)[:size_a, :size_b]

        def passing_a(weights: np.ndarray) -> np.ndarray:
            return np.bincount(level_a, weights, size_a + 1).astype(np.int64).cumsum()[:size_a, None]

        all_right = right + of_a.sum() + passing_a(of_b - of_a) + passing(of_c - of_b)
        ones = np.ones_like(of_b)
        all_cost = cost + answers.cost[b] * passing_a(ones) + answers.cost[b + 1] * passing(ones)
        self._note(all_right, all_cost, chosen, left)

    def _note(self, right: np.ndarray, cost: np.ndarray, chosen: tuple[int, ...], left: int) -> None:
        """Keep the sets that are cheaper than all earlier ones with at least the same accuracy."""
        at_least = np.minimum.accumulate(self.cost[::-1])[::-1]
        rows, columns = np.nonzero(cost < at_least[right])
        if not len(rows):
            return
        order = np.argsort(cost[rows, columns], kind="stable")
        rows, columns = rows[order], columns[order]
        values, first = np.unique(right[rows, columns], return_index=True)
        rows, columns = rows[first], columns[first]
        self.cost[values] = cost[rows, columns]
        self.chosen[values, : len(chosen)] = chosen
        if left:
            self.chosen[values, -1] = columns
        if left == 2:
            self.chosen[values, -2] = rows

    def front(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of right answers of each point of the curve, growing, and its candidates."""
        later = np.minimum.accumulate(np.append(self.cost[1:], np.inf)[::-1])[::-1]
        right = np.flatnonzero(self.cost < later)
        return right, self.chosen[right]
