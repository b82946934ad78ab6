"""Bench rows of attention that host and device share, where both alone take equally long.

Weights are on the device and the cache is on the host. Layers are narrow and contexts long, so that attention takes
longer than the products. The link's pace is the one at which loading the cache takes as long as the host's attention to
all of it. The device and the host have a core each.
"""

from contextlib import closing
from dataclasses import replace
from functools import partial

import torch

from experiments.bench.harness import Table, bench, least_disturbed
from experiments.bench.overlap import (
    FAST_LINK,
    MINI_BATCH,
    ROUNDS,
    SMALL_HEAD,
    Decode,
    OverlapCase,
    OverlapRun,
    at_rates,
    clock_errors,
    measured_decode,
    profiled,
    usual_decode,
)
from flexhybrid.core.policy import Placement
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.profile.job import fastest_dtype
from flexhybrid.runtime.process_settings import torch_threads
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import Weights
from sim.presets import kv_only

SHAPE = replace(SMALL_HEAD, hidden=256, num_heads=4, num_kv_heads=4, head_dim=64, ffn=256, max_positions=2048)
CONTEXT, MAX_TOKENS = 1536, 6
WORKLOAD = Workload.uniform(16, CONTEXT, MAX_TOKENS)
HOST_SHARES = (0.4, 0.5, 0.6)  #: of the context; the best one counts


@bench("split attention")
def bench_split(table: Table) -> None:
    """Add the gain of the split over the better of both alone, its overlap and the virtual clock's errors."""
    shape, device = SHAPE, torch.device("cpu")
    dtype = fastest_dtype(shape, device)
    plain = replace(kv_only(MINI_BATCH * (CONTEXT + 33)), weights=Placement(device=1.0))
    policies = {"device": plain, "host": replace(plain, name="host", attention="host")}
    for share in HOST_SHARES:
        attention = {"host": share, "device": 1 - share}
        policies[f"{share:.0%} host"] = replace(plain, name=f"{share:.0%} host", attention=attention)
    cases = {name: OverlapCase(name, policy, "h2d", 1, shape, WORKLOAD) for name, policy in policies.items()}
    with torch_threads(1):
        hardware = profiled(dtype, cases["host"])
        with closing(Weights(shape, RandomWeights(shape), dtype, device, plain)) as weights:
            runs = {
                name: OverlapRun(case, weights, at_rates(hardware, {"h2d": FAST_LINK})) for name, case in cases.items()
            }
            (alone,) = least_disturbed(runs["host"].computing_s, 1)
            rates = {"h2d": runs["device"].planned_bytes("h2d") / alone.result["host_compute"] / 1e9}
            found: dict[str, Decode] = {}
            errors, paced = {}, at_rates(hardware, rates)
            for name, run in runs.items():
                run.set_rates(rates)
                rounds = least_disturbed(partial(measured_decode, run, rates), ROUNDS)
                found[name] = usual_decode([done.result for done in rounds])
                errors[name] = clock_errors(run, cases[name], paced, found[name].wall_s)
    seconds = {name: decode.wall_s for name, decode in found.items()}
    best = min((name for name in seconds if name not in ("device", "host")), key=seconds.__getitem__)
    gain = min(seconds["device"], seconds["host"]) / seconds[best]
    conditions = {"seconds": seconds, "rates": rates, "best": best}
    table.at_least("split attention: tokens/s over the better of host and device alone", gain, 1.15, "x", **conditions)
    ideals = found[best].ideal_s
    table.at_least(
        f"overlap, attention of host and device, {best}", max(ideals.values()) / seconds[best], 0.9, "x", ideals=ideals
    )
    before, after = ([pair[at] for pair in errors.values()] for at in (0, 1))
    table.errors(f"split attention: virtual clock vs measured, {len(before)} policies", before, 8, 15)
    table.errors(f"split attention: after trials, {len(after)} policies", after, 8, 15)
