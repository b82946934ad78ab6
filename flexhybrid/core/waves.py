"""Requests into waves: as many at a time as the memory budgets (and the policy's max_batch) allow."""

import numpy as np

from flexhybrid.core.context.selection import pool_blocks
from flexhybrid.core.memory import MemoryPlan, buffer_sizes, check_budget, fits, memory_plan
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload

SHORT_REQUEST_TOKENS = 16  #: prompt tokens of the request that ``check_least`` tries


def wave_plan(problem: Problem, policy: Policy, workload: Workload) -> MemoryPlan:
    """Bytes per tier and part of one wave."""
    return memory_plan(problem, policy, buffer_sizes(admit(problem, policy, workload)))


def split_waves(problem: Problem, policy: Policy, workload: Workload) -> list[np.ndarray]:
    """Consecutive requests per wave, as indices. Raises InputError when a single request is over a given budget."""
    waves, start = [], 0
    while start < workload.num_requests:
        count = first_wave(problem, policy, workload.select(slice(start, None)))
        waves.append(np.arange(start, start + count))
        start += count
    return waves


def first_wave(problem: Problem, policy: Policy, workload: Workload) -> int:
    """How many of the first requests fit the given budgets together. Raises InputError when not even one does."""

    def plan(count: int) -> MemoryPlan:
        return wave_plan(problem, policy, workload.select(slice(count)))

    low, high = 1, min(policy.max_batch or workload.num_requests, workload.num_requests)
    if policy.selection.pool_bytes is not None:
        stored = problem.stored(policy.bits).kv
        high = min(high, pool_blocks(problem.shape, policy.selection, stored))
    if fits(plan(high), problem.budgets):
        return high
    check_budget(plan(low), problem.budgets, f"one request of {int(workload.prompt_tokens[0])} prompt tokens")
    while high - low > 1:  # low fits, high does not
        middle = (low + high) // 2
        low, high = (middle, high) if fits(plan(middle), problem.budgets) else (low, middle)
    return low


def check_least(problem: Problem, policy: Policy) -> None:
    """Raise InputError when not even one short request can run, naming the least memory that would do."""
    least = wave_plan(problem, policy, Workload.uniform(1, SHORT_REQUEST_TOKENS, 1))
    subject = f"model {problem.shape.name} with policy {policy.name} and a single short request"
    check_budget(least, problem.budgets, subject)
