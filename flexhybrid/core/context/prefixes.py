"""Prompts that begin alike: whole blocks of their tokens, computed once and kept once for all requests that have them.

A block is known by its 16 tokens and all tokens before it, so a tree of blocks holds every way in which prompts begin.
Every request deals its blocks to cache entries alike: the same block of two prompts is of the same entry.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, BlockEntries, BlockManager

LEAST_BLOCKS = 2  #: a request shares no fewer: attention over them is a product of its own
PATIENCE = 8  #: requests that may join before the first waiting one, to share blocks
FEWEST = 2  #: requests for which a block is shared
BLOCK_BYTES = BLOCK_TOKENS * np.dtype(np.int32).itemsize

#: Request -> token ids of its prompt; None: it shares nothing (its prompt must be computed as a whole).
Prompt = Callable[[int], Sequence[int] | np.ndarray | None]


class PromptTree:
    """The blocks of known prompts as a tree; a prompt is known from the first look at it until its request has left."""

    def __init__(self, prompt: Prompt):
        self._prompt = prompt
        self._blocks: dict[tuple[int, bytes], int] = {}  # the block before it and its tokens -> number
        self._keys: dict[int, tuple[int, bytes]] = {}
        self._known: dict[int, int] = defaultdict(int)  # block -> known prompts that have it
        self._paths: dict[int, list[int]] = {}  # request -> the blocks of its prompt
        self._numbers = count(1)
        self.resident: dict[int, int] = {}  #: blocks that are kept -> where (``SharedBlocks``)
        self.longest = math.inf  #: tokens of a prompt beyond which it shares nothing

    def path(self, request: int) -> list[int]:
        """Return the whole blocks of a request's prompt without its last token, from which the answer begins."""
        path = self._paths.get(request)
        if path is None:
            prompt, block = self._prompt(request), 0
            path = self._paths[request] = []
            if prompt is None or len(prompt) > self.longest:
                prompt = ()
            tokens = np.asarray(prompt[:-1], dtype=np.int32).tobytes()
            for end in range(BLOCK_BYTES, len(tokens) + 1, BLOCK_BYTES):
                key = block, tokens[end - BLOCK_BYTES : end]
                block = self._blocks.get(key, 0)
                if not block:
                    block = self._blocks[key] = next(self._numbers)
                    self._keys[block] = key
                self._known[block] += 1
                path.append(block)
        return path

    def shared(self, request: int) -> list[int]:
        """Return the first blocks of a request's prompt that another known prompt has too, or that are kept."""
        path, known, resident, length = self.path(request), self._known, self.resident, 0
        for block in path:
            if known[block] < FEWEST and block not in resident:
                break
            length += 1
        return path[:length] if length >= LEAST_BLOCKS else []

    def forget(self, request: int) -> None:
        """Forget a request's prompt."""
        for block in self._paths.pop(request, ()):
            self._known[block] -= 1
            self.drop(block)

    def drop(self, block: int) -> None:
        """Forget a block that is neither known nor kept."""
        if not self._known[block] and block not in self.resident:
            del self._known[block]
            del self._blocks[self._keys.pop(block)]


class PrefixOrder:
    """Sends waiting requests to mini-batches whose members share their prefix. PATIENCE limits how often the first is
    passed over: with room, the request at position i joins after at most (i + 1) * PATIENCE others."""

    def __init__(self, tree: PromptTree):
        self.tree = tree
        self.first, self.passed = -1, 0  #: the first in the line, and how many have joined before it

    def order(self, ready: list[int], members: Mapping[int, int]) -> list[int]:
        """Return the requests that a mini-batch takes next: first those that share the most with its ``members``
        (shared block -> count), or nothing with any member."""
        paths = {request: self.tree.shared(request) for request in ready}
        if not any(paths.values()):
            return ready
        if ready[0] != self.first:
            self.first, self.passed = ready[0], 0

        def rank(request: int) -> float:
            path = paths[request]
            if not path or request == self.first and self.passed >= PATIENCE:
                return -math.inf
            return -sum(members.get(block, 0) for block in path) / len(path)

        return sorted(ready, key=rank)

    def join(self, requests: Collection[int]) -> None:
        """Remove requests that joined."""
        self.passed += len(requests)


class Build(NamedTuple):
    """Shared blocks [first, last) of the request in a place, computed or stored with it for all that share them."""

    place: int
    first: int
    last: int
    level: int  #: of the iteration's builds; a level needs some of the earlier ones


class SharedBlocks:
    """The shared blocks of a wave, at the beginning of each pool, and how many of them (``depth``, from its first
    block) each place's request has. Unused blocks stay until their room is needed. Layers with a window keep them all,
    because requests differ in where their own context begins.

    If blocks are exact (``exact``), they are computed once, in steps of their own, before the prompts. With fewer bits,
    a prompt computed after them would differ from one computed alone: each is computed whole, and the first one stores
    the shared blocks.
    """

    def __init__(
        self,
        tree: PromptTree,
        entries: BlockEntries,
        num_blocks: dict[str, int],
        num_places: int,
        piece_blocks: int,
        exact: bool,
    ):
        self.tree, self.entries, self.exact = tree, entries, exact
        self.blocks = BlockManager(num_blocks)
        self.piece_blocks = piece_blocks  #: most that are computed or stored of a prompt in one step
        self.depth = np.zeros(num_places, dtype=np.int64)
        self.stored_before = np.zeros(num_places, dtype=np.int64)  #: of these, those that other requests have stored
        self.table = np.zeros((num_places, 1), dtype=np.int64)  #: [places, most] their physical blocks
        self.builds: list[Build] = []  #: of the iteration that is laid out
        self.num_tokens = 0  #: prompt tokens that members did not compute, or store, because others had
        #: mini-batch -> its members' blocks in its latest step, and what these have in common (``steps.Common``)
        self.commons: dict[int, tuple[tuple[bytes, ...], tuple]] = {}
        self._levels: dict[int, int] = {}  # of blocks that these builds compute
        self._members: dict[int, int] = defaultdict(int)  # block -> places
        self._path: dict[int, list[int]] = {}  # place -> its shared blocks
        self._idle: dict[int, None] = {}  # blocks that no place has; the first ones go first
        self._entries: list[int] = []  # of a prompt's first blocks
        self._resident = tree.resident = {}

    def attach(self, place: int, path: list[int]) -> None:
        """Give the request in a place the blocks ``path`` (``PromptTree.shared``): kept ones, and room for those that
        it will compute. Without room for all, it has the first ones."""
        kept = next((i for i, block in enumerate(path) if block not in self._resident), len(path))
        for block in path[:kept]:
            self._members[block] += 1
            self._idle.pop(block, None)
        length = kept
        if len(path) > len(self._entries):
            self._entries = self.entries.entry_of(np.arange(2 * len(path)) * BLOCK_TOKENS).tolist()
        while length < len(path) and self._take(path[length], self.entries.names[self._entries[length]]):
            length += 1
        if not length:
            return
        path = self._path[place] = path[:length]
        self.depth[place], self.stored_before[place] = length, kept
        if length > self.table.shape[1]:
            self.table = np.pad(self.table, ((0, 0), (0, length - self.table.shape[1])))
        self.table[place, :length] = [self._resident[block] for block in path]
        lowest = self._levels.get(path[kept - 1], -1) + 1 if kept else 0
        for level, first in enumerate(range(kept, length, self.piece_blocks), lowest):
            build = Build(place, first, min(first + self.piece_blocks, length), level)
            self.builds.append(build)
            self._levels.update(dict.fromkeys(path[build.first : build.last], level))

    def path(self, place: int) -> list[int]:
        """Return the shared blocks of the request in a place."""
        return self._path.get(place, [])

    def _take(self, block: int, entry: str) -> bool:
        """Find a place for a block, if necessary that of an unused one; return False without any."""
        pool = self.blocks.pools[entry]
        while not pool.num_free and self._idle:
            self._release(next(iter(self._idle)))
        if not pool.num_free:
            return False
        self._resident[block] = pool.take(block, 1)[0].first
        self._members[block] = 1
        return True

    def _release(self, block: int) -> None:
        self._idle.pop(block, None)
        del self._members[block], self._resident[block]
        self.blocks.release(block)
        self.tree.drop(block)

    def detach(self, place: int) -> None:
        """Release the shared blocks of the request in a place. If joining requests are turned back, release the last
        first: blocks that will not be computed are dropped."""
        if not self.depth[place]:
            return
        path = self._path.pop(place)
        first = min((build.first for build in self.builds if build.place == place), default=len(path))
        self.builds = [build for build in self.builds if build.place != place]
        for at in reversed(range(len(path))):
            block = path[at]
            self._members[block] -= 1
            if at >= first:
                del self._levels[block]
                self._release(block)
            elif not self._members[block]:
                self._idle[block] = None
        self.depth[place] = self.stored_before[place] = 0

    def take_builds(self, places: Collection[int]) -> list[Build]:
        """Return the builds of these places, by level; from now on they are kept blocks like others."""
        builds = sorted((build for build in self.builds if build.place in places), key=lambda build: build.level)
        self.builds = [build for build in self.builds if build.place not in places]
        self._levels = self._levels if self.builds else {}
        return builds

    def check(self) -> None:
        """Raise AssertionError if a block is lost, held twice or miscounted."""
        self.blocks.check()
        members: dict[int, int] = defaultdict(int)
        for place, path in self._path.items():
            assert len(path) == self.depth[place]
            assert self.table[place, : len(path)].tolist() == [self._resident[block] for block in path]
            for block in path:
                members[block] += 1
        assert np.count_nonzero(self.depth) == len(self._path), "a place has an uncounted share"
        assert {b: n for b, n in self._members.items() if n} == members, "members are counted wrongly"
        assert set(self._idle) == {block for block in self._resident if not members[block]}, "idle blocks are lost"
        held = sum(len(pool.held) for pool in self.blocks.pools.values())
        assert held == len(self._resident), "a kept block is not known, or a known one is not kept"


def shared_runs(table: np.ndarray, depth: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (first, last, rows) of the longest runs of blocks that the same rows of a table [B, most] have, of which
    row b has the first ``depth[b]``: a tree, cut where rows part or one ends."""
    left = [(0, np.flatnonzero(depth))]
    while left:
        first, rows = left.pop()
        if not len(rows):
            continue
        order = rows[np.argsort(table[rows, first], kind="stable")]
        for group in np.split(order, np.flatnonzero(np.diff(table[order, first])) + 1):
            end = int(depth[group].min())
            differs = (table[group, first:end] != table[group[0], first:end]).any(axis=0)
            last = first + int(differs.argmax()) if differs.any() else end
            yield first, last, group
            left.append((last, group[depth[group] > last]))


def common_blocks(entries: BlockEntries, table: np.ndarray, depth: np.ndarray) -> np.ndarray:
    """Return the blocks of each entry, [entry], that rows of a table [B, most] share in their first ``depth`` [B]."""
    columns = np.arange(table.shape[1])
    chosen, num_entries = columns < depth[:, None], len(entries.names)
    named = table * num_entries + entries.entry_of(columns * BLOCK_TOKENS)
    return np.bincount(np.unique(named[chosen]) % num_entries, minlength=num_entries)


def build_steps(builds: Iterable[Build], max_rows: int) -> list[list[Build]]:
    """Group a mini-batch's builds, sorted by level, into steps of at most this many padded rows, or of one build."""
    steps: list[list[Build]] = []
    for build in builds:
        together = [*steps[-1], build] if steps and steps[-1][0].level == build.level else []
        if together and padded_rows(together) <= max_rows:
            steps[-1] = together
        else:
            steps.append([build])
    return steps


def padded_rows(builds: Sequence[Build]) -> int:
    """Rows of a step that computes these builds."""
    return len(builds) * max(build.last - build.first for build in builds) * BLOCK_TOKENS
