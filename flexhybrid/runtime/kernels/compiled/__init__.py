"""Whether a CPU runs compiled kernels (numba is installed), and the threads that share a kernel's rows."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

#: Calls a function on the items of iterables: ``map``, or that of a pool whose threads have one torch thread each.
Share = Callable[..., Iterable]

#: Bytes read and written for each thread, below which a kernel takes fewer threads: to hand rows over takes some 90 us.
BYTES_A_THREAD = 1 << 20


@cache
def has_numba() -> bool:
    """Return whether kernels for a CPU can be compiled; without numba, plain torch and numpy do their work."""
    return importlib.util.find_spec("numba") is not None


@cache
def converts_float16() -> bool:
    """Return whether this processor converts float16: elsewhere LLVM would call a library that is not there."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX") or platform.machine() in ("aarch64", "arm64")


def compile_timer(seconds: list[float]) -> AbstractContextManager:
    """Return a context that, where kernels were compiled in it, appends the seconds that this took."""
    if not has_numba():
        return nullcontext()
    from numba.core.event import install_timer

    return install_timer("numba:compile", seconds.append)


def demand(kernel: str, **holds: bool) -> None:
    """Raise ValueError for a wrong argument, with which a kernel would access other memory."""
    for argument, right in holds.items():
        if not right:
            raise ValueError(f"{kernel}: {argument}: a wrong dtype, shape or stride, or an index outside of its memory")


def spread(run: Callable[[int, int], object], count: int, num_bytes: int, share: Share = map) -> None:
    """Call ``run(first, end)`` on ranges of ``count`` rows, of ``num_bytes`` read and written together: on as many
    threads as torch computes with in the calling thread."""
    threads = 1 if share is map else max(1, min(torch.get_num_threads(), num_bytes // BYTES_A_THREAD, count))
    deal(run, [count * thread // threads for thread in range(threads + 1)], share)


def deal(run: Callable[[int, int], object], bounds: Sequence[int], share: Share) -> None:
    """Call ``run(first, end)`` on the ranges between bounds: the calling thread takes the first range, ``share`` deals
    out the others."""
    others = share(run, bounds[1:-1], bounds[2:]) if len(bounds) > 2 else ()
    run(bounds[0], bounds[1])
    for _ in others:
        pass
