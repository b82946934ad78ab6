"""Bench rows of the module path (``flexhybrid.runtime.models.module``): what a model of a new kind pays for running
through transformers' layers, in processor time of a layer and in decode speed on a paced link.

Speeds are over what a decode's bytes and products allow, in turn with a Llama by a file of ours: the ratio says which
models would gain by a file of their own, and the Llama's row lets later trees be compared with this one.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from experiments.bench.harness import Table, bench, seconds_in_turn, seconds_of
from experiments.bench.launch import _MACHINE, SHORT
from experiments.bench.layer_kinds import save_config, shape_in
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Experts, Policy
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.links import CpuCopies
from flexhybrid.runtime.models.coroutines import hosted
from flexhybrid.runtime.models.empty_model import empty_model
from flexhybrid.runtime.process_settings import torch_threads
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import Weights
from sim.presets import hybrid, kv_only, resident

#: Sizes whose products take no time, and sizes of all models on the link: no text outgrows the window, so all load the
#: same bytes.
TINY: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=64, max_position_embeddings=2048, dtype="float32",
)  # fmt: skip
WIDE: dict[str, Any] = dict(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=3, num_attention_heads=16, num_key_value_heads=8,
    head_dim=64, vocab_size=3000, max_position_embeddings=2048, sliding_window=2048, dtype="float32",
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(
    TINY,
    hidden_size=512,
    num_attention_heads=8,
    num_hidden_layers=2,
    moe_intermediate_size=512,
    num_experts=32,
    num_experts_per_tok=4,
    vocab_size=1000,
)
FAST = "llama"  #: the model with a file of ours
MODULES = ("llama", "qwen3", "gemma2", "gemma3_text", "phi3")
PER_STEP, PRODUCTS = ("embed", "head", "sample"), ("project", "kv_gen", "finish")
LINK_GB_PER_S, TURNS, PRODUCT_REPEATS = 2.0, 5, 7
WORKLOAD, MINI_BATCH = Workload.uniform(16, 512, 8), 8
POSITION_BAR_US = 500
#: Of its bound, what a decode by a file of ours reaches at least. Trees are held against each other by the rows.
FAST_BARS = {"kv_only": 0.95, "hybrid(0.5)": 0.8}
EXPERTS_BAR = 0.6  #: of the processor time of mini-batches with experts of their own
MODULE_BAR = 0.9  #: of the other path's: below, a file of its own pays, as Qwen3 and Phi-3 have it


def policies(tokens: int) -> list[Policy]:
    return [kv_only(tokens), hybrid(0.5, tokens)]


def saved(folder: str, model_type: str, sizes: dict[str, Any]) -> Path:
    """Return a folder with a model's configuration and nothing else."""
    own = Path(folder) / model_type
    own.mkdir(exist_ok=True)
    save_config(own, model_type, sizes)
    return own


@bench("modules")
def bench_python(table: Table) -> None:
    """Add the microseconds that the verbs of a mini-batch spend on the compute lane in one layer of a decode of a model
    whose products take no time, on the module path; and how much of it the other path takes."""
    by_policy: dict[str, dict[str, dict[str, float]]] = {}
    with torch_threads(1), TemporaryDirectory() as folder:
        llama = saved(folder, FAST, TINY)
        shapes = {"fast": shape_in(llama), "module": empty_model(llama).shape}
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


@bench("modules")
def bench_speeds(table: Table) -> None:
    """Add decode speeds over their bounds, one thread: the fast path's, and the module path's to it."""
    with torch_threads(1), TemporaryDirectory() as folder:
        shapes = {FAST: shape_in(saved(folder, FAST, WIDE))}
        shapes |= {f"{name} (module)": empty_model(saved(folder, name, WIDE)).shape for name in MODULES}
        for policy in policies(MINI_BATCH * (34 * 16 + 1)):
            with ExitStack() as stack:
                sessions = {name: stack.enter_context(streamed(shape, policy)) for name, shape in shapes.items()}
                bounds = {name: bound_s(session) for name, session in sessions.items()}
                calls = {name: lambda _, session=session: session.decode_result() for name, session in sessions.items()}
                seconds = seconds_in_turn(calls, TURNS, warm_up=1)
            _add(table, policy.name, bounds, seconds)


@bench("modules")
def bench_experts(table: Table) -> None:
    """Add the processor time of decode iterations whose mini-batches share experts, over that of each by itself.

    Everything is resident: 96 requests in 12 mini-batches, and layers of 32 experts of 3 MB, of which a token takes 4.
    """
    seconds: dict[int, list[float]] = {0: [], 1: []}
    workload = Workload.uniform(96, 16, 4)
    with torch_threads(1), TemporaryDirectory() as folder, ExitStack() as stack:
        shape = empty_model(saved(folder, "qwen3_moe", EXPERTS)).shape
        sessions = {}
        for batch in seconds:
            policy = replace(resident(8 * 33), packing="fifo", experts=Experts(batch))
            weights = stack.enter_context(
                closing(Weights(shape, RandomWeights(shape), "float32", torch.device("cpu"), policy))
            )
            make_engine = partial(Engine, num_threads=1)
            opened = Session.of(weights, policy, workload, hardware=_MACHINE, make_engine=make_engine)
            sessions[batch] = stack.enter_context(opened)
            if len(sessions[batch].wave.mini_batches) != 12:
                raise ValueError("not 12 mini-batches")
            sessions[batch].generate()
        for _ in range(TURNS):
            for batch, session in sessions.items():
                start = time.process_time()
                session.decode_result()
                seconds[batch].append((time.process_time() - start) / 3)
    ratios = [together / alone for alone, together in zip(*seconds.values(), strict=True)]
    name = "experts once for 12 mini-batches: processor time of an iteration, to each by itself"
    table.at_most(name, statistics.median(ratios), EXPERTS_BAR, "x", samples=ratios, seconds=seconds)


def _add(table: Table, policy: str, bounds: dict[str, dict[str, float]], seconds: dict[str, list[float]]) -> None:
    # Models of one size need the same products. Their own may be more: KV-Gen of Phi-3, whose queries, keys and values
    # are one matrix, computes queries too.
    bounds = {name: of | {"products_s": bounds[FAST]["products_s"]} for name, of in bounds.items()}
    reached = {name: [max(bounds[name].values()) / s for s in of_name] for name, of_name in seconds.items()}
    name, own = f"fast path: decode speed over its bound, {policy}", reached.pop(FAST)
    table.at_least(name, statistics.median(own), FAST_BARS[policy], "x", samples=own, **bounds[FAST])
    for other, of_module in reached.items():
        ratios = [module / fast for module, fast in zip(of_module, own, strict=True)]
        name = f"{other}: decode speed over its bound, to the fast path's, {policy}"
        table.at_least(name, statistics.median(ratios), MODULE_BAR, "x", samples=ratios, **bounds[other])


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


def bound_s(session: Session) -> dict[str, float]:
    """Return the seconds that a decode takes at least: of the link for its bytes at its rate, and of plain products of
    torch with as many rows and operations as the compute lane's, each timed by itself."""
    link_bytes, products, shape = 0.0, Counter[tuple[int, int]](), session.wave.shape
    for task in stream(session.wave, first_iteration=1):
        if task.resource == "h2d":
            link_bytes += task.work.link_bytes
        elif task.verb in PRODUCTS and task.work.tokens:
            columns = task.work.flops / (2 * task.work.tokens * shape.hidden)
            products[int(task.work.tokens), round(columns)] += 1
    computed = sum(count * _product_s(*size, shape.hidden) for size, count in products.items())
    return {"link_s": link_bytes / (1e9 * LINK_GB_PER_S), "products_s": computed}


@cache
def _product_s(rows: int, columns: int, hidden: int) -> float:
    """Return the least seconds of a product [rows, hidden] x [hidden, columns], the same for all who have it."""
    left, right = torch.randn(rows, hidden), torch.randn(columns, hidden)
    return min(seconds_of(lambda: torch.mm(left, right.t())) for _ in range(PRODUCT_REPEATS))
