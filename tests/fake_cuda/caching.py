"""A model of torch's caching allocator for CUDA: what it reserves for a sequence of allocations.

Written after its documented behaviour and its source (c10/cuda/CUDACachingAllocator.cpp, torch 2.9 to 2.13): sizes are
rounded to 512 bytes; up to 1 MiB comes from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, more from segments
of its own, rounded to 2 MiB; the smallest free block that is large enough is taken and split; neighbours that are free
are one block; each stream has pools of its own. With expandable segments a pool is one range of addresses to which
pages of 2 MiB (small pool) or 20 MiB are added as they are needed.

Left out: rounding to powers of two, garbage collection and a largest size to split, all off by default; private pools
of CUDA graphs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from itertools import count

MIB = 1 << 20
UNIT = 512  #: bytes of an allocation's rounding, and the smallest rest of a small block
SMALL = MIB  #: the largest size of the small pool, and the largest rest of a large block that stays with it
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
LARGE = 10 * MIB  #: from here on a request has a segment of its own
SEGMENT_UNIT = 2 * MIB  #: of such segments
ADDRESSES = LARGE_SEGMENT << 18  #: of an expandable segment: whole pages, more than any device has


class OutOfMemory(MemoryError):
    """The limit does not allow what was asked for, though all that was cached has been let go of."""


class Block:
    """A range of a segment; ``key`` orders the free ones of a pool."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "previous", "size", "streams", "waits")

    def __init__(self, pool: Pool, address: int, size: int):
        self.pool, self.address, self.size = pool, address, size
        self.previous: Block | None = None
        self.next: Block | None = None
        self.free, self.mapped = True, True
        self.streams: set[Hashable] = set()  #: other streams that have used it (``record_stream``)
        self.waits: set[Hashable] = set()  #: those of them that have not come to its end yet

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address

    @property
    def whole(self) -> bool:
        """Whether it is a whole segment."""
        return self.previous is None and self.next is None


class Pool:
    """The blocks of a stream, small or large."""

    def __init__(self, stream: Hashable, small: bool):
        self.stream, self.small = stream, small
        self.free: list[tuple[tuple[int, int], Block]] = []
        self.unmapped: list[tuple[int, Block]] = []  #: of expandable segments, by address
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT

    def add(self, block: Block) -> None:
        block.free = True
        insort(self.free, (block.key, block), key=lambda entry: entry[0])

    def remove(self, block: Block) -> None:
        at = bisect_left(self.free, block.key, key=lambda entry: entry[0])
        assert self.free[at][1] is block
        del self.free[at]

    def from_size(self, size: int) -> Iterator[Block]:
        """Yield the free blocks of at least this size, the smallest first."""
        at = bisect_left(self.free, (size, 0), key=lambda entry: entry[0])
        yield from (block for _, block in self.free[at:])

    def splits(self, rest: int, expandable: bool) -> bool:
        return rest >= UNIT if self.small or expandable else rest > SMALL


def rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def segment_size(size: int) -> int:
    """Bytes of the segment that is made for a (rounded) size."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE else rounded(size, SEGMENT_UNIT)


class CachingAllocator:
    """Bytes of tensors (``allocated``), bytes held for them (``reserved``), and peaks. ``limit``: of
    ``torch.cuda.set_per_process_memory_fraction``. ``retries``: how often the cache had to be emptied."""

    def __init__(self, limit: int | None = None, expandable: bool = False):
        self.limit, self.expandable = limit, expandable
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0
        self._pools: dict[tuple[Hashable, bool], Pool] = {}
        self._deferred: list[Block] = []
        self._addresses = count(0, 2 * ADDRESSES)  #: of segments

    # ---- what a program calls

    def allocate(self, size: int, stream: Hashable = "default") -> Block:
        """Return a block for ``size`` bytes on a stream. Raises OutOfMemory."""
        size = max(UNIT, rounded(size, UNIT))
        self._take_back()
        pool = self._pools.setdefault((stream, size <= SMALL), Pool(stream, size <= SMALL))
        block = self._find(pool, size) or self._more(pool, size)
        if block is None:
            self.retries += 1
            for waiting in self._deferred:
                waiting.waits.clear()
            self.empty_cache()
            block = self._more(pool, size)
        if block is None:
            raise OutOfMemory(
                f"asked for {size}, reserved {self.reserved}, allocated {self.allocated}, of {self.limit} bytes"
            )
        rest = block.size - size
        if pool.splits(rest, self.expandable):
            pool.add(self._cut(block, size))
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def record_stream(self, block: Block, stream: Hashable) -> None:
        """Say that another stream uses a block: after ``free`` it stays until that stream has come so far."""
        if stream != block.pool.stream:
            block.streams.add(stream)

    def free(self, block: Block) -> None:
        if block.streams:
            block.waits = set(block.streams)
            self._deferred.append(block)
        else:
            self._release(block)

    def synchronize(self, stream: Hashable) -> None:
        """A stream has come to the end of its work."""
        for block in self._deferred:
            block.waits.discard(stream)

    def empty_cache(self) -> None:
        """Give back every segment that nothing lies in; of expandable ones every page."""
        self._take_back()
        for pool in self._pools.values():
            for _, block in list(pool.free):
                if self.expandable:
                    self._unmap(pool, block)
                elif block.whole:
                    pool.remove(block)
                    self.reserved -= block.size

    # ---- blocks

    def _take_back(self) -> None:
        """Release what was deferred and is no longer used."""
        done = [block for block in self._deferred if not block.waits]
        self._deferred = [block for block in self._deferred if block.waits]
        for block in done:
            block.streams.clear()
            self._release(block)

    def _release(self, block: Block) -> None:
        self.allocated -= block.size
        block.pool.add(self._merged(block))

    def _merged(self, block: Block) -> Block:
        """Return the block with its free neighbours, which leave the pool."""
        for other in (block.previous, block.next):
            if other is not None and other.free and other.mapped:
                block.pool.remove(other)
                block = self._joined(other, block) if other is block.previous else self._joined(block, other)
        return block

    @staticmethod
    def _joined(first: Block, second: Block) -> Block:
        first.size += second.size
        first.next = second.next
        if second.next:
            second.next.previous = first
        return first

    @staticmethod
    def _cut(block: Block, size: int) -> Block:
        """Cut a block behind ``size`` bytes; return the rest, which is in no list."""
        rest = Block(block.pool, block.address + size, block.size - size)
        rest.previous, rest.next, rest.mapped = block, block.next, block.mapped
        if block.next:
            block.next.previous = rest
        block.next, block.size = rest, size
        return rest

    def _find(self, pool: Pool, size: int) -> Block | None:
        """Take the free block that fits best. An expandable block has the size that it can reach and comes last."""
        best = None
        for block in pool.from_size(size):
            behind = block.next
            if behind is None or behind.mapped:
                best = block
                break
            best = best or block
        if best is not None:
            pool.remove(best)
        return best

    def _may_reserve(self, size: int) -> bool:
        return self.limit is None or self.reserved + size <= self.limit

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _more(self, pool: Pool, size: int) -> Block | None:
        """Take memory from the device; None where the limit does not allow it."""
        if not self._may_reserve(segment_size(size)):
            return None
        if self.expandable:
            return self._expanded(pool, size)
        block = Block(pool, next(self._addresses), segment_size(size))
        self._reserve(block.size)
        return block

    # ---- expandable segments

    def _expanded(self, pool: Pool, size: int) -> Block | None:
        """Add pages behind the first place where free blocks and addresses without memory are large enough."""
        start = next((place for _, block in pool.unmapped if (place := _place(block, size))), None)
        if start is None:
            start = Block(pool, next(self._addresses), ADDRESSES)
            start.mapped = False
            pool.unmapped.append((start.address, start))
        block = start if start.mapped else self._mapped(pool, start, size)
        while block is not None and block.size < size:
            following = block.next
            assert following is not None and not following.mapped
            block = self._mapped(pool, following, size - block.size)
        if block is not None:
            pool.remove(block)
        return block

    def _mapped(self, pool: Pool, block: Block, size: int) -> Block:
        """Add whole pages at the begin of a block of addresses; return the free block that they are now part of."""
        pool.unmapped.remove((block.address, block))
        pages = min(rounded(min(size, block.size), pool.page), block.size)
        if pages < block.size:
            rest = self._cut(block, pages)
            pool.unmapped.append((rest.address, rest))
            pool.unmapped.sort(key=lambda entry: entry[0])
        block.mapped = True
        self._reserve(pages)
        block = self._merged(block)
        pool.add(block)
        return block

    def _unmap(self, pool: Pool, block: Block) -> None:
        """Give back the whole pages in a free block."""
        begin, end = rounded(block.address, pool.page), (block.address + block.size) // pool.page * pool.page
        if end <= begin:
            return
        pool.remove(block)
        if begin > block.address:
            middle = self._cut(block, begin - block.address)
            pool.add(block)
            block = middle
        if block.address + block.size > end:
            pool.add(self._cut(block, end - block.address))
        self.reserved -= block.size
        block.mapped = False
        for other in (block.previous, block.next):
            if other is not None and not other.mapped:
                pool.unmapped.remove((other.address, other))
                block = self._joined(other, block) if other is block.previous else self._joined(block, other)
        pool.unmapped.append((block.address, block))
        pool.unmapped.sort(key=lambda entry: entry[0])


def _place(block: Block, size: int) -> Block | None:
    """Return the block at which ``size`` bytes of free or unmapped addresses begin."""
    start = block.previous if block.previous is not None and block.previous.free else block
    found, at = 0, start
    while found < size and at is not None and at.free:
        found, at = found + at.size, at.next
    return start if found >= size else None
