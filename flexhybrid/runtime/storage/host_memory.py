"""Host memory for pools and weights, with exact sizes, page-locked for a GPU."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import resource
from concurrent.futures import ThreadPoolExecutor

import torch

from flexhybrid.core.errors import InputError
from flexhybrid.core.units import gib

#: Maximum bytes registered in one call. Drivers of series 580 refuse 512 GiB (vllm-project/vllm#51081).
PIECE_BYTES = 64 << 30

#: Maximum number of threads that touch memory. Eight took 1/5 to 1/3 of one thread's time, as others measured
#: (ai-dynamo/dynamo#13710, rapidsai/cudf#23457).
TOUCHING_THREADS = 16

#: Fewer bytes than this are touched by one thread, because starting others takes longer.
TOUCHED_ALONE_BYTES = 64 << 20


class HostMemory:
    """Allocates zeroed host tensors and counts their bytes.

    torch's pinned allocator rounds up to a power of two, which may double a large pool. This class maps memory of the
    exact size and registers it with the driver. Every tensor begins on a page, as direct disk reads require.
    """

    def __init__(self, pinned: bool):
        self.pinned = pinned
        self.allocated_bytes = 0

    def bytes(self, size: int) -> torch.Tensor:
        """Return a zeroed uint8 tensor. Raise InputError if the system or the driver refuses the memory."""
        if size == 0:
            return torch.zeros(0, dtype=torch.uint8)
        mapping, tensor = _mapped(size)
        touch(tensor)
        if self.pinned:
            mapping.lock(tensor.data_ptr(), size, self.allocated_bytes)
        self.allocated_bytes += size + (-size % mmap.PAGESIZE if self.pinned else 0)
        return tensor

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


#: Unused mappings that the driver could not release, as during a capture. They stay mapped until it can: it would
#: refuse to lock new mappings at the same addresses.
STILL_LOCKED: list[_Mapping] = []


class _Mapping(mmap.mmap):
    """Anonymous memory, which is unregistered before it is unmapped. A tensor over the memory keeps it alive."""

    registered: tuple[int, ...] = ()  #: addresses of the pieces that the driver has locked

    def lock(self, address: int, size: int, locked_before: int) -> None:
        """Page-lock the memory in pieces. Raise InputError, with nothing locked, if the driver refuses a piece.

        ``locked_before``: bytes that the owner had locked before, for the message.
        """
        runtime = _cuda_runtime()
        for mapping in STILL_LOCKED:
            mapping._unlock()
        STILL_LOCKED[:] = [mapping for mapping in STILL_LOCKED if mapping.registered]
        for start in range(0, size, PIECE_BYTES):
            piece = min(PIECE_BYTES, size - start)
            status = int(runtime.cudaHostRegister(address + start, piece, 0))
            if status:
                self._unlock()
                _report_refusal()
                raise InputError(_refusal(size, locked_before, status))
            self.registered = (*self.registered, address + start)

    def _unlock(self) -> None:
        runtime = _cuda_runtime()
        self.registered = tuple(piece for piece in self.registered if int(runtime.cudaHostUnregister(piece)))

    def __del__(self):
        with contextlib.suppress(Exception):  # at the interpreter's exit, CUDA may be unloaded
            self._unlock()
            if self.registered:
                STILL_LOCKED.append(self)


def _refusal(size: int, locked_before: int, status: int) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    named = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"
    return (
        f"page-locked host memory: the driver refused {gib(size)} in addition to {gib(locked_before)} "
        f"(cudaHostRegister: error {status}). Give the run less (--host-memory), or allow more: ulimit -l is "
        f"{named} here (in a container: --ulimit memlock=-1), and memory that is locked must be free"
    )


def _cuda_runtime():
    """Return torch's binding of the CUDA runtime. Raise RuntimeError without CUDA."""
    runtime = torch.cuda.cudart()
    if runtime is None:
        raise RuntimeError("this torch has no CUDA runtime")
    return runtime


def _report_refusal() -> None:
    """Make torch raise CUDA's last error now, so that no later call raises it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda", dtype=torch.uint8)


def _mapped(size: int) -> tuple[_Mapping, torch.Tensor]:
    """Map anonymous memory; return it and a uint8 tensor over it. Raise InputError if the system refuses."""
    try:
        mapping = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        refused = f"host memory: the system refused {gib(size)} ({error}); give the run less (--host-memory)"
        raise InputError(refused) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # huge pages are faster to touch and to lock
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping, torch.frombuffer(mapping, dtype=torch.uint8)


def touch(tensor: torch.Tensor) -> None:
    """Touch the pages of new memory with several threads. The driver would touch them one by one while locking."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = min(TOUCHING_THREADS, cores) if len(tensor) >= TOUCHED_ALONE_BYTES else 1
    share = -(-len(tensor) // num_threads // mmap.PAGESIZE) * mmap.PAGESIZE
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(_touch, tensor.split(max(share, 1))))


def _touch(part: torch.Tensor) -> None:
    """Write a zero to each page. The pages of an anonymous mapping are zero."""
    part.numpy()[:: mmap.PAGESIZE] = 0  # numpy releases the interpreter's lock, and starts no threads
