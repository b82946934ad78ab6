"""The stream of tasks of a wave, in FlexGen's zig-zag (column) order or row by row (``schedule/positions.py``).

While a position computes, the link loads a slice of the next layer group's weights and the next position's cache.
Iterations overlap: the first weights of iteration i + 1 are loaded during the last group of iteration i. So is its
first cache, unless a request may stop.

A request leaves when it has all its tokens. If it may stop earlier, iteration i + 1 is settled, that is, its requests
are chosen, while the last positions of iteration i are still queued. A stop in these positions takes effect one
iteration late (``positions.num_awaited``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from flexhybrid.core import work
from flexhybrid.core.schedule import accesses
from flexhybrid.core.schedule.positions import NO_STOPS, LayerGroup, Position, Stops, positions
from flexhybrid.core.schedule.templates import Accesses, Template, Templates
from flexhybrid.core.task import RESOURCES, Access, Task, Work
from flexhybrid.core.verbs import RESOURCE_OF
from flexhybrid.core.wave import Wave

PAGE_BYTES = 4096  #: slices of a streamed layer end at whole pages
LOADS_OF_ACT = ("read_act", "load_act")


class WeightSlice(NamedTuple):
    """Payload of a load_weights task: bytes [start, end) of a layer are copied from the host to a device slot. If the
    layer is partly on the disk, bytes [disk_start, disk_end) are copied too, through staging."""

    slot: int
    start: int
    end: int
    disk_start: int = 0
    disk_end: int = 0


class ExpertRows(NamedTuple):
    """Payload of an experts task: the positions whose rows are multiplied with a layer's experts."""

    weight_slot: int
    positions: Sequence[Position]


def part_starts(num_positions: int, batch: int) -> list[int]:
    """Return the first position of each part of a layer's positions that has its experts together. ``batch``: see
    ``Experts.batch``."""
    parts = min(batch, num_positions)
    return [-(-num_positions * part // parts) for part in range(parts)]


def stream(wave: Wave, stops: Stops = NO_STOPS, first_iteration: int = 0) -> Iterator[Task]:
    """Yield the tasks of a wave in stream order, from the first prompt token to the last sampled one.

    ``stops``: reports requests that stop early. It is called once per iteration, after all tasks on which its result
    depends, and may block. ``first_iteration``: 1 starts at the first decode iteration, with a filled cache.
    """
    return _Stream(wave, stops).tasks(first_iteration)


def numbered_stream(wave: Wave) -> Iterator[tuple[int, Task]]:
    """Yield (position number from 1, task) of ``stream`` if no request stops early."""
    state = _Stream(wave, NO_STOPS)
    return ((state.number, task) for task in state.tasks(0))


class PositionContext(NamedTuple):
    """A position and its neighbours in the stream: all that decides which tasks are yielded while it is computed."""

    position: Position
    ahead: Position | None  #: the next position
    before: Position | None  #: the previous position, if its stores were held back
    following: LayerGroup | None  #: the next group; a slice of its weights is loaded
    index: int  #: index of the position in its group
    num_slices: int  #: number of positions in its group
    opened: bool  #: the device already began to compute the position during the previous one


POSITION, AHEAD, BEFORE, FOLLOWING = range(4)  #: owners of tasks, as indices into ``PositionContext``
#: Most recordings that are kept. If requests join one by one, the order of positions changes again and again.
MOST_RECORDINGS = 8192

#: Tasks without the fields that depend on the position: (verb, resource, reads, writes), for loads of weights also work
#: and payload.
Entries = tuple[tuple, ...]
#: A part of a recording: (owner of the tasks, entries of the tasks).
Part = tuple[int, Sequence[tuple]]


class RecordedTasks(NamedTuple):
    """The recorded tasks of a position and its context, reused for all positions with a context of the same forms."""

    parts: tuple[tuple[int, Callable[..., list[Task]], Entries], ...]  #: (owner, function, its argument)
    opens: bool  #: the tasks begin to compute the next position
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
    """Make the tasks that load weights. ``key``: (iteration, layer, mini-batch)."""
    return [_new(Task, (*key, *entry)) for entry in entries]


def _slice_key(group: LayerGroup, position: Position, index: int) -> tuple[int, int, int]:
    """Return (iteration, layer, mini-batch) of the slice of a group's weights that is loaded during ``position``. The
    mini-batch is the group's with this index, or the position's if the group is not settled."""
    if group.positions:
        position = group.positions[min(index, len(group.positions) - 1)]
    return group.iteration, group.layer, position.step.mini_batch


_new = tuple.__new__  #: halves the time of making a NamedTuple


class _Stream:
    """Yields the tasks of a stream, position by position."""

    def __init__(self, wave: Wave, stops: Stops):
        self.wave, self.stops = wave, stops
        self.kinds = [wave.shape.weights_kind(layer) for layer in range(wave.shape.num_layers)]
        self.number = 1  # number of the current position
        self.by_step = wave.policy.overlap == "step"  # a barrier between positions, as in FlexGen
        self.one_by_one = wave.policy.overlap == "none"
        self.templates = Templates(wave)
        # Recorded entries, by everything that they depend on: of slices of weights, parts of positions, and positions.
        self.slices: dict[tuple, Entries] = {}
        self.parts: dict[tuple, Entries] = {}
        self.recordings: dict[tuple, RecordedTasks] = {}
        self.experts = _Experts(wave)

    def tasks(self, first_iteration: int) -> Iterator[Task]:
        """Yield the tasks in stream order."""
        groups = positions(self.wave, self.stops, first_iteration)
        current, before, opened = next(groups, None), None, False
        if current:
            first = current.positions[0]
            yield from _loads_of_weights(_slice_key(current, first, 0), self._load_weights(current, 0, 1))
            yield from self.tasks_of(self.templates.load_cache, first)
        while current:
            following, num_slices = next(groups, None), len(current.positions)
            parts = self.experts.parts(current)
            upcoming = [*current.positions[1:], *(following.positions[:1] if following else ())]
            for index, position in enumerate(current.positions):
                ahead = upcoming[index] if index < len(upcoming) else None
                forms = position.form, ahead and ahead.form, before and before.form
                slices = following and 2 * self.kinds[following.layer] + following.weight_slot
                key = forms, slices, index, num_slices, opened, self.by_step and self.number % 2
                recording = self.recordings.get(key)
                if recording is None:
                    if len(self.recordings) >= MOST_RECORDINGS:
                        self.recordings.clear()
                    around = PositionContext(position, ahead, before, following, index, num_slices, opened=opened)
                    recording = self.recordings[key] = self._record(around)
                owners = position, ahead, before, following and _slice_key(following, position, index)
                for owner, make, entries in recording.parts:
                    yield from make(owners[owner], entries)
                opened, before = recording.opens, position if recording.holds else None
                if index in parts:
                    yield from self.experts.tasks(self, current, parts[index])
                if following and not following.positions and index + 1 == num_slices:  # the group is settled now
                    following = next(groups, None)
                    if ahead := following.positions[0] if following else None:
                        if before and self._loads_late(position, ahead) == "stored":
                            yield from self.tasks_of(self.templates.store, before)
                            before = None
                        yield from self.tasks_of(self.templates.load_cache, ahead)
                self.number += 1
            current = following
        if before:
            yield from self.tasks_of(self.templates.store, before)

    def _record(self, around: PositionContext) -> RecordedTasks:
        """Record the tasks of a position, with what decides them around it."""
        position, ahead = around.position, around.ahead
        late = self._loads_late(position, ahead) if ahead else None
        opens = ahead is not None and self._opens_early(position, ahead, around.num_slices)
        holds = self.by_step and late != "stored"
        parts: list[tuple[int, list[tuple]]] = []
        for owner, entries in self._recorded_parts(around, late, opens, holds):
            if entries and parts and parts[-1][0] == owner:
                parts[-1][1].extend(entries)
            elif entries:
                parts.append((owner, [*entries]))
        made = ((owner, _loads_of_weights if owner == FOLLOWING else _tasks, tuple(part)) for owner, part in parts)
        return RecordedTasks(tuple(made), opens, holds)

    def _entry(self, verb: str, reads: Accesses, writes: Accesses) -> tuple[str, str, Accesses, Accesses]:
        """Return a task's entry, with the accesses that order tasks under policies with less overlap.

        For overlap "step", accesses to barrier cells make all tasks of a position wait for the previous position's. For
        "none", all tasks write the same cell, so they run one after another.
        """
        resource = RESOURCE_OF[verb]
        if self.by_step:
            index = RESOURCES.index(resource)
            reads = *reads, Access(("barrier", (self.number - 1) % 2), 0, len(RESOURCES))
            writes = *writes, Access(("barrier", self.number % 2), index, index + 1)
        elif self.one_by_one:
            writes = *writes, Access(("turn",), 0, 1)
        return verb, resource, reads, writes

    def _recorded_parts(self, around: PositionContext, late: str | None, opens: bool, holds: bool) -> Iterator[Part]:
        """Yield the parts in stream order. ``late``: see ``_loads_late``; ``opens``, ``holds``: ``RecordedTasks``."""
        position, ahead, before, following, *_, opened = around
        if before:
            yield BEFORE, self._part(self.templates.store, before)
        on_host = "attend_host" in position.works
        # The host's attention output crosses before the weights, because the device needs it first. FlexGen loads
        # weights first, because it synchronizes after each position.
        weights_last = on_host and self.wave.policy.overlap == "full"
        cache = self._part(self.templates.load_cache, ahead) if ahead and not late else ()
        yield from self._loads(around, cache, weights_last)
        if not opened:
            yield POSITION, self._part(self.templates.open, position)
        if ahead and opens:
            yield AHEAD, self._part(self.templates.open, ahead)
        if ahead and late == "selected":
            yield AHEAD, self._part(self.templates.load_cache, ahead)
        if on_host:
            yield POSITION, self._part(self.templates.load_attended, position)
        if following and weights_last:
            yield FOLLOWING, self._load_weights(following, around.index, around.num_slices)
        yield POSITION, self._part(self.templates.close, position)
        if not self.by_step:
            yield POSITION, self._part(self.templates.store, position)
        if self.samples(position) and "route" not in position.works:
            yield POSITION, self._part(self.templates.sample, position)
        if self.by_step and not holds:
            yield POSITION, self._part(self.templates.store, position)
        if ahead and late == "stored":
            yield AHEAD, self._part(self.templates.load_cache, ahead)

    def _loads_late(self, position: Position, ahead: Position) -> str | None:
        """Return "stored" or "selected" if the next position loads data that this one stores or selects, else None."""
        if ahead.follows(position) and (ahead.layer == position.layer or "load_hidden" in ahead.works and ahead.layer):
            return "stored"
        return "selected" if "gather" in ahead.works else None

    def _opens_early(self, position: Position, ahead: Position, num_slices: int) -> bool:
        """Return whether the device projects the next position while the host attends for this one.

        At the first position of a layer, two things can prevent it: packed weights, because this layer's unpacked ones
        are still in use, and a last slice (of ``num_slices``) with bytes that projection reads.
        """
        if "attend_host" not in position.works or "attend_host" not in ahead.works or ahead.follows(position):
            return False
        if ahead.leads and "route" in position.works:  # the layer before waits for its experts
            return False
        if not ahead.leads or "dequantize_weights" in ahead.works:
            return not ahead.leads
        kind = self.kinds[ahead.layer]
        last = [_slice(*part, num_slices - 1, num_slices) for part in self.wave.placed[kind].streamed_parts]
        return all(start == end or start >= self.templates.needed[kind][1] for start, end in last)

    def samples(self, position: Position) -> bool:
        """Return whether a token is sampled after the position."""
        return position.layer == self.wave.shape.num_layers - 1 and position.step.last

    # ---- the tasks of a position

    def _part(self, part: Callable[[Position], Iterator[Template]], position: Position) -> Entries:
        """Return the entries of a part of a position, which are equal for all positions of a form."""
        key = part.__name__, position.form, self.by_step and self.number % 2
        entries = self.parts.get(key)
        if entries is None:
            entries = self.parts[key] = tuple(self.entries(part(position)))
        return entries

    def entries(self, templates: Iterable[Template]) -> Iterator[tuple]:
        """Yield the entries of templates (``_entry``)."""
        return (self._entry(*template) for template in templates)

    def tasks_of(self, part: Callable[[Position], Iterator[Template]], position: Position) -> list[Task]:
        """Return the tasks of a part of a position, outside a recording."""
        return _tasks(position, self._part(part, position))

    # ---- loads

    def _loads(self, around: PositionContext, cache: Entries, weights_last: bool) -> Iterator[Part]:
        """Yield the loads during a position: a slice of the next group's weights, then the next position's cache.

        With ``kv_act_first``, W_K and W_V come first if the layer is not sliced, then ACT, then the other loads, with
        which recomputation overlaps (KVPR, Fig. 5b).
        """
        following, early = around.following, self.wave.policy.weight_order == "kv_act_first"
        weights, cut = (), False
        if following and not weights_last:
            cut = early and around.num_slices == 1 and self.wave.cuts_layer(following.layer)
            weights = self._load_weights(following, around.index, around.num_slices, cut)
        if early:
            yield FOLLOWING, weights[:1] if cut else ()
            yield AHEAD, [entry for entry in cache if entry[0] in LOADS_OF_ACT]
            weights, cache = weights[cut:], tuple(entry for entry in cache if entry[0] not in LOADS_OF_ACT)
        yield FOLLOWING, weights
        yield AHEAD, cache

    def _load_weights(self, group: LayerGroup, index: int, num_slices: int, cut: bool = False) -> Entries:
        """Return the loads of one slice of a group's streamed bytes.

        There is a slice for each position, of the bytes on the host and of those on the disk, so that link and disk are
        evenly busy. ``cut``: make two loads, W_K and W_V first.
        """
        slice_of = self.kinds[group.layer], group.weight_slot, index, num_slices, cut
        if (key := (*slice_of, self.by_step and self.number % 2)) not in self.slices:
            tasks = _slice_tasks(self.wave, *slice_of)
            made = ((self._entry(verb, reads, writes), *rest) for verb, reads, writes, *rest in tasks)
            self.slices[key] = tuple((*entry[:2], work, *entry[2:], payload) for entry, work, payload in made)
        return self.slices[key]


def _slice_tasks(wave: Wave, kind: int, slot: int, index: int, num_slices: int, cut: bool) -> Iterator[tuple]:
    """Yield the loads of a slice of a kind of layer: (verb, reads, writes, work, payload)."""
    layout, first, disk_first = wave.placed[kind]
    parts = wave.placed[kind].streamed_parts
    (low, high), (disk_start, disk_end) = (_slice(*part, index, num_slices) for part in parts)
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
            yield "read_weights", (), reads, Work(link_bytes=on_disk, num_copies=1), payload
        moved = Work(link_bytes=end - start + on_disk, num_copies=len(writes))
        yield "load_weights", reads, writes, moved, payload


class _Experts:
    """Makes the tasks of a layer after the last mini-batch of a part: its experts, and the rest of the layer."""

    def __init__(self, wave: Wave):  # not the stream: a cycle of references would keep a run's buffers
        self.wave = wave
        self.entries: dict[tuple, tuple] = {}  # by the forms of the part's positions

    def parts(self, group: LayerGroup) -> dict[int, Sequence[Position]]:
        """Return {index of a part's last position in the group: the part's positions}."""
        if not (batch := self.wave.policy.experts.batch):
            return {}
        routed = [index for index, position in enumerate(group.positions) if "route" in position.works]
        starts = part_starts(len(routed), batch)
        of_parts = (routed[start:end] for start, end in zip(starts, [*starts[1:], None], strict=False))
        return {part[-1]: [group.positions[index] for index in part] for part in of_parts}

    def tasks(self, stream: _Stream, group: LayerGroup, part: Sequence[Position]) -> Iterator[Task]:
        """Yield the experts of a part's positions, then the rest of the layer for each of them."""
        key = tuple([position.form for position in part]), stream.by_step and stream.number % 2
        if key not in self.entries:
            if len(self.entries) >= MOST_RECORDINGS:
                self.entries.clear()
            self.entries[key] = next(stream.entries(stream.templates.experts(part)))
        rows = sum(position.works["experts"].tokens for position in part)
        done = work.experts(self.wave.shape.of_weights(stream.kinds[group.layer]), self.wave.stored.compute, rows)
        verb, resource, reads, writes = self.entries[key]
        own = group.iteration, group.layer, part[0].step.mini_batch
        yield Task(*own, verb, resource, done, reads, writes, ExpertRows(group.weight_slot, part))
        for position in part:
            yield from stream.tasks_of(stream.templates.after_experts, position)
            if stream.samples(position):
                yield from stream.tasks_of(stream.templates.sample, position)


def _slice(first: int, last: int, index: int, num_slices: int) -> tuple[int, int]:
    """Return [start, end) of one slice of the bytes [first, last), in whole pages. With fewer pages than slices, empty
    slices are spread evenly."""
    pages = -(-(last - first) // PAGE_BYTES)
    start, end = (first + -(-pages * i // num_slices) * PAGE_BYTES for i in (index, index + 1))
    return min(last, start), min(last, end)
