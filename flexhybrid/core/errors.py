"""Errors that users see: what is wrong, with which value, and what to do."""

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from typing import TypeGuard

#: Longest value that is shown completely, in characters, so that an error is one readable line.
SHOWN = 80
AS_NEAR = 0.08  #: names whose similarity is less than the best by up to this are suggested, too


FULL = (errno.ENOSPC, errno.EDQUOT)  #: error numbers of a full disk
FAILING = (errno.EIO, errno.EROFS, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.ETIMEDOUT)  #: of a failing disk


class InputError(ValueError):
    """A wrong request, file or setting. The command line prints the error and exits with ``exit_status``."""

    exit_status = 2


class DiskError(InputError):
    """A disk is full or fails, or a file was truncated or closed meanwhile. The user's input is not wrong."""

    exit_status = 1


def file_error(doing: str, error: OSError | UnicodeError, advice: str = "") -> InputError:
    """Return the error "cannot ``doing``: REASON", with advice; a DiskError if the disk is full or fails."""
    number = getattr(error, "errno", None)
    text = f"cannot {doing}: {getattr(error, 'strerror', None) or error}{advice}"
    if number in FULL or number in FAILING:
        return DiskError(f"{text}; {'make room' if number in FULL else 'check the disk'}")
    return InputError(text)


def stray_error(error: OSError) -> InputError:
    """Return the error for an OSError outside ``file_errors``. Raise the OSError if it is not about a file or disk."""
    if error.filename is None and error.errno not in (*FULL, *FAILING):
        raise error
    return file_error(f"use {error.filename or 'a temporary file'}", error)


class NotBuiltIn(InputError):
    """A configuration that our own layer functions do not support; transformers' layers may run it."""


@contextmanager
def file_errors(doing: str, advice: str = "") -> Iterator[None]:
    """Raise the ``file_error`` for an OSError or UnicodeError in the block."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise file_error(doing, error, advice) from None


def unknown(what: str, name: object, known: Iterable[str], *, other: str = "") -> InputError:
    """Return the error for a name that is not in ``known``; the message has the nearest names, then all.

    ``what``: the kind of name ("model"); ``name``: the given value, of any type; ``other``: what else is accepted ("the
    path of a hardware file").
    """
    known = list(known)
    near = _nearest(name, known) if isinstance(name, str) else []
    guess = f"; did you mean {' or '.join(map(_one_line, near))}?" if near else ";"
    names = ", ".join(map(_one_line, known)) or "none"
    return InputError(f"unknown {what} {shown(name)}{guess} known: {names}{f', or {other}' if other else ''}")


def check(name: str, value: object, accepted: bool, wanted: str) -> None:
    """Raise InputError, "NAME is VALUE; it must be WANTED", unless the value is ``accepted``."""
    if not accepted:
        raise InputError(f"{name} is {shown(value)}; it must be {wanted}")


#: Field -> flag of the command line, if the flag has the name that other tools use.
FLAGS = {
    "prompt_len": "--input-len", "gen_len": "--output-len", "answer_tokens": "--mean-output-len",
    "max_batch": "--max-num-seqs", "actors": "--num-replicas", "fresh": "--overwrite", "restart": "--overwrite",
}  # fmt: skip
#: Former flag -> flag; former flags are still accepted.
FORMER_FLAGS = {f"--{name.replace('_', '-')}": named for name, named in FLAGS.items()}


def flag(name: str) -> str:
    """Return the command line's flag of a field, such as ``--max-ttft`` for ``max_ttft``."""
    return FLAGS.get(name) or f"--{name.replace('_', '-')}"


def shown(value: object) -> str:
    """Return the value's ``repr``, cut to SHOWN characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of more than 4,300 digits, or deeply nested lists
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a user's value is a number that a float can hold, and not True or False."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and float(value) is not None
    except OverflowError:
        return False


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a user's value is an integer, and not True or False."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _one_line(name: str) -> str:
    """Return a name, as its ``repr`` if it has characters that would break the line."""
    return name if name.isprintable() else repr(name)


def _nearest(name: str, known: list[str]) -> list[str]:
    """Return up to three of ``known`` that are most similar to a name, ignoring case and a folder before the name."""
    by_lower = {known_name.lower(): known_name for known_name in known}
    last = name.rstrip("/").split("/")[-1][:SHOWN].lower()
    near = difflib.get_close_matches(last, by_lower, n=3)
    likeness = [difflib.SequenceMatcher(None, lower, last).ratio() for lower in near]
    return [by_lower[lower] for lower, ratio in zip(near, likeness, strict=True) if ratio > likeness[0] - AS_NEAR]
