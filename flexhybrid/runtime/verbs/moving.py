"""Verbs of the links, the disk and the host's cores: loads, stores, and rows put into their blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from flexhybrid.core import work
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.schedule.steps import Store
from flexhybrid.core.task import Task

if TYPE_CHECKING:
    from flexhybrid.runtime.executor import Executor

# ---- weights


def read_weights(ex: Executor, task: Task) -> None:
    """disk -> staging: a slice of a layer's disk bytes."""
    piece, weights = task.payload, ex.weights
    low, high = piece.disk_start - weights.disk_from, piece.disk_end - weights.disk_from
    weights.disk.read([(task.layer * weights.disk_stride + low, ex.slots.staging[piece.slot][low:high])])


def load_weights(ex: Executor, task: Task) -> None:
    """host and staging -> device slot: a slice of a layer's streamed bytes."""
    piece, weights = task.payload, ex.weights
    slot, first = ex.slots.device[piece.slot], weights.streamed_from
    if piece.end > piece.start:
        source = weights.on_host[task.layer][piece.start - first : piece.end - first]
        ex.copies.copy_h2d(slot[piece.start - first : piece.end - first], source)
    if piece.disk_end > piece.disk_start:
        low, high = piece.disk_start - weights.disk_from, piece.disk_end - weights.disk_from
        source = ex.slots.staging[piece.slot][low:high]
        ex.copies.copy_h2d(slot[piece.disk_start - first : piece.disk_end - first], source)


# ---- cached context


def read_act(ex: Executor, task: Task) -> None:
    """disk -> staging: the blocks of a mini-batch's ACT."""
    _read(ex, task, "act")


def read_kv(ex: Executor, task: Task) -> None:
    """disk -> staging: the blocks of a mini-batch's KV."""
    _read(ex, task, "kv")


def _read(ex: Executor, task: Task, representation: str) -> None:
    step, pieces = task.payload.step, []
    for segment in step.of(representation):
        if segment.tier != "disk":
            continue
        pool = ex.buffers.disk_pools[segment.space]
        target = ex.buffers.read_region(step, segment, task.payload.slot)
        for row, rows, column, first, stride, blocks in segment.runs:
            for i in range(rows):
                place = target[row + i, column : column + blocks].view(-1).view(torch.uint8)
                pieces.append((pool.offset(task.layer, first + i * stride), place))
    ex.buffers.disk.read(pieces)


def load_act(ex: Executor, task: Task) -> None:
    """host and staging -> device: the blocks of a mini-batch's ACT."""
    _load(ex, task, "act")


def load_kv(ex: Executor, task: Task) -> None:
    """host and staging -> device: the blocks of a mini-batch's KV."""
    _load(ex, task, "kv")


def _load(ex: Executor, task: Task, representation: str) -> None:
    step, slot = task.payload.step, task.payload.slot
    if ex.looks_at_choice(task):
        _load_gathered(ex, task, representation)
        return
    for segment in step.of(representation):
        if segment.tier == "device":
            continue
        target = ex.buffers.loaded_region(step, segment, slot)
        if segment.tier == "host":
            ex.copies.copy_blocks_h2d(target, ex.buffers.pools[segment.space][task.layer], segment.runs)
        else:
            staged, width = ex.buffers.read_region(step, segment, slot), segment.buffer_blocks
            runs = tuple(r._replace(first=r.row * width + r.column, stride=width) for r in segment.runs)
            ex.copies.copy_blocks_h2d(target, staged.flatten(0, 1), runs)  # what was read: padding stays behind


def _load_gathered(ex: Executor, task: Task, representation: str) -> None:
    """The chosen tokens' rows, in one copy of as many bytes as there are."""
    key, buffers = (representation, task.payload.slot), ex.buffers
    fetched = ex.fetched[key] = ex.gathered[key]
    ex.copies.copy_h2d(buffers.loaded_rows(*key, fetched.tokens), buffers.gathered_rows(*key, fetched.tokens))
    element_bytes = getattr(ex.wave.stored, representation)
    ex.resolve(task, work.load_rows(ex.shape, element_bytes, representation, fetched.tokens))


# ---- new rows


def store_act(ex: Executor, task: Task) -> None:
    """device staging -> landing strip: the new tokens' ACT."""
    _store(ex, task, "act")


def store_kv(ex: Executor, task: Task) -> None:
    """device staging -> landing strip: the new tokens' KV."""
    _store(ex, task, "kv")


def _store(ex: Executor, task: Task, representation: str) -> None:
    slot = task.payload.slot
    for store in task.payload.step.stores:
        if store.representation == representation and store.tier != "device":
            rows = len(store.rows)
            ex.copies.copy_d2h(
                ex.buffers.strips[store.space][slot, :rows], ex.buffers.staging[store.space][slot, :rows]
            )
    if ex.chooses_places and not task.payload.step.prefill:
        places = ex.places[slot]
        ex.copies.copy_d2h(ex.buffers.place_strip[slot, : len(places)], places)


def scatter(ex: Executor, task: Task) -> None:
    """landing strips -> host blocks. numpy only: it holds no torch threads."""
    slot = task.payload.slot
    for store in task.payload.step.stores:
        if store.tier == "host":
            put_rows(ex, task, store, ex.buffers.strips[store.space][slot, : len(store.rows)])


def put_rows(ex: Executor, task: Task, store: Store, rows: torch.Tensor) -> None:
    """New rows [n, row] into their places in a layer of a host pool."""
    pool, rows = as_numpy(ex.buffers.pools[store.space][task.layer]), as_numpy(rows)
    if not ex.buffers.head_major(store):
        pool[store.blocks, store.offsets] = rows
        return
    rows = rows.reshape(-1, 2, ex.shape.num_kv_heads, ex.shape.head_dim)
    if ex.chooses_places and not task.payload.step.prefill:
        blocks, heads, offsets = ex.places_of(task, store, ex.buffers.place_strip[task.payload.slot])
        pool[blocks, :, heads, offsets] = rows.transpose(0, 2, 1, 3)
    elif task.payload.step.width > 1:
        _put_runs(pool, rows, store.blocks, store.offsets, ex.host_share)
    else:
        pool[store.blocks, :, :, store.offsets] = rows


#: Runs of tokens, a block each at most, that one of the host's threads puts away at a time.
RUNS_AT_A_TIME = 32


def _put_runs(
    pool: np.ndarray, rows: np.ndarray, blocks: np.ndarray, offsets: np.ndarray, share: Callable = map
) -> None:
    """pool[block, :, :, offset] = rows, by runs of neighbouring tokens: a prompt fills its blocks in order.

    ``share`` as in ``attention.attend_blocks``: a GPU's link brings a prompt's rows faster than one thread lays them.
    """
    starts = np.flatnonzero(np.r_[True, (blocks[1:] != blocks[:-1]) | (np.diff(offsets) != 1)])
    ends = np.r_[starts[1:], len(blocks)]

    def put(some: slice) -> None:
        for start, end in zip(starts[some], ends[some], strict=True):
            offset = offsets[start]
            pool[blocks[start], :, :, offset : offset + end - start] = rows[start:end].transpose(1, 2, 0, 3)

    for _ in share(put, (slice(at, at + RUNS_AT_A_TIME) for at in range(0, len(starts), RUNS_AT_A_TIME))):
        pass


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A numpy view of a CPU tensor; 16-bit floats as integers, since only bytes are moved."""
    return (tensor.view(torch.int16) if tensor.element_size() == 2 else tensor).numpy()


def write_act(ex: Executor, task: Task) -> None:
    """landing strip -> disk blocks: the new tokens' ACT."""
    _write(ex, task, "act")


def write_kv(ex: Executor, task: Task) -> None:
    """landing strip -> disk blocks: the new tokens' KV."""
    _write(ex, task, "kv")


def _write(ex: Executor, task: Task, representation: str) -> None:
    slot, pieces = task.payload.slot, []
    for store in task.payload.step.stores:
        if store.representation != representation or store.tier != "disk":
            continue
        pool, strip = ex.buffers.disk_pools[store.space], ex.buffers.strips[store.space][slot]
        place = store.blocks * BLOCK_TOKENS + store.offsets
        starts = np.flatnonzero(np.r_[True, np.diff(place) != 1])  # tokens that follow one another go as one piece
        for start, end in zip(starts, np.r_[starts[1:], len(place)], strict=True):
            offset = pool.offset(task.layer, int(store.blocks[start]), int(store.offsets[start]))
            pieces.append((offset, strip[start:end].view(-1).view(torch.uint8)))
    ex.buffers.disk.write(pieces)


# ---- hidden states, queries, tokens


def load_hidden(ex: Executor, task: Task) -> None:
    """host -> device: the hidden states of a mini-batch."""
    source = ex.host_hidden(task)
    target = ex.buffers.hidden_slots[task.payload.slot, : len(source)]
    ex.copies.copy_h2d(target, source)
    ex.hidden[ex.hidden_key(task)] = target


def store_hidden(ex: Executor, task: Task) -> None:
    """device -> host: the hidden states of a mini-batch."""
    ex.copies.copy_d2h(ex.host_hidden(task), ex.hidden[ex.hidden_key(task)])


def store_query(ex: Executor, task: Task) -> None:
    """device -> host: new keys, values and queries, for attention there."""
    kvq = ex.kvq[task.payload.slot]
    ex.copies.copy_d2h(ex.buffers.query_strip[task.payload.slot, : len(kvq)], kvq)


def load_attended(ex: Executor, task: Task) -> None:
    """host -> device: what attention there gave."""
    slot, rows = task.payload.slot, len(task.payload.step.requests)
    ex.copies.copy_h2d(ex.buffers.attended[slot, :rows], ex.buffers.out_strip[slot, :rows])


def store_out(ex: Executor, task: Task) -> None:
    """device -> host: the sampled tokens."""
    start, count = ex.log_start[task.mini_batch], len(task.payload.step.requests)
    ex.copies.copy_d2h(ex.token_log[task.iteration, start : start + count], ex.sampled[task.mini_batch][:count])


VERBS = {
    verb.__name__: verb
    for verb in (
        read_weights, load_weights, read_act, read_kv, load_act, load_kv, store_act, store_kv, scatter, write_act,
        write_kv, load_hidden, store_hidden, store_query, load_attended, store_out,
    )
}  # fmt: skip
