"""Accesses of numpy to page-locked memory that tensors have handed out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fake_cuda.accesses import Watch, span_of
from fake_cuda.order import Cells, Place, Span
from torch.utils import _pytree as pytree


class Watched(np.ndarray):
    """Page-locked memory as numpy sees it, whose elements are read and written under watch."""

    watch: Watch | None = None

    def __array_finalize__(self, base):
        self.watch = getattr(base, "watch", None)

    @property
    def plain(self) -> np.ndarray:
        return self.view(np.ndarray)

    def seen(self, write: bool, what: str) -> None:
        place = Span(self.__array_interface__["data"][0], self.shape, self.strides, self.itemsize)
        if self.watch:
            self.watch.on_host(place, write, what)

    def _picked(self, key) -> Place | None:
        """Return the place of elements that an index picks; None where it makes a view."""
        if _is_basic(key):
            return None
        addresses = np.array(self.__array_interface__["data"][0])
        for n, stride in zip(self.shape, self.strides, strict=True):
            addresses = addresses[..., None] + stride * np.arange(n)
        return Cells(np.unique(addresses[key]), self.itemsize)

    def __getitem__(self, key):
        place = self._picked(key)
        if place is None:
            found = super().__getitem__(key)
            if isinstance(found, Watched):
                return found
            place = Span(self.__array_interface__["data"][0], self.shape, self.strides, self.itemsize)
        if self.watch:
            self.watch.on_host(place, False, "index")
        return self.plain[key]

    def __setitem__(self, key, value):
        place, plain = self._picked(key), self.plain
        if place is None:
            part = plain[key if isinstance(key, tuple) else (key,)]
            if isinstance(part, np.ndarray):
                place = Span(part.__array_interface__["data"][0], part.shape, part.strides, part.itemsize)
            else:
                place = Span(self.__array_interface__["data"][0], self.shape, self.strides, self.itemsize)
        if self.watch:
            self.watch.on_host(place, True, "assignment")
        plain[key] = _unwatched(value)

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **others):
        for array in out:
            if isinstance(array, Watched):
                array.seen(True, ufunc.__name__)
        others |= {"out": tuple(map(_silent, out))} if out else {}
        return getattr(ufunc, method)(*map(_unwatched, inputs), **others)

    def __array_function__(self, func, types, args, kwargs):
        written = [kwargs.get("out")] + ([args[0]] if func is np.copyto else [])
        for array in written:
            if isinstance(array, Watched):
                array.seen(True, func.__name__)

        def plain(value):
            if any(value is array for array in written):
                return _silent(value)
            return _unwatched(value)

        return func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs))


def _is_basic(key) -> bool:
    """Return whether an index makes a view."""
    keys = key if isinstance(key, tuple) else (key,)
    return all(one is None or one is Ellipsis or isinstance(one, slice | int | np.integer) for one in keys)


def _silent(value):
    return value.plain if isinstance(value, Watched) else value


def _unwatched(value):
    """Return a plain array that is about to be read."""
    if isinstance(value, Watched):
        value.seen(False, "read")
        return value.plain
    return value


def _reading(name: str) -> Callable:
    def method(self, *args, **kwargs):
        self.seen(False, name)
        return getattr(self.plain, name)(*args, **kwargs)

    return method


for _name in ("tolist", "item", "copy", "astype", "sum", "max", "min", "any", "all", "nonzero", "argsort", "tobytes"):
    setattr(Watched, _name, _reading(_name))


class Arrays(torch.overrides.TorchFunctionMode):
    """Hands out page-locked memory to numpy under watch; the mode of one thread."""

    def __init__(self, watch: Watch):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.call(func, args, kwargs or {})

    def call(self, func, args: tuple, kwargs: dict) -> Any:
        if func is torch.Tensor.numpy and self.watch.is_registered(args[0].data_ptr()):
            array = func(*args, **kwargs).view(Watched)
            array.watch = self.watch
            return array
        if func is torch.from_numpy:
            return func(*map(_silent, args), **kwargs)
        if func is torch.Tensor.tolist and not self.watch.runs.on_device(args[0]):
            self.watch.on_host(span_of(args[0]), False, "tolist")
        return func(*args, **kwargs)
