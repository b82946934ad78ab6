"""From a policy and a workload to a wave: requests in mini-batches, each with its blocks, and the queue of the others.

``schedule.steps`` says what a mini-batch does in an iteration, ``core.plan`` in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, BlockEntries, BlockManager
from flexhybrid.core.context.cache_entries import Pool, representation_of
from flexhybrid.core.context.packing import chunk_tokens, num_chunks, packed
from flexhybrid.core.context.prefixes import SharedBlocks
from flexhybrid.core.context.selection import (
    kept_tokens,
    layers_by_window,
    limits_cache,
    num_keeping,
    with_pool_share,
)
from flexhybrid.core.context.split import SplitLines, split_lines
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.layout import PlacedLayer, placed_layers
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import ElementBytes, Policy, Selection
from flexhybrid.core.problem import BufferSizes, Problem
from flexhybrid.core.workload import Workload


@dataclass
class RequestQueue:
    """The requests of a batch: running ones have a place (an index into ``Wave.workload``), the others wait.

    They join by number, preempted ones first. A request that does not fit is passed over.
    """

    workload: Workload  #: of all requests
    following: int  #: first request that was never considered
    passed_over: list[int] = field(default_factory=list)  #: earlier requests that wait
    #: request -> tokens from before a preemption or from an earlier batch, now part of its prompt
    given: dict[int, int] = field(default_factory=dict)
    #: called as a request joins a mini-batch of the running batch, also after a preemption
    on_join: Callable[[int, int], None] = lambda request, mini_batch: None
    on_leave: Callable[[int, int], None] = lambda request, iteration: None  #: called when it stops running
    ended: np.ndarray | None = None  #: answers that ended before this batch, by tokens
    closes: Callable[[], bool] = lambda: False  #: once true, only preempted requests join

    def first(self, count: int) -> list[int]:
        """Return the first waiting requests, ``count`` at most."""
        end = min(self.workload.num_requests, self.following + max(0, count - len(self.passed_over)))
        self.passed_over += range(self.following, end)
        self.following = end
        return self.passed_over[:count]

    @property
    def is_closed(self) -> bool:
        """Return whether no request may join: none waits, or the queue is closed and none was preempted."""
        return self.is_empty or self.closes() and not (self.passed_over and self.passed_over[0] in self.given)

    def remove(self, requests: set[int]) -> None:
        """Remove requests that join, or never will."""
        self.passed_over = [request for request in self.passed_over if request not in requests]

    def put_back(self, request: int, num_given: int) -> None:
        """Queue a preempted request with ``num_given`` tokens, before all others."""
        self.given[request] = num_given
        self.passed_over.insert(0, request)

    @property
    def is_empty(self) -> bool:
        return not self.passed_over and self.following == self.workload.num_requests

    @property
    def waiting(self) -> np.ndarray:
        """All who wait."""
        return np.r_[np.array(self.passed_over, dtype=np.int64), self.following : self.workload.num_requests]


@dataclass(frozen=True)
class Wave:
    """Requests that run together: lengths, mini-batches, blocks. With a queue, waiting requests take the places of
    ended ones (``core/schedule/scheduler.py``), and the arrays over places change."""

    problem: Problem
    policy: Policy
    workload: Workload  #: of the request in each place
    entries: BlockEntries
    mini_batches: tuple[np.ndarray, ...]  #: places
    windows: tuple[int | None, ...]  #: kinds of layers (``layers_by_window``); each has pools of its own
    tables: dict[str, np.ndarray]  #: pool -> [places, most], the physical blocks of each request, in order
    num_blocks: dict[str, np.ndarray]  #: pool -> [places], their counts
    joined: np.ndarray  #: [places], the iteration that computes the prompt
    request: np.ndarray  #: [places], index of the request in the queue
    blocks: tuple[BlockManager, ...]  #: of each mini-batch; they own the blocks of the pools
    placed: tuple[PlacedLayer, ...]  #: the weights of each kind of layer (``ModelShape.weights_kind``)
    split: dict[str, SplitLines]  #: of both(…) entries
    #: the same requests in layers that keep all tokens although others do not, in separate blocks
    whole: Wave | None = None
    queue: RequestQueue | None = None  #: None: no request waits
    limits: BufferSizes = BufferSizes({}, {})  #: for requests that join; unused without a queue
    #: expected answer length / limit; below 1, requests take blocks on demand
    expected_share: float = 1.0
    empty: bool = False  #: no request has a place yet
    sharing: SharedBlocks | None = None  #: shared blocks of equal prompt beginnings; None: none

    @property
    def begun(self) -> np.ndarray:
        """Return the requests that have places when the batch begins."""
        return self.request[:0] if self.empty else self.request

    @property
    def grows(self) -> bool:
        return self.expected_share < 1

    @property
    def shape(self) -> ModelShape:
        return self.problem.shape

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """Return the requests' pools, kind of layers by kind; counts [..., pool] have this order."""
        return tuple(Pool(entry, window) for window in self.windows for entry in self.entries.names)

    @property
    def pool_blocks(self) -> dict[str, int]:
        """Return each pool's number of blocks per layer. Shared blocks come first, in all kinds of layers."""
        sizes = {pool.name: sum(part.pools[pool.name].num_blocks for part in self.blocks) for pool in self.pools}
        for pool in self.pools if self.sharing else ():
            sizes[pool.name] += self.shared.blocks.pools[pool.entry].num_blocks
        return sizes

    def window_of(self, layer: int) -> int | None:
        """The window that a layer keeps; None: it keeps all tokens."""
        return self.shape.attention_of(layer).window if self.windows != (None,) else None

    def by_pool(self, counts: np.ndarray) -> np.ndarray:
        """Return the blocks of each pool, [..., pool], for ``counts`` [..., entry] in layers that keep all tokens."""
        return by_pool(self.entries, self.windows, counts)

    @property
    def shared(self) -> SharedBlocks:
        """Return the shared blocks. Raise ValueError without any."""
        if self.sharing is None:
            raise ValueError("the requests of this wave share no blocks")
        return self.sharing

    def shared_blocks(self, places) -> np.ndarray:
        """Return how many leading blocks of their prompts the requests in these places share."""
        return np.zeros(np.shape(places), np.int64) if self.sharing is None else self.sharing.depth[places]

    def skipped_tokens(self, places) -> np.ndarray:
        """Return the leading prompt tokens in these places that shared blocks already hold."""
        computed = self.sharing is None or not self.sharing.exact
        return np.zeros(np.shape(places), np.int64) if computed else self.shared.depth[places] * BLOCK_TOKENS

    def own_blocks(self, places, tokens) -> np.ndarray:
        """Return the blocks of each pool that the requests in these places own at these lengths."""
        held = self.entries.held(tokens)
        return self.by_pool(held if self.sharing is None else held - self.entries.dealt(self.sharing.depth[places]))

    @cached_property
    def stored(self) -> ElementBytes:
        """Return the stored bytes per element of weights, KV and ACT."""
        return self.problem.stored(self.policy.bits)

    def placed_of(self, layer: int) -> PlacedLayer:
        """Return where the weights of a layer lie."""
        return self.placed[self.shape.weights_kind(layer)]

    def cuts_layer(self, layer: int) -> bool:
        """Return whether a layer loaded at once comes in two loads: recomputation's part, then ACT, then the rest."""
        streams_early = self.policy.weight_order == "kv_act_first" and self.policy.bits.weights == "native"
        return streams_early and self.placed_of(layer).has_early_part


def by_pool(entries: BlockEntries, windows: tuple[int | None, ...], counts: np.ndarray) -> np.ndarray:
    """``Wave.by_pool``."""
    of_kinds = [counts if w is None else np.minimum(counts, entries.in_window(w)) for w in windows]
    return of_kinds[0] if len(windows) == 1 else np.concatenate(of_kinds, axis=-1)


def stored_layers(problem: Problem, policy: Policy) -> tuple[PlacedLayer, ...]:
    """Return the placement of each kind of layer's weights, in the policy's bits."""
    stored = problem.stored(policy.bits)
    return placed_layers(problem.shape, policy.weights, stored.weights, stored.compute)


def check_planned(policy: Policy, shape: ModelShape) -> None:
    """Raise InputError for what this planner does not support, by name."""
    whole = policy.selection.whole_layers
    if whole is not None and whole > shape.num_layers:
        raise InputError(
            f"policy {policy.name}: selection.whole_layers is {whole}; {shape.name} has {shape.num_layers} layers: "
            "give no more than that"
        )
    representations = {representation_of(entry) for entry in policy.cache_entries}
    speculative = policy.selection.method == "speculative"
    refusals = (
        (policy.embedding.device < 1, "embedding and head off the device"),
        (shape.recurrent and "tok" in representations, "a cache of token ids (tok) for a model with recurrent layers, "
         "whose states would be recomputed for each token,"),
        (shape.lending and policy.selection.method != "none", f"selection {policy.selection.method} for a model whose "
         "layers attend to keys and values of others, in which other tokens would have to be chosen,"),
        (policy.hidden == "disk", "hidden states on the disk"),
        (representations == {"tok"}, "a cache of token ids alone: the newest block needs an entry too, such as kv@host "
         "with a share of 1e-6 (token_recompute(1) has it), and it"),
        (policy.selection.method == "heavy_hitter" and representations != {"kv"}, "selection heavy_hitter over a cache "
         "other than kv"),
        (speculative and not set(policy.cache_entries) <= {"kv@host", "act@host"}, "speculative selection over a cache "
         "other than kv@host and act@host"),
        (speculative and limits_cache(policy.selection) and "act" in representations, "a limited pool of a speculative "
         "selection over ACT, whose rows serve all heads,"),
        (speculative and policy.selection.partial_keys == "disk", "partial keys on the disk"),
        (policy.static_cache and "both" in representations, "a static cache of both copies"),
        (policy.host_attends and policy.attention == "device" and policy.selection.method != "none",
         f"selection {policy.selection.method} with attention shared between host and device"),
    )  # fmt: skip
    for refused, what in refusals:
        if refused:
            raise InputError(f"policy {policy.name}: {what} cannot be planned by this version")


def admit(
    problem: Problem,
    policy: Policy,
    workload: Workload,
    alone: Workload | None = None,
    mini_batches: Sequence[np.ndarray] | None = None,
    shared: np.ndarray | None = None,
    room: Mapping[str, int] = MappingProxyType({}),
    gives: bool = True,
) -> Wave:
    """Pack requests and allocate their blocks, each mini-batch's contiguous, in pools of exactly the needed size.

    ``mini_batches``: a given packing. ``alone``: each part of a pool must hold any of these requests alone. ``shared``:
    leading blocks of each request that are shared (``Wave.sharing``); they are at the beginning of each pool, ``room``
    [entry] blocks. The hardware record decides split points of both(…) entries. Without ``gives``, pools are sized and
    all blocks stay free. Raise InputError for a policy that cannot be planned.
    """
    check_planned(policy, problem.shape)
    cached = workload.cached_tokens
    stored = problem.stored(policy.bits).kv
    policy = replace(policy, selection=with_pool_share(problem.shape, policy.selection, stored, cached))
    entries = BlockEntries(policy.cache)
    split = {
        entry: split_lines(problem, policy, entry) for entry in entries.names if representation_of(entry) == "both"
    }
    if mini_batches is None:
        mini_batches = packed(problem, policy, cached)
    if problem.shape.whole_prompts:
        longest = max(int(of.cached_tokens.max()) for of in (workload, alone) if of is not None)
        bound = max(policy.max_mini_batch_tokens, (longest // BLOCK_TOKENS + 1) * BLOCK_TOKENS)
        policy = replace(policy, max_mini_batch_tokens=bound)
    first = workload.prompt_tokens.copy()  # the first length of each request that is held as a whole
    for group in mini_batches:
        if num_chunks(policy, first[group]) > 1:
            first[group] = chunk_tokens(policy.max_mini_batch_tokens)
    kept = kept_tokens(policy.selection, workload.prompt_tokens, cached, cached)
    counts, least = entries.most_blocks(first, kept), None  # [requests, entry]
    if shared is not None:
        counts = counts - entries.dealt(shared)
    if alone is not None:
        last = alone.cached_tokens
        most = kept_tokens(policy.selection, alone.prompt_tokens, last, last)
        least = entries.most_blocks(np.minimum(alone.prompt_tokens, first.min()), most).max(axis=0)
    windows = tuple(layers_by_window(problem.shape, policy.selection))
    wave = Wave(
        problem=problem,
        policy=policy,
        workload=workload,
        entries=entries,
        mini_batches=tuple(mini_batches),
        windows=windows,
        tables={},
        num_blocks={},
        joined=np.zeros(workload.num_requests, dtype=np.int64),
        request=np.arange(workload.num_requests),
        blocks=(),
        placed=stored_layers(problem, policy),
        split=split,
    )
    wave = _with_blocks(wave, wave.by_pool(counts), None if least is None else wave.by_pool(least), room, gives)
    if not num_keeping(policy.selection, problem.shape.num_layers):
        return wave
    # In all layers a prompt is computed whole, also that of a request that joins later.
    longest = max(int(of.cached_tokens.max()) for of in (workload, alone) if of is not None)
    keeping = replace(policy, selection=Selection(), max_mini_batch_tokens=longest + BLOCK_TOKENS)
    whole = _with_blocks(replace(wave, policy=keeping), entries.most_blocks(first, cached), None, gives=gives)
    return replace(wave, whole=whole)


def _with_blocks(
    wave: Wave,
    counts: np.ndarray,
    least: np.ndarray | None,
    room: Mapping[str, int] = MappingProxyType({}),
    gives: bool = True,
) -> Wave:
    """Return the wave with ``counts`` [requests, pool] own blocks in pools of that size, at least ``least`` [pool] per
    mini-batch, after ``room`` [entry]. Without ``gives`` the blocks stay free."""
    names, blocks = tuple(pool.name for pool in wave.pools), []
    taken = {pool.name: room.get(pool.entry, 0) for pool in wave.pools}
    for group in wave.mini_batches:
        of_group = counts[group].sum(axis=0)
        sizes = dict(zip(names, (of_group if least is None else np.maximum(of_group, least)).tolist(), strict=True))
        blocks.append(BlockManager(sizes, taken))
        taken = {name: taken[name] + size for name, size in sizes.items()}
    most = counts.max(axis=0) if least is None else np.maximum(counts.max(axis=0), least)
    tables = {name: np.zeros((len(counts), max(1, int(most[i]))), np.int64) for i, name in enumerate(names)}
    num_blocks = {name: np.zeros(len(counts), np.int64) for name in names}
    wave = replace(wave, blocks=tuple(blocks), tables=tables, num_blocks=num_blocks)
    for k, group in enumerate(wave.mini_batches if gives else ()):
        for place in group.tolist():
            give_blocks(wave, k, place, counts[place])
    return wave


def give_blocks(wave: Wave, k: int, place: int, counts: Sequence[int] | np.ndarray) -> None:
    """Extend the blocks of the request in a place of mini-batch ``k`` to ``counts`` [pool]. Raise InputError, and
    change nothing, if too few are free."""
    have = {name: int(held[place]) for name, held in wave.num_blocks.items()}
    more = {pool.name: int(count) - have[pool.name] for pool, count in zip(wave.pools, counts, strict=True)}
    wave.blocks[k].take(place, more)
    for name, count in more.items():
        if count:
            held, table = wave.blocks[k].blocks_of(name, place), wave.tables[name]
            if len(held) > table.shape[1]:
                table = wave.tables[name] = np.pad(table, ((0, 0), (0, len(held) - table.shape[1])))
            table[place, : len(held)], wave.num_blocks[name][place] = held, len(held)


def trim_blocks(wave: Wave, k: int, place: int, counts: Sequence[int] | np.ndarray) -> None:
    """Free the last blocks of the request in a place of mini-batch ``k`` beyond ``counts`` [pool], above 0."""
    for pool, count in zip(wave.pools, counts, strict=True):
        spare = int(wave.num_blocks[pool.name][place]) - int(count)
        if spare > 0:
            wave.blocks[k].pools[pool.name].give_up(place, spare)
            wave.num_blocks[pool.name][place] = count


def leave_place(wave: Wave, k: int, place: int) -> None:
    """Free what the request in a place of mini-batch ``k`` holds, and its part in shared blocks."""
    take_blocks_back(wave, k, place)
    if wave.sharing:
        wave.sharing.detach(place)
    if wave.whole:
        take_blocks_back(wave.whole, k, place)


def take_blocks_back(wave: Wave, k: int, place: int) -> None:
    """Free all blocks of the request in a place of mini-batch ``k``."""
    wave.blocks[k].release(place)
    for counts in wave.num_blocks.values():
        counts[place] = 0
