"""The verb of a heavy-hitter selection."""

from __future__ import annotations

import torch

from flexhybrid.core.task import Task
from flexhybrid.runtime.executor import Executor
from flexhybrid.runtime.kernels.attention import attention_sums, split_heads
from flexhybrid.runtime.selections.heavy_hitters import HeavyHitters


def rank(state: Executor[HeavyHitters], task: Task) -> None:
    """Choose the tokens that stay: after the prompt the rows of the best go to staging; in the decode the new token
    takes the place of the worst."""
    step, slot, heavy_hitters = task.payload.step, task.payload.slot, state.selection
    if not step.prefill:
        heavy_hitters.after_token(task.layer, step, slot)
        return
    kvq = state.kvq[slot].unflatten(0, (len(step.requests), step.width))
    keys, values, queries = split_heads(state.shape, kvq)
    sums = attention_sums(queries, keys, state.to_device(step.new_tokens))
    chosen = heavy_hitters.after_prompt(task.layer, step, sums)
    heads = torch.arange(state.shape.num_kv_heads, device=state.device)
    for store in step.stores:
        request = state.to_device(store.rows // step.width)[:, None]
        tokens = chosen[request, heads, heavy_hitters.prompt_places(step, store)[:, None]]
        rows = torch.stack([part[request, tokens, heads] for part in (keys, values)], dim=1)  # [rows, 2, G, d]
        state.buffers.staging[store.space][slot, : len(rows)].copy_(rows.flatten(1))
