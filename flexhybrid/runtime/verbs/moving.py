"""Verbs of the links, the disk and the host's cores: they load, store, and write rows to blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.schedule.steps import Store
from flexhybrid.core.task import Task
from flexhybrid.runtime.executor import State
from flexhybrid.runtime.kernels import compiled
from flexhybrid.runtime.kernels.compiled import Share
from flexhybrid.runtime.storage.disk import DiskSpace

# ---- weights


def read_weights(state: State, task: Task) -> None:
    """Read a part of a layer's disk bytes to the host's staging buffer."""
    part, weights = task.payload, state.weights
    first = weights.placed_of(task.layer).disk_from
    low, high = part.disk_start - first, part.disk_end - first
    disk_space(weights.disk).read([(weights.disk_starts[task.layer] + low, state.slots.staging[part.slot][low:high])])


def load_weights(state: State, task: Task) -> None:
    """Load a part of a layer's streamed bytes from the host and its staging buffer to a device slot."""
    part, weights = task.payload, state.weights
    slot, (_, first, disk_first) = state.slots.device[part.slot], weights.placed_of(task.layer)
    if part.end > part.start:
        source = weights.on_host[task.layer][part.start - first : part.end - first]
        state.copies.copy_h2d(slot[part.start - first : part.end - first], source)
    if part.disk_end > part.disk_start:
        low, high = part.disk_start - disk_first, part.disk_end - disk_first
        source = state.slots.staging[part.slot][low:high]
        state.copies.copy_h2d(slot[part.disk_start - first : part.disk_end - first], source)


# ---- cached context


def read_cache(state: State, task: Task, representation: str) -> None:
    """Read the disk's blocks of a mini-batch to the host's staging buffer."""
    step, reads = task.payload.step, []
    for segment in step.of(representation):
        if segment.tier != "disk":
            continue
        pool = state.buffers.disk_pools[segment.space]
        target = state.buffers.read_region(step, segment, task.payload.slot)
        for row, rows, column, first, stride, blocks in segment.runs:
            for i in range(rows):
                place = target[row + i, column : column + blocks].view(-1).view(torch.uint8)
                reads.append((pool.offset(task.layer, first + i * stride), place))
    disk_space(state.buffers.disk).read(reads)


def load_cache(state: State, task: Task, representation: str) -> None:
    """Load the blocks of a mini-batch from the host and its staging buffer to the device."""
    step, slot = task.payload.step, task.payload.slot
    for segment in step.of(representation):
        if segment.tier == "device":
            continue
        target = state.buffers.loaded_region(step, segment, slot)
        if segment.tier == "host":
            state.copies.copy_blocks_h2d(target, state.buffers.pools[segment.space][task.layer], segment.runs)
        else:
            staged, width = state.buffers.staged_blocks(step, segment, slot), target.shape[1]
            runs = tuple(r._replace(first=r.row * width + r.column, stride=width) for r in segment.runs)
            state.copies.copy_blocks_h2d(target, staged, runs)  # without the padding


# ---- new rows


def store_cache(state: State, task: Task, representation: str) -> None:
    """Store the new tokens' rows in the host's staging buffer, and their places if a selection chooses them."""
    slot, buffers = task.payload.slot, state.buffers
    for store in task.payload.step.stores:
        if store.representation == representation and store.tier != "device":
            rows = len(store.rows)
            state.copies.copy_d2h(buffers.landed(store.space, slot, rows), buffers.staged(store.space, slot, rows))
    if state.selection.chooses_places(task.payload.step):
        places = state.selection.places[slot]
        state.copies.copy_d2h(buffers.place_strip[slot, : len(places)], places)


def scatter(state: State, task: Task) -> None:
    """Write rows from the host's staging buffers to the host's blocks. It uses numba or numpy, but no torch threads."""
    slot = task.payload.slot
    for store in task.payload.step.stores:
        if store.tier == "host":
            put_rows(state, task, store, state.buffers.landed(store.space, slot, len(store.rows)))


def put_rows(state: State, task: Task, store: Store, rows: torch.Tensor) -> None:
    """Write new rows [n, row] to their places in a layer of a host pool."""
    pool = state.buffers.pools[store.space][task.layer]
    if state.buffers.head_major(store) and state.selection.chooses_places(task.payload.step):
        put_heads(pool, rows, state.cells(store, state.buffers.place_strip[task.payload.slot]), state.host_share)
    else:
        put_tokens(pool, rows, store.blocks, store.offsets, state.host_share)


def put_tokens(
    pool: torch.Tensor, rows: torch.Tensor, blocks: np.ndarray, offsets: np.ndarray, share: Share = map
) -> None:
    """Write rows [n, row] to ``offsets`` [n] of ``blocks`` [n] in a pool, [·, 16, row] or head-major [·, 2, G, 16, d].

    The pool is contiguous. ``share`` divides rows among threads, because a GPU's link is faster than one thread.
    """
    if not compiled.has_numba():
        by_head = (slice(None),) * (pool.dim() - 3)  # keys and values, heads
        as_numpy(pool)[blocks, *by_head, offsets] = as_numpy(rows).reshape(-1, *pool.shape[1:-2], pool.shape[-1])
        return
    from flexhybrid.runtime.kernels.rows_numba import Pieces, Rows, copy_rows

    piece = pool.shape[-1] * pool.itemsize
    count = 1 if pool.dim() == 3 else pool.shape[1] * pool.shape[2]
    to = Rows(pool, piece, blocks.astype(np.int64) * (count * BLOCK_TOKENS) + offsets)
    from_ = Rows(rows, rows.stride(0) * rows.itemsize)
    copy_rows(len(rows), to, from_, Pieces(piece, count, BLOCK_TOKENS * piece, piece), share)


def put_heads(pool: torch.Tensor, rows: torch.Tensor, cells: tuple[Any, ...], share: Share = map) -> None:
    """Write keys and values of each head of rows [n, 2·G·d] to separate cells of a pool [·, 2, G, 16, d].

    ``cells``: blocks, heads and offsets, which broadcast to [n, G].
    """
    blocks, heads, offsets = cells
    groups, d = pool.shape[2], pool.shape[-1]
    if not compiled.has_numba():
        new = as_numpy(rows).reshape(-1, 2, groups, d)
        as_numpy(pool)[blocks, :, heads, offsets] = new.transpose(0, 2, 1, 3)
        return
    from flexhybrid.runtime.kernels.rows_numba import Pieces, Rows, copy_rows

    piece = d * pool.itemsize
    to = Rows(pool, piece, (blocks.astype(np.int64) * (2 * groups) + heads) * BLOCK_TOKENS + offsets)
    from_ = Rows(rows, rows.itemsize, np.arange(len(rows))[:, None] * rows.stride(0) + np.arange(groups) * d)
    pieces = Pieces(piece, 2, groups * BLOCK_TOKENS * piece, groups * piece)
    copy_rows(len(rows) * groups, to, from_, pieces, share)


def take_rows(source: torch.Tensor, rows: np.ndarray, target: torch.Tensor, share: Share = map) -> None:
    """Copy source[rows] to ``target``. Both are contiguous, [·, n]."""
    if not compiled.has_numba():
        # With "clip", numpy writes to the target directly and releases the interpreter's lock meanwhile.
        np.take(as_numpy(source), rows, axis=0, out=as_numpy(target), mode="clip")
        return
    from flexhybrid.runtime.kernels.rows_numba import Pieces, Rows, copy_rows

    num_bytes = source.shape[-1] * source.itemsize
    copy_rows(len(rows), Rows(target, num_bytes), Rows(source, num_bytes, rows), Pieces(num_bytes), share)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a numpy view of a CPU tensor. 16-bit floats become integers, because numpy has no bfloat16."""
    return (tensor.view(torch.int16) if tensor.element_size() == 2 else tensor).numpy()


def write_cache(state: State, task: Task, representation: str) -> None:
    """Write the new tokens' rows from the host's staging buffers to blocks on the disk."""
    slot, writes = task.payload.slot, []
    for store in task.payload.step.stores:
        if store.representation != representation or store.tier != "disk":
            continue
        pool, strip = state.buffers.disk_pools[store.space], state.buffers.strips[store.space][slot]
        place = store.blocks * BLOCK_TOKENS + store.offsets
        starts = np.flatnonzero(np.r_[True, np.diff(place) != 1])  # one write for neighbouring tokens
        for start, end in zip(starts, np.r_[starts[1:], len(place)], strict=True):
            offset = pool.offset(task.layer, int(store.blocks[start]), int(store.offsets[start]))
            writes.append((offset, strip[start:end].view(-1).view(torch.uint8)))
    disk_space(state.buffers.disk).write(writes)


def disk_space(space: DiskSpace | None) -> DiskSpace:
    """Return the space. Raise ValueError if there is none."""
    if space is None:
        raise ValueError("a task needs disk space, but the policy has none")
    return space


# ---- hidden states, queries, tokens


def load_hidden(state: State, task: Task) -> None:
    """Load the hidden states of a mini-batch from the host to the device."""
    source = state.hidden.host_rows(task)
    state.copies.copy_h2d(state.hidden.slot(task, len(source)), source)


def store_hidden(state: State, task: Task) -> None:
    """Store the hidden states of a mini-batch on the host."""
    state.copies.copy_d2h(state.hidden.host_rows(task), state.hidden.of(task))


def store_query(state: State, task: Task) -> None:
    """Store new keys, values and queries on the host, for attention on the host."""
    kvq, requests = state.kvq[task.payload.slot], len(task.payload.step.requests)
    if len(kvq) > requests:  # rows of a recomputed prefix come before each request's new one
        kvq = kvq.unflatten(0, (requests, -1))[:, -1].contiguous()
    state.copies.copy_d2h(state.buffers.query_strip[task.payload.slot, : len(kvq)], kvq)


def load_attended(state: State, task: Task) -> None:
    """Load the output of attention on the host to the device."""
    slot, rows = task.payload.slot, len(task.payload.step.requests)
    state.copies.copy_h2d(state.buffers.attended[slot, :rows], state.buffers.out_strip[slot, :rows])


def store_out(state: State, task: Task) -> None:
    """Store the sampled tokens, and the log probabilities that requests ask for, on the host."""
    target = state.sampled.on_host(task.payload.step)
    tokens = state.sampled.on_device[task.mini_batch][: len(target)]
    state.copies.copy_d2h(target, tokens)
    state.logprobs.store(task.payload.step)
    state.masks.advance(task.payload.step, tokens)
