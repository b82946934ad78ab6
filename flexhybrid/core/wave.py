"""From a policy and a workload to a wave: requests packed into mini-batches, each with its blocks.

``flexhybrid.core.schedule.steps`` says what a mini-batch of the wave does in an iteration, ``flexhybrid.core.plan`` in
which order all of it is done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, BlockEntries, BlockManager
from flexhybrid.core.context.cache_entries import representation_of
from flexhybrid.core.context.packing import chunk_tokens, num_chunks, pack
from flexhybrid.core.context.selection import kept_tokens, limits_cache, num_keeping, with_pool_share
from flexhybrid.core.context.split import SplitLines, split_lines
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.layout import LayerLayout, layer_layout
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import ElementBytes, Policy, Selection
from flexhybrid.core.problem import Problem
from flexhybrid.core.workload import Workload


@dataclass(frozen=True)
class Wave:
    """Requests admitted together: their lengths, mini-batches and blocks."""

    problem: Problem
    policy: Policy
    workload: Workload
    entries: BlockEntries
    mini_batches: tuple[np.ndarray, ...]
    first_block: dict[str, np.ndarray]  #: entry -> [requests], physical
    num_blocks: dict[str, np.ndarray]  #: entry -> [requests], reserved
    blocks: BlockManager  #: owns the blocks of the pools
    layout: LayerLayout
    split: dict[str, SplitLines]  #: of the entries both(…)
    #: the same requests in layers that keep all tokens although the others do not, in blocks of their own
    whole: Wave | None = None

    @property
    def shape(self) -> ModelShape:
        return self.problem.shape

    def release(self) -> None:
        """Give back the blocks of all requests, when the wave has run for the last time."""
        for request in range(self.workload.num_requests):
            self.blocks.release(request)
        if self.whole:
            self.whole.release()

    @property
    def pool_blocks(self) -> dict[str, int]:
        """Cache entry -> blocks that the requests reserve."""
        return {entry: int(blocks.sum()) for entry, blocks in self.num_blocks.items()}

    @cached_property
    def stored(self) -> ElementBytes:
        """Bytes an element of weights, KV and ACT as they are stored."""
        return self.problem.stored(self.policy.bits)

    @cached_property
    def streamed_from(self) -> int:
        """First byte of a layer that is streamed; those before it stay on the device."""
        return self.layout.resident_prefix(self.policy.weights.device)

    @cached_property
    def disk_from(self) -> int:
        """First byte of a layer that lies on the disk."""
        return disk_from(self.layout, self.policy)


def stored_layout(problem: Problem, policy: Policy) -> LayerLayout:
    """Layout of a layer whose matrices are stored in the policy's bits."""
    stored = problem.stored(policy.bits)
    return layer_layout(problem.shape, stored.weights, stored.compute)


def disk_from(layout: LayerLayout, policy: Policy) -> int:
    """First byte of a layer that lies on the disk; those before it are on the device, then on the host."""
    if not policy.weights.disk:
        return layout.total_bytes
    return max(layout.resident_prefix(policy.weights.device), layout.resident_prefix(1.0 - policy.weights.disk))


def check_planned(policy: Policy, shape: ModelShape) -> None:
    """Refuse what this plan maker does not lay out, by name. Raise InputError."""
    whole = policy.selection.whole_layers
    if whole is not None and whole > shape.num_layers:
        raise InputError(
            f"policy {policy.name}: selection.whole_layers is {whole}; {shape.name} has {shape.num_layers} layers: "
            "give no more than that"
        )
    representations = {representation_of(entry) for entry in policy.cache_entries}
    speculative = policy.selection.method == "speculative"
    refusals = (
        (policy.embedding.device < 1, "embedding and head off the device"),
        (policy.hidden == "disk", "hidden states on the disk"),
        (representations == {"tok"}, "a cache of token ids alone: the newest tokens need a share of kv or act, and it"),
        (policy.selection.method == "heavy_hitter" and representations != {"kv"}, "selection heavy_hitter over a cache "
         "other than kv"),
        (speculative and not set(policy.cache_entries) <= {"kv@host", "act@host"}, "speculative selection over a cache "
         "other than kv@host and act@host"),
        (speculative and limits_cache(policy.selection) and "act" in representations, "a limited pool of a speculative "
         "selection over ACT, whose rows serve all heads,"),
        (speculative and policy.selection.partial_keys == "disk", "partial keys on the disk"),
        (policy.static_cache and "both" in representations, "a static cache of both copies"),
    )  # fmt: skip
    for refused, what in refusals:
        if refused:
            raise InputError(f"policy {policy.name}: {what} cannot be planned by this version")


def admit(
    problem: Problem,
    policy: Policy,
    workload: Workload,
    blocks: BlockManager | None = None,
    seconds_per_token: tuple[float, float] = (1.0, 1.0),
) -> Wave:
    """Pack requests and reserve their blocks, those of a mini-batch side by side.

    The wave owns ``blocks`` from now on; None: new pools of exactly the size it needs. ``seconds_per_token``: see
    ``pack``. The hardware record decides the split points of both(…) entries. Raises InputError when a policy cannot
    be planned or a pool has no room.
    """
    check_planned(policy, problem.shape)
    cached = workload.cached_tokens
    stored = problem.stored(policy.bits).kv
    policy = replace(policy, selection=with_pool_share(problem.shape, policy.selection, stored, cached))
    entries = BlockEntries(policy.cache)
    split = {
        entry: split_lines(problem, policy, entry) for entry in entries.names if representation_of(entry) == "both"
    }
    mini_batches = pack(cached, entries, policy.max_mini_batch_tokens, policy.packing, seconds_per_token)
    kept = kept_tokens(policy.selection, workload.prompt_tokens, cached, cached)
    first = workload.prompt_tokens.copy()  # the first length of each request that is held as a whole
    for group in mini_batches:
        if num_chunks(policy, first[group]) > 1:
            first[group] = chunk_tokens(policy.max_mini_batch_tokens)
    counts = entries.most_blocks(first, kept)  # [requests, entry]
    num_blocks = {entry: counts[:, i] for i, entry in enumerate(entries.names)}
    blocks, first_block = _reserve(num_blocks, mini_batches, blocks)
    wave = Wave(
        problem=problem,
        policy=policy,
        workload=workload,
        entries=entries,
        mini_batches=tuple(mini_batches),
        first_block=first_block,
        num_blocks=num_blocks,
        blocks=blocks,
        layout=stored_layout(problem, policy),
        split=split,
    )
    if not num_keeping(policy.selection, problem.shape.num_layers):
        return wave
    counts = entries.most_blocks(first, cached)
    num_blocks = {entry: counts[:, i] for i, entry in enumerate(entries.names)}
    blocks, first_block = _reserve(num_blocks, mini_batches)
    # a prompt is taken whole in all layers
    keeping = replace(policy, selection=Selection(), max_mini_batch_tokens=int(cached.max()) + BLOCK_TOKENS)
    whole = replace(wave, policy=keeping, num_blocks=num_blocks, first_block=first_block, blocks=blocks)
    return replace(wave, whole=whole)


def _reserve(num_blocks: dict[str, np.ndarray], mini_batches, blocks: BlockManager | None = None):
    """Return the owner of the blocks, and the first block of each entry and request: {entry: [requests]}."""
    if blocks is None:
        blocks = BlockManager({entry: int(count.sum()) for entry, count in num_blocks.items()})
    first_block = {entry: np.zeros(len(count), dtype=np.int64) for entry, count in num_blocks.items()}
    for group in mini_batches:
        for request in group:
            extents = blocks.admit(int(request), {entry: int(count[request]) for entry, count in num_blocks.items()})
            for entry, extent in extents.items():
                first_block[entry][request] = extent.first
    return blocks, first_block
