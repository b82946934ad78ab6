"""What is run and on what: a model, a compute dtype, a machine and the memory that a run may fill, as one value.

The executor and the simulator share it. The executor names its device and the budgets of the run, and has a hardware
record where the machine was profiled; the simulator takes device and memory sizes from the hardware record.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.hardware import OWN_MEMORY, Hardware
from flexhybrid.core.model.shape import DTYPE_BYTES, ModelShape
from flexhybrid.core.policy import Bits, ElementBytes, Policy


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
    """A value for each phase of attention; in a problem the name of a way in ``runtime.kernels.attention``."""

    prompt: str  #: all tokens of a prompt over themselves
    chunk: str  #: several new tokens over cached ones and themselves
    decode: str  #: one new token over cached ones, laid side by side
    #: whether a decode step without a selection reads keys and values where they lie (``runtime.kernels``: in_place on
    #: a CPU, attend_triton on CUDA)
    in_place: bool = False
    on_host: bool = False  #: whether attention on the host, beside any device, does


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that a plan depends on besides the policy and the requests.

    ``budgets`` are those that were given for the run: the executor keeps to them alone, because its hardware record may
    describe another machine. Searches and the simulator keep to ``effective_budgets``.
    """

    shape: ModelShape
    dtype: str = "float16"  #: compute dtype, a key of DTYPE_BYTES
    hardware: Hardware | None = None  #: None: this machine was not profiled
    budgets: Budgets = NO_BUDGETS
    device: str = ""  #: "cpu" or "cuda"; by default the hardware record's, "cpu" without a record
    attention: AttentionPaths | None = None  #: None: the fastest ones of the machine that runs it
    cuda_graphs: bool = True  #: whether decode steps are launched by CUDA graphs, where they can be

    def __post_init__(self):
        if not self.device:
            object.__setattr__(self, "device", self.hardware.device if self.hardware else "cpu")

    @property
    def attends_in_place(self) -> bool:
        """Whether decode steps without a selection read keys and values where they lie: by this run's ways to attend,
        else by those for which the hardware record holds. A CPU's kernels that do so have no softcap."""
        if self.shape.softcaps and self.device != "cuda":
            return False
        if self.attention:
            return self.attention.in_place
        return self.hardware is not None and self.hardware.attends_in_place

    @property
    def host_attends_in_place(self) -> bool:
        """Whether compiled kernels attend on the host."""
        return self.attention is not None and self.attention.on_host and not self.shape.softcaps

    @property
    def assembling(self) -> Problem:
        """The same problem where each context is laid side by side; for a run, which has named its ways to attend."""
        return replace(self, attention=self.attention and self.attention._replace(in_place=False))

    @property
    def counts_allocator(self) -> bool:
        """Whether a plan counts what a CUDA context and torch's allocator take beside tensors: in a budget that was
        given. In the memory of a record they are part of what it sets aside (``Hardware.device_reserve``)."""
        if self.device != "cuda" or self.hardware is None:
            return self.device == "cuda"
        given = self.budgets.device not in (None, self.hardware.usable_memory("device"))
        return given or "device" in self.hardware.notes.get(OWN_MEMORY, {})

    @property
    def bytes_per_element(self) -> int:
        """Bytes of an element in the compute dtype."""
        return DTYPE_BYTES[self.dtype]

    def stored(self, bits: Bits) -> ElementBytes:
        """Bytes an element of weights, KV and ACT as they are stored with these bits."""
        return bits.element_bytes(self.bytes_per_element, self.shape.kv_group, self.shape.act_group)

    @property
    def effective_budgets(self) -> Budgets:
        """The given budgets, completed by the usable memory of the hardware record; None: no limit.

        A machine whose record has no disk, or no disk rates, gets a disk budget of 0 whatever was given.
        """
        if self.hardware is None:
            return self.budgets
        usable = {tier: self.hardware.usable_memory(tier) for tier in TIERS}
        sizes = {tier: usable[tier] if given is None else given for tier, given in self.budgets.items()}
        return Budgets(**sizes | {"disk": (sizes["disk"] or 0) if self.hardware.has_disk else 0})


def attends_in_place(problem: Problem, policy: Policy) -> bool:
    """Whether decode steps under a policy read keys and values where they lie, instead of laying them side by side."""
    return problem.attends_in_place and policy.attention == "device" and policy.selection.method == "none"


def launches_steps(problem: Problem, policy: Policy) -> bool:
    """Whether one CUDA graph may launch a whole decode step: weights, keys and values lie on the device."""
    resident = policy.weights.device == 1 and policy.hidden == "device" and {*policy.cache_entries} == {"kv@device"}
    return resident and policy.overlap == "full" and without_graphs(problem, policy) is None


def without_graphs(problem: Problem, policy: Policy) -> str | None:
    """Return why a run launches its decode steps kernel by kernel; None where CUDA graphs launch them."""
    reasons = (
        (problem.device != "cuda", "the device is no GPU"),
        (not problem.cuda_graphs, "they are switched off"),
        (bool(problem.shape.modules), "the layers are transformers' own, whose Python values change"),
        (policy.attention == "host", "the host attends"),
        (policy.selection.method != "none", "the selection of tokens depends on data"),
        (not problem.attends_in_place, "each context is copied and padded, which grows: Triton's kernels do not run"),
    )
    return next((reason for holds, reason in reasons if holds), None)
