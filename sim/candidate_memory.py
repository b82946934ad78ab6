"""Memory of candidates: bytes in each tier, computed with ``core.memory`` as for the executor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, lengths_between
from flexhybrid.core.context.cache_entries import ATTENDED_ENTRY, TIERS, Pool
from flexhybrid.core.memory import layer_bytes, memory_parts
from flexhybrid.core.problem import BufferSizes, Problem
from flexhybrid.core.schedule.buffer_sizes import Reads, group_sizes, split_blocks
from sim.candidates import Candidates, CandidateSteps, candidate_steps

#: In layers with a window, the largest memory is sought among this many of the last context lengths.
LAST_LENGTHS = 4 * BLOCK_TOKENS


def peak_of_steps(steps: CandidateSteps) -> dict[str, np.ndarray]:
    """Return tier -> bytes, [candidates]."""
    memory = memory_plans(steps)
    return {tier: sum(memory[tier].values(), start=0.0) + np.zeros(len(steps.batch)) for tier in TIERS}


def memory_plans(steps: CandidateSteps) -> dict[str, dict[str, np.ndarray]]:
    """Return tier -> part -> bytes, [candidates], as ``core.memory.memory_plan`` does for a wave."""
    cached = steps.prompt + steps.generated - 1
    kept, sizes = steps.kept_of(cached), _mini_batch_sizes(steps)
    if steps.whole:
        sizes = sizes.merge(_mini_batch_sizes(steps.whole))
    sizes = replace(
        sizes,
        pool_blocks={
            Pool(entry, window).name: steps.batch * count
            for window in steps.windows
            for entry, count in steps.reserved_in(window).items()
        },
        whole_blocks={e: steps.batch * count for e, count in steps.whole.reserved.items()} if steps.whole else {},
        hidden_rows=steps.batch * sizes.step_rows / steps.size * steps.num_chunks,
        index_rows={r: steps.batch * rows / steps.size for r, rows in sizes.selected_rows.items()},
        cached_tokens=steps.batch * cached,
        places=steps.batch,
        kept_tokens=steps.batch * kept,
        partial_rows=steps.batch * kept,
        column_sets=steps.batch if steps.policy.selection.columns == "request" else steps.num_mini_batches,
        longest=steps.prompt + steps.generated,
        log_cells=steps.batch * steps.generated,
    )
    weights = layer_bytes(steps.problem, steps.policy, steps.resident, steps.on_disk)
    return memory_parts(steps.problem, steps.policy, sizes, weights)


def _mini_batch_sizes(steps: CandidateSteps) -> BufferSizes:
    """Return the buffer sizes of a mini-batch, the largest over its steps (``buffer_sizes.mini_batch_sizes``)."""
    cached = steps.prompt + steps.generated - 1
    prompt, widest = np.minimum(steps.prompt, _most_new_tokens(steps)), steps.windows[-1]
    prompt_tokens = steps.prompt_tokens
    if widest is not None:  # tokens outside every later token's window are not stored
        prompt_tokens = prompt_tokens - np.maximum(
            steps.dealing.stored(steps.dealing.first_stored(steps.prompt, widest))
            - steps.dealing.dropped_blocks(steps.prompt) * BLOCK_TOKENS,
            0,
        )
    since, until = steps.ever_stored(steps.prompt), steps.ever_stored(cached)

    def sizes_of(size, reads: Reads) -> BufferSizes:
        """Return the buffer sizes of a mini-batch of ``size`` requests."""
        splits = {
            entry: split_blocks(lines, size, reads.tokens[entry], steps.num_mini_batches, steps.prompt)
            for entry, lines in steps.lines.items()
        }
        fresh = steps.dealing.by_entry(size * (until > since))
        staged = steps.dealing.by_entry(size * np.minimum(prompt_tokens, _most_new_tokens(steps)))
        of_size = replace(reads, running=size * reads.running, splits=splits)
        return group_sizes(steps.problem, steps.policy, size, prompt, of_size, fresh=fresh, staged=staged)

    reads = _reads(steps, widest)
    sizes = sizes_of(steps.size, reads)
    if steps.lines:  # fewer requests or shorter contexts may have other split points, and then larger buffers
        sizes = sizes.merge(sizes_of(steps.last_size, reads))
        for window in steps.windows[:-1]:
            of_window = _reads(steps, window)
            sizes = sizes.merge(sizes_of(steps.size, of_window)).merge(sizes_of(steps.last_size, of_window))
    return sizes


def _most_new_tokens(steps: CandidateSteps) -> np.ndarray:
    """Return the most new tokens of a request in one step, [candidates]; infinity without chunks."""
    return np.where(steps.num_chunks > 1, steps.chunk_size, np.inf)


def _reads(steps: CandidateSteps, window: int | None) -> Reads:
    """Return the reads of a request in the steps that may need the most memory, [steps, candidates]. These are decode
    steps and the last two chunks of a long prompt. ``window``: attention window of the layer."""
    decodes = steps.generated > 1
    last = steps.kept_of(np.where(decodes, steps.prompt + steps.generated - 2, 0))
    stairs = steps.dealing.keeps_ids or steps.lines
    read = lengths_between(steps.prompt, last) if stairs else last[None]  # [steps, candidates]
    if window is not None and np.any(last >= window):  # the oldest blocks leave the window one by one
        latest = np.maximum(last - np.arange(LAST_LENGTHS)[:, None], np.minimum(steps.prompt, last))
        read = np.concatenate([read, latest])
    running, new = np.where(decodes, 1.0, 0.0) + 0.0 * read, np.ones_like(read)
    pieces = np.zeros(read.shape, dtype=bool)
    if np.any(steps.num_chunks > 1):  # the last chunk reads the most but may be small, so the one before counts too
        before = np.maximum(steps.num_chunks - np.array([[1.0], [2.0]]), 0.0) * steps.chunk_size
        read, running = np.concatenate([read, before]), np.concatenate([running, before > 0])
        new = np.concatenate([new, np.minimum(steps.prompt - before, steps.chunk_size)])
        pieces = np.concatenate([pieces, np.ones(before.shape, dtype=bool)])
    held = steps.dealing.by_entry(steps.dealing.held(read, window))
    tokens = steps.dealing.by_entry(steps.dealing.tokens(read, window))
    if steps.policy.static_cache:
        held = {entry: count[None] for entry, count in steps.reserved_in(window).items()}
    recomputed = steps.dealing.tok_blocks(read) * BLOCK_TOKENS if steps.dealing.keeps_ids else 0.0 * read
    context = read - recomputed if window is None else sum(tokens.values())
    if ATTENDED_ENTRY in tokens:
        context = context - tokens[ATTENDED_ENTRY] * ~pieces
    return Reads(running, held, tokens, context, recomputed, splits={}, new=new, pieces=pieces)


def peak_bytes(problem: Problem, candidates: Candidates) -> dict[str, np.ndarray]:
    """Return tier -> bytes, in the shape of the candidates' numbers."""
    steps, size = candidate_steps(problem, candidates)
    peak = {tier: np.zeros(len(steps.batch)) for tier in TIERS}
    for members, entries in steps.alike():
        for tier, num_bytes in peak_of_steps(steps.take(members, entries)).items():
            peak[tier][members] = num_bytes
    return {tier: num_bytes.reshape(size) for tier, num_bytes in peak.items()}
