"""A lower bound on the transfer time of any placement, in a second where the binary program needs hours.

Where the contents of a host can be listed, host_patterns.py gives the bound. Otherwise: replicas of a model are equal,
so only the number of pairs of two kinds that lie together counts. For kinds A and B let Y_AB = Σ_p n_A(p)·n_B(p) over
places p (GPUs, or hosts), n_A(p) being how many of A lie at p. Every placement has

1. Σ_B size_B·Y_AB ≤ R_A·capacity, for memory and for time: the items that lie with an A fit its place;
2. the same with sizes rounded by a dual feasible function (three items above a half of a GPU need three GPUs);
3. Y on GPUs ≤ Y on hosts ≤ R_A·R_B;
4. of the two partitions that talk inside a replica t ≤ Y_AB, t ≤ R pairs together; where t are, n_A and n_B differ by
   at most R − t in all, so Y_AC and Y_BC by that times the most C of a place;
5. Y − R·Rᵀ/places positive semidefinite (Cauchy and Schwarz): pairs of A with B need As and Bs in the same places.

The most that such a Y saves is a linear program but for 5, whose violated rows are added as cuts, for the eigenvectors
of negative eigenvalues. Each round's optimum is a bound.
"""

import math
import time

import numpy as np

from flexhybrid.cascade.cluster.served import Cluster
from flexhybrid.cascade.placement.host_patterns import Kinds, most_saved
from flexhybrid.cascade.placement.instances import Layout

ROUNDS = 80
TOLERANCE = 1e-6  #: of the transfer time of all items apart: HiGHS holds rows and reduced costs to 1e-7
ENOUGH = 1e-3  #: of the bound: the rounds end after three in a row that gain less
DUAL_FEASIBLE = (1, 2, 3, 4, 5)  #: k of u^(k): sizes of which k + 1 fill the place count as k-ths


def lower_bound(
    layout: Layout, cluster: Cluster, most_load: float, until: float = math.inf, good_enough: float = math.inf
) -> float:
    """Return a lower bound on any placement's seconds of transfer a request; ends early at ``good_enough``."""
    kinds = Kinds(layout, cluster, most_load)
    all_apart = cluster.network_s_per_byte * sum(weight * count for _, _, weight, count in kinds.pairs)
    if all_apart <= 0:
        return 0.0
    saved = most_saved(kinds, cluster)  # never above the relaxation's
    bound = _relaxed(kinds, cluster, all_apart, until, good_enough) if saved is None else all_apart - saved
    return max(0.0, bound - TOLERANCE * all_apart)


def _relaxed(kinds: Kinds, cluster: Cluster, all_apart: float, until: float, good_enough: float) -> float:
    """Solve the linear program with cuts 5 in rounds; ``all_apart``: the cost of items on separate hosts."""
    from scipy.optimize import linprog

    relaxation = Relaxation(kinds, cluster)
    best, idle = 0.0, 0
    for _ in range(ROUNDS):
        rows, right = np.array(relaxation.rows), np.array(relaxation.right)
        limits = np.stack([relaxation.low, relaxation.high], axis=1)
        result = linprog(-relaxation.value / all_apart, rows, right, bounds=limits, method="highs")
        if result.status != 0:
            break  # no Y exists: nothing fits, which callers find out themselves
        bound = max(0.0, all_apart * (1 + result.fun))
        idle = idle + 1 if bound - best < ENOUGH * best else 0
        best = max(best, bound)
        if idle == 3 or time.perf_counter() > until or best >= good_enough or not relaxation.cut(result.x):
            break
    return best


class Relaxation:
    """A linear program: maximise value · x with rows · x <= right, low <= x <= high.

    x: Y of the pairs of kinds A <= B on GPUs, Y on hosts, then for each pair of kinds that talks the number of its
    items' pairs that lie together on GPUs, and on hosts.
    """

    def __init__(self, kinds: Kinds, cluster: Cluster):
        self.kinds, self.size = kinds, len(kinds.of)
        first, second = np.triu_indices(self.size)
        self.width = len(first)
        self.place = np.zeros((self.size, self.size), dtype=int)  # column of Y_AB within its level
        self.place[first, second] = np.arange(self.width)
        self.place = np.maximum(self.place, self.place.T)
        self.of_pair = 2 * self.width, 2 * self.width + len(kinds.pairs)  # where the pairs begin, by level
        self.places = len(cluster.gpus), int(cluster.hosts.max()) + 1
        self.gpus_of_host = float(np.bincount(cluster.hosts).max())
        weight = np.array([weight for _, _, weight, _ in kinds.pairs])
        rates = cluster.host_s_per_byte, cluster.network_s_per_byte - cluster.host_s_per_byte
        self.value = np.concatenate([np.zeros(2 * self.width), *(weight * rate for rate in rates)])
        both, together = kinds.count[first] * kinds.count[second], [num_pairs for _, _, _, num_pairs in kinds.pairs]
        self.high = np.concatenate([both, both, together, together])
        self.low = np.zeros(len(self.high))
        for level in (0, self.width):
            self.low[level + self.place.diagonal()] = kinds.count
        self.rows: list[np.ndarray] = []
        self.right: list[float] = []
        self._capacity(float(np.bincount(cluster.hosts, cluster.memory).max() / cluster.memory.max()))
        self._together()

    def _add(self, entries: dict[int, float], limit: float) -> None:
        row = np.zeros(len(self.value))
        for column, entry in entries.items():
            row[column] += entry
        self.rows.append(row)
        self.right.append(limit)

    def _capacity(self, memory: float) -> None:
        """Add 1 and 2; ``memory``: of a host, in its largest GPUs."""
        gpus = self.gpus_of_host
        sizes = [(self.kinds.memory, memory), (self.kinds.load, gpus)]
        sizes += [(_dual_feasible(share, k), gpus) for share, _ in sizes for k in DUAL_FEASIBLE]
        for share, of_host in sizes:
            for a, count in enumerate(self.kinds.count):
                for level, capacity in ((0, 1.0), (self.width, of_host)):
                    entries = {level + self.place[a, b]: share[b] for b in range(self.size) if share[b]}
                    self._add(entries, capacity * count * (1 + 1e-9))

    def _together(self) -> None:
        """Add 3 and 4."""
        k, width, place = self.kinds, self.width, self.place
        for column in range(width):
            self._add({column: 1.0, width + column: -1.0}, 0.0)
        for i, (a, b, _, _) in enumerate(k.pairs):
            on_gpu, on_host = (start + i for start in self.of_pair)
            self._add({on_gpu: 1.0, place[a, b]: -1.0}, 0.0)
            self._add({on_host: 1.0, width + place[a, b]: -1.0}, 0.0)
            self._add({on_gpu: 1.0, on_host: -1.0}, 0.0)
            if k.of[a][0] != k.of[b][0]:
                continue
            for c in range(self.size):
                for level, pair, gpus in ((0, on_gpu, 1.0), (width, on_host, self.gpus_of_host)):
                    most = min(k.count[c], k.alone[c] * gpus)
                    for one, other in ((a, b), (b, a)):
                        entries = {level + place[one, c]: 1.0, level + place[other, c]: -1.0, pair: most}
                        self._add(entries, most * k.count[a])

    def cut(self, x: np.ndarray) -> bool:
        """Add what x violates of 5; False where it violates nothing."""
        before, count = len(self.rows), self.kinds.count
        scale = 1 / np.sqrt(count)
        for level, places in zip((0, self.width), self.places, strict=True):
            matrix = (x[level + self.place] - np.outer(count, count) / places) * np.outer(scale, scale)
            values, vectors = np.linalg.eigh(matrix)
            for v in (vectors * scale[:, None]).T[values < -1e-6]:
                row = np.zeros(len(self.value))
                np.add.at(row, level + self.place, -np.outer(v, v))
                self.rows.append(row)
                self.right.append(-((v @ count) ** 2) / places)
        return len(self.rows) > before


def _dual_feasible(share: np.ndarray, k: int) -> np.ndarray:
    """Return u^(k) of sizes: a set that sums to at most 1 still does (Fekete and Schepers, 2001)."""
    scaled = (k + 1) * share
    is_integer = np.abs(scaled - np.rint(scaled)) < 1e-6
    return np.where(is_integer, share, np.floor(scaled) / k)
