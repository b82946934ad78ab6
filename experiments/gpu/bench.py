"""Bench rows of a GPU: kernels against plain ones of their size, memory, and what CUDA graphs save.

OPT-6.7B's shapes with random weights.
"""

import time
from collections.abc import Callable
from statistics import median

import torch

from experiments.bench.harness import Table
from experiments.bench.kernels import Sizes, bench_kernels
from experiments.gpu.setting import Setting, gpu, make_bench
from flexhybrid.core.memory import CONTEXT_BYTES, GRAPH_BYTES, memory_plan, total_bytes
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.jobs.compare.speed import PolicyRun
from flexhybrid.runtime.engine import RunControl
from flexhybrid.runtime.session import Session
from sim.presets import hybrid

SETTING = Setting("opt-6.7b", "float16", 64, 512, 8, 16)
KERNELS = Sizes(SETTING.mini_batch, 32, 128, 520, 256)

UNTRACED = RunControl()
#: What graphs make of the time to launch at least: a layer's 13 launches and their views become four calls, or one; and
#: what one makes of a decode's time.
GRAPHS_BAR, JOINT_BAR, GRAPH_TURNS = 2.0, 1.1, 3


def policies() -> list[Policy]:
    """Return policies: weights streamed, everything on the device (the fastest launches), and four bits."""
    on_device, bound = Placement(device=1.0), SETTING.mini_batch_tokens
    return [
        hybrid(0.5, bound),
        Policy("device", on_device, cache={"kv@device": 1.0}, max_mini_batch_tokens=bound),
        Policy("4 bits", bits=Bits(4, 4, 4), cache={"act@host": 0.5, "kv@host": 0.5}, max_mini_batch_tokens=bound),
    ]


def bench_graphs(table: Table, name: str, session: Session, free_bytes: Callable[[], int]) -> None:
    """Add what CUDA graphs save of a decode's launches and of its time, and what the driver keeps for them, where the
    policy has them; all ways compute over the same memory, in turn. ``free_bytes``: of the device."""
    graphs = session.executor.graphs
    if graphs is None:
        return
    graphs.enabled = False
    session.generate(UNTRACED)
    graphs.forget()
    held, free = torch.cuda.memory_reserved(), free_bytes()
    graphs.enabled = True
    _untraced_decode(session)  # forms are seen, and captured
    kept = (free - free_bytes()) - (torch.cuda.memory_reserved() - held)
    row = f"CUDA graphs, {name}: bytes that the driver keeps of a graph, over those that the plan counts"
    table.at_most(row, kept / (GRAPH_BYTES * graphs.num_graphs), 1.0, "x", bytes=kept)
    ways = {"joint": (True, True), "a verb": (True, False), "none": (False, True)}
    samples: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(1 + GRAPH_TURNS):  # the first one captures
        for way, (graphs.enabled, graphs.joins) in ways.items():
            sample = _untraced_decode(session)
            samples[way] += [sample] if turn else []
    graphs.enabled = graphs.joins = True
    medians = {way: [median(figures) for figures in zip(*of, strict=True)] for way, of in samples.items()}
    (joint_s, launching_s), (apart_s, _), (without_s, launching_without_s) = medians.values()
    told = {"seconds and those of launching": medians, "graphs": graphs.summary()}
    row = f"CUDA graphs, {name}: a decode's time to launch without them, over with them"
    table.at_least(row, launching_without_s / launching_s, GRAPHS_BAR, "x", **told)
    row = f"CUDA graphs, {name}: a decode's time without them, over with them"
    table.at_least(row, without_s / joint_s, 1.0, "x")
    row = f"CUDA graphs, {name}: a decode's time with a graph a verb, over one for verbs with nothing between them"
    table.at_least(row, apart_s / joint_s, JOINT_BAR, "x")


def _untraced_decode(session: Session) -> tuple[float, float]:
    """Return the seconds of a decode of which no trace is kept, and those that Python took."""
    start = time.perf_counter()
    launching_s = session.decode_result(control=UNTRACED).launch_s
    return time.perf_counter() - start, launching_s


def bench_gpu(table: Table) -> None:
    """Add all rows, with one policy's weights and pools at a time."""
    shape, device = shape_by_name(SETTING.model), gpu()
    for index, policy in enumerate(policies()):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        with make_bench(shape, device, SETTING) as bench:
            contender = PolicyRun(bench, policy)
            plan = memory_plan(contender.wave.problem, policy, buffer_sizes(contender.wave))
            share = (torch.cuda.max_memory_reserved() - before + CONTEXT_BYTES) / total_bytes(plan)["device"]
            table.at_most(f"memory, {policy.name}: what the allocator holds, over the plan", share, 1.0, "x")
            if index == 0:
                bench_kernels(table, contender, KERNELS)
            session = Session(contender.engine, contender.wave, bench.prompts)
            bench_graphs(table, policy.name, session, lambda: torch.cuda.mem_get_info()[0])
        contender = None  # frees its buffers before the next policy's are allocated
