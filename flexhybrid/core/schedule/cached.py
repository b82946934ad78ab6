"""A property that is computed at its first use, for values of which there are many."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):  # noqa: N801  (the name of the library's own)
    """``functools.cached_property`` as it is from Python 3.12 on. Before, it took a lock that all objects share, which
    takes as long as many a value and lets the threads of a run wait for each other. Two threads may compute a value at
    the same time: it must be the same."""

    def __init__(self, function: Callable[[Any], T]):
        self.function, self.__doc__ = function, function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> "cached_property[T]": ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> "cached_property[T] | T":
        if instance is None:
            return self
        value = instance.__dict__[self.name] = self.function(instance)
        return value
