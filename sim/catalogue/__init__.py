"""The hardware catalogue: machines known from their datasheets, one JSON file each beside this module.

Each line is a datasheet peak times an efficiency that the file states, with a source for every number in its notes.
These are estimates for machines not at hand; where a machine is, profile it.
"""

from __future__ import annotations

from pathlib import Path

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, load_hardware

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The machines of the catalogue."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name_or_path: str | Path) -> Hardware:
    """A catalogue entry by name (any case), or a hardware file by path; InputError lists the known names."""
    text = str(name_or_path)
    if text.lower() in names():
        return load_hardware(FOLDER / f"{text.lower()}.json")
    if isinstance(name_or_path, Path) or text.endswith(".json") or "/" in text:
        return load_hardware(name_or_path)
    raise InputError(f"unknown hardware {text!r}; known: {', '.join(names())}, or the path of a hardware file")
