"""The zig-zag order of a wave: which mini-batch passes which layer when, before any task of it is named.

The column schedule takes all mini-batches of a layer, then the next layer; the row schedule all layers of a mini-batch,
then the next mini-batch. Either way it is a row of groups that share streamed weights, and of positions (a mini-batch
in a layer) within them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import groupby, product
from typing import NamedTuple

from flexhybrid.core.context.selection import num_whole
from flexhybrid.core.schedule.refill import RunningBatch
from flexhybrid.core.schedule.step_work import counts_of, step_work
from flexhybrid.core.schedule.steps import MiniBatchStep, in_window, make_step
from flexhybrid.core.task import Work
from flexhybrid.core.wave import Wave

StopsUntil = Callable[[int], Collection[int]]


def no_stops(_iteration: int) -> frozenset[int]:
    """Nobody stops early: the lengths alone decide (ignore_eos, and every prediction)."""
    return frozenset()


StepWorks = tuple[MiniBatchStep, dict[str, Work]]


class Position(NamedTuple):
    """A mini-batch in a layer: the payload of its tasks."""

    step: MiniBatchStep
    layer: int
    works: dict[str, Work]
    slot: int  #: of the KV, ACT, staging and strip buffers
    weight_slot: int
    leads: bool  #: it is the first of its group
    form: int  #: of two positions with the same one the tasks read and write the same

    def follows(self, other: Position) -> bool:
        """Whether it needs what the other computes: it continues its very requests, or shares it with others."""
        return self.step.mini_batch == other.step.mini_batch or bool(other.step.builds and self.step.commons)


def positions(wave: Wave, stops_until: StopsUntil, first_iteration: int) -> Iterator[list[Position]]:
    """Runs of positions that share a layer's weights. Iteration i + 1 is settled when i's last group is taken."""
    first = num_whole(wave.policy.selection, wave.shape.num_layers)
    iteration, number, slot = first_iteration, 0, 0
    forms: dict[tuple, int] = {}
    batch = RunningBatch(wave)
    laid_out = _lay_out(batch, iteration, frozenset(), forms)
    while laid_out:
        layers, column = range(wave.shape.num_layers), wave.policy.schedule == "column"
        in_turn = sorted(laid_out, key=lambda s: s[1][0].chunk)  # so that a chunk need not wait for the one before
        sharing = (
            [in_turn]
            if column
            else [list(chunk_positions) for _, chunk_positions in groupby(laid_out, lambda s: s[1][0].mini_batch)]
        )
        for members, layer in product(sharing, layers):
            group = []
            for by_window, whole, step_form in members:
                slots = number % 2, slot % 2
                step, works = by_window[wave.shape.attention_of(layer).window] if layer >= first else whole
                leads = not group
                form = forms.setdefault((layer, slots, leads, step_form), len(forms))
                group.append(Position(step, layer, works, *slots, leads, form))
                number += 1
            slot += 1
            yield group
        iteration += 1
        laid_out = _lay_out(batch, iteration, stops_until(iteration - 2), forms)


def _lay_out(
    batch: RunningBatch, iteration: int, stopped: Collection[int], forms: dict[tuple, int]
) -> list[tuple[dict[int | None, StepWorks], StepWorks, int]]:
    """Of the mini-batches that have a request: the step and its works in layers that look at a choice of tokens, by
    their window, and in those that look at all, and their form: what else than the layer and its slots decides the
    forms of its positions.
    """
    steps, wave = [], batch.wave
    for k, chunk, piece, built, requests in batch.steps(iteration, stopped):
        step = make_step(wave, iteration, k, requests, chunk, piece, built)
        counts = counts_of(step, wave)
        works = step_work(wave.shape, wave.policy, wave.stored, counts, False)
        whole_step, whole = step, works
        if counts.selected is not None:
            whole = step_work(wave.shape, wave.policy, wave.stored, counts, True)
        if wave.whole:
            whole_step = replace(make_step(wave.whole, iteration, k, requests, chunk, piece), whole=True)
            of_all = counts_of(whole_step, wave.whole)
            whole = step_work(wave.shape, wave.whole.policy, wave.stored, of_all, True)
        by_window: dict[int | None, StepWorks] = {None: (step, works)}
        for window in wave.shape.windows:
            by_window[window] = by_window[None]
            if wave.policy.selection.method == "none" and (narrow := in_window(step, window, wave)) is not step:
                of_narrow = step_work(wave.shape, wave.policy, wave.stored, counts_of(narrow, wave), False)
                by_window[window] = narrow, of_narrow
        stored = tuple((s.entry, s.representation, s.own, s.shared) for s in (*step.stores, *whole_step.stores))
        common = tuple(sorted({segment.entry for segment in step.shared_segments})), step.builds
        form = k, chunk, step.prefill, step.last, tuple(whole), stored, common
        form += tuple(tuple(works) for _, works in by_window.values())
        steps.append((by_window, (whole_step, whole), forms.setdefault(form, len(forms))))
    return steps
