"""The progress of a long job on stderr, and its stop by a signal."""

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
FIRST_S, PLAIN_S = 5.0, 30.0  #: seconds until the first line, where there is no terminal, and from one to the next
AGAIN_S = 0.05  #: seconds after which an interrupt that was lost is sent again
STOP_S = 1.0  #: seconds after which a stop no longer waits for the end of the iteration
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
BAR_OF_ANSWERS = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}{postfix}"  #: with the words of ``state``, 80 columns


class Progress:
    """Shows progress on stderr: a bar on a terminal, elsewhere a line after FIRST_S and then every PLAIN_S, nothing
    when ``quiet``.

    ``total`` counts the most that may come; an answer that ends before its limit takes its rest away. ``answers``:
    their number. ``predicted_s``: of the total. A thread keeps the clock going between two calls of ``advance``, from
    ``with`` on.
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
        self.predicted_rate: float | None = None  #: a second, to be shown beside the measured one
        self.terminal = sys.stderr.isatty()
        self.steps_alike = True  #: False: of steps that take seconds and others that take minutes nothing is predicted
        self.outlook: Callable[[], float | None] | None = None  #: says the seconds left, where somebody knows better
        self.first_share: Callable[[], float] | None = None  #: says how much of the prompts is read, before the first
        self.total, self.count, self.done = total, 0, 0
        self.began, self._marks = time.monotonic(), list[tuple[float, int]]()  # now and then, when so much had come
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
        """Begin the part of the job called ``title``."""
        self.title = title
        self.bar.set_description(title)

    def advance(self, count: int = 1) -> None:
        """Count what has come."""
        now = time.monotonic()
        if not self._marks or now - self.began > 1.1 * (self._marks[-1][0] - self.began):
            self._marks.append((now, self.count + count))
        self.count += count
        self.bar.update(count)  # what is left, which takes a while to foretell, the ticker says

    def finished(self, unused: int) -> None:
        """Count a complete answer; it is ``unused`` tokens shorter than its limit."""
        self.done += 1
        self.total -= unused

    def expect(self, answers: int, total: int) -> None:
        """Take the number of all answers and the most that may come of them, once both are known."""
        self.answers, self.total = answers, total

    def seconds_left(self) -> float | None:
        """Return how long that takes, at ``rate``. Before the first of it, what is left of the prediction. None where
        nothing is known, or the prediction has passed."""
        if self.outlook and (told := self.outlook()) is not None:
            return told
        if not self.steps_alike:
            return None
        if not self.count:
            left = (self.predicted_s or 0.0) - (time.monotonic() - self.began)
            return left if left > 0 else None
        rate = self.rate()
        return (self.total - self.count) / rate if rate else None

    def rate(self) -> float:
        """Return the count a second in the last half of the time, without the first of it."""
        now = time.monotonic()
        at, before = next((mark for mark in self._marks[::-1] if 2 * mark[0] <= self.began + now), self._marks[0])
        if self.count == before or now <= at:
            at, before = self.began, 0
        return (self.count - before) / max(now - at, 1e-9)

    def state(self) -> str:
        """Return the time left, the rate and the answers done, in words: a narrow terminal cuts off the last ones."""
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
    """stdout or stderr, which may be full, closed or ASCII: what cannot be written is lost, and nothing ends by it."""

    def __init__(self, stream: TextIO | None):
        self.stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (None: closed from the start)
        self.failure: OSError | None = None  #: the first
        if isinstance(self.stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # of a file whose descriptor has become a pipe
                self.stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str = "") -> int:
        """Write a text, or what waits to be written."""
        try:
            self.stream.write(text) if text else self.stream.flush()
        except OSError as error:
            self.failure = self.failure or error
        return len(text)

    flush = write


@contextlib.contextmanager
def lasting_streams() -> Iterator[_LastingStream]:
    """Let the block write to stdout and stderr whatever becomes of them, a warning as one line. Yield stdout."""
    before = sys.stdout, sys.stderr, warnings.formatwarning
    streams = sys.stdout, sys.stderr = _LastingStream(sys.stdout), _LastingStream(sys.stderr)
    warnings.formatwarning = lambda message, *_: f"flexhybrid: {message}\n"  # without a line of our source
    try:
        yield streams[0]
    finally:
        sys.stdout, sys.stderr, warnings.formatwarning = before
        for stream in streams:
            stream.flush()
            if stream.failure:  # what still waits Python would complain of at its end
                with contextlib.suppress(OSError):  # a stream without a file
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@dataclass
class StopAsked:
    """Whether the user wants the job to end."""

    asked: bool = False
    overdue: bool = False  #: whether the iteration did not end within STOP_S
    swallowed: bool = False  #: whether an interrupt was raised where nothing can be raised


@contextlib.contextmanager
def lost_interrupts_again(on_loss: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Send an interrupt once more, AGAIN_S later, that met a callback of C code or a finalizer: it is lost there, and
    Python would print it as ignored. ``on_loss`` is called for each."""
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
    """Send SIGINT to the main thread after so many seconds, behind a call of ``before``."""

    def interrupt() -> None:
        before()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    return timer


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopAsked]:
    """Turn the first SIGINT (Ctrl-C) or SIGTERM into ``asked``. When the block goes on for STOP_S more, it is left by a
    KeyboardInterrupt that ends with it; a second signal raises one that does not.

    An interrupt that meets a callback of C code is sent again (``lost_interrupts_again``). The C code may fail instead:
    a failure after it counts as the interrupt."""
    stop, main = StopAsked(), threading.main_thread()
    timers: list[threading.Timer] = []

    def handle(_signal_number, _frame) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        timers.append(interrupt_in(STOP_S, partial(setattr, stop, "overdue", True)))
        text = f"stopping after this iteration, or in {STOP_S:.0f} s; once more stops at once"
        print(f"\nflexhybrid: {text}", file=sys.stderr, flush=True)

    if threading.current_thread() is not main:  # signals are the main thread's
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
