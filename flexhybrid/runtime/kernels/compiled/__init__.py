"""Tell whether kernels can be compiled for this CPU, and split a kernel's rows among threads."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

#: Calls a function on the items of iterables: ``map``, or the ``map`` method of a pool whose threads each use one torch
#: thread.
Share = Callable[..., Iterable]

#: Minimum of bytes read and written per thread. Handing rows to a thread takes about 90 µs.
BYTES_A_THREAD = 1 << 20


@cache
def has_numba() -> bool:
    """Return whether kernels can be compiled for a CPU. Without numba, torch and numpy are used instead."""
    return importlib.util.find_spec("numba") is not None


@cache
def converts_float16() -> bool:
    """Return whether this processor converts float16. On others, LLVM would call a library that is not available."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX") or platform.machine() in ("aarch64", "arm64")


def compile_timer(seconds: list[float]) -> AbstractContextManager:
    """Return a context that appends the seconds of each compilation inside it to ``seconds``."""
    if not has_numba():
        return nullcontext()
    from numba.core.event import install_timer

    return install_timer("numba:compile", seconds.append)


def demand(kernel: str, **holds: bool) -> None:
    """Raise ValueError if an argument is wrong (``holds``: argument=is right): the kernel would access other memory."""
    for argument, right in holds.items():
        if not right:
            raise ValueError(f"{kernel}: {argument}: a wrong dtype, shape or stride, or an index outside of its memory")


def spread(run: Callable[[int, int], object], count: int, num_bytes: int, share: Share = map) -> None:
    """Call ``run(first, end)`` on ranges of ``count`` rows, on up to as many threads as torch uses in this thread.

    ``num_bytes``: total bytes that the rows read and write; each thread gets at least BYTES_A_THREAD.
    """
    threads = 1 if share is map else max(1, min(torch.get_num_threads(), num_bytes // BYTES_A_THREAD, count))
    deal(run, [count * thread // threads for thread in range(threads + 1)], share)


def deal(run: Callable[[int, int], object], bounds: Sequence[int], share: Share) -> None:
    """Call ``run(first, end)`` on the ranges between bounds: the first on this thread, the others through ``share``."""
    others = share(run, bounds[1:-1], bounds[2:]) if len(bounds) > 2 else ()
    run(bounds[0], bounds[1])
    for _ in others:
        pass
