"""Attends once in place in each dtype: compiles the kernels, or loads what an earlier process has kept of them.

For a process to import that forks others: it takes a second, where they are kept, and each fork would take it again.
"""

import contextlib

import numpy as np
import torch

with contextlib.suppress(ImportError):  # without numba nothing attends in place
    from flexhybrid.runtime.kernels import in_place

    LAYOUT = in_place.Layout(*(np.zeros(size, np.int64) for size in ((1, 1), 1, (1, 5))), [0, 1])
    for dtype in in_place.KINDS:
        in_place.attend(torch.zeros(1, 1, 16), [torch.zeros(64, dtype=dtype)], LAYOUT, None)
