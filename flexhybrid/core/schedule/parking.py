"""Contexts of requests that step back, parked in host memory until they return, where that is cheaper than to compute
them anew.

Only pools of the device are parked: from there a context crosses a link that is idle where all caches lie on the
device, and what it saves is computed on the resource that binds. From the host it would go to the disk; where caches
lie on the host the link binds, and computing a prompt anew on the same pass of the weights costs next to nothing.

A request that returns decodes at once, as if it had never left: it has its place's arrays as of ``given`` iterations
ago. Bits are those that were stored, so its tokens do not change.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

from flexhybrid.core.context.blocks import BlockManager
from flexhybrid.core.context.cache_entries import parts
from flexhybrid.core.hardware import LINKS, Hardware
from flexhybrid.core.schedule.step_work import StepCounts, counts_of, move_blocks, work_of_kind
from flexhybrid.core.schedule.steps import ContextMove, make_step
from flexhybrid.core.task import Work
from flexhybrid.core.verbs import VERBS
from flexhybrid.core.wave import Wave

Seconds = dict[str, float]  #: resource -> seconds


def can_park(wave: Wave) -> bool:
    """Return whether contexts of a batch that grows may be parked: all of each lies in blocks of its own in pools of
    the device, alike in all layers."""
    shape, on_device = wave.shape, all(part.tier == "device" for part in parts(wave.entries.names))
    alike = wave.windows == (None,) and not shape.recurrent and not shape.lending
    return wave.grows and on_device and alike and wave.sharing is None and wave.problem.hardware is not None


class Parking:
    """The parking area of a batch that was just opened: blocks of each entry, in each layer; who is there, by
    request."""

    def __init__(self, wave: Wave):
        self.wave, self.area = wave, BlockManager({})
        self._cheaper: dict[int, bool] = {}

    def held(self, tokens: int) -> dict[str, int]:
        """Blocks of each entry that hold a context of so many tokens."""
        return dict(zip(self.wave.entries.names, self.wave.entries.held(tokens).tolist(), strict=True))

    def take(self, request: int, tokens: int) -> bool:
        """Give a request that steps back with ``tokens`` cached room, where that is cheaper than to compute them anew,
        and there is room; return whether it has it."""
        if not self.is_cheaper(tokens) or not self.area.has_room(self.held(tokens)):
            return False
        self.area.take(request, self.held(tokens))
        return True

    def has(self, request: int) -> bool:
        return any(request in pool.held for pool in self.area.pools.values())

    def move(self, request: int, place: int) -> ContextMove:
        """Return the blocks of a parked request beside those that it has, or had, in a place."""
        parked = {name: self.area.blocks_of(name, request) for name in self.area.pools}
        held = {name: self.wave.tables[name][place, : len(blocks)].copy() for name, blocks in parked.items()}
        return ContextMove(place, {name: (held[name], blocks) for name, blocks in parked.items() if len(blocks)})

    # ---- what it costs

    def is_cheaper(self, tokens: int) -> bool:
        """Return whether moving a context of so many tokens there and back makes iterations longer by less than
        computing it anew in one of them; each takes as long as its busiest resource."""
        if tokens not in self._cheaper:
            self._cheaper[tokens] = self.moving_s(tokens) < self.computing_s(tokens)
        return self._cheaper[tokens]

    def moving_s(self, tokens: int) -> float:
        """Seconds by which moving a context out and back makes two iterations longer."""
        shape, stored = self.wave.shape, self.wave.stored
        moved = move_blocks(shape, stored, self.held(tokens))
        return sum(
            self._longer({VERBS[verb].resource: shape.num_layers * self._task(verb, moved)})
            for verb in ("park", "unpark")
        )

    def computing_s(self, tokens: int) -> float:
        """Seconds by which an iteration is longer that computes a prompt of so many tokens beside its decode."""
        of_entries = dict(zip(self.wave.entries.names, self.wave.entries.stored(tokens).tolist(), strict=True))
        stored = {part: of_entries[part.entry] for part in parts(self.wave.entries.names)}
        return self._longer(
            self._of_layers(StepCounts(True, 1, tokens, context=0, blocks={}, copies={}, stored=stored))
        )

    def _longer(self, more: Seconds) -> float:
        decode = self._decode
        return max(decode.get(r, 0.0) + more.get(r, 0.0) for r in {**decode, **more}) - max(decode.values())

    @cached_property
    def _decode(self) -> Seconds:
        """Seconds of each resource in an iteration of the batch behind its first prompts."""
        wave, seconds = self.wave, defaultdict[str, float](float)
        for k, group in enumerate(wave.mini_batches):
            for resource, spent in self._of_layers(counts_of(make_step(wave, 1, k, group), wave)).items():
                seconds[resource] += spent
        for layer in range(wave.shape.num_layers):
            placed = wave.placed_of(layer)
            streamed = placed.layout.total_bytes - placed.streamed_from
            if streamed:
                seconds["h2d"] += self._task("load_weights", Work(link_bytes=streamed))
            if placed.disk_bytes:
                seconds["disk_read"] += self._task("read_weights", Work(link_bytes=placed.disk_bytes))
        return seconds

    def _of_layers(self, counts: StepCounts) -> Seconds:
        """Seconds of a step of these counts, in all layers."""
        shape, policy, seconds = self.wave.shape, self.wave.policy, defaultdict[str, float](float)
        kinds = shape.layer_kinds
        for kind in dict.fromkeys(kinds):
            works = work_of_kind(shape.of_weights(kind.weights), policy, self.wave.stored, counts, False, kind)
            for verb, of in works.items():
                times = kinds.count(kind) if VERBS[verb].per != "iteration" else kind == kinds[0]
                seconds[VERBS[verb].resource] += times * self._task(verb, of)
        return seconds

    def _task(self, verb: str, of: Work) -> float:
        """Seconds of a task."""
        resource = VERBS[verb].resource
        num_bytes = of.link_bytes if resource in LINKS else of.memory_bytes
        return float(self._hardware.line(verb, resource, of.line).seconds(of.flops, num_bytes))

    @cached_property
    def _hardware(self) -> Hardware:
        hardware = self.wave.problem.hardware
        if hardware is None:
            raise ValueError("nothing is known of the machine")
        return hardware.at_work(self.wave.policy)
