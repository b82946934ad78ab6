"""The progress of a long job on stderr, and its stop by a signal."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tqdm import tqdm

PLAIN_S = 30.0  #: seconds between lines where stderr is not a terminal


class Progress:
    """Shows progress on stderr: a bar on a terminal, elsewhere a line every PLAIN_S, nothing when ``quiet``."""

    def __init__(
        self, total: int, title: str, unit: str, quiet: bool, predicted_s: float | None = None, failed: int = 0
    ):
        self.title, self.quiet, self.predicted_s, self.failed = title, quiet, predicted_s, failed
        self.terminal = sys.stderr.isatty()
        self.total, self.count, self.done = total, 0, 0
        self.began = self.printed_s = time.monotonic()
        self.bar = tqdm(
            total=total, desc=title, unit=unit, unit_scale=True, file=sys.stderr, leave=False,
            disable=quiet or not self.terminal,
        )  # fmt: skip

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error) -> None:
        self.bar.close()

    def turn_to(self, title: str) -> None:
        """Begin the part of the job called ``title``."""
        self.title = title
        self.bar.set_description(title)

    def advance(self, count: int) -> None:
        self.count += count
        self.bar.update(count)
        now = time.monotonic()
        if not self.terminal and not self.quiet and now - self.printed_s >= PLAIN_S:
            self.printed_s = now
            rate = self.count / (now - self.began)
            left = max(self.total - self.count, 0) / rate if rate else 0.0
            predicted = f" (predicted {self.total / self.predicted_s:.1f})" if self.predicted_s else ""
            answers = f", {self._counts()}" if self.done else ""
            print(
                f"{self.title}: {self.count:,} of {self.total:,}, {rate:.1f}/s{predicted}, {left:.0f} s left{answers}",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def finished(self, unused: int) -> None:
        """Count a complete answer; it is ``unused`` tokens shorter than its limit."""
        self.done += 1
        self.total -= unused
        self.bar.total = self.total
        predicted = f", predicted {self.total / self.predicted_s:.0f} tok/s" if self.predicted_s else ""
        self.bar.set_postfix_str(f"{self._counts()}{predicted}", refresh=False)

    def _counts(self) -> str:
        return f"{self.done:,} done" + (f", {self.failed:,} refused" if self.failed else "")

    def note(self, text: str) -> None:
        """Print a message above the bar."""
        if not self.quiet:
            tqdm.write(f"flexhybrid: {text}", file=sys.stderr)


@dataclass
class StopAsked:
    """Whether the user wants the job to end."""

    asked: bool = False


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopAsked]:
    """Turn the first SIGINT (Ctrl-C) or SIGTERM into ``asked``; the second one raises KeyboardInterrupt."""
    stop = StopAsked()

    def handle(_signal_number, _frame) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        print("\nflexhybrid: stopping after this iteration; once more stops at once", file=sys.stderr, flush=True)

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield stop
        return
    earlier = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
