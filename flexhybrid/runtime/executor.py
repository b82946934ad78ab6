"""The executor: the state that verbs share while they run a wave, task by task, on the lanes of the real clock.

Shapes in names: B requests of a mini-batch, R computed tokens (padded), N new tokens of a request, T attention columns,
G key/value heads, H query heads, d head size, h hidden. Compute verbs run on the compute lane alone, so what only they
touch needs no guard; all else is guarded by the dependencies that the stream's reads and writes make.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.selection import limits_cache
from flexhybrid.core.memory import chunk_rows
from flexhybrid.core.schedule.steps import MiniBatchStep, Store
from flexhybrid.core.task import Task, Work
from flexhybrid.core.wave import Wave
from flexhybrid.runtime.buffers import Buffers, Context
from flexhybrid.runtime.kernels.rotary import rotary_tables
from flexhybrid.runtime.kernels.sampling import SamplingPlan, step_sampling
from flexhybrid.runtime.models import architecture
from flexhybrid.runtime.runnable import check_runnable
from flexhybrid.runtime.selections.heavy_hitters import HeavyHitters
from flexhybrid.runtime.selections.speculative import Fetched, Speculation
from flexhybrid.runtime.step_tensors import (
    StepTensors,
    StorePlace,
    TokenTable,
    act_positions,
    computed_positions,
    hidden_columns,
    mask_of,
    position_tables,
    store_rows,
    to_device,
)
from flexhybrid.runtime.storage.weights import Parts, Weights, WeightSlots
from flexhybrid.runtime.verbs import VERBS


class Executor:
    """One wave in the making. ``copies`` are the link implementation's (CPU copies or CUDA streams); ``host_share``
    shares requests that the host attends to among its threads (``attention.attend_blocks``)."""

    def __init__(
        self, weights: Weights, slots: WeightSlots, buffers: Buffers, wave: Wave, prompts: list[list[int]],
        plan: SamplingPlan, copies, host_share: Callable = map,
    ):  # fmt: skip
        check_runnable(wave.shape, wave.policy)
        if (wave.streamed_from, wave.disk_from) != (weights.streamed_from, weights.disk_from):
            raise ValueError("the wave's policy places the weights otherwise than they were loaded")
        self.weights, self.slots, self.buffers, self.wave, self.copies = weights, slots, buffers, wave, copies
        self.host_share = host_share
        self.shape, self.device, self.policy = wave.shape, weights.device, wave.policy
        self.model = architecture(wave.shape)
        self.sampling = plan
        self.stored_weights = [
            [weights.views(layer, slot) for slot in (slots.device or [None])] for layer in range(self.shape.num_layers)
        ]
        self.plain_weights = weights.plain_views(slots.plain) if weights.bits != "native" else None
        lengths = wave.workload.prompt_tokens + wave.workload.max_tokens
        self.tokens = TokenTable(prompts, lengths, self.device)
        self.rotary = self.act_positions = None
        if self.shape.rotary:
            longest = int(lengths.max())
            self.rotary = rotary_tables(self.shape, longest, weights.dtype, self.device)
            self.act_positions = position_tables(wave.kinds, longest)
        #: by mini-batch and chunk, or by slot where hidden states live on the host
        self.hidden: dict[tuple[int, int] | int, torch.Tensor] = {}
        self.kvq: dict[int, torch.Tensor] = {}  #: [R, keys | values | queries], by slot
        self.act: torch.Tensor | None = None  #: [R, h], the input of the projections
        self.attended: torch.Tensor | None = None  #: [R, H·d]
        self.logits: torch.Tensor | None = None  #: [B, vocab]
        method = wave.policy.selection.method
        self.heavy_hitters = HeavyHitters(wave, self.device) if method == "heavy_hitter" else None
        self.speculation = Speculation(wave, weights) if method == "speculative" else None
        #: what a selection has fetched, by representation and slot: in the host's gathered rows, and on the device; and
        #: by representation what the compute lane took over from there: a slot is free before attention is over
        self.gathered: dict[tuple[str, int], Fetched] = {}
        self.fetched: dict[tuple[str, int], Fetched] = {}
        self.chosen: dict[str, Fetched] = {}
        #: work that is known only when a task runs, by the task's key; None: nobody asks
        self.resolved: dict[tuple, Work] | None = None
        self.context: Context | None = None  #: what attention reads
        self.chooses_places = limits_cache(wave.policy.selection)  #: whose place a new token takes, each head by itself
        self.weights_BGT: torch.Tensor | None = None  #: attention weights of new tokens by group, heavy hitters only
        self.places: dict[int, torch.Tensor] = {}  #: [B, G], where each head puts the new token, by slot
        self.step_tensors: dict[tuple[int, int], StepTensors] = {}  #: by mini-batch and chunk
        count = wave.workload.num_requests
        self.sampled = [torch.zeros(len(group), dtype=torch.int64, device=self.device) for group in wave.mini_batches]
        iterations = int(wave.workload.max_tokens.max())
        self.token_log = copies.host_memory.zeros((iterations, count), torch.int64)  # column = order of packing
        self.log_start = np.cumsum([0] + [len(group) for group in wave.mini_batches])
        rows = chunk_rows(wave) if self.policy.hidden == "host" else []
        self.most_rows = [most for most, _ in rows]
        self.first_rows = np.cumsum([0] + [most * chunks for most, chunks in rows])  # in the host's hidden states
        self.verbs: dict[str, Callable[[Executor, Task], None]] = dict(VERBS)

    def perform(self, task: Task) -> None:
        """Run one task; what a device computes asynchronously is enqueued."""
        self.verbs[task.verb](self, task)

    def tokens_of(self, step: MiniBatchStep) -> np.ndarray:
        """Sampled token ids [B] of a step whose store_out is complete, in the order of ``step.requests``."""
        start = self.log_start[step.mini_batch]
        return self.token_log[step.iteration, start : start + len(step.requests)].numpy()

    # ---- for the verbs

    def resolve(self, task: Task, work: Work) -> None:
        """Note what a task really moves, where the plan has only what is expected."""
        if self.resolved is not None:
            self.resolved[task.key] = work

    def looks_at_choice(self, task: Task) -> bool:
        """Whether a task of the decode is in a layer whose tokens a speculative selection has chosen."""
        return self.speculation is not None and task.layer >= self.speculation.first

    def layer_weights(self, task: Task) -> dict[str, Parts]:
        """The tensors of a task's layer in the compute dtype."""
        return self.plain_weights or self.stored_layer(task)

    def stored_layer(self, task: Task) -> dict[str, Parts]:
        """The tensors of a task's layer as they lie in resident memory and in its weight slot."""
        slot = task.payload.weight_slot if self.slots.device else 0
        return self.stored_weights[task.layer][slot]

    def begin_step(self, task: Task) -> StepTensors:
        if task.iteration == 1:  # the chunks of the prompt are over
            for state in (self.step_tensors, self.hidden):
                for key in [key for key in state if isinstance(key, tuple) and key[0] == task.mini_batch and key[1]]:
                    del state[key]
        tensors = self.step_tensors[_step_key(task)] = self.prepare(task.payload.step)
        return tensors

    def tensors(self, task: Task) -> StepTensors:
        return self.step_tensors[_step_key(task)]

    def hidden_key(self, task: Task) -> tuple[int, int] | int:
        return _step_key(task) if self.policy.hidden == "device" else task.payload.slot

    def keep_hidden(self, task: Task, hidden_Rh: torch.Tensor) -> None:
        """Hidden states that the compute lane has made.

        On their way to the host they lie in a slot of their own: a link may still read them when the compute stream's
        allocator would give their memory to somebody else.
        """
        if self.policy.hidden == "host":
            slot = self.buffers.hidden_slots[task.payload.slot, : len(hidden_Rh)]
            hidden_Rh = slot.copy_(hidden_Rh)
        self.hidden[self.hidden_key(task)] = hidden_Rh

    def host_hidden(self, task: Task) -> torch.Tensor:
        """[R, h]: the hidden states of a mini-batch in host memory."""
        step = task.payload.step
        rows = len(step.requests) * step.computed_width
        first = self.first_rows[task.mini_batch] + step.chunk * self.most_rows[task.mini_batch]
        return self.buffers.host_hidden[first : first + rows]

    def places_of(self, task: Task, store: Store, places: torch.Tensor):
        """(blocks, heads, offsets) of a store's new tokens, [rows, G] each, from slots [B, G] in requests' extents;
        numpy for what lies on the host."""
        first = self.wave.first_block[store.kind][task.payload.step.requests][store.rows][:, None]
        heads = np.arange(self.shape.num_kv_heads)[None]
        if store.tier == "device":
            places = places[self.to_device(store.rows)]
            return places // BLOCK_TOKENS + self.to_device(first), self.to_device(heads), places % BLOCK_TOKENS
        places = places.numpy()[store.rows]
        return places // BLOCK_TOKENS + first, heads, places % BLOCK_TOKENS

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.device)

    def prepare(self, step: MiniBatchStep) -> StepTensors:
        """Index tensors, mask and sampling of one step."""
        batch, width = len(step.requests), step.computed_width
        positions = computed_positions(step)
        positions_R = self.to_device(positions.reshape(-1))
        stores = {}
        for store in step.stores:
            rows, on_device = store_rows(step, store.rows), store.tier == "device"
            places = (self.to_device(store.blocks), self.to_device(store.offsets)) if on_device else ()
            stores[store.space] = StorePlace(None if rows is None else self.to_device(rows), *places)
        tables = {s.space: self.to_device(s.block_table) for s in step.segments if s.tier == "device" and s.max_tokens}
        hidden = None if step.prefill or self.policy.attention == "host" else hidden_columns(step)
        last_rows = None
        if width > 1:
            last_rows = self.to_device(np.arange(batch) * width + step.recomputed_width + step.new_tokens - 1)
        total = step.context + step.new_tokens
        rotation = act_rotation = None
        if self.rotary is not None:
            rotation = self._rotation(positions_R)
            if step.act_blocks:
                act_rotation = self._rotation(self.to_device(act_positions(step, self.act_positions)))
        return StepTensors(
            cells_R=self.to_device(self.tokens.cells(step.requests, positions).reshape(-1)),
            positions_R=positions_R,
            rotation_R=rotation,
            act_rotation=act_rotation,
            mask_B11T=None if hidden is None else self.mask_of(hidden),
            last_rows_B=last_rows,
            sampled_cells_B=self.to_device(self.tokens.cells(step.requests, total)),
            sampling=step_sampling(self.sampling, step.requests, total, self.to_device),
            stores=stores,
            block_tables=tables,
            guess=self.speculation.prepare(step) if self.speculation else None,
        )

    def mask_of(self, hidden_BT: np.ndarray) -> torch.Tensor:
        return mask_of(hidden_BT, self.weights.dtype, self.device)

    def rotation_at(self, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of tokens at these positions, flat."""
        return self._rotation(self.to_device(positions.reshape(-1)))

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rotary
        return cos[positions], sin[positions]


def _step_key(task: Task) -> tuple[int, int]:
    """Which mini-batch a task works on, and which chunk of its prompt."""
    return task.mini_batch, task.payload.step.chunk
