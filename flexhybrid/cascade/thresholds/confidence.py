"""Confidence in an answer by temperature scaling of the logits (HybridServe, Sec. IV-A; Guo et al. 2017).

All three tasks are classification, slot by slot: a classifier has one slot, an extractive answer two (its start and its
end), a generated answer one a token. The confidence of an answer is the smallest over its slots of the largest softmax
of logits / temperature. A model has one temperature, so that no output changes.

The paper's confidence is f = max(softmax²), the square of the one here. A square is no probability, so calibration
could not be measured on it. A threshold t here routes as t² does there. Where the paper spreads thresholds evenly, it
spreads them in f: the samples of Algorithm 1 (``sampling``) and the equal parts of its skips (``skips``) do so too.

Shapes in comments: N requests, S slots, C classes (positions of a context, tokens of a vocabulary or the k likeliest).
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import log_softmax

from flexhybrid.core.errors import InputError

OUTSIDE = -1  #: instead of a label: a class that the logits do not have
TEMPERATURES = (0.05, 20.0)  #: searched between; a model that is always right asks for 0, one that guesses for infinity
NUM_BINS = 15  #: of the calibration error, as in Guo et al.
BELOW_ONE = float(np.nextafter(1.0, 0.0))  #: the largest confidence: a threshold of 1 lets no request be answered


@dataclass(frozen=True)
class Scored:
    """A model's logits on labelled requests. Raises InputError for shapes that do not match."""

    logits: np.ndarray  #: [N, S, C]; -inf where a class is impossible
    labels: np.ndarray  #: [N, S] indices among the C classes, or OUTSIDE
    counted: np.ndarray  #: [N, S] bool: slots that have a label
    answered: np.ndarray | None = None  #: [N, S] bool: slots that the model's answer has; None: those of the label

    def __post_init__(self):
        answered = self.counted if self.answered is None else self.answered
        if self.logits.ndim != 3 or not (
            self.labels.shape == self.logits.shape[:2] == self.counted.shape == answered.shape
        ):
            raise InputError(
                f"logits {self.logits.shape}, labels {self.labels.shape} and slots {self.counted.shape} do not match"
            )

    @property
    def correct(self) -> np.ndarray:
        """Return whether every slot that has a label is right [N]."""
        return (~self.counted | (self.logits.argmax(axis=-1) == self.labels)).all(axis=1)

    def confidence(self, temperature: float = 1.0) -> np.ndarray:
        """Return the confidence of the answers [N]: over all slots that an answer has, as it is where no label says how
        long the right one is."""
        return confidence(self.logits, self.counted if self.answered is None else self.answered, temperature)


def top_k_logits(logits: np.ndarray, k: int | None) -> np.ndarray:
    """Return the k largest along the last axis, largest first; for None all, in their order (the paper's TopK(P))."""
    if k is None or k >= logits.shape[-1]:
        return logits
    largest = np.partition(logits, -k, axis=-1)[..., -k:]
    return -np.sort(-largest, axis=-1)


def slot_confidence(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the largest softmax of logits / temperature along the last axis: [..., C] -> [...], below 1.

    NaN where a logit is NaN or none is finite.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
        return np.minimum(1.0 / np.exp(scaled).sum(axis=-1), BELOW_ONE)


def confidence(logits: np.ndarray, counted: np.ndarray | None = None, temperature: float = 1.0) -> np.ndarray:
    """Return the confidence of answers, [N, S, C] -> [N]: the least of the slots that count (None: all)."""
    slots = slot_confidence(np.asarray(logits, dtype=float), temperature)
    return (slots if counted is None else np.where(counted, slots, BELOW_ONE)).min(axis=1)


def calibration_error(confidence: np.ndarray, correct: np.ndarray, num_bins: int = NUM_BINS) -> float:
    """Return the expected calibration error: |share correct − mean confidence| over equal bins."""
    bins = np.minimum((np.asarray(confidence) * num_bins).astype(int), num_bins - 1)
    gaps = np.bincount(bins, np.asarray(correct, dtype=float) - confidence, num_bins)
    return float(np.abs(gaps).sum() / len(bins))


def label_loss(scored: Scored, temperature: float) -> float:
    """Return the mean negative log likelihood, in nats, of the labels of all slots that count."""
    logits, labels = scored.logits[scored.counted], scored.labels[scored.counted]
    return float(-log_softmax(logits / temperature, axis=-1)[np.arange(len(labels)), labels].mean())


def right_or_wrong_loss(scored: Scored, temperature: float) -> float:
    """Return the mean negative log likelihood of each slot's largest class being right or wrong.

    For generation, where the label may be none of the k likeliest tokens. A slot counts if all before it are right:
    later tokens of the label do not continue what the model wrote.
    """
    right = scored.logits.argmax(axis=-1) == scored.labels
    before = np.logical_and.accumulate(np.concatenate([np.ones((len(right), 1), bool), right[:, :-1]], axis=1), axis=1)
    slots = scored.counted & before
    sure = slot_confidence(scored.logits[slots], temperature)
    return float(-np.log(np.where(right[slots], sure, 1.0 - sure)).mean())


def fit_temperature(scored: Scored, generated: bool = False) -> float:
    """Return the temperature of the least loss (label_loss, or right_or_wrong_loss for generated answers), to 0.1 %.

    Label loss is convex in 1 / temperature, so one search over its logarithm finds it; the other loss is first scanned.
    """
    from scipy.optimize import minimize_scalar  # which takes half a second to load, and only fitting needs it

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
    """A model's fitted confidence and its calibration errors, on the data it was fitted on."""

    temperature: float
    ece_before: float  #: expected calibration error at temperature 1
    ece_after: float
    confidence: np.ndarray  #: [N] with the temperature


def calibrate(scored: Scored, generated: bool = False) -> Calibration:
    """Fit the temperature; keep 1 where it calibrates these answers better.

    Neither the least loss nor the least confidence of several slots guarantees a smaller calibration error.
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
