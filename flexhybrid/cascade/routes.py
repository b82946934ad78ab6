"""A cascade as data: models with costs, thresholds and skips that route requests, and expected shares.

``flexhybrid cascade search`` writes it as a JSON file, which the commands plan, simulate and run read.

A request starts at model 0. Model i answers if its confidence c >= thresholds[i]; the last model always answers.
Otherwise the request goes on, to the target of the first skip with c < below, else to model i + 1.

    confidence of model i   0 ──── below ──── below ──────── threshold ──── 1
    goes on to                  n−1       i+2        i+1               answers
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from flexhybrid.core.errors import InputError, unknown
from flexhybrid.core.files import write_by_rename

VERSION = 1
TASKS = ("classification", "generation", "extraction")
#: Kind of cost of a request on a model -> its unit. Money is in the user's currency.
COSTS = {"energy_j": "J", "seconds": "s", "money": "money"}
ANSWERED = -1  #: in place of a next model: the request is answered


@dataclass(frozen=True)
class CascadeModel:
    """A model of a cascade, with its costs per request; None: unknown."""

    name: str
    temperature: float = 1.0  #: divides the logits before the confidence is computed
    energy_j: float | None = None
    seconds: float | None = None
    money: float | None = None
    source: str | None = None  #: path or function of a local model
    energy_source: str | None = None  #: origin of energy_j: "measured: …" or "stated: …"

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"a model of a cascade needs a name, not {self.name!r}")
        _check_number(f"temperature of {self.name}", self.temperature, above=0.0)
        for cost in COSTS:
            if getattr(self, cost) is not None:
                _check_number(f"{cost} of {self.name}", getattr(self, cost), above=0.0)
        for field, value in (("source", self.source), ("energy_source", self.energy_source)):
            if value is not None and not isinstance(value, str):
                raise InputError(f"{field} of {self.name} must be text or null, not {value!r}")


@dataclass(frozen=True)
class Skip:
    """A rule that requests with a confidence below ``below`` go straight to model ``to``."""

    below: float
    to: int


@dataclass(frozen=True)
class Expected:
    """Expected results of a cascade: those on the data of its search. Shares are of all requests."""

    answered: tuple[float, ...]  #: share that each model answers; sums to 1
    visited: tuple[float, ...]  #: share that each model computes; the paper's rho
    accuracy: float  #: 0 .. 1
    num_requests: int | None = None  #: number of requests in the data


@dataclass(frozen=True)
class Cascade:
    """Models from small to large, and the routes between them. Raise InputError that names the field for wrong ones."""

    models: tuple[CascadeModel, ...]
    thresholds: tuple[float, ...]  #: least confidence with which each model except the last answers
    skips: tuple[tuple[Skip, ...], ...] = ()  #: skips of each model except the last, sorted by ``below``
    task: str = "classification"
    cost: str = "energy_j"  #: kind of cost for which the thresholds were chosen
    top_k: int | None = None  #: generation: number of largest logits for the confidence; None: all
    x_dtype: str | None = None  #: numpy's name of the type of the requests' arrays; None: unknown
    expected: Expected | None = None
    note: str = ""  #: description of how the thresholds were chosen

    def __post_init__(self):
        if not self.models:
            raise InputError("a cascade needs at least one model")
        if twice := [name for name in self.names if self.names.count(name) > 1]:
            raise InputError(f"two models of the cascade are called {twice[0]!r}")
        if self.task not in TASKS:
            raise unknown("task", self.task, TASKS)
        if self.cost not in COSTS:
            raise unknown("cost", self.cost, COSTS)
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 2):
            raise InputError(f"top_k is {self.top_k!r}; it must be a whole number >= 2, or null")
        if self.x_dtype is not None and not _is_numeric(self.x_dtype):
            raise InputError(f"x_dtype is {self.x_dtype!r}; it must be numpy's name of a type of numbers, or null")
        if len(self.thresholds) != len(self.models) - 1:
            raise InputError(
                f"{len(self.models)} models need {len(self.models) - 1} thresholds, not {len(self.thresholds)}"
            )
        for name, threshold in zip(self.names, self.thresholds):
            _check_number(f"threshold of {name}", threshold, 0.0, 1.0)
        if not self.skips:
            object.__setattr__(self, "skips", ((),) * len(self.thresholds))
        if len(self.skips) != len(self.thresholds):
            raise InputError(f"{len(self.thresholds)} models may skip, but {len(self.skips)} lists of skips are given")
        for i, skips in enumerate(self.skips):
            self._check_skips(i, skips)
        if self.expected is not None:
            _check_expected(self.expected, len(self.models))

    def _check_skips(self, i: int, skips: tuple[Skip, ...]) -> None:
        """Raise InputError for wrong skips of model i."""
        name, last = self.names[i], 0.0
        for skip in skips:
            _check_number(f"a skip of {name}", skip.below, 0.0, 1.0)
            if not last < skip.below <= self.thresholds[i]:
                raise InputError(
                    f"skips of {name} must grow up to at most its threshold {self.thresholds[i]:g}; {skip.below:g} "
                    f"comes after {last:g}"
                )
            if not isinstance(skip.to, int) or not i < skip.to < len(self.models):
                raise InputError(f"a skip of {name} goes to {skip.to!r}, which is not a larger model of the cascade")
            last = skip.below

    @property
    def names(self) -> list[str]:
        return [model.name for model in self.models]

    @property
    def costs(self) -> np.ndarray:
        """The chosen cost of a request on each model [models]. Raise InputError if it is unknown."""
        return costs_of(self.models, self.cost)

    def next_model(self, i: int, confidence: np.ndarray) -> np.ndarray:
        """Return the next model of requests [N] with this confidence at model i; ANSWERED if model i answers.

        Requests with the confidence NaN go on to model i + 1.
        """
        confidence = np.asarray(confidence, dtype=float)
        if i == len(self.models) - 1:
            return np.full(confidence.shape, ANSWERED)
        to = np.full(confidence.shape, i + 1)
        for skip in reversed(self.skips[i]):
            to[confidence < skip.below] = skip.to
        to[confidence >= self.thresholds[i]] = ANSWERED
        return to

    def walk(self, confidence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the answering model of N requests [N], and whether each model computes them [models, N] bool.

        ``confidence`` [models or models − 1, N]: each model's confidence in each request.
        """
        confidence = np.asarray(confidence, dtype=float)
        num_requests = confidence.shape[1]
        at = np.zeros(num_requests, dtype=int)
        visited = np.zeros((len(self.models), num_requests), dtype=bool)
        for i in range(len(self.models)):
            here = np.flatnonzero(at == i)
            visited[i, here] = True
            if i < len(self.models) - 1:
                to = self.next_model(i, confidence[i, here])
                at[here] = np.where(to == ANSWERED, i, to)
        return at, visited

    def to_dict(self) -> dict:
        """Return the content of the JSON file, in which skips have the names of their targets."""
        record = asdict(self)
        names = self.names
        record["skips"] = [[{"below": skip.below, "to": names[skip.to]} for skip in skips] for skips in self.skips]
        return {"version": VERSION, **record}

    @classmethod
    def from_dict(cls, record: object, where: str = "the cascade") -> Cascade:
        """Return the cascade of a JSON file's content. Raise InputError for a missing, unknown or wrong field."""
        try:
            return cls(**_fields_from(record))
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the JSON file, in one step."""
        write_by_rename(Path(path), json.dumps(self.to_dict(), indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Cascade:
        return cls.from_dict(read_json(path), str(path))


def costs_of(models: tuple[CascadeModel, ...], cost: str) -> np.ndarray:
    """Return the cost of a request on each model [models]. Raise InputError if it is unknown."""
    if cost not in COSTS:
        raise unknown("cost", cost, COSTS)
    if unpriced := [model.name for model in models if getattr(model, cost) is None]:
        raise InputError(f"{cost} of a request on {unpriced[0]} is not known: give it to `flexhybrid cascade fit`")
    return np.array([getattr(model, cost) for model in models], dtype=float)


def read_json(path: str | Path) -> Any:
    """Return a JSON file's content. Raise InputError if it cannot be read."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None


def _is_numeric(dtype: str) -> bool:
    """Return whether numpy knows a type of numbers by this name."""
    try:
        return np.dtype(dtype).kind in "biuf"
    except TypeError:
        return False


def _check_number(name: str, value, low: float = -math.inf, high: float = math.inf, above: float = -math.inf) -> None:
    """Raise InputError unless ``value`` is a finite number with low <= value <= high and value > above."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"{name} must be a finite number, not {value!r}")
    if not low <= value <= high:
        raise InputError(f"{name} is {value:g}; it must be between {low:g} and {high:g}")
    if not value > above:
        raise InputError(f"{name} is {value:g}; it must be above {above:g}")


def _check_expected(expected: Expected, num_models: int) -> None:
    for name in ("answered", "visited"):
        shares = getattr(expected, name)
        if len(shares) != num_models:
            raise InputError(f"expected {name} has {len(shares)} shares for {num_models} models")
        for share in shares:
            _check_number(f"expected {name} share", share, 0.0, 1.0)
    if abs(sum(expected.answered) - 1) > 1e-6:
        raise InputError(f"expected answered shares sum to {sum(expected.answered):g}, not to 1")
    _check_number("expected accuracy", expected.accuracy, 0.0, 1.0)


def _fields_from(record: object) -> dict:
    """Return the fields of a Cascade from a JSON file's content."""
    data = dict(_checked_fields(Cascade, record, "a cascade", {"version"}))
    if data.pop("version", None) != VERSION:
        raise InputError(f"version must be {VERSION}")
    models = [
        CascadeModel(**_checked_fields(CascadeModel, model, "a model")) for model in _checked_list(data, "models")
    ]
    places = {model.name: place for place, model in enumerate(models)}
    data["models"] = tuple(models)
    data["thresholds"] = tuple(_checked_list(data, "thresholds"))
    data["skips"] = tuple(tuple(_skip_from(skip, places) for skip in skips) for skips in _checked_list(data, "skips"))
    if data.get("expected") is not None:
        expected = dict(_checked_fields(Expected, data["expected"], "expected"))
        for name in ("answered", "visited"):
            expected[name] = tuple(_checked_list(expected, name))
        data["expected"] = Expected(**expected)
    return data


def _checked_fields(record: type, data: object, name: str, more: Collection[str] = ()) -> dict:
    if not isinstance(data, dict):
        raise InputError(f"{name} must be a JSON object, not {type(data).__name__}")
    known = {field.name for field in fields(record)}.union(more)
    if strange := [key for key in data if key not in known]:
        raise unknown(f"field of {name}", strange[0], sorted(known))
    needed = [field.name for field in fields(record) if field.default is field.default_factory]
    if missing := [key for key in needed if key not in data]:
        raise InputError(f"{name}: the field {missing[0]!r} is missing")
    return data


def _checked_list(record: dict, name: str) -> list:
    value = record.get(name, [])
    if not isinstance(value, list):
        raise InputError(f"{name} must be a list, not {value!r}")
    return value


def _skip_from(data: object, places: dict[str, int]) -> Skip:
    data = _checked_fields(Skip, data, "a skip")
    if data["to"] not in places:
        raise unknown("model that a skip goes to", data["to"], places)
    return Skip(data["below"], places[data["to"]])
