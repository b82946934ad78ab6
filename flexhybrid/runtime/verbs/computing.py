"""Verbs of the compute lane that look at each token by itself: projections, KV-Gen, feed-forward, head, conversions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.task import Task
from flexhybrid.core.work import MIN_KV_GEN_ROWS
from flexhybrid.runtime.kernels import sampling
from flexhybrid.runtime.kernels.quantize import WORK_ELEMENTS, dequantize, quantize
from flexhybrid.runtime.kernels.rotary import rotate_
from flexhybrid.runtime.storage.weights import linear

if TYPE_CHECKING:
    from flexhybrid.runtime.executor import Executor


@torch.inference_mode()
def embed(ex: Executor, task: Task) -> None:
    """Token ids -> hidden states [R, h]; here a step begins."""
    tensors = ex.begin_step(task)
    tokens = ex.tokens.ids[tensors.cells_R]
    ex.keep_hidden(task, ex.model.embed(ex.shape, ex.weights.outer, tokens, tensors.positions_R))


@torch.inference_mode()
def dequantize_weights(ex: Executor, task: Task) -> None:
    """The layer's packed matrices in the compute dtype."""
    ex.weights.dequantize(ex.stored_layer(task), ex.plain_weights)


@torch.inference_mode()
def dequantize_act(ex: Executor, task: Task) -> None:
    """Packed ACT of all tiers -> rows [·, h], segment after segment."""
    _dequantize(ex, task, "act", ex.buffers.plain_act)


@torch.inference_mode()
def dequantize_kv(ex: Executor, task: Task) -> None:
    """Packed KV of all tiers -> rows [·, 2·G·d], segment after segment."""
    _dequantize(ex, task, "kv", ex.buffers.plain_kv)


def _dequantize(ex: Executor, task: Task, representation: str, plain: torch.Tensor) -> None:
    """The segments of one representation -> rows of ``plain`` [·, width], one segment after the other."""
    batch, first, bits = len(task.payload.step.requests), 0, getattr(ex.policy.bits, representation)
    if ex.looks_at_choice(task):
        key = representation, task.payload.slot
        ex.chosen[representation] = ex.fetched[key]
        tokens = ex.chosen[representation].tokens
        dequantize(ex.buffers.loaded_rows(*key, tokens), bits, plain.dtype, out=plain[:tokens])
        return
    for segment in task.payload.step.of(representation):
        size = batch * segment.buffer_blocks * BLOCK_TOKENS
        target = plain[first : first + size].view(batch, -1, BLOCK_TOKENS, plain.shape[1])
        _unpack(ex, task, segment, target, bits)
        first += size


def _unpack(ex: Executor, task: Task, segment, target: torch.Tensor, bits: int) -> None:
    """A segment's packed blocks -> target [B, blocks, 16, width]."""
    if segment.tier != "device":
        packed = ex.buffers.loaded_region(task.payload.step, segment, task.payload.slot)
        dequantize(packed.view(*target.shape[:3], -1), bits, target.dtype, out=target)
        return
    pool, rows = ex.buffers.pools[segment.space][task.layer], target.flatten(0, 1)
    table = ex.tensors(task).block_tables[segment.space].flatten()
    some = max(1, WORK_ELEMENTS[rows.device.type] // rows[0].numel())
    for part, blocks in zip(rows.split(some), table.split(some), strict=True):
        dequantize(pool.index_select(0, blocks), bits, target.dtype, out=part)


@torch.inference_mode()
def kv_gen(ex: Executor, task: Task) -> None:
    """Keys and values from ACT, one product: [·, h] -> [·, 2·G·d]; keys rotated with their own positions."""
    step, shape = task.payload.step, ex.shape
    w, count = ex.layer_weights(task), len(step.requests) * step.act_blocks * BLOCK_TOKENS
    rotation, chosen = ex.tensors(task).act_rotation, ex.looks_at_choice(task)
    if chosen:
        if not ex.buffers.packed("act"):
            ex.chosen["act"] = ex.fetched["act", task.payload.slot]
        fetched = ex.chosen["act"]
        count, rotation = fetched.tokens, ex.rotation_at(fetched.positions) if rotation else None
    if ex.buffers.packed("act"):
        rows = ex.buffers.plain_act[:count]
    else:
        rows = ex.buffers.loaded["act"][task.payload.slot].view(-1, shape.hidden)[:count]
        if not chosen:
            _gather_act(ex, task)
    if len(rows) < MIN_KV_GEN_ROWS:
        rows = torch.cat([rows, rows.new_zeros(MIN_KV_GEN_ROWS - len(rows), rows.shape[1])])
    bias = w["kvq.bias"][0][: shape.kv_width] if "kvq.bias" in w else None
    generated = ex.buffers.generated[: len(rows)]
    if len(w["kv.weight"]) == 1 and bias is not None:
        torch.addmm(bias, rows, w["kv.weight"][0].t(), out=generated)
    elif len(w["kv.weight"]) == 1:
        torch.mm(rows, w["kv.weight"][0].t(), out=generated)
    else:
        generated.copy_(linear(rows, w["kv.weight"], bias))
    if rotation:
        keys = generated[:count, : shape.kv_width // 2]
        rotate_(keys.view(count, shape.num_kv_heads, shape.head_dim), *rotation)


def _gather_act(ex: Executor, task: Task) -> None:
    """ACT blocks of the device, beside those that the link brought."""
    for segment in task.payload.step.of("act"):
        if segment.tier == "device":
            pool = ex.buffers.pools[segment.space][task.layer].flatten(1)
            target = ex.buffers.loaded_region(task.payload.step, segment, task.payload.slot)
            table = ex.tensors(task).block_tables[segment.space]
            torch.index_select(pool, 0, table.flatten(), out=target.flatten(0, 1))


@torch.inference_mode()
def project(ex: Executor, task: Task) -> None:
    """Keys, values and queries of the computed tokens, and the native ones' rows to staging."""
    shape, w, slot = ex.shape, ex.layer_weights(task), task.payload.slot
    tensors = ex.tensors(task)
    ex.act = ex.model.attention_input(shape, w, ex.hidden[ex.hidden_key(task)])
    kvq = linear(ex.act, w["kvq.weight"], w["kvq.bias"][0] if "kvq.bias" in w else None)
    if tensors.rotation_R:
        rows, keys = len(kvq), shape.kv_width // 2
        rotate_(kvq[:, :keys].view(rows, shape.num_kv_heads, shape.head_dim), *tensors.rotation_R)
        rotate_(kvq[:, shape.kv_width :].view(rows, shape.num_heads, shape.head_dim), *tensors.rotation_R)
    ex.kvq[slot], step = kvq, task.payload.step
    if ex.speculation and not step.prefill:
        keys = kvq[:, : shape.kv_width // 2].unflatten(-1, (shape.num_kv_heads, shape.head_dim))
        ex.places[slot] = ex.speculation.take_places(task.layer, step, tensors.guess, keys)
    if ex.policy.attention == "host" and not step.prefill:
        return  # the new rows go with the queries
    if ex.heavy_hitters and step.prefill:
        return  # which rows stay is known after attention
    for store in step.stores:
        if not ex.buffers.packed(store.representation):
            _stage(ex, store, tensors.stores[store.space].rows, slot)


def _stage(ex: Executor, store, rows: torch.Tensor | None, slot: int) -> None:
    """New rows of one part, as they are or packed, to its staging buffer."""
    source = ex.act if store.representation == "act" else ex.kvq[slot][:, : ex.shape.kv_width]
    target = ex.buffers.staging[store.space][slot, : len(store.rows)]
    if ex.buffers.packed(store.representation):
        bits = getattr(ex.policy.bits, store.representation)
        quantize(source if rows is None else source[rows], bits, out=target)
    elif rows is None:
        target.copy_(source)
    else:
        torch.index_select(source, 0, rows, out=target)


@torch.inference_mode()
def quantize_rows(ex: Executor, task: Task) -> None:
    """New rows of the parts that are stored packed, to staging."""
    for store in task.payload.step.stores:
        if ex.buffers.packed(store.representation):
            rows = ex.tensors(task).stores[store.space].rows
            _stage(ex, store, rows, task.payload.slot)


@torch.inference_mode()
def scatter_device(ex: Executor, task: Task) -> None:
    """Staging -> blocks of the device."""
    tensors, slot, shape = ex.tensors(task), task.payload.slot, ex.shape
    for store in task.payload.step.stores:
        if store.tier != "device":
            continue
        place, pool = tensors.stores[store.space], ex.buffers.pools[store.space][task.layer]
        rows = ex.buffers.staging[store.space][slot, : len(store.rows)]
        if ex.chooses_places and not task.payload.step.prefill:
            rows = rows.view(-1, 2, shape.num_kv_heads, shape.head_dim).transpose(1, 2)
            blocks, heads, offsets = ex.places_of(task, store, ex.places[slot])
            pool[blocks, :, heads, offsets] = rows
        elif ex.buffers.head_major(store):
            pool[place.blocks, :, :, place.offsets] = rows.view(-1, 2, shape.num_kv_heads, shape.head_dim)
        else:
            pool[place.blocks, place.offsets] = rows


@torch.inference_mode()
def finish(ex: Executor, task: Task) -> None:
    """Output projection and feed-forward network: the next layer's hidden states."""
    hidden, attended = ex.hidden[ex.hidden_key(task)], ex.attended
    ex.act = ex.attended = None  # over: their memory is for the feed-forward rows
    if ex.policy.attention == "host" and not task.payload.step.prefill:
        attended = ex.buffers.attended[task.payload.slot, : len(hidden)]
    else:  # with attention on the host the other slot's may be under way
        ex.kvq.clear()
    ex.keep_hidden(task, ex.model.finish(ex.shape, ex.layer_weights(task), hidden, attended))


@torch.inference_mode()
def head(ex: Executor, task: Task) -> None:
    """Logits of each request's last token."""
    last = ex.tensors(task).last_rows_B
    hidden = ex.hidden[ex.hidden_key(task)]
    ex.logits = ex.model.head(ex.shape, ex.weights.outer, hidden if last is None else hidden[last])


@torch.inference_mode()
def sample(ex: Executor, task: Task) -> None:
    """The next token of each request, into the token table and on its way to the host: NO_TOKEN where the logits are
    no numbers."""
    tensors = ex.tensors(task)
    finite = ex.logits.amax(dim=-1).isfinite()
    chosen = sampling.choose(ex.logits, tensors.sampling)
    ex.tokens.ids[tensors.sampled_cells_B] = chosen
    ex.sampled[task.mini_batch][: len(chosen)].copy_(chosen.masked_fill(~finite, sampling.NO_TOKEN))


VERBS = {
    verb.__name__: verb
    for verb in (
        embed, dequantize_weights, dequantize_act, dequantize_kv, kv_gen, project, scatter_device, finish, head, sample,
    )
} | {"quantize": quantize_rows}  # fmt: skip
