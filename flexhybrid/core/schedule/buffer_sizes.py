"""Rows and blocks of each buffer of a wave; ``core.memory`` converts them to bytes.

The executor allocates these sizes; the budget check and the search add them up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, BlockEntries, ceil_blocks
from flexhybrid.core.context.cache_entries import ATTENDED_ENTRY, TIERS, representation_of, stored_copies
from flexhybrid.core.context.packing import chunk_tokens, longest_piece, num_chunks
from flexhybrid.core.context.prefixes import Build, build_steps, common_blocks, padded_rows
from flexhybrid.core.context.selection import kept_tokens, most_selected
from flexhybrid.core.context.split import SplitLines, split_point
from flexhybrid.core.policy import Policy, Selection
from flexhybrid.core.problem import BufferSizes, Problem, attends_in_place, larger
from flexhybrid.core.wave import Wave, by_pool
from flexhybrid.core.workload import Workload

LOG_ITERATIONS = 4  #: iterations of sampled tokens that the host keeps if requests join; at least 2 are needed


def mini_batch_sizes(wave: Wave, groups: Iterable[np.ndarray] | None = None) -> Iterator[tuple[BufferSizes, int]]:
    """Yield (sizes without pools, number of chunks of the prompts) of each mini-batch. ``groups``: places of other
    mini-batches (default: the wave's). Mini-batches with equal lengths share one result."""
    prompts, cached = wave.workload.prompt_tokens, wave.workload.cached_tokens
    of_lengths: dict[bytes, tuple[BufferSizes, int]] = {}
    entries, policy, widest = wave.entries, wave.policy, wave.windows[-1]
    kept = kept_tokens(policy.selection, prompts, cached, cached)
    kept_prompts = kept_tokens(policy.selection, prompts, prompts, cached)
    prompt_tokens = entries.stored(kept_prompts) - entries.stored(entries.first_stored(kept_prompts, widest))
    fresh = _stored_until(entries, cached, kept) > _stored_until(entries, prompts, kept)  # the decode stores to it

    for group in wave.mini_batches if groups is None else groups:
        if (lengths := np.stack([prompts[group], cached[group]]).tobytes()) in of_lengths:
            yield of_lengths[lengths]
            continue
        staged = prompt_tokens[group].sum(axis=0)
        if (chunks := num_chunks(policy, prompts[group])) > 1:
            staged = _staged_by_chunk(entries, policy, int(prompts[group].max()), widest)
        stored_now = entries.by_entry(np.multiply(fresh[group].any(axis=0), len(group)))
        longest, staged_now = longest_piece(policy, prompts[group]), entries.by_entry(staged)
        windows = wave.windows if wave.split else (widest,)  # with both(…), a shorter context may recompute more
        reads = (_reads(wave, group, window) for window in windows)
        sizes = (
            group_sizes(wave.problem, policy, len(group), longest, of_window, fresh=stored_now, staged=staged_now)
            for of_window in reads
        )
        of_lengths[lengths] = reduce(BufferSizes.merge, sizes), chunks
        yield of_lengths[lengths]


class SharedLengths(NamedTuple):
    """Numbers of blocks that requests of a mini-batch share."""

    depth: np.ndarray  #: [requests], shared blocks of each request
    joining: np.ndarray  #: [joining requests], shared blocks that their prompt step does not compute
    common: np.ndarray  #: [entry], shared blocks, each counted once


def shared_lengths(wave: Wave, group: np.ndarray, joining: np.ndarray) -> SharedLengths | None:
    """Return the blocks that requests in the places ``group`` share; None without sharing. ``joining``: those of the
    places whose prompts are computed now."""
    if wave.sharing is None:
        return None
    depth = wave.shared_blocks(group)
    common = common_blocks(wave.entries, wave.shared.table[group], depth)
    return SharedLengths(depth, wave.skipped_tokens(joining) // BLOCK_TOKENS, common)


def running_sizes(
    wave: Wave, cached: np.ndarray, joining: np.ndarray, shared: SharedLengths | None = None
) -> BufferSizes:
    """Return sizes that suffice for a mini-batch until each request has ``cached`` tokens, in whatever order they end.

    ``joining``: prompt tokens of requests whose prompts are computed now. The cache must have no both(…) and no token
    ids, so that its blocks only grow.
    """
    entries, depth, depth_joining, widest = wave.entries, np.int64(0), np.int64(0), wave.windows[-1]
    most = np.inf if widest is None else entries.in_window(widest)  # most blocks of a request, [entry]
    if shared is not None:
        depth, depth_joining = shared.depth, shared.joining
    own = entries.dealt(depth)
    of_each = np.minimum(entries.held(cached) - own, most).astype(np.int64)
    blocks = np.maximum.reduce(of_each)[None]  # [steps, entry]
    tokens = np.maximum.reduce(entries.tokens(cached) - own * BLOCK_TOKENS)[None]
    running, new, pieces = np.array([len(cached)]), np.ones(1, dtype=np.int64), np.zeros(1, dtype=bool)
    act_blocks = of_each.sum(axis=0)[None]
    staged, longest = np.zeros(len(entries.names), dtype=np.int64), 1
    if len(joining):
        before = entries.dealt(depth_joining)
        first_stored = entries.first_stored(joining, widest if shared is None else None)
        skipped = np.maximum(first_stored, depth_joining * BLOCK_TOKENS)
        staged = (entries.stored(joining) - entries.stored(skipped)).sum(axis=0)
        fresh_tokens = joining - depth_joining * BLOCK_TOKENS
        longest = longest_piece(wave.policy, fresh_tokens)
        if num_chunks(wave.policy, fresh_tokens) > 1:  # the last chunk reads the earlier ones
            prompt = int(joining[0])
            staged = _staged_by_chunk(entries, wave.policy, prompt, widest, anywhere=wave.sharing is not None)
            running, new, pieces = np.r_[running, 1], np.r_[new, longest], np.array([False, True])
            before = before.reshape(-1)
            held = np.minimum(entries.held(prompt) - before, most).astype(np.int64)
            blocks, act_blocks = np.vstack([blocks, held]), np.vstack([act_blocks, held])
            tokens = np.vstack([tokens, entries.tokens(prompt) - before * BLOCK_TOKENS])
        elif np.any(depth_joining):  # prompts attend to shared tokens
            running, new, pieces = np.r_[running, len(joining)], np.r_[new, longest], np.array([False, True])
            blocks, tokens, act_blocks = (np.vstack([sizes, 0 * sizes]) for sizes in (blocks, tokens, act_blocks))

    tokens = np.minimum(tokens, blocks * BLOCK_TOKENS)
    reads = Reads(
        running=running,
        held=entries.by_entry(blocks.T),
        tokens=entries.by_entry(tokens.T),
        context=tokens.sum(axis=1),
        recomputed=np.zeros_like(running),
        splits={},
        new=new,
        pieces=pieces,
        act_blocks=entries.by_entry(act_blocks.T),
    )
    fresh = dict.fromkeys(entries.names, len(cached))
    sizes = group_sizes(wave.problem, wave.policy, len(cached), 1, reads, fresh=fresh, staged=entries.by_entry(staged))
    sizes = replace(sizes, step_rows=max(sizes.step_rows, len(joining) * longest))
    return sizes if shared is None else with_common(sizes, entries.by_entry(shared.common))


def with_common(sizes: BufferSizes, blocks: dict[str, int]) -> BufferSizes:
    """Return ``sizes`` with room for the shared blocks of each entry."""

    def count(representation: str, *tiers: str) -> int:
        copies = (copy for entry in blocks for copy in stored_copies(entry))
        return sum(int(blocks[c.entry]) for c in copies if c.representation == representation and c.tier in tiers)

    return replace(
        sizes,
        act_buffer_blocks=sizes.act_buffer_blocks + count("act", *TIERS),
        kv_buffer_blocks=sizes.kv_buffer_blocks + count("kv", "host", "disk"),
        act_staging_blocks=sizes.act_staging_blocks + count("act", "disk"),
        kv_staging_blocks=sizes.kv_staging_blocks + count("kv", "disk"),
        act_blocks=sizes.act_blocks + count("act", *TIERS),
        plain_kv_blocks=sizes.plain_kv_blocks + count("kv", *TIERS),
        attention_tokens=sizes.attention_tokens
        + (BLOCK_TOKENS * int(sum(blocks.values())) if sizes.attention_tokens else 0),
    )


def build_sizes(wave: Wave, builds: Sequence[Build]) -> BufferSizes:
    """Return the sizes of a step that computes shared blocks."""
    entries, sharing = wave.entries, wave.shared
    places, first, last = (np.array([build[i] for build in builds]) for i in range(3))
    staged = (entries.dealt(last) - entries.dealt(first)).sum(axis=0) * BLOCK_TOKENS
    sizes = BufferSizes(
        pool_blocks={},
        staged_rows=entries.by_entry(staged.tolist()),
        attention_tokens=padded_rows(builds) if first.any() else 0,
        step_rows=padded_rows(builds),
        batch=len(builds),
    )
    common = common_blocks(entries, sharing.table[places], first)
    return with_common(sizes, entries.by_entry(common.tolist()))


def queue_sizes(wave: Wave, alone: Workload, singly: bool) -> BufferSizes:
    """Return the sizes of a wave whose places later requests take. ``singly``: they join one by one, otherwise a
    mini-batch at a time. ``alone``: any of these requests must fit if it runs alone."""
    prompts, longest, hidden_rows = alone.prompt_tokens, int(alone.cached_tokens.max()) + 1, 0
    of_groups = [] if wave.sharing else list(mini_batch_sizes(wave))
    sizes = BufferSizes(wave.pool_blocks, staged_rows={}) if wave.sharing else _merged(wave, of_groups)
    if singly:
        for group in wave.mini_batches if wave.sharing else _largest_groups(wave):
            lengths = wave.workload.select(group)
            shared = shared_lengths(wave, group, group)
            sizes = sizes.merge(running_sizes(wave, lengths.cached_tokens, lengths.prompt_tokens, shared))
        for request in {int(prompts.argmax()), int(alone.cached_tokens.argmax())}:
            lengths = alone.select(np.array([request]))
            sizes = sizes.merge(running_sizes(wave, lengths.cached_tokens, lengths.prompt_tokens))
        longest_prompt = prompts[[int(prompts.argmax())]]
        in_pieces = (of_group.step_rows * chunks for of_group, chunks in of_groups)  # in one pass of the weights
        rows = _shared_prompt_rows(wave) if wave.sharing else max(sizes.step_rows, *in_pieces)
        rows = max(rows, longest_piece(wave.policy, longest_prompt) * num_chunks(wave.policy, longest_prompt))
        if wave.sharing:
            for builds in first_builds(wave):
                sizes = sizes.merge(build_sizes(wave, builds))
        hidden_rows = len(wave.mini_batches) * max(rows, sizes.step_rows) + wave.workload.num_requests
    of_batch = BufferSizes(
        pool_blocks={},
        staged_rows={},
        hidden_rows=hidden_rows,
        cached_tokens=wave.workload.num_requests * longest,
        places=wave.workload.num_requests,
        noted_bytes=wave.workload.noted_bytes(wave.workload.num_requests * longest),
        longest=longest,
        attention_tokens=longest if wave.sharing else 0,  # for a request of any length that attends to shared tokens
        log_cells=LOG_ITERATIONS * 2 * sizes.batch * len(wave.mini_batches),
    )
    return sizes.merge(of_batch).plain()


def holds_lengths(most: Workload, cached: np.ndarray, prompts: np.ndarray, piece: int = 0) -> bool:
    """Return whether the ``running_sizes`` of ``most`` surely suffice for other requests, because these are not more
    and not longer. ``cached``, ``prompts``: their tokens, and those of joining prompts. ``piece``: a single joining
    prompt must not be longer, so that it is computed whole."""

    def no_longer(tokens: np.ndarray, limits: np.ndarray) -> bool:
        if len(tokens) > len(limits):
            return False
        return bool((np.sort(tokens)[::-1] <= np.sort(limits)[::-1][: len(tokens)]).all())

    several = len(cached) > 1 and (len(prompts) != 1 or prompts[0] <= piece)
    return several and no_longer(cached, most.cached_tokens) and no_longer(prompts, most.prompt_tokens)


def _largest_groups(wave: Wave) -> list[np.ndarray]:
    """Return the mini-batches without those that surely need no more than an earlier one."""
    chosen, most = [], None
    for group in wave.mini_batches:
        lengths = wave.workload.select(group)
        if most is None or not holds_lengths(most, lengths.cached_tokens, lengths.prompt_tokens):
            chosen.append(group)
            most = lengths
    return chosen


def _shared_prompt_rows(wave: Wave) -> int:
    """Return the most padded rows that a mini-batch computes in the batch's first pass of the weights."""
    rows = []
    for group in wave.mini_batches:
        own = wave.workload.prompt_tokens[group] - wave.skipped_tokens(group)
        own_rows = len(group) * longest_piece(wave.policy, own) * num_chunks(wave.policy, own)
        rows.append(own_rows + sum(map(padded_rows, first_builds(wave, group))))
    return max(rows)


def first_builds(wave: Wave, group: np.ndarray | None = None) -> list[list[Build]]:
    """Return the steps that compute shared blocks for the first time. ``group``: places of one mini-batch (default: all
    mini-batches)."""
    groups = wave.mini_batches if group is None else [group]
    steps = []
    for members in groups:
        computed = wave.shared.builds if wave.shared.exact else ()
        builds = sorted((b for b in computed if b.place in members), key=lambda build: build.level)
        steps += build_steps(builds, wave.policy.max_mini_batch_tokens)
    return steps


def buffer_sizes(wave: Wave) -> BufferSizes:
    """Return the sizes of a wave for the longest lengths that its requests can reach."""
    return wave.limits if wave.queue else _merged(wave, list(mini_batch_sizes(wave)))


def _merged(wave: Wave, of_groups: list[tuple[BufferSizes, int]]) -> BufferSizes:
    """Return ``buffer_sizes`` of a wave without a queue; ``of_groups``: ``mini_batch_sizes``."""
    prompts, cached = wave.workload.prompt_tokens, wave.workload.cached_tokens
    kept = kept_tokens(wave.policy.selection, prompts, cached, cached)
    sizes, hidden_rows, index_rows = BufferSizes(pool_blocks=wave.pool_blocks, staged_rows={}), 0, {}
    if wave.whole:
        pairs = zip(of_groups, mini_batch_sizes(wave.whole), strict=True)
        of_groups = [(limited.merge(whole), chunks) for (limited, chunks), (whole, _) in pairs]
    for of_group, chunks in of_groups:
        hidden_rows += of_group.step_rows * chunks
        index_rows = {r: index_rows.get(r, 0) + rows for r, rows in of_group.selected_rows.items()}
    for of_group in {id(of_group): of_group for of_group, _ in of_groups}.values():
        sizes = sizes.merge(of_group)
    of_wave = BufferSizes(
        pool_blocks={},
        staged_rows={},
        hidden_rows=hidden_rows,
        index_rows=index_rows,
        cached_tokens=cached.sum(),
        places=len(cached),
        noted_bytes=wave.workload.noted_bytes(cached.sum() + len(cached)),
        kept_tokens=kept.sum(),
        partial_rows=sum(len(group) * kept[group].max() for group in wave.mini_batches),
        column_sets=len(cached) if wave.policy.selection.columns == "request" else len(wave.mini_batches),
        longest=cached.max() + 1,
        log_cells=log_shape(wave, sizes.batch)[0] * log_shape(wave, sizes.batch)[1],
        whole_blocks=wave.whole.pool_blocks if wave.whole else {},
    )
    return sizes.merge(of_wave).plain()


def log_shape(wave: Wave, batch: int) -> tuple[int, int]:
    """Return the shape (iterations, requests) of the log of sampled tokens on the host. If requests join, the log is a
    ring with room for ``batch`` decoding and ``batch`` joining requests of each mini-batch. It is read two iterations
    later."""
    if wave.queue is None:
        return int(wave.workload.max_tokens.max()), wave.workload.num_requests
    return LOG_ITERATIONS, 2 * batch * len(wave.mini_batches)


@dataclass(frozen=True)
class Reads:
    """The cache that steps of a mini-batch read for its longest request; arrays [steps] or [steps, candidates]."""

    running: np.ndarray  #: requests that run in the step
    held: dict[str, np.ndarray]  #: entry -> blocks
    tokens: dict[str, np.ndarray]  #: entry -> tokens
    context: np.ndarray | int  #: columns of the attention buffer with cached tokens
    recomputed: np.ndarray  #: tokens of the longest prefix that is kept as token ids
    splits: dict[str, dict[str, np.ndarray]]  #: both(…) entry -> blocks that are recomputed ("act") and loaded ("kv")
    new: np.ndarray | int = 1  #: new tokens of a request
    pieces: np.ndarray | bool = False  #: True for prompt steps in which the device attends to the cache
    #: entry -> contiguous ACT blocks of all requests; None: all requests are as long as the longest one
    act_blocks: dict[str, np.ndarray] | None = None


def _reads(wave: Wave, group: np.ndarray, window: int | None) -> Reads:
    """Return the reads of the steps of a mini-batch that may need the most memory in layers with this window. These are
    decode steps and chunks of a long prompt; one more step reads nothing."""
    entries, policy, workload = wave.entries, wave.policy, wave.workload
    lengths = np.stack([workload.prompt_tokens[group], workload.max_tokens[group]])
    (prompts, generated), count = np.unique(lengths, axis=1, return_counts=True)
    if window is not None and workload.cached_tokens[group].max() <= window:
        window = None  # the window holds every context
    if entries.tok_share or wave.split or window is not None:
        steps = np.arange(generated.max())[:, None]
    else:  # the cache only grows: the last steps before a request leaves suffice
        steps = np.unique([0, *(generated - 1)])[:, None]
    runs = (steps > 0) & (steps < generated)  # [steps, requests with different lengths]
    last = prompts + generated - 1
    tokens, new = kept_tokens(policy.selection, prompts, np.maximum(prompts + steps - 1, 0), last), 1
    pieces = np.zeros(len(tokens), dtype=bool)
    if (chunks := num_chunks(policy, workload.prompt_tokens[group])) > 1:
        size = chunk_tokens(policy.max_mini_batch_tokens)
        before = np.arange(chunks)[:, None] * size
        new = np.r_[np.ones(len(tokens), int), np.minimum(prompts - before, size)[:, 0]]
        tokens, runs = np.concatenate([tokens, before]), np.concatenate([runs, before > 0])
        pieces = np.r_[pieces, np.ones(chunks, dtype=bool)]
    held, of_entry = entries.held(tokens, window), entries.tokens(tokens, window)
    recomputed = entries.tok_tokens(tokens)
    if policy.static_cache:
        reserved = entries.most_blocks(prompts, kept_tokens(policy.selection, prompts, last, last))
        reserved = by_pool(entries, (window,), reserved)
        held = np.broadcast_to(reserved, held.shape)

    def longest(values):
        return np.where(runs, values, 0).max(axis=1)

    def of_all(values):
        return (runs * count * values).sum(axis=1)

    blocks_and_tokens = {entry: (held[..., i], of_entry[..., i]) for i, entry in enumerate(entries.names)}
    act_blocks = {entry: of_all(blocks) for entry, (blocks, _) in blocks_and_tokens.items()}
    most_tokens = {entry: longest(tokens_by_step) for entry, (_, tokens_by_step) in blocks_and_tokens.items()}
    splits = {}
    for entry, lines in wave.split.items():
        tokens_by_step, prompt = blocks_and_tokens[entry][1], int(prompts.max())
        blocks = split_blocks(lines, len(group), tokens_by_step, len(wave.mini_batches), prompt)
        splits[entry] = {r: longest(values_by_step) for r, values_by_step in blocks.items()}
        most_recomputed = splits[entry]["act"][:, None]
        act_blocks[entry] = of_all(np.minimum(most_recomputed, ceil_blocks(tokens_by_step)))
    return Reads(
        running=(runs * count).sum(axis=1),
        held={entry: longest(blocks) for entry, (blocks, _) in blocks_and_tokens.items()},
        tokens=most_tokens,
        context=sum(of * by_device(entry, pieces) for entry, of in most_tokens.items()),
        recomputed=longest(recomputed),
        splits=splits,
        new=new,
        pieces=pieces,
        act_blocks=act_blocks,
    )


def by_device(entry: str, pieces):
    """Return 1 for steps in which the device attends to an entry; 0 for those in which the host does, which need no
    buffer on the device. ``pieces``: see ``Reads``."""
    return pieces if entry == ATTENDED_ENTRY else 1


def _staged_by_chunk(
    entries: BlockEntries, policy: Policy, prompt: int, window: int | None, anywhere: bool = False
) -> np.ndarray:
    """Return the most tokens that a chunk of a prompt stores to each entry in layers with this window, [entry].
    ``anywhere``: chunks may begin at any block, not only at multiples of their size."""
    size = chunk_tokens(policy.max_mini_batch_tokens)
    before = np.arange(0, prompt, BLOCK_TOKENS if anywhere else size)
    after = np.minimum(before + size, prompt)
    return (entries.stored(after) - entries.stored(np.maximum(before, entries.first_stored(after, window)))).max(axis=0)


def selected_rows(selection: Selection, reads: Reads) -> dict:
    """Return representation -> most rows that a speculative selection loads for a mini-batch in a layer."""
    if selection.method != "speculative":
        return {}
    return {
        representation_of(entry): np.max(reads.running * (tokens > 0) * most_selected(selection, tokens), axis=0)
        for entry, tokens in reads.tokens.items()
    }


def _stored_until(entries: BlockEntries, tokens, kept) -> np.ndarray:
    """Return the number of each request's first ``tokens`` that were stored to each entry, [requests, entry]. Beyond
    ``kept`` tokens, new tokens replace the oldest."""
    rounds, remainder = np.divmod(tokens, kept)
    return rounds[:, None] * entries.stored(kept) + entries.stored(remainder)


def group_sizes(
    problem: Problem, policy: Policy, batch, prompt, reads: Reads, fresh: dict, staged: dict
) -> BufferSizes:
    """Return the sizes of a mini-batch of ``batch`` requests; numbers or arrays [candidates].

    ``prompt``: tokens of the longest prompt. ``fresh``, ``staged``: entry -> new tokens of all requests in a decode
    step, and in their prompts.
    """
    largest = np.maximum.reduce  # faster than np.max
    columns = {(r, tier): 0 * reads.context for r in ("act", "kv") for tier in ("any", "disk", "device")}
    for entry, blocks in reads.held.items():
        for part in stored_copies(entry):
            count = reads.running * (reads.splits[entry][part.representation] if entry in reads.splits else blocks)
            if reads.act_blocks and part.representation == "act":
                count = reads.act_blocks[entry]
            count = count * by_device(entry, reads.pieces)
            for tier in ("any", part.tier):
                if (part.representation, tier) in columns:
                    columns[part.representation, tier] = columns[part.representation, tier] + count

    def most(each_request):
        return largest(reads.running * each_request)

    on_device = reads.pieces if policy.attention == "host" else True
    assembled = reads.pieces if attends_in_place(problem, policy) else on_device
    moved = {r: columns[r, "any"] - columns[r, "device"] for r in ("act", "kv")}
    if policy.bits.act == "native":  # device blocks are gathered with the loaded ones
        moved["act"] = columns["act", "any"]
    return BufferSizes(
        pool_blocks={},
        staged_rows={entry: larger(fresh[entry], rows) for entry, rows in staged.items()},
        act_buffer_blocks=largest(moved["act"]),
        kv_buffer_blocks=largest(moved["kv"] * on_device),
        act_staging_blocks=largest(columns["act", "disk"]),
        kv_staging_blocks=largest(columns["kv", "disk"]),
        act_blocks=largest(columns["act", "any"]),
        plain_kv_blocks=largest(columns["kv", "any"] * on_device),
        attention_tokens=most((reads.context + reads.recomputed + reads.new) * assembled),
        context_tokens=most(reads.context * on_device),
        step_rows=larger(batch * prompt, most(reads.recomputed + reads.new)),
        batch=batch,
        decode_batch=most(1),
        selected_rows=selected_rows(policy.selection, reads),
    )


def split_blocks(lines: SplitLines, batch, tokens, num_mini_batches, prompt) -> dict:
    """Return the blocks of a request with ``tokens`` that a both(…) entry recomputes ("act") and loads ("kv"); numbers
    or arrays. ``prompt``: tokens of the mini-batch's longest prompt."""
    act = split_point(lines, batch, tokens, num_mini_batches, prompt=prompt) // BLOCK_TOKENS
    return {"act": act, "kv": ceil_blocks(tokens) - act}
