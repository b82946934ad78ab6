"""Bench rows of KVPR's load order on the paced link: W_K and W_V, then ACT, then the rest, against the natural order.

Where all positions of a stream are alike the order changes nothing, because buffers are double. It shows where heavy
and light positions take turns: a layer that sees all tokens then waits for its slot of weights until the one two before
it has ended. The model here has such layers and layers with a window in turn, as Gemma and gpt-oss have.

What a task takes is measured in the very rounds that are judged, so that a machine that others use is no faster in the
prediction than in the run; predicted is what the order makes of it. Each class of tasks has the mean of its own: one
line through KV-Gen of 4 and of 105 ms has the long ones a tenth too cheap, and the gain 4 to 7 points too large. Of
RATES the link has the one where that is most.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace

import torch
from tqdm import tqdm

from experiments.bench.harness import Round, Table, least_disturbed
from flexhybrid.core.hardware import LINKS, Hardware, Line
from flexhybrid.core.model.attention import PLAIN
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.plan import stream
from flexhybrid.core.task import Task
from flexhybrid.core.trace import TraceEvent, Window, check_trace
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.speed import LAST
from flexhybrid.runtime.links import CpuCopies
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import Weights
from policy_search.fit import fit_hardware
from sim import virtual_clock
from sim.presets import kvpr_column

WINDOW, CONTEXT, MAX_TOKENS, BATCH = 32, 768, 7, 8
SHAPE = ModelShape(
    name="alternating",
    family="llama",
    num_layers=6,
    hidden=512,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    ffn=1408,
    vocab=1000,
    max_positions=2048,
    gated_mlp=True,
    rotary=True,
    bias=False,
    attention=tuple(replace(PLAIN, window=(None, WINDOW)[layer % 2]) for layer in range(6)),
)
WORKLOAD = Workload.uniform(BATCH, CONTEXT, MAX_TOKENS)
RATES = (0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8, 1.1)  #: GB/s of the paced link
#: Decides the split points, alike for both orders; nothing else.
NOMINAL = Hardware(
    "nominal",
    "cpu",
    {"compute": Line(4e-5, 1e-11, 1e-10), "h2d": Line(5e-5, 0.0, 1 / 0.14e9), "d2h": Line(5e-5, 0.0, 1 / 0.14e9)},
)
POLICIES = {hiding: kvpr_column("pipeline", hiding, max_mini_batch_tokens=1 << 20) for hiding in (True, False)}
ROUNDS = 31  #: of a quarter of a second for each order: single ones are up to 15 points apart
LEAST_GAIN, MOST_APART = 5.0, 3.0  #: percent; points between what is predicted and what is measured


def gain_of(seconds: dict[bool, float]) -> float:
    """Return how much longer a decode takes without hiding, in percent."""
    return 100 * (seconds[False] / seconds[True] - 1)


Traces = dict[bool, list[TraceEvent]]  #: hiding -> events of a decode


def task_class(task: Task) -> tuple[str, float, float]:
    """Return what tasks of like cost have in common: verb, or link; operations; bytes."""
    if task.resource in LINKS:
        return task.resource, float(task.work.flops), float(task.work.link_bytes)
    return task.verb, float(task.work.flops), float(task.work.memory_bytes)


def class_seconds(traces: Traces) -> dict[tuple[str, float, float], float]:
    """Return the mean seconds of each class of tasks."""
    times = defaultdict(list)
    for task, start, end in (event for trace in traces.values() for event in trace):
        times[task_class(task)].append(end - start)
    return {of: statistics.fmean(seconds) for of, seconds in times.items()}


def measured_lines(traces: Traces) -> Hardware:
    """Return lines through the seconds of each verb's classes of tasks; of the link one line, through all its loads."""
    samples = defaultdict(list)
    for (key, flops, moved), seconds in class_seconds(traces).items():
        samples[key].append((flops, moved, seconds))
    return fit_hardware(samples, name="here", device="cpu")


def predicted_gain(
    sessions: dict[bool, Session], hardware: Hardware, seconds_of: Callable[[Task], float] | None = None
) -> float:
    """Return the gain on the virtual clock, in percent. ``seconds_of``: as ``virtual_clock.run`` has it."""
    gained = {}
    for hiding, session in sessions.items():
        trace = virtual_clock.run(stream(session.wave, first_iteration=1), hardware, seconds_of=seconds_of)
        gained[hiding] = Window(trace, LAST).seconds
    return gain_of(gained)


def bench_load_order(table: Table, dtype: str) -> None:
    """Add the predicted gain, and how far the measured one is from it; the orders are run in turn."""
    name, device = "KVPR, W_K and W_V first, layers that take turns", torch.device("cpu")
    sessions: dict[bool, Session] = {}
    with closing(Weights(SHAPE, RandomWeights(SHAPE), dtype, device, POLICIES[True])) as weights, ExitStack() as stack:
        for hiding, policy in POLICIES.items():
            sessions[hiding] = stack.enter_context(Session.of(weights, policy, WORKLOAD, hardware=NOMINAL))
            sessions[hiding].generate()

        def set_rate(rate: float) -> None:
            for session in sessions.values():
                if isinstance(session.engine.copies, CpuCopies):
                    session.engine.copies.set_rate(rate)

        def one_round() -> Traces:
            return {hiding: session.decode() for hiding, session in sessions.items()}

        set_rate(RATES[-2])
        lines = measured_lines(one_round())
        by_rate = {rate: predicted_gain(sessions, lines.with_link_rate(rate)) for rate in RATES}
        rate = max(by_rate, key=lambda each: by_rate[each])
        set_rate(rate)
        rounds: list[Round[Traces]] = least_disturbed(one_round, ROUNDS)
        traces = [done.result for done in rounds]
        predicted = []
        for each in traces:
            seconds = class_seconds(each)
            predicted.append(predicted_gain(sessions, lines, lambda task, of=seconds: of[task_class(task)]))
    windows = [{hiding: Window(trace, LAST).seconds for hiding, trace in each.items()} for each in traces]
    measured = [gain_of(seconds) for seconds in windows]
    conditions = {"link_gb_per_s": rate, "by_rate": {str(each): gain for each, gain in by_rate.items()}}
    table.at_least(
        f"{name}: predicted gain", statistics.median(predicted), LEAST_GAIN, "%", samples=predicted, **conditions
    )
    apart = abs(statistics.median(measured) - statistics.median(predicted))
    conditions = {"samples": measured, "seconds": [str(seconds) for seconds in windows]}
    table.at_most(f"{name}: measured gain from the predicted", apart, MOST_APART, "points", **conditions)
    violated = sum(bool(check_trace(trace)) for each in traces for trace in each.values())
    table.at_most(f"{name}: traces in which a read saw a wrong version", violated, 0, "traces")
    table.disturbed("load order rounds", [done.others for done in rounds])
    gains = f"measured {statistics.median(measured):+.1f} %, predicted {statistics.median(predicted):+.1f} %"
    tqdm.write(f"     {name}: {gains} at {rate:g} GB/s")
