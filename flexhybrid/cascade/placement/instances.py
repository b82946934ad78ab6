"""Chooses replicas and partitions for models, flow and rate; returns the items to place, with sizes and traffic."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexhybrid.cascade.cluster.served import Cluster, Flow, ServedModel
from flexhybrid.core.errors import InputError, is_number
from flexhybrid.core.units import gib

MOST_CHOICES = 16  #: most choices (R, S) that are evaluated, those with the fewest partitions first
MOST_SORTED = 1 << 16  #: most choices that are sorted for that; enough for all of up to sixteen models
MORE_PARTITIONS = 1  #: partitions beyond the fewest that fit a GPU


@dataclass(frozen=True)
class Layout:
    """A choice (R, S) of §V-C for a rate. Arrays are by model; a model that no request visits has no replica."""

    models: tuple[ServedModel, ...]
    flow: Flow
    rate: float  #: requests/s of the whole cascade
    replicas: np.ndarray  #: [models], R
    partitions: np.ndarray  #: [models], S
    batch: np.ndarray  #: [models], requests per batch
    memory: np.ndarray  #: [models], bytes of one partition of one replica
    load: np.ndarray  #: [models], its kernel utilisation u: the share of time that its kernels run (Eq. 4)

    @cached_property
    def items(self) -> np.ndarray:
        """Model, replica and partition of every item [items, 3]."""
        counts = zip(self.replicas.tolist(), self.partitions.tolist(), strict=True)
        rows = [(m, r, s) for m, (replicas, parts) in enumerate(counts) for r in range(replicas) for s in range(parts)]
        return np.array(rows, dtype=np.int64).reshape(-1, 3)

    @cached_property
    def traffic(self) -> np.ndarray:
        """Mean bytes per request of the cascade from item to item [items, items].

        Requests go from the last partition of each replica of a model to the first partition of each replica of the
        next, evenly spread, and within a replica from partition to partition. Other pairs have no traffic (§V-A).
        """
        model, replica, partition = self.items.T
        first, last = partition == 0, partition == self.partitions[model] - 1
        visits, onward = self.flow.visits, np.asarray(self.flow.onward)
        output = np.array([served.output_bytes for served in self.models])
        hidden = np.array([served.hidden_bytes for served in self.models])
        replicas = np.maximum(self.replicas, 1)
        between = (visits * output / replicas)[:, None] * onward / replicas[None, :]  # [models, models], per pair
        table = np.where(last[:, None] & first[None, :], between[np.ix_(model, model)], 0.0)
        same = (model[:, None] == model[None, :]) & (replica[:, None] == replica[None, :])
        step = same & (partition[:, None] + 1 == partition[None, :])
        return np.where(step, (visits * hidden / replicas)[model][:, None], table)

    @cached_property
    def item_memory(self) -> np.ndarray:
        return self.memory[self.items[:, 0]]

    @cached_property
    def item_load(self) -> np.ndarray:
        return self.load[self.items[:, 0]]

    def name(self, item: int) -> str:
        """Return the name of an item, like "GPT-XXL, replica 2 of 3, partition 1 of 2"."""
        model, replica, partition = self.items[item]
        words = [self.models[model].name]
        if self.replicas[model] > 1:
            words.append(f"replica {replica + 1} of {self.replicas[model]}")
        if self.partitions[model] > 1:
            words.append(f"partition {partition + 1} of {self.partitions[model]}")
        return ", ".join(words)


def layouts(
    models: Sequence[ServedModel], flow: Flow, cluster: Cluster, rate: float, batch: int, most_load: float
) -> Iterator[Layout]:
    """Yield promising choices (R, S), those with the fewest partitions first.

    S starts with the fewest partitions that fit the largest GPU. R is the least number of replicas for which a GPU with
    one partition has a load of at most ``most_load``; more replicas would only add transfers. R·S is then proportional
    to ρ·l (§V-C), rounded up so that no GPU is overloaded. Raise InputError if a model cannot fit.
    """
    check_rate(rate)
    if len(models) != len(flow.entry):
        raise InputError(f"there are {len(models)} models, and a flow for {len(flow.entry)}")
    visits = flow.visits
    largest = float(cluster.memory.max())
    options = []
    for model, share in zip(models, visits, strict=True):
        choices = list(_fitting(model, share, rate, batch, most_load, largest)) if share > 0 else [(0, 1, 1, 0.0, 0.0)]
        if not choices:
            raise InputError(_never_fits(model, share * batch, cluster))
        options.append(choices[: 1 + MORE_PARTITIONS])
    combinations = itertools.islice(itertools.product(*options), MOST_SORTED)
    by_partitions = sorted(combinations, key=lambda choice: sum(option[0] * option[1] for option in choice))
    for choice in by_partitions[:MOST_CHOICES]:
        yield Layout(tuple(models), flow, rate, *map(np.array, zip(*choice, strict=True)))


def _fitting(
    model: ServedModel, share: float, rate: float, batch: int, most_load: float, largest: float
) -> Iterator[tuple[int, int, int, float, float]]:
    """Yield (replicas, partitions, batch, bytes, load) of a model for each number of partitions that fits.

    Try the numbers of replicas from the fewest whose load (busy share of the time) may be at most ``most_load`` to one
    more than batches of one request need. ``batch`` requests enter the cascade every batch / rate seconds, and
    ``share`` of them reach this model (HybridServe cascade, §V-C).
    """
    for partitions in range(1, model.max_partitions + 1):
        fewest = rate * share * model.seconds(model.max_batch) / model.max_batch / partitions / most_load
        enough = rate * share * model.seconds(1) / partitions / most_load  # with batches of one request
        for replicas in range(max(1, math.ceil(fewest - 1e-9)), max(1, math.ceil(enough)) + 2):
            size = min(model.max_batch, max(1, math.ceil(share * batch / replicas)))
            load = rate * share / replicas * model.seconds(size) / size / partitions
            if load <= most_load * (1 + 1e-9):
                break
        memory = model.memory(size) / partitions
        if memory <= largest:
            yield replicas, partitions, size, memory, load


def _never_fits(model: ServedModel, batch: float, cluster: Cluster) -> str:
    """Return the message about a model that fits no GPU."""
    memory = model.memory(min(model.max_batch, max(1, math.ceil(batch)))) / model.max_partitions
    largest = max(cluster.gpus, key=lambda gpu: gpu.memory)
    cut = f"in {model.max_partitions} partitions" if model.max_partitions > 1 else "which cannot be partitioned"
    return (
        f"no placement: {model.name}, {cut}, needs {gib(memory)} on a GPU; {largest.name}, the largest of "
        f"{len(cluster.gpus)}, lacks {gib(memory - largest.memory)} of its {gib(largest.memory)}"
    )


def check_rate(rate: float) -> None:
    """Raise InputError for an impossible rate."""
    if not is_number(rate) or not 0 < rate < math.inf:
        raise InputError(f"rate is {rate!r} requests/s; it must be a number > 0")
