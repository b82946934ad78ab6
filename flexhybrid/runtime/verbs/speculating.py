"""Verbs of selections: ``rank`` chooses the tokens to keep; the others belong to the speculative selection.

A speculative selection keeps partial keys after a prompt. In the decode, it chooses the tokens of the next layer and
gathers their rows. Variants of load, conversion and assembly verbs follow, for layers that read only chosen tokens.
"""

import numpy as np
import torch

from flexhybrid.core import work
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.task import Task
from flexhybrid.runtime.buffers import Context
from flexhybrid.runtime.executor import Executor
from flexhybrid.runtime.kernels.attention import split_heads
from flexhybrid.runtime.selections.heavy_hitters import HeavyHitters
from flexhybrid.runtime.selections.speculative import Fetched, Speculation
from flexhybrid.runtime.step_tensors import mask_of
from flexhybrid.runtime.verbs.attending import copy_own, copy_to_columns
from flexhybrid.runtime.verbs.computing import generate
from flexhybrid.runtime.verbs.moving import take_rows

State = Executor[Speculation]


def rank(state: Executor[HeavyHitters | Speculation], task: Task) -> None:
    """Choose the tokens to keep: after a prompt, stage the best tokens' rows; in the decode, replace the worst one."""
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


def speculate(state: State, task: Task) -> None:
    """After a prompt, keep partial query weights and keys; in the decode, choose the next layer's tokens."""
    step = task.payload.step
    if step.prefill:
        keys, _, queries = split_heads(state.shape, state.kvq[task.payload.slot])
        state.selection.after_prompt(task.layer, step, state.layer_weights.of(task), queries, keys)
        return
    layer = task.layer + 1
    resident = state.layer_weights.by_slot[layer][0]
    state.selection.choose(layer, step, state.act, state.tensors(task).rotation_R, resident)


def store_index(state: State, task: Task) -> None:
    """Store the indices of the next layer's chosen tokens on the host."""
    for choice in state.selection.guess(task.payload.step).choices.values():
        state.copies.copy_d2h(choice.of(state.buffers.host_index), choice.of(state.selection.index))


def gather(state: State, task: Task) -> None:
    """Gather the rows of the chosen tokens in host memory, and record how many there are."""
    slot, num_tokens = task.payload.slot, {}
    for representation, choice in state.selection.guess(task.payload.step).choices.items():
        segment, index_BXS = choice.segment, choice.of(state.buffers.host_index).numpy()
        chosen = index_BXS >= 0
        positions = None
        if representation == "act" and state.steps.positions:
            positions = state.steps.positions[segment.entry][index_BXS[chosen]]
        fetched = Fetched(representation, index_BXS.shape[1], chosen[:, 0].sum(-1), positions)
        state.selection.gathered[representation, slot] = fetched
        num_tokens[representation] = fetched.tokens
        pool = state.buffers.pools[segment.space][task.layer]
        target = state.buffers.chosen_rows(state.buffers.gathered, representation, slot, fetched.tokens)
        block = segment.held[np.nonzero(chosen)[0], index_BXS[chosen] // BLOCK_TOKENS].astype(np.int64)
        offset = (index_BXS % BLOCK_TOKENS)[chosen]
        if choice.each_head:
            heads = pool.view(-1, pool.shape[-1])  # rows of blocks [2, G, 16, d]
            keys = (2 * block * pool.shape[2] + np.nonzero(chosen)[1]) * BLOCK_TOKENS + offset
            take_rows(heads, keys, target[0], state.host_share)
            take_rows(heads, keys + pool.shape[2] * BLOCK_TOKENS, target[1], state.host_share)
        else:
            take_rows(pool.view(-1, target.shape[-1]), block * BLOCK_TOKENS + offset, target, state.host_share)
    stored, rows = state.wave.stored, (num_tokens.get("kv", 0), num_tokens.get("act", 0))
    state.resolve(task, work.scatter_rows(state.shape, stored.kv, stored.act, *rows))


# ---- layers that read chosen tokens


def load_chosen(state: State, task: Task, representation: str) -> None:
    """Load the gathered rows to the device, in one copy."""
    key, buffers = (representation, task.payload.slot), state.buffers
    fetched = state.selection.fetched[key] = state.selection.gathered[key]
    state.copies.copy_h2d(
        buffers.chosen_rows(buffers.loaded, *key, fetched.tokens),
        buffers.chosen_rows(buffers.gathered, *key, fetched.tokens),
    )
    element_bytes = getattr(state.wave.stored, representation)
    state.resolve(task, work.store_rows(state.shape, element_bytes, representation, fetched.tokens))


def dequantize_chosen(state: State, task: Task, representation: str) -> None:
    """Dequantize the fetched rows to the compute dtype."""
    slot, buffers = task.payload.slot, state.buffers
    tokens = state.selection.take(representation, slot).tokens
    packed = buffers.chosen_rows(buffers.loaded, representation, slot, tokens)
    buffers.formats[representation].unpack(packed, buffers.plain[representation][:tokens], state.compute_share)


def kv_gen_chosen(state: State, task: Task) -> None:
    """Recompute keys and values from the fetched ACT rows."""
    slot, selection = task.payload.slot, state.selection
    fetched = selection.taken["act"] if state.buffers.packed("act") else selection.take("act", slot)
    rotation = None if fetched.positions is None else state.steps.rotation_at(fetched.positions)
    generate(state, task, state.buffers.act_rows(slot, fetched.tokens), rotation)


def assemble_chosen(state: State, task: Task) -> None:
    """Assemble the fetched tokens of each representation, padded to the longest request; then the new tokens."""
    step, slot, buffers = task.payload.step, task.payload.slot, state.buffers
    if step.of("kv") and not buffers.packed("kv"):  # others were taken when they were dequantized or recomputed
        state.selection.take("kv", slot)
    fetched = [state.selection.taken[segment.representation] for segment in step.segments if segment.max_tokens]
    targets = buffers.attention_views(len(step.requests), sum(tokens.most for tokens in fetched) + 1)
    column, hidden = 0, []
    for tokens in fetched:
        columns = slice(column, column + tokens.most)
        rows = state.to_device(tokens.padded_rows().reshape(-1))
        if buffers.each_head(tokens.representation):
            for loaded, target in zip(
                buffers.chosen_rows(buffers.loaded, "kv", slot, tokens.tokens), targets, strict=True
            ):
                target[:, :, columns].copy_(loaded.index_select(0, rows).view(target[:, :, columns].shape))
        else:
            computed = buffers.generated if tokens.representation == "act" else buffers.plain["kv"]
            copy_to_columns(computed.index_select(0, rows), targets, column, tokens.most, state.shape)
        hidden.append(np.arange(tokens.most) >= tokens.counts_B[:, None])
        column += tokens.most
    copy_own(state, task, targets, column)
    hidden_BT = np.pad(np.concatenate(hidden, axis=1), ((0, 0), (0, 1)))  # the new token sees itself
    mask = mask_of(hidden_BT, state.weights.dtype, state.device) if hidden_BT.any() else None
    state.context = Context(*targets, mask)
