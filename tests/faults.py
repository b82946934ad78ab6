"""Faults at the file operations of a run: ``make soak`` tries all of them, the suite some.

Every operation on a file below a folder has a number: opening, reading, writing, waiting for the disk, renaming,
removing, looking. At one of them the process is killed, or the operation fails, or a write takes a part of its bytes.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
from pathlib import Path

#: Functions of ``os`` that take a path or a descriptor first.
OPERATIONS = (
    *("open", "write", "pread", "fsync", "ftruncate", "fstat", "stat", "lstat", "unlink", "replace", "rename"),
    *("mkdir", "scandir", "listdir", "truncate"),
)
#: Fault -> its error; None: none. "full": writing fails from there on; "short": half of the bytes are written.
FAULTS = {"kill": None, "error": errno.EIO, "no space": errno.ENOSPC, "full": errno.ENOSPC, "short": None}
TAKE_SPACE = ("write", "open to write", "fsync", "ftruncate", "replace", "rename", "mkdir", "truncate")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def points(seen: list[tuple[str, str]]) -> list[tuple[str, int]]:
    """Return (fault, number) of all faults that the operations of a run can have."""
    numbered = enumerate(seen, 1)
    return [
        (fault, number)
        for number, (name, _) in numbered
        for fault in FAULTS
        if name in TAKE_SPACE or fault in ("kill", "error")
    ]


def is_one_line(status: int, said: str, happened: list[tuple[str, str]]) -> bool:
    """Return whether a run whose disk failed has gone on, or ended with a line that says which file and what to do."""
    if status == 0:
        return "Traceback" not in said
    named = any(path.removesuffix(".partial") in said for _, path in happened) or "a temporary file" in said
    return status == 1 and named and said.count("\n") == 1 and ("make room" in said or "check the disk" in said)


class Faults:
    """A context in which the operations below ``folder`` are counted, and the ``number``-th one has a fault."""

    def __init__(self, folder: Path, fault: str | None = None, number: int = 0):
        self.folder, self.fault, self.number = os.path.realpath(folder), fault, number
        self.seen: list[tuple[str, str]] = []  #: (operation, file) of each
        self.happened: list[tuple[str, str]] = []  #: those that had a fault
        self._paths: dict[int, str] = {}  # of descriptors
        self._real = {name: getattr(os, name) for name in OPERATIONS} | {"io": io.open}

    def __enter__(self) -> Faults:
        for name in OPERATIONS:
            setattr(os, name, self._trapped(name))
        io.open = builtins.open = self._opened
        return self

    def __exit__(self, *_error) -> None:
        for name in OPERATIONS:
            setattr(os, name, self._real[name])
        io.open = builtins.open = self._real["io"]

    def _path(self, first) -> str | None:
        """Return the file that an operation is on; None for one that is not watched."""
        if isinstance(first, int):
            return self._paths.get(first)
        path = os.path.abspath(os.fsdecode(first))
        return path if path.startswith(self.folder) else None

    def reached(self, operation: str, path: str, size: int = 0) -> int:
        """Count an operation, and let the fault happen where it is due; return how many of ``size`` bytes to write."""
        self.seen.append((operation, path))
        due = len(self.seen) == self.number or self.fault == "full" and len(self.seen) > self.number > 0
        if not due or self.fault in ("no space", "full") and operation not in TAKE_SPACE:
            return size
        if self.fault == "short":
            return max(1, size // 2)
        self.happened.append((operation, path))
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        number = FAULTS[self.fault]
        raise OSError(number, os.strerror(number), *([] if size or operation in ("fsync", "read") else [path]))

    def _trapped(self, name: str):
        real = self._real[name]

        def call(first=".", *others, **more):
            if (path := self._path(first)) is None:
                return real(first, *others, **more)
            if name == "write":
                return real(first, bytes(others[0])[: self.reached(name, path, len(others[0]))])
            opens = name == "open" and others and others[0] & WRITES
            self.reached("open to write" if opens else name, path)
            result = real(first, *others, **more)
            if name == "open":
                self._paths[result] = path
            return result

        return call

    def _opened(self, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **how):
        """Stand in for ``open``."""
        if (path := self._path(file)) is None:
            return self._real["io"](file, mode, buffering, encoding, errors, newline, **how)
        if not how.get("opener"):  # else it opens by ``os.open``
            self.reached("open" if mode.strip("bt") == "r" else "open to write", path)
        raw = _Raw(file, mode.replace("b", "").replace("t", ""), **how)
        raw.faults, raw.path = self, path
        self._paths[raw.fileno()] = path
        kind = io.BufferedRandom if "+" in mode else io.BufferedReader if mode[0] == "r" else io.BufferedWriter
        buffered = kind(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)


class _Raw(io.FileIO):
    """An open file whose reads and writes are counted."""

    faults: Faults
    path: str

    def readinto(self, buffer):
        self.faults.reached("read", self.path)
        return super().readinto(buffer)

    def readall(self):
        self.faults.reached("read", self.path)
        return super().readall()

    def write(self, data):
        return super().write(bytes(data)[: self.faults.reached("write", self.path, len(data))])
