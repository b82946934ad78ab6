"""Reads and checks files of logits, labels and requests. An error names the file and the field."""

import json
from pathlib import Path

import numpy as np

from flexhybrid.cascade.models import ModelOutputs
from flexhybrid.cascade.thresholds.confidence import OUTSIDE, Scored, top_k_logits
from flexhybrid.core.errors import InputError, file_errors

NO_LABEL = -1  #: label of slots after an answer's end


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz, or the columns of a .parquet, in which lists become axes.
    Raise InputError if the file cannot be read."""
    try:
        if not path.stat().st_size:
            raise InputError(f"{path} is an empty file")
        if path.suffix == ".parquet":
            import pandas as pd

            frame = pd.read_parquet(path)
            return {name: _column(path, name, frame[name]) for name in frame.columns}
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # zipfile, numpy and pyarrow each have their own errors
        raise InputError(f"cannot read {path}: {str(error).splitlines()[0] if str(error) else error!r}") from None
    raise InputError(f"{path}: a file of arrays ends in .npz or .parquet")


def _column(path: Path, name: str, cells) -> np.ndarray:
    """Return a column as an array. Raise InputError if its lists differ in length."""
    rows = [np.stack(list(cell)) if isinstance(cell, np.ndarray) and cell.dtype == object else cell for cell in cells]
    try:
        return np.array(rows)
    except ValueError:
        raise InputError(f"{path}: the rows of column {name!r} differ in length") from None


def _field(path: Path, arrays: dict[str, np.ndarray], name: str, content: str) -> np.ndarray:
    """Return an array by name. Raise InputError if the file has no such array."""
    if name not in arrays:
        raise InputError(f"{path} has no {content}: it needs {name!r} and has {', '.join(arrays) or 'nothing'}")
    return arrays[name]


def read_labels(path: Path) -> np.ndarray:
    """Return the labels [N, S] of a file from its field "labels"; [N] counts as one slot. Raise InputError if wrong."""
    labels = _field(path, read_arrays(path), "labels", "labels")
    if not np.issubdtype(labels.dtype, np.integer) or labels.ndim not in (1, 2) or not len(labels):
        raise InputError(f"{path}: labels must be whole numbers [requests] or [requests, slots], not {labels.dtype}")
    return labels.reshape(len(labels), -1).astype(np.int64)


def read_logits(path: Path) -> ModelOutputs:
    """Return logits [N, S, C] from a file's field "logits" ([N, C] counts as one slot), and optional "classes".
    Raise InputError if they are wrong."""
    arrays = read_arrays(path)
    logits = _field(path, arrays, "logits", "logits")
    if not np.issubdtype(logits.dtype, np.number) or logits.ndim not in (2, 3) or not logits.size:
        raise InputError(f"{path}: logits must be numbers [requests, classes] or [requests, slots, classes]")
    logits = logits.astype(float).reshape(len(logits), -1, logits.shape[-1])
    classes = arrays.get("classes")
    if classes is not None and classes.size != logits.size:
        raise InputError(f"{path}: classes {classes.shape} must have the shape of logits {logits.shape}")
    classes = None if classes is None else classes.reshape(logits.shape)
    return ModelOutputs([], logits, np.ones(logits.shape[:2], dtype=bool), classes)


def read_requests(path: Path, task: str) -> tuple[list | np.ndarray, list | np.ndarray | None]:
    """Return the requests of a file, and their labels or None. Raise InputError if the file is wrong.

    - Generation: .jsonl with lines {"prompt": …, "answer": …}, or .txt with one prompt per line.
    - Encoders: .jsonl with lines {"text": …, "label": …}. A text may be a pair; an extraction has two labels, the
      tokens at which the answer begins and ends.
    - Other models: arrays x [N, …] and labels.
    """
    if task == "generation":
        return _read_lines(path, task, "answer")
    if path.suffix == ".jsonl":
        requests, labels = _read_lines(path, task, "label")
        return requests, None if labels is None else _whole_numbers(path, labels)
    arrays = read_arrays(path)
    requests = _field(path, arrays, "x", "requests")
    if not requests.ndim or not len(requests):
        raise InputError(f"{path} has no requests")
    if "labels" not in arrays:
        return requests, None
    labels = read_labels(path)
    if len(labels) != len(requests):
        raise InputError(f"{path}: {len(requests)} requests and {len(labels)} labels")
    return requests, labels


def _whole_numbers(path: Path, labels: list) -> np.ndarray:
    """Return labels, or lists of labels, as an array [N, S]. Raise InputError if they differ in length."""
    rows = [label if isinstance(label, list) else [label] for label in labels]
    if len({*map(len, rows)}) > 1 or not rows[0] or {type(number) for row in rows for number in row} != {int}:
        raise InputError(f'{path}: each "label" must be a whole number, or a list of them, all of equal length')
    return np.array(rows, dtype=np.int64)


def _read_lines(path: Path, task: str, label: str) -> tuple[list, list | None]:
    """Return the requests of lines of JSON, and their field ``label``; None if no line has one. .txt has no labels.
    Raise InputError for a wrong line, and if only some lines have labels."""
    with file_errors(f"read {path}"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise InputError(f"{path} has no requests")
    if path.suffix != ".jsonl":
        return lines, None
    requests, labels = [], []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            raise InputError(f"{path}, request {number}: not JSON") from None
        try:
            requests.append(request_of(record, task))
        except InputError as error:
            raise InputError(f"{path}, request {number}: {error}") from None
        labels.append(record.get(label))
    missing = sum(one is None for one in labels)
    if 0 < missing < len(labels):
        raise InputError(f'{path}: "{label}" is missing in {missing} of {len(labels)} requests')
    return requests, None if missing else labels


def request_of(record: object, task: str, x_dtype: str | None = None) -> str | list[int] | np.ndarray:
    """Return the request of a JSON object: its "prompt" for generation, else its "text", or its "x" as an array.

    ``x_dtype``: type of the array; None: int64 for whole numbers, else float32. Raise InputError for another object,
    and for numbers that the type cannot represent.
    """
    if task == "generation":
        prompt = record.get("prompt") if isinstance(record, dict) else None
        if isinstance(prompt, str) or isinstance(prompt, list) and prompt and {*map(type, prompt)} == {int}:
            return prompt
        raise InputError('it needs a "prompt", a text or a list of token ids')
    if isinstance(record, dict) and "text" in record:
        text = record["text"]
        if isinstance(text, str) or isinstance(text, list) and [*map(type, text)] == [str, str]:
            return text
        raise InputError('its "text" must be a text, or a list of two')
    try:
        numbers = np.array(record["x"] if isinstance(record, dict) else None)
        kind = numbers.dtype.kind
        with np.errstate(invalid="ignore", over="ignore"):
            x = numbers.astype(x_dtype or (np.float32 if kind == "f" else numbers.dtype))
        is_held = np.isfinite(x) == np.isfinite(numbers) if x.dtype.kind == "f" else x == numbers
        if kind in "biuf" and x.size and is_held.all():
            return x
    except (ValueError, KeyError, TypeError, OverflowError):  # no "x", no numbers, or lists of different lengths
        pass
    raise InputError(f'it needs an "x" of numbers{f" of the type {x_dtype}" if x_dtype else ""}')


def check_labels(labels: np.ndarray, where: str, task: str) -> None:
    """Raise InputError if all labels are of one class."""
    classes = np.unique(labels[labels != NO_LABEL])
    if len(classes) < 2:
        only = ", ".join(map(str, classes)) or "none"
        text = f"all answers are token {only}" if task == "generation" else f"the labels are of one class only ({only})"
        raise InputError(f"{where}: {text}: confidence cannot be fitted on them")


def scored(name: str, prediction: ModelOutputs, labels: np.ndarray, task: str, top_k: int | None) -> Scored:
    """Return a model's logits together with labels [N, S].
    Raise InputError if logits are not finite or do not match the labels. For generation, keep the ``top_k`` logits."""
    logits, (num, slots, num_classes) = prediction.logits, prediction.logits.shape
    if labels.shape != (num, slots):
        raise InputError(
            f"logits of {name} are for {num} requests of {slots} slots, labels for {labels.shape[0]} of "
            f"{labels.shape[1]}"
        )
    bad = ~np.isfinite(logits.max(axis=-1)) | np.isnan(logits).any(axis=-1)
    if bad.any():
        raise InputError(f"logits of {name} are not numbers at request {int(np.flatnonzero(bad.any(axis=1))[0])}")
    counted = labels != NO_LABEL
    if task != "generation":
        if ((labels < 0) | (labels >= num_classes)).any():
            wrong = int(np.flatnonzero(((labels < 0) | (labels >= num_classes)).any(axis=1))[0])
            raise InputError(f"label of request {wrong} is {labels[wrong].tolist()}; {name} has {num_classes} classes")
        if (outside := np.isneginf(np.take_along_axis(logits, labels[..., None], axis=-1)).any(axis=(1, 2))).any():
            wrong = int(np.flatnonzero(outside)[0])
            raise InputError(f"label of request {wrong} is {labels[wrong].tolist()}, which {name} excludes (-inf)")
        return Scored(logits, labels, counted, prediction.counted)
    order = np.argsort(-logits, axis=-1, kind="stable")[..., : top_k or num_classes]
    classes = prediction.classes
    if classes is None:
        classes = np.broadcast_to(np.arange(num_classes), logits.shape)
    is_label = (np.take_along_axis(classes, order, axis=-1) == labels[..., None]) & prediction.counted[..., None]
    places = np.where(is_label.any(axis=-1), is_label.argmax(axis=-1), OUTSIDE)
    kept = top_k_logits(np.take_along_axis(logits, order, axis=-1), top_k)
    return Scored(kept, places, counted, prediction.counted)
