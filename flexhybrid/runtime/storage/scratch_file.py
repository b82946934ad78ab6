"""A preallocated file that leaves nothing behind: without a name where the system allows it, else removed early.

A file with a name is unlinked as soon as it is open. Where a filesystem refuses that, it is removed when it is closed
or the interpreter exits, and after a crash by the next process that makes a scratch file in the same folder. Its name
holds its process (machine, pid, start time, because pids are reused), and the owner holds a lock on it. Only a file
whose process on this machine has ended, and whose lock is free, is removed.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
from pathlib import Path

from flexhybrid.core.errors import InputError

#: Filesystems in memory, without a disk behind their page cache.
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "devtmpfs")

CLOSED = -1  #: in place of a file descriptor

ZEROS = 1 << 22  #: bytes written at once where the system cannot preallocate


class ScratchFile:
    """An open file of exactly ``num_bytes`` allocated bytes.

    ``fd`` uses the page cache (CLOSED after ``close``), ``direct_fd`` bypasses it (None where that is not possible);
    ``path`` is the file's name while it has one. Raises InputError when the folder cannot be used or has no room.
    """

    def __init__(self, directory: Path, num_bytes: int):
        self.directory = directory
        self.num_bytes = num_bytes
        self.path: Path | None = None
        self.fd = CLOSED
        self.direct_fd: int | None = None
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            remove_leftovers(directory)
            self._open()
        except FileNotFoundError:  # a typo, or a disk that is not mounted
            self.close()
            why = "no folder can be made in" if directory.parent.is_dir() else "there is no folder"
            raise InputError(f"{why} {directory.parent} to keep scratch space in {directory}") from None
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
        """Close the file and remove its name, if it has one. May be called again."""
        path, self.path = self.path, None
        if path is not None:
            with contextlib.suppress(OSError):  # removed already
                os.unlink(path)
        descriptors, self.direct_fd, self.fd = (self.direct_fd, self.fd), None, CLOSED
        for descriptor in descriptors:
            if descriptor is not None and descriptor != CLOSED:
                os.close(descriptor)

    def __str__(self) -> str:
        return f"the scratch file {self.path}" if self.path else f"the scratch file in {self.directory}"

    def _open(self) -> None:
        try:
            self.fd = open_unnamed(self.directory)
            source = f"/proc/self/fd/{self.fd}"
        except OSError:  # this filesystem has no unnamed files; an unusable folder raises on the next line
            source = self.path = self.directory / scratch_name()
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            with contextlib.suppress(OSError):  # without locks the pid alone protects it
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.direct_fd = self._open_direct(source)
        if self.direct_fd is not None and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)  # used for unaligned ends only: no read-ahead
        if self.path:
            with contextlib.suppress(OSError):  # some network filesystems keep the names of open files
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
            if free is not None and self.num_bytes > free:  # posix_fallocate may fill the filesystem before it fails
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
    """Open a file without a name in this folder. Raise OSError where the system or the filesystem has none."""
    if not hasattr(os, "O_TMPFILE"):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)


def unlink_open(path: Path) -> None:
    """Remove the name of an open file. Raise OSError where the filesystem keeps it."""
    os.unlink(path)


def preallocate(fd: int, num_bytes: int) -> None:
    """Allocate ``num_bytes`` of blocks to a new file. Raise OSError when the filesystem has no room for them."""
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
    """Return a file name with its owner: machine, pid, the process's start time; and a random part."""
    pid = os.getpid()
    return f"flexhybrid-{_machine()}-{pid}-{start_time(pid) or 0}-{secrets.token_hex(4)}.scratch"


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove the scratch files that killed processes of this machine left in a folder; return their paths."""
    removed = []
    for path in directory.glob(f"flexhybrid-{_machine()}-*.scratch"):
        owner = re.fullmatch(r"(\d+)-(\d+)-[0-9a-f]+\.scratch", path.name.removeprefix(f"flexhybrid-{_machine()}-"))
        if owner is None or is_running(int(owner[1]), int(owner[2])):
            continue
        with contextlib.suppress(OSError):  # another user's, or removed already
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while a process in another container holds it
                os.unlink(path)
                removed.append(path)
            finally:
                os.close(fd)
    return removed


def is_running(pid: int, started: int) -> bool:
    """Return whether the process with this pid and start time is alive; True where that is unknown."""
    now = start_time(pid)
    if now is not None and started:
        return now == started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # alive, but another user's
    return True


def start_time(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot; None where the system does not tell, or it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])  # field 22; the name in field 2 may hold anything
    except (OSError, ValueError, IndexError):
        return None


def free_bytes(directory: Path) -> int | None:
    """Return the bytes that a user may still allocate on the folder's filesystem; None where it is unknown."""
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


def filesystem_of(directory: Path) -> str:
    """Return the type of a folder's filesystem, like "ext4"; "" where the system does not tell."""
    folder = os.path.realpath(directory)
    filesystem, longest = "", -1
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            fields = line.split()
            point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields[4])
            inside = folder == point or folder.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= longest:  # the last of several mounts on one point hides the others
                filesystem, longest = fields[fields.index("-") + 1], len(point)
    return filesystem


def _machine() -> str:
    """Return this machine's name in characters that a file name may hold."""
    return re.sub(r"[^A-Za-z0-9.]", "_", os.uname().nodename)
