"""FlexGen's own policy search (Sheng et al., ICML 2023, Sec. 4.3): a method to compare with, not our search.

For each GPU batch (requests computed together) and number of GPU batches in a block, a linear program places weights,
keys and values, and hidden states over device, host and disk. Its rows follow the cost model published with FlexGen
(version 0.1.8), which differs from the paper in the decode: there the link's way in overlaps with nothing else.

    prefill of a layer  max(in + read, out + write, compute)
    decode of a layer   in + max(out, read, write, compute)

Its rates were fitted to runs of its engine on one machine. Here links and disk cost what a machine's lines say a byte,
and a GPU batch's compute what ``sim.cost.price`` says, so reading the weights once for each GPU batch has its price.
What the model leaves out, we leave out: embedding and head, (de)compression, new keys and values on their way to the
host in the decode, and what is between a mini-batch's parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linprog

from flexhybrid.core import work
from flexhybrid.core.context.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import gib
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.verbs import RESOURCE_OF
from flexhybrid.core.workload import Workload
from sim.array_clock import predict
from sim.candidates import Candidates
from sim.cost import price

DISK_EFFICIENCY = 0.95  #: FlexGen's: of the disk's rate, when it reads weights in the decode
TIE = 1e-5  #: of the least run's seconds: what a share on the host costs, and half of one on the disk
LEAST_SHARE = 1e-3  #: smaller shares are dropped
MOST_REQUESTS = 1 << 16  #: of a block, where memory sets no bound
MOST_ROUNDS = 8  #: of solving again with less memory
NATIVE = Bits()
TRANSFERS = (
    "load_weights", "load_kv", "load_hidden", "store_kv", "store_hidden", "read_weights", "read_kv", "write_kv"
)  # fmt: skip

#: The unknowns: shares of weights, of keys and values and of hidden states on device (d), host (h) and disk (k). Their
#: last number is a constant, so that terms read like formulas: ``2 * WH + 3 * ONE`` is 2·wh + 3. Hidden states never
#: lie on FlexGen's disk.
WD, WH, WK, CD, CH, CK, HD, HH, ONE = np.eye(9)


@dataclass(frozen=True)
class Rates:
    """What a machine takes for one layer of a block: links and disk in seconds a byte, the rest in seconds, all
    requests together."""

    load_weights: float
    load_kv: float
    load_hidden: float
    store_kv: float
    store_hidden: float
    read_weights: float
    read_kv: float
    write_kv: float
    prefill_s: float  #: compute of the prefill
    decode_s: float  #: compute of a decode step but for attention
    attend_s: float  #: a decode step's attention on the device to all of the context
    attend_host_s: float  #: the same on the host


@dataclass(frozen=True)
class Block:
    """All that one linear program depends on; bytes are as stored."""

    shape: ModelShape
    bytes_per_element: int
    weight_bytes: float  #: of a layer's matrices
    kv_token_bytes: float
    prompt_tokens: int
    gen_tokens: int
    gpu_batch: int
    batch: int  #: requests of all GPU batches together
    rates: Rates
    host_attention: bool = False  #: to keys and values off the device; else they cross to it in each step

    @property
    def num_gpu_batches(self) -> int:
        return -(-self.batch // self.gpu_batch)

    @property
    def hidden_bytes(self) -> int:
        """Of one token's row."""
        return self.shape.hidden * self.bytes_per_element


@dataclass(frozen=True)
class FlexGenResult:
    """FlexGen's choice as a policy of ours."""

    policy: Policy
    gpu_batch: int
    num_gpu_batches: int
    predicted_tokens_per_s: float  #: of this policy, by FlexGen's cost model
    num_lps: int
    search_s: float
    lp_tokens_per_s: float  #: what the linear program promised, before the policy had to fit our account of memory


def cost_rows(block: Block) -> dict[str, dict[str, np.ndarray]]:
    """Seconds of one layer, all requests: phase -> {what: vector over (shares, 1)}. A prefill is as long as the longest
    of its entries; a decode step takes "in" and besides the longest of the others."""
    r, w, b = block.rates, block.weight_bytes, block.batch
    prompt_hidden, hidden = b * block.prompt_tokens * block.hidden_bytes, b * block.hidden_bytes
    prompt_kv = b * (block.prompt_tokens + 1) * block.kv_token_bytes
    mean_kv = b * (block.prompt_tokens + block.gen_tokens / 2) * block.kv_token_bytes
    into = r.load_weights * w * (WH + WK) + r.load_hidden * hidden * HH
    if block.host_attention:
        attend = r.attend_s * CD + r.attend_host_s * (CH + CK)
    else:
        into = into + r.load_kv * mean_kv * (CH + CK)
        attend = r.attend_s * ONE
    return {
        "prefill": {
            "in": r.load_weights * w * (WH + WK) + r.load_hidden * prompt_hidden * HH + r.read_weights * w * WK,
            "out": prompt_kv * (r.store_kv * (CH + CK) + r.write_kv * CK) + r.store_hidden * prompt_hidden * HH,
            "compute": r.prefill_s * ONE,
        },
        "decode": {
            "in": into,
            "out": r.store_hidden * hidden * HH,
            "read": r.read_kv * mean_kv * CK + r.read_weights * w / DISK_EFFICIENCY * WK,
            "write": r.write_kv * b * block.kv_token_bytes * CK,
            "compute": r.decode_s * ONE + attend,
        },
    }


def run_seconds(block: Block, shares: np.ndarray) -> float:
    """Seconds of the whole run at ``shares`` (wd, wh, wk, cd, ch, ck, hd, hh), by FlexGen's cost model."""
    rows, x = cost_rows(block), np.append(shares, 1.0)
    prefill = max(row @ x for row in rows["prefill"].values())
    decode = {what: row @ x for what, row in rows["decode"].items()}
    step = decode.pop("in") + max(decode.values())
    return float(block.shape.num_layers * (prefill + (block.gen_tokens - 1) * step))


def tokens_per_s(block: Block, shares: np.ndarray) -> float:
    """Generated tokens over the seconds of the whole run."""
    return block.batch * block.gen_tokens / run_seconds(block, shares)


def memory_rows(block: Block) -> list[tuple[str, np.ndarray]]:
    """FlexGen's account of memory: (tier, bytes as a vector over (shares, 1)); each row alone must fit its tier.

    What is kept, two slots for streamed weights and a GPU batch's hidden states, and its temporaries: those of all
    parts of a layer added up.
    """
    shape, p, g, b, L = block.shape, block.bytes_per_element, block.gpu_batch, block.batch, block.shape.num_layers
    s, total = block.prompt_tokens, block.prompt_tokens + block.gen_tokens
    h, q, ffn, w = shape.hidden, shape.query_width, shape.ffn, block.weight_bytes
    hidden, kv = block.hidden_bytes, block.kv_token_bytes
    qkv = h + q + shape.kv_width
    temporaries = p * g * s * (qkv + 2 * q + shape.num_heads * s + 2 * h + ffn + h)
    attended = CD if block.host_attention else ONE
    scores = p * shape.num_heads * total * g
    step = p * g * (qkv + 2 * h + ffn + h) * ONE + (p * g * 2 * q + total * g * kv + scores) * attended
    on_host = (scores + hidden * g) * ONE if block.host_attention else 0 * ONE
    slots = 2 * w * (ONE - WD)
    return [
        ("device", L * (w * WD + total * b * kv * CD) + s * b * hidden * HD + slots + s * g * hidden * (ONE - HD)
         + temporaries * ONE),
        ("device", L * (w * WD + total * b * kv * CD) + b * hidden * HD + slots + g * hidden * (ONE - HD)
         + g * total * kv * attended + step),
        ("host", L * (w * WH + s * b * kv * CH) + s * b * hidden * HH + w * (ONE - WD) + s * g * hidden * (ONE - HD)),
        ("host", L * (w * WH + total * b * kv * CH) + b * hidden * HH + w * WK + 2 * total * g * kv * CK + on_host),
        ("disk", L * (w * WK + total * b * kv * CK)),
    ]  # fmt: skip


def solve(block: Block, budgets: dict[str, float | None], cache_on_host: bool = False) -> np.ndarray | None:
    """The placement with the least ``run_seconds``: eight shares, or None where no placement fits.

    ``budgets``: bytes of each tier that may be used; None: no bound. ``cache_on_host``: keys and values lie there and
    nowhere else. Among equals, device before host before disk.
    """
    if any(budgets[tier] is not None and budgets[tier] <= 0 for tier in ("device", "host")):
        return None
    rows, repeats = cost_rows(block), block.gen_tokens - 1
    a_ub, b_ub = [], []
    decode = rows["decode"]
    for phase, vectors in (("prefill", rows["prefill"].values()), ("decode", [
        decode["in"] + vector for what, vector in decode.items() if what != "in"
    ])):  # fmt: skip
        for vector in vectors:  # vector·(x, 1) <= T of the phase
            a_ub.append([*vector[:8], *((-1, 0) if phase == "prefill" else (0, -1))])
            b_ub.append(-vector[8])
    for tier, vector in memory_rows(block):
        if budgets[tier] is not None and budgets[tier] > 0:
            a_ub.append([*(vector[:8] / budgets[tier]), 0, 0])
            b_ub.append(1 - vector[8] / budgets[tier])
    upper = np.ones(8)
    upper[[2, 5]] = 1.0 if budgets["disk"] is None or budgets["disk"] > 0 else 0.0
    if cache_on_host:
        upper[[3, 5]] = 0.0
    least = block.rates.prefill_s + repeats * block.rates.decode_s
    objective = np.array([*(TIE * (WH + CH + HH + 2 * (WK + CK)))[:8], 1 / least, repeats / least])
    a_eq = np.zeros((3, 10))
    a_eq[0, :3] = a_eq[1, 3:6] = a_eq[2, 6:8] = 1
    bounds = [(0.0, limit) for limit in upper] + [(0, None)] * 2
    answer = linprog(objective, a_ub, b_ub, a_eq, np.ones(3), bounds, method="highs")
    return _clean(answer.x[:8]) if answer.status == 0 else None


def _clean(shares: np.ndarray) -> np.ndarray:
    """Without a solver's dust: nothing below 1e-9, and three sums of 1."""
    kept = np.where(shares < 1e-9, 0.0, shares)
    for group in (slice(0, 3), slice(3, 6), slice(6, 8)):
        kept[group] /= kept[group].sum()
    return kept


def make_block(
    shape: ModelShape,
    hardware: Hardware,
    bytes_per_element: int,
    prompt_tokens: int,
    gen_tokens: int,
    gpu_batch: int,
    batch: int,
    bits: Bits = NATIVE,
    host_attention: bool = False,
    disk: bool = False,
) -> Block:
    """A block of ``batch`` requests on a machine. Stored widths count scales and zeros, which FlexGen's quarter leaves
    out. Raises InputError for a machine without a line that is needed; those of the disk only with ``disk``."""
    p, stored = bytes_per_element, bits.element_bytes(bytes_per_element)
    whole, last = divmod(batch, gpu_batch)

    def seconds(verb: str, make: Callable[[int], work.Work], resource: str = "compute") -> float:
        of_last = price(hardware, verb, resource, make(last)) if last else 0.0
        return float(whole * price(hardware, verb, resource, make(gpu_batch)) + of_last)

    def products(width: int) -> float:
        project = seconds("project", lambda g: work.project(shape, p, g * width))
        return project + seconds("finish", lambda g: work.finish(shape, p, g * width))

    def attend(g: int) -> work.Work:
        return work.attend_decode(shape, p, g, prompt_tokens + gen_tokens / 2)

    def s_per_byte(verb: str) -> float:
        link = RESOURCE_OF[verb]
        return hardware.line(verb, link).s_per_byte if disk or not link.startswith("disk") else 0.0

    rates = Rates(
        **{verb: s_per_byte(verb) for verb in TRANSFERS},
        prefill_s=products(prompt_tokens)
        + seconds("attend_prefill", lambda g: work.attend_prefill(shape, p, g, prompt_tokens)),
        decode_s=products(1),
        attend_s=seconds("attend", attend),
        attend_host_s=seconds("attend_host", attend, "host_compute") if host_attention else 0.0,
    )
    return Block(
        shape, p, shape.layer_matrix_elements * stored.weights, shape.kv_token_bytes(stored.kv), prompt_tokens,
        gen_tokens, gpu_batch, batch, rates, host_attention,
    )  # fmt: skip


class Search:
    """Linear programs of one machine, model and workload, each solved once."""

    def __init__(self, make: Callable[[int, int], Block], budgets: dict[str, float | None], cache_on_host: bool):
        self.make, self.budgets, self.cache_on_host = make, budgets, cache_on_host
        self.solved: dict[tuple[int, int], tuple[Block, np.ndarray] | None] = {}

    def at(self, gpu_batch: int, batch: int) -> tuple[Block, np.ndarray] | None:
        """(block, shares), or None where nothing fits."""
        key = gpu_batch, batch
        if key not in self.solved:
            block = self.make(gpu_batch, batch)
            shares = solve(block, self.budgets, self.cache_on_host)
            self.solved[key] = None if shares is None else (block, shares)
        return self.solved[key]

    def of_batch(self, batch: int, gpu_batches: Iterable[int] | None) -> list[tuple[Block, np.ndarray]]:
        """Every way to cut ``batch`` requests into GPU batches of nearly one size."""
        wanted = range(1, batch + 1) if gpu_batches is None else gpu_batches
        sizes = {-(-batch // -(-batch // min(g, batch))) for g in wanted}
        return [found for g in sorted(sizes) if (found := self.at(g, batch))]

    def of_any(self, gpu_batches: Iterable[int] | None) -> list[tuple[Block, np.ndarray]]:
        """For each GPU batch the best number of them. FlexGen tries 1, 2, 3, … and stops at the first that is slower
        than the one before. The least seconds are convex in the number (but for small working sets), so tokens/s
        rises and then falls, and halving finds the same number with fewer programs."""
        own = (g if g < 4 else 1 << (g - 2) for g in range(1, 18))  # 1, 2, 3, 4, 8, 16, …
        best = []
        for g in own if gpu_batches is None else gpu_batches:
            if self.at(g, g) is None:
                if gpu_batches is None:
                    break
                continue
            most = max(1, MOST_REQUESTS // g)
            good, bad = 1, 2
            while bad <= most and self._still_rises(g, bad):
                good, bad = bad, 2 * bad
            bad = min(bad, most + 1)
            while bad - good > 1:
                middle = (good + bad) // 2
                good, bad = (middle, bad) if self._still_rises(g, middle) else (good, middle)
            best.append(self.at(g, g * good))
        return best

    def _still_rises(self, g: int, number: int) -> bool:
        found = self.at(g, g * number)
        return found is not None and tokens_per_s(*found) >= tokens_per_s(*self.at(g, g * (number - 1)))


def flexgen_policy(
    shape: ModelShape,
    hardware: Hardware,
    workload: Workload,
    bytes_per_element: int,
    *,
    batch: int | None = None,
    host_attention: bool = False,
    compress: bool = False,
    memory_share: float = 0.8,
    gpu_batches: Iterable[int] | None = None,
    device_memory: int | None = None,
    host_memory: int | None = None,
    disk_memory: int | None = None,
) -> FlexGenResult:
    """What FlexGen would run: the fastest placement, GPU batch and number of GPU batches by its own cost model.

    FlexGen pads requests to the longest, so the workload's longest prompt and generation count. ``batch``: requests of
    the block; None lets the search choose. ``host_attention``: attention may run on the host. A policy of ours does
    that only with the whole cache there, so those programs are held to it; attention on the device stays in the race.
    ``compress``: weights in 4 bits, and the cache too where attention is on the device. ``memory_share``: of each tier,
    what FlexGen may use. ``gpu_batches``: those to try; None: with a batch all even cuts of it, else FlexGen's own 1,
    2, 3, 4, 8, 16, …. Memories in bytes; None takes the hardware's, no bound where that has none, and no disk where it
    knows none, or not how fast one is.

    FlexGen's runtime keeps hidden states in one tier: the one with the larger share. Shares below 0.001 are dropped.
    Its account of memory lacks the embedding and our double buffers, so a placement is made to fit ours: the program is
    solved again with so much less of a tier as ours lacks, and where that has no answer, all leaves the device for the
    host. Among the cuts the one that is fastest after that, by FlexGen's cost model, is taken.

    Raises InputError when nothing fits, naming the tier.
    """
    started = time.perf_counter()
    gpu_batches = None if gpu_batches is None else sorted(set(gpu_batches))
    _check(batch, memory_share, gpu_batches)
    memories = {
        "device": hardware.usable_memory("device") if device_memory is None else device_memory,
        "host": hardware.host_memory if host_memory is None else host_memory,
        "disk": (hardware.disk_memory or 0) if disk_memory is None else disk_memory,
    }
    if not hardware.has_disk:
        memories["disk"] = 0
    tiers = _Tiers(hardware, memories, memory_share)
    s, n = int(workload.prompt_tokens.max()), int(workload.max_tokens.max())
    fitted: list[tuple[float, Policy, Block, float]] = []
    num_lps = 0
    for on_host in (True, False) if host_attention else (False,):
        bits = Bits(weights=4 if compress else "native", kv=4 if compress and not on_host else "native")

        def make(gpu_batch: int, of: int, on_host=on_host, bits=bits) -> Block:
            return make_block(
                shape, hardware, bytes_per_element, s, n, gpu_batch, of, bits, on_host, memories["disk"] != 0
            )

        search = Search(make, tiers.budgets, on_host)
        found = search.of_any(gpu_batches) if batch is None else search.of_batch(batch, gpu_batches)
        num_lps += len(search.solved)
        lacks: list[str] = []
        for block, shares in found:
            policy, over, more_lps = _fit(tiers, block, shares, bits, on_host)
            num_lps += more_lps
            if policy is None:
                lacks.append(tiers.what_lacks(block, over))
            else:
                fitted.append((tokens_per_s(block, _shares_of(policy)), policy, block, tokens_per_s(block, shares)))
        if not found:
            smallest = min(gpu_batches or (1,))
            lacks.append(_what_flexgen_lacks(make(smallest, batch or smallest), tiers.budgets))
    if not fitted:
        raise InputError(f"FlexGen places nothing: {lacks[0]}")
    rate, policy, block, promised = max(fitted, key=lambda one: one[0])
    seconds = time.perf_counter() - started
    return FlexGenResult(policy, block.gpu_batch, block.num_gpu_batches, rate, num_lps, seconds, promised)


def _check(batch: int | None, memory_share: float, gpu_batches: list[int] | None) -> None:
    if batch is not None and batch < 1:
        raise InputError(f"batch is {batch}; a batch has at least one request")
    if not 0 < memory_share <= 1:
        raise InputError(f"memory_share is {memory_share!r}; it must be a number above 0, up to 1")
    if gpu_batches is not None and (not gpu_batches or gpu_batches[0] < 1):
        raise InputError(f"gpu_batches is {gpu_batches!r}; it must name numbers of requests >= 1")


def _policy(block: Block, shares: np.ndarray, bits: Bits, on_host: bool) -> Policy:
    """The program's placement as a policy."""

    def kept(some: np.ndarray) -> list[float]:
        some = np.where(some < LEAST_SHARE, 0.0, some)
        return [float(share) for share in some / some.sum()]

    cache = {f"kv@{tier}": share for tier, share in zip(TIERS, kept(shares[3:6]), strict=True) if share > 0}
    padded = int(ceil_blocks(block.prompt_tokens + block.gen_tokens - 1)) * BLOCK_TOKENS + 1
    return Policy(
        "flexgen", Placement(*kept(shares[:3])), cache=cache, hidden="device" if shares[6] >= shares[7] else "host",
        bits=bits, max_mini_batch_tokens=block.gpu_batch * padded, max_batch=block.batch, packing="fifo",
        attention="host" if on_host else "device", weight_order="natural", overlap="step",
    )  # fmt: skip


def _shares_of(policy: Policy) -> np.ndarray:
    """The eight shares of a policy: the inverse of ``_policy``."""
    w, hidden = policy.weights, policy.hidden == "device"
    return np.array(
        [w.device, w.host, w.disk, *(policy.cache.get(f"kv@{tier}", 0.0) for tier in TIERS), hidden, not hidden],
        dtype=np.float64,
    )


@dataclass(frozen=True)
class _Tiers:
    """A machine with its memories in bytes (None: no bound; disk 0: none), and the share that FlexGen may use."""

    hardware: Hardware
    memories: dict[str, int | None]
    share: float

    @property
    def budgets(self) -> dict[str, float | None]:
        return {tier: None if size is None else self.share * size for tier, size in self.memories.items()}

    def over(self, block: Block, policy: Policy) -> dict[str, float]:
        """Tiers that cannot hold the policy, by our own account: bytes beyond their memory."""
        asked = Candidates(policy, block.batch, block.prompt_tokens, block.gen_tokens)
        peak = predict(block.shape, self.hardware, block.bytes_per_element, asked, walk=False).peak_bytes
        excess = {tier: float(peak[tier][0]) - size for tier, size in self.memories.items() if size is not None}
        return {tier: num_bytes for tier, num_bytes in excess.items() if num_bytes > 0}

    def what_lacks(self, block: Block, over: dict[str, float]) -> str:
        tier, excess = next(iter(over.items()))
        size, at = self.memories[tier], f"{block.batch} requests in GPU batches of {block.gpu_batch}"
        return f"{tier} memory: {at} need at least {gib(size + excess)}, it has {gib(size)}"


def _fit(
    tiers: _Tiers, block: Block, shares: np.ndarray, bits: Bits, on_host: bool
) -> tuple[Policy | None, dict[str, float], int]:
    """(the placement as a policy that fits our own account of memory, {}, programs solved for it), or (None, what each
    tier lacks, programs)."""
    policy, budgets, num_lps = _policy(block, shares, bits, on_host), tiers.budgets, 0
    while (over := tiers.over(block, policy)) and num_lps < MOST_ROUNDS:
        x = np.append(_shares_of(policy), 1.0)
        for tier, excess in over.items():
            budgets[tier] = max(row @ x for of, row in memory_rows(block) if of == tier) - excess
        again = solve(block, budgets, on_host)
        num_lps += 1
        if again is None:
            break
        policy = _policy(block, again, bits, on_host)
    if over:
        w, cache = policy.weights, dict(policy.cache)
        cache["kv@host"] = cache.get("kv@host", 0.0) + cache.pop("kv@device", 0.0)
        cache = {kind: share for kind, share in cache.items() if share > 0}
        policy = replace(policy, weights=Placement(0.0, w.device + w.host, w.disk), cache=cache, hidden="host")
        over = tiers.over(block, policy)
    return (None, over, num_lps) if over else (policy, {}, num_lps)


def _what_flexgen_lacks(block: Block, budgets: dict[str, float | None]) -> str:
    """Why FlexGen's own account has no room for ``block``."""
    ways = [np.array([wd, 1 - wd, 0, 0, 1, 0, hd, 1 - hd, 1.0]) for wd in (0, 1) for hd in (0, 1)]
    device = min(max(row @ x for tier, row in memory_rows(block) if tier == "device") for x in ways)
    if budgets["device"] is not None and device > budgets["device"]:
        return (
            f"device memory: GPU batches of {block.gpu_batch} need at least {gib(device)}, "
            f"FlexGen may use {gib(budgets['device'])}"
        )
    tiers = "host and disk memory" if budgets["disk"] else "host memory"
    room = sum(budgets[tier] or 0 for tier in ("host", "disk"))
    needs = max(row @ ways[0] for tier, row in memory_rows(block) if tier == "host")
    requests = "1 request" if block.batch == 1 else f"{block.batch} requests"
    return f"{tiers}: weights and cache of {requests} take about {gib(needs)}, FlexGen may use {gib(room)}"
