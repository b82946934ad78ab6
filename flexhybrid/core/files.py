"""Files that several processes may want at once."""

from __future__ import annotations

from flexhybrid.core.errors import InputError


def lock_file(descriptor: int, busy: str) -> None:
    """Make this process the only writer of an open file; the lock goes with the process, whatever ends it.

    Raises InputError with the text ``busy`` where another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InputError(busy) from None
