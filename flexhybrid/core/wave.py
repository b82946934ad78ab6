"""Waves: the requests of a workload in mini-batches under a policy, their blocks, and the queue of waiting requests."""

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
from flexhybrid.core.context.selection import kept_tokens, layers_by_window, limits_cache, num_keeping, with_pool_share
from flexhybrid.core.context.split import SplitLines, split_lines
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.layout import PlacedLayer, placed_layers
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import ElementBytes, Policy, Selection
from flexhybrid.core.problem import BufferSizes, Problem
from flexhybrid.core.workload import Workload


@dataclass
class RequestQueue:
    """The waiting requests of a batch. Running requests have a place, an index into ``Wave.workload``. Requests join in
    the order of their numbers, preempted ones first. A request that does not fit is passed over."""

    workload: Workload  #: all requests, running and waiting
    following: int  #: first request that was never considered
    passed_over: list[int] = field(default_factory=list)  #: waiting requests that were considered, or preempted
    #: request -> tokens from before a preemption, now part of its prompt
    given: dict[int, int] = field(default_factory=dict)
    #: called when a request joins a mini-batch of the running batch, also after a preemption
    on_join: Callable[[int, int], None] = lambda request, mini_batch: None
    on_leave: Callable[[int, int], None] = lambda request, iteration: None  #: called when a request ends
    ended: np.ndarray | None = None  #: numbers of answers that ended before this batch, by tokens
    closes: Callable[[], bool] = lambda: False  #: once it returns True, only preempted requests join
    arrived: int | None = None  #: requests that have arrived, the first ones of the workload; None: all
    #: called before the requests of an iteration are chosen; it may raise ``arrived``, and returns whether it did
    on_iteration: Callable[[], bool] = lambda: False

    def first(self, count: int) -> list[int]:
        """Return the first ``count`` waiting requests, or all if there are fewer."""
        end = min(self.num_arrived, self.following + max(0, count - len(self.passed_over)))
        self.passed_over += range(self.following, end)
        self.following = end
        return self.passed_over[:count]

    @property
    def num_arrived(self) -> int:
        """Return the number of requests that may join or have joined."""
        return self.workload.num_requests if self.arrived is None else self.arrived

    @property
    def is_closed(self) -> bool:
        """Return whether no request may join: none waits, or the queue is closed and no preempted request waits."""
        return self.is_empty or self.closes() and not (self.passed_over and self.passed_over[0] in self.given)

    def remove(self, requests: set[int]) -> None:
        """Remove requests that join now, or that never will."""
        self.passed_over = [request for request in self.passed_over if request not in requests]

    def put_back(self, request: int, num_given: int) -> None:
        """Queue a preempted request with ``num_given`` tokens, before all others."""
        self.given[request] = num_given
        self.passed_over.insert(0, request)

    @property
    def is_empty(self) -> bool:
        return not self.passed_over and self.following == self.num_arrived

    @property
    def waiting(self) -> np.ndarray:
        """Return the waiting requests, in order."""
        return np.r_[np.array(self.passed_over, dtype=np.int64), self.following : self.num_arrived]


@dataclass(frozen=True)
class Wave:
    """Requests that run together: their lengths, mini-batches and blocks. With a queue, waiting requests take the
    places of ended ones (``core/schedule/scheduler.py``), and the arrays over places change."""

    problem: Problem
    policy: Policy
    workload: Workload  #: lengths of the request in each place
    entries: BlockEntries
    mini_batches: tuple[np.ndarray, ...]  #: the places of each mini-batch
    windows: tuple[int | None, ...]  #: window of each kind of layers (``layers_by_window``), which has its own pools
    tables: dict[str, np.ndarray]  #: pool -> [places, most], the physical blocks of each request, in order
    num_blocks: dict[str, np.ndarray]  #: pool -> [places], number of these blocks
    joined: np.ndarray  #: [places], the iteration that computes the prompt
    request: np.ndarray  #: [places], index of the request in the queue
    blocks: tuple[BlockManager, ...]  #: owner of each mini-batch's part of the pools
    placed: tuple[PlacedLayer, ...]  #: weights of each kind of layers (``ModelShape.weights_kind``)
    split: dict[str, SplitLines]  #: both(…) entry -> its lines
    #: the same requests in layers that keep all tokens, in separate blocks, if other layers drop tokens; else None
    whole: Wave | None = None
    queue: RequestQueue | None = None  #: None: no request waits
    limits: BufferSizes = BufferSizes({}, {})  #: buffers that joining requests must fit; unused without a queue
    #: expected answer length / limit; below 1, requests take blocks on demand
    expected_share: float = 1.0
    empty: bool = False  #: no request has a place yet
    sharing: SharedBlocks | None = None  #: shared blocks of equal prompt beginnings; None: nothing is shared

    @property
    def begun(self) -> np.ndarray:
        """Return the requests that have places when the batch begins."""
        return self.request[:0] if self.empty else self.request

    @property
    def grows(self) -> bool:
        """Return whether requests take blocks on demand."""
        return self.expected_share < 1

    @property
    def shape(self) -> ModelShape:
        return self.problem.shape

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """Return the pools, by kind of layers and entry. Counts [..., pool] have this order."""
        return tuple(Pool(entry, window) for window in self.windows for entry in self.entries.names)

    @property
    def pool_blocks(self) -> dict[str, int]:
        """Return pool -> number of blocks in each layer, with shared blocks, which every kind of layers has."""
        sizes = {pool.name: sum(part.pools[pool.name].num_blocks for part in self.blocks) for pool in self.pools}
        for pool in self.pools if self.sharing else ():
            sizes[pool.name] += self.shared.blocks.pools[pool.entry].num_blocks
        return sizes

    def window_of(self, layer: int) -> int | None:
        """Return the window of tokens that a layer keeps; None: it keeps all tokens."""
        return self.shape.attention_of(layer).window if self.windows != (None,) else None

    def by_pool(self, counts: np.ndarray) -> np.ndarray:
        """Return the blocks of each pool, [..., pool], from the blocks that layers without a window have,
        [..., entry]."""
        return by_pool(self.entries, self.windows, counts)

    @property
    def shared(self) -> SharedBlocks:
        """Return ``sharing``. Raise ValueError if nothing is shared."""
        if self.sharing is None:
            raise ValueError("the requests of this wave share no blocks")
        return self.sharing

    def shared_blocks(self, places) -> np.ndarray:
        """Return the number of leading prompt blocks that the requests in these places share."""
        return np.zeros(np.shape(places), np.int64) if self.sharing is None else self.sharing.depth[places]

    def skipped_tokens(self, places) -> np.ndarray:
        """Return the number of leading prompt tokens in these places that are in shared blocks and not computed
        again."""
        computed = self.sharing is None or not self.sharing.exact
        return np.zeros(np.shape(places), np.int64) if computed else self.shared.depth[places] * BLOCK_TOKENS

    def own_blocks(self, places, tokens) -> np.ndarray:
        """Return the unshared blocks of each pool that the requests in these places have at these lengths."""
        held = self.entries.held(tokens)
        return self.by_pool(held if self.sharing is None else held - self.entries.dealt(self.sharing.depth[places]))

    @cached_property
    def stored(self) -> ElementBytes:
        """Return the stored bytes per element of weights, KV and ACT."""
        return self.problem.stored(self.policy.bits)

    def placed_of(self, layer: int) -> PlacedLayer:
        """Return the placement of a layer's weights."""
        return self.placed[self.shape.weights_kind(layer)]

    def cuts_layer(self, layer: int) -> bool:
        """Return whether a layer that is not sliced has two loads: W_K and W_V, then, after ACT, the other weights."""
        unpacks = self.shape.unpacks(self.policy.bits.weights)
        streams_early = self.policy.weight_order == "kv_act_first" and not unpacks
        return streams_early and self.placed_of(layer).has_early_part


def by_pool(entries: BlockEntries, windows: tuple[int | None, ...], counts: np.ndarray) -> np.ndarray:
    """Return ``Wave.by_pool`` of these entries and windows."""
    by_kind = [counts if w is None else np.minimum(counts, entries.in_window(w)) for w in windows]
    return by_kind[0] if len(windows) == 1 else np.concatenate(by_kind, axis=-1)


def stored_layers(problem: Problem, policy: Policy) -> tuple[PlacedLayer, ...]:
    """Return the placement of the weights of each kind of layers, in the policy's bits."""
    stored = problem.stored(policy.bits)
    return placed_layers(problem.shape, policy.weights, stored.weights, stored.compute)


def check_weights_bits(policy: Policy, shape: ModelShape) -> None:
    """Raise InputError if a policy packs weights that the checkpoint has packed."""
    if shape.packed_elements and policy.bits.weights != "native":
        raise InputError(
            f"policy {policy.name}: bits.weights {policy.bits.weights} would pack weights that the checkpoint of "
            f'{shape.name} has packed: it must be "native"'
        )


def check_planned(policy: Policy, shape: ModelShape) -> None:
    """Raise InputError for a policy that cannot be planned for a model."""
    whole = policy.selection.whole_layers
    if whole is not None and whole > shape.num_layers:
        raise InputError(
            f"policy {policy.name}: selection.whole_layers is {whole}; {shape.name} has {shape.num_layers} layers: "
            "give no more than that"
        )
    check_weights_bits(policy, shape)
    representations = {representation_of(entry) for entry in policy.cache_entries}
    speculative = policy.selection.method == "speculative"
    batch, selected = policy.experts.batch, policy.selection.method != "none"
    if batch and not any(shape.routed):
        why = "computes them by its own code" if shape.modules and shape.modules.has_experts else "has none"
        raise InputError(
            f"policy {policy.name}: experts.batch is {batch}, which is for models with experts; {shape.name} {why}: "
            "give 0"
        )
    refusals = (
        (batch and selected, f"experts.batch with selection {policy.selection.method}"),
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
        (policy.splits_attention and policy.selection.method != "none",
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
    """Return a wave: pack requests into mini-batches and give them blocks, in pools of exactly the needed size.

    ``alone``: each mini-batch's part of the pools must hold any of these requests alone. ``mini_batches``: a given
    packing. ``shared``: number of leading blocks of each request that are shared; ``room``: entry -> shared blocks,
    which are the first of each pool. ``gives``: False leaves all blocks free. Raise InputError for a policy that cannot
    be planned, and if both(…) entries or packing "balance" need a hardware record and the problem has none.
    """
    check_planned(policy, problem.shape)
    cached = workload.cached_tokens
    longest = max(int(lengths.cached_tokens.max()) for lengths in (workload, alone) if lengths is not None)
    selection = with_pool_share(problem.shape, policy.selection, problem.stored(policy.bits).kv, cached)
    policy = replace(policy, selection=selection)
    entries = BlockEntries(policy.cache)
    both = [entry for entry in entries.names if representation_of(entry) == "both"]
    split = {entry: split_lines(problem, policy, entry) for entry in both}
    if mini_batches is None:
        mini_batches = packed(problem, policy, cached)
    if problem.shape.whole_prompts:
        bound = max(policy.max_mini_batch_tokens, (longest // BLOCK_TOKENS + 1) * BLOCK_TOKENS)
        policy = replace(policy, max_mini_batch_tokens=bound)
    first = workload.prompt_tokens.copy()  # tokens of each request after its first step
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
    # All layers compute prompts whole, also those of requests that join later.
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
    """Return the wave with blocks for its requests. ``counts``: unshared blocks, [requests, pool]; ``least``: least
    size of each mini-batch's part, [pool]; ``room``, ``gives``: see ``admit``."""
    names, blocks = tuple(pool.name for pool in wave.pools), []
    taken = {pool.name: room.get(pool.entry, 0) for pool in wave.pools}
    for group in wave.mini_batches:
        needed = counts[group].sum(axis=0)
        sizes = dict(zip(names, (needed if least is None else np.maximum(needed, least)).tolist(), strict=True))
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
    """Free the blocks that the request in a place of mini-batch ``k`` has beyond ``counts`` [pool], which is above
    0."""
    for pool, count in zip(wave.pools, counts, strict=True):
        spare = int(wave.num_blocks[pool.name][place]) - int(count)
        if spare > 0:
            wave.blocks[k].pools[pool.name].give_up(place, spare)
            wave.num_blocks[pool.name][place] = count


def leave_place(wave: Wave, k: int, place: int) -> None:
    """Free all blocks of the request in a place of mini-batch ``k``, and end its use of shared blocks."""
    take_blocks_back(wave, k, place)
    if wave.sharing:
        wave.sharing.detach(place)
    if wave.whole:
        take_blocks_back(wave.whole, k, place)


def take_blocks_back(wave: Wave, k: int, place: int) -> None:
    """Free the unshared blocks of the request in a place of mini-batch ``k``."""
    wave.blocks[k].release(place)
    for counts in wave.num_blocks.values():
        counts[place] = 0
