"""The confidence of a model in an answer, with temperature scaling (HybridServe, Sec. IV-A; Guo et al. 2017).

Each task is a classification of slots: a classifier's answer has one slot, an extractive answer two (start and end), a
generated answer one per token. The confidence of a slot is the largest softmax of logits / temperature, and that of an
answer the smallest over its slots. A model has one temperature, so that no output changes.

The paper's confidence is f = max(softmax²), the square of the one here. A square is not a probability, so its
calibration could not be measured. A threshold t here routes like t² there. The paper spreads thresholds evenly in f,
and so do the samples of Algorithm 1 (``sampling``) and the equal parts of its skips (``skips``) here.

Shapes in comments: N requests, S slots, C classes (positions of a context, tokens of a vocabulary or the k likeliest).
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import log_softmax

from flexhybrid.core.errors import InputError

OUTSIDE = -1  #: in place of a label: a class without a logit
TEMPERATURES = (0.05, 20.0)  #: range of the search; the optimum is 0 for a model that is always right
NUM_BINS = 15  #: bins of the calibration error, as in Guo et al.
BELOW_ONE = float(np.nextafter(1.0, 0.0))  #: the largest confidence, so that no request reaches a threshold of 1


@dataclass(frozen=True)
class Scored:
    """A model's logits on labelled requests. Raise InputError if shapes do not match."""

    logits: np.ndarray  #: [N, S, C]; -inf for impossible classes
    labels: np.ndarray  #: [N, S] indices among the C classes, or OUTSIDE
    counted: np.ndarray  #: [N, S] bool: whether the label has this slot
    answered: np.ndarray | None = None  #: [N, S] bool: whether the answer has this slot; None: as ``counted``

    def __post_init__(self):
        answered = self.counted if self.answered is None else self.answered
        logits, labels, counted = self.logits.shape, self.labels.shape, self.counted.shape
        if len(logits) != 3 or not labels == logits[:2] == counted == answered.shape:
            raise InputError(f"logits {logits}, labels {labels} and slots {counted} do not match")

    @property
    def correct(self) -> np.ndarray:
        """Whether every slot with a label is right [N]."""
        return (~self.counted | (self.logits.argmax(axis=-1) == self.labels)).all(axis=1)

    def confidence(self, temperature: float = 1.0) -> np.ndarray:
        """Return the confidence of the answers [N], over all slots of an answer, as for answers without labels."""
        return confidence(self.logits, self.counted if self.answered is None else self.answered, temperature)


def top_k_logits(logits: np.ndarray, k: int | None) -> np.ndarray:
    """Return the k largest along the last axis, sorted (the paper's TopK(P)); for None all, unsorted."""
    if k is None or k >= logits.shape[-1]:
        return logits
    largest = np.partition(logits, -k, axis=-1)[..., -k:]
    return -np.sort(-largest, axis=-1)


def slot_confidence(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the largest softmax of logits / temperature along the last axis, [..., C] -> [...], below 1.

    NaN if a logit is NaN or none is finite.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
        return np.minimum(1.0 / np.exp(scaled).sum(axis=-1), BELOW_ONE)


def confidence(logits: np.ndarray, counted: np.ndarray | None = None, temperature: float = 1.0) -> np.ndarray:
    """Return the confidence of answers, [N, S, C] -> [N]: the minimum over the counted slots (None: all)."""
    slots = slot_confidence(np.asarray(logits, dtype=float), temperature)
    return (slots if counted is None else np.where(counted, slots, BELOW_ONE)).min(axis=1)


def calibration_error(confidence: np.ndarray, correct: np.ndarray, num_bins: int = NUM_BINS) -> float:
    """Return the expected calibration error: |share correct − mean confidence| over equal bins."""
    bins = np.minimum((np.asarray(confidence) * num_bins).astype(int), num_bins - 1)
    gaps = np.bincount(bins, np.asarray(correct, dtype=float) - confidence, num_bins)
    return float(np.abs(gaps).sum() / len(bins))


def label_loss(scored: Scored, temperature: float) -> float:
    """Return the mean negative log likelihood, in nats, of the labels of all counted slots."""
    logits, labels = scored.logits[scored.counted], scored.labels[scored.counted]
    return float(-log_softmax(logits / temperature, axis=-1)[np.arange(len(labels)), labels].mean())


def right_or_wrong_loss(scored: Scored, temperature: float) -> float:
    """Return the mean negative log likelihood of whether each slot's largest class is right.

    This is for generation, where the label may not be among the k likeliest tokens. A slot counts if all slots before
    it are right: later tokens of the label do not continue the model's own text.
    """
    right = scored.logits.argmax(axis=-1) == scored.labels
    before = np.logical_and.accumulate(np.concatenate([np.ones((len(right), 1), bool), right[:, :-1]], axis=1), axis=1)
    slots = scored.counted & before
    sure = slot_confidence(scored.logits[slots], temperature)
    return float(-np.log(np.where(right[slots], sure, 1.0 - sure)).mean())


def fit_temperature(scored: Scored, generated: bool = False) -> float:
    """Return the temperature of least loss (label_loss, or right_or_wrong_loss for generated answers), to 0.1 %.

    Label loss is convex in 1 / temperature, so a search over its logarithm finds the minimum; the other loss is scanned
    first.
    """
    from scipy.optimize import minimize_scalar  # takes half a second to load, and only fitting needs it

    loss = right_or_wrong_loss if generated else label_loss
    low, high = np.log(TEMPERATURES)
    if generated:
        scan = np.linspace(low, high, 33)
        best = int(np.argmin([loss(scored, np.exp(value)) for value in scan]))
        low, high = scan[max(best - 1, 0)], scan[min(best + 1, len(scan) - 1)]
    result = minimize_scalar(
        lambda value: loss(scored, np.exp(value)), bounds=(low, high), method="bounded", options={"xatol": 1e-3}
    )
    return float(np.exp(result.x))


@dataclass(frozen=True)
class Calibration:
    """A model's temperature and calibration errors, on the data of the fit."""

    temperature: float
    ece_before: float  #: expected calibration error at temperature 1
    ece_after: float
    confidence: np.ndarray  #: [N], computed with the temperature


def calibrate(scored: Scored, generated: bool = False) -> Calibration:
    """Return the calibration with the fitted temperature, or with 1 if its calibration error is smaller.

    The least loss does not guarantee a smaller error, nor does the minimum over several slots.
    """
    correct = scored.correct
    plain = scored.confidence()
    before = calibration_error(plain, correct)
    temperature = fit_temperature(scored, generated)
    fitted = scored.confidence(temperature)
    after = calibration_error(fitted, correct)
    if after > before:
        return Calibration(1.0, before, before, plain)
    return Calibration(temperature, before, after, fitted)
