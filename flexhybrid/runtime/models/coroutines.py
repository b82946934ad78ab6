"""Functions that interrupt themselves and are resumed.

Each runs in a greenlet, which the next function reuses: making one takes ten times as long (about 10 µs), for its
frames' memory.

A greenlet's part of the C stack is on top of the frames of its latest switcher. torch walks the whole stack for every
error that it raises, and the process dies if the frames below differ from those at the start. So all switches happen on
one line of one permanent frame (``hosted``).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from flexhybrid.runtime.process_settings import float32_default

Result = TypeVar("Result")

_ENDED, _RAISED = object(), object()  #: what a greenlet gives when its function has ended, or raised an error
_LEFT = object()  #: value that ends a resumed function


class _Left(BaseException):
    """Ends a function that is not gone on with."""


class _Switch(NamedTuple):
    """Asks the host to switch to a greenlet."""

    worker: Any
    value: Any


class _Worker(NamedTuple):
    greenlet: Any
    place: list[Any]  #: a function before it runs, its result or error behind


class _Host(threading.local):
    base: Any = None  #: the greenlet from which all others of this thread are switched to; None: nothing is hosted
    whole: Any = None  #: that of the hosted function
    idle: list[_Worker]
    workers: weakref.WeakSet[Any]  #: the greenlets of all functions that have not ended


_host = _Host()


def hosted(function: Callable[[], Result]) -> Result:
    """Return what a function returns; while it runs, it may use ``started`` in this thread."""
    import greenlet

    if _host.base is not None:
        return function()
    # The function is no closure of what runs it: a frame that an error holds keeps its closure when it is cleared.
    switched_to: Any = greenlet.greenlet(_call)
    callers, value = [], function
    _host.base, _host.whole = greenlet.getcurrent(), switched_to
    _host.idle, _host.workers = [], weakref.WeakSet()
    try:
        while True:
            value = switched_to.switch(value)  # the one line
            if type(value) is _Switch:
                callers.append(switched_to)
                switched_to, value = value
            elif _host.whole.dead:
                return value
            else:
                switched_to = callers.pop()
    finally:
        # An error's traceback may outlive this thread with them; their frames have memory of their own.
        for worker in list(_host.workers):
            worker.throw()
        _host.base, _host.whole, _host.idle, _host.workers = None, None, [], weakref.WeakSet()


def _call(function: Callable[[], Result]) -> Result:
    return function()


class Coroutine:
    """A function that is running, in the thread that has started it."""

    def __init__(self, worker: _Worker):
        self._worker: _Worker | None = worker

    @property
    def ended(self) -> bool:
        return self._worker is None

    def resume(self, value: Any) -> Any:
        """Go on with the function, for which ``interrupt`` returns ``value``; return as ``started``."""
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
    """Run a function until it is interrupted or ends; return its interruption's value, or its result.

    Raise what it raises, and RuntimeError outside ``hosted``.
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
    """Interrupt the running function: ``started`` or ``Coroutine.resume`` returns ``value``. Return what it is resumed
    with. Raise RuntimeError where no such function runs."""
    import greenlet

    if _host.base is None or greenlet.getcurrent() is _host.whole:
        raise RuntimeError("nothing runs here that could be gone on with")
    given = _host.base.switch(value)
    if given is _LEFT:
        raise _Left
    return given


def _serve(place: list[Any]) -> object:
    """Run functions, one after the other, until one raises an error: its traceback holds frames of this greenlet. None
    of them, nor its result, is held while the greenlet is idle."""
    import greenlet

    while True:
        try:
            place.append(place.pop()())
        except greenlet.GreenletExit:  # unreferenced
            raise
        except _Left:
            place[:] = [None]  # its result is not needed
        except BaseException as error:
            place[:] = [error]
            return _RAISED
        _host.base.switch(_ENDED)
