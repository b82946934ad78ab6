"""Weights in memory: a flat run of bytes a layer and tier, and the tensors that are views into them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F

from flexhybrid.core.layout import LayerLayout, TensorSpot, layer_layout
from flexhybrid.core.memory import NUM_SLOTS
from flexhybrid.core.shape import DTYPE_BYTES, ModelShape
from flexhybrid.runtime.host_memory import HostMemory

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


class Weights:
    """All weights of a model, placed: a resident prefix of each layer on the device, the rest on the host.

    Engines that differ in their caches only can share one Weights.
    """

    def __init__(self, shape: ModelShape, source: WeightSource, dtype: str, device: torch.device, device_share: float):
        self.shape, self.dtype, self.device = shape, getattr(torch, dtype), device
        self.bytes_per_element = DTYPE_BYTES[dtype]
        self.layout: LayerLayout = layer_layout(shape, self.bytes_per_element)
        self.streamed_from = self.layout.resident_prefix(device_share)
        streamed = self.layout.total_bytes - self.streamed_from
        self.resident = [
            torch.zeros(self.streamed_from, dtype=torch.uint8, device=device) for _ in range(shape.num_layers)
        ]
        self.host_memory = HostMemory(pinned=device.type == "cuda")
        self.streamed = [self.host_memory.bytes(streamed) for _ in range(shape.num_layers)]
        self.outer: dict[str, torch.Tensor] = {}
        for layer in range(shape.num_layers):
            for name, first_row, tensor in source.layer_tensors(layer):
                self._place(layer, name, first_row, tensor.to(self.dtype))
        for name, tensor in source.outer_tensors():
            self.outer[name] = tensor.to(device=device, dtype=self.dtype)

    def _place(self, layer: int, name: str, first_row: int, tensor: torch.Tensor) -> None:
        spot = next(spot for spot in self.layout.spots if spot.name == name)
        start = spot.start + first_row * spot.row_bytes
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        cut = min(max(self.streamed_from - start, 0), flat.numel())
        self.resident[layer][start : start + cut].copy_(flat[:cut])
        if cut < flat.numel():
            offset = start + cut - self.streamed_from
            self.streamed[layer][offset : offset + flat.numel() - cut].copy_(flat[cut:])

    def make_slots(self) -> list[torch.Tensor]:
        """Device buffers that streamed layers land in."""
        size = self.layout.total_bytes - self.streamed_from
        return [torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(NUM_SLOTS if size else 0)]

    def views(self, layer: int, slot: torch.Tensor | None) -> dict[str, Parts]:
        """Layout name -> parts, over the resident bytes of a layer and the given slot."""
        return {spot.name: self._parts(spot, 0, spot.rows, layer, slot) for spot in self.layout.spots} | {
            "kv.weight": self._parts(self._spot("kvq.weight"), 0, self.shape.kv_width, layer, slot)
        }

    def _spot(self, name: str) -> TensorSpot:
        return next(spot for spot in self.layout.spots if spot.name == name)

    def _parts(self, spot: TensorSpot, first_row: int, last_row: int, layer: int, slot) -> Parts:
        start = spot.start + first_row * spot.row_bytes
        end = spot.start + last_row * spot.row_bytes
        cut = min(max(self.streamed_from, start), end)
        ranges = [(self.resident[layer], start, cut)]
        if slot is not None:
            ranges.append((slot, cut - self.streamed_from, end - self.streamed_from))
        parts = []
        for memory, low, high in ranges:
            if high > low:
                flat = memory[low:high].view(self.dtype)
                parts.append(flat.view(-1, spot.cols) if spot.cols else flat)
        return tuple(parts)
