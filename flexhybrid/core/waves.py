"""Requests into batches: as many at a time as the memory budgets (and the policy's max_batch) allow."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from flexhybrid.core.context.blocks import BlockEntries
from flexhybrid.core.context.packing import pack
from flexhybrid.core.context.selection import pool_blocks
from flexhybrid.core.memory import MemoryPlan, buffer_sizes, check_budget, fits, memory_plan, queue_sizes
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.refill import FIRST_RUN, joins_singly, may_grow
from flexhybrid.core.wave import RequestQueue, Wave, admit, give_blocks, take_blocks_back
from flexhybrid.core.workload import Workload

#: Of an answer's limit, that is expected of it where not all of it fits: most answers end long before.
EXPECTED_SHARE = 0.25
SHORT_REQUEST_TOKENS = 16  #: prompt tokens of the request that ``check_least`` tries


def wave_plan(problem: Problem, policy: Policy, workload: Workload) -> MemoryPlan:
    """Bytes per tier and part of requests that run together."""
    return memory_plan(problem, policy, buffer_sizes(admit(problem, policy, workload)))


def check_longest(problem: Problem, policy: Policy, workload: Workload) -> None:
    """Raise InputError when a single request is over a given budget."""
    for request in extremes(workload):
        first_wave(problem, policy, workload.select(np.array([request])))


def extremes(workload: Workload) -> list[int]:
    """Return the requests of the longest prompt and of the most tokens in all."""
    return sorted({int(workload.prompt_tokens.argmax()), int(workload.cached_tokens.argmax())})


def split_waves(problem: Problem, policy: Policy, workload: Workload) -> list[np.ndarray]:
    """Consecutive requests per wave, as indices. Raises InputError when a single request is over a given budget."""
    waves, start = [], 0
    while start < workload.num_requests:
        count = first_wave(problem, policy, workload.select(slice(start, None)))
        waves.append(np.arange(start, start + count))
        start += count
    return waves


def open_batch(problem: Problem, policy: Policy, workload: Workload, count: int, share: float = 1.0) -> Wave:
    """Return a batch with places for ``count`` requests, the first of the workload; the others wait for places.

    ``share``: the pools are made for answers of this share of their limits, but for a single one of its full length in
    each mini-batch; requests then take blocks as they need them.
    """
    num_requests = workload.num_requests
    first = Workload(workload.prompt_tokens[:count], workload.max_tokens[:count])
    if count == num_requests and share == 1:
        return admit(problem, policy, workload)
    planned = Workload(first.prompt_tokens, np.maximum(1, np.ceil(share * first.max_tokens)).astype(np.int64))
    # Buffers are for answers of full length: what is padded to the longest of a mini-batch never limits who runs.
    tokens, entries = first.cached_tokens, BlockEntries(policy.cache)
    mini_batches = pack(tokens, entries, policy.max_mini_batch_tokens, policy.packing)
    alone = workload.select(np.array(extremes(workload)))
    wave = replace(admit(problem, policy, planned, alone=alone, mini_batches=mini_batches), workload=first)
    if wave.whole:
        wave = replace(wave, whole=replace(wave.whole, workload=first))
    limits = queue_sizes(wave, workload, joins_singly(policy))
    wave = replace(wave, queue=RequestQueue(workload, following=count), limits=limits, expected_share=share)
    if wave.grows:
        for k, group in enumerate(wave.mini_batches):
            for place in group.tolist():
                held = [wave.num_blocks[entry][place] for entry in wave.entries.names]
                take_blocks_back(wave, k, place)
                give_blocks(wave, k, place, np.minimum(wave.entries.held(first.prompt_tokens[place]) + FIRST_RUN, held))
    return wave


def first_wave(problem: Problem, policy: Policy, workload: Workload) -> int:
    """How many of the first requests fit the given budgets together, with room for the longest answers that they may
    give. Raises InputError when not even one does."""
    return _most_that_fit(
        problem, policy, workload, lambda count: wave_plan(problem, policy, workload.select(slice(count)))
    )


def batch_size(problem: Problem, policy: Policy, workload: Workload, at_most: int) -> tuple[int, float]:
    """Return how many requests run at a time, and for which share of their answers' limits the pools are made
    (``open_batch``): for all of it where that fits the budgets with ``at_most`` requests, otherwise, where requests may
    take blocks as they need them, EXPECTED_SHARE. Raises InputError when not even one request fits."""
    shares = (1.0, EXPECTED_SHARE) if may_grow(policy) else (1.0,)
    counts = []
    for share in shares:

        def plan(count: int, share: float = share) -> MemoryPlan:
            return memory_plan(problem, policy, buffer_sizes(open_batch(problem, policy, workload, count, share)))

        counts.append(_most_that_fit(problem, policy, workload, plan, at_most))
        if counts[0] == min(at_most, policy.max_batch or at_most, workload.num_requests):
            break
    best = int(np.argmax(counts))
    return counts[best], shares[best]


def _most_that_fit(
    problem: Problem,
    policy: Policy,
    workload: Workload,
    plan: Callable[[int], MemoryPlan],
    at_most: int | None = None,
) -> int:
    """The largest number of requests whose plan fits the budgets. Raise InputError when one is over them."""
    low, high = 1, min(at_most or workload.num_requests, policy.max_batch or workload.num_requests)
    high = min(high, workload.num_requests)
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
