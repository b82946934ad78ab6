"""What the cascade does on real data, as one file of numbers that the reproduction shows beside the paper's.

    python -m experiments.studies.cascade_study            # experiments/results/cascade/{digits,code_lines}.json

Ten splits and trainings of four CNNs on handwritten digits, and three language models that finish lines of code from
held-out files (``line_cascade``); accuracies are of data that nothing was fitted on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from experiments.bench.harness import seconds_of
from experiments.reproduce.cascade.confidence import FOLDER
from experiments.studies.line_cascade import answered, line_study, read_requests
from experiments.studies.trials import OPTIONS, Trial, evaluated
from experiments.training.digits import fit_on, scored_on, splits, train_all
from flexhybrid.cascade.routes import Cascade, CascadeModel
from flexhybrid.cascade.thresholds.confidence import confidence
from flexhybrid.cascade.thresholds.exact import exact_curve
from flexhybrid.cascade.thresholds.fit import Fitted
from flexhybrid.cascade.thresholds.sampling import sampled_curve
from flexhybrid.cascade.thresholds.search import SearchOptions, search
from flexhybrid.cascade.thresholds.skips import Route
from flexhybrid.core.files import write_by_rename

SEEDS = range(20, 30)  #: splits and trainings of digits, on which CAUTION is judged
ROUTED_BYTES = (1_000, 50_000, 1_000_000)  #: the paper's Fig. 8
ROUTED_MODELS = 5
REPEATS = 50


def trial(seed: int, **training) -> Trial:
    """Train, fit, and evaluate on held-out images."""
    data, models = splits(seed), train_all(seed, **training)
    fitted = fit_on(models, data["validation"])
    return evaluated(fitted, [scored_on(model, data["held out"]) for model in models.values()])


def study(trials: Sequence[Trial]) -> dict:
    """Return the results of all trials as plain numbers; shares and accuracies are 0 .. 1."""
    first = trials[0].fitted
    names = [model.name for model in first.models]
    cost = first.answers("energy_j").cost
    began = time.process_time()
    search(first)
    return {
        "models": names,
        "cost_j": cost.tolist(),
        "num_seeds": len(trials),
        "num_validation": first.correct.shape[1],
        "num_held_out": trials[0].held_out.num_requests,
        "search_s": time.process_time() - began,
        "alone": [seed.accuracy.tolist() for seed in trials],
        "contribution": [contributions(seed.held_out.correct).tolist() for seed in trials],
        "ece_held_out": [seed.ece.tolist() for seed in trials],
        "modes": {name: [mode_of(seed, options) for seed in trials] for name, options in OPTIONS.items()},
        "curves": curves(first),
        "routing_s": routing(),
    }


def contributions(correct: np.ndarray) -> np.ndarray:
    """Return, from [models, N], the share of requests that each model is the first to answer right (Table I)."""
    before = np.pad(np.logical_or.accumulate(correct, axis=0), ((1, 0), (0, 0)))[:-1]
    return (correct & ~before).mean(axis=1)


def mode_of(seed: Trial, options: SearchOptions) -> dict:
    """Return a searched cascade on held-out requests."""
    searched = search(seed.fitted, options)
    route = Route(seed.held_out.only(searched.kept), searched.cascade)
    return {
        "models": searched.cascade.names,
        "thresholds": list(searched.cascade.thresholds),
        "answered": route.shares.tolist(),
        "visited": route.visited.tolist(),
        "accuracy": float(route.correct.mean()),
        "cost_of_largest": route.cost / float(seed.held_out.cost[-1]),
    }


def curves(fitted: Fitted) -> dict:
    """Return accuracy and cost (over the largest model's) of the exact search's and of sampling's validation points."""
    answers, points = fitted.answers("energy_j"), {}
    for name, curve in (("exact", exact_curve(answers)), ("sampling", sampled_curve(answers))):
        points[name] = {"accuracy": curve.accuracy.tolist(), "cost": (curve.cost / answers.cost[-1]).tolist()}
    return points


def routing() -> dict[str, float]:
    """Return the median seconds of routing a prediction vector through the routers of five models, by its bytes."""
    names = [f"m{i}" for i in range(ROUTED_MODELS)]
    cascade = Cascade(tuple(CascadeModel(name, energy_j=1.0) for name in names), (1.0,) * (ROUTED_MODELS - 1))
    medians = {}
    for num_bytes in ROUTED_BYTES:
        logits = np.random.default_rng(0).normal(size=(1, 1, num_bytes // 4)).astype(np.float32)

        def route(logits: np.ndarray = logits) -> None:
            for place in range(ROUTED_MODELS):
                cascade.next_model(place, confidence(logits))

        medians[str(num_bytes)] = float(np.median([seconds_of(route) for _ in range(REPEATS)]))
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=("digits", "code_lines"), help="(both)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="(experiments/results/cascade)")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help=f"splits and trainings of digits ({len(SEEDS)})")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.only != "code_lines":
        record = study([trial(seed) for seed in tqdm(range(SEEDS[0], SEEDS[0] + arguments.seeds), unit="seed")])
        write_by_rename(arguments.out / "digits.json", json.dumps(record, indent=1))
    if arguments.only != "digits":
        answers = answered(read_requests())
        record = study([answers.trial(fold) for fold in answers.folds()]) | {"lines": line_study(answers)}
        write_by_rename(arguments.out / "code_lines.json", json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
