"""Whether accesses to memory are in order: vector clocks of threads and streams, carried by events and waits.

An *agent* is a thread of the host or a stream of the device. An access is in order with an earlier one if its agent
knows of it: by the order of the agent's own work, or through a chain of waits. Two accesses to a byte, one of them a
write, that are not in order are a fault, however the clocks of this run happened to fall.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

Clock = list[int]  #: by agent: how many of its accesses are known
GRANULE_BITS = 12  #: accesses are looked up by pieces of memory of this size
CROWDED = 48  #: accesses to a piece beyond which those that everybody knows of are looked for


class Span(NamedTuple):
    """The bytes of a strided array."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  #: in bytes
    itemsize: int

    @lru_cache(1 << 16)  # noqa: B019  a value: most come again
    def bounds(self) -> tuple[int, int, bool]:
        """Return an array's first byte, the byte after its last, and whether it surely fills the range."""
        low, high, whole = self.address, self.address + self.itemsize, True
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n == 0:
                return self.address, self.address, True
            whole = whole and (n == 1 or stride == high - low)
            if stride > 0:
                high += (n - 1) * stride
            else:
                low += (n - 1) * stride
        return low, high, whole

    def runs(self) -> tuple[np.ndarray, int]:
        """Return where runs of neighbouring bytes begin, sorted, and how long each is."""
        width, outer = self.itemsize, []
        for stride, n in sorted((s, n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1 and s):
            if stride == width and not outer:
                width *= n
            else:
                outer.append((stride, n))
        starts = np.array([self.address])
        for stride, n in outer:
            starts = (starts[:, None] + stride * np.arange(n)).reshape(-1)
        return np.sort(starts), width


class Cells(NamedTuple):
    """Elements at given addresses."""

    addresses: np.ndarray  #: sorted
    itemsize: int

    def bounds(self) -> tuple[int, int, bool]:
        if not len(self.addresses):
            return 0, 0, True
        return int(self.addresses[0]), int(self.addresses[-1]) + self.itemsize, False

    def runs(self) -> tuple[np.ndarray, int]:
        return self.addresses, self.itemsize


Place = Span | Cells


class Seen:
    """An access."""

    __slots__ = ("agent", "high", "low", "place", "time", "what", "whole", "write")

    def __init__(self, agent: int, time: int, place: Place, write: bool, what: str):
        self.agent, self.time, self.place, self.write, self.what = agent, time, place, write, what
        self.low, self.high, self.whole = place.bounds()  #: time: how many accesses its agent had made with it

    def covers(self, other: Seen) -> bool:
        """Return whether this access is to every byte of another one, as far as is seen at a glance."""
        if self.whole:
            return self.low <= other.low and other.high <= self.high
        return type(self.place) is type(other.place) is Span and self.place == other.place


def overlap(one: Seen, other: Seen) -> bool:
    """Return whether two accesses have a byte in common."""
    if one.low >= other.high or other.low >= one.high:
        return False
    (starts, width), (others, other_width) = one.place.runs(), other.place.runs()
    first = np.searchsorted(others, starts - other_width, side="right")  # the first that ends behind each start
    inside = first < len(others)
    return bool((others[first[inside]] < starts[inside] + width).any())


class Order:
    """The clocks of all agents, and accesses unknown to some. ``faults``: (access, conflicting access)."""

    def __init__(self):
        self.faults: Counter[tuple[str, str]] = Counter()
        self.checked = 0
        self._lock = threading.RLock()  # what the collector of garbage ends may ask for an agent, anywhere
        self._agents: dict[Hashable, int] = {}
        self._threads: list[int] = []
        self._clocks: list[Clock] = []
        self._seen: defaultdict[int, list[Seen]] = defaultdict(list)

    def agent(self, key: Hashable, thread: bool = False) -> int:
        """Return the number of an agent. ``thread``: it is one of the host's, from which all work comes."""
        number = self._agents.get(key)
        if number is None:
            with self._lock:
                number = self._agents[key] = len(self._clocks)
                for clock in self._clocks:
                    clock.append(0)
                self._clocks.append([0] * (number + 1))
                if thread:
                    self._threads.append(number)
        return number

    def now(self, agent: int) -> Clock:
        """Return what an agent knows."""
        return self._clocks[agent].copy()

    def learn(self, agent: int, clock: Clock) -> None:
        """Let an agent know what ``clock`` says: it has waited for it."""
        known = self._clocks[agent]
        for other, time in enumerate(clock):
            if time > known[other]:
                known[other] = time

    def step(self, agent: int) -> int:
        """Let an agent's time go on by a step that is no access; return the time."""
        self._clocks[agent][agent] += 1
        return self._clocks[agent][agent]

    def access(self, agent: int, place: Place, write: bool, what: str, known: Clock | None = None) -> None:
        """Check an access, and remember it. ``known``: what its agent knows, where that is not its own clock."""
        with self._lock:
            clock = self._clocks[agent]
            access = Seen(agent, clock[agent] + 1, place, write, what)
            if access.low == access.high:
                return
            clock[agent] += 1
            self.checked += 1
            if known is not None:
                clock = known + [0] * (len(clock) - len(known))
            for granule in range(access.low >> GRANULE_BITS, (access.high - 1 >> GRANULE_BITS) + 1):
                self._check(access, clock, self._seen[granule])

    def _check(self, access: Seen, clock: Clock, seen: list[Seen]) -> None:
        """Check an access against those to the same piece of memory, ``seen``; remember it there."""
        if len(seen) > CROWDED:
            least = [min(self._clocks[thread][agent] for thread in self._threads) for agent in range(len(clock))]
            seen[:] = [one for one in seen if one.time > least[one.agent]]
        low, high = access.low, access.high
        for one in [one for one in seen if one.low < high and low < one.high]:
            if one.agent == access.agent or one.time <= clock[one.agent]:
                if (access.write or not one.write) and access.covers(one):
                    seen.remove(one)  # what is not in order with that one is not in order with this one either
            elif (access.write or one.write) and overlap(one, access):
                kinds = ["reads", "writes"]
                self.faults[f"{access.what} {kinds[access.write]}", f"{one.what} {kinds[one.write]}"] += 1
        seen.append(access)
