"""Samples of this machine under load: the executor's own tasks, timed while the link copies.

Kernels beside a busy link are slower than alone (on two CPU cores by a third), so nothing is timed by itself: whole
runs of a small model are made at several sizes and every task's time is taken from their traces; a few more, in which
all lies on the device, give lines of their own for policies that move nothing. Each size is measured in two
passes at different times, their mean stands for it, and sizes whose passes disagree are named. The mean counts within a
pass, too: on a CPU the link's copies interrupt one kernel in a few, and a quantile would not see them. The better pass
alone made seventeen predictions of eighteen come early: a run is long enough to see a machine's bad moments.
Lines through the samples are fitted elsewhere (policy_search.fit).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import ALONE_SUFFIX, LINKS
from flexhybrid.core.memory import BufferSizes, buffer_sizes, fits, memory_plan
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.task import Task
from flexhybrid.core.trace import TraceEvent, Window
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.profiling.cpu_use import CpuUse
from flexhybrid.runtime.runnable import check_runnable
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import Weights, WeightSlots


class Run(NamedTuple):
    """One profiling run: a policy's fields beside its mini-batch bound, and the batch it is run with."""

    requests: int
    context: int
    per_mini_batch: int  #: requests
    cache: dict[str, float]
    other: dict = {}  #: the policy's other fields


def _mix(requests: int, context: int, act: float, per_mini_batch: int) -> Run:
    return Run(requests, context, per_mini_batch, {"kv@host": 1 - act, "act@host": act})


#: Mini-batches from 250 to 8,000 tokens, all mixes, and one to four mini-batches, so that slices of weights differ too.
MIXES = (
    _mix(4, 128, 0.50, 2),
    _mix(16, 256, 1.00, 4),
    _mix(8, 512, 0.25, 4),
    _mix(16, 256, 0.75, 8),
    _mix(16, 512, 0.50, 8),
    _mix(16, 512, 1.00, 4),
    _mix(16, 512, 0.00, 16),
    _mix(32, 128, 0.50, 32),
)

_PACKED = Bits(weights=4, kv=4, act=4)
_HALF = {"kv@host": 0.5, "act@host": 0.5}

#: What other systems do besides: four bits, attention and hidden states on the host, a cache on the device, a prefix
#: computed anew. A line holds for one number of bits, and eight cost less a byte: the systems that pack take four. Runs
#: with the same bits follow one another: each change makes the weights anew.
OTHERS = (
    Run(4, 256, 2, {"kv@host": 1.0}, {"attention": "host"}),
    Run(8, 512, 4, {"kv@host": 1.0}, {"attention": "host"}),
    Run(4, 128, 2, {"tok": 0.25, "kv@device": 0.75}, {"hidden": "host"}),
    Run(8, 256, 4, {"tok": 0.25, "kv@device": 0.75}, {"hidden": "host"}),
    Run(4, 128, 2, _HALF, {"bits": _PACKED}),
    Run(8, 256, 4, _HALF, {"bits": _PACKED}),
)

#: All of it on the device: what verbs take while nothing crosses the link.
_RESIDENT = {"kv@device": 1.0}, {"weights": Placement(device=1.0)}
ALONE = (
    Run(4, 128, 2, *_RESIDENT),
    Run(16, 256, 8, *_RESIDENT),
    Run(96, 64, 96, *_RESIDENT),  # a file's requests are many in a mini-batch
    Run(48, 256, 16, *_RESIDENT),
)
RUNS = MIXES + OTHERS + ALONE
SHORTEST = 32  #: tokens, to which a context is cut at most
#: Times the median: a stranger's doing, left out of the mean. Not three: in a job one short task in ten waits that long
#: for a thread or for Python's lock, which made predictions early.
OUTLIER = 10.0
DISAGREE = 1.15  #: passes further apart than this are reported
DECODE_SECONDS, DECODES = 0.4, 5  #: of each run and pass: a small model's few steps could all fall in a good moment
LINK_SIZES = tuple(1 << n for n in range(16, 25, 2))  #: bytes, 64 KiB to 16 MiB
LINK_SECONDS = 0.06  #: copies of one size go back to back for about this long

Sample = tuple[float, float, float]  #: (flops, bytes, seconds)


@dataclass
class ProfileSamples:
    """Samples per line key, what the two passes disagreed on, and the faster compute dtype (CPU; else None)."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    disagreements: list[str] = field(default_factory=list)
    faster_dtype: str | None = None


def faster_cpu_dtype(shape: ModelShape) -> str:
    """float32 or bfloat16: whichever multiplies KV-Gen's matrices faster here."""
    return _faster_product(shape.hidden, shape.kv_width)


@functools.cache
def _faster_product(hidden: int, width: int, rows: int = 512) -> str:
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(rows, hidden).to(dtype)
        b = torch.randn(width, hidden).to(dtype)
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
    on_progress: Callable[[], None] | None = None,
    runs: Sequence[Run] = RUNS,
    budgets: dict[str, int | None] | None = None,
) -> ProfileSamples:
    """Measure this machine for models of this shape (two of its layers are run, with random weights).

    ``on_progress`` is called 2 · len(runs) times. Contexts are cut to the model's positions, and runs to what
    ``budgets`` hold (bytes a tier). Runs that the executor refuses for this model (rows that do not pack) are left out,
    and their verbs have no line.
    """
    small = replace(shape, num_layers=2)
    placed: dict[object, tuple[Weights, WeightSlots]] = {}  # of the bits and places at hand

    def weights_of(policy: Policy) -> tuple[Weights, WeightSlots]:
        which = policy.bits.weights, policy.weights
        if which not in placed:
            placed.clear()  # one set at a time: both may be more than the budgets hold
            weights = Weights(small, RandomWeights(small, device=device.type), dtype, device, policy)
            placed[which] = weights, weights.make_slots()
        return placed[which]

    passes: tuple[list[Stretch], list[Stretch]] = [], []
    links: list[list] = []
    for stretches in passes:
        for run in runs:
            stretches += _run(small, weights_of, run, link_gb_per_s, budgets or {})
            gc.collect()  # of a run that is over, circles keep the buffers
            if on_progress:
                on_progress()
        links.append(_link_samples(device, link_gb_per_s))
    usual = usually_left(sum(passes, []))
    typical = []
    for stretches, of_links in zip(passes, links, strict=True):
        found = kernel_times(stretches, usual, device.type)
        for key, seconds in of_links:
            found.setdefault(key, []).append(seconds)
        typical.append({key: _typical(times) for key, times in found.items()})
    result = typical_of_passes(*typical)
    # Verbs without samples of their own only move memory: as assemble does on the device, as scatter does on the host.
    result.samples["compute"] = result.samples["assemble"]
    result.samples["host_compute"] = result.samples["scatter"]
    if "dequantize_weights" in result.samples:
        # All layers are of one size, which gives no slope: that is the one of keys and values, unpacked alike.
        result.samples["dequantize_weights"] += result.samples["dequantize_kv"]
    if device.type == "cpu":
        result.faster_dtype = faster_cpu_dtype(shape)
    return result


class Stretch(NamedTuple):
    """What ran in one go."""

    trace: list[TraceEvent]
    seconds: float
    left: float  #: share of them in which the host stole nothing (``CpuUse.left_since``)
    alone: bool  #: nothing crossed the link


def usually_left(stretches: Sequence[Stretch]) -> float:
    """Share of all their seconds in which the host stole nothing."""
    whole = sum(one.seconds for one in stretches)
    return sum(one.seconds * one.left for one in stretches) / whole if whole else 1.0


def kernel_times(stretches: Sequence[Stretch], usual: float, device: str) -> dict[tuple, list[float]]:
    """{(line key, flops, bytes): seconds of each such task}, those of the CPU's own kernels as if in each stretch so
    much had been left to them as usual.

    A host steals nothing in one second and half of a core in the next. Without this two profiles of one virtual machine
    were 11.5 and 17.8 s apart on one job; with it, they are as far apart as what they say of the host's usual greed.
    """
    on_cpu = {"host_compute", "compute"} if device == "cpu" else {"host_compute"}
    found: dict[tuple, list[float]] = {}
    for stretch in stretches:
        for task, start, end in stretch.trace:
            if (key := _line_key(task)) is None:
                continue
            key += ALONE_SUFFIX * stretch.alone
            bytes_ = task.work.link_bytes if task.resource in LINKS else task.work.memory_bytes
            share = stretch.left / usual if task.resource in on_cpu else 1.0
            found.setdefault((key, task.work.flops, bytes_), []).append((end - start) * share)
    return found


def typical_of_passes(first: dict[tuple, float], second: dict[tuple, float]) -> ProfileSamples:
    """Samples of what both passes measured, {(line key, flops, bytes): seconds}: their mean, and disagreements."""
    result = ProfileSamples()
    for key in sorted(first.keys() & second.keys()):
        name, flops, num_bytes = key
        better, worse = sorted((first[key], second[key]))
        if worse > DISAGREE * better and worse > 1e-3:
            result.disagreements.append(
                f"{name} at {flops / 1e9:.2f} GFLOP, {num_bytes / 1e6:.1f} MB: {first[key] * 1e3:.2f} and "
                f"{second[key] * 1e3:.2f} ms"
            )
        result.samples.setdefault(name, []).append((float(flops), float(num_bytes), (better + worse) / 2))
    return result


def _typical(times: list[float]) -> float:
    """Mean without outliers."""
    times = np.array(times)
    return float(times[times <= OUTLIER * np.median(times)].mean())


def _line_key(task: Task) -> str | None:
    """One line a verb; stores take d2h's: a decode step's few rows say nothing about a link. A selection's work after
    the prompt goes by the line of its guesses."""
    after_prompt = task.verb == "speculate" and not task.iteration
    return None if task.verb.startswith("store_") or after_prompt else task.verb


def _run(
    shape: ModelShape, weights_of: Callable[[Policy], tuple[Weights, WeightSlots]], run: Run,
    link_gb_per_s: float | None, budgets: dict[str, int | None],
) -> list[Stretch]:  # fmt: skip
    """Prefill and three decode iterations of one to four mini-batches, and these again, up to ``DECODES`` times, until
    they took ``DECODE_SECONDS``; nothing where the model cannot run so, or the device cannot hold all of it."""
    alone, run = run in ALONE, run._replace(context=min(run.context, shape.max_positions - 4))
    policy = _policy(run)
    try:
        check_runnable(shape, policy)
    except InputError:
        return []
    weights, slots = weights_of(policy)
    p, device = weights.bytes_per_element, weights.device.type
    wave, sizes = _planned(shape, run, p)
    while not fits(memory_plan(shape, wave.policy, p, sizes, device), budgets) and (fewer := _halved(run)) != run:
        run = fewer
        wave, sizes = _planned(shape, run, p)
    if wave.policy.stays_on_device and not fits(memory_plan(shape, wave.policy, p, sizes, device), budgets):
        return []  # nor will a job
    session = Session(Engine(weights, wave.policy, sizes, link_gb_per_s, slots=slots), wave)

    def timed(action: Callable[[], list[TraceEvent]]) -> Stretch:
        before = CpuUse.now()
        trace = action()
        after = CpuUse.now()
        return Stretch(trace, after.at_s - before.at_s, after.left_since(before), alone)

    stretches = [timed(lambda: session.generate().trace)]
    num_repeats = min(int(DECODE_SECONDS / Window(stretches[0].trace).seconds), DECODES - 1)
    stretches += [timed(session.decode) for _ in range(num_repeats)]
    session.engine.close()
    return stretches


def _policy(run: Run) -> Policy:
    bound = run.per_mini_batch * (run.context + 48)
    rest = {"weights": Placement(host=1.0)} | run.other
    return Policy(cache=run.cache, max_mini_batch_tokens=bound, **rest)


def _planned(shape: ModelShape, run: Run, bytes_per_element: int) -> tuple[Wave, BufferSizes]:
    wave = admit(shape, _policy(run), Workload.uniform(run.requests, run.context, 4), bytes_per_element)
    return wave, buffer_sizes(wave)


def _halved(run: Run) -> Run:
    """Half of the requests, or of the context where one is left; the same run where that is short."""
    if run.requests > 1:
        return run._replace(requests=run.requests // 2, per_mini_batch=max(1, run.per_mini_batch // 2))
    return run._replace(context=max(run.context // 2, min(run.context, SHORTEST)))


def _link_samples(device: torch.device, link_gb_per_s: float | None):
    """((key, 0, bytes), seconds) of both directions, alone and at once, through the links' own copies.

    A paced CPU link is also measured without its pace, so that one profile serves both ways of running.
    """
    if device.type == "cuda":
        from flexhybrid.runtime.cuda import CudaCopies

        return _time_links(CudaCopies(), device, "")
    from flexhybrid.runtime.links import CpuCopies

    samples = _time_links(CpuCopies(link_gb_per_s), device, "")
    return samples + (_time_links(CpuCopies(), device, "_unpaced") if link_gb_per_s else [])


def _time_links(copies, device: torch.device, suffix: str) -> list:
    host = {size: copies.host_memory.bytes(size) for size in LINK_SIZES}
    target = {size: torch.zeros(size, dtype=torch.uint8, device=device) for size in LINK_SIZES}

    def time_copies(direction: str, key: str, out: list) -> None:
        """Seconds a copy, of copies back to back: the first one's credit or wake-up is left out."""
        own = torch.cuda.Stream(device) if device.type == "cuda" else None

        def several(count: int, size: int) -> float:
            start = time.perf_counter()
            with torch.cuda.stream(own) if own else contextlib.nullcontext():
                for _ in range(count):
                    _copy_once(copies, direction, host[size], target[size])
            if own:
                own.synchronize()
            return time.perf_counter() - start

        for size in LINK_SIZES:
            once = several(2, size) / 2
            count = max(2, min(200, round(LINK_SECONDS / max(once, 1e-6))))
            out.append(((key, 0, size), several(count, size) / count))

    samples: list = []
    for direction in ("h2d", "d2h"):
        time_copies(direction, direction + suffix, samples)
    both = [
        threading.Thread(target=time_copies, args=(direction, f"{direction}_both{suffix}", samples))
        for direction in ("h2d", "d2h")
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    return samples


def _copy_once(copies, direction: str, host: torch.Tensor, target: torch.Tensor) -> None:
    if direction == "h2d":
        copies.copy_h2d(target, host)
    else:
        copies.copy_d2h(host, target)
