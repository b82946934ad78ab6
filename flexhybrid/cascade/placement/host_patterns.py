"""The most that any placement saves, where the contents of a host can be listed: large items, few of them a GPU.

A pattern is the number of items of each kind on each GPU of one host, and its saving is known. So no placement saves
more than the linear program of Gilmore and Gomory (1961), whose variables are the uses of each pattern: all items are
placed, with no more patterns than hosts. Its columns are found by their reduced costs; the prices of every round give a
bound (Lagrange).
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from flexhybrid.cascade.cluster.served import Cluster
from flexhybrid.cascade.placement.instances import Layout

MOST_PATTERNS = 500_000  #: of a host
MOST_OF_GPU = 20_000  #: of a GPU; some 10 µs each to list
ROUNDS = 200
NEW_COLUMNS = 100  #: a round


class Kinds:
    """Kinds of equal items (model and partition), which a bound need not distinguish."""

    def __init__(self, layout: Layout, cluster: Cluster, most_load: float):
        self.of = [(m, s) for m in range(len(layout.models)) if layout.replicas[m] for s in range(layout.partitions[m])]
        model = np.array([m for m, _ in self.of])
        self.count = layout.replicas[model].astype(float)
        self.memory = layout.memory[model] / cluster.memory.max()  # shares of the largest GPU
        self.load = layout.load[model] / most_load
        with np.errstate(divide="ignore"):
            fit = np.minimum(1 / self.memory, 1 / self.load)
        self.alone = np.minimum(self.count, np.floor(fit + 1e-9))  # [kinds] on an empty GPU
        self.pairs: list[tuple[int, int, float, float]] = []  #: kind, kind, bytes of one pair, pairs that talk
        index_of = {kind: index for index, kind in enumerate(self.of)}
        kind_of = np.array([index_of[int(m), int(s)] for m, _, s in layout.items], dtype=int)
        traffic = layout.traffic + layout.traffic.T
        for a, b in itertools.combinations(range(len(self.of)), 2):
            block = traffic[np.ix_(kind_of == a, kind_of == b)]
            if block.any():
                self.pairs.append((a, b, float(block.max()), float((block > 0).sum())))


def most_saved(kinds: Kinds, cluster: Cluster) -> float | None:
    """Return the most seconds of transfer a request that a placement saves, against all items on separate hosts.

    None where a host has too many patterns to list.
    """
    per_host, hosts = int(np.bincount(cluster.hosts).max()), int(cluster.hosts.max()) + 1
    of_gpu = _gpu_patterns(kinds)
    if len(of_gpu) > MOST_OF_GPU or math.comb(len(of_gpu) + per_host - 1, per_host) > MOST_PATTERNS:
        return None
    combinations = itertools.combinations_with_replacement(range(len(of_gpu)), per_host)
    combined = np.fromiter(itertools.chain.from_iterable(combinations), dtype=np.int32).reshape(-1, per_host)
    counts = np.zeros((len(combined), of_gpu.shape[1]), dtype=np.int32)  # [patterns, kinds]
    for slot in combined.T:
        counts += of_gpu[slot]
    possible = (counts <= kinds.count).all(axis=1)
    combined, counts = combined[possible], counts[possible]
    on_gpus = _saved(kinds, of_gpu, cluster.host_s_per_byte)[combined].sum(axis=1)
    on_hosts = _saved(kinds, counts, cluster.network_s_per_byte - cluster.host_s_per_byte)
    return _by_columns(counts, on_gpus + on_hosts, kinds.count, hosts)


def _gpu_patterns(kinds: Kinds) -> np.ndarray:
    """Return the numbers of each kind that fit one GPU, from none on [patterns, kinds]; at most MOST_OF_GPU + 1."""

    def fill(kind: int, memory: float, load: float) -> Iterator[list[int]]:
        if kind == len(kinds.of):
            yield []
            return
        for count in range(int(kinds.count[kind]) + 1):
            left = memory - count * kinds.memory[kind], load - count * kinds.load[kind]
            if min(left) < -1e-9:
                return
            for more in fill(kind + 1, *left):
                yield [count, *more]

    return np.array(list(itertools.islice(fill(0, 1.0, 1.0), MOST_OF_GPU + 1)), dtype=np.int32)


def _saved(kinds: Kinds, counts: np.ndarray, s_per_byte: float) -> np.ndarray:
    """Return the seconds a request that items save by lying together, by their number of each kind [patterns]."""
    saved = np.zeros(len(counts))
    for a, b, weight, _ in kinds.pairs:
        of_a, of_b = counts[:, a], counts[:, b]
        inside = kinds.of[a][0] == kinds.of[b][0]  # partitions of one replica talk to each other alone
        saved += weight * s_per_byte * (np.minimum(of_a, of_b) if inside else of_a * of_b)
    return saved


def _by_columns(counts: np.ndarray, value: np.ndarray, needed: np.ndarray, hosts: int) -> float:
    """Return the least upper bound found of max Σ value·x over x >= 0 with Σ counts·x = needed, Σ x <= hosts."""
    from scipy.optimize import linprog

    scale = max(float(value.max()), 1e-300)
    value, size = value / scale, len(needed)
    penalty = 10.0 * hosts  # of an item that no chosen column places: more than all that can be saved
    chosen, best = np.argsort(-value, kind="stable")[:NEW_COLUMNS], math.inf
    for _ in range(ROUNDS):
        objective = -np.concatenate([value[chosen], np.full(size, -penalty)])
        uses = np.concatenate([np.ones(len(chosen)), np.zeros(size)])[None]
        placed = np.concatenate([counts[chosen].T, np.eye(size)], axis=1)
        result = linprog(objective, uses, [hosts], placed, needed, method="highs")
        prices = -result.eqlin.marginals
        reduced = value - counts @ prices
        best = min(best, float(needed @ prices) + hosts * max(0.0, float(reduced.max())))
        gains = reduced + float(result.ineqlin.marginals[0])
        new = np.argsort(-gains, kind="stable")[:NEW_COLUMNS]
        new = new[gains[new] > 1e-9]
        if not len(np.setdiff1d(new, chosen)):
            break
        chosen = np.union1d(chosen, new)
    return best * scale
