"""The number of threads that torch computes with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_HIDDEN = 512  #: hidden size below which one thread computes a product as fast as two


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Compute with ``count`` threads of torch inside the block (None: unchanged)."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(device: str, hidden: int) -> int | None:
    """Return 1 for a model whose products are too small for two CPU threads, else None (all threads)."""
    return 1 if device == "cpu" and hidden < SMALL_HIDDEN else None
