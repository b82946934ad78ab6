"""Problems: a model, a compute dtype, a machine and memory budgets as one value, for executor and simulator.

The executor gives the device and the budgets, and has a hardware record if the machine was profiled. The simulator
takes device and memory sizes from the record.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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
        """Return the budget of a tier."""
        return getattr(self, tier)

    def items(self) -> Iterator[tuple[str, float | None]]:
        """Return (tier, budget) for every tier."""
        return ((tier, self.of(tier)) for tier in TIERS)

    @property
    def limits(self) -> dict[str, float]:
        """Return tier -> bytes; infinity without a budget."""
        return {tier: math.inf if size is None else float(size) for tier, size in self.items()}

    def hold(self, peak_bytes: Mapping[str, np.ndarray] | Mapping[str, int]) -> np.ndarray:
        """Return whether these bytes, tier -> [candidates], are within all budgets, [candidates]."""
        return np.all([np.less_equal(peak_bytes[tier], limit) for tier, limit in self.limits.items()], axis=0)


NO_BUDGETS = Budgets()


class AttentionPaths(NamedTuple):
    """The implementation of each phase of attention, by its name in ``runtime.kernels.attention``."""

    prompt: str  #: tokens of a prompt attend to each other
    chunk: str  #: several new tokens attend to cached tokens and to each other
    decode: str  #: one new token attends to cached tokens in contiguous memory
    #: decode steps without a selection read keys and values in place (``in_place.py`` on a CPU, ``attend_triton.py`` on
    #: CUDA)
    in_place: bool = False
    on_host: bool = False  #: attention on the host reads keys and values in place


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that a plan depends on, apart from the policy and the requests."""

    shape: ModelShape
    dtype: str = "float16"  #: compute dtype, a key of DTYPE_BYTES
    hardware: Hardware | None = None  #: None: the machine was not profiled
    #: given budgets. The executor obeys only these, because its record may describe another machine; searches and the
    #: simulator obey ``effective_budgets``
    budgets: Budgets = NO_BUDGETS
    device: str = ""  #: "cpu" or "cuda" (default: the hardware record's device, or "cpu" without a record)
    attention: AttentionPaths | None = None  #: None: the fastest implementations on the running machine
    cuda_graphs: bool = True  #: launch decode steps by CUDA graphs if possible

    def __post_init__(self):
        if not self.device:
            object.__setattr__(self, "device", self.hardware.device if self.hardware else "cpu")

    @property
    def attends_in_place(self) -> bool:
        """Return whether decode steps without a selection read keys and values in place. ``attention`` decides, or
        without it the hardware record. On a CPU, kernels in place do not support a softcap."""
        if self.shape.softcaps and self.device != "cuda":
            return False
        if self.attention:
            return self.attention.in_place
        return self.hardware is not None and self.hardware.attends_in_place

    @property
    def assembling(self) -> Problem:
        """Return the problem with attention to contexts that are assembled in a buffer, if ``attention`` is given."""
        return replace(self, attention=self.attention and self.attention._replace(in_place=False))

    @property
    def counts_allocator(self) -> bool:
        """Return whether a plan counts the CUDA context and torch's allocator: on CUDA with a given budget. A record's
        usable memory is already without them (``Hardware.device_reserve``)."""
        if self.device != "cuda" or self.hardware is None:
            return self.device == "cuda"
        given = self.budgets.device not in (None, self.hardware.usable_memory("device"))
        return given or "device" in self.hardware.notes.get(OWN_MEMORY, {})

    @property
    def bytes_per_element(self) -> int:
        """Return the bytes of an element of the compute dtype."""
        return DTYPE_BYTES[self.dtype]

    def stored(self, bits: Bits) -> ElementBytes:
        """Return the stored bytes per element of weights, KV and ACT with these bits."""
        return bits.element_bytes(self.bytes_per_element, self.shape.kv_group, self.shape.act_group)

    @property
    def effective_budgets(self) -> Budgets:
        """Return the given budgets; the record's usable memory replaces missing ones. If the record has no disk, or not
        its rates, the disk budget is 0."""
        if self.hardware is None:
            return self.budgets
        usable = {tier: self.hardware.usable_memory(tier) for tier in TIERS}
        sizes = {tier: usable[tier] if given is None else given for tier, given in self.budgets.items()}
        return Budgets(**sizes | {"disk": (sizes["disk"] or 0) if self.hardware.has_disk else 0})


def attends_in_place(problem: Problem, policy: Policy) -> bool:
    """Return whether decode steps under a policy read keys and values in place."""
    return problem.attends_in_place and policy.attention == "device" and policy.selection.method == "none"


def launches_steps(problem: Problem, policy: Policy) -> bool:
    """Return whether one CUDA graph can launch a whole decode step. This needs weights, keys and values on the
    device."""
    resident = policy.weights.device == 1 and policy.hidden == "device" and {*policy.cache_entries} == {"kv@device"}
    return resident and policy.overlap == "full" and without_graphs(problem, policy) is None


def without_graphs(problem: Problem, policy: Policy) -> str | None:
    """Return in words why decode steps are launched kernel by kernel; None if CUDA graphs launch them."""
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
    """Rows and blocks of a wave's buffers: the most that any mini-batch needs. Numbers, or arrays [candidates]."""

    pool_blocks: dict[str, int]  #: pool (``Pool.name``) -> blocks in each of its layers
    staged_rows: dict[str, int]  #: entry -> new tokens of a mini-batch in a step
    act_buffer_blocks: int = 0  #: blocks of a slot of the ACT buffer
    kv_buffer_blocks: int = 0  #: blocks of a slot of the KV buffer
    act_staging_blocks: int = 0  #: ACT blocks of a slot of staging, on the way from the disk
    kv_staging_blocks: int = 0  #: KV blocks of a slot of staging
    act_blocks: int = 0  #: ACT blocks of a mini-batch that are recomputed together
    plain_kv_blocks: int = 0  #: KV blocks of a mini-batch in all tiers
    attention_tokens: int = 0  #: rows B·T of the attention buffer
    context_tokens: int = 0  #: rows of cached tokens among these
    hidden_rows: int = 0  #: rows of hidden states of all mini-batches
    #: padded rows of the largest mini-batch in a step: prompts, or new tokens with a recomputed prefix
    step_rows: int = 0
    batch: int = 0  #: requests of the largest mini-batch
    decode_batch: int = 0  #: decoding requests of the largest mini-batch
    cached_tokens: int = 0  #: tokens of all requests that run together
    kept_tokens: int = 0  #: tokens of all requests that a selection keeps
    #: representation -> most rows that a speculative selection gathers for a mini-batch
    selected_rows: dict[str, int] = field(default_factory=dict)
    index_rows: dict[str, int] = field(default_factory=dict)  #: the same for all mini-batches together
    partial_rows: int = 0  #: padded rows of a speculative selection's partial keys, of all mini-batches
    column_sets: int = 0  #: mini-batches or requests that choose columns for prediction
    longest: int = 0  #: tokens of the longest request, prompt and answer
    log_cells: int = 0  #: cells of the token log, iterations times requests
    places: int = 0  #: requests that run together
    noted_bytes: int = 0  #: bytes of all requests' log probabilities (``Workload.noted``)
    #: entry -> blocks in layers that keep all tokens, if other layers drop some
    whole_blocks: dict[str, int] = field(default_factory=dict)

    def merge(self, other: BufferSizes) -> BufferSizes:
        """Return the least sizes that suffice for both."""

        def merged(a, b):
            if isinstance(a, dict):
                return {key: larger(a.get(key, 0), b.get(key, 0)) for key in {**a, **b}}
            return larger(a, b)

        others = vars(other)
        sizes: dict = {name: merged(own, others[name]) for name, own in vars(self).items()}
        return BufferSizes(**sizes)

    def holds(self, other: BufferSizes) -> bool:
        """Return whether these sizes suffice for the other ones."""
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
    """Return the larger number, or the elementwise maximum of arrays."""
    return np.maximum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else max(a, b)
