"""Convert sizes in bytes to text and back, and numbers of things to text."""

import math

from flexhybrid.core.errors import InputError


def gib(num_bytes: float) -> str:
    """Return a size as text in GiB, MiB or KiB; below 512 bytes in bytes."""
    if 0 < num_bytes < 2**9:
        return f"{num_bytes:.0f} bytes"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size / 2:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


def counted(number: int, thing: str) -> str:
    """Return "1 token", "1,024 tokens"."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def parse_bytes(text: str | float | None) -> int | None:
    """Return the bytes of a size such as "8GiB", "512MiB", "12GB" or a number; None for None. Raise InputError for
    another text, for less than 1 byte, and for a text without a unit of less than 1 KiB, whose unit was forgotten."""
    if text is None or (isinstance(text, int) and not isinstance(text, bool) and text > 0):
        return text
    units = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    units |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    stripped = str(text).strip().lower()
    digits = stripped.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = stripped[len(digits) :]
    try:
        value = float(digits) * units[unit]
    except (ValueError, KeyError):
        raise InputError(f"memory size {text!r} is not understood: write 8GiB, 512MiB or a number of bytes") from None
    if not math.isfinite(value) or value < 1:
        raise InputError(f"memory size {text!r} must be a positive number of bytes, such as '20GiB', not a share")
    if isinstance(text, str) and not unit and value < 2**10:
        raise InputError(f"memory size {text!r} is {value:g} bytes: add a unit, like {text}GiB or {text}MiB")
    return int(value)
