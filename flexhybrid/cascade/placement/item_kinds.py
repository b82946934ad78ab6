"""The placed items by kind: items of one model and partition are equal, and a bound need not distinguish them."""

from __future__ import annotations

import itertools

import numpy as np

from flexhybrid.cascade.cluster.served import Cluster
from flexhybrid.cascade.placement.instances import Layout


class Kinds:
    """Kinds of equal items (model and partition), and the numbers of them that fit a GPU."""

    def __init__(self, layout: Layout, cluster: Cluster, most_load: float):
        self.of = [(m, s) for m in range(len(layout.models)) if layout.replicas[m] for s in range(layout.partitions[m])]
        model = np.array([m for m, _ in self.of])
        self.count = layout.replicas[model].astype(float)
        self.memory = layout.memory[model] / cluster.memory.max()  # shares of the largest GPU
        self.load = layout.load[model] / most_load
        self.alone = self._most(1.0, 1.0)  # [kinds] on an empty GPU
        self.with_one = np.array([self._most(1 - m, 1 - u) for m, u in zip(self.memory, self.load, strict=True)])
        self.pairs: list[tuple[int, int, float, float]] = []  #: kind, kind, bytes of one pair, pairs that talk
        index_of = {kind: index for index, kind in enumerate(self.of)}
        kind_of = np.array([index_of[int(m), int(s)] for m, _, s in layout.items], dtype=int)
        traffic = layout.traffic + layout.traffic.T
        for a, b in itertools.combinations(range(len(self.of)), 2):
            block = traffic[np.ix_(kind_of == a, kind_of == b)]
            if block.any():
                self.pairs.append((a, b, float(block.max()), float((block > 0).sum())))

    def _most(self, memory: float, load: float) -> np.ndarray:
        """Return the number of each kind that fits a GPU's remaining memory and load, at most all of it [kinds]."""
        with np.errstate(divide="ignore"):
            fit = np.minimum(max(memory, 0.0) / self.memory, max(load, 0.0) / self.load)
        return np.minimum(self.count, np.floor(fit + 1e-9))
