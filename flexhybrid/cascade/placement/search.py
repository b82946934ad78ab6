"""Algorithm 3 (§V): which replica of which partition of which model lies on which GPU.

For every (R, S) worth a look the placement of least transfer within memory and time: by the binary program where it is
small, else by search with a bound that says how far from the best it can be at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexhybrid.cascade.cluster.served import Cluster, Flow, ServedModel
from flexhybrid.cascade.placement import assign
from flexhybrid.cascade.placement.instances import Layout, layouts
from flexhybrid.cascade.placement.lower_bound import TOLERANCE, lower_bound
from flexhybrid.cascade.placement.program import solve_exactly, transfer_s, what_is_lacking
from flexhybrid.core.errors import InputError
from flexhybrid.core.units import gib

MOST_LOAD = 0.8  #: kernel utilisation of a GPU; Eq. 4 has 1, at which queues grow without end
SMALL = 160  #: items x GPUs up to which the binary program is solved
GOOD_GAP = 0.01  #: at which the search ends before its time
STARTS_SHARE = 0.3  #: of the time, to find which (R, S) to spend the rest on


@dataclass(frozen=True, eq=False)
class Plan:
    """A placement. ``gpu_of`` [items] in the order of ``layout.items``; ``transfer_s`` seconds a request (Eq. 2).

    ``bound_s``: below it no placement of these replicas and partitions can be; ``num_choices``: of (R, S) looked at.
    """

    layout: Layout
    cluster: Cluster
    most_load: float
    gpu_of: np.ndarray
    transfer_s: float
    bound_s: float
    how: str  #: "binary program" or "search"
    num_choices: int
    seconds: float

    @property
    def gap(self) -> float:
        """How far above the best transfer_s may be, 0..1."""
        return 0.0 if self.transfer_s <= 0 else max(0.0, 1 - self.bound_s / self.transfer_s)

    @property
    def memory(self) -> np.ndarray:
        """Bytes filled [GPUs]."""
        return np.bincount(self.gpu_of, self.layout.item_memory, len(self.cluster.gpus))

    @property
    def load(self) -> np.ndarray:
        """Kernel utilisation [GPUs]."""
        return np.bincount(self.gpu_of, self.layout.item_load, len(self.cluster.gpus))

    def gpus_of(self, model: int) -> np.ndarray:
        """GPU of each partition of each replica [R, S]."""
        mine = self.layout.items[:, 0] == model
        return self.gpu_of[mine].reshape(int(self.layout.replicas[model]), int(self.layout.partitions[model]))

    def to_dict(self) -> dict:
        """Plain JSON."""
        names = [gpu.name for gpu in self.cluster.gpus]
        memory, load = self.memory, self.load
        models = [
            {
                "name": model.name, "replicas": int(self.layout.replicas[m]),
                "partitions": int(self.layout.partitions[m]), "batch": int(self.layout.batch[m]),
                "visits": float(self.layout.flow.visits[m]), "load": float(self.layout.load[m]),
                "gpus": [[names[g] for g in replica] for replica in self.gpus_of(m)],
            }
            for m, model in enumerate(self.layout.models)
        ]  # fmt: skip
        gpus = [
            {
                "name": gpu.name, "host": gpu.host, "memory_bytes": gpu.memory, "used_bytes": float(memory[g]),
                "load": float(load[g]), "holds": [self.layout.name(int(i)) for i in np.flatnonzero(self.gpu_of == g)],
            }
            for g, gpu in enumerate(self.cluster.gpus)
        ]  # fmt: skip
        return {
            "rate": self.layout.rate, "most_load": self.most_load, "transfer_s": self.transfer_s,
            "bound_s": self.bound_s, "gap": self.gap, "how": self.how, "num_choices": self.num_choices,
            "seconds": self.seconds, "models": models, "gpus": gpus,
        }  # fmt: skip


def plan(
    models: Sequence[ServedModel],
    flow: Flow,
    cluster: Cluster,
    rate: float,
    batch: int = 1,
    most_load: float = MOST_LOAD,
    time_limit: float = 10.0,
) -> Plan:
    """The placement that serves ``rate`` requests/s with least transfer.

    ``batch``: requests that enter together (§V-C). Raises InputError where nothing fits, saying which GPU lacks what.
    """
    check_limits(batch, most_load, time_limit)
    begun = time.perf_counter()
    choices = list(layouts(models, flow, cluster, rate, batch, most_load))
    small = [one for one in choices if len(one.items) * len(cluster.gpus) <= SMALL]
    if len(small) == len(choices):
        found = _by_program(choices, cluster, most_load, begun + time_limit)
    else:
        found = _by_search(choices, cluster, most_load, begun, time_limit)
    layout, gpu_of, cost, bound, how = found or _last_resort(choices, cluster, most_load, time_limit)
    seconds = time.perf_counter() - begun
    return Plan(layout, cluster, most_load, gpu_of, cost, bound, how, len(choices), seconds)


def most_rate(
    models: Sequence[ServedModel],
    flow: Flow,
    cluster: Cluster,
    batch: int = 1,
    most_load: float = MOST_LOAD,
    time_limit: float = 10.0,
) -> float:
    """The highest rate, requests/s, for which a placement is found, to 1 %.

    Raises InputError where not even one request in a million seconds can be served: a model does not fit.
    """
    check_limits(batch, most_load, time_limit)
    begun = time.perf_counter()

    def fits(rate: float) -> bool:
        try:
            choices = layouts(models, flow, cluster, rate, batch, most_load)
            return any(_packs(layout, cluster, most_load) for layout in choices)
        except InputError:
            return False

    visits = flow.visits
    work = sum(v * one.seconds(one.max_batch) / one.max_batch for v, one in zip(visits, models, strict=True))
    low, high = 1e-6, len(cluster.gpus) * most_load / work * 1.01  # all GPUs as busy as may be
    if not fits(low):
        plan(models, flow, cluster, low, batch, most_load, time_limit)  # raises, and says what is lacking
    while high / low > 1.01 and time.perf_counter() - begun < time_limit:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _packs(layout: Layout, cluster: Cluster, most_load: float) -> bool:
    if not _has_room(layout, cluster, most_load):
        return False
    board = assign.Board(layout, cluster, most_load)
    return any(board.greedy(order) for order in assign.orders(layout, cluster))


def _has_room(layout: Layout, cluster: Cluster, most_load: float) -> bool:
    """Whether all together is enough (Algorithm 3, line 6)."""
    partitions = layout.replicas * layout.partitions
    memory, load = float(partitions @ layout.memory), float(partitions @ layout.load)
    return memory <= cluster.memory.sum() * (1 + 1e-9) and load <= most_load * len(cluster.gpus) * (1 + 1e-9)


def _by_program(choices: list[Layout], cluster: Cluster, most_load: float, until: float):
    """(layout, gpu_of, cost, bound, how) of the best choice; None where no choice fits.

    Where search meets the bound nothing is left to prove, and a choice whose bound is above the best so far is passed
    over; for the others the binary program is solved.
    """
    best = None
    for layout in choices:
        if not _has_room(layout, cluster, most_load):
            continue
        bound = lower_bound(layout, cluster, most_load, until)
        if best and bound >= best[2]:
            continue
        tolerance = 2 * TOLERANCE * cluster.network_s_per_byte * float(layout.traffic.sum())
        found = assign.search(layout, cluster, most_load, bound + tolerance, until)
        if found and found[0] <= bound + tolerance:
            one = layout, found[1], found[0], found[0], "search"
        else:
            solved = solve_exactly(layout, cluster, most_load, until - time.perf_counter())
            if solved is None:
                continue
            one = layout, solved.gpu_of, solved.cost, max(solved.bound, min(bound, solved.cost)), "binary program"
        if best is None or one[2] < best[2] * (1 - 1e-9):
            best = one
    return best


def _by_search(choices: list[Layout], cluster: Cluster, most_load: float, begun: float, time_limit: float):
    """The same by search: starts for every choice, then the time that is left for the best one."""
    starts = []
    for layout in choices:
        if time.perf_counter() - begun > STARTS_SHARE * time_limit and starts:
            break
        if _has_room(layout, cluster, most_load):
            found = assign.search(layout, cluster, most_load, math.inf, begun + time_limit)
            if found:
                starts.append((found[0], layout, found[1]))
    if not starts:
        return None
    cost, layout, gpu_of = min(starts, key=lambda one: one[0])
    now = time.perf_counter()
    bound = lower_bound(layout, cluster, most_load, now + 0.4 * (begun + time_limit - now), cost * (1 - GOOD_GAP))
    found = assign.search(layout, cluster, most_load, bound / (1 - GOOD_GAP), begun + time_limit)
    if found and found[0] < cost:
        cost, gpu_of = found
    return layout, gpu_of, cost, min(bound, cost), "search"


def _last_resort(choices: list[Layout], cluster: Cluster, most_load: float, time_limit: float):
    """Where no start fits: an integer program either finds a placement, or says what the cluster lacks."""
    for layout in choices:
        lacking, gpu_of = what_is_lacking(layout, cluster, most_load, max(2.0, time_limit))
        if gpu_of is not None:
            cost = transfer_s(layout, cluster, gpu_of)
            return layout, gpu_of, cost, min(cost, lower_bound(layout, cluster, most_load)), "search"
        if layout is choices[0]:
            first = lacking
    raise InputError(_infeasible(choices[0], cluster, most_load, first))


def _infeasible(layout: Layout, cluster: Cluster, most_load: float, lacking: list[str] | None) -> str:
    partitions = layout.replicas * layout.partitions
    needs = (
        f"{len(layout.items)} partitions need {gib(float(partitions @ layout.memory))} and "
        f"{float(partitions @ layout.load):.3g} GPUs' time; there are {gib(cluster.memory.sum())} and "
        f"{len(cluster.gpus)} GPUs, each to be busy up to {most_load:.0%}"
    )
    if lacking is None:
        return f"no placement found for {layout.rate:.4g} requests/s in the time given: {needs}"
    shown = lacking[:3] + ([f"and {len(lacking) - 3} more GPUs"] if len(lacking) > 3 else [])
    return f"no placement for {layout.rate:.4g} requests/s: {'; '.join(shown)} ({needs})"


def check_limits(batch: int, most_load: float, time_limit: float) -> None:
    if isinstance(batch, bool) or not isinstance(batch, (int, np.integer)) or batch < 1:
        raise InputError(f"batch is {batch!r}; it must be a whole number >= 1")
    if not 0 < most_load <= 1:
        raise InputError(f"the most load of a GPU is {most_load!r}; it must lie in (0, 1]")
    if not time_limit > 0:
        raise InputError(f"time_limit is {time_limit!r} s; it must be > 0")


def describe(found: Plan) -> str:
    """A plan for people: models, GPUs, and how good it is."""
    lines = [f"{found.cluster.describe()}; {found.layout.rate:.4g} requests/s"]
    for row in found.to_dict()["models"]:
        if row["replicas"]:
            cut = f" of {row['partitions']} partitions" if row["partitions"] > 1 else ""
            where = "; ".join(", ".join(replica) for replica in row["gpus"][:4])
            more = f"; and {row['replicas'] - 4} more" if row["replicas"] > 4 else ""
            lines.append(
                f"  {row['name']:12s} {row['visits']:6.1%} of requests, {row['replicas']} replica"
                f"{'s' * (row['replicas'] > 1)}{cut}, batches of {row['batch']}: {where}{more}"
            )
        else:
            lines.append(f"  {row['name']:12s} is not deployed: no request reaches it")
    used = found.gpu_of
    busy, full = found.load, found.memory / found.cluster.memory
    lines.append(f"  {len(set(used.tolist()))} GPUs used; the busiest {busy.max():.0%}, the fullest {full.max():.0%}")
    proof = "proved least" if found.gap < 1e-6 else f"at most {found.gap:.1%} above the least ({found.bound_s:.4g})"
    lines.append(
        f"  transfers {found.transfer_s:.4g} s a request, {proof}; by {found.how}, {found.num_choices} choices of "
        f"replicas and partitions, {found.seconds:.2f} s"
    )
    if len(set(used.tolist())) < len(found.load):
        lines.append("  latency is not weighed: models on a GPU wait for each other; a lower --most-load spreads them")
    return "\n".join(lines)
