"""FlexGen's policy search (Sheng et al., ICML 2023, Sec. 4.3), to compare with; our search is ``policy_search.search``.

A GPU batch is the requests that are computed together; a block has one or more GPU batches. For each combination of
sizes, a linear program places weights, keys and values, and hidden states on device, host and disk. The rows follow the
cost model published with FlexGen 0.1.8. Unlike the paper's, its loads in the decode ("in") overlap with nothing:

    prefill of a layer  max(in + read, out + write, compute)
    decode of a layer   in + max(out, read, write, compute)

FlexGen's rates were fitted to its engine on one machine. Here the bytes of links and disk cost what a machine's lines
say, and the compute of each GPU batch costs what ``sim.cost.price`` says. Like FlexGen's model, this one ignores
embedding and head, (de)compression, and storing new keys and values to the host in the decode.
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

DISK_EFFICIENCY = 0.95  #: share of the disk's rate when it reads weights in the decode (FlexGen's number)
#: Cost that breaks ties, as a share of the least run's seconds: of each share on the host, twice that on the disk.
TIE = 1e-5
LEAST_SHARE = 1e-3  #: smaller shares are dropped
MOST_REQUESTS = 1 << 16  #: most requests of a block if memory sets no limit
OWN_SIZES = (1, 2, 3, *(1 << power for power in range(2, 16)))  #: sizes of a GPU batch that FlexGen tries
MOST_ROUNDS = 8  #: most times that a program is solved again with less memory
NATIVE = Bits()
LINK_VERBS = ("load_weights", "load_kv", "load_hidden", "store_kv", "store_hidden")
DISK_VERBS = ("read_weights", "read_kv", "write_kv")

#: Unit vectors of the unknowns: shares of weights (W), cache (C) and hidden states (H) on device (D), host (H) and disk
#: (K). ONE is a constant, so terms read like formulas: ``2 * WH + 3 * ONE`` is 2·wh + 3. Hidden states are never on the
#: disk.
WD, WH, WK, CD, CH, CK, HD, HH, ONE = np.eye(9)
DEVICE_OF = np.array([0, 0, 0, 3, 3, 3, 6, 6])  #: index of each unknown's device share


@dataclass(frozen=True)
class Rates:
    """A machine's costs for one layer of a block: seconds per byte of links and disk; fields in ``_s`` are seconds of
    all requests together."""

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
    attend_s: float  #: attention of a decode step to the whole context, on the device
    attend_host_s: float  #: the same on the host


@dataclass(frozen=True)
class BlockSetting:
    """Inputs that all blocks of a search have in common."""

    problem: Problem
    prompt_tokens: int
    gen_tokens: int
    bits: Bits = NATIVE  #: stored bits; unlike FlexGen's quarter, bytes include scales and zeros
    host_attention: bool = False  #: attend on the host to keys and values that are there; else load them in each step
    cache_on_host: bool = False  #: keep keys and values only on the host
    disk: bool = False  #: whether a disk is used

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of a layer's matrices."""
        return self.problem.shape.layer_matrix_elements * self.problem.stored(self.bits).weights

    @property
    def kv_token_bytes(self) -> float:
        """Return the bytes of a token's keys and values in a layer."""
        return self.problem.shape.kv_token_bytes(self.problem.stored(self.bits).kv)

    @property
    def hidden_bytes(self) -> int:
        """Return the bytes of a token's hidden state."""
        return self.problem.shape.hidden * self.problem.bytes_per_element


@dataclass(frozen=True)
class Block:
    """The inputs of one linear program."""

    setting: BlockSetting
    gpu_batch: int
    batch: int  #: requests in all GPU batches
    rates: Rates

    @property
    def num_gpu_batches(self) -> int:
        return -(-self.batch // self.gpu_batch)


@dataclass(frozen=True)
class FlexGenResult:
    """FlexGen's choice, as one of our policies."""

    policy: Policy
    gpu_batch: int  #: requests of a GPU batch
    num_gpu_batches: int
    predicted_tokens_per_s: float  #: this policy's prediction by FlexGen's cost model
    lp_tokens_per_s: float  #: prediction at the linear program's shares, before they were fitted to our memory plan


def cost_rows(block: Block) -> dict[str, dict[str, np.ndarray]]:
    """Return phase -> part -> seconds of one layer for all requests, as vectors over (shares, 1). A prefill takes its
    longest part; a decode step takes "in" plus the longest of the other parts."""
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
    """Return FlexGen's memory model: rows (tier, bytes as a vector over (shares, 1)). Each row must fit its tier.

    The bytes are those of stored weights, cache and hidden states, two slots for streamed weights, a GPU batch's hidden
    states, and its temporaries, summed over a layer's parts.
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
    """Return the eight shares with the least ``run_seconds``; None if nothing fits.

    ``budgets``: usable bytes of each tier; infinity without a limit. ``cache_on_host``: keys and values only on the
    host. Ties go to the device before the host before the disk.
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
    """Return the program over the shares with indices ``free`` and the seconds of prefill and decode. Shares of the
    device follow, because each group adds up to 1."""
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
    """Return shares without the solver's rounding errors: none below 1e-9, and groups that add up to 1."""
    kept = np.where(shares < 1e-9, 0.0, shares)
    for group in (slice(0, 3), slice(3, 6), slice(6, 8)):
        kept[group] /= kept[group].sum()
    return kept


def make_block(setting: BlockSetting, gpu_batch: int, batch: int) -> Block:
    """Return a block of ``batch`` requests with the costs of the problem's machine. Raise InputError if the machine
    lacks a line; lines of the disk are needed only with a disk."""
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
    """Options of FlexGen's search."""

    batch: int | None = None  #: requests of the block; None: the search chooses
    most_requests: int = MOST_REQUESTS  #: most requests of a block if the search chooses
    #: attention may run on the host. Our policies then need the whole cache there, so these programs keep it there.
    #: Programs with attention on the device are solved, too
    host_attention: bool = False
    compress: bool = False  #: weights in 4 bits; also the cache if attention is on the device
    cache_on_host: bool = False  #: keep keys and values only on the host, as papers do that compare with FlexGen
    memory_share: float = 0.8  #: share of each tier that FlexGen may use
    #: sizes of a GPU batch to try; None: FlexGen's own
    gpu_batches: tuple[int, ...] | None = None

    def __post_init__(self):
        if self.batch is not None and self.batch < 1:
            raise InputError(f"batch is {self.batch}; a batch has at least one request")
        check("memory_share", self.memory_share, 0 < self.memory_share <= 1, "a number above 0, up to 1")
        if self.gpu_batches is not None and min(self.gpu_batches, default=0) < 1:
            raise InputError(f"gpu_batches is {self.gpu_batches!r}; it must name numbers of requests >= 1")


class PlacementSearch:
    """Linear programs of one machine, model and workload. Each is solved once."""

    def __init__(self, make: Callable[[int, int], Block], budgets: dict[str, float], cache_on_host: bool):
        self.make, self.budgets, self.cache_on_host = make, budgets, cache_on_host
        self.solved: dict[tuple[int, int], tuple[Block, np.ndarray] | None] = {}

    def at(self, gpu_batch: int, batch: int) -> tuple[Block, np.ndarray] | None:
        """Return (block, shares), or None if nothing fits."""
        key = gpu_batch, batch
        if key not in self.solved:
            block = self.make(gpu_batch, batch)
            shares = solve(block, self.budgets, self.cache_on_host)
            self.solved[key] = None if shares is None else (block, shares)
        return self.solved[key]

    def of_batch(self, batch: int, gpu_batches: Iterable[int] | None) -> list[tuple[Block, np.ndarray]]:
        """Return the placements of ``batch`` requests, cut evenly into GPU batches of up to each of these sizes."""
        sizes = {-(-batch // -(-batch // min(g, batch))) for g in gpu_batches or OWN_SIZES}
        return [placed for g in sorted(sizes) if (placed := self.at(g, batch))]

    def of_any(
        self, gpu_batches: Iterable[int] | None, most_requests: int = MOST_REQUESTS
    ) -> list[tuple[Block, np.ndarray]]:
        """Return the placement with the best number of GPU batches, for each size of a GPU batch.

        FlexGen tries 1, 2, 3, … GPU batches and stops at the first slower number. The least seconds are convex in this
        number (except for small working sets), so tokens/s rises and then falls, and bisection needs fewer programs.
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


def flexgen_policy(problem: Problem, workload: Workload, options: FlexGenOptions) -> FlexGenResult:
    """Return FlexGen's choice: the fastest placement, GPU batch and number of GPU batches by its own cost model.

    FlexGen pads requests to the longest one, so the workload's longest prompt and generation count. Its runtime keeps
    hidden states in one tier, here the one with the larger share. FlexGen's memory model lacks the embedding and our
    double buffers, so each placement is made to fit our memory plan (``_fit``) before the fastest is chosen.

    Raise InputError if nothing fits the problem's effective budgets.
    """
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
    """Return a placement as a policy; shares below LEAST_SHARE are dropped."""
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
    """Return the eight shares of a policy made by ``_policy``."""
    weights = [getattr(policy.weights, tier) for tier in TIERS]
    cache = [policy.cache.get(f"kv@{tier}", 0.0) for tier in TIERS]
    hidden = [float(policy.hidden == tier) for tier in ("device", "host")]
    return np.array([*weights, *cache, *hidden])


def _over(block: Block, policy: Policy) -> dict[str, float]:
    """Return tier -> bytes by which a policy exceeds the tier's memory, by our memory plan; empty if it fits."""
    problem = block.setting.problem
    candidates = Candidates(policy, block.batch, block.setting.prompt_tokens, block.setting.gen_tokens)
    peak = peak_bytes(problem, candidates)
    excess = {tier: float(peak[tier][0]) - size for tier, size in problem.effective_budgets.limits.items()}
    return {tier: num_bytes for tier, num_bytes in excess.items() if num_bytes > 0}


def _fit(block: Block, shares: np.ndarray, budgets: dict[str, float]) -> tuple[Policy, dict[str, float]]:
    """Return (a policy close to the placement, tier -> bytes by which it exceeds our memory plan; empty if it fits).
    The program is solved again with the excess taken from ``budgets``, the bytes that FlexGen may use. If that fails,
    everything on the device moves to the host."""
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
    """Return in words why ``block`` exceeds FlexGen's memory model."""
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
