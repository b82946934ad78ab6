"""Attention of decode steps on a CPU, device or host, that reads keys and values where they lie
(``runtime/kernels/in_place.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.schedule.step_work import commons_together
from flexhybrid.core.schedule.steps import MiniBatchStep, Segment
from flexhybrid.core.task import Task
from flexhybrid.runtime.executor import State
from flexhybrid.runtime.kernels.attention import Weighed
from flexhybrid.runtime.kernels.shared_attention import add_part

if TYPE_CHECKING:
    from flexhybrid.runtime.kernels.in_place import Extent, Layout


class Together(NamedTuple):
    """Where keys and values lie to which requests attend together."""

    rows: torch.Tensor  #: [g, m] of the step: of g such parts, m requests have each
    segments: tuple[Segment, ...]
    layout: Layout


class StepExtents(NamedTuple):
    """Where a decode step's keys and values lie, the same in every layer."""

    segments: list[Segment]  #: a part each; also of what requests share, but each attends to by itself
    layout: Layout  #: of the new tokens among the projected rows, then of the segments
    together: list[Together]


def attend_in_place(state: State, task: Task) -> None:
    """Attend with one new token a request over its context, but for what is attended to together: [B, H·d]."""
    from flexhybrid.runtime.kernels import in_place

    step, rows = task.payload.step, state.kvq[task.payload.slot]
    kept = state.extents.get(task.mini_batch)
    if kept is None or kept[0] is not step:
        kept = state.extents[task.mini_batch] = step, _step_extents(state, step)
    segments, layout, together = kept[1]
    memories = [rows, *(_memory(state, task, segment) for segment in segments)]
    context = _queries(state, rows), memories, layout, state.compute_share
    if together:
        state.weighed = in_place.attend_and_sum(*context)
    else:
        state.attended = in_place.attend(*context)


def add_shared_in_place(state: State, task: Task) -> None:
    """Add to ``state.weighed`` what requests attend to together."""
    from flexhybrid.runtime.kernels import in_place

    queries = _queries(state, state.kvq[task.payload.slot]).unflatten(1, (state.shape.num_kv_heads, -1))
    for rows, segments, layout in state.extents[task.mini_batch][1].together:
        memories = [_memory(state, task, segment) for segment in segments]

        def attend(q_gGQd: torch.Tensor, memories=memories, layout=layout) -> Weighed:
            return in_place.attend_and_sum(q_gGQd.flatten(1, 2), memories, layout, state.compute_share)

        add_part(state.weighed, queries[:, :, :, None], rows, attend)


def _queries(state: State, rows: torch.Tensor) -> torch.Tensor:
    """Return the queries [B, H, d] of projected rows."""
    return rows[:, state.shape.kv_width :].unflatten(1, (state.shape.num_heads, state.shape.head_dim))


def attend_blocks_in_place(
    state: State, query: torch.Tensor, pool: torch.Tensor, held: np.ndarray, tokens: np.ndarray
) -> Weighed:
    """Attend on the host, with queries [B, H, d], over the first ``tokens`` [B] in blocks ``held`` [B, most] of a layer
    of a pool."""
    from flexhybrid.runtime.kernels import in_place

    d, groups, width = state.shape.head_dim, state.shape.num_kv_heads, state.shape.kv_width
    blocks = held.astype(np.int64) * (BLOCK_TOKENS * width)
    extent = in_place.Extent(blocks, tokens, d, BLOCK_TOKENS * d, BLOCK_TOKENS * width // 2)
    layout = in_place.layout_of([extent], groups, 1)
    return in_place.attend_and_sum(query, [pool], layout, state.host_share)


def _memory(state: State, task: Task, segment: Segment) -> torch.Tensor:
    """Return what holds keys and values in the task's layer, all that lie as the segment does."""
    buffers, representation = state.buffers, segment.representation
    if representation == "act":
        return buffers.generated
    if buffers.packed("kv"):
        return buffers.plain["kv"]
    if segment.tier == "device":
        return buffers.pools[segment.space][task.layer]
    return buffers.loaded["kv"][task.payload.slot]


def _blocks(state: State, step: MiniBatchStep) -> dict[int, np.ndarray]:
    """Return for each segment, by id, the blocks of its ``_memory`` that it has: [B, blocks]. Where the link, KV-Gen or
    unpacking laid them, segments lie one after the other."""
    blocks, first = {}, {"act": 0, "kv": 0}
    for segment in (*step.of("act"), *step.of("kv")):
        if segment.representation == "act" or segment.tier != "device" or state.buffers.packed("kv"):
            begin = first[segment.representation]
            table = begin + segment.buffer_table
            first[segment.representation] = begin + segment.block_table.size
        else:
            table = segment.block_table
        blocks[id(segment)] = table.astype(np.int64)
    return blocks


def _shared_extents(
    state: State, step: MiniBatchStep, blocks_of: dict[int, np.ndarray]
) -> list[tuple[Segment, Extent]]:
    """Where the shared blocks lie to which each request attends by itself, by cache entry."""
    from flexhybrid.runtime.kernels.in_place import Extent

    together = set(map(id, commons_together(step, state.wave)))
    blocks: dict[str, list[list[np.ndarray]]] = {}
    kinds: dict[str, Segment] = {}
    for common in step.commons:
        for segment in () if id(common) in together else common.segments:
            kinds[segment.entry] = segment
            of_rows = blocks.setdefault(segment.entry, [[] for _ in step.requests])
            for members, of_group in zip(common.rows.tolist(), blocks_of[id(segment)], strict=True):
                for row in members:
                    of_rows[row].append(of_group)
    extents = []
    for entry, of_rows in blocks.items():
        joined = [np.concatenate(of_row) if of_row else np.zeros(0, np.int64) for of_row in of_rows]
        counts = np.array([len(row) for row in joined], dtype=np.int64)
        table = np.zeros((len(joined), counts.max()), dtype=np.int64)
        table[np.arange(table.shape[1]) < counts[:, None]] = np.concatenate(joined)
        block = table * BLOCK_TOKENS * state.shape.kv_width
        extents.append((kinds[entry], Extent(block, counts * BLOCK_TOKENS, *_strides(state, kinds[entry]))))
    return extents


def _strides(state: State, segment: Segment) -> tuple[int, int, int]:
    """Return ``token_stride``, ``head_stride`` and ``values`` of an ``Extent`` of a segment's blocks."""
    d, width = state.shape.head_dim, state.shape.kv_width
    if state.buffers.head_major(segment):
        return d, BLOCK_TOKENS * d, BLOCK_TOKENS * width // 2
    return width, d, width // 2


def _step_extents(state: State, step: MiniBatchStep) -> StepExtents:
    from flexhybrid.runtime.kernels.in_place import Extent, layout_of

    shape, batch, blocks_of = state.shape, len(step.requests), _blocks(state, step)
    d, width = shape.head_dim, shape.kv_width
    segments = []
    for segment in step.segments:
        if segment.max_tokens:
            elements, tokens = blocks_of[id(segment)] * BLOCK_TOKENS * width, segment.num_tokens.astype(np.int64)
            segments.append((segment, Extent(elements, tokens, *_strides(state, segment))))
    if step.commons:
        segments += _shared_extents(state, step, blocks_of)
    own_rows = np.arange(batch, dtype=np.int64)[:, None] * (width + shape.query_width)
    own = Extent(own_rows, np.ones(batch, dtype=np.int64), 0, d, width // 2)
    layout = layout_of([own, *(extent for _, extent in segments)], shape.num_kv_heads, state.compute_threads)
    return StepExtents([segment for segment, _ in segments], layout, _together(state, step, blocks_of))


def _together(state: State, step: MiniBatchStep, blocks_of: dict[int, np.ndarray]) -> list[Together]:
    from flexhybrid.runtime.kernels.in_place import Extent, layout_of

    groups, block = state.shape.num_kv_heads, BLOCK_TOKENS * state.shape.kv_width
    parts = []
    for common in commons_together(step, state.wave):
        segments = tuple(segment for segment in common.segments if segment.max_tokens)
        extents = [
            Extent(blocks_of[id(s)] * block, s.num_tokens.astype(np.int64), *_strides(state, s)) for s in segments
        ]
        layout = layout_of(extents, groups, state.compute_threads)
        parts.append(Together(torch.from_numpy(common.rows), segments, layout))
    return parts
