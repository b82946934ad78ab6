"""Algorithm 1 of HybridServe (Edinburgh): random sampling of thresholds, with more samples near accurate ones."""

import numpy as np

from flexhybrid.cascade.thresholds.curve import Answers, Curve, evaluate, pareto

NUM_SAMPLES = 256  #: samples of a round; the paper gives no number
EPSILON = 0.05  #: half the side of the box around a good sample; in the paper "small, empirically chosen"
MAX_ROUNDS = 64  #: most rounds


def sampled_curve(
    answers: Answers, seed: int = 0, num_samples: int = NUM_SAMPLES, max_rounds: int = MAX_ROUNDS
) -> Curve:
    """Return the curve found by sampling.

    - Lines 3 and 4: a round draws ``num_samples`` sets of thresholds, uniform in [0, 1].
    - Lines 5 and 6: it draws the same number in boxes of ± EPSILON around samples whose accuracy is between those of
      the second-largest and the largest model.
    - Line 8, "until no new (a, e)": rounds end when one adds no point to the curve, or after ``max_rounds``.

    Samples are thresholds on the paper's f; their roots are thresholds on our confidence (``confidence``).
    """
    generator = np.random.default_rng(seed)
    right = answers.correct.sum(axis=1)
    low, high = sorted(right[-2:]) if answers.num_models > 1 else (right[0], right[0])
    size = (num_samples, answers.num_models - 1)
    # The set that sends all requests to the largest model, so that the curve always has its accuracy.
    front = Curve(np.ones((1, size[1])), *evaluate(answers, np.ones((1, size[1]))), answers.num_requests, exact=False)
    before: set[tuple[int, float]] = set()
    for _ in range(max_rounds):
        squares = generator.random(size)
        front, num_correct = _with_sets(front, answers, np.sqrt(squares))
        good = squares[(low <= num_correct) & (num_correct <= high)]
        if len(good):
            near = good[generator.integers(len(good), size=num_samples)] + generator.uniform(-EPSILON, EPSILON, size)
            front, _ = _with_sets(front, answers, np.sqrt(np.clip(near, 0.0, 1.0)))
        now = set(zip(front.num_correct.tolist(), front.cost.tolist()))
        if not now - before:
            break
        before = now
    return front


def _with_sets(front: Curve, answers: Answers, thresholds: np.ndarray) -> tuple[Curve, np.ndarray]:
    """Return the curve with more sets of thresholds added, and the number of right answers of each added set."""
    num_correct, cost = evaluate(answers, thresholds)
    all_correct, all_cost = np.concatenate([front.num_correct, num_correct]), np.concatenate([front.cost, cost])
    kept = pareto(all_correct, all_cost)
    sets = np.concatenate([front.thresholds, thresholds])[kept]
    return Curve(sets, all_correct[kept], all_cost[kept], front.num_requests, exact=False), num_correct
