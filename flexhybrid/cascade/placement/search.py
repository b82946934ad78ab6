"""Algorithm 3 (§V): places every partition of every replica of a cascade's models on a GPU.

For each promising choice (R, S) of replicas and partitions, a search finds a placement with little transfer within the
GPUs' memory and time. If the binary program of the best choice is small enough, its solver then improves that
placement, or gives a bound on how much better another one can be.
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

MOST_LOAD = 0.8  #: highest kernel utilisation of a GPU; Eq. 4 has 1, at which queues grow without end
SMALL = 160  #: items x GPUs up to which every choice (R, S), not only the best one, gets a full search
BOUNDED = 640  #: items x GPUs up to which the binary program is solved; above, its bound would be near 0
STARTS_SHARE = 0.3  #: share of the time for choosing (R, S)
SEARCH_SHARE = 0.3  #: share of the remaining time for the search, if the binary program follows
LEAST_GAIN = 1e-6  #: share of the transfer time below which a gain does not count


@dataclass(frozen=True, eq=False)
class Plan:
    """A placement of a cascade."""

    layout: Layout
    cluster: Cluster
    most_load: float
    gpu_of: np.ndarray  #: [items], GPU of each of ``layout.items``
    transfer_s: float  #: seconds of transfer per request (Eq. 2)
    bound_s: float | None = None  #: lower bound on transfer_s for these replicas and partitions; None: unknown
    how: str = "search"  #: or "binary program"
    num_choices: int = 1  #: number of choices (R, S) that were evaluated
    seconds: float = 0.0  #: time of the search

    @property
    def gap(self) -> float | None:
        """The share, 0..1, by which transfer_s may exceed the minimum; None without a bound."""
        if self.transfer_s <= 0:
            return 0.0
        return None if self.bound_s is None else max(0.0, 1 - self.bound_s / self.transfer_s)

    @property
    def memory(self) -> np.ndarray:
        """The used bytes of each GPU [GPUs]."""
        return np.bincount(self.gpu_of, self.layout.item_memory, len(self.cluster.gpus))

    @property
    def load(self) -> np.ndarray:
        """The kernel utilisation of each GPU [GPUs]."""
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
    """Return a placement for ``rate`` requests/s with the least transfer found.

    ``batch``: requests that enter together (§V-C). Raise InputError with the GPUs' shortages if nothing fits.
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
    """Return the highest rate in requests/s for which a placement is found, to 1 %.

    Raise InputError if a model does not fit, even at one request in a million seconds.
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
        plan(models, flow, cluster, low, batch, most_load, time_limit=time_limit)  # raises InputError
    while high / low > 1.01 and time.perf_counter() - begun < time_limit:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _packs(layout: Layout, cluster: Cluster, most_load: float) -> bool:
    """Return whether a greedy start places all items."""
    if not _has_room(layout, cluster, most_load):
        return False
    return any(PlacementState(layout, cluster, most_load).greedy(order) for order in orders(layout, cluster))


def _has_room(layout: Layout, cluster: Cluster, most_load: float) -> bool:
    """Return whether the cluster's total memory and time are enough (Algorithm 3, line 6)."""
    partitions = layout.replicas * layout.partitions
    memory, load = float(partitions @ layout.memory), float(partitions @ layout.load)
    return memory <= cluster.memory.sum() * (1 + 1e-9) and load <= most_load * len(cluster.gpus) * (1 + 1e-9)


def _by_search(
    choices: list[Layout], cluster: Cluster, most_load: float, begun: float, time_limit: float
) -> Plan | None:
    """Return the best placement found by search; None if no greedy start fits.

    Greedy starts of every choice decide which choice gets the remaining time.
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
    cost, layout, gpu_of = next(start for start in starts if start[0] <= least)  # the fewest partitions if equal
    now = time.perf_counter()
    share = SEARCH_SHARE if len(gpu_of) * len(cluster.gpus) <= BOUNDED else 1.0
    assigned = assign(layout, cluster, most_load, 0.0, now + share * (begun + time_limit - now))
    if assigned and assigned[0] < cost:
        cost, gpu_of = assigned
    return Plan(layout, cluster, most_load, gpu_of, cost)


def _by_program(placed: Plan, until: float) -> Plan:
    """Return ``placed`` with the bound of the binary program, or a better placement found by its solver."""
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
    """Return a placement by an integer program. Raise InputError with the first choice's shortages if there is none."""
    lacking = []
    for layout in choices:
        texts, gpu_of = shortages(layout, cluster, most_load, max(2.0, time_limit))
        if gpu_of is not None:
            return Plan(layout, cluster, most_load, gpu_of, transfer_s(layout, cluster, gpu_of))
        lacking.append(texts)
    raise InputError(_infeasible(choices[0], cluster, most_load, lacking[0]))


def _infeasible(layout: Layout, cluster: Cluster, most_load: float, lacking: list[str] | None) -> str:
    """Return the message that nothing fits. ``lacking``: texts about shortages; None: unknown."""
    partitions = layout.replicas * layout.partitions
    needs = (
        f"{len(layout.items)} partitions need {gib(float(partitions @ layout.memory))} and "
        f"{float(partitions @ layout.load):.3g} GPUs' time; there are {gib(cluster.memory.sum())} and "
        f"{len(cluster.gpus)} GPUs, of which each may be busy for {most_load:.0%} of the time"
    )
    if lacking is None:
        return f"no placement found for {layout.rate:.4g} requests/s within the time limit: {needs}"
    shown = lacking[:3] + ([f"and {len(lacking) - 3} more GPUs"] if len(lacking) > 3 else [])
    return f"no placement for {layout.rate:.4g} requests/s: {'; '.join(shown)} ({needs})"


def check_limits(batch: int, most_load: float, time_limit: float) -> None:
    """Raise InputError for impossible limits."""
    check("batch", batch, is_integer(batch) and batch >= 1, "a whole number >= 1")
    if not 0 < most_load <= 1:
        raise InputError(f"the most load of a GPU is {most_load!r}; it must be in (0, 1]")
    check("time_limit", time_limit, time_limit > 0, "seconds > 0")


def describe(plan: Plan) -> str:
    """Return a plan as text: models, GPUs, and the distance from the optimum."""
    lines = [f"{plan.cluster.describe()}; {plan.layout.rate:.4g} requests/s"]
    for row in plan.to_dict()["models"]:
        if row["replicas"]:
            cut = f" in {row['partitions']} partitions" if row["partitions"] > 1 else ""
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
        proof = "too large for an optimality bound"
    else:
        proof = "optimal" if plan.gap < 1e-6 else f"at most {plan.gap:.1%} above the optimum ({plan.bound_s:.4g})"
    lines.append(
        f"  transfers {plan.transfer_s:.4g} s per request, {proof}; by {plan.how}, {plan.num_choices} choices of "
        f"replicas and partitions, {plan.seconds:.2f} s"
    )
    if len(set(used.tolist())) < len(plan.load):
        lines.append("  not optimised for latency: models on one GPU wait for each other; lower --most-load to spread")
    return "\n".join(lines)
