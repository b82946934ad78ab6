"""Bench rows of the module path (``flexhybrid.runtime.models.module``) beside a file of its own: what a model of a new
kind pays for running through transformers' layers. Both paths run one Llama, side by side in one process."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from experiments.bench.harness import Table, seconds_in_turn
from experiments.bench.launch import _MACHINE, SHORT
from flexhybrid.core.model.shape import ModelShape, shape_of
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.links import CpuCopies
from flexhybrid.runtime.models.coroutines import hosted
from flexhybrid.runtime.models.empty_model import empty_model
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import Weights
from flexhybrid.runtime.threads import torch_threads
from sim.presets import hybrid, kv_only

TINY = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, vocab_size=64, max_position_embeddings=2048)  # fmt: skip
WIDE = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
            num_key_value_heads=8, vocab_size=3000, max_position_embeddings=2048)  # fmt: skip
PER_STEP = ("embed", "head", "sample")
POSITION_BAR_US, RATIO_BAR = 500, 0.85
LINK_GB_PER_S, TURNS = 2.0, 7
WORKLOAD, MINI_BATCH = Workload.uniform(16, 512, 8), 8


def bench_module_path(table: Table) -> None:
    with torch_threads(1):
        bench_python(table)
        bench_speed_ratio(table)


@contextmanager
def shapes_of_llama(sizes: dict) -> Iterator[dict[str, ModelShape]]:
    """Give a Llama's shape by path: "fast", by a file of ours, and "module", by transformers' layers."""
    from transformers import LlamaConfig

    with TemporaryDirectory() as folder:
        LlamaConfig(**sizes).save_pretrained(folder)
        yield {"fast": shape_of(Path(folder)), "module": empty_model(Path(folder)).shape}


def policies(tokens: int) -> list[Policy]:
    return [kv_only(tokens), hybrid(0.5, tokens)]


def policies_of_width() -> list[Policy]:
    """Return those of ``streamed`` sessions."""
    return policies(MINI_BATCH * (34 * 16 + 1))


def bench_python(table: Table) -> None:
    """Add the microseconds that the verbs of a mini-batch spend on the compute lane in one layer of a decode of a model
    whose products take no time, on the module path; and how much of it the other path takes."""
    by_policy: dict[str, dict[str, dict[str, float]]] = {}
    with shapes_of_llama(TINY) as shapes:
        for policy in policies(4 * 200):
            by_policy[policy.name] = {path: _verbs(shape, policy) for path, shape in shapes.items()}
    sums = {
        name: {path: sum(us for verb, us in verbs.items() if verb not in PER_STEP) for path, verbs in paths.items()}
        for name, paths in by_policy.items()
    }
    slowest = max(sums, key=lambda name: sums[name]["module"])
    name = f"module path: verbs of a mini-batch in a layer ({slowest})"
    table.at_most(name, sums[slowest]["module"], POSITION_BAR_US, "µs", sums=sums, by_verb=by_policy)


def _verbs(shape: ModelShape, policy: Policy) -> dict[str, float]:
    """Return {verb of the compute lane: median processor time in µs}."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    weights = Weights(shape, RandomWeights(shape), "float32", torch.device("cpu"), policy)
    with closing(weights), Session.of(weights, policy, SHORT, hardware=_MACHINE) as session:

        def run_tasks() -> None:
            for turn in range(3):
                for task in stream(session.wave, first_iteration=1):
                    start = time.thread_time()
                    session.executor.perform(task)
                    if turn and task.resource == "compute":
                        times[task.verb].append(1e6 * (time.thread_time() - start))

        hosted(run_tasks)
    return {verb: statistics.median(us) for verb, us in times.items()}


def bench_speed_ratio(table: Table) -> None:
    """Add the decode speed of the module path over the other's, hidden 1,024 on a paced link, one thread."""
    for policy in policies_of_width():
        with shapes_of_llama(WIDE) as shapes, ExitStack() as stack:
            sessions = {path: stack.enter_context(streamed(shape, policy)) for path, shape in shapes.items()}
            calls = {path: lambda _, session=session: session.decode_result() for path, session in sessions.items()}
            seconds = seconds_in_turn(calls, TURNS, warm_up=1)
        ratios = [fast / module for fast, module in zip(seconds["fast"], seconds["module"], strict=True)]
        name = f"module path: decode speed over the other path's, {policy.name}"
        table.at_least(name, statistics.median(ratios), RATIO_BAR, "x", samples=ratios, seconds=seconds)


@contextmanager
def streamed(shape: ModelShape, policy: Policy) -> Iterator[Session]:
    """Give a session that has generated once."""
    make_engine = partial(Engine, num_threads=1)
    weights = Weights(shape, RandomWeights(shape), "float32", torch.device("cpu"), policy)
    opened = Session.of(weights, policy, WORKLOAD, hardware=_MACHINE, make_engine=make_engine)
    with closing(weights), opened as session:
        copies = session.engine.copies
        if isinstance(copies, CpuCopies):
            copies.set_rate(LINK_GB_PER_S)
        session.generate()
        yield session
