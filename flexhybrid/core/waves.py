"""Requests into waves: as many at a time as the memory budgets (and the policy's max_batch) allow."""

from __future__ import annotations

import numpy as np

from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import buffer_sizes, check_budget, fits, memory_plan
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Policy
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload

Budgets = dict[str, int | None]


def wave_plan(
    shape: ModelShape, policy: Policy, workload: Workload, bytes_per_element: int, device: str,
    hardware: Hardware | None = None,
) -> dict:  # fmt: skip
    """Bytes per tier and part of one wave. ``hardware`` decides where both(…) entries are split."""
    wave = admit(shape, policy, workload, bytes_per_element, hardware=hardware)
    return memory_plan(shape, policy, bytes_per_element, buffer_sizes(wave), device)


def split_waves(
    shape: ModelShape, policy: Policy, workload: Workload, bytes_per_element: int, budgets: Budgets, device: str,
    hardware: Hardware | None = None,
) -> list[np.ndarray]:  # fmt: skip
    """Consecutive requests per wave, as indices. Raises InputError when a single request is over a budget."""
    waves, start = [], 0
    while start < workload.num_requests:
        rest = Workload(workload.prompt_tokens[start:], workload.max_tokens[start:])
        count = first_wave(shape, policy, rest, bytes_per_element, budgets, device, hardware)
        waves.append(np.arange(start, start + count))
        start += count
    return waves


def first_wave(
    shape: ModelShape, policy: Policy, workload: Workload, bytes_per_element: int, budgets: Budgets, device: str,
    hardware: Hardware | None = None,
) -> int:  # fmt: skip
    """How many of the first requests fit together. Raises InputError when not even one does."""

    def plan(count: int) -> dict:
        part = Workload(workload.prompt_tokens[:count], workload.max_tokens[:count])
        return wave_plan(shape, policy, part, bytes_per_element, device, hardware)

    low, high = 1, min(policy.max_batch or workload.num_requests, workload.num_requests)
    if fits(plan(high), budgets):
        return high
    check_budget(plan(low), budgets, f"one request of {int(workload.prompt_tokens[0])} prompt tokens")
    while high - low > 1:  # low fits, high does not
        middle = (low + high) // 2
        low, high = (middle, high) if fits(plan(middle), budgets) else (low, middle)
    return low


def check_least(
    shape: ModelShape, policy: Policy, bytes_per_element: int, budgets: Budgets, device: str,
    hardware: Hardware | None = None, tokens: int = 16,
) -> None:  # fmt: skip
    """Raise InputError when not even one request of ``tokens`` tokens can run, naming the least that would do."""
    least = wave_plan(shape, policy, Workload.uniform(1, tokens, 1), bytes_per_element, device, hardware)
    check_budget(least, budgets, f"model {shape.name} with policy {policy.name} and a single short request")
