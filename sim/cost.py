"""The machine on which a problem or a wave is priced, and the price of a task there."""

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
    """Return the machine on which a problem is priced, with the rates it has under a policy (``Hardware.at_work``).
    Raise InputError if the problem has no hardware record."""
    if problem.hardware is None:
        raise InputError(f"{problem.shape.name}: without a hardware record nothing can be predicted")
    return problem.hardware.at_work(policy) if policy else problem.hardware


def hardware_of_wave(wave: Wave) -> Hardware:
    """Return the machine on which a wave is priced. Its links are slower if the wave uses far memory or the page
    cache (``byte_times``)."""
    hardware = hardware_of(wave.problem, wave.policy)
    if not hardware.notes.keys() & {FAR_MEMORY, PAGE_CACHE}:
        return hardware
    times = byte_times(hardware, total_bytes(memory_plan(wave.problem, wave.policy, buffer_sizes(wave))))
    slower = {key: float(times.get(resource_of_line(key) or "", 1.0)) for key in hardware.lines}
    lines = {key: replace(line, s_per_byte=line.s_per_byte * slower[key]) for key, line in hardware.lines.items()}
    return replace(hardware, lines=lines)


def byte_times(hardware: Hardware, peak_bytes: Mapping[str, Any]) -> dict[str, Any]:
    """Return link -> factor on the seconds of a byte; links with factor 1 are absent.

    ``peak_bytes``: tier -> bytes that the run fills (numbers or arrays). The factor is a mean, because all bytes of a
    tier cross equally often. The near node's memory fills first. The page cache has the host memory that is left.
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
    """Return the seconds of one task. The counts of its work may be numbers or arrays."""
    return task_seconds(hardware.line(verb, resource, work.line), resource, work)
