"""Bench rows of InfiniGen's selection on a paced link: its speed over the full cache, and its own cost.

Weights are resident, the cache lies on the host. Layers 0 and 1 attend to all tokens, so that a small moved share takes
many layers: 32, like OPT-6.7B, and in the other layers as many tokens as the paper counts at 2,048 (73). No prompt is
run, since a prefill of 32 layers would take minutes and tells nothing about the decode. The cache, the partial keys and
the queries are filled with noise, so that each head chooses different tokens of the context.
"""

import math
import statistics
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from tqdm import tqdm

from experiments.bench.harness import Table, bench, least_disturbed
from experiments.bench.overlap import LAST
from flexhybrid.core.context.selection import REPORTED, REPORTED_ALPHA, counted_tokens
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.trace import TraceEvent, TraceWindow
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.profile.job import TIMING_SHAPE, fastest_dtype
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.executor import Executor
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
MOST_MOVED = 0.10  #: share of the context's keys and values, over all layers
CAP = counted_tokens()[REPORTED][REPORTED_ALPHA][1][-1] / counted_tokens()[REPORTED][REPORTED_ALPHA][0][-1]
OWN_COST = ("speculate", "store_index", "gather")  #: verbs that the full cache does not have

#: Sizes on both sides of the bench's own, to which the cost lines are fitted.
PROFILED = tuple(
    ProfileRun(requests, context, requests, {"kv@host": 1.0}, other)
    for other in ({}, {"selection": infinigen(math.inf, cap=4 * CAP, whole_layers=1).selection})
    for requests, context in ((4, 512), (4, 2040), (8, 1024))
)


@dataclass(frozen=True)
class SelectionRun:
    """Medians over rounds, without the first and the last decode iteration."""

    tokens_per_s: list[float]  #: of each round
    moved: float  #: share of the context's keys and values that crossed to the device
    own_s: dict[str, float]  #: seconds per iteration of each verb of OWN_COST
    step_s: float  #: seconds per iteration
    others_cpu_share: list[float]


def policies() -> dict[str, Policy]:
    return {"full cache": offloaded(overlap="full"), "InfiniGen": infinigen(math.inf, cap=CAP)}


def fill(executor: Executor) -> None:
    """Fill the cache so that pages are touched and heads choose different tokens."""
    for layer in chain.from_iterable(executor.buffers.pools.values()):
        layer.fill_(0.01)
    if isinstance(executor.selection, Speculation):
        copies = executor.selection.partial
        for table in (copies.keys, copies.query_weights):
            table.normal_()
        for columns in copies.columns:
            order = torch.rand(*columns.shape[:-1], executor.shape.head_dim).argsort(-1)
            columns.copy_(order[..., : copies.num_columns].sort(-1).values)


def measure(
    policy: Policy, weights: Weights, workload: Workload = WORKLOAD, num_rounds: int = ROUNDS, rate: float = RATE
) -> SelectionRun:
    """Decode under a policy; ``rate``: GB/s of the link."""
    with Session.of(weights, policy, workload, make_engine=partial(Engine, link_gb_per_s=rate)) as session:
        fill(session.executor)
        rounds = least_disturbed(session.decode, num_rounds)
        wave = session.wave
    windows = [TraceWindow(done.result, LAST) for done in rounds]
    steps = [window.seconds / window.num_iterations for window in windows]
    return SelectionRun(
        tokens_per_s=[workload.num_requests / step_s for step_s in steps],
        moved=moved_share(windows[0], wave),
        own_s={verb: statistics.median(verb_s(window, verb) for window in windows) for verb in OWN_COST},
        step_s=statistics.median(steps),
        others_cpu_share=[done.others for done in rounds],
    )


def verb_s(window: TraceWindow, verb: str) -> float:
    """Return the seconds per iteration of a verb's tasks that end inside the window."""
    events = (event for event in window.trace if event.task.verb == verb)
    seconds = (end - start for _, start, end in events if window.begin_s < end < window.end_s)
    return sum(seconds) / window.num_iterations


def moved_share(window: TraceWindow, wave: Wave) -> float:
    """Return the bytes of loaded keys and values over those of the full context in all layers."""
    loads: list[TraceEvent] = [event for event in window.trace if event.task.verb == "load_kv"]
    token_bytes = wave.shape.kv_token_bytes(wave.problem.bytes_per_element)
    context_bytes = sum(int(event.task.payload.step.context.sum()) * token_bytes for event in loads)
    return sum(event.task.work.link_bytes for event in loads) / context_bytes


@bench("selection")
def bench_selection(table: Table) -> None:
    """InfiniGen against the full cache, and the virtual clock against both."""
    dtype = fastest_dtype(SHAPE, torch.device("cpu"))
    device, runs, errors = torch.device("cpu"), {}, []
    bar = tqdm(total=2 * len(PROFILED) + 2, unit="run", leave=False)
    samples = profile(SHAPE, dtype, device, RATE, bar.update, PROFILED).samples
    hardware = fit_hardware(samples, name="paced", device="cpu", dtype=dtype).with_link_rate(RATE)
    on_device = Policy(weights=Placement(device=1.0))
    with closing(Weights(SHAPE, RandomWeights(SHAPE), dtype, device, on_device)) as weights:
        for name, policy in policies().items():
            runs[name] = measure(policy, weights)
            bar.update()
            wave = admit(Problem(shape=SHAPE, dtype=dtype), policy, WORKLOAD)
            predicted = TraceWindow(virtual_clock.run(stream(wave, first_iteration=1), hardware), LAST)
            predicted_step_s = predicted.seconds / predicted.num_iterations
            errors.append(100 * abs(runs[name].step_s / predicted_step_s - 1))
    full, own = runs["full cache"], runs["InfiniGen"]
    where = f"InfiniGen, {SHAPE.num_layers} layers of hidden {SHAPE.hidden}, context {PROMPT}, batch {BATCH}"
    conditions = {"layers": SHAPE.num_layers, "rate": RATE, "moved": own.moved}
    conditions |= {"full_tokens_per_s": full.tokens_per_s, "tokens_per_s": own.tokens_per_s}
    table.at_least(f"{where}: decode over the full cache's", full.step_s / own.step_s, 2.0, "x", **conditions)
    table.at_most(f"{where}: moved of the cache", 100 * own.moved, 100 * MOST_MOVED, "%")
    table.at_most(f"{where}: virtual clock vs measured, worst of two", max(errors), 10, "%", samples=errors)
    table.disturbed("selection rounds", [*full.others_cpu_share, *own.others_cpu_share])
    parts = ", ".join(f"{verb} {1e3 * seconds:.1f}" for verb, seconds in own.own_s.items())
    full_ms = f"{1e3 * full.step_s:.0f}"
    tqdm.write(f"     an iteration takes {1e3 * own.step_s:.0f} ms, of which {parts} ms; the full cache's {full_ms} ms")
