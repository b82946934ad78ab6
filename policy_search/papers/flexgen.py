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

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from flexhybrid.core import work
from flexhybrid.core.context.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.errors import InputError, check
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.units import gib
from flexhybrid.core.verbs import RESOURCE_OF
from flexhybrid.core.workload import Workload
from policy_search.grid import Programs
from policy_search.lower_bound import INFEASIBLE, OPEN, solve_side_by_side
from sim.candidate_memory import peak_bytes
from sim.candidates import Candidates
from sim.cost import hardware_of, price

DISK_EFFICIENCY = 0.95  #: FlexGen's: of the disk's rate, when it reads weights in the decode
TIE = 1e-5  #: of the least run's seconds: what a share on the host costs, and half of one on the disk
LEAST_SHARE = 1e-3  #: smaller shares are dropped
MOST_REQUESTS = 1 << 16  #: of a block, where memory sets no bound
OWN_SIZES = (1, 2, 3, *(1 << power for power in range(2, 16)))  #: of GPU batches, that FlexGen tries
MOST_ROUNDS = 8  #: of solving again with less memory
NATIVE = Bits()
LINK_VERBS = ("load_weights", "load_kv", "load_hidden", "store_kv", "store_hidden")
DISK_VERBS = ("read_weights", "read_kv", "write_kv")

#: The unknowns: shares of weights, keys and values, and hidden states on device (d), host (h) and disk (k). Their last
#: number is a constant, so that terms read like formulas: ``2 * WH + 3 * ONE`` is 2·wh + 3. FlexGen's hidden states are
#: never on its disk.
WD, WH, WK, CD, CH, CK, HD, HH, ONE = np.eye(9)
DEVICE_OF = np.array([0, 0, 0, 3, 3, 3, 6, 6])  #: of each unknown, that of the device's share


@dataclass(frozen=True)
class Rates:
    """A machine's cost for one layer of a block: links and disk in seconds per byte, the rest in seconds, all requests
    together."""

    load_weights: float
    load_kv: float
    load_hidden: float
    store_kv: float
    store_hidden: float
    read_weights: float
    read_kv: float
    write_kv: float
    prefill_s: float  #: compute of the prefill
    decode_s: float  #: compute of a decode step without attention
    attend_s: float  #: a decode step's attention on the device to all of the context
    attend_host_s: float  #: the same on the host


@dataclass(frozen=True)
class BlockSetting:
    """What all blocks of a search share."""

    problem: Problem
    prompt_tokens: int
    gen_tokens: int
    bits: Bits = NATIVE  #: as stored: scales and zeros count, which FlexGen's quarter leaves out
    host_attention: bool = False  #: to keys and values off the device; else they cross to it in each step
    cache_on_host: bool = False  #: keys and values are only on the host
    disk: bool = False  #: whether a disk is used

    @property
    def weight_bytes(self) -> float:
        """Bytes of a layer's matrices."""
        return self.problem.shape.layer_matrix_elements * self.problem.stored(self.bits).weights

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of a token's keys and values in a layer."""
        return self.problem.shape.kv_token_bytes(self.problem.stored(self.bits).kv)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one token's row."""
        return self.problem.shape.hidden * self.problem.bytes_per_element


@dataclass(frozen=True)
class Block:
    """Everything that one linear program depends on."""

    setting: BlockSetting
    gpu_batch: int
    batch: int  #: requests of all GPU batches together
    rates: Rates

    @property
    def num_gpu_batches(self) -> int:
        return -(-self.batch // self.gpu_batch)


@dataclass(frozen=True)
class FlexGenResult:
    """FlexGen's choice as a policy of ours."""

    policy: Policy
    gpu_batch: int
    num_gpu_batches: int
    predicted_tokens_per_s: float  #: of this policy, by FlexGen's cost model
    lp_tokens_per_s: float  #: what the linear program promised, before the policy had to fit our account of memory


def cost_rows(block: Block) -> dict[str, dict[str, np.ndarray]]:
    """Return the seconds of one layer, all requests: phase -> {part: vector over (shares, 1)}. A prefill takes its
    longest part; a decode step takes "in" and then the longest of the others."""
    r, b, setting = block.rates, block.batch, block.setting
    w, kv, s, n = setting.weight_bytes, setting.kv_token_bytes, setting.prompt_tokens, setting.gen_tokens
    prompt_hidden, hidden = b * s * setting.hidden_bytes, b * setting.hidden_bytes
    prompt_kv, mean_kv = b * (s + 1) * kv, b * (s + n / 2) * kv
    into = r.load_weights * w * (WH + WK) + r.load_hidden * hidden * HH
    if setting.host_attention:
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
            "write": r.write_kv * b * kv * CK,
            "compute": r.decode_s * ONE + attend,
        },
    }


def run_seconds(block: Block, shares: np.ndarray) -> float:
    """Return the seconds of a run at ``shares`` (wd, wh, wk, cd, ch, ck, hd, hh), by FlexGen's cost model."""
    rows, x = cost_rows(block), np.append(shares, 1.0)
    prefill = max(row @ x for row in rows["prefill"].values())
    decode = {part: row @ x for part, row in rows["decode"].items()}
    step = decode.pop("in") + max(decode.values())
    return float(block.setting.problem.shape.num_layers * (prefill + (block.setting.gen_tokens - 1) * step))


def tokens_per_s(block: Block, shares: np.ndarray) -> float:
    """Return the generated tokens over the seconds of the run."""
    return block.batch * block.setting.gen_tokens / run_seconds(block, shares)


def memory_rows(block: Block) -> list[tuple[str, np.ndarray]]:
    """FlexGen's account of memory: (tier, bytes as a vector over (shares, 1)); each row alone must fit its tier.

    Stored parts, two slots for streamed weights and a GPU batch's hidden states, and its temporaries, summed over a
    layer's parts.
    """
    setting, g, b = block.setting, block.gpu_batch, block.batch
    shape, p, L = setting.problem.shape, setting.problem.bytes_per_element, setting.problem.shape.num_layers
    s, total = setting.prompt_tokens, setting.prompt_tokens + setting.gen_tokens
    h, q, ffn, w = shape.hidden, shape.query_width, shape.ffn, setting.weight_bytes
    hidden, kv = setting.hidden_bytes, setting.kv_token_bytes
    qkv = h + q + shape.kv_width
    temporaries = p * g * s * (qkv + 2 * q + shape.num_heads * s + 2 * h + ffn + h)
    attended = CD if setting.host_attention else ONE
    scores = p * shape.num_heads * total * g
    step = p * g * (qkv + 2 * h + ffn + h) * ONE + (p * g * 2 * q + total * g * kv + scores) * attended
    on_host = (scores + hidden * g) * ONE if setting.host_attention else 0 * ONE
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


def solve(block: Block, budgets: dict[str, float], cache_on_host: bool = False) -> np.ndarray | None:
    """Return the placement with the least ``run_seconds``, eight shares; None if none fits.

    ``budgets``: usable bytes of each tier; infinity without a limit. ``cache_on_host``: keys and values only there.
    Among equals, device before host before disk.
    """
    if budgets["device"] <= 0 or budgets["host"] <= 0:
        return None
    free = [1, 4, 7] if budgets["disk"] <= 0 else [1, 2, 4, 7] if cache_on_host else [1, 2, 4, 5, 7]
    solved = solve_side_by_side(_program(block, budgets, cache_on_host, free))
    if solved.state[0] == OPEN:
        raise RuntimeError(f"{block.batch} requests in GPU batches of {block.gpu_batch}: the program is not solved")
    if solved.state[0] == INFEASIBLE:
        return None
    shares = np.zeros(8)
    shares[free] = solved.z[0, :-2]
    shares[[0, 3, 6]] = 1 - shares[1] - shares[2], 1 - shares[4] - shares[5], 1 - shares[7]
    return _clean(shares)


def _program(block: Block, budgets: dict[str, float], cache_on_host: bool, free: list[int]) -> Programs:
    """Return the program over the shares ``free``, and the prefill's and the decode's part of the run. The rest is on
    the device."""
    rows, repeats = cost_rows(block), block.setting.gen_tokens - 1
    steps = [rows["decode"]["in"] + vector for part, vector in rows["decode"].items() if part != "in"]
    least = block.rates.prefill_s + repeats * block.rates.decode_s
    below = [(vector / least, 0.0, (1, 0)) for vector in rows["prefill"].values()]  # vector, its limit, less the parts
    below += [(vector * max(repeats, 1) / least, 0.0, (0, 1)) for vector in steps]
    limited = [(tier, vector) for tier, vector in memory_rows(block) if 0 < budgets[tier] < np.inf]
    below += [(vector / budgets[tier], 1.0, (0, 0)) for tier, vector in limited]
    below += [(off_device, 1.0, (0, 0)) for off_device in (WH + WK, CH + CK, HH)]
    below += [(CD, 0.0, (0, 0))] * cache_on_host
    vectors, limits, parts = (np.array(column, dtype=float) for column in zip(*below, strict=True))
    G = np.concatenate([vectors[:, free] - vectors[:, DEVICE_OF[free]], -parts], axis=1)
    h = limits - vectors[:, [0, 3, 6, 8]].sum(axis=1)
    costs = np.array([*(TIE * (WH + CH + HH + 2 * (WK + CK)))[free], 1.0, min(repeats, 1)])
    return Programs(G[None], h[None], costs, 1)


def _clean(shares: np.ndarray) -> np.ndarray:
    """Remove a solver's rounding: nothing below 1e-9, three sums of 1."""
    kept = np.where(shares < 1e-9, 0.0, shares)
    for group in (slice(0, 3), slice(3, 6), slice(6, 8)):
        kept[group] /= kept[group].sum()
    return kept


def make_block(setting: BlockSetting, gpu_batch: int, batch: int) -> Block:
    """Return a block of ``batch`` requests on a machine. Raise InputError for a missing line; the disk's are needed
    only with a disk."""
    shape, hardware, width = setting.problem.shape, hardware_of(setting.problem), setting.problem.bytes_per_element
    num_full, last = divmod(batch, gpu_batch)

    def seconds(verb: str, make: Callable[[int], work.Work], resource: str = "compute") -> float:
        last_s = price(hardware, verb, resource, make(last)) if last else 0.0
        return float(num_full * price(hardware, verb, resource, make(gpu_batch)) + last_s)

    def products(tokens: int) -> float:
        project = seconds("project", lambda g: work.project(shape, width, g * tokens))
        return project + seconds("finish", lambda g: work.finish(shape, width, g * tokens))

    def attend(g: int) -> work.Work:
        return work.attend_decode(shape, width, g, setting.prompt_tokens + setting.gen_tokens / 2)

    def s_per_byte(verb: str) -> float:
        link = RESOURCE_OF[verb]
        return hardware.line(verb, link).s_per_byte if setting.disk or not link.startswith("disk") else 0.0

    prompt = setting.prompt_tokens
    attend_prefill = seconds("attend_prefill", lambda g: work.attend_prefill(shape, width, g, prompt))
    rates = Rates(
        **{verb: s_per_byte(verb) for verb in (*LINK_VERBS, *DISK_VERBS)},
        prefill_s=products(prompt) + attend_prefill,
        decode_s=products(1),
        attend_s=seconds("attend", attend),
        attend_host_s=seconds("attend_host", attend, "host_compute") if setting.host_attention else 0.0,
    )
    return Block(setting, gpu_batch, batch, rates)


@dataclass(frozen=True, kw_only=True)
class FlexGenOptions:
    """What FlexGen is asked for."""

    batch: int | None = None  #: requests of the block; None: the search chooses
    most_requests: int = MOST_REQUESTS  #: of a block, where it does
    #: attention may run on the host. A policy of ours does that only with the whole cache there, so those programs are
    #: held to it; attention on the device stays in the race
    host_attention: bool = False
    compress: bool = False  #: weights in 4 bits, and the cache too where attention is on the device
    cache_on_host: bool = False  #: keys and values only on the host, as in papers that compare with it
    memory_share: float = 0.8  #: FlexGen's bytes of each tier
    #: GPU batches to try; None: FlexGen's own
    gpu_batches: tuple[int, ...] | None = None

    def __post_init__(self):
        if self.batch is not None and self.batch < 1:
            raise InputError(f"batch is {self.batch}; a batch has at least one request")
        check("memory_share", self.memory_share, 0 < self.memory_share <= 1, "a number above 0, up to 1")
        if self.gpu_batches is not None and min(self.gpu_batches, default=0) < 1:
            raise InputError(f"gpu_batches is {self.gpu_batches!r}; it must name numbers of requests >= 1")


class PlacementSearch:
    """Linear programs of one machine, model and workload, each solved once."""

    def __init__(self, make: Callable[[int, int], Block], budgets: dict[str, float], cache_on_host: bool):
        self.make, self.budgets, self.cache_on_host = make, budgets, cache_on_host
        self.solved: dict[tuple[int, int], tuple[Block, np.ndarray] | None] = {}

    def at(self, gpu_batch: int, batch: int) -> tuple[Block, np.ndarray] | None:
        """Return (block, shares), or None where nothing fits."""
        key = gpu_batch, batch
        if key not in self.solved:
            block = self.make(gpu_batch, batch)
            shares = solve(block, self.budgets, self.cache_on_host)
            self.solved[key] = None if shares is None else (block, shares)
        return self.solved[key]

    def of_batch(self, batch: int, gpu_batches: Iterable[int] | None) -> list[tuple[Block, np.ndarray]]:
        """Return the placements of the ways to cut ``batch`` requests into GPU batches of nearly these sizes."""
        sizes = {-(-batch // -(-batch // min(g, batch))) for g in gpu_batches or OWN_SIZES}
        return [placed for g in sorted(sizes) if (placed := self.at(g, batch))]

    def of_any(
        self, gpu_batches: Iterable[int] | None, most_requests: int = MOST_REQUESTS
    ) -> list[tuple[Block, np.ndarray]]:
        """Return, for each GPU batch, the placement of the best number of them.

        FlexGen tries 1, 2, 3, … and stops at the first that is slower. The least seconds are convex in the number
        (except for small working sets), so tokens/s rises and then falls, and halving needs fewer programs.
        """
        best = []
        for g in gpu_batches or OWN_SIZES:
            most = most_requests // g
            if not most or self.at(g, g) is None:
                if gpu_batches is None:
                    break
                continue
            good, bad = 1, 2
            while bad <= most and self._still_rises(g, bad):
                good, bad = bad, 2 * bad
            bad = min(bad, most + 1)
            while bad - good > 1:
                middle = (good + bad) // 2
                good, bad = (middle, bad) if self._still_rises(g, middle) else (good, middle)
            best.append(self.at(g, g * good))
        return best

    def _still_rises(self, gpu_batch: int, count: int) -> bool:
        placed, before = (self.at(gpu_batch, gpu_batch * n) for n in (count, count - 1))
        return placed is not None and before is not None and tokens_per_s(*placed) >= tokens_per_s(*before)


def flexgen_policy(problem: Problem, workload: Workload, options: FlexGenOptions | None = None) -> FlexGenResult:
    """Return what FlexGen would run: the fastest placement, GPU batch and number of GPU batches by its own cost model.

    FlexGen pads requests to the longest, so the workload's longest prompt and generation count. FlexGen's runtime keeps
    hidden states in one tier: the one with the larger share. Shares below 0.001 are dropped. Its account of memory
    leaves out the embedding and our double buffers, so a placement is made to fit ours: the program is solved again
    with as much less of a tier as ours is short of, and where that has no answer, everything leaves the device for the
    host. Among the cuts the one that is fastest after that, by FlexGen's cost model, is taken.

    Raise InputError when nothing fits the problem's effective budgets, naming the tier.
    """
    options = options or FlexGenOptions()
    gpu_batches = None if options.gpu_batches is None else sorted(set(options.gpu_batches))
    memories = problem.effective_budgets.limits  # infinity without a limit, 0 without a disk
    budgets = {tier: options.memory_share * size for tier, size in memories.items()}
    prompt_tokens, gen_tokens = int(workload.prompt_tokens.max()), int(workload.max_tokens.max())
    fitted: list[tuple[float, Policy, Block, float]] = []
    reasons = []
    for on_host in (True, False) if options.host_attention else (False,):
        bits = Bits(weights=4, kv="native" if on_host else 4) if options.compress else NATIVE
        kept = on_host or options.cache_on_host
        setting = BlockSetting(problem, prompt_tokens, gen_tokens, bits, on_host, kept, disk=memories["disk"] != 0)
        cuts = PlacementSearch(partial(make_block, setting), budgets, kept)
        if options.batch is None:
            placed = cuts.of_any(gpu_batches, options.most_requests)
        else:
            placed = cuts.of_batch(options.batch, gpu_batches)
        for block, shares in placed:
            policy, over = _fit(block, shares, budgets)
            for tier, excess in over.items():
                size, at = memories[tier], f"{block.batch} requests in GPU batches of {block.gpu_batch}"
                reasons.append(f"{tier} memory: {at} need at least {gib(size + excess)}, it has {gib(size)}")
            if not over:
                fitted.append((tokens_per_s(block, _shares_of(policy)), policy, block, tokens_per_s(block, shares)))
        if not placed:
            smallest = min(gpu_batches or (1,))
            block = make_block(setting, smallest, options.batch or smallest)
            reasons.append(_what_flexgen_lacks(block, budgets))
    if not fitted:
        raise InputError(f"FlexGen places nothing: {reasons[0]}")
    rate, policy, block, promised = max(fitted, key=lambda row: row[0])
    return FlexGenResult(policy, block.gpu_batch, block.num_gpu_batches, rate, promised)


def _policy(block: Block, shares: np.ndarray) -> Policy:
    """Return the program's placement as a policy."""
    setting = block.setting

    def kept(group: np.ndarray) -> list[float]:
        group = np.where(group < LEAST_SHARE, 0.0, group)
        return [float(share) for share in group / group.sum()]

    cache = {f"kv@{tier}": share for tier, share in zip(TIERS, kept(shares[3:6]), strict=True) if share > 0}
    padded = int(ceil_blocks(setting.prompt_tokens + setting.gen_tokens - 1)) * BLOCK_TOKENS + 1
    return Policy(
        "flexgen",
        Placement(*kept(shares[:3])),
        cache=cache,
        hidden="device" if shares[6] >= shares[7] else "host",
        bits=setting.bits,
        max_mini_batch_tokens=block.gpu_batch * padded,
        max_batch=block.batch,
        packing="fifo",
        attention="host" if setting.host_attention else "device",
        weight_order="natural",
        overlap="step",
    )


def _shares_of(policy: Policy) -> np.ndarray:
    """Return the eight shares of a policy: the inverse of ``_policy``."""
    weights = [getattr(policy.weights, tier) for tier in TIERS]
    cache = [policy.cache.get(f"kv@{tier}", 0.0) for tier in TIERS]
    hidden = [float(policy.hidden == tier) for tier in ("device", "host")]
    return np.array([*weights, *cache, *hidden])


def _over(block: Block, policy: Policy) -> dict[str, float]:
    """Return the tiers that cannot hold the policy, by our own account, with the bytes beyond their memory."""
    problem = block.setting.problem
    candidates = Candidates(policy, block.batch, block.setting.prompt_tokens, block.setting.gen_tokens)
    peak = peak_bytes(problem, candidates)
    excess = {tier: float(peak[tier][0]) - size for tier, size in problem.effective_budgets.limits.items()}
    return {tier: num_bytes for tier, num_bytes in excess.items() if num_bytes > 0}


def _fit(block: Block, shares: np.ndarray, budgets: dict[str, float]) -> tuple[Policy, dict[str, float]]:
    """Return (the placement as a policy that fits our own account of memory, {}), or, where none is found, (the last
    policy tried, the bytes that each tier is short of). ``budgets``: bytes that FlexGen may use, which shrink."""
    policy, budgets = _policy(block, shares), dict(budgets)
    over = _over(block, policy)
    for _ in range(MOST_ROUNDS):
        if not over:
            break
        x = np.append(_shares_of(policy), 1.0)
        for tier, excess in over.items():
            budgets[tier] = max(float(row @ x) for of, row in memory_rows(block) if of == tier) - excess
        again = solve(block, budgets, block.setting.cache_on_host)
        if again is None:
            break
        policy = _policy(block, again)
        over = _over(block, policy)
    if over:
        w, cache = policy.weights, dict(policy.cache)
        cache["kv@host"] = cache.get("kv@host", 0.0) + cache.pop("kv@device", 0.0)
        cache = {kind: share for kind, share in cache.items() if share > 0}
        policy = replace(policy, weights=Placement(0.0, w.device + w.host, w.disk), cache=cache, hidden="host")
        over = _over(block, policy)
    return policy, over


def _what_flexgen_lacks(block: Block, budgets: dict[str, float]) -> str:
    """Return why FlexGen's own account has no room for ``block``."""
    ways = [np.array([wd, 1 - wd, 0, 0, 1, 0, hd, 1 - hd, 1.0]) for wd in (0, 1) for hd in (0, 1)]
    device = min(max(float(row @ x) for tier, row in memory_rows(block) if tier == "device") for x in ways)
    if device > budgets["device"]:
        return (
            f"device memory: GPU batches of {block.gpu_batch} need at least {gib(device)}, "
            f"FlexGen may use {gib(budgets['device'])}"
        )
    on_disk = budgets["disk"] and not block.setting.cache_on_host
    tiers = "host and disk memory" if on_disk else "host memory"
    room = budgets["host"] + (budgets["disk"] if on_disk else 0)
    needs = max(float(row @ ways[0]) for tier, row in memory_rows(block) if tier == "host")
    requests = "1 request" if block.batch == 1 else f"{block.batch} requests"
    return f"{tiers}: weights and cache of {requests} take about {gib(needs)}, FlexGen may use {gib(room)}"
