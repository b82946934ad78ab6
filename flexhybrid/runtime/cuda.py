"""CUDA streams and events for stream lanes (``issuing.StreamLane``), and copies with the interface of ``CpuCopies``."""

import bisect
import ctypes
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from flexhybrid.core.schedule.steps import BlockRun
from flexhybrid.runtime.storage.host_memory import HostMemory


@lru_cache
def lane_streams(device: torch.device) -> dict[str, torch.cuda.Stream]:
    """Return one stream per device lane. All runs share them, because torch keeps freed memory for each stream."""
    return {name: torch.cuda.Stream(device) for name in ("compute", "h2d", "d2h")}


class Events:
    """A device's events, with and without timing, which are reused.

    If several threads create events, a lock of the driver may take milliseconds. torch reuses events for the same
    reason.
    """

    MOST = 4096  #: limit of stored events of each kind; others, after a long trace, are freed

    def __init__(self):
        self.free: dict[bool, list[torch.cuda.Event]] = {False: [], True: []}

    def take(self, timed: bool) -> torch.cuda.Event:
        try:
            return self.free[timed].pop()
        except IndexError:
            # blocking: a waiting host lane sleeps, instead of using a core that the planning thread needs
            return torch.cuda.Event(enable_timing=timed, blocking=True)


class Recorded:
    """A recorded event, reused only after this object is deleted, so that no thread waits for later work."""

    __slots__ = ("_events", "event", "timed")

    def __init__(self, events: Events, stream: torch.cuda.Stream, timed: bool):
        self._events, self.timed, self.event = events, timed, events.take(timed)
        self.event.record(stream)

    def is_complete(self) -> bool:
        """Return whether the stream has reached the event."""
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()

    def __del__(self):
        if hasattr(self, "event") and len(free := self._events.free[self.timed]) < Events.MOST:
            free.append(self.event)


@lru_cache
def lane_events(_device: torch.device) -> Events:
    """Return the events of a device, which all runs share."""
    return Events()


class Mark(NamedTuple):
    """An event with a known time on the host (``time.perf_counter``)."""

    event: torch.cuda.Event
    host_s: float


class CudaClock:
    """Converts times of device events to ``time.perf_counter``.

    To make a ``Mark``, several events are recorded and awaited; the one with the shortest wait is taken. There are
    marks before, during and after a run. Times between two marks are interpolated, because the clocks drift. Marks must
    be close together: CUDA returns the time between events as a float32 in milliseconds, which is exact to 4 µs after a
    minute and to 250 µs after an hour.
    """

    TRIES = 20  #: number of events recorded for a mark
    BETWEEN_S = 30.0  #: time between marks

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._marks = [self._mark()]
        self._device_s: list[float] | None = None  #: seconds from the first mark to each mark
        self._marking = threading.Lock()

    def keep_up(self) -> None:
        """Make a mark if the latest is older than BETWEEN_S. Any thread of a run may call this."""
        if time.perf_counter() - self._marks[-1].host_s > self.BETWEEN_S and self._marking.acquire(blocking=False):
            try:
                self._marks.append(self._mark())
            finally:
                self._marking.release()

    def _mark(self) -> Mark:
        """Record events and wait for each; return the one with the shortest wait, at the middle of its wait."""
        marks = []
        for _ in range(self.TRIES):
            event = torch.cuda.Event(enable_timing=True)
            before = time.perf_counter()
            event.record(self._stream)
            event.synchronize()
            after = time.perf_counter()
            marks.append((after - before, event, (before + after) / 2))
        _, event, middle_s = min(marks, key=lambda mark: mark[0])
        return Mark(event, middle_s)

    def seconds(self, event: torch.cuda.Event) -> float:
        """Return the time of an event of the run. The run must have ended."""
        marks = self._marks
        if self._device_s is None:
            marks.append(self._mark())
            steps = [before.event.elapsed_time(after.event) / 1e3 for before, after in pairwise(marks)]
            self._device_s = [0.0, *accumulate(steps)]
        roughly_s = marks[0].event.elapsed_time(event) / 1e3
        place = min(max(bisect.bisect(self._device_s, roughly_s), 1), len(marks) - 1)
        begin, end = marks[place - 1], marks[place]
        device_s = self._device_s[place] - self._device_s[place - 1]
        rate = (end.host_s - begin.host_s) / device_s if device_s > 0.1 else 1.0
        return begin.host_s + begin.event.elapsed_time(event) / 1e3 * rate


class CudaStream:
    """A CUDA stream with the methods that a lane needs. Waiting for an event that was not recorded does nothing."""

    def __init__(self, stream: torch.cuda.Stream, clock: CudaClock, events: Events):
        self._stream = stream
        self._clock = clock
        self._events = events

    def wait(self, recorded: Recorded) -> None:
        self._stream.wait_event(recorded.event)

    def record(self, timed: bool = True) -> Recorded:
        if timed:
            self._clock.keep_up()
        return Recorded(self._events, self._stream, timed)

    def enter(self) -> None:
        """Make this the calling thread's current stream."""
        torch.cuda.set_stream(self._stream)

    def synchronize(self) -> None:
        """Wait for all enqueued work: after a failed run, before its memory is freed."""
        self._stream.synchronize()

    @staticmethod
    def seconds_between(begin: Recorded, end: Recorded) -> float:
        """Return the seconds between two events, both recorded with timing and complete."""
        return begin.event.elapsed_time(end.event) / 1e3

    def seconds(self, recorded: Recorded) -> float:
        """Return the time (``time.perf_counter``) of a complete event. The run must have ended."""
        return self._clock.seconds(recorded.event)


#: Larger copies to the device are split, so that small copies of other streams, which compute waits for, run between.
PIECE_BYTES = 16 << 20


class CudaCopies:
    """Enqueues copies between page-locked host memory and the device on the thread's current stream.

    Tensors must be contiguous on both sides: torch would first copy a strided host tensor to a temporary one, and wait.
    """

    def __init__(self):
        self.host_memory = HostMemory(pinned=True)
        self.enabled = True

    def abort(self) -> None:
        """Do nothing: enqueued copies end by themselves."""

    def copy_h2d(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.enabled and source.nbytes <= PIECE_BYTES:
            target.copy_(source, non_blocking=True)
        elif self.enabled:
            piece = PIECE_BYTES // source.element_size()
            for part, of_source in zip(target.view(-1).split(piece), source.view(-1).split(piece), strict=True):
                part.copy_(of_source, non_blocking=True)

    def copy_d2h(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def copy_blocks_h2d(self, target: torch.Tensor, pool: torch.Tensor, runs: tuple[BlockRun, ...]) -> None:
        """Copy the blocks of all runs from pool [blocks, …] to target [B, columns, block], one call per run.

        Both must be contiguous. Raise RuntimeError if CUDA refuses a copy.
        """
        if not self.enabled:
            return
        copy, block = memcpy_2d(), target.shape[2] * target.element_size()
        if copy is None:
            _copy_by_requests(target, pool.flatten(1), runs)
            return
        columns, into, out_of = target.shape[1], target.data_ptr(), pool.data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        for row, rows, column, first, stride, blocks in runs:
            width, pitch = blocks * block, stride * block
            in_one = rows == 1 or width <= pitch < PITCHES  # the pitch of a single row is its width
            for i, height in ((0, rows),) if in_one else ((i, 1) for i in range(rows)):
                to, source = into + ((row + i) * columns + column) * block, out_of + (first + i * stride) * block
                between = pitch if height > 1 else width
                call = to, columns * block, source, between, width, height, H2D, stream
                if status := copy(*call):
                    raise RuntimeError(f"cudaMemcpy2DAsync refused {height} rows of {width} bytes: error {status}")


H2D = 1  #: cudaMemcpyHostToDevice
PITCHES = 2**31  #: a pitch must be smaller than this

#: cudaMemcpy2DAsync(target, its pitch, source, its pitch, width, height, kind, stream) -> status; sizes in bytes.
Memcpy2D = Callable[[int, int, int, int, int, int, int, int], int]


@lru_cache
def memcpy_2d() -> Memcpy2D | None:
    """Return cudaMemcpy2DAsync of torch's runtime; None if it is not found.

    One call copies the evenly spaced blocks of all requests of a run, without a view for each request.
    """
    try:
        function = ctypes.CDLL(None).cudaMemcpy2DAsync
    except (AttributeError, OSError):
        return None
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    function.argtypes = [pointer, size, pointer, size, size, size, ctypes.c_int, pointer]
    function.restype = ctypes.c_int
    return function


def _copy_by_requests(target: torch.Tensor, source: torch.Tensor, runs: tuple[BlockRun, ...]) -> None:
    """Copy the blocks of all runs, with one call of torch per request."""
    for row, rows, column, first, stride, blocks in runs:
        for i in range(rows):
            start = first + i * stride
            target[row + i, column : column + blocks].copy_(source[start : start + blocks], non_blocking=True)
