"""Verbs that assemble contexts in the attention buffer, and verbs that attend, on the device or on the host."""

from __future__ import annotations

import torch

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.schedule.steps import Segment
from flexhybrid.core.task import Task
from flexhybrid.runtime.buffers import Context, SharedPart
from flexhybrid.runtime.executor import State
from flexhybrid.runtime.kernels import attention
from flexhybrid.runtime.kernels.attention import Assembled, SlidingWindow, attend_in_window, split_heads
from flexhybrid.runtime.kernels.shared_attention import add_shared, attend_and_sum, attend_in_parts, grouped, merge
from flexhybrid.runtime.verbs.attending_in_place import add_shared_in_place, attend_in_place, attend_part_on_host
from flexhybrid.runtime.verbs.moving import put_rows

#: gather(tensor, [index], out=out) writes ``tensor[index]`` to ``out``, at any strides.
gather = torch.ops.aten.index.Tensor_out
Targets = tuple[torch.Tensor, torch.Tensor]  #: keys and values [B, G, T, d] of the attention buffer
WIDE = (torch.complex128, torch.int64, torch.int32, torch.int16)  #: dtypes of 16, 8, 4 and 2 bytes


def assemble(state: State, task: Task) -> None:
    """Assemble keys and values, head-major: all segments, then the recomputed prefix, then the new tokens."""
    step, batch = task.payload.step, len(task.payload.step.requests)
    targets = state.buffers.attention_views(batch, step.attention_tokens)
    rows = {"act": 0, "plain": 0}  # number of copied rows of recomputed and of dequantized KV
    copy_own(state, task, targets, _copy_segments(state, task, step.segments, targets, rows))
    before, commons, tensors = batch * step.attention_tokens, [], state.tensors(task)
    places = tensors.places.common if tensors.places else [None] * len(step.commons)
    for common, of_step, columns in zip(step.commons, tensors.common_rows, places, strict=True):
        views = state.buffers.attention_views(len(common.rows), common.tokens, before)
        _copy_segments(state, task, common.segments, views, rows)
        commons.append(SharedPart(of_step, *views, columns))
        before += len(common.rows) * common.tokens
    state.context = Context(*targets, tensors.mask_B11T, tuple(commons))


def _copy_segments(
    state: State, task: Task, segments: tuple[Segment, ...], targets: Targets, rows: dict[str, int]
) -> int:
    """Copy segments to the targets, one after another from column 0; return the next column."""
    step, shape, slot, column = task.payload.step, state.shape, task.payload.slot, 0
    for segment in segments:
        width = segment.max_tokens
        if not width:
            continue
        size = segment.block_table.size * BLOCK_TOKENS
        if segment.representation == "act":
            generated = state.buffers.generated[rows["act"] : rows["act"] + size]
            rows["act"] += size
            if segment.in_line:
                blocks = generated.view(-1, BLOCK_TOKENS, 2, shape.num_kv_heads, shape.head_dim).permute(0, 2, 3, 1, 4)
                gather_blocks(blocks, state.tensors(task).buffer_tables[id(segment)], targets, column, width)
            else:
                copy_to_columns(generated, targets, column, width, shape)
        elif state.buffers.packed("kv"):
            plain = state.buffers.plain["kv"][rows["plain"] : rows["plain"] + size]
            copy_to_columns(plain, targets, column, width, shape)
            rows["plain"] += size
        elif not state.buffers.head_major(segment):
            copy_to_columns(state.buffers.loaded_region(step, segment, slot), targets, column, width, shape)
        elif segment.tier == "host":
            blocks = state.buffers.loaded_region(step, segment, slot)
            blocks = blocks.unflatten(2, (2, shape.num_kv_heads, BLOCK_TOKENS, shape.head_dim))
            _copy_blocks(blocks, targets, column, width)
        else:
            table = state.tensors(task).block_tables[id(segment)]
            gather_blocks(state.buffers.pools[segment.space][task.layer], table, targets, column, width)
        column += width
    return column


def copy_own(state: State, task: Task, targets: Targets, column: int) -> None:
    """Copy the computed tokens' own keys and values to the columns from ``column`` on."""
    for own, target in zip(split_heads(state.shape, state.kvq[task.payload.slot]), targets, strict=False):
        target[:, :, column:].copy_(own.view(len(target), -1, *own.shape[1:]).transpose(1, 2))


def copy_to_columns(rows: torch.Tensor, targets: Targets, column: int, width: int, shape: ModelShape) -> None:
    """Copy rows [B · columns, 2·G·d] to the columns [column, column + width) of the targets."""
    grid = _widened(rows.view(len(targets[0]), -1, 2, shape.num_kv_heads, shape.head_dim))[:, :width]
    for half, target in enumerate(targets):
        _widened(target)[:, :, column : column + width].copy_(grid[:, :, half].transpose(1, 2))


def _copy_blocks(blocks: torch.Tensor, targets: Targets, column: int, width: int) -> None:
    """Copy blocks [B, n, 2, G, 16, d] to the columns [column, column + width) of the targets."""
    full, tail = divmod(width, BLOCK_TOKENS)
    blocks = _widened(blocks)
    for half, target in enumerate(targets):
        full_columns, tail_columns = _windows(_widened(target), column, full, tail)
        if full:
            full_columns.copy_(blocks[:, :full, half])
        if tail:
            tail_columns.copy_(blocks[:, full, half, :, :tail])


def gather_blocks(pool: torch.Tensor, table: torch.Tensor, targets: Targets, column: int, width: int) -> None:
    """Copy a pool's blocks [·, 2, G, 16, d], by a table [B, n], to the columns [column, column + width) of the targets.

    One operation copies all requests. One call per request took five times as long.
    """
    full, tail = divmod(width, BLOCK_TOKENS)
    pool = _widened(pool)
    for half, target in enumerate(targets):
        full_columns, tail_columns = _windows(_widened(target), column, full, tail)
        if full:
            gather(pool[:, half], [table[:, :full]], out=full_columns)
        if tail:
            gather(pool[:, half, :, :tail], [table[:, full]], out=tail_columns)


def _windows(target: torch.Tensor, column: int, full: int, tail: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a target [B, G, T, d] from a column on: ``full`` blocks [B, full, G, 16, d], ``tail`` tokens."""
    end = column + full * BLOCK_TOKENS
    blocks = target[:, :, column:end].unflatten(2, (full, BLOCK_TOKENS)).transpose(1, 2)
    return blocks, target[:, :, end : end + tail]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with the largest possible elements. A gather, or a GPU's strided copy, moves single elements."""
    row_bytes = tensor.shape[-1] * tensor.element_size()
    return tensor.view(next(dtype for dtype in WIDE if row_bytes % dtype.itemsize == 0))


def attend(state: State, task: Task) -> None:
    """Attend with one new token per request to its context: [B, H·d].

    Shared prefixes are left to ``attend_shared``, the host's part to ``merge_attended``.
    """
    step, (keys, values, mask, commons) = task.payload.step, state.context
    if step.in_place:
        attend_in_place(state, task)
        return
    rule, width = state.score_rule(task), state.window_of(task)
    mask = state.tensors(task).window_masks.get(width, mask) if width else mask
    merges = "merge_attended" in task.payload.works
    if commons or merges or rule.changes_scores:
        state.weighed = attend_and_sum(_grouped(state, task), keys, values, mask, rule)
        if not (commons or merges):
            state.finish_attention(task)
    elif state.selection.weighs(task):
        state.attended, weights = attention.attend_and_weigh(
            _new_queries(state, task)[:, 0], Assembled(keys, values, mask)
        )
        state.selection.after_attend(task, weights)
    else:
        path = state.attention["decode"]
        context = Assembled(keys, values, mask)
        state.attended = path(_new_queries(state, task), context, rule.scaling).flatten(0, 1)


def attend_shared(state: State, task: Task) -> None:
    """Add the new tokens' attention to shared prefixes: [B, H·d]."""
    if task.payload.step.in_place:
        add_shared_in_place(state, task)
    else:
        commons, window = state.context.commons, _window(state, task)
        add_shared(state.weighed, _grouped(state, task), commons, state.score_rule(task), window)
    if "merge_attended" not in task.payload.works:
        state.finish_attention(task)


def attend_chunk(state: State, task: Task) -> None:
    """Attend with a chunk of prompts to the cached tokens before it and to itself: [B · N, H·d]."""
    (keys, values, mask, commons), new = state.context, _new_queries(state, task)
    context = Assembled(keys, values, mask)
    rule, window = state.score_rule(task), _window(state, task)
    path = state.attention["decode" if task.payload.step.width == 1 else "chunk"]
    if commons or rule.changes_scores:
        attended = attend_in_parts(new, context, commons, rule, window)
    elif window:
        attended = attend_in_window(path, new, context, window, rule.scaling)
    else:
        attended = path(new, context, rule.scaling)
    state.attended = attended.flatten(0, 1)


def _window(state: State, task: Task) -> SlidingWindow | None:
    """Return the new tokens' window over the attention buffer's columns; None if it hides nothing."""
    places = state.tensors(task).places
    width = state.window_of(task)
    return SlidingWindow(width, places.new_BN, places.columns_BT) if width and places else None


def _new_queries(state: State, task: Task) -> torch.Tensor:
    """Return the queries of the new tokens, [B, N, H, d]."""
    step, shape = task.payload.step, state.shape
    query = state.kvq[task.payload.slot][:, shape.kv_width :].unflatten(1, (shape.num_heads, shape.head_dim))
    return query.unflatten(0, (len(step.requests), -1))[:, step.recomputed_width :]


def _grouped(state: State, task: Task) -> torch.Tensor:
    return grouped(_new_queries(state, task), state.shape.num_kv_heads)


def attend_recomputed(state: State, task: Task) -> None:
    """Attend with the recomputed prefix to itself. Its rows come before the new tokens' rows."""
    step, batch = task.payload.step, len(task.payload.step.requests)
    parts = _over_themselves(state, task, slice(0, step.recomputed_width)), state.attended.view(batch, step.width, -1)
    out = state.graphs.attended(state, step, whole=True) if state.graphs else None
    rows = torch.cat(parts, dim=1, out=None if out is None else out.unflatten(0, (batch, -1)))
    state.attended = rows.flatten(0, 1)


def attend_prefill(state: State, task: Task) -> None:
    """Attend with the tokens of prompts to themselves."""
    state.attended = _over_themselves(state, task, slice(None)).flatten(0, 1)


def _over_themselves(state: State, task: Task, tokens: slice) -> torch.Tensor:
    """Return the causal attention of these columns of the computed grid: [B, columns, H·d]."""
    grid = state.kvq[task.payload.slot].unflatten(0, (len(task.payload.step.requests), -1))[:, tokens]
    keys, values, queries = split_heads(state.shape, grid)
    context, rule = Assembled(keys.transpose(1, 2), values.transpose(1, 2)), state.score_rule(task)
    window = None
    if width := state.window_of(task):
        places = torch.arange(grid.shape[1], device=grid.device, dtype=torch.int64)[None]
        window = SlidingWindow(width, places, places)
    if rule.changes_scores:
        return attend_in_parts(queries, context, (), rule, window)
    if window:
        return attend_in_window(state.attention["chunk"], queries, context, window, rule.scaling)
    return state.attention["prompt"](queries, context, rule.scaling)


def attend_host(state: State, task: Task) -> None:
    """Write new rows to the host's KV blocks or the disk's staging buffer; then attend to each request's context.

    If the device attends too (``merge_attended``), attend to the host's part only.
    """
    if "merge_attended" in task.payload.works:
        attend_part_on_host(state, task)
        return
    step, slot, width = task.payload.step, task.payload.slot, state.shape.kv_width
    for store in () if state.shape.borrows(task.layer) else step.stores:
        rows = state.buffers.query_strip[slot, : len(step.requests), :width]
        if len(store.rows) < len(rows):
            rows = rows[torch.from_numpy(store.rows)]
        if store.tier == "host":
            put_rows(state, task, store, rows)
        else:
            state.buffers.landed(store.space, slot, len(rows)).copy_(rows)
    attend_in_place(state, task)
    if not step.commons:
        _give_attended(state, task)


def attend_host_shared(state: State, task: Task) -> None:
    """Add attention to shared prefixes on the host."""
    add_shared_in_place(state, task)
    _give_attended(state, task)


def merge_attended(state: State, task: Task) -> None:
    """Combine the host's part of the attention with the device's: [B, H·d]."""
    attended, width = state.weighed[0], state.shape.query_width
    part = state.buffers.attended[task.payload.slot, : len(attended)]
    merge(state.weighed, (part[:, :width].view_as(attended), part[:, width:].view(attended.shape[:3])))
    state.finish_attention(task)


def _give_attended(state: State, task: Task) -> None:
    """Copy the host's attention output to the buffer that ``load_attended`` reads."""
    attended = state.weighed[0]
    state.score_rule(task).with_sinks(state.weighed)
    state.buffers.out_strip[task.payload.slot, : len(attended)].copy_(attended.flatten(1))
