"""Weights in memory and on the disk: a flat run of bytes a layer and tier, and the tensors that are views into them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from flexhybrid.core.memory import NUM_SLOTS
from flexhybrid.core.model.layout import LayerLayout, TensorSpot, layer_layout
from flexhybrid.core.model.shape import DTYPE_BYTES, ModelShape
from flexhybrid.core.plan import PAGE_BYTES
from flexhybrid.core.policy import Policy
from flexhybrid.core.wave import disk_from
from flexhybrid.runtime.kernels.quantize import dequantize, quantize
from flexhybrid.runtime.storage.disk import DiskSpace
from flexhybrid.runtime.storage.host_memory import HostMemory

#: A tensor cut by rows: a streamed and a resident part, or one whole.
Parts = tuple[torch.Tensor, ...]


def linear(rows: torch.Tensor, parts: Parts, bias: torch.Tensor | None) -> torch.Tensor:
    """rows · Wᵀ + bias with W given in row parts; [R, in] -> [R, out]."""
    if len(parts) == 1:
        return F.linear(rows, parts[0], bias)
    product = torch.cat([F.linear(rows, part) for part in parts], dim=-1)
    return product if bias is None else product.add_(bias)


class WeightSource(Protocol):
    """Where weights come from: a checkpoint on disk, or random numbers."""

    def layer_tensors(self, layer: int) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(layout name, first row, tensor) of one layer, one at a time."""

    def outer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors outside the layers, one at a time."""

    def skew(self, layer: int) -> torch.Tensor | None:
        """[G, d, d]: what a rotary model's turned queries and keys are multiplied with before a selection guesses
        (``runtime.skew``); None: nothing."""


class DiskPlace(NamedTuple):
    """Where scratch space may lie, and how fast it is meant to be (None: as fast as it is)."""

    directory: Path | str | None = None
    gb_per_s: float | None = None

    def space(self, num_bytes: int) -> DiskSpace | None:
        """Space of that size; None for nothing."""
        return DiskSpace(self.directory, num_bytes, self.gb_per_s) if num_bytes else None


ANYWHERE = DiskPlace()


class WeightSlots(NamedTuple):
    """Where streamed layers land on the device, two in turn, and where their disk bytes wait in host memory."""

    device: list[torch.Tensor]
    staging: list[torch.Tensor]
    plain: torch.Tensor  #: a layer in the compute dtype, made of packed bytes; empty where bits are native


class Weights:
    """All weights of a model, placed: of each layer a prefix on the device, then a run on the host, the rest on disk.

    Engines that differ in their caches only can share one Weights.
    """

    def __init__(
        self, shape: ModelShape, source: WeightSource, dtype: str, device: torch.device, policy: Policy,
        disk: DiskPlace = ANYWHERE,
    ):  # fmt: skip
        self.shape, self.dtype, self.device, self.bits = shape, getattr(torch, dtype), device, policy.bits.weights
        self.bytes_per_element = p = DTYPE_BYTES[dtype]
        self.layout: LayerLayout = layer_layout(shape, policy.bits.element_bytes(p).weights, p)
        self.plain_layout: LayerLayout = layer_layout(shape, p)
        self.streamed_from = self.layout.resident_prefix(policy.weights.device)
        self.disk_from = disk_from(self.layout, policy)
        on_disk = self.layout.total_bytes - self.disk_from
        self.disk_stride = on_disk + -on_disk % PAGE_BYTES
        self.host_memory = HostMemory(pinned=device.type == "cuda")
        self.resident = [self._on_device(self.streamed_from) for _ in range(shape.num_layers)]
        self.on_host = [self.host_memory.bytes(self.disk_from - self.streamed_from) for _ in range(shape.num_layers)]
        self.disk = disk.space(self.disk_stride * shape.num_layers)
        self.outer: dict[str, torch.Tensor] = {}
        #: of a rotary model, a layer's skewing matrices [G, d, d] or None
        self.skewing: list[torch.Tensor | None] = []
        try:
            self._fill(source)
        except BaseException:
            self.close()
            raise

    def _on_device(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def _fill(self, source: WeightSource) -> None:
        spots = {spot.name: spot for spot in self.layout.spots}
        to_disk = torch.zeros(self.disk_stride, dtype=torch.uint8)
        for layer in range(self.shape.num_layers):
            for name, first_row, tensor in source.layer_tensors(layer):
                spot = spots[name]
                tensor = tensor.to(self.dtype).contiguous()
                if self.bits != "native" and spot.cols:
                    tensor = quantize(tensor, self.bits).cpu()
                self._place(layer, spot.start + first_row * spot.row_bytes, tensor.view(-1).view(torch.uint8), to_disk)
            if self.disk:
                self.disk.write([(layer * self.disk_stride, to_disk)])
        # Copies, all of them: a tensor of the source's would keep its whole file mapped.
        for name, tensor in source.outer_tensors():
            self.outer[name] = tensor.to(device=self.device, dtype=self.dtype, copy=True)
        for layer in range(self.shape.num_layers if self.shape.rotary else 0):
            matrices = source.skew(layer)
            self.skewing.append(None if matrices is None else matrices.clone())

    def _place(self, layer: int, start: int, flat: torch.Tensor, to_disk: torch.Tensor) -> None:
        """Bytes of a layer from ``start`` on, each to its tier."""
        ends = (self.streamed_from, self.disk_from, self.layout.total_bytes)
        first = 0
        for end, memory in zip(ends, (self.resident[layer], self.on_host[layer], to_disk), strict=True):
            low, high = max(start, first), min(start + len(flat), end)
            if low < high:
                memory[low - first : high - first].copy_(flat[low - start : high - start])
            first = end

    @property
    def layer_bytes(self) -> dict[str, int]:
        """Bytes of the layers that lie in each tier."""
        on_disk = (self.layout.total_bytes - self.disk_from) * self.shape.num_layers if self.disk else 0
        return {"device": sum(map(len, self.resident)), "host": sum(map(len, self.on_host)), "disk": on_disk}

    def close(self) -> None:
        """Give the disk space back."""
        if self.disk:
            self.disk.close()

    def make_slots(self) -> WeightSlots:
        """Buffers of an engine for streamed layers."""
        streamed, on_disk = self.layout.total_bytes - self.streamed_from, self.layout.total_bytes - self.disk_from
        return WeightSlots(
            [self._on_device(streamed) for _ in range(NUM_SLOTS if streamed else 0)],
            [self.host_memory.bytes(on_disk) for _ in range(NUM_SLOTS if on_disk else 0)],
            self._on_device(self.plain_layout.total_bytes if self.bits != "native" else 0),
        )

    def views(self, layer: int, slot: torch.Tensor | None) -> dict[str, Parts]:
        """Layout name -> parts as stored, over the resident bytes of a layer and the given slot. Packed matrices are
        [rows, bytes of a row] of uint8."""
        views = {spot.name: self._parts(spot, spot.rows, layer, slot) for spot in self.layout.spots}
        spot = next(spot for spot in self.layout.spots if spot.name == "kvq.weight")
        return views | {"kv.weight": self._parts(spot, self.shape.kv_width, layer, slot)}

    def _parts(self, spot: TensorSpot, rows: int, layer: int, slot: torch.Tensor | None) -> Parts:
        """The first ``rows`` rows of a tensor."""
        end = spot.start + rows * spot.row_bytes
        cut = min(max(self.streamed_from, spot.start), end)
        ranges = [(self.resident[layer], spot.start, cut)]
        if slot is not None:
            ranges.append((slot, cut - self.streamed_from, end - self.streamed_from))
        packed = self.bits != "native" and spot.cols
        parts = []
        for memory, low, high in ranges:
            if high > low:
                flat = memory[low:high] if packed else memory[low:high].view(self.dtype)
                parts.append(flat.view(-1, spot.row_bytes if packed else spot.cols) if spot.cols else flat)
        return tuple(parts)

    def plain_views(self, plain: torch.Tensor) -> dict[str, Parts]:
        """Layout name -> the tensor in the compute dtype, over a slot's plain layer."""
        views = {}
        for spot in self.plain_layout.spots:
            flat = plain[spot.start : spot.end].view(self.dtype)
            views[spot.name] = (flat.view(spot.rows, spot.cols) if spot.cols else flat,)
        return views | {"kv.weight": (views["kvq.weight"][0][: self.shape.kv_width],)}

    def dequantize(self, stored: dict[str, Parts], plain: dict[str, Parts]) -> None:
        """Make a layer's tensors in the compute dtype of its stored ones."""
        for spot in self.plain_layout.spots:
            row = 0
            for part in stored[spot.name]:
                target = plain[spot.name][0][row : row + len(part)]
                if spot.cols:
                    dequantize(part, self.bits, self.dtype, out=target)
                else:
                    target.copy_(part)
                row += len(part)
