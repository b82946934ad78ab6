"""Bench rows of cascades on a cluster: placement, and a million requests."""

import time
from functools import partial

import numpy as np
from tqdm import tqdm

from experiments.bench.harness import Table, seconds_of
from experiments.reproduce.cascade import setup as cascade_setup
from flexhybrid.cascade.cluster.arrivals import poisson
from flexhybrid.cascade.cluster.deployment import deploy
from flexhybrid.cascade.cluster.energy import POWER
from flexhybrid.cascade.cluster.served import BatchLine, ServedModel, chain, even_cluster
from flexhybrid.cascade.cluster.simulation import simulate
from flexhybrid.cascade.placement.search import MOST_LOAD, most_rate, plan

SHAPES = ((64, 1), (16, 4), (8, 8))  #: hosts, GPUs of each
SEEDS = range(4)
PLANNED = 0.9  #: share of the highest rate for which models are placed


def bench_cluster(table: Table) -> None:
    """Add all rows."""
    bench_placement(table)
    bench_million(table)


def ten_models(seed: int):
    """Return ten models of 60 million to 20 billion parameters, seconds and bytes by size, and a flow through them."""
    rng = np.random.default_rng(seed)
    sizes = np.geomspace(0.06, 20, 10) * 1e9 * rng.uniform(0.8, 1.25, 10)
    models = tuple(
        ServedModel(
            f"m{i}",
            BatchLine(2e-3 + size * 1e-12, size * 2.2e-12),
            BatchLine(2 * size + 3e8, size * 2e-3),
            output_bytes=float(rng.uniform(1e3, 1e5)),
            hidden_bytes=float(rng.uniform(1e5, 2e6)),
            max_batch=32,
            max_partitions=8,
        )
        for i, size in enumerate(sizes)
    )
    return models, chain(rng.dirichlet(np.ones(10)).tolist())


def bench_placement(table: Table) -> None:
    """Place ten models on 64 GPUs near their highest rate, ten on 512 GPUs, and the cascade paper's models."""
    cases = [(shape, seed) for shape in SHAPES for seed in SEEDS]
    placements = {}
    for shape, seed in tqdm(cases, desc="placement", leave=False):
        placements[shape, seed] = _placed(*shape, seed)
    for hosts, gpus in SHAPES:
        plans = [placements[(hosts, gpus), seed] for seed in SEEDS]
        name = f"placement, 10 models on {hosts} x {gpus} GPUs, worst of {len(plans)}"
        seconds = [placed.seconds for placed in plans]
        table.at_most(f"{name}: seconds", max(seconds), 12, "s", samples=seconds, items=len(plans[0].gpu_of))
    large = _placed(64, 8, 0)
    table.at_most("placement, 10 models on 64 x 8 GPUs: seconds", large.seconds, 20, "s", items=len(large.gpu_of))
    seconds = []
    for name in cascade_setup.FAMILIES:
        system = cascade_setup.CascadeSystem(name, "EO")
        rate = 0.8 * cascade_setup.highest_rate(system)
        request = *system.models(), cascade_setup.cluster(), rate, cascade_setup.BATCH
        seconds.append(seconds_of(partial(plan, *request)))
    name = "placement, the cascade paper's three on 12 T4s (45 s there, with construction): seconds"
    table.at_most(name, max(seconds), 45, "s", samples=seconds)


def _placed(hosts: int, gpus: int, seed: int):
    models, flow = ten_models(seed)
    cluster = even_cluster(hosts, gpus, 16 * 2**30, 12.0, 1.25)
    rate = most_rate(models, flow, cluster, 64)
    return plan(models, flow, cluster, PLANNED * rate, 64, MOST_LOAD)


def bench_million(table: Table) -> None:
    """Time the simulation of a cascade of four sizes under load, with batches and hops."""
    models = tuple(
        ServedModel(name, BatchLine(2e-3, 1e-3 * times), BatchLine(1e9, 0.0), 1e4, 1e5, max_batch=8)
        for name, times in (("a", 1), ("b", 2), ("c", 5), ("d", 20))
    )
    cluster = even_cluster(3, 4, 2**31, 12.0, 1.25)
    deployment = deploy(plan(models, chain((0.5, 0.3, 0.15, 0.05)), cluster, 1200.0, 64), 1e-4)
    arrivals = poisson(1200.0, 1_000_000)
    begun, cpu_begun = time.perf_counter(), time.process_time()
    simulated = simulate(deployment, arrivals, POWER["t4"])
    seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_begun
    conditions = {"cpu_s": cpu_s, "mean_latency_ms": 1e3 * simulated.mean_latency_s, "rho": simulated.rho}
    table.at_most("cluster simulation, a million requests: seconds", seconds, 60, "s", **conditions)
