"""Functions that are interrupted where they say so, and go on from there when they are told to.

Each runs in a greenlet. One that has ended is used again by the next function of its thread: to make one takes ten
times as long (some 10 µs), as its frames get memory of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_ENDED = object()  #: what a greenlet gives when its function has ended


class _Left(BaseException):
    """Ends a function that is not gone on with."""


class _Idle(threading.local):
    def __init__(self):
        self.runs: list[Run] = []


_idle = _Idle()


class Run:
    """A function that is running, in the thread that has started it."""

    def __init__(self):
        import greenlet

        self._place: list[Any] = []  # the function before it runs, its result behind
        self._greenlet = greenlet.greenlet(_serve)

    def resume(self, value: Any) -> Any:
        """Go on with the function, for which ``interrupt`` returns ``value``; return as ``started``."""
        return self._given(self._greenlet.switch(value))

    def leave(self) -> None:
        """End the function where it is."""
        self._given(self._greenlet.throw(_Left))

    def _begin(self, function: Callable[[], Any]) -> Any:
        import greenlet

        self._greenlet.parent = greenlet.getcurrent()
        self._place.append(function)
        return self.resume(self._place)

    def _given(self, given: Any) -> Any:
        if given is not _ENDED:
            return given
        _idle.runs.append(self)
        return self._place.pop() if self._place else None


def started(function: Callable[[], Any]) -> tuple[Run, Any]:
    """Run a function until it is interrupted, or to its end: return what it was interrupted with, or its result."""
    run = _idle.runs.pop() if _idle.runs else Run()
    return run, run._begin(function)


def interrupt(value: Any) -> Any:
    """Interrupt the running function, of which ``started`` or ``Run.resume`` return this value. Return the value that
    it is resumed with. Raise RuntimeError where no such function runs."""
    import greenlet

    parent = greenlet.getcurrent().parent
    if parent is None:
        raise RuntimeError("nothing runs here that could be gone on with")
    return parent.switch(value)


def _serve(place: list[Any]) -> None:
    """Run functions, one after the other; none of them, nor its result, is held while the greenlet is idle."""
    import greenlet

    while True:
        try:
            place.append(place.pop()())
        except _Left:  # nobody waits for its result
            place.clear()
        caller: Any = greenlet.getcurrent().parent
        caller.switch(_ENDED)
