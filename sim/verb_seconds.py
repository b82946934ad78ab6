"""Seconds and bytes of every verb in the prefill and in the pieces of the decode, in arrays of candidates.

Work comes from ``core.steps.step_work``, seconds from ``sim.cost.price``: nothing is counted here a second time.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.context.selection import num_choosing
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.plan import PAGE_BYTES
from flexhybrid.core.schedule.steps import StepCounts, step_work
from flexhybrid.core.task import RESOURCES, Work
from flexhybrid.core.work import kv_gen
from sim.candidate_steps import Loads, Piece
from sim.cost import price
from sim.walk import longest

#: Where each verb runs; one home, so that a phase's sums need no stream.
RESOURCE_OF = {
    "read_weights": "disk_read", "read_act": "disk_read", "read_kv": "disk_read",
    "write_act": "disk_write", "write_kv": "disk_write",
    "load_weights": "h2d", "load_act": "h2d", "load_kv": "h2d", "load_hidden": "h2d", "load_keys": "h2d",
    "load_attended": "h2d",
    "store_act": "d2h", "store_kv": "d2h", "store_hidden": "d2h", "store_query": "d2h", "store_index": "d2h",
    "store_out": "d2h",
    "scatter": "host_compute", "gather": "host_compute", "attend_host": "host_compute",
}  # fmt: skip

#: What crosses a link, by the verb that moves it.
TRAFFIC_OF = {
    "weights": "weights", "kv": "kv", "act": "act", "hidden": "hidden", "keys": "kv", "index": "kv", "query": "hidden",
    "attended": "hidden", "out": "hidden",
}  # fmt: skip

_ONCE_A_MINI_BATCH = frozenset({"head", "sample", "store_out", "embed"})

#: Verbs that move or convert a context's blocks: their representation, and the tiers these lie on.
_OF_BLOCKS = {
    "load_act": ("act", ("host", "disk")), "load_kv": ("kv", ("host", "disk")), "read_act": ("act", ("disk",)),
    "read_kv": ("kv", ("disk",)), "dequantize_act": ("act", TIERS), "dequantize_kv": ("kv", TIERS),
    "kv_gen": ("act", TIERS),
}  # fmt: skip

_BETWEEN_LAYERS = frozenset({"load_hidden", "store_hidden"})
_OF_A_CHOICE = frozenset({"speculate", "store_index", "load_keys", "gather"})


class Phases:
    """Seconds and link bytes of every verb: of a usual mini-batch and of the last, in the prefill (phase 0) and
    in the pieces of the decode (phases 1, 2, …). Arrays [candidates]."""

    def __init__(self, loads: Loads, hardware: Hardware, pieces: list[Piece]):
        self.loads, self.hardware = loads, hardware
        self.seconds: list[dict] = []  # phase -> {(verb, layer looks at all?, last mini-batch?): seconds}
        self.link_bytes: list[dict] = []
        self.there: list[dict] = []  # phase -> {(verb, last mini-batch?): which candidates have it}, where not all do
        self.beside: dict[str, np.ndarray] = {}  # verb of the prefill -> seconds of what the tiny run's has no task for
        self._add_phase(loads.prefill)
        if np.any(loads.chunks > 1):
            self._add_chunks()
        for piece in pieces:
            self._add_phase(lambda batch, piece=piece: loads.decode(batch, piece.first, piece.final, piece.kind))

    def _add_phase(self, counts_of) -> None:
        loads, seconds, moved, there = self.loads, {}, {}, {}
        for last, batch in ((False, loads.usual), (True, loads.last)):
            counts = counts_of(batch)
            for all_tokens in (False, True) if counts.selected is not None else (False,):
                works = step_work(loads.shape, loads.policy, loads.stored, counts, all_tokens)
                for verb, one in works.items():
                    resource = RESOURCE_OF.get(verb, "compute")
                    present, empty = _present(verb, counts, one), Work()
                    if verb == "kv_gen" and counts.selected is None:
                        rows = counts.batch * counts.act_columns * BLOCK_TOKENS
                        one, empty = (kv_gen(loads.shape, loads.bytes_per_element, n) for n in (rows, 0))
                    cost = price(self.hardware, verb, resource, one)
                    if present is not None:
                        without = price(self.hardware, verb, resource, empty)
                        cost = np.where(present > 0, cost - (1.0 - present) * without, 0.0)
                        there[verb, last] = present > 0
                    seconds[verb, all_tokens, last] = cost
                    if verb in RESOURCE_OF:
                        moved[verb, all_tokens, last] = one.link_bytes
        streamed, on_disk = loads.layout.total_bytes - loads.resident, loads.on_disk
        slices = _num_slices(loads.K, streamed - on_disk, on_disk) / loads.K
        for verb, resource, num_bytes in (("load_weights", "h2d", streamed), ("read_weights", "disk_read", on_disk)):
            if not np.any(num_bytes):
                continue
            fixed = price(self.hardware, verb, resource, Work())
            whole = np.where(num_bytes > 0, price(self.hardware, verb, resource, Work(link_bytes=num_bytes)), 0.0)
            evenly = np.where(num_bytes > 0, (whole - fixed) / loads.K, 0.0)  # over the mini-batches
            row = loads.policy.schedule == "row"
            if verb == "read_weights":
                slices = _num_slices(loads.K, 0.0 * on_disk, on_disk) / loads.K
            for last in (False, True):
                seconds[verb, False, last] = whole if row else evenly + fixed * slices
                moved[verb, False, last] = num_bytes if row else num_bytes / loads.K
            seconds[verb, "whole", False] = whole
        self.seconds.append(seconds)
        self.link_bytes.append(moved)
        self.there.append(there)

    def _add_chunks(self) -> None:
        """Prompts in pieces: a position of the prefill stands for all of them, one after the other.

        The tiny run computes its prompts whole, so what the later pieces read of the earlier ones is added to tasks
        that it has: loads to those of the weights, where these are streamed, all else to the prompt's attention.
        """
        loads, many = self.loads, self.loads.chunks > 1
        pieces = [(1.0, loads.first_chunk()), (loads.chunks - 1, loads.later_chunk())]
        seconds, moved, seen = {}, {}, set(self.verbs(0))
        for count, counts in pieces:
            for verb, one in step_work(loads.shape, loads.policy, loads.stored, counts, False).items():
                if verb in ("head", "sample", "store_out"):
                    continue
                cost = price(self.hardware, verb, RESOURCE_OF.get(verb, "compute"), one)
                seconds[verb] = seconds.get(verb, 0.0) + count * cost
                if verb in RESOURCE_OF:
                    moved[verb] = moved.get(verb, 0.0) + count * one.link_bytes
        for table, values in ((self.seconds[0], seconds), (self.link_bytes[0], moved)):
            for verb, value in values.items():
                for last in (False, True):
                    table[verb, False, last] = np.where(many, value, table.get((verb, False, last), 0.0))
        streamed = loads.layout.total_bytes > loads.resident
        for verb in [verb for verb in seconds if verb not in seen]:
            beside = np.where(many, seconds[verb], 0.0)
            on_link = streamed & (RESOURCE_OF.get(verb) == "h2d")
            for other, extra in (("load_weights", on_link * beside), ("attend_prefill", ~on_link * beside)):
                self.beside[other] = self.beside.get(other, 0.0) + extra

    def of(self, phase: int, verb: str, whole: bool, all_tokens: bool, usual):
        """(seconds of a task or None where it has no work, which candidates have it or None for all). ``usual``: for
        which candidates its mini-batch is not one of the last; True or False where for all."""
        seconds, present = self._of(phase, verb, whole, all_tokens, usual)
        if not phase and not whole and seconds is not None and verb in self.beside:
            seconds = seconds + self.beside[verb]
        return seconds, present

    def _of(self, phase: int, verb: str, whole: bool, all_tokens: bool, usual):
        found = self.seconds[phase]
        if whole:
            return found.get((verb, "whole", False)), None
        if (verb, all_tokens, False) not in found:
            all_tokens = False
        if (verb, all_tokens, False) not in found:
            return None, None
        there = self.there[phase]
        if isinstance(usual, bool):
            return found[verb, all_tokens, not usual], there.get((verb, not usual))
        value = np.where(usual, found[verb, all_tokens, False], found[verb, all_tokens, True])
        if (verb, False) not in there and (verb, True) not in there:
            return value, None
        return value, np.where(usual, there.get((verb, False), True), there.get((verb, True), True))

    def round_seconds(self, phase: int, round_: str):
        """Seconds of one more round on its busiest resource: of a position ("inner"; "last inner": in the last layer),
        of a layer or mini-batch ("outer"), of an iteration ("iteration")."""
        if round_ == "iteration":
            return longest(*self.busy(phase).values())
        loads, column = self.loads, self.loads.policy.schedule == "column"
        once = round_ == "last inner" if column else round_ == "outer"
        busy = dict.fromkeys(RESOURCES, 0.0)
        for verb in self.verbs(phase):
            one = self.seconds[phase].get((verb, False, False))
            if one is None or verb in _ONCE_A_MINI_BATCH and not once:
                continue
            if column and verb == "dequantize_weights":
                one = one if round_ == "outer" else 0.0
            elif column and round_ == "outer":
                one = self._of_all(one, self.seconds[phase][verb, False, True])
            elif round_ == "outer" and verb not in _ONCE_A_MINI_BATCH:
                one = one * loads.shape.num_layers
            resource = RESOURCE_OF.get(verb, "compute")
            busy[resource] = busy[resource] + one
        return longest(*busy.values())

    def _of_all(self, one, last):
        """The sum over mini-batches."""
        return (self.loads.K - self.loads.num_last) * one + self.loads.num_last * last

    def total(self, table: list[dict], phase: int, verb: str):
        """One iteration's sum of a verb, over all layers and mini-batches."""
        loads, values = self.loads, table[phase]
        L = loads.shape.num_layers
        choosing = num_choosing(loads.policy.selection, L)
        layers = 1 if verb in _ONCE_A_MINI_BATCH else L - 1 if verb in _BETWEEN_LAYERS else L
        layers = choosing if verb in _OF_A_CHOICE else layers
        one = values.get((verb, False, False))
        if one is None:  # in layers that look at all tokens alone
            return (L - choosing) * self._of_all(values[verb, True, False], values[verb, True, True])
        if verb == "dequantize_weights" and loads.policy.schedule == "column":
            return layers * one
        of_layer = self._of_all(one, values[verb, False, True])
        if not phase and loads.policy.schedule == "column" and (verb, "whole", False) in values:
            # the run's first load comes in one piece
            return (layers - 1) * of_layer + values[verb, "whole", False]
        total = layers * of_layer
        if (verb, True, False) in values and verb not in _ONCE_A_MINI_BATCH | _BETWEEN_LAYERS | _OF_A_CHOICE:
            of_whole = self._of_all(values[verb, True, False], values[verb, True, True])
            total = total + (L - choosing) * (of_whole - of_layer)
        return total

    def verbs(self, phase: int) -> list[str]:
        """Each once, always in the same order: sums then end in the same last digit in every process."""
        return list(dict.fromkeys(verb for verb, _, _ in self.seconds[phase]))

    def busy(self, phase: int) -> dict[str, np.ndarray]:
        """Seconds of one iteration on each resource."""
        busy = dict.fromkeys(RESOURCES, 0.0)
        for verb in self.verbs(phase):
            resource = RESOURCE_OF.get(verb, "compute")
            busy[resource] = busy[resource] + self.total(self.seconds, phase, verb)
        return busy

    def after_the_last_token(self, phase: int) -> dict[str, np.ndarray]:
        """Seconds of each resource's work, at most, that the run's last token does not wait for. ``phase``: the last.

        A position waits for what was stored two positions before it, and that for its way to the blocks two before.
        """
        late = dict.fromkeys(RESOURCES, 0.0)
        for verb in self.verbs(phase):
            if verb.startswith(("store_", "write_", "scatter")):
                resource = RESOURCE_OF.get(verb, "compute")
                one = longest(*(s for (name, _, _), s in self.seconds[phase].items() if name == verb))
                late[resource] = late[resource] + one * (self.loads.K if verb == "store_out" else 5)
        return late

    def traffic(self, phase: int) -> dict[tuple[str, str], np.ndarray]:
        """(link, kind) -> bytes of one iteration."""
        moved: dict[tuple[str, str], np.ndarray] = {}
        for verb in dict.fromkeys(verb for verb, _, _ in self.link_bytes[phase]):
            resource = RESOURCE_OF[verb]
            if resource == "host_compute":
                continue
            key = resource, TRAFFIC_OF[verb.split("_")[1]]
            moved[key] = moved.get(key, 0.0) + self.total(self.link_bytes, phase, verb)
        return moved


def _num_slices(most, on_host, on_disk):
    """How many of ``most`` slices of a layer have something of its bytes on the host or on the disk: both are cut into
    whole pages as even as may be, so that few pages lie apart."""
    pages = [np.minimum(most, np.ceil(num_bytes / PAGE_BYTES)) for num_bytes in (on_host, on_disk)]
    number = np.maximum(*pages)
    apart = (number < most) & (np.minimum(*pages) > 1)
    if np.any(apart):
        number = np.array(number)
        triples = np.stack([np.broadcast_to(n, number.shape)[apart] for n in (most, *pages)], axis=-1)
        number[apart] = [_num_places(*map(int, triple)) for triple in triples]
    return number


@lru_cache(maxsize=4096)
def _num_places(slices: int, *pages: int) -> int:
    """Slices that hold one of so many pages of either kind."""
    return len({slices * page // count for count in pages for page in range(count)})


def _present(verb: str, counts: StepCounts, one: Work):
    """The share of a phase's steps in which a verb has work at all, [candidates]; None where all of them have.

    Whole blocks come one at a time, and each new token goes to one kind of them.
    """
    share = None
    if verb == "attend_recomputed":
        share = counts.recomputed / BLOCK_TOKENS
    elif verb in _OF_BLOCKS and counts.selected is None:
        of, tiers = _OF_BLOCKS[verb]
        share = longest(*(
            copies for part, copies in counts.copies.items() if part.representation == of and part.tier in tiers
        )) / counts.batch  # fmt: skip
    elif verb in ("store_act", "store_kv", "write_act", "write_kv"):
        share = one.link_bytes
    elif verb in ("scatter", "scatter_device", "quantize"):
        share = one.memory_bytes
    if share is None or np.all(share >= 1):
        return None
    return np.minimum(1.0, share)
