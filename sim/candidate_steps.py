"""What each mini-batch of a candidate does in the prefill and in pieces of the decode, in arrays of candidates.

The sums of a step (``core.steps.StepCounts``), its memory and its traffic, for requests of one length. The formulas are
those of ``core.work`` and ``core.memory``; here are only the numbers that go in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, HALF, ceil_blocks, deal_blocks, lengths_between
from flexhybrid.core.context.cache_entries import parts_of, representation_of
from flexhybrid.core.context.packing import chunk_tokens, takes_prompts_whole
from flexhybrid.core.context.selection import kept_tokens, limits_cache, selected_tokens
from flexhybrid.core.context.split import SplitLines, split_lines, split_point
from flexhybrid.core.memory import BufferSizes, Reads, group_sizes, memory_parts, split_blocks
from flexhybrid.core.model.layout import LayerLayout, layer_layout
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import ElementBytes, Policy
from flexhybrid.core.problem import problem_of
from flexhybrid.core.schedule.steps import StepCounts
from sim.tiny_run import most_mini_batches

#: Iterations at which a piece of the decode is looked at: whole blocks make stairs of it.
SAMPLES = 4
GROWTH = 0.25  #: of the context within a piece of the decode (its logarithm); what binds may change as it grows
MOST_PIECES = 5


def ceil_div(a, b):
    return np.ceil(a / b)


def padded_width(prompt_tokens, max_tokens):
    """Tokens of a mini-batch that a request takes: its whole context in blocks, whatever the shares, since only its
    last block is partial, and a new token."""
    return ceil_blocks(prompt_tokens + max_tokens - 1) * BLOCK_TOKENS + 1


def num_mini_batches(batch, prompt_tokens, max_tokens, max_mini_batch_tokens, packing: str = "balanced"):
    """(mini-batches, requests in the largest) as ``packing.pack`` cuts requests of one length; arrays."""
    most = np.maximum(1.0, np.floor(max_mini_batch_tokens / padded_width(prompt_tokens, max_tokens)))
    if packing == "balanced":
        most = ceil_div(batch, ceil_div(batch, most))
    size = np.minimum(batch, most)
    return ceil_div(batch, size), size


@dataclass(frozen=True)
class Piece:
    """A stretch of the decode in which iterations count as alike; arrays [candidates]."""

    first: np.ndarray  #: tokens of context
    final: np.ndarray
    count: np.ndarray  #: iterations
    kind: str | None = None  #: where the new tokens go; None: a single iteration, each candidate its own


@dataclass(frozen=True)
class Loads:
    """A chunk of candidates of one structure: arrays [candidates], or numbers."""

    shape: ModelShape
    policy: Policy  #: its cache's entries, without their shares; the numbers in it do not count
    bytes_per_element: int
    lines: dict[str, SplitLines]
    batch: np.ndarray
    prompt: np.ndarray
    generated: np.ndarray
    bound: np.ndarray
    shares: dict[str, np.ndarray]
    weights_device: np.ndarray
    weights_disk: np.ndarray

    @cached_property
    def stored(self) -> ElementBytes:
        return self.policy.bits.element_bytes(self.bytes_per_element)

    @cached_property
    def layout(self) -> LayerLayout:
        return layer_layout(self.shape, self.stored.weights, self.bytes_per_element)

    @cached_property
    def resident(self):
        """Bytes of a layer on the device."""
        return self._prefix(self.weights_device)

    @cached_property
    def on_disk(self):
        """Bytes of a layer on the disk."""
        if not np.any(self.weights_disk):
            return 0.0 * self.resident
        start = np.maximum(self.resident, self._prefix(1.0 - self.weights_disk))
        return np.where(np.asarray(self.weights_disk) > 0, self.layout.total_bytes - start, 0.0)

    def _prefix(self, share):
        """``LayerLayout.resident_prefix`` for arrays of shares."""
        values, inverse = np.unique(share, return_inverse=True)
        prefix = np.array([self.layout.resident_prefix(float(v)) for v in values], dtype=np.float64)
        return prefix[inverse].reshape(np.shape(share))

    @cached_property
    def _cut(self):
        return num_mini_batches(self.batch, self.prompt, self.generated, self.bound, self.policy.packing)

    @property
    def K(self):
        """Mini-batches."""
        return self._cut[0]

    @property
    def size(self):
        """Requests in the largest mini-batch."""
        return self._cut[1]

    @cached_property
    def last(self):
        """Requests in each of the last mini-batches: what remains, or of sizes as equal as may be, one less than in the
        first."""
        remaining = self.batch - (self.K - 1) * self.size
        return remaining if self.policy.packing == "fifo" else np.maximum(remaining, self.size - 1)

    @cached_property
    def num_last(self):
        """How many of the last mini-batches are of that size; where not all are walked, one, and the others count as
        of their mean size."""
        if self.policy.packing == "fifo":
            return np.ones_like(self.K)
        most = most_mini_batches(self.policy.schedule, self.shape.num_layers)
        return np.where(most < self.K, 1.0, self.K * self.size - self.batch)

    @cached_property
    def usual(self):
        """Requests in each of the others, on average."""
        others = self.K - self.num_last
        return np.where(others > 0, (self.batch - self.num_last * self.last) / np.maximum(others, 1), self.size)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted(kind for kind in self.shares if kind != "tok"))

    @cached_property
    def chunk(self):
        """Tokens of a piece of a prompt that is longer than a mini-batch may be."""
        return chunk_tokens(self.bound)

    @cached_property
    def chunks(self):
        """Pieces in which a prompt is computed; 1: it is computed whole."""
        if takes_prompts_whole(self.policy):
            return np.ones_like(self.chunk)
        return np.where(self.size > 1, 1.0, np.ceil(self.prompt / self.chunk))

    # ---- which blocks are of which kind

    def _tok_blocks(self, tokens):
        """Leading blocks of a request of so many tokens that are kept as ids alone: never the newest."""
        full = np.floor(self.shares["tok"] * np.floor(tokens / BLOCK_TOKENS) + HALF)
        return np.minimum(full, np.maximum(ceil_blocks(tokens) - 1, 0.0))

    def _dealt(self, blocks) -> dict[str, np.ndarray]:
        """Blocks of each kind that were ever dealt among a request's first so many (whole numbers)."""
        shares = [self.shares[kind] for kind in self.kinds]
        return dict(zip(self.kinds, deal_blocks(self.kinds, shares, blocks), strict=True))

    def _blocks_at(self, tokens) -> dict[str, np.ndarray]:
        """Blocks of each kind that hold a request's first so many tokens; arrays of any shape that broadcasts."""
        dealt = self._dealt(ceil_blocks(tokens))
        if "tok" not in self.shares:
            return dealt
        dropped = self._dealt(self._tok_blocks(tokens))
        return {kind: dealt[kind] - dropped[kind] for kind in self.kinds}

    def _stored_until(self, tokens) -> dict[str, np.ndarray]:
        """Tokens of each kind among a request's first so many, were none ever dropped."""
        full = np.floor(tokens / BLOCK_TOKENS)
        rest = tokens - full * BLOCK_TOKENS
        low, high = self._dealt(full), self._dealt(full + 1)
        return {kind: low[kind] * BLOCK_TOKENS + rest * (high[kind] - low[kind]) for kind in self.kinds}

    def _tokens_at(self, tokens) -> dict[str, np.ndarray]:
        """Tokens of each kind among a request's first so many; the others are kept as ids alone."""
        stored = self._stored_until(tokens)
        if "tok" not in self.shares:
            return stored
        dropped = self._dealt(self._tok_blocks(tokens))
        return {kind: stored[kind] - dropped[kind] * BLOCK_TOKENS for kind in self.kinds}

    @cached_property
    def prompt_kinds(self) -> dict[str, np.ndarray]:
        """Tokens of each kind that the prefill stores of a request."""
        return self._tokens_at(self._kept_of(self.prompt))

    # ---- what a step does

    def prefill(self, batch) -> StepCounts:
        """The prefill of ``batch`` requests (``usual`` or ``last``)."""
        stored = {part: batch * n for kind, n in self.prompt_kinds.items() for part in parts_of(kind)}
        return StepCounts(True, batch, self.prompt, 0.0, {}, {}, 0.0, stored)

    def first_chunk(self) -> StepCounts:
        """The first piece of a long prompt."""
        tokens = np.minimum(self.chunk, self.prompt)
        stored = {part: n for kind, n in self._tokens_at(tokens).items() for part in parts_of(kind)}
        return StepCounts(True, 1.0, tokens, 0.0, {}, {}, 0.0, stored)

    def later_chunk(self) -> StepCounts:
        """The mean of its other pieces."""
        others = np.maximum(self.chunks - 1, 1)
        last = np.maximum(self.chunks - 1, 1) * self.chunk
        mean = self.decode(1.0, np.minimum(self.chunk, last), last)
        since, until = self._tokens_at(np.minimum(self.chunk, self.prompt)), self.prompt_kinds
        stored = {
            part: np.maximum(until[kind] - since[kind], 0.0) / others for kind in self.kinds for part in parts_of(kind)
        }
        width = np.where(self.chunks > 1, (self.prompt - self.chunk) / others, 1.0)
        return replace(mean, width=width, stored=stored)

    @cached_property
    def kept(self):
        """The most tokens of a request that stay cached."""
        cached = self.prompt + self.generated
        return self._kept_of(cached)

    def _kept_of(self, context):
        """Of a request's first so many tokens, those that stay cached."""
        return kept_tokens(self.policy.selection, self.prompt, context, self.prompt + self.generated - 1)

    def _ever_stored(self, tokens) -> dict[str, np.ndarray]:
        """Of a request's first so many tokens, those that were stored to each kind: where a selection limits the cache,
        the newest take the places of those that are dropped."""
        if not limits_cache(self.policy.selection):
            return self._stored_until(tokens)
        rounds = np.floor(tokens / self.kept)
        whole, rest = self._stored_until(self.kept), self._stored_until(tokens - rounds * self.kept)
        return {kind: rounds * whole[kind] + rest[kind] for kind in self.kinds}

    def _new_tokens(self, first, after) -> dict[str, np.ndarray]:
        """How many of the iterations whose contexts are ``first``, … ``after`` − 1 tokens store to each kind."""
        since, until = self._ever_stored(first), self._ever_stored(after)
        return {kind: until[kind] - since[kind] for kind in self.kinds}

    def pieces(self) -> list[Piece]:
        """The decode cut into pieces at whole blocks, and these by the kind of block that their new tokens go to: a run
        of sixteen iterations stores to one kind alone. The last iteration stands apart. A count may be 0.

        A block more is loaded once its first token is there; one is kept as ids alone once the newest is full.
        """
        begun = 0 if "tok" in self.shares else 1
        end = self.prompt + np.maximum(self.generated - 2, 0)
        growth = np.log(end / self.prompt)
        number = np.clip(np.ceil(growth / GROWTH), 1, MOST_PIECES)
        pieces, first = [], self.prompt
        for i in range(1, int(np.max(number)) + 1):
            whole = np.round(self.prompt * np.exp(growth * i / number) / BLOCK_TOKENS) * BLOCK_TOKENS + begun
            after = np.where(i >= number, end, np.clip(whole, first, end))
            final = np.maximum(first, after - 1)
            pieces += [Piece(first, final, count, kind) for kind, count in self._new_tokens(first, after).items()]
            first = after
        return [*pieces, Piece(end, end, np.where(self.generated > 1, 1.0, 0.0))]

    def decode(self, batch, first, final, kind: str | None = None) -> StepCounts:
        """A mean step of ``batch`` requests over the iterations whose contexts go from ``first`` to ``final`` tokens.

        ``kind``: where the new token goes; None: as each candidate has it, of an iteration that stands alone.
        """
        at, weight = self._samples(first, final, kind)

        def mean(samples):
            return (samples * weight).sum(axis=0)

        context, held = mean(at), self._blocks_at(at)
        recomputed = 0.0
        if "tok" in self.shares:
            recomputed = mean(self._tok_blocks(at)) * BLOCK_TOKENS
        leading = {}
        if self.lines:
            tokens = self._tokens_at(at)
            leading = {
                name: split_point(lines, batch, tokens[name], self.K) / BLOCK_TOKENS
                for name, lines in self.lines.items()
            }
        blocks, copies, columns = {}, {}, 0.0
        for name in self.kinds:
            for part in parts_of(name):
                count = held[name]
                if name in leading:
                    count = leading[name] if part.representation == "act" else count - leading[name]
                copies[part] = batch * mean(count > 0)
                if self.policy.static_cache:  # all that is reserved is brought, and recomputed
                    count = self.reserved[name] * (count > 0)
                if part.representation == "act":
                    columns = columns + mean(count)
                blocks[part] = batch * mean(count)
        if kind is None:
            fresh = self._new_tokens(first, first + 1)
            stored = {part: batch * fresh[name] for name in self.kinds for part in parts_of(name)}
        else:
            stored = {part: batch + 0.0 * context for part in parts_of(kind)}
        selected = None
        if self.policy.selection.method == "speculative":
            selected = selected_tokens(self.policy.selection, context)
        return StepCounts(
            False, batch, 1.0, context - recomputed, blocks, copies, columns, stored, recomputed, selected
        )  # fmt: skip

    def _samples(self, first, final, kind: str | None) -> tuple[np.ndarray, np.ndarray]:
        """Tokens in the cache at a few of the iterations whose contexts go from ``first`` to ``final``, and the share
        of
        them that each stands for: [samples, …]. Only iterations count whose new token goes to ``kind``. Where few
        blocks are added, each number of blocks has its samples."""
        first, final = (np.asarray(n, dtype=np.float64) for n in (first, final))
        if np.all(first == final):
            return np.minimum(first, self.kept)[None], np.ones_like(first)[None]
        # Within a block a split point may change; a block is dropped when the newest is full.
        spans = [(1, 4), (5, 8), (9, 12), (13, 15)] if self.lines else [(1, 15)]
        if self.lines or "tok" in self.shares:
            spans.append((16, 16))
        else:
            spans = [(1, 16)]
        offsets = np.arange(SAMPLES)[:, None] * BLOCK_TOKENS + np.array(spans).T[:, None, :]
        start, end = offsets.reshape(2, -1, *[1] * np.ndim(first))  # [samples, …] from the block of the first token
        before, span, number = (ceil_blocks(first) - 1) * BLOCK_TOKENS, final - first + 1, len(start)
        few = final - before <= SAMPLES * BLOCK_TOKENS
        spread = np.floor(first + span * np.arange(number + 1).reshape(-1, *[1] * np.ndim(first)) / number)
        low = np.where(few, np.maximum(first, before + start), spread[:-1])
        after = np.where(few, np.minimum(final, before + end) + 1, spread[1:])
        after = np.maximum(low, after)
        count = after - low
        if kind is not None and len(self.kinds) > 1:
            count = self._new_tokens(low, after)[kind]
        at = np.minimum(np.floor((low + np.maximum(after - 1, low)) / 2), final)
        total = count.sum(axis=0)
        return np.minimum(at, self.kept), np.where(total > 0, count, 1.0) / np.where(total > 0, total, number)

    # ---- memory

    @cached_property
    def reserved(self) -> dict[str, np.ndarray]:
        """Blocks of each kind that a request reserves."""
        last = self._kept_of(self.prompt + self.generated - 1)
        first = np.where(self.chunks > 1, self.chunk, self.prompt)  # the first length that is held as a whole
        lengths = lengths_between(first, last) if "tok" in self.shares else last[None]
        return {kind: np.max(blocks, axis=0) for kind, blocks in self._blocks_at(lengths).items()}

    def memory(self, device: str) -> dict[str, dict[str, np.ndarray]]:
        """``core.memory.memory_plan`` of each candidate: bytes per tier and part."""
        cached = self.prompt + self.generated - 1
        decodes = self.generated > 1
        kept = self._kept_of(cached)
        last = self._kept_of(np.where(decodes, cached - 1, 0))
        read = last[None]  # [steps, candidates]
        if "tok" in self.shares or self.lines:
            read = lengths_between(self.prompt, last)
        running, new = np.where(decodes, 1.0, 0.0) + 0.0 * read, np.ones_like(read)
        if np.any(self.chunks > 1):  # what the last two pieces of a long prompt read: the last may be a small one
            before = np.maximum(self.chunks - np.array([[1.0], [2.0]]), 0.0) * self.chunk
            read, running = np.concatenate([read, before]), np.concatenate([running, before > 0])
            new = np.concatenate([new, np.minimum(self.prompt - before, self.chunk)])
        held, tokens = self._blocks_at(read), self._tokens_at(read)
        if self.policy.static_cache:
            held = {kind: self.reserved[kind][None] for kind in held}
        since, until = self._ever_stored(self.prompt), self._ever_stored(cached)
        recomputed = self._tok_blocks(read) * BLOCK_TOKENS if "tok" in self.shares else 0.0 * read

        def of(size) -> BufferSizes:
            """A mini-batch of so many requests."""
            splits = {kind: split_blocks(lines, size, tokens[kind], self.K) for kind, lines in self.lines.items()}
            fresh = {kind: size * (until[kind] > since[kind]) for kind in self.kinds}
            most = np.where(self.chunks > 1, self.chunk, np.inf)
            staged = {kind: size * np.minimum(tokens, most) for kind, tokens in self.prompt_kinds.items()}
            reads = Reads(size * running, held, tokens, read - recomputed, recomputed, splits, new)
            return group_sizes(self.policy, size, np.minimum(self.prompt, most), reads, fresh, staged)

        one = of(self.size)
        if self.lines:  # fewer requests may split otherwise
            one = one.merge(of(self.last))
        sizes = BufferSizes(**{
            **{name: getattr(one, name) for name in one.__dataclass_fields__},
            "pool_blocks": {kind: self.batch * count for kind, count in self.reserved.items()},
            "hidden_rows": self.batch * one.step_rows / self.size * self.chunks,
            "index_rows": {r: self.batch * rows / self.size for r, rows in one.selected_rows.items()},
            "cached_tokens": self.batch * cached,
            "kept_tokens": self.batch * kept,
            "partial_rows": self.batch * kept,
            "num_mini_batches": self.K,
            "longest": self.prompt + self.generated,
            "log_cells": self.batch * self.generated,
        })  # fmt: skip
        return memory_parts(
            problem_of(self.shape, self.bytes_per_element, device=device),
            self.policy,
            sizes,
            self.resident,
            self.on_disk,
        )


def lines_of(shape: ModelShape, policy: Policy, hardware, bytes_per_element: int) -> dict[str, SplitLines]:
    """The split lines of a policy's both(…) entries."""
    problem = problem_of(shape, bytes_per_element, hardware)
    return {
        kind: split_lines(problem, policy, kind) for kind in policy.cache_kinds if representation_of(kind) == "both"
    }
