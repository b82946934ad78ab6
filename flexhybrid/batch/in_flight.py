"""How far the requests in flight are: a small file beside the output, by which the run after a kill says what was lost,
and the run after a stop knows which answers are long.

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
STOPPED = "stopped"

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

    def earlier(self) -> tuple[Tokens, bool]:
        """Return what an earlier run has noted last, and whether it was killed; nothing after one that came to its
        end."""
        try:
            noted = json.loads(self.path.read_bytes())
            tokens = {int(line): int(count) for line, count in noted.get(STOPPED, noted).items()}
            return tokens, STOPPED not in noted
        except (OSError, ValueError, TypeError, AttributeError):
            return {}, False

    def stop(self) -> None:
        """Keep the last note of a run that was asked to stop."""
        if self.path.exists():
            with contextlib.suppress(InputError):
                write_by_rename(self.path, json.dumps({STOPPED: self.earlier()[0]}))

    def remove(self) -> None:
        """End the notes."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
