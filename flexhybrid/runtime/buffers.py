"""Pools and buffers of an engine, allocated once, with the sizes that the memory plan counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.cache_entries import Pool, StoredCopy, parts
from flexhybrid.core.context.selection import layers_by_window, num_choosing, num_keeping, num_limited
from flexhybrid.core.memory import NUM_SLOTS, index_cells
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import BufferSizes
from flexhybrid.core.schedule.steps import MiniBatchStep, Segment, Store
from flexhybrid.core.work import MIN_KV_GEN_ROWS
from flexhybrid.runtime.kernels.compiled import Share
from flexhybrid.runtime.kernels.quantize import dequantize, packed_bytes, quantize
from flexhybrid.runtime.storage.disk import DiskSpace
from flexhybrid.runtime.storage.host_memory import HostMemory


class RowFormat(NamedTuple):
    """How a row (a token's keys and values, or its ACT) is stored: as ``dtype``, or quantized to ``bits``."""

    width: int  #: number of elements; of bytes, if quantized
    dtype: torch.dtype
    bits: int  #: 0: not quantized
    group: int  #: number of elements that share a scale

    @property
    def num_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def pack(self, rows: torch.Tensor, out: torch.Tensor, share: Share = map) -> None:
        quantize(rows, self.bits, out, self.group, share)

    def unpack(self, packed: torch.Tensor, out: torch.Tensor, share: Share = map) -> None:
        dequantize(packed, self.bits, out.dtype, out, self.group, share)


def row_format(width: int, bits: int | str, group: int, dtype: torch.dtype) -> RowFormat:
    """Return the format of rows of ``width`` elements, stored with ``bits``. ``dtype``: the compute dtype."""
    if isinstance(bits, str):
        return RowFormat(width, dtype, 0, group)
    return RowFormat(packed_bytes(width, bits, group), torch.uint8, bits, group)


class DiskPool(NamedTuple):
    """A pool on the disk. Block b of layer l begins at byte ``starts[l] + b * block_bytes``."""

    starts: tuple[int, ...]
    row_bytes: int

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.row_bytes

    def offset(self, layer: int, block: int, token: int = 0) -> int:
        return self.starts[layer] + block * self.block_bytes + token * self.row_bytes


class SharedPart(NamedTuple):
    """The blocks of g shared prefixes, each shared by m requests."""

    rows: torch.Tensor  #: [g, m] rows of the step that share each prefix
    keys: torch.Tensor  #: [g, G, T, d]
    values: torch.Tensor
    columns: torch.Tensor | None = None  #: [g, T] positions; None if no layer has a window


class Context(NamedTuple):
    """The input of attention: keys and values [B, G, T, d] in their buffer, and a mask to add to scores."""

    keys: torch.Tensor
    values: torch.Tensor
    mask_B11T: torch.Tensor | None
    commons: tuple[SharedPart, ...] = ()  #: shared prefixes


class StatePools:
    """Recurrent states of a wave's requests, on the device or the host.

    ``pools[layer]`` has a tensor [places, …] for each tensor of the layer's state. Places are numbered by mini-batch,
    so that those of a mini-batch are contiguous. States on the host are loaded to a slot of the device.
    """

    def __init__(
        self, shape: ModelShape, tier: str, places: int, batch: int, dtype: torch.dtype, make: dict[str, Callable]
    ):
        """``make``: tier -> function that makes a tensor of zeros, given size and dtype."""
        self.shape, self.dtype, self.on_host = shape, dtype, tier == "host"
        self.pools: dict[int, list[torch.Tensor]] = {}
        most = 0
        for layer in shape.recurrent:
            state = shape.state_of(layer)
            tensors = state.tensors if state else ()
            self.pools[layer] = [make[tier](places, *t.size, dtype=torch.float32 if t.wide else dtype) for t in tensors]
            most = max(most, state.num_bytes(dtype.itemsize) if state else 0)
        self._slots = make["device"](NUM_SLOTS, batch * most if self.on_host else 0, dtype=torch.uint8)

    def slot(self, layer: int, slot: int, batch: int) -> list[torch.Tensor]:
        """Return a slot's memory [batch, …] for each tensor of a layer's state."""
        state, start, rooms = self.shape.state_of(layer), 0, []
        for tensor in state.tensors if state else ():
            end = start + batch * tensor.num_bytes(self.dtype.itemsize)
            room = self._slots[slot, start:end].view(torch.float32 if tensor.wide else self.dtype)
            rooms.append(room.view(batch, *tensor.size))
            start = end
        return rooms


#: Limit of stored views. Contexts grow and regions change, so old views are not needed again.
MOST_VIEWS = 4096


class Buffers:
    """All tensors that live longer than a task. All start as zeros, because masked padding must not be NaN.

    ``pools[space]`` is [layer][block, …]. A block has the same number in all layers of a kind. A block is [16, row]; a
    native KV block in memory is head-major instead, [2, G, 16, d], so that the keys of a head are contiguous.
    """

    def __init__(self, shape: ModelShape, policy: Policy, sizes: BufferSizes, dtype: torch.dtype, device: torch.device):
        self.shape, self.policy, self.sizes = shape, policy, sizes
        #: views made by ``_view``: making one takes as long as a small kernel, and every layer needs the same ones
        self._views: dict[tuple, torch.Tensor] = {}
        self.disk: DiskSpace | None = None  #: space of ``disk_bytes``; the owner sets it
        self.disk_bytes = 0  #: size of all pools on the disk
        self.host_memory = HostMemory(pinned=device.type == "cuda")
        groups, d, kv, hidden = shape.num_kv_heads, shape.head_dim, shape.kv_width, shape.passed_width
        act = shape.act_width
        widths = {"kv": (kv, policy.bits.kv, shape.kv_group), "act": (act, policy.bits.act, shape.act_group)}
        self.formats = {name: row_format(*width, dtype) for name, width in widths.items()}

        def on_device(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        def on_host(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return self.host_memory.zeros(size, dtype)

        makers = {"device": on_device, "host": on_host}
        self.states = StatePools(shape, policy.state_tier, sizes.places, sizes.batch, dtype, makers)
        self.pools: dict[str, tuple[torch.Tensor, ...]] = {}
        self.disk_pools: dict[str, DiskPool] = {}
        self.staging: dict[str, torch.Tensor] = {}
        self.strips: dict[str, torch.Tensor] = {}
        for part in parts(tuple(sizes.staged_rows)):
            row = self.formats[part.representation]
            width, row_dtype = row.width, row.dtype
            of_layers, rows = layer_blocks(shape, policy, sizes, part.entry), sizes.staged_rows[part.entry]
            if part.tier == "disk":
                ends = self.disk_bytes + np.cumsum([0, *of_layers]) * BLOCK_TOKENS * row.num_bytes
                *starts, self.disk_bytes = ends.tolist()
                starts = [starts[shape.source_of(layer)] for layer in range(shape.num_layers)]
                self.disk_pools[part.space] = DiskPool(tuple(starts), row.num_bytes)
            else:
                make = on_device if part.tier == "device" else on_host
                block = (2, groups, BLOCK_TOKENS, d) if self.head_major(part) else (BLOCK_TOKENS, width)
                if len(set(of_layers)) == 1:
                    self.pools[part.space] = make(len(of_layers), of_layers[0], *block, dtype=row_dtype).unbind()
                else:
                    made = [make(blocks, *block, dtype=row_dtype) for blocks in of_layers]
                    self.pools[part.space] = tuple(made[shape.source_of(layer)] for layer in range(shape.num_layers))
            self.staging[part.space] = on_device(NUM_SLOTS, rows, width, dtype=row_dtype)
            if part.tier != "device":
                self.strips[part.space] = on_host(NUM_SLOTS, rows, width, dtype=row_dtype)

        self.loaded: dict[str, torch.Tensor] = {}
        self.read: dict[str, torch.Tensor] = {}
        slot_blocks = {
            "act": (sizes.act_buffer_blocks, sizes.act_staging_blocks),
            "kv": (sizes.kv_buffer_blocks, sizes.kv_staging_blocks),
        }
        for name, (on_link, from_disk) in slot_blocks.items():
            row = self.formats[name]
            self.loaded[name] = on_device(NUM_SLOTS, on_link, BLOCK_TOKENS * row.width, dtype=row.dtype)
            self.read[name] = on_host(NUM_SLOTS, from_disk, BLOCK_TOKENS * row.width, dtype=row.dtype)
        plain_act = sizes.act_blocks if policy.bits.act != "native" else 0
        plain_kv = sizes.plain_kv_blocks if policy.bits.kv != "native" else 0
        self.plain = {"act": on_device(plain_act * BLOCK_TOKENS, act), "kv": on_device(plain_kv * BLOCK_TOKENS, kv)}
        generated = max(sizes.act_blocks * BLOCK_TOKENS, MIN_KV_GEN_ROWS) if sizes.act_blocks else 0
        self.generated = on_device(generated, kv)
        self.attention = on_device(2, sizes.attention_tokens * groups * d)
        hidden_on_host = policy.hidden == "host"
        self.hidden_slots = on_device(NUM_SLOTS, sizes.step_rows if hidden_on_host else 0, hidden)
        self.host_hidden = on_host(sizes.hidden_rows if hidden_on_host else 0, hidden)
        strip_rows = sizes.decode_batch if policy.host_attends else 0
        #: attention output of the host; if the device attends too: float32, with log(denominator) for each head
        part = (shape.query_width, dtype)
        if policy.splits_attention:
            part = (shape.query_width + shape.num_heads, torch.float32)
        self.query_strip = on_host(NUM_SLOTS, strip_rows, shape.query_width + kv)
        self.out_strip = on_host(NUM_SLOTS, strip_rows, part[0], dtype=part[1])
        placed = num_limited(policy.selection, shape.num_layers) > 0
        self.place_strip = on_host(NUM_SLOTS, sizes.decode_batch * placed, groups, dtype=torch.int64)
        self.attended = on_device(NUM_SLOTS, strip_rows, part[0], dtype=part[1])
        choosing = num_choosing(policy.selection, shape.num_layers) > 0
        self.gathered = {
            name: on_host(NUM_SLOTS, sizes.selected_rows.get(name, 0) * choosing, row.width, dtype=row.dtype)
            for name, row in self.formats.items()
        }
        self.host_index = on_host(index_cells(shape, policy, sizes.index_rows) * choosing, dtype=torch.int32)

    def head_major(self, part: StoredCopy | Segment | Store) -> bool:
        """Return whether blocks are [2, G, 16, d] instead of [16, row]."""
        return part.representation == "kv" and part.tier != "disk" and self.formats["kv"].dtype != torch.uint8

    def packed(self, representation: str) -> bool:
        """Return whether rows are stored quantized."""
        return self.formats[representation].dtype == torch.uint8

    def attention_views(self, batch: int, tokens: int, before: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the attention buffer for keys and values, [B, G, T, d] each, after ``before`` tokens."""
        groups, d = self.shape.num_kv_heads, self.shape.head_dim
        used = slice(before * groups * d, (before + batch * tokens) * groups * d)
        keys, values = self.attention[0, used], self.attention[1, used]
        return keys.view(batch, groups, tokens, d), values.view(batch, groups, tokens, d)

    def _view(self, key: tuple, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the stored view with this key; make it at its first use."""
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            view = self._views[key] = make()
        return view

    def staged(self, space: str, slot: int, count: int) -> torch.Tensor:
        """Return the first ``count`` rows of a slot of the device's staging buffer for a pool."""
        return self._view(("staged", space, slot, count), lambda: self.staging[space][slot, :count])

    def landed(self, space: str, slot: int, count: int) -> torch.Tensor:
        """Return the first ``count`` rows of a slot of the host's staging buffer (``strips``) for a pool."""
        return self._view(("landed", space, slot, count), lambda: self.strips[space][slot, :count])

    def act_rows(self, slot: int, count: int) -> torch.Tensor:
        """Return ACT rows [count, width] in the compute dtype: as loaded, or dequantized."""
        if self.packed("act"):
            return self.plain["act"][:count]
        return self._view(("act", slot, count), lambda: self.chosen_rows(self.loaded, "act", slot, count))

    def each_head(self, representation: str) -> bool:
        """Return whether each head may choose its own tokens: only if blocks are head-major, not one row for all."""
        return representation == "kv" and not self.packed("kv")

    def chosen_rows(self, memory: dict[str, torch.Tensor], representation: str, slot: int, tokens: int) -> torch.Tensor:
        """Return the rows of chosen tokens in ``memory`` (``gathered`` on the host, or ``loaded`` on the device).

        They are [tokens, row]; if each head chooses, keys and then values [2, G · tokens, d].
        """
        width = self.formats[representation].width
        rows = memory[representation][slot].view(-1)[: tokens * width]
        return rows.view(2, -1, self.shape.head_dim) if self.each_head(representation) else rows.view(tokens, width)

    def loaded_region(self, step: MiniBatchStep, segment: Segment, slot: int) -> torch.Tensor:
        """Return a slot's region for a segment's blocks on the device: [*block_table.shape, 16 · row].

        The regions of a slot are adjacent. Native ACT of the device has a region too: it is copied next to loaded ACT.
        """
        name = segment.representation
        copies_all = name == "act" and not self.packed("act")
        before = _blocks_before(step, segment, lambda other: copies_all or other.tier != "device")
        shape = segment.block_table.shape
        return self._view(
            ("loaded", name, slot, before, shape), lambda: _region(self.loaded[name][slot], before, shape)
        )

    def loaded_rows(self, step: MiniBatchStep, segment: Segment, slot: int) -> torch.Tensor:
        """Return ``loaded_region`` as rows: [*block_table.shape, 16, row]."""
        region = self.loaded_region(step, segment, slot)
        key = ("loaded rows", region.data_ptr(), region.shape)
        return self._view(key, lambda: region.unflatten(-1, (BLOCK_TOKENS, -1)))

    def plain_region(self, segment: Segment, first: int) -> torch.Tensor:
        """Return a segment's memory for dequantized rows, after ``first`` blocks: [*block_table.shape, 16, width]."""
        name, shape = segment.representation, segment.block_table.shape
        rows = slice(first * BLOCK_TOKENS, (first + math.prod(shape)) * BLOCK_TOKENS)
        return self._view(
            ("plain", name, first, shape), lambda: self.plain[name][rows].unflatten(0, (*shape, BLOCK_TOKENS))
        )

    def read_region(self, step: MiniBatchStep, segment: Segment, slot: int) -> torch.Tensor:
        """Return a slot's region in host memory for a segment's disk blocks: [*block_table.shape, 16 · row]."""
        before = _blocks_before(step, segment, lambda other: other.tier == "disk")
        name, shape = segment.representation, segment.block_table.shape
        return self._view(("read", name, slot, before, shape), lambda: _region(self.read[name][slot], before, shape))

    def staged_blocks(self, step: MiniBatchStep, segment: Segment, slot: int) -> torch.Tensor:
        """Return ``read_region`` as one list of blocks: [·, 16 · row]."""
        region = self.read_region(step, segment, slot)
        key = ("staged blocks", region.data_ptr(), region.dtype, region.shape)
        return self._view(key, lambda: region.flatten(0, 1))


def layer_blocks(shape: ModelShape, policy: Policy, sizes: BufferSizes, entry: str) -> list[int]:
    """Return the number of blocks of an entry's pool in each layer; 0 for layers that borrow keys and values."""
    whole = num_keeping(policy.selection, shape.num_layers)
    of_windows = {window: Pool(entry, window).name for window in layers_by_window(shape, policy.selection)}
    blocks = [sizes.whole_blocks.get(entry, 0)] * whole
    for layer in range(whole, shape.num_layers):
        name = of_windows.get(shape.attention_of(layer).window, entry)
        blocks.append(sizes.pool_blocks[name] if layer in shape.attending else 0)
    return blocks


def _blocks_before(step: MiniBatchStep, segment: Segment, has_region: Callable[[Segment], bool]) -> int:
    """Return the number of a slot's blocks before a segment's region: those of earlier segments with a region."""
    before = 0
    for other in step.of(segment.representation):
        if other is segment:
            break
        if has_region(other):
            before += other.block_table.size
    return before


def _region(buffer: torch.Tensor, before: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the blocks of a slot after the first ``before``, in a table of this shape."""
    return buffer[before : before + math.prod(shape)].view(*shape, -1)
