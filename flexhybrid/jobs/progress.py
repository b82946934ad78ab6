"""Shows the progress of a long job on stderr, and stops the job on a signal."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TextIO

from tqdm import tqdm

TICK_S = 1.0  #: seconds between looks at the clock
FIRST_S, PLAIN_S = 5.0, 30.0  #: without a terminal: seconds until the first line, and between two lines
AGAIN_S = 0.05  #: seconds after which a lost interrupt is sent again
STOP_S = 1.0  #: seconds that a stop waits for the end of the iteration
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
BAR_OF_ANSWERS = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}{postfix}"  #: fits 80 columns with the text of ``state``


class Progress:
    """Shows progress on stderr: a bar on a terminal, else a line after FIRST_S and then every PLAIN_S.

    ``quiet`` shows nothing. ``total``: the largest possible count of ``unit``; an answer that ends before its limit
    lowers it. ``predicted_s``: seconds for the total. ``failed``: refused requests so far. ``answers``: number of
    answers. Inside a ``with`` block, a thread updates the output between calls of ``advance``.
    """

    def __init__(  # noqa: PLR0913
        self,
        total: int,
        title: str,
        unit: str,
        quiet: bool,
        predicted_s: float | None = None,
        failed: int = 0,
        answers: int | None = None,
    ):
        self.title, self.quiet, self.failed, self.answers = title, quiet, failed, answers
        self.predicted_s = predicted_s
        self.predicted_rate: float | None = None  #: predicted count per second, shown next to the measured one
        self.terminal = sys.stderr.isatty()
        self.steps_alike = True  #: False: steps differ so much in length that no time left is shown
        self.outlook: Callable[[], float | None] | None = None  #: a better estimate of the seconds left, if known
        self.first_share: Callable[[], float] | None = None  #: share of the prompts computed, before the first token
        self.total, self.count, self.done = total, 0, 0
        self.began, self._marks = time.monotonic(), list[tuple[float, int]]()  # (time, count), at growing intervals
        self._ended, self._ticker = threading.Event(), None
        wide = self.terminal and os.get_terminal_size(sys.stderr.fileno()).columns > 0
        bar = BAR if answers is None else BAR_OF_ANSWERS
        self.bar = tqdm(
            total=total, desc=title, unit=unit, unit_scale=True, file=sys.stderr, leave=False, bar_format=bar,
            disable=quiet or not self.terminal, dynamic_ncols=wide,
            ncols=None if wide else 80, nrows=None if wide else 24,
        )  # fmt: skip

    def __enter__(self) -> Progress:
        if not self.quiet:
            self._ticker = threading.Thread(target=self._tick, name="clock", daemon=True)
            self._ticker.start()
        return self

    def __exit__(self, *error) -> None:
        self._ended.set()
        if self._ticker:
            self._ticker.join()
        self.bar.close()

    def _tick(self) -> None:
        wait_s = TICK_S if self.terminal else FIRST_S
        while not self._ended.wait(wait_s):
            if self.terminal:
                self.bar.total = self.total
                self.bar.set_postfix_str(self.state(), refresh=True)
            else:
                parts = filter(None, (f"{self.title}: {self.count:,} of {self.total:,}", self.state()))
                print(", ".join(parts), file=sys.stderr, flush=True)
                wait_s = PLAIN_S

    def turn_to(self, title: str) -> None:
        """Show ``title`` as the current part of the job."""
        self.title = title
        self.bar.set_description(title)

    def advance(self, count: int = 1) -> None:
        """Add ``count`` to the progress."""
        now = time.monotonic()
        if not self._marks or now - self.began > 1.1 * (self._marks[-1][0] - self.began):
            self._marks.append((now, self.count + count))
        self.count += count
        self.bar.update(count)  # the thread adds the time left, as estimating it takes a while

    def finished(self, unused: int) -> None:
        """Count a complete answer, ``unused`` tokens shorter than its limit."""
        self.done += 1
        self.total -= unused

    def expect(self, answers: int, total: int) -> None:
        """Set the number of answers and the total, once both are known."""
        self.answers, self.total = answers, total

    def seconds_left(self) -> float | None:
        """Return the seconds left: by ``outlook``, else by the rate so far, else by the prediction; None if unknown."""
        if self.outlook and (estimate := self.outlook()) is not None:
            return estimate
        if not self.steps_alike:
            return None
        if not self.count:
            left = (self.predicted_s or 0.0) - (time.monotonic() - self.began)
            return left if left > 0 else None
        rate = self.rate()
        return (self.total - self.count) / rate if rate else None

    def rate(self) -> float:
        """Return the count per second over about the last half of the time."""
        now = time.monotonic()
        at, before = next((mark for mark in self._marks[::-1] if 2 * mark[0] <= self.began + now), self._marks[0])
        if self.count == before or now <= at:
            at, before = self.began, 0
        return (self.count - before) / max(now - at, 1e-9)

    def state(self) -> str:
        """Return time left, rate and complete answers as text, the most important first for narrow terminals."""
        parts = []
        if (left := self.seconds_left()) is not None:
            parts.append(f"{tqdm.format_interval(left)} left")
        if self.count:
            predicted = f" (predicted {self.predicted_rate:.1f})" if self.predicted_rate and not self.terminal else ""
            parts.append(f"{self.rate():.1f}/s{predicted}")
        elif self.answers:
            parts.append("reading the prompts (prefill)" + (f", {self.first_share():.0%}" if self.first_share else ""))
        if self.done:
            parts.append(f"{self.done:,}/{self.answers:,} done" if self.answers else f"{self.done:,} done")
            parts += [f"{self.failed:,} refused"] * bool(self.failed)
        return ", ".join(parts)

    def note(self, text: str) -> None:
        """Print a message above the bar."""
        if not self.quiet:
            tqdm.write(f"flexhybrid: {text}", file=sys.stderr)


class _LastingStream:
    """Wraps stdout or stderr so that writing never raises: text for a full or closed stream is lost."""

    def __init__(self, stream: TextIO | None):
        self.stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (None: closed from the start)
        self.failure: OSError | None = None  #: the first error
        if isinstance(self.stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # raised for a file whose descriptor became a pipe
                self.stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str = "") -> int:
        """Write ``text``, or flush the stream if it is empty."""
        try:
            self.stream.write(text) if text else self.stream.flush()
        except OSError as error:
            self.failure = self.failure or error
        return len(text)

    flush = write


@contextlib.contextmanager
def lasting_streams() -> Iterator[_LastingStream]:
    """Let the block write to stdout and stderr without errors, and a warning as one line. Yield stdout."""
    before = sys.stdout, sys.stderr, warnings.formatwarning
    streams = sys.stdout, sys.stderr = _LastingStream(sys.stdout), _LastingStream(sys.stderr)
    warnings.formatwarning = lambda message, *_: f"flexhybrid: {message}\n"  # without a line of our source
    try:
        yield streams[0]
    finally:
        sys.stdout, sys.stderr, warnings.formatwarning = before
        for stream in streams:
            stream.flush()
            if stream.failure:  # so that Python does not report unwritten text at exit
                with contextlib.suppress(OSError):  # raised for a stream without a descriptor
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@dataclass
class StopAsked:
    """The state of a stop by a signal."""

    asked: bool = False  #: whether the user wants the job to end
    overdue: bool = False  #: whether the iteration did not end within STOP_S
    swallowed: bool = False  #: whether an interrupt was lost in a callback of C code or a finalizer


@contextlib.contextmanager
def lost_interrupts_again(on_loss: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Send an interrupt again, AGAIN_S later, if it was raised in a callback of C code or in a finalizer.
    There, Python would only print it as ignored. ``on_loss`` is called for each lost interrupt."""
    show, timers = sys.unraisablehook, []

    def unraisable(lost) -> None:
        if lost.exc_type is not KeyboardInterrupt:
            show(lost)
            return
        on_loss()
        timers.append(interrupt_in(AGAIN_S))

    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        sys.unraisablehook = show
        for timer in timers:
            timer.cancel()


def interrupt_in(seconds: float, before: Callable[[], None] = lambda: None) -> threading.Timer:
    """Send SIGINT to the main thread after some seconds, and call ``before`` just before that; return the timer."""

    def interrupt() -> None:
        before()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    return timer


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopAsked]:
    """Yield a StopAsked that the first SIGINT (Ctrl-C) or SIGTERM sets to ``asked``.

    If the block still runs STOP_S seconds later, a KeyboardInterrupt ends it; the caller does not see this interrupt,
    but the one that a second signal raises. An interrupt lost in C code is sent again (``lost_interrupts_again``);
    if the C code fails because of it, the failure counts as the interrupt.
    """
    stop, main = StopAsked(), threading.main_thread()
    timers: list[threading.Timer] = []

    def handle(_signal_number, _frame) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        timers.append(interrupt_in(STOP_S, partial(setattr, stop, "overdue", True)))
        text = f"stopping after this iteration, or in {STOP_S:.0f} s; a second signal stops at once"
        print(f"\nflexhybrid: {text}", file=sys.stderr, flush=True)

    if threading.current_thread() is not main:  # only the main thread may set signal handlers
        yield stop
        return
    earlier = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with lost_interrupts_again(partial(setattr, stop, "swallowed", True)):
            yield stop
    except BaseException as error:
        if not (isinstance(error, KeyboardInterrupt) or stop.swallowed and isinstance(error, Exception)):
            raise
        if not stop.overdue:
            raise error if isinstance(error, KeyboardInterrupt) else KeyboardInterrupt() from None
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in earlier.items():
            signal.signal(number, handler)
