"""The verb of selections that choose the tokens of a prompt that stay: heavy hitters, and a limited pool."""

import torch

from flexhybrid.core.task import Task
from flexhybrid.runtime.executor import Executor
from flexhybrid.runtime.kernels.attention import split_heads
from flexhybrid.runtime.selections.heavy_hitters import HeavyHitters
from flexhybrid.runtime.selections.speculative import Speculation


def rank(state: Executor[HeavyHitters | Speculation], task: Task) -> None:
    """Choose the tokens that stay: of a prompt, the rows of the best go to staging; in the decode the new token takes
    the place of the worst."""
    step, slot, selection = task.payload.step, task.payload.slot, state.selection
    if isinstance(selection, HeavyHitters) and not step.prefill:
        selection.after_token(task.layer, step, slot)
        return
    kvq = state.kvq[slot].unflatten(0, (len(step.requests), step.width))
    keys, values, queries = split_heads(state.shape, kvq)
    chosen = selection.rank_prompt(task.layer, step, queries, keys)
    heads = torch.arange(state.shape.num_kv_heads, device=state.device, dtype=torch.int64)
    for store in step.stores:
        request = state.to_device(store.rows // step.width)[:, None]
        positions = state.wave.entries.positions(
            state.wave.entries.names.index(store.entry), int(store.places.max()) + 1
        )
        tokens = chosen[request, heads, state.to_device(positions[store.places])[:, None]]
        rows = torch.stack([part[request, tokens, heads] for part in (keys, values)], dim=1)  # [rows, 2, G, d]
        state.buffers.staging[store.space][slot, : len(rows)].copy_(rows.flatten(1))
