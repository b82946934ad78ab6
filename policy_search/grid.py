"""The discrete choices of a search, and the linear program over shares that each of them leaves.

With all that is discrete decided (an ``Option``, a batch, a bound of the mini-batch), the seconds of every resource and
the bytes of every tier are sums over where the weights and the cache lie, each weighted by its share. The terms of such
a sum are read off the closed form at the vertices: everything in one place. Bits, placement and schedule add up
independently, so a few dozen evaluations over all batches at once make the terms of all choices.

What the terms leave out, and the walk of ``sim.array_clock`` has: waiting; whole blocks; and what only mixtures pay (a
second copy's overhead, a layer cut between two tiers). What a both(…) entry can do, a mixture of its two parts can do
in less memory, so it is no vertex of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from flexhybrid.core.context.cache_entries import TIERS, parts_of, representation_of
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.task import RESOURCES
from sim.candidates import Candidates, num_mini_batches, peak_bytes
from sim.verb_seconds import ResourceSums, resource_sums

NATIVE = "native"
PHASES = ("prefill", "decode")
#: Rows of a program: seconds of each resource in each phase, then bytes of each tier.
ROWS = tuple((phase, resource) for phase in PHASES for resource in RESOURCES) + tuple(("memory", t) for t in TIERS)
NUM_TIME_ROWS = len(PHASES) * len(RESOURCES)
MINI_BATCH_BOUNDS = (1024, 2048, 4096, 8192, 16384, 32768)  #: tokens
TOK_SHARE = 0.5  #: recomputing a prefix is priced at this share: its attention, alone, grows with the square


@dataclass(frozen=True)
class Space:
    """What a searched policy may say. What the machine cannot serve is left out by itself."""

    entries: tuple[str, ...] = ("kv@device", "kv@host", "kv@disk", "act@device", "act@host", "act@disk", "tok")
    both: tuple[str, ...] = ("both(kv@host,act@host)", "both(kv@host,act@device)")
    attention: tuple[str, ...] = ("device", "host")
    schedules: tuple[str, ...] = ("column", "row")
    hidden: tuple[str, ...] = ("device", "host")
    weights: tuple[str, ...] = TIERS
    weights_bits: tuple[str | int, ...] = (NATIVE, 8, 4)
    kv_bits: tuple[str | int, ...] = (NATIVE, 8, 4)
    act_bits: tuple[str | int, ...] = (NATIVE, 8, 4)

    def allows(self, policy: Policy) -> bool:
        """Whether a policy stays inside; its selection must be none, whatever the space."""
        bits, named = policy.bits, (*self.entries, *self.both)
        used = [tier for tier in TIERS if getattr(policy.weights, tier) > 0]
        return (
            all(kind in named for kind in policy.cache_kinds)
            and policy.attention in self.attention
            and policy.schedule in self.schedules
            and policy.hidden in self.hidden
            and all(tier in self.weights for tier in used)
            and (bits.weights in self.weights_bits and bits.kv in self.kv_bits and bits.act in self.act_bits)
            and policy.selection.method == "none"
        )


#: All that the plan maker lays out.
FULL = Space()
#: Only exact representations at the compute dtype's width.
LOSSLESS = replace(FULL, weights_bits=(NATIVE,), kv_bits=(NATIVE,), act_bits=(NATIVE,))
#: KV and ACT in memory, attention on the device, mini-batch by mini-batch of a layer.
PLAIN = Space(
    entries=("kv@device", "kv@host", "act@device", "act@host"), both=(), attention=("device",), schedules=("column",),
    hidden=("device",), weights=("device", "host"), weights_bits=(NATIVE,), kv_bits=(NATIVE,), act_bits=(NATIVE,),
)  # fmt: skip


class Option(NamedTuple):
    """What is discrete in a policy besides its batch and mini-batches."""

    schedule: str
    hidden: str
    attention: str
    weights_bits: str | int
    kv_bits: str | int
    act_bits: str | int

    @staticmethod
    def of(policy: Policy) -> Option:
        bits = policy.bits
        return Option(policy.schedule, policy.hidden, policy.attention, bits.weights, bits.kv, bits.act)

    def policy(self, cache: dict[str, float], weights: Placement, bound: int = 8192, max_batch=None) -> Policy:
        """The policy that this option and the shares make; bits of what is not stored are native."""
        stored = {part for kind, share in cache.items() if share > 0 for part in ("kv", "act") if part + "@" in kind}
        kv, act = (bits if part in stored else NATIVE for part, bits in (("kv", self.kv_bits), ("act", self.act_bits)))
        return Policy(
            "searched", weights, cache=cache, hidden=self.hidden, bits=Bits(self.weights_bits, kv, act),
            schedule=self.schedule, max_mini_batch_tokens=bound, max_batch=max_batch, attention=self.attention,
        )  # fmt: skip


@dataclass(frozen=True)
class Question:
    """What is asked: a model on a machine, requests of one length, bytes a tier may hold, what may be said."""

    shape: ModelShape
    hardware: Hardware
    bytes_per_element: int
    prompt_tokens: int
    max_tokens: int
    budgets: dict[str, float]  #: tier -> bytes; infinity without a limit
    space: Space = FULL
    weights_device: float | None = None  #: share of each layer's bytes; None: free
    objective: str = "throughput"

    @property
    def by_decode(self) -> bool:
        """Whether the decode alone counts."""
        return self.objective == "decode_throughput" and self.max_tokens > 1

    def tokens(self, batch):
        """Generated tokens that the objective's seconds are spread over."""
        return batch * (self.max_tokens - 1 if self.by_decode else self.max_tokens)

    @cached_property
    def tiers(self) -> tuple[str, ...]:
        """Those that hold anything: a disk needs room and rates."""
        return TIERS if self.budgets["disk"] > 0 and self.hardware.has_disk else TIERS[:2]

    def has_line(self, verb: str, resource: str) -> bool:
        try:
            self.hardware.line(verb, resource)
        except InputError:
            return False
        return True

    @cached_property
    def entries(self) -> tuple[str, ...]:
        """Cache entries that attention on the device may mix."""
        return tuple(e for e in self.space.entries if e == "tok" or e.split("@")[1] in self.tiers)

    @cached_property
    def both(self) -> tuple[str, ...]:
        """Entries that keep two copies of a token."""
        return tuple(e for e in self.space.both if all(part.tier in self.tiers for part in parts_of(e)))

    @cached_property
    def placements(self) -> tuple[tuple[float, float, float], ...]:
        """The weights' vertices: shares of device, host and disk."""
        kept = self.weights_device
        tiers = [tier for tier in self.space.weights if tier in self.tiers]
        if kept is None:
            return tuple(tuple(float(tier == one) for tier in TIERS) for one in tiers)
        rest = [tier for tier in tiers if tier != "device"] if kept < 1 else ["host"]
        return tuple((kept, (1 - kept) * (one == "host"), (1 - kept) * (one == "disk")) for one in rest)

    @cached_property
    def options(self) -> list[Option]:
        """Every option. Attention on the host reads native bits: nothing there unpacks."""
        space = self.space
        bits = {NATIVE}
        if self.has_line("dequantize_weights", "compute"):
            bits |= {8, 4}
        widths = [[b for b in of if b in bits] for of in (space.weights_bits, space.kv_bits, space.act_bits)]
        kinds = {representation_of(entry) for entry in self.entries}
        if "act" not in kinds:
            widths[2] = [NATIVE]
        if "kv" not in kinds:
            widths[1] = [NATIVE]
        found = []
        for schedule, hidden in product(space.schedules, space.hidden):
            if "device" in space.attention and kinds - {"tok"}:
                found += [Option(schedule, hidden, "device", *one) for one in product(*widths)]
            on_host = "host" in space.attention and "kv@host" in space.entries and NATIVE in widths[1]
            if on_host and self.has_line("attend_host", "host_compute"):
                found += [Option(schedule, hidden, "host", one, NATIVE, NATIVE) for one in widths[0]]
        return found


def batch_grid(max_batch: int) -> np.ndarray:
    """Every batch up to 64, then steps of a sixteenth, and ``max_batch`` itself."""
    batches, batch = [], 1
    while batch <= max_batch:
        batches.append(batch)
        batch += 1 if batch < 64 else batch // 16
    return np.array(sorted({*batches, max_batch}))


def pairs_of(question: Question, batches: np.ndarray, bounds) -> tuple[np.ndarray, np.ndarray]:
    """(batch, bound of a mini-batch) of every different cut into mini-batches."""
    return distinct_pairs(question, *(a.reshape(-1) for a in np.meshgrid(batches, sorted(bounds), indexing="ij")))


def distinct_pairs(question: Question, batch: np.ndarray, bound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of pairs (batch, bound of a mini-batch), the first of each different cut into mini-batches."""
    batch, bound = batch.astype(float), bound.astype(float)
    count, _ = num_mini_batches(batch, question.prompt_tokens, question.max_tokens, bound)
    _, first = np.unique(np.stack([batch, count]), axis=1, return_index=True)
    return batch[first], bound[first]


@dataclass(frozen=True)
class Program:
    """The linear program of one choice, spelt out: seconds and bytes of each row of ROWS wherever cache and weights lie
    (``constant``), and more for all of the cache, or of the weights, in one place."""

    option: Option
    batch: int
    bound: int
    constant: np.ndarray  #: [rows]
    cache: dict[str, np.ndarray]  #: entry -> [rows]
    weights: dict[tuple[float, float, float], np.ndarray]  #: shares of device, host, disk -> [rows]
    budgets: dict[str, float]
    counted: tuple[float, float]  #: weight of the prefill's and of the decode's seconds in the objective


@dataclass(frozen=True)
class Programs:
    """Many programs in one form: minimise c·z with G z ≤ h, z ≥ 0. z: all cache shares but the first entry's, all
    weight shares but the first placement's, seconds of the prefill, seconds of the decode, both per generated token."""

    G: np.ndarray  #: [programs, rows, columns]; the rows of ROWS, then "shares add up" of the cache and of the weights
    h: np.ndarray  #: [programs, rows]
    c: np.ndarray  #: [columns]
    num_cache: int  #: entries, the first included


@dataclass(frozen=True)
class Grid:
    """All choices: every option with every (batch, bound). Choice i is option i // pairs with pair i % pairs."""

    question: Question
    options: list[Option]
    batch: np.ndarray  #: [pairs]
    bound: np.ndarray  #: [pairs]
    _seen: dict = field(default_factory=dict)

    @property
    def num_choices(self) -> int:
        return len(self.options) * len(self.batch)

    def split(self, choices) -> tuple[np.ndarray, np.ndarray]:
        """(option, pair) indices."""
        return np.divmod(np.asarray(choices), len(self.batch))

    # ---- terms, [pairs, rows], each against the reference: native bits, all on the device, column schedule

    def _evaluate(self, cache, placements=((1.0, 0.0, 0.0),), bits=(NATIVE,) * 3, **fields) -> np.ndarray:
        """Seconds and bytes, [placements, pairs, rows], with the weights in each of ``placements``."""
        q, count = self.question, len(placements)
        policy = Policy(cache=cache, bits=Bits(*bits), **fields)
        device, _, disk = np.repeat(np.array(placements).T, len(self.batch), axis=1)
        pairs = np.tile(self.batch, count), q.prompt_tokens, q.max_tokens, np.tile(self.bound, count)
        candidates = Candidates(policy, *pairs, weights_device=device, weights_disk=disk)
        sums: ResourceSums = resource_sums(q.shape, q.hardware, q.bytes_per_element, candidates)
        columns = [*sums.prefill_s.values(), *sums.decode_s.values(), *(sums.peak_bytes[tier] for tier in TIERS)]
        return np.stack(columns, axis=-1).reshape(count, len(self.batch), len(ROWS))

    @property
    def reference(self) -> np.ndarray:
        return self._term("reference")

    def _term(self, kind: str, *key) -> np.ndarray:
        """A term by name, evaluated once: [..., pairs, rows]."""
        found = self._seen.get((kind, *key))
        if found is None:
            found = self._seen[kind, *key] = getattr(self, f"_{kind}_term")(*key)
        return found

    def narrowed(self, choice: int) -> Grid:
        """The grid of one choice alone, with what is already known of it."""
        number, pair = self.split(choice)
        known = {key: term[..., pair : pair + 1, :] for key, term in self._seen.items()}
        return Grid(self.question, [self.options[number]], self.batch[[pair]], self.bound[[pair]], known)

    def _reference_term(self) -> np.ndarray:
        return self._evaluate({"kv@device": 1.0})[0]

    def _cache_term(self, entry: str, bits) -> np.ndarray:
        if entry == "tok":
            host = self._term("cache", "kv@host", NATIVE)
            mixed = self._evaluate({"tok": TOK_SHARE, "kv@host": 1 - TOK_SHARE})[0] - self.reference
            return (mixed - (1 - TOK_SHARE) * host) / TOK_SHARE
        of = (NATIVE, bits, NATIVE) if representation_of(entry) == "kv" else (NATIVE, NATIVE, bits)
        return self._evaluate({entry: 1.0}, bits=of)[0] - self.reference

    def _host_attention_term(self) -> np.ndarray:
        return self._evaluate({"kv@host": 1.0}, attention="host")[0] - self.reference

    def _weights_term(self, schedule: str, bits) -> np.ndarray:
        """[placements, pairs, rows]. A schedule in itself costs nothing: native weights on the device are the
        reference's."""
        placements = self.question.placements
        more = {"bits": (bits, NATIVE, NATIVE), "schedule": schedule}
        term = self._evaluate({"kv@device": 1.0}, placements, **more) - self.reference
        if schedule == "row" and bits == NATIVE:
            term[[number for number, placement in enumerate(placements) if placement[0] == 1]] = 0.0
        return term

    def _hidden_term(self, tier: str) -> np.ndarray:
        if tier == "device":
            return 0.0 * self.reference
        return self._evaluate({"kv@device": 1.0}, hidden=tier)[0] - self.reference

    @cached_property
    def cut_bytes(self) -> np.ndarray:
        """Device bytes, [pairs], that a layer cut between resident and streamed needs beside."""
        q = self.question

        batch, bound = np.repeat([self.batch, self.bound], 3, axis=1)
        share = np.tile([0.0, 0.5, 1.0], len(self.batch))
        policy = Policy(weights=Placement(host=1.0), cache={"kv@device": 1.0})
        candidates = Candidates(policy, batch, q.prompt_tokens, q.max_tokens, bound, weights_device=share)
        peak = peak_bytes(q.shape, q.hardware, q.bytes_per_element, candidates)["device"]
        none, half, whole = peak.reshape(-1, 3).T
        step = q.shape.layer_bytes(q.bytes_per_element)  # a rounded row more or less
        return np.maximum(0.0, half - (none + whole) / 2) + 1e-3 * step

    # ---- programs

    def vertices(self, option: Option) -> list[np.ndarray]:
        """The cache's terms, one for each of ``question.entries``."""
        if option.attention == "host":
            return [self._term("host_attention")] * max(1, len(self.question.entries))
        widths = {"kv": option.kv_bits, "act": option.act_bits, "tok": NATIVE}
        return [self._term("cache", e, widths[representation_of(e)]) for e in self.question.entries]

    def weight_vertices(self, option: Option) -> list[np.ndarray]:
        """The weights' terms, one for each of ``question.placements``."""
        return list(self._term("weights", option.schedule, option.weights_bits))

    def constant(self, option: Option) -> np.ndarray:
        return self.reference + self._term("hidden", option.hidden)

    @cached_property
    def unit(self) -> np.ndarray:
        """Seconds, [pairs], become seconds per token by this factor."""
        return 1.0 / self.question.tokens(self.batch)

    @cached_property
    def budgets(self) -> np.ndarray:
        """[tiers], bytes."""
        return np.array([self.question.budgets[tier] for tier in TIERS])

    @property
    def counted(self) -> tuple[float, float]:
        return (0.0, 1.0) if self.question.by_decode else (1.0, 1.0)

    def program(self, choice: int) -> Program:
        """One choice, spelt out."""
        number, pair = self.split(choice)
        option = self.options[number]
        names = self.question.entries if option.attention == "device" else ("kv@host",)
        cache = {name: term[pair] for name, term in zip(names, self.vertices(option), strict=False)}
        weights = dict(zip(self.question.placements, (t[pair] for t in self.weight_vertices(option)), strict=True))
        constant = self.constant(option)[pair]
        for terms in (cache, weights):  # what every place costs, whichever it is, is no matter of shares
            least = np.min(list(terms.values()), axis=0)
            constant = constant + least
            for place in terms:
                terms[place] = terms[place] - least
        return Program(
            option, int(self.batch[pair]), int(self.bound[pair]), constant, cache, weights,
            dict(self.question.budgets), self.counted,
        )  # fmt: skip

    def programs(self, choices: np.ndarray, less_bytes: np.ndarray | None = None) -> Programs:
        """The programs of some choices; ``less_bytes`` [choices] are taken from the device's budget."""
        numbers, pairs = self.split(choices)
        nc, nw, rows = max(1, len(self.question.entries)), len(self.question.placements), len(ROWS)
        columns = nc + nw  # both simplices without their first vertex, and two phases
        G, h = np.zeros((len(numbers), rows + 2, columns)), np.zeros((len(numbers), rows + 2))
        limited = np.isfinite(self.budgets)
        share_of_budget = np.where(limited, 1 / np.maximum(np.where(limited, self.budgets, 1.0), 1.0), 0.0)
        for number in np.unique(numbers):
            chosen = np.flatnonzero(numbers == number)
            at, option = pairs[chosen], self.options[number]
            unit = self.unit[at][:, None] * np.ones(NUM_TIME_ROWS)
            scale = np.concatenate([unit, np.broadcast_to(share_of_budget, (len(at), len(TIERS)))], axis=1)
            cache = [term[at] * scale for term in self.vertices(option)]
            weights = [term[at] * scale for term in self.weight_vertices(option)]
            for j, term in enumerate(cache[1:]):
                G[chosen, :rows, j] = term - cache[0]
            for j, term in enumerate(weights[1:]):
                G[chosen, :rows, nc - 1 + j] = term - weights[0]
            h[chosen, :rows] = -(self.constant(option)[at] * scale + cache[0] + weights[0])
        G[:, : len(RESOURCES), -2] = -1.0
        G[:, len(RESOURCES) : NUM_TIME_ROWS, -1] = -1.0
        G[:, rows, : nc - 1] = 1.0
        G[:, rows + 1, nc - 1 : nc + nw - 2] = 1.0
        h[:, rows:] = 1.0
        h[:, NUM_TIME_ROWS:rows] += 1.0
        if less_bytes is not None:
            h[:, NUM_TIME_ROWS] -= less_bytes * share_of_budget[0]
        c = np.zeros(columns)
        c[-2:] = self.counted
        return Programs(G, h, c, nc)

    def shares(self, programs: Programs, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(cache shares [programs, entries], weight shares [programs, placements]) of solutions z."""
        nc = programs.num_cache
        cache, weights = z[:, : nc - 1], z[:, nc - 1 : -2]
        cache = np.concatenate([1 - cache.sum(1, keepdims=True), cache], axis=1)
        weights = np.concatenate([1 - weights.sum(1, keepdims=True), weights], axis=1)
        return np.clip(cache, 0.0, 1.0), np.clip(weights, 0.0, 1.0)
