"""Algorithm 1 of HybridServe (Edinburgh): thresholds by random sampling, more of it where accuracy is high."""

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
    # All requests go on to the largest: the curve has its accuracy with any draw.
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
    """Return (the curve with sets of thresholds that no other beats, the requests that each set answers right)."""
    num_correct, cost = evaluate(answers, thresholds)
    all_correct, all_cost = np.concatenate([front.num_correct, num_correct]), np.concatenate([front.cost, cost])
    kept = pareto(all_correct, all_cost)
    sets = np.concatenate([front.thresholds, thresholds])[kept]
    return Curve(sets, all_correct[kept], all_cost[kept], front.num_requests, exact=False), num_correct
