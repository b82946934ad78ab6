"""Candidates (a policy with requests of one length each), and their steps in the prefill and the decode.

Arrays [candidates] hold many candidates. This module counts what a step does (``StepCounts``); ``candidate_memory``
computes buffer sizes (``BufferSizes``). Work and bytes follow from ``step_work`` and ``memory_parts``, as in the
executor.

Core's ``make_step`` and ``buffer_sizes`` describe one iteration, request by request. A step here is the mean over many
iterations of many policies, with fractional counts and without a loop over requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, Dealing, ceil_blocks, deal_blocks, most_dealt, window_blocks
from flexhybrid.core.context.cache_entries import ATTENDED_ENTRY, representation_of, stored_copies
from flexhybrid.core.context.packing import chunk_tokens, takes_prompts_whole
from flexhybrid.core.context.selection import (
    ALMOST_ALL,
    kept_tokens,
    layers_by_window,
    limits_cache,
    num_keeping,
    pool_blocks,
    selected_tokens,
)
from flexhybrid.core.context.split import SplitLines, split_lines, split_point
from flexhybrid.core.model.layout import LayerLayout, kind_layouts
from flexhybrid.core.model.shape import LayerKind
from flexhybrid.core.policy import ElementBytes, Policy, Selection
from flexhybrid.core.problem import Problem, attends_in_place
from flexhybrid.core.schedule.step_work import StepCounts
from flexhybrid.core.workload import Workload
from sim.template_run import most_mini_batches

SAMPLES = 4  #: blocks of the context that are sampled in a stretch of the decode
GROWTH = 0.25  #: a stretch ends before the context has grown by e**GROWTH, as the limiting resource may change
MOST_STRETCHES = 5  #: cuts of the decode by growth; each has one stretch per cache entry


@dataclass(frozen=True)
class Candidates:
    """Policies and batches to price: numbers or arrays that broadcast to [candidates].

    ``policy`` has the fields that all candidates share, such as schedule, bits, attention and selection. A field below
    that is None has the policy's value. All requests of a candidate have the same lengths.
    """

    policy: Policy
    batch: np.ndarray | float  #: number of requests
    prompt_tokens: np.ndarray | float
    max_tokens: np.ndarray | float  #: tokens that each request generates
    max_mini_batch_tokens: np.ndarray | float | None = None
    cache: Mapping[str, np.ndarray | float] | None = None  #: entry -> share of each request's tokens
    weights_device: np.ndarray | float | None = None  #: share of each layer's bytes
    weights_disk: np.ndarray | float | None = None


def candidates_of(policy: Policy, workload: Workload) -> Candidates:
    """Make one candidate from a policy and the workload's mean lengths."""
    return Candidates(policy, workload.num_requests, *mean_lengths(workload))


def mean_lengths(workload: Workload) -> tuple[int, int]:
    """Return (prompt tokens, generated tokens) of the mean request, rounded."""
    return max(1, round(float(workload.prompt_tokens.mean()))), max(1, round(float(workload.max_tokens.mean())))


def padded_width(prompt_tokens, max_tokens):
    """Return the tokens that a request counts in a mini-batch: its context, rounded up to blocks, and a new token."""
    return ceil_blocks(prompt_tokens + max_tokens - 1) * BLOCK_TOKENS + 1


def num_mini_batches(batch, prompt_tokens, max_tokens, max_mini_batch_tokens, packing: str = "balanced"):
    """Return (number of mini-batches, requests in the largest), as ``packing.packed`` cuts requests of one length."""
    size = np.maximum(1.0, np.floor(max_mini_batch_tokens / padded_width(prompt_tokens, max_tokens)))
    if packing == "balanced":
        size = np.ceil(batch / np.ceil(batch / size))
    size = np.minimum(batch, size)
    return np.ceil(batch / size), size


@dataclass(frozen=True)
class DecodeStretch:
    """Iterations of the decode that are priced alike; arrays [candidates]."""

    first: np.ndarray  #: context tokens in the first iteration
    final: np.ndarray  #: context tokens in the last iteration
    count: np.ndarray  #: number of iterations; 0 if a candidate lacks the stretch
    entry: str | None = None  #: cache entry of the new tokens; None: any entry of the candidate


class CandidateDealing(Dealing):
    """Deals the blocks of requests to cache entries whose shares are arrays [candidates]. Counts are [entry, ...]."""

    per_entry, samples_axis = (None, ...), 1

    def __init__(self, shares: dict[str, np.ndarray]):
        self.names = tuple(sorted(entry for entry in shares if entry != "tok"))
        self.keeps_ids = "tok" in shares
        self.tok_share = shares.get("tok", 0.0)
        self._shares = [shares[entry] for entry in self.names]

    def dealt(self, num_blocks) -> np.ndarray:
        if len(self.names) == 1:
            return np.asarray(num_blocks)[None]
        return np.stack(deal_blocks(self.names, self._shares, num_blocks))

    def in_window(self, window: int) -> np.ndarray:
        size = np.shape(self._shares[0])
        most = most_dealt(self.names, self._shares, window_blocks(window))
        return np.stack([np.broadcast_to(blocks, size) for blocks in most])


@dataclass(frozen=True)
class CandidateSteps:
    """A chunk of candidates whose policies differ only in numbers; arrays [candidates]."""

    problem: Problem
    policy: Policy  #: its mini-batch size and its shares of weights and cache are not used
    lines: dict[str, SplitLines]  #: both(…) entry -> its lines
    batch: np.ndarray  #: number of requests
    prompt: np.ndarray  #: tokens of a request's prompt
    generated: np.ndarray  #: tokens that a request generates
    max_mini_batch_tokens: np.ndarray
    weights_device: np.ndarray
    weights_disk: np.ndarray
    shares: dict[str, np.ndarray]  #: cache entry -> share of tokens

    def take(self, members: np.ndarray, entries: set[str]) -> CandidateSteps:
        """Return the candidates of these indices, which use only these cache entries."""
        columns = ("batch", "prompt", "generated", "max_mini_batch_tokens", "weights_device", "weights_disk")
        return replace(
            self,
            lines={entry: lines for entry, lines in self.lines.items() if entry in entries},
            shares={entry: share[members] for entry, share in self.shares.items() if entry in entries},
            **{name: getattr(self, name)[members] for name in columns},
        )

    def alike(self, columns: Iterable[np.ndarray] = ()) -> Iterator[tuple[np.ndarray, set[str]]]:
        """Yield (indices, entries) of each group of candidates with equal cache entries and equal ``columns``."""
        present = {entry: share > 0 for entry, share in self.shares.items()}
        codes = np.zeros(len(self.batch), dtype=np.int64)
        for column in (*present.values(), *columns):
            codes = codes * (int(np.max(column)) + 1) + np.asarray(column, dtype=np.int64)
            if codes.max(initial=0) >= 1 << 40:
                codes = np.unique(codes, return_inverse=True)[1]
        for code in np.unique(codes):
            members = np.flatnonzero(codes == code)
            yield members, {entry for entry, uses in present.items() if uses[members[0]]}

    @property
    def stays_on_device(self) -> np.ndarray:
        """Return ``Policy.stays_on_device`` of each candidate: only new tokens cross the host link."""
        return self.policy.context_stays(self.shares) & (self.weights_device == 1)

    @cached_property
    def whole(self) -> CandidateSteps | None:
        """Return the steps in layers that keep all tokens, if other layers drop some; None without such layers."""
        if not num_keeping(self.policy.selection, self.problem.shape.num_layers):
            return None
        steps = replace(self, policy=replace(self.policy, selection=Selection()))
        steps.__dict__["num_chunks"] = self.num_chunks  # all layers compute the same chunks
        return steps

    # ---- weights

    @cached_property
    def stored(self) -> ElementBytes:
        return self.problem.stored(self.policy.bits)

    @cached_property
    def layouts(self) -> tuple[LayerLayout, ...]:
        """Return the layout of each kind of weights."""
        return kind_layouts(self.problem.shape, self.stored.weights, self.problem.bytes_per_element)

    @cached_property
    def layer_sizes(self) -> np.ndarray:
        """Return the bytes of a layer by kind of weights, [kinds, 1]."""
        return np.array([[layout.total_bytes] for layout in self.layouts])

    @cached_property
    def resident(self) -> np.ndarray:
        """Return the bytes on the device of a layer of each kind, [kinds, candidates]."""
        return self._prefixes(self.weights_device)

    @cached_property
    def on_disk(self) -> np.ndarray:
        """Return the bytes on the disk of a layer of each kind, [kinds, candidates]."""
        if not np.any(self.weights_disk):
            return 0.0 * self.resident
        start = np.maximum(self.resident, self._prefixes(1.0 - self.weights_disk))
        return np.where(self.weights_disk > 0, self.layer_sizes - start, 0.0)

    def _prefixes(self, share: np.ndarray) -> np.ndarray:
        """Return ``LayerLayout.resident_prefix`` of each share, [kinds, candidates]."""
        values, inverse = np.unique(share, return_inverse=True)
        prefixes = [[layout.resident_prefix(float(v)) for v in values] for layout in self.layouts]
        return np.array(prefixes, dtype=np.float64)[:, inverse]

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Return the kinds of layers, each once."""
        return tuple(dict.fromkeys(self.problem.shape.layer_kinds))

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Return each layer's index in ``kinds``."""
        return tuple(map(self.kinds.index, self.problem.shape.layer_kinds))

    # ---- mini-batches

    @cached_property
    def _cut(self) -> tuple[np.ndarray, np.ndarray]:
        packing = self.policy.packing
        return num_mini_batches(self.batch, self.prompt, self.generated, self.max_mini_batch_tokens, packing)

    @property
    def num_mini_batches(self) -> np.ndarray:
        return self._cut[0]

    @property
    def size(self) -> np.ndarray:
        """Return the number of requests in the largest mini-batch."""
        return self._cut[1]

    @cached_property
    def last_size(self) -> np.ndarray:
        """Return the requests in each of the last mini-batches: one less than in the first ones with balanced packing,
        otherwise the remainder."""
        remaining = self.batch - (self.num_mini_batches - 1) * self.size
        return np.maximum(remaining, self.size - 1) if self.policy.packing == "balanced" else remaining

    @cached_property
    def num_last(self) -> np.ndarray:
        """Return the number of last mini-batches, which have ``last_size`` requests. It is 1 if some mini-batches are
        not walked; then ``full_size`` is a mean."""
        if self.policy.packing != "balanced":
            return np.ones_like(self.num_mini_batches)
        walked = most_mini_batches(self.policy, self.layers)
        count = self.num_mini_batches
        return np.where(walked < count, 1.0, count * self.size - self.batch)

    @cached_property
    def full_size(self) -> np.ndarray:
        """Return the mean number of requests in the mini-batches before the last ones."""
        others = self.num_mini_batches - self.num_last
        return np.where(others > 0, (self.batch - self.num_last * self.last_size) / np.maximum(others, 1), self.size)

    @cached_property
    def chunk_size(self):
        """Return the tokens of a chunk of a prompt that is longer than a mini-batch."""
        return chunk_tokens(self.max_mini_batch_tokens)

    @cached_property
    def num_chunks(self) -> np.ndarray:
        """Return the number of chunks in which a prompt is computed."""
        if takes_prompts_whole(self.policy) or self.problem.shape.whole_prompts:
            return np.ones_like(self.chunk_size)
        return np.where(self.size > 1, 1.0, np.ceil(self.prompt / self.chunk_size))

    # ---- cache entries

    @cached_property
    def dealing(self) -> CandidateDealing:
        return CandidateDealing(self.shares)

    def _by_copy(self, rows: np.ndarray) -> dict:
        """Return stored copy -> rows, from the rows of each entry."""
        return {copy: count for entry, count in self.dealing.by_entry(rows).items() for copy in stored_copies(entry)}

    @cached_property
    def kept(self) -> np.ndarray:
        """Return the most tokens of a request that are cached at once."""
        return self.kept_of(self.prompt + self.generated)

    def kept_of(self, context):
        """Return the number of cached tokens of a request whose context has ``context`` tokens."""
        cached = self.prompt + self.generated - 1
        return np.minimum(kept_tokens(self._selection, self.prompt, context, cached), self._pool_tokens)

    @cached_property
    def _selection(self) -> Selection:
        """Return the selection; a limit in bytes is replaced by a share, as ``_pool_tokens`` applies the limit."""
        selection = self.policy.selection
        return replace(selection, pool=ALMOST_ALL, pool_bytes=None) if selection.pool_bytes is not None else selection

    @cached_property
    def _pool_tokens(self):
        """Return each request's tokens under a limit in bytes, as ``with_pool_share`` divides it; infinity without."""
        selection, bits = self.policy.selection, self.policy.bits
        if selection.pool_bytes is None:
            return np.inf
        blocks = pool_blocks(self.problem.shape, selection, self.problem.stored(bits).kv)
        return np.maximum(1.0, np.floor(blocks / self.batch)) * BLOCK_TOKENS

    def ever_stored(self, tokens) -> np.ndarray:
        """Return the number of a request's first ``tokens`` that were stored to each entry, [entry, ...]. If the
        selection limits the cache, new tokens replace dropped ones."""
        if not limits_cache(self.policy.selection):
            return self.dealing.stored(tokens)
        kept = np.broadcast_to(self.kept, np.shape(tokens))
        rounds = np.floor(tokens / kept)
        return rounds * self.dealing.stored(kept) + self.dealing.stored(tokens - rounds * kept)

    def _new_tokens(self, first, after) -> np.ndarray:
        """Return how many iterations with contexts ``first`` to ``after`` − 1 store to each entry, [entry, ...]."""
        return self.ever_stored(after) - self.ever_stored(first)

    # ---- counts of a step

    @cached_property
    def prompt_tokens(self) -> np.ndarray:
        """Return the tokens of a request that the prefill stores in each entry, [entry, candidates]."""
        return self.dealing.tokens(self.kept_of(self.prompt))

    def _stored_at_once(self, num_tokens, window: int | None) -> np.ndarray:
        """Return the tokens that a prompt's first ``num_tokens`` store to each entry if they are computed together.
        ``window``: attention window of the layer (None: all tokens)."""
        window = self._windowed(window)
        if window is None:
            return self.dealing.tokens(self.kept_of(num_tokens))
        return self.dealing.stored(num_tokens) - self.dealing.stored(self.dealing.first_stored(num_tokens, window))

    def prefill(self, batch, window: int | None = None) -> StepCounts:
        """Return the prefill of ``batch`` requests in layers with this window. ``batch``: ``full_size`` or
        ``last_size``."""
        stored = self._by_copy(batch * self._stored_at_once(self.prompt, window))
        return StepCounts(True, batch, self.prompt, 0.0, {}, {}, stored=stored, window=self._windowed(window))

    def first_chunk(self, window: int | None = None) -> StepCounts:
        """Return the step of a long prompt's first chunk, in layers with this window."""
        tokens = np.minimum(self.chunk_size, self.prompt)
        stored = self._by_copy(self._stored_at_once(tokens, window))
        return StepCounts(True, 1.0, tokens, 0.0, {}, {}, stored=stored, window=self._windowed(window))

    def _windowed(self, window: int | None) -> int | None:
        """Return the window, or None if a selection decides which tokens are attended to."""
        return window if self.policy.selection.method == "none" else None

    def later_chunk(self, window: int | None = None) -> StepCounts:
        """Return the mean step of a long prompt's later chunks, in layers with this window."""
        later = np.maximum(self.num_chunks - 1, 1)
        last = later * self.chunk_size
        stretch = DecodeStretch(np.minimum(self.chunk_size, last), last, later)
        mean = self.decode(stretch, window, of_chunks=True)(1.0)
        since, until = self.dealing.tokens(np.minimum(self.chunk_size, self.prompt)), self.prompt_tokens
        width = np.where(self.num_chunks > 1, (self.prompt - self.chunk_size) / later, 1.0)
        stored = self._by_copy(np.minimum(np.maximum(until - since, 0.0) / later, self._stored_at_once(last, window)))
        return replace(mean, in_place=None, width=width, stored=stored, chunk=True)

    def stretches(self) -> list[DecodeStretch]:
        """Return the stretches of the decode. A stretch may have count 0.

        The decode is cut at whole blocks. Each part has one stretch per cache entry, because sixteen consecutive
        iterations store to the same entry. The last iteration is a stretch of its own.
        """
        # Costs change when a block's first token is stored, or, with token ids, when the newest block is full.
        begun = 0 if self.dealing.keeps_ids else 1
        end = self.prompt + np.maximum(self.generated - 2, 0)
        growth = np.log(end / self.prompt)
        num_cuts = np.clip(np.ceil(growth / GROWTH), 1, MOST_STRETCHES)
        stretches, first = [], self.prompt
        for i in range(1, int(np.max(num_cuts)) + 1):
            on_block = np.round(self.prompt * np.exp(growth * i / num_cuts) / BLOCK_TOKENS) * BLOCK_TOKENS + begun
            after = np.where(i >= num_cuts, end, np.clip(on_block, first, end))
            final = np.maximum(first, after - 1)
            new_tokens = self.dealing.by_entry(self._new_tokens(first, after))
            stretches += [DecodeStretch(first, final, count, entry) for entry, count in new_tokens.items()]
            first = after
        return [*stretches, DecodeStretch(end, end, np.where(self.generated > 1, 1.0, 0.0))]

    def decode(
        self, stretch: DecodeStretch, window: int | None = None, of_chunks: bool = False
    ) -> Callable[[np.ndarray | float], StepCounts]:
        """Return a function from a number of requests to the stretch's mean step, in layers with this window.
        ``of_chunks``: the stretch is of prompt steps, in which the device attends to the whole context."""
        at, weight = self._samples(stretch)
        window = self._windowed(window)

        def mean(samples):
            return (samples * weight).sum(axis=0)

        held, reserved = self.dealing.by_entry(self.dealing.held(at, window)), self.reserved_in(window)
        splits = ATTENDED_ENTRY in self.shares and not of_chunks
        needed = self.lines or window is not None or splits
        tokens = self.dealing.by_entry(self.dealing.tokens(at, window)) if needed else {}
        recomputed = mean(self.dealing.tok_blocks(at)) * BLOCK_TOKENS if self.dealing.keeps_ids else 0.0
        context = mean(at) - recomputed if window is None else mean(sum(tokens.values()))  # cached tokens, all read
        on_host = mean(tokens[ATTENDED_ENTRY]) if splits else 0.0
        context = context - on_host
        new_tokens = None  # stored to each entry by one iteration
        if stretch.entry is None:
            new_tokens = self._new_tokens(stretch.first, stretch.final + 1) / (stretch.final + 1 - stretch.first)
        selection = self.policy.selection
        speculative, name = selection.method == "speculative", self.problem.shape.name
        selected = selected_tokens(selection, context, name) if speculative else None
        in_place = attends_in_place(self.problem, self.policy)

        def step_of(batch) -> StepCounts:
            blocks, copies = {}, {}
            for entry in self.dealing.names:
                if splits and entry == ATTENDED_ENTRY:
                    continue
                leading = 0.0
                if entry in self.lines:
                    at = self.lines[entry], batch, tokens[entry], self.num_mini_batches
                    leading = split_point(*at, prompt=self.prompt) / BLOCK_TOKENS
                for copy in stored_copies(entry):
                    count = held[entry]
                    if entry in self.lines:
                        count = leading if copy.representation == "act" else count - leading
                    copies[copy] = batch * mean(count > 0)
                    if self.policy.static_cache:  # loads every reserved block
                        count = reserved[entry] * (count > 0)
                    blocks[copy] = batch * mean(count)
            if new_tokens is None:
                stored = {copy: batch + 0.0 * context for copy in stored_copies(stretch.entry)}
            else:
                stored = self._by_copy(batch * new_tokens)
            return StepCounts(
                prefill=False,
                batch=batch,
                width=1.0,
                context=context,
                blocks=blocks,
                copies=copies,
                stored=stored,
                recomputed=recomputed,
                selected=selected,
                in_place=batch * (context + recomputed + 1) if in_place else None,
                on_host=batch * on_host,
                window=window,
            )

        return step_of

    def _samples(self, stretch: DecodeStretch) -> tuple[np.ndarray, np.ndarray]:
        """Return (cached tokens at sampled iterations of a stretch, weight of each sample), both [samples, candidates].
        The weights of a candidate add up to 1. They count only iterations whose new token goes to the stretch's entry.
        If the stretch adds at most SAMPLES blocks, each number of blocks has its own samples."""
        first, final = stretch.first, stretch.final
        if np.all(first == final):
            return np.minimum(first, self.kept)[None], np.ones_like(first)[None]
        # Within a block, the split point may change with each token; a block becomes ids when the newest is full.
        if self.lines:
            spans = [(token, token) for token in range(1, BLOCK_TOKENS + 1)]
        else:
            spans = [(1, 15), (16, 16)] if self.dealing.keeps_ids else [(1, 16)]
        offsets = np.arange(SAMPLES)[:, None] * BLOCK_TOKENS + np.array(spans).T[:, None, :]
        start, end = offsets.reshape(2, -1, 1)  # [samples, 1], from the start of the first token's block
        before, span, num_samples = (ceil_blocks(first) - 1) * BLOCK_TOKENS, final - first + 1, len(start)
        few = final - before <= SAMPLES * BLOCK_TOKENS
        spread = np.floor(first + span * np.arange(num_samples + 1)[:, None] / num_samples)
        low = np.where(few, np.maximum(first, before + start), spread[:-1])
        after = np.where(few, np.minimum(final, before + end) + 1, spread[1:])
        after = np.maximum(low, after)
        count = after - low
        if stretch.entry is not None and len(self.dealing.names) > 1:
            count = self._new_tokens(low, after)[self.dealing.names.index(stretch.entry)]
        at = np.minimum(np.floor((low + np.maximum(after - 1, low)) / 2), final)
        total = count.sum(axis=0)
        weight = np.where(total > 0, count, 1.0) / np.where(total > 0, total, num_samples)
        return np.minimum(at, self.kept), weight

    # ---- reserved blocks

    @cached_property
    def reserved(self) -> dict[str, np.ndarray]:
        """Return the blocks of each entry that a request reserves."""
        last = self.kept_of(self.prompt + self.generated - 1)
        first = np.where(self.num_chunks > 1, self.chunk_size, self.prompt)  # tokens stored by the first step
        return self.dealing.by_entry(self.dealing.most_blocks(first, last))

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each kind of layers; the last kind keeps the most tokens."""
        return tuple(layers_by_window(self.problem.shape, self.policy.selection))

    def reserved_in(self, window: int | None) -> dict[str, np.ndarray]:
        """Return the blocks of each entry that a request reserves in a layer with this window."""
        if window is None:
            return self.reserved
        at_most = self.dealing.by_entry(self.dealing.in_window(window))
        return {entry: np.minimum(count, at_most[entry]) for entry, count in self.reserved.items()}


def candidate_steps(problem: Problem, candidates: Candidates) -> tuple[CandidateSteps, tuple[int, ...]]:
    """Return (the candidates in flat float arrays, the shape to which their numbers broadcast). Cache entries that no
    candidate uses are left out."""
    policy, cache = candidates.policy, candidates.policy.cache if candidates.cache is None else candidates.cache
    own = {
        "max_mini_batch_tokens": policy.max_mini_batch_tokens,
        "weights_device": policy.weights.device,
        "weights_disk": policy.weights.disk,
    }
    numbers = {
        "batch": candidates.batch,
        "prompt": candidates.prompt_tokens,
        "generated": candidates.max_tokens,
        **{name: value if (given := getattr(candidates, name)) is None else given for name, value in own.items()},
        **{entry: share for entry, share in cache.items() if np.any(share)},
    }
    size = np.broadcast_shapes(*map(np.shape, numbers.values())) or (1,)
    flat = {name: np.broadcast_to(value, size).astype(np.float64).reshape(-1) for name, value in numbers.items()}
    shares = {entry: flat.pop(entry) for entry in cache if entry in flat}
    lines = {entry: split_lines(problem, policy, entry) for entry in shares if representation_of(entry) == "both"}
    return CandidateSteps(problem, policy, lines, **flat, shares=shares), size
