"""Paths that a command line names, tried before torch and transformers are loaded: a typo is told at once, in the words
of whoever would read the path later."""

from __future__ import annotations

import stat
from pathlib import Path

from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import shape_of_checkpoint


def check_checkpoint(path: Path | None) -> None:
    """Raise InputError for a folder that is none, or holds no configuration of a known model. None: not named."""
    if path is not None:
        shape_of_checkpoint(path)


def check_file(path: Path | None, what: str = "") -> None:
    """Raise InputError for a file that cannot be opened; ``what`` ("text file ") stands before its name. None: not
    named. A pipe is left alone: it can be read only once."""
    if path is None:
        return
    try:
        if not stat.S_ISFIFO(path.stat().st_mode):
            path.open("rb").close()
    except OSError as error:
        raise InputError(f"cannot read {what}{path}: {error.strerror or error}") from None
