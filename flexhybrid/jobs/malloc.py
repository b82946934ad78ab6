"""Freed memory goes back to the system, so that a process takes what its budgets say."""

import contextlib
import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  #: glibc's malloc.h
LARGEST_KEPT_BYTES = 1 << 20
KEPT_PRODUCTS = 64  #: that oneDNN has compiled, each for a number of rows, in 0.1 MB; its default is 1,024


def return_freed_memory() -> None:
    """Let glibc give every freed block of LARGEST_KEPT_BYTES or more back at once.

    By itself it raises that size to the largest block ever freed, up to 32 MiB, and keeps twice as much: reading a
    layer's tensors once then leaves tens of megabytes with each thread, beside the budgets. Other C libraries are left
    as they are. For a process that is our own, before its first product.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KEPT_PRODUCTS))
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for setting in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            libc.mallopt(setting, LARGEST_KEPT_BYTES)


def trim_memory() -> None:
    """Let glibc give back the whole pages between blocks that are in use: with time they add up to 150 MB."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
