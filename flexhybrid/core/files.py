"""Read JSON, write and lock files, and find the folder with this machine's profiles."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from flexhybrid.core.errors import InputError, file_errors

OF_MODELS = "models"  #: folder in ``cache_folder()`` with profiles for single models


def load_json(path: str | Path, kind: str = "", **options):
    """Return the content of a JSON file. ``kind``: the file's kind for errors ("policy file "); ``options``: see
    ``parse_json``. Raise InputError if the file cannot be read."""
    with file_errors(f"read {kind}{path}"):
        check_no_pointer(Path(path))
        text = Path(path).read_text(encoding="utf-8-sig")
    return parse_json(text, f"{kind}{path}", **options)


def check_no_pointer(path: Path) -> None:
    """Raise InputError if a file is a git-lfs pointer, a short text that git has in place of a large file."""
    with path.open("rb") as file:
        if file.read(40).startswith(b"version https://git-lfs.github.com/spec/"):
            raise InputError(f"{path} is a git-lfs pointer, not the file itself: run git lfs pull in its folder")


def parse_json(text: str, name: str, **options):
    """Return the content of a JSON text. ``options``: arguments of ``json.loads``, whose functions may raise
    ValueError. Raise InputError, with line and column, if the text is not JSON."""
    try:
        return json.loads(text, **options)
    except json.JSONDecodeError as error:
        raise InputError(f"cannot read {name}: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot read {name}: {error}") from None


def named_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the dict of a JSON object. Raise ValueError for a repeated field, of which ``json`` would take the
    last."""
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is given more than once")
    return data


def lock_file(descriptor: int, busy: str) -> None:
    """Lock an open file for this process, until the process ends. Raise InputError with the text ``busy`` if another
    process has locked it."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InputError(busy) from None


def partial_file(path: Path) -> Path:
    """Return the temporary file that replaces ``path`` once it is complete. A killed process leaves it behind."""
    return path.with_name(path.name + ".partial")


@contextlib.contextmanager
def new_file(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file that replaces ``path`` when the block ends without an error.

    Readers see either the complete old or the complete new file. ``durable``: wait until it is on the disk. Raise
    InputError if the file cannot be written.
    """
    partial = partial_file(path)
    with file_errors(f"write {path}"), contextlib.ExitStack() as stack:
        path.parent.mkdir(parents=True, exist_ok=True)
        stack.callback(partial.unlink, missing_ok=True)
        with open(partial, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)
        if durable:
            folder = os.open(path.parent, os.O_RDONLY)
            stack.callback(os.close, folder)
            os.fsync(folder)


def write_by_rename(path: Path, content: str | bytes, durable: bool = False) -> None:
    """Write a file through ``new_file``. Text is written in UTF-8, with escapes for characters that UTF-8 lacks."""
    with new_file(path, durable) as file:
        file.write(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))


def check_new_file(path: Path) -> None:
    """Raise InputError if ``write_by_rename`` would fail: the path is a folder, or its folder does not exist or is not
    writable."""
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write {path}: the folder {path.parent} is not writable")


def cache_folder() -> Path:
    """Return the folder of this machine's profiles: $FLEXHYBRID_CACHE, else "flexhybrid" in the user's cache folder.
    Raise InputError if there is no home folder."""
    try:
        if folder := os.environ.get("FLEXHYBRID_CACHE"):
            return Path(folder).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexhybrid"
    except RuntimeError:
        raise InputError("no home folder is known here: set FLEXHYBRID_CACHE to a folder for profiles") from None


def check_cache_folder() -> None:
    """Raise InputError if profiles cannot be written. Called before one is measured."""
    folder, why = cache_folder(), "it is not writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return
    except OSError as error:
        why = error.strerror
    raise InputError(f"cannot keep profiles in {folder}: {why}; set FLEXHYBRID_CACHE to a folder that can be written")


def profile_file(device: str) -> Path:
    """Return the file of this machine's profile for a device, "cpu" or "cuda"."""
    return cache_folder() / f"hardware-{device}.json"


def newest_profile() -> Path | None:
    """Return this machine's latest profile for any device, made by `profile` or `compare`; else the latest that a run
    made for its model; else None."""
    kept = [*cache_folder().glob("hardware-*.json")] or cache_folder().glob(f"{OF_MODELS}/*.json")
    return max(kept, key=lambda path: path.stat().st_mtime_ns, default=None)
