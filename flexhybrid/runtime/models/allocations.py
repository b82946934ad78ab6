"""Count the peak memory of a function's tensors on the meta device, where tensors have sizes but no memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexhybrid.runtime.models.latent import tensors_in


class _Counted(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is active and still exist."""

    def __init__(self):
        super().__init__()
        self.held = self.peak = 0
        self._seen: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            memory = tensor.untyped_storage()
            if memory._cdata not in given and memory._cdata not in self._seen:
                self._add(memory)
        return result

    def _add(self, memory: torch.UntypedStorage) -> None:
        key, size = memory._cdata, memory.nbytes()

        def gone(_) -> None:
            del self._seen[key]
            self.held -= size

        self._seen[key] = weakref.ref(memory, gone)
        self.held += size
        self.peak = max(self.peak, self.held)


def peak_bytes(function: Callable[[], Any]) -> int:
    """Return the peak bytes of the tensors that a function makes."""
    with _Counted() as counted:
        result = function()
    del result
    return counted.peak
