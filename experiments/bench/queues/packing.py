"""Bench rows of packing on requests of many lengths: mini-batches of like length, as a run makes them, against
CAPTURE's F_b with this machine's seconds and against the order of arrival. Decode iterations of one wave over a paced
link, weights on the device, in rounds side by side; and what KV-Gen recomputes of padding.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from experiments.bench.harness import Table, seconds_in_turn
from experiments.reproduce.capture.packing import greedy, packed
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Placement
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.profile.job import TIMING_SHAPE, measure_hardware
from flexhybrid.resolve import PacedDevice
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.profiling.attention_paths import fastest_paths
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import Weights
from sim.presets import hybrid

LINK_GB_PER_S, REQUESTS, DECODED, ROUNDS = 0.4, 32, 3, 3
MINI_BATCH_TOKENS = 4096
#: Where the link is at work all the time, no way to pack is faster than another: rounds differ by more than the ways.
LINK_BINDS, NO_SLOWER = 0.97, 0.98
SHARES = (0.0, 0.25, 0.5, 1.0)  #: of tokens that are ACT


def mixed_lengths() -> Workload:
    """Prompts of 16 to 1,000 tokens, log-normal."""
    prompts = np.clip(np.exp(np.random.default_rng(0).normal(np.log(180), 0.9, REQUESTS)), 16, 1000).astype(np.int64)
    return Workload(prompts, np.full(REQUESTS, DECODED + 1))


def bench_packing(table: Table, dtype: str) -> None:
    """Add tokens/s of each mix against those of the two other ways to pack."""
    shape, device, workload = replace(TIMING_SHAPE, num_layers=2), torch.device("cpu"), mixed_lengths()
    path = Path("results/bench-hardware.json")
    hardware, *_ = measure_hardware(TIMING_SHAPE, dtype, PacedDevice(device, LINK_GB_PER_S), path)
    paths = fastest_paths("cpu", dtype, shape.queries_per_key)
    problem = Problem(shape=shape, dtype=dtype, hardware=hardware, device="cpu", attention=paths)
    for share in SHARES:
        policy = replace(hybrid(share, MINI_BATCH_TOKENS), weights=Placement(device=1))
        tokens = workload.cached_tokens
        ways = {
            "like length": packed(policy, tokens),
            "F_b's greedy": greedy(problem, policy, tokens),
            "order of arrival": packed(replace(policy, packing="fifo"), tokens),
        }
        waves = {way: admit(problem, policy, workload, mini_batches=groups) for way, groups in ways.items()}
        weights = Weights(shape, RandomWeights(shape), dtype, device, policy)
        sessions = {}
        for way, wave in waves.items():
            engine = Engine(weights, policy, buffer_sizes(wave), LINK_GB_PER_S)
            sessions[way] = Session(engine, wave)
            with engine.without_copies():  # the prompts are not what is timed
                sessions[way].generate()
        calls = {way: lambda _, session=session: session.decode() for way, session in sessions.items()}
        seconds = {way: statistics.median(of) for way, of in seconds_in_turn(calls, ROUNDS, warm_up=1).items()}
        counts = {way: len(groups) for way, groups in ways.items()}
        loads = [task for task in stream(waves["like length"], first_iteration=1) if task.resource == "h2d"]
        link_s = sum(task.work.link_bytes for task in loads) / (LINK_GB_PER_S * 1e9)
        link = link_s / seconds["like length"]
        for way in list(ways)[1:]:
            name = f"packing, {share:.0%} ACT: by length against {way}, tokens/s"
            bar = NO_SLOWER if link > LINK_BINDS else 1.0
            table.at_least(name, seconds[way] / seconds["like length"], bar, "x", mini_batches=counts, link=link)
        for session in sessions.values():
            session.engine.close()
        weights.close()
