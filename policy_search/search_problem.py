"""The problem of a search: requests of one length, and the policies that may be chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from flexhybrid.core.context.cache_entries import ATTENDED_ENTRY, TIERS, representation_of, stored_copies
from flexhybrid.core.context.packing import chunk_tokens
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.policy import BITS, Bits, CacheShares, Experts, Placement, Policy
from flexhybrid.core.problem import Problem
from sim.array_clock import Prediction
from sim.candidates import Candidates, num_mini_batches
from sim.cost import hardware_of

NATIVE = "native"
MINI_BATCH_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)  #: sizes of a mini-batch that are tried
#: Sizes that are tried with everything on the device: there are no copies that several mini-batches could hide.
RESIDENT_MINI_BATCH_TOKENS = (*MINI_BATCH_TOKENS, 65536, 131072)


@dataclass(frozen=True)
class Space:
    """Choices that a searched policy may use. The search skips choices that the machine lacks."""

    entries: tuple[str, ...] = (
        *("kv@device", "kv@host", "kv@disk", "act@device", "act@host", "act@disk", "tok"),
        ATTENDED_ENTRY,
    )
    both: tuple[str, ...] = ("both(kv@host,act@host)", "both(kv@host,act@device)")
    attention: tuple[str, ...] = ("device", "host")
    schedules: tuple[str, ...] = ("column", "row")
    hidden: tuple[str, ...] = ("device", "host")
    weights: tuple[str, ...] = TIERS
    weights_bits: tuple[str | int, ...] = (NATIVE, 8, 4)
    kv_bits: tuple[str | int, ...] = (NATIVE, 8, 4)
    act_bits: tuple[str | int, ...] = (NATIVE, 8, 4)
    experts: tuple[int, ...] = (0, 1)  #: values of ``Experts.batch``, for models whose mini-batches can share experts
    mix: CacheShares | None = None  #: fixed shares of the cache; None: the search chooses
    kept: tuple[tuple[str, Any], ...] = ()  #: (field, value) pairs of OTHERS, which every policy has

    @property
    def lossless(self) -> bool:
        """Return whether every policy stores everything in native bits."""
        return {*self.weights_bits, *self.kv_bits, *self.act_bits} == {NATIVE}

    def allows(self, policy: Policy) -> bool:
        """Return whether a policy uses only these choices. A policy with a selection is in no space."""
        bits, entries = policy.bits, (*self.entries, *self.both)
        used = [tier for tier in TIERS if getattr(policy.weights, tier) > 0]
        return (
            all(entry in entries for entry in policy.cache_entries)
            and policy.attention in self.attention
            and policy.schedule in self.schedules
            and policy.hidden in self.hidden
            and all(tier in self.weights for tier in used)
            and (bits.weights in self.weights_bits and bits.kv in self.kv_bits and bits.act in self.act_bits)
            and policy.selection.method == "none"
            and policy.experts.batch in self.experts
            and (self.mix is None or _alike(policy.cache, self.mix))
            and all(getattr(policy, name) == value for name, value in self.kept)
        )


def _alike(shares: Mapping[str, float], others: Mapping[str, float]) -> bool:
    """Return whether shares are equal up to rounding."""
    return all(abs(shares.get(key, 0.0) - others.get(key, 0.0)) <= 1e-4 for key in {*shares, *others})


#: All choices.
FULL = Space()
#: All choices with native bits.
LOSSLESS = replace(FULL, weights_bits=(NATIVE,), kv_bits=(NATIVE,), act_bits=(NATIVE,))
#: KV and ACT on device and host, attention on the device, column schedule, native bits.
PLAIN = replace(
    LOSSLESS,
    entries=("kv@device", "kv@host", "act@device", "act@host"),
    both=(),
    attention=("device",),
    schedules=("column",),
    hidden=("device",),
    weights=("device", "host"),
    experts=(0,),
)


def measured_space(space: Space, hardware: Hardware) -> Space:
    """Return the space without choices that this machine's profile did not measure: attention on the host, and packed
    bits. If a CPU is the device, attention is not shared either: both parts would run on the same cores. The space is
    unchanged for other machines."""
    if hardware.name != "local":
        return space
    if hardware.device == "cpu":
        space = replace(space, entries=tuple(entry for entry in space.entries if entry != ATTENDED_ENTRY))
    if "attend_host" not in hardware.lines:
        space = replace(space, attention=("device",))
    if "dequantize_kv" not in hardware.lines:
        space = replace(space, weights_bits=(NATIVE,), kv_bits=(NATIVE,), act_bits=(NATIVE,))
    return space


#: Fields of a policy that no search chooses. Settings can fix their values (``Space.kept``).
OTHERS = ("embedding", "states", "packing", "weight_order", "split", "static_cache", "overlap")


class Option(NamedTuple):
    """The discrete choices of a policy except its batch and mini-batch size."""

    schedule: str
    hidden: str
    attention: str
    weights_bits: str | int
    kv_bits: str | int
    act_bits: str | int
    kept: tuple[tuple[str, Any], ...] = ()  #: (field, value) pairs of OTHERS that differ from the defaults
    experts: int = 0  #: ``Experts.batch``

    @staticmethod
    def of(policy: Policy) -> Option:
        """Return the option of a policy."""
        bits, kept = policy.bits, unusual((name, getattr(policy, name)) for name in OTHERS)
        usual = Option(policy.schedule, policy.hidden, str(policy.attention), bits.weights, bits.kv, bits.act)
        return usual._replace(kept=kept, experts=policy.experts.batch)

    def storing(self, entries: Iterable[str]) -> Option:
        """Return the option with native bits for representations that no cache entry stores."""
        stored = "".join(entries)
        return self._replace(
            kv_bits=self.kv_bits if "kv" in stored else NATIVE, act_bits=self.act_bits if "act" in stored else NATIVE
        )

    def policy(self, cache: dict[str, float], weights: Placement, **sizes: Any) -> Policy:
        """Return the policy of this option with these shares. ``sizes``: max_batch and max_mini_batch_tokens.
        Representations without a share get native bits."""
        stored = self.storing(entry for entry, share in cache.items() if share > 0)
        return Policy(
            "searched",
            weights,
            cache=cache,
            hidden=self.hidden,
            bits=Bits(stored.weights_bits, stored.kv_bits, stored.act_bits),
            schedule=self.schedule,
            attention=self.attention,
            experts=Experts(self.experts),
            **dict(self.kept),
            **sizes,
        )


def unusual(fields: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """Return the (name, value) pairs that differ from a policy's defaults."""
    usual = Policy()
    return tuple((name, value) for name, value in fields if value != getattr(usual, name))


@dataclass(frozen=True, kw_only=True)
class SearchProblem(Problem):
    """A problem on a known machine, with requests of one length and the policies that may be chosen."""

    prompt_tokens: int
    max_tokens: int
    space: Space = FULL
    weights_device: float | None = None  #: share of each layer's bytes on the device; None: free
    weights_disk: float | None = None  #: share of each layer's bytes on the disk; None: free
    #: one of ``OBJECTIVES``, or "ttft" (time to first token) or "tpot" (time between two tokens)
    objective: str = "throughput"
    max_ttft_s: float | None = None  #: most seconds to the first tokens of a wave; None: no limit
    max_tpot_s: float | None = None  #: most seconds between two tokens of a request; None: no limit

    def allows(self, policy: Policy) -> bool:
        """Return whether a policy is in the space and has the fixed weight shares."""
        given = {"device": self.weights_device, "disk": self.weights_disk}
        kept = {tier: share for tier, share in given.items() if share is not None}
        return self.space.allows(policy) and _alike({tier: getattr(policy.weights, tier) for tier in kept}, kept)

    @cached_property
    def limits(self) -> dict[str, float]:
        """Return tier -> bytes that a policy may fill; infinity without a limit."""
        return self.effective_budgets.limits

    def candidates(self, policy: Policy, batch: np.ndarray, mini_batch_tokens=None, **shares) -> Candidates:
        """Return a policy with each batch as candidates with this problem's lengths. ``shares``: the share fields of
        ``Candidates``."""
        return Candidates(policy, batch, self.prompt_tokens, self.max_tokens, mini_batch_tokens, **shares)

    @cached_property
    def phase_limits(self) -> np.ndarray:
        """Return the most seconds of a wave's prefill and decode, [2]; infinity without a limit. The decode's limit has
        one iteration more than the decode, because the prefill may hide one iteration's work. Both have a tolerance of
        1e-9."""
        decode = None if self.max_tpot_s is None or self.max_tokens == 1 else self.max_tpot_s * self.max_tokens
        return np.array([np.inf if limit is None else limit * (1 + 1e-9) for limit in (self.max_ttft_s, decode)])

    def in_time(self, prediction: Prediction) -> np.ndarray:
        """Return whether predictions with waiting keep the limits of TTFT and TPOT, [candidates]."""
        decode_s = prediction.decode_s * self.max_tokens / max(1, self.max_tokens - 1)
        return (prediction.prefill_s <= self.phase_limits[0]) & (decode_s <= self.phase_limits[1])

    def may_be_in_time(self, prefill_s, decode_s):
        """Return whether policies can keep the limits, given the seconds of their busiest resources."""
        return (prefill_s <= self.phase_limits[0]) & (decode_s <= self.phase_limits[1])

    @property
    def counted(self) -> tuple[float, float]:
        """Return the weights of the prefill's and the decode's seconds in the objective."""
        if self.objective in ("decode_throughput", "tpot") and self.max_tokens > 1:
            return 0.0, 1.0
        return 1.0, float(self.objective != "ttft")

    def tokens(self, batch):
        """Return the generated tokens by which the objective divides its seconds: those of one request for "ttft" and
        "tpot", otherwise those of the batch."""
        prefill, decode = self.counted
        of_request = self.max_tokens - (not prefill) if decode else 1
        return of_request * (np.ones_like(batch) if self.objective in ("ttft", "tpot") else batch)

    @cached_property
    def tiers(self) -> tuple[str, ...]:
        """Return the tiers that can hold data. An unknown disk has a limit of 0 bytes."""
        return TIERS if self.limits["disk"] > 0 else TIERS[:2]

    def has_line(self, verb: str, resource: str) -> bool:
        """Return whether the machine has a line for a verb."""
        with suppress(InputError):
            return bool(hardware_of(self).line(verb, resource))
        return False

    @cached_property
    def entries(self) -> tuple[str, ...]:
        """Return the cache entries that attention on the device may mix. Entries without recomputation come first: if
        several are equally fast, a program's optimum uses the first."""
        known = [e for e in self.space.entries if all(part.tier in self.tiers for part in stored_copies(e))]
        splits = {"device", "host"} <= {*self.space.attention} and self.has_line("attend_host", "host_compute")
        if ATTENDED_ENTRY in known and not (splits and NATIVE in self.space.kv_bits):
            known.remove(ATTENDED_ENTRY)
        return tuple(sorted(known, key=lambda entry: ("kv", "act", "tok").index(representation_of(entry))))

    @cached_property
    def both(self) -> tuple[str, ...]:
        """Return the entries that keep two copies of a token."""
        return tuple(e for e in self.space.both if all(part.tier in self.tiers for part in stored_copies(e)))

    @cached_property
    def placements(self) -> tuple[tuple[float, float, float], ...]:
        """Return the vertices of the weights' placement: (device share, host share, disk share)."""
        kept, on_disk = self.weights_device, self.weights_disk
        tiers = [tier for tier in self.space.weights if tier in self.tiers]
        if on_disk is not None:
            devices = (1 - on_disk, 0.0) if kept is None else (kept,)
            return tuple((device, 1 - on_disk - device, on_disk) for device in dict.fromkeys(devices))
        if kept is None:
            return tuple((float(tier == "device"), float(tier == "host"), float(tier == "disk")) for tier in tiers)
        streamed = [tier for tier in tiers if tier != "device"] if kept < 1 else ["host"]
        return tuple((kept, (1 - kept) * (tier == "host"), (1 - kept) * (tier == "disk")) for tier in streamed)

    @cached_property
    def options(self) -> list[Option]:
        """Return all options. Attention on the host needs a cache in native bits, because the host does not unpack."""
        space = self.space
        known = set(BITS) if self.has_line("dequantize_weights", "compute") else {NATIVE}
        weights, kv, act = (
            [bits for bits in widths if bits in known] for widths in (space.weights_bits, space.kv_bits, space.act_bits)
        )
        if self.shape.packed_elements:
            weights = [NATIVE]  # as the checkpoint packs them
        stored = {representation_of(entry) for entry in space.mix or self.entries}
        stored |= {"kv", "act"} if "both" in stored else set()
        on_device = list(product(weights, kv if "kv" in stored else [NATIVE], act if "act" in stored else [NATIVE]))
        if "device" not in space.attention or not stored - {"tok"}:
            on_device = []
        on_host = "host" in space.attention and "kv@host" in space.entries and (NATIVE in kv or "kv" not in stored)
        on_host = on_host and self.has_line("attend_host", "host_compute")
        on_host = on_host and {*(space.mix or ())} <= {"kv@host", "kv@disk"}
        options = []
        for schedule, hidden in product(space.schedules, space.hidden):
            options += [Option(schedule, hidden, "device", *bits) for bits in on_device]
            if on_host:
                options += [Option(schedule, hidden, "host", bits, NATIVE, NATIVE) for bits in weights]
        together = [batch for batch in space.experts if batch and any(self.shape.routed)]
        shared = [option for option in options if option.schedule == "column" and option.hidden == "device"]
        options *= 0 in space.experts
        options += [option._replace(experts=batch) for batch in together for option in shared]
        if not options:
            raise InputError(
                "no policy is left to choose: what is kept of the cache contradicts where attention may run"
            )
        return [option._replace(kept=unusual(space.kept)) for option in options]


def batch_grid(max_batch: int) -> np.ndarray:
    """Return every batch up to 64, then batches in steps of a sixteenth, and ``max_batch``."""
    batches, batch = [], 1
    while batch <= max_batch:
        batches.append(batch)
        batch += 1 if batch < 64 else batch // 16
    return np.array(sorted({*batches, max_batch}))


def pairs_of(problem: SearchProblem, batches: np.ndarray, mini_batch_tokens) -> tuple[np.ndarray, np.ndarray]:
    """Return (batch, mini-batch tokens), arrays [pairs], with one pair for each different cut into mini-batches."""
    pairs = np.meshgrid(batches, sorted(mini_batch_tokens), indexing="ij")
    return distinct_pairs(problem, *(values.reshape(-1) for values in pairs))


def distinct_pairs(problem: SearchProblem, batch: np.ndarray, mini_batch_tokens) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs (batch, mini-batch tokens) without those that cut batches into the same mini-batches, and long
    prompts into the same number of chunks, as an earlier pair."""
    batch, mini_batch_tokens = batch.astype(float), mini_batch_tokens.astype(float)
    count, _ = num_mini_batches(batch, problem.prompt_tokens, problem.max_tokens, mini_batch_tokens)
    chunks = np.ceil(problem.prompt_tokens / chunk_tokens(mini_batch_tokens))
    _, first = np.unique(np.stack([batch, count, chunks]), axis=1, return_index=True)
    return batch[first], mini_batch_tokens[first]
