"""A run's stream in small: the planner's own tasks and dependencies for a few layers and mini-batches.

Kinds of layers repeat, all mini-batches but the last are alike, and iterations change slowly. So the order of tasks and
their dependencies follow from a template run. ``sim.array_clock`` walks it with the durations of the real run, many
policies at a time, and skips repetitions.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from flexhybrid.core.context.cache_entries import representation_of
from flexhybrid.core.context.selection import counts_uses, num_whole
from flexhybrid.core.context.split import SplitLines
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.layout import layer_layout
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.model.states import LayerState
from flexhybrid.core.plan import numbered_stream
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.dependencies import Dependencies
from flexhybrid.core.task import RESOURCES, Access, Task
from flexhybrid.core.verbs import RESOURCE_OF, VERBS
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Workload

#: Positions walked before and after a skip. A slow resource delays the next one two positions later (all buffers are
#: double), and the longest chain has three: compute, d2h, host core; disk, h2d, compute.
BEFORE, AFTER = 6, 4
LEAST_BEFORE, LEAST_AFTER = 4, 1  #: rounds of several positions each
MOST_PERIOD = 16  #: longest period of kinds of layers; with a longer one all layers are walked

#: Resident part of a layer: less than W_K and W_V; those; those and W_Q; all.
RESIDENT_CLASSES = (0, 1, 2, 3)
#: They do not matter.
LINES = {"compute": Line(s_per_flop=1.0), "h2d": Line(s_per_byte=1.0), "disk_read": Line(s_per_byte=1.0)}

#: Verbs that a step of the real run may lack although the template has them.
OPTIONAL = frozenset(verb.name for verb in VERBS.values() if verb.needs)
#: Lane of a verb's tasks: the verb itself if optional, else its resource.
LANE_OF = {name: name if name in OPTIONAL else resource for name, resource in RESOURCE_OF.items()}


class TaskKey(NamedTuple):
    """What the price of a template task depends on, besides its iteration."""

    verb: str
    first_load: bool  #: in the stream's first load of weights
    all_tokens: bool  #: in a layer that attends to all tokens although others select
    mini_batch: int
    kind: int  #: of its layer
    part: int = 0  #: part of weights that come in two loads: 1 the first, 2 the second; else 0


class TinyTask(NamedTuple):
    """A task of the template run."""

    resource: int  #: index into RESOURCES
    iteration: int
    key: TaskKey
    waits: tuple[int, ...]  #: indices of awaited tasks on other resources


_new = tuple.__new__  #: halves the time of making a NamedTuple


@dataclass(frozen=True)
class Loop:
    """One of the two nested loops of an iteration."""

    num_rounds: int  #: of the template run
    before_skip: int | None  #: rounds walked before the skip; None: the template has all rounds
    kinds: tuple[int, ...] = ()  #: kinds of the layers, by round; empty for a loop over mini-batches
    pace_rounds: int = 2  #: rounds whose mean is the rate: slots and kinds of layers alternate


@dataclass(frozen=True)
class TinyRun:
    """The tasks in stream order, and how positions nest: outer (column: layers) over inner (mini-batches)."""

    tasks: tuple[TinyTask, ...]
    inner: Loop
    outer: Loop
    ends: tuple[int, ...]  #: one past the last task of each position
    #: position with a skip after it -> (task, alias) pairs. Later tasks of the loop wait for the alias, a number
    #: beyond the tasks, which represents the skipped rounds' task
    moved_after: dict[int, tuple[tuple[int, int], ...]]
    num_moved: int
    unused_after: tuple[tuple[int, ...], ...]  #: position -> tasks and aliases that no later task waits for
    barriers: bool  #: all resources synchronize after each position


def structure_of(policy: Policy, entries: tuple[str, ...]) -> Policy:
    """Remove a policy's numbers: policies with equal results share a template run."""
    selection = policy.selection
    if selection.method == "speculative":
        counted = counts_uses(selection)
        pool, victim = (0.5, "lru") if counted else (1.0, "fifo")
        selection = replace(
            selection,
            alpha=4.0,
            partial_ratio=0.5,
            max_fraction=0.5,
            pool=pool,
            pool_bytes=None,
            victim=victim,
            expected_fraction=None,
        )
    elif selection.method == "heavy_hitter":
        selection = replace(selection, budget=0.5)
    widths = (policy.bits.weights, policy.bits.kv, policy.bits.act)
    return replace(
        policy,
        name="",
        weights=Placement(host=1.0),
        cache={entry: 1.0 / len(entries) for entry in entries},
        bits=Bits(*("native" if bits == "native" else 8 for bits in widths)),
        max_mini_batch_tokens=1,
        max_batch=None,
        packing="fifo",
        selection=selection,
        split="paper",
        static_cache=False,
    )


def loops_of(policy: Policy, layers: tuple[int, ...], num_mini_batches: int) -> tuple[Loop, Loop]:
    """Return the inner and outer loop of a template run's iteration; ``layers``: the kind of each. Skipped layers
    continue the period of the last walked ones; before them come the first layers, which attend to all tokens although
    others do not, and two more."""

    def loop(num_rounds: int, positions: int) -> Loop:
        before, after = _walked(positions)
        return Loop(before + after, before) if num_rounds > before + after else Loop(num_rounds, None)

    whole = num_whole(policy.selection, len(layers))
    if policy.schedule == "column":
        inner = loop(num_mini_batches, 1)
        return inner, layer_loop(layers, inner.num_rounds, whole)
    inner = layer_loop(layers, 1, whole)
    return inner, loop(num_mini_batches, inner.num_rounds)


def _walked(positions: int) -> tuple[int, int]:
    """Return the rounds of this many positions that are walked before and after a skip."""
    return max(LEAST_BEFORE, -(-BEFORE // positions)), max(LEAST_AFTER, -(-AFTER // positions))


@lru_cache(maxsize=1024)
def layer_loop(layers: tuple[int, ...], positions: int, whole: int) -> Loop:
    """Return the loop over layers with the fewest rounds. It skips whole periods of kinds, after the layers outside the
    period, the first ``whole`` and two more, and enough for a rate."""
    count, (least, after) = len(layers), _walked(positions)
    best = Loop(count, None, layers)
    periods = range(1, 1 + (1 if len(set(layers)) == 1 else min(MOST_PERIOD, count // 2)))
    for period in periods:
        pace = period if period % 2 == 0 else 2 * period
        first, runs = 0, []  # layers [first, last) have this period
        for layer in range(period, count + 1):
            if layer == count or layers[layer] != layers[layer - period]:
                runs.append((first, layer))
                first = layer - period + 1
        for first, last in runs:
            before = max(first + pace + 2, whole + 2, least)
            skipped = (min(last, count - after) - before) // period * period
            if skipped > 0 and count - skipped < best.num_rounds:
                best = Loop(count - skipped, before, (*layers[:before], *layers[before + skipped :]), pace)
    return best


def most_mini_batches(policy: Policy, layers: tuple[int, ...]) -> int:
    """Return the most mini-batches of a template run."""
    inner, outer = loops_of(policy, layers, num_mini_batches=1 << 30)
    return (inner if policy.schedule == "column" else outer).num_rounds


@lru_cache(maxsize=128)
def template_run(
    structure: Policy,
    inner: Loop,
    outer: Loop,
    num_decode: int,
    resident: int,
    on_disk: int,
    states: tuple[LayerState | None, ...] = (),
    in_place: bool = False,
) -> TinyRun:
    """Return the template run of policies with this ``structure_of``, with ``num_decode`` decode iterations.

    ``resident``: one of RESIDENT_CLASSES. ``on_disk``: streamed weights on the disk, 0 none, 1 some, 2 all. ``states``:
    what layers of each kind keep, and whether they attend; empty: all attend and keep nothing. ``in_place``: attention
    reads keys and values in place.
    """
    layers, mini_batches = (outer, inner) if structure.schedule == "column" else (inner, outer)
    positions = inner.num_rounds * outer.num_rounds
    first = 2 if positions >= 4 else 5  # repeated: the previous user of a slot is equally far back in the next
    if resident and not any("act" in entry for entry in structure.cache) and structure.weight_order == "kv_act_first":
        structure = replace(structure, weight_order="kv_first")  # nothing comes before the rest of the weights
    # Laid out even if left out again: one layout serves every number of iterations.
    laid_out = num_decode if num_decode < first else first + 1
    tasks, ends = lay_out(
        structure, layers.kinds, mini_batches.num_rounds, laid_out, resident, on_disk, states, in_place
    )
    if num_decode != laid_out:
        bounds = first * positions, (first + 1) * positions
        tasks, ends = _repeated(tasks, ends, bounds, num_decode - laid_out)
    tasks, moved_after, num_moved = with_aliases(tasks, ends, inner, outer)
    barriers = structure.overlap == "step"
    return TinyRun(tasks, inner, outer, ends, moved_after, num_moved, _unused(tasks, ends), barriers)


def with_aliases(tasks: tuple[TinyTask, ...], ends: tuple[int, ...], inner: Loop, outer: Loop):
    """Return the tasks, waiting for aliases across skips; each position's (task, alias) pairs; their number."""
    at = np.repeat(np.arange(len(ends)), np.diff((0, *ends))).tolist()
    loops = [
        (loop.before_skip, stride, loop.num_rounds * stride)
        for loop, stride in ((inner, 1), (outer, inner.num_rounds))
        if loop.before_skip
    ]
    moved: dict[int, dict[int, int]] = {}
    num_names = len(tasks)

    def name_of(awaited: int, position: int) -> int:
        """Return the pairs of a skip: buffers have two slots, so it repeats only the last two rounds before it."""
        nonlocal num_names
        for before, stride, length in loops:
            skip = position // length * length + before * stride
            if skip - 2 * stride <= at[awaited] < skip <= position:
                aliases = moved.setdefault(skip - 1, {})
                if awaited not in aliases:
                    aliases[awaited], num_names = num_names, num_names + 1
                return aliases[awaited]
        return awaited

    def renamed_waits(task: TinyTask, position: int) -> TinyTask:
        return _new(TinyTask, (*task[:-1], tuple([name_of(awaited, position) for awaited in task.waits])))

    # Tasks before a loop's first position wait for nothing across its skip.
    behind = [
        any(position % length >= before * stride for before, stride, length in loops) for position in range(len(ends))
    ]
    renamed = tuple(
        renamed_waits(task, at[index]) if task.waits and behind[at[index]] else task for index, task in enumerate(tasks)
    )
    return renamed, {position: tuple(aliases.items()) for position, aliases in moved.items()}, num_names - len(tasks)


def _unused(tasks: tuple[TinyTask, ...], ends: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return position -> tasks (or aliases) that no later task waits for."""
    last_use: dict[int, int] = {}
    for index, task in enumerate(tasks):
        last_use[index] = index
        for awaited in task.waits:
            last_use[awaited] = index
    at = np.repeat(np.arange(len(ends)), np.diff((0, *ends))).tolist()
    unused: list[list[int]] = [[] for _ in ends]
    for name, index in last_use.items():
        unused[at[index]].append(name)
    return tuple(map(tuple, unused))


def _repeated(tasks: tuple[TinyTask, ...], ends: tuple[int, ...], bounds: tuple[int, int], times: int):
    """Return the tasks with the positions [first, last), an iteration, repeated ``times`` more in place; -1 removes
    them."""
    first, last = bounds
    start, end = ends[first - 1], ends[last - 1]
    out, out_ends = list(tasks[:start]), list(ends[:first])

    def append(begin: int, stop: int, copies: int) -> None:
        """Append the tasks and ends of the positions [begin, stop), shifted by this many copies."""
        shift = copies * (end - start)
        for task in tasks[ends[begin - 1] : ends[stop - 1]]:
            waits = tuple([awaited + shift for awaited in task.waits])
            out.append(TinyTask(task.resource, task.iteration + copies, task.key, waits))
        out_ends.extend([index + shift for index in ends[begin:stop]])

    for copies in range(times + 1):
        append(first, last, copies)
    append(last, len(ends), times)
    return tuple(out), tuple(out_ends)


@lru_cache(maxsize=128)
def lay_out(
    structure: Policy,
    layers: tuple[int, ...],
    num_mini_batches: int,
    num_decode: int,
    resident: int,
    on_disk: int,
    states: tuple[LayerState | None, ...] = (),
    in_place: bool = False,
):
    """Return (tasks, end of each position) of a run laid out in full; ``layers``: the kind of each."""
    num_layers = len(layers)
    of_layers = tuple(states[kind] for kind in layers) if any(states) else ()
    machine = Hardware("tiny", "cpu", LINES, attends_in_place=in_place)
    wave = _wave(structure, num_layers, num_mini_batches, num_decode, resident, on_disk, of_layers, machine)
    policy = wave.policy
    waits_of, tasks, ends, loaded = _Waits(), [], [], False
    one_by_one = policy.overlap == "none"  # as if for one resource
    whole, places = num_whole(policy.selection, num_layers), {name: place for place, name in enumerate(RESOURCES)}
    for position, task in numbered_stream(wave):
        while len(ends) < position - 1:
            ends.append(len(tasks))
        first_load = not loaded and task.verb in ("load_weights", "read_weights")
        loaded = loaded or task.verb == "load_weights"
        part = _part_of(task, wave) if task.verb == "load_weights" else 0
        key = task.verb, first_load, task.layer < whole, task.mini_batch, layers[task.layer], part
        resource, waits = (0, ()) if one_by_one else (places[task.resource], waits_of.add(task))
        tasks.append(_new(TinyTask, (resource, task.iteration, _new(TaskKey, key), waits)))
    last = (num_decode + 1) * num_layers * num_mini_batches - 1  # what follows belongs to it
    return tuple(tasks), (*ends[:last], *[len(tasks)] * (last + 1 - min(len(ends), last)))


def _part_of(task: Task, wave: Wave) -> int:
    """Return ``TaskKey.part`` of a load of weights."""
    sliced = wave.policy.schedule == "column" and len(wave.mini_batches) > 1
    if sliced or not wave.cuts_layer(task.layer):
        return 0
    placed, piece = wave.placed_of(task.layer), task.payload
    return 1 if piece.end == placed.layout.kv_end else 2 if piece.start == placed.layout.kv_end else 0


def _wave(
    structure: Policy,
    num_layers: int,
    num_mini_batches: int,
    num_decode: int,
    resident: int,
    on_disk: int,
    states: tuple[LayerState | None, ...],
    machine: Hardware,
) -> Wave:
    """Return a wave with the policies' structure: a small model on a machine whose lines do not matter."""
    shape = ModelShape(
        name="tiny",
        family="opt",
        num_layers=num_layers,
        hidden=256,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        ffn=1024,
        vocab=512,
        max_positions=1 << 20,
        states=states,
    )
    layout = layer_layout(shape, structure.bits.element_bytes(2, shape.kv_group).weights, 2)
    total = layout.total_bytes
    device = (0.0, (layout.kv_end + layout.qkv_end) / 2 / total, (layout.qkv_end + total) / 2 / total, 1.0)[resident]
    streamed = 1.0 - device
    disk = (0.0, streamed / 2, streamed)[on_disk]
    # Requests that end at different blocks, so that each new token goes to every entry of some request.
    together = 4 * len(structure.cache)
    prompts = 16 * (2 * together + np.arange(together))
    widest = together * (int(prompts.max()) + 16 * (len(structure.cache) + 2))
    weights = Placement(device=device, host=streamed - disk, disk=disk)
    policy = replace(structure, weights=weights, max_mini_batch_tokens=widest)
    workload = Workload(np.tile(prompts, num_mini_batches), np.full(together * num_mini_batches, num_decode + 1))
    problem = Problem(shape=shape, dtype="float16", hardware=machine)
    groups = np.split(np.arange(workload.num_requests), num_mini_batches)
    wave = admit(problem, policy, workload, mini_batches=groups)
    half = SplitLines("paper", 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    split = {entry: half for entry in policy.cache if representation_of(entry) == "both"}
    return replace(wave, split=split)


class _Waits:
    """Return what each task waits for: indices of earlier tasks on other resources.

    ``Dependencies`` names the latest task per resource, but a real run may lack it (OPTIONAL): then the task also waits
    for those that replace it. Two tasks on the link write a buffer that a third reads:

    h2d | 0 load_hidden | 1 load_kv | compute | 2 attend | waits for (0, 1): a run without load_kv waits for 0.

    If every run had task 1, task 2 would wait for (1,), since the link runs 0 before 1. And if every run has task 2,
    later tasks on compute wait for neither.
    """

    def __init__(self):
        self.dependencies = Dependencies()
        self.resources: list[str] = []  # of each task
        self.lanes: list[str] = []  # of each task
        self.queues: dict[str, list[int]] = {resource: [] for resource in RESOURCES}
        # For each piece of memory, the latest task of each lane that wrote it, and those that read it since: all
        # since the last writer that every run has.
        self.users: defaultdict[Access, tuple[dict[str, int], dict[str, int]]] = defaultdict(lambda: ({}, {}))
        self.awaited: dict[str, set[int]] = {resource: set() for resource in RESOURCES}  # by tasks that every run has
        self.covered: dict[tuple[str, str], int] = {}  # (waiting, awaited resource) -> latest awaited of every run

    def add(self, task: Task) -> tuple[int, ...]:
        """Queue a task; return what it waits for."""
        index, resource, lane = len(self.resources), task.resource, LANE_OF[task.verb]
        awaited = {self.queues[other][ordinal] for other, ordinal in self.dependencies.add(task)}
        self.queues[resource].append(index)
        self.resources.append(resource)
        self.lanes.append(lane)
        for access in task.reads:
            writers, readers = self.users[access]
            awaited.update(writers.values())
            readers[lane] = index
        for access in task.writes:
            writers, readers = self.users[access]
            awaited.update(writers.values(), readers.values())
            if lane == resource:
                writers.clear()
                readers.clear()
            writers[lane] = index
        # Resources are first in, first out, and a run has all or none of an optional verb's tasks: a task has ended
        # once a later one of its lane or of its resource's lane has.
        over, waits = {resource}, []
        for earlier in sorted(awaited, reverse=True):
            if self.resources[earlier] not in over and self.lanes[earlier] not in over:
                over.add(self.lanes[earlier])
                if self._is_new(earlier, index):
                    waits.append(earlier)
        return tuple(reversed(waits))

    def _is_new(self, earlier: int, waiting: int) -> bool:
        """Return whether ``waiting`` must wait for ``earlier`` although earlier tasks of its queue may have; record
        it."""
        queues = self.resources[waiting], self.resources[earlier]
        if earlier in self.awaited[queues[0]] or earlier < self.covered.get(queues, 0):
            return False
        if self.lanes[waiting] == queues[0]:
            self.awaited[queues[0]].add(earlier)
            if self.lanes[earlier] == queues[1]:
                self.covered[queues] = earlier
        return True
