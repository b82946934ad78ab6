"""The machine that a problem, a policy or a wave is priced on, and the price of a verb there."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import FAR_MEMORY, PAGE_CACHE, Hardware, resource_of_line, task_seconds
from flexhybrid.core.memory import memory_plan, total_bytes
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.task import Work
from flexhybrid.core.wave import Wave


def hardware_of(problem: Problem, policy: Policy | None = None) -> Hardware:
    """Return the machine to price on, with a policy as that leaves it (``Hardware.at_work``). Raise InputError if the
    problem names none."""
    if problem.hardware is None:
        raise InputError(f"{problem.shape.name}: without a hardware record nothing can be predicted")
    return problem.hardware.at_work(policy) if policy else problem.hardware


def hardware_of_wave(wave: Wave) -> Hardware:
    """Return the machine as a wave's policy leaves it, with links slowed by the memories that the wave fills."""
    hardware = hardware_of(wave.problem, wave.policy)
    if not hardware.notes.keys() & {FAR_MEMORY, PAGE_CACHE}:
        return hardware
    times = byte_times(hardware, total_bytes(memory_plan(wave.problem, wave.policy, buffer_sizes(wave))))
    lines = {
        key: replace(line, s_per_byte=line.s_per_byte * float(times.get(resource_of_line(key) or "", 1.0)))
        for key, line in hardware.lines.items()
    }
    return replace(hardware, lines=lines)


def byte_times(hardware: Hardware, peak_bytes: Mapping[str, Any]) -> dict[str, Any]:
    """Return link -> factor on the time of a byte when a run fills this much of each tier (numbers or arrays).

    All bytes of a tier cross equally often, so it is their mean. The near node's memory fills first; the page cache
    uses the host memory that the run leaves free. Other links are absent.
    """
    times: dict[str, Any] = {}
    host, disk = (np.maximum(peak_bytes[tier], 1.0) for tier in ("host", "disk"))
    if far := hardware.notes.get(FAR_MEMORY):
        beyond = np.maximum(host - far["near_bytes"], 0.0) / host
        times["h2d"] = times["d2h"] = 1.0 + beyond * (1.0 / far["share"] - 1.0)
    if (rate := hardware.notes.get(PAGE_CACHE)) and hardware.host_memory and hardware.has_disk:
        held = np.minimum(1.0, np.maximum(hardware.host_memory - host, 0.0) / disk)
        times["disk_read"] = 1.0 - held + held * 1e-9 / rate / hardware.lines["disk_read"].s_per_byte
    return times


def price(hardware: Hardware, verb: str, resource: str, work: Work):
    """Return the seconds of one task; the work's counts, and so the result, may be numpy arrays."""
    return task_seconds(hardware.line(verb, resource, work.line), resource, work)
