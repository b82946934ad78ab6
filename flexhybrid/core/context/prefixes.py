"""Shared prefixes: blocks with which several prompts begin are computed once and kept once for all of them.

A block is identified by its 16 tokens and all tokens before it, so the blocks of all prompts form a tree. All requests
deal their blocks to cache entries alike, so a shared block is in the same entry for each of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, BlockEntries, BlockManager

LEAST_BLOCKS = 2  #: least blocks that a request shares, because attention to them is a product of its own
PATIENCE = 8  #: most requests that join before the first waiting one, to share blocks
FEWEST_SHARERS = 2  #: a block is shared if at least this many known requests have it
BLOCK_BYTES = BLOCK_TOKENS * np.dtype(np.int32).itemsize  #: bytes of a block's token ids

#: Request -> token ids of its prompt; None: it shares nothing, because its prompt must be computed as a whole.
Prompt = Callable[[int], Sequence[int] | np.ndarray | None]


class PromptTree:
    """The tree of the blocks of known prompts. A prompt is known from the first ``path`` of its request to ``forget``.
    Blocks have numbers from 1."""

    def __init__(self, prompt: Prompt):
        self._prompt = prompt
        self._blocks: dict[tuple[int, bytes], int] = {}  # (previous block, token ids) -> block
        self._keys: dict[int, tuple[int, bytes]] = {}  # the inverse of ``_blocks``
        self._known: dict[int, int] = defaultdict(int)  # block -> number of known prompts with it
        self._paths: dict[int, list[int]] = {}  # request -> the blocks of its prompt
        self._numbers = count(1)
        self.resident: dict[int, int] = {}  # kept block -> its physical block (``SharedBlocks``)
        self.longest = math.inf  # prompts with more tokens share nothing

    def path(self, request: int) -> list[int]:
        """Return the full blocks of a request's prompt, without its last token: the request itself must compute that
        token to sample from it."""
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
        """Return the leading blocks of a request's prompt that another known prompt also has, or that are kept."""
        path, known, resident, length = self.path(request), self._known, self.resident, 0
        for block in path:
            if known[block] < FEWEST_SHARERS and block not in resident:
                break
            length += 1
        return path[:length] if length >= LEAST_BLOCKS else []

    def forget(self, request: int) -> None:
        """Forget a request's prompt."""
        for block in self._paths.pop(request, ()):
            self._known[block] -= 1
            self.drop(block)

    def drop(self, block: int) -> None:
        """Remove a block that no known prompt has and that is not kept."""
        if not self._known[block] and block not in self.resident:
            del self._known[block]
            del self._blocks[self._keys.pop(block)]


class PrefixOrder:
    """Orders waiting requests so that they join mini-batches whose members share their prefix. PATIENCE limits how
    often the first request is passed over: if there is room, the request at position i joins after at most (i + 1) *
    PATIENCE others."""

    def __init__(self, tree: PromptTree):
        self.tree = tree
        self.first, self.passed = -1, 0  # the first waiting request, and the number of requests that joined before it

    def order(self, ready: list[int], members: Mapping[int, int]) -> list[int]:
        """Return waiting requests in the order in which a mini-batch takes them: those without shared blocks, then
        those that share the most with its members. ``members``: shared block -> number of members with it."""
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


class Build(NamedTuple):
    """Shared blocks [first, last) that the request in a place computes or stores for all requests that share them."""

    place: int
    first: int
    last: int
    level: int  #: order among the builds of an iteration: it may need blocks of lower levels


class SharedBlocks:
    """Owns the shared blocks of a wave, which are the first of each pool, and knows which requests use them.

    Unused blocks are kept until their room is needed. Layers with a window keep all shared blocks, because the contexts
    of different requests continue them at different points.

    ``exact``: blocks are stored in native bits. Then they are computed once, in steps of their own, before the prompts.
    With fewer bits, a prompt after stored blocks would get other tokens than alone. So each prompt is computed whole,
    and the first one stores the shared blocks.
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
        self.piece_blocks = piece_blocks  # most blocks of a prompt that one step computes or stores
        self.depth = np.zeros(num_places, dtype=np.int64)  # number of leading blocks that each place shares
        self.stored_before = np.zeros(num_places, dtype=np.int64)  # part of ``depth`` that other requests have stored
        self.table = np.zeros((num_places, 1), dtype=np.int64)  # physical shared blocks, [places, largest depth]
        self.builds: list[Build] = []  # builds of the iteration that is planned
        self.num_tokens = 0  # prompt tokens that requests did not compute, or store, because others had
        # Mini-batch -> (key of its requests and their blocks in its latest step, the step's ``steps.Common``).
        self.commons: dict[int, tuple[tuple[bytes, ...], tuple]] = {}
        self._levels: dict[int, int] = {}  # block that ``builds`` compute -> level
        self._members: dict[int, int] = defaultdict(int)  # block -> number of places that use it
        self._path: dict[int, list[int]] = {}  # place -> its shared blocks
        self._idle: dict[int, None] = {}  # unused blocks, in the order in which they are dropped
        self._entries: list[int] = []  # entry of a prompt's block 0, 1, …
        self._resident = tree.resident = {}  # kept block -> its physical block

    def attach(self, place: int, path: list[int]) -> None:
        """Let the request in a place share the blocks ``path`` (``PromptTree.shared``): blocks that are kept, and new
        ones that it will compute. Without room for all, it shares the first ones."""
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
        """Give a new block a physical block, if necessary by dropping unused ones; return False without room."""
        pool = self.blocks.pools[entry]
        while not pool.num_free and self._idle:
            self._release(next(iter(self._idle)))
        if not pool.num_free:
            return False
        self._resident[block] = pool.take(block, 1)[0].first
        self._members[block] = 1
        return True

    def _release(self, block: int) -> None:
        """Drop a block and free its physical block."""
        self._idle.pop(block, None)
        del self._members[block], self._resident[block]
        self.blocks.release(block)
        self.tree.drop(block)

    def detach(self, place: int) -> None:
        """End the use of shared blocks by the request in a place. Blocks that it has not computed yet are dropped, so
        joining requests that are turned back must be detached in reverse order."""
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
        """Return the builds of these places, by level, and remove them: their blocks count as computed from now on."""
        builds = sorted((build for build in self.builds if build.place in places), key=lambda build: build.level)
        self.builds = [build for build in self.builds if build.place not in places]
        self._levels = self._levels if self.builds else {}
        return builds

    def check(self) -> None:
        """Raise AssertionError if a block is lost, held twice or counted wrongly."""
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
    """Yield (first, last, rows) for the longest runs of columns [first, last) in which the same rows are equal.
    ``table``: blocks [B, most]; row b has the first ``depth[b]``. A run ends where rows differ or a row ends."""
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
    """Return the number of different blocks of each entry, [entry], in a table [B, most] whose row b has the first
    ``depth[b]`` blocks."""
    columns = np.arange(table.shape[1])
    chosen, num_entries = columns < depth[:, None], len(entries.names)
    named = table * num_entries + entries.entry_of(columns * BLOCK_TOKENS)
    return np.bincount(np.unique(named[chosen]) % num_entries, minlength=num_entries)


def build_steps(builds: Iterable[Build], max_rows: int) -> list[list[Build]]:
    """Group a mini-batch's builds, sorted by level, into steps of one level. A step has at most ``max_rows`` padded
    rows, or one build."""
    steps: list[list[Build]] = []
    for build in builds:
        together = [*steps[-1], build] if steps and steps[-1][0].level == build.level else []
        if together and padded_rows(together) <= max_rows:
            steps[-1] = together
        else:
            steps.append([build])
    return steps


def padded_rows(builds: Sequence[Build]) -> int:
    """Return the padded rows of a step that computes these builds."""
    return len(builds) * max(build.last - build.first for build in builds) * BLOCK_TOKENS
