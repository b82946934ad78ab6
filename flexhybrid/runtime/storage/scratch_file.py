"""A preallocated file that leaves nothing behind: unnamed where the system has that, else removed as early as can be.

A file with a name is unlinked as soon as it is open. Where a filesystem refuses that it is removed when it is closed or
the interpreter exits, and after a crash by the next process that makes a scratch file in the same folder. Its name says
which process it belongs to (machine, pid, start time: pids are used again), and the owner holds a lock on it: only a
file of a process of this machine that is gone, and whose lock is free, is ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from pathlib import Path

from flexhybrid.core.errors import InputError

#: Filesystems that are memory: past the page cache there is no disk.
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "devtmpfs")

ZEROS = 1 << 22  #: bytes written at once where the system cannot preallocate


class ScratchFile:
    """An open file of exactly ``num_bytes`` that are really there.

    ``fd`` goes through the page cache, ``direct_fd`` past it (None where that is not possible); ``path`` is the name as
    long as there is one. Raises InputError when the folder cannot be used or has no room.
    """

    def __init__(self, directory: Path, num_bytes: int):
        self.directory = directory
        self.num_bytes = num_bytes
        self.path: Path | None = None
        self.fd = self.direct_fd = None
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            remove_leftovers(directory)
            self._open()
        except FileNotFoundError:  # a slip of the pen, or a disk that is not mounted
            self.close()
            raise InputError(f"there is no folder {directory.parent} to keep scratch space in {directory}") from None
        except OSError as error:
            self.close()
            raise InputError(
                f"cannot make a scratch file in {directory}: {error.strerror or error}; name another folder"
            ) from None
        try:
            self._allocate()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close, and remove the name if there still is one; more than once is fine."""
        path, self.path = self.path, None
        if path is not None:
            with contextlib.suppress(OSError):  # somebody else was faster
                os.unlink(path)
        for name in ("direct_fd", "fd"):
            descriptor = getattr(self, name)
            setattr(self, name, None)
            if descriptor is not None:
                os.close(descriptor)

    def __str__(self) -> str:
        return f"the scratch file {self.path}" if self.path else f"the scratch file in {self.directory}"

    def _open(self) -> None:
        try:
            self.fd = open_unnamed(self.directory)
            source = f"/proc/self/fd/{self.fd}"
        except OSError:  # not on this filesystem; a folder that takes no file at all is told by the next line
            source = self.path = self.directory / scratch_name()
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            with contextlib.suppress(OSError):  # without locks the pid alone guards it
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.direct_fd = self._open_direct(source)
        if self.direct_fd is not None and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)  # only ragged ends come this way: read nothing ahead
        if self.path:
            with contextlib.suppress(OSError):  # some network and shared-folder filesystems keep open files' names
                unlink_open(self.path)
                self.path = None

    def _open_direct(self, source: str | Path) -> int | None:
        if not hasattr(os, "O_DIRECT") or filesystem_of(self.directory) in MEMORY_FILESYSTEMS:
            return None
        with contextlib.suppress(OSError):
            return os.open(source, os.O_RDWR | os.O_DIRECT)
        return None

    def _allocate(self) -> None:
        free = free_bytes(self.directory)
        try:
            if free is not None and self.num_bytes > free:  # told before: a filesystem may fill up before it gives up
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            preallocate(self.fd, self.num_bytes)
        except OSError as error:
            if error.errno == errno.EFBIG:
                why = "larger than a file may be here (see ulimit -f)"
            elif error.errno in (errno.ENOSPC, errno.EDQUOT):
                left = "" if free is None else f"; {free:,} bytes are free there"
                why = f"{error.strerror}{left}"
            else:
                why = error.strerror or str(error)
            raise InputError(
                f"no room for {self.num_bytes:,} bytes of scratch space in {self.directory}: {why}. Free some, put "
                "less on the disk, or name a folder on another one"
            ) from None


def open_unnamed(directory: Path) -> int:
    """A file without a name in this folder. Raises OSError where the system or the filesystem has none."""
    if not hasattr(os, "O_TMPFILE"):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)


def unlink_open(path: Path) -> None:
    """Take the name off an open file. Raises OSError where the filesystem keeps it."""
    os.unlink(path)


def preallocate(fd: int, num_bytes: int) -> None:
    """Make a new file this long, its blocks really reserved. Raises OSError when they are not to be had."""
    if num_bytes == 0:
        return
    if hasattr(os, "posix_fallocate"):
        try:
            return os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    zeros = bytes(min(ZEROS, num_bytes))
    position = 0
    while position < num_bytes:
        position += os.pwrite(fd, zeros[: num_bytes - position], position)


def scratch_name() -> str:
    """A file name that tells whose it is: machine, pid, the process's start time, and something random."""
    pid = os.getpid()
    return f"flexhybrid-{_machine()}-{pid}-{start_time(pid) or 0}-{secrets.token_hex(4)}.scratch"


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove the scratch files that processes of this machine left here when they were killed; returns them."""
    removed = []
    for path in directory.glob(f"flexhybrid-{_machine()}-*.scratch"):
        owner = re.fullmatch(r"(\d+)-(\d+)-[0-9a-f]+\.scratch", path.name.removeprefix(f"flexhybrid-{_machine()}-"))
        if owner is None or is_running(int(owner[1]), int(owner[2])):
            continue
        with contextlib.suppress(OSError):  # another user's, or gone by now
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held: alive, in a container whose pids we do not see
                os.unlink(path)
                removed.append(path)
            finally:
                os.close(fd)
    return removed


def is_running(pid: int, started: int) -> bool:
    """Whether the process that had this pid and start time is alive; in doubt, yes."""
    now = start_time(pid)
    if now is not None and started:
        return now == started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # alive, and another user's
    return True


def start_time(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did; None where that is not told, or it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])  # field 22; the name in field 2 may hold anything
    except (OSError, ValueError, IndexError):
        return None


def free_bytes(directory: Path) -> int | None:
    """Bytes that a user may still take of the folder's filesystem; None where it does not tell."""
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


def filesystem_of(directory: Path) -> str:
    """The kind of filesystem a folder lies on, like "ext4"; "" where the system does not tell."""
    folder = os.path.realpath(directory)
    found, longest = "", -1
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            fields = line.split()
            point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields[4])
            inside = folder == point or folder.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= longest:  # of several mounts on one point the last is seen
                found, longest = fields[fields.index("-") + 1], len(point)
    return found


def _machine() -> str:
    """This machine's name, as far as a file name takes it."""
    return re.sub(r"[^A-Za-z0-9.]", "_", os.uname().nodename)
