"""What each mini-batch of a candidate does in the prefill and in pieces of the decode, in arrays of candidates.

The sums of a step (``core.steps.StepCounts``), its memory and its traffic, for requests of one length. The formulas are
those of ``core.work`` and ``core.memory``; here are only the numbers that go in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexhybrid.core.blocks import BLOCK_TOKENS, HALF, deal_blocks
from flexhybrid.core.kinds import Part, parts_of, representation_of
from flexhybrid.core.layout import LayerLayout, layer_layout
from flexhybrid.core.memory import BufferSizes, group_sizes, memory_parts, split_extremes
from flexhybrid.core.policy import ElementBytes, Policy
from flexhybrid.core.selection import kept_tokens, selected_tokens
from flexhybrid.core.shape import ModelShape
from flexhybrid.core.split import SplitLines, split_lines, split_point
from flexhybrid.core.steps import StepCounts


def ceil_div(a, b):
    return np.ceil(a / b)


def num_mini_batches(batch, prompt_tokens, max_tokens, max_mini_batch_tokens):
    """(mini-batches, requests in each but the last) as ``packing.pack`` cuts requests of one length; arrays.

    A request's padded width is its whole context in blocks, whatever the shares: only its last block is partial.
    """
    padded = ceil_div(prompt_tokens + max_tokens - 1, BLOCK_TOKENS) * BLOCK_TOKENS + 1
    most = np.maximum(1.0, np.floor(max_mini_batch_tokens / padded))
    size = ceil_div(batch, ceil_div(batch, most))
    return ceil_div(batch, size), size


def _sum_ceil_blocks(tokens):
    """Sum of ceil(t / 16) over t = 0 … tokens."""
    full = np.floor(tokens / BLOCK_TOKENS)
    return full * (full + 1) * (BLOCK_TOKENS / 2) + (tokens - full * BLOCK_TOKENS) * (full + 1)


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
        return layer_layout(self.shape, self.stored.weights)

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
        return num_mini_batches(self.batch, self.prompt, self.generated, self.bound)

    @property
    def K(self):
        """Mini-batches."""
        return self._cut[0]

    @property
    def size(self):
        """Requests in each mini-batch but the last."""
        return self._cut[1]

    @cached_property
    def last(self):
        """Requests in the last mini-batch."""
        return self.batch - (self.K - 1) * self.size

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted(kind for kind in self.shares if kind != "tok"))

    # ---- which blocks are of which kind

    def _tok_blocks(self, blocks):
        return np.floor(self.shares.get("tok", 0.0) * blocks + HALF)

    def _blocks_at(self, blocks) -> dict[str, np.ndarray]:
        """Blocks of each kind among a request's first so many (whole numbers)."""
        shares = [self.shares[kind] for kind in self.kinds]
        dealt = deal_blocks(self.kinds, shares, blocks)
        if "tok" in self.shares:
            dropped = deal_blocks(self.kinds, shares, self._tok_blocks(blocks))
            dealt = [a - b for a, b in zip(dealt, dropped, strict=True)]
        return dict(zip(self.kinds, dealt, strict=True))

    def _stored_until(self, tokens) -> dict[str, np.ndarray]:
        """Tokens of each kind that were ever stored of a request's first so many."""
        full = np.floor(tokens / BLOCK_TOKENS)
        rest = tokens - full * BLOCK_TOKENS
        shares = [self.shares[kind] for kind in self.kinds]
        low, high = (deal_blocks(self.kinds, shares, n) for n in (full, full + 1))
        return {kind: a * BLOCK_TOKENS + rest * (b - a) for kind, a, b in zip(self.kinds, low, high, strict=True)}

    @cached_property
    def prompt_kinds(self) -> dict[str, np.ndarray]:
        """Tokens of each kind that the prefill stores of a request."""
        kept = kept_tokens(self.policy.selection, self.prompt, self.prompt)
        if "tok" not in self.shares:
            return self._stored_until(kept)
        dropped = self._stored_until(self._tok_blocks(np.floor(kept / BLOCK_TOKENS)) * BLOCK_TOKENS)
        return {kind: n - dropped[kind] for kind, n in self._stored_until(kept).items()}

    # ---- what a step does

    def prefill(self, batch) -> StepCounts:
        """The prefill of ``batch`` requests (``size`` or ``last``)."""
        stored = {part: batch * n for kind, n in self.prompt_kinds.items() for part in parts_of(kind)}
        return StepCounts(True, batch, self.prompt, 0.0, {}, {}, 0.0, stored)

    def decode(self, batch, first, final) -> tuple[StepCounts, dict[Part, np.ndarray]]:
        """A mean step of ``batch`` requests over the iterations whose contexts go from ``first`` to ``final`` tokens,
        and the share of these iterations whose new token goes to each part."""
        first, final = (kept_tokens(self.policy.selection, self.prompt, n) for n in (first, final))
        context = (first + final) * 0.5
        blocks = (_sum_ceil_blocks(final) - _sum_ceil_blocks(first - 1)) / (final - first + 1)
        low = np.floor(blocks)
        at_low, at_high = self._blocks_at(low), self._blocks_at(low + 1)
        held = {kind: at_low[kind] + (blocks - low) * (at_high[kind] - at_low[kind]) for kind in self.kinds}
        recomputed = 0.0
        if "tok" in self.shares:
            recomputed = self._tok_blocks(context / BLOCK_TOKENS) * BLOCK_TOKENS
        of_part: dict[Part, np.ndarray] = {}
        columns = 0.0
        for kind in self.kinds:
            split = None
            if representation_of(kind) == "both":
                share = held[kind] / blocks
                tokens = split_point(self.lines[kind], batch, context * share, self.K, whole_blocks=False)
                split = {"act": tokens / BLOCK_TOKENS, "kv": held[kind] - tokens / BLOCK_TOKENS}
            for part in parts_of(kind):
                count = held[kind] if split is None else split[part.representation]
                if self.policy.static_cache:
                    count = self._final[kind]
                of_part[part] = batch * count
                if part.representation == "act":
                    columns = columns + count
        until = self._stored_until(final + 1)
        since = self._stored_until(first)
        span = final - first + 1
        share = {kind: (until[kind] - since[kind]) / span for kind in self.kinds}
        if self.policy.selection.method == "heavy_hitter":
            share = {kind: self.shares[kind] + 0.0 * context for kind in self.kinds}
        fraction = {part: share[kind] for kind in self.kinds for part in parts_of(kind)}
        stored = {part: batch + 0.0 * context for part in fraction}
        selected = None
        if self.policy.selection.method == "speculative":
            selected = selected_tokens(self.policy.selection, context)
        copies = {part: batch * np.minimum(1.0, count) for part, count in of_part.items()}
        counts = StepCounts(
            False, batch, 1.0, context - recomputed, of_part, copies, columns, stored, recomputed, selected
        )  # fmt: skip
        return counts, fraction

    # ---- memory

    @cached_property
    def _final(self) -> dict[str, np.ndarray]:
        """Blocks of each kind that a request reserves."""
        cached = self.prompt + self.generated - 1
        blocks = ceil_div(kept_tokens(self.policy.selection, self.prompt, cached), BLOCK_TOKENS)
        final = self._blocks_at(blocks)
        if "tok" not in self.shares:
            return final
        before = self._blocks_at(np.maximum(blocks - 1, 0.0))
        return {kind: np.maximum(final[kind], before[kind]) + 1 for kind in self.kinds}

    def memory(self, device: str) -> dict[str, dict[str, np.ndarray]]:
        """``core.memory.memory_plan`` of each candidate: bytes per tier and part."""
        cached = self.prompt + self.generated - 1
        final = self._final
        splits = {
            kind: split_extremes(lines, self.size, self.prompt, cached, self.K) for kind, lines in self.lines.items()
        }
        staged = {kind: self.size * tokens for kind, tokens in self.prompt_kinds.items()}
        recomputed = self._tok_blocks(np.floor(cached / BLOCK_TOKENS)) * BLOCK_TOKENS if "tok" in self.shares else 0.0
        one = group_sizes(self.policy, self.size, self.prompt, final, staged, recomputed, splits)
        sizes = BufferSizes(**{
            **{name: getattr(one, name) for name in one.__dataclass_fields__},
            "pool_blocks": {kind: self.batch * count for kind, count in final.items()},
            "hidden_rows": self.batch * self.prompt,
            "cached_tokens": self.batch * cached,
        })  # fmt: skip
        return memory_parts(
            self.shape, self.policy, self.bytes_per_element, sizes, self.resident, self.on_disk,
            self.layout.total_bytes, device,
        )  # fmt: skip


def lines_of(shape: ModelShape, policy: Policy, hardware, bytes_per_element: int) -> dict[str, SplitLines]:
    """The split lines of a policy's both(…) entries."""
    return {
        kind: split_lines(shape, policy, hardware, bytes_per_element, kind)
        for kind in policy.cache_kinds
        if representation_of(kind) == "both"
    }
