"""Turns a user's arguments into the device, the problem and the policy of a run on this machine."""

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

#: Bytes of a CUDA device that libraries need for kernels they load at first use, outside of torch's allocator. An
#: estimate from reports, not measured here.
LOADED_LATER_BYTES = 2**29


@dataclass(frozen=True)
class PacedDevice:
    """A device, with limits on the rates of copies."""

    device: torch.device
    link_gb_per_s: float | None = None  #: rate of a CPU's imitated link; None: no link
    disk: DiskPlace = ANYWHERE  #: scratch folder and rate of the disk


def pick_device(
    name: str,
    link_gb_per_s: float | None = None,
    disk_dir: str | Path | None = None,
    disk_gb_per_s: float | None = None,
) -> PacedDevice:
    """Return the device "auto", "cpu" or "cuda" with its rates.
    Raise InputError for another name, for CUDA if torch finds none, and for a wrong rate."""
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"device {name!r} is not one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device is cuda, but torch finds no CUDA device here")
    device = torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
    if link_gb_per_s is not None and device.type == "cuda":
        raise InputError("link_gb_per_s is for the imitated link of a CPU; the rate of a CUDA device cannot be set")
    place = DiskPlace(disk_dir, checked_rate("disk_gb_per_s", disk_gb_per_s))
    return PacedDevice(device, checked_rate("link_gb_per_s", link_gb_per_s), place)


def free_device_memory(device: torch.device) -> int:
    """Return the bytes of a CUDA device that a run's memory plan may use.

    They are the free bytes without LOADED_LATER_BYTES, plus the CUDA context, which is in the plan but exists already.
    """
    free = torch.cuda.mem_get_info(device)[0]
    return free - min(LOADED_LATER_BYTES, free // 32) + CONTEXT_BYTES


def resolve_problem(arguments: LLMArguments, shape: ModelShape, paced: PacedDevice) -> Problem:
    """Return the problem of running a model with these arguments.
    Raise InputError if the attention kernels of the run to continue are missing here."""
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
        raise InputError(f"this job began with attention by {lacking}, or start it again with another --output")
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
    """Return the compute dtype. "auto" is the checkpoint's, except for 16-bit checkpoints on a CPU.
    These get the dtype with faster matrix products, by the profile, or else timed now. Raise InputError for an unknown
    dtype, or one that is too slow."""
    if name not in ("auto", "float32", "bfloat16", "float16"):
        raise InputError(f"dtype {name!r} is not one of auto, float32, bfloat16, float16")
    if name == "float16" and device.type == "cpu":
        raise InputError("float16 matrix products are hundreds of times slower on a CPU: give bfloat16 or float32")
    if name != "auto":
        return name
    if device.type == "cuda" or shape.dtype == "float32":
        return shape.dtype
    return (hardware.faster_dtype if hardware else None) or faster_cpu_dtype(shape)


def saved_hardware(device: torch.device) -> Hardware | None:
    """Return this machine's record by ``profile`` or ``compare``, else the catalogue's for its GPU, else None."""
    if (kept := profile_file(device.type)).is_file():
        return load_hardware(kept)
    return catalogue.for_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def named_hardware(hardware: Hardware | str | Path | None, paced: PacedDevice) -> Hardware | None:
    """Return a hardware record with the link and disk rates of this run.
    ``hardware``: a record, the name of one, a JSON file, or None for the record that was measured here."""
    if hardware is None:
        hardware = saved_hardware(paced.device)
    elif not isinstance(hardware, Hardware):
        hardware = catalogue.load(hardware)
    if hardware and paced.device.type == "cpu":
        hardware = hardware.with_link_rate(paced.link_gb_per_s)
    return hardware.with_disk_rate(paced.disk.gb_per_s) if hardware and paced.disk.gb_per_s is not None else hardware


def resolve_policy(policy: str | Path | Policy, shape: ModelShape) -> Policy | str:
    """Return the policy, or its name if it depends on machine and requests (``settle_policy``).

    A text is "auto", a system of ``policy_search.systems`` or the path of a JSON file. Raise InputError for an unknown
    name, and for a system that cannot run.
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
    if not needs_lines(name):  # only its shares depend on machine and requests, so it can be checked now
        check_runnable(shape, policy_here(name, Problem(shape=shape), Workload.uniform(1, 1, 1)))
    return name


QUEUE_SEARCH_S = 5.0  #: approximate seconds of a search for a queue


def settle_policy(name: str, problem: Problem, workload: Workload, link_is_paced: bool = False) -> Policy:
    """Return the policy of a name from ``resolve_policy`` for this machine and these requests."""
    if name == "auto":
        return best_policy(problem, workload, link_is_paced)
    return policy_here(name, problem, workload)


def best_policy(
    problem: Problem, workload: Workload, link_is_paced: bool = False, time_limit: float | None = None
) -> Policy:
    """Return the policy of "auto": everything on the device if all requests fit there at once, else a search's result.

    With a paced link, always search, and without the margin for staying on the device. ``time_limit``: seconds of the
    search. Raise InputError if a search is needed but there is no hardware record, or if nothing fits.
    """
    if not link_is_paced and (policy := resident_at_once(problem, workload)):
        return policy
    if problem.hardware is None:
        raise InputError(f"policy auto needs to know this machine: {MEASURE}, or a policy such as kv_only")
    margin = 0.0 if link_is_paced else MODEL_ERROR  # who paces the link wants to see copies over it
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
        # The search used mean lengths. If the longest requests do not fit, search with their lengths.
        longest = Workload.uniform(1, int(workload.prompt_tokens.max()), int(workload.max_tokens.max()))
        found = search(problem, longest, settings)
        policy = _fitting_policy(problem, found.policy, workload)
    if time_limit:
        return policy
    with suppress(InputError):  # the profile lacks one of the verbs, or no other policy fits
        # The search ignores that long requests leave room for few others, and that prompts share prefixes.
        run = price_queue(problem, policy, workload, settings.max_batch, walked_tasks=ROUGH_TASKS)
        searched_s = 0.0 if workload.prefixes else workload.max_tokens.sum() / found.prediction["tokens_per_s"]
        if run.at_a_time < workload.num_requests and run.total_s > searched_s + QUEUE_SEARCH_S:
            given = [policy]
            for name in ("kv_only", "act_only"):
                with suppress(InputError):  # the model does not support it
                    given.append(policy_here(name, problem, workload))
            best = best_for_queue(problem, workload, settings, given, rough=True).policy
            check_longest(problem, best, workload)
            return best
    return policy


def auto_settings(hardware: Hardware, workload: Workload, **others) -> SearchSettings:
    """Return the settings of a search for "auto". ``others``: more fields of SearchSettings."""
    most = min(workload.num_requests, MAX_BATCH)
    return SearchSettings(max_batch=most, space=measured_space(LOSSLESS, hardware), **others)


def resident_at_once(problem: Problem, workload: Workload) -> Policy | None:
    """Return the fastest policy with everything on the device under which all requests fit at once; None if none.
    The candidates differ in their mini-batches; without a profile, only the preset's own is one."""
    of_speed = resident_by_speed(problem, workload)
    return next((policy for policy in of_speed if fits(wave_plan(problem, policy, workload), problem.budgets)), None)


def _fitting_policy(problem: Problem, policy: Policy, workload: Workload) -> Policy:
    """Return the policy with the largest of a few shares of weights on the device for which every request fits.
    Raise InputError if there is none."""
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
