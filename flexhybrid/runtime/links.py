"""Links of a CPU: real copies, paced to a set rate by deadlines."""

import ctypes
import math
import threading
import time

import numpy as np
import torch

from flexhybrid.core.schedule.steps import BlockRun
from flexhybrid.runtime.storage.host_memory import HostMemory

#: Seconds. If a copy begins within this time after the last one, the link counts as busy in between.
BACK_TO_BACK_S = 5e-4

#: Seconds of the longest single sleep, so that stopping a pacer takes effect soon.
LONGEST_SLEEP_S = 0.1

#: Seconds of delay that later copies may catch up. A longer delay is not caused by the link: the machine was busy.
MOST_LATE_S = 2e-2


class LaneTurn(threading.local):
    """State that a lane and its pacer share, for each thread."""

    #: Time at which the current task was submitted and its awaited tasks had ended; None outside of lanes.
    ready_s: float | None = None
    paced_s = 0.0  #: total time that pacers made the thread sleep


TURN = LaneTurn()


class Pacer:
    """Limits one direction of a link to a rate, with a deadline for the end of each copy.

    A real link does not wait for a thread that wakes up late. So a copy's deadline is counted from the last deadline,
    or from the time when the lane's task was ready (``LaneTurn``), whichever is later. Delays do not add up. Outside of
    lanes, a copy counts from the last deadline if it follows at once, else from its own start. For small copies,
    sleeping a fixed time per copy reaches 30 to 60 % of the rate; deadlines reach 92 to 100 %.
    """

    def __init__(self, bytes_per_s: float | None):
        self.bytes_per_s = bytes_per_s
        self.stopped = False  #: any thread may set this, after which ``end`` does not sleep
        self._deadline = self._ended = 0.0

    def begin(self) -> float:
        return time.perf_counter()

    def end(self, began: float, num_bytes: int) -> None:
        """Sleep until the deadline of a copy of ``num_bytes`` that began at ``began``."""
        if self.bytes_per_s is None:
            return
        ready_s = TURN.ready_s
        if ready_s is None:
            ready_s = -math.inf if began - self._ended < BACK_TO_BACK_S else began
        self._deadline = max(self._deadline, ready_s, began - MOST_LATE_S) + num_bytes / self.bytes_per_s
        TURN.paced_s += max(0.0, self._deadline - time.perf_counter())
        while (delay := self._deadline - time.perf_counter()) > 0 and not self.stopped:
            time.sleep(min(delay, LONGEST_SLEEP_S))
        self._ended = time.perf_counter()


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return a numpy view of a contiguous CPU tensor's bytes; the last dimension counts bytes."""
    return tensor.view(torch.uint8).numpy()


def copy_runs(target: np.ndarray, source: np.ndarray, runs: tuple[BlockRun, ...]) -> None:
    """Copy target[row, column : column + blocks] = source[first : first + blocks] for every request of every run.

    target is [B, columns, …], source [blocks, …], with blocks of equal size. A run of several requests is one strided
    copy. numpy releases the interpreter's lock while it copies, and starts no threads.
    """
    for row, rows, column, first, stride, blocks in runs:
        if rows == 1:
            np.copyto(target[row, column : column + blocks], source[first : first + blocks])
            continue
        window = source[first : first + (rows - 1) * stride + blocks]
        shape = (rows, blocks, *source.shape[1:])
        strides = (stride * source.strides[0], *source.strides)
        # The same as as_strided(), which takes several times as long.
        view = np.ndarray(shape, source.dtype, window, strides=strides)
        np.copyto(target[row : row + rows, column : column + blocks], view)


def num_blocks(runs: tuple[BlockRun, ...]) -> int:
    """Return the number of blocks of all runs."""
    return sum(run.rows * run.blocks for run in runs)


class CpuCopies:
    """Both link directions of a CPU "device". Only the thread of one lane uses each.

    ``enabled`` = False skips copies to the device, and the pace of copies to the host. Running the same steps without
    the link measures the ideal compute time.
    """

    MOST_KNOWN = 4096  #: limit of stored numpy views

    def __init__(self, gb_per_s: float | None = None):
        self.host_memory = HostMemory(pinned=False)
        self.enabled = True
        self._known: dict[int, tuple[torch.Tensor, np.ndarray]] = {}  #: id() -> (tensor, its bytes)
        self.set_rate(gb_per_s)

    def set_rate(self, gb_per_s: float | None) -> None:
        """Set the pace of both directions; None: as fast as memory allows."""
        rate = None if gb_per_s is None else gb_per_s * 1e9
        self.h2d, self.d2h = Pacer(rate), Pacer(rate)

    def abort(self) -> None:
        """Make current copies end at once, because their run failed."""
        self.h2d.stopped = self.d2h.stopped = True

    def copy_h2d(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copy(self.h2d, target, source)

    def copy_d2h(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copy(self.d2h, target, source)

    def copy_blocks_h2d(self, target: torch.Tensor, pool: torch.Tensor, runs: tuple[BlockRun, ...]) -> None:
        """Copy the blocks of all runs from pool [blocks, …] to target [B, columns, block]. Both must be buffers."""
        if not self.enabled:
            return
        began, blocks = self.h2d.begin(), self._memory(pool, 2)
        copy_runs(self._memory(target, 3), blocks, runs)
        self.h2d.end(began, num_blocks(runs) * blocks.shape[1])

    def _memory(self, tensor: torch.Tensor, num_dims: int) -> np.ndarray:
        """Return a buffer's bytes as an array of ``num_dims`` dimensions; the last one is flattened."""
        known = self._known.get(id(tensor))
        if known is None:
            if len(self._known) >= self.MOST_KNOWN:
                self._known.clear()
            known = self._known[id(tensor)] = tensor, as_bytes(tensor.flatten(num_dims - 1))
        return known[1]

    def _copy(self, pacer: Pacer, target: torch.Tensor, source: torch.Tensor) -> None:
        if not self.enabled and pacer is self.h2d:
            return
        began = pacer.begin()
        alike = target.dtype == source.dtype and target.shape == source.shape
        if alike and target.is_contiguous() and source.is_contiguous():
            # As numpy copies contiguous memory, without making two arrays. Releases the interpreter's lock.
            ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
        else:
            np.copyto(as_bytes(target), as_bytes(source))
        if self.enabled:
            pacer.end(began, target.nbytes)
