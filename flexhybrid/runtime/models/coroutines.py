"""Run functions that can interrupt themselves and be resumed.

Each function runs in a greenlet. Finished greenlets are reused, because creating one takes ten times as long (about
10 µs), for the memory of its frames.

A greenlet's part of the C stack lies on top of the frames of the code that last switched to it. torch walks the whole
stack for every error that it raises, and the process dies if the frames below have changed since the start. So all
switches happen on one line of one permanent frame (``hosted``).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from flexhybrid.runtime.process_settings import float32_default

Result = TypeVar("Result")

_ENDED, _RAISED = object(), object()  #: values that a greenlet returns when its function has ended, or raised an error
_LEFT = object()  #: resuming a function with this value ends it


class _Left(BaseException):
    """Raised in a function to end it (``Coroutine.leave``)."""


class _Switch(NamedTuple):
    """Tells ``hosted`` to switch to a greenlet."""

    worker: Any
    value: Any


class _Worker(NamedTuple):
    greenlet: Any
    place: list[Any]  #: holds a function before it runs, its result or error afterwards


class _Host(threading.local):
    base: Any = None  #: the greenlet that switches to all others of this thread; None outside ``hosted``
    whole: Any = None  #: the greenlet of the hosted function
    idle: list[_Worker]
    workers: weakref.WeakSet[Any]  #: greenlets of all functions that have not ended


_host = _Host()


def hosted(function: Callable[[], Result]) -> Result:
    """Call a function, which may use ``started`` in this thread; return its result."""
    import greenlet

    if _host.base is not None:
        return function()
    # ``_call`` is no closure: a frame held by an error's traceback keeps its closure, even if it is cleared.
    switched_to: Any = greenlet.greenlet(_call)
    callers, value = [], function
    _host.base, _host.whole = greenlet.getcurrent(), switched_to
    _host.idle, _host.workers = [], weakref.WeakSet()
    try:
        while True:
            value = switched_to.switch(value)  # the only line that switches
            if type(value) is _Switch:
                callers.append(switched_to)
                switched_to, value = value
            elif _host.whole.dead:
                return value
            else:
                switched_to = callers.pop()
    finally:
        # End the greenlets: an error's traceback may keep them, and the memory of their frames, after the thread.
        for worker in list(_host.workers):
            worker.throw()
        _host.base, _host.whole, _host.idle, _host.workers = None, None, [], weakref.WeakSet()


def _call(function: Callable[[], Result]) -> Result:
    return function()


class Coroutine:
    """A started function. Only the thread that started it may resume it."""

    def __init__(self, worker: _Worker):
        self._worker: _Worker | None = worker

    @property
    def ended(self) -> bool:
        return self._worker is None

    def resume(self, value: Any) -> Any:
        """Resume the function: its ``interrupt`` returns ``value``. Return the next interruption's value or the result.

        Raise the function's error, or RuntimeError if it has ended.
        """
        if (worker := self._worker) is None:
            raise RuntimeError("the function has ended")
        with float32_default():
            given = _host.base.switch(_Switch(worker.greenlet, value))
        if given is not _ENDED and given is not _RAISED:
            return given
        result, self._worker = worker.place.pop(), None
        if given is _ENDED:
            _host.idle.append(worker)
            return result
        try:
            raise result
        finally:
            del result  # its traceback holds this frame

    def leave(self) -> None:
        """End the function at its interruption."""
        self.resume(_LEFT)


def started(function: Callable[[], Any]) -> tuple[Coroutine, Any]:
    """Run a function until it is interrupted or ends; return (coroutine, interruption's value or result).

    Raise the function's error, or RuntimeError outside ``hosted``.
    """
    if _host.base is None:
        raise RuntimeError("functions that are interrupted run within hosted()")
    worker = _host.idle.pop() if _host.idle else _new_worker()
    worker.place.append(function)
    run = Coroutine(worker)
    return run, run.resume(worker.place)


def _new_worker() -> _Worker:
    import greenlet

    worker = _Worker(greenlet.greenlet(_serve, _host.base), [])
    _host.workers.add(worker.greenlet)
    return worker


def interrupt(value: Any) -> Any:
    """Interrupt the running function: ``started`` or ``Coroutine.resume`` returns ``value`` to the caller.

    Return the value with which the function is resumed. Raise RuntimeError outside of a started function.
    """
    import greenlet

    if _host.base is None or greenlet.getcurrent() is _host.whole:
        raise RuntimeError("no function runs here that could be resumed")
    given = _host.base.switch(value)
    if given is _LEFT:
        raise _Left
    return given


def _serve(place: list[Any]) -> object:
    """Run functions one after another, until one raises an error, whose traceback holds frames of this greenlet.

    An idle greenlet holds no function and no result.
    """
    import greenlet

    while True:
        try:
            place.append(place.pop()())
        except greenlet.GreenletExit:  # the greenlet is deleted
            raise
        except _Left:
            place[:] = [None]  # its result is not needed
        except BaseException as error:
            place[:] = [error]
            return _RAISED
        _host.base.switch(_ENDED)
