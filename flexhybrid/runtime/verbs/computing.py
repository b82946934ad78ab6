"""Verbs of the compute lane that process tokens separately: projections, KV-Gen, feed-forward, head, conversions."""

from functools import partial
from typing import Any

import torch

from flexhybrid.core.schedule.steps import Segment, Store
from flexhybrid.core.task import Task
from flexhybrid.core.work import MIN_KV_GEN_ROWS
from flexhybrid.runtime.executor import NOTHING, State, step_key
from flexhybrid.runtime.kernels import sampling
from flexhybrid.runtime.kernels.quantize import WORK_ELEMENTS
from flexhybrid.runtime.kernels.rotary import norm_and_rotate_rows_
from flexhybrid.runtime.models.module import ModulePath
from flexhybrid.runtime.models.states import Running
from flexhybrid.runtime.step_tensors import Rotation
from flexhybrid.runtime.storage.parts import Parts, linear
from flexhybrid.runtime.verbs.recurring import held_states, keep_states


def embed(state: State, task: Task) -> None:
    """Embed token ids: hidden states [R, h]. The first verb of a step."""
    tensors = state.tensors(task)
    step = task.payload.step
    if step.begins and not step.builds:
        state.masks.begin(step, state.steps.plan.select(step.queued).grammars, state.answers)
    tokens = state.tokens.ids[tensors.cells_R]
    if state.modules:
        waits = tensors.last_rows_B is None
        embedded = state.modules.embed(step_key(task), tokens, tensors.positions_R, waits, step.new_tokens)
    else:
        embedded = state.model.embed(state.shape, state.weights.outer, tokens, tensors.positions_R)
    state.hidden.keep(task, embedded)


def dequantize_weights(state: State, task: Task) -> None:
    """Dequantize the layer's matrices to the compute dtype."""
    state.weights.dequantize(state.layer_weights.pairs(task), state.compute_share)


def dequantize_cache(state: State, task: Task, representation: str) -> None:
    """Dequantize the blocks of all tiers to rows [·, width] of the compute dtype, one segment after another."""
    first = 0  # number of blocks of earlier segments
    for segment in task.payload.step.of(representation):
        _unpack(state, task, segment, state.buffers.plain_region(segment, first))
        first += segment.block_table.size


def _unpack(state: State, task: Task, segment: Segment, target: torch.Tensor) -> None:
    """Dequantize a segment's blocks to ``target`` [*block_table.shape, 16, width]."""
    unpack = state.buffers.formats[segment.representation].unpack
    if segment.tier != "device":
        packed = state.buffers.loaded_rows(task.payload.step, segment, task.payload.slot)
        unpack(packed, target, state.compute_share)
        return
    pool, rows = state.buffers.pools[segment.space][task.layer], target.flatten(0, 1)
    table = state.tensors(task).block_tables[id(segment)].flatten()
    at_a_time = max(1, WORK_ELEMENTS[rows.device.type] // rows[0].numel())
    for unpacked, blocks in zip(rows.split(at_a_time), table.split(at_a_time), strict=True):
        unpack(pool.index_select(0, blocks), unpacked, state.compute_share)


def kv_gen(state: State, task: Task) -> None:
    """Recompute keys and values from the ACT of all segments."""
    step = task.payload.step
    if not state.buffers.packed("act"):
        _gather_act(state, task)
    rows = state.buffers.act_rows(task.payload.slot, step.act_rows)
    if state.modules:
        _generate_by_module(state, state.modules, task, rows)
    else:
        generate(state, task, rows, state.tensors(task).act_rotation)


def _generate_by_module(state: State, modules: ModulePath, task: Task, act_rows: torch.Tensor) -> None:
    """Recompute keys and values from ACT rows by the layer's own attention module."""
    views, count, positions = state.layer_weights.of(task), len(act_rows), state.tensors(task).act_positions
    if positions is None:
        raise ValueError("the positions of ACT rows are unknown")
    calls = modules.calls_at((*step_key(task), task.payload.step.window), positions, MIN_KV_GEN_ROWS)
    if count < MIN_KV_GEN_ROWS:
        act_rows = torch.cat([act_rows, act_rows.new_zeros(MIN_KV_GEN_ROWS - count, act_rows.shape[1])])
    modules.generate(task.layer, act_rows, calls, views, state.buffers.generated[: len(act_rows)])


def generate(state: State, task: Task, act_rows: torch.Tensor, rotation: Rotation | None) -> None:
    """Recompute keys and values [·, 2·G·d] from ACT rows [·, h] in one product; rotate keys to their positions."""
    shape, w, rows, count = state.shape, state.layer_weights.of(task), act_rows, len(act_rows)
    if count < MIN_KV_GEN_ROWS:
        rows = torch.cat([rows, rows.new_zeros(MIN_KV_GEN_ROWS - count, rows.shape[1])])
    bias = w["kvq.bias"][0][: shape.kv_width] if "kvq.bias" in w else None
    generated = linear(rows, w["kv.weight"], bias, out=state.buffers.generated[: len(rows)])
    if rotation:
        keys = (0, shape.num_kv_heads, w.get("k_norm.weight"))
        norm_and_rotate_rows_(generated[:count], [keys], shape.norm_eps, rotation)


def _gather_act(state: State, task: Task) -> None:
    """Copy the device's ACT blocks next to the loaded ones."""
    for segment in task.payload.step.of("act"):
        if segment.tier == "device":
            pool = state.buffers.pools[segment.space][task.layer].flatten(1)
            target = state.buffers.loaded_region(task.payload.step, segment, task.payload.slot)
            table = state.tensors(task).block_tables[id(segment)]
            torch.index_select(pool, 0, table.flatten(), out=target.flatten(0, 1))


def project(state: State, task: Task) -> None:
    """Project keys, values and queries of the computed tokens; copy new rows to staging, if stored in native bits."""
    w, slot, step = state.layer_weights.of(task), task.payload.slot, task.payload.step
    if state.modules:
        hidden = state.hidden.of(task)
        held = held_states(state, task)
        state.kvq[slot], state.act = state.modules.project(step_key(task), slot, task.layer, hidden, w, held)
    else:
        _project(state, task, w)
    state.selection.after_project(task, state.kvq[slot])
    if state.policy.attention == "host" and step.decodes:
        return  # ``store_query`` moves the new rows
    if state.selection.stages_rows(step) and not state.shape.borrows(task.layer):
        _stage_stores(state, task, packed=False)


def _project(state: State, task: Task, w: dict[str, Parts]) -> None:
    """Project, norm and rotate by the functions of ``state.model``."""
    slot, tensors = task.payload.slot, state.tensors(task)
    state.act = state.model.attention_input(state.shape, w, state.hidden.of(task))
    out = state.graphs.kvq(state, task) if state.graphs else None
    kvq = state.kvq[slot] = linear(state.act, w["kvq.weight"], w["kvq.bias"][0] if "kvq.bias" in w else None, out)
    if tensors.rotation_R:
        keys = (0, state.shape.num_kv_heads, w.get("k_norm.weight"))
        queries = (state.shape.kv_width, state.shape.num_heads, w.get("q_norm.weight"))
        norm_and_rotate_rows_(kvq, [keys, queries], state.shape.norm_eps, tensors.rotation_R)


def quantize(state: State, task: Task) -> None:
    """Quantize new rows to staging, for stores that are quantized."""
    _stage_stores(state, task, packed=True)


def _stage_stores(state: State, task: Task, packed: bool) -> None:
    """Copy or quantize new rows to staging. ``packed``: only quantized stores, or only native ones."""
    slot, tensors = task.payload.slot, state.tensors(task)
    for store in task.payload.step.stores:
        if state.buffers.packed(store.representation) != packed or _projected(state, task, store) is not None:
            continue
        source = state.act if store.representation == "act" else state.kvq[slot][:, : state.shape.kv_width]
        rows = tensors.stores[store.space].rows
        target = state.buffers.staged(store.space, slot, len(store.rows) if rows is None else len(rows))
        if packed:
            new = source if rows is None else source[rows]
            state.buffers.formats[store.representation].pack(new, target, state.compute_share)
        elif rows is None:
            target.copy_(source)
        else:
            torch.index_select(source, 0, rows, out=target)


def _projected(state: State, task: Task, store: Store) -> torch.Tensor | None:
    """Return the projected rows if a device store reads them directly; None if it reads them from staging.

    They are read directly in decode steps under graphs, because there a slot's rows keep their address.
    """
    if store.tier == "device" and store.representation == "kv" and state.graphs and not state.buffers.packed("kv"):
        return state.graphs.kvq(state, task)
    return None


def scatter_device(state: State, task: Task) -> None:
    """Move rows from staging, or projected rows, to blocks of the device."""
    tensors, slot, shape = state.tensors(task), task.payload.slot, state.shape
    for store in task.payload.step.stores:
        if store.tier != "device":
            continue
        place, pool = tensors.stores[store.space], state.buffers.pools[store.space][task.layer]
        count = len(store.rows) if place.blocks is None else len(place.blocks)
        if (projected := _projected(state, task, store)) is not None:
            rows = projected[:, : shape.kv_width] if place.rows is None else projected[place.rows, : shape.kv_width]
        else:
            rows = state.buffers.staged(store.space, slot, count)
        if state.selection.chooses_places(task.payload.step):
            rows = rows.view(-1, 2, shape.num_kv_heads, shape.head_dim).transpose(1, 2)
            blocks, heads, offsets = state.cells(store, state.selection.places[slot])
            pool[blocks, :, heads, offsets] = rows
        elif state.buffers.head_major(store):
            pool[place.blocks, :, :, place.offsets] = rows.view(-1, 2, shape.num_kv_heads, shape.head_dim)
        else:
            pool[place.blocks, place.offsets] = rows


def finish(state: State, task: Task) -> None:
    """Run the rest of a layer after attention: output projection and feed-forward network. After ``experts``, run what
    is left."""
    hidden, modules = state.hidden.of(task), state.modules
    if modules is None:
        finished = _finish_by_rows(state, state.layer_weights.of(task), hidden, _attended(state, task))
    elif "route" in task.payload.works:
        finished = modules.routed.finish(step_key(task))
    else:
        finished = modules.rows_of(len(hidden), _run_layer(modules, state, task))
        keep_states(state, task)
    state.hidden.keep(task, finished)
    if task.layer == state.shape.num_layers - 1:
        state.logprobs.note_prompt(task.payload.step, state.hidden.of(task), partial(_head, state))


def _run_layer(modules: ModulePath, state: State, task: Task) -> list[Running]:
    """Run a layer after attention, or all of a layer without attention, to its end or its experts."""
    of_layer, slot = state.shape.state_of(task.layer), task.payload.slot
    if of_layer is None or of_layer.attends:
        return modules.resume(slot, task.layer, _attended(state, task))
    w, held = state.layer_weights.of(task), held_states(state, task)
    return modules.start(step_key(task), slot, task.layer, state.hidden.of(task), w, held)


def route(state: State, task: Task) -> None:
    """Run a layer up to its experts, which several mini-batches share."""
    modules: Any = state.modules
    modules.routed.add(step_key(task), len(state.hidden.of(task)), partial(_run_layer, modules, state, task))
    keep_states(state, task)


def experts(state: State, task: Task) -> None:
    """Multiply the rows of several mini-batches with a layer's experts."""
    modules: Any = state.modules
    keys = [(position.step.mini_batch, position.step.chunk) for position in task.payload.positions]
    modules.routed.multiply(keys)


def _attended(state: State, task: Task) -> torch.Tensor:
    """Return attention's output, which the executor keeps no longer: its memory is free for feed-forward rows."""
    attended = state.attended
    state.act = state.attended = NOTHING
    if state.policy.attention == "host" and task.payload.step.decodes:  # the other slot's rows may be in use
        return state.buffers.attended[task.payload.slot, : len(state.hidden.of(task))]
    if "merge_attended" not in task.payload.works:  # otherwise the other slot may have the next mini-batch's rows
        state.kvq.clear()
    return attended


#: Maximum of rows that pass through the feed-forward network at a time. A prompt's feed-forward rows are the largest
#: temporary tensors, and fragment a device's memory. This number keeps any processor busy.
ROWS_AT_A_TIME = 8192


def _finish_by_rows(state: State, w: dict[str, Parts], hidden_Rh: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Run the rest of a layer, ROWS_AT_A_TIME rows at a time."""
    if len(hidden_Rh) <= ROWS_AT_A_TIME:
        return state.model.finish(state.shape, w, hidden_Rh, attended)
    finished = torch.empty_like(hidden_Rh)
    pieces = (tensor.split(ROWS_AT_A_TIME) for tensor in (finished, hidden_Rh, attended))
    for target, hidden, own in zip(*pieces, strict=True):
        target.copy_(state.model.finish(state.shape, w, hidden, own))
    return finished


def _head(state: State, hidden_Bh: torch.Tensor, step: tuple[int, int] | None = None) -> torch.Tensor:
    """Return the logits [B, vocab] of hidden states [B, h]. ``step``: see ``ModulePath.head``."""
    if state.modules:
        return state.modules.head(hidden_Bh, step)
    return state.model.head(state.shape, state.weights.outer, hidden_Bh)


def head(state: State, task: Task) -> None:
    """Compute the logits of each request's last token."""
    last = state.tensors(task).last_rows_B
    hidden = state.hidden.of(task)
    state.logits = _head(state, hidden if last is None else hidden[last], step_key(task))


def sample(state: State, task: Task) -> None:
    """Choose each request's next token. The copy for the host has NO_TOKEN if logits are not finite."""
    tensors = state.tensors(task)
    finite = state.logits.amax(dim=-1).isfinite()
    logits = state.masks.masked(task.payload.step, state.logits)
    chosen = sampling.choose(logits, tensors.sampling, state.tokens.ids)
    state.tokens.ids[tensors.sampled_cells_B] = chosen
    state.logprobs.note_sampled(task.payload.step, state.logits, chosen)
    state.sampled.on_device[task.mini_batch][: len(chosen)].copy_(chosen.masked_fill(~finite, sampling.NO_TOKEN))
