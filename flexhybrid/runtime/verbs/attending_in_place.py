"""Attention of decode steps on a CPU that reads keys and values where they lie (``runtime/kernels/in_place.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.schedule.steps import MiniBatchStep, Segment
from flexhybrid.core.task import Task
from flexhybrid.runtime.executor import State

if TYPE_CHECKING:
    from flexhybrid.runtime.kernels.in_place import Extent


class StepExtents(NamedTuple):
    """Where a decode step's keys and values lie, the same in every layer."""

    segments: tuple[tuple[Segment, Extent], ...]
    own: Extent  #: of the new tokens, among the projected rows
    bounds: list[int]  #: of the ranges of requests and heads that threads take


def attend_in_place(state: State, task: Task) -> torch.Tensor:
    """Attend with one new token a request over its whole context: [B, H·d]."""
    from flexhybrid.runtime.kernels import in_place

    step, shape, slot = task.payload.step, state.shape, task.payload.slot
    kept = state.extents.get(task.mini_batch)
    if kept is None or kept[0] is not step:
        kept = state.extents[task.mini_batch] = step, _step_extents(state, step)
    extents, rows = kept[1], state.kvq[slot]
    parts, first = [in_place.Part(in_place.memory_of(rows), extents.own)], {"act": 0, "kv": 0}
    for segment, extent in extents.segments:
        memory = _memory(state, task, segment, first)
        parts.append(in_place.Part(in_place.memory_of(memory), extent))
    query = rows[:, shape.kv_width :].unflatten(1, (shape.num_heads, shape.head_dim))
    return in_place.attend(query, parts, extents.bounds, state.compute_share)


def _memory(state: State, task: Task, segment: Segment, first: dict[str, int]) -> torch.Tensor:
    """Return what holds a segment's keys and values in the task's layer; ``first``: rows of those before it, by
    representation."""
    step, buffers = task.payload.step, state.buffers
    made = {"act": buffers.generated} if segment.representation == "act" else {}
    if segment.representation == "kv" and buffers.packed("kv"):
        made = {"kv": buffers.plain["kv"]}
    for representation, rows in made.items():
        begin = first[representation]
        first[representation] += len(step.requests) * segment.buffer_blocks * BLOCK_TOKENS
        return rows[begin : first[representation]]
    if segment.tier == "device":
        return buffers.pools[segment.space][task.layer]
    return buffers.loaded_region(step, segment, task.payload.slot)


def _step_extents(state: State, step: MiniBatchStep) -> StepExtents:
    from flexhybrid.runtime.kernels.in_place import Extent, bounds_of

    shape, buffers, batch = state.shape, state.buffers, len(step.requests)
    d, width = shape.head_dim, shape.kv_width
    segments = []
    for segment in step.segments:
        if not segment.max_tokens:
            continue
        blocks = np.arange(batch * segment.buffer_blocks).reshape(batch, -1)  # as the link or KV-Gen laid them
        if segment.representation == "kv" and segment.tier == "device" and not buffers.packed("kv"):
            blocks = segment.block_table
        strides = width, d, width // 2
        if buffers.head_major(segment):
            strides = d, BLOCK_TOKENS * d, BLOCK_TOKENS * width // 2
        tokens = segment.num_tokens.astype(np.int64)
        segments.append((segment, Extent(blocks.astype(np.int64) * BLOCK_TOKENS * width, tokens, *strides)))
    own_rows = np.arange(batch, dtype=np.int64)[:, None] * (width + shape.query_width)
    own = Extent(own_rows, np.ones(batch, dtype=np.int64), 0, d, width // 2)
    bounds = bounds_of(step.context + 1, shape.num_kv_heads, state.compute_threads)
    return StepExtents(tuple(segments), own, bounds)
