"""Bench rows of the cascade: four CNNs on handwritten digits, over several splits and trainings.

Held out is what neither training nor validation saw. Costs are stated energies (``experiments.training.digits``): a
share of the largest model's is a ratio of multiply-adds.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student
from tqdm import tqdm

from experiments.training.digits import fit_on, scored_on, splits, train_all
from flexhybrid.cascade.models import ModelOutputs
from flexhybrid.cascade.routes import Cascade, CascadeModel
from flexhybrid.cascade.serving.ray_serve import APPLICATION, HOST, Size, deployed
from flexhybrid.cascade.thresholds.confidence import Scored, calibration_error, confidence
from flexhybrid.cascade.thresholds.curve import Answers, accuracy_preserving
from flexhybrid.cascade.thresholds.exact import exact_curve
from flexhybrid.cascade.thresholds.fit import Fitted
from flexhybrid.cascade.thresholds.sampling import sampled_curve
from flexhybrid.cascade.thresholds.search import SearchOptions, search
from flexhybrid.cascade.thresholds.skips import Route

SEEDS = range(20, 30)  #: the search's caution was chosen with 0 to 19 in view
#: The search as it comes, and the paper's: no caution, its own way of dropping models and of skipping.
OPTIONS = {
    "AP": SearchOptions(), "EO": SearchOptions(mode="eo"),
    "AP, the paper's": SearchOptions(caution=1.0, method="sampling", drop="paper", skips="paper"),
    "AP, paper's skips": SearchOptions(skips="paper"), "AP, no skips": SearchOptions(skips="none"),
}  # fmt: skip
WARM_UP = 20  #: requests that set up connections
ROUTED_BYTES, NUM_ROUTED = 50_000, 200  #: the paper's prediction vector of GPT (Sec. VI-D)


@dataclass(frozen=True)
class Trial:
    """One seed: what was fitted on the validation set, and the same models on held-out images."""

    fitted: Fitted
    held_out: Answers
    ece: np.ndarray  #: [models, 2] on held-out images, before and after scaling

    def route(self, options: SearchOptions) -> Route:
        """The cascade that the validation set gives, on the held-out images."""
        found = search(self.fitted, options)
        return Route(self.held_out.only(found.kept), found.cascade)

    @property
    def accuracy(self) -> np.ndarray:
        """Held out, of each model alone."""
        return self.held_out.correct.mean(axis=1)


def trial(seed: int, **training) -> Trial:
    """Train, fit, and look at held-out images."""
    data, models = splits(seed), train_all(seed, **training)
    fitted = fit_on(models, data["validation"])
    return looked_at(fitted, [scored_on(model, data["held out"]) for model in models.values()])


def looked_at(fitted: Fitted, seen: Sequence[Scored]) -> Trial:
    """Fitted models on data that nothing was fitted on."""
    correct = np.array([one.correct for one in seen])
    sure = np.array([confidence(one.logits, None, m.temperature) for one, m in zip(seen, fitted.models)])
    plain = np.array([confidence(one.logits) for one in seen])
    ece = [[calibration_error(row, right) for row in pair] for *pair, right in zip(plain, sure, correct)]
    return Trial(fitted, Answers(correct, sure, fitted.answers("energy_j").cost), np.array(ece))


def interval(values) -> tuple[float, float]:
    """(mean, half of its 95 % interval by Student's t)."""
    values = np.asarray(values, dtype=float)
    half = student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return float(values.mean()), float(half)


def bench_cascade(table) -> None:
    """All rows."""
    trials = [trial(seed) for seed in tqdm(SEEDS, desc="digits", unit="seed", leave=False)]
    bench_accuracy(table, trials)
    bench_thresholds(table, trials)
    bench_calibration(table, trials)
    bench_router(table)
    bench_serve(table)


def bench_accuracy(table, trials: list[Trial]) -> None:
    """Accuracy and cost on held-out images."""
    routes = {name: [one.route(options) for one in trials] for name, options in OPTIONS.items()}
    largest, second = (np.array([one.accuracy[place] for one in trials]) for place in (-1, -2))
    costs = np.array([one.held_out.cost[-1] for one in trials])
    accuracy = {name: np.array([route.correct.mean() for route in found]) for name, found in routes.items()}
    share = {name: np.array([route.cost for route in found]) / costs for name, found in routes.items()}
    more, half = interval(100 * (accuracy["AP"] - largest))
    table.add(
        f"cascade, digits: AP less the largest model, held out, mean of {len(trials)} seeds", more, 0, "points",
        interval_95=[more - half, more + half], each=(100 * (accuracy["AP"] - largest)).tolist(),
        largest=float(largest.mean()), papers_ap=interval(100 * (accuracy["AP, the paper's"] - largest)),
        papers_ap_cost=float(share["AP, the paper's"].mean()),
    )  # fmt: skip
    table.add("cascade, digits: cost of AP, of the largest model's", share["AP"].mean(), 0.5, "x", False,
              each=share["AP"].tolist(), without_skips=float(share["AP, no skips"].mean()),
              papers_skips=float(share["AP, paper's skips"].mean()))  # fmt: skip
    more, half = interval(100 * (accuracy["EO"] - second))
    table.add("cascade, digits: EO less the second-largest model, held out", more, 0, "points",
              interval_95=[more - half, more + half], cost=float(share["EO"].mean()),
              less_than_largest=interval(100 * (accuracy["EO"] - largest)))  # fmt: skip
    joint = np.array([one.held_out.correct.any(axis=0).mean() - one.accuracy.max() for one in trials])
    table.add("cascade, digits: joint accuracy less the best model's (Table I)", 100 * joint.mean(), 0, "points")


def bench_thresholds(table, trials: list[Trial]) -> None:
    """The exact search beside the paper's sampling, over the same models."""
    worse, ratios = 0, []
    for seed, one in enumerate(trials):
        answers = one.fitted.answers("energy_j")
        exact, sampled = exact_curve(answers), sampled_curve(answers, seed)
        best = [exact.cost[accuracy_preserving(exact, right)] for right in sampled.num_correct]
        worse += int((np.array(best) > sampled.cost * (1 + 1e-12)).sum())
        ratios += (sampled.cost / best).tolist()
    table.add("cascade: points of the sampled curve that the exact search misses", worse, 0, "points", False)
    table.add("cascade: cost of sampled thresholds over exact ones, median of the curve", np.median(ratios), 1, "x",
              worst=float(max(ratios)))  # fmt: skip


def bench_calibration(table, trials: list[Trial]) -> None:
    """Expected calibration error after scaling over before."""
    fitted = np.concatenate([one.fitted.ece for one in trials])
    table.add("cascade: ECE after scaling over before, validation, worst model", (fitted[:, 1] / fitted[:, 0]).max(), 1,
              "x", False, mean_before=float(fitted[:, 0].mean()), mean_after=float(fitted[:, 1].mean()))  # fmt: skip
    held_out = np.concatenate([one.ece for one in trials]).mean(axis=0)
    table.add("cascade: ECE after scaling over before, held out, mean of models", held_out[1] / held_out[0], 1, "x",
              False, mean_before=float(held_out[0]), mean_after=float(held_out[1]))  # fmt: skip


def bench_router(table) -> None:
    """What the router does with one prediction of 50 KB: confidence, and where to."""
    cascade = Cascade(tuple(CascadeModel(name, energy_j=1.0) for name in "abcde"), (0.9,) * 4)
    logits = np.random.default_rng(0).normal(size=(1, 1, ROUTED_BYTES // 4)).astype(np.float32)
    seconds = []
    for _ in range(NUM_ROUTED):
        began = time.perf_counter()
        cascade.next_model(0, confidence(logits, None, cascade.models[0].temperature))
        seconds.append(time.perf_counter() - began)
    table.add("cascade: routing one prediction of 50 KB", 1e3 * float(np.median(seconds)), 1, "ms", False)


class Instant:
    """A model that costs nothing: what is left of a request's time is the way there and back."""

    name = "instant"

    def predict(self, batch: Sequence) -> ModelOutputs:
        logits = np.zeros((len(batch), 1, 2))
        logits[..., 0] = 9.0
        return ModelOutputs([0] * len(batch), logits, np.ones((len(batch), 1), dtype=bool))


def bench_serve(table) -> None:
    """What the router adds to requests of 50 KB on Ray Serve, one at a time: through it, and straight to a replica."""
    from ray import serve

    cascade = Cascade((CascadeModel(Instant.name, energy_j=1.0),), ())
    request, seconds = np.zeros(ROUTED_BYTES // 4, dtype=np.float32), {"router": [], "replica": []}
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    with deployed(cascade, [Instant], [Size()], port, tqdm.write):
        router = serve.get_app_handle(APPLICATION)
        replica = serve.get_deployment_handle(Instant.name, APPLICATION)
        ways = {"router": lambda: router.answer.remote(request, 0), "replica": lambda: replica.ask.remote(request)}
        for turn in range(NUM_ROUTED + WARM_UP):
            for way, ask in ways.items():
                began = time.perf_counter()
                ask().result()
                if turn >= WARM_UP:
                    seconds[way].append(time.perf_counter() - began)
    straight, through = (1e3 * float(np.median(seconds[way])) for way in ("replica", "router"))
    table.add("cascade on Ray Serve: what the router adds to a request of 50 KB", through - straight, 1, "ms", False,
              straight_ms=straight, through_ms=through)  # fmt: skip
