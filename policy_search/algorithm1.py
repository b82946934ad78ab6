"""CAPTURE's Algorithm 1: how many ACT and KV blocks, so that the link and the GPU take equally long (eq. 2 to 4).

All times are of one layer and one iteration, all blocks together. The paper's balance (eq. 2 and 3) charges the link
with weights and KV and compute with KV-Gen alone. The full balance adds what a real pipeline carries: the link also
loads the host's ACT blocks, and compute also does the forward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexhybrid.core import work
from flexhybrid.core.blocks import BLOCK_TOKENS
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.layout import layer_layout
from flexhybrid.core.shape import ModelShape
from sim.cost import price

BALANCES = ("paper", "full")


@dataclass(frozen=True)
class Linear:
    """seconds of n blocks = fixed_s + n·per_block_s, and nothing for no blocks."""

    per_block_s: float
    fixed_s: float = 0.0

    def seconds(self, num_blocks: float) -> float:
        return self.fixed_s + num_blocks * self.per_block_s if num_blocks > 0 else 0.0


@dataclass(frozen=True)
class LayerTimes:
    """What Algorithm 1 knows of a machine and a model: the fitted lines, per layer."""

    load_w_s: float  #: T_load_w: the streamed weights of a layer
    kv_gen: Linear  #: T_kv_gen(#ACT)
    load_kv: Linear  #: T_load_kv(#KV)
    load_act: Linear  #: of host ACT blocks; the paper charges nothing for it
    forward_s: float = 0.0  #: project, assemble, attend, finish of the batch at hand; the paper leaves it out

    def link_s(self, balance: str, act_blocks: float, kv_blocks: float) -> float:
        """T_PCIe (eq. 2) with so many blocks on the host."""
        seconds = self.load_w_s + self.load_kv.seconds(kv_blocks)
        return seconds + self.load_act.seconds(act_blocks) if balance == "full" else seconds

    def compute_s(self, balance: str, act_blocks: float, act_gpu_blocks: float = 0.0) -> float:
        """T_Computation (eq. 3)."""
        seconds = self.kv_gen.seconds(act_blocks + act_gpu_blocks)
        return seconds + self.forward_s if balance == "full" else seconds


def layer_times(
    shape: ModelShape,
    hardware: Hardware,
    bytes_per_element: int,
    batch: int = 0,
    context_tokens: int = 0,
    num_mini_batches: int = 1,
    weights_device: float = 0.0,
) -> LayerTimes:
    """The lines of one layer. Each mini-batch pays each verb's overhead once. Without a batch there is no forward."""
    p, K = bytes_per_element, num_mini_batches
    layout = layer_layout(shape, p)
    streamed = layout.total_bytes - layout.resident_prefix(weights_device)

    def linear(verb: str, resource: str, make) -> Linear:
        zero, many = (price(hardware, verb, resource, make(n)) for n in (0, 1 << 16))
        return Linear((many - zero) / (1 << 16), K * zero)

    forward_s = 0.0
    if batch:
        rows, tokens = batch / K, batch / K * (context_tokens + 1)
        for verb, one in (
            ("project", work.project(shape, p, rows)),
            ("assemble", work.assemble(shape, p, tokens)),
            ("attend", work.attend_decode(shape, p, rows, context_tokens + 1)),
            ("finish", work.finish(shape, p, rows)),
        ):
            forward_s += K * price(hardware, verb, "compute", one)
    weights = linear("load_weights", "h2d", lambda n: work.Work(link_bytes=n))
    return LayerTimes(
        load_w_s=weights.seconds(streamed),
        kv_gen=linear("kv_gen", "compute", lambda n: work.kv_gen(shape, p, n * BLOCK_TOKENS)),
        load_kv=linear("load_kv", "h2d", lambda n: work.load_blocks(shape, p, "kv", n, 1)),
        load_act=linear("load_act", "h2d", lambda n: work.load_blocks(shape, p, "act", n, 1)),
        forward_s=forward_s,
    )


@dataclass(frozen=True)
class Allocation:
    """Algorithm 1's answer: blocks on the host, those of its first step included."""

    act_init: int
    kv_init: int
    act_blocks: int
    kv_blocks: int
    link_s: float  #: per layer, at these blocks, under the balance asked for
    compute_s: float

    @property
    def act_share(self) -> float:
        """ACT share of the host's tokens."""
        total = self.act_blocks + self.kv_blocks
        return self.act_blocks / total if total else 0.0


def initial_blocks(times: LayerTimes, act_gpu_blocks: float, balance: str) -> tuple[float, float]:
    """Step 1 (lines 11-18): (ACT_init, KV_init) that fill the idle time left by loading weights, or by KV-Gen of the
    blocks on the GPU. In the full balance a host ACT block fills only what its own load leaves of its KV-Gen; where
    that is nothing, no number of them fills the gap and ACT_init is 0."""
    budget = times.load_w_s - times.compute_s(balance, 0, act_gpu_blocks)  # line 13
    if budget >= 0:  # line 14-15
        fill, fixed = times.kv_gen.per_block_s, 0.0 if act_gpu_blocks else times.kv_gen.fixed_s
        if balance == "full":
            fill, fixed = fill - times.load_act.per_block_s, fixed - times.load_act.fixed_s
        return (max(0.0, (budget - fixed) / fill) if fill > 0 else 0.0), 0.0
    return 0.0, max(0.0, (-budget - times.load_kv.fixed_s) / times.load_kv.per_block_s)  # line 16-17


def allocate(
    times: LayerTimes,
    host_bytes: float,
    weight_bytes: float,
    act_block_bytes: float,
    kv_block_bytes: float,
    act_gpu_blocks: int = 0,
    balance: str = "paper",
) -> Allocation:
    """Algorithm 1 over a host memory: every byte that the weights leave becomes an ACT or a KV block.

    Block sizes are of all layers together, as S_weight is. The paper first fills the idle time (lines 11-18), then
    splits the rest so that S_ACT·a + S_KV·k = M_remaining (line 24) and T_kv_gen(a) = T_load_kv(k) (line 25). Since
    both steps keep T_PCIe = T_Computation, the sum of the two is the one allocation that fills the memory and balances
    it, and that is what is solved here, overheads counted once. Where even one kind alone does not balance, the memory
    is filled with the kind that comes nearest: the paper does not say. Block counts are rounded to the integer
    with the smaller |T_PCIe − T_Computation| (eq. 4). Raises InputError when the weights do not fit or the balance
    is unknown.
    """
    _check_balance(balance)
    room = host_bytes - weight_bytes
    if room < 0:
        raise InputError(f"host memory: the weights take {weight_bytes:.0f} bytes, the budget is {host_bytes:.0f}")
    act_init, kv_init = initial_blocks(times, act_gpu_blocks, balance)
    most_act = int(room // act_block_bytes)

    def kv_beside(act_blocks: int) -> int:
        return int((room - act_blocks * act_block_bytes) // kv_block_bytes)

    def gap(act_blocks: int) -> float:
        return times.compute_s(balance, act_blocks, act_gpu_blocks) - times.link_s(
            balance, act_blocks, kv_beside(act_blocks)
        )

    act = _nearest_root(gap, most_act)
    kv = kv_beside(act)
    return Allocation(
        min(round(act_init), act), min(round(kv_init), kv), act, kv,
        times.link_s(balance, act, kv), times.compute_s(balance, act, act_gpu_blocks),
    )  # fmt: skip


def share_for_batch(
    times: LayerTimes, total_blocks: int, balance: str = "paper", act_gpu_blocks: int = 0
) -> Allocation:
    """The same balance for a given number of blocks (a batch's context) instead of a given memory.

    On a machine whose memory holds more than the batch at hand, this is the ratio that matters. ``times`` should be
    those of the batch. In the full balance both sides can move the same way, then the end with the shorter layer,
    max(T_PCIe, T_Computation), is taken. ``act_share`` of the answer is 0..1 of tokens.
    """
    _check_balance(balance)

    def gap(act_blocks: int) -> float:
        return times.compute_s(balance, act_blocks, act_gpu_blocks) - times.link_s(
            balance, act_blocks, total_blocks - act_blocks
        )

    def layer_s(act_blocks: int) -> float:
        return max(
            times.compute_s(balance, act_blocks, act_gpu_blocks),
            times.link_s(balance, act_blocks, total_blocks - act_blocks),
        )

    act = _nearest_root(gap, total_blocks)
    if balance == "full":
        act = min((act, 0, total_blocks), key=layer_s)
    act_init, kv_init = initial_blocks(times, act_gpu_blocks, balance)
    kv = total_blocks - act
    return Allocation(
        min(round(act_init), act), min(round(kv_init), kv), act, kv,
        times.link_s(balance, act, kv), times.compute_s(balance, act, act_gpu_blocks),
    )  # fmt: skip


def _check_balance(balance: str) -> None:
    if balance not in BALANCES:
        raise InputError(f"unknown balance {balance!r}; known: {', '.join(BALANCES)}")


def _nearest_root(gap, most: int) -> int:
    """The integer in [0, most] with the smallest |gap|, for a gap that is linear but for overheads at the ends."""
    low, high = min(1, most), max(0, most - 1)
    candidates = {0, low, high, most}
    if gap(low) * gap(high) < 0:
        while high - low > 1:
            middle = (low + high) // 2
            if gap(low) * gap(middle) <= 0:
                high = middle
            else:
                low = middle
        candidates |= {low, high}
    # memory that holds no whole further block makes the gap step: look a few blocks to either side
    for found in tuple(candidates):
        candidates |= {min(most, max(0, found + step)) for step in range(-4, 5)}
    return min(sorted(candidates), key=lambda blocks: abs(gap(blocks)))


def host_blocks(batch: int, context_tokens: int) -> int:
    """Blocks of a batch's context."""
    return batch * math.ceil(context_tokens / BLOCK_TOKENS)
