"""The stream of tasks of a wave, in FlexGen's zig-zag (column) order or row by row (``schedule/positions.py``).

While a position computes, the link loads a slice of the next group's weights and the next position's cache. Iterations
overlap: the last group of iteration i carries the first weight loads of iteration i + 1, and the first cache loads
unless a request may stop. A request leaves when it has all its tokens. If it may stop earlier, iteration i + 1 is
settled while the last positions of iteration i are still queued, so a stop in these positions takes effect one
iteration late (``positions.num_awaited``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from flexhybrid.core.schedule import accesses
from flexhybrid.core.schedule.positions import NO_STOPS, LayerGroup, Position, Stops, positions
from flexhybrid.core.schedule.templates import Accesses, Template, Templates
from flexhybrid.core.task import RESOURCES, Access, Task, Work
from flexhybrid.core.verbs import RESOURCE_OF
from flexhybrid.core.wave import Wave

PAGE_BYTES = 4096  #: slices of a streamed layer end at whole pages
LOADS_OF_ACT = ("read_act", "load_act")


class WeightSlice(NamedTuple):
    """Bytes [start, end) of a layer that a load_weights task copies from the host to a device slot: its payload.

    Of a layer that is partly on the disk, bytes [disk_start, disk_end) come with them, through staging.
    """

    slot: int
    start: int
    end: int
    disk_start: int = 0
    disk_end: int = 0


def stream(wave: Wave, stops: Stops = NO_STOPS, first_iteration: int = 0) -> Iterator[Task]:
    """Yield the tasks of a wave in stream order, from the first prompt token to the last sampled one.

    ``first_iteration`` 1 starts at the first decode iteration, with a filled cache. ``stops`` names requests that stop
    early. It is asked once an iteration, after all tasks that its answer depends on were yielded, and may block.
    """
    return _Stream(wave, stops).tasks(first_iteration)


def numbered_stream(wave: Wave) -> Iterator[tuple[int, Task]]:
    """Yield (position number from 1, task) of ``stream`` when no request stops early."""
    state = _Stream(wave, NO_STOPS)
    return ((state.number, task) for task in state.tasks(0))


class Slice(NamedTuple):
    """A load of a slice of weights, without its key."""

    verb: str
    reads: Accesses
    writes: Accesses
    work: Work
    payload: WeightSlice


class Turn(NamedTuple):
    """A position, and what decides which tasks are yielded while it computes."""

    position: Position
    ahead: Position | None  #: the next position
    before: Position | None  #: the previous position, if its stores were held back
    following: LayerGroup | None  #: the next group, of whose weights a slice is loaded
    index: int  #: of the position in its group
    num_slices: int  #: positions of its group
    opened: bool  #: the previous turn already began to compute the position


POSITION, AHEAD, BEFORE, FOLLOWING = range(4)  #: in a ``Turn``
#: Limit of kept scripts. Requests that join one by one keep changing the order of positions.
MOST_SCRIPTS = 8192

#: Tasks without what the position adds: verb, resource, reads, writes; for weight loads also work and payload.
Entries = tuple[tuple, ...]
#: A part of a script: the index in ``Turn`` of the position that the tasks belong to, and the tasks.
Part = tuple[int, Sequence[tuple]]


class Script(NamedTuple):
    """The recorded tasks of a turn, reused for every turn whose positions have the same forms."""

    parts: tuple[tuple[int, Callable[..., list[Task]], Entries], ...]  #: (owner, function, its argument)
    opens: bool  #: they begin to compute the next position
    holds: bool  #: the stores of the position are held back


def _tasks(position: Position, entries: Iterable[tuple]) -> list[Task]:
    """Make the tasks of a position from their recorded entries."""
    step, works = position.step, position.works
    iteration, layer, k = step.iteration, position.layer, step.mini_batch
    return [
        _new(Task, (iteration, layer, k, verb, resource, works[verb], reads, writes, position))
        for verb, resource, reads, writes in entries
    ]


def _loads_of_weights(key: tuple[int, int, int], entries: Iterable[tuple]) -> list[Task]:
    """Make the tasks that load weights. ``key``: (iteration, layer) that they are for, and a mini-batch."""
    return [_new(Task, (*key, *entry)) for entry in entries]


def _slice_key(group: LayerGroup, position: Position, index: int) -> tuple[int, int, int]:
    """Return the key of the slice of a group's weights that is loaded with position number ``index``. The mini-batch in
    it is the group's own with that index, or the position's if the group is not settled."""
    if group.positions:
        position = group.positions[min(index, len(group.positions) - 1)]
    return group.iteration, group.layer, position.step.mini_batch


_new = tuple.__new__  #: halves the time of making a NamedTuple


class _Stream:
    """The state of a stream: yields tasks turn by turn."""

    def __init__(self, wave: Wave, stops: Stops):
        self.wave, self.stops = wave, stops
        self.num_layers = wave.shape.num_layers
        self.kinds = [wave.shape.weights_kind(layer) for layer in range(self.num_layers)]
        self.number = 1  # of the current position
        self.by_step = wave.policy.overlap == "step"  # a barrier between positions, as FlexGen has
        self.one_by_one = wave.policy.overlap == "none"
        self.templates = Templates(wave)
        self.slices: dict[tuple, Entries] = {}  # -> loads of a slice of weights
        self.of_parts: dict[tuple, Entries] = {}  # -> tasks of a part of a position
        self.scripts: dict[tuple, Script] = {}

    def tasks(self, first_iteration: int) -> Iterator[Task]:
        """The tasks in stream order."""
        groups = positions(self.wave, self.stops, first_iteration)
        current, before, opened = next(groups, None), None, False
        if current:
            first = current.positions[0]
            key = current.iteration, current.layer, first.step.mini_batch
            yield from _loads_of_weights(key, self._load_weights(current, 0, 1))
            yield from self._tasks_of(self.templates.load_cache, first)
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
                            yield from self._tasks_of(self.templates.store, before)
                            before = None
                        yield from self._tasks_of(self.templates.load_cache, ahead)
                self.number += 1
            current = following
        if before:
            yield from self._tasks_of(self.templates.store, before)

    def _script(self, turn: Turn) -> Script:
        """Record the tasks of a turn."""
        position, ahead = turn.position, turn.ahead
        # The next position may load what this one stores or selects.
        late = self._loads_late(position, ahead) if ahead else None
        opens = ahead is not None and self._opens_early(position, ahead, turn.num_slices)
        holds = self.by_step and late != "stored"
        parts: list[tuple[int, list[tuple]]] = []
        for whose, entries in self._parts(turn, late, opens, holds):
            if entries and parts and parts[-1][0] == whose:
                parts[-1][1].extend(entries)
            elif entries:
                parts.append((whose, [*entries]))
        made = ((whose, _loads_of_weights if whose == FOLLOWING else _tasks, tuple(of)) for whose, of in parts)
        return Script(tuple(made), opens, holds)

    def _entry(self, verb: str, reads: Accesses, writes: Accesses) -> tuple[str, str, Accesses, Accesses]:
        """Return a task's entry in a script, with the accesses that order tasks under policies with less overlap.

        overlap "step": a barrier after each position (FlexGen). overlap "none": all tasks access one cell, one after
        another.
        """
        resource = RESOURCE_OF[verb]
        if self.by_step:
            lane = RESOURCES.index(resource)
            reads = *reads, Access(("barrier", (self.number - 1) % 2), 0, len(RESOURCES))
            writes = *writes, Access(("barrier", self.number % 2), lane, lane + 1)
        elif self.one_by_one:
            writes = *writes, Access(("turn",), 0, 1)
        return verb, resource, reads, writes

    def _parts(self, turn: Turn, late: str | None, opens: bool, holds: bool) -> Iterator[Part]:
        """Yield the tasks of a turn, each with its owner."""
        position, ahead, before, following, *_, opened = turn
        if before:
            yield BEFORE, self._part(self.templates.store, before)
        on_host = "attend_host" in position.works
        # The host's attention output crosses before the weights, because the device waits for it first. FlexGen,
        # which synchronizes after each step, loads weights first.
        weights_last = on_host and self.wave.policy.overlap == "full"
        cache = self._part(self.templates.load_cache, ahead) if ahead and not late else ()
        yield from self._loads(turn, cache, weights_last)
        if not opened:
            yield POSITION, self._part(self.templates.open, position)
        if ahead and opens:
            yield AHEAD, self._part(self.templates.open, ahead)
        if ahead and late == "selected":
            yield AHEAD, self._part(self.templates.load_cache, ahead)
        if on_host:
            yield POSITION, self._part(self.templates.load_attended, position)
        if following and weights_last:
            yield FOLLOWING, self._load_weights(following, turn.index, turn.num_slices)
        yield POSITION, self._part(self.templates.close, position)
        if not self.by_step:
            yield POSITION, self._part(self.templates.store, position)
        if position.layer == self.num_layers - 1 and position.step.last:
            yield POSITION, self._part(self.templates.sample, position)
        if self.by_step and not holds:
            yield POSITION, self._part(self.templates.store, position)
        if ahead and late == "stored":
            yield AHEAD, self._part(self.templates.load_cache, ahead)

    def _loads_late(self, position: Position, ahead: Position) -> str | None:
        """Return "stored" or "selected" if the next position loads what this one stores or selects, else None."""
        if ahead.follows(position) and (ahead.layer == position.layer or "load_hidden" in ahead.works and ahead.layer):
            return "stored"
        return "selected" if "gather" in ahead.works else None

    def _opens_early(self, position: Position, ahead: Position, num_slices: int) -> bool:
        """Return whether the next position projects while the host attends to this one (attention on the host).

        For the first position of the next layer this needs all bytes that projection reads before the last of
        ``num_slices`` slices, and native weights: unpacked weights of this layer are still in use.
        """
        if "attend_host" not in position.works or "attend_host" not in ahead.works or ahead.follows(position):
            return False
        if not ahead.leads:
            return True
        if "dequantize_weights" in ahead.works:
            return False
        kind = self.kinds[ahead.layer]
        last = [_slice(*part, num_slices - 1, num_slices) for part in self._streamed(kind)]
        return all(start == end or start >= self.templates.needed[kind][1] for start, end in last)

    def _streamed(self, kind: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the streamed bytes [start, end) of a kind of layer: from the host, and from the disk."""
        layout, streamed_from, disk_from = self.wave.placed[kind]
        return (streamed_from, disk_from), (disk_from, layout.total_bytes)

    # ---- the tasks of a position

    def _part(self, part: Callable[[Position], Iterator[Template]], position: Position) -> Entries:
        """Return the entries of a part of a position, which are equal in all positions of a form."""
        key = part.__name__, position.form, self.by_step and self.number % 2
        entries = self.of_parts.get(key)
        if entries is None:
            entries = self.of_parts[key] = tuple([self._entry(*template) for template in part(position)])
        return entries

    def _tasks_of(self, part: Callable[[Position], Iterator[Template]], position: Position) -> list[Task]:
        """Return the tasks of a part of a position, outside a script."""
        return _tasks(position, self._part(part, position))

    # ---- loads

    def _loads(self, turn: Turn, cache: Entries, weights_last: bool) -> Iterator[Part]:
        """Yield the loads of a turn: a slice of the next group's weights, then the next position's cache.

        ``kv_act_first``: ACT first, then W_K and W_V if the layer is loaded at once, then the rest. Recomputation
        overlaps with the rest of the loads (KVPR, Fig. 5b).
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

    def _load_weights(self, group: LayerGroup, index: int, num_slices: int, cut: bool = False) -> Entries:
        """Return the loads of one slice of a group's streamed bytes; a slice per position keeps the link evenly busy.

        Bytes on the host and on the disk are sliced alike, so that the disk is evenly busy too. ``cut``: in two loads,
        the bytes for recomputation first.
        """
        of = self.kinds[group.layer], group.weight_slot, index, num_slices, cut
        if (key := (*of, self.by_step and self.number % 2)) not in self.slices:
            made = ((self._entry(verb, reads, writes), *rest) for verb, reads, writes, *rest in self._slice_tasks(*of))
            self.slices[key] = tuple((*entry[:2], work, *entry[2:], payload) for entry, work, payload in made)
        return self.slices[key]

    def _slice_tasks(self, kind: int, slot: int, index: int, num_slices: int, cut: bool) -> Iterator[Slice]:
        """Return the loads of a slice of a kind of layer."""
        layout, first, disk_first = self.wave.placed[kind]
        (low, high), (disk_start, disk_end) = (_slice(*part, index, num_slices) for part in self._streamed(kind))
        on_disk = disk_end - disk_start
        for start, end in ((low, layout.kv_end), (layout.kv_end, high)) if cut else ((low, high),):
            if end - start + on_disk == 0:
                return
            payload = WeightSlice(slot, start, end, disk_start, disk_end)
            reads: tuple[Access, ...] = ()
            writes = accesses.bytes_of_slot(slot, start - first, end - first)
            if on_disk:
                reads = (Access(("weights_staging", slot), disk_start - disk_first, disk_end - disk_first),)
                writes += accesses.bytes_of_slot(slot, disk_start - first, disk_end - first)
                yield Slice("read_weights", (), reads, Work(link_bytes=on_disk, num_copies=1), payload)
            moved = Work(link_bytes=end - start + on_disk, num_copies=len(writes))
            yield Slice("load_weights", reads, writes, moved, payload)


def _slice(first: int, last: int, index: int, num_slices: int) -> tuple[int, int]:
    """Return [start, end) of one slice of the bytes [first, last), in whole pages. If there are fewer pages than
    slices, empty slices are spread evenly between the others."""
    pages = -(-(last - first) // PAGE_BYTES)
    start, end = (first + -(-pages * i // num_slices) * PAGE_BYTES for i in (index, index + 1))
    return min(last, start), min(last, end)
