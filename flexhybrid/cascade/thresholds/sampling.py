"""Algorithm 1 of HybridServe (Edinburgh): thresholds by random sampling, more of it where accuracy is high."""

from __future__ import annotations

import numpy as np

from flexhybrid.cascade.thresholds.curve import Answers, Curve, evaluate, pareto

NUM_SAMPLES = 256  #: of a round; the paper gives no number
EPSILON = 0.05  #: half the side of the box around a good sample; the paper: "small, empirically chosen"
MAX_ROUNDS = 64


def sampled_curve(
    answers: Answers, seed: int = 0, num_samples: int = NUM_SAMPLES, max_rounds: int = MAX_ROUNDS
) -> Curve:
    """Return the curve that sampling finds.

    Lines 3 and 4: ``num_samples`` sets of thresholds a round, uniform in [0, 1]. Lines 5 and 6: as many again in boxes
    of ± EPSILON around those whose accuracy lies between the second-largest and the largest model's. Line 8, "until no
    new (a, e)": until a round adds no point to the curve, or ``max_rounds``. Samples and boxes are of thresholds of the
    paper's f, whose roots are thresholds of our confidence (``confidence``).
    """
    generator = np.random.default_rng(seed)
    right = answers.correct.sum(axis=1)
    low, high = sorted(right[-2:]) if answers.num_models > 1 else (right[0], right[0])
    size = (num_samples, answers.num_models - 1)
    front = _Front(answers)
    front.add(np.ones((1, size[1])))  # all requests go on to the largest: the curve has its accuracy with any draw
    for _ in range(max_rounds):
        squares = generator.random(size)
        num_correct = front.add(np.sqrt(squares))
        good = squares[(low <= num_correct) & (num_correct <= high)]
        if len(good):
            near = good[generator.integers(len(good), size=num_samples)] + generator.uniform(-EPSILON, EPSILON, size)
            front.add(np.sqrt(np.clip(near, 0.0, 1.0)))
        if not front.is_new():
            break
    return Curve(front.thresholds, front.num_correct, front.cost, answers.num_requests, exact=False)


class _Front:
    """The points that no other beats, so far."""

    def __init__(self, answers: Answers):
        self.answers = answers
        self.thresholds = np.empty((0, answers.num_models - 1))
        self.num_correct, self.cost = np.empty(0, dtype=int), np.empty(0)
        self.before: set[tuple[int, float]] = set()

    def add(self, thresholds: np.ndarray) -> np.ndarray:
        """Add sets of thresholds; return the number of requests that each set answers right."""
        num_correct, cost = evaluate(self.answers, thresholds)
        all_correct, all_cost = np.concatenate([self.num_correct, num_correct]), np.concatenate([self.cost, cost])
        kept = pareto(all_correct, all_cost)
        self.thresholds = np.concatenate([self.thresholds, thresholds])[kept]
        self.num_correct, self.cost = all_correct[kept], all_cost[kept]
        return num_correct

    def is_new(self) -> bool:
        """Return whether points were added since the last call."""
        now = set(zip(self.num_correct.tolist(), self.cost.tolist()))
        new, self.before = bool(now - self.before), now
        return new
