"""A preallocated file without a name (or whose name is deleted at once), which disappears with the process."""

import contextlib
import errno
import os
import re
import secrets
from pathlib import Path

from flexhybrid.core.errors import InputError

#: Filesystems in memory, without a disk.
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "devtmpfs")

CLOSED = -1  #: replaces the descriptor of a closed file

ZEROS = 1 << 22  #: number of bytes written at once if the system cannot preallocate


class ScratchFile:
    """An open file of exactly ``num_bytes`` allocated bytes.

    ``fd`` uses the page cache. ``direct_fd`` bypasses it (None if that is impossible). Raise InputError if the folder
    cannot be used or has no room.
    """

    def __init__(self, directory: Path, num_bytes: int):
        self.directory = directory
        self.num_bytes = num_bytes
        self.fd = CLOSED
        self.direct_fd: int | None = None
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            try:
                directory.mkdir(mode=0o700, exist_ok=True)
                self._open()
            except FileNotFoundError:  # a typing error, or a disk that is not mounted
                why = "no folder can be made in" if directory.parent.is_dir() else "there is no folder"
                raise InputError(f"{why} {directory.parent} to keep scratch space in {directory}") from None
            except OSError as error:
                advice = f"{error.strerror or error}; name another folder"
                raise InputError(f"cannot make a scratch file in {directory}: {advice}") from None
            self._allocate()
            on_error.pop_all()

    def close(self) -> None:
        """Close the file. May be called again."""
        descriptors, self.direct_fd, self.fd = (self.direct_fd, self.fd), None, CLOSED
        for descriptor in descriptors:
            if descriptor is not None and descriptor != CLOSED:
                os.close(descriptor)

    def __str__(self) -> str:
        return f"the scratch file in {self.directory}"

    def _open(self) -> None:
        try:
            self.fd = open_unnamed(self.directory)
        except OSError:  # the filesystem has no unnamed files; an unusable folder raises again here
            path = self.directory / f"flexhybrid-{secrets.token_hex(8)}.scratch"
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.unlink(path)
        self.direct_fd = self._open_direct(f"/proc/self/fd/{self.fd}")
        if self.direct_fd is not None and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead: only unaligned ends are read here

    def _open_direct(self, source: str) -> int | None:
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
    """Open a file without a name in a folder. Raise OSError if the system or the filesystem cannot do this."""
    if not hasattr(os, "O_TMPFILE"):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)


def preallocate(fd: int, num_bytes: int) -> None:
    """Allocate ``num_bytes`` to a new file. Raise OSError if the filesystem has no room."""
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


def free_bytes(directory: Path) -> int | None:
    """Return the free bytes of a folder's filesystem; None if unknown."""
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


def filesystem_of(directory: Path) -> str:
    """Return the type of a folder's filesystem, like "ext4"; "" if unknown."""
    folder = os.path.realpath(directory)
    filesystem, longest = "", -1
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            fields = line.split()
            point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields[4])
            inside = folder == point or folder.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= longest:  # a later mount hides an earlier one on the same point
                filesystem, longest = fields[fields.index("-") + 1], len(point)
    return filesystem
