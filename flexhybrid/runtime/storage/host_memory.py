"""Host memory for pools and weights: exact size, page-locked where a GPU wants it."""

from __future__ import annotations

import contextlib
import mmap

import torch


class HostMemory:
    """Allocates zeroed host tensors and keeps count of what that really took.

    torch's own pinned allocator rounds up to a power of two (up to 2x for a large pool). Here memory is mapped at its
    exact size and registered with the driver; where that fails, torch's allocator serves and its rounding is counted.
    All of it begins on a page: direct reads of a disk want that.
    """

    def __init__(self, pinned: bool):
        self.pinned = pinned
        self.allocated_bytes = 0

    def bytes(self, size: int) -> torch.Tensor:
        """A zeroed uint8 tensor."""
        if not self.pinned or size == 0:
            self.allocated_bytes += size
            return _mapped(size)[1].zero_() if size else torch.zeros(0, dtype=torch.uint8)  # touched now, not in a run
        try:
            tensor = _registered(size)
            self.allocated_bytes += size + -size % mmap.PAGESIZE
        except (RuntimeError, OSError):
            tensor = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            self.allocated_bytes += 1 << (size - 1).bit_length()
        return tensor

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor of this shape."""
        count = 1
        for extent in shape:
            count *= extent
        return self.bytes(count * dtype.itemsize).view(dtype).view(shape)


class _RegisteredMapping(mmap.mmap):
    """Anonymous memory that is unregistered before it is unmapped; the tensor over it keeps it alive."""

    address = 0

    def __del__(self):
        if self.address:
            with contextlib.suppress(Exception):  # at the interpreter's exit CUDA may be gone before this
                torch.cuda.cudart().cudaHostUnregister(self.address)


def _mapped(size: int) -> tuple[_RegisteredMapping, torch.Tensor]:
    """Anonymous memory of this size, and the tensor over it."""
    mapping = _RegisteredMapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # fewer, larger pages are faster to touch and to lock
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping, torch.frombuffer(mapping, dtype=torch.uint8)


def _registered(size: int) -> torch.Tensor:
    """Mapped and page-locked memory of exactly this size. Raises RuntimeError when the driver refuses."""
    mapping, tensor = _mapped(size)
    status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0)
    if int(status) != 0:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # the refusal stays CUDA's last error until something reports it
        raise RuntimeError(f"cudaHostRegister refused {size} bytes: {status}")
    mapping.address = tensor.data_ptr()
    return tensor
