"""Time the executor's tasks on this machine under load, while the link copies data.

A kernel runs slower while the link is busy (by a third on two CPU cores), so no kernel is timed alone. A small model
runs at several sizes, and the traces give the seconds of every task. A few more runs keep all data on the device. They
give separate lines for policies that move nothing.

On a CPU, interruptions and cold cores lengthen tasks, and nothing shortens them. Therefore:

- The sample of a size is its undisturbed time: the median of the faster half of its tasks.
- All runs are measured in two passes. Runs whose long tasks differ between passes are measured again, until the two
  shortest times of each size agree or CPU_SECONDS are over.
- A task that follows a pause is left out: its matrix products take 1.1 to 1.6 times as long on an Intel Xeon with AMX.
  A device that waits for its link does not limit a run. So a slow paced link is sped up to keep the device busy.
- The samples exclude the mean time that copies, threads and the interpreter's lock add. This contention is stored for
  each resource as seconds per task and a factor (``Hardware.line``). Without it, 17 of 18 predictions were too low.

A GPU times its own kernels and needs one pass of fewer runs. ``policy_search.fit`` fits lines through the samples.
"""

import contextlib
import functools
import gc
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from flexhybrid.core.admission import open_batch
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import ALONE_SUFFIX, LAUNCHER, LINKS, crosses_link, resource_of_line
from flexhybrid.core.memory import fits, memory_plan
from flexhybrid.core.model.shape import ModelShape, shape_by_name
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.problem import NO_BUDGETS, Budgets, Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.task import Task
from flexhybrid.core.trace import TraceEvent
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Prefixes, Workload
from flexhybrid.runtime.cuda import CudaCopies
from flexhybrid.runtime.engine import Engine, RunControl, WaveResult
from flexhybrid.runtime.links import CpuCopies
from flexhybrid.runtime.profiling.attention_paths import fastest_paths
from flexhybrid.runtime.profiling.cpu_use import CpuUse
from flexhybrid.runtime.runnable import check_runnable
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import Weights, WeightSlots


class ProfileRun(NamedTuple):
    """One profiling run: its requests, and the fields of its policy except ``max_mini_batch_tokens``."""

    requests: int
    context: int
    per_mini_batch: int  #: requests
    cache: dict[str, float]
    other: dict = {}  #: the policy's other fields; the default for weights is the host
    shared: int = 0  #: length of the prefix that all requests share, in tokens

    @property
    def policy(self) -> Policy:
        bound = self.per_mini_batch * (self.context + 48)
        on_host = Policy(cache=self.cache, max_mini_batch_tokens=bound, weights=Placement(host=1.0))
        return replace(on_host, **self.other)


def _mix(requests: int, context: int, act: float, per_mini_batch: int) -> ProfileRun:
    return ProfileRun(requests, context, per_mini_batch, {"kv@host": 1 - act, "act@host": act})


#: Mixes of KV and ACT on the host, in one to four mini-batches of 250 to 8,000 tokens. Each number of mini-batches
#: gives another size for the slices in which weights are loaded.
MIXES = (
    _mix(4, 128, 0.50, 2),
    _mix(16, 256, 1.00, 4),
    _mix(8, 512, 0.25, 4),
    _mix(16, 256, 0.75, 8),
    _mix(16, 512, 0.50, 8),
    _mix(16, 512, 1.00, 8),
    _mix(16, 512, 0.00, 16),
    _mix(32, 128, 0.50, 32),
)

_PACKED = Bits(weights=4, kv=4, act=4)
_HALF = {"kv@host": 0.5, "act@host": 0.5}

#: Policies of other systems: 4 bits, attention or hidden states on the host, a cache on the device, recomputed tokens.
#: A line is valid for one number of bits (8 bits cost less per byte), and systems that quantize use 4. Runs with equal
#: bits are consecutive, because a change of bits loads the weights again.
OTHERS = (
    ProfileRun(4, 256, 2, {"kv@host": 1.0}, {"attention": "host"}),
    ProfileRun(8, 512, 4, {"kv@host": 1.0}, {"attention": "host"}),
    ProfileRun(4, 128, 2, {"tok": 0.25, "kv@device": 0.75}, {"hidden": "host"}),
    ProfileRun(8, 256, 4, {"tok": 0.25, "kv@device": 0.75}, {"hidden": "host"}),
    ProfileRun(4, 128, 2, _HALF, {"bits": _PACKED}),
    ProfileRun(8, 256, 4, _HALF, {"bits": _PACKED}),
    ProfileRun(16, 512, 8, _HALF, {"bits": _PACKED}),
)

#: Runs with all data on the device: nothing crosses the link while their verbs run.
_RESIDENT = {"kv@device": 1.0}, {"weights": Placement(device=1.0)}
ALONE = (
    ProfileRun(4, 128, 2, *_RESIDENT),
    ProfileRun(16, 256, 8, *_RESIDENT),
    ProfileRun(96, 64, 96, *_RESIDENT),  # a mini-batch as large as in jobs over files
    ProfileRun(48, 256, 16, *_RESIDENT),
)


def _sharing(*place) -> tuple[ProfileRun, ...]:
    """Return two runs with a shared prefix, which the rest of the prompts and the decode steps attend to."""
    return ProfileRun(8, 128, 8, *place, shared=64), ProfileRun(32, 256, 32, *place, shared=192)


_HOST_KV = {"kv@host": 1.0}
#: Runs with a shared prefix. Many queries attend to data that is read once, so the time of attention depends on FLOPs.
#: In all other runs it depends on bytes.
SHARED = (
    ProfileRun(8, 256, 2, _HOST_KV, shared=192),  # chunks of one or two prompts, like those of joining requests
    *_sharing(_HOST_KV),
    *_sharing(_HOST_KV, {"attention": "host"}),
)
ALONE += _sharing(*_RESIDENT)
RUNS = MIXES + SHARED + OTHERS + ALONE
#: Runs on a GPU. KV-Gen takes about 10^10, 10^11 and 10^12 FLOP at OPT-6.7B's width; the small sizes do not fill a GPU.
GPU_RUNS = (MIXES[0], MIXES[3], _mix(16, 928, 1.00, 16), MIXES[6]) + SHARED + OTHERS + ALONE


#: Parts that a profile may omit if no requested or searched policy can use them. Every profile has mixes of KV and ACT
#: on the host.
PARTS = frozenset({"resident", "shared prefixes", "host attention", "token recomputation", "four bits"})


def parts_of(run: ProfileRun) -> frozenset[str]:
    """Return the parts of a profile that a run belongs to. A profile without one of these parts omits the run."""
    uses = {
        "resident": run.policy.stays_on_device,
        "shared prefixes": run.shared > 0,
        "host attention": run.policy.host_attends,
        "token recomputation": "tok" in run.cache,
        "four bits": run.policy.bits != Bits(),
    }
    return frozenset(part for part, is_used in uses.items() if is_used)


def runs_of(device: str, parts: frozenset[str] = PARTS) -> list[ProfileRun]:
    """Return the runs of one pass for these parts of a profile. ``device``: "cpu" or "cuda"."""
    return [run for run in (GPU_RUNS if device == "cuda" else RUNS) if parts_of(run) <= parts]


def num_passes(device: str) -> int:
    """Return the number of passes over all runs."""
    return 1 if device == "cuda" else 2


#: Policies that measure the mean time of Python per task, and the narrow model that they run.
LAUNCHED = _mix(4, 100, 0.50, 2).policy, ProfileRun(4, 100, 2, *_RESIDENT).policy
LAUNCHED_SHAPE = replace(shape_by_name("opt-125m"), num_layers=32, hidden=64, ffn=64, vocab=64, num_kv_heads=2)
MOST_LAYERS = 8  #: limit of profiled layers
#: Minimum number of layers on a GPU. A step's first layer waits until a copy of weights lets its index tensors through.
#: With four layers this wait is an outlier, as in a whole model; with two it would be half of the mean.
GPU_LAYERS = 4
SHORTEST = 32  #: tokens; a context is not halved below this length
#: Samples longer than this multiple of the median are left out of a mean, as disturbed by other processes. A multiple
#: of 3 is too small: one in ten short tasks of a job waits that long for a thread or for Python's lock.
OUTLIER = 10.0
PAUSE_S = 2e-4  #: a task follows a pause if it begins this long after the previous task's end
LEAST_IN_A_ROW = 4  #: if fewer tasks of a size follow no pause, all tasks of the size count
#: The host of a virtual machine steals the same share of a longer task as of the whole run. It steals nothing from most
#: shorter tasks, so the faster half of them is undisturbed.
LONG_S = 1e-2
HASTE = 1.25  #: rate of a sped-up link, as a multiple of the rate at which the device uses the data
AGREE = 1.05  #: the two shortest times of a size agree up to this ratio
RELEVANT = 0.05  #: a size matters from this share of its run's computing time
CPU_SECONDS = 45.0  #: after this time, a CPU's runs are not measured again
#: A GPU's times of one size may form two clusters, separated by a gap of at least this ratio, each with at least an
#: eighth of the times. The upper cluster is left out, because it waits for the host: the first layer of a step takes
#: 300 µs on an H200, of which 25 µs are work.
CLUSTERS_APART, CLUSTER_SHARE = 3.0, 1 / 8
DISAGREE, REPORTED_S = 1.15, 1e-3  #: two passes' times above this ratio are reported, if they are this long
DECODE_SECONDS, DECODES = 0.4, 5  #: limits of each run's decoding in a pass; fewer steps could miss slow phases
ANSWER, SHARED_ANSWER = 4, 8  #: tokens; a batch with a shared prefix is decoded only once
LINK_SIZES = tuple(1 << n for n in range(16, 25, 2))  #: bytes, 64 KiB to 16 MiB
LINK_SECONDS = 0.06  #: approximate time for all copies of one size

Sample = tuple[float, float, float]  #: (flops, bytes, seconds)


@dataclass
class ProfileSamples:
    """Samples by line key; the sizes whose passes disagree; the faster compute dtype of a CPU (None on a GPU)."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    disagreements: list[str] = field(default_factory=list)
    faster_dtype: str | None = None
    attends_in_place: bool = False  #: whether the runs attended in place (``AttentionPaths.in_place``)
    #: Computing resource of a CPU -> (undisturbed seconds, mean seconds, number of tasks) of each size.
    #: "compute_alone" holds the runs in which nothing crosses the link.
    contention: dict[str, list[tuple[float, float, int]]] = field(default_factory=dict)
    after_pause: dict[str, float] = field(default_factory=dict)  #: line -> time after a pause / time without a pause


def faster_cpu_dtype(shape: ModelShape) -> str:
    """Return "float32" or "bfloat16", whichever multiplies KV-Gen's matrices faster on this CPU."""
    return _faster_product(shape.hidden, shape.kv_width)


@functools.cache
def _faster_product(hidden: int, width: int) -> str:
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(512, hidden, dtype=torch.float32).to(dtype)
        b = torch.randn(width, hidden, dtype=torch.float32).to(dtype)
        times = []
        for _ in range(6):
            start = time.perf_counter()
            torch.nn.functional.linear(a, b)
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times[1:])
    return "bfloat16" if seconds[torch.bfloat16] < seconds[torch.float32] else "float32"


def profile(
    shape: ModelShape,
    dtype: str,
    device: torch.device,
    link_gb_per_s: float | None = None,
    on_progress: Callable[[], object] | None = None,
    runs: Sequence[ProfileRun] | None = None,
    budgets: Budgets = NO_BUDGETS,
) -> ProfileSamples:
    """Measure this machine for models of this shape, by running a few layers with random weights.

    ``runs`` defaults to ``runs_of`` the device. ``on_progress`` is called after each run of the first ``num_passes``
    passes. Contexts are cut to the model's maximum length, and runs are halved until they fit ``budgets``. Runs that
    the executor refuses for this model (for example, if its rows cannot be quantized) are left out; their verbs get no
    line.
    """
    small = profiled_layers(shape, GPU_LAYERS if device.type == "cuda" else 2)
    placed: dict[object, tuple[Weights, WeightSlots]] = {}  # only the latest bits and placement

    def weights_of(policy: Policy) -> tuple[Weights, WeightSlots]:
        key = policy.bits.weights, policy.weights
        if key not in placed:
            placed.clear()  # two sets of weights may exceed the budgets
            weights = Weights(small, RandomWeights(small, device=device.type), dtype, device, policy)
            placed[key] = weights, weights.make_slots()
        return placed[key]

    began, todo = time.perf_counter(), runs_of(device.type) if runs is None else list(runs)
    all_runs, passes, relevant = todo, [], {}
    while todo:
        times: TaskTimes = {}
        for run in todo:
            of_run = kernel_times(_run(small, weights_of, run, link_gb_per_s, budgets), device.type)
            relevant[id(run)] = _relevant_sizes(of_run)
            add_times(times, of_run)
            gc.collect()  # reference cycles of a finished run keep its buffers
            if on_progress and len(passes) < num_passes(device.type):
                on_progress()
        if len(passes) < num_passes(device.type):
            for key, seconds in _link_samples(device, link_gb_per_s):
                times.setdefault(key, ([], []))[0].append(seconds)
        passes.append(times)
        if len(passes) >= num_passes(device.type):
            apart = _disagreeing_sizes(passes, device.type)
            in_time = device.type == "cpu" and time.perf_counter() - began < CPU_SECONDS
            todo = [run for run in all_runs if relevant[id(run)] & apart] if in_time else []
    result = samples_of(passes, device.type)
    result.samples[LAUNCHER] = [(0.0, 0.0, launch_seconds(shape, dtype, device))]
    # Verbs without samples only move memory, like assemble (or attend in place) on the device, scatter on the host.
    result.samples["compute"] = result.samples.get("assemble", result.samples["attend"])
    result.samples["host_compute"] = result.samples["scatter"]
    if "dequantize_weights" in result.samples:
        # All layers have one size, so their samples give no slope. Keys and values are dequantized at the same rate. A
        # model whose checkpoint is packed may have only samples of its own weights, which then serve this model alone.
        result.samples["dequantize_weights"] += result.samples.get("dequantize_kv", [])
    if device.type == "cpu":
        result.faster_dtype = faster_cpu_dtype(shape)
    result.attends_in_place = fastest_paths(device.type, dtype, shape.queries_per_key, shape.head_dim).in_place
    return result


def profiled_layers(shape: ModelShape, least: int = 2) -> ModelShape:
    """Return a model of the first layers that have all kinds of weights: ``least`` to MOST_LAYERS layers.

    Its layers use the windows of the whole model in turn.
    """
    counts = enumerate(shape.weights_counts)
    first = [next(i for i in range(shape.num_layers) if shape.weights_kind(i) == kind) for kind, n in counts if n]
    windows = list(dict.fromkeys(kind.window for kind in shape.layer_kinds))
    count = min(MOST_LAYERS, max(least, 1 + max(first), len(windows)))
    small = shape.of_layers(range(min(count, shape.num_layers) if shape.modules else count))
    sources = map(small.source_of, range(small.num_layers))
    turns = (replace(small.attention[i], window=windows[of % len(windows)]) for i, of in enumerate(sources))
    return replace(small, attention=tuple(turns))


class Stretch(NamedTuple):
    """The trace of one timed call of the executor."""

    trace: list[TraceEvent]
    seconds: float
    left: float  #: share of the seconds that a virtual machine's host did not steal (``CpuUse.left_since``)
    alone: bool  #: whether nothing crossed the link
    hastened: bool = False  #: whether the link was faster than the requested pace


#: (line key, FLOPs, bytes) -> (seconds of each task without a pause before it, and with one)
TaskTimes = dict[tuple[str, float, float], tuple[list[float], list[float]]]


def kernel_times(stretches: Sequence[Stretch], device: str) -> TaskTimes:
    """Return the seconds of all tasks that have a line.

    Stolen time is subtracted from long CPU tasks (LONG_S). Without this, two profiles of one virtual machine predicted
    11.5 and 17.8 s for the same job. Tasks after a pause are told apart on a CPU only.
    """
    on_cpu = {"host_compute", "compute"} if device == "cpu" else {"host_compute"}
    times: TaskTimes = {}
    for stretch in stretches:
        ended: dict[str, float] = {}
        for task, start, end in stretch.trace:
            waited = device == "cpu" and start - ended.get(task.resource, -math.inf) >= PAUSE_S
            ended[task.resource] = end
            if (key := _line_key(task)) is None or (stretch.hastened and task.resource in LINKS):
                continue
            key += ALONE_SUFFIX * stretch.alone
            bytes_ = task.work.link_bytes if task.resource in LINKS else task.work.memory_bytes
            share = stretch.left if task.resource in on_cpu and end - start >= LONG_S else 1.0
            of_size = times.setdefault((key, task.work.flops, bytes_), ([], []))
            of_size[waited].append((end - start) * share)
    return times


def add_times(times: TaskTimes, more: TaskTimes) -> None:
    """Add the seconds of more tasks to ``times``."""
    for key, added in more.items():
        for own, others in zip(times.setdefault(key, ([], [])), added, strict=True):
            own += others


def _counting_seconds(key: str, times: tuple[list[float], list[float]]) -> list[float]:
    """Return the seconds that count: all on a link; elsewhere those without a pause, if there are LEAST_IN_A_ROW."""
    in_a_row, paused = times
    return in_a_row if len(in_a_row) >= LEAST_IN_A_ROW and not crosses_link(key) else in_a_row + paused


def _relevant_sizes(times: TaskTimes) -> set:
    """Return the sizes that took more than RELEVANT of a run's computing seconds."""
    seconds = {key: sum(map(sum, of)) for key, of in times.items() if not crosses_link(key[0])}
    return {key for key, of in seconds.items() if of > RELEVANT * sum(seconds.values())}


def samples_of(passes: Sequence[TaskTimes], device: str) -> ProfileSamples:
    """Return the samples of all passes; for a CPU also its contention and its slowdown after pauses."""
    result = typical_of_passes(*(typical_times(times, device) for times in passes))
    merged: TaskTimes = {}
    for times in passes:
        add_times(merged, times)
    known = {(name, flops, moved): s for name, of in result.samples.items() for flops, moved, s in of}
    slower: dict[str, list[float]] = {}
    for key, undisturbed_s in known.items() if device == "cpu" else ():
        name, resource = key[0], resource_of_line(key[0])
        if resource not in ("compute", "host_compute"):
            continue
        counted = np.array(_counting_seconds(name, merged[key]))
        mean_s = counted[counted <= OUTLIER * np.median(counted)].mean()
        of_resource = resource + ALONE_SUFFIX * name.endswith(ALONE_SUFFIX)
        result.contention.setdefault(of_resource, []).append((undisturbed_s, float(mean_s), len(counted)))
        if min(map(len, merged[key])) >= LEAST_IN_A_ROW:
            slower.setdefault(name, []).append(_lower_half(merged[key][1]) / _lower_half(merged[key][0]))
    result.after_pause = {name: float(np.median(ratios)) for name, ratios in slower.items()}
    return result


def typical_times(times: TaskTimes, device: str) -> dict[tuple, float]:
    """Return the typical seconds of each size: the mean on a GPU and on a CPU's links, else the undisturbed time.

    A CPU's link is paced, so only the mean of consecutive copies is right.
    """
    return {
        key: _lower_half(of) if device == "cpu" and not crosses_link(key[0]) else _typical(of, device)
        for key, of in ((key, _counting_seconds(key[0], of)) for key, of in times.items())
    }


def typical_of_passes(*passes: dict[tuple, float]) -> ProfileSamples:
    """Return the mean of each size's two shortest times, and the sizes whose two shortest times disagree.

    A pass is {(line key, FLOPs, bytes): seconds}. Sizes missing from one of the first two passes are left out.
    """
    result = ProfileSamples()
    for key in sorted(set.intersection(*map(set, passes[:2]))):
        (name, flops, num_bytes), seconds = key, sorted(of[key] for of in passes if key in of)[:2]
        if seconds[-1] > max(DISAGREE * seconds[0], REPORTED_S):
            times = " and ".join(f"{1e3 * of:.2f}" for of in seconds)
            result.disagreements.append(f"{name} at {flops / 1e9:.2f} GFLOP, {num_bytes / 1e6:.1f} MB: {times} ms")
        result.samples.setdefault(name, []).append((float(flops), float(num_bytes), sum(seconds) / len(seconds)))
    return result


def _disagreeing_sizes(passes: Sequence[TaskTimes], device: str) -> set:
    """Return the sizes of REPORTED_S or more whose two shortest times differ by more than AGREE."""
    typical = [typical_times(times, device) for times in passes]
    shortest = {key: sorted(of[key] for of in typical if key in of)[:2] for key in set().union(*typical)}
    return {key for key, of in shortest.items() if of[-1] > max(AGREE * of[0], REPORTED_S)}


def _lower_half(samples: Sequence[float]) -> float:
    """Return the median of the faster half of the samples."""
    times = np.sort(samples)
    return float(np.median(times[: (len(times) + 1) // 2]))


def _typical(samples: list[float], device: str) -> float:
    """Return the mean without outliers; on a GPU without the upper of two clusters (CLUSTERS_APART)."""
    times = np.sort(samples)
    if device == "cuda" and len(least := times[: math.ceil(CLUSTER_SHARE * len(times))]) < len(times):
        gaps = times[len(least) : len(times) - len(least) + 1] / times[len(least) - 1 : len(times) - len(least)]
        if gaps.max() >= CLUSTERS_APART:
            times = times[: len(least) + gaps.argmax()]
    return float(times[times <= OUTLIER * np.median(times)].mean())


def _line_key(task: Task) -> str | None:
    """Return the key of a task's line: its verb and the suffix ``Work.line``; None for tasks without samples.

    Stores have no samples, because the few rows of a decode step say nothing about a link. They use the line of d2h.
    A selection's work after a prompt uses the line of its guesses in decode steps.
    """
    after_prompt = task.verb == "speculate" and not task.iteration
    return None if task.resource == "d2h" or after_prompt else task.verb + task.work.line


def _run(
    shape: ModelShape,
    weights_of: Callable[[Policy], tuple[Weights, WeightSlots]],
    run: ProfileRun,
    link_gb_per_s: float | None,
    budgets: Budgets,
) -> list[Stretch]:
    """Run the prefill and three decode iterations, then repeat the decode for DECODE_SECONDS or until DECODES calls.

    Requests that share a prefix are decoded once. A GPU runs everything once before it is timed. Return [] if the
    executor refuses the model, or if a run with resident data or a shared prefix does not fit the budgets.
    """
    alone, run = run in ALONE, run._replace(context=min(run.context, shape.max_positions - SHARED_ANSWER))
    try:
        check_runnable(shape, run.policy)
    except InputError:
        return []
    weights, slots = weights_of(run.policy)
    device, dtype = weights.device.type, weights.dtype_name
    paths = fastest_paths(device, dtype, shape.queries_per_key, shape.head_dim)
    problem = Problem(shape=shape, dtype=dtype, device=device, attention=paths)
    while True:
        wave = _wave(problem, run)
        sizes = buffer_sizes(wave)
        if fits(memory_plan(problem, wave.policy, sizes), budgets):
            break
        if run.shared:
            return []
        if (fewer := _halved(run)) == run:
            if wave.policy.stays_on_device:
                return []  # no job fits either
            break
        run = fewer
    engine = Engine(weights, wave.policy, sizes, link_gb_per_s, slots=slots)
    session = Session(engine, wave)
    if device == "cuda":  # compile kernels and capture graphs before timing
        session.generate()
        session = Session(engine, _wave(problem, run)) if run.shared else session

    def timed(action: Callable[[], WaveResult]) -> Stretch:
        before = CpuUse.now()
        result = action()
        after = CpuUse.now()
        return Stretch(result.trace, after.at_s - before.at_s, after.left_since(before), alone)

    stretches = [timed(session.generate)]
    if not run.shared:
        until = time.perf_counter() + DECODE_SECONDS
        hastened = device == "cpu" and bool(link_gb_per_s) and _hasten(engine, stretches[0].trace, link_gb_per_s)
        while len(stretches) < DECODES and (time.perf_counter() < until or (hastened and len(stretches) == 1)):
            stretches.append(timed(session.decode_result)._replace(hastened=hastened))
    session.engine.close()
    return stretches


def _hasten(engine: Engine, trace: list[TraceEvent], gb_per_s: float) -> bool:
    """Speed up a paced link so that it does not delay these decode iterations; return whether its pace changed."""
    decoded = [event for event in trace if event.task.iteration]
    computing_s = sum(end - start for task, start, end in decoded if task.resource == "compute")
    num_bytes = sum(task.work.link_bytes for task, *_ in decoded if task.resource == "h2d")
    faster = HASTE * num_bytes / max(computing_s, 1e-9) / 1e9
    if faster <= gb_per_s or not isinstance(engine.copies, CpuCopies):
        return False
    engine.copies.set_rate(faster)
    return True


def launch_seconds(shape: ModelShape, dtype: str, device: torch.device) -> float:
    """Return the processor seconds that Python takes per decode task of a model with this shape's heads.

    The measured model is so narrow that its kernels take little time. It has 32 layers, like real models, because the
    setup of a step counts once for all its layers: with four layers, a task seemed to take five times as long.
    """
    narrow = replace(LAUNCHED_SHAPE, num_heads=2 * shape.queries_per_key, head_dim=shape.head_dim)
    lengths, source = Workload.uniform(4, 32, 8), RandomWeights(narrow, device=device.type)
    seconds, num_tasks = 0.0, 0
    for policy in LAUNCHED:
        weights = Weights(narrow, source, dtype, device, policy)
        with Session.of(weights, policy, lengths) as session:
            if graphs := session.executor.graphs:
                graphs.joins_steps = False  # a graph of a whole step would take less Python time per task
            session.generate(RunControl())  # compile kernels and capture graphs before timing
            num_tasks += sum(1 for _ in stream(session.wave, first_iteration=1))
            seconds += min(session.decode_result(control=RunControl()).launch_s for _ in range(2))
    return seconds / num_tasks


def _wave(problem: Problem, run: ProfileRun) -> Wave:
    """Return the wave of a run's requests; requests that share a prefix get an open batch."""
    if not run.shared:
        return admit(problem, run.policy, Workload.uniform(run.requests, run.context, ANSWER))
    beginning = Prefixes(np.array([min(run.shared, run.context - 1)]), np.array([-1]), np.zeros(run.requests, np.int64))
    workload = replace(Workload.uniform(run.requests, run.context, SHARED_ANSWER), prefixes=beginning)
    return open_batch(problem, run.policy, workload, run.requests)


def _halved(run: ProfileRun) -> ProfileRun:
    """Return the run with half its requests; for a single request, with half its context, at least SHORTEST tokens."""
    if run.requests > 1:
        return run._replace(requests=run.requests // 2, per_mini_batch=max(1, run.per_mini_batch // 2))
    return run._replace(context=max(run.context // 2, min(run.context, SHORTEST)))


def _link_samples(device: torch.device, link_gb_per_s: float | None) -> list:
    """Return ((line key, 0, bytes), seconds) of copies in each link direction, alone and both at once.

    A paced CPU link is also measured without its pace, so that one profile is valid for paced and unpaced runs.
    """
    if device.type == "cuda":
        return _time_links(CudaCopies(), device)
    samples = _time_links(CpuCopies(link_gb_per_s), device)
    return samples + (_time_links(CpuCopies(), device, "_unpaced") if link_gb_per_s else [])


def _time_links(copies: CpuCopies | CudaCopies, device: torch.device, suffix: str = "") -> list:
    host = {size: copies.host_memory.bytes(size) for size in LINK_SIZES}
    target = {size: torch.zeros(size, dtype=torch.uint8, device=device) for size in LINK_SIZES}

    def time_copies(direction: str, key: str) -> list:
        """Time consecutive copies. Leave out the first ones: they wake the thread, and are paced less."""
        own = torch.cuda.Stream(device) if device.type == "cuda" else None

        def seconds_of(count: int, size: int) -> float:
            start = time.perf_counter()
            with torch.cuda.stream(own) if own else contextlib.nullcontext():
                for _ in range(count):
                    if direction == "h2d":
                        copies.copy_h2d(target[size], host[size])
                    else:
                        copies.copy_d2h(host[size], target[size])
            if own:
                own.synchronize()
            return time.perf_counter() - start

        samples = []
        for size in LINK_SIZES:
            once = seconds_of(2, size) / 2
            count = max(2, min(200, round(LINK_SECONDS / max(once, 1e-6))))
            samples.append(((key + suffix, 0, size), seconds_of(count, size) / count))
        return samples

    directions = ("h2d", "d2h")
    samples = [sample for direction in directions for sample in time_copies(direction, direction)]
    with ThreadPoolExecutor(2) as both:
        for timed in both.map(time_copies, directions, ("h2d_both", "d2h_both")):
            samples += timed
    return samples
