"""Deploys a plan on a cluster: the GPUs of each replica, transfer times, and the capacity."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from flexhybrid.cascade.cluster.served import Cluster, Flow, ServedModel
from flexhybrid.cascade.placement.search import Plan
from flexhybrid.core.errors import InputError, check


@dataclass(frozen=True, eq=False)
class Deployment:
    """A cascade on GPUs. Models that no request visits have no replica."""

    models: tuple[ServedModel, ...]
    flow: Flow
    num_gpus: int
    gpus: tuple[tuple[tuple[int, ...], ...], ...]  #: [m][r][s], GPU of partition s of replica r of model m
    hop_s: np.ndarray  #: [i, j], seconds from model i to model j for the requests of a batch that go on
    hidden_s: tuple[tuple[tuple[float, ...], ...], ...]  #: [m][r][s], seconds per request from partition s to s + 1

    def rho(self, rate: float) -> float:
        """Return the utilisation of the busiest GPU at ``rate`` requests/s with full batches.

        From 1 on, queues grow without end. A small linear program chooses each replica's share of its model's requests.
        Raise InputError if a visited model has no GPU.
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
            raise InputError(f"requests go to {lost[0]}, which is on no GPU")
        busy[:, -1] = -1.0
        scale = max(float(busy[:, :-1].max()), 1e-300)
        busy[:, :-1] /= scale
        least = np.append(np.zeros(columns - 1), 1.0)
        result = linprog(least, busy, np.zeros(self.num_gpus), shares[used], np.ones(len(used)), method="highs")
        return float(result.fun) * scale

    def capacity(self) -> float:
        """Return the requests/s at which the busiest GPU is fully used."""
        return 1.0 / self.rho(1.0)


def deploy(plan: Plan, router_s: float = 0.0) -> Deployment:
    """Return the deployment of a plan, with its batch sizes. ``router_s``: seconds of the router per hop."""
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
    """Return the deployment of models on the GPUs ``gpus[m][r][s]`` (model, replica, partition)."""
    check("router_s", router_s, 0 <= router_s < float("inf"), "a number of seconds >= 0")
    table = cluster.s_per_byte()
    placed = tuple(tuple(tuple(replica) for replica in model) for model in gpus)
    hop_s = np.zeros((len(models), len(models)))
    for i, model in enumerate(models):
        for j in range(i + 1, len(models)):
            if placed[i] and placed[j]:  # take the mean over replicas, which share one queue
                last, first = [r[-1] for r in placed[i]], [r[0] for r in placed[j]]
                hop_s[i, j] = router_s + model.output_bytes * float(table[np.ix_(last, first)].mean())
    hidden_s = tuple(
        tuple(tuple(model.hidden_bytes * float(table[pair]) for pair in pairwise(replica)) for replica in replicas)
        for model, replicas in zip(models, placed, strict=True)
    )
    return Deployment(tuple(models), flow, len(cluster.gpus), placed, hop_s, hidden_s)
