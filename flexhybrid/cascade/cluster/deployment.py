"""A plan as the cluster runs it: servers, hops and their capacity."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from flexhybrid.cascade.cluster.served import Cluster, Flow, ServedModel
from flexhybrid.cascade.placement.search import Plan
from flexhybrid.core.errors import InputError, check


@dataclass(frozen=True, eq=False)
class Deployment:
    """``gpus[m][r][s]``: GPU of partition s of replica r of model m. Models that no request visits have no replica.

    ``hop_s[i][j]``: from model i to j, for a batch's requests that go on; ``hidden_s[m][r][s]``: seconds a request from
    partition s to s + 1.
    """

    models: tuple[ServedModel, ...]
    flow: Flow
    num_gpus: int
    gpus: tuple[tuple[tuple[int, ...], ...], ...]
    hop_s: np.ndarray
    hidden_s: tuple[tuple[tuple[float, ...], ...], ...]

    def rho(self, rate: float) -> float:
        """Return the utilisation of the busiest GPU with full batches and the best shares of each model's replicas.

        At 1 or above queues grow without end. The shares come from a small linear program.
        """
        from scipy.optimize import linprog

        visits = self.flow.visits
        replicas = [(m, r) for m, model in enumerate(self.gpus) for r in range(len(model))]
        columns = len(replicas) + 1
        busy, shares = np.zeros((self.num_gpus, columns)), np.zeros((len(self.models), columns))
        for column, (m, r) in enumerate(replicas):
            model = self.models[m]
            work = rate * visits[m] * model.seconds(model.max_batch) / model.max_batch / len(self.gpus[m][r])
            for g in self.gpus[m][r]:
                busy[g, column] += work
            shares[m, column] = 1.0
        used = [m for m, model in enumerate(self.gpus) if model]
        if lost := [self.models[m].name for m in range(len(self.models)) if visits[m] > 0 and m not in used]:
            raise InputError(f"requests go to {lost[0]}, which lies on no GPU")
        busy[:, -1] = -1.0
        scale = max(float(busy[:, :-1].max()), 1e-300)
        busy[:, :-1] /= scale
        least = np.append(np.zeros(columns - 1), 1.0)
        result = linprog(least, busy, np.zeros(self.num_gpus), shares[used], np.ones(len(used)), method="highs")
        return float(result.fun) * scale

    def capacity(self) -> float:
        """Return the requests/s at which the busiest GPU has no time left."""
        return 1.0 / self.rho(1.0)


def deploy(plan: Plan, router_s: float = 0.0) -> Deployment:
    """Deploy a plan, with the batches for which it keeps memory. ``router_s``: the router's seconds, a hop."""
    layout, gpus, models = plan.layout, [], []
    for m, (model, batch) in enumerate(zip(layout.models, layout.batch, strict=True)):
        gpus.append([list(map(int, replica)) for replica in plan.gpus_of(m)] if layout.replicas[m] else [])
        models.append(replace(model, max_batch=int(batch)))
    return place(models, layout.flow, plan.cluster, gpus, router_s)


def place(
    models: Sequence[ServedModel],
    flow: Flow,
    cluster: Cluster,
    gpus: Sequence[Sequence[Sequence[int]]],
    router_s: float = 0.0,
) -> Deployment:
    """Deploy models on the GPUs ``gpus[m][r][s]``."""
    check("router_s", router_s, 0 <= router_s < float("inf"), "a number of seconds >= 0")
    table = cluster.s_per_byte()
    placed = tuple(tuple(tuple(replica) for replica in model) for model in gpus)
    hop_s = np.zeros((len(models), len(models)))
    for i, model in enumerate(models):
        for j in range(i + 1, len(models)):
            if placed[i] and placed[j]:  # the mean over replicas: a model has one queue
                last, first = [r[-1] for r in placed[i]], [r[0] for r in placed[j]]
                hop_s[i, j] = router_s + model.output_bytes * float(table[np.ix_(last, first)].mean())
    hidden_s = tuple(
        tuple(tuple(model.hidden_bytes * float(table[pair]) for pair in pairwise(replica)) for replica in replicas)
        for model, replicas in zip(models, placed, strict=True)
    )
    return Deployment(tuple(models), flow, len(cluster.gpus), placed, hop_s, hidden_s)
