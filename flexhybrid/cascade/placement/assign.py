"""A search that assigns items to GPUs where they are too many for the binary program: greedy starts, moves and swaps.

Its state is two tables, the traffic of an item with each GPU and with each host, which change by a row at a time.
"""

import time

import numpy as np

from flexhybrid.cascade.cluster.served import Cluster
from flexhybrid.cascade.placement.instances import Layout

SLACK = 1e-9  #: of a GPU's memory or time: sums of many shares may miss a bound by rounding


class PlacementState:
    """The GPU of every item; ``gpu_of`` [items], -1 for an item that is not placed.

    ``near`` [items, GPUs]: bytes a request between an item and the items on a GPU, both ways; ``near_host``: those on
    all GPUs of a host. ``free`` [2, GPUs]: memory and time left, as shares of the largest GPU's and of 1.
    """

    def __init__(self, layout: Layout, cluster: Cluster, most_load: float):
        unit = cluster.memory.max()
        self.traffic = layout.traffic + layout.traffic.T
        self.sizes = np.stack([layout.item_memory / unit, layout.item_load])  # [2, items]
        self.host_of = cluster.hosts
        self.host, self.network = cluster.host_s_per_byte, cluster.network_s_per_byte
        self.least_gain = 1e-9 * self.network * self.traffic.max(initial=0.0)
        self.full = np.stack([cluster.memory / unit, np.full(len(cluster.gpus), most_load)])
        self.clear()

    def clear(self) -> None:
        """Remove all items."""
        items, gpus = len(self.traffic), self.full.shape[1]
        self.gpu_of = np.full(items, -1)
        self.near = np.zeros((items, gpus))
        self.near_host = np.zeros((items, self.host_of.max() + 1))
        self.free = self.full.copy()

    def put(self, item: int, gpu: int, sign: int = 1) -> None:
        """Place an item (sign 1), or remove it (-1)."""
        self.near[:, gpu] += sign * self.traffic[item]
        self.near_host[:, self.host_of[gpu]] += sign * self.traffic[item]
        self.free[:, gpu] -= sign * self.sizes[:, item]
        self.gpu_of[item] = gpu if sign > 0 else -1

    def restore(self, gpu_of: np.ndarray) -> None:
        self.clear()
        for item, gpu in enumerate(gpu_of):
            self.put(item, int(gpu))

    def saved(self) -> np.ndarray:
        """Return the seconds of transfer a request that an item on a GPU saves over a host of its own [items, GPUs]."""
        return (self.network - self.host) * self.near_host[:, self.host_of] + self.host * self.near

    def cost(self) -> float:
        """Return the seconds of transfer a request (Eq. 2)."""
        items = np.arange(len(self.gpu_of))
        return float(self.network * self.traffic.sum() - self.saved()[items, self.gpu_of].sum()) / 2

    def greedy(self, order: np.ndarray) -> bool:
        """Place the items of ``order``, each where it saves most, and of those where least is left.

        Return False where an item fits no GPU; ``gpu_of`` then has the items placed before it.
        """
        for item in order:
            left = self.free - self.sizes[:, item, None]
            fits = (left >= -SLACK).all(axis=0)
            if not fits.any():
                return False
            saved = (self.network - self.host) * self.near_host[item][self.host_of] + self.host * self.near[item]
            tightness = left.max(axis=0)
            score = np.where(fits, saved - 1e-6 * self.network * self.traffic.max() * tightness, -np.inf)
            self.put(item, int(score.argmax()))
        return True

    def improve(self, until: float) -> None:
        """Make the best move or swap of two items, until none pays or ``until`` is reached (time.perf_counter())."""
        while time.perf_counter() < until and (self._move() or self._swap()):
            pass

    def _move(self) -> bool:
        saved = self.saved()
        gain = saved - saved[np.arange(len(self.gpu_of)), self.gpu_of][:, None]
        fits = (self.free[:, None, :] >= self.sizes[:, :, None] - SLACK).all(axis=0)
        gain = np.where(fits, gain, -np.inf)
        item, gpu = np.unravel_index(gain.argmax(), gain.shape)
        if gain[item, gpu] <= self.least_gain:
            return False
        self.put(int(item), int(self.gpu_of[item]), -1)
        self.put(int(item), int(gpu))
        return True

    def _swap(self) -> bool:
        at, saved = self.gpu_of, self.saved()
        swapped = saved[:, at]  # item i on the GPU of item j
        stays = swapped.diagonal()
        # a pair that changes places counts each other as near where neither lies any longer
        hosts = self.host_of[at]
        closeness = np.where(
            at[:, None] == at[None, :],
            self.network,
            np.where(hosts[:, None] == hosts[None, :], self.network - self.host, 0.0),
        )
        itself = self.traffic * (self.network - closeness)
        gain = swapped + swapped.T - stays[:, None] - stays[None, :] - 2 * itself
        for free, size in zip(self.free, self.sizes, strict=True):
            more = size[:, None] - size[None, :]  # on j's GPU when i replaces j
            gain = np.where((more <= free[at][None, :] + SLACK) & (-more <= free[at][:, None] + SLACK), gain, -np.inf)
        gain = np.where(at[:, None] == at[None, :], -np.inf, gain)
        a, b = (int(i) for i in np.unravel_index(gain.argmax(), gain.shape))
        if gain[a, b] <= self.least_gain:
            return False
        self._exchange(a, b)
        return True

    def _exchange(self, a: int, b: int) -> None:
        gpu_a, gpu_b = int(self.gpu_of[a]), int(self.gpu_of[b])
        self.put(a, gpu_a, -1)
        self.put(b, gpu_b, -1)
        self.put(a, gpu_b)
        self.put(b, gpu_a)

    def swap_some(self, rng: np.random.Generator, times: int) -> None:
        """Swap random items that fit each other's GPU, at any cost."""
        for _ in range(20 * times):
            a, b = rng.integers(len(self.gpu_of), size=2)
            gpu_a, gpu_b = self.gpu_of[a], self.gpu_of[b]
            more = self.sizes[:, a] - self.sizes[:, b]
            fits = (more <= self.free[:, gpu_b] + SLACK).all() and (-more <= self.free[:, gpu_a] + SLACK).all()
            if gpu_a != gpu_b and fits:
                self._exchange(int(a), int(b))
                times -= 1
                if not times:
                    return

    def relay(self, rng: np.random.Generator, hosts: int) -> None:
        """Remove all items of some hosts and place them again, roughly largest first; undo it where they do not fit."""
        before, chosen = self.gpu_of.copy(), rng.permutation(self.near_host.shape[1])[:hosts]
        removed = np.flatnonzero(np.isin(self.host_of[self.gpu_of], chosen))
        for item in removed:
            self.put(int(item), int(self.gpu_of[item]), -1)
        order = np.argsort(-self.sizes[:, removed].max(axis=0) * rng.uniform(0.6, 1.0, len(removed)))
        if not self.greedy(removed[order]):
            self.restore(before)


def orders(layout: Layout, cluster: Cluster) -> list[np.ndarray]:
    """Return orders for a greedy start: largest first; replicas of neighbouring models together; giants first."""
    model, replica, partition = layout.items.T
    size = np.maximum(layout.item_memory / cluster.memory.max(), layout.item_load)
    turn = replica / np.maximum(layout.replicas, 1)[model]
    return [np.argsort(-size, kind="stable"), np.lexsort((partition, -model, turn)), np.lexsort((partition, -model))]


def assign(
    layout: Layout, cluster: Cluster, most_load: float, good_enough: float, until: float, seed: int = 0
) -> tuple[float, np.ndarray] | None:
    """Return the best assignment found (seconds of transfer a request, GPU of each item); None where no start fits.

    Ends at a cost of ``good_enough`` or below, or when ``time.perf_counter()`` reaches ``until``; the starts are always
    made. It is seeded: equal calls that time does not end give equal answers.
    """
    state, best = PlacementState(layout, cluster, most_load), None
    for order in orders(layout, cluster):
        state.clear()
        if state.greedy(order):
            state.improve(until)
            if best is None or state.cost() < best[0]:
                best = state.cost(), state.gpu_of.copy()
    if best is None or len(layout.items) < 2:
        return best
    rng, since = np.random.default_rng(seed), 0
    most_gpus = int(np.bincount(cluster.hosts).max())
    while best[0] > good_enough and since < PATIENCE * len(layout.items) and time.perf_counter() < until:
        state.restore(best[1])
        if rng.random() < 0.5:
            state.swap_some(rng, int(rng.integers(2, 2 + max(2, len(layout.items) // 8))))
        else:
            state.relay(rng, int(rng.integers(2, 5)) * (1 + 7 // most_gpus))
        state.improve(until)
        since += 1
        if state.cost() < best[0] * (1 - 1e-9):
            best, since = (state.cost(), state.gpu_of.copy()), 0
    return best


PATIENCE = 20  #: kicks an item, in a row without a better assignment
