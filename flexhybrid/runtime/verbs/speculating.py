"""Verbs of a speculative selection: columns after the prompt, the next layer's tokens in the decode, and their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from flexhybrid.core import work
from flexhybrid.core.blocks import BLOCK_TOKENS
from flexhybrid.core.task import Task
from flexhybrid.runtime.verbs.moving import as_numpy

if TYPE_CHECKING:
    from flexhybrid.runtime.executor import Executor


@torch.inference_mode()
def speculate(ex: Executor, task: Task) -> None:
    """After the prompt: this layer's partial query weights and keys. In the decode: whom the next layer fetches."""
    step, shape, tensors = task.payload.step, ex.shape, ex.tensors(task)
    if not step.prefill:
        layer = task.layer + 1
        weights = ex.stored_weights[layer][0]
        ex.speculation.choose(layer, step, tensors.guess, ex.act, tensors.rotation_R, weights)
        return
    kvq = ex.kvq[task.payload.slot]
    keys = kvq[:, : shape.kv_width // 2].unflatten(-1, (shape.num_kv_heads, shape.head_dim))
    queries = kvq[:, shape.kv_width :].unflatten(-1, (shape.num_heads, shape.head_dim))
    ex.speculation.after_prompt(task.layer, step, ex.layer_weights(task), queries, keys)


def store_index(ex: Executor, task: Task) -> None:
    """device -> host: which tokens the next layer fetches."""
    step, speculation = task.payload.step, ex.speculation
    source = speculation.index_of(step, speculation.index)
    ex.copies.copy_d2h(speculation.index_of(step, ex.buffers.host_index), source)


def gather(ex: Executor, task: Task) -> None:
    """Rows of the chosen tokens, side by side: keys, then values, by request, head and token. numpy only.

    What the link then moves is known only now.
    """
    step, slot, d = task.payload.step, task.payload.slot, ex.shape.head_dim
    (segment,) = step.segments
    index = ex.speculation.index_of(step, ex.buffers.host_index).numpy()
    there = index >= 0
    block = segment.first_block[:, None, None] + index // BLOCK_TOKENS
    heads = np.arange(ex.shape.num_kv_heads)[None, :, None]
    # Rows of d elements of a pool [blocks, 2, G, 16, d]; values lie G · 16 of them behind their keys.
    values_behind = ex.shape.num_kv_heads * BLOCK_TOKENS
    rows = ((2 * block * ex.shape.num_kv_heads + heads) * BLOCK_TOKENS + index % BLOCK_TOKENS)[there]
    pool = as_numpy(ex.buffers.pools[segment.space][task.layer]).reshape(-1, d)
    gathered = as_numpy(ex.buffers.gathered_rows(slot, len(rows)))
    np.take(pool, rows, axis=0, out=gathered[0], mode="clip")  # clip: numpy writes to ``out`` itself
    np.take(pool, rows + values_behind, axis=0, out=gathered[1], mode="clip")
    ex.gathered[slot] = there[:, 0].sum(-1)
    ex.resolve(task, work.gather_rows(ex.shape, ex.wave.stored.kv, int(ex.gathered[slot].sum())))


VERBS = {verb.__name__: verb for verb in (speculate, store_index, gather)}
