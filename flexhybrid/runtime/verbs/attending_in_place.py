"""Decode attention that reads keys and values in place, and the tables of where they are.

``runtime/kernels/in_place.py`` attends on a CPU (device or host), ``attend_triton.py`` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import numpy as np
import torch

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.schedule.step_work import commons_together
from flexhybrid.core.schedule.steps import MiniBatchStep, Segment
from flexhybrid.core.task import Task
from flexhybrid.runtime.executor import State
from flexhybrid.runtime.kernels.attention import Extent, Weighed
from flexhybrid.runtime.kernels.in_place import Parts, layout_of
from flexhybrid.runtime.kernels.logit_changes import ToDevice
from flexhybrid.runtime.kernels.shared_attention import add_part

if TYPE_CHECKING:
    from flexhybrid.runtime.kernels.attend_triton import BlockTable

Places = TypeVar("Places")


class Group(NamedTuple):
    """Shared prefixes to which requests attend together: g prefixes, each of m requests."""

    rows: torch.Tensor  #: [g, m] rows of the step
    segments: tuple[Segment, ...]
    layout: Parts | BlockTable


class HostPart(NamedTuple):
    """The keys and values to which the host attends while the device attends to others; the same in every layer."""

    rows: np.ndarray  #: rows of the step whose requests have such keys and values
    segments: list[Segment]
    layout: Parts


class StepExtents(NamedTuple):
    """Where the keys and values of a decode step are; the same in every layer."""

    #: one for each part of the contexts; None: among the projected rows (new tokens, or a recomputed prefix)
    segments: list[Segment | None]
    layout: Parts | BlockTable
    together: list[Group]  #: empty with a window, which begins at a different token for each request


def attend_in_place(state: State, task: Task) -> None:
    """Attend with one new token per request to its context: [B, H·d].

    On the host, or with ``attend_shared``, set ``state.weighed``: attention without the shared prefixes in
    ``together``.
    """
    segments, layout, _ = extents_of(state, task)
    memories = [_memory(state, task, segment) for segment in segments]
    query, rule = _queries(state, task), state.score_rule(task)
    if {"attend_shared", "merge_attended"} & task.payload.works.keys() or on_host(state):
        state.weighed = layout.attend_and_sum(query, memories, rule)
        return
    out = state.graphs.attended(state, task.payload.step) if state.graphs else None
    state.attended = layout.attend(query, memories, rule, out)


def extents_of(state: State, task: Task) -> StepExtents:
    """Return where a step's keys and values are. Computed once per step."""
    step = task.payload.step
    if state.graphs and state.graphs.holds(state, step):
        return state.graphs.fixed(state, task).extents
    place = torch.from_numpy if on_host(state) else state.to_device
    return _once_a_step(state, task, "all", lambda window: step_extents(state, step, window, place))


def _once_a_step(state: State, task: Task, which: str, make: Callable[[int | None], Places]) -> Places:
    """Return ``make(window)`` for the task's step, computed in the first of the layers that have the step."""
    step = task.payload.step
    key = task.mini_batch, step.window, which
    of_step, places = state.extents.get(key, (None, None))
    if of_step is not step:
        places = make(state.window_of(task))
        state.extents[key] = step, places
    return cast("Places", places)


def memory_names(state: State, segments: Sequence[Segment | None]) -> list[str]:
    """Return the name of each part's memory."""
    return [_memory_name(state, segment) for segment in segments]


def add_shared_in_place(state: State, task: Task) -> None:
    """Add attention to the shared prefixes in ``together`` to ``state.weighed``."""
    queries = _queries(state, task).unflatten(1, (state.shape.num_kv_heads, -1))
    rule = state.score_rule(task)
    for rows, segments, layout in extents_of(state, task).together:
        memories = [_memory(state, task, segment) for segment in segments]

        def attend(q_gGQd: torch.Tensor, memories=memories, layout=layout) -> Weighed:
            return layout.attend_and_sum(q_gGQd.flatten(1, 2), memories, rule)

        add_part(state.weighed, queries[:, :, :, None], rows, attend)


def attend_part_on_host(state: State, task: Task) -> None:
    """Attend on the host to the step's ``on_host`` parts. ``merge_attended`` combines the result with the device's.

    Write results and log(denominator) to ``out_strip``; the latter is -inf for a request that sees none of these parts.
    """
    shape, slot, step = state.shape, task.payload.slot, task.payload.step
    part = _once_a_step(state, task, "on host", lambda window: _host_part(state, step, window))
    out, queries = state.buffers.out_strip[slot], state.buffers.query_strip[slot, :, shape.kv_width :]
    batch, width = len(step.requests), shape.query_width
    out[:batch, :width], out[:batch, width:] = 0.0, -torch.inf
    if not len(part.rows):
        return
    rows = torch.from_numpy(part.rows)
    memories = [state.buffers.pools[segment.space][task.layer] for segment in part.segments]
    query = queries[rows].unflatten(1, (shape.num_heads, shape.head_dim))
    attended, sums = part.layout.attend_and_sum(query, memories, state.score_rule(task))
    out[rows, :width], out[rows, width:] = attended.flatten(1), sums.flatten(1)


def _host_part(state: State, step: MiniBatchStep, window: int | None) -> HostPart:
    """Return where the host's part of a step's keys and values is."""
    shared = [(common.rows, common.on_host) for common in step.commons if common.on_host]
    of_all = (*step.on_host, *(segment for _, segments in shared for segment in segments))
    blocks_of = {id(segment): segment.block_table.astype(np.int64) for segment in of_all}
    found = [(segment, _extent(state, step, segment, blocks_of, window)) for segment in step.on_host]
    found += _shared_extents(state, step, shared, blocks_of, window)
    seen = sum(extent.seen for _, extent in found)
    rows = np.flatnonzero(seen)
    extents = [extent.of_rows(rows) for _, extent in found]
    segments, of_head = [segment for segment, _ in found], state.shape.queries_per_key * state.shape.head_dim
    layout = _layout(state, extents, segments, of_head, torch.from_numpy, True) if len(rows) else None
    return HostPart(rows, segments, cast("Parts", layout))


def by_numba(state: State) -> bool:
    """Return whether a CPU attends, not a GPU."""
    return state.device.type == "cpu" or on_host(state)


def on_host(state: State) -> bool:
    """Return whether the host attends in place, for any device."""
    return state.policy.attention == "host"


def _layout(
    state: State,
    extents: Sequence[Extent],
    segments: Sequence[Segment | None],
    of_head: int,
    to_device: ToDevice,
    host: bool,
) -> Parts | BlockTable:
    """Return the kernels' table of contexts. ``segments``: one per extent; ``of_head``: query elements per key head;
    ``host``: whether the host attends."""
    shape = state.shape
    if not (host or by_numba(state)):
        from flexhybrid.runtime.kernels.attend_triton import table_of

        return table_of(extents, memory_names(state, segments), (shape.num_kv_heads, shape.head_dim), to_device)
    threads, share, by_kernels = state.compute_threads, state.compute_share, True
    if host:
        threads, share, by_kernels = torch.get_num_threads(), state.host_share, state.host_kernels  # of the lane
    return layout_of(extents, shape.num_kv_heads, threads, of_head, share, by_kernels)


def _queries(state: State, task: Task) -> torch.Tensor:
    """Return the queries [B, H, d] of the new tokens. Their rows follow the requests' recomputed prefixes."""
    step = task.payload.step
    rows = _memory(state, task, None)[: len(step.requests) * step.computed_width]
    rows = rows.unflatten(0, (len(step.requests), -1))[:, -1]
    return rows[:, state.shape.kv_width :].unflatten(1, (state.shape.num_heads, state.shape.head_dim))


def _memory_name(state: State, segment: Segment | None) -> str:
    """Return the name of the memory with a segment's keys and values. A name stands for one tensor."""
    if segment is None:
        return "rows"
    if segment.representation == "act":
        return "generated"
    if state.buffers.packed("kv"):
        return "plain"
    if on_host(state) and segment.tier == "disk":
        return "read"
    return segment.space if segment.tier == "device" or on_host(state) else "loaded"


def _memory(state: State, task: Task, segment: Segment | None) -> torch.Tensor:
    """Return the tensor with a segment's keys and values in the task's layer."""
    buffers, name = state.buffers, _memory_name(state, segment)
    if name == "rows":
        return buffers.query_strip[task.payload.slot] if on_host(state) else state.kvq[task.payload.slot]
    if name == "generated":
        return buffers.generated
    if name == "plain":
        return buffers.plain["kv"]
    if name == "read":
        return buffers.read["kv"][task.payload.slot]
    return buffers.loaded["kv"][task.payload.slot] if name == "loaded" else buffers.pools[name][task.layer]


def _blocks(state: State, step: MiniBatchStep) -> dict[int, np.ndarray]:
    """Return {id of a segment: its blocks in its ``_memory`` [B, blocks]}. Segments in one buffer are consecutive."""
    blocks, first = {}, {"act": 0, "kv": 0}
    for segment in (*step.of("act"), *step.of("kv")):
        in_pool = segment.tier == "device" or on_host(state) and segment.tier == "host"
        if segment.representation == "act" or not in_pool or state.buffers.packed("kv"):
            begin = first[segment.representation]
            table = begin + segment.buffer_table
            first[segment.representation] = begin + segment.block_table.size
        else:
            table = segment.block_table
        blocks[id(segment)] = table.astype(np.int64)
    return blocks


def _begins(state: State, segment: Segment, num_blocks: int) -> np.ndarray:
    """Return the positions of the first tokens of a segment's blocks, [B, num_blocks]."""
    positions = state.steps.positions[segment.entry]
    places = (segment.start_block[:, None] + np.arange(num_blocks)) * BLOCK_TOKENS
    return positions[np.minimum(places, len(positions) - 1)]


def _alone(state: State, step: MiniBatchStep, window: int | None) -> list[tuple[np.ndarray, tuple[Segment, ...]]]:
    """Return the device's shared prefixes that each request attends to separately: (rows that share it, segments)."""
    together = set() if window else set(map(id, commons_together(step, state.wave)))
    return [(common.rows, common.segments) for common in step.commons if id(common) not in together]


def _shared_extents(
    state: State,
    step: MiniBatchStep,
    shared: list[tuple[np.ndarray, tuple[Segment, ...]]],
    blocks_of: dict[int, np.ndarray],
    window: int | None,
) -> list[tuple[Segment, Extent]]:
    """Return segments and extents of ``shared`` prefixes to which each request attends separately."""
    blocks: dict[str, list[list[np.ndarray]]] = {}
    kinds: dict[str, Segment] = {}
    for rows, segments in shared:
        for segment in segments:
            kinds[segment.entry] = segment
            of_rows = blocks.setdefault(segment.entry, [[] for _ in step.requests])
            table = blocks_of[id(segment)]
            begins = _begins(state, segment, table.shape[1]) if window else np.zeros_like(table)
            for members, of_group in zip(rows.tolist(), np.stack([table, begins], axis=1), strict=True):
                for row in members:
                    of_rows[row].append(of_group)
    extents = []
    for entry, of_rows in blocks.items():
        joined = [np.concatenate([np.zeros((2, 0), np.int64), *of_row], axis=1) for of_row in of_rows]
        counts = np.array([row.shape[1] for row in joined], dtype=np.int64)
        tables = np.zeros((2, len(joined), counts.max()), dtype=np.int64)
        tables[:, np.arange(tables.shape[2]) < counts[:, None]] = np.concatenate(joined, axis=1)
        block = tables[0] * BLOCK_TOKENS * state.shape.kv_width
        extent = Extent(block, counts * BLOCK_TOKENS, *_strides(state, kinds[entry]))
        extents.append((kinds[entry], _in_window(extent, step, tables[1], window)))
    return extents


def _in_window(extent: Extent, step: MiniBatchStep, begins: np.ndarray, window: int | None) -> Extent:
    """Hide the tokens of an extent outside the new tokens' windows. ``begins`` [B, n]: positions of first tokens."""
    if window is None:
        return extent
    return extent._replace(hidden=np.clip((step.context + 1 - window)[:, None] - begins, 0, BLOCK_TOKENS))


def _strides(state: State, segment: Segment) -> tuple[int, int, int]:
    """Return ``token_stride``, ``head_stride`` and ``values`` of an ``Extent`` of a segment's blocks."""
    d, width = state.shape.head_dim, state.shape.kv_width
    if state.buffers.head_major(segment):
        return d, BLOCK_TOKENS * d, BLOCK_TOKENS * width // 2
    return width, d, width // 2


def step_extents(state: State, step: MiniBatchStep, window: int | None, to_device: ToDevice) -> StepExtents:
    """Return where a decode step's keys and values are. ``window``: the layers' window, if it hides tokens."""
    shape, batch, blocks_of = state.shape, len(step.requests), _blocks(state, step)
    d, width, row = shape.head_dim, shape.kv_width, shape.kv_width + shape.query_width
    first = np.arange(batch, dtype=np.int64)[:, None] * step.computed_width
    own = Extent((first + step.recomputed_width) * row, np.ones(batch, dtype=np.int64), 0, d, width // 2)
    segments: list[tuple[Segment | None, Extent]] = [(None, own)]
    if step.recomputed is not None and step.recomputed_width:  # whole blocks
        begins = np.arange(0, step.recomputed_width, BLOCK_TOKENS)
        prefix = Extent((first + begins) * row, step.recomputed, row, d, width // 2)
        segments.append((None, _in_window(prefix, step, begins, window)))
    for segment in step.segments:
        if segment.max_tokens:
            segments.append((segment, _extent(state, step, segment, blocks_of, window)))
    if step.commons:
        segments += _shared_extents(state, step, _alone(state, step, window), blocks_of, window)
    of_segments, extents = [segment for segment, _ in segments], [extent for _, extent in segments]
    layout = _layout(state, extents, of_segments, shape.queries_per_key * d, to_device, on_host(state))
    return StepExtents(of_segments, layout, [] if window else _together(state, step, blocks_of, to_device))


def _extent(
    state: State, step: MiniBatchStep, segment: Segment, blocks_of: dict[int, np.ndarray], window: int | None
) -> Extent:
    """Return the extent of a segment of the requests' own blocks."""
    elements = blocks_of[id(segment)] * BLOCK_TOKENS * state.shape.kv_width
    begins = _begins(state, segment, elements.shape[1]) if window else elements
    extent = Extent(elements, segment.num_tokens.astype(np.int64), *_strides(state, segment))
    return _in_window(extent, step, begins, window)


def _together(state: State, step: MiniBatchStep, blocks_of: dict[int, np.ndarray], to_device: ToDevice) -> list[Group]:
    """Return the shared prefixes to which requests attend together."""
    block, parts = BLOCK_TOKENS * state.shape.kv_width, []
    for common in commons_together(step, state.wave):
        segments = tuple(segment for segment in common.segments if segment.max_tokens)
        extents = [
            Extent(blocks_of[id(s)] * block, s.num_tokens.astype(np.int64), *_strides(state, s)) for s in segments
        ]
        of_head = common.rows.shape[1] * state.shape.queries_per_key * state.shape.head_dim
        layout = _layout(state, extents, segments, of_head, to_device, on_host(state))
        parts.append(Group(to_device(common.rows), segments, layout))
    return parts
