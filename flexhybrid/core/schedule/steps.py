"""Steps: the tokens of one mini-batch in one iteration, and the blocks that they read and write, by request."""

from collections.abc import Sequence
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
    """Consecutive blocks of requests [row, row + rows). Request row + i has physical blocks ``first + i * stride``, …,
    ``blocks`` of them. They go to the buffer columns from ``column`` on of that request."""

    row: int
    rows: int
    column: int
    first: int
    stride: int
    blocks: int


@dataclass(frozen=True)
class CopyPart:
    """A stored copy of a cache entry, as a step reads or writes it."""

    entry: str
    representation: str  #: kv or act
    tier: str

    @cached_property
    def part(self) -> StoredCopy:
        """Return the stored copy."""
        return StoredCopy(self.entry, self.representation, self.tier)

    @property
    def space(self) -> str:
        """Return the name of the copy's memory (``StoredCopy.space``)."""
        return self.part.space


@dataclass(frozen=True)
class Segment(CopyPart):
    """One representation of a mini-batch's context in one iteration; arrays [B] over its requests.

    Block i of a request's segment is physical block ``held[(start_block - held_from + i) % reserved]``. This ring turns
    only if the oldest blocks are dropped: those of token ids, or outside a window.
    """

    held: np.ndarray  #: [B, most], the physical blocks of the entry that each request holds, in order
    num_tokens: np.ndarray
    start_block: np.ndarray  #: number of the entry's blocks before the segment's first one, with dropped ones
    reserved: np.ndarray  #: number of blocks that each request holds
    moves_all: bool = False  #: a load copies all reserved blocks (a static cache)
    held_from: np.ndarray | int = 0  #: number of the entry's shared blocks, which come before those in ``held``

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
        """Return the number of each request's blocks that are copied to the buffer, [B]."""
        return self.reserved if self.moves_all else self.num_blocks

    @cached_property
    def in_line(self) -> bool:
        """Return whether the buffer has the requests' blocks one after another, without padding: ACT is recomputed in
        one product. Otherwise the buffer is a grid with a row for each request."""
        return self.representation == "act" and self.moved_blocks.min() < self.moved_blocks.max()

    @cached_property
    def runs(self) -> tuple[BlockRun, ...]:
        """Return the runs of the segment's blocks."""
        table = self.block_table
        return block_runs(table, np.array([table.size]) if self.in_line else self.moved_blocks)

    @cached_property
    def block_table(self) -> np.ndarray:
        """Return the physical block of each buffer block: [1, blocks] if ``in_line``, else [B, columns]. Padding
        repeats a request's last block; a request without blocks has block 0."""
        start, count = self.start_block[:, None], self.moved_blocks[:, None]
        columns = np.arange(int(count.max()))
        column = np.minimum(columns, np.maximum(count - 1, 0))
        place = (start - np.reshape(self.held_from, (-1, 1)) + column) % np.maximum(self.reserved, 1)[:, None]
        table = np.where(count > 0, np.take_along_axis(self.held, place, axis=1), 0) if place.size else place
        return table[columns < count][None] if self.in_line else table

    @cached_property
    def buffer_table(self) -> np.ndarray:
        """Return the buffer index of each request's blocks, [B, columns]. Padding repeats the last one."""
        count = self.moved_blocks[:, None]
        columns = np.arange(int(count.max()))
        if not self.in_line:
            return np.arange(count.size * len(columns)).reshape(count.size, -1)
        places = np.cumsum(count)[:, None] - count + np.minimum(columns, np.maximum(count - 1, 0))
        return np.minimum(places, self.block_table.size - 1)


def block_runs(table: np.ndarray, counts: np.ndarray) -> tuple[BlockRun, ...]:
    """Return the runs of the first ``counts`` [B] blocks of each row of a table [B, columns]. Equal runs of consecutive
    rows are merged if they are evenly spaced."""
    begins = np.arange(table.shape[1]) < counts[:, None]
    begins[:, 1:] &= table[:, 1:] != table[:, :-1] + 1
    column, row = np.nonzero(begins.T)  # in column order, so that equal requests have adjacent first runs
    order = np.lexsort((column, row))
    begin, owner = column[order], row[order]
    end = np.where(np.append(owner[1:] == owner[:-1], False), np.append(begin[1:], 0), counts[owner])
    length = np.empty_like(end)
    length[order] = end - begin
    runs: list[list[int]] = []  # the fields of BlockRun
    latest = -1  # first block of the last run
    for at, place, start, blocks in np.stack([row, column, table[row, column], length], axis=1).tolist():
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
    """The blocks to which the new tokens of one stored copy go; arrays [stored tokens]."""

    rows: np.ndarray  #: row of each token in the padded grid of new tokens
    blocks: np.ndarray  #: physical block
    offsets: np.ndarray  #: token within the block
    places: np.ndarray  #: token within the request's own blocks of the entry
    held: np.ndarray  #: [B, most], these blocks of each request, in order
    own: bool = True  #: some blocks belong to a single request
    shared: bool = False  #: some blocks are shared

    def block_at(self, requests: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the physical blocks of these requests' tokens (``places``)."""
        return self.held[requests, places // BLOCK_TOKENS]


@dataclass(frozen=True)
class Common:
    """Shared blocks [first, last) of g prompt beginnings, each shared by m requests of the step."""

    rows: np.ndarray  #: [g, m], the requests, as indices into the step's
    first: int
    last: int
    segments: tuple[Segment, ...]  #: one for each cache entry, with B = g and only full blocks
    on_host: tuple[Segment, ...] = ()  #: the same for entries to which the host attends

    @property
    def tokens(self) -> int:
        """Return the tokens of ``segments``."""
        return (self.last - self.first) * BLOCK_TOKENS - sum(segment.max_tokens for segment in self.on_host)


@dataclass(frozen=True)
class MiniBatchStep:
    """The work of a mini-batch in one iteration, equal in all layers that keep the same number of tokens.

    New tokens form a right-padded grid [B, width]; token t of request b is row b·width + t. The attention buffer of a
    decode step is [segment | segment | … | recomputed prefix | new tokens], each part padded to its longest request.
    Keys and values of shared blocks (``commons``) follow.
    """

    iteration: int
    mini_batch: int
    requests: np.ndarray  #: [B], places in the wave
    queued: np.ndarray  #: [B], the requests' indices in the queue
    context: np.ndarray  #: [B], tokens cached before this iteration
    new_tokens: np.ndarray  #: [B]
    most_kept: np.ndarray  #: [B], tokens of each request that the selection keeps
    segments: tuple[Segment, ...]
    stores: tuple[Store, ...]
    on_host: tuple[Segment, ...] = ()  #: segments to which the host attends; ``segments`` has the others
    recomputed: np.ndarray | None = None  #: [B], leading tokens that are kept as token ids; None: none
    #: number of the step among the mini-batch's in this iteration. Chunks of the first prompts count from 0; in later
    #: iterations the decode is 0, and chunks of joining prompts count from 1
    chunk: int = 0
    last: bool = True  #: the last chunk of prompts, or a decode step: a token is sampled
    whole: bool = False  #: the step of layers that keep all tokens, under a selection that drops tokens in others
    begins: bool = False  #: the first chunk of its requests' prompts
    joins: bool = False  #: the first chunk of requests that join a running batch
    commons: tuple[Common, ...] = ()
    builds: bool = False  #: it computes shared blocks and stores to them
    decodes: bool = False  #: each request has one new token, after its whole prompt
    in_place: bool = False  #: a decode step that reads keys and values in place
    window: int | None = None  #: attention window of its layers; segments hold the tokens inside (None: all)

    @cached_property
    def prefill(self) -> bool:
        """Return whether nothing is cached, so that the new tokens attend only to themselves."""
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
        """Return the padded tokens of a request that pass through the layers: recomputed and new ones."""
        return self.recomputed_width + self.width

    @cached_property
    def attention_tokens(self) -> int:
        """Return T, the columns of the attention buffer, with the new tokens."""
        return sum(segment.max_tokens for segment in self.segments) + self.computed_width

    def of(self, representation: str) -> tuple[Segment, ...]:
        """Return the segments of "kv" or "act" that have tokens, followed by the shared ones."""
        return self._by_representation[representation]

    @cached_property
    def _by_representation(self) -> dict[str, tuple[Segment, ...]]:
        read = (*(s for s in self.segments if s.max_tokens), *self.shared_segments)
        return {name: tuple(s for s in read if s.representation == name) for name in ("act", "kv")}

    @cached_property
    def shared_segments(self) -> tuple[Segment, ...]:
        return tuple(segment for common in self.commons for segment in common.segments)

    @cached_property
    def act_rows(self) -> int:
        """Return the rows of the ACT buffer."""
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
    """Return the step of a wave's mini-batch with these running ``requests`` (places).

    ``chunk``: see ``MiniBatchStep``. ``piece``: chunk of the prompts (default: ``chunk``). ``built`` [B, 2]: compute
    these shared blocks [first, last) instead of prompts. ``window``: attention window of the layers. Tokens outside
    every new token's window are not read, and tokens outside every later token's window are not stored.
    """
    prompts, last = wave.workload.prompt_tokens[requests], True
    age, depth = iteration - wave.joined[requests], wave.shared_blocks(requests)
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
    splits = decodes and wave.policy.splits_attention
    by_device, on_host = _divided(segments) if splits else (tuple(segments), ())
    if splits:
        commons = tuple(Common(of.rows, of.first, of.last, *_divided(of.segments)) for of in commons)
    by_blocks = decodes and wave.policy.attention == "host" and not wave.policy.attends_from_disk
    if window and commons and not by_blocks:  # attention on the host applies the window itself
        commons = _commons_in_window(wave.entries, commons, context, window)
    begins = bool(not age[0] and (built is not None or context[0] == shared[0]))
    return MiniBatchStep(
        iteration=iteration,
        mini_batch=mini_batch,
        requests=requests,
        context=context,
        new_tokens=new_tokens,
        segments=by_device,
        on_host=on_host,
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


def _divided(segments: Sequence[Segment]) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """Return (segments to which the device attends, those with tokens to which the host attends)."""
    by_host = tuple(s for s in segments if s.entry == ATTENDED_ENTRY and s.max_tokens)
    return tuple(s for s in segments if s.entry != ATTENDED_ENTRY), by_host


def _commons_in_window(entries: BlockEntries, commons: tuple[Common, ...], context, window: int) -> tuple[Common, ...]:
    """Return shared blocks without those outside every new token's window. ``context``: [B]."""
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
    """Return shared segments without the entries' first ``before`` [entry] blocks."""
    left = []
    for segment in segments:
        cut = before[entries.names.index(segment.entry)] - segment.start_block
        if cut[0] < segment.reserved[0]:
            tokens = segment.num_tokens - cut * BLOCK_TOKENS
            left.append(replace(segment, num_tokens=tokens, start_block=segment.start_block + cut))
    return tuple(left)


def _known_commons(wave, mini_batch: int, requests: np.ndarray, depth: np.ndarray) -> tuple[Common, ...]:
    """Return ``_commons``; the result is cached while a mini-batch's requests share the same blocks."""
    key = requests.tobytes(), depth.tobytes(), wave.shared.table[requests, : int(depth.max())].tobytes()
    known = wave.shared.commons.get(mini_batch)
    if known is None or known[0] != key:
        known = wave.shared.commons[mini_batch] = key, _commons(wave, requests, depth)
    return known[1]


def _commons(wave, requests: np.ndarray, depth: np.ndarray) -> tuple[Common, ...]:
    """Return the shared blocks of requests, each block once. ``depth``: number of shared blocks of each, [B]."""
    table, alike = wave.shared.table[requests], {}
    for first, last, rows in shared_runs(table, depth):
        alike.setdefault((first, last, len(rows)), []).append(rows)
    commons = []
    for (first, last, _), groups in alike.items():
        rows = np.stack(groups)
        columns = np.arange(first, last)
        entry_index, before = wave.entries.entry_of(columns * BLOCK_TOKENS), wave.entries.dealt(first)
        segments = []
        for i, entry in enumerate(wave.entries.names):
            held = table[rows[:, :1], columns[entry_index == i]]
            if held.size:
                reserved, start = np.full(len(rows), held.shape[1]), np.full(len(rows), before[i])
                (copy,) = stored_copies(entry)
                segments.append(Segment(*copy, held, reserved * BLOCK_TOKENS, start, reserved, held_from=start))
        commons.append(Common(rows, first, last, tuple(segments)))
    return tuple(commons)


def held_blocks(wave, pool: str, requests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (the blocks of a pool that requests hold, in order and padded, [B, most]; their numbers, [B])."""
    counts = wave.num_blocks[pool][requests]
    return wave.tables[pool][requests, : max(1, int(counts.max()))], counts


class HeldTokens(NamedTuple):
    """The blocks of an entry that requests of a step hold; the fields are those of ``Segment``."""

    held: np.ndarray
    held_from: np.ndarray
    start_block: np.ndarray
    reserved: np.ndarray


def _segments(wave, mini_batch: int, entry: str, extent: HeldTokens, tokens) -> list[Segment]:
    """Return one segment for a plain entry, or two for both(…): the leading tokens as ACT, the others as KV.

    The split point is that of the mini-batch's original requests. With fewer requests, a better split could need more
    ACT than its buffer holds.
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
    """Return the stores of new tokens. ``lengths``: (cached tokens, new tokens, tokens that each entry stored before or
    None); ``holdings``: ``held_blocks`` of each entry."""
    context, new_tokens, token_index = lengths
    width = int(new_tokens.max())
    if width == 1:
        batch_row, within, positions = np.arange(len(requests)), np.zeros_like(context), context
    else:
        batch_row = np.repeat(np.arange(len(requests)), new_tokens)
        within = np.arange(len(batch_row)) - np.repeat(np.cumsum(new_tokens) - new_tokens, new_tokens)
        positions = context[batch_row] + within
    if limits_cache(wave.policy.selection):  # new tokens replace dropped ones
        lengths = wave.workload.prompt_tokens[requests], context + new_tokens, wave.workload.cached_tokens[requests]
        kept = kept_tokens(wave.policy.selection, *lengths)
        positions = positions % kept[batch_row]
        fresh = within >= (new_tokens - kept)[batch_row]
        batch_row, within, positions = batch_row[fresh], within[fresh], positions[fresh]
    if wave.entries.tok_share or window and width > 1:  # skip tokens kept as ids, or outside every later window
        fresh = positions >= wave.entries.first_stored(context + new_tokens, window)[batch_row]
        if wave.sharing is not None:  # but store shared blocks, which other requests read
            fresh |= positions < (wave.shared.depth[requests] * BLOCK_TOKENS)[batch_row]
        batch_row, within, positions = batch_row[fresh], within[fresh], positions[fresh]
    if wave.sharing is not None and width > 1:  # skip tokens that another request has stored
        fresh = positions >= (wave.shared.stored_before[requests] * BLOCK_TOKENS)[batch_row]
        batch_row, within, positions = batch_row[fresh], within[fresh], positions[fresh]
    entry_index = wave.entries.entry_of(positions)
    if token_index is None or positions is not context:
        token_index = wave.entries.stored(positions)  # earlier tokens of each entry, with dropped ones
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
            # A row of the shared table has the blocks of all entries.
            at, kinds = chosen[is_shared], (not is_shared.all(), True)
            blocks[is_shared] = wave.shared.table[requests[batch_row[at]], positions[at] // BLOCK_TOKENS]
        for part in stored_copies(entry):
            stores.append(Store(*part, rows, blocks, offsets, places, held, *kinds))
    return tuple(stores)
