"""``flexhybrid cascade fit``: fits each model's temperature on validation data, and saves its confidences."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from flexhybrid.arguments import options_from
from flexhybrid.cascade.data import NO_LABEL, check_labels, read_labels, read_logits, read_requests, scored
from flexhybrid.cascade.loading import load_model, named_path, named_policies
from flexhybrid.cascade.metering import MEASURED_S, Energy, Meter, describe_energy
from flexhybrid.cascade.models import TOP_K, Generator, Model, ModelOutputs, first_line
from flexhybrid.cascade.options import FitOptions
from flexhybrid.cascade.routes import COSTS, TASKS, VERSION, CascadeModel, costs_of, read_json
from flexhybrid.cascade.thresholds.confidence import calibrate
from flexhybrid.cascade.thresholds.curve import Answers
from flexhybrid.core.errors import InputError, unknown
from flexhybrid.core.files import write_by_rename

BATCH = 64  #: most requests that a local model gets at once


@dataclass(frozen=True)
class Fitted:
    """Models from small to large with their temperatures, and their answers to the N requests of the validation set."""

    models: tuple[CascadeModel, ...]
    task: str
    top_k: int | None
    correct: np.ndarray  #: [models, N] bool: whether the answer is right
    confidence: np.ndarray  #: [models, N]
    ece: np.ndarray  #: [models, 2] expected calibration error before and after scaling
    x_dtype: str | None = None  #: type of the requests' arrays; None: no arrays

    def answers(self, cost: str) -> Answers:
        """Return the answers with one kind of cost."""
        return Answers(self.correct, self.confidence, costs_of(self.models, cost))

    def save(self, path: Path) -> None:
        """Write the JSON file, in one step."""
        models = [asdict(model) for model in self.models]
        names = ("task", "top_k", "x_dtype")
        record = {"version": VERSION, "models": models} | {name: getattr(self, name) for name in names}
        arrays = {"ece": self.ece, "confidence": self.confidence, "correct": self.correct.astype(int)}
        record |= {name: array.tolist() for name, array in arrays.items()}
        write_by_rename(path, json.dumps(record))

    @classmethod
    def load(cls, path: Path) -> Fitted:
        record = read_json(path)
        try:
            if record["version"] != VERSION:
                raise InputError(f"{path}: version must be {VERSION}")
            return cls(
                models=tuple(CascadeModel(**model) for model in record["models"]),
                task=record["task"],
                top_k=record["top_k"],
                correct=np.array(record["correct"], dtype=bool),
                confidence=np.array(record["confidence"], dtype=float),
                ece=np.array(record["ece"], dtype=float),
                x_dtype=record.get("x_dtype"),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path} is not a file of `flexhybrid cascade fit`: {error!r}") from None


def fit(
    models: Sequence[CascadeModel],
    predictions: Sequence[ModelOutputs],
    labels: np.ndarray,
    task: str = "classification",
    top_k: int | None = None,
    where: str = "labels",
) -> Fitted:
    """Return the models with fitted temperatures. ``labels`` [N, S]: classes, token ids or positions, or NO_LABEL.

    Raise InputError for labels of only one class, logits that are not numbers, and shapes that do not match.
    ``where``: name of the labels in messages.
    """
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    check_labels(labels, where, task)
    fitted, correct, calibrations = [], [], []
    for model, prediction in zip(models, predictions, strict=True):
        answers = scored(model.name, prediction, labels, task, top_k)
        calibration = calibrate(answers, generated=task == "generation")
        fitted.append(replace(model, temperature=calibration.temperature))
        correct.append(answers.correct)
        calibrations.append(calibration)
    confidence = np.array([calibration.confidence for calibration in calibrations])
    ece = np.array([(calibration.ece_before, calibration.ece_after) for calibration in calibrations])
    return Fitted(tuple(fitted), task, top_k, np.array(correct), confidence, ece)


def run_fit(options: FitOptions) -> dict:
    """Fit the models and write them to a file; return a record of them."""
    if bool(options.logits) == bool(options.models):
        raise InputError("give either --logits NAME=FILE … and --labels, or --models NAME=PATH … and --data")
    named = [named_path(text) for text in options.logits or options.models]
    top_k, x_dtype = (options.top_k or TOP_K) if options.task == "generation" else None, None
    if options.logits:
        if options.labels is None:
            raise InputError("labels are missing: give their file with --labels (it may be one of the --logits files)")
        predictions, labels = [read_logits(Path(file)) for _, file in named], read_labels(options.labels)
        models, where = [CascadeModel(name) for name, _ in named], str(options.labels)
    else:
        if options.data is None:
            raise InputError("requests and labels are missing: give their file with --data")
        requests, answers = read_requests(options.data, options.task)
        if answers is None:
            raise InputError(f"{options.data}: labels are missing")
        x_dtype = str(requests.dtype) if isinstance(requests, np.ndarray) and requests.dtype.kind in "biuf" else None
        models, predictions, labels = _predict_all(named, requests, answers, options, top_k)
        where = str(options.data)
    models = _priced(models, options)
    fitted = replace(fit(models, predictions, labels, options.task, top_k, where), x_dtype=x_dtype)
    fitted.save(options.out)
    tokens = [int(one.counted.sum()) for one in predictions] if options.task == "generation" else None
    return record_of(fitted, str(options.out), tokens)


def _predict_all(
    named: list[tuple[str, str]], requests, answers, options: FitOptions, top_k: int | None
) -> tuple[list[CascadeModel], list[ModelOutputs], np.ndarray]:
    """Run local models one after another; return models with measured costs, predictions, and labels [N, S]."""
    models, predictions, labels = [], [], None
    policies = named_policies(options.policies, [name for name, _ in named], options.task)
    for name, source in named:
        more = {"device": options.device, **policies.get(name, {})}
        model = load_model(name, source, options.task, options.max_tokens, top_k, **more)
        try:
            if isinstance(model, Generator) and labels is None:
                labels = answer_tokens(model.llm.tokenizer, answers, options.max_tokens)
            prediction, costs = _measured(model, requests)
        finally:
            model.close()
        predictions.append(prediction)
        models.append(CascadeModel(name, source=source, **costs))
    if labels is None and options.task == "generation":  # all models are functions of the user
        labels = answer_tokens(None, answers, options.max_tokens)
    return models, predictions, np.asarray(answers) if labels is None else labels


def _measured(model: Model, requests: Sequence) -> tuple[ModelOutputs, dict]:
    """Return the outputs for all requests, and a request's seconds (by the median batch) and joules.

    If energy can be measured, all requests are repeated for MEASURED_S. Raise InputError if the model raises.
    """
    parts, seconds, starts, num = [], [], range(0, len(requests), BATCH), 0
    with contextlib.suppress(Exception):  # an error is raised again below, with its request
        model.predict(requests[:1])  # a first call may load and compile
    with Meter(getattr(model, "device", "cpu")) as meter:
        began = time.perf_counter()
        while not parts or meter.is_measured and time.perf_counter() - began < MEASURED_S:
            is_first = not parts
            for start in starts:
                since = time.perf_counter()
                outputs = _predict(model, requests, start, BATCH)
                seconds.append((time.perf_counter() - since) / len(outputs.outputs))
                num += len(outputs.outputs)
                if is_first:
                    parts.append(outputs)
        joules, source = meter.joules, meter.source
    if joules == 0:
        source = "not measured: the counters did not change"
    costs = {"seconds": float(np.median(seconds)), "energy_j": joules / num if joules else None}
    return joined(parts), costs | {"energy_source": source}


def _predict(model: Model, requests: Sequence, start: int, size: int) -> ModelOutputs:
    """Return the outputs for a batch. Raise InputError if the model raises."""
    batch = requests[start : start + size]
    try:
        return model.predict(batch)
    except InputError:
        raise
    except Exception as error:  # a model may raise anything
        raise InputError(
            f"model {model.name} failed at requests {start} to {start + len(batch) - 1}: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error


def joined(parts: Sequence[ModelOutputs]) -> ModelOutputs:
    """Return the outputs for parts of the requests as one; fewer logits are padded with -inf."""
    outputs = [output for part in parts for output in part.outputs]
    most = max(part.logits.shape[-1] for part in parts)  # texts have a logit per position of their batch's longest
    lacking = [(part.logits, most - part.logits.shape[-1]) for part in parts]
    padded = [np.pad(logits, ((0, 0), (0, 0), (0, more)), constant_values=-np.inf) for logits, more in lacking]
    logits = np.concatenate(padded)
    counted = np.concatenate([part.counted for part in parts])
    given = [part.classes for part in parts if part.classes is not None]
    classes = np.concatenate(given) if given else None
    return ModelOutputs(outputs, logits, counted, classes)


def answer_tokens(tokenizer, answers: Sequence, max_tokens: int) -> np.ndarray:
    """Return answers, texts or token ids, as token ids [N, max_tokens], by the tokenizer that all models share.

    Raise InputError for an empty answer, or a text without a tokenizer.
    """
    labels = np.full((len(answers), max_tokens), NO_LABEL)
    for row, answer in zip(labels, answers):
        if isinstance(answer, str):
            if tokenizer is None:
                raise InputError("the model has no tokenizer: give answers as token ids")
            answer = tokenizer(answer, add_special_tokens=False)["input_ids"]
        if not answer:
            raise InputError("an answer is empty")
        row[: len(answer)] = answer[:max_tokens]
    return labels


def _priced(models: list[CascadeModel], options: FitOptions) -> list[CascadeModel]:
    """Return the models with the options' costs. Energy is, in this order, given, from a given power, or measured."""
    for cost, values in (options.costs or {}).items():
        if values is None:
            continue
        if cost not in COSTS:
            raise unknown("cost", cost, COSTS)
        if len(values) != len(models):
            raise InputError(f"{cost} has {len(values)} values for {len(models)} models")
        more = {"energy_source": "stated: given to fit"} if cost == "energy_j" else {}
        models = [replace(model, **{cost: value}, **more) for model, value in zip(models, values)]
    if options.watts is not None:
        if not options.watts > 0:
            raise InputError(f"watts is {options.watts:g}; it must be above 0")
        for i, model in enumerate(models):
            if model.seconds is None:
                raise InputError("--watts needs the seconds of each model: run local models, or give --seconds")
            if (options.costs or {}).get("energy_j") is None:
                energy_j, source = options.watts * model.seconds, f"stated: {options.watts:g} W of its seconds"
                models[i] = replace(model, energy_j=energy_j, energy_source=source)
    return models


def record_of(fitted: Fitted, path: str, tokens: Sequence[int] | None = None) -> dict:
    """Return each model's costs, accuracy and calibration as a record. ``tokens``: number of each model's tokens."""
    rows, num = [], fitted.correct.shape[1]
    for i, (model, (before, after)) in enumerate(zip(fitted.models, fitted.ece.tolist(), strict=True)):
        source = model.energy_source or "not measured: no model ran"
        joules = None if model.energy_j is None else model.energy_j * num
        energy = Energy(joules, source, num, None if tokens is None else tokens[i]).record()
        accuracy = {"accuracy": float(fitted.correct[i].mean()), "ece_before": before, "ece_after": after}
        rows.append({**asdict(model), **energy, **accuracy})
    joint = float(fitted.correct.any(axis=0).mean())
    return {"path": path, "num_requests": num, "joint_accuracy": joint, "models": rows}


def describe_fit(result: dict) -> str:
    """Return the record of a fit as text."""
    costs = [cost for cost in COSTS if any(row[cost] is not None for row in result["models"])]
    names = "".join(f" {cost:>10s}" for cost in costs)
    lines = [f"{'model':16s} {'accuracy':>8s} {'temperature':>11s} {'ECE before':>10s} {'after':>7s}{names}"]
    for row in result["models"]:
        priced = "".join(f" {row[cost]:10.3g}" if row[cost] is not None else f" {'–':>10s}" for cost in costs)
        lines.append(
            f"{row['name']:16s} {row['accuracy']:8.2%} {row['temperature']:11.3f} {row['ece_before']:10.2%} "
            f"{row['ece_after']:7.2%}{priced}"
        )
    lines += ["", *(f"{row['name']}: {describe_energy(row)}" for row in result["models"])]
    lines.append(
        f"\n{result['num_requests']} requests; {result['joint_accuracy']:.2%} are answered right by at least one "
        f"model: {result['path']}"
    )
    return "\n".join(lines)


def command(args) -> dict:
    """Run the command ``fit``."""
    result = run_fit(options_from(FitOptions, args, costs={cost: getattr(args, cost) for cost in COSTS}))
    args.show(describe_fit(result))
    return result
