"""Index tensors, masks and sampling tensors of a step. They are made once per step and used in every layer."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from flexhybrid.core.context.blocks import BLOCK_TOKENS, BlockEntries
from flexhybrid.core.schedule.steps import MiniBatchStep, Segment, Store
from flexhybrid.core.wave import Wave
from flexhybrid.runtime.kernels.rotary import rotary_tables
from flexhybrid.runtime.kernels.sampling import SamplingPlan, StepSampling, step_sampling


class Prompts(Protocol):
    """Token ids of the prompts, by request."""

    def __getitem__(self, request: int, /) -> Sequence[int]: ...


class SamplingPlans(Protocol):
    """A ``SamplingPlan``, or an object that makes the plan of some requests."""

    def select(self, members: np.ndarray) -> SamplingPlan: ...


Rotation = tuple[torch.Tensor, torch.Tensor]  #: cosines and sines, [R, d] each
PlaceArrays = Callable[[dict[Hashable, np.ndarray]], dict[Hashable, torch.Tensor]]  #: copies arrays to the device


class WindowPositions(NamedTuple):
    """Positions of tokens in their requests, for layers with a window."""

    new_BN: torch.Tensor
    columns_BT: torch.Tensor  #: -1 for padding
    common: tuple[torch.Tensor, ...]  #: [g, T] for each of ``MiniBatchStep.commons``


class StorePlace(NamedTuple):
    """The computed rows of a store, and their places in a device pool."""

    rows: torch.Tensor | None  #: None: all rows in order
    blocks: torch.Tensor | None = None
    offsets: torch.Tensor | None = None


@dataclass(frozen=True)
class StepTensors:
    """Tensors of one step. Its rows are a padded grid [B, computed_width]: a recomputed prefix, then new tokens."""

    cells_R: torch.Tensor  #: cells of the rows' tokens in the token table
    positions_R: torch.Tensor
    rotation_R: Rotation | None
    act_rotation: Rotation | None  #: rotations of the rows that KV-Gen recomputes
    act_positions: torch.Tensor | None  #: positions of these rows, for transformers' layers
    mask_B11T: torch.Tensor | None  #: hides padding, added to scores; None: no column is padding
    #: window -> mask that also hides tokens outside the window, if each request has one new token
    window_masks: dict[int, torch.Tensor]
    places: WindowPositions | None  #: None if no context is assembled, or no layer has a window
    last_rows_B: torch.Tensor | None  #: rows that the head reads; None: all rows
    sampled_cells_B: torch.Tensor  #: cells of the sampled tokens in the token table
    sampling: StepSampling | None
    stores: dict[str, StorePlace]
    block_tables: dict[int, torch.Tensor]  #: id() of a device segment -> its block table
    buffer_tables: dict[int, torch.Tensor]  #: id() of a segment ``in_line`` -> its table [B, columns]
    common_rows: tuple[torch.Tensor, ...]  #: [g, m] for each of ``MiniBatchStep.commons``


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device, asynchronously."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    # From pageable memory, the copy would wait until the stream is empty, and the device would then be idle.
    return tensor.pin_memory().to(device, non_blocking=True)


def together_to_device(arrays: Mapping[Hashable, np.ndarray], device: torch.device) -> dict[Hashable, torch.Tensor]:
    """Copy arrays to the device by name, asynchronously, with one copy per dtype (each takes 20 µs of Python)."""
    if device.type == "cpu":
        return {name: to_device(array, device) for name, array in arrays.items()}
    there: dict[Hashable, torch.Tensor] = {}
    for dtype in dict.fromkeys(array.dtype for array in arrays.values()):
        alike = {name: array for name, array in arrays.items() if array.dtype == dtype}
        joined = to_device(np.concatenate([array.reshape(-1) for array in alike.values()]), device)
        parts = joined.split([array.size for array in alike.values()])
        there |= {name: part.view(array.shape) for (name, array), part in zip(alike.items(), parts, strict=True)}
    return there


class TokenTable:
    """Token ids on the device: prompt and answer of the request in each place of a wave, one after another."""

    def __init__(self, prompts: Sequence[Sequence[int]], num_tokens: np.ndarray, device: torch.device):
        self.start = np.cumsum(np.r_[0, num_tokens])
        flat = np.zeros(self.start[-1], dtype=np.int64)
        for first, prompt in zip(self.start, prompts, strict=False):
            flat[first : first + len(prompt)] = prompt
        self.ids = torch.from_numpy(flat).to(device)

    def enter(self, place: int, ids: Sequence[int]) -> None:
        """Write the first token ids of the request in a place. Its other cells stay unchanged."""
        first = int(self.start[place])
        self.ids[first : first + len(ids)] = to_device(np.array(ids, dtype=np.int64), self.ids.device)

    def cells(self, requests: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the cells in ``ids`` of tokens at ``positions`` ([B] or [B, …]) of ``requests`` [B]."""
        return self.start[requests].reshape(-1, *[1] * (positions.ndim - 1)) + positions


def computed_positions(step: MiniBatchStep) -> np.ndarray:
    """Return the positions of the computed tokens: [B, computed_width]. Padding has positions within its request.

    Positions of a recomputed prefix, padding included, change only when a block is added to it.
    """
    prefix = np.minimum(np.arange(step.recomputed_width), step.context[:, None] // BLOCK_TOKENS * BLOCK_TOKENS)
    new = np.minimum(np.arange(step.width), step.new_tokens[:, None] - 1) + step.context[:, None]
    return np.concatenate([prefix, new], axis=1)


def position_tables(entries: BlockEntries, longest: int) -> dict[str, np.ndarray]:
    """Return, for every cache entry, the positions of its tokens in a request of ``longest`` tokens, in order.

    One more position is appended, for the padding of requests without tokens in the entry.
    """
    counts = entries.stored(longest)
    return {
        entry: np.minimum(entries.positions(i, int(counts[i]) + 1), longest - 1)
        for i, entry in enumerate(entries.names)
    }


def act_positions(step: MiniBatchStep, tables: dict[str, np.ndarray]) -> np.ndarray:
    """Return the positions of the rows that KV-Gen recomputes, in buffer order. Padding has later tokens' positions."""
    rows = []
    for segment in step.of("act"):
        count, table = segment.moved_blocks[:, None] * BLOCK_TOKENS, tables[segment.entry]
        columns = np.arange(int(count.max()))
        positions = table[np.minimum(columns + segment.start_block[:, None] * BLOCK_TOKENS, len(table) - 1)]
        rows.append(positions[columns < count] if segment.in_line else positions.reshape(-1))
    return np.concatenate(rows)


def segment_positions(segment: Segment, tables: dict[str, np.ndarray]) -> np.ndarray:
    """Return the positions of a segment's tokens, [B, max_tokens]; -1 for padding."""
    index = np.arange(segment.max_tokens)
    inside = index < segment.num_tokens[:, None]
    index = np.minimum(index + segment.start_block[:, None] * BLOCK_TOKENS, len(tables[segment.entry]) - 1)
    return np.where(inside, tables[segment.entry][index], -1)


def column_positions(step: MiniBatchStep, tables: dict[str, np.ndarray]) -> np.ndarray:
    """Return the position of the token in each attention column of a step, [B, T]; -1 for padding of cached tokens.

    The step attends to all cached tokens. ``tables``: ``position_tables``.
    """
    columns = [segment_positions(segment, tables) for segment in step.segments]
    if step.recomputed is not None:
        index = np.arange(step.recomputed_width)
        columns.append(np.where(index < step.recomputed[:, None], index, -1))
    columns.append(step.context[:, None] + np.arange(step.width))
    return np.concatenate(columns, axis=1)


#: Rows of a mask begin at multiples of this number of elements. CUDA's attention would copy other masks at each call.
MASK_ALIGNMENT = 8


def hidden_columns(step: MiniBatchStep) -> np.ndarray | None:
    """Return which columns are padding, bool [B, T]; None if none is.

    New tokens' columns are not marked, because attention among new tokens is causal.
    """
    padding = [np.arange(s.max_tokens) >= s.num_tokens[:, None] for s in step.segments if s.max_tokens]
    if step.recomputed is not None:
        padding.append(np.arange(step.recomputed_width) >= step.recomputed[:, None])
    if not any(columns.any() for columns in padding):
        return None
    padding.append(np.zeros((len(step.requests), step.width), dtype=bool))
    return np.concatenate(padding, axis=1)


def mask_of(hidden_BT: np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a mask to add to scores, [B, 1, 1, T]: -inf for hidden columns, else 0."""
    columns = hidden_BT.shape[1]
    added = np.zeros((len(hidden_BT), 1, 1, -(-columns // MASK_ALIGNMENT) * MASK_ALIGNMENT), dtype=np.float32)
    added[:, 0, 0, :columns][hidden_BT] = -np.inf
    return to_device(added, device).to(dtype)[..., :columns]


class StepMaker:
    """Makes the tensors of a wave's steps, from tables of its tokens and positions."""

    def __init__(self, wave: Wave, prompts: Prompts, plan: SamplingPlans, dtype: torch.dtype, device: torch.device):
        self.prompts, self.plan, self.dtype, self.device = prompts, plan, dtype, device
        self.attends_on_host = wave.policy.attention == "host"
        lengths = wave.workload.prompt_tokens + wave.workload.max_tokens
        if wave.queue is not None:
            lengths = np.full_like(lengths, wave.queue.workload.cached_tokens.max() + 1)
        self.tokens = TokenTable([prompts[request] for request in wave.begun.tolist()], lengths, device)
        self.rotary: Rotation | None = None  #: rotations of all positions
        self.windows = wave.shape.windows
        self.positions: dict[str, np.ndarray] = {}  #: positions of cached tokens; {} if not needed
        longest = int(lengths.max())
        if wave.shape.rotary or wave.shape.modules or self.windows:
            self.positions = position_tables(wave.entries, longest)
        if wave.shape.rotary:
            self.rotary = rotary_tables(wave.shape, longest, dtype, device)

    def enter(self, step: MiniBatchStep, answers: Mapping[int, Sequence[int]]) -> None:
        """Write the prompts of joining requests, and their answers so far, to the token table."""
        for place, request in zip(step.requests.tolist(), step.queued.tolist(), strict=True):
            self.tokens.enter(place, [*self.prompts[request], *answers.get(request, ())])

    def make(
        self, step: MiniBatchStep, place: PlaceArrays | None = None, rotation: Rotation | None = None
    ) -> StepTensors:
        """Return a step's tensors. ``place``: copies arrays to the device (default: ``together_to_device``).

        ``rotation``: rotations of the computed tokens, if the caller has them.
        """
        batch, width = len(step.requests), step.computed_width
        positions = computed_positions(step)
        assembled = not (step.prefill or step.in_place or self.attends_on_host and step.decodes)
        hidden = hidden_columns(step) if assembled else None
        columns = column_positions(step, self.positions) if assembled and self.windows else None
        total = step.context + step.new_tokens
        read = [*step.of("act"), *step.of("kv")]
        act_at = act_positions(step, self.positions) if step.act_rows and self.positions else None
        arrays: dict[Hashable, np.ndarray] = {
            "positions": positions.reshape(-1),
            "cells": self.tokens.cells(step.requests, positions).reshape(-1),
            "sampled": self.tokens.cells(step.requests, total),
        }
        if width > 1:
            arrays["last"] = np.arange(batch) * width + step.recomputed_width + step.new_tokens - 1
        for store in step.stores:
            arrays |= {(store.space, part): array for part, array in self._of_store(step, store).items()}
        arrays |= {("blocks", id(s)): s.block_table for s in read if s.tier == "device"}
        arrays |= {("buffer", id(s)): s.buffer_table for s in read if assembled and s.in_line}
        arrays |= {("common", i): common.rows for i, common in enumerate(step.commons)}
        there = place(arrays) if place else together_to_device(arrays, self.device)

        def by_segment(kind: str) -> dict[int, torch.Tensor]:
            return {id(s): there[kind, id(s)] for s in read if (kind, id(s)) in there}

        stores = {
            store.space: StorePlace(*[there.get((store.space, of)) for of in StorePlace._fields])
            for store in step.stores
        }
        return StepTensors(
            cells_R=there["cells"],
            positions_R=there["positions"],
            rotation_R=rotation or self._rotation(there["positions"]),
            act_rotation=None if act_at is None else self.rotation_at(act_at),
            act_positions=None if act_at is None or self.rotary else self._copy(act_at),
            mask_B11T=None if hidden is None else mask_of(hidden, self.dtype, self.device),
            window_masks={} if columns is None or step.width > 1 else self._window_masks(step, columns, hidden),
            places=None if columns is None else self._places(step, positions, columns),
            last_rows_B=there.get("last"),
            sampled_cells_B=there["sampled"],
            sampling=step_sampling(self.plan.select(step.queued), total, self.tokens.start[step.requests], self._copy),
            stores=stores,
            block_tables=by_segment("blocks"),
            buffer_tables=by_segment("buffer"),
            common_rows=tuple(there["common", i] for i in range(len(step.commons))),
        )

    def _window_masks(
        self, step: MiniBatchStep, columns_BT: np.ndarray, hidden_BT: np.ndarray | None
    ) -> dict[int, torch.Tensor]:
        """Return ``StepTensors.window_masks``, for windows that hide tokens."""
        masks = {}
        for window in self.windows:
            outside = columns_BT <= step.context[:, None] - window
            if outside.any():
                outside = outside if hidden_BT is None else outside | hidden_BT
                masks[window] = mask_of(outside, self.dtype, self.device)
        return masks

    def _places(self, step: MiniBatchStep, positions: np.ndarray, columns_BT: np.ndarray) -> WindowPositions:
        common = []
        for part in step.commons:
            of_part = [segment_positions(segment, self.positions) for segment in part.segments]
            common.append(self._copy(np.concatenate(of_part, axis=1)))
        return WindowPositions(self._copy(positions[:, step.recomputed_width :]), self._copy(columns_BT), tuple(common))

    def rotation_at(self, positions: np.ndarray) -> Rotation | None:
        """Return cosines and sines at these positions, flattened; None for models without rotary positions."""
        return self._rotation(self._copy(positions.reshape(-1)))

    def _rotation(self, positions: torch.Tensor) -> Rotation | None:
        if self.rotary is None:
            return None
        cos, sin = self.rotary
        return cos[positions], sin[positions]

    def _of_store(self, step: MiniBatchStep, store: Store) -> dict[str, np.ndarray]:
        """Return the arrays of a ``StorePlace``, by name."""
        arrays = {"blocks": store.blocks, "offsets": store.offsets} if store.tier == "device" else {}
        if len(store.rows) < len(step.requests) * step.computed_width:
            request, token = np.divmod(
                store.rows, step.width
            )  # convert from rows of new tokens to rows of computed tokens
            arrays["rows"] = request * step.computed_width + step.recomputed_width + token
        return arrays

    def _copy(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.device)
