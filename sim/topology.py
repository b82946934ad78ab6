"""A run's stream in small: the very tasks and dependencies of the plan maker, for a handful of layers and mini-batches.

Layers are alike, mini-batches but the last are alike, iterations change slowly. So the order of tasks and what waits
for what can be read off the stream of a tiny run, and ``sim.closed_form`` walks that one with the durations of the real
run, many policies at a time, and skips over what repeats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from flexhybrid.core.dependencies import Dependencies
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.kinds import representation_of
from flexhybrid.core.layout import layer_layout
from flexhybrid.core.plan import admit
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.shape import ModelShape
from flexhybrid.core.split import SplitLines
from flexhybrid.core.stream import numbered_stream
from flexhybrid.core.task import RESOURCES
from flexhybrid.core.workload import Workload

MOST_MINI_BATCHES = 6  #: of the tiny run; what lies between the fifth and the last is skipped
MOST_LAYERS = 5
MOST_DECODE = 7  #: decode iterations: two for each of three pieces of the decode, and the last

#: Which part of a layer is resident: less than W_K and W_V; those; those and W_Q; all.
RESIDENT_CLASSES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Entry:
    """A task of the tiny run."""

    resource: int
    verb: str
    iteration: int
    first_layer: bool
    last_mini_batch: bool
    whole: bool  #: the stream's first load of weights, which comes in one piece
    waits: tuple[int, ...]  #: indices of the entries it waits for, the one before it on its resource included
    position: int  #: from 0


@dataclass(frozen=True)
class Topology:
    """The entries in stream order, and how positions are nested: outer (column: layers) over inner (mini-batches)."""

    entries: tuple[Entry, ...]
    column: bool
    inner: int
    outer: int
    iterations: int  #: the prefill included
    ends: tuple[int, ...]  #: one past the last entry of each position
    samples: tuple[tuple[int, ...], ...]  #: of each iteration, the entries that sample

    @property
    def most_inner(self) -> int:
        return MOST_MINI_BATCHES if self.column else MOST_LAYERS

    @property
    def most_outer(self) -> int:
        return MOST_LAYERS if self.column else MOST_MINI_BATCHES


def kinds_key(policy: Policy, cache_kinds: tuple[str, ...]) -> Policy:
    """The policy with its numbers taken out: two policies with one key have one topology."""
    shares = {kind: 1.0 / len(cache_kinds) for kind in cache_kinds}
    selection = policy.selection
    if selection.method == "speculative":
        selection = replace(selection, pool=1.0, max_fraction=0.5)
    return replace(
        policy, name="", weights=Placement(host=1.0), cache=shares, max_mini_batch_tokens=1, max_batch=None,
        packing="fifo", selection=selection,
    )  # fmt: skip


def topology(
    key: Policy, num_layers: int, num_mini_batches: int, num_decode: int, resident: int, on_disk: int
) -> Topology:
    """The tiny run of policies with this ``kinds_key``.

    ``resident``: one of RESIDENT_CLASSES. ``on_disk``: of the streamed weights, 0 none, 1 some, 2 all lie on the disk.
    """
    return _build(
        key.to_json(), min(num_layers, MOST_LAYERS), min(num_mini_batches, MOST_MINI_BATCHES),
        min(num_decode, MOST_DECODE), resident, on_disk,
    )  # fmt: skip


@cache
def _build(key: str, num_layers: int, num_mini_batches: int, num_decode: int, resident: int, on_disk: int) -> Topology:
    shape = ModelShape("tiny", "opt", num_layers, 256, 4, 4, 64, 1024, 512, 1 << 20)
    policy = Policy.from_json(key)
    layout = layer_layout(shape, policy.bits.element_bytes(2).weights)
    total = layout.total_bytes
    kept = (0.0, (layout.kv_end + layout.qkv_end) / 2 / total, (layout.qkv_end + total) / 2 / total, 1.0)[resident]
    rest = 1.0 - kept
    disk = (0.0, rest / 2, rest)[on_disk]
    policy = replace(policy, weights=Placement(device=kept, host=rest - disk, disk=disk))
    # Requests that end at different blocks: whenever a token is new, some request's goes to each kind.
    together = 4 * len(policy.cache)
    prompts = 16 * (8 * together + np.arange(together))
    wide = together * (int(prompts.max()) + 16 * (len(policy.cache) + 2))
    policy = replace(policy, max_mini_batch_tokens=wide)
    workload = Workload(np.tile(prompts, num_mini_batches), np.full(together * num_mini_batches, num_decode + 1))
    wave = admit(shape, policy, workload, 2, hardware=Hardware("tiny", "cpu", {
        "compute": Line(s_per_flop=1.0), "h2d": Line(s_per_byte=1.0), "disk_read": Line(s_per_byte=1.0),
    }))  # fmt: skip
    groups = np.split(np.arange(workload.num_requests), num_mini_batches)
    half = SplitLines("paper", 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    split = {kind: half for kind in policy.cache if representation_of(kind) == "both"}
    wave = replace(wave, mini_batches=tuple(groups), split=split)
    column = policy.schedule == "column"
    inner, outer = (num_mini_batches, num_layers) if column else (num_layers, num_mini_batches)

    dependencies, on_resource = Dependencies(), {resource: [] for resource in RESOURCES}
    entries: list[Entry] = []
    ends: list[int] = []
    samples: list[list[int]] = [[] for _ in range(num_decode + 1)]
    loaded = False
    for number, task in numbered_stream(wave):
        own = on_resource[task.resource]
        waits = [on_resource[resource][ordinal] for resource, ordinal in dependencies.add(task)]
        if own:
            waits.append(own[-1])
        while len(ends) < number - 1:
            ends.append(len(entries))
        if task.verb == "sample":
            samples[task.iteration].append(len(entries))
        own.append(len(entries))
        whole = not loaded and task.verb in ("load_weights", "read_weights")
        loaded = loaded or task.verb == "load_weights"
        entries.append(Entry(
            RESOURCES.index(task.resource), task.verb, task.iteration, task.layer == 0,
            task.mini_batch == num_mini_batches - 1, whole, tuple(waits), number - 1,
        ))  # fmt: skip
    while len(ends) < (num_decode + 1) * inner * outer:
        ends.append(len(entries))
    ends[-1] = len(entries)
    return Topology(tuple(entries), column, inner, outer, num_decode + 1, tuple(ends), tuple(map(tuple, samples)))
