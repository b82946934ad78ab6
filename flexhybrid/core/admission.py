"""Admission: choose how many requests run together, so that they fit the memory budgets, and open their batch."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple, NoReturn

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, BlockEntries, ceil_blocks
from flexhybrid.core.context.packing import chunk_tokens, pack, packed
from flexhybrid.core.context.prefixes import PromptTree, SharedBlocks
from flexhybrid.core.context.selection import pool_blocks
from flexhybrid.core.errors import InputError
from flexhybrid.core.memory import MemoryPlan, check_budget, fits, memory_plan, total_bytes
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes, queue_sizes
from flexhybrid.core.schedule.scheduler import FIRST_RUN, LOOKED_AT, joins_singly, may_grow, may_share, stores_exactly
from flexhybrid.core.wave import RequestQueue, Wave, admit, give_blocks, take_blocks_back
from flexhybrid.core.workload import Workload

#: Expected length / limit of answers if the whole limits do not fit. Most answers end long before their limit.
EXPECTED_SHARE = 0.25
#: There is room for one more shared prefix per this many requests, because a new prefix begins before the last ends.
FOLLOWERS = 4
SHORT_REQUEST_TOKENS = 16  #: prompt tokens of the request that ``check_least`` tries


def wave_plan(problem: Problem, policy: Policy, workload: Workload) -> MemoryPlan:
    """Return the bytes per tier and part of requests that run together."""
    return memory_plan(problem, policy, buffer_sizes(admit(problem, policy, workload)))


def check_longest(problem: Problem, policy: Policy, workload: Workload) -> None:
    """Raise InputError if a single request exceeds a given budget."""
    for request in extremes(workload):
        first_wave(problem, policy, workload.select(np.array([request])))


def extremes(workload: Workload) -> list[int]:
    """Return the request with the longest prompt and the one with the most tokens."""
    return sorted({int(workload.prompt_tokens.argmax()), int(workload.cached_tokens.argmax())})


class Places(NamedTuple):
    """The places of a batch, as ``batch_size`` chooses them."""

    count: int  #: requests that run together
    share: float = 1.0  #: share of their answers' limits that the pools hold
    shares_prefixes: bool = True  #: whether the pools have room for shared blocks


def open_batch(
    problem: Problem,
    policy: Policy,
    workload: Workload,
    places: Places | int,
    tree: PromptTree | None = None,
    gives: bool = True,
    empty: bool = False,
) -> Wave:
    """Return a batch with places for the first requests of the workload; the others wait.

    If the places' ``share`` is below 1, pools hold this share of the answers' limits, and each mini-batch's part holds
    at least one request of full length. Requests then take blocks on demand.

    ``tree``: the requests' prompts (default: ``known_tree``). Equal beginnings share blocks if the policy allows it
    (``may_share``). ``gives``: False gives no blocks, if only sizes are needed. ``empty``: the workload only sizes the
    places, and no request has arrived (``RequestQueue.arrived`` is 0).
    """
    count, share, shares_prefixes = places if isinstance(places, Places) else Places(places)
    num_requests, tree = workload.num_requests, (tree or known_tree(workload)) if shares_prefixes else None
    prompts, limits = workload.prompt_tokens[:count], workload.max_tokens[:count]
    first = Workload(prompts.copy(), limits.copy(), noted=workload.noted)  # joining requests overwrite these lengths
    mini_batches, room, paths = _packed(problem, policy, workload, count, tree)
    if count == num_requests and share == 1 and not any(paths) and not empty:
        return admit(problem, policy, workload, gives=gives)
    gives = gives and not empty
    planned = Workload(first.prompt_tokens, np.maximum(1, np.ceil(share * first.max_tokens)).astype(np.int64))
    depth = _depth(paths) if room else None
    alone = workload.select(np.array(extremes(workload)))
    wave = admit(problem, policy, planned, alone=alone, mini_batches=mini_batches, shared=depth, room=room, gives=gives)
    wave = replace(wave, workload=first)
    if tree and room:
        piece = chunk_tokens(policy.max_mini_batch_tokens) // BLOCK_TOKENS
        sharing = SharedBlocks(tree, BlockEntries(policy.cache), room, count, piece, stores_exactly(policy))
        for group in wave.mini_batches:
            for place in group.tolist():
                sharing.attach(place, tree.shared(place))
        wave = replace(wave, sharing=sharing)
    if wave.whole:
        wave = replace(wave, whole=replace(wave.whole, workload=first))
    # A preempted request returns with all its tokens.
    longest = Workload(alone.cached_tokens, np.ones_like(alone.max_tokens)) if share < 1 else alone
    limits = queue_sizes(wave, longest, joins_singly(policy))
    queue = RequestQueue(workload, following=0 if empty else count, arrived=0 if empty else None)
    wave = replace(wave, queue=queue, limits=limits, expected_share=share, empty=empty)
    if gives and wave.grows:
        for k, group in enumerate(wave.mini_batches):
            for place in group.tolist():
                held = [wave.num_blocks[pool.name][place] for pool in wave.pools]
                take_blocks_back(wave, k, place)
                prompt = wave.own_blocks(place, first.prompt_tokens[place])
                give_blocks(wave, k, place, np.minimum(prompt + FIRST_RUN, held))
    return wave


def _packed(
    problem: Problem, policy: Policy, workload: Workload, count: int, tree: PromptTree | None
) -> tuple[list[np.ndarray], dict[str, int], list[list[int]]]:
    """Return (places of each mini-batch, room for shared blocks, shared blocks) of the first ``count`` requests.
    Buffers are large enough for full answers, so that padding does not limit later which requests run. The last two are
    the result of ``_shared_room``, empty if no blocks are shared."""
    entries, cached = BlockEntries(policy.cache), workload.cached_tokens[:count]
    room, paths = {}, []
    if tree and may_share(policy, problem.shape):
        # A chunk attends to stored blocks. So a prompt in several chunks shares nothing unless blocks are exact.
        tree.longest = math.inf if stores_exactly(policy) else chunk_tokens(policy.max_mini_batch_tokens)
        room, paths = _shared_room(tree, entries, count, workload.num_requests)
    if not room:
        return packed(problem, policy, cached), room, paths
    # With attention on the host, the device computes one mini-batch while the host attends for another. Counting only
    # unshared tokens could leave a single mini-batch, in which device and host would alternate.
    own = 0 if policy.attention == "host" else _depth(paths) * BLOCK_TOKENS
    return _pack_sharing(cached - own, problem, policy, paths), room, paths


def _depth(paths: list[list[int]]) -> np.ndarray:
    """Return the number of blocks that each request shares."""
    return np.array([len(path) for path in paths], dtype=np.int64)


def known_tree(workload: Workload) -> PromptTree | None:
    """Return a tree of stand-in prompts for predictions, which know shared prefixes but not their tokens; None without
    shared prefixes."""
    return PromptTree(workload.stand_in) if workload.prefixes is not None else None


def _shared_room(
    tree: PromptTree, entries: BlockEntries, count: int, num_requests: int
) -> tuple[dict[str, int], list[list[int]]]:
    """Return (entry -> blocks to reserve for sharing among ``count`` running requests, shared blocks of the first
    ``count`` requests); both empty without sharing. The reserved blocks are those of the requests that share the most,
    among a sample of all."""
    tree.resident, together = {}, count + max(1, count // FOLLOWERS)
    first, step = range(min(num_requests, together + LOOKED_AT)), -(-num_requests // LOOKED_AT)
    looked_at = {*first, *range(0, num_requests, step)}
    for request in looked_at:
        tree.path(request)
    shared = {request: tree.shared(request) for request in looked_at}
    deepest = sorted(looked_at, key=lambda request: len(shared[request]))[-together:]
    depth_of = {block: at for request in deepest for at, block in enumerate(shared[request])}
    entry_index = entries.entry_of(np.array([*depth_of.values()], dtype=np.int64) * BLOCK_TOKENS)
    most = np.bincount(entry_index, minlength=len(entries.names))
    if not most.any():
        return {}, []
    return dict(zip(entries.names, most.tolist(), strict=True)), [shared[request] for request in range(count)]


def _pack_sharing(tokens: np.ndarray, problem: Problem, policy: Policy, paths: list[list[int]]) -> list[np.ndarray]:
    """Return the mini-batches of requests with these unshared ``tokens`` and shared blocks ``paths``. Requests are
    packed by length or by their shared blocks, whichever needs fewer loads of blocks."""
    groups, entries = packed(problem, policy, tokens), BlockEntries(policy.cache)
    order = np.array(sorted(range(len(paths)), key=lambda place: (paths[place], -tokens[place])))
    alike = [order[group] for group in pack(tokens[order], entries, policy.max_mini_batch_tokens, "fifo")]

    def num_blocks(groups: list[np.ndarray]) -> int:
        shared = sum(len({block for place in group for block in paths[place]}) for group in groups)
        return shared + sum(len(group) * int(ceil_blocks(tokens[group].max())) for group in groups)

    return min(groups, alike, key=num_blocks)


def first_wave(problem: Problem, policy: Policy, workload: Workload) -> int:
    """Return how many of the first requests fit the budgets together with full answers. Raise InputError if none
    fits."""

    def plan(count: int) -> MemoryPlan:
        return wave_plan(problem, policy, workload.select(slice(count)))

    return _most_that_fit(problem, policy, workload, plan, None) or _refuse(problem, workload, plan)


def batch_size(
    problem: Problem, policy: Policy, workload: Workload, at_most: int, tree: PromptTree | None = None
) -> Places:
    """Return how many requests run together, at most ``at_most``, and how.

    If ``at_most`` requests fit with full answers, pools hold these. Otherwise pools hold EXPECTED_SHARE of the answers'
    limits, if blocks can be taken on demand and more requests run then. Prompts share blocks unless that leaves no room
    for one request. ``tree``: see ``open_batch``. Raise InputError if not even one request fits.
    """
    shares = (1.0, EXPECTED_SHARE) if may_grow(policy) else (1.0,)
    most = min(at_most, policy.max_batch or at_most, workload.num_requests)
    for known in dict.fromkeys((tree or known_tree(workload), None)):
        found = []
        for share in shares:

            def plan(count: int, share: float = share, known: PromptTree | None = known) -> MemoryPlan:
                places = Places(count, share, known is not None)
                wave = open_batch(problem, policy, workload, places, known, gives=False)
                return memory_plan(problem, policy, buffer_sizes(wave))

            # Preempted requests return with longer prompts, which may not fit.
            count = _most_that_fit(problem, policy, workload, plan, known, at_most)
            found.append(Places(count, share, known is not None))
            if found[0].count in (0, most):
                break
        if found[0].count:
            return max(found, key=lambda places: places.count)
    _refuse(problem, workload, plan)


def _most_that_fit(
    problem: Problem,
    policy: Policy,
    workload: Workload,
    plan: Callable[[int], MemoryPlan],
    tree: PromptTree | None,
    at_most: int | None = None,
) -> int:
    """Return the largest number of requests whose plan fits the budgets; 0 if one request does not fit.

    One more request may need less memory, because all mini-batches become smaller if it opens another one. So bisect
    the number of mini-batches, each with its fewest requests, and then the requests within it. The result is exact for
    requests of one length and close for others.
    """
    high = min(at_most or workload.num_requests, policy.max_batch or workload.num_requests, workload.num_requests)
    if policy.selection.pool_bytes is not None:
        high = min(high, pool_blocks(problem.shape, policy.selection, problem.stored(policy.bits).kv))

    @cache
    def fitting(count: int) -> bool:
        return fits(plan(count), problem.budgets)

    @cache
    def num_mini_batches(count: int) -> int:
        return len(_packed(problem, policy, workload, count, tree)[0])

    def fewest(count: int) -> int:
        """Return the fewest requests that form the same number of mini-batches as ``count``."""
        return count if count == 1 else 1 + _last(0, count, lambda n: num_mini_batches(n) < num_mini_batches(count))

    if fitting(high):
        return high
    if not fitting(1):
        return 0
    most = _last(1, high, lambda count: fitting(fewest(count)))  # the largest count whose number of mini-batches fits
    return _last(fewest(most), most + 1, fitting)


def _last(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the last number below ``high`` for which ``holds`` is true, by bisection; it must be true for ``low``."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _refuse(problem: Problem, workload: Workload, plan: Callable[[int], MemoryPlan]) -> NoReturn:
    """Raise InputError for the first request, which does not fit the budgets alone."""
    check_budget(plan(1), problem.budgets, f"one request of {int(workload.prompt_tokens[0])} prompt tokens")
    raise ValueError("the request fits by itself")


def check_least(problem: Problem, policy: Policy) -> None:
    """Raise InputError if not even one short request fits the budgets."""
    least = wave_plan(problem, policy, Workload.uniform(1, SHORT_REQUEST_TOKENS, 1))
    subject = f"model {problem.shape.name} with policy {policy.name} and a single short request"
    check_budget(least, problem.budgets, subject)


def check_smallest(problem: Problem) -> None:
    """Raise InputError if the device budget is too small for one short request under every lossless policy. Called
    before profiling, which would then be of no use."""
    plans, request = [], Workload.uniform(1, SHORT_REQUEST_TOKENS, 1)
    streamed = Policy("auto", Placement(host=1), cache={"kv@host": 1.0}, states="host")
    for attention, hidden, schedule in product(("device", "host"), ("device", "host"), ("column", "row")):
        with suppress(InputError):  # the model does not support this policy
            policy = replace(streamed, attention=attention, hidden=hidden, schedule=schedule)
            plans.append(wave_plan(problem, policy, request))
    least = min(plans, key=lambda plan: total_bytes(plan)["device"])
    subject = f"model {problem.shape.name} with everything streamed and a single short request"
    check_budget(least, Budgets(device=problem.budgets.device), subject)
