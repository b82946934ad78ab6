"""Solves the binary program of §V with PuLP and HiGHS for small cases, and finds what a cluster lacks.

The products of Eq. 2 are linearised. T has only three values (same GPU, same host, network), so a pair of items needs
no variable for every two GPUs, but only for "both on this GPU" and "both on this host".
"""

import math
from typing import Any, NamedTuple

import numpy as np

from flexhybrid.cascade.cluster.served import Cluster
from flexhybrid.cascade.placement.instances import Layout
from flexhybrid.core.units import gib


class ExactPlacement(NamedTuple):
    """The solver's result."""

    cost: float  #: seconds of transfer per request; infinite without a placement
    bound: float  #: lower bound on the cost; equal to the cost if the solver finished
    gpu_of: np.ndarray | None  #: [items], GPU of each; None without a placement


def binary_program(layout: Layout, cluster: Cluster, most_load: float):
    """Return the program of Eqs. 2 to 4, its variables x[item][GPU], and the scale of the objective.
    Rows are named after their equations."""
    import pulp

    gpus, hosts = range(len(cluster.gpus)), cluster.hosts
    items, num_hosts = range(len(layout.items)), int(cluster.hosts.max()) + 1
    problem = pulp.LpProblem("placement", pulp.LpMaximize)
    x = [[problem.add_variable(f"x_{i}_{g}", cat=pulp.LpBinary) for g in gpus] for i in items]
    for i in items:
        problem += pulp.lpSum(x[i]) == 1, f"eq3_once_{i}"
    unit = float(cluster.memory.max())
    for g in gpus:
        problem += (
            pulp.lpSum(layout.item_memory[i] / unit * x[i][g] for i in items) <= cluster.memory[g] / unit,
            f"eq3_memory_{g}",
        )
        problem += pulp.lpSum(layout.item_load[i] * x[i][g] for i in items) <= most_load, f"eq4_load_{g}"
    saved = []
    scale = max(float(cluster.network_s_per_byte * layout.traffic.max()), 1e-300)  # so that costs are near 1
    for i, j in zip(*np.nonzero(layout.traffic), strict=True):
        weight = float(layout.traffic[i, j]) / scale
        for g in gpus:
            same = problem.add_variable(f"same_gpu_{i}_{j}_{g}", 0, 1)
            problem += same <= x[i][g], f"product_{i}_{j}_gpu_{g}_first"
            problem += same <= x[j][g], f"product_{i}_{j}_gpu_{g}_second"
            saved.append(weight * cluster.host_s_per_byte * same)
        for h in range(num_hosts):
            same = problem.add_variable(f"same_host_{i}_{j}_{h}", 0, 1)
            of_host = np.flatnonzero(hosts == h)
            problem += same <= pulp.lpSum(x[i][g] for g in of_host), f"product_{i}_{j}_host_{h}_first"
            problem += same <= pulp.lpSum(x[j][g] for g in of_host), f"product_{i}_{j}_host_{h}_second"
            saved.append(weight * (cluster.network_s_per_byte - cluster.host_s_per_byte) * same)
    problem += pulp.lpSum(saved), "eq2_transfer_saved"
    return problem, x, scale


def solve_exactly(
    layout: Layout, cluster: Cluster, most_load: float, time_limit: float, below: float = math.inf
) -> ExactPlacement:
    """Return the placement of least transfer among those that cost less than ``below``.

    The bound is HiGHS's dual bound; infinite if the program is proved infeasible.
    """
    import pulp

    problem, x, scale = binary_program(layout, cluster, most_load)
    all_apart = cluster.network_s_per_byte * float(layout.traffic.sum())
    if below < math.inf:
        saved: Any = problem.objective
        problem += saved >= (all_apart - below) / scale, "less_transfer"
    proved = _solve(problem, time_limit, gapRel=1e-9)
    if proved is None and problem.status == pulp.LpStatusInfeasible:
        return ExactPlacement(math.inf, math.inf, None)
    highs: Any = problem.solverModel  # PuLP types it as None
    most_saved = -highs.getInfo().mip_dual_bound * scale  # PuLP has HiGHS minimise the negative
    bound = max(0.0, min(below, all_apart - most_saved))
    if proved is None:
        return ExactPlacement(math.inf, bound, None)
    gpu_of = np.array([np.argmax([variable.value() or 0.0 for variable in row]) for row in x])
    cost = transfer_s(layout, cluster, gpu_of)
    return ExactPlacement(cost, cost if proved else min(cost, bound), gpu_of)


def _solve(problem, time_limit: float, **options) -> bool | None:
    """Run HiGHS; return whether its values are proved optimal, None if it has none."""
    import pulp

    problem.solve(pulp.HiGHS(msg=False, timeLimit=max(0.1, time_limit), threads=1, **options))
    if problem.sol_status == pulp.LpSolutionOptimal:
        return True
    # After a time limit PuLP reports a feasible solution, even without values.
    has_values = problem.sol_status == pulp.LpSolutionIntegerFeasible and problem.solverModel.getSolution().value_valid
    return False if has_values else None


def transfer_s(layout: Layout, cluster: Cluster, gpu_of: np.ndarray) -> float:
    """Return Eq. 2, Σ traffic · T(g, g'): seconds of transfer a request."""
    return float((layout.traffic * cluster.s_per_byte()[np.ix_(gpu_of, gpu_of)]).sum())


def shortages(
    layout: Layout, cluster: Cluster, most_load: float, time_limit: float
) -> tuple[list[str] | None, np.ndarray | None]:
    """Place all items with the least sum of shortages; return texts about shortages, and the GPU of each item.

    The list is None if the solver did not finish; the GPUs are None if there are shortages. Equal items are counted
    (n[kind][GPU]), so that the program stays small for hundreds of GPUs.
    """
    import pulp

    kinds, first = np.unique(layout.items[:, [0, 2]], axis=0, return_index=True)
    gpus, unit = range(len(cluster.gpus)), float(cluster.memory.max())
    problem = pulp.LpProblem("shortages", pulp.LpMinimize)
    count = [[problem.add_variable(f"n_{k}_{g}", 0, cat=pulp.LpInteger) for g in gpus] for k in range(len(kinds))]
    lack = [[problem.add_variable(f"lack_{resource}_{g}", 0) for g in gpus] for resource in ("memory", "load")]
    for k, (model, _) in enumerate(kinds):
        problem += pulp.lpSum(count[k]) == int(layout.replicas[model]), f"eq3_all_{k}"
    for g in gpus:
        used = pulp.lpSum(layout.item_memory[i] / unit * count[k][g] for k, i in enumerate(first))
        problem += used - lack[0][g] <= float(cluster.memory[g]) / unit, f"eq3_memory_{g}"
        used = pulp.lpSum(layout.item_load[i] * count[k][g] for k, i in enumerate(first))
        problem += used - lack[1][g] <= most_load, f"eq4_load_{g}"
    problem += pulp.lpSum(lack[0] + lack[1]), "lacking"
    proved = _solve(problem, time_limit)
    if proved is None:
        return None, None
    texts = []
    for g in gpus:
        memory, load = (float(shortage[g].value() or 0.0) for shortage in lack)
        if memory > 1e-6:
            texts.append(f"{cluster.gpus[g].name} lacks {gib(memory * unit)} of memory")
        if load > 1e-6:
            texts.append(f"{cluster.gpus[g].name} lacks {load:.3g} of a GPU's time")
    if texts and not proved:
        return None, None
    return texts, None if texts else _spread(layout, kinds, count)


def _spread(layout: Layout, kinds: np.ndarray, count) -> np.ndarray:
    """Return the GPU of each item from the solved counts by kind."""
    gpu_of = np.zeros(len(layout.items), dtype=int)
    for k, (model, partition) in enumerate(kinds):
        items = np.flatnonzero((layout.items[:, 0] == model) & (layout.items[:, 2] == partition))
        gpu_of[items] = [g for g, variable in enumerate(count[k]) for _ in range(round(variable.value() or 0.0))]
    return gpu_of
