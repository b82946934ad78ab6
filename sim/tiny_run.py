"""A run's stream in small: the very tasks and dependencies of the plan maker, for a handful of layers and mini-batches.

Layers are alike, mini-batches but the last are alike, iterations change slowly. So the order of tasks and what waits
for what can be read off the stream of a tiny run. ``sim.walk`` takes it task by task with the durations of the real
run, many policies at a time, and skips over what repeats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from flexhybrid.core.context.cache_entries import representation_of
from flexhybrid.core.context.selection import first_choosing
from flexhybrid.core.context.split import SplitLines
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.layout import layer_layout
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.plan import numbered_stream
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.dependencies import Dependencies
from flexhybrid.core.task import RESOURCES, Access, Task
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload

#: Positions walked before and after a skip. What a slow resource holds up shows after two positions at the next one
#: (all buffers are double), and the longest chain has three of them: compute, d2h, host core; disk, h2d, compute.
BEFORE, AFTER = 6, 4
LEAST_BEFORE, LEAST_AFTER = 4, 1  #: rounds of several positions each

#: Which part of a layer is resident: less than W_K and W_V; those; those and W_Q; all.
RESIDENT_CLASSES = (0, 1, 2, 3)

#: Verbs that a step may lack in the real run though the tiny one has them.
OPTIONAL = frozenset((
    "kv_gen", "attend_recomputed", "load_act", "load_kv", "read_act", "read_kv", "dequantize_act", "dequantize_kv",
    "store_act", "store_kv", "write_act", "write_kv", "scatter", "scatter_device", "quantize",
))  # fmt: skip


class Entry(NamedTuple):
    """A task of the tiny run."""

    resource: int
    iteration: int
    #: verb; whether the stream's first load of weights, and in a layer that looks at all tokens; mini-batch
    what: tuple[str, bool, bool, int]
    waits: tuple[int, ...]  #: indices of the entries on other resources that it waits for


@dataclass(frozen=True)
class Rounds:
    """One of the two nested loops of an iteration: rounds of the tiny run, and how many are walked before a skip."""

    number: int
    before: int | None  #: None: the real run has no more of them than the tiny one


@dataclass(frozen=True)
class Topology:
    """The entries in stream order, and how positions are nested: outer (column: layers) over inner (mini-batches)."""

    entries: tuple[Entry, ...]
    inner: Rounds
    outer: Rounds
    ends: tuple[int, ...]  #: one past the last entry of each position
    #: of a position after which rounds are skipped: (entry, its other name). Who comes later in the same loop waits for
    #: it under that name, a number beyond the entries: there it stands for what the skipped rounds did in its place
    moved_after: dict[int, tuple[tuple[int, int], ...]]
    num_moved: int
    unused_after: tuple[tuple[int, ...], ...]  #: of each position, entries that nobody waits for from there on
    barriers: bool  #: everything meets after each position


def kinds_key(policy: Policy, cache_kinds: tuple[str, ...]) -> Policy:
    """The policy with its numbers taken out: two policies with one key have one topology."""
    selection = policy.selection
    if selection.method == "speculative":
        selection = replace(selection, alpha=4.0, partial_ratio=0.5, pool=1.0, max_fraction=0.5, victim="fifo",
                            expected_fraction=None)  # fmt: skip
    elif selection.method == "heavy_hitter":
        selection = replace(selection, budget=0.5)
    bits = (getattr(policy.bits, kind) for kind in ("weights", "kv", "act"))
    return replace(
        policy, name="", weights=Placement(host=1.0), cache={kind: 1.0 / len(cache_kinds) for kind in cache_kinds},
        bits=Bits(*(one if one == "native" else 8 for one in bits)), max_mini_batch_tokens=1, max_batch=None,
        packing="fifo", selection=selection, split="paper", static_cache=False,
    )  # fmt: skip


def walked_rounds(num_inner: int, num_outer: int) -> tuple[Rounds, Rounds]:
    """How many of an iteration's inner and outer rounds the tiny run has."""

    def rounds(wanted: int, positions: int) -> Rounds:
        before = max(LEAST_BEFORE, -(-BEFORE // positions))
        after = max(LEAST_AFTER, -(-AFTER // positions))
        return Rounds(before + after, before) if wanted > before + after else Rounds(wanted, None)

    inner = rounds(num_inner, 1)
    return inner, rounds(num_outer, inner.number)


def most_mini_batches(schedule: str, num_layers: int) -> int:
    """How many mini-batches the tiny run has at most."""
    endless = 1 << 30
    inner, outer = walked_rounds(*((endless, num_layers) if schedule == "column" else (num_layers, endless)))
    return (inner if schedule == "column" else outer).number


def topology(
    key: Policy, num_layers: int, num_mini_batches: int, num_decode: int, resident: int, on_disk: int
) -> Topology:
    """The tiny run of policies with this ``kinds_key``, of ``num_decode`` decode iterations.

    ``resident``: one of RESIDENT_CLASSES. ``on_disk``: of the streamed weights, 0 none, 1 some, 2 all lie on the disk.
    """
    column = key.schedule == "column"
    inner, outer = walked_rounds(*((num_mini_batches, num_layers) if column else (num_layers, num_mini_batches)))
    return _topology(key.to_json(), inner, outer, num_decode, resident, on_disk)


@lru_cache(maxsize=128)
def _topology(key: str, inner: Rounds, outer: Rounds, num_decode: int, resident: int, on_disk: int) -> Topology:
    policy = Policy.from_json(key)
    layers, mini_batches = (outer, inner) if policy.schedule == "column" else (inner, outer)
    positions = inner.number * outer.number
    like = 2 if positions >= 4 else 5  # this iteration and the next stand for more; two, because slots go by turns
    # Those two are laid out even where they are left out again: one tiny run then serves every number of iterations.
    base = num_decode if num_decode < like else like + 2 + (num_decode - like) % 2
    entries, ends = _tiny_run(key, layers.number, mini_batches.number, base, resident, on_disk)
    if num_decode != base:
        entries, ends = _repeated(entries, ends, like * positions, (like + 2) * positions, (num_decode - base) // 2)
    entries, moved_after, num_moved = _with_moved(entries, ends, inner, outer)
    unused = _unused(entries, ends)
    return Topology(entries, inner, outer, ends, moved_after, num_moved, unused, policy.overlap == "step")


def _with_moved(entries: tuple[Entry, ...], ends: tuple[int, ...], inner: Rounds, outer: Rounds):
    """The entries with waits across skipped rounds renamed, and who is renamed after which position to what."""
    at = np.repeat(np.arange(len(ends)), np.diff((0, *ends))).tolist()
    loops = [(rounds.before, stride, rounds.number * stride)
             for rounds, stride in ((inner, 1), (outer, inner.number)) if rounds.before]  # fmt: skip
    moved: dict[int, dict[int, int]] = {}
    names = len(entries)

    def renamed(awaited: int, position: int) -> int:
        """Buffers have two slots: only what happened in the last two rounds before a skip is repeated by it."""
        nonlocal names
        for before, stride, length in loops:
            skip = position // length * length + before * stride
            if skip - 2 * stride <= at[awaited] < skip <= position:
                of_skip = moved.setdefault(skip - 1, {})
                if awaited not in of_skip:
                    of_skip[awaited], names = names, names + 1
                return of_skip[awaited]
        return awaited

    out = tuple(
        entry._replace(waits=tuple(renamed(n, at[number]) for n in entry.waits)) if entry.waits else entry
        for number, entry in enumerate(entries)
    )
    return out, {skip: tuple(of.items()) for skip, of in moved.items()}, names - len(entries)


def _unused(entries: tuple[Entry, ...], ends: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Of each position, the entries (or their other names) that nobody waits for from there on."""
    last_use: dict[int, int] = {}
    for number, entry in enumerate(entries):
        last_use[number] = number
        last_use.update(dict.fromkeys(entry.waits, number))
    at = np.repeat(np.arange(len(ends)), np.diff((0, *ends)))
    unused: list[list[int]] = [[] for _ in ends]
    for name, number in last_use.items():
        unused[at[number]].append(name)
    return tuple(map(tuple, unused))


def _repeated(entries: tuple[Entry, ...], ends: tuple[int, ...], first: int, last: int, times: int):
    """The entries with those of positions [first, last), two iterations, there ``times`` times more; -1 leaves them
    out."""
    start, end = ends[first - 1], ends[last - 1]
    out, out_ends = list(entries[:start]), list(ends[:first])

    def append(begin: int, stop: int, copies: int) -> None:
        """Entries and ends of the positions [begin, stop), later by so many copies."""
        shift = copies * (end - start)
        for e in entries[ends[begin - 1] : ends[stop - 1]]:
            out.append(Entry(e.resource, e.iteration + 2 * copies, e.what, tuple([w + shift for w in e.waits])))
        out_ends.extend([one + shift for one in ends[begin:stop]])

    for copies in range(times + 1):
        append(first, last, copies)
    append(last, len(ends), times)
    return tuple(out), tuple(out_ends)


@lru_cache(maxsize=128)
def _tiny_run(key: str, num_layers: int, num_mini_batches: int, num_decode: int, resident: int, on_disk: int):
    """(entries, one past the last of each position) of a run laid out in full."""
    shape = ModelShape("tiny", "opt", num_layers, 256, 4, 4, 64, 1024, 512, 1 << 20)
    policy = Policy.from_json(key)
    layout = layer_layout(shape, policy.bits.element_bytes(2).weights, 2)
    total = layout.total_bytes
    kept = (0.0, (layout.kv_end + layout.qkv_end) / 2 / total, (layout.qkv_end + total) / 2 / total, 1.0)[resident]
    rest = 1.0 - kept
    disk = (0.0, rest / 2, rest)[on_disk]
    policy = replace(policy, weights=Placement(device=kept, host=rest - disk, disk=disk))
    # Requests that end at different blocks: whenever a token is new, some request's goes to each kind.
    together = 4 * len(policy.cache)
    prompts = 16 * (2 * together + np.arange(together))
    wide = together * (int(prompts.max()) + 16 * (len(policy.cache) + 2))
    policy = replace(policy, max_mini_batch_tokens=wide)
    workload = Workload(np.tile(prompts, num_mini_batches), np.full(together * num_mini_batches, num_decode + 1))
    lines = {"compute": Line(s_per_flop=1.0), "h2d": Line(s_per_byte=1.0), "disk_read": Line(s_per_byte=1.0)}
    problem = Problem(shape=shape, dtype="float16", hardware=Hardware("tiny", "cpu", lines))
    wave = admit(problem, policy, workload)
    groups = np.split(np.arange(workload.num_requests), num_mini_batches)
    half = SplitLines("paper", 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    split = {kind: half for kind in policy.cache if representation_of(kind) == "both"}
    wave = replace(wave, mini_batches=tuple(groups), split=split)

    waits_of, entries, ends, loaded = _Waits(), [], [], False
    one_by_one = policy.overlap is False  # one task at a time: as if there were one resource
    for number, task in numbered_stream(wave):
        while len(ends) < number - 1:
            ends.append(len(entries))
        whole = not loaded and task.verb in ("load_weights", "read_weights")
        loaded = loaded or task.verb == "load_weights"
        what = task.verb, whole, task.layer < first_choosing(policy.selection), task.mini_batch
        if one_by_one:
            entries.append(Entry(0, task.iteration, what, ()))
        else:
            entries.append(Entry(RESOURCES.index(task.resource), task.iteration, what, waits_of.add(task)))
    last = (num_decode + 1) * num_layers * num_mini_batches - 1  # what comes after it belongs to it
    return tuple(entries), (*ends[:last], *[len(entries)] * (last + 1 - min(len(ends), last)))


class _Waits:
    """What each task waits for, as numbers of earlier tasks: those that ``Dependencies`` says, and those that would
    count in their place were they absent; without what an earlier task of the same resource has waited for."""

    def __init__(self):
        self.dependencies = Dependencies()
        self.on_resource: dict[str, list[int]] = {resource: [] for resource in RESOURCES}
        self.resources: list[str] = []  # of each task
        self.stands_for: list[str | tuple[str, str]] = []  # all before it on its resource; if OPTIONAL, of its verb
        #: of an access: its latest writers, and who has read it since, both in ascending order
        self.touched: dict[Access, tuple[list[int], list[int]]] = {}
        self.waited: dict[str, set[int]] = {resource: set() for resource in RESOURCES}
        self.surely: dict[tuple[str, str], int] = {}  # (who waits, for whom) -> latest task that is always there

    def add(self, task: Task) -> tuple[int, ...]:
        resource, number, sure = task.resource, len(self.resources), task.verb not in OPTIONAL
        found = {self.on_resource[other][ordinal] for other, ordinal in self.dependencies.add(task)}
        self.resources.append(resource)
        self.stands_for.append(resource if sure else (resource, task.verb))
        self.on_resource[resource].append(number)
        touched = self.touched
        for access in task.reads:
            writers, readers = touched.get(access) or touched.setdefault(access, ([], []))
            found.update(writers)
            self._note(readers, number)
        for access in task.writes:
            writers, readers = touched.get(access) or touched.setdefault(access, ([], []))
            found.update(writers, readers)
            if sure:
                writers[:] = (number,)
                readers.clear()
            else:
                self._note(writers, number)
        resources = self.resources
        others = [other for other in found if resources[other] != resource]
        if not others:
            return ()
        return tuple(sorted(other for other in self._latest(others) if self._counts(other, resource, sure)))

    def _counts(self, number: int, waiter: str, sure: bool) -> bool:
        """Whether a task on the resource ``waiter`` must wait for the one of this number; notes it if so. ``sure``:
        the one that waits is always there."""
        pair = waiter, self.resources[number]
        if number in self.waited[waiter] or number < self.surely.get(pair, 0):
            return False
        if sure:
            self.waited[waiter].add(number)
            if self.stands_for[number] == self.resources[number]:
                self.surely[pair] = number
        return True

    def _note(self, numbers: list[int], number: int) -> None:
        """Add the latest task of all; those that it stands for are forgotten."""
        if numbers:
            name, which = self.stands_for[number], self.stands_for
            if name == self.resources[number]:
                which = self.resources
            numbers[:] = [other for other in numbers if which[other] != name]
        numbers.append(number)

    def _latest(self, numbers: list[int]) -> list[int]:
        """Of each resource, the last task that is always there, and of those after it the last of each verb."""
        if len(numbers) < 2:
            return numbers
        kept, done = [], set()
        for number in sorted(numbers, reverse=True):
            name = self.stands_for[number]
            if name not in done and self.resources[number] not in done:
                kept.append(number)
                done.add(name)
        return kept
