"""The linear program over shares for each discrete choice of a search.

A choice is an ``Option``, a batch and a mini-batch size. The seconds of each resource and the bytes of each tier are
then linear in the shares of weights and cache. Their terms are ``VerbSeconds`` at the vertices, where everything is in
one tier. Bits, placement and schedule add up independently, so a few dozen evaluations over all batches give the terms
of all choices.

The terms ignore waiting, whole blocks, and costs of mixtures alone (the overhead of a second copy, a layer cut between
tiers), which ``sim.array_clock`` includes. A both(…) entry is not a vertex: mixing its two parts does the same in less
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from flexhybrid.core.context.cache_entries import ATTENDED_ENTRY, TIERS, representation_of, stored_copies
from flexhybrid.core.policy import Bits, Experts, Placement, Policy
from flexhybrid.core.task import RESOURCES
from policy_search.search_problem import NATIVE, Option, SearchProblem
from sim.candidate_memory import peak_bytes
from sim.verb_seconds import resource_sums

PHASES = ("prefill", "decode")
#: Rows of a program: seconds of each resource in each phase, then bytes of each tier.
ROWS = tuple((phase, resource) for phase in PHASES for resource in RESOURCES) + tuple(("memory", t) for t in TIERS)
NUM_TIME_ROWS = len(PHASES) * len(RESOURCES)
TOK_SHARE = 0.5  #: share of tokens at which recomputation is priced; only its attention is not linear in the share
WEIGHTS_ON_DEVICE = (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class Program:
    """The linear program of one choice in readable form: seconds and bytes of each row of ROWS."""

    option: Option
    batch: int
    mini_batch_tokens: int
    constant: np.ndarray  #: [rows], the part that every placement has
    cache: dict[str, np.ndarray]  #: entry -> [rows], added if the whole cache is there
    weights: dict[tuple[float, float, float], np.ndarray]  #: (device, host, disk share) -> [rows], added
    limits: dict[str, float]  #: tier -> bytes, phase -> seconds
    counted: tuple[float, float]  #: weights of the prefill's and the decode's seconds in the objective


@dataclass(frozen=True)
class Programs:
    """Many programs in one form: minimize c·z subject to G z ≤ h and z ≥ 0.

    The columns of z are the cache shares without the first entry's, the weight shares without the first placement's,
    and the prefill's and the decode's seconds per generated token.
    """

    #: [programs, rows, columns]. The rows are those of ROWS, the sums of the cache and the weight shares, and a limit
    #: of seconds for each phase that has one
    G: np.ndarray
    h: np.ndarray  #: [programs, rows]
    c: np.ndarray  #: [columns]
    num_cache: int  #: number of cache entries, with the first

    def shares(self, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (cache shares [programs, entries], weight shares [programs, placements]) of solutions z."""
        cache, weights = z[:, : self.num_cache - 1], z[:, self.num_cache - 1 : -2]
        cache = np.concatenate([1 - cache.sum(1, keepdims=True), cache], axis=1)
        weights = np.concatenate([1 - weights.sum(1, keepdims=True), weights], axis=1)
        return np.clip(cache, 0.0, 1.0), np.clip(weights, 0.0, 1.0)


@dataclass(frozen=True)
class ChoiceGrid:
    """All choices: every option with every pair (batch, mini-batch tokens).

    Choice i is option i // pairs with pair i % pairs. Terms are arrays [pairs, rows]: differences from the reference,
    which has native bits, everything on the device, and the column schedule.
    """

    problem: SearchProblem
    options: list[Option]
    batch: np.ndarray  #: [pairs]
    mini_batch_tokens: np.ndarray  #: [pairs]
    _terms: dict = field(default_factory=dict)

    @property
    def num_choices(self) -> int:
        return len(self.options) * len(self.batch)

    def split(self, choices) -> tuple[np.ndarray, np.ndarray]:
        """Return the option indices and the pair indices of choices."""
        return np.divmod(np.asarray(choices), len(self.batch))

    def _evaluate(self, cache, placements=(WEIGHTS_ON_DEVICE,), bits=(NATIVE,) * 3, **fields) -> np.ndarray:
        """Return seconds and bytes, [placements, pairs, rows]. ``fields``: further fields of the policy."""
        problem, count = self.problem, len(placements)
        device, _, disk = np.repeat(np.array(placements).T, len(self.batch), axis=1)
        fields = dict(problem.space.kept) | fields
        policy, batch = Policy(cache=cache, bits=Bits(*bits), **fields), np.tile(self.batch, count)
        tokens = np.tile(self.mini_batch_tokens, count)
        candidates = problem.candidates(policy, batch, tokens, weights_device=device, weights_disk=disk)
        return resource_sums(problem, candidates).reshape(count, len(self.batch), len(ROWS))

    def _term(self, evaluate: Callable[..., np.ndarray], *arguments: Any) -> np.ndarray:
        """Return ``evaluate(*arguments)`` for one of the methods below; each call is evaluated once."""
        key = evaluate.__name__, *arguments
        if key not in self._terms:
            self._terms[key] = evaluate(*arguments)
        return self._terms[key]

    @cached_property
    def reference(self) -> np.ndarray:
        return self._evaluate({"kv@device": 1.0})[0]

    def _cache_term(self, entry: str, bits) -> np.ndarray:
        """Return the term of the whole cache in one entry. For token ids it follows from a mix with keys and values."""
        if entry == "tok":
            host = self._term(self._cache_term, "kv@host", NATIVE)
            mixed = self._evaluate({"tok": TOK_SHARE, "kv@host": 1 - TOK_SHARE})[0] - self.reference
            return (mixed - (1 - TOK_SHARE) * host) / TOK_SHARE
        widths = (NATIVE, bits, NATIVE) if representation_of(entry) == "kv" else (NATIVE, NATIVE, bits)
        return self._evaluate({entry: 1.0}, bits=widths)[0] - self.reference

    def _mix_term(self, kv_bits, act_bits) -> np.ndarray:
        """Return the term of the fixed cache shares. How a both(…) entry splits depends on the weights, so the term has
        the seconds of its cheaper copy, a lower bound."""
        mix, widths = self.problem.space.mix or {}, (NATIVE, kv_bits, act_bits)
        term = self._evaluate(mix, bits=widths)[0] - self.reference
        copies = {entry: stored_copies(entry) for entry in mix if representation_of(entry) == "both"}
        for chosen in product(*copies.values()) if copies else ():
            alone = {entry: share for entry, share in mix.items() if entry not in copies}
            for entry, copy in zip(copies, chosen, strict=True):
                name = f"{copy.representation}@{copy.tier}"
                alone[name] = alone.get(name, 0.0) + mix[entry]
            seconds = (self._evaluate(alone, bits=widths)[0] - self.reference)[:, :NUM_TIME_ROWS]
            term[:, :NUM_TIME_ROWS] = np.minimum(term[:, :NUM_TIME_ROWS], seconds)
        return term

    def _host_attention_term(self, entry: str) -> np.ndarray:
        cache = self.problem.space.mix or {entry: 1.0}
        return self._evaluate(cache, attention="host")[0] - self.reference

    def _weights_term(self, schedule: str, bits) -> np.ndarray:
        """Return the terms of the weights' placements, [placements, pairs, rows]. The row schedule with native weights
        on the device costs the same as the reference, so its term is 0."""
        placements = self.problem.placements
        fields = {"bits": (bits, NATIVE, NATIVE), "schedule": schedule}
        term = self._evaluate({"kv@device": 1.0}, placements, **fields) - self.reference
        if schedule == "row" and bits == NATIVE:
            term[[i for i, placement in enumerate(placements) if placement[0] == 1]] = 0.0
        return term

    def _hidden_term(self, tier: str) -> np.ndarray:
        if tier == "device":
            return 0.0 * self.reference
        return self._evaluate({"kv@device": 1.0}, hidden=tier)[0] - self.reference

    def _experts_term(self, batch: int) -> np.ndarray:
        if not batch:
            return 0.0 * self.reference
        return self._evaluate({"kv@device": 1.0}, experts=Experts(batch))[0] - self.reference

    @cached_property
    def cut_bytes(self) -> np.ndarray:
        """Return the additional device bytes of a layer that is cut between resident and streamed, [pairs]."""
        problem = self.problem
        batch, tokens = np.repeat([self.batch, self.mini_batch_tokens], 3, axis=1)
        policy = Policy(weights=Placement(host=1.0), cache={"kv@device": 1.0})
        device = np.tile([0.0, 0.5, 1.0], len(self.batch))
        peak = peak_bytes(problem, problem.candidates(policy, batch, tokens, weights_device=device))["device"]
        streamed, half, resident = peak.reshape(-1, 3).T
        rounded_row = 1e-3 * problem.shape.layer_bytes(problem.bytes_per_element)
        return np.maximum(0.0, half - (streamed + resident) / 2) + rounded_row

    def columns(self, option: Option) -> tuple[str, ...]:
        """Return the entry that each of ``vertices`` represents. Attention on the host reads only kv@host and kv@disk.
        With packed keys and values, the host cannot attend, so no column represents ``attended(kv@host)``."""
        if self.problem.space.mix:
            return ("as kept",)
        entries = self.problem.entries
        if option.attention == "host":
            return tuple(entry if entry == "kv@disk" else "kv@host" for entry in entries)
        if option.kv_bits != NATIVE:
            return tuple(entries[0] if entry == ATTENDED_ENTRY else entry for entry in entries)
        return entries

    def fold(self, option: Option, shares: np.ndarray) -> np.ndarray:
        """Return the shares [..., columns] added up by the entry that each column represents, [..., entries]."""
        entries, folded = self.problem.entries, np.zeros_like(shares)
        for column, entry in enumerate(self.columns(option)):
            folded[..., entries.index(entry)] += shares[..., column]
        return folded

    def vertices(self, option: Option) -> list[np.ndarray]:
        """Return the cache's terms, one for each of ``columns``."""
        if option.attention == "host":
            return [self._term(self._host_attention_term, entry) for entry in self.columns(option)]
        if self.problem.space.mix:
            return [self._term(self._mix_term, option.kv_bits, option.act_bits)]
        widths = {"kv": option.kv_bits, "act": option.act_bits, "tok": NATIVE}
        return [self._term(self._cache_term, e, widths[representation_of(e)]) for e in self.columns(option)]

    @property
    def num_vertices(self) -> int:
        return 1 if self.problem.space.mix else max(1, len(self.problem.entries))

    def weight_vertices(self, option: Option) -> list[np.ndarray]:
        """Return the weights' terms, one for each of ``problem.placements``."""
        return list(self._term(self._weights_term, option.schedule, option.weights_bits))

    def constant(self, option: Option) -> np.ndarray:
        terms = self._term(self._hidden_term, option.hidden) + self._term(self._experts_term, option.experts)
        return self.reference + terms

    @cached_property
    def unit(self) -> np.ndarray:
        """Return the factor from seconds to seconds per token, [pairs]."""
        return 1.0 / self.problem.tokens(self.batch)

    def program(self, choice: int) -> Program:
        """Return the program of one choice in readable form."""
        index, pair = self.split(choice)
        option = self.options[index]
        terms = zip(self.columns(option), self.vertices(option), strict=True)
        cache = {entry: term[pair] for entry, term in terms}
        placements = zip(self.problem.placements, self.weight_vertices(option), strict=True)
        weights = {placement: term[pair] for placement, term in placements}
        in_any_entry, in_any_placement = (np.min(list(terms.values()), axis=0) for terms in (cache, weights))
        return Program(
            option=option,
            batch=int(self.batch[pair]),
            mini_batch_tokens=int(self.mini_batch_tokens[pair]),
            constant=self.constant(option)[pair] + in_any_entry + in_any_placement,
            cache={entry: term - in_any_entry for entry, term in cache.items()},
            weights={placement: term - in_any_placement for placement, term in weights.items()},
            limits=self.problem.limits | dict(zip(PHASES, self.problem.phase_limits.tolist(), strict=True)),
            counted=self.problem.counted,
        )

    def programs(self, choices: np.ndarray, less_bytes: np.ndarray | None = None) -> Programs:
        """Return the programs of some choices. ``less_bytes`` [choices] reduces the device's limit."""
        option_index, pairs = self.split(choices)
        nc, nw, rows = self.num_vertices, len(self.problem.placements), len(ROWS)
        columns = nc + nw  # nc - 1 cache shares, nw - 1 weight shares, and the seconds of two phases
        limited_phases = np.flatnonzero(np.isfinite(self.problem.phase_limits))
        num_rows = rows + 2 + len(limited_phases)
        G, h = np.zeros((len(pairs), num_rows, columns)), np.zeros((len(pairs), num_rows))
        limits = np.array([self.problem.limits[tier] for tier in TIERS])
        share_of_limit = 1 / np.maximum(limits, 1.0)  # 0 without a limit
        for index in np.unique(option_index):
            chosen = np.flatnonzero(option_index == index)
            at, option = pairs[chosen], self.options[index]
            unit = self.unit[at][:, None] * np.ones(NUM_TIME_ROWS)
            scale = np.concatenate([unit, np.broadcast_to(share_of_limit, (len(at), len(TIERS)))], axis=1)
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
        for row, phase in enumerate(limited_phases, rows + 2):
            G[:, row, columns - 2 + phase] = 1.0
            h[:, row] = self.problem.phase_limits[phase] * self.unit[pairs]
        h[:, NUM_TIME_ROWS:rows] += 1.0
        if less_bytes is not None:
            h[:, NUM_TIME_ROWS] -= less_bytes * share_of_limit[0]
        c = np.zeros(columns)
        c[-2:] = self.problem.counted
        return Programs(G, h, c, nc)
