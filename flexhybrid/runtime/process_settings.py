"""Settings of the whole process that a run needs, held while any run lasts."""

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
    """Sets a value while it has users. The last user to end, on whichever thread, restores the value before the first.

    All users want the same value, so that two engines of one process cannot disturb each other.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], object], value: T):
        self._read, self._write, self._value = read, write, value
        self._users, self._before = 0, value
        self._lock = threading.RLock()  # reentrant: collecting a forgotten user, which ends it, may happen inside

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


#: Seconds between forced switches of Python threads while lanes run: the default of 5 ms would let a busy planner delay
#: a due copy.
SHORT_SWITCH_INTERVAL = HeldSetting(sys.getswitchinterval, sys.setswitchinterval, 5e-4)

#: Garbage collections skip objects that survived two of them. A trace has so many objects that repeated full
#: collections would make planning take three times as long, and a profile, which needs a trace, would measure that.
NO_OLD_GARBAGE = HeldSetting(gc.get_threshold, lambda of: gc.set_threshold(*of), (*gc.get_threshold()[:2], 1 << 30))

#: During a stream capture its thread may not free page-locked memory, which earlier garbage may hold: the driver would
#: keep it and refuse the next mapping there.
NO_GARBAGE = HeldSetting(gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable(), False)

#: cuDNN's attention builds a graph for every new context length, on the host, in the middle of a decode.
NO_CUDNN_ATTENTION = HeldSetting(torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False)


def _product_precision() -> tuple[str | None, str]:
    """Return how float32 products round, by torch's older and newer API. The older one has no answer (None) if the
    newer was used."""
    try:
        first = torch.get_float32_matmul_precision()
    except RuntimeError:
        first = None
    return first, str(torch.backends.cuda.matmul.fp32_precision)


def _set_product_precision(precision: tuple[str | None, str]) -> None:
    torch.set_float32_matmul_precision(precision[0] or "highest")  # sets the second one as well
    torch.backends.cuda.matmul.fp32_precision = precision[1]


#: Exact tokens in float32: the environment of an image may have asked for products with ten bits.
NO_TF32 = HeldSetting(_product_precision, _set_product_precision, ("highest", "ieee"))


class _Float32Default(TorchFunctionMode):
    """Computes in this thread what torch computes where its default dtype, a setting of the process, is float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if getattr(made, "dtype", None) != torch.get_default_dtype() or any(map(_decides, tree_leaves((args, kwargs)))):
            return made
        with suppress(TypeError):
            if (named := func(*args, **kwargs | {"dtype": torch.float32})) is not NotImplemented:
                return named
        return func(*tree_map(lambda of: of.float() if torch.is_tensor(of) else of, args), **kwargs)  # of integers


def _decides(given: object) -> bool:
    """Return whether an argument decides the dtype of a result."""
    return isinstance(given, torch.dtype) or isinstance(given, torch.Tensor) and given.is_floating_point()


def float32_default() -> AbstractContextManager:
    """Make float32 the default dtype for transformers' modules in this thread."""
    return nullcontext() if torch.get_default_dtype() == torch.float32 else _Float32Default()


@contextmanager
def on_cpu() -> Iterator[None]:
    """Make this thread's tensors without a named device CPU tensors, for any default device."""
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        yield
