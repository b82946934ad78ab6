"""CAPTURE's Algorithm 1: how many ACT and KV blocks, so that the link and the GPU take equally long (eq. 2 to 4).

All times are of one layer and one iteration, all blocks together. The paper's balance (eq. 2 and 3) charges the link
with weights and KV and compute with KV-Gen alone. The full balance adds what a real pipeline carries: the link also
loads the host's ACT blocks, and compute also does the forward pass.

``capture_policy`` is the whole system of the paper (CAPTURE, Sec. IV) as a policy, each part of which can be left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from flexhybrid.core import work
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import gib
from flexhybrid.core.model.layout import layer_layout
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.workload import Workload
from sim.array_clock import predict
from sim.candidates import Candidates, mean_lengths, num_mini_batches
from sim.cost import price
from sim.presets import static_share

BALANCES = ("paper", "full")
SHARE_STEPS = 256  #: ACT shares tried are multiples of one of so many
CACHE = ("act@device", "act@host", "kv@host")


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


def host_allocation(
    shape: ModelShape,
    hardware: Hardware,
    bytes_per_element: int,
    *,
    balance: str = "paper",
    act_gpu_blocks: int = 0,
    weights_device: float = 0.0,
    host_memory: int | None = None,
    times: LayerTimes | None = None,
) -> Allocation:
    """Algorithm 1 over a machine's whole host memory, as the paper runs it once at the start.

    ``act_gpu_blocks``: ACT blocks in GPU memory. ``times``: of a batch (``layer_times``); None: overheads paid once and
    no forward pass. Raises InputError when the host memory is not known or the weights do not fit.
    """
    host_memory = hardware.host_memory if host_memory is None else host_memory
    if host_memory is None:
        raise InputError(f"hardware {hardware.name} has no host memory on record: give host_memory")
    p, L, layout = bytes_per_element, shape.num_layers, layer_layout(shape, bytes_per_element)
    times = times or layer_times(shape, hardware, p, weights_device=weights_device)
    streamed = L * (layout.total_bytes - layout.resident_prefix(weights_device))
    act, kv = (L * BLOCK_TOKENS * size for size in (shape.act_token_bytes(p), shape.kv_token_bytes(p)))
    return allocate(times, host_memory, streamed, act, kv, act_gpu_blocks, balance)


@dataclass(frozen=True)
class _Capture:
    """A batch on a machine, and Algorithm 1's lines for it at the middle of its decode."""

    shape: ModelShape
    hardware: Hardware
    bytes_per_element: int
    batch: int
    prompt_tokens: int
    max_tokens: int
    max_mini_batch_tokens: int
    weights_device: float
    memories: dict[str, int | None]

    @property
    def blocks(self) -> int:
        return host_blocks(self.batch, self.prompt_tokens + self.max_tokens // 2)

    def times(self) -> LayerTimes:
        num, _ = num_mini_batches(self.batch, self.prompt_tokens, self.max_tokens, self.max_mini_batch_tokens)
        context = self.prompt_tokens + self.max_tokens // 2
        return layer_times(
            self.shape, self.hardware, self.bytes_per_element, self.batch, context, int(num), self.weights_device
        )

    def host_shares(self, device_shares, balance: str, ratio: bool) -> tuple[np.ndarray, np.ndarray]:
        """(ACT share of the host's tokens, whether Algorithm 1 wants that much ACT on the device) beside each share of
        all tokens that is ACT on the device."""
        if not ratio:
            return np.full(len(device_shares), static_share(self.shape)), np.ones(len(device_shares), dtype=bool)
        times, shares, wanted = self.times(), [], []
        for device_share in device_shares:
            on_device = round(device_share * self.blocks)
            found = share_for_batch(times, self.blocks - on_device, balance, on_device)
            shares.append(found.act_share)
            wanted.append(found.act_blocks > 0 or found.compute_s <= found.link_s or not on_device)
        return np.array(shares), np.array(wanted)

    def candidates(self, policy: Policy, device_shares, host_shares) -> Candidates:
        on_host = 1.0 - np.asarray(device_shares)
        shares = (np.asarray(device_shares), on_host * host_shares, on_host * (1.0 - host_shares))
        cache = {kind: share for kind, share in zip(CACHE, shares, strict=True) if np.any(share)}
        return Candidates(policy, self.batch, self.prompt_tokens, self.max_tokens, cache=cache)

    def excess(self, policy: Policy, device_shares, host_shares) -> dict[str, np.ndarray]:
        """Bytes beyond each bounded memory of each pair of shares."""
        asked = self.candidates(policy, device_shares, host_shares)
        peak = predict(self.shape, self.hardware, self.bytes_per_element, asked, walk=False).peak_bytes
        return {tier: peak[tier] - size for tier, size in self.memories.items() if size is not None}


def _fits(excess: dict[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    return np.all([np.ones(shape, dtype=bool), *(over <= 0 for over in excess.values())], axis=0)


def capture_policy(
    shape: ModelShape,
    hardware: Hardware,
    workload: Workload,
    bytes_per_element: int,
    *,
    batch: int | None = None,
    balance: str = "paper",
    ratio: bool = True,
    packing: bool = True,
    device_act: bool = True,
    max_mini_batch_tokens: int = 8192,
    weights_device: float = 0.0,
    device_memory: int | None = None,
    host_memory: int | None = None,
) -> Policy:
    """CAPTURE (Sec. IV) for ``batch`` requests (None: all) of the workload's mean lengths.

    - ``device_act``: ACT blocks fill what GPU memory is left ("exclusively allocated for Activation cache blocks"), up
      to the number that Algorithm 1 wants in all; HybridServe adds that a small batch may keep KV there instead, but
      gives no rule.
    - ``ratio``: the host's blocks by Algorithm 1 under ``balance``, for this batch's blocks instead of for a full
      memory; where the host has no room for that many KV blocks, ACT blocks take their place. Without it the static
      split of the paper's Table III: equal bytes of ACT and KV (that ACT is "filled first" we leave out: a host with
      room to spare would hold no KV at all). Each request keeps the pools' ratio (eq. 5).
    - ``packing``: balanced mini-batches (eq. 6 and 7), without it in order of arrival; of up to
      ``max_mini_batch_tokens`` padded tokens.
    - ``weights_device``: share of each layer's weights that stays on the device. The paper only says that weights are
      prefetched from the host, and gives the rest of the GPU to ACT.

    Hidden states of the prefill lie on the device, or on the host where the device has no room (the paper does not
    say). Memories in bytes; None takes the hardware's. Raises InputError when nothing fits, naming the tier.
    """
    given = dict(balance=balance, ratio=ratio, packing=packing, device_act=device_act)
    system = _capture(
        shape, hardware, workload, bytes_per_element, batch, max_mini_batch_tokens, weights_device,
        (device_memory, host_memory),
    )  # fmt: skip
    _check_balance(balance)
    defaults = dict(balance="paper", ratio=True, packing=True, device_act=True)
    options = ",".join(f"{key}={value}".lower() for key, value in given.items() if value != defaults[key])
    plain = Policy(
        f"capture({options})" if options else "capture", Placement(weights_device, 1.0 - weights_device),
        cache=dict.fromkeys(CACHE, 1 / 3), max_mini_batch_tokens=max_mini_batch_tokens, max_batch=system.batch,
        packing="balanced" if packing else "fifo",
    )  # fmt: skip
    steps = np.arange(SHARE_STEPS + 1) / SHARE_STEPS
    device_shares = steps if device_act else steps[:1]
    base, wanted = system.host_shares(device_shares, balance, ratio)
    excess: dict[str, np.ndarray] = {}
    lifts = steps[::4, None] if ratio else steps[:1, None]  # of the host's KV blocks, those replaced by ACT: [lifts, 1]
    for hidden in ("device", "host"):
        policy = replace(plain, hidden=hidden)
        for lift in (lifts[:1], lifts):
            host_shares = base + lift * (1.0 - base)
            excess = system.excess(policy, device_shares, host_shares)
            fits = _fits(excess, host_shares.shape)
            on_device = np.flatnonzero(wanted & (excess.get("device", 0.0 * host_shares)[0] <= 0))
            found = np.flatnonzero(wanted & fits.any(axis=0))
            if len(lift) == len(lifts) and not len(found):  # the host is full: more on the device than is wanted
                found = np.flatnonzero(fits.any(axis=0))[:1]
            if len(found) and (len(lift) == len(lifts) or found[-1] == on_device[-1]):
                place = int(np.argmax(fits[:, found[-1]])), found[-1]
                cache = system.candidates(policy, device_shares[place[1]], host_shares[place]).cache
                return replace(policy, cache={kind: float(share) for kind, share in cache.items()})
    roomy = excess.get("device", 0.0 * host_shares) <= 0
    tier, lack = ("host", excess["host"][roomy].min()) if roomy.any() else ("device", excess["device"].min())
    raise InputError(
        f"CAPTURE places nothing: {tier} memory: {system.batch} requests need at least "
        f"{gib(system.memories[tier] + lack)}, the budget is {gib(system.memories[tier])}"
    )


def _capture(shape, hardware, workload, p, batch, max_mini_batch_tokens, weights_device, memories) -> _Capture:
    batch = workload.num_requests if batch is None else batch
    if batch < 1:
        raise InputError(f"batch is {batch}; a batch has at least one request")
    sizes = {
        tier: hardware.usable_memory(tier) if given is None else given
        for tier, given in zip(("device", "host"), memories, strict=True)
    }
    return _Capture(shape, hardware, p, batch, *mean_lengths(workload), max_mini_batch_tokens, weights_device, sizes)


def compare_balances(
    shape: ModelShape,
    hardware: Hardware,
    workload: Workload,
    bytes_per_element: int,
    *,
    batch: int | None = None,
    **options,
) -> dict[str, dict[str, float]]:
    """What the balances choose, beside the static split and the closed form's own optimum: a dense scan over the host's
    ACT share, next to the full balance's ACT on the device.

    ``options``: of ``capture_policy``. Each of "paper", "full", "static" and "optimum" has act_share (of the host's
    tokens), act_device (share of all tokens), kv_act_bytes_ratio (on the host), tokens_per_s and decode_tokens_per_s by
    the closed form, and link_s and compute_s: of one layer and iteration, with all that the full balance charges.
    """
    system = _capture(
        shape, hardware, workload, bytes_per_element, batch, options.get("max_mini_batch_tokens", 8192),
        options.get("weights_device", 0.0), (options.get("device_memory"), options.get("host_memory")),
    )  # fmt: skip
    policies = {
        name: capture_policy(shape, hardware, workload, bytes_per_element, batch=batch, **{**options, **more})
        for name, more in {
            "paper": {"balance": "paper"}, "full": {"balance": "full"}, "static": {"ratio": False},
        }.items()
    }  # fmt: skip
    full, shares = policies["full"], np.arange(SHARE_STEPS + 1) / SHARE_STEPS
    device_shares = np.full(len(shares), full.cache.get("act@device", 0.0))
    fits = _fits(system.excess(full, device_shares, shares), shares.shape)
    asked = system.candidates(full, device_shares[fits], shares[fits])
    best = int(np.argmax(predict(shape, hardware, bytes_per_element, asked).tokens_per_s))
    policies["optimum"] = replace(full, cache={kind: float(share[best]) for kind, share in asked.cache.items()})
    times, bytes_ratio = system.times(), shape.kv_token_bytes(1) / shape.act_token_bytes(1)
    rows = {}
    for name, policy in policies.items():
        device, act, kv = (policy.cache.get(kind, 0.0) for kind in CACHE)
        asked = Candidates(policy, system.batch, system.prompt_tokens, system.max_tokens)
        found = predict(shape, hardware, bytes_per_element, asked)
        rows[name] = {
            "act_share": act / (act + kv) if act else 0.0, "act_device": device,
            "kv_act_bytes_ratio": kv / act * bytes_ratio if act else math.inf,
            "tokens_per_s": float(found.tokens_per_s[0]), "decode_tokens_per_s": float(found.decode_tokens_per_s[0]),
            "link_s": times.link_s("full", act * system.blocks, kv * system.blocks),
            "compute_s": times.compute_s("full", act * system.blocks, device * system.blocks),
        }  # fmt: skip
    return rows
