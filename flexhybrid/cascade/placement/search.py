"""Algorithm 3 (§V): the GPU of every partition of every replica of a cascade's models.

For every promising (R, S) it searches the placement of least transfer within memory and time. Where the binary program
of the best (R, S) is small enough, its solver then improves that placement, or bounds how much better another can be.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexhybrid.cascade.cluster.served import Cluster, Flow, ServedModel
from flexhybrid.cascade.placement.assign import PlacementState, assign, orders
from flexhybrid.cascade.placement.instances import Layout, layouts
from flexhybrid.cascade.placement.program import shortages, solve_exactly, transfer_s
from flexhybrid.core.errors import InputError, check, is_integer
from flexhybrid.core.units import gib

MOST_LOAD = 0.8  #: kernel utilisation of a GPU; Eq. 4 has 1, at which queues grow without end
SMALL = 160  #: items x GPUs up to which the search does for every (R, S) what it does for the best of many items
BOUNDED = 640  #: items x GPUs up to which the binary program is solved; above, its bound stays near 0
STARTS_SHARE = 0.3  #: of the time, to choose the (R, S) on which the remaining time is spent
SEARCH_SHARE = 0.3  #: of the time, for the search where the binary program follows
LEAST_GAIN = 1e-6  #: of the transfer time: a placement that is better by less is not looked for


@dataclass(frozen=True, eq=False)
class Plan:
    """A placement. ``gpu_of`` [items] in the order of ``layout.items``; ``transfer_s`` seconds a request (Eq. 2).

    ``bound_s``: a lower bound on the transfer_s of these replicas and partitions, None above BOUNDED; ``num_choices``:
    (R, S) evaluated.
    """

    layout: Layout
    cluster: Cluster
    most_load: float
    gpu_of: np.ndarray
    transfer_s: float
    bound_s: float | None = None
    how: str = "search"  #: or "binary program"
    num_choices: int = 1
    seconds: float = 0.0

    @property
    def gap(self) -> float | None:
        """Return how far transfer_s may lie above the least, 0..1; None where no bound is known."""
        if self.transfer_s <= 0:
            return 0.0
        return None if self.bound_s is None else max(0.0, 1 - self.bound_s / self.transfer_s)

    @property
    def memory(self) -> np.ndarray:
        """Return the bytes filled [GPUs]."""
        return np.bincount(self.gpu_of, self.layout.item_memory, len(self.cluster.gpus))

    @property
    def load(self) -> np.ndarray:
        """Return the kernel utilisation [GPUs]."""
        return np.bincount(self.gpu_of, self.layout.item_load, len(self.cluster.gpus))

    def gpus_of(self, model: int) -> np.ndarray:
        """Return the GPU of each partition of each replica [R, S]."""
        of_model = self.layout.items[:, 0] == model
        return self.gpu_of[of_model].reshape(int(self.layout.replicas[model]), int(self.layout.partitions[model]))

    def to_dict(self) -> dict:
        """Return plain JSON values."""
        names, layout, models, gpus = [gpu.name for gpu in self.cluster.gpus], self.layout, [], []
        for m, model in enumerate(layout.models):
            placed = [[names[g] for g in replica] for replica in self.gpus_of(m)]
            counts = {name: int(getattr(layout, name)[m]) for name in ("replicas", "partitions", "batch")}
            shares = {"visits": float(layout.flow.visits[m]), "load": float(layout.load[m])}
            shares["memory_bytes"] = float(model.memory(counts["batch"]))
            models.append({"name": model.name, **counts, **shares, "gpus": placed})
        for g, (gpu, used, load) in enumerate(zip(self.cluster.gpus, self.memory, self.load, strict=True)):
            holds = [layout.name(int(i)) for i in np.flatnonzero(self.gpu_of == g)]
            memory = {"memory_bytes": gpu.memory, "used_bytes": float(used)}
            gpus.append({"name": gpu.name, "host": gpu.host, **memory, "load": float(load), "holds": holds})
        names = ("most_load", "transfer_s", "bound_s", "gap", "how", "num_choices", "seconds")
        fields = {name: getattr(self, name) for name in names}
        return {"rate": layout.rate, **fields, "models": models, "gpus": gpus}


def plan(
    models: Sequence[ServedModel],
    flow: Flow,
    cluster: Cluster,
    rate: float,
    batch: int = 1,
    most_load: float = MOST_LOAD,
    time_limit: float = 10.0,
) -> Plan:
    """Find the placement that serves ``rate`` requests/s with least transfer.

    ``batch``: requests that enter together (§V-C). Raises InputError with each GPU's shortage where nothing fits.
    """
    check_limits(batch, most_load, time_limit)
    begun = time.perf_counter()
    choices = list(layouts(models, flow, cluster, rate, batch, most_load))
    placed = _by_search(choices, cluster, most_load, begun, time_limit)
    placed = placed or _last_resort(choices, cluster, most_load, time_limit)
    placed = _by_program(placed, begun + time_limit)
    return replace(placed, num_choices=len(choices), seconds=time.perf_counter() - begun)


def most_rate(
    models: Sequence[ServedModel],
    flow: Flow,
    cluster: Cluster,
    batch: int = 1,
    most_load: float = MOST_LOAD,
    time_limit: float = 10.0,
) -> float:
    """Return the highest rate, requests/s, for which a placement is found, to 1 %.

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

    full_batch_s = [model.seconds(model.max_batch) / model.max_batch for model in models]
    work = sum(share * seconds for share, seconds in zip(flow.visits, full_batch_s, strict=True))
    low, high = 1e-6, len(cluster.gpus) * most_load / work * 1.01  # all GPUs at most_load
    if not fits(low):
        plan(models, flow, cluster, low, batch, most_load, time_limit=time_limit)  # raises, with each GPU's shortage
    while high / low > 1.01 and time.perf_counter() - begun < time_limit:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _packs(layout: Layout, cluster: Cluster, most_load: float) -> bool:
    if not _has_room(layout, cluster, most_load):
        return False
    return any(PlacementState(layout, cluster, most_load).greedy(order) for order in orders(layout, cluster))


def _has_room(layout: Layout, cluster: Cluster, most_load: float) -> bool:
    """Tell whether the cluster's memory and time are enough in sum (Algorithm 3, line 6)."""
    partitions = layout.replicas * layout.partitions
    memory, load = float(partitions @ layout.memory), float(partitions @ layout.load)
    return memory <= cluster.memory.sum() * (1 + 1e-9) and load <= most_load * len(cluster.gpus) * (1 + 1e-9)


def _by_search(
    choices: list[Layout], cluster: Cluster, most_load: float, begun: float, time_limit: float
) -> Plan | None:
    """Return the best choice's placement by search: starts for every choice, then the remaining time for the best.

    None where no start fits.
    """
    small = all(len(layout.items) * len(cluster.gpus) <= SMALL for layout in choices)
    starts = []
    for layout in choices:
        if time.perf_counter() - begun > STARTS_SHARE * time_limit and starts:
            break
        if _has_room(layout, cluster, most_load):
            assigned = assign(layout, cluster, most_load, 0.0 if small else math.inf, begun + time_limit)
            if assigned:
                starts.append((assigned[0], layout, assigned[1]))
    if not starts:
        return None
    least = min(cost for cost, _, _ in starts) * (1 + LEAST_GAIN)
    cost, layout, gpu_of = next(start for start in starts if start[0] <= least)  # of equals the fewest partitions
    now = time.perf_counter()
    share = SEARCH_SHARE if len(gpu_of) * len(cluster.gpus) <= BOUNDED else 1.0
    assigned = assign(layout, cluster, most_load, 0.0, now + share * (begun + time_limit - now))
    if assigned and assigned[0] < cost:
        cost, gpu_of = assigned
    return Plan(layout, cluster, most_load, gpu_of, cost)


def _by_program(placed: Plan, until: float) -> Plan:
    """Return ``placed`` with the binary program's bound, or a placement of less transfer that its solver finds."""
    layout, cluster, most_load = placed.layout, placed.cluster, placed.most_load
    if placed.transfer_s <= 0:
        return replace(placed, bound_s=0.0)
    if len(placed.gpu_of) * len(cluster.gpus) > BOUNDED:
        return placed
    below = placed.transfer_s * (1 - LEAST_GAIN)
    solved = solve_exactly(layout, cluster, most_load, until - time.perf_counter(), below)
    if solved.gpu_of is not None and solved.cost < below:
        return Plan(layout, cluster, most_load, solved.gpu_of, solved.cost, solved.bound, how="binary program")
    return replace(placed, bound_s=placed.transfer_s if solved.bound >= below else solved.bound)


def _last_resort(choices: list[Layout], cluster: Cluster, most_load: float, time_limit: float) -> Plan:
    """Find a placement by an integer program; raises InputError with the first choice's shortages."""
    lacking = []
    for layout in choices:
        texts, gpu_of = shortages(layout, cluster, most_load, max(2.0, time_limit))
        if gpu_of is not None:
            return Plan(layout, cluster, most_load, gpu_of, transfer_s(layout, cluster, gpu_of))
        lacking.append(texts)
    raise InputError(_infeasible(choices[0], cluster, most_load, lacking[0]))


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
    check("batch", batch, is_integer(batch) and batch >= 1, "a whole number >= 1")
    if not 0 < most_load <= 1:
        raise InputError(f"the most load of a GPU is {most_load!r}; it must lie in (0, 1]")
    check("time_limit", time_limit, time_limit > 0, "seconds > 0")


def describe(plan: Plan) -> str:
    """Return a plan as text: models, GPUs, and its distance from the least transfer."""
    lines = [f"{plan.cluster.describe()}; {plan.layout.rate:.4g} requests/s"]
    for row in plan.to_dict()["models"]:
        if row["replicas"]:
            cut = f" of {row['partitions']} partitions" if row["partitions"] > 1 else ""
            placed = "; ".join(", ".join(replica) for replica in row["gpus"][:4])
            more = f"; and {row['replicas'] - 4} more" if row["replicas"] > 4 else ""
            lines.append(
                f"  {row['name']:12s} {row['visits']:6.1%} of requests, {row['replicas']} replica"
                f"{'s' * (row['replicas'] > 1)}{cut}, batches of {row['batch']}: {placed}{more}"
            )
        else:
            lines.append(f"  {row['name']:12s} is not deployed: no request reaches it")
    used = plan.gpu_of
    busy, full = plan.load, plan.memory / plan.cluster.memory
    lines.append(f"  {len(set(used.tolist()))} GPUs used; the busiest {busy.max():.0%}, the fullest {full.max():.0%}")
    if plan.gap is None:
        proof = "too many placements for a bound on the least"
    else:
        proof = "proved least" if plan.gap < 1e-6 else f"at most {plan.gap:.1%} above the least ({plan.bound_s:.4g})"
    lines.append(
        f"  transfers {plan.transfer_s:.4g} s a request, {proof}; by {plan.how}, {plan.num_choices} choices of "
        f"replicas and partitions, {plan.seconds:.2f} s"
    )
    if len(set(used.tolist())) < len(plan.load):
        lines.append("  latency is not weighed: models on a GPU wait for each other; a lower --most-load spreads them")
    return "\n".join(lines)
