"""CAPTURE's Algorithm 1: the numbers of ACT and KV blocks that balance link time and GPU time (eq. 2 to 4).

Times are those of all blocks in one layer and one iteration. In the "paper" balance (eq. 2 and 3), the link loads
weights and KV, and the GPU computes KV-Gen. The "full" balance adds the loads of the host's ACT blocks and the forward
pass.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from flexhybrid.core import work
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.layout import kind_layouts
from flexhybrid.core.problem import Problem
from sim.cost import hardware_of, price

BALANCES = ("paper", "full")


@dataclass(frozen=True)
class Linear:
    """Seconds of n blocks: fixed_s + n · per_block_s, and 0 if n is 0."""

    per_block_s: float
    fixed_s: float = 0.0

    def seconds(self, num_blocks: float) -> float:
        return self.fixed_s + num_blocks * self.per_block_s if num_blocks > 0 else 0.0


@dataclass(frozen=True)
class LayerTimes:
    """Times of one layer as Algorithm 1 uses them."""

    load_w_s: float  #: T_load_w: loading the streamed weights of a layer
    kv_gen: Linear  #: T_kv_gen(#ACT)
    load_kv: Linear  #: T_load_kv(#KV)
    load_act: Linear  #: loading ACT blocks of the host, only in the full balance
    forward_s: float = 0.0  #: project, assemble, attend and finish of the batch, only in the full balance

    def link_s(self, balance: str, act_blocks: float, kv_blocks: float) -> float:
        """Return T_PCIe (eq. 2) for these numbers of blocks on the host."""
        seconds = self.load_w_s + self.load_kv.seconds(kv_blocks)
        return seconds + self.load_act.seconds(act_blocks) if balance == "full" else seconds

    def compute_s(self, balance: str, act_blocks: float, act_gpu_blocks: float = 0.0) -> float:
        """Return T_Computation (eq. 3) for these numbers of ACT blocks on host and GPU."""
        seconds = self.kv_gen.seconds(act_blocks + act_gpu_blocks)
        return seconds + self.forward_s if balance == "full" else seconds


def layer_times(
    problem: Problem, batch: int = 0, context_tokens: int = 0, num_mini_batches: int = 1, weights_device: float = 0.0
) -> LayerTimes:
    """Return the times of one layer. Each mini-batch pays the overhead of each verb once. Batch 0: without the forward
    pass."""
    shape, width, hardware = problem.shape, problem.bytes_per_element, hardware_of(problem)

    def seconds(verb: str, resource: str, amount: work.Work) -> float:
        return float(price(hardware, verb, resource, amount))

    def linear(verb: str, resource: str, amount_of: Callable[[int], work.Work]) -> Linear:
        zero, many = (seconds(verb, resource, amount_of(n)) for n in (0, 1 << 16))
        return Linear((many - zero) / (1 << 16), num_mini_batches * zero)

    forward_s = 0.0
    if batch:
        rows = batch / num_mini_batches
        tokens = rows * (context_tokens + 1)
        amounts = {
            "project": work.project(shape, width, rows),
            "assemble": work.assemble(shape, width, tokens),
            "attend": work.attend_decode(shape, width, rows, context_tokens + 1),
            "finish": work.finish(shape, width, rows),
        }
        if problem.attends_in_place:
            del amounts["assemble"]
        for verb, amount in amounts.items():
            forward_s += num_mini_batches * seconds(verb, "compute", amount)
    streamed = [of.total_bytes - of.resident_prefix(weights_device) for of in kind_layouts(shape, width)]
    mean_bytes = sum(n * size for n, size in zip(shape.weights_counts, streamed, strict=True)) / shape.num_layers
    weights = linear("load_weights", "h2d", lambda n: work.Work(link_bytes=n))
    return LayerTimes(
        load_w_s=weights.seconds(mean_bytes),
        kv_gen=linear("kv_gen", "compute", lambda n: work.kv_gen(shape, width, n * BLOCK_TOKENS)),
        load_kv=linear("load_kv", "h2d", lambda n: work.load_blocks(shape, width, "kv", n, 1)),
        load_act=linear("load_act", "h2d", lambda n: work.load_blocks(shape, width, "act", n, 1)),
        forward_s=forward_s,
    )


@dataclass(frozen=True)
class Allocation:
    """Algorithm 1's result: blocks on the host, including those of its first step (lines 11-18)."""

    act_blocks: int
    kv_blocks: int
    link_s: float  #: T_PCIe of a layer with these blocks
    compute_s: float  #: T_Computation of a layer with these blocks

    @property
    def act_share(self) -> float:
        """Return the ACT share of the host's tokens."""
        total = self.act_blocks + self.kv_blocks
        return self.act_blocks / total if total else 0.0


def allocate(
    times: LayerTimes,
    host_bytes: float,
    weight_bytes: float,
    act_block_bytes: float,
    kv_block_bytes: float,
    balance: str = "paper",
    act_gpu_blocks: int = 0,
) -> Allocation:
    """Run Algorithm 1 for a host memory: ACT and KV blocks fill all bytes that the weights leave.

    Block sizes, like the weights' bytes, are for all layers. The paper first fills the idle time (lines 11-18), then
    splits the remaining bytes so that S_ACT·a + S_KV·k = M_remaining (line 24) and T_kv_gen(a) = T_load_kv(k) (line
    25). Both steps keep T_PCIe = T_Computation. So their sum is the one allocation that fills the memory and balances
    the times. It is solved here directly, with overheads counted once. The paper does not say what happens if no mix
    balances; the nearest one is taken here. Block counts are rounded to the integer with the smaller
    |T_PCIe − T_Computation| (eq. 4). Raise InputError if the weights do not fit or the balance is unknown.
    """
    check_balance(balance)
    room = host_bytes - weight_bytes
    if room < 0:
        raise InputError(f"host memory: the weights take {weight_bytes:.0f} bytes, the budget is {host_bytes:.0f}")

    def kv_besides(act_blocks: int) -> int:
        return int((room - act_blocks * act_block_bytes) // kv_block_bytes)

    def gap(act_blocks: int) -> float:
        link_s = times.link_s(balance, act_blocks, kv_besides(act_blocks))
        return times.compute_s(balance, act_blocks, act_gpu_blocks) - link_s

    # KV blocks are whole, so the gap has small steps: one ACT block less may leave no room for a KV block.
    act = _nearest_root(gap, int(room // act_block_bytes), steps=4)
    return _allocation(times, balance, act_gpu_blocks, act, kv_besides(act))


def share_for_batch(times: LayerTimes, total_blocks: int, balance: str, act_gpu_blocks: int = 0) -> Allocation:
    """Run Algorithm 1 for the ``total_blocks`` of a batch's context, if the memory has room for more.

    ``times``: layer times of this batch. In the full balance, ACT blocks may slow both link and compute. Then an end of
    the range is taken if its layer, max(T_PCIe, T_Computation), is faster.
    """
    check_balance(balance)

    def sides(act_blocks: int) -> tuple[float, float]:
        link_s = times.link_s(balance, act_blocks, total_blocks - act_blocks)
        return times.compute_s(balance, act_blocks, act_gpu_blocks), link_s

    def gap(act_blocks: int) -> float:
        compute_s, link_s = sides(act_blocks)
        return compute_s - link_s

    act = _nearest_root(gap, total_blocks)
    if balance == "full":
        act = min((act, 0, total_blocks), key=lambda act_blocks: max(sides(act_blocks)))
    return _allocation(times, balance, act_gpu_blocks, act, total_blocks - act)


def _allocation(times: LayerTimes, balance: str, act_gpu_blocks: int, act: int, kv: int) -> Allocation:
    return Allocation(act, kv, times.link_s(balance, act, kv), times.compute_s(balance, act, act_gpu_blocks))


def check_balance(balance: str) -> None:
    """Raise InputError if the balance is not one of BALANCES."""
    if balance not in BALANCES:
        raise InputError(f"unknown balance {balance!r}; known: {', '.join(BALANCES)}")


def _nearest_root(gap: Callable[[int], float], most: int, steps: int = 0) -> int:
    """Return the integer in [0, most] with the least |gap(integer)|. The gap must be monotonic except at the ends and
    within ``steps`` integers."""
    low, high = min(1, most), max(0, most - 1)
    candidates, below = {0, low, high, most}, gap(low)
    if below * gap(high) < 0:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if below * gap(middle) <= 0 else (middle, high)
        candidates |= {low, high}
    near = {min(most, max(0, candidate + step)) for candidate in candidates for step in range(-steps, steps + 1)}
    return min(sorted(near), key=lambda blocks: abs(gap(blocks)))


def host_blocks(batch: int, context_tokens: int) -> int:
    """Return the number of blocks in a batch's context."""
    return batch * math.ceil(context_tokens / BLOCK_TOKENS)


def host_allocation(problem: Problem, act_gpu_blocks: int = 0) -> Allocation:
    """Run Algorithm 1 for a machine's whole host memory with all weights streamed, as the paper does at the start.
    There is no forward pass. Raise InputError if the host memory is unknown or the weights do not fit."""
    shape, width, host_memory = problem.shape, problem.bytes_per_element, problem.effective_budgets.host
    if host_memory is None:
        raise InputError(f"hardware {hardware_of(problem).name} has no host memory on record: give host_memory")
    block_tokens = shape.num_layers * BLOCK_TOKENS
    layouts = zip(shape.weights_counts, kind_layouts(shape, width), strict=True)
    return allocate(
        layer_times(problem),
        host_memory,
        weight_bytes=sum(count * layout.total_bytes for count, layout in layouts),
        act_block_bytes=block_tokens * shape.act_token_bytes(width),
        kv_block_bytes=block_tokens * shape.kv_token_bytes(width),
        act_gpu_blocks=act_gpu_blocks,
    )
