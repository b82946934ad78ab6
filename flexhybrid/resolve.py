"""A user's arguments made definite on this machine: device and paces, problem, policy."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flexhybrid.arguments import LLMArguments
from flexhybrid.core.admission import check_longest, wave_plan
from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.errors import InputError
from flexhybrid.core.files import profile_file
from flexhybrid.core.hardware import MEASURE, Hardware, load_hardware
from flexhybrid.core.memory import CONTEXT_BYTES, fits
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.units import parse_bytes
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.profiling.attention_paths import can_attend_in_place, fastest_paths, proved_on_gpu
from flexhybrid.runtime.profiling.profile import faster_cpu_dtype
from flexhybrid.runtime.runnable import check_runnable
from flexhybrid.runtime.storage.disk import checked_rate
from flexhybrid.runtime.storage.weights import ANYWHERE, DiskPlace
from policy_search.queue_search import best_for_queue
from policy_search.search import MAX_BATCH, MODEL_ERROR, SearchSettings, search
from policy_search.search_problem import LOSSLESS, measured_space
from policy_search.systems import check_run, needs_lines, policy_anywhere, policy_here, resident_by_speed
from sim import catalogue
from sim.queue_clock import ROUGH_TASKS, price_queue

#: Of a CUDA device's free memory: libraries load their kernels as they are first used, outside torch's allocator. From
#: what others report, not measured here.
LOADED_LATER_BYTES = 2**29


@dataclass(frozen=True)
class PacedDevice:
    """A device, the pace of a CPU's link (None: none), and the place and pace of the disk."""

    device: torch.device
    link_gb_per_s: float | None = None
    disk: DiskPlace = ANYWHERE


def pick_device(
    name: str,
    link_gb_per_s: float | None = None,
    disk_dir: str | Path | None = None,
    disk_gb_per_s: float | None = None,
) -> PacedDevice:
    """Return the device "auto", "cpu" or "cuda" with its paces. Raise InputError for another name, for CUDA where torch
    finds none, and for a pace that is no rate."""
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"device {name!r} is not one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda was asked for, but torch finds no CUDA device here")
    device = torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
    if link_gb_per_s is not None and device.type == "cuda":
        raise InputError("link_gb_per_s paces the copies of a CPU; a CUDA device runs at the rate of its own link")
    place = DiskPlace(disk_dir, checked_rate("disk_gb_per_s", disk_gb_per_s))
    return PacedDevice(device, checked_rate("link_gb_per_s", link_gb_per_s), place)


def free_device_memory(device: torch.device) -> int:
    """Return the bytes of a CUDA device that a run's plan may fill: the free ones, plus what the plan's context already
    takes. Libraries load kernels at first use, outside torch's allocator."""
    free = torch.cuda.mem_get_info(device)[0]
    return free - min(LOADED_LATER_BYTES, free // 32) + CONTEXT_BYTES


def resolve_problem(arguments: LLMArguments, shape: ModelShape, paced: PacedDevice) -> Problem:
    """Return the problem of running a model of this shape under these arguments."""
    hardware = named_hardware(arguments.hardware, paced)
    sizes = {tier: parse_bytes(arguments.budgets.get(tier)) for tier in TIERS}
    if paced.device.type == "cuda" and sizes["device"] is None:
        sizes["device"] = free_device_memory(paced.device)
    dtype = pick_dtype(arguments.dtype, shape, paced.device, hardware)
    device = paced.device.type
    heads = shape.queries_per_key, shape.head_dim
    attention = arguments.attention or fastest_paths(device, dtype, *heads)
    in_place, on_host = can_attend_in_place(dtype), can_attend_in_place(dtype, on_host=True)
    lacking = ""
    if device == "cpu" and attention.in_place > in_place or attention.on_host > on_host:
        lacking = "numba, which is not installed here: pip install numba"
    elif attention.in_place and device != "cpu" and not proved_on_gpu(dtype, *heads):
        lacking = "Triton, whose kernels do not run here (a warning says why): pip install triton"
    if lacking:
        raise InputError(f"this job was begun with attention by {lacking}, or start it with another --output")
    return Problem(
        shape=shape,
        dtype=dtype,
        hardware=hardware,
        budgets=Budgets(**sizes),
        device=device,
        attention=attention,
        cuda_graphs=arguments.cuda_graphs,
    )


def pick_dtype(name: str, shape: ModelShape, device: torch.device, hardware: Hardware | None = None) -> str:
    """Return the compute dtype. "auto" is the checkpoint's on CUDA. On a CPU, for 16-bit checkpoints, it is the dtype
    with faster products: by the profile, or timed now, so that answers do not depend on a kept profile."""
    if name not in ("auto", "float32", "bfloat16", "float16"):
        raise InputError(f"dtype {name!r} is not one of auto, float32, bfloat16, float16")
    if name == "float16" and device.type == "cpu":
        raise InputError("float16 matrix products are hundreds of times slower on a CPU: ask for bfloat16 or float32")
    if name != "auto":
        return name
    if device.type == "cuda" or shape.dtype == "float32":
        return shape.dtype
    return (hardware.faster_dtype if hardware else None) or faster_cpu_dtype(shape)


def saved_hardware(device: torch.device) -> Hardware | None:
    """Return this machine's record as ``flexhybrid profile`` or compare measured it, else the catalogue's entry of this
    GPU, else None."""
    if (kept := profile_file(device.type)).is_file():
        return load_hardware(kept)
    return catalogue.for_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def named_hardware(hardware: Hardware | str | Path | None, paced: PacedDevice) -> Hardware | None:
    """Return a hardware record at the paces of this run: the one given, one by name or from a JSON file, or (None) the
    one that was measured here."""
    if hardware is None:
        hardware = saved_hardware(paced.device)
    elif not isinstance(hardware, Hardware):
        hardware = catalogue.load(hardware)
    if hardware and paced.device.type == "cpu":
        hardware = hardware.with_link_rate(paced.link_gb_per_s)
    return hardware.with_disk_rate(paced.disk.gb_per_s) if hardware and paced.disk.gb_per_s is not None else hardware


def resolve_policy(policy: str | Path | Policy, shape: ModelShape) -> Policy | str:
    """Return a Policy, or the name of one that the machine and the requests decide (``settle_policy``): "auto", or a
    system's.

    A string is "auto", a system of ``policy_search.systems`` or the path of a JSON file. Raise InputError for an
    unknown name and for a system that cannot be run.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, Path) or str(policy).endswith(".json"):
        return Policy.load(policy)
    if policy == "auto":
        return policy
    name = str(policy)
    check_run(name, also=("auto",))
    if (anywhere := policy_anywhere(name, shape)) is not None:
        return anywhere
    if not needs_lines(name):  # a search decides its shares alone: whether it can be run is known now
        check_runnable(shape, policy_here(name, Problem(shape=shape), Workload.uniform(1, 1, 1)))
    return name


QUEUE_SEARCH_S = 5.0  #: seconds that a search for a queue takes, about


def settle_policy(name: str, problem: Problem, workload: Workload, link_is_paced: bool = False) -> Policy:
    """Return the policy that a name of ``resolve_policy`` means on this machine, for these requests."""
    if name == "auto":
        return best_policy(problem, workload, link_is_paced)
    return policy_here(name, problem, workload)


def best_policy(
    problem: Problem, workload: Workload, link_is_paced: bool = False, time_limit: float | None = None
) -> Policy:
    """Return the policy of "auto": all resident if that fits at once and no link is paced, else a search of at most
    ``time_limit`` seconds; with a paced link, without the margin for the device.

    Raise InputError if a search needs an unknown hardware record, or nothing fits.
    """
    if not link_is_paced and (policy := resident_at_once(problem, workload)):
        return policy
    if problem.hardware is None:
        raise InputError(f"policy auto needs to know this machine: {MEASURE}, or a policy such as kv_only")
    margin = 0.0 if link_is_paced else MODEL_ERROR  # a pace is asked for to see what crosses the link
    settings = auto_settings(problem.hardware, workload, time_limit=time_limit, margin=margin)
    if workload.answer_tokens is not None:
        with suppress(InputError):
            policy = best_for_queue(problem, workload, settings, rough=True).policy
            check_longest(problem, policy, workload)
            return policy
    try:
        found = search(problem, workload, settings)
        policy = _fitting_policy(problem, found.policy, workload)
    except InputError:
        # The search takes mean lengths. If the longest requests do not fit, they decide.
        longest = Workload.uniform(1, int(workload.prompt_tokens.max()), int(workload.max_tokens.max()))
        found = search(problem, longest, settings)
        policy = _fitting_policy(problem, found.policy, workload)
    if time_limit:
        return policy
    with suppress(InputError):  # a machine without a line for one of the verbs; nothing else fits
        # A search knows neither how few the longest requests leave room for, nor what prompts share.
        run = price_queue(problem, policy, workload, settings.max_batch, walked_tasks=ROUGH_TASKS)
        searched_s = 0.0 if workload.prefixes else workload.max_tokens.sum() / found.prediction["tokens_per_s"]
        if run.at_a_time < workload.num_requests and run.total_s > searched_s + QUEUE_SEARCH_S:
            given = [policy]
            for name in ("kv_only", "act_only"):
                with suppress(InputError):  # not for this model
                    given.append(policy_here(name, problem, workload))
            best = best_for_queue(problem, workload, settings, given, rough=True).policy
            check_longest(problem, best, workload)
            return best
    return policy


def auto_settings(hardware: Hardware, workload: Workload, **others) -> SearchSettings:
    """Return the settings of the search of "auto" for these requests; ``others``: further ones, by name."""
    most = min(workload.num_requests, MAX_BATCH)
    return SearchSettings(max_batch=most, space=measured_space(LOSSLESS, hardware), **others)


def resident_at_once(problem: Problem, workload: Workload) -> Policy | None:
    """Return everything on the device, in the mini-batches predicted to be fastest among those in which all requests
    fit at once; None without any. On an unknown machine the preset's own are taken."""
    of_speed = resident_by_speed(problem, workload)
    return next((policy for policy in of_speed if fits(wave_plan(problem, policy, workload), problem.budgets)), None)


def _fitting_policy(problem: Problem, policy: Policy, workload: Workload) -> Policy:
    """Return the policy with the most weights on the device with which every request fits. Raise InputError if none
    does."""
    disk = policy.weights.disk
    for keep in (1.0, 0.75, 0.5, 0.25):
        share = policy.weights.device * keep
        fewer = replace(policy, weights=Placement(device=share, host=max(0.0, 1.0 - share - disk), disk=disk))
        with suppress(InputError):
            check_longest(problem, fewer, workload)
            return fewer
    streamed = replace(policy, weights=Placement(host=1.0 - disk, disk=disk))
    check_longest(problem, streamed, workload)
    return streamed
