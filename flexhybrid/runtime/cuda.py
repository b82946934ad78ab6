"""CUDA streams, events and copies behind the faces that the lanes and the executor know."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from flexhybrid.runtime.host_memory import HostMemory


class CudaClock:
    """Places device events on the clock of ``time.perf_counter``: one timed event and one reading, taken together."""

    def __init__(self, device: torch.device):
        stream = torch.cuda.Stream(device)
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(stream)
        self._origin.synchronize()
        self._origin_s = time.perf_counter()

    def seconds(self, event: torch.cuda.Event) -> float:
        return self._origin_s + self._origin.elapsed_time(event) / 1e3


class CudaStream:
    """A StreamFace over one CUDA stream."""

    def __init__(self, device: torch.device, clock: CudaClock):
        self._stream = torch.cuda.Stream(device)
        self._clock = clock

    def wait(self, event: torch.cuda.Event) -> None:
        self._stream.wait_event(event)

    def record(self) -> torch.cuda.Event:
        # blocking: a host lane that waits sleeps instead of spinning on a core that the planner needs
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(self._stream)
        return event

    def run(self, function: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            function()

    def seconds(self, event: torch.cuda.Event) -> float:
        return self._clock.seconds(event)


class CudaCopies:
    """Copies enqueued on the calling lane's stream, between page-locked host memory and the device.

    Every piece is contiguous on both sides: torch sends a strided host tensor through a temporary and waits for it.
    """

    def __init__(self):
        self.host_memory = HostMemory(pinned=True)
        self.enabled = True

    def copy_h2d(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.enabled:
            target.copy_(source, non_blocking=True)

    def copy_d2h(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def copy_blocks_h2d(
        self, target: torch.Tensor, pool: torch.Tensor, first: np.ndarray, count: np.ndarray, first_column: int,
        num_bytes: int,
    ) -> None:  # fmt: skip
        if not self.enabled:
            return
        whole_rows = first_column == 0 and target.shape[1] == int(count[0])
        if whole_rows and (count == count[0]).all() and (np.diff(first) == count[0]).all():
            target.flatten(0, 1).copy_(pool[first[0] : first[0] + len(first) * count[0]], non_blocking=True)
            return
        for row, (start, blocks) in enumerate(zip(first.tolist(), count.tolist(), strict=True)):
            if blocks:
                part = target[row, first_column : first_column + blocks]
                part.copy_(pool[start : start + blocks], non_blocking=True)
