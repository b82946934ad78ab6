"""The planner's and simulation's view of a cascade: models as lines over the batch size, a flow of requests, and GPUs.

Models are ordered from small to large, and a request only goes on to a larger model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexhybrid.core.errors import InputError, check, is_integer, is_number
from flexhybrid.core.units import gib

SHARE_SLACK = 1e-6  #: shares whose sum differs from 1 by at most this are scaled to sum to 1


@dataclass(frozen=True)
class BatchLine:
    """The line at_zero + per_request · batch of §V-C, in seconds or bytes."""

    at_zero: float
    per_request: float
    worst_error: float | None = None  #: largest relative error on the fitted samples; None if not fitted

    def __post_init__(self):
        for name in ("at_zero", "per_request"):
            value = getattr(self, name)
            is_term = is_number(value) and 0 <= value < math.inf
            check(f"{name} of a line over batch sizes", value, is_term, "a number >= 0")

    def __call__(self, batch):
        return self.at_zero + self.per_request * batch


def fit_batch_line(samples: Sequence[tuple[float, float]]) -> BatchLine:
    """Return a line with terms >= 0 fitted to (batch, value) samples of a profile.

    The fit minimises the squares of relative errors, as in ``policy_search.fit``, so that all batch sizes weigh alike.
    A single batch size gives a line through the origin. Raise InputError without samples, or for values <= 0.
    """
    from scipy.optimize import nnls

    try:
        table = np.array([tuple(sample) for sample in samples], dtype=np.float64)
    except (TypeError, ValueError):
        table = np.empty(0)
    if table.shape != (len(table), 2) or not np.isfinite(table).all() or (table <= 0).any():
        raise InputError("a profile must be a list of pairs [batch, value] of numbers > 0")
    batch, value = table.T
    if np.ptp(batch) == 0:
        return BatchLine(0.0, float((value / batch).mean()))
    scales = np.array([value.max(), value.max() / batch.max()])  # nnls needs columns of similar size
    terms, _ = nnls(np.stack([scales[0] / value, scales[1] * batch / value], axis=1), np.ones_like(value))
    at_zero, per_request = (float(term) for term in terms * scales)
    worst = float(np.abs((at_zero + per_request * batch) / value - 1).max())
    return BatchLine(at_zero, per_request, worst)


@dataclass(frozen=True)
class ServedModel:
    """A model of a cascade as it is served. Each of its S partitions has 1/S of seconds and memory (§V-C)."""

    name: str
    seconds: BatchLine  #: seconds of a batch on one GPU
    memory: BatchLine  #: bytes while a batch is computed
    output_bytes: float = 0.0  #: bytes of a request that go on to another model
    hidden_bytes: float = 0.0  #: bytes of a request that pass from one partition to the next
    max_batch: int = 1
    max_partitions: int = 1

    def __post_init__(self):
        if self.seconds(1) <= 0:
            raise InputError(f"model {self.name}: a request must take more than 0 seconds")
        for name in ("output_bytes", "hidden_bytes"):
            value = getattr(self, name)
            check(f"model {self.name}: {name}", value, 0 <= value < math.inf, "a number >= 0")
        for name in ("max_batch", "max_partitions"):
            value = getattr(self, name)
            check(f"model {self.name}: {name}", value, is_integer(value) and value >= 1, "a whole number >= 1")


@dataclass(frozen=True)
class Flow:
    """The shares 0..1 of requests that take each route."""

    entry: tuple[float, ...]  #: share of all requests that begins at each model
    onward: tuple[tuple[float, ...], ...]  #: [i][j], share of the requests at model i that goes on to model j > i

    def __post_init__(self):
        entry, onward = np.asarray(self.entry, dtype=float), np.asarray(self.onward, dtype=float)
        if onward.shape != (len(entry), len(entry)):
            raise InputError(f"a flow of {len(entry)} models needs {len(entry)} x {len(entry)} shares")
        _check_shares("entry", entry)
        _check_shares("onward", onward)
        if abs(entry.sum() - 1) > 1e-9 or (onward.sum(axis=1) > 1 + 1e-9).any():
            raise InputError("entry shares must sum to 1, and shares that go on from a model to at most 1")
        if np.tril(onward).any():
            raise InputError("requests only go on to a larger model: onward[i][j] must be 0 for j <= i")

    @property
    def visits(self) -> np.ndarray:
        """The share ρ of all requests that each model computes [models]."""
        visits = np.array(self.entry, dtype=float)
        for i, row in enumerate(self.onward):
            visits += visits[i] * np.asarray(row)
        return visits

    @property
    def answered(self) -> np.ndarray:
        """The share of all requests that each model answers [models]."""
        return self.visits * (1 - np.asarray(self.onward).sum(axis=1))


def chain(answered: Sequence[float] | np.ndarray) -> Flow:
    """Return the flow without skips in which model i answers the share ``answered[i]`` of all requests (Table III)."""
    shares = check_answered(answered)
    n = len(shares)
    onward = np.zeros((n, n))
    reach = np.append(1 - np.concatenate([[0.0], np.cumsum(shares)[:-1]]), 0.0)
    for i in range(n - 1):
        onward[i, i + 1] = max(0.0, reach[i + 1] / reach[i]) if reach[i] > SHARE_SLACK else 0.0
    return Flow((1.0, *[0.0] * (n - 1)), tuple(map(tuple, onward.tolist())))


def direct(answered: Sequence[float] | np.ndarray) -> Flow:
    """Return the best possible flow with skips: the first model passes each request straight to the answering one."""
    shares = check_answered(answered)
    onward = np.zeros((len(shares), len(shares)))
    onward[0, 1:] = shares[1:]
    return Flow((1.0, *[0.0] * (len(shares) - 1)), tuple(map(tuple, onward.tolist())))


def check_answered(answered: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the shares scaled to sum to 1. Raise InputError if their sum differs by more than SHARE_SLACK."""
    shares = np.asarray(answered, dtype=float)
    _check_shares("answered", shares)
    if len(shares) == 0 or abs(shares.sum() - 1) > SHARE_SLACK:
        raise InputError(f"the shares that the models answer sum to {shares.sum():.6g}; they must sum to 1")
    return shares / shares.sum()


def _check_shares(name: str, shares: np.ndarray) -> None:
    """Raise InputError for a share outside of 0 to 1."""
    wrong = shares[~((shares >= 0) & (shares <= 1 + 1e-12))]
    if wrong.size:
        raise InputError(f"{name} has the share {wrong.flat[0]:.6g}; shares lie in [0, 1]")


@dataclass(frozen=True)
class Gpu:
    """A GPU of a cluster."""

    name: str
    host: str
    memory: int  #: bytes that models may use

    def __post_init__(self):
        check(f"GPU {self.name}: memory", self.memory, 0 < self.memory < math.inf, "a number of bytes > 0")


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, on which the models' lines hold. The seconds per byte are T(g, g') of §V-A."""

    gpus: tuple[Gpu, ...]
    host_s_per_byte: float  #: seconds per byte between two GPUs of a host
    network_s_per_byte: float  #: seconds per byte between GPUs of two hosts

    def __post_init__(self):
        if not self.gpus:
            raise InputError("a cluster needs at least one GPU")
        names = [gpu.name for gpu in self.gpus]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"two GPUs are called {twice!r}")
        if not 0 <= self.host_s_per_byte <= self.network_s_per_byte < math.inf:
            raise InputError(
                f"seconds per byte are {self.host_s_per_byte!r} within a host and {self.network_s_per_byte!r} between "
                "hosts; both must be >= 0, and the network may not be faster"
            )

    @property
    def hosts(self) -> np.ndarray:
        """The index of each GPU's host [gpus]."""
        return np.unique([gpu.host for gpu in self.gpus], return_inverse=True)[1]

    @property
    def memory(self) -> np.ndarray:
        """The bytes of each GPU [gpus]."""
        return np.array([gpu.memory for gpu in self.gpus], dtype=float)

    def s_per_byte(self) -> np.ndarray:
        """Return T, the seconds per byte from GPU to GPU [gpus, gpus]."""
        hosts = self.hosts
        table = np.where(hosts[:, None] == hosts[None, :], self.host_s_per_byte, self.network_s_per_byte)
        np.fill_diagonal(table, 0.0)
        return table

    def describe(self) -> str:
        sizes = sorted({gpu.memory for gpu in self.gpus})
        memory = gib(sizes[0]) if len(sizes) == 1 else f"{gib(sizes[0])} to {gib(sizes[-1])}"
        return f"{len(self.gpus)} GPUs of {memory} in {len(set(self.hosts.tolist()))} hosts"


def even_cluster(hosts: int, gpus: int, memory: int, host_gb_per_s: float, network_gb_per_s: float) -> Cluster:
    """Return a cluster of ``hosts`` equal hosts with ``gpus`` GPUs each. Raise InputError for impossible numbers."""
    for name, value in (("hosts", hosts), ("GPUs a host", gpus)):
        if not is_integer(value) or value < 1:
            raise InputError(f"{name}: {value!r} is not a whole number >= 1")
    for name, value in (("rate within a host", host_gb_per_s), ("rate of the network", network_gb_per_s)):
        if not 0 < value < math.inf:
            raise InputError(f"{name} is {value!r} GB/s; it must be > 0")
    names = (Gpu(f"host{h}-gpu{g}", f"host{h}", memory) for h in range(hosts) for g in range(gpus))
    return Cluster(tuple(names), 1e-9 / host_gb_per_s, 1e-9 / network_gb_per_s)
