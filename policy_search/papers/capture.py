"""CAPTURE as a policy (Sec. IV): Algorithm 1's ratio, ACT on the device and balanced packing, each optional."""

import math
from dataclasses import dataclass, fields, replace

import numpy as np

from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.units import gib
from flexhybrid.core.workload import Workload
from policy_search.papers.algorithm1 import check_balance, host_blocks, layer_times, share_for_batch
from sim.candidate_memory import peak_bytes
from sim.candidates import Candidates, mean_lengths, num_mini_batches
from sim.presets import CAPTURE_MINI_BATCH_TOKENS, static_share

SHARE_STEPS = 256  #: tried ACT shares are multiples of 1 over this
CACHE = ("act@device", "act@host", "kv@host")


_PACKINGS: dict[bool | str, str] = {True: "balanced", False: "fifo", "balance": "balance"}


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """Parts of CAPTURE that are used, and its batch sizes.

    - ``ratio``: Algorithm 1 chooses the host's ACT and KV blocks under ``balance``, for the blocks of this batch, not
      of a full memory. If the host has no room for the KV blocks, ACT blocks replace some. False: the static split of
      the paper's Table III, equal bytes of ACT and KV. Its rule that ACT is "filled first" is not used: a host with
      free memory would then hold no KV. Each request keeps the pools' ratio (eq. 5).
    - ``packing``: True: balanced mini-batches of requests of similar length, faster than those of eq. 6 and 7
      (``core/context/packing.py``); "balance": those of eq. 6 and 7; False: requests in order of arrival. A mini-batch
      has up to ``max_mini_batch_tokens`` padded tokens.
    - ``device_act``: ACT blocks fill the rest of GPU memory ("exclusively allocated for Activation cache blocks"), up
      to Algorithm 1's total. HybridServe adds that a small batch may keep KV there, but gives no rule.
    - ``weights_device``: share of each layer's weights that stays on the device. The paper only says that weights are
      prefetched from the host, and gives the GPU's other memory to ACT.
    """

    balance: str = "paper"
    ratio: bool = True
    packing: bool | str = True
    device_act: bool = True
    batch: int | None = None  #: number of requests; None: all requests of the workload
    max_mini_batch_tokens: int = CAPTURE_MINI_BATCH_TOKENS
    weights_device: float = 0.0

    def __post_init__(self):
        check_balance(self.balance)
        if self.batch is not None and self.batch < 1:
            raise InputError(f"batch is {self.batch}; a batch has at least one request")

    @property
    def name(self) -> str:
        """Return the system's name as a call with the options that differ from their defaults."""
        own = [field for field in fields(self)[:4] if getattr(self, field.name) != field.default]
        changes = ",".join(f"{field.name}={getattr(self, field.name)}".lower() for field in own)
        return f"capture({changes})" if changes else "capture"


@dataclass(frozen=True)
class _Batch:
    """A batch of requests of one length on a machine."""

    problem: Problem
    options: CaptureOptions
    size: int
    prompt_tokens: int
    max_tokens: int

    @property
    def memories(self) -> dict[str, float]:
        """Return tier -> bytes of device and host, without tiers that have no limit."""
        limits = self.problem.effective_budgets.limits
        return {tier: limits[tier] for tier in ("device", "host") if limits[tier] < math.inf}

    def host_shares(self, device_shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (ACT share of the host's tokens, whether Algorithm 1 wants this much ACT on the device), both for each
        of ``device_shares``, the share of all tokens that is ACT on the device. Costs are those of the middle of the
        decode."""
        options, problem = self.options, self.problem
        if not options.ratio:
            count = len(device_shares)
            return np.full(count, static_share(problem.shape)), np.ones(count, dtype=bool)
        num, _ = num_mini_batches(self.size, self.prompt_tokens, self.max_tokens, options.max_mini_batch_tokens)
        context = self.prompt_tokens + self.max_tokens // 2
        times = layer_times(problem, self.size, context, int(num), options.weights_device)
        blocks, shares, wanted = host_blocks(self.size, context), [], []
        for device_share in device_shares:
            on_device = round(device_share * blocks)
            allocation = share_for_batch(times, blocks - on_device, options.balance, on_device)
            shares.append(allocation.act_share)
            idle = allocation.compute_s <= allocation.link_s
            wanted.append(allocation.act_blocks > 0 or idle or not on_device)
        return np.array(shares), np.array(wanted)

    def excess(self, policy: Policy, device_shares, host_shares) -> dict[str, np.ndarray]:
        """Return tier -> bytes beyond its limit (negative: free), in the shape of ``host_shares``."""
        problem, cache = self.problem, _cache(device_shares, host_shares)
        candidates = Candidates(policy, self.size, self.prompt_tokens, self.max_tokens, cache=cache)
        peak = peak_bytes(problem, candidates)
        return {tier: peak[tier] - size for tier, size in self.memories.items()}


def _cache(device_shares, host_shares) -> dict[str, np.ndarray]:
    """Return entry -> share of all tokens. ``device_shares``: share of all tokens; ``host_shares``: ACT share of the
    tokens on the host."""
    on_host = 1.0 - np.asarray(device_shares)
    shares = (np.asarray(device_shares), on_host * host_shares, on_host * (1.0 - host_shares))
    return {entry: share for entry, share in zip(CACHE, shares, strict=True) if np.any(share)}


def capture_policy(problem: Problem, workload: Workload, options: CaptureOptions) -> Policy:
    """Return CAPTURE's policy for requests of the workload's mean lengths.

    Hidden states are on the device, or on the host if the device has no room; the paper does not say where. Raise
    InputError if nothing fits the effective budgets.
    """
    size = workload.num_requests if options.batch is None else options.batch
    batch = _Batch(problem, options, size, *mean_lengths(workload))
    plain = Policy(
        options.name,
        Placement(options.weights_device, 1.0 - options.weights_device),
        cache=dict.fromkeys(CACHE, 1 / 3),
        max_mini_batch_tokens=options.max_mini_batch_tokens,
        max_batch=size,
        packing=_PACKINGS[options.packing],
    )
    steps = np.arange(SHARE_STEPS + 1) / SHARE_STEPS
    device_shares = steps if options.device_act else steps[:1]
    own_shares, wanted = batch.host_shares(device_shares)
    lifts = steps[::4, None] if options.ratio else steps[:1, None]  # share of the host's KV blocks that ACT replaces
    for hidden in ("device", "host"):
        policy = replace(plain, hidden=hidden)
        for lift in (lifts[:1], lifts):
            host_shares = own_shares + lift * (1.0 - own_shares)  # [lifts, device shares]
            excess = batch.excess(policy, device_shares, host_shares)
            fits = np.all([np.ones(host_shares.shape, dtype=bool), *(over <= 0 for over in excess.values())], axis=0)
            on_device = np.flatnonzero(wanted & (excess.get("device", 0.0 * host_shares)[0] <= 0))
            columns, last_try = np.flatnonzero(wanted & fits.any(axis=0)), len(lift) == len(lifts)
            if last_try and not len(columns):  # the host is full: put more ACT on the device than is wanted
                columns = np.flatnonzero(fits.any(axis=0))[:1]
            if len(columns) and (last_try or columns[-1] == on_device[-1]):
                column = columns[-1]
                host_share = host_shares[int(np.argmax(fits[:, column])), column]
                cache = _cache(device_shares[column], host_share)
                return replace(policy, cache={entry: float(share) for entry, share in cache.items()})
    roomy = excess.get("device", 0.0 * host_shares) <= 0
    tier, short = ("host", excess["host"][roomy].min()) if roomy.any() else ("device", excess["device"].min())
    raise InputError(
        f"CAPTURE places nothing: {tier} memory: {size} requests need at least "
        f"{gib(batch.memories[tier] + short)}, the budget is {gib(batch.memories[tier])}"
    )
