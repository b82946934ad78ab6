"""What one mini-batch does in one iteration: its tokens and where they lie, request by request."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, BlockEntries, ceil_blocks
from flexhybrid.core.context.cache_entries import ATTENDED_ENTRY, Pool, StoredCopy, stored_copies
from flexhybrid.core.context.packing import chunk_tokens, num_chunks
from flexhybrid.core.context.prefixes import shared_runs
from flexhybrid.core.context.selection import kept_tokens, limits_cache
from flexhybrid.core.context.split import split_point
from flexhybrid.core.problem import attends_in_place


class BlockRun(NamedTuple):
    """Requests [row, row + rows) whose blocks are evenly spaced: request row + i has ``blocks`` of them from physical
    block ``first + i * stride``, and they go to its buffer columns from ``column`` on."""

    row: int
    rows: int
    column: int
    first: int
    stride: int
    blocks: int


@dataclass(frozen=True)
class CopyPart:
    """What a step reads or writes of one stored copy of a cache entry."""

    entry: str
    representation: str  #: kv or act
    tier: str

    @cached_property
    def part(self) -> StoredCopy:
        return StoredCopy(self.entry, self.representation, self.tier)

    @property
    def space(self) -> str:
        """Name of the pool that holds it."""
        return self.part.space


@dataclass(frozen=True)
class Segment(CopyPart):
    """One representation of one mini-batch's context at one iteration: per-request arrays over B.

    Block i of a request's part lies in physical block ``held[(start_block + i) % reserved]`` of its pool. This ring
    turns only where the oldest blocks are dropped: kept as ids alone (tok), or behind a window.
    """

    held: np.ndarray  #: [B, most]: the blocks that each request holds of the entry, in order
    num_tokens: np.ndarray
    start_block: np.ndarray  #: blocks of the entry that come before the segment's first one, dropped ones included
    reserved: np.ndarray  #: how many blocks each request holds
    moves_all: bool = False  #: a load brings all of them (a static cache)
    held_from: np.ndarray | int = 0  #: shared blocks of the entry, before the first one of ``held``

    @cached_property
    def batch(self) -> int:
        return len(self.num_tokens)

    @cached_property
    def num_blocks(self) -> np.ndarray:
        return ceil_blocks(self.num_tokens)

    @cached_property
    def max_tokens(self) -> int:
        return int(self.num_tokens.max())

    @cached_property
    def max_blocks(self) -> int:
        return int(self.num_blocks.max())

    @cached_property
    def moved_blocks(self) -> np.ndarray:
        """[B]: the blocks of each request that come to its buffer."""
        return self.reserved if self.moves_all else self.num_blocks

    @cached_property
    def in_line(self) -> bool:
        """Return whether the buffer holds the requests' blocks contiguously, without padding (ACT, recomputed in one
        product). Otherwise it is a grid with a row per request."""
        return self.representation == "act" and self.moved_blocks.min() < self.moved_blocks.max()

    @cached_property
    def runs(self) -> tuple[BlockRun, ...]:
        """Return where the step's blocks are, merged over equal neighbouring requests."""
        table = self.block_table
        return block_runs(table, np.array([table.size]) if self.in_line else self.moved_blocks)

    @cached_property
    def block_table(self) -> np.ndarray:
        """Return the physical block for each buffer block: [1, blocks] if contiguous, else [B, columns]. Padding
        repeats a request's last block, or is block 0."""
        start, count = self.start_block[:, None], self.moved_blocks[:, None]
        columns = np.arange(int(count.max()))
        column = np.minimum(columns, np.maximum(count - 1, 0))
        place = (start - np.reshape(self.held_from, (-1, 1)) + column) % np.maximum(self.reserved, 1)[:, None]
        table = np.where(count > 0, np.take_along_axis(self.held, place, axis=1), 0) if place.size else place
        return table[columns < count][None] if self.in_line else table

    @cached_property
    def buffer_table(self) -> np.ndarray:
        """[B, columns]: the buffer place of each request's blocks. Padding repeats the last."""
        count = self.moved_blocks[:, None]
        columns = np.arange(int(count.max()))
        if not self.in_line:
            return np.arange(count.size * len(columns)).reshape(count.size, -1)
        places = np.cumsum(count)[:, None] - count + np.minimum(columns, np.maximum(count - 1, 0))
        return np.minimum(places, self.block_table.size - 1)


def block_runs(table: np.ndarray, counts: np.ndarray) -> tuple[BlockRun, ...]:
    """Return the runs of the first ``counts`` [B] blocks of each row of a table [B, columns]."""
    begins = np.arange(table.shape[1]) < counts[:, None]
    begins[:, 1:] &= table[:, 1:] != table[:, :-1] + 1
    column, row = np.nonzero(begins.T)  # by columns, so that equal requests have adjacent first runs
    order = np.lexsort((column, row))
    begin, owner = column[order], row[order]
    end = np.where(np.append(owner[1:] == owner[:-1], False), np.append(begin[1:], 0), counts[owner])
    length = np.empty_like(end)
    length[order] = end - begin
    runs: list[list[int]] = []  # numbers of a BlockRun
    latest = -1  # block at which the last run begins
    for at, place, start, blocks in zip(
        row.tolist(), column.tolist(), table[row, column].tolist(), length.tolist(), strict=True
    ):
        step = start - latest
        latest = start
        if runs and step > 0:
            last = first_row, rows, last_place, _, stride, last_blocks = runs[-1]
            alike = first_row + rows == at and last_blocks == blocks and last_place == place
            if alike and (rows == 1 or step == stride):
                last[1], last[4] = rows + 1, step
                continue
        runs.append([at, 1, place, start, 0, blocks])
    return tuple(BlockRun(*run) for run in runs)


@dataclass(frozen=True)
class Store(CopyPart):
    """Where the new tokens of one part go: row of the padded new-token grid -> (block, offset)."""

    rows: np.ndarray
    blocks: np.ndarray
    offsets: np.ndarray
    places: np.ndarray  #: of each row, in tokens, over the request's blocks of the entry
    held: np.ndarray  #: [B, most]: these blocks, in order
    own: bool = True  #: some blocks belong to a single request
    shared: bool = False  #: some blocks are shared

    def block_at(self, requests: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the physical blocks of places (in tokens) of these requests."""
        return self.held[requests, places // BLOCK_TOKENS]


@dataclass(frozen=True)
class Common:
    """Blocks [first, last) of equal prompt beginnings: g beginnings, each shared by m requests of the step."""

    rows: np.ndarray  #: [g, m] rows of the step
    first: int
    last: int
    segments: tuple[Segment, ...]  #: B = g; of whole blocks
    on_host: tuple[Segment, ...] = ()  #: likewise, attended to on the host

    @property
    def tokens(self) -> int:
        """Return the tokens of ``segments``."""
        return (self.last - self.first) * BLOCK_TOKENS - sum(segment.max_tokens for segment in self.on_host)


@dataclass(frozen=True)
class MiniBatchStep:
    """What one mini-batch does in one iteration; the same for all layers that keep the same number of tokens.

    New tokens form a right-padded grid [B, width], row b·width + t. The attention buffer of a decode step is [segment |
    segment | … | recomputed prefix | new], each part padded to its longest request. Keys and values of shared blocks
    (``commons``) follow.
    """

    iteration: int
    mini_batch: int
    requests: np.ndarray  #: [B] places in the wave
    queued: np.ndarray  #: [B] the requests' indices in the queue
    context: np.ndarray  #: [B] tokens cached before this iteration
    new_tokens: np.ndarray  #: [B]
    most_kept: np.ndarray  #: [B] tokens of each request that the selection keeps
    segments: tuple[Segment, ...]
    stores: tuple[Store, ...]
    on_host: tuple[Segment, ...] = ()  #: segments of a decode step that the host attends to; the device to the others
    recomputed: np.ndarray | None = None  #: [B] leading tokens kept as ids alone; None: none
    #: the mini-batch's step in this iteration: a piece of its prompts; in later iterations the decode is 0, and
    #: pieces of joining prompts count from 1
    chunk: int = 0
    last: bool = True  #: the prompt's last piece, or a decode step: a token is sampled
    whole: bool = False  #: of layers that keep all tokens although others do not
    begins: bool = False  #: the first piece of its requests' prompts
    joins: bool = False  #: the same, of requests that joined the running batch
    commons: tuple[Common, ...] = ()
    builds: bool = False  #: it computes shared blocks and stores into them
    decodes: bool = False  #: one new token of each request, after its whole prompt
    in_place: bool = False  #: it decodes, reading keys and values in place
    window: int | None = None  #: of layers with this window, whose segments hold the tokens in sight; None: all

    @cached_property
    def prefill(self) -> bool:
        """Return whether nothing is cached: the new tokens are a prompt that attends to itself alone."""
        return not self.context.any()

    @cached_property
    def width(self) -> int:
        return int(self.new_tokens.max())

    @property
    def rows(self) -> int:
        return len(self.requests) * self.width

    @cached_property
    def recomputed_width(self) -> int:
        return 0 if self.recomputed is None else int(self.recomputed.max())

    @property
    def computed_width(self) -> int:
        """Return the padded tokens of a request that pass through the layers: recomputed prefix, then new ones."""
        return self.recomputed_width + self.width

    @cached_property
    def attention_tokens(self) -> int:
        """T: columns of the attention buffer, the new tokens included."""
        return sum(segment.max_tokens for segment in self.segments) + self.computed_width

    def of(self, representation: str) -> tuple[Segment, ...]:
        """Return the segments of "kv" or "act" that have tokens, then the shared ones."""
        return self._by_representation[representation]

    @cached_property
    def _by_representation(self) -> dict[str, tuple[Segment, ...]]:
        read = (*(s for s in self.segments if s.max_tokens), *self.shared_segments)
        return {name: tuple(s for s in read if s.representation == name) for name in ("act", "kv")}

    @cached_property
    def has_on_host(self) -> bool:
        """Return whether the host attends to a part of the context, beside the device."""
        return bool(self.on_host) or any(common.on_host for common in self.commons)

    @cached_property
    def shared_segments(self) -> tuple[Segment, ...]:
        return tuple(segment for common in self.commons for segment in common.segments)

    @cached_property
    def act_rows(self) -> int:
        """Rows of the ACT buffer."""
        return sum(segment.block_table.size for segment in self.of("act")) * BLOCK_TOKENS


def make_step(
    wave,
    iteration: int,
    mini_batch: int,
    requests: np.ndarray,
    chunk: int = 0,
    piece: int | None = None,
    built: np.ndarray | None = None,
    window: int | None = None,
) -> MiniBatchStep:
    """Make the step of the still running requests of a ``plan.Wave``'s mini-batch; O(B) numpy work.

    ``chunk``: see ``MiniBatchStep``; ``piece``: of the prompts (None: the chunk). ``built`` [B, 2]: compute these
    shared blocks [first, last) instead. ``window``: for layers that have it; tokens out of sight of all new tokens are
    not read, tokens out of sight of all later ones not stored.
    """
    prompts, last = wave.workload.prompt_tokens[requests], True
    age, depth = iteration - wave.joined[requests], wave.shared_blocks(requests)  # shared blocks
    if built is not None:
        depth = built[:, 0]
    elif not age[0]:
        depth = wave.skipped_tokens(requests) // BLOCK_TOKENS
    shared = depth * BLOCK_TOKENS
    if built is not None:
        context, new_tokens, last = shared, (built[:, 1] - depth) * BLOCK_TOKENS, False
    elif not age[0] and num_chunks(wave.policy, prompts - shared) > 1:
        size = chunk_tokens(wave.policy.max_mini_batch_tokens)
        context = shared + (chunk if piece is None else piece) * size
        new_tokens = np.minimum(prompts - context, size)
        last = bool(context[0] + new_tokens[0] == prompts[0])
    elif not age[0]:
        context, new_tokens = shared, prompts - shared
    else:
        context, new_tokens = prompts + age - 1, np.ones_like(prompts)
    entries: BlockEntries = wave.entries
    cached = wave.workload.max_tokens[requests] + prompts - 1
    kept = kept_tokens(wave.policy.selection, prompts, context, cached)
    before, held_from = entries.dropped_blocks(kept, window), np.zeros(len(entries.names), np.int64)
    if wave.sharing is not None:
        held_from = entries.dealt(depth)
        before = np.maximum(before, held_from)  # shared blocks are never dropped
    stored = entries.stored(kept)
    tokens_by_entry = stored - before * BLOCK_TOKENS
    segments: list[Segment] = []
    decodes = bool(age[0]) and built is None
    holdings = [held_blocks(wave, Pool(entry, window).name, requests) for entry in entries.names]
    for i, (entry, (held, reserved)) in enumerate(zip(entries.names, holdings, strict=True)):
        extent = HeldTokens(held, held_from[..., i], before[:, i], reserved)
        segments += _segments(wave, mini_batch, entry, extent, tokens_by_entry[:, i])
    recomputed = entries.tok_tokens(context) if entries.tok_share else None
    lengths = context, new_tokens, stored if kept is context else None
    stores = _stores(wave, requests, lengths, holdings, window)
    commons = () if wave.sharing is None else _known_commons(wave, mini_batch, requests, depth)
    if decodes and ATTENDED_ENTRY in entries.names:
        commons = tuple(_divided(common) for common in commons)
    by_blocks = decodes and wave.policy.attention == "host" and not wave.policy.attends_from_disk
    if window and commons and not by_blocks:  # the host finds its own blocks
        commons = _commons_in_window(wave.entries, commons, context, window)
    begins = bool(not age[0] and (built is not None or context[0] == shared[0]))
    return MiniBatchStep(
        iteration=iteration,
        mini_batch=mini_batch,
        requests=requests,
        context=context,
        new_tokens=new_tokens,
        segments=tuple(segment for segment in segments if not (decodes and segment.entry == ATTENDED_ENTRY)),
        on_host=tuple(
            segment for segment in segments if decodes and segment.entry == ATTENDED_ENTRY and segment.max_tokens
        ),
        stores=stores,
        recomputed=recomputed,
        chunk=chunk,
        last=last,
        most_kept=kept_tokens(wave.policy.selection, prompts, cached, cached),
        queued=wave.request[requests],
        begins=begins,
        joins=begins and (iteration > 0 or wave.empty),
        commons=commons,
        builds=built is not None,
        decodes=decodes,
        in_place=decodes and attends_in_place(wave.problem, wave.policy),
        window=window,
    )


def _divided(common: Common) -> Common:
    """Return shared blocks with those that the host attends to apart."""
    on_host = tuple(segment for segment in common.segments if segment.entry == ATTENDED_ENTRY)
    others = tuple(segment for segment in common.segments if segment.entry != ATTENDED_ENTRY)
    return replace(common, segments=others, on_host=on_host)


def _commons_in_window(entries: BlockEntries, commons: tuple[Common, ...], context, window: int) -> tuple[Common, ...]:
    """Drop shared blocks that are outside every new token's window. ``context``: [B]."""
    left = []
    for common in commons:
        seen_from = int(np.maximum(context[common.rows].min() + 1 - window, 0)) // BLOCK_TOKENS
        if seen_from >= common.last:
            continue
        if seen_from > common.first:
            before = entries.dealt(seen_from)
            segments, on_host = (_cut(of, before, entries) for of in (common.segments, common.on_host))
            common = Common(common.rows, seen_from, common.last, segments, on_host)
        left.append(common)
    return tuple(left)


def _cut(segments: tuple[Segment, ...], before: np.ndarray, entries: BlockEntries) -> tuple[Segment, ...]:
    """Drop the first ``before`` [entry] blocks of shared segments."""
    left = []
    for segment in segments:
        cut = before[entries.names.index(segment.entry)] - segment.start_block
        if cut[0] < segment.reserved[0]:
            tokens = segment.num_tokens - cut * BLOCK_TOKENS
            left.append(replace(segment, num_tokens=tokens, start_block=segment.start_block + cut))
    return tuple(left)


def _known_commons(wave, mini_batch: int, requests: np.ndarray, depth: np.ndarray) -> tuple[Common, ...]:
    """Return ``_commons``, cached while the members of a mini-batch share the same blocks."""
    key = requests.tobytes(), depth.tobytes(), wave.shared.table[requests, : int(depth.max())].tobytes()
    known = wave.shared.commons.get(mini_batch)
    if known is None or known[0] != key:
        known = wave.shared.commons[mini_batch] = key, _commons(wave, requests, depth)
    return known[1]


def _commons(wave, requests: np.ndarray, depth: np.ndarray) -> tuple[Common, ...]:
    """Return the blocks that several requests have among their first ``depth`` [B] ones, each block once."""
    table, alike = wave.shared.table[requests], {}
    for first, last, rows in shared_runs(table, depth):
        alike.setdefault((first, last, len(rows)), []).append(rows)
    commons = []
    for (first, last, _), groups in alike.items():
        rows = np.stack(groups)
        columns = np.arange(first, last)
        of_entry, before = wave.entries.entry_of(columns * BLOCK_TOKENS), wave.entries.dealt(first)
        segments = []
        for i, entry in enumerate(wave.entries.names):
            held = table[rows[:, :1], columns[of_entry == i]]
            if held.size:
                reserved, start = np.full(len(rows), held.shape[1]), np.full(len(rows), before[i])
                (copy,) = stored_copies(entry)
                segments.append(Segment(*copy, held, reserved * BLOCK_TOKENS, start, reserved, held_from=start))
        commons.append(Common(rows, first, last, tuple(segments)))
    return tuple(commons)


def held_blocks(wave, pool: str, requests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the blocks that requests hold of a pool, in order and padded: [B, most]; and their counts [B]."""
    counts = wave.num_blocks[pool][requests]
    return wave.tables[pool][requests, : max(1, int(counts.max()))], counts


class HeldTokens(NamedTuple):
    """The blocks of an entry that requests of a step hold: see ``Segment``."""

    held: np.ndarray
    held_from: np.ndarray
    start_block: np.ndarray
    reserved: np.ndarray


def _segments(wave, mini_batch: int, entry: str, extent: HeldTokens, tokens) -> list[Segment]:
    """Return one segment for a plain entry; for both(…) the leading tokens as ACT, the rest as KV.

    The split stays that of the whole mini-batch: with fewer requests more ACT might be best than its buffer holds.
    """
    held, held_from, dropped, reserved = extent
    leading = {"act": (tokens, dropped), "kv": (tokens, dropped)}
    if entry in wave.split:
        groups, members = wave.mini_batches, wave.mini_batches[mini_batch]
        prompt, longest = int(wave.workload.prompt_tokens[members].max()), int(tokens.max(initial=0))
        split = split_point(wave.split[entry], len(members), longest, len(groups), prompt=prompt)
        recomputed = np.minimum(int(split), tokens)
        leading = {"act": (recomputed, dropped), "kv": (tokens - recomputed, dropped + recomputed // BLOCK_TOKENS)}
    return [
        Segment(
            *copy,
            held=held,
            num_tokens=leading[copy.representation][0],
            start_block=leading[copy.representation][1],
            reserved=reserved,
            moves_all=wave.policy.static_cache,
            held_from=held_from,
        )
        for copy in stored_copies(entry)
    ]


def _stores(wave, requests, lengths, holdings, window) -> tuple[Store, ...]:
    """Return where new tokens go. ``lengths``: tokens cached before, new tokens, and where the former went (None: not
    known); ``holdings``: ``held_blocks`` of each entry."""
    context, new_tokens, token_index = lengths
    width = int(new_tokens.max())
    if width == 1:
        batch_row, within, positions = np.arange(len(requests)), np.zeros_like(context), context
    else:
        batch_row = np.repeat(np.arange(len(requests)), new_tokens)
        within = np.arange(len(batch_row)) - np.repeat(np.cumsum(new_tokens) - new_tokens, new_tokens)
        positions = context[batch_row] + within
    if limits_cache(wave.policy.selection):  # the newest replace the dropped ones
        lengths = wave.workload.prompt_tokens[requests], context + new_tokens, wave.workload.cached_tokens[requests]
        kept = kept_tokens(wave.policy.selection, *lengths)
        positions = positions % kept[batch_row]
        fresh = within >= (new_tokens - kept)[batch_row]
        batch_row, within, positions = batch_row[fresh], within[fresh], positions[fresh]
    if wave.entries.tok_share or window and width > 1:  # recomputed leading tokens, or out of sight
        first = wave.entries.first_stored(context + new_tokens, window)
        fresh = positions >= first[batch_row]
        if wave.sharing is not None:  # shared blocks are read by other requests
            fresh |= positions < (wave.shared.depth[requests] * BLOCK_TOKENS)[batch_row]
        batch_row, within, positions = batch_row[fresh], within[fresh], positions[fresh]
    if wave.sharing is not None and width > 1:  # already stored by another request
        fresh = positions >= (wave.shared.stored_before[requests] * BLOCK_TOKENS)[batch_row]
        batch_row, within, positions = batch_row[fresh], within[fresh], positions[fresh]
    entry_index = wave.entries.entry_of(positions)
    if token_index is None or positions is not context:
        token_index = wave.entries.stored(positions)  # earlier tokens of each entry, dropped ones included
    stores, shared, own_from = [], np.zeros(0, dtype=bool), np.zeros(0, dtype=np.int64)
    if wave.sharing is not None:
        shared = positions < (wave.shared.depth[requests] * BLOCK_TOKENS)[batch_row]
        own_from = wave.entries.dealt(wave.shared.depth[requests]) * BLOCK_TOKENS
    for i, entry in enumerate(wave.entries.names):
        chosen = np.flatnonzero(entry_index == i)
        if not len(chosen):
            continue
        (held, counts), row = holdings[i], batch_row[chosen]
        rows, index, kinds = row * width + within[chosen], token_index[chosen, i], (True, False)
        if wave.sharing is not None:
            index = index - own_from[row, i]
        places = index % (np.maximum(counts[row], 1) * BLOCK_TOKENS)
        blocks, offsets = held[row, places // BLOCK_TOKENS], places % BLOCK_TOKENS
        if wave.sharing is not None and (is_shared := shared[chosen]).any():
            # A row of the table has all blocks of its request, of every entry.
            at, kinds = chosen[is_shared], (not is_shared.all(), True)
            blocks[is_shared] = wave.shared.table[requests[batch_row[at]], positions[at] // BLOCK_TOKENS]
        for part in stored_copies(entry):
            stores.append(Store(*part, rows, blocks, offsets, places, held, *kinds))
    return tuple(stores)
