"""Settings of the process that runs need: kept while a run lasts, or set for one thread."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Generic, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

T = TypeVar("T")


class HeldSetting(Generic[T]):
    """Sets a value while it has users. When the last user ends, on any thread, the earlier value is restored.

    All users need the same value, so two engines in one process do not disturb each other.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], object], value: T):
        self._read, self._write, self._value = read, write, value
        self._users, self._before = 0, value
        self._lock = threading.RLock()  # reentrant, because garbage collection inside may end a user

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = self._read()
                self._write(self._value)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._write(self._before)


#: Seconds between switches of Python threads while lanes run. With the default of 5 ms, a busy planning thread could
#: delay a copy.
SHORT_SWITCH_INTERVAL = HeldSetting(sys.getswitchinterval, sys.setswitchinterval, 5e-4)

#: Garbage collections skip objects that survived two of them. A trace has so many objects that full collections would
#: make planning take three times as long, which a profile would measure, because it needs a trace.
NO_OLD_GARBAGE = HeldSetting(gc.get_threshold, lambda of: gc.set_threshold(*of), (*gc.get_threshold()[:2], 1 << 30))

#: No garbage collection. During a stream capture, its thread must not free page-locked memory: the driver would keep
#: the memory and refuse the next mapping at its address.
NO_GARBAGE = HeldSetting(gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable(), False)

#: No cuDNN attention, which builds a graph on the host for every new context length.
NO_CUDNN_ATTENTION = HeldSetting(torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False)


def _product_precision() -> tuple[str | None, str]:
    """Return the precision of float32 products, by torch's old API (None if the new one was used) and its new API."""
    try:
        first = torch.get_float32_matmul_precision()
    except RuntimeError:
        first = None
    return first, str(torch.backends.cuda.matmul.fp32_precision)


def _set_product_precision(precision: tuple[str | None, str]) -> None:
    torch.set_float32_matmul_precision(precision[0] or "highest")  # also sets the new API's value
    torch.backends.cuda.matmul.fp32_precision = precision[1]


#: Exact products in float32. The environment may have requested products with 10-bit mantissas.
NO_TF32 = HeldSetting(_product_precision, _set_product_precision, ("highest", "ieee"))


class _Float32Default(TorchFunctionMode):
    """Makes this thread's operations use float32 as default dtype, whatever the process's default is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if getattr(made, "dtype", None) != torch.get_default_dtype() or any(map(_decides, tree_leaves((args, kwargs)))):
            return made
        with suppress(TypeError):
            if (named := func(*args, **kwargs | {"dtype": torch.float32})) is not NotImplemented:
                return named
        # An operation without a dtype argument, on integers.
        return func(*tree_map(lambda of: of.float() if torch.is_tensor(of) else of, args), **kwargs)


def _decides(given: object) -> bool:
    """Return whether an argument determines the result's dtype, so that the default is not used."""
    return isinstance(given, torch.dtype) or isinstance(given, torch.Tensor) and given.is_floating_point()


def float32_default() -> AbstractContextManager:
    """Make float32 the default dtype for transformers' modules in this thread."""
    return nullcontext() if torch.get_default_dtype() == torch.float32 else _Float32Default()


@contextmanager
def on_cpu() -> Iterator[None]:
    """Make new tensors of this thread CPU tensors if no device is given, whatever the default device is."""
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        yield


SMALL_HIDDEN = 512  #: hidden size below which one CPU thread computes products as fast as two


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Make torch use ``count`` threads inside the context (None: unchanged)."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(device: str, hidden: int) -> int | None:
    """Return 1 for a model whose products are too small for two CPU threads, else None (all threads)."""
    return 1 if device == "cpu" and hidden < SMALL_HIDDEN else None
