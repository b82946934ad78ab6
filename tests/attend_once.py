"""Compile the CPU kernels for each dtype, or load those that an earlier process kept. A process that forks others
imports this module, so that its forks need not repeat it, which takes a second each time."""

import contextlib
import fcntl

with contextlib.suppress(ImportError):  # without numba there are none
    from flexhybrid.runtime.kernels import compiled, in_place, rows_numba
    from flexhybrid.runtime.kernels.compiled.attention import KINDS

    with open(in_place.__file__) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # who comes second finds what the first one has compiled
        for dtype in KINDS:
            in_place.compile_for(dtype)
            if compiled.converts_float16():
                rows_numba.compile_for(dtype)
