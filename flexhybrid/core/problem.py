"""What runs, and on what: a model, a compute dtype, a machine and memory budgets as one value.

The executor and the simulator share it. The executor names its device and budgets, and has a hardware record if the
machine was profiled; the simulator takes device and memory sizes from the record.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np

from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.hardware import OWN_MEMORY, Hardware
from flexhybrid.core.model.shape import DTYPE_BYTES, ModelShape
from flexhybrid.core.policy import Bits, ElementBytes, Policy
from flexhybrid.core.task import Count


@dataclass(frozen=True)
class Budgets:
    """Bytes of each tier that a run may fill; None: no budget was given."""

    device: float | None = None
    host: float | None = None
    disk: float | None = None

    def of(self, tier: str) -> float | None:
        """Budget of "device", "host" or "disk"."""
        return getattr(self, tier)

    def items(self) -> Iterator[tuple[str, float | None]]:
        """(tier, budget) of every tier."""
        return ((tier, self.of(tier)) for tier in TIERS)

    @property
    def limits(self) -> dict[str, float]:
        """Tier -> bytes; infinity without a budget."""
        return {tier: math.inf if size is None else float(size) for tier, size in self.items()}


NO_BUDGETS = Budgets()


class AttentionPaths(NamedTuple):
    """A value for each phase of attention; in a problem, the name of an implementation in
    ``runtime.kernels.attention``."""

    prompt: str  #: all tokens of a prompt over themselves
    chunk: str  #: several new tokens over cached ones and themselves
    decode: str  #: one new token over cached ones, contiguous
    #: whether decode steps without a selection read keys and values in place (``in_place.py`` on a CPU,
    #: ``attend_triton.py`` on CUDA)
    in_place: bool = False
    on_host: bool = False  #: whether attention on the host reads in place


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that a plan depends on besides the policy and the requests.

    ``budgets``: given for the run, and all that the executor obeys, because its record may describe another machine.
    Searches and the simulator obey ``effective_budgets``.
    """

    shape: ModelShape
    dtype: str = "float16"  #: compute dtype, a key of DTYPE_BYTES
    hardware: Hardware | None = None  #: None: this machine was not profiled
    budgets: Budgets = NO_BUDGETS
    device: str = ""  #: "cpu" or "cuda"; by default the hardware record's, "cpu" without a record
    attention: AttentionPaths | None = None  #: None: the fastest ones of the running machine
    cuda_graphs: bool = True  #: launch decode steps by CUDA graphs where possible

    def __post_init__(self):
        if not self.device:
            object.__setattr__(self, "device", self.hardware.device if self.hardware else "cpu")

    @property
    def attends_in_place(self) -> bool:
        """Return whether decode steps without a selection read keys and values in place: by this run's attention, or
        that of the hardware record. A CPU's kernels for it have no softcap."""
        if self.shape.softcaps and self.device != "cuda":
            return False
        if self.attention:
            return self.attention.in_place
        return self.hardware is not None and self.hardware.attends_in_place

    @property
    def assembling(self) -> Problem:
        """Return the same problem with assembled contexts, for a run that has named its attention."""
        return replace(self, attention=self.attention and self.attention._replace(in_place=False))

    @property
    def counts_allocator(self) -> bool:
        """Return whether a plan counts a CUDA context and torch's allocator: with a given budget. A record's memory
        already leaves them out (``Hardware.device_reserve``)."""
        if self.device != "cuda" or self.hardware is None:
            return self.device == "cuda"
        given = self.budgets.device not in (None, self.hardware.usable_memory("device"))
        return given or "device" in self.hardware.notes.get(OWN_MEMORY, {})

    @property
    def bytes_per_element(self) -> int:
        """Bytes of an element in the compute dtype."""
        return DTYPE_BYTES[self.dtype]

    def stored(self, bits: Bits) -> ElementBytes:
        """Return the stored bytes per element of weights, KV and ACT with these bits."""
        return bits.element_bytes(self.bytes_per_element, self.shape.kv_group, self.shape.act_group)

    @property
    def effective_budgets(self) -> Budgets:
        """Return the given budgets, completed by the record's usable memory; None: no limit.

        Without a disk, or its rates, in the record the disk budget is 0.
        """
        if self.hardware is None:
            return self.budgets
        usable = {tier: self.hardware.usable_memory(tier) for tier in TIERS}
        sizes = {tier: usable[tier] if given is None else given for tier, given in self.budgets.items()}
        return Budgets(**sizes | {"disk": (sizes["disk"] or 0) if self.hardware.has_disk else 0})


def attends_in_place(problem: Problem, policy: Policy) -> bool:
    """Return whether decode steps under a policy read keys and values in place."""
    return problem.attends_in_place and policy.attention == "device" and policy.selection.method == "none"


def launches_steps(problem: Problem, policy: Policy) -> bool:
    """Return whether one CUDA graph may launch a whole decode step: weights, keys and values are on the device."""
    resident = policy.weights.device == 1 and policy.hidden == "device" and {*policy.cache_entries} == {"kv@device"}
    return resident and policy.overlap == "full" and without_graphs(problem, policy) is None


def without_graphs(problem: Problem, policy: Policy) -> str | None:
    """Return why a run launches its decode steps kernel by kernel; None if CUDA graphs launch them."""
    reasons = (
        (problem.device != "cuda", "the device is no GPU"),
        (not problem.cuda_graphs, "they are switched off"),
        (bool(problem.shape.modules), "the layers are transformers' own, whose Python values change"),
        (policy.host_attends, "the host attends"),
        (policy.selection.method != "none", "the selection of tokens depends on data"),
        (not problem.attends_in_place, "each context is copied and padded, which grows: Triton's kernels do not run"),
    )
    return next((reason for holds, reason in reasons if holds), None)


@dataclass(frozen=True)
class BufferSizes:
    """Rows and blocks of a wave: maxima over mini-batches at final lengths. Numbers, or arrays over candidates."""

    pool_blocks: dict[str, int]  #: pool name (``Pool``) -> blocks, in each of its layers
    staged_rows: dict[str, int]  #: entry -> new tokens of one mini-batch in one step
    act_buffer_blocks: int = 0  #: of one slot
    kv_buffer_blocks: int = 0  #: of one slot
    act_staging_blocks: int = 0  #: of one slot, on the way from the disk
    kv_staging_blocks: int = 0
    act_blocks: int = 0  #: of one mini-batch, recomputed together
    plain_kv_blocks: int = 0  #: of one mini-batch, in any tier
    attention_tokens: int = 0  #: B·T
    context_tokens: int = 0  #: cached ones among them
    hidden_rows: int = 0  #: of all mini-batches together
    #: padded rows of the largest mini-batch in a step: its prompts, or new tokens with a recomputed prefix
    step_rows: int = 0
    batch: int = 0  #: requests of the largest mini-batch
    decode_batch: int = 0  #: those of them that decode
    cached_tokens: int = 0  #: of all requests that run together
    kept_tokens: int = 0  #: tokens that a selection keeps, of all requests
    #: representation -> most rows that a speculative selection gathers for a mini-batch
    selected_rows: dict[str, int] = field(default_factory=dict)
    index_rows: dict[str, int] = field(default_factory=dict)  #: the same for all mini-batches together
    partial_rows: int = 0  #: padded places of a speculative selection, of all mini-batches
    column_sets: int = 0  #: mini-batches or requests that choose columns for prediction
    longest: int = 0  #: tokens of the longest request, prompt and answer
    log_cells: int = 0  #: iterations times requests
    places: int = 0  #: requests that run together and keep recurrent states
    noted_bytes: int = 0  #: of log probabilities (``Workload.noted``), of all requests
    #: entry -> blocks in layers that keep all tokens although others do not
    whole_blocks: dict[str, int] = field(default_factory=dict)

    def merge(self, other: BufferSizes) -> BufferSizes:
        """Enough for either."""

        def of_both(a, b):
            if isinstance(a, dict):
                return {key: larger(a.get(key, 0), b.get(key, 0)) for key in {**a, **b}}
            return larger(a, b)

        others = vars(other)
        sizes: dict = {name: of_both(own, others[name]) for name, own in vars(self).items()}
        return BufferSizes(**sizes)

    def holds(self, other: BufferSizes) -> bool:
        """Return whether buffers of these sizes suffice for the other ones."""
        return all(
            all(own.get(key, 0) >= size for key, size in asked.items()) if isinstance(asked, dict) else own >= asked
            for own, asked in zip(vars(self).values(), vars(other).values(), strict=True)
        )

    def plain(self) -> BufferSizes:
        """Return the same sizes as plain integers."""

        def as_int(value):
            return {key: int(size) for key, size in value.items()} if isinstance(value, dict) else int(value)

        sizes: dict = {f.name: as_int(getattr(self, f.name)) for f in fields(self)}
        return BufferSizes(**sizes)


def larger(a, b) -> Count:
    """Return the larger of numbers, or of arrays elementwise."""
    return np.maximum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else max(a, b)
