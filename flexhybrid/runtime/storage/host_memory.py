"""Host memory for pools and weights: of exact size, and page-locked for a GPU."""

import contextlib
import math
import mmap

import torch


class HostMemory:
    """Allocates zeroed host tensors and counts the bytes that they take.

    torch's pinned allocator rounds up to a power of two (up to 2x for a large pool). This class maps memory of the
    exact size and registers it with the driver. Where that fails it uses torch's allocator and counts the rounded size.
    Every tensor begins on a page, as direct disk reads require.
    """

    def __init__(self, pinned: bool):
        self.pinned = pinned
        self.allocated_bytes = 0

    def bytes(self, size: int) -> torch.Tensor:
        """Return a zeroed uint8 tensor of ``size`` bytes."""
        if not self.pinned or size == 0:
            self.allocated_bytes += size
            return _mapped(size)[1].zero_() if size else torch.zeros(0, dtype=torch.uint8)  # touch the pages now
        try:
            tensor = _registered(size)
            self.allocated_bytes += size + -size % mmap.PAGESIZE
        except (RuntimeError, OSError):
            tensor = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            self.allocated_bytes += 1 << (size - 1).bit_length()
        return tensor

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a zeroed tensor."""
        return self.bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


class _RegisteredMapping(mmap.mmap):
    """Anonymous memory that is unregistered before it is unmapped. The tensor over it keeps it alive."""

    address = 0

    def __del__(self):
        if self.address:
            with contextlib.suppress(Exception):  # at the interpreter's exit CUDA may be gone already
                _cuda_runtime().cudaHostUnregister(self.address)


def _cuda_runtime():
    """Return torch's binding of the CUDA runtime. Raise RuntimeError without CUDA."""
    runtime = torch.cuda.cudart()
    if runtime is None:
        raise RuntimeError("this torch has no CUDA runtime")
    return runtime


def _mapped(size: int) -> tuple[_RegisteredMapping, torch.Tensor]:
    """Map anonymous memory of ``size`` bytes; return the mapping and a uint8 tensor over it."""
    mapping = _RegisteredMapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # huge pages are faster to touch and to lock
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping, torch.frombuffer(mapping, dtype=torch.uint8)


def _registered(size: int) -> torch.Tensor:
    """Return page-locked memory of exactly ``size`` bytes. Raise RuntimeError when the driver refuses."""
    mapping, tensor = _mapped(size)
    status = _cuda_runtime().cudaHostRegister(tensor.data_ptr(), size, 0)
    if int(status) != 0:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # report the refusal: it would stay CUDA's last error
        raise RuntimeError(f"cudaHostRegister refused {size} bytes: {status}")
    mapping.address = tensor.data_ptr()
    return tensor
