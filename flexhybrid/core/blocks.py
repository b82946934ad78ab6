"""Blocks of 16 tokens: which representation each logical block of a request has, and who owns the physical ones.

A request's tokens are cut into logical blocks. ``BlockKinds`` fixes the representation of each, the same for every
request under one policy; within a representation the request's tokens lie densely, in order. At admission a request
reserves one extent of physical blocks per representation, so that a load is a handful of long copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexhybrid.core.errors import InputError

BLOCK_TOKENS = 16


def ceil_blocks(tokens):
    """Blocks that hold this many tokens; works on arrays."""
    return -(-tokens // BLOCK_TOKENS)


class BlockKinds:
    """The representation of logical block 0, 1, 2, … under given token shares.

    CAPTURE eq. 5: each request keeps #ACT : #KV equal to the pools' ratio, so the next block is of the kind that is
    behind. Kinds are sorted by name, so ACT comes first in a tie.
    """

    def __init__(self, shares: dict[str, float]):
        self.kinds = tuple(sorted(kind for kind, share in shares.items() if share > 0))
        self._shares = np.array([shares[kind] for kind in self.kinds])
        self._sequence = np.zeros(0, dtype=np.int64)
        self._counts = np.zeros((1, len(self.kinds)), dtype=np.int64)  # [blocks so far, kind]

    def _extend(self, num_blocks: int) -> None:
        if num_blocks <= len(self._sequence):
            return
        num_blocks = max(num_blocks, 2 * len(self._sequence))
        sequence, counts = list(self._sequence), [row for row in self._counts]
        while len(sequence) < num_blocks:
            behind = self._shares * (len(sequence) + 1) - counts[-1]
            kind = int(np.argmax(behind.round(9)))
            sequence.append(kind)
            row = counts[-1].copy()
            row[kind] += 1
            counts.append(row)
        self._sequence, self._counts = np.array(sequence), np.array(counts)

    def blocks(self, num_blocks) -> np.ndarray:
        """Blocks of each kind among the first ``num_blocks``: [..., kind]."""
        num_blocks = np.asarray(num_blocks)
        self._extend(int(num_blocks.max(initial=0)))
        return self._counts[num_blocks]

    def tokens(self, num_tokens) -> np.ndarray:
        """Tokens of each kind among the first ``num_tokens``: [..., kind]. Only the last block can be partial."""
        num_tokens = np.asarray(num_tokens)
        full, rest = num_tokens // BLOCK_TOKENS, num_tokens % BLOCK_TOKENS
        tokens = self.blocks(full) * BLOCK_TOKENS
        self._extend(int(full.max(initial=0)) + 1)
        last_kind = self._sequence[full]
        return tokens + rest[..., None] * (last_kind[..., None] == np.arange(len(self.kinds)))

    def kind_of(self, positions) -> np.ndarray:
        """Index into ``kinds`` of the token at each position."""
        block = np.asarray(positions) // BLOCK_TOKENS
        self._extend(int(block.max(initial=0)) + 1)
        return self._sequence[block]


@dataclass(frozen=True)
class Extent:
    """Physical blocks [first, first + count) of one pool; the same ids serve every layer."""

    first: int
    count: int


class BlockPool:
    """The free and used extents of one pool. First fit, neighbours merge when freed."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free: list[tuple[int, int]] = [(0, num_blocks)] if num_blocks else []  # (first, count), sorted
        self._used: dict[int, Extent] = {}  # request id -> extent

    @property
    def num_free(self) -> int:
        return sum(count for _, count in self._free)

    def largest_free(self) -> int:
        return max((count for _, count in self._free), default=0)

    def reserve(self, request: int, count: int) -> Extent:
        """Reserve ``count`` neighbouring blocks. Raises InputError when no gap is wide enough."""
        if request in self._used:
            raise ValueError(f"request {request} already holds {self._used[request]}")
        if count == 0:
            self._used[request] = Extent(0, 0)
            return self._used[request]
        for i, (first, size) in enumerate(self._free):
            if size >= count:
                self._free[i : i + 1] = [(first + count, size - count)] if size > count else []
                extent = Extent(first, count)
                self._used[request] = extent
                return extent
        raise InputError(f"{count} neighbouring blocks asked for, the largest gap has {self.largest_free()}")

    def shrink(self, request: int, count: int) -> Extent:
        """Give back all but the first ``count`` blocks of a request."""
        extent = self._used[request]
        if count > extent.count:
            raise ValueError(f"request {request} holds {extent.count} blocks, cannot keep {count}")
        self._give_back(extent.first + count, extent.count - count)
        self._used[request] = Extent(extent.first, count)
        return self._used[request]

    def release(self, request: int) -> None:
        """Give back all blocks of a request; one that holds none is left alone."""
        if extent := self._used.pop(request, None):
            self._give_back(extent.first, extent.count)

    def _give_back(self, first: int, count: int) -> None:
        if count == 0:
            return
        merged: list[tuple[int, int]] = []
        for start, size in sorted([*self._free, (first, count)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged

    def check(self) -> None:
        """Integrity: free and used extents are disjoint and cover the pool exactly. Raises AssertionError."""
        spans = [(first, count) for first, count in self._free]
        spans += [(extent.first, extent.count) for extent in self._used.values() if extent.count]
        position = 0
        for first, count in sorted(spans):
            assert first == position, f"blocks from {position} to {first} are lost or owned twice"
            position = first + count
        assert position == self.num_blocks, f"the pool ends at {self.num_blocks}, its extents at {position}"


class BlockManager:
    """All pools of an engine, keyed by representation@tier ("kv@host"). The only one that moves a block."""

    def __init__(self, num_blocks: dict[str, int]):
        self.pools = {kind: BlockPool(count) for kind, count in num_blocks.items()}

    def admit(self, request: int, blocks: dict[str, int]) -> dict[str, Extent]:
        """Reserve one extent per representation; all or nothing."""
        taken: dict[str, Extent] = {}
        try:
            for kind, count in blocks.items():
                taken[kind] = self.pools[kind].reserve(request, count)
        except InputError as error:
            for kind in taken:
                self.pools[kind].release(request)
            raise InputError(f"request {request}: no room in pool {kind}: {error}") from None
        return taken

    def release(self, request: int) -> None:
        """Give back all blocks of a request, in every pool."""
        for pool in self.pools.values():
            pool.release(request)

    def check(self) -> None:
        for pool in self.pools.values():
            pool.check()
