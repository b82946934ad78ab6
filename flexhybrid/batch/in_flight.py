"""How far the requests in flight are: a small file beside the output, by which the run after a kill says what was lost.

It is written now and then and never waited for: the output alone decides what is done.
"""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from flexhybrid.core.files import write_by_rename

NOTE_S = 1.0  #: seconds between notes

#: Line of the input, from 1 -> tokens that its answers have so far.
Tokens = dict[int, int]


class InFlight:
    """The file of one output."""

    def __init__(self, output: Path):
        self.path, self._noted_at = output.with_name(output.name + ".in-flight.json"), 0.0

    def note(self, tokens: Callable[[], Tokens]) -> None:
        """Write what ``tokens`` returns, unless it was done less than NOTE_S ago, or the disk has no room."""
        if time.monotonic() - self._noted_at < NOTE_S:
            return
        with contextlib.suppress(OSError):
            write_by_rename(self.path, json.dumps(tokens()))
        self._noted_at = time.monotonic()

    def earlier(self) -> Tokens:
        """Return what a run that was killed has noted last; nothing after one that ended by itself."""
        try:
            return {int(line): int(tokens) for line, tokens in json.loads(self.path.read_bytes()).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def remove(self) -> None:
        """End the notes."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
