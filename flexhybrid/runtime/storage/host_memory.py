"""Host memory for pools and weights: of exact size, and page-locked for a GPU."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import resource
import threading

import torch

from flexhybrid.core.errors import InputError
from flexhybrid.core.units import gib

#: The most that is registered in one call: drivers of series 580 refuse 512 GiB (vllm-project/vllm#51081).
PIECE_BYTES = 64 << 30

#: The most threads that touch memory. Eight took a third to a fifth of the time of one, on others' machines
#: (ai-dynamo/dynamo#13710, rapidsai/cudf#23457).
TOUCHING_THREADS = 16

#: Fewer bytes are touched by one thread: starting others takes longer.
TOUCHED_ALONE_BYTES = 64 << 20


class HostMemory:
    """Allocates zeroed host tensors and counts the bytes that they take.

    torch's pinned allocator rounds up to a power of two (up to 2x for a large pool). This class maps memory of the
    exact size and registers it with the driver. Every tensor begins on a page, as direct disk reads require.
    """

    def __init__(self, pinned: bool):
        self.pinned = pinned
        self.allocated_bytes = 0

    def bytes(self, size: int) -> torch.Tensor:
        """Return a zeroed uint8 tensor of ``size`` bytes. Raise InputError if the system lacks the memory, or the
        driver refuses to lock it."""
        if size == 0:
            return torch.zeros(0, dtype=torch.uint8)
        mapping, tensor = _mapped(size)
        touch(tensor)
        if self.pinned:
            mapping.lock(tensor.data_ptr(), size, self.allocated_bytes)
        self.allocated_bytes += size + (-size % mmap.PAGESIZE if self.pinned else 0)
        return tensor

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a zeroed tensor."""
        return self.bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


#: Unused mappings that the driver did not release, as in a capture. They stay mapped until it does, or it would refuse
#: to lock new mappings at their addresses.
STILL_LOCKED: list[_Mapping] = []


class _Mapping(mmap.mmap):
    """Anonymous memory that is unregistered before it is unmapped. The tensor over it keeps it alive."""

    registered: tuple[int, ...] = ()  #: addresses of the pieces that the driver has locked

    def lock(self, address: int, size: int, locked_before: int) -> None:
        """Page-lock the memory piece by piece. If the driver refuses one, unlock all and raise InputError.
        ``locked_before``: bytes that its owner has locked."""
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
        with contextlib.suppress(Exception):  # at the interpreter's exit CUDA may be gone already
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
    """Make torch report the refusal now; otherwise it would surface as CUDA's last error in a later call."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda", dtype=torch.uint8)


def _mapped(size: int) -> tuple[_Mapping, torch.Tensor]:
    """Map anonymous memory of ``size`` bytes; return the mapping and a uint8 tensor over it. Raise InputError if the
    system refuses."""
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
    """Touch the pages of new memory now, with several threads: the driver would do so one by one while locking."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = min(TOUCHING_THREADS, cores) if len(tensor) >= TOUCHED_ALONE_BYTES else 1
    share = -(-len(tensor) // num_threads // mmap.PAGESIZE) * mmap.PAGESIZE
    threads = [threading.Thread(target=_touch, args=(part,)) for part in tensor.split(max(share, 1))]
    for thread in threads[1:]:
        thread.start()
    threads[0].run()
    for thread in threads[1:]:
        thread.join()


def _touch(part: torch.Tensor) -> None:
    """Write to each page. The pages of an anonymous mapping come with zeros."""
    part.numpy()[:: mmap.PAGESIZE] = 0  # numpy releases the interpreter here, and starts no threads
