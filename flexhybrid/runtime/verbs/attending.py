"""Verbs that bring a context together and attend to it, on the device or on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from flexhybrid.core.context.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.core.schedule.steps import block_runs
from flexhybrid.core.task import Task
from flexhybrid.runtime.buffers import Context
from flexhybrid.runtime.kernels import attention
from flexhybrid.runtime.verbs.moving import put_rows

if TYPE_CHECKING:
    from flexhybrid.runtime.executor import Executor

#: tensor, [index], out: ``tensor[index]``, written where ``out`` lies, whatever its strides
gather = torch.ops.aten.index.Tensor_out
WIDE = (torch.complex128, torch.int64, torch.int32, torch.int16)  #: of 16, 8, 4 and 2 bytes


@torch.inference_mode()
def assemble(ex: Executor, task: Task) -> None:
    """Lay keys and values of all segments side by side, head-major; then the recomputed prefix; then the new tokens."""
    if ex.looks_at_choice(task):
        _assemble_chosen(ex, task)
        return
    step, shape, slot = task.payload.step, ex.shape, task.payload.slot
    groups, d, batch = shape.num_kv_heads, shape.head_dim, len(step.requests)
    targets = ex.buffers.attention_views(batch, step.attention_tokens)
    ex.context = Context(*targets, ex.tensors(task).mask_B11T)
    column, generated, plain = 0, 0, 0
    for segment in step.segments:
        width, size = segment.max_tokens, batch * segment.buffer_blocks * BLOCK_TOKENS
        if not width:
            continue
        if segment.representation == "act":
            _lay_rows(ex.buffers.generated[generated : generated + size], targets, column, width, shape)
            generated += size
        elif ex.buffers.packed("kv"):
            _lay_rows(ex.buffers.plain_kv[plain : plain + size], targets, column, width, shape)
            plain += size
        elif not ex.buffers.head_major(segment):
            _lay_rows(ex.buffers.loaded_region(step, segment, slot), targets, column, width, shape)
        elif segment.tier == "host":
            blocks = ex.buffers.loaded_region(step, segment, slot)
            blocks = blocks.view(batch, segment.buffer_blocks, 2, groups, BLOCK_TOKENS, d)
            _lay_blocks(blocks, targets, column, width)
        else:
            pool, table = ex.buffers.pools[segment.space][task.layer], ex.tensors(task).block_tables[segment.space]
            gather_blocks(pool, table, targets, column, width)
        column += width
    _lay_own(ex, task, targets, column)


def _lay_own(ex: Executor, task: Task, targets, column: int) -> None:
    """The computed tokens' own keys and values -> the columns from ``column`` on."""
    own = ex.kvq[task.payload.slot][:, : ex.shape.kv_width]
    own = own.view(len(targets[0]), -1, 2, ex.shape.num_kv_heads, ex.shape.head_dim)
    for part, target in enumerate(targets):
        target[:, :, column:].copy_(own[:, :, part].transpose(1, 2))


def _assemble_chosen(ex: Executor, task: Task) -> None:
    """Lay the tokens that a selection fetched side by side, representation by representation, each request's padded to
    the longest; then the new tokens."""
    step, slot, groups = task.payload.step, task.payload.slot, ex.shape.num_kv_heads
    if ex.buffers.each_head("kv") and step.of("kv"):  # packed and recomputed ones were taken over before
        ex.chosen["kv"] = ex.fetched["kv", slot]
    parts = [ex.chosen[segment.representation] for segment in step.segments if segment.max_tokens]
    targets = ex.buffers.attention_views(len(step.requests), sum(part.most for part in parts) + 1)
    column, hidden = 0, []
    for part in parts:
        columns = slice(column, column + part.most)
        each_head = ex.buffers.each_head(part.representation)
        rows = ex.to_device(part.padded_rows(groups if each_head else 1).reshape(-1))
        if each_head:
            for loaded, target in zip(ex.buffers.loaded_rows("kv", slot, part.tokens), targets, strict=True):
                target[:, :, columns].copy_(loaded.index_select(0, rows).view(target[:, :, columns].shape))
        else:
            whole = ex.buffers.generated if part.representation == "act" else ex.buffers.plain_kv
            _lay_rows(whole.index_select(0, rows), targets, column, part.most, ex.shape)
        hidden.append(np.arange(part.most) >= part.counts_B[:, None])
        column += part.most
    _lay_own(ex, task, targets, column)
    hidden = np.pad(np.concatenate(hidden, axis=1), ((0, 0), (0, 1)))  # the new token sees itself
    ex.context = Context(*targets, ex.mask_of(hidden) if hidden.any() else None)


def _lay_rows(rows: torch.Tensor, targets, column: int, width: int, shape) -> None:
    """Rows [B · columns, 2·G·d], token by token -> columns [column, column + width) of keys and values."""
    grid = _widened(rows.view(len(targets[0]), -1, 2, shape.num_kv_heads, shape.head_dim))[:, :width]
    for part, target in enumerate(targets):
        _widened(target)[:, :, column : column + width].copy_(grid[:, :, part].transpose(1, 2))


def _lay_blocks(blocks: torch.Tensor, targets, column: int, width: int) -> None:
    """blocks [B, n, 2, G, 16, d] -> columns [column, column + width) of keys and values."""
    full, rest = divmod(width, BLOCK_TOKENS)
    blocks = _widened(blocks)
    for part, target in enumerate(targets):
        whole, partial = _windows(_widened(target), column, full, rest)
        if full:
            whole.copy_(blocks[:, :full, part])
        if rest:
            partial.copy_(blocks[:, full, part, :, :rest])


def gather_blocks(pool: torch.Tensor, table: torch.Tensor, targets, column: int, width: int) -> None:
    """Blocks of a pool [·, 2, G, 16, d], as a table [B, n] names them -> columns [column, column + width) of keys and
    values. One operation for all requests, however their blocks lie: a call a request took five times as long."""
    full, rest = divmod(width, BLOCK_TOKENS)
    pool = _widened(pool)
    for part, target in enumerate(targets):
        whole, partial = _windows(_widened(target), column, full, rest)
        if full:
            gather(pool[:, part], [table[:, :full]], out=whole)
        if rest:
            gather(pool[:, part, :, :rest], [table[:, full]], out=partial)


def _windows(target: torch.Tensor, column: int, full: int, rest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a target [B, G, T, d] from a column on: its next ``full`` blocks [B, full, G, 16, d] and the ``rest`` tokens
    after them [B, G, rest, d]."""
    end = column + full * BLOCK_TOKENS
    whole = target[:, :, column:end].unflatten(2, (full, BLOCK_TOKENS)).transpose(1, 2)
    return whole, target[:, :, end : end + rest]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in the largest elements that its rows divide into: a gather, and a GPU's copy between strides,
    moves one at a time."""
    row_bytes = tensor.shape[-1] * tensor.element_size()
    return tensor.view(next(dtype for dtype in WIDE if row_bytes % dtype.itemsize == 0))


@torch.inference_mode()
def attend(ex: Executor, task: Task) -> None:
    """The new tokens over their whole context: [B, N, H·d]."""
    step, shape = task.payload.step, ex.shape
    batch = len(step.requests)
    keys, values, mask = ex.context
    query = ex.kvq[task.payload.slot][:, shape.kv_width :].view(batch, -1, shape.num_heads, shape.head_dim)
    new = query[:, step.recomputed_width :]
    if ex.heavy_hitters or _counts_looks(ex, task):
        query = new.reshape(batch, shape.num_heads, shape.head_dim)
        attended, weights = attention.attend_and_weigh(query, keys, values, mask)
        if ex.heavy_hitters:
            ex.weights_BGT = weights.float().sum(2)
        else:
            guess, places = ex.tensors(task).guess, ex.places[task.payload.slot]
            ex.speculation.looked_at(task.layer, step, guess, weights, places)
    elif step.width == 1:
        attended = attention.attend_decode(new.reshape(batch, shape.num_heads, shape.head_dim), keys, values, mask)
    else:
        attended = attention.attend_chunk(new, keys, values, mask).view(batch * step.width, -1)
    ex.attended = attended


def _counts_looks(ex: Executor, task: Task) -> bool:
    """Whether a layer looks at every token, and must remember at which it needed to: its victims hang on that."""
    counts = ex.speculation is not None and ex.speculation.uses is not None
    return counts and not ex.looks_at_choice(task) and not task.payload.step.prefill


@torch.inference_mode()
def attend_recomputed(ex: Executor, task: Task) -> None:
    """The tokens of the recomputed prefix over themselves; its rows come before the new tokens'."""
    step, batch = task.payload.step, len(task.payload.step.requests)
    prefix = _over_themselves(ex, task, slice(0, step.recomputed_width))
    ex.attended = torch.cat([prefix, ex.attended.view(batch, step.width, -1)], dim=1).flatten(0, 1)


@torch.inference_mode()
def attend_prefill(ex: Executor, task: Task) -> None:
    """The tokens of a prompt over themselves."""
    ex.attended = _over_themselves(ex, task, slice(None)).flatten(0, 1)


def _over_themselves(ex: Executor, task: Task, tokens: slice) -> torch.Tensor:
    """Causal attention of these columns of the computed grid: [B, columns, H·d]."""
    shape, batch = ex.shape, len(task.payload.step.requests)
    grid = ex.kvq[task.payload.slot].view(batch, -1, shape.kv_width + shape.query_width)[:, tokens]
    own = grid[..., : shape.kv_width].unflatten(-1, (2, shape.num_kv_heads, shape.head_dim))
    query = grid[..., shape.kv_width :].unflatten(-1, (shape.num_heads, shape.head_dim))
    return attention.attend_prefill(query, own[:, :, 0], own[:, :, 1])


@torch.inference_mode()
def rank(ex: Executor, task: Task) -> None:
    """Which tokens stay: after the prompt the best go to staging; later the worst one's place is the new token's."""
    step, shape, slot = task.payload.step, ex.shape, task.payload.slot
    if not step.prefill:
        ex.places[slot] = ex.heavy_hitters.after_token(task.layer, step, ex.weights_BGT)
        return
    groups, batch = shape.num_kv_heads, len(step.requests)
    kvq = ex.kvq[slot].view(batch, step.width, -1)
    own = kvq[..., : shape.kv_width].unflatten(-1, (2, groups, shape.head_dim))
    query = kvq[..., shape.kv_width :].unflatten(-1, (shape.num_heads, shape.head_dim))
    sums = attention.looked_at(query, own[:, :, 0], ex.to_device(step.new_tokens))
    chosen = ex.heavy_hitters.after_prompt(task.layer, step, sums)
    heads = torch.arange(groups, device=ex.device)
    for store in step.stores:
        request = ex.to_device(store.rows // step.width)[:, None]
        tokens = chosen[request, heads, ex.heavy_hitters.prompt_places(step, store)[:, None]]
        rows = own[request, tokens, :, heads]  # [rows, G, 2, d]
        ex.buffers.staging[store.space][slot, : len(rows)].copy_(rows.transpose(1, 2).flatten(1))


@torch.inference_mode()
def attend_host(ex: Executor, task: Task) -> None:
    """Attention beside the host's KV blocks: new rows into their blocks, then each request over its own."""
    step, shape, slot = task.payload.step, ex.shape, task.payload.slot
    batch = len(step.requests)
    strip = ex.buffers.query_strip[slot, :batch]
    (store,) = step.stores
    put_rows(ex, task, store, strip[:, : shape.kv_width].contiguous())
    query = strip[:, shape.kv_width :].view(batch, shape.num_heads, shape.head_dim)
    out = ex.buffers.out_strip[slot, :batch].view(batch, shape.num_heads, shape.head_dim)
    tokens = step.context + 1
    runs = block_runs(ex.wave.first_block[store.kind][step.requests], ceil_blocks(tokens), np.zeros_like(tokens))
    attention.attend_blocks(query, ex.buffers.pools[store.space][task.layer], runs, tokens, out, ex.host_share)


VERBS = {
    verb.__name__: verb
    for verb in (assemble, attend, attend_recomputed, attend_prefill, attend_host, rank)
}  # fmt: skip
