"""Verbs of a speculative selection: columns after the prompt, the next layer's tokens in the decode, and their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from flexhybrid.core import work
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.task import Task
from flexhybrid.runtime.selections.speculative import Fetched
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
    for choice in ex.tensors(task).guess.choices.values():
        ex.copies.copy_d2h(choice.of(ex.buffers.host_index), choice.of(ex.speculation.index))


def gather(ex: Executor, task: Task) -> None:
    """Rows of the chosen tokens, side by side. numpy only; what the link then moves is known only now."""
    slot, tokens = task.payload.slot, {}
    for representation, choice in ex.tensors(task).guess.choices.items():
        segment, index_BXS = choice.segment, choice.of(ex.buffers.host_index).numpy()
        there = index_BXS >= 0
        positions = None
        if representation == "act" and ex.act_positions:
            positions = ex.act_positions[segment.kind][index_BXS[there]]
        fetched = ex.gathered[representation, slot] = Fetched(representation, there[:, 0].sum(-1), positions)
        tokens[representation] = fetched.tokens
        pool = as_numpy(ex.buffers.pools[segment.space][task.layer])
        target = as_numpy(ex.buffers.gathered_rows(representation, slot, fetched.tokens))
        block = (segment.first_block[:, None, None] + index_BXS // BLOCK_TOKENS)[there]
        offset = (index_BXS % BLOCK_TOKENS)[there]
        if choice.each_head:
            _take_heads(pool, block, np.nonzero(there)[1], offset, target)
        else:
            _take(pool.reshape(-1, target.shape[-1]), block * BLOCK_TOKENS + offset, target)
    stored = ex.wave.stored
    rows = tokens.get("kv", 0), tokens.get("act", 0)
    ex.resolve(task, work.gather_rows(ex.shape, stored.kv, stored.act, *rows))


def _take_heads(pool: np.ndarray, block: np.ndarray, head: np.ndarray, offset: np.ndarray, target: np.ndarray) -> None:
    """Keys and values [2, n, d] of single heads, of a pool [blocks, 2, G, 16, d]."""
    groups = pool.shape[2]
    rows = (2 * block * groups + head) * BLOCK_TOKENS + offset
    for part, behind in zip(target, (0, groups * BLOCK_TOKENS), strict=True):
        _take(pool.reshape(-1, pool.shape[-1]), rows + behind, part)


def _take(source: np.ndarray, rows: np.ndarray, target: np.ndarray) -> None:
    """target = source[rows]; with clip numpy writes to the target itself, and holds no lock meanwhile."""
    np.take(source, rows, axis=0, out=target, mode="clip")


VERBS = {verb.__name__: verb for verb in (speculate, store_index, gather)}
