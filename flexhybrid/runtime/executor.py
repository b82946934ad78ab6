"""The executor: one function a verb, run by the lanes in the order of the stream.

Shapes in names: B requests of a mini-batch, R padded new tokens, T attention columns, G key/value heads, H query heads,
d head size, h hidden. Compute verbs run on the compute lane alone, so what only they touch needs no guard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from flexhybrid.core.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.core.plan import Wave
from flexhybrid.core.steps import MiniBatchStep, Segment
from flexhybrid.core.task import Task
from flexhybrid.core.work import MIN_KV_GEN_ROWS
from flexhybrid.runtime import attention
from flexhybrid.runtime.buffers import Buffers
from flexhybrid.runtime.models import architecture
from flexhybrid.runtime.rotary import rotary_tables, rotate_
from flexhybrid.runtime.runnable import check_runnable
from flexhybrid.runtime.sampling import SamplingPlan, StepSampling, choose, step_sampling
from flexhybrid.runtime.weights import Weights, linear

#: Cosines and sines, a row a token.
Rotary = tuple[torch.Tensor, torch.Tensor]


@dataclass
class _StepTensors:
    """What a step's compute verbs need on the device; made once an iteration, used by every layer."""

    step: MiniBatchStep
    tokens_R: torch.Tensor | None  #: prompt tokens; None in decode, where the last sampled ones are used
    positions_R: torch.Tensor
    mask_B11T: torch.Tensor | None
    last_rows_B: torch.Tensor | None  #: rows of the new-token grid that the head reads; None when it is all of them
    sampling: StepSampling | None
    requests_B: torch.Tensor
    stores: dict[str, tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]  #: rows, blocks, offsets
    rotary_Rd: Rotary | None  #: of the new tokens; None: the model has no rotary positions
    rotary_act: Rotary | None  #: of a request's columns of the ACT buffer, the same for every request


class Executor:
    """Verb functions over one wave. ``copy_*`` come from the link implementation (CPU copies or CUDA streams)."""

    def __init__(
        self,
        weights: Weights,
        slots: list[torch.Tensor],
        buffers: Buffers,
        wave: Wave,
        prompts: list[list[int]],
        plan: SamplingPlan,
        copies,
    ):
        check_runnable(wave.policy)
        if wave.streamed_from != weights.streamed_from:
            raise ValueError("the wave's policy places the weights otherwise than they were loaded")
        self.weights, self.slots, self.buffers, self.wave = weights, slots, buffers, wave
        self.shape, self.device = wave.shape, weights.device
        self.model = architecture(wave.shape)
        self.prompts, self.sampling, self.copies = prompts, plan, copies
        self.views = [
            [weights.views(layer, slot) for slot in (slots or [None])] for layer in range(self.shape.num_layers)
        ]
        count = wave.workload.num_requests
        self.rotary: Rotary | None = None
        if self.shape.rotary:  # to the end of the block that holds the last token
            positions = int(ceil_blocks(wave.workload.cached_tokens).max()) * BLOCK_TOKENS
            self.rotary = rotary_tables(self.shape, positions, weights.dtype, self.device)
        self.last_tokens = torch.zeros(count, dtype=torch.int64, device=self.device)
        self.hidden: dict[int, torch.Tensor] = {}
        self.step_tensors: dict[int, _StepTensors] = {}
        self.sampled = [torch.zeros(len(group), dtype=torch.int64, device=self.device) for group in wave.mini_batches]
        iterations = int(wave.workload.max_tokens.max())
        self.token_log = copies.host_memory.zeros((iterations, count), torch.int64)  # column = order of packing
        self._log_start = np.cumsum([0] + [len(group) for group in wave.mini_batches])
        self.verbs: dict[str, Callable[[Task], None]] = {
            name: getattr(self, f"_{name}")
            for name in (
                "embed", "kv_gen", "project", "assemble", "attend", "attend_prefill", "finish", "head", "sample",
                "load_weights", "load_act", "load_kv", "store_act", "store_kv", "store_out", "scatter",
                "scatter_device",
            )
        }  # fmt: skip

    def perform(self, task: Task) -> None:
        self.verbs[task.verb](task)

    def tokens_of(self, step: MiniBatchStep) -> np.ndarray:
        """Sampled token ids [B] of a step whose store_out is complete, in the order of ``step.requests``."""
        start = self._log_start[step.mini_batch]
        return self.token_log[step.iteration, start : start + len(step.requests)].numpy()

    # ---- links ----------------------------------------------------------------------------------------------------

    def _load_weights(self, task: Task) -> None:
        piece = task.payload
        low, high = piece.start - self.weights.streamed_from, piece.end - self.weights.streamed_from
        self.copies.copy_h2d(self.slots[piece.slot][low:high], self.weights.streamed[task.layer][low:high])

    def _load_act(self, task: Task) -> None:
        step, slot = task.payload.step, task.payload.slot
        host = _segment(step, "act@host")
        columns = step.act_blocks
        target = self._act_slot(step, slot)
        first_column = columns - host.max_blocks  # device blocks come first
        self.copies.copy_blocks_h2d(
            target, self.buffers.pools["act@host"][task.layer], host.first_block, host.num_blocks, first_column,
            task.work.link_bytes,
        )  # fmt: skip

    def _load_kv(self, task: Task) -> None:
        step, slot = task.payload.step, task.payload.slot
        host = _segment(step, "kv@host")
        self.copies.copy_blocks_h2d(
            self._kv_slot(step, slot), self.buffers.pools["kv@host"][task.layer], host.first_block, host.num_blocks, 0,
            task.work.link_bytes,
        )  # fmt: skip

    def _act_slot(self, step: MiniBatchStep, slot: int) -> torch.Tensor:
        """[B, act blocks, 16, h]"""
        batch, blocks = len(step.requests), step.act_blocks
        return self.buffers.act_buffer[slot, : batch * blocks].view(batch, blocks, BLOCK_TOKENS, -1)

    def _kv_slot(self, step: MiniBatchStep, slot: int) -> torch.Tensor:
        """[B, kv blocks, 2, G, 16, d]"""
        batch, blocks = len(step.requests), _segment(step, "kv@host").max_blocks
        flat = self.buffers.kv_buffer[slot, : batch * blocks]
        return flat.view(batch, blocks, *flat.shape[1:])

    def _store_act(self, task: Task) -> None:
        self._store(task, "act@host")

    def _store_kv(self, task: Task) -> None:
        self._store(task, "kv@host")

    def _store(self, task: Task, kind: str) -> None:
        slot, rows = task.payload.slot, task.work.tokens
        self.copies.copy_d2h(self.buffers.strips[kind][slot, :rows], self.buffers.staging[kind][slot, :rows])

    def _store_out(self, task: Task) -> None:
        start, count = self._log_start[task.mini_batch], len(task.payload.step.requests)
        self.copies.copy_d2h(
            self.token_log[task.iteration, start : start + count], self.sampled[task.mini_batch][:count]
        )

    # ---- host_compute ---------------------------------------------------------------------------------------------

    def _scatter(self, task: Task) -> None:
        """Rows of the landing strip into their blocks. numpy only: it holds no torch threads."""
        step, slot = task.payload.step, task.payload.slot
        groups, d = self.shape.num_kv_heads, self.shape.head_dim
        for store in step.stores:
            representation, tier = store.kind.split("@")
            if tier != "host":
                continue
            rows = _as_numpy(self.buffers.strips[store.kind][slot, : len(store.rows)])
            pool = _as_numpy(self.buffers.pools[store.kind][task.layer])
            if representation == "act":
                pool[store.blocks, store.offsets] = rows
            elif step.prefill:
                _scatter_runs(pool, rows.reshape(-1, 2, groups, d), store.blocks, store.offsets)
            else:
                pool[store.blocks, :, :, store.offsets] = rows.reshape(-1, 2, groups, d)

    # ---- compute --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _embed(self, task: Task) -> None:
        step = task.payload.step
        tensors = self.step_tensors[task.mini_batch] = self._prepare(step)
        tokens = tensors.tokens_R
        if tokens is None:
            tokens = self.last_tokens[tensors.requests_B]
        self.hidden[task.mini_batch] = self.model.embed(self.shape, self.weights.outer, tokens, tensors.positions_R)

    @torch.inference_mode()
    def _kv_gen(self, task: Task) -> None:
        payload = task.payload
        step, w = payload.step, self._layer(task)
        blocks = self._act_slot(step, payload.slot)
        device = _segment(step, "act@device")
        if device is not None and device.max_blocks:
            pool = self.buffers.pools["act@device"][task.layer]
            for row, (first, count) in enumerate(zip(device.first_block, device.num_blocks, strict=True)):
                blocks[row, :count].copy_(pool[first : first + count])
        rows = blocks.view(-1, self.shape.hidden)
        if len(rows) < MIN_KV_GEN_ROWS:
            rows = torch.cat([rows, rows.new_zeros(MIN_KV_GEN_ROWS - len(rows), rows.shape[1])])
        bias = w["kvq.bias"][0][: self.shape.kv_width] if "kvq.bias" in w else None
        generated = self.buffers.generated[: len(rows)]
        if len(w["kv.weight"]) > 1:
            generated.copy_(linear(rows, w["kv.weight"], bias))
        elif bias is None:
            torch.mm(rows, w["kv.weight"][0].t(), out=generated)
        else:
            torch.addmm(bias, rows, w["kv.weight"][0].t(), out=generated)
        rotary = self.step_tensors[task.mini_batch].rotary_act
        if rotary is not None:
            used = generated[: len(step.requests) * step.act_blocks * BLOCK_TOKENS]
            rotate_(self._heads(used.view(len(step.requests), -1, self.shape.kv_width), 0), *rotary)

    @torch.inference_mode()
    def _project(self, task: Task) -> None:
        payload, w = task.payload, self._layer(task)
        tensors = self.step_tensors[task.mini_batch]
        act_Rh = self.model.attention_input(self.shape, w, self.hidden[task.mini_batch])
        bias = w["kvq.bias"][0] if "kvq.bias" in w else None
        self.kvq = linear(act_Rh, w["kvq.weight"], bias)
        if tensors.rotary_Rd is not None:
            rotate_(self._heads(self.kvq, 0), *tensors.rotary_Rd)
            rotate_(self.kvq[:, self.shape.kv_width :].unflatten(-1, (-1, self.shape.head_dim)), *tensors.rotary_Rd)
        for kind, (rows, _, _) in tensors.stores.items():
            source = self.kvq[:, : self.shape.kv_width] if kind.startswith("kv") else act_Rh
            target = self.buffers.staging[kind][payload.slot]
            if rows is None:
                target[: len(source)].copy_(source)
            else:
                torch.index_select(source, 0, rows, out=target[: len(rows)])

    @torch.inference_mode()
    def _assemble(self, task: Task) -> None:
        """Lay keys and values of all segments side by side, head-major, the new token's last."""
        payload = task.payload
        step = payload.step
        groups, d = self.shape.num_kv_heads, self.shape.head_dim
        batch = len(step.requests)
        targets = self.buffers.attention_views(batch, step.attention_tokens)
        column = act_column = 0
        for segment in step.segments:
            width = segment.max_tokens
            if not width:
                continue
            if segment.kind.startswith("act"):
                rows = self.buffers.generated[: batch * step.act_blocks * BLOCK_TOKENS]
                grid = rows.view(batch, -1, 2, groups, d)[:, act_column : act_column + width]
                act_column += segment.max_blocks * BLOCK_TOKENS
                for part, target in enumerate(targets):
                    target[:, :, column : column + width].copy_(grid[:, :, part].transpose(1, 2))
            elif segment.kind == "kv@host":
                blocks = self._kv_slot(step, payload.slot)
                _copy_kv_blocks(blocks, targets, slice(0, batch), column, width)
            else:
                pool = self.buffers.pools[segment.kind][task.layer]
                for b, (first, count) in enumerate(zip(segment.first_block, segment.num_blocks, strict=True)):
                    held = min(width, int(count) * BLOCK_TOKENS)
                    _copy_kv_blocks(pool[None, first : first + count], targets, slice(b, b + 1), column, held)
            column += width
        new = self.kvq[:, : self.shape.kv_width].view(batch, 2, groups, d)
        for part, target in enumerate(targets):
            target[:, :, column].copy_(new[:, part])

    @torch.inference_mode()
    def _attend(self, task: Task) -> None:
        step, shape = task.payload.step, self.shape
        batch = len(step.requests)
        keys, values = self.buffers.attention_views(batch, step.attention_tokens)
        mask = self.step_tensors[task.mini_batch].mask_B11T
        query = self.kvq[:, shape.kv_width :].reshape(batch, shape.num_heads, shape.head_dim)
        self.attended = attention.attend_decode(query, keys, values, mask)

    @torch.inference_mode()
    def _attend_prefill(self, task: Task) -> None:
        step, shape = task.payload.step, self.shape
        grid = (len(step.requests), step.width)
        new = self.kvq[:, : shape.kv_width].view(*grid, 2, shape.num_kv_heads, shape.head_dim)
        query = self.kvq[:, shape.kv_width :].view(*grid, shape.num_heads, shape.head_dim)
        self.attended = attention.attend_prefill(query, new[:, :, 0], new[:, :, 1]).view(step.rows, -1)

    @torch.inference_mode()
    def _finish(self, task: Task) -> None:
        k = task.mini_batch
        self.hidden[k] = self.model.finish(self.shape, self._layer(task), self.hidden[k], self.attended)

    @torch.inference_mode()
    def _scatter_device(self, task: Task) -> None:
        tensors, slot = self.step_tensors[task.mini_batch], task.payload.slot
        groups, d = self.shape.num_kv_heads, self.shape.head_dim
        for kind, (_, blocks, offsets) in tensors.stores.items():
            if not kind.endswith("@device"):
                continue
            rows = self.buffers.staging[kind][slot, : len(blocks)]
            pool = self.buffers.pools[kind][task.layer]
            if kind.startswith("act"):
                pool[blocks, offsets] = rows
            else:
                pool[blocks, :, :, offsets] = rows.view(-1, 2, groups, d)

    @torch.inference_mode()
    def _head(self, task: Task) -> None:
        last = self.step_tensors[task.mini_batch].last_rows_B
        hidden = self.hidden[task.mini_batch]
        self.logits = self.model.head(self.shape, self.weights.outer, hidden if last is None else hidden[last])

    @torch.inference_mode()
    def _sample(self, task: Task) -> None:
        tensors = self.step_tensors[task.mini_batch]
        chosen = choose(self.logits, tensors.sampling)
        self.last_tokens[tensors.requests_B] = chosen
        self.sampled[task.mini_batch][: len(chosen)].copy_(chosen)

    def _heads(self, kv: torch.Tensor, part: int) -> torch.Tensor:
        """Keys (part 0) or values (1) of rows [..., 2·G·d or wider] as [..., G, d], a view."""
        groups, d = self.shape.num_kv_heads, self.shape.head_dim
        return kv[..., part * groups * d : (part + 1) * groups * d].unflatten(-1, (groups, d))

    def _rotary(self, positions: np.ndarray) -> Rotary:
        """Rows of the cosine and sine tables."""
        index = self._on_device(positions)
        return self.rotary[0][index], self.rotary[1][index]

    def _act_positions(self, step: MiniBatchStep) -> np.ndarray:
        """Positions of a request's columns of the ACT buffer: segment by segment, each a run of whole blocks."""
        kinds = self.wave.kinds
        return np.concatenate([
            kinds.positions(kinds.kinds.index(segment.kind), segment.max_blocks * BLOCK_TOKENS)
            for segment in step.of("act")
        ])  # fmt: skip

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor
        # From pageable memory the copy would wait for the whole stream, and the device would run dry.
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _layer(self, task: Task) -> dict:
        slot = task.payload.weight_slot if self.slots else 0
        return self.views[task.layer][slot]

    def _prepare(self, step: MiniBatchStep) -> _StepTensors:
        """Index tensors, mask and random numbers of one step."""
        batch, width = len(step.requests), step.width
        on_device = self._on_device
        tokens = last_rows = None
        positions = step.context
        if step.prefill:
            grid = np.zeros((batch, width), dtype=np.int64)
            for row, request in enumerate(step.requests):
                grid[row, : len(self.prompts[request])] = self.prompts[request]
            tokens = on_device(grid.reshape(-1))
            positions = np.minimum(np.tile(np.arange(width), batch), np.repeat(step.new_tokens - 1, width))
            last_rows = on_device(np.arange(batch) * width + step.new_tokens - 1)
        stores = {}
        for store in step.stores:
            whole = len(store.rows) == step.rows
            place = (None, None)
            if store.kind.endswith("@device"):
                place = (on_device(store.blocks), on_device(store.offsets))
            stores[store.kind] = (None if whole else on_device(store.rows), *place)
        mask = None if step.prefill else self._mask(step)
        return _StepTensors(
            step=step,
            tokens_R=tokens,
            positions_R=on_device(positions),
            mask_B11T=None if mask is None else on_device(mask).to(self.weights.dtype),
            last_rows_B=last_rows,
            sampling=step_sampling(self.sampling, step.requests, step.context + step.new_tokens, on_device),
            requests_B=on_device(step.requests),
            stores=stores,
            rotary_Rd=self._rotary(positions) if self.shape.rotary else None,
            rotary_act=self._rotary(self._act_positions(step)) if self.shape.rotary and step.act_blocks else None,
        )

    @staticmethod
    def _mask(step: MiniBatchStep) -> np.ndarray | None:
        """[B, 1, 1, T] of 0 and -inf; None when no request is shorter than another in any segment."""
        pieces = []
        for segment in step.segments:
            if segment.max_tokens:
                pieces.append(np.arange(segment.max_tokens) < segment.num_tokens[:, None])
        pieces.append(np.ones((len(step.requests), 1), dtype=bool))
        visible = np.concatenate(pieces, axis=1)
        if visible.all():
            return None
        return np.where(visible, 0.0, -np.inf).astype(np.float32)[:, None, None, :]


def _segment(step: MiniBatchStep, kind: str) -> Segment | None:
    return next((segment for segment in step.segments if segment.kind == kind), None)


def _copy_kv_blocks(blocks, targets, requests: slice, column: int, width: int) -> None:
    """blocks [B, n, 2, G, 16, d] -> columns [column, column + width) of keys and values."""
    full, rest = divmod(width, BLOCK_TOKENS)
    for part, target in enumerate(targets):
        if full:
            window = target[requests, :, column : column + full * BLOCK_TOKENS]
            window = window.unflatten(2, (full, BLOCK_TOKENS))
            window.copy_(blocks[:, :full, part].transpose(1, 2))
        if rest:
            start = column + full * BLOCK_TOKENS
            target[requests, :, start : start + rest].copy_(blocks[:, full, part, :, :rest])


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A numpy view of a CPU tensor; 16-bit floats as integers, since only bytes are moved."""
    return (tensor.view(torch.int16) if tensor.element_size() == 2 else tensor).numpy()


def _scatter_runs(pool: np.ndarray, rows: np.ndarray, blocks: np.ndarray, offsets: np.ndarray) -> None:
    """pool[block, :, :, offset] = rows, by runs of neighbouring tokens: a prompt fills its blocks in order."""
    starts = np.flatnonzero(np.r_[True, blocks[1:] != blocks[:-1]])
    for start, end in zip(starts, np.r_[starts[1:], len(blocks)], strict=True):
        offset = offsets[start]
        pool[blocks[start], :, :, offset : offset + end - start] = rows[start:end].transpose(1, 2, 0, 3)
