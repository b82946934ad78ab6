"""Bench rows of KVPR's load order on the paced link: W_K and W_V, then ACT, then the rest, against the natural order.

Where all positions of a stream are alike the order changes nothing, because buffers are double. It shows where heavy
and light positions take turns: a layer that sees all tokens then waits for its slot of weights until the one two before
it has ended. The model here has such layers and layers with a window in turn, as Gemma and gpt-oss have. Of RATES the
link has the one at which the machine's own lines predict the most.
"""

from __future__ import annotations

import statistics
from contextlib import closing
from dataclasses import replace

import torch
from tqdm import tqdm

from experiments.bench.harness import Round, Table, least_disturbed
from flexhybrid.core.hardware import Hardware, crosses_link
from flexhybrid.core.model.attention import PLAIN
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.plan import stream
from flexhybrid.core.problem import Problem
from flexhybrid.core.trace import Window, check_trace
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.links import CpuCopies
from flexhybrid.runtime.profiling.profile import ProfileRun, profile
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import Weights
from policy_search.fit import fit_hardware
from sim import virtual_clock
from sim.presets import kvpr_column

WINDOW, CONTEXT, MAX_TOKENS, BATCH = 32, 768, 7, 8
SHAPE = ModelShape(
    "alternating", "llama", num_layers=6, hidden=512, num_heads=8, num_kv_heads=8, head_dim=64, ffn=1408, vocab=1000,
    max_positions=2048, gated_mlp=True, rotary=True, bias=False,
    attention=tuple(replace(PLAIN, window=(None, WINDOW)[layer % 2]) for layer in range(6)),
)  # fmt: skip
WORKLOAD = Workload.uniform(BATCH, CONTEXT, MAX_TOKENS)
RATES = (0.1, 0.14, 0.2, 0.28, 0.4, 0.56)  #: GB/s of the paced link
POLICIES = {hiding: kvpr_column("pipeline", hiding, max_mini_batch_tokens=1 << 20) for hiding in (True, False)}
#: What the machine is measured by: the sizes of this model's tasks and some around them.
RUNS = tuple(
    ProfileRun(requests, context, requests, {"act@host": act, "kv@host": 1.0 - act})
    for requests, context, act in ((4, 128, 0.5), (8, 256, 0.5), (8, 768, 1.0), (8, 768, 0.5), (8, 768, 0.25))
)
ROUNDS = 3
LAST = -2  #: iteration of a trace that ends its window
LEAST_GAIN, MOST_APART = 5.0, 3.0  #: percent; points between what is predicted and what is measured


def gain_of(seconds: dict[bool, float]) -> float:
    """Return how much longer a decode takes without hiding, in percent."""
    return 100 * (seconds[False] / seconds[True] - 1)


def predicted_s(dtype: str, hardware: Hardware) -> dict[bool, float]:
    """Return hiding -> seconds of the window on the virtual clock."""
    problem = Problem(shape=SHAPE, dtype=dtype, hardware=hardware)
    waves = {hiding: admit(problem, policy, WORKLOAD) for hiding, policy in POLICIES.items()}
    return {
        hiding: Window(virtual_clock.run(stream(wave, first_iteration=1), hardware), LAST).seconds
        for hiding, wave in waves.items()
    }


def bench_load_order(table: Table, dtype: str) -> None:
    """Add the predicted gain, and how far the measured one is from it; the orders are run in turn."""
    device = torch.device("cpu")
    samples = profile(SHAPE, dtype, device, RATES[-1], runs=RUNS).samples
    # In one mini-batch all loads of weights have one size, which gives no slope: the link's own line prices all loads.
    samples = {key: of for key, of in samples.items() if key in ("h2d", "d2h") or not crosses_link(key)}
    hardware = fit_hardware(samples, name="here", device="cpu", dtype=dtype)
    by_rate = {rate: gain_of(predicted_s(dtype, hardware.with_link_rate(rate))) for rate in RATES}
    rate = max(by_rate, key=lambda each: by_rate[each])
    name = "KVPR, W_K and W_V first, layers that take turns"
    machine = hardware.with_link_rate(rate)
    sessions: dict[bool, Session] = {}
    with closing(Weights(SHAPE, RandomWeights(SHAPE), dtype, device, POLICIES[True])) as weights:
        for hiding, policy in POLICIES.items():
            sessions[hiding] = Session.of(weights, policy, WORKLOAD, hardware=machine)
            sessions[hiding].generate()
            copies = sessions[hiding].engine.copies
            if isinstance(copies, CpuCopies):
                copies.set_rate(rate)

        def one_round() -> dict[bool, list]:
            return {hiding: session.decode() for hiding, session in sessions.items()}

        rounds: list[Round[dict[bool, list]]] = least_disturbed(one_round, ROUNDS)
        for session in sessions.values():
            session.close()
    windows = [{hiding: Window(trace, LAST).seconds for hiding, trace in done.result.items()} for done in rounds]
    gains = [gain_of(seconds) for seconds in windows]
    measured, predicted = statistics.median(gains), by_rate[rate]
    usual = {hiding: statistics.median(seconds[hiding] for seconds in windows) for hiding in POLICIES}
    conditions = {"link_gb_per_s": rate, "by_rate": {str(each): gain for each, gain in by_rate.items()}}
    table.at_least(f"{name}: predicted gain", predicted, LEAST_GAIN, "%", **conditions)
    conditions = {"measured": measured, "predicted": predicted, "samples": gains, "seconds": str(usual)}
    table.at_most(
        f"{name}: measured gain from the predicted", abs(measured - predicted), MOST_APART, "points", **conditions
    )
    violated = sum(bool(check_trace(trace)) for done in rounds for trace in done.result.values())
    table.at_most(f"{name}: traces in which a read saw a wrong version", violated, 0, "traces")
    tqdm.write(f"     {name}: measured {measured:+.1f} %, predicted {predicted:+.1f} % at {rate:g} GB/s")
