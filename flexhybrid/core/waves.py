"""Requests into waves: as many at a time as the memory budgets (and the policy's max_batch) allow."""

from __future__ import annotations

import numpy as np

from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import buffer_sizes, check_budget, fits, memory_plan
from flexhybrid.core.plan import admit
from flexhybrid.core.policy import Policy
from flexhybrid.core.shape import ModelShape
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
    limit = policy.max_batch or workload.num_requests
    waves, start = [], 0

    def plan(end: int) -> dict:
        part = Workload(workload.prompt_tokens[start:end], workload.max_tokens[start:end])
        return wave_plan(shape, policy, part, bytes_per_element, device, hardware)

    while start < workload.num_requests:
        low, high = start + 1, min(start + limit, workload.num_requests)
        if not fits(plan(high), budgets):
            check_budget(plan(low), budgets, f"one request of {int(workload.prompt_tokens[start])} prompt tokens")
            while high - low > 1:  # low fits, high does not
                middle = (low + high) // 2
                low, high = (middle, high) if fits(plan(middle), budgets) else (low, middle)
            high = low
        waves.append(np.arange(start, high))
        start = high
    return waves


def check_least(
    shape: ModelShape, policy: Policy, bytes_per_element: int, budgets: Budgets, device: str,
    hardware: Hardware | None = None, tokens: int = 16,
) -> None:  # fmt: skip
    """Raise InputError when not even one request of ``tokens`` tokens can run, naming the least that would do."""
    least = wave_plan(shape, policy, Workload.uniform(1, tokens, 1), bytes_per_element, device, hardware)
    check_budget(least, budgets, f"model {shape.name} with policy {policy.name} and a single short request")
