"""A lower bound on the transfer time of any placement, in a second where the binary program needs hours.

Where all that a host can hold can be listed, that gives it (host_patterns.py). Elsewhere: replicas of a model are
alike, so what counts is how many pairs of two kinds lie together. For kinds A and B let Y_AB = Σ_p n_A(p)·n_B(p) over
places p (GPUs, or hosts), n_A(p) being how many of A lie at p. Every placement has

1. Σ_B size_B·Y_AB ≤ R_A·capacity, for memory and for time: whatever lies with an A fits its place;
2. the same with sizes rounded by a dual feasible function (three items above a half of a GPU need three GPUs);
3. Y on GPUs ≤ Y on hosts ≤ R_A·R_B;
4. of the two partitions that talk inside a replica t ≤ Y_AB, t ≤ R pairs together; where t are, n_A and n_B differ by
   at most R − t in all, so Y_AC and Y_BC by that times the most C of a place;
5. Y − R·Rᵀ/places positive semidefinite (Cauchy and Schwarz): pairs of A with B need As and Bs in the same places;
6. Σ_p (v·n − k)·(v·n − k − 1) ≥ 0 for whole v and k: n counts whole items.

The most that such a Y saves is a linear program but for 5 and 6, of which what is violated is added as cuts: for the
eigenvectors v of negative eigenvalues, and for whole v of up to three kinds. Each round's optimum is a bound.
"""

from __future__ import annotations

import itertools
import math
import time

import numpy as np

from flexhybrid.cascade.cluster.served import Cluster
from flexhybrid.cascade.placement import host_patterns
from flexhybrid.cascade.placement.instances import Layout
from flexhybrid.cascade.placement.item_kinds import Kinds

ROUNDS = 80
TOLERANCE = 1e-6  #: of the whole transfer time: HiGHS holds rows and reduced costs to 1e-7
ENOUGH = 1e-3  #: of the bound: three rounds in a row that gain less are the last
DUAL_FEASIBLE = (1, 2, 3, 4, 5)  #: k of u^(k): sizes of which k + 1 fill the place are counted in k-ths
MOST_CUTS = 60  #: of 6, a round and level


def lower_bound(
    layout: Layout, cluster: Cluster, most_load: float, until: float = math.inf, good_enough: float = math.inf
) -> float:
    """Seconds of transfer a request that no placement undercuts. Ends early once it reaches ``good_enough``."""
    kinds = Kinds(layout, cluster, most_load)
    whole = cluster.network_s_per_byte * sum(weight * count for _, _, weight, count in kinds.pairs)
    if whole <= 0:
        return 0.0
    saved = host_patterns.most_saved(kinds, cluster)  # at most what any relaxation of what hosts hold allows
    bound = _relaxed(kinds, cluster, whole, until, good_enough) if saved is None else whole - saved
    return max(0.0, bound - TOLERANCE * whole)


def _relaxed(kinds: Kinds, cluster: Cluster, whole: float, until: float, good_enough: float) -> float:
    """The linear program with cuts 5 and 6, round by round; ``whole``: the cost of all items on hosts of their own."""
    from scipy.optimize import linprog

    relaxation = Relaxation(kinds, cluster)
    best, idle = 0.0, 0
    for _ in range(ROUNDS):
        found = linprog(
            -relaxation.value / whole, np.array(relaxation.rows), np.array(relaxation.right),
            bounds=np.stack([relaxation.low, relaxation.high], axis=1), method="highs",
        )  # fmt: skip
        if found.status != 0:
            break  # no Y exists: nothing fits, which is not for this function to say
        bound = max(0.0, whole * (1 + found.fun))
        idle = idle + 1 if bound - best < ENOUGH * best else 0
        best = max(best, bound)
        if idle == 3 or time.perf_counter() > until or best >= good_enough or not relaxation.cut(found.x):
            break
    return best


class Relaxation:
    """The linear program: maximise value · x with rows · x <= right, low <= x <= high.

    x: Y of the pairs of kinds A <= B on GPUs, the same on hosts, then for each pair of kinds that talks how many of
    its items' pairs lie together on GPUs, and on hosts.
    """

    def __init__(self, kinds: Kinds, cluster: Cluster):
        self.kinds, self.size = kinds, len(kinds.of)
        pairs = np.triu_indices(self.size)
        self.width = len(pairs[0])
        self.place = np.zeros((self.size, self.size), dtype=int)  # column of Y_AB within its level
        self.place[pairs] = np.arange(self.width)
        self.place = np.maximum(self.place, self.place.T)
        self.of_pair = 2 * self.width, 2 * self.width + len(kinds.pairs)  # where the pairs begin, by level
        self.places = len(cluster.gpus), int(cluster.hosts.max()) + 1
        self.gpus_of_host = float(np.bincount(cluster.hosts).max())
        memory = np.bincount(cluster.hosts, cluster.memory).max() / cluster.memory.max()
        self.rows: list[np.ndarray] = []
        self.right: list[float] = []
        self._objective(cluster)
        self._limits()
        self._capacity(float(memory))
        self._together()

    @property
    def num_columns(self) -> int:
        return 2 * self.width + 2 * len(self.kinds.pairs)

    def _add(self, entries: dict[int, float], limit: float) -> None:
        row = np.zeros(self.num_columns)
        for column, entry in entries.items():
            row[column] += entry
        self.rows.append(row)
        self.right.append(limit)

    def _objective(self, cluster: Cluster) -> None:
        self.value = np.zeros(self.num_columns)
        weight = np.array([weight for _, _, weight, _ in self.kinds.pairs])
        self.value[self.of_pair[0] : self.of_pair[1]] = weight * cluster.host_s_per_byte
        self.value[self.of_pair[1] :] = weight * (cluster.network_s_per_byte - cluster.host_s_per_byte)

    def _limits(self) -> None:
        """Bounds of single columns."""
        k, gpus = self.kinds, self.gpus_of_host
        self.low, self.high = np.zeros(self.num_columns), np.zeros(self.num_columns)
        for a in range(self.size):
            for b in range(a, self.size):
                column, both = self.place[a, b], k.count[a] * k.count[b]
                if a == b:
                    self.low[[column, self.width + column]] = k.count[a]
                    self.high[column] = min(both, k.count[a] * k.alone[a])
                    self.high[self.width + column] = min(both, k.count[a] * k.alone[a] * gpus)
                    continue
                with_a, with_b = k.count[a] * k.beside[a, b], k.count[b] * k.beside[b, a]
                self.high[column] = min(both, with_a, with_b)
                more = (gpus - 1) * np.array([k.count[a] * k.alone[b], k.count[b] * k.alone[a]])
                self.high[self.width + column] = min(both, with_a + more[0], with_b + more[1])
        for start in self.of_pair:
            self.high[start : start + len(k.pairs)] = [count for _, _, _, count in k.pairs]
        self.high = np.maximum(self.low, self.high)

    def _capacity(self, memory: float) -> None:
        """1 and 2; ``memory``: of a host, in its largest GPUs."""
        gpus = self.gpus_of_host
        sizes = [(self.kinds.memory, memory), (self.kinds.load, gpus)]
        sizes += [(_dual_feasible(share, k), gpus) for share, _ in sizes for k in DUAL_FEASIBLE]
        for share, of_host in sizes:
            for a, count in enumerate(self.kinds.count):
                for level, capacity in ((0, 1.0), (self.width, of_host)):
                    entries = {level + self.place[a, b]: share[b] for b in range(self.size) if share[b]}
                    self._add(entries, capacity * count * (1 + 1e-9))

    def _together(self) -> None:
        """3 and 4."""
        k, width, place = self.kinds, self.width, self.place
        for column in range(width):
            self._add({column: 1.0, width + column: -1.0}, 0.0)
        for number, (a, b, _, _) in enumerate(k.pairs):
            on_gpu, on_host = (start + number for start in self.of_pair)
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
        """Add what x violates of 5 and 6; False where it violates nothing."""
        before = len(self.rows)
        for level, places in zip((0, self.width), self.places, strict=True):
            Y = x[level + self.place]
            for v in self._negative(Y, places):
                self._add_square(level, v, -((v @ self.kinds.count) ** 2) / places)
            for v, k in self._fractional(Y, places):
                self._add_square(level, v, k * (k + 1) * places, 2 * k + 1)
        return len(self.rows) > before

    def _add_square(self, level: int, v: np.ndarray, limit: float, slope: float = 0.0) -> None:
        """-v·Y·v <= limit - slope·(v·R)"""
        row = np.zeros(self.num_columns)
        np.add.at(row, level + self.place, -np.outer(v, v))
        self.rows.append(row)
        self.right.append(limit - slope * float(v @ self.kinds.count))

    def _negative(self, Y: np.ndarray, places: int):
        """Eigenvectors that violate 5."""
        scale = 1 / np.sqrt(self.kinds.count)
        matrix = (Y - np.outer(self.kinds.count, self.kinds.count) / places) * np.outer(scale, scale)
        values, vectors = np.linalg.eigh(matrix)
        return [vector * scale for value, vector in zip(values, vectors.T, strict=True) if value < -1e-6]

    def _fractional(self, Y: np.ndarray, places: int) -> list[tuple[np.ndarray, float]]:
        """(v, k) that violate 6 most."""
        v = _whole_vectors(self.size)
        total = v @ self.kinds.count
        k = np.floor(total / places)
        excess = ((v @ Y) * v).sum(axis=1) - (2 * k + 1) * total + k * (k + 1) * places
        worst = np.argsort(excess)[:MOST_CUTS]
        return [(v[i], float(k[i])) for i in worst if excess[i] < -1e-4]


def _dual_feasible(share: np.ndarray, k: int) -> np.ndarray:
    """u^(k): a set of sizes that sums to at most 1 still does (Fekete and Schepers, 2001)."""
    scaled = (k + 1) * share
    whole = np.abs(scaled - np.rint(scaled)) < 1e-6
    return np.where(whole, share, np.floor(scaled) / k)


def _whole_vectors(size: int) -> np.ndarray:
    """All v of one to three entries ±1, the first of them +1."""
    rows = []
    for count in (1, 2, 3):
        for some in itertools.combinations(range(size), count):
            for signs in itertools.product((1.0, -1.0), repeat=count - 1):
                row = np.zeros(size)
                row[list(some)] = (1.0, *signs)
                rows.append(row)
    return np.array(rows)
