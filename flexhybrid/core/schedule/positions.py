"""The order of a wave's positions. A position is a mini-batch in a layer.

In the column schedule, all mini-batches pass a layer before the next layer. In the row schedule, a mini-batch passes
all layers before the next mini-batch. Both are sequences of layer groups: positions that share a layer's streamed
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from itertools import groupby, product
from typing import NamedTuple

from flexhybrid.core.context.selection import num_whole
from flexhybrid.core.model.shape import LayerKind
from flexhybrid.core.problem import launches_steps
from flexhybrid.core.schedule.scheduler import Scheduler
from flexhybrid.core.schedule.step_work import StepCounts, counts_of, step_work, work_of_kind
from flexhybrid.core.schedule.steps import MiniBatchStep, make_step
from flexhybrid.core.task import Work
from flexhybrid.core.wave import Wave

QUEUED_SHARE = 4  #: while the planner waits for tokens, 1 / QUEUED_SHARE of a group's positions stay queued


class Stops(NamedTuple):
    """Functions that report requests that end before their limits.

    ``until(iteration, num_steps)``: returns the requests that have ended with a token of the stream's first
    ``num_steps`` sampling steps, and may block for these tokens. It is called when the requests of ``iteration`` are
    chosen. ``may_come(requests)``: returns whether any of these requests may end early.
    """

    until: Callable[[int, int], Collection[int]]
    may_come: Callable[[Iterable[int]], bool]


#: Every request runs to its limit: with ignore_eos, and in predictions for fixed lengths.
NO_STOPS = Stops(lambda iteration, num_steps: frozenset(), lambda requests: False)


def num_awaited(num_positions: int) -> int:
    """Return how many of the last group's first positions are awaited before the next iteration's requests are chosen.
    Meanwhile, the lanes work on the other positions, at least one. A stop in those takes effect one iteration late."""
    return num_positions - max(1, num_positions // QUEUED_SHARE)


StepWorks = tuple[MiniBatchStep, dict[str, Work]]


class Position(NamedTuple):
    """A step of a mini-batch in a layer; the payload of its tasks."""

    step: MiniBatchStep
    layer: int
    works: dict[str, Work]  #: verb -> work
    slot: int  #: slot of the KV, ACT, staging and strip buffers
    weight_slot: int  #: slot of the layer's weights
    leads: bool  #: it is the first position of its group
    form: int  #: positions with equal forms have tasks with equal reads and writes

    def follows(self, other: Position) -> bool:
        """Return whether this position needs the other's results: it has the same mini-batch, or attends to shared
        blocks that the other computes."""
        return self.step.mini_batch == other.step.mini_batch or bool(other.step.builds and self.step.commons)


class LayerGroup(NamedTuple):
    """Positions that share a layer's weights."""

    iteration: int
    layer: int
    weight_slot: int
    positions: list[Position]  #: in order; empty if the iteration's requests are not chosen yet


_new = tuple.__new__  #: halves the time of making a NamedTuple


def positions(wave: Wave, stops: Stops, first_iteration: int) -> Iterator[LayerGroup]:
    """Yield the layer groups of each iteration.

    The requests of iteration i + 1 are chosen before the last group of iteration i is computed. If requests may stop in
    that group, the first group of iteration i + 1 is yielded twice: first without positions, for its weight loads, and
    again once the stops of the positions that ``num_awaited`` counts are known.
    """
    first = num_whole(wave.policy.selection, wave.shape.num_layers)
    iteration, number, slot, num_steps = first_iteration, 0, 0, 0
    forms: dict[tuple, int] = {}  # of positions
    step_forms: dict[tuple, int] = {}
    kinds = tuple(dict.fromkeys(wave.shape.layer_kinds))
    kind_of = [kinds.index(kind) for kind in wave.shape.layer_kinds]
    batch, launched_whole = Scheduler(wave), launches_steps(wave.problem, wave.policy)
    laid_out = _lay_out(batch, iteration, frozenset(), step_forms)
    while laid_out:
        layers, column = range(wave.shape.num_layers), wave.policy.schedule == "column"
        in_turn = sorted(laid_out, key=lambda s: s[0].chunk)  # chunks of one prompt are apart: each needs the previous
        by_mini_batch = (list(steps) for _, steps in groupby(laid_out, lambda s: s[0].mini_batch))
        sharing = [in_turn] if column else by_mini_batch
        group: list[Position] = []
        for members, layer in product(sharing, layers):
            group = []
            weight_slot, kind = slot % 2, kind_of[layer]
            for _, by_kind, whole, step_form in members:
                step, works = by_kind[kind] if layer >= first else whole[kinds[kind].weights]
                leads = not group
                form = forms.setdefault((layer, number % 2, weight_slot, leads, step_form), len(forms))
                group.append(_new(Position, (step, layer, works, number % 2, weight_slot, leads, form)))
                number += 1
            yield LayerGroup(iteration, layer, weight_slot, group)
            slot += 1
        iteration += 1
        num_steps += sum(step.last for step, *_ in laid_out)
        unknown, awaited = group, num_awaited(len(group))
        # If one CUDA graph launches a whole step, its launch must not be delayed by waiting for tokens.
        if launched_whole and not awaited or stops.may_come(_running_on(wave, iteration, group[:awaited])):
            yield LayerGroup(iteration, 0, slot % 2, [])
            unknown = group[awaited:]
        known = num_steps - sum(position.step.last for position in unknown)
        laid_out = _lay_out(batch, iteration, stops.until(iteration, known), step_forms)


def _running_on(wave: Wave, iteration: int, sampling: list[Position]) -> list[int]:
    """Return the requests that get a token in these positions and continue in ``iteration`` unless that token ends
    them."""
    requests: list[int] = []
    for step in (position.step for position in sampling if position.step.last):
        runs_on = wave.workload.max_tokens[step.requests] > iteration - wave.joined[step.requests]
        requests += step.queued[runs_on].tolist()
    return requests


def _lay_out(
    batch: Scheduler, iteration: int, stopped: Collection[int], forms: dict[tuple, int]
) -> list[tuple[MiniBatchStep, list[StepWorks], dict[int, StepWorks], int]]:
    """Return the steps of an iteration. Each is a tuple of:

    - the step;
    - (step, works) by kind of layers, under the policy's selection;
    - kind of weights -> (step, works) in layers that attend to all tokens;
    - its form: a number. Positions in one layer and the same buffer slots have equal forms if their steps have.
    """
    steps, wave = [], batch.wave
    kinds = tuple(dict.fromkeys(wave.shape.layer_kinds))
    shapes = {kind.weights: wave.shape.of_weights(kind.weights) for kind in kinds}
    priced: dict[LayerKind, tuple[StepCounts, dict[str, Work]]] = {}
    for k, chunk, piece, built, requests in batch.steps(iteration, stopped):
        of_windows: dict[int | None, tuple[MiniBatchStep, StepCounts]] = {}
        for window in wave.windows:
            step = make_step(wave, iteration, k, requests, chunk, piece, built=built, window=window)
            of_windows[window] = step, counts_of(step, wave)
        step, counts = of_windows[wave.windows[-1]]  # the last kind of layers keeps the most tokens
        whole_step, policy, by_kind = step, wave.policy, []
        for kind in kinds:
            of_step, of_counts = of_windows.get(kind.window, (step, counts))  # under a selection there is one window
            known, works = priced.get(kind, (None, {}))
            if known != of_counts:  # otherwise the works of the previous mini-batch apply
                works = work_of_kind(shapes[kind.weights], policy, wave.stored, of_counts, False, kind)
                priced[kind] = of_counts, works
            by_kind.append((of_step, works))
        whole: dict[int, StepWorks] = {kind.weights: of for kind, of in zip(kinds, by_kind, strict=True)}
        if wave.whole:
            whole_step = replace(make_step(wave.whole, iteration, k, requests, chunk, piece), whole=True)
            counts, policy = counts_of(whole_step, wave.whole), wave.whole.policy
        if wave.whole or counts.selected is not None:
            whole = {
                kind: (whole_step, step_work(shape, policy, wave.stored, counts, True))
                for kind, shape in shapes.items()
            }
        form = k, chunk, step.prefill, step.last, step.builds
        for of_kind, works in (*by_kind, *whole.values()):
            stored = tuple((s.entry, s.representation, s.own, s.shared) for s in of_kind.stores)
            common = tuple(sorted({segment.entry for segment in of_kind.shared_segments}))
            common += tuple(sorted({segment.entry for part in of_kind.commons for segment in part.on_host}))
            form += stored, common, bool(of_kind.commons), tuple(works)
        steps.append((step, by_kind, whole, forms.setdefault(form, len(forms))))
    return steps
