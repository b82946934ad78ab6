"""Places of recurrent states: one for each request of a wave, on the device or the host.

Places are numbered as the mini-batches are packed, so that those of a mini-batch are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexhybrid.core.memory import NUM_SLOTS
from flexhybrid.core.model.shape import ModelShape


class StatePools:
    """``pools[layer]``: a tensor [places, …] for each tensor of a layer's state. States on the host pass through a
    device slot, a mini-batch at a time."""

    def __init__(
        self, shape: ModelShape, tier: str, places: int, batch: int, dtype: torch.dtype, make: dict[str, Callable]
    ):
        """``make``: by tier, what makes a tensor of zeros of a size and a dtype."""
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
        """Return a slot's room [batch, …] for each tensor of a layer's state."""
        state, start, rooms = self.shape.state_of(layer), 0, []
        for tensor in state.tensors if state else ():
            end = start + batch * tensor.num_bytes(self.dtype.itemsize)
            room = self._slots[slot, start:end].view(torch.float32 if tensor.wide else self.dtype)
            rooms.append(room.view(batch, *tensor.size))
            start = end
        return rooms
