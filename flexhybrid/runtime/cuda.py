"""CUDA streams, events and copies, as the lanes and the verbs use them (``clock.StreamLane``, ``links.CpuCopies``)."""

import time
from collections.abc import Callable
from functools import lru_cache

import torch

from flexhybrid.core.schedule.steps import BlockRun
from flexhybrid.runtime.storage.host_memory import HostMemory


@lru_cache
def lane_streams(device: torch.device) -> dict[str, torch.cuda.Stream]:
    """Return one stream for each device lane. All runs share them: freed memory and cuBLAS workspaces are kept per
    stream."""
    return {name: torch.cuda.Stream(device) for name in ("compute", "h2d", "d2h")}


class CudaClock:
    """Places device events on the clock of ``time.perf_counter``.

    A mark is an event whose time on the host is known: of many that are recorded and awaited, the one with the shortest
    wait. One mark is taken before a run and one after it, and times between are mapped linearly, because the two clocks
    drift apart.
    """

    TRIES = 20

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._first, self._first_s = self._mark()
        self._rate: float | None = None

    def _mark(self) -> tuple[torch.cuda.Event, float]:
        """Record events and wait for each; return the one with the shortest wait, and the middle of that wait."""
        marks = []
        for _ in range(self.TRIES):
            event = torch.cuda.Event(enable_timing=True)
            before = time.perf_counter()
            event.record(self._stream)
            event.synchronize()
            after = time.perf_counter()
            marks.append((after - before, event, (before + after) / 2))
        _, event, middle_s = min(marks, key=lambda mark: mark[0])
        return event, middle_s

    def seconds(self, event: torch.cuda.Event) -> float:
        if self._rate is None:
            last, last_s = self._mark()
            device_s = self._first.elapsed_time(last) / 1e3
            self._rate = (last_s - self._first_s) / device_s if device_s > 0.1 else 1.0
        return self._first_s + self._first.elapsed_time(event) / 1e3 * self._rate


class CudaStream:
    """A CUDA stream as a lane uses it. Waiting on an event that was never recorded does nothing."""

    def __init__(self, stream: torch.cuda.Stream, clock: CudaClock):
        self._stream = stream
        self._clock = clock

    def wait(self, event: torch.cuda.Event) -> None:
        self._stream.wait_event(event)

    def record(self, timed: bool = True) -> torch.cuda.Event:
        # blocking: a host lane that waits for it sleeps, instead of spinning on a core that the planner needs
        event = torch.cuda.Event(enable_timing=timed, blocking=True)
        event.record(self._stream)
        return event

    def enter(self) -> None:
        """Make the calling thread issue to this stream from now on; called once, by the lane's thread."""
        torch.cuda.set_stream(self._stream)  # the current stream is a thread's own; asking for it each time costs 10 us

    def run(self, function: Callable[[], None]) -> None:
        """Enqueue the work that ``function`` issues; return at once."""
        function()

    def synchronize(self) -> None:
        """Wait for all that was enqueued: at the end of a failed run, before its memory is freed."""
        self._stream.synchronize()

    def seconds(self, event: torch.cuda.Event) -> float:
        """Return when a recorded, finished event happened, on the clock of ``time.perf_counter``."""
        return self._clock.seconds(event)


class CudaCopies:
    """Copies enqueued on the calling lane's stream, between page-locked host memory and the device.

    Every copy is contiguous on both sides: torch copies a strided host tensor to a temporary first, and waits for it.
    """

    def __init__(self):
        self.host_memory = HostMemory(pinned=True)
        self.enabled = True

    def abort(self) -> None:
        """Copies that are enqueued end soon without help."""

    def copy_h2d(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.enabled:
            target.copy_(source, non_blocking=True)

    def copy_d2h(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def copy_blocks_h2d(self, target: torch.Tensor, pool: torch.Tensor, runs: tuple[BlockRun, ...]) -> None:
        """target [B, columns, block], pool [blocks, …]: copy the blocks of all runs, neighbouring ones in one copy."""
        if not self.enabled:
            return
        source = pool.flatten(1)
        for row, rows, column, first, stride, blocks in runs:
            if rows == 1 or (stride == blocks == target.shape[1]):
                region = target[row : row + rows, column : column + blocks].view(-1, target.shape[2])
                region.copy_(source[first : first + rows * blocks], non_blocking=True)
                continue
            for i in range(rows):
                start = first + i * stride
                target[row + i, column : column + blocks].copy_(source[start : start + blocks], non_blocking=True)
