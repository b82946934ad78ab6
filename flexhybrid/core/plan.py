"""The stream of tasks of a wave, in FlexGen's zig-zag (column) order or row by row (core/positions.py).

While a position computes, the link loads a slice of the next group's weights and the next position's cache. There is no
edge between iterations: the last group of iteration i carries the first loads of weights of iteration i + 1, and of the
cache where nobody may stop in it. A request leaves when it has its tokens. Where it may stop by itself, iteration i + 1
is settled with the stops of iteration i but for those of its last positions, which are still queued then: who stops in
these leaves one iteration late (``positions.num_awaited``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby
from operator import itemgetter
from typing import NamedTuple

from flexhybrid.core.context.selection import first_choosing
from flexhybrid.core.schedule import places
from flexhybrid.core.schedule.places import Places, cell, host_hidden
from flexhybrid.core.schedule.positions import NO_STOPS, Group, Position, Stops, positions
from flexhybrid.core.task import RESOURCES, Access, Task, Work
from flexhybrid.core.verbs import RESOURCE_OF
from flexhybrid.core.wave import Wave

PAGE_BYTES = 4096  #: slices of a streamed layer end on whole pages
LOADS_OF_ACT = ("read_act", "load_act")

Accesses = tuple[Access, ...]
Outline = tuple[str, Accesses, Accesses]  #: a task's verb, reads and writes


class WeightSlice(NamedTuple):
    """Bytes [start, end) of a layer on their way from the host to a device slot; the payload of load_weights.

    Of a layer that lies partly on the disk, bytes [disk_start, disk_end) come along by way of staging.
    """

    slot: int
    start: int
    end: int
    disk_start: int = 0
    disk_end: int = 0


def stream(wave: Wave, stops: Stops = NO_STOPS, first_iteration: int = 0) -> Iterator[Task]:
    """The tasks of a wave in stream order, from the first prompt token to the last sampled one.

    ``first_iteration`` 1 starts at the first decode iteration, over a cache that is already filled.

    ``stops``: who stops by itself. It is asked once an iteration, when every task is handed out that the answer hangs
    on, and may block until it is known.
    """
    return _Stream(wave, stops).tasks(first_iteration)


def numbered_stream(wave: Wave) -> Iterator[tuple[int, Task]]:
    """``stream`` where nobody stops, with the number, from 1, of the position during which a task is handed out."""
    state = _Stream(wave, NO_STOPS)
    return ((state.number, task) for task in state.tasks(0))


class Slice(NamedTuple):
    """A task that brings a slice of weights, without its key."""

    verb: str
    reads: Accesses
    writes: Accesses
    work: Work
    payload: WeightSlice


class Turn(NamedTuple):
    """Whose tasks are handed out while a position has its turn."""

    position: Position
    ahead: Position | None  #: the position behind it
    before: Position | None  #: the one before it, where its stores were held back
    following: Group | None  #: the next group, of whose weights a slice is loaded
    index: int  #: of the position in its group
    num_slices: int  #: positions of its group
    opened: bool  #: the turn before it has begun to compute the position


POSITION, AHEAD, BEFORE, FOLLOWING = range(4)  #: in a ``Turn``
#: Scripts that are kept at most. Where requests join one by one, which positions follow each other goes on changing.
MOST_SCRIPTS = 8192

#: Tasks without what their position says: verb, resource, reads and writes; loads of weights with work and payload.
Entries = tuple[tuple, ...]
#: A part of a script: the index in ``Turn`` of the position whose tasks these are, and the tasks.
Part = tuple[int, Iterable[tuple]]


class Script(NamedTuple):
    """The tasks of a turn. They are those of every turn whose positions have the same forms: the positions say the
    rest."""

    parts: tuple[tuple[int, Callable[..., list[Task]], Entries], ...]  #: whose, what makes them of what
    opens: bool  #: they begin to compute the position ahead
    holds: bool  #: the stores of the position are held back


def _tasks(position: Position, entries: Iterable[tuple]) -> list[Task]:
    """The tasks of a position that a script has."""
    step, works = position.step, position.works
    iteration, layer, k = step.iteration, position.layer, step.mini_batch
    return [
        _new(Task, (iteration, layer, k, verb, resource, works[verb], reads, writes, position))
        for verb, resource, reads, writes in entries
    ]


def _loads_of_weights(key: tuple[int, int, int], entries: Iterable[tuple]) -> list[Task]:
    """The tasks that bring weights; ``key``: iteration and layer that they are for, and a mini-batch."""
    return [_new(Task, (*key, *entry)) for entry in entries]


def _slice_key(group: Group, position: Position, index: int) -> tuple[int, int, int]:
    """The key of a group's slice of weights that comes in the turn of a position, the one with this index: it is named
    after the mini-batch that has the index in the group, or after the position's where the group is not settled."""
    if group.positions:
        position = group.positions[min(index, len(group.positions) - 1)]
    return group.iteration, group.layer, position.step.mini_batch


_new = tuple.__new__  #: half of what calling a NamedTuple takes


class _Stream:
    """The state of the stream. Emits tasks turn by turn."""

    def __init__(self, wave: Wave, stops: Stops):
        self.wave, self.stops = wave, stops
        self.num_layers = wave.shape.num_layers
        self.kinds = [wave.shape.weights_kind(layer) for layer in range(self.num_layers)]
        self.number = 1  # of the position at hand
        self.by_step = (
            wave.policy.overlap == "step"
        )  # with a barrier after each position: one for odd, one for even ones
        self.first_choosing = first_choosing(wave.policy.selection)
        # Bytes of each kind of layer that recomputing and projecting wait for; in natural order W_K and W_V come no
        # sooner.
        natural, layouts = wave.policy.weight_order == "natural", [placed.layout for placed in wave.placed]
        self.needed = [(of.total_bytes,) * 2 if natural else (of.kv_end, of.qkv_end) for of in layouts]
        self.at = Places(wave)
        self.slices: dict[tuple, Entries] = {}  # that bring a slice of weights
        self.of_parts: dict[tuple, Entries] = {}  # of the parts of positions
        self.scripts: dict[tuple, Script] = {}

    def tasks(self, first_iteration: int) -> Iterator[Task]:
        """The tasks in stream order."""
        groups = positions(self.wave, self.stops, first_iteration)
        current, before, opened = next(groups, None), None, False
        if current:
            first = current.positions[0]
            key = current.iteration, current.layer, first.step.mini_batch
            yield from _loads_of_weights(key, self._load_weights(current, 0, 1))
            yield from self._tasks_of(self._load_cache, first)
        while current:
            following, num_slices = next(groups, None), len(current.positions)
            upcoming = [*current.positions[1:], *(following.positions[:1] if following else ())]
            for index, position in enumerate(current.positions):
                ahead = upcoming[index] if index < len(upcoming) else None
                forms = position.form, ahead and ahead.form, before and before.form
                slices = following and 2 * self.kinds[following.layer] + following.weight_slot
                key = forms, slices, index, num_slices, opened, self.by_step and self.number % 2
                script = self.scripts.get(key)
                if script is None:
                    if len(self.scripts) >= MOST_SCRIPTS:
                        self.scripts.clear()
                    turn = Turn(position, ahead, before, following, index, num_slices, opened)
                    script = self.scripts[key] = self._script(turn)
                of = position, ahead, before, following and _slice_key(following, position, index)
                for whose, make, entries in script.parts:
                    yield from make(of[whose], entries)
                opened, before = script.opens, position if script.holds else None
                if following and not following.positions and index + 1 == num_slices:  # it is settled now
                    following = next(groups, None)
                    if ahead := following.positions[0] if following else None:
                        if before and self._loads_late(position, ahead) == "stored":
                            yield from self._tasks_of(self._store, before)
                            before = None
                        yield from self._tasks_of(self._load_cache, ahead)
                self.number += 1
            current = following
        if before:
            yield from self._tasks_of(self._store, before)

    def _script(self, turn: Turn) -> Script:
        """Write down the tasks of a turn."""
        position, ahead = turn.position, turn.ahead
        # What the position stores or selects now may be what the next one loads.
        late = self._loads_late(position, ahead) if ahead else None
        opens = ahead is not None and self._opens_early(position, ahead, turn.num_slices)
        holds = self.by_step and late != "stored"
        parts = []
        for whose, of in groupby(self._parts(turn, late, opens, holds), itemgetter(0)):
            entries = tuple(chain.from_iterable(part for _, part in of))
            parts.append((whose, _loads_of_weights if whose == FOLLOWING else _tasks, entries))
        return Script(tuple(part for part in parts if part[2]), opens, holds)

    def _entries(self, outlines: Iterable[Outline] | Iterable[Slice]) -> Iterator[tuple]:
        """Yield what a script has of tasks, with what keeps them in order where the policy lets them overlap less.

        With a barrier after each position, as FlexGen has one, they wait for all tasks of the position before. One at a
        time, every task passes through one cell, so that it waits for the one before.
        """
        for verb, reads, writes, *rest in outlines:
            resource = RESOURCE_OF[verb]
            if self.by_step:
                lane = RESOURCES.index(resource)
                reads = *reads, Access(("barrier", (self.number - 1) % 2), 0, len(RESOURCES))
                writes = *writes, Access(("barrier", self.number % 2), lane, lane + 1)
            elif self.wave.policy.overlap == "none":
                writes = *writes, Access(("turn",), 0, 1)
            yield verb, resource, *rest[:1], reads, writes, *rest[1:]  # work and payload of loads of weights

    def _parts(self, turn: Turn, late: str | None, opens: bool, holds: bool) -> Iterator[Part]:
        """Yield the tasks of a turn, each with whose it is."""
        position, ahead, before, following, *_, opened = turn
        if before:
            yield BEFORE, self._part(self._store, before)
        on_host = "attend_host" in position.works
        # What attention on the host gave comes before the weights: the device waits for it, and not yet for
        # them. Peers that meet after each step (FlexGen) load their weights first.
        weights_last = on_host and self.wave.policy.overlap == "full"
        cache = self._part(self._load_cache, ahead) if ahead and not late else ()
        yield from self._loads(turn, cache, weights_last)
        if not opened:
            yield POSITION, self._part(self._open, position)
        if ahead and opens:
            yield AHEAD, self._part(self._open, ahead)
        if ahead and late == "selected":
            yield AHEAD, self._part(self._load_cache, ahead)
        if on_host:
            yield POSITION, self._part(self._load_attended, position)
        if following and weights_last:
            yield FOLLOWING, self._load_weights(following, turn.index, turn.num_slices)
        yield POSITION, self._part(self._close, position)
        if not self.by_step:
            yield POSITION, self._part(self._store, position)
        if position.layer == self.num_layers - 1 and position.step.last:
            yield POSITION, self._part(self._sample, position)
        if self.by_step and not holds:
            yield POSITION, self._part(self._store, position)
        if ahead and late == "stored":
            yield AHEAD, self._part(self._load_cache, ahead)

    def _loads_late(self, position: Position, ahead: Position) -> str | None:
        """ "stored": the next position loads what this one stores; "selected": what it selects; None: neither."""
        if ahead.follows(position) and (ahead.layer == position.layer or "load_hidden" in ahead.works and ahead.layer):
            return "stored"
        return "selected" if "gather" in ahead.works else None

    def _opens_early(self, position: Position, ahead: Position, num_slices: int) -> bool:
        """With attention on the host, the next mini-batch projects while the host attends to this one; the first of the
        next layer only where what it reads came with the slices before the last of ``num_slices``, which comes later,
        and does not take the place of unpacked weights that this one still needs."""
        if "attend_host" not in position.works or "attend_host" not in ahead.works or ahead.follows(position):
            return False
        if not ahead.leads:
            return True
        if "dequantize_weights" in ahead.works:
            return False
        kind = self.wave.shape.weights_kind(ahead.layer)
        last = [_slice(*part, num_slices - 1, num_slices) for part in self._streamed(kind)]
        return all(start == end or start >= self.needed[kind][1] for start, end in last)

    def _streamed(self, kind: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The streamed bytes [start, end) of a kind of layer: those from the host, and those from the disk."""
        layout, streamed_from, disk_from = self.wave.placed[kind]
        return (streamed_from, disk_from), (disk_from, layout.total_bytes)

    # ---- the tasks of a position

    def _part(self, part: Callable[[Position], Iterator[Outline]], position: Position) -> Entries:
        """The tasks of a part of a position. What they read and write is the same in all positions of its form, and
        worked out in the first."""
        key = part.__name__, position.form, self.by_step and self.number % 2
        entries = self.of_parts.get(key)
        if entries is None:
            entries = self.of_parts[key] = tuple(self._entries(part(position)))
        return entries

    def _tasks_of(self, part: Callable[[Position], Iterator[Outline]], position: Position) -> list[Task]:
        """The tasks of a part of a position, outside of a script."""
        return _tasks(position, self._part(part, position))

    # ---- loads

    def _loads(self, turn: Turn, cache: Entries, weights_last: bool) -> Iterator[Part]:
        """The loads of a position: a slice of the next group's weights, then the next position's cache.

        ``kv_act_first``: ACT before the slice, and of a layer that comes at once W_K and W_V before it. Recomputing
        then runs while the rest of the weights and the keys and values cross the link (KVPR, Fig. 5b).
        """
        following, early = turn.following, self.wave.policy.weight_order == "kv_act_first"
        weights: Entries = ()
        cut = False
        if following and not weights_last:
            cut = early and turn.num_slices == 1 and self.wave.cuts_layer(following.layer)
            weights = self._load_weights(following, turn.index, turn.num_slices, cut)
        if early:
            yield FOLLOWING, weights[:1] if cut else ()
            yield AHEAD, [entry for entry in cache if entry[0] in LOADS_OF_ACT]
            weights, cache = weights[cut:], tuple(entry for entry in cache if entry[0] not in LOADS_OF_ACT)
        yield FOLLOWING, weights
        yield AHEAD, cache

    def _load_weights(self, group: Group, index: int, num_slices: int, cut: bool = False) -> Entries:
        """Slice of a group's streamed bytes: one slice a position of the group before keeps the link evenly busy.

        What lies on the host and what lies on the disk are sliced alike, so that the disk is evenly busy too. ``cut``:
        in two loads, what recomputing reads before the rest.
        """
        of = self.kinds[group.layer], group.weight_slot, index, num_slices, cut
        if (key := (*of, self.by_step and self.number % 2)) not in self.slices:
            self.slices[key] = tuple(self._entries(self._slice_tasks(*of)))
        return self.slices[key]

    def _slice_tasks(self, kind: int, slot: int, index: int, num_slices: int, cut: bool) -> Iterator[Slice]:
        """The tasks that bring a slice of a kind of layer."""
        layout, first, disk_first = self.wave.placed[kind]
        (low, high), (disk_start, disk_end) = (_slice(*part, index, num_slices) for part in self._streamed(kind))
        on_disk = disk_end - disk_start
        for start, end in ((low, layout.kv_end), (layout.kv_end, high)) if cut else ((low, high),):
            if end - start + on_disk == 0:
                return
            payload = WeightSlice(slot, start, end, disk_start, disk_end)
            reads: tuple[Access, ...] = ()
            writes = places.bytes_of_slot(slot, start - first, end - first)
            if on_disk:
                reads = (Access(("weights_staging", slot), disk_start - disk_first, disk_end - disk_first),)
                writes += places.bytes_of_slot(slot, disk_start - first, disk_end - first)
                yield Slice("read_weights", (), reads, Work(link_bytes=on_disk, num_copies=1), payload)
            moved = Work(link_bytes=end - start + on_disk, num_copies=len(writes))
            yield Slice("load_weights", reads, writes, moved, payload)

    def _load_cache(self, ahead: Position) -> Iterator[Outline]:
        """ACT before KV: recomputing comes before assembling. Disk blocks go through staging."""
        step, slot, works = ahead.step, ahead.slot, ahead.works
        if "park" in works:  # before those who take their blocks write them
            yield "park", self.at.own_pools(ahead), (self.at.parked(ahead),)
        if "unpark" in works:
            yield "unpark", (self.at.parked(ahead),), self.at.own_pools(ahead)
        if "load_hidden" in works and ahead.layer:
            yield "load_hidden", (host_hidden(step),), (self.at.hidden(ahead),)
        if "load_state" in works:
            yield "load_state", (self.at.state(ahead),), (cell("state_buffer", slot),)
        if "load_keys" in works and self._guesses(ahead.layer):
            keys = cell("partial_keys", step.mini_batch, ahead.layer + 1)
            yield "load_keys", (keys,), (cell("partial_buffer", slot),)
        if "gather" in works:
            gathered = cell("gathered", slot)
            index = cell("host_index", step.mini_batch)
            pools = (*self.at.pools(ahead, "act", "host"), *self.at.pools(ahead, "kv", "host"))
            yield "gather", (index, *pools), (gathered,)
            for representation in ("act", "kv"):
                if f"load_{representation}" in works:
                    buffer = cell(f"{representation}_buffer", slot)
                    yield f"load_{representation}", (gathered,), (buffer,)
            return
        for representation in ("act", "kv"):
            if f"load_{representation}" not in works:
                continue
            reads = self.at.pools(ahead, representation, "host")
            if f"read_{representation}" in works:
                staged = cell(f"{representation}_staging", slot)
                pools = self.at.pools(ahead, representation, "disk")
                yield f"read_{representation}", pools, (staged,)
                reads = (*reads, staged)
            buffer = cell(f"{representation}_buffer", slot)
            yield f"load_{representation}", reads, (buffer,)

    # ---- computing

    def _open(self, position: Position) -> Iterator[Outline]:
        """One mini-batch in one layer up to its queries: embedding, recomputing, projecting, speculating."""
        step, layer, works = position.step, position.layer, position.works
        kind, slot, k = self.wave.shape.weights_kind(layer), position.slot, step.mini_batch
        kv_end, qkv_end = self.needed[kind]
        hidden, qkv = self.at.hidden(position), self.at.qkv(position)
        if layer == 0:
            yield "embed", (cell("tokens", k),), (hidden,)
        if "dequantize_weights" in works and position.leads:
            weights = self.at.weights(position, 0, self.wave.placed[kind].layout.total_bytes)
            yield "dequantize_weights", weights, places.PLAIN
        if "kv_gen" in works:
            buffer = cell("act_buffer", slot)
            pools = self.at.pools(position, "act", "device")
            reads, writes = (buffer, *self.at.matrices(position, 0, kv_end)), (places.GENERATED,)
            if "dequantize_act" in works:
                yield "dequantize_act", (buffer, *pools), (places.PLAIN_ACT,)
                reads = (*reads, places.PLAIN_ACT)
            elif pools:  # gathered into the buffer, beside what the link brought
                reads, writes = (*reads, *pools), (*writes, buffer)
            yield "kv_gen", reads, writes
        if "project" not in works:  # the layer does not attend: all of it is in finish
            return
        staging, matrices = cell("staging", slot), self.at.matrices(position, 0, qkv_end)
        writes = (qkv,) if self.wave.shape.borrows(layer) else (qkv, staging)
        if layer >= self.first_choosing and not step.prefill:  # the new tokens' partial keys
            writes += (cell("partial_keys", k, layer),)
        states = self.at.computed_states(position)
        yield "project", (hidden, *matrices, *states), (*writes, *states)
        if "quantize" in works:
            yield "quantize", (qkv,), (staging,)
        ranks = (self.at.ranks(position),) if "rank" in works else ()
        if ranks and step.prefill:  # only now it is known which rows stay
            yield "rank", (qkv,), (*ranks, staging)
        if "speculate" in works and step.prefill and layer >= self.first_choosing:
            yield "speculate", (qkv, *ranks, *matrices), (cell("partial_keys", k, layer),)
        elif "speculate" in works and not step.prefill and self._guesses(layer):
            yield from self._speculate(position, qkv)
        if "attend_host" in works:
            yield from self._attend_on_host(position, qkv)

    def _guesses(self, layer: int) -> bool:
        """Whether a layer's input guesses what the next one looks at."""
        return self.first_choosing <= layer + 1 < self.num_layers

    def _speculate(self, position: Position, qkv: Access) -> Iterator[Outline]:
        """The next layer's choice, from this layer's input; its index goes to the host, which gathers the rows."""
        k, slot = position.step.mini_batch, position.slot
        keys = cell("partial_keys", k, position.layer + 1)
        source = cell("partial_buffer", slot) if "load_keys" in position.works else keys
        index = cell("index", k)
        yield "speculate", (qkv, source), (index,)
        yield "store_index", (index,), (cell("host_index", k),)

    def _attend_on_host(self, position: Position, qkv: Access) -> Iterator[Outline]:
        slot = position.slot
        query, out = cell("query_strip", slot), cell("out_strip", slot)
        yield "store_query", (qkv,), (query,)
        stores = () if self.wave.shape.borrows(position.layer) else position.step.stores
        own = tuple(self.at.pool(position, store.entry, store.representation) for store in stores)
        pools = self.at.pools(position, "kv", "host")
        yield "attend_host", (query, *pools), (out, *own)
        if "attend_host_shared" in position.works:
            yield "attend_host_shared", (query, out, *pools), (out,)

    def _load_attended(self, position: Position) -> Iterator[Outline]:
        yield "load_attended", (cell("out_strip", position.slot),), (self.at.attended(position),)

    def _close(self, position: Position) -> Iterator[Outline]:
        """The rest of what it computes: attention and feed-forward."""
        step, works = position.step, position.works
        layout = self.wave.placed_of(position.layer).layout
        hidden, qkv, states = self.at.hidden(position), self.at.qkv(position), self.at.computed_states(position)
        if "project" not in works:
            yield "finish", (hidden, *self.at.matrices(position, 0, layout.total_bytes), *states), (hidden, *states)
            return
        if step.prefill:
            yield "attend_prefill", (qkv,), (self.at.attended(position),)
        elif "attend_host" not in works:
            yield from self._attend(position, qkv)
        if "rank" in works and not step.prefill:
            yield "rank", (self.at.attended(position), qkv), (self.at.ranks(position),)
        reads = (self.at.attended(position), hidden, *self.at.matrices(position, 0, layout.vectors_end))
        reads += self.at.matrices(position, layout.qkv_end, layout.total_bytes)
        yield "finish", (*reads, *states), (hidden, *states)

    def _attend(self, position: Position, qkv: Access) -> Iterator[Outline]:
        works, slot = position.works, position.slot
        buffer = cell("kv_buffer", slot)
        pools = self.at.pools(position, "kv", "device")
        reads = (qkv,)
        if "kv_gen" in works:
            reads += (places.GENERATED,)
        if "dequantize_kv" in works:
            yield "dequantize_kv", (buffer, *pools), (places.PLAIN_KV,)
            reads += (places.PLAIN_KV,)
        else:
            reads += ((buffer,) if "load_kv" in works else ()) + pools
        if "assemble" in works:
            yield "assemble", reads, (places.ATTENTION,)
            reads = (qkv, places.ATTENTION)
        attended = self.at.attended(position)
        yield "attend_chunk" if "attend_chunk" in works else "attend", reads, (attended,)
        if "attend_shared" in works:
            yield "attend_shared", (*reads, attended), (attended,)
        if "attend_recomputed" in works:
            yield "attend_recomputed", (qkv, places.ATTENTION), (places.ATTENDED,)

    def _store(self, position: Position) -> Iterator[Outline]:
        """New tokens: staging -> landing strip over the link, strip -> blocks by a host core or the disk; or on the
        device. Hidden states that live on the host follow."""
        works, slot, step = position.works, position.slot, position.step
        staging, ranks = cell("staging", slot), (self.at.ranks(position),) if "rank" in works else ()
        strips = {r: cell(f"{r}_strip", slot) for r in ("act", "kv") if f"store_{r}" in works}
        for representation, strip in strips.items():
            yield f"store_{representation}", (staging, *ranks), (strip,)

        def pools(tier: str, *representations: str) -> tuple[Access, ...]:
            return tuple(
                self.at.pool(position, store.entry, store.representation, shared)
                for store in step.stores
                for shared, written in ((False, store.own), (True, store.shared))
                if written and store.tier == tier and store.representation in representations
            )

        if "scatter" in works:
            to_host = tuple(strip for r, strip in strips.items() if pools("host", r))
            yield "scatter", to_host, pools("host", "act", "kv")
        if "scatter_device" in works:
            yield "scatter_device", (staging, *ranks), pools("device", "act", "kv")
        for representation, strip in strips.items():
            if f"write_{representation}" in works:
                pool = pools("disk", representation)
                yield f"write_{representation}", (strip,), pool
        if "store_state" in works:
            yield "store_state", (cell("state_buffer", slot),), (self.at.state(position),)
        if "store_hidden" in works and position.layer < self.num_layers - 1:
            yield "store_hidden", (self.at.hidden(position),), (host_hidden(step),)

    def _sample(self, position: Position) -> Iterator[Outline]:
        """The next token, from the last layer's hidden states."""
        k, hidden = position.step.mini_batch, self.at.hidden(position)
        tokens = cell("tokens", k)
        yield "head", (hidden,), (places.LOGITS,)
        yield "sample", (places.LOGITS,), (tokens,)
        yield "store_out", (tokens,), (cell("token_log", k),)


def _slice(first: int, last: int, index: int, num_slices: int) -> tuple[int, int]:
    """[start, end) of one of so many slices of bytes [first, last): whole pages, as even as they allow. Where pages are
    fewer than slices, the empty ones lie between the others, so that the link is evenly busy all the same."""
    pages = -(-(last - first) // PAGE_BYTES)
    start, end = (first + -(-pages * i // num_slices) * PAGE_BYTES for i in (index, index + 1))
    return min(last, start), min(last, end)
