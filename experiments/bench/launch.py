"""Bench rows of a task's overhead: planning, hand-off between threads, and the Python of the verbs.

The verbs run on a model so small that their products take no time; launching remains. CPU time is measured, so that
other processes do not count.

``as_on_a_gpu`` measures what Python does for a GPU without one: it replaces the device's streams, events and copies,
CUDA graphs and kernels by calls that do nothing. Real ones take 2 to 10 us, those of Triton's
kernels outside of graphs (to pack and unpack) more; a mini-batch has some 30 calls in a layer.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch

from experiments.bench.harness import Table, bench
from flexhybrid.core.admission import open_batch
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.shape import ModelShape, shape_by_name
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.problem import Problem, without_graphs
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.schedule.dependencies import Dependencies
from flexhybrid.core.task import Access, Task, Work
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.clock import Clock, HostLane, Lane
from flexhybrid.runtime.engine import Engine, infer
from flexhybrid.runtime.executor import Executor
from flexhybrid.runtime.issuing import Issuer, StreamLane
from flexhybrid.runtime.process_settings import torch_threads
from flexhybrid.runtime.profiling.attention_paths import fastest_paths
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.host_memory import HostMemory
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import Weights
from flexhybrid.runtime.verbs import attending_in_place, graphed
from sim.presets import hybrid, kv_only, kvpr_column, token_recompute

BATCH, CONTEXT = 32, 512
BOUND = 8 * (34 * 16 + 1)
PLANNING_BAR_US, QUEUE_BAR_US, HAND_OFF_BAR_US, POSITION_BAR_US = 4, 10, 30, 300
KNOWN_FORMS = 3  #: iterations after which a decode has had every form of its positions
REPEATS, QUEUE_TASKS = 5, 150_000
#: Contexts are short, so that nothing takes long but calling; lengths differ, so that masks count.
SHORT = Workload(48 + np.arange(8), np.full(8, 24))

TINY = ModelShape("opt-launch", "opt", num_layers=2, hidden=64, num_heads=1, num_kv_heads=1, head_dim=64, ffn=64,
                  vocab=64, max_positions=2048)  # fmt: skip
LAYERS = replace(TINY, num_layers=32)  #: as OPT-6.7B has: what a step makes once for all layers is shared out
_MACHINE = Hardware(
    "launch", "cpu", {"compute": Line(s_per_flop=1e-11, s_per_byte=1e-11), "h2d": Line(s_per_byte=1e-9)}
)
PLANNED = Problem(shape=shape_by_name("opt-6.7b"), dtype="float16", hardware=_MACHINE)
ON_DEVICE = Policy("on the device", Placement(device=1.0), cache={"kv@device": 1.0})  #: a graph launches a layer


def policies() -> list[Policy]:
    """Return a policy of each kind of stream."""
    half = Placement(device=0.5, host=0.5)
    quarters = dict.fromkeys(("act@device", "act@host", "kv@device", "kv@host"), 0.25)
    return [
        hybrid(0.5, BOUND),
        replace(hybrid(0.5, BOUND), name="device and host", weights=half, cache=quarters),
        kvpr_column("pipeline", max_mini_batch_tokens=BOUND),
        replace(hybrid(0.5, BOUND), name="4 bits", bits=Bits(weights=4, kv=4, act=4)),
        replace(kv_only(BOUND), name="attention on the host", attention="host"),
        token_recompute(0.25, BOUND),
    ]


@bench("model")
def bench_launch(table: Table) -> None:
    bench_planning(table)
    bench_planning_of_queue(table)
    bench_hand_off(table)
    with torch_threads(1):
        bench_verbs(table)
        bench_python(table)
        if importlib.util.find_spec("triton") and hasattr(os, "sched_setaffinity"):
            bench_python_as_on_a_gpu(table)


def bench_planning(table: Table) -> None:
    """Microseconds per task of the stream and its dependencies, for the slowest kind of policy: of a short run from its
    prompts on, and of its decode once every form of position has been laid out.

    A step is laid out once for all layers, so the number of layers matters; it is OPT-6.7B's.
    """
    shape, workload = PLANNED.shape, Workload.uniform(BATCH, CONTEXT, 8)
    whole, decode = {}, {}
    for policy in policies():
        times = []
        for _ in range(REPEATS):
            wave, dependencies = admit(PLANNED, policy, workload), Dependencies()
            counts, marks = [0], [time.thread_time()]  # at the first task of each iteration
            for number, task in enumerate(stream(wave)):
                dependencies.add(task)
                if task.iteration == len(marks):
                    counts.append(number)
                    marks.append(time.thread_time())
            counts, marks = [*counts, number + 1], [*marks, time.thread_time()]
            times.append([(marks[-1] - marks[i]) / (counts[-1] - counts[i]) * 1e6 for i in (0, KNOWN_FORMS)])
        whole[policy.name], decode[policy.name] = (min(seconds) for seconds in zip(*times, strict=True))
    kinds = f"a task of {shape.num_layers} layers: slowest of {len(whole)} kinds of policy"
    for name, by_policy in (("", whole), (" of known forms", decode)):
        name = f"planning and dependencies{name}, {kinds}"
        table.at_most(name, max(by_policy.values()), PLANNING_BAR_US, "µs", by_policy=by_policy)


def bench_planning_of_queue(table: Table) -> None:
    """The same for a queue of 1,000 requests of mixed lengths, 128 at a time, in which forms keep changing."""
    generator, us = np.random.default_rng(0), {}
    workload = Workload(generator.integers(16, 1000, 1000), generator.integers(8, 64, 1000))
    for policy in policies():
        tasks, start = islice(stream(open_batch(PLANNED, policy, workload, 128)), QUEUE_TASKS), time.thread_time()
        deque(map(Dependencies().add, tasks), maxlen=0)
        us[policy.name] = (time.thread_time() - start) / QUEUE_TASKS * 1e6
    name = f"planning and dependencies of a queue of mixed lengths, a task: slowest of {len(us)} kinds of policy"
    table.at_most(name, max(us.values()), QUEUE_BAR_US, "µs", by_policy=us)


def bench_hand_off(table: Table) -> None:
    """Time a chain of tasks that changes lanes at every task, so that each hand-off wakes another thread."""
    lanes, cell = ("h2d", "compute", "d2h"), Access(("cell",), 0, 1)
    chain = [Task(i, 0, 0, "work", lanes[i % 3], Work(), reads=(cell,), writes=(cell,)) for i in range(3000)]
    trace = Clock([HostLane(name, lambda task: None) for name in lanes]).run(chain)
    gaps = [later.start_s - earlier.end_s for earlier, later in zip(trace, trace[1:], strict=False)]
    median_us = 1e6 * statistics.median(gaps)
    table.at_most("hand-off to another CPU worker, median", median_us, HAND_OFF_BAR_US, "µs")


def bench_verbs(table: Table) -> None:
    """Microseconds that the verbs of a mini-batch spend on the compute lane in one layer of a decode."""
    layer_us: dict[str, dict[str, float]] = {}
    step_us: dict[str, float] = {}
    per_step = ("embed", "head", "sample")
    for policy in policies():
        times = defaultdict(list)
        policy = replace(policy, max_mini_batch_tokens=4 * 200)
        weights = Weights(TINY, RandomWeights(TINY), "float32", torch.device("cpu"), policy)
        with Session.of(weights, policy, SHORT, hardware=_MACHINE) as session:
            for task in stream(session.wave, first_iteration=1):
                start = time.thread_time()
                session.executor.perform(task)
                times[task.resource, task.verb].append(1e6 * (time.thread_time() - start))
        medians = {verb: statistics.median(us) for (resource, verb), us in times.items() if resource == "compute"}
        layer_us[policy.name] = {verb: us for verb, us in medians.items() if verb not in per_step}
        step_us[policy.name] = sum(medians[verb] for verb in per_step)
    sums = {name: sum(verbs.values()) for name, verbs in layer_us.items()}
    slowest = max(sums, key=lambda name: sums[name])
    name = f"launch: verbs of a mini-batch in a layer, slowest of {len(sums)} kinds of policy ({slowest})"
    table.at_most(name, sums[slowest], POSITION_BAR_US, "µs", by_verb=layer_us)
    slowest = max(step_us, key=lambda name: step_us[name])
    name = f"launch: embed, head and sample of a mini-batch ({slowest})"
    table.at_most(name, step_us[slowest], POSITION_BAR_US, "µs", by_policy=step_us)


def bench_python(table: Table) -> None:
    """CPU microseconds of a mini-batch and layer in a decode: planning, lanes and the verbs of all resources, and the
    copies and products, which are small on this model."""
    us = {}
    for policy in policies():
        weights = Weights(LAYERS, RandomWeights(LAYERS), "float32", torch.device("cpu"), policy)
        with Session.of(weights, replace(policy, max_mini_batch_tokens=4 * 200), SHORT, hardware=_MACHINE) as session:
            us[policy.name] = _us_of_a_mini_batch(session)
    slowest = max(us, key=lambda name: us[name])
    name = f"launch: planning, lanes and all verbs, a mini-batch and layer, slowest of {len(us)} kinds ({slowest})"
    table.at_most(name, us[slowest], POSITION_BAR_US, "µs", by_policy=us)


def _us_of_a_mini_batch(session: Session) -> float:
    """Return the CPU microseconds of a mini-batch and layer in a decode whose forms were seen before."""
    iterations, rounds = int(session.wave.workload.max_tokens.max()) - 1, []
    for _ in range(REPEATS):
        start = time.process_time()
        session.engine.run(session.executor, tasks=stream(session.wave, first_iteration=1))
        rounds.append(time.process_time() - start)
    return 1e6 * min(rounds) / (iterations * session.wave.shape.num_layers * len(session.wave.mini_batches))


def bench_python_as_on_a_gpu(table: Table) -> None:
    """The same as on a GPU, where the planning thread enqueues for all streams and graphs launch what they can: on one
    core, and on all, where a thread that waits for the interpreter's lock wakes on another core each time."""
    for where, cores in (("one core", [min(os.sched_getaffinity(0))]), ("all cores", None)):
        us: dict[str, float] = {}
        without: dict[str, float] = {}
        with _held_to(cores):
            for policy in (*policies(), ON_DEVICE):
                with as_on_a_gpu(replace(policy, max_mini_batch_tokens=4 * 200)) as session:
                    of = us if session.executor.graphs else without
                    of[policy.name] = _us_of_a_mini_batch(session)
        slowest = max(us, key=lambda name: us[name])
        kinds = f"slowest of {len(us)} kinds that graphs launch ({slowest})"
        name = f"launch: all that Python does as on a GPU, {where}, a mini-batch and layer, {kinds}"
        table.at_most(name, us[slowest], POSITION_BAR_US, "µs", by_policy=us, without_graphs=without)


@contextmanager
def _held_to(cores: Iterable[int] | None) -> Iterator[None]:
    """Run this thread, and those that it starts, on some cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if cores is None else cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class NoDevice:
    """A stream, event, graph or copies whose calls do nothing."""

    def __init__(self, *_):
        self.host_memory = HostMemory(pinned=False)

    def record(self, **_) -> NoDevice:
        return self

    def seconds(self, _event: NoDevice) -> float:
        return 0.0

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return _nothing


def _nothing(*_, **__) -> None: ...


def _left_out(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a product that leaves its ``out`` as it is."""
    return lambda *factors, out=None: product(*factors) if out is None else out


@contextmanager
def as_on_a_gpu(policy: Policy) -> Iterator[Session]:
    """Make a session of LAYERS whose tasks are those of a GPU, enqueued as there, on no device."""
    from flexhybrid.runtime.kernels import attend_triton, rows_numba

    weights = Weights(LAYERS, RandomWeights(LAYERS), "float32", torch.device("cpu"), policy)
    paths = fastest_paths("cpu", "float32", LAYERS.queries_per_key, LAYERS.head_dim)._replace(in_place=True)
    problem = Problem(shape=LAYERS, dtype="float32", hardware=_MACHINE, device="cuda", attention=paths)
    wave = admit(problem, policy, SHORT)
    engine, nothing = Engine(weights, policy, buffer_sizes(wave)), cast("Any", NoDevice())
    engine.copies, lanes_of = nothing, engine.lanes

    def lanes(executor: Executor) -> list[Lane]:
        issuer, names = Issuer(infer), ("compute", "h2d", "d2h")
        on_host = [lane for lane in lanes_of(executor) if lane.name not in names]
        joint = {"compute": graphed.JointLaunch(executor)} if executor.graphs else {}
        return [*(StreamLane(name, executor.perform, nothing, issuer, joint.get(name)) for name in names), *on_host]

    with ExitStack() as held:
        held.callback(engine.close)
        for owner, name, stand_in in (
            (engine, "lanes", lanes),
            (torch.cuda, "CUDAGraph", NoDevice),
            (torch.cuda, "graph_pool_handle", NoDevice),
            (torch, "addmm", _left_out(torch.addmm)),  # KV-Gen's product
            (attend_triton, "launch", _nothing),
            (rows_numba, "quantize", _nothing),
            (rows_numba, "dequantize", _nothing),
            (attending_in_place, "by_numba", _nothing),
        ):
            held.enter_context(patch.object(owner, name, stand_in))
        session = Session(engine, wave)
        if without_graphs(problem, policy) is None:
            graphed.attach(session.executor)
        yield session
