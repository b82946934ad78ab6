"""How far the requests in flight are: a small file beside the output, by which the run after a kill or a stop knows
which answers are long.

It is written now and then and never waited for: the output alone decides what is done.
"""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from flexhybrid.core.errors import InputError
from flexhybrid.core.files import write_by_rename

NOTE_S = 1.0  #: seconds between notes

#: Line of the input, from 1 -> tokens that its answers have so far.
Tokens = dict[int, int]


class InFlight:
    """The file of one output."""

    def __init__(self, output: Path):
        self.path, self._noted_at = output.with_name(output.name + ".in-flight.json"), 0.0

    def note(self, tokens: Callable[[], Tokens]) -> bool:
        """Write what ``tokens`` returns, unless the disk has no room; return False where it was done less than NOTE_S
        ago."""
        if time.monotonic() - self._noted_at < NOTE_S:
            return False
        with contextlib.suppress(InputError):
            write_by_rename(self.path, json.dumps(tokens()))
        self._noted_at = time.monotonic()
        return True

    def earlier(self) -> Tokens:
        """Return what an earlier run has noted last; nothing after one that came to its end."""
        try:
            return {int(line): int(count) for line, count in json.loads(self.path.read_bytes()).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def remove(self) -> None:
        """End the notes."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
