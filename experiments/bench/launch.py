"""Bench rows of what a task costs beside its work: planning, handing over, and the Python of the verbs.

The verbs are timed on a model so small that their products take no time: what is left is what a launcher spends on a
GPU too, where each call of torch costs about as much as here. Processor time counts, so that a busy machine does not
show.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from dataclasses import replace

import numpy as np
import torch

from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.shape import ModelShape, shape_by_name
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.dependencies import Dependencies
from flexhybrid.core.task import Access, Task, Work
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.clock import Clock, Lane
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import Weights
from flexhybrid.runtime.threads import torch_threads
from sim.presets import hybrid, kv_only, kvpr_column, token_recompute

BATCH, CONTEXT = 32, 512
BOUND = 8 * (34 * 16 + 1)
PLANNING_BAR_US, HAND_OFF_BAR_US, POSITION_BAR_US = 10, 50, 1000
REPEATS = 5
#: Contexts are short, so that nothing takes long but calling; lengths differ, so that masks count.
SHORT = Workload(48 + np.arange(8), np.full(8, 24))

TINY = ModelShape("opt-launch", "opt", num_layers=2, hidden=64, num_heads=1, num_kv_heads=1, head_dim=64, ffn=64,
                  vocab=64, max_positions=2048)  # fmt: skip
_MACHINE = Hardware(
    "launch", "cpu", {"compute": Line(s_per_flop=1e-11, s_per_byte=1e-11), "h2d": Line(s_per_byte=1e-9)}
)


def policies() -> list[Policy]:
    """One of each kind of stream."""
    half = Placement(device=0.5, host=0.5)
    return [
        hybrid(0.5, BOUND), replace(hybrid(0.5, BOUND, half), name="device and host", cache={
            "act@device": 0.25, "act@host": 0.25, "kv@device": 0.25, "kv@host": 0.25
        }),
        kvpr_column("pipeline", max_mini_batch_tokens=BOUND),
        replace(hybrid(0.5, BOUND), name="4 bits", bits=Bits(weights=4, kv=4, act=4)),
        replace(kv_only(BOUND), name="attention on the host", attention="host"),
        token_recompute(0.25, BOUND),
    ]  # fmt: skip


def bench_launch(table) -> None:
    bench_planning(table)
    bench_hand_off(table)
    with torch_threads(1):
        bench_verbs(table)


def wave_of(shape: ModelShape, policy: Policy, max_tokens: int) -> Wave:
    problem = Problem(shape=shape, dtype="float16", hardware=_MACHINE)
    return admit(problem, policy, Workload.uniform(BATCH, CONTEXT, max_tokens))


def bench_planning(table) -> None:
    """The stream and its dependencies, microseconds a task: the slowest kind of policy. A step is laid out once for all
    layers, so that their number counts: OPT-6.7B's."""
    shape, found = shape_by_name("opt-6.7b"), {}
    for policy in policies():
        times = []
        for _ in range(REPEATS):
            wave, dependencies, count = wave_of(shape, policy, 8), Dependencies(), 0
            start = time.thread_time()
            for task in stream(wave):
                dependencies.add(task)
                count += 1
            times.append((time.thread_time() - start) / count * 1e6)
        found[policy.name] = min(times)
    name = f"planning and dependencies, a task of {shape.num_layers} layers: slowest of {len(found)} kinds of policy"
    table.add(name, max(found.values()), PLANNING_BAR_US, "µs", False, by_policy=found)


def bench_hand_off(table) -> None:
    """A chain that changes lanes at every task: each hand-off wakes another thread."""
    lanes, cell = ("h2d", "compute", "d2h"), Access(("cell",), 0, 1)
    chain = [Task(i, 0, 0, "work", lanes[i % 3], Work(), (cell,), (cell,)) for i in range(3000)]
    trace = Clock([Lane(name, lambda task: None) for name in lanes]).run(chain)
    gaps = [later.start_s - earlier.end_s for earlier, later in zip(trace, trace[1:], strict=False)]
    table.add("hand-off to another CPU worker, median", statistics.median(gaps) * 1e6, HAND_OFF_BAR_US, "µs", False)


def bench_verbs(table) -> None:
    """Of a mini-batch in one layer of a decode, microseconds that its verbs spend on the lane that computes."""
    found: dict[str, dict[str, float]] = {}
    steps = {}
    for policy in policies():
        times = defaultdict(list)
        policy = replace(policy, max_mini_batch_tokens=4 * 200)
        weights = Weights(TINY, RandomWeights(TINY), "float32", torch.device("cpu"), policy)
        with Session.of(weights, policy, SHORT, hardware=_MACHINE) as session:
            for task in stream(session.wave, first_iteration=1):
                start = time.thread_time()
                session.executor.perform(task)
                times[task.resource, task.verb].append(1e6 * (time.thread_time() - start))
        once = ("embed", "head", "sample")
        found[policy.name] = {
            verb: statistics.median(of) for (resource, verb), of in times.items()
            if resource == "compute" and verb not in once
        }  # fmt: skip
        steps[policy.name] = sum(statistics.median(times["compute", verb]) for verb in once)
    sums = {name: sum(verbs.values()) for name, verbs in found.items()}
    slowest = max(sums, key=sums.get)
    name = f"launch: verbs of a mini-batch in a layer, slowest of {len(sums)} kinds of policy ({slowest})"
    table.add(name, sums[slowest], POSITION_BAR_US, "µs", False, by_verb=found)
    slowest = max(steps, key=steps.get)
    table.add(f"launch: embed, head and sample of a mini-batch ({slowest})", steps[slowest], POSITION_BAR_US, "µs",
              False, by_policy=steps)  # fmt: skip
