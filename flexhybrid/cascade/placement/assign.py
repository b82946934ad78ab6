"""A local search that assigns items to GPUs, for cases too large for the binary program: greedy starts, moves, swaps.

An item is a partition of a replica. The state has two tables, the traffic of each item with each GPU and with each
host; a move changes one column of each.
"""

import time

import numpy as np

from flexhybrid.cascade.cluster.served import Cluster
from flexhybrid.cascade.placement.instances import Layout

SLACK = 1e-9  #: share of a GPU's memory or time by which a sum may exceed it because of rounding
PATIENCE = 20  #: attempts per item without a better assignment after which the search ends


class PlacementState:
    """An assignment of items to GPUs.

    - ``gpu_of`` [items]: GPU of each item; -1: not placed.
    - ``near`` [items, GPUs], ``near_host`` [items, hosts]: bytes per request, in both directions, between an item and
      all items on a GPU or a host.
    - ``free`` [2, GPUs]: free memory as a share of the largest GPU's, and free time as a share.
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
        """Place all items as in ``gpu_of``."""
        self.clear()
        for item, gpu in enumerate(gpu_of):
            self.put(item, int(gpu))

    def saved(self) -> np.ndarray:
        """Return the seconds per request that an item on a GPU saves over being on its own host [items, GPUs]."""
        return (self.network - self.host) * self.near_host[:, self.host_of] + self.host * self.near

    def cost(self) -> float:
        """Return the seconds of transfer per request (Eq. 2)."""
        items = np.arange(len(self.gpu_of))
        return float(self.network * self.traffic.sum() - self.saved()[items, self.gpu_of].sum()) / 2

    def greedy(self, order: np.ndarray) -> bool:
        """Place the items in ``order``, each on the GPU where it saves most; among equal ones, on the fullest.

        Return False if an item fits no GPU; the items before it are then placed.
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
        """Make the best move of an item or swap of two, until none helps or time.perf_counter() reaches ``until``."""
        while time.perf_counter() < until and (self._move() or self._swap()):
            pass

    def _move(self) -> bool:
        """Make the best move of an item; return False if none helps."""
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
        """Make the best swap of two items; return False if none helps."""
        at, saved = self.gpu_of, self.saved()
        swapped = saved[:, at]  # item i on the GPU of item j
        stays = swapped.diagonal()
        # Correct for the traffic between the two items, which counts each other's old GPU as near.
        hosts = self.host_of[at]
        closeness = np.where(
            at[:, None] == at[None, :],
            self.network,
            np.where(hosts[:, None] == hosts[None, :], self.network - self.host, 0.0),
        )
        itself = self.traffic * (self.network - closeness)
        gain = swapped + swapped.T - stays[:, None] - stays[None, :] - 2 * itself
        for free, size in zip(self.free, self.sizes, strict=True):
            more = size[:, None] - size[None, :]  # additional use of j's GPU if i replaces j
            gain = np.where((more <= free[at][None, :] + SLACK) & (-more <= free[at][:, None] + SLACK), gain, -np.inf)
        gain = np.where(at[:, None] == at[None, :], -np.inf, gain)
        a, b = (int(i) for i in np.unravel_index(gain.argmax(), gain.shape))
        if gain[a, b] <= self.least_gain:
            return False
        self._exchange(a, b)
        return True

    def _exchange(self, a: int, b: int) -> None:
        """Swap two items."""
        gpu_a, gpu_b = int(self.gpu_of[a]), int(self.gpu_of[b])
        self.put(a, gpu_a, -1)
        self.put(b, gpu_b, -1)
        self.put(a, gpu_b)
        self.put(b, gpu_a)

    def swap_some(self, rng: np.random.Generator, times: int) -> None:
        """Swap random pairs of items that fit each other's GPU, even if the cost grows."""
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
        """Place all items of some random hosts again, roughly the largest first; undo this if they do not fit."""
        before, chosen = self.gpu_of.copy(), rng.permutation(self.near_host.shape[1])[:hosts]
        removed = np.flatnonzero(np.isin(self.host_of[self.gpu_of], chosen))
        for item in removed:
            self.put(int(item), int(self.gpu_of[item]), -1)
        order = np.argsort(-self.sizes[:, removed].max(axis=0) * rng.uniform(0.6, 1.0, len(removed)))
        if not self.greedy(removed[order]):
            self.restore(before)


def orders(layout: Layout, cluster: Cluster) -> list[np.ndarray]:
    """Return orders for greedy starts: largest items; replicas of neighbouring models together; large models first."""
    model, replica, partition = layout.items.T
    size = np.maximum(layout.item_memory / cluster.memory.max(), layout.item_load)
    turn = replica / np.maximum(layout.replicas, 1)[model]
    return [np.argsort(-size, kind="stable"), np.lexsort((partition, -model, turn)), np.lexsort((partition, -model))]


def assign(
    layout: Layout, cluster: Cluster, most_load: float, good_enough: float, until: float
) -> tuple[float, np.ndarray] | None:
    """Return the best assignment found: seconds of transfer per request, and GPU of each item. None if no start fits.

    The search ends at a cost of at most ``good_enough``, after PATIENCE, or when time.perf_counter() reaches ``until``;
    the greedy starts are always made. Unless time ends it, equal arguments give equal results.
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
    rng, since = np.random.default_rng(0), 0
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
