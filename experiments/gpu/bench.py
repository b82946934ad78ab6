"""Bench rows of a GPU: kernels against plain ones of their size, and whether the launcher stays ahead of the device.

OPT-6.7B's shapes with random weights.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median

import torch

from experiments.bench.harness import Table
from experiments.bench.kernels import Sizes, bench_kernels
from experiments.gpu.attend import bench_attend_cuda
from experiments.gpu.quantize import bench_quantize_cuda
from experiments.gpu.setting import Setting, make_bench
from flexhybrid.core.memory import CONTEXT_BYTES, GRAPH_BYTES, memory_plan, total_bytes
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.task import Task
from flexhybrid.core.trace import TraceEvent, Window, idle_though_ready
from flexhybrid.jobs.compare.speed import PolicyRun
from flexhybrid.runtime.clock import Clock
from flexhybrid.runtime.cuda import Recorded, lane_events, lane_streams
from flexhybrid.runtime.engine import RunControl
from flexhybrid.runtime.issuing import STREAM_LOOKAHEAD_TASKS
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.host_memory import HostMemory
from sim.presets import hybrid

SETTING = Setting("opt-6.7b", "float16", 64, 512, 8, 16)
KERNELS = Sizes(SETTING.mini_batch, 32, 128, 520, 256)

#: A task starved when it ended on the device within this time after the host had enqueued it. Twice the error of
#: placing an event on the host's clock.
AT_THE_HEELS_S = 1e-4
#: What graphs make of the time to launch at least: a layer's 13 launches and their views become four calls.
GRAPHS_BAR, GRAPH_TURNS = 2.0, 3
#: On others' machines eight threads touched a GiB, and the driver locked it, in 0.10 to 0.14 s (``host_memory``).
PAGE_LOCKED_BYTES, PAGE_LOCKING_BAR_S = 4 << 30, 0.2
RECORDS, RECORD_BAR_US = 3000, 50
STARVED_BAR, OVERHEAD_BAR = 1.0, 2.0  #: percent of the compute lane's tasks, and of the decode's time


def policies() -> list[Policy]:
    """Return policies: weights streamed, everything on the device (the fastest launches), and four bits."""
    on_device, bound = Placement(device=1.0), SETTING.mini_batch_tokens
    return [
        hybrid(0.5, bound),
        Policy("device", on_device, cache={"kv@device": 1.0}, max_mini_batch_tokens=bound),
        Policy("4 bits", bits=Bits(4, 4, 4), cache={"act@host": 0.5, "kv@host": 0.5}, max_mini_batch_tokens=bound),
    ]


@dataclass(frozen=True)
class Launch:
    """Counters of a decode's compute lane in the trace's window."""

    seconds: float
    num_tasks: int
    starved: dict[str, int]  #: verb -> tasks that ended as soon as they were enqueued
    #: verb -> seconds that the device waited though the task was ready: before the task, and for a starved task until
    #: it was enqueued (its kernels took less than that, by an unknown amount)
    idle_s: dict[str, float]
    issuing_s: float  #: seconds that the planning thread spent enqueueing them

    @property
    def starved_percent(self) -> float:
        return 100 * sum(self.starved.values()) / self.num_tasks

    @property
    def idle_percent(self) -> float:
        return 100 * sum(self.idle_s.values()) / self.seconds


def launch_of(trace: list[TraceEvent], issued: list[tuple[float, float]]) -> Launch:
    """Count the starved tasks of a trace.

    ``issued``: seconds on the trace's clock when the compute lane began and ended to enqueue each of its tasks.
    """
    window = Window(trace)
    starved, idle_s, issuing_s, num_tasks = defaultdict(int), defaultdict(float), 0.0, 0
    for ((task, start, stop), idle), (since, until) in zip(idle_though_ready(trace), issued, strict=True):
        if start < window.begin_s or stop > window.end_s:
            continue
        num_tasks += 1
        issuing_s += until - since
        starves = stop - until < AT_THE_HEELS_S
        starved[task.verb] += starves
        idle_s[task.verb] += idle + (max(0.0, min(stop, until) - start) if starves else 0.0)
    return Launch(window.seconds, num_tasks, dict(starved), dict(idle_s), issuing_s)


def watched_decode(contender: PolicyRun) -> Launch:
    """Decode again, and compare the host's times of enqueueing with the device's times of running."""
    executor, engine = contender.session.executor, contender.engine
    perform, issued = executor.perform, []
    if engine.device.type == "cuda":
        torch.cuda.current_stream(engine.device).synchronize()  # the lanes read tensors made on it

    def watched(task: Task) -> None:
        start = time.perf_counter()
        perform(task)
        if task.resource == "compute":
            issued.append((start, time.perf_counter()))

    executor.perform = watched
    try:
        clock = Clock(engine.lanes(executor))
        with engine.process_settings():
            trace = clock.run(stream(contender.wave, first_iteration=1))
    finally:
        executor.perform = perform
    return launch_of(trace, [(start - clock.began_s, end - clock.began_s) for start, end in issued])


def bench_launcher(table: Table, contender: PolicyRun) -> None:
    """Add the shares of starved tasks and of idle time, with the verbs at which they occur."""
    contender.decode()  # libraries load, and caches of plans and kernels fill
    launch, name = watched_decode(contender), contender.policy.name
    conditions = {"starved_by_verb": launch.starved, "idle_s_by_verb": launch.idle_s}
    conditions["issuing_share"] = launch.issuing_s / launch.seconds
    table.at_most(f"launch, {name}: tasks that starved", launch.starved_percent, STARVED_BAR, "%", **conditions)
    row = f"launch, {name}: compute idle though all was there, of the decode's time"
    table.at_most(row, launch.idle_percent, OVERHEAD_BAR, "%")


def bench_graphs(table: Table, contender: PolicyRun, free_bytes: Callable[[], int]) -> None:
    """Add what CUDA graphs save of a decode's launches and of its time, and what the driver keeps for them, where the
    policy has them; both sides compute over the same memory, in turn. ``free_bytes``: of the device."""
    name = contender.policy.name
    contender.session = session = Session(contender.engine, contender.wave, contender.bench.prompts)
    graphs = session.executor.graphs
    if graphs is None:
        return
    graphs.enabled = False
    session.generate()
    graphs.forget()
    held, free = torch.cuda.memory_reserved(), free_bytes()
    graphs.enabled = True
    _untraced_decode(session)  # forms are seen, and captured
    captured = graphs.num_graphs
    kept = (free - free_bytes()) - (torch.cuda.memory_reserved() - held)
    launches: dict[bool, list[Launch]] = {True: [], False: []}
    for enabled in (True, False) * GRAPH_TURNS:
        graphs.enabled = enabled
        launches[enabled].append(watched_decode(contender))
    graphs.enabled = True
    issuing, seconds = (
        {enabled: median(getattr(one, of) for one in found) for enabled, found in launches.items()}
        for of in ("issuing_s", "seconds")
    )
    told = {"graphs": graphs.summary(), "issuing_s": issuing[True], "issuing_without_s": issuing[False]}
    row = f"CUDA graphs, {name}: the compute lane's time to launch without them, over with them"
    table.at_least(row, issuing[False] / issuing[True], GRAPHS_BAR, "x", **told)
    row = f"CUDA graphs, {name}: a decode's time without them, over with them"
    table.at_least(row, seconds[False] / seconds[True], 1.0, "x", with_s=seconds[True], without_s=seconds[False])
    row = f"CUDA graphs, {name}: bytes that the driver keeps of a graph, over those that the plan counts"
    table.at_most(row, kept / (GRAPH_BYTES * captured), 1.0, "x", bytes=kept)
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for joins in (True, False) * (1 + GRAPH_TURNS):  # the first of each captures
        graphs.joins = joins
        times[joins].append(_untraced_decode(session))
    graphs.joins = True
    (together_s, launching_s), (apart_s, launching_apart_s) = (
        map(median, zip(*times[joins][1:], strict=True)) for joins in (True, False)
    )
    told = {"together_s": together_s, "apart_s": apart_s, "launching_s": launching_s}
    row = f"CUDA graphs, {name}: a decode's time with a graph a verb, over one for verbs with nothing between them"
    table.at_least(row, apart_s / together_s, 1.0, "x", **told, launching_apart_s=launching_apart_s)


def _untraced_decode(session: Session) -> tuple[float, float]:
    """Return the seconds of a decode of which no trace is kept, and those that Python took."""
    start = time.perf_counter()
    launching_s = session.decode_result(control=RunControl()).launch_s
    return time.perf_counter() - start, launching_s


def bench_page_locking(table: Table) -> None:
    """Add the seconds that a GiB of page-locked memory takes, whose pages several threads touch first."""
    memory, seconds = HostMemory(pinned=True), []
    for _ in range(GRAPH_TURNS):
        start = time.perf_counter()
        memory.bytes(PAGE_LOCKED_BYTES)  # and unlocked at once
        seconds.append((time.perf_counter() - start) / (PAGE_LOCKED_BYTES / 2**30))
    table.at_most("memory: page-locking a GiB", median(seconds), PAGE_LOCKING_BAR_S, "s", samples=seconds)


def bench_events(table: Table, device: torch.device) -> None:
    """Add what the slowest hundredth of records takes, on the streams of the lanes in turn."""
    events, times, streams = lane_events(device), [], lane_streams(device).values()
    held = deque(maxlen=len(streams) * STREAM_LOOKAHEAD_TASKS)
    for of in islice(cycle(streams), len(streams) * RECORDS):
        start = time.perf_counter()
        held.append(Recorded(events, of, False))
        times.append(time.perf_counter() - start)
    times.sort()
    slow = times[len(times) * 99 // 100]
    table.at_most("events: 99 of 100 records take at most", 1e6 * slow, RECORD_BAR_US, "µs", most_us=1e6 * times[-1])


def bench_gpu(table: Table, on_progress: Callable[[str], None] = print) -> None:
    """Add all rows, with one policy's weights and pools at a time."""
    shape, device = shape_by_name(SETTING.model), torch.device("cuda")
    bench_page_locking(table)
    bench_events(table, device)
    bench_quantize_cuda(table)
    bench_attend_cuda(table)
    for index, policy in enumerate(policies()):
        on_progress(policy.name)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        with make_bench(shape, device, SETTING) as bench:
            contender = PolicyRun(bench, policy)
            sizes = buffer_sizes(contender.wave)
            planned = total_bytes(memory_plan(contender.wave.problem, policy, sizes))["device"]
            held = torch.cuda.max_memory_reserved() - before
            share = (held + CONTEXT_BYTES) / planned
            table.at_most(f"memory, {policy.name}: what the allocator holds, over the plan", share, 1.0, "x")
            if index == 0:
                bench_kernels(table, contender, KERNELS)
            bench_graphs(table, contender, lambda: torch.cuda.mem_get_info()[0])
            bench_launcher(table, contender)
        contender = None  # frees its buffers before the next policy's are allocated
