"""A cascade of language models that goes on with lines of code, like the paper's on LAMBADA.

The smallest model is a table of n-grams, the largest a checkpoint of this repository, with one tokenizer. The requests
are in ``code_lines.jsonl`` beside this file: lines of the standard library's files that no checkpoint learned from, the
last one without its last word. The first token of that word is the answer. ``except ValueError`` is easy to end, the
name in ``return self.name`` is hard. Files are dealt into folds: the cascade that answers a fold's files
was fitted on the files of the others, so that each file is judged once, by thresholds that have not seen it. Intervals
are over files, drawn whole, both sides of a pair together. Energy is stated: multiply-adds, and reads of the table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments import token_ids
from experiments.studies.trials import OPTIONS, Trial, evaluated
from experiments.training.digits import PICOJOULES
from experiments.training.ngrams import BITS, NGramModel, NGrams
from flexhybrid import shipped
from flexhybrid.cascade.data import scored
from flexhybrid.cascade.models import TOP_K, Generator, ModelOutputs
from flexhybrid.cascade.routes import CascadeModel
from flexhybrid.cascade.thresholds.curve import Answers
from flexhybrid.cascade.thresholds.fit import BATCH, fit, joined
from flexhybrid.cascade.thresholds.search import SearchOptions, search
from flexhybrid.cascade.thresholds.skips import Route
from flexhybrid.core import work
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.jobs.accuracy.bootstrap import Interval, mean_difference, ratio_of_means

REQUESTS = Path(__file__).with_name("code_lines.jsonl")  #: as ``cascade fit --task generation`` reads it
ANSWER_TOKENS = 1
NGRAMS = "ngrams"
CHECKPOINTS_OF = {"qwen3-4m": shipped.QWEN3}
NUM_FOLDS = 5
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)  #: of the requests, the smallest model's surest
BYTES = 4  #: of a number; the work's operations do not depend on it
#: A read of 64 bits from memory, the dearer end: Horowitz, ISSCC 2014, Fig. 1.1.9. A table is searched by halving.
READ_PICOJOULES = 2600.0


def multiply_adds(shape: ModelShape, prompt_tokens: float) -> float:
    """Return the multiply-adds of a prompt, and of an answer's ANSWER_TOKENS tokens behind it."""
    tokens = prompt_tokens + ANSWER_TOKENS - 1
    layer = work.project(shape, BYTES, tokens).flops + work.finish(shape, BYTES, tokens).flops
    layer += work.attend_prefill(shape, BYTES, 1, tokens).flops
    return (shape.num_layers * layer + work.head(shape, BYTES, ANSWER_TOKENS).flops) / 2


def lookup_j(ngrams: NGrams) -> float:
    """Return the joules of an answer of the table: two searches for each length of context, and the mixing."""
    reads = sum(2 * np.ceil(np.log2(len(keys) + 1)) for keys in ngrams.keys)
    return 1e-12 * (reads * READ_PICOJOULES + len(ngrams.keys) * (1 << BITS) * PICOJOULES) * ANSWER_TOKENS


@dataclass(frozen=True)
class LineRequest:
    """A line to finish: the number of its file, its type, the text up to its last word, and what comes there."""

    file: int
    type: str
    prompt: str
    answer: str


def read_requests() -> list[LineRequest]:
    """Return the requests that the repository holds."""
    return [LineRequest(**json.loads(line)) for line in REQUESTS.read_text(encoding="utf-8").splitlines()]


@dataclass(frozen=True)
class AnsweredLines:
    """The models' answers to N requests. ``files`` [N]: the file of each; ``labels`` [N, ANSWER_TOKENS]."""

    models: list[CascadeModel]
    predictions: list[ModelOutputs]
    labels: np.ndarray
    files: np.ndarray
    types: np.ndarray  #: [N] of the lines

    def trial(self, judged: np.ndarray) -> Trial:
        """Fit on the other requests than ``judged`` [N] bool, and evaluate on those."""
        fitted = fit(self.models, self._parts(~judged), self.labels[~judged], "generation", TOP_K)
        held_out = [
            scored(model.name, outputs, self.labels[judged], "generation", TOP_K)
            for model, outputs in zip(self.models, self._parts(judged), strict=True)
        ]
        return evaluated(fitted, held_out)

    def _parts(self, rows: np.ndarray) -> list[ModelOutputs]:
        kept = np.flatnonzero(rows)
        return [
            ModelOutputs([one.outputs[i] for i in kept], one.logits[kept], one.counted[kept], _rows(one.classes, kept))
            for one in self.predictions
        ]

    def folds(self) -> list[np.ndarray]:
        """Return which requests each fold judges: the files are dealt in turn."""
        place = np.unique(self.files, return_inverse=True)[1]
        return [place % NUM_FOLDS == fold for fold in range(NUM_FOLDS)]


def _rows(array: np.ndarray | None, kept: np.ndarray) -> np.ndarray | None:
    return None if array is None else array[kept]


def answered(requests: Sequence[LineRequest]) -> AnsweredLines:
    """Answer every request with every model; the models' seconds are CPU time of a request."""
    prompts = [token_ids(request.prompt) for request in requests]
    labels = np.array([token_ids(request.answer)[1:] for request in requests])
    ngrams = NGrams.load()
    since = time.process_time()
    predictions = [NGramModel(NGRAMS, ngrams, ANSWER_TOKENS).predict(prompts)]
    seconds = (time.process_time() - since) / len(prompts)
    models = [CascadeModel(NGRAMS, energy_j=lookup_j(ngrams), energy_source=STATED, seconds=seconds)]
    for name, folder in CHECKPOINTS_OF.items():
        generator = Generator(name, str(folder), ANSWER_TOKENS, policy="resident", dtype="float32", device="cpu")
        since = time.process_time()
        parts = [generator.predict(prompts[at : at + BATCH]) for at in range(0, len(prompts), BATCH)]
        seconds = (time.process_time() - since) / len(prompts)
        energy = multiply_adds(generator.llm.shape, float(np.mean([len(ids) for ids in prompts]))) * PICOJOULES * 1e-12
        generator.close()
        models.append(CascadeModel(name, energy_j=energy, energy_source=STATED, seconds=seconds))
        predictions.append(joined(parts))
    return AnsweredLines(models, predictions, labels, *map(np.array, zip(*((r.file, r.type) for r in requests))))


STATED = "stated: multiply-adds and reads"


@dataclass(frozen=True)
class Judged:
    """N requests under one routing policy: whether each is answered right [N], and its energy in J [N]."""

    correct: np.ndarray
    cost: np.ndarray

    def record(self, largest: Judged, files: np.ndarray) -> dict:
        """Return accuracy less the largest model's and cost over its, with 95 % intervals over files."""
        num, right, cost, right_of_largest, cost_of_largest = (
            np.array([values[files == file].sum() for file in np.unique(files)], dtype=float)
            for values in (np.ones(len(files)), self.correct, self.cost, largest.correct, largest.cost)
        )
        gained = mean_difference(right / num, right_of_largest / num, num)
        return {
            "accuracy": float(self.correct.mean()),
            "gained_points": _ends(gained, 100),
            "cost_of_largest": _ends(ratio_of_means(cost, cost_of_largest)),
        }


def _ends(interval: Interval, scale: float = 1.0) -> list[float]:
    return [scale * end for end in interval]


def alone(answers: Answers, model: int) -> Judged:
    """Let one model answer everything."""
    return Judged(answers.correct[model], np.full(answers.num_requests, answers.cost[model]))


def by_cascade(trials: Sequence[Trial], folds: Sequence[np.ndarray], options: SearchOptions) -> tuple[Judged, list]:
    """Return what the searched cascade of each fold does to that fold's requests, and the models that each kept."""
    size = len(folds[0])
    judged, kept = Judged(np.zeros(size, dtype=bool), np.zeros(size)), []
    for trial, fold in zip(trials, folds, strict=True):
        searched = search(trial.fitted, options)
        part = trial.held_out.only(searched.kept)
        _, visited = searched.cascade.walk(part.confidence)
        judged.correct[fold] = Route(part, searched.cascade).correct
        judged.cost[fold] = part.cost @ visited
        kept.append(searched.cascade.names)
    return judged, kept


def all_knowing(answers: Answers, as_the_largest: bool = False) -> Judged:
    """Choose with knowledge of which models are right: from the first model straight to the cheapest right one, or stay
    at the first where none is.

    No cascade is more accurate, and no equally accurate one that begins with this model is cheaper. ``as_the_largest``:
    the dearest requests that the largest model's accuracy does not need stay at the first model, too.
    """
    right = np.logical_or.reduce(answers.correct)
    to = np.where(right, answers.correct.argmax(axis=0), 0)
    if as_the_largest:
        spare = int(right.sum() - answers.correct[-1].sum())
        dearest = np.argsort(-to, kind="stable")[:spare]
        dearest = dearest[to[dearest] > 0]
        right[dearest], to[dearest] = False, 0
    return Judged(right, _straight(answers, to))


def knowing_the_smaller(answers: Answers) -> Judged:
    """Choose with knowledge of which smaller models are right, as a perfect confidence would: the largest model gets
    the requests that all smaller ones have wrong."""
    smaller = answers.correct[:-1]
    to = np.where(np.logical_or.reduce(smaller), smaller.argmax(axis=0), answers.num_models - 1)
    return Judged(np.logical_or.reduce(answers.correct), _straight(answers, to))


def _straight(answers: Answers, to: np.ndarray) -> np.ndarray:
    """Return the cost of requests [N] that the first model computes, and then model ``to`` [N]."""
    return answers.cost[0] + np.where(to > 0, answers.cost[to], 0.0)


def surest(answers: Answers, shares: Sequence[float] = SHARES) -> dict[str, list[float]]:
    """Return the accuracy of each model on the share of the requests of which the first model is surest."""
    order = np.argsort(-answers.confidence[0], kind="stable")
    parts = {share: order[: round(share * answers.num_requests)] for share in shares}
    return {f"{share:g}": answers.correct[:, rows].mean(axis=1).tolist() for share, rows in parts.items()}


def by_type(trials: Sequence[Trial], folds: Sequence[np.ndarray], types: np.ndarray) -> Judged:
    """Choose by a line's type: the cheapest model that is as accurate as the largest on fitted lines of this type."""
    judged = Judged(np.zeros(len(types), dtype=bool), np.zeros(len(types)))
    for trial, fold in zip(trials, folds, strict=True):
        for name in np.unique(types[fold]):
            fitted = trial.fitted.correct[:, types[~fold] == name].sum(axis=1)
            model = int(np.flatnonzero(fitted >= fitted[-1])[0])
            rows = np.flatnonzero(fold)[types[fold] == name]
            judged.correct[rows] = trial.held_out.correct[model, types[fold] == name]
            judged.cost[rows] = trial.held_out.cost[model]
    return judged


def line_study(answers: AnsweredLines) -> dict:
    """Return all figures of this cascade as plain numbers."""
    folds = answers.folds()
    trials = [answers.trial(fold) for fold in folds]
    whole = _in_order(trials, folds)
    largest = alone(whole, -1)
    ways = {f"{model.name} alone": alone(whole, i) for i, model in enumerate(answers.models)}
    ways["all-knowing"] = all_knowing(whole)
    ways["all-knowing, as accurate as the largest"] = all_knowing(whole, as_the_largest=True)
    ways["perfect confidence"] = knowing_the_smaller(whole)
    ways["by type alone"] = by_type(trials, folds, answers.types)
    kept = {}
    for name, options in OPTIONS.items():
        ways[name], kept[name] = by_cascade(trials, folds, options)
    rows = {
        name: {
            "requests": int((answers.types == name).sum()),
            "accuracy": whole.correct[:, answers.types == name].mean(axis=1).tolist(),
            "cascade_accuracy": float(ways["AP"].correct[answers.types == name].mean()),
            "cascade_cost": float(ways["AP"].cost[answers.types == name].mean() / whole.cost[-1]),
        }
        for name in np.unique(answers.types).tolist()
    }
    return {
        "num_files": len(np.unique(answers.files)),
        "num_requests": len(answers.files),
        "processor_s": [model.seconds for model in answers.models],
        "cost_of_largest": (whole.cost / whole.cost[-1]).tolist(),
        "surest": surest(whole),
        "ways": {name: judged.record(largest, answers.files) for name, judged in ways.items()},
        "kept": kept,
        "types": rows,
    }


def _in_order(trials: Sequence[Trial], folds: Sequence[np.ndarray]) -> Answers:
    """Return the judged answers of all folds, in the requests' order."""
    shape = len(trials[0].held_out.cost), len(folds[0])
    correct, confidence = np.zeros(shape, dtype=bool), np.zeros(shape)
    for trial, fold in zip(trials, folds, strict=True):
        correct[:, fold], confidence[:, fold] = trial.held_out.correct, trial.held_out.confidence
    return Answers(correct, confidence, trials[0].held_out.cost)
