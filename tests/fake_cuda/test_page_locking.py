"""Test page-locked memory with stand-in drivers that count and that refuse."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading

import pytest
import torch

from flexhybrid.core.errors import InputError
from flexhybrid.runtime.storage import host_memory
from flexhybrid.runtime.storage.host_memory import HostMemory

MIB = 1 << 20


class CountingRuntime:
    """A CUDA binding that records locked memory and its pages, and refuses more than ``most`` bytes."""

    def __init__(self, most: float = float("inf")):
        self.most = most
        self.locked: dict[int, int] = {}
        self.calls: list[int] = []
        self.absent = 0  #: pages that the driver would have had to ask for
        self.captures = False  #: a stream, when it lets go of nothing

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert address % mmap.PAGESIZE == 0
        assert all(address + size <= start or start + of <= address for start, of in self.locked.items())
        if sum(self.locked.values()) + size > self.most:
            return 2  # cudaErrorMemoryAllocation
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
        self.absent += sum(not page & 1 for page in pages)
        self.locked[address] = size
        self.calls.append(size)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if self.captures:
            return 900  # cudaErrorStreamCaptureUnsupported
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch):
    counting = CountingRuntime()
    monkeypatch.setattr(host_memory, "_cuda_runtime", lambda: counting)
    monkeypatch.setattr(host_memory, "_report_refusal", lambda: None)
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 4 * MIB)
    return counting


def test_memory_is_locked_piece_by_piece_and_unlocked_with_the_tensor(runtime):
    memory = HostMemory(pinned=True)
    tensor = memory.zeros((3, 3 * MIB + 5), torch.uint8)
    assert runtime.calls == [4 * MIB, 4 * MIB, MIB + 15] and not runtime.absent
    assert min(runtime.locked) == tensor.data_ptr() and not tensor.any()
    assert memory.allocated_bytes == 9 * MIB + mmap.PAGESIZE  # not 16 MiB, the next power of two
    del tensor
    gc.collect()
    assert not runtime.locked


def test_memory_stays_mapped_until_the_driver_unlocks_it(runtime):
    """Otherwise the system would map other memory there, which the driver refuses to lock."""
    memory = HostMemory(pinned=True)
    first = memory.bytes(9 * MIB)
    runtime.captures = True
    del first
    gc.collect()
    assert len(runtime.locked) == 3
    second = memory.bytes(MIB)  # none of its pages is among those that are locked
    runtime.captures = False
    third = memory.bytes(MIB)
    assert set(runtime.locked) == {second.data_ptr(), third.data_ptr()} and not host_memory.STILL_LOCKED


@pytest.mark.parametrize("most", [0, 6 * MIB])
def test_a_refusal_is_reported_and_leaves_nothing_locked(runtime, most):
    """No other memory is taken instead: torch's allocator would round it up to a power of two."""
    runtime.most = most
    memory = HostMemory(pinned=True)
    with pytest.raises(InputError, match=r"refused 9.00 MiB .*--host-memory.*ulimit -l"):
        memory.bytes(9 * MIB)
    gc.collect()
    assert not runtime.locked and memory.allocated_bytes == 0


def test_memory_beyond_the_systems_is_reported():
    with pytest.raises(InputError, match=r"host memory: the system refused .*--host-memory"):
        HostMemory(pinned=False).bytes(1 << 62)


@pytest.mark.parametrize("pinned", [False, True])
def test_several_threads_touch_pages_before_they_are_locked(runtime, monkeypatch, pinned):
    """All parts are touched at the same time: each thread waits for the others."""
    together, own = threading.Barrier(4), host_memory._touch

    def touch(part: torch.Tensor) -> None:
        together.wait(30)
        assert not runtime.calls
        own(part)

    monkeypatch.setattr(host_memory.os, "sched_getaffinity", lambda process: range(4))
    monkeypatch.setattr(host_memory, "TOUCHED_ALONE_BYTES", MIB)
    monkeypatch.setattr(host_memory, "_touch", touch)
    HostMemory(pinned).bytes(6 * MIB + 77)
    assert not together.broken and bool(runtime.calls) == pinned and not runtime.absent


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 5 * MIB, 5 * MIB + 1])
@pytest.mark.parametrize("cores", [1, 3, 64])
def test_every_page_is_touched(runtime, monkeypatch, size, cores):
    monkeypatch.setattr(host_memory.os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(host_memory, "TOUCHED_ALONE_BYTES", MIB)
    HostMemory(pinned=True).bytes(size)
    assert sum(runtime.calls) == size and not runtime.absent
