"""Blocks of 16 tokens: the representation of each logical block, and the owner of each physical one.

A request's tokens are cut into logical blocks. ``BlockEntries`` fixes each block's representation, equal for all
requests under a policy; within a representation tokens are stored densely, in order. A request takes physical blocks in
contiguous runs that grow with it, so that a load is a few long copies.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from flexhybrid.core.context.cache_entries import representation_of
from flexhybrid.core.errors import InputError

BLOCK_TOKENS = 16


def ceil_blocks(tokens):
    """Blocks that hold this many tokens; works on arrays."""
    return -(-tokens // BLOCK_TOKENS)


def full_blocks(tokens):
    """Blocks that this many tokens fill; works on arrays. Of floats the quotient is exact, and faster than ``//``."""
    if isinstance(tokens, np.ndarray) and tokens.dtype.kind == "f":
        return np.floor(tokens / BLOCK_TOKENS)
    return tokens // BLOCK_TOKENS


#: Rounding up from one half, with room for the rounding error of a share times a count.
HALF = 0.5 + 5e-10


def window_blocks(window: int) -> int:
    """Return the most blocks that this number of consecutive tokens can touch."""
    return (window - 2) // BLOCK_TOKENS + 2


def deal_blocks(entries: tuple[str, ...], shares, num_blocks) -> list:
    """Return the blocks of each entry among a request's first ``num_blocks``; shares and counts may be arrays of one
    shape.

    CAPTURE eq. 5 keeps each request's #ACT : #KV at the pools' ratio: the next block belongs to the entry that is
    furthest behind, so of two entries the first has floor(share·n + ½) of n blocks. More entries are dealt in turn: ACT
    against the rest, then each representation over its tiers. Counts never fall with n. A representation is at most
    half a block off its share, a tier within it at most one block.
    """

    def halves(ratio, count):
        dealt = np.floor(ratio * count + HALF)
        return dealt, count - dealt

    return _dealt_by(halves, entries, shares, num_blocks)


def most_dealt(entries: tuple[str, ...], shares, span: int) -> list:
    """Most blocks of each entry among any ``span`` blocks in a row, as ``deal_blocks`` deals them; at most one too many
    where entries take turns unevenly. Shares may be arrays."""

    def most(ratio, count):
        return np.ceil(ratio * count - 1e-9), np.ceil((1 - ratio) * count - 1e-9)

    return _dealt_by(most, entries, shares, span)


def _dealt_by(cut: Callable, entries: tuple[str, ...], shares, num_blocks) -> list:
    """``cut(ratio, count)`` says how many blocks of a count go to some entries that have this share, and to others."""
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
    """Return the lengths from ``first`` to ``last`` tokens at which a request may hold or load the most: [samples,
    ...].

    Only lengths near whole blocks count, because the loaded part of a both(…) entry is monotonic between them.
    Arguments may be arrays; requests with fewer such lengths repeat some.
    """
    first, last = np.broadcast_arrays(first, np.maximum(first, last))
    block = first // BLOCK_TOKENS
    num_blocks = int(np.max(last // BLOCK_TOKENS - block, initial=0)) + 1
    around = np.add.outer(np.arange(num_blocks) * BLOCK_TOKENS, [0, 1, BLOCK_TOKENS - 1]).reshape(-1, *[1] * first.ndim)
    return np.clip(block * BLOCK_TOKENS + around, first, last)


class Dealing(ABC):
    """How the tokens of a request are dealt to cache entries, and which leading ones are kept as ids alone.

    A subclass says with ``dealt`` how the first blocks are dealt: ``BlockEntries`` from a table, for the requests of a
    wave; ``sim.candidates.CandidateDealing`` by computing it, for shares that are arrays.
    """

    keeps_ids: bool  #: tokens of the entry ``tok``
    tok_share: float | np.ndarray
    per_entry: tuple  #: index that gives counts of requests the axis of entries that ``dealt`` has
    samples_axis: int  #: of ``dealt``, for counts [samples, ...]

    @abstractmethod
    def dealt(self, num_blocks) -> np.ndarray:
        """Blocks of each entry among the first ``num_blocks``."""

    @abstractmethod
    def in_window(self, window: int) -> np.ndarray:
        """Return the most blocks of each entry that a window touches (``most_dealt``). In layers with the window a
        request holds no more, as a ring in which new tokens replace those out of sight."""

    def tok_blocks(self, num_tokens):
        """Blocks kept as ids alone among the first ``num_tokens``: never the newest."""
        full = np.floor(self.tok_share * full_blocks(num_tokens) + HALF)
        return np.minimum(full, np.maximum(ceil_blocks(num_tokens) - 1, 0))

    def passed_blocks(self, num_tokens, window: int | None):
        """Return the blocks of the first ``num_tokens`` that the next token does not read: token ids, or outside its
        window."""
        passed = self.tok_blocks(num_tokens)
        return passed if window is None else np.maximum(passed, full_blocks(np.maximum(num_tokens + 1 - window, 0)))

    def first_stored(self, num_tokens, window: int | None):
        """Position of the first of ``num_tokens`` tokens that is kept when the last of them is stored: what later
        tokens do not see is not. It begins a block, and never comes behind the newest."""
        newest = np.maximum(ceil_blocks(num_tokens) - 1, 0)
        return np.minimum(self.passed_blocks(num_tokens, window), newest) * BLOCK_TOKENS

    def dropped_blocks(self, num_tokens, window: int | None = None) -> np.ndarray:
        """Blocks of each entry among the ``passed_blocks``."""
        return self.dealt(self.passed_blocks(num_tokens, window))

    def held(self, num_tokens, window: int | None = None) -> np.ndarray:
        """Blocks of each entry that hold something of the first ``num_tokens`` that the next token sees."""
        dealt = self.dealt(ceil_blocks(num_tokens))
        if not self.keeps_ids and window is None:
            return dealt
        return dealt - self.dropped_blocks(num_tokens, window)

    def most_blocks(self, first, last) -> np.ndarray:
        """Blocks of each entry that a request ever holds at once as it grows from ``first`` to ``last`` tokens."""
        if not self.keeps_ids:
            return self.held(last)
        return self.held(lengths_between(first, last)).max(axis=self.samples_axis)

    def stored(self, num_tokens) -> np.ndarray:
        """Tokens of each entry that the first ``num_tokens`` ever stored, those kept as ids alone by now included."""
        num_tokens = np.asarray(num_tokens)
        full = full_blocks(num_tokens)
        dealt = self.dealt(full)
        partial = (num_tokens - full * BLOCK_TOKENS)[self.per_entry]
        return dealt * BLOCK_TOKENS + partial * (self.dealt(full + 1) - dealt)

    def tokens(self, num_tokens, window: int | None = None) -> np.ndarray:
        """Tokens of each entry in the blocks that are ``held``. Only the last block can be partial."""
        stored = self.stored(num_tokens)
        if not self.keeps_ids and window is None:
            return stored
        return stored - self.dropped_blocks(num_tokens, window) * BLOCK_TOKENS


class BlockEntries(Dealing):
    """The representation of logical block 0, 1, 2, … under given token shares: ``deal_blocks`` as a sequence.

    Kinds are sorted by name, so ACT comes before KV and the device before the host. Tokens of the entry ``tok`` are
    a prefix of the request and in none of the entries: its first blocks were dealt an entry when they were new and have
    been dropped since. Counts are whole numbers [..., entry].
    """

    per_entry, samples_axis = (..., None), 0

    def __init__(self, shares: Mapping[str, float]):
        self.names = tuple(sorted(entry for entry, share in shares.items() if share > 0 and entry != "tok"))
        self.tok_share = float(shares.get("tok", 0.0))
        self.keeps_ids = self.tok_share > 0
        self._shares = [float(shares[entry]) for entry in self.names]
        self._tables = self._deal(64)

    def in_window(self, window: int) -> np.ndarray:
        """Return the most blocks of each entry that a window touches: [entry]."""
        return np.array(most_dealt(self.names, self._shares, window_blocks(window)), dtype=np.int64)

    def passed_blocks(self, num_tokens, window: int | None):
        return super().passed_blocks(np.asarray(num_tokens), window).astype(np.int64)

    def tok_tokens(self, num_tokens):
        """Tokens kept as ids alone among the first ``num_tokens``: whole blocks, never the newest."""
        num_tokens = np.asarray(num_tokens)
        if not self.tok_share:
            return np.zeros_like(num_tokens)
        return self.tok_blocks(num_tokens).astype(np.int64) * BLOCK_TOKENS

    def _deal(self, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks of each entry among the first 0, 1, … blocks, [num_blocks + 1, entry], and each block's entry."""
        dealt = deal_blocks(self.names, self._shares, np.arange(num_blocks + 1))
        counts = np.stack(dealt, axis=-1).astype(np.int64)
        return counts, np.argmax(np.diff(counts, axis=0), axis=-1)

    def _reaching(self, num_blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return tables of at least this many blocks; cached, because every step looks up its few requests."""
        tables, most = self._tables, int(num_blocks.max(initial=0))
        if most >= len(tables[0]):
            tables = self._tables = self._deal(2 * most)
        return tables

    def dealt(self, num_blocks) -> np.ndarray:
        """Blocks of each entry among the first ``num_blocks``: [..., entry]."""
        num_blocks = np.asarray(num_blocks)
        return self._reaching(num_blocks)[0][num_blocks]

    def stored(self, num_tokens) -> np.ndarray:
        """Tokens of each entry that the first ``num_tokens`` ever stored: [..., entry]."""
        num_tokens = np.asarray(num_tokens)
        full = num_tokens // BLOCK_TOKENS
        counts = self._reaching(full + 1)[0]
        dealt = counts[full]
        return dealt * BLOCK_TOKENS + (num_tokens - full * BLOCK_TOKENS)[..., None] * (counts[full + 1] - dealt)

    def dropped_blocks(self, num_tokens, window: int | None = None) -> np.ndarray:
        """Blocks of each entry among the ``passed_blocks`` of the first ``num_tokens``: [..., entry]."""
        if not self.keeps_ids and window is None:
            return np.zeros((*np.shape(num_tokens), len(self.names)), dtype=np.int64)
        return self.dealt(self.passed_blocks(num_tokens, window))

    def positions(self, entry: int, num_tokens: int) -> np.ndarray:
        """Position in its request of token 0, 1, … that ever went to a block of ``names[entry]``: [num_tokens].

        The inverse of ``stored`` and ``entry_of``: the same for every request, since all deal their blocks alike.
        """
        wanted = ceil_blocks(num_tokens)
        searched = max(wanted, 1)
        while (dealt := self.dealt(np.arange(searched + 1))[:, entry])[-1] < wanted:
            searched *= 2
        blocks = np.searchsorted(dealt, np.arange(1, wanted + 1)) - 1
        return (blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)[:num_tokens]

    def entry_of(self, positions) -> np.ndarray:
        """Index into ``names`` of the token at each position, when it is new."""
        block = np.asarray(positions) // BLOCK_TOKENS
        return self._reaching(block + 1)[1][block]


@dataclass(frozen=True)
class BlockSpan:
    """Physical blocks [first, first + count) of one pool; the same ids serve every layer."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


class BlockPool:
    """Blocks [first, first + num_blocks) of a pool: the free ones, and each request's, as contiguous runs."""

    def __init__(self, num_blocks: int, first: int = 0):
        self.first, self.num_blocks = first, num_blocks
        self.free: list[BlockSpan] = [BlockSpan(first, num_blocks)] if num_blocks else []  #: sorted, with gaps
        self.held: dict[int, list[BlockSpan]] = {}  #: request -> its runs, in the order of its blocks
        self.num_free = num_blocks

    def take(self, request: int, count: int) -> list[BlockSpan]:
        """Give a request ``count`` more blocks in as few runs as the gaps allow; return all its runs.

        The gap behind its last block comes first, then the smallest one that holds the rest, else the largest ones.
        Raises InputError, and gives nothing, when fewer blocks are free.
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
        """The gap to take blocks of next, and how many."""
        wide = []
        for gap in self.free:
            if gap.first == behind:
                return gap, min(count, gap.count)
            if gap.count >= count:
                wide.append(gap)
        gap = min(wide, key=lambda gap: gap.count) if wide else max(self.free, key=lambda gap: gap.count)
        return gap, min(count, gap.count)

    def release(self, request: int) -> None:
        """Take back all blocks of a request; one that holds none is left alone."""
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
        """Raise AssertionError unless free and held extents are disjoint and cover the pool exactly."""
        spans = [*self.free, *(run for runs in self.held.values() for run in runs)]
        position, end = self.first, self.first + self.num_blocks
        for extent in sorted(spans, key=lambda extent: extent.first):
            assert extent.first == position and extent.count > 0, f"blocks from {position} on are lost or held twice"
            position = extent.end
        assert position == end, f"the pool ends at {end}, its extents at {position}"
        assert self.num_free == sum(extent.count for extent in self.free), "free blocks are counted wrongly"


class BlockManager:
    """The part of a mini-batch in the pools by name ("kv@host"), and the only one that gives blocks there:
    ``num_blocks`` from ``first`` on (0)."""

    def __init__(self, num_blocks: dict[str, int], first: dict[str, int] | None = None):
        self.pools = {entry: BlockPool(count, (first or {}).get(entry, 0)) for entry, count in num_blocks.items()}

    def has_room(self, counts: dict[str, int]) -> bool:
        """Return whether this many blocks of each entry are free."""
        return all(count <= self.pools[entry].num_free for entry, count in counts.items())

    def take(self, request: int, counts: dict[str, int]) -> None:
        """Extend a request's blocks of each entry by these counts. Raise InputError, unchanged, without room."""
        for entry, count in counts.items():
            if count > self.pools[entry].num_free:
                raise InputError(
                    f"request {request}: no room in pool {entry}: {count} blocks asked for, "
                    f"{self.pools[entry].num_free} are free"
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
        """Take back all blocks of a request, in every pool."""
        for pool in self.pools.values():
            pool.release(request)

    def check(self) -> None:
        """Raise AssertionError if a block of a pool is lost or held twice."""
        for pool in self.pools.values():
            pool.check()
