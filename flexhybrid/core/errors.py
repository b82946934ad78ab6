"""The one error that users see: what was wrong, with which value, and what to do."""

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from typing import TypeGuard

#: Longest value shown whole, in characters, so that an error stays one readable line.
SHOWN = 80
AS_NEAR = 0.08  #: difference of likeness within which a name may be meant as well as the nearest


FULL = (errno.ENOSPC, errno.EDQUOT)  #: errors of a disk where room may be made
FAILING = (errno.EIO, errno.EROFS, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.ETIMEDOUT)  #: of one that fails


class InputError(ValueError):
    """A request, file or setting that cannot be served. The command line prints it and exits with ``exit_status``."""

    exit_status = 2


class DiskError(InputError):
    """A disk is full or fails, or its file was shortened or closed: nothing that the user gave is wrong."""

    exit_status = 1


def file_error(doing: str, error: OSError | UnicodeError, advice: str = "") -> InputError:
    """The error (to be raised): "cannot write FILE: REASON", with advice."""
    number = getattr(error, "errno", None)
    text = f"cannot {doing}: {getattr(error, 'strerror', None) or error}{advice}"
    if number in FULL or number in FAILING:
        return DiskError(f"{text}; {'make room' if number in FULL else 'check the disk'}")
    return InputError(text)


def stray_error(error: OSError) -> InputError:
    """The error (to be raised) of an OSError that no ``file_errors`` has met. Raise one that is not of a file."""
    if error.filename is None and error.errno not in (*FULL, *FAILING):
        raise error
    return file_error(f"use {error.filename or 'a temporary file'}", error)


class NotBuiltIn(InputError):
    """A configuration that the project's own layer functions do not cover; transformers' layers may run it."""


@contextmanager
def file_errors(doing: str, advice: str = "") -> Iterator[None]:
    """Raise an OSError or UnicodeError of the block as InputError: "cannot write FILE: REASON", with advice."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise file_error(doing, error, advice) from None


def unknown(what: str, name: object, known: Iterable[str], *, other: str = "") -> InputError:
    """Return the error for a name not in ``known``: the nearest ones first, then all in order.

    ``what``: the kind of thing in words ("model"); ``name``: the given value, of any type; ``other``: what is also
    accepted ("the path of a hardware file").
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


#: Fields whose flags have the names that other tools give them.
FLAGS = {
    "prompt_len": "--input-len", "gen_len": "--output-len", "answer_tokens": "--mean-output-len",
    "max_batch": "--max-num-seqs", "actors": "--num-replicas", "fresh": "--overwrite", "restart": "--overwrite",
}  # fmt: skip
#: Their former names, which are still understood.
FORMER_FLAGS = {f"--{name.replace('_', '-')}": named for name, named in FLAGS.items()}


def flag(name: str) -> str:
    """Return the command line's option of a field: ``max_ttft`` is ``--max-ttft``."""
    return FLAGS.get(name) or f"--{name.replace('_', '-')}"


def shown(value: object) -> str:
    """Return the value as code, cut to SHOWN characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of more than 4,300 digits, lists within lists
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value given by a user is a number that a float can hold; True and False are none."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and float(value) is not None
    except OverflowError:
        return False


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value given by a user is an integer; True and False are none."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _one_line(name: str) -> str:
    """Return a name as it is, unless it would break the line: names of columns may hold anything."""
    return name if name.isprintable() else repr(name)


def _nearest(name: str, known: list[str]) -> list[str]:
    """Return up to three of ``known`` nearest to a name, ignoring capitals and a folder before the name."""
    by_lower = {known_name.lower(): known_name for known_name in known}
    last = name.rstrip("/").split("/")[-1][:SHOWN].lower()
    near = difflib.get_close_matches(last, by_lower, n=3)
    likeness = [difflib.SequenceMatcher(None, lower, last).ratio() for lower in near]
    return [by_lower[lower] for lower, ratio in zip(near, likeness, strict=True) if ratio > likeness[0] - AS_NEAR]
