"""Seconds and bytes of every verb in the prefill and in stretches of the decode, in arrays [candidates].

Work comes from ``step_work``, seconds from ``sim.cost.price``. The busiest resource's sum over a phase is a lower bound
of the phase's time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache, partial, reduce
from typing import Any

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.selection import num_whole
from flexhybrid.core.hardware import FAR_MEMORY, PAGE_CACHE
from flexhybrid.core.plan import PAGE_BYTES
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.step_work import StepCounts, recomputed_rows, work_of_kind
from flexhybrid.core.task import RESOURCES, Work
from flexhybrid.core.verbs import RESOURCE_OF, VERBS
from flexhybrid.core.wave import check_planned
from flexhybrid.core.work import experts, kv_gen
from sim.candidate_memory import peak_of_steps
from sim.candidates import Candidates, CandidateSteps, DecodeStretch, candidate_steps
from sim.cost import byte_times, hardware_of, price

#: (verb, True in a layer that attends to all tokens in a model whose other layers select, True in one of the last
#: mini-batches, the layer's index in ``CandidateSteps.kinds``)
VerbKey = tuple[str, bool, bool, int]


#: Verbs that follow the last of the mini-batches that share experts.
AFTER_ROUTES = ("experts", "finish", "head", "sample", "store_out")


@dataclass
class _Phase:
    """Costs of one task of each verb, in the prefill or in a stretch of the decode; arrays [candidates]."""

    seconds: dict[VerbKey, np.ndarray] = field(default_factory=dict)
    link_bytes: dict[VerbKey, Any] = field(default_factory=dict)
    #: whether a candidate has the task; absent if all have it
    present: dict[VerbKey, np.ndarray] = field(default_factory=dict)
    #: verb -> seconds of the run's first load of weights, a whole layer
    first_load_s: dict[str, np.ndarray] = field(default_factory=dict)
    #: kind of layer -> rows of all mini-batches, if they share its experts
    expert_rows: dict[int, Any] = field(default_factory=dict)
    #: kind of layer -> seconds of the first of two loads (``Wave.cuts_layer``); 0 if one load has all weights
    early_load_s: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def verbs(self) -> list[str]:
        """Return each verb once. The order is fixed, so that sums are bit-identical in every process."""
        return list(dict.fromkeys(verb for verb, *_ in self.seconds))


class VerbSeconds:
    """Seconds and link bytes of every verb in each phase; arrays [candidates]. Phase 0 is the prefill; phases 1, 2, …
    are the stretches of the decode."""

    def __init__(self, steps: CandidateSteps, stretches: list[DecodeStretch], beside_link: bool = False):
        """Price all phases. ``beside_link``: price every candidate as if the link were always busy, so that sums are
        linear in the shares. Otherwise, candidates that stay on the device get the rates of an idle link."""
        self.steps, self.hardware, self.stretches = steps, hardware_of(steps.problem), stretches
        self.alone = steps.stays_on_device
        by_memory = self.hardware.notes.keys() & {FAR_MEMORY, PAGE_CACHE}
        self.byte_times = byte_times(self.hardware, peak_of_steps(steps)) if by_memory else {}
        # The machine for candidates that stay on the device; None if there are none.
        self.undisturbed = self.hardware.undisturbed if self.alone.any() and not beside_link else None
        self.phases = [self._phase(None)]
        # (prefill verb, kind of layer) -> seconds of work that has no task in the template run
        self.extra_prefill_s: dict[tuple[str, int], np.ndarray] = {}
        if np.any(steps.num_chunks > 1):
            self._add_chunks()
        for stretch in stretches:
            self.phases.append(self._phase(stretch))
        self._busy: dict[int, dict[str, np.ndarray]] = {}
        self._rounds: dict[tuple[int, str, tuple[int, ...]], np.ndarray] = {}

    # ---- one task

    def _price(self, verb: str, resource: str, work: Work) -> Any:
        """Return the seconds of a task, [candidates] or one number for all."""
        if resource in self.byte_times:
            work = work._replace(link_bytes=work.link_bytes * self.byte_times[resource])
        seconds = price(self.hardware, verb, resource, work)
        if self.undisturbed is None:
            return seconds
        return np.where(self.alone, price(self.undisturbed, verb, resource, work), seconds)

    def _phase(self, stretch: DecodeStretch | None) -> _Phase:
        """Price every verb in a stretch of the decode, or in the prefill (None)."""
        phase = _Phase()
        for kind in range(len(self.steps.kinds)):
            self._add_kind(phase, stretch, kind)
        self._add_weights(phase)
        return phase

    def _add_kind(self, phase: _Phase, stretch: DecodeStretch | None, kind: int) -> None:
        """Price every verb in layers of one kind, in a stretch of the decode or in the prefill (None)."""
        steps, (weights, window, *_) = self.steps, self.steps.kinds[kind]
        shape = steps.problem.shape.of_weights(weights)
        step_of = steps.decode(stretch, window) if stretch else partial(steps.prefill, window=window)
        if steps.whole:
            # In a stretch, layers that drop tokens store to one entry; the others store to several.
            mixed = steps.whole.decode(replace(stretch, entry=None)) if stretch else steps.whole.prefill
        rows: list[Any] = []  # of a full mini-batch, and of one of the last, that pass experts together with others
        for last, batch in ((False, steps.full_size), (True, steps.last_size)):
            if last and np.array_equal(batch, steps.full_size):
                for table in (phase.seconds, phase.present, phase.link_bytes):
                    of_kind = [(key, value) for key, value in table.items() if key[3] == kind]
                    table.update({(verb, all_tokens, True, kind): value for (verb, all_tokens, *_), value in of_kind})
                break
            counts = step_of(batch)
            ways = [(False, steps.policy, counts)]
            if counts.selected is not None:
                ways.append((True, steps.policy, counts))
            if steps.whole:
                ways.append((True, steps.whole.policy, mixed(batch)))
            for all_tokens, policy, counts in ways:
                works = work_of_kind(shape, policy, steps.stored, counts, all_tokens, steps.kinds[kind])
                rows += [works["experts"].tokens] if "experts" in works else []
                for verb, work in works.items():
                    key = verb, all_tokens, last, kind
                    phase.seconds[key], present = self._task_seconds(verb, work, counts)
                    if present is not None:
                        phase.present[key] = present
                    if VERBS[verb].cargo:
                        phase.link_bytes[key] = work.link_bytes
            if steps.whole:
                for verb in [verb for verb in phase.verbs if (verb, True, last, kind) not in phase.seconds]:
                    key = verb, True, last, kind  # these layers lack the verb, for example ``rank``
                    phase.seconds[key], phase.present[key] = np.zeros(len(batch)), np.zeros(len(batch), bool)
                    if VERBS[verb].cargo:
                        phase.link_bytes[key] = 0.0
        if rows:
            phase.expert_rows[kind] = self._of_all(rows[0], rows[-1])
            parts = np.minimum(steps.policy.experts.batch, steps.num_mini_batches)
            mean_s = parts * self.experts_s(phase, kind, 1.0 / parts) / steps.num_mini_batches
            phase.seconds |= {("experts", False, last, kind): mean_s for last in (False, True)}

    def experts_s(self, phase: _Phase, kind: int, share) -> Any:
        """Return the seconds of experts for a ``share`` of a layer's rows, [candidates] or one number."""
        shape = self.steps.problem.shape.of_weights(self.steps.kinds[kind].weights)
        work = experts(shape, self.steps.stored.compute, phase.expert_rows[kind] * share)
        return self._price("experts", RESOURCE_OF["experts"], work)

    def _task_seconds(self, verb: str, work: Work, counts: StepCounts) -> tuple[Any, np.ndarray | None]:
        """Return (mean seconds of a task over a phase's steps, whether a candidate has it or None if all have)."""
        resource, share, empty = RESOURCE_OF[verb], _present_share(verb, counts), Work()
        if verb == "kv_gen" and counts.selected is None:
            rows = recomputed_rows(counts)
            work, empty = (kv_gen(self.steps.problem.shape, self.steps.problem.bytes_per_element, n) for n in (rows, 0))
        seconds = self._price(verb, resource, work)
        if share is None:
            return seconds, None
        return np.where(share > 0, seconds - (1.0 - share) * self._price(verb, resource, empty), 0.0), share > 0

    def _add_weights(self, phase: _Phase) -> None:
        """Add the loads of streamed weights: a whole layer in the row schedule, slices in the column schedule."""
        steps = self.steps
        count, by_row = steps.num_mini_batches, steps.policy.schedule == "row"
        streamed = steps.layer_sizes - steps.resident
        for verb, resource, of_weights, on_host in (
            ("load_weights", "h2d", streamed, streamed - steps.on_disk),
            ("read_weights", "disk_read", steps.on_disk, 0.0 * steps.on_disk),
        ):
            if not np.any(of_weights):
                continue
            overhead_s = self._price(verb, resource, Work())
            for kind, (weights, *_) in enumerate(steps.kinds):
                num_bytes, cut_s = of_weights[weights], 0.0
                layer_s = np.where(num_bytes > 0, self._price(verb, resource, Work(link_bytes=num_bytes)), 0.0)
                if verb == "load_weights" and steps.policy.weight_order == "kv_act_first":
                    phase.early_load_s[kind] = self._early_load_s(weights)
                    cut_s = np.where(phase.early_load_s[kind] > 0, overhead_s, 0.0)
                evenly_s = np.where(num_bytes > 0, (layer_s - overhead_s) / count, 0.0)  # seconds of each mini-batch
                slices = num_slices(count, on_host[weights], steps.on_disk[weights]) / count
                for last in (False, True):
                    key = verb, False, last, kind
                    phase.seconds[key] = cut_s + (layer_s if by_row else evenly_s + overhead_s * slices)
                    phase.link_bytes[key] = num_bytes if by_row else num_bytes / count
                if kind == steps.layers[0]:
                    phase.first_load_s[verb] = layer_s

    def _early_load_s(self, weights: int) -> np.ndarray:
        """Return the seconds of loading W_K and W_V if they have a load of their own before ACT, else 0;
        [candidates]."""
        steps, layout = self.steps, self.steps.layouts[weights]
        early = layout.kv_end - steps.resident[weights]
        whole = steps.policy.schedule == "row" or steps.num_mini_batches == 1
        cut = whole & (early > 0) & (steps.on_disk[weights] == 0) & (layout.kv_end < layout.total_bytes)
        cut = cut & (not steps.problem.shape.unpacks(steps.policy.bits.weights))
        return np.where(cut, self._price("load_weights", "h2d", Work(link_bytes=np.maximum(early, 0))), 0.0)

    def _add_chunks(self) -> None:
        """Add the work of all chunks of a long prompt to the prefill, whose template computes prompts whole.

        Later chunks read what earlier chunks stored, with verbs that a prefill without chunks lacks. Their seconds are
        added to other tasks: those on h2d to the loads of streamed weights, the others to the prompt's attention.
        """
        steps, prefill, chunked = self.steps, self.phases[0], self.steps.num_chunks > 1
        known = set(prefill.verbs)  # the verbs of a prefill without chunks
        for kind, (weights, window, *_) in enumerate(steps.kinds):
            shape = steps.problem.shape.of_weights(weights)
            seconds, moved = {}, {}
            for count, counts in ((1.0, steps.first_chunk(window)), (steps.num_chunks - 1, steps.later_chunk(window))):
                works = work_of_kind(shape, steps.policy, steps.stored, counts, False, steps.kinds[kind])
                for verb, work in works.items():
                    if VERBS[verb].per == "iteration" and verb != "embed":
                        continue
                    seconds[verb] = seconds.get(verb, 0.0) + count * self._price(verb, RESOURCE_OF[verb], work)
                    if VERBS[verb].cargo:
                        moved[verb] = moved.get(verb, 0.0) + count * work.link_bytes
            for table, values in ((prefill.seconds, seconds), (prefill.link_bytes, moved)):
                for verb, value in values.items():
                    for last in (False, True):
                        key = verb, False, last, kind
                        table[key] = np.where(chunked, value, table.get(key, 0.0))
            streamed = steps.layer_sizes[weights] > steps.resident[weights]
            for verb in [verb for verb in seconds if verb not in known]:
                extra_s = np.where(chunked, seconds[verb], 0.0)
                on_link = streamed & (RESOURCE_OF[verb] == "h2d")
                for carrier, share_s in (("load_weights", on_link * extra_s), ("attend_prefill", ~on_link * extra_s)):
                    self.extra_prefill_s[carrier, kind] = self.extra_prefill_s.get((carrier, kind), 0.0) + share_s

    def task(self, phase: int, verb: str, all_tokens: bool, kind: int, full: bool | np.ndarray):
        """Return (seconds of a task or None without work, whether a candidate has it or None if all have). ``kind``:
        the layer's kind. ``full``: whether the mini-batch is not one of the last, [candidates] or one value."""
        table, presence = self.phases[phase].seconds, self.phases[phase].present
        if (verb, all_tokens, False, kind) not in table:
            all_tokens = False
        if (verb, all_tokens, False, kind) not in table:
            return None, None
        of_full, of_last = ((verb, all_tokens, last, kind) for last in (False, True))
        if isinstance(full, bool):
            key = of_full if full else of_last
            seconds, present = table[key], presence.get(key)
        else:
            seconds = np.where(full, table[of_full], table[of_last])
            present = None
            of_full, of_last = presence.get(of_full), presence.get(of_last)
            if of_full is not None or of_last is not None:
                present = np.where(full, *(True if has is None else has for has in (of_full, of_last)))
        if not phase and (verb, kind) in self.extra_prefill_s:
            seconds = seconds + self.extra_prefill_s[verb, kind]
        return seconds, present

    # ---- sums

    def round_seconds(self, phase: int, loop: str, kinds: tuple[int, ...] = ()):
        """Return the seconds of one more round of a loop on its busiest resource, a mean over layers of these kinds.
        ``loop``: "inner" (a round is a position), "last inner" (a position in the last round of the outer loop),
        "outer" (a layer or a mini-batch) or "iteration"."""
        key = phase, loop, kinds
        if key not in self._rounds:
            if loop == "iteration":
                busy = self.busy(phase)
            elif loop == "outer" and self.steps.policy.schedule == "row":
                busy = self._sum_of_rounds(phase, loop, self.steps.layers)
            else:
                busy = {r: seconds / len(kinds) for r, seconds in self._sum_of_rounds(phase, loop, kinds).items()}
            self._rounds[key] = longest(*busy.values())
        return self._rounds[key]

    def _sum_of_rounds(self, phase: int, loop: str, kinds: tuple[int, ...]) -> dict[str, Any]:
        """Return resource -> seconds of one round in each layer; ``kinds``: the kinds of these layers."""
        busy: dict[str, Any] = dict.fromkeys(RESOURCES, 0.0)
        for place, kind in enumerate(dict.fromkeys(kinds)):
            for resource, seconds in self._busy_round(phase, loop, kind, kinds.count(kind), not place).items():
                busy[resource] = busy[resource] + seconds
        return busy

    def _busy_round(self, phase: int, loop: str, kind: int, count: int, first: bool) -> dict[str, np.ndarray]:
        """Return resource -> seconds of ``count`` rounds of the inner or outer loop in layers of a kind. ``first``:
        also count the verbs that a mini-batch has once per iteration."""
        column = self.steps.policy.schedule == "column"
        once = loop == "last inner" if column else loop == "outer"
        busy: dict[str, Any] = dict.fromkeys(RESOURCES, 0.0)
        for verb in self.phases[phase].verbs:
            seconds = self.phases[phase].seconds.get((verb, False, False, kind))
            if seconds is None or VERBS[verb].per == "iteration" and not (once and first):
                continue
            if column and verb == "dequantize_weights":
                seconds = seconds if loop == "outer" else 0.0
            elif verb in AFTER_ROUTES and kind in self.phases[phase].expert_rows and loop != "outer":
                continue
            elif column and loop == "outer":
                seconds = self._of_all(seconds, self.phases[phase].seconds[verb, False, True, kind])
            if VERBS[verb].per != "iteration":
                seconds = seconds * count
            resource = RESOURCE_OF[verb]
            busy[resource] = busy[resource] + seconds
        return busy

    def _of_all(self, full, last):
        """Return the sum over mini-batches of a value that is ``full`` or, in the last ones, ``last``."""
        return (self.steps.num_mini_batches - self.steps.num_last) * full + self.steps.num_last * last

    def _total(self, values: dict[VerbKey, np.ndarray], verb: str, first_load: np.ndarray | None = None):
        """Return one iteration's sum of a verb over layers and mini-batches. ``first_load``: the value of the first
        layer in the column schedule (None: as in the other layers)."""
        steps, column = self.steps, self.steps.policy.schedule == "column"
        of_layers, first = steps.layers, num_whole(steps.policy.selection, steps.problem.shape.num_layers)
        per = VERBS[verb].per
        if per == "iteration":
            of_layers = of_layers[:1]
        elif per == "gap":
            of_layers = of_layers[1:]
        elif per == "choosing layer":
            of_layers = of_layers[first:]
        total: Any = 0.0
        for kind in range(len(steps.kinds)):
            count, whole = of_layers.count(kind), steps.layers[:first].count(kind)
            full = values.get((verb, False, False, kind))
            if full is None:  # only layers that attend to all tokens have the verb
                if (verb, True, False, kind) in values:
                    of_whole = (values[verb, True, last, kind] for last in (False, True))
                    total = total + whole * self._of_all(*of_whole)
                continue
            if verb == "dequantize_weights" and column:
                total = total + count * full
                continue
            of_layer = self._of_all(full, values[verb, False, True, kind])
            if column and first_load is not None and kind == steps.layers[0]:
                total = total + ((count - 1) * of_layer + first_load)
                continue
            total = total + count * of_layer
            if (verb, True, False, kind) in values and per == "layer":
                of_whole = self._of_all(values[verb, True, False, kind], values[verb, True, True, kind])
                total = total + whole * (of_whole - of_layer)
        return total

    def busy(self, phase: int) -> dict[str, np.ndarray]:
        """Return resource -> seconds of one iteration of a phase."""
        if phase not in self._busy:
            busy: dict[str, Any] = dict.fromkeys(RESOURCES, 0.0)
            table = self.phases[phase]
            for verb in table.verbs:
                first_load_s = None if phase else table.first_load_s.get(verb)
                busy[RESOURCE_OF[verb]] += self._total(table.seconds, verb, first_load_s)
            self._busy[phase] = busy
        return self._busy[phase]

    def decode_busy(self) -> dict[str, np.ndarray]:
        """Return resource -> seconds of the decode."""
        busy: dict[str, Any] = dict.fromkeys(RESOURCES, 0.0)
        for phase, stretch in enumerate(self.stretches, start=1):
            for resource, seconds in self.busy(phase).items():
                busy[resource] = busy[resource] + stretch.count * seconds
        return busy

    def decode_bound_s(self):
        """Return the seconds of the decode if each stretch takes its busiest resource's time."""
        pairs = enumerate(self.stretches, start=1)
        return sum((stretch.count * longest(*self.busy(phase).values()) for phase, stretch in pairs), start=0.0)

    def after_the_last_token(self) -> dict[str, np.ndarray]:
        """Return resource -> most seconds of work that may follow the last token.

        This is storing: a position waits only for stores of two positions earlier, and these for stores two positions
        before them. So the stores of up to five positions may end late.
        """
        late: dict[str, Any] = dict.fromkeys(RESOURCES, 0.0)
        phase = self.phases[-1]
        for verb in phase.verbs:
            if VERBS[verb].stores:
                resource = RESOURCE_OF[verb]
                seconds = longest(*(value for (name, *_), value in phase.seconds.items() if name == verb))
                late[resource] = late[resource] + seconds * (self.steps.num_mini_batches if verb == "store_out" else 5)
        return late

    def traffic(self) -> dict[tuple[str, str], np.ndarray]:
        """Return (link, cargo) -> bytes of the run."""
        moved: dict[tuple[str, str], np.ndarray] = {}
        for phase, times in zip(self.phases, (1.0, *(stretch.count for stretch in self.stretches)), strict=True):
            of_phase: dict[tuple[str, str], np.ndarray] = {}
            for verb in dict.fromkeys(verb for verb, *_ in phase.link_bytes):
                key = RESOURCE_OF[verb], VERBS[verb].cargo
                of_phase[key] = of_phase.get(key, 0.0) + self._total(phase.link_bytes, verb)
            for key, num_bytes in of_phase.items():
                moved[key] = moved.get(key, 0.0) + times * num_bytes
        return moved


def num_slices(num_mini_batches, on_host, on_disk):
    """Return how many slices of a layer have bytes on the host or the disk; arrays [candidates]. A layer has one slice
    per mini-batch. The whole pages of each tier are spread evenly over the slices."""
    pages = [np.minimum(num_mini_batches, np.ceil(num_bytes / PAGE_BYTES)) for num_bytes in (on_host, on_disk)]
    slices = np.maximum(*pages)
    apart = (slices < num_mini_batches) & (np.minimum(*pages) > 1)
    if np.any(apart):
        slices = np.array(slices)
        triples = [np.broadcast_to(n, slices.shape)[apart] for n in (num_mini_batches, *pages)]
        slices[apart] = [_num_places(*map(int, triple)) for triple in np.stack(triples, axis=-1)]
    return slices


@lru_cache(maxsize=4096)
def _num_places(slices: int, *pages: int) -> int:
    """Return how many of ``slices`` slices of a layer's weights have at least one page. ``pages``: number of the
    layer's streamed pages in each tier."""
    return len({slices * page // count for count in pages for page in range(count)})


def _present_share(verb: str, counts: StepCounts):
    """Return the share of a phase's steps in which a verb has work, [candidates]; None if it has work in every step.
    The share is below 1 because new tokens of a request go to one cache entry at a time."""
    share, needs, (representations, tiers) = None, VERBS[verb].needs, VERBS[verb].blocks or ((), ())
    if needs == "recomputed":
        share = counts.recomputed / BLOCK_TOKENS
    elif needs == "rows" or needs == "blocks" and counts.selected is None:
        of_copies = counts.stored if needs == "rows" else counts.copies
        copies = (n for c, n in of_copies.items() if c.representation in representations and c.tier in tiers)
        share = (sum(copies) if needs == "rows" else longest(*copies)) / counts.batch
    return None if share is None or np.all(share >= 1) else np.minimum(1.0, share)


def longest(*values):
    """Return the elementwise maximum of several arrays or numbers."""
    return reduce(np.maximum, values)


def resource_sums(problem: Problem, candidates: Candidates) -> np.ndarray:
    """Return the sums of each candidate, the terms of a linear program over shares: [*candidates' shape, terms].

    The terms are each resource's seconds in the prefill, each resource's seconds in the decode, and each tier's bytes.
    All candidates must use the same cache entries. Raise InputError for a policy that cannot be planned or a verb
    without a line.
    """
    check_planned(candidates.policy, problem.shape)
    steps, size = candidate_steps(problem, candidates)
    verbs = VerbSeconds(steps, [stretch for stretch in steps.stretches() if np.any(stretch.count)], True)
    tables = verbs.busy(0), verbs.decode_busy(), peak_of_steps(steps)
    zero = np.zeros(len(steps.batch))
    return np.stack([(zero + value).reshape(size) for table in tables for value in table.values()], axis=-1)
