"""Blocks of 16 tokens: the cache entry of each logical block, and the owner of each physical block.

A request's tokens are cut into logical blocks. ``BlockEntries`` deals each block to a cache entry, equally for all
requests of a policy. Each entry stores its tokens in order, without gaps. A request takes physical blocks in contiguous
runs that grow with it, so that a load is a few long copies.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from flexhybrid.core.context.cache_entries import representation_of
from flexhybrid.core.errors import InputError

BLOCK_TOKENS = 16


def ceil_blocks(tokens):
    """Return the number of blocks that hold ``tokens`` tokens; numbers or arrays."""
    return -(-tokens // BLOCK_TOKENS)


def full_blocks(tokens):
    """Return the number of blocks that ``tokens`` tokens fill completely; numbers or arrays."""
    if isinstance(tokens, np.ndarray) and tokens.dtype.kind == "f":  # exact, and faster than ``//``
        return np.floor(tokens / BLOCK_TOKENS)
    return tokens // BLOCK_TOKENS


#: Added before floor, so that one half rounds up in spite of the rounding error of a share times a count.
HALF = 0.5 + 5e-10


def window_blocks(window: int) -> int:
    """Return the most blocks that ``window`` consecutive tokens can touch."""
    return (window - 2) // BLOCK_TOKENS + 2


def deal_blocks(entries: tuple[str, ...], shares, num_blocks) -> list:
    """Return the number of each entry's blocks among a request's first ``num_blocks``; numbers or arrays of one shape.

    CAPTURE eq. 5 keeps each request's #ACT : #KV at the pools' ratio. The next block goes to the entry that is furthest
    behind, so the first of two entries has floor(share·n + ½) of n blocks. More entries are divided repeatedly: first
    ACT and the rest, then each representation over its tiers. Counts never fall with n. A representation differs from
    its share by at most half a block, a tier within it by at most one block.
    """

    def halves(ratio, count):
        dealt = np.floor(ratio * count + HALF)
        return dealt, count - dealt

    return _dealt_by(halves, entries, shares, num_blocks)


def most_dealt(entries: tuple[str, ...], shares, span: int) -> list:
    """Return the most blocks of each entry among any ``span`` consecutive blocks that ``deal_blocks`` deals; the result
    may be one too large. Shares may be arrays."""

    def most(ratio, count):
        return np.ceil(ratio * count - 1e-9), np.ceil((1 - ratio) * count - 1e-9)

    return _dealt_by(most, entries, shares, span)


def _dealt_by(cut: Callable, entries: tuple[str, ...], shares, num_blocks) -> list:
    """Return the blocks of each entry by repeated division. ``cut(ratio, count)``: divides ``count`` blocks between
    entries with the share ``ratio`` and the other entries."""
    counts: list = [0] * len(entries)

    def deal(members: list[int], count) -> None:
        if len(members) == 1:
            counts[members[0]] = count
            return
        representation = representation_of(entries[members[0]])
        first = [i for i in members if representation_of(entries[i]) == representation]
        if len(first) == len(members):
            first = members[:1]
        later = [i for i in members if i not in first]
        first_share, all_shares = sum(shares[i] for i in first), sum(shares[i] for i in members)
        ratio = np.divide(
            first_share,
            all_shares,
            out=np.zeros(np.broadcast(first_share, all_shares).shape),
            where=np.asarray(all_shares) > 0,
        )
        of_first, of_later = cut(ratio, count)
        deal(first, of_first)
        deal(later, of_later)

    deal(list(range(len(entries))), num_blocks)
    return counts


def lengths_between(first, last) -> np.ndarray:
    """Return the lengths between ``first`` and ``last`` tokens at which a request may hold or load the most, [samples,
    ...]. Arguments may be arrays; requests with fewer samples repeat some.

    Lengths near whole blocks suffice, because the loaded part of a both(…) entry is monotonic between them.
    """
    first, last = np.broadcast_arrays(first, np.maximum(first, last))
    block = first // BLOCK_TOKENS
    num_blocks = int(np.max(last // BLOCK_TOKENS - block, initial=0)) + 1
    around = np.add.outer(np.arange(num_blocks) * BLOCK_TOKENS, [0, 1, BLOCK_TOKENS - 1]).reshape(-1, *[1] * first.ndim)
    return np.clip(block * BLOCK_TOKENS + around, first, last)


class Dealing(ABC):
    """Deals the tokens of a request to cache entries; counts the blocks that are held, dropped or kept as token ids.

    ``BlockEntries`` looks counts up in a table, for the requests of a wave. ``sim.candidates.CandidateDealing``
    computes them, for shares that are arrays.
    """

    names: tuple[str, ...]  #: cache entries except ``tok``, sorted
    keeps_ids: bool  #: whether the cache has the entry ``tok``
    tok_share: float | np.ndarray  #: share of the entry ``tok``
    per_entry: tuple  #: index that adds the entries' axis of ``dealt`` to an array of counts
    samples_axis: int  #: the axis of samples in the result of ``dealt`` for counts [samples, ...]

    @abstractmethod
    def dealt(self, num_blocks) -> np.ndarray:
        """Return the number of each entry's blocks among the first ``num_blocks``."""

    @abstractmethod
    def in_window(self, window: int) -> np.ndarray:
        """Return the most blocks of each entry that a window touches (``most_dealt``). In layers with this window a
        request holds a ring of these blocks, in which new tokens replace those outside the window."""

    def by_entry(self, values: Iterable) -> dict:
        """Return entry -> value, for values in the order of ``names``."""
        return dict(zip(self.names, values, strict=True))

    def tok_blocks(self, num_tokens):
        """Return how many of the first ``num_tokens``' blocks are kept as token ids; never the newest block."""
        full = np.floor(self.tok_share * full_blocks(num_tokens) + HALF)
        return np.minimum(full, np.maximum(ceil_blocks(num_tokens) - 1, 0))

    def passed_blocks(self, num_tokens, window: int | None):
        """Return the number of leading blocks that the token after ``num_tokens`` does not read, because they are kept
        as token ids or are outside its window."""
        passed = self.tok_blocks(num_tokens)
        return passed if window is None else np.maximum(passed, full_blocks(np.maximum(num_tokens + 1 - window, 0)))

    def first_stored(self, num_tokens, window: int | None):
        """Return the position of the first token that is kept after ``num_tokens`` are stored. It begins a block, at
        most the newest; earlier tokens are token ids or outside every later token's window."""
        newest = np.maximum(ceil_blocks(num_tokens) - 1, 0)
        return np.minimum(self.passed_blocks(num_tokens, window), newest) * BLOCK_TOKENS

    def dropped_blocks(self, num_tokens, window: int | None = None) -> np.ndarray:
        """Return the number of each entry's blocks among the ``passed_blocks``."""
        return self.dealt(self.passed_blocks(num_tokens, window))

    def held(self, num_tokens, window: int | None = None) -> np.ndarray:
        """Return the number of each entry's blocks that the token after ``num_tokens`` reads."""
        dealt = self.dealt(ceil_blocks(num_tokens))
        if not self.keeps_ids and window is None:
            return dealt
        return dealt - self.dropped_blocks(num_tokens, window)

    def most_blocks(self, first, last) -> np.ndarray:
        """Return the most blocks of each entry that a request holds at once while it grows from ``first`` to ``last``
        tokens."""
        if not self.keeps_ids:
            return self.held(last)
        return self.held(lengths_between(first, last)).max(axis=self.samples_axis)

    def stored(self, num_tokens) -> np.ndarray:
        """Return how many of the first ``num_tokens`` were stored to each entry, with those that are now token ids."""
        num_tokens = np.asarray(num_tokens)
        full = full_blocks(num_tokens)
        dealt = self.dealt(full)
        partial = (num_tokens - full * BLOCK_TOKENS)[self.per_entry]
        return dealt * BLOCK_TOKENS + partial * (self.dealt(full + 1) - dealt)

    def tokens(self, num_tokens, window: int | None = None) -> np.ndarray:
        """Return the tokens of each entry in the ``held`` blocks. Only the last block can be partial."""
        stored = self.stored(num_tokens)
        if not self.keeps_ids and window is None:
            return stored
        return stored - self.dropped_blocks(num_tokens, window) * BLOCK_TOKENS


class BlockEntries(Dealing):
    """Deals the blocks of a request under fixed token shares, by a table of ``deal_blocks``; counts [..., entry].

    Entries are sorted by name, so ACT comes before KV and the device before the host. ``tok`` is not among them: token
    ids are a prefix of the request, whose blocks were dealt to entries when they were new, and dropped later.
    """

    per_entry, samples_axis = (..., None), 0

    def __init__(self, shares: Mapping[str, float]):
        self.names = tuple(sorted(entry for entry, share in shares.items() if share > 0 and entry != "tok"))
        self.tok_share = float(shares.get("tok", 0.0))
        self.keeps_ids = self.tok_share > 0
        self._shares = [float(shares[entry]) for entry in self.names]
        self._tables = self._deal(64)

    def in_window(self, window: int) -> np.ndarray:
        """Return the most blocks of each entry that a window touches, [entry]."""
        return np.array(most_dealt(self.names, self._shares, window_blocks(window)), dtype=np.int64)

    def passed_blocks(self, num_tokens, window: int | None):
        return super().passed_blocks(np.asarray(num_tokens), window).astype(np.int64)

    def tok_tokens(self, num_tokens):
        """Return how many of the first ``num_tokens`` are kept as token ids: whole blocks, never the newest."""
        num_tokens = np.asarray(num_tokens)
        if not self.tok_share:
            return np.zeros_like(num_tokens)
        return self.tok_blocks(num_tokens).astype(np.int64) * BLOCK_TOKENS

    def _deal(self, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (each entry's blocks among the first 0, 1, … blocks, [num_blocks + 1, entry]; the entry of each
        block)."""
        dealt = deal_blocks(self.names, self._shares, np.arange(num_blocks + 1))
        counts = np.stack(dealt, axis=-1).astype(np.int64)
        return counts, np.argmax(np.diff(counts, axis=0), axis=-1)

    def _reaching(self, num_blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return tables with more blocks than the largest of ``num_blocks``. They are kept and only grow."""
        tables, most = self._tables, int(num_blocks.max(initial=0))
        if most >= len(tables[0]):
            tables = self._tables = self._deal(2 * most)
        return tables

    def dealt(self, num_blocks) -> np.ndarray:
        """Return the number of each entry's blocks among the first ``num_blocks``, [..., entry]."""
        num_blocks = np.asarray(num_blocks)
        return self._reaching(num_blocks)[0][num_blocks]

    def dropped_blocks(self, num_tokens, window: int | None = None) -> np.ndarray:
        """Return the number of each entry's blocks among the ``passed_blocks``, [..., entry]."""
        if not self.keeps_ids and window is None:
            return np.zeros((*np.shape(num_tokens), len(self.names)), dtype=np.int64)
        return self.dealt(self.passed_blocks(num_tokens, window))

    def positions(self, entry: int, num_tokens: int) -> np.ndarray:
        """Return the positions in a request of the first ``num_tokens`` tokens that are stored to ``names[entry]``,
        [num_tokens]. They are equal for all requests."""
        wanted = ceil_blocks(num_tokens)
        searched = max(wanted, 1)
        while (dealt := self.dealt(np.arange(searched + 1))[:, entry])[-1] < wanted:
            searched *= 2
        blocks = np.searchsorted(dealt, np.arange(1, wanted + 1)) - 1
        return (blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)[:num_tokens]

    def entry_of(self, positions) -> np.ndarray:
        """Return the entry, as an index into ``names``, to which the token at each position is stored."""
        block = np.asarray(positions) // BLOCK_TOKENS
        return self._reaching(block + 1)[1][block]


@dataclass(frozen=True)
class BlockSpan:
    """Physical blocks [first, first + count) of a pool, in every layer."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


class BlockPool:
    """Owns blocks [first, first + num_blocks) of a pool: those of each request, in contiguous runs, and free ones."""

    def __init__(self, num_blocks: int, first: int = 0):
        self.first, self.num_blocks = first, num_blocks
        self.free: list[BlockSpan] = [BlockSpan(first, num_blocks)] if num_blocks else []  # sorted, with gaps between
        self.held: dict[int, list[BlockSpan]] = {}  # request -> its runs, in the order of its blocks
        self.num_free = num_blocks

    def take(self, request: int, count: int) -> list[BlockSpan]:
        """Give a request ``count`` more blocks in few runs; return all its runs.

        Blocks come first from the gap after its last block, then from the smallest gap that has enough, else from the
        largest gaps. Raise InputError, and change nothing, if fewer blocks are free.
        """
        if count > self.num_free:
            raise InputError(f"{count} blocks asked for, {self.num_free} are free")
        runs = self.held.setdefault(request, [])
        while count:
            gap, size = self._gap(runs[-1].end if runs else None, count)
            count, self.num_free = count - size, self.num_free - size
            if runs and runs[-1].end == gap.first:
                runs[-1] = BlockSpan(runs[-1].first, runs[-1].count + size)
            else:
                runs.append(BlockSpan(gap.first, size))
            place = self.free.index(gap)
            self.free[place : place + 1] = [BlockSpan(gap.first + size, gap.count - size)] if gap.count > size else []
        return runs

    def _gap(self, behind: int | None, count: int) -> tuple[BlockSpan, int]:
        """Return (the gap to take blocks from next, number of blocks). ``behind``: the block after the request's
        last."""
        wide = []
        for gap in self.free:
            if gap.first == behind:
                return gap, min(count, gap.count)
            if gap.count >= count:
                wide.append(gap)
        gap = min(wide, key=lambda gap: gap.count) if wide else max(self.free, key=lambda gap: gap.count)
        return gap, min(count, gap.count)

    def release(self, request: int) -> None:
        """Free all blocks of a request, if it has any."""
        if runs := self.held.pop(request, []):
            self._free(runs)

    def give_up(self, request: int, count: int) -> None:
        """Free the last ``count`` of a request's blocks."""
        if not count:
            return
        runs = self.held[request]
        given_up: list[BlockSpan] = []
        while count:
            last = runs.pop()
            size = min(count, last.count)
            given_up.append(BlockSpan(last.end - size, size))
            if size < last.count:
                runs.append(BlockSpan(last.first, last.count - size))
            count -= size
        self._free(given_up)

    def _free(self, extents: list[BlockSpan]) -> None:
        merged: list[BlockSpan] = []
        for extent in sorted([*self.free, *extents], key=lambda extent: extent.first):
            if merged and merged[-1].end == extent.first:
                merged[-1] = BlockSpan(merged[-1].first, merged[-1].count + extent.count)
            else:
                merged.append(extent)
        self.free, self.num_free = merged, self.num_free + sum(extent.count for extent in extents)

    def check(self) -> None:
        """Raise AssertionError unless free and held runs are disjoint and cover the pool exactly."""
        spans = [*self.free, *(run for runs in self.held.values() for run in runs)]
        position, end = self.first, self.first + self.num_blocks
        for extent in sorted(spans, key=lambda extent: extent.first):
            assert extent.first == position and extent.count > 0, f"blocks from {position} on are lost or held twice"
            position = extent.end
        assert position == end, f"the pool ends at {end}, its extents at {position}"
        assert self.num_free == sum(extent.count for extent in self.free), "free blocks are counted wrongly"


class BlockManager:
    """Owns a mini-batch's part of each pool. ``num_blocks``: pool -> blocks; ``first``: pool -> first block (default:
    0)."""

    def __init__(self, num_blocks: dict[str, int], first: dict[str, int] | None = None):
        self.pools = {entry: BlockPool(count, (first or {}).get(entry, 0)) for entry, count in num_blocks.items()}

    def take(self, request: int, counts: dict[str, int]) -> None:
        """Give a request these numbers of further blocks in each pool. Raise InputError, and change nothing, if fewer
        are free."""
        for entry, count in counts.items():
            if count > (free := self.pools[entry].num_free):
                raise InputError(
                    f"request {request}: no room in pool {entry}: {count} blocks asked for, {free} are free"
                )
        for entry, count in counts.items():
            self.pools[entry].take(request, count)

    def blocks_of(self, entry: str, request: int) -> np.ndarray:
        """Return the physical blocks of a request, in order."""
        runs = self.pools[entry].held.get(request, [])
        if len(runs) == 1:
            return np.arange(runs[0].first, runs[0].end)
        return np.concatenate([np.arange(run.first, run.end) for run in runs]) if runs else np.zeros(0, np.int64)

    def release(self, request: int) -> None:
        """Free all blocks of a request in every pool."""
        for pool in self.pools.values():
            pool.release(request)

    def check(self) -> None:
        """Raise AssertionError if a pool's block is lost or held twice."""
        for pool in self.pools.values():
            pool.check()
