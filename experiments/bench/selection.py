"""Bench rows of InfiniGen's selection on a paced link: what it gains over the full cache, and what it costs itself.

Weights are resident, the cache lies on the host. Layers 0 and 1 look at all tokens, so that a small share moved takes
many layers: 32 here, as OPT-6.7B has, and of the others as many tokens as the paper counts at 2,048 (73). The cache is
not a prompt's: a prefill of 32 layers would take minutes and says nothing about the decode. It is filled with noise, as
are the partial keys and queries, so that each head chooses tokens of its own all over the context.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from functools import partial

import torch
from tqdm import tqdm

from experiments.bench.overlap import LAST
from experiments.bench.rounds import least_disturbed, undisturbed
from flexhybrid.core.context.selection import INFINIGEN_TOKENS
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import problem_of
from flexhybrid.core.trace import TraceEvent, Window, check_trace
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.profile.job import TIMING_SHAPE
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.executor import Executor
from flexhybrid.runtime.profiling.cpu_use import MOST_OTHERS
from flexhybrid.runtime.profiling.profile import ProfileRun, profile
from flexhybrid.runtime.selections.speculative import Speculation
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import Weights
from policy_search.fit import fit_hardware
from sim import virtual_clock
from sim.presets import infinigen, offloaded

SHAPE = replace(TIMING_SHAPE, num_layers=32)
BATCH, PROMPT, MAX_TOKENS = 8, 2040, 6
WORKLOAD = Workload.uniform(BATCH, PROMPT, MAX_TOKENS)
RATE = 1.0  #: GB/s of the link
ROUNDS = 3
MOST_MOVED = 0.10  #: of the context's keys and values, over all layers
CAP = INFINIGEN_TOKENS[1][-1] / INFINIGEN_TOKENS[0][-1]
OWN_COST = ("speculate", "store_index", "gather")  #: what a selection does beside what the full cache does

#: What a cost line holds for: sizes on both sides of the bench's own.
PROFILED = tuple(
    ProfileRun(requests, context, requests, {"kv@host": 1.0}, other)
    for other in ({}, {"selection": infinigen(math.inf, cap=4 * CAP, whole_layers=1).selection})
    for requests, context in ((4, 512), (4, 2040), (8, 1024))
)


@dataclass(frozen=True)
class Measured:
    """Medians over rounds, of the decode's iterations but the first and the last."""

    tokens_per_s: float
    moved: float  #: share of the context's keys and values that crossed to the device
    own_s: dict[str, float]  #: seconds of each of OWN_COST an iteration
    step_s: float
    bad_traces: int
    others_cpu_share: list[float]


def policies() -> dict[str, Policy]:
    return {"full cache": offloaded(overlap=True), "InfiniGen": infinigen(math.inf, cap=CAP)}


def fill(executor: Executor) -> None:
    """What a prefill would leave, as far as time depends on it: pages that are there, and choices that differ."""
    for pool in executor.buffers.pools.values():
        pool.fill_(0.01)
    if isinstance(executor.selection, Speculation):
        copies = executor.selection.partial
        for table in (copies.keys, copies.query_weights):
            table.normal_()
        columns = torch.rand(*copies.columns.shape[:-1], executor.shape.head_dim).argsort(-1)
        copies.columns.copy_(columns[..., : copies.num_columns].sort(-1).values)


def measure(
    policy: Policy, weights: Weights, workload: Workload = WORKLOAD, rounds: int = ROUNDS, rate: float = RATE
) -> Measured:
    """``rate``: GB/s of the link."""
    with Session.of(weights, policy, workload, make_engine=partial(Engine, link_gb_per_s=rate)) as session:
        fill(session.executor)
        done = least_disturbed(undisturbed(session.decode, rounds), rounds)
        wave = session.wave
    windows = [Window(trace, LAST) for _, trace in done]
    bad = sum(bool(check_trace(trace)) for _, trace in done)
    step_s = statistics.median(window.seconds / window.num_iterations for window in windows)
    own_s = {verb: statistics.median(seconds_of(window, verb) for window in windows) for verb in OWN_COST}
    return Measured(
        workload.num_requests / step_s, moved_share(windows[0], wave), own_s, step_s, bad, [share for share, _ in done]
    )


def seconds_of(window: Window, verb: str) -> float:
    """Of a verb's tasks, an iteration."""
    seconds = (
        end - start for task, start, end in window.trace if task.verb == verb and window.begin_s < end < window.end_s
    )
    return sum(seconds) / window.num_iterations


def moved_share(window: Window, wave: Wave) -> float:
    """Bytes of keys and values loaded, over those of the whole context in all layers."""
    loads: list[TraceEvent] = [event for event in window.trace if event.task.verb == "load_kv"]
    whole = sum(
        int(event.task.payload.step.context.sum()) * wave.shape.kv_token_bytes(wave.bytes_per_element)
        for event in loads
    )
    return sum(event.task.work.link_bytes for event in loads) / whole


def bench_selection(table, dtype: str) -> None:
    """InfiniGen against the full cache, the virtual clock against both."""
    device, found, errors = torch.device("cpu"), {}, []
    runs = tqdm(total=2 * len(PROFILED) + 2, unit="run", leave=False)
    samples = profile(SHAPE, dtype, device, RATE, runs.update, PROFILED).samples
    hardware = fit_hardware(samples, name="paced", device="cpu", dtype=dtype).with_link_rate(RATE)
    weights = Weights(SHAPE, RandomWeights(SHAPE), dtype, device, Policy(weights=Placement(device=1.0)))
    try:
        for name, policy in policies().items():
            found[name] = measure(policy, weights)
            runs.update()
            errors.append(100 * abs(found[name].step_s / predicted_step(policy, weights, hardware) - 1))
    finally:
        weights.close()
    full, own = found["full cache"], found["InfiniGen"]
    more = {"layers": SHAPE.num_layers, "rate": RATE, "moved": own.moved, "full_tokens_per_s": full.tokens_per_s,
            "tokens_per_s": own.tokens_per_s}  # fmt: skip
    where = f"InfiniGen, {SHAPE.num_layers} layers of hidden {SHAPE.hidden}, context {PROMPT}, batch {BATCH}"
    table.add(f"{where}: decode over the full cache's", own.tokens_per_s / full.tokens_per_s, 2.0, "x", **more)
    table.add(f"{where}: moved of the cache", 100 * own.moved, 100 * MOST_MOVED, "%", False)
    table.add(f"{where}: virtual clock vs measured, worst of two", max(errors), 10, "%", False)
    table.add("real traces of a selection in which a read saw a wrong version", full.bad_traces + own.bad_traces, 0,
              "traces", False)  # fmt: skip
    disturbed = [share for one in found.values() for share in one.others_cpu_share]
    table.add("selection rounds with others on more than 5 % of the cores", sum(x > MOST_OTHERS for x in disturbed), 0,
              "rounds", False)  # fmt: skip
    parts = ", ".join(f"{verb} {1e3 * seconds:.1f}" for verb, seconds in own.own_s.items())
    tqdm.write(f"     an iteration takes {1e3 * own.step_s:.0f} ms, the full cache's {1e3 * full.step_s:.0f}; of it "
               f"{parts} ms")  # fmt: skip


def predicted_step(policy: Policy, weights: Weights, hardware: Hardware) -> float:
    """Seconds of an iteration on the virtual clock."""
    wave = admit(problem_of(weights.shape, weights.bytes_per_element), policy, WORKLOAD)
    window = Window(virtual_clock.run(stream(wave, first_iteration=1), hardware), LAST)
    return window.seconds / window.num_iterations
