"""Template runs: the planner's tasks and dependencies for a few layers, mini-batches and iterations.

Kinds of layers repeat, all mini-batches except the last are alike, and iterations change slowly. So a small run shows
the order and the dependencies of all tasks. ``sim.array_clock`` walks it with the durations of the real run, for many
policies at a time, and skips repetitions.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

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

#: Positions walked before and after a skip. A slow resource delays the next resource two positions later, because
#: buffers are double. The longest chain has three resources: compute, d2h, host core; or disk, h2d, compute.
BEFORE, AFTER = 6, 4
LEAST_BEFORE, LEAST_AFTER = 4, 1  #: rounds walked before and after a skip, if a round has several positions
MOST_PERIOD = 16  #: longest period of kinds of layers; with a longer one all layers are walked

#: Resident part of a layer's weights: 0 less than W_K and W_V; 1 W_K and W_V; 2 also W_Q; 3 all.
RESIDENT_CLASSES = (0, 1, 2, 3)
#: Lines of the template's machine. Their values do not matter: only the order of tasks is used.
LINES = {"compute": Line(s_per_flop=1.0), "h2d": Line(s_per_byte=1.0), "disk_read": Line(s_per_byte=1.0)}

#: Verbs that the template has, and that a step of the real run may lack.
OPTIONAL = frozenset(verb.name for verb in VERBS.values() if verb.needs)
#: verb -> the group of tasks that a run has or lacks together: the verb itself if it is optional, else its resource.
GROUP_OF = {name: name if name in OPTIONAL else resource for name, resource in RESOURCE_OF.items()}


class TaskKey(NamedTuple):
    """What the price of a template task depends on, apart from its iteration."""

    verb: str
    first_load: bool  #: the task belongs to the stream's first load of weights
    all_tokens: bool  #: its layer attends to all tokens, in a model whose other layers select tokens
    mini_batch: int
    kind: int  #: kind of its layer
    part: int = 0  #: for weights in two loads: 1 the first, 2 the second; else 0


class TinyTask(NamedTuple):
    """A task of the template run."""

    resource: int  #: index into RESOURCES
    iteration: int
    key: TaskKey
    waits: tuple[int, ...]  #: indices of awaited tasks on other resources


class TinyKind(NamedTuple):
    """Properties of a kind of layers: fields of ``ModelShape``, for one layer."""

    states: LayerState | None
    routed: bool  #: False also if the policy computes experts for each mini-batch by itself


@dataclass(frozen=True)
class Loop:
    """One of the two nested loops of an iteration."""

    num_rounds: int  #: rounds in the template run
    before_skip: int | None  #: rounds walked before the skip; None: no round is skipped
    kinds: tuple[int, ...] = ()  #: kind of each round's layer; empty for a loop over mini-batches
    rate_rounds: int = 2  #: skipped rounds take the mean time of this many; buffer slots and layer kinds alternate


@dataclass(frozen=True)
class TinyRun:
    """The tasks of a template run in stream order, and its two nested loops. In the column schedule, the outer loop is
    over layers and the inner loop over mini-batches; in the row schedule, the outer loop is over mini-batches."""

    tasks: tuple[TinyTask, ...]
    inner: Loop
    outer: Loop
    ends: tuple[int, ...]  #: one past the last task of each position
    #: position with a skip after it -> (task, alias) pairs. Tasks after the skip wait for the alias instead, an index
    #: beyond the tasks. It represents the same task in the last skipped rounds
    moved_after: dict[int, tuple[tuple[int, int], ...]]
    num_moved: int  #: number of aliases
    unused_after: tuple[tuple[int, ...], ...]  #: position -> tasks and aliases that no later task waits for
    barriers: bool  #: all resources synchronize after each position


def structure_of(policy: Policy, entries: tuple[str, ...], unpacks: bool = False) -> Policy:
    """Return the policy with its numbers replaced by standard ones. Policies with equal results share a template run.
    ``entries``: names of its cache entries. ``unpacks``: the checkpoint's weights are packed, which is as if the policy
    packed them."""
    selection = policy.selection
    if selection.method == "speculative":
        pool, victim = (0.5, "lru") if counts_uses(selection) else (1.0, "fifo")
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
    widths = (8 if unpacks else policy.bits.weights, policy.bits.kv, policy.bits.act)
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
    """Return the inner and the outer loop of a template run's iteration. ``layers``: the kind of each layer."""

    def loop(num_rounds: int, positions: int) -> Loop:
        before, after = _walked(positions)
        return Loop(before + after, before) if num_rounds > before + after else Loop(num_rounds, None)

    whole = num_whole(policy.selection, len(layers))
    if policy.schedule == "column":
        in_parts = policy.experts.batch > 1  # mini-batches are not alike: the last of each part has the experts
        inner = Loop(num_mini_batches, None) if in_parts else loop(num_mini_batches, 1)
        return inner, layer_loop(layers, inner.num_rounds, whole)
    inner = layer_loop(layers, 1, whole)
    return inner, loop(num_mini_batches, inner.num_rounds)


def _walked(positions: int) -> tuple[int, int]:
    """Return how many rounds are walked before and after a skip. ``positions``: positions in a round."""
    return max(LEAST_BEFORE, -(-BEFORE // positions)), max(LEAST_AFTER, -(-AFTER // positions))


@lru_cache(maxsize=1024)
def layer_loop(layers: tuple[int, ...], positions: int, whole: int) -> Loop:
    """Return the loop over layers with the fewest rounds that shows the rate of the skipped ones. Whole periods of
    kinds are skipped. Walked before them are the layers outside the period, the first ``whole`` layers (which attend to
    all tokens), two more, and enough layers for a rate. ``positions``: positions in a layer."""
    count, (least, after) = len(layers), _walked(positions)
    best = Loop(count, None, layers)
    periods = range(1, 1 + (1 if len(set(layers)) == 1 else min(MOST_PERIOD, count // 2)))
    for period in periods:
        rated = period if period % 2 == 0 else 2 * period  # even, because buffer slots alternate
        first, runs = 0, []  # layers [first, last) have this period
        for layer in range(period, count + 1):
            if layer == count or layers[layer] != layers[layer - period]:
                runs.append((first, layer))
                first = layer - period + 1
        for first, last in runs:
            before = max(first + rated + 2, whole + 2, least)
            skipped = (min(last, count - after) - before) // period * period
            if skipped > 0 and count - skipped < best.num_rounds:
                best = Loop(count - skipped, before, (*layers[:before], *layers[before + skipped :]), rated)
    return best


def most_mini_batches(policy: Policy, layers: tuple[int, ...]) -> int:
    """Return the largest number of mini-batches that a template run has."""
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
    kinds: tuple[TinyKind, ...] = (),
    in_place: bool = False,
) -> TinyRun:
    """Return the template run of policies with this ``structure_of``, with ``num_decode`` decode iterations.

    ``resident``: one of RESIDENT_CLASSES. ``on_disk``: streamed weights on the disk, 0 none, 1 some, 2 all. ``kinds``:
    properties of each kind of layers; empty: all layers attend and have no state. ``in_place``: attention reads keys
    and values in place.
    """
    layers, mini_batches = (outer, inner) if structure.schedule == "column" else (inner, outer)
    positions = inner.num_rounds * outer.num_rounds
    first = 2 if positions >= 4 else 5  # this iteration is repeated: from it on, waits reach equally far back
    if resident and not any("act" in entry for entry in structure.cache) and structure.weight_order == "kv_act_first":
        structure = replace(structure, weight_order="kv_first")  # the same order without ACT, and fewer template runs
    # Lay out the repeated iteration even if it is removed again: one layout serves every number of iterations.
    laid_out = num_decode if num_decode < first else first + 1
    counts = mini_batches.num_rounds, laid_out
    tasks, ends = lay_out(structure, layers.kinds, *counts, resident, on_disk, kinds, in_place)
    if num_decode != laid_out:
        bounds = first * positions, (first + 1) * positions
        tasks, ends = _repeated(tasks, ends, bounds, num_decode - laid_out)
    tasks, moved_after, num_moved = with_aliases(tasks, ends, inner, outer)
    barriers = structure.overlap == "step"
    return TinyRun(
        tasks, inner, outer, ends, moved_after, num_moved, unused_after=_unused(tasks, ends), barriers=barriers
    )


def with_aliases(tasks: tuple[TinyTask, ...], ends: tuple[int, ...], inner: Loop, outer: Loop):
    """Return (tasks that wait for aliases across skips, ``TinyRun.moved_after``, number of aliases)."""
    at = np.repeat(np.arange(len(ends)), np.diff((0, *ends))).tolist()
    loops = [
        (loop.before_skip, stride, loop.num_rounds * stride)
        for loop, stride in ((inner, 1), (outer, inner.num_rounds))
        if loop.before_skip
    ]
    moved: dict[int, dict[int, int]] = {}
    num_names = len(tasks)

    def name_of(awaited: int, position: int) -> int:
        """Return the awaited task, or its alias if a skip lies between. Buffers have two slots, so only tasks of the
        last two rounds before a skip have aliases."""
        nonlocal num_names
        for before, stride, length in loops:
            skip = position // length * length + before * stride
            if skip - 2 * stride <= at[awaited] < skip <= position:
                aliases = moved.setdefault(skip - 1, {})
                if awaited not in aliases:
                    aliases[awaited], num_names = num_names, num_names + 1
                return aliases[awaited]
        return awaited

    # Tasks before a loop's first position wait for nothing across its skip.
    behind = [any(n % length >= before * stride for before, stride, length in loops) for n in range(len(ends))]
    renamed = tuple(
        task._replace(waits=tuple(name_of(awaited, at[index]) for awaited in task.waits)) if behind[at[index]] else task
        for index, task in enumerate(tasks)
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
    """Return (tasks, ends) with the positions [first, last) of an iteration repeated ``times`` more; -1 removes them.
    ``bounds``: (first, last)."""
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
    kinds: tuple[TinyKind, ...] = (),
    in_place: bool = False,
):
    """Return (tasks, end of each position) of a run without skips. ``layers``: the kind of each layer; the other
    arguments are those of ``template_run``."""
    num_layers = len(layers)
    of_layers = {}
    for name in TinyKind._fields:
        if any(values := tuple(getattr(kinds[kind], name) for kind in layers) if kinds else ()):
            of_layers[name] = values
    machine = Hardware("tiny", "cpu", LINES, attends_in_place=in_place)
    wave = _wave(structure, (num_layers, num_mini_batches, num_decode), (resident, on_disk), of_layers, machine)
    policy = wave.policy
    waits_of, tasks, ends, loaded = _Waits(), [], [], False
    one_by_one = policy.overlap == "none"  # all tasks run as if on one resource
    whole, places = num_whole(policy.selection, num_layers), {name: place for place, name in enumerate(RESOURCES)}
    for position, task in numbered_stream(wave):
        while len(ends) < position - 1:
            ends.append(len(tasks))
        first_load = not loaded and task.verb in ("load_weights", "read_weights")
        loaded = loaded or task.verb == "load_weights"
        part = _part_of(task, wave) if task.verb == "load_weights" else 0
        key = task.verb, first_load, task.layer < whole, task.mini_batch, layers[task.layer], part
        resource, waits = (0, ()) if one_by_one else (places[task.resource], waits_of.add(task))
        tasks.append(TinyTask(resource, task.iteration, TaskKey(*key), waits))
    last = (num_decode + 1) * num_layers * num_mini_batches - 1  # the tasks that follow belong to this position
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
    counts: tuple[int, int, int],
    placed: tuple[int, int],
    of_layers: dict[str, Any],
    machine: Hardware,
) -> Wave:
    """Return a wave of a small model whose policy has this structure. ``counts``: numbers of layers, mini-batches and
    decode iterations. ``placed``: (``resident``, ``on_disk``). ``of_layers``: fields of the model's
    shape."""
    (num_layers, num_mini_batches, num_decode), (resident, on_disk) = counts, placed
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
        **of_layers,
    )
    layout = layer_layout(shape, structure.bits.element_bytes(2, shape.kv_group).weights, 2)
    total = layout.total_bytes
    device = (0.0, (layout.kv_end + layout.qkv_end) / 2 / total, (layout.qkv_end + total) / 2 / total, 1.0)[resident]
    streamed = 1.0 - device
    disk = (0.0, streamed / 2, streamed)[on_disk]
    # Contexts end at different blocks, so that in each step every entry gets a new token of some request.
    together = 4 * len(structure.cache)
    prompts = 16 * (2 * together + np.arange(together))
    widest = together * (int(prompts.max()) + 16 * (len(structure.cache) + 2))
    weights = Placement(device=device, host=streamed - disk, disk=disk)
    policy = replace(structure, weights=weights, max_mini_batch_tokens=widest)
    workload = Workload(np.tile(prompts, num_mini_batches), np.full(together * num_mini_batches, num_decode + 1))
    problem = Problem(shape=shape, dtype="float16", hardware=machine)
    groups = np.split(np.arange(workload.num_requests), num_mini_batches)
    wave = admit(problem, policy, workload, mini_batches=groups)
    nothing = dict.fromkeys(("load_act_s", "weights_s", "forward_s", "forward_request_s", "attend_s"), 0.0)
    half = SplitLines("paper", gen_s=1.0, load_kv_s=1.0, **nothing)
    split = {entry: half for entry in policy.cache if representation_of(entry) == "both"}
    return replace(wave, split=split)


class _Waits:
    """Finds the tasks that each task waits for: indices of earlier tasks on other resources.

    ``Dependencies`` returns only the latest task of each resource. A real run may lack this task (OPTIONAL), so the
    task must also wait for earlier ones. For example, two tasks on the link write a buffer that a third task reads:

        h2d: 0 load_hidden, 1 load_kv; compute: 2 attend, which waits for (0, 1)

    A run without load_kv waits for task 0. If every run had task 1, task 2 would wait for (1,), as the link runs task 0
    first. If every run has task 2, later tasks on compute wait for neither.
    """

    def __init__(self):
        self.dependencies = Dependencies()
        self.resources: list[str] = []  # of each task
        self.groups: list[str] = []  # of each task, from GROUP_OF
        self.queues: dict[str, list[int]] = {resource: [] for resource in RESOURCES}
        # Piece of memory -> (group -> latest writer, group -> latest reader since). Both are cleared by a writer that
        # every run has.
        self.users: defaultdict[Access, tuple[dict[str, int], dict[str, int]]] = defaultdict(lambda: ({}, {}))
        # Resource -> tasks that its tasks have waited for, in every run.
        self.awaited: dict[str, set[int]] = {resource: set() for resource in RESOURCES}
        # (waiting resource, awaited resource) -> latest task waited for, of those that every run has.
        self.covered: dict[tuple[str, str], int] = {}

    def add(self, task: Task) -> tuple[int, ...]:
        """Queue a task; return the indices of the tasks that it waits for."""
        index, resource, group = len(self.resources), task.resource, GROUP_OF[task.verb]
        awaited = {self.queues[other][ordinal] for other, ordinal in self.dependencies.add(task)}
        self.queues[resource].append(index)
        self.resources.append(resource)
        self.groups.append(group)
        for access in task.reads:
            writers, readers = self.users[access]
            awaited.update(writers.values())
            readers[group] = index
        for access in task.writes:
            writers, readers = self.users[access]
            awaited.update(writers.values(), readers.values())
            if group == resource:
                writers.clear()
                readers.clear()
            writers[group] = index
        # Resources are first in, first out, and a run has all or none of an optional verb's tasks. So a task has ended
        # once a later task of its group has ended, or a later task of its resource that every run has.
        ended, waits = {resource}, []
        for earlier in sorted(awaited, reverse=True):
            if self.resources[earlier] not in ended and self.groups[earlier] not in ended:
                ended.add(self.groups[earlier])
                if self._is_new(earlier, index):
                    waits.append(earlier)
        return tuple(reversed(waits))

    def _is_new(self, earlier: int, waiting: int) -> bool:
        """Return whether no earlier task of the same resource has waited for ``earlier`` in every run. Record the wait
        if every run has the task ``waiting``."""
        queues = self.resources[waiting], self.resources[earlier]
        if earlier in self.awaited[queues[0]] or earlier < self.covered.get(queues, 0):
            return False
        if self.groups[waiting] == queues[0]:
            self.awaited[queues[0]].add(earlier)
            if self.groups[earlier] == queues[1]:
                self.covered[queues] = earlier
        return True
