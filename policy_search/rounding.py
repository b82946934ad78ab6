"""From a program's shares to what a policy can say, and what that takes: whole blocks, weights that fit, the walk.

A request's cache is dealt in blocks, so shares are rounded to blocks of the final context. The weights fill what is
left exactly: on the device as much as fits, on the disk only what the host cannot hold. What is then predicted is the
policy itself, waiting and all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations, compress

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.core.context.cache_entries import representation_of
from flexhybrid.core.model.layout import layer_layout
from flexhybrid.core.policy import Placement, Policy
from policy_search.grid import NATIVE, Grid, Option, Programs, Question
from policy_search.lower_bound import solve_side_by_side
from sim.array_clock import Prediction, predict
from sim.candidates import Candidates, peak_bytes

WEIGHT_STEPS = 10_000  #: weight shares are multiples of one of so many
MOST_DEALS = 96  #: ways of dealing blocks that are tried around the best mix
SHARE_STEPS = 128  #: of an exchange between two entries, beside whole blocks
LEAST_BLOCKS = 0.75  #: an entry with fewer blocks than this is also tried without


@dataclass(frozen=True)
class Draft:
    """A policy before its weights are placed."""

    option: Option
    batch: int
    bound: int
    cache: tuple[tuple[str, float], ...]  #: entries with their shares, sorted, none of zero

    @staticmethod
    def of(option: Option, batch, bound, shares: dict[str, float]) -> Draft:
        """Shares of zero are dropped, bits of what is not stored are native: equal policies make equal drafts."""
        cache = tuple(sorted((kind, float(share)) for kind, share in shares.items() if share > 0))
        stored = "".join(kind for kind, _ in cache)
        kv = option.kv_bits if "kv" in stored else NATIVE
        act = option.act_bits if "act" in stored else NATIVE
        return Draft(option._replace(kv_bits=kv, act_bits=act), int(batch), int(bound), cache)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for kind, _ in self.cache)

    def policy(self, device: float, disk: float) -> Policy:
        """The policy with its weights placed: shares of each layer's bytes."""
        device, disk = round(float(device), 6), round(float(disk), 6)
        weights = Placement(device, max(0.0, round(1.0 - device - disk, 6)), disk)
        return self.option.policy(dict(self.cache), weights, self.bound, self.batch)


@dataclass(frozen=True)
class Priced:
    """A policy that fits, and its objective by the closed form with waiting: seconds per token."""

    policy: Policy
    batch: int
    seconds: float
    draft: Draft | None = None


@dataclass
class Evaluator:
    """Prices drafts and remembers which ones it has seen."""

    question: Question
    num_walked: int = 0
    seen: set = field(default_factory=set)

    def price(self, drafts: list[Draft], limit: float = np.inf) -> list[Priced]:
        """Of the drafts not yet seen, those that fit and whose bound is below ``limit`` (seconds per token)."""
        groups: dict[tuple, list[Draft]] = {}
        for draft in drafts:
            if draft not in self.seen:
                self.seen.add(draft)
                alone = draft if "both" in map(representation_of, draft.kinds) else None
                groups.setdefault((draft.option, draft.kinds, alone), []).append(draft)
        return [one for group in groups.values() for one in self._price(group, limit)]

    def _price(self, drafts: list[Draft], limit: float) -> list[Priced]:
        """Drafts of one option with the same entries."""
        q = self.question
        device, disk, fits = place_weights(q, candidates_of(q, drafts))
        if not fits.any():
            return []
        drafts = [draft for draft, fit in zip(drafts, fits, strict=True) if fit]
        device, disk = device[fits], disk[fits]
        policies = [draft.policy(a, b) for draft, a, b in zip(drafts, device, disk, strict=True)]
        if "both" in map(representation_of, drafts[0].kinds):  # its split hangs on where the weights are
            priced = [self.price_policy(policy, np.array([policy.max_batch]), limit) for policy in policies]
            return [replace(one, draft=drafts[0]) for some in priced for one in some]
        candidates = candidates_of(q, drafts, policies[0], device, disk)
        if np.isfinite(limit):
            bound = predict(q.shape, q.hardware, q.bytes_per_element, candidates, walk=False)
            near = _counted(q, bound, candidates.batch) < limit
            if not near.any():
                return []
            policies, drafts = (list(compress(some, near)) for some in (policies, drafts))
            candidates = candidates_of(q, drafts, policies[0], device[near], disk[near])
        self.num_walked += len(drafts)
        seconds = objective_seconds(q, candidates)
        return [
            Priced(policy, draft.batch, float(s), draft)
            for policy, draft, s in zip(policies, drafts, seconds, strict=True)
        ]

    def price_policy(self, policy: Policy, batches: np.ndarray, limit: float = np.inf) -> list[Priced]:
        """A whole policy on several batches; left out are those over a budget and those whose bound is at the limit."""
        q = self.question
        candidates = Candidates(policy, batches.astype(np.float64), q.prompt_tokens, q.max_tokens)
        bound = predict(q.shape, q.hardware, q.bytes_per_element, candidates, walk=False)
        least = _counted(q, bound, batches)
        fits = np.all([bound.peak_bytes[tier] <= budget for tier, budget in q.budgets.items()], axis=0)
        batches = batches[fits & (least < limit)]
        if not len(batches):
            return []
        self.num_walked += len(batches)
        seconds = objective_seconds(q, replace(candidates, batch=batches.astype(np.float64)))
        return [
            Priced(replace(policy, max_batch=int(batch)), int(batch), float(s))
            for batch, s in zip(batches, seconds, strict=True)
        ]


def objective_seconds(question: Question, candidates: Candidates) -> np.ndarray:
    """Seconds per token, [candidates]: of the whole run, or of the decode. Never less than the bound."""
    q = question
    found = predict(q.shape, q.hardware, q.bytes_per_element, candidates)
    return _counted(q, found, np.asarray(candidates.batch))


def _counted(q: Question, found: Prediction, batch: np.ndarray) -> np.ndarray:
    """The seconds of a prediction that the objective counts, per token."""
    return (found.decode_s if q.by_decode else np.maximum(found.total_s, found.bound_s)) / q.tokens(batch)


def candidates_of(q: Question, drafts: list[Draft], policy: Policy | None = None, device=None, disk=None) -> Candidates:
    """Drafts of one option with the same entries; ``policy`` stands for what they share."""
    first = drafts[0]
    if policy is None:
        policy = first.option.policy(dict(first.cache), Placement(host=1.0))
    shares = np.array([[share for _, share in draft.cache] for draft in drafts]).T
    return Candidates(
        policy, np.array([float(d.batch) for d in drafts]), q.prompt_tokens, q.max_tokens,
        np.array([float(d.bound) for d in drafts]), dict(zip(first.kinds, shares, strict=True)), device, disk,
    )  # fmt: skip


def place_weights(question: Question, candidates: Candidates) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(device share, disk share, whether it fits), [candidates]: the most of the weights on the device, the least on
    the disk. A resident byte of a layer costs one in each of L layers and saves two slots: what is left divides evenly.
    """
    q, c = question, candidates
    layout = layer_layout(q.shape, c.policy.bits.element_bytes(q.bytes_per_element).weights, q.bytes_per_element)
    size, total = np.shape(c.batch), layout.total_bytes
    slope = max(q.shape.num_layers - 2, 0)
    row = max(spot.row_bytes for spot in layout.spots if spot.cols)  # a share is rounded to whole rows

    def peaks(device, disk) -> dict[str, np.ndarray]:
        device, disk = np.broadcast_to(device, size), np.broadcast_to(disk, size)
        return peak_bytes(q.shape, q.hardware, q.bytes_per_element, _with_weights(c, device, disk))

    if q.weights_device is not None:
        device = np.full(size, float(q.weights_device))
    elif "device" not in q.space.weights:
        device = np.zeros(size)
    elif np.isinf(q.budgets["device"]):
        device = np.ones(size)
    else:
        whole = peaks(1.0, 0.0)["device"] <= q.budgets["device"]
        kept = layout.resident_prefix(0.5) + (q.budgets["device"] - peaks(0.5, 0.0)["device"]) / max(slope, 1) - row
        share = np.floor(kept / total * WEIGHT_STEPS) / WEIGHT_STEPS
        share = np.where((kept > layout.vectors_end) & (slope > 0), np.clip(share, 0.0, 1.0 - 1.0 / WEIGHT_STEPS), 0.0)
        device = np.where(whole, 1.0, share)
    disk = np.zeros(size)
    if "disk" in q.tiers and "disk" in q.space.weights and np.isfinite(q.budgets["host"]):
        over = peaks(device, disk)["host"] - q.budgets["host"]
        moved = np.ceil((over / max(slope, 1) + row) / total * WEIGHT_STEPS) / WEIGHT_STEPS
        disk = np.where(over > 0, np.minimum(moved if slope else 1.0, 1.0 - device), 0.0)
    found = peaks(device, disk)
    fits = np.all([found[tier] <= budget for tier, budget in q.budgets.items()], axis=0)
    return device, disk, fits


def _with_weights(c: Candidates, device: np.ndarray, disk: np.ndarray) -> Candidates:
    return replace(c, weights_device=device, weights_disk=disk)


# ---- shares to blocks


def drafts_of(grid: Grid, choice: int, shares: np.ndarray) -> list[tuple[Draft, np.ndarray]]:
    """A choice with its program's cache shares [entries] said in whole blocks: drafts, each with its shares as the
    program has them. With attention on the host a program's columns are alike, and the first stands for the cache."""
    number, pair = grid.split(choice)
    option, batch, bound = grid.options[number], grid.batch[pair], grid.bound[pair]
    if option.attention == "host":
        return [(Draft.of(option, batch, bound, {"kv@host": 1.0}), np.eye(len(shares))[0])]
    entries, blocks = grid.question.entries, final_blocks(grid.question)
    ways = [one for way in roundings(shares, blocks) for one in _with_newest(way, entries, blocks)]
    return [(Draft.of(option, batch, bound, dict(zip(entries, way, strict=True))), way) for way in ways]


def _with_newest(way: np.ndarray, entries: tuple[str, ...], blocks: int) -> list[np.ndarray]:
    """Token ids alone are no cache: the newest block is something else, whatever else."""
    if "tok" not in entries or way[entries.index("tok")] < 1:
        return [way]
    others = [np.eye(len(entries))[i] for i, entry in enumerate(entries) if entry != "tok"]
    return [way + (one - way) / blocks for one in others] if blocks > 1 else []


def final_blocks(question: Question) -> int:
    """Blocks of a request's final context."""
    return int(ceil_blocks(question.prompt_tokens + question.max_tokens - 1))


def roundings(shares: np.ndarray, blocks: int) -> np.ndarray:
    """Ways to say ``shares`` [entries] in whole blocks, [ways, entries]: every rounding of each entry down or up that
    adds up, the same without an entry of hardly a block, and the largest entry alone."""
    ways = {tuple(np.eye(len(shares))[shares.argmax()])}
    kept = np.where(shares * blocks >= LEAST_BLOCKS, shares, 0.0)
    for some in (shares, kept / max(kept.sum(), 1e-12)):
        exact = some * blocks
        down = np.floor(exact + 1e-6)
        missing = int(round(blocks - down.sum()))
        broken = np.flatnonzero(exact - down > 1e-6)
        if missing > len(broken):
            continue
        for up in combinations(broken, missing):
            counts = down.copy()
            counts[list(up)] += 1
            ways.add(tuple(counts / blocks))
    return np.array(sorted(ways))


def exchange_steps(question: Question) -> np.ndarray:
    """Shares that an exchange between two entries tries, sorted, 0 and 1 among them: whole blocks of the first and the
    final context, and multiples of 1/128."""
    steps = {step / SHARE_STEPS for step in range(SHARE_STEPS + 1)}
    for tokens in (question.prompt_tokens, question.prompt_tokens + question.max_tokens - 1):
        blocks = -(-tokens // BLOCK_TOKENS)
        if blocks <= 2 * SHARE_STEPS:
            steps |= {count / blocks for count in range(blocks + 1)}
    return np.array(sorted(steps))


def deals_near(question: Question, share: float) -> np.ndarray:
    """Shares of the first of two entries, within two blocks of ``share``, one for each order of dealing blocks: between
    the shares (k + 1/2)/n at which some context of n blocks, n of the decode, gets another block of it."""
    final = final_blocks(question)
    low, high = share - 2 / final, share + 2 / final
    edges = {0.0, 1.0}
    for n in range(max(1, int(question.prompt_tokens // BLOCK_TOKENS)), final + 1):
        first, last = int(np.floor(low * n)) - 1, int(np.ceil(high * n)) + 1
        edges |= {(k + 0.5) / n for k in range(max(0, first), min(n, last))}
    edges = np.array(sorted(edge for edge in edges if low <= edge <= high or edge in (0.0, 1.0)))
    middles = (edges[1:] + edges[:-1]) / 2
    near = middles[(middles >= low) & (middles <= high)]
    return near[:: max(1, len(near) // MOST_DEALS)]


def exchanges(question: Question, shares: np.ndarray) -> np.ndarray:
    """Shares [ways, entries] in which one entry of ``shares`` has given or taken any part of another's."""
    steps, ways, least = exchange_steps(question), [], 0.5 / final_blocks(question)  # less is never a whole block
    count = len(shares)
    for giver in np.flatnonzero(shares > 0):
        for taker in range(count):
            if taker == giver:
                continue
            both = shares[giver] + shares[taker]
            moved = steps[steps <= both + 1e-12]
            some = np.repeat(shares[None, :], len(moved) + 1, axis=0)
            kept = np.append(moved, both)
            kept = np.where(kept < least, 0.0, np.where(both - kept < least, both, kept))
            some[:, giver], some[:, taker] = kept, both - kept
            ways.append(some)
    if not ways:
        return shares[None, :]
    ways = np.concatenate(ways)
    if "tok" in question.entries:  # the newest tokens need a share of something else
        ways = ways[ways[:, question.entries.index("tok")] < 0.95]
    return np.unique(np.round(ways, 9), axis=0)


def with_cache_fixed(grid: Grid, choices: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least seconds per token, [choices], where the cache has these ``shares`` [choices, entries] and only the weights
    are free, infinity where no placement of theirs fits; and that placement, [choices, tiers]."""
    programs = grid.programs(choices)
    nc = programs.num_cache
    h = programs.h - np.einsum("nij,nj->ni", programs.G[:, :, : nc - 1], shares[:, 1:])
    rest = Programs(np.ascontiguousarray(programs.G[:, :, nc - 1 :]), h, programs.c[nc - 1 :], 1)
    solved = solve_side_by_side(rest)
    return solved.value, grid.shares(rest, solved.z)[1] @ np.array(grid.question.placements)
