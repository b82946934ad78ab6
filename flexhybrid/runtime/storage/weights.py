"""Weights in memory and on the disk: one byte range per layer and tier. Tensors are views of these ranges."""

import os
import warnings
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import torch

from flexhybrid.core.memory import NUM_SLOTS
from flexhybrid.core.model.layout import PlacedLayer, TensorSpot, kind_layouts, placed_layers
from flexhybrid.core.model.packing import PackedRun, Packing
from flexhybrid.core.model.shape import DTYPE_BYTES, ModelShape
from flexhybrid.core.plan import PAGE_BYTES
from flexhybrid.core.policy import Policy
from flexhybrid.runtime.kernels.compiled import Share
from flexhybrid.runtime.kernels.quantize import dequantize, quantize
from flexhybrid.runtime.kernels.unpack import typed, unpack
from flexhybrid.runtime.models.module import ModulePath
from flexhybrid.runtime.storage.disk import DiskSpace
from flexhybrid.runtime.storage.host_memory import HostMemory
from flexhybrid.runtime.storage.parts import Parts

#: Alignment of tensors in shared memory, the same as the allocator's.
ALIGNED_BYTES = 512

#: Environment variables with the allocator's settings: since torch 2.9, and before.
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allow_expandable_segments(device: torch.device) -> None:
    """Allow segments of CUDA memory to grow, unless the user has set this: it avoids fragmentation.

    The setting applies to the whole process. It changes no results.
    """
    given = next((os.environ[name] for name in SETTINGS if os.environ.get(name)), "")
    if device.type != "cuda" or "expandable_segments" in given:
        return
    # New settings replace all earlier ones.
    settings = f"{given},expandable_segments:True" if given else "expandable_segments:True"
    try:
        change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (change or torch.cuda.memory._set_allocator_settings)(settings)
    except (AttributeError, RuntimeError, ValueError) as error:  # another allocator, or an old version of torch
        warnings.warn(f"CUDA memory is allocated in segments of fixed size: {error}", stacklevel=2)


def release_cached(device: torch.device) -> None:
    """Release the memory that a CUDA device's allocator keeps of freed tensors."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class PackedParts(NamedTuple):
    """Matrices of the same packing, in memory: views of their parts."""

    packing: Packing
    parts: dict[str, torch.Tensor]


Stored = torch.Tensor | PackedParts


class WeightSource(Protocol):
    """A source of a model's weights, one tensor at a time: a checkpoint, or random numbers."""

    def layer_tensors(self, layer: int) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (layout name, the source's own name, tensor) of a layer. A tensor may come in several row parts; a
        packed tensor comes as its bytes, in the order of ``TensorSpot.runs``."""
        ...

    def outer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (layout name, tensor) of the tensors outside the layers."""
        ...

    def skew(self, layer: int) -> torch.Tensor | None:
        """Return the skewing matrices [G, d, d] of a rotary model (``selections.skew``); None if it is not skewed."""
        ...


class DiskPlace(NamedTuple):
    """The folder of scratch space (None: the user's cache folder) and its pace (None: the disk's own speed)."""

    directory: Path | str | None = None
    gb_per_s: float | None = None

    def space(self, num_bytes: int) -> DiskSpace | None:
        """Return scratch space of this size; None for 0 bytes."""
        return DiskSpace(self.directory, num_bytes, self.gb_per_s) if num_bytes else None


ANYWHERE = DiskPlace()


class WeightSlots(NamedTuple):
    """The buffers of streamed layers: two on the device, and two on the host for data from the disk."""

    device: list[torch.Tensor]
    staging: list[torch.Tensor]
    plain: torch.Tensor  #: one unpacked layer in the compute dtype; empty if nothing is packed


class Weights:
    """All weights of a model. The bytes of each layer are first on the device, then in host memory, then on the disk.

    Engines with the same placement of weights can share one Weights.
    """

    def __init__(
        self,
        shape: ModelShape,
        source: WeightSource,
        dtype: str,
        device: torch.device,
        policy: Policy,
        disk: DiskPlace = ANYWHERE,
    ):
        self.shape, self.dtype, self.device, self.bits = shape, getattr(torch, dtype), device, policy.bits.weights
        self.dtype_name, self.bytes_per_element = dtype, (width := DTYPE_BYTES[dtype])
        self.stored_width = policy.bits.element_bytes(width, shape.kv_group).weights
        self.placed = placed_layers(shape, policy.weights, self.stored_width, width)
        self.plain_layouts = kind_layouts(shape.unpacked, width)
        by_layer = [self.placed_of(layer) for layer in range(shape.num_layers)]
        self.host_memory = HostMemory(pinned=device.type == "cuda")
        on_disk = (placed.disk_bytes + -placed.disk_bytes % PAGE_BYTES for placed in by_layer)
        self.disk_starts = list(accumulate(on_disk, initial=0))  #: start of each layer, on whole pages; the end
        self.disk = disk.space(self.disk_starts[-1])
        self.outer: dict[str, torch.Tensor] = {}
        self.skewing: list[torch.Tensor | None] = []  #: skewing matrices [G, d, d] of each rotary layer
        allow_expandable_segments(device)
        try:
            #: transformers' layers; None for models with own layer functions
            self.modules = ModulePath(shape, self.dtype, device) if shape.modules else None
            # First the tensors whose source uses temporary device memory: these memories are freed before the permanent
            # ones are allocated.
            self._fill_outer(source)
            self.resident = self._on_device_together([placed.streamed_from for placed in by_layer])
            self.on_host = [self.host_memory.bytes(placed.disk_from - placed.streamed_from) for placed in by_layer]
            self._fill(source)
        except BaseException:
            self.close()
            raise
        release_cached(device)

    def _on_device(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def _on_device_together(self, sizes: list[int]) -> list[torch.Tensor]:
        """Return memories of these sizes as views of one. CUDA's allocator would round up each of them."""
        starts = list(accumulate((size + -size % ALIGNED_BYTES for size in sizes), initial=0))
        whole = self._on_device(starts[-1])
        return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def _fill_outer(self, source: WeightSource) -> None:
        for name, tensor in source.outer_tensors():
            release_cached(self.device)
            dtype = torch.float32 if self.modules and self.modules.stays_float32(name) else self.dtype
            # Copy always: a view of the source's tensor would keep its file mapped.
            self.outer[name] = tensor.to(device=self.device, dtype=dtype, copy=True)
        if self.modules:
            self.modules.place_outer(self.outer)
        release_cached(self.device)

    def _fill(self, source: WeightSource) -> None:
        for layer in range(self.shape.num_layers):
            to_disk = torch.zeros(self.disk_starts[layer + 1] - self.disk_starts[layer], dtype=torch.uint8)
            spots = {spot.name: spot for spot in self.placed_of(layer).layout.spots}
            ends = {name: spot.start for name, spot in spots.items()}  # end of the bytes that are in place
            for name, _, tensor in source.layer_tensors(layer):
                tensor = tensor if spots[name].runs else tensor.to(self.dtype).contiguous()
                if isinstance(self.bits, int) and spots[name].cols:
                    tensor = quantize(tensor.flatten(0, -2), self.bits).cpu()
                flat = tensor.view(-1).view(torch.uint8)
                self._place(layer, ends[name], flat, to_disk)
                ends[name] += len(flat)
            if self.disk and len(to_disk):
                self.disk.write([(self.disk_starts[layer], to_disk)])
        for layer in range(self.shape.num_layers if self.shape.rotary else 0):
            matrices = source.skew(layer)
            self.skewing.append(None if matrices is None else matrices.clone())

    def unpacks(self, layer: int) -> bool:
        """Return whether a layer is unpacked before it computes."""
        return self.shape.of_weights(self.shape.weights_kind(layer)).unpacks(self.bits)

    def placed_of(self, layer: int) -> PlacedLayer:
        """Return the stored layout of a layer, and its placement."""
        return self.placed[self.shape.weights_kind(layer)]

    def _place(self, layer: int, start: int, flat: torch.Tensor, to_disk: torch.Tensor) -> None:
        """Copy bytes of a layer, from its byte ``start`` on, to their tiers. ``to_disk``: the disk's buffer."""
        layout, streamed_from, disk_from = self.placed_of(layer)
        ends = (streamed_from, disk_from, layout.total_bytes)
        first = 0
        for end, memory in zip(ends, (self.resident[layer], self.on_host[layer], to_disk), strict=True):
            low, high = max(start, first), min(start + len(flat), end)
            if low < high:
                memory[low - first : high - first].copy_(flat[low - start : high - start])
            first = end

    @property
    def layer_bytes(self) -> dict[str, int]:
        """Return the bytes of all layers in each tier."""
        on_disk = sum(self.placed_of(layer).disk_bytes for layer in range(self.shape.num_layers))
        return {"device": sum(map(len, self.resident)), "host": sum(map(len, self.on_host)), "disk": on_disk}

    def close(self) -> None:
        """Release the disk space."""
        if self.disk:
            self.disk.close()

    def make_slots(self) -> WeightSlots:
        """Allocate the buffers of streamed layers for one engine."""
        streamed, on_disk = (
            max(of) for of in zip(*((p.streamed_bytes, p.disk_bytes) for p in self.placed), strict=True)
        )
        plain = max(layout.total_bytes for layout in self.plain_layouts)
        return WeightSlots(
            [self._on_device(streamed) for _ in range(NUM_SLOTS if streamed else 0)],
            [self.host_memory.bytes(on_disk) for _ in range(NUM_SLOTS if on_disk else 0)],
            self._on_device(plain if self.shape.unpacks(self.bits) else 0),
        )

    def views(self, layer: int, slot: torch.Tensor | None) -> dict[str, Parts]:
        """Return {layout name: parts as stored}: views of a layer's resident bytes and of its slot.

        Quantized matrices are uint8 [rows, bytes per row]; the checkpoint's packed tensors are their bytes.
        """
        spots = self.placed_of(layer).layout.spots
        views = {spot.name: self._parts(spot, spot.rows, layer, slot) for spot in spots}
        if self.modules or self.shape.packed_elements:
            return views
        spot = next(spot for spot in spots if spot.name == "kvq.weight")
        return views | {"kv.weight": self._parts(spot, self.shape.kv_width, layer, slot)}

    def _parts(self, spot: TensorSpot, rows: int, layer: int, slot: torch.Tensor | None) -> Parts:
        """Return the first ``rows`` rows of a tensor, in parts."""
        end = spot.end if spot.runs else spot.start + rows * spot.row_bytes
        streamed_from = self.placed_of(layer).streamed_from
        cut = min(max(streamed_from, spot.start), end)
        ranges = [(self.resident[layer], spot.start, cut)]
        if slot is not None:
            ranges.append((slot, cut - streamed_from, end - streamed_from))
        packed = self.bits != "native" and spot.cols
        parts = []
        for memory, low, high in ranges:
            if high > low and spot.runs:
                parts.append(memory[low:high])
            elif high > low:
                flat = memory[low:high] if packed else memory[low:high].view(self.dtype)
                parts.append(flat.view(-1, spot.row_bytes if packed else spot.cols) if spot.cols else flat)
        return tuple(parts)

    def plain_views(self, plain: torch.Tensor, layer: int = 0) -> dict[str, Parts]:
        """Return {layout name: tensor in the compute dtype}: views of a dequantized layer (``WeightSlots.plain``)."""
        views = {}
        for spot in self.plain_layouts[self.shape.weights_kind(layer)].spots:
            flat = plain[spot.start : spot.end].view(self.dtype)
            views[spot.name] = (flat.view(spot.rows, spot.cols) if spot.cols else flat,)
        if self.modules:
            return views
        return views | {"kv.weight": (views["kvq.weight"][0][: self.shape.kv_width],)}

    def dequantize(self, pairs: Sequence[tuple[Stored, torch.Tensor]], share: Share = map) -> None:
        """Unpack or copy each stored tensor of ``plain_pairs``. ``share`` as in ``kernels.quantize``."""
        for part, target in pairs:
            if isinstance(part, PackedParts):
                unpack(part.packing, part.parts, target, share)
            elif isinstance(self.bits, int) and target.dim() > 1:
                dequantize(part, self.bits, self.dtype, out=target, share=share)
            else:
                target.copy_(part)

    def plain_pairs(
        self, layer: int, stored: dict[str, Parts], plain: dict[str, Parts]
    ) -> list[tuple[Stored, torch.Tensor]]:
        """Return (stored part, its place in the compute dtype) for each part; adjacent vectors are joined. Packed
        matrices of a run are together."""
        pairs: list[tuple[Stored, torch.Tensor]] = []
        runs = {spot.name: spot.runs for spot in self.placed_of(layer).layout.spots}
        for name, (whole, *_) in plain.items():
            row = 0
            if of := runs.get(name, ()):
                pairs += _packed_pairs(of, stored[name][0], whole)
                continue
            for part in stored.get(name, ()) if name != "kv.weight" else ():
                target, rows = whole[row : row + len(part)], len(part)
                if pairs and all(map(_is_neighbour, pairs[-1], (part, target))):
                    part, target = map(_joined, cast("tuple[torch.Tensor, torch.Tensor]", pairs.pop()), (part, target))
                pairs.append((part, target))
                row += rows
        return pairs


def _packed_pairs(
    runs: Sequence[PackedRun], memory: torch.Tensor, whole: torch.Tensor
) -> Iterator[tuple[Stored, torch.Tensor]]:
    """Yield (parts of a run in ``memory``, the rows [matrices, rows, columns] of ``whole`` that it fills)."""
    start = 0
    for run in runs:
        sizes = run.part_bytes
        parts = memory[start : start + sum(sizes)].split(sizes)
        start += sum(sizes)
        rows, cols = run.packing.rows, run.packing.cols
        flat = whole.view(-1, cols)
        target = flat.as_strided(
            (run.count, rows, cols), (run.step * cols, cols, 1), flat.storage_offset() + run.first * cols
        )
        yield PackedParts(run.packing, typed(run, parts)), target


def _is_neighbour(before: Stored, vector: torch.Tensor) -> bool:
    """Return whether ``vector`` begins where ``before`` ends, in the same memory."""
    if isinstance(before, PackedParts):
        return False
    alike = before.dim() == vector.dim() == 1 and before.dtype == vector.dtype
    same_memory = alike and before.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
    return same_memory and before.data_ptr() + before.nbytes == vector.data_ptr()


def _joined(before: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    return before.as_strided((len(before) + len(vector),), (1,))
