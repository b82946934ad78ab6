"""What the user asked for, made definite on this machine: device, dtype, hardware record, policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, load_hardware, profile_file
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.waves import split_waves
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.profiling.profile import faster_cpu_dtype
from flexhybrid.runtime.runnable import check_runnable

SLOWEST_LINK = 0.01  #: GB/s; slower, nothing would ever end

#: Of a CUDA device's free memory: libraries load their kernels as they are first used, outside torch's allocator. From
#: what others report, not measured here.
LOADED_LATER_BYTES = 2**29


def pick_device(name: str, link_gb_per_s: float | None) -> torch.device:
    """ "auto", "cpu" or "cuda". Raises InputError for anything else, for CUDA that is not there, and for a bad pace."""
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"device {name!r} is not one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda was asked for, but torch finds no CUDA device here")
    device = torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
    if link_gb_per_s is not None:
        if device.type == "cuda":
            raise InputError("link_gb_per_s paces the copies of a CPU; a CUDA device runs at the rate of its own link")
        number = isinstance(link_gb_per_s, (int, float)) and not isinstance(link_gb_per_s, bool)
        if not number or not SLOWEST_LINK <= link_gb_per_s < float("inf"):
            raise InputError(f"link_gb_per_s is {link_gb_per_s!r}; it must be a number of at least {SLOWEST_LINK} GB/s")
    return device


def free_device_memory(device: torch.device) -> int:
    """Bytes that a CUDA device has free now, less what libraries take for themselves as they load: the budget where
    none is named."""
    free = torch.cuda.mem_get_info(device)[0]
    return free - min(LOADED_LATER_BYTES, free // 32)


def pick_dtype(name: str, shape: ModelShape, device: torch.device, hardware: Hardware | None) -> str:
    """The compute dtype. "auto": the checkpoint's on CUDA; on a CPU, for 16-bit ones, what multiplies faster, as the
    profile found it or, before there is one, by a look now: the answers must not hang on whether one is kept."""
    if name not in ("auto", "float32", "bfloat16", "float16"):
        raise InputError(f"dtype {name!r} is not one of auto, float32, bfloat16, float16")
    if name == "float16" and device.type == "cpu":
        raise InputError("float16 matrix products are hundreds of times slower on a CPU: ask for bfloat16 or float32")
    if name != "auto":
        return name
    if device.type == "cuda" or shape.dtype == "float32":
        return shape.dtype
    return (hardware.faster_dtype if hardware else None) or faster_cpu_dtype(shape)


def profile_path(device: torch.device) -> Path:
    return profile_file(device.type)


def saved_hardware(device: torch.device) -> Hardware | None:
    """What ``flexhybrid profile`` (or compare) measured here; else a catalogue entry for this GPU; else None."""
    if profile_path(device).is_file():
        return load_hardware(profile_path(device))
    if device.type == "cuda":
        from sim import catalogue

        return catalogue.for_gpu(torch.cuda.get_device_name(device))
    return None


def named_hardware(
    hardware: Hardware | str | Path | None, device: torch.device, link_gb_per_s: float | None
) -> Hardware | None:
    """A record as it is; None and "local": what was measured here; a name of the catalogue; or a JSON file. On a CPU at
    the rate of this run's link."""
    if hardware is None:
        hardware = saved_hardware(device)
    elif not isinstance(hardware, Hardware):
        from sim import catalogue

        hardware = catalogue.load(hardware)
    return hardware.with_link_rate(link_gb_per_s) if hardware and device.type == "cpu" else hardware


def resolve_policy(policy: str | Path | Policy, shape: ModelShape) -> Policy | str:
    """A Policy; or the name, "auto" or a system's, of one that the machine and the requests decide (``settle_policy``).

    A string is "auto", a system of ``policy_search.systems`` or the path of a JSON file. Raises InputError for an
    unknown name and for a system that cannot be run.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, Path) or str(policy).endswith(".json"):
        return Policy.load(policy)
    if policy == "auto":
        return policy
    from policy_search.systems import needs_lines, policy_anywhere, policy_here

    name = str(policy)
    if (found := policy_anywhere(name, shape)) is not None:
        return found
    if not needs_lines(name):  # only its shares are open: whether it can be run is known now
        check_runnable(shape, policy_here(name, Problem(shape=shape), Workload.uniform(1, 1, 1)))
    return name


def settle_policy(name: str, problem: Problem, workload: Workload, link_gb_per_s: float | None) -> Policy:
    """The policy that a name of ``resolve_policy`` stands for on this machine, with these requests.

    The hardware record has this run's link rate already (``named_hardware``).
    """
    if name == "auto":
        return best_policy(problem, workload, link_gb_per_s)
    from policy_search.systems import policy_here

    return policy_here(name, problem, workload)


def lossless_space(hardware: Hardware):
    """What a search may choose where nothing may be lost: attention on the host only where it was measured."""
    from policy_search.search import LOSSLESS

    measured = hardware.name != "local" or "attend_host" in hardware.lines
    return LOSSLESS if measured else replace(LOSSLESS, attention=("device",))


def best_policy(problem: Problem, workload: Workload, link_gb_per_s: float | None) -> Policy:
    """The policy "auto" stands for: all resident where that fits and nothing is paced, else the searched one.

    Raises InputError when a search is needed and no hardware record is known.
    """
    from sim.presets import resident

    if link_gb_per_s is None:
        try:
            if len(split_waves(problem, resident(), workload)) == 1:
                return resident()
        except InputError:
            pass  # not even one request fits: something has to move
    hardware = problem.hardware
    if hardware is None:
        raise InputError(
            "policy auto needs to know this machine: run `flexhybrid profile` once, or name a policy such as kv_only "
            "or hybrid(0.5)"
        )
    from policy_search.search import SearchSettings, search

    settings = SearchSettings(max_batch=workload.num_requests, space=lossless_space(hardware))
    # The search knows requests of one length: the mean ones. Where the longest do not fit beside the weights that it
    # kept, keep fewer; where they do not fit at all, let the longest decide.
    longest = Workload.uniform(1, int(workload.prompt_tokens.max()), int(workload.max_tokens.max()))
    for lengths in (workload, longest):
        try:
            policy = search(problem, lengths, settings).policy
        except InputError:
            if lengths is longest:
                raise
            continue  # what would do must do for the longest, too
        for keep in (1.0, 0.75, 0.5, 0.25, 0.0):
            share, disk = policy.weights.device * keep, policy.weights.disk
            smaller = replace(policy, weights=Placement(device=share, host=max(0.0, 1.0 - share - disk), disk=disk))
            try:
                split_waves(problem, smaller, workload)
                return smaller
            except InputError:
                if share == 0.0 and lengths is longest:
                    raise
