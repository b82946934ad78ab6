"""Preallocated scratch space on a disk for weights and caches, with large parallel requests.

The file is never mapped: if another program shortens a mapped file, the process is killed; after a short pread, it can
report an error. If the system allows it, the file has no name (O_TMPFILE) and disappears with the process.

Reads and writes bypass the page cache (O_DIRECT) if the filesystem supports this and offset, length and address are
multiples of ``ALIGN``. Unaligned ends, and pieces whose address and offset differ modulo ALIGN, use the page cache.
Only full pages bypass the cache, so no page is written both ways, and Linux writes a dirty page before it reads it
directly.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import torch

from flexhybrid.core.errors import DiskError, InputError, is_number
from flexhybrid.core.files import cache_folder
from flexhybrid.runtime.links import Pacer
from flexhybrid.runtime.storage.host_memory import HostMemory
from flexhybrid.runtime.storage.scratch_file import MEMORY_FILESYSTEMS, ScratchFile, filesystem_of

#: O_DIRECT requires multiples of this for offsets, lengths and addresses. At least a page (see above).
ALIGN = max(4096, mmap.PAGESIZE)

#: Maximum bytes of one request. Smaller calls are not divided among workers: 6 MiB take as long in one request as in
#: four (3.5 ms on two idle cores; while both compute, 4.0 and 4.4 ms), and wake fewer threads.
REQUEST_BYTES = 8 << 20

#: Maximum number of buffers in one preadv or pwritev.
MOST_BUFFERS = 1024

#: A paced call sleeps for at most this long at a time, so that closing the space ends it soon.
PACE_STEP_S = 0.1

SLOWEST_PACE = 0.01  #: GB/s, the lowest allowed pace

NUM_WORKERS = 4  #: number of threads for the requests of one call, including the calling thread

Piece = tuple[int, torch.Tensor]  #: (offset in bytes, contiguous CPU memory)


_Part = tuple[int, bool, memoryview]  #: (offset, direct, bytes)


@dataclass(slots=True)
class _Request:
    """One system call, for buffers that are consecutive in the file from ``offset`` on."""

    offset: int
    direct: bool
    buffers: list[memoryview]
    num_bytes: int


class DiskSpace:
    """``num_bytes`` of scratch space in a folder of the user's choice.

    directory: created with mode 0700 if missing (default: "scratch" in the user's cache folder). gb_per_s: pace of
    reads and of writes, each direction separately (default: the disk's own speed).

    Any number of threads may read and write at once. The caller must not overlap a write with another call for the same
    bytes. An error ends only its own call. ``enabled`` = False skips reads and pace, to measure computing time alone.

    Raise InputError if the folder cannot be used or lacks ``num_bytes``, or for an invalid pace.
    """

    def __init__(self, directory: Path | str | None, num_bytes: int, gb_per_s: float | None = None):
        if num_bytes < 0:
            raise ValueError(f"num_bytes must be >= 0, not {num_bytes}")
        self.set_rate(gb_per_s)
        folder = cache_folder() / "scratch" if directory is None else Path(directory).expanduser()
        if directory is None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.num_bytes = num_bytes
        self.enabled = True
        # Whole pages, so that direct requests at the end stay inside the file.
        self._file = ScratchFile(folder, num_bytes + -num_bytes % ALIGN)
        self._workers = ThreadPoolExecutor(NUM_WORKERS - 1, thread_name_prefix="flexhybrid-disk")
        self._closing = False
        self._callers: set[threading.Thread] = set()
        self._changed = threading.Condition()
        # Runs at close, at garbage collection, and at the interpreter's exit. It never blocks.
        self._release = weakref.finalize(self, _release, self._file, self._workers)
        self.direct = self._direct_reads_work()

    def set_rate(self, gb_per_s: float | None) -> None:
        """Set the pace of both directions; None removes it."""
        self.gb_per_s = checked_rate("disk_gb_per_s", gb_per_s)
        rate = None if gb_per_s is None else gb_per_s * 1e9
        self._pacers = {"read": (Pacer(rate), threading.Lock()), "write": (Pacer(rate), threading.Lock())}

    def read(self, pieces: Sequence[Piece]) -> None:
        """Read the bytes at every piece's offset into its memory. Raise DiskError if a read fails."""
        if self.enabled:
            self._transfer("read", pieces)

    def write(self, pieces: Sequence[Piece]) -> None:
        """Write every piece's memory at its offset; pieces may not overlap. Raise DiskError if a write fails."""
        self._transfer("write", pieces)

    def flush(self) -> None:
        """Write the file's dirty pages in the page cache to the disk. Raise DiskError if that fails."""
        try:
            os.fsync(self._file.fd)
        except OSError as error:
            raise DiskError(f"cannot write back {self._file}: {error.strerror or error}") from None

    def drop_page_cache(self) -> None:
        """Drop the file from the page cache, if the system can do this, so that measurements read the disk itself."""
        self.flush()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def describe(self) -> str:
        """Return a line for users: size, folder, filesystem, and whether reads bypass the page cache."""
        kind = filesystem_of(self._file.directory)
        if self.direct:
            how = "reads bypass the page cache"
        elif kind in MEMORY_FILESYSTEMS:
            how = "which is memory, not a disk"
        else:
            how = "reads may come from the page cache, as fast as memory"
        pace = f", paced at {self.gb_per_s:g} GB/s" if self.gb_per_s else ""
        where = f"{self._file.directory} ({kind or 'unknown filesystem'})"
        return f"{self.num_bytes / 2**30:.2f} GiB in {where}, {how}{pace}"

    def abort(self) -> None:
        """Make running and later calls raise DiskError soon. Does not block; ``close`` must follow."""
        self._closing = True

    def close(self) -> None:
        """Release the space and end its threads. Running calls raise DiskError soon. May be called again."""
        with self._changed:
            self._closing = True
            # After Ctrl-C, this thread may still be among the callers.
            while any(caller.is_alive() for caller in self._callers - {threading.current_thread()}):
                self._changed.wait(timeout=0.1)
        self._workers.shutdown(wait=True)
        self._release()

    def __enter__(self) -> DiskSpace:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _direct_reads_work(self) -> bool:
        """Try a direct read. Some filesystems open files with O_DIRECT, but refuse to read or need larger blocks."""
        if self._file.direct_fd is None:
            return False
        page = HostMemory(pinned=False).bytes(ALIGN).numpy().data
        try:
            return self._file.num_bytes == 0 or os.preadv(self._file.direct_fd, [page], 0) == ALIGN
        except OSError:
            return False

    def _transfer(self, direction: str, pieces: Sequence[Piece]) -> None:
        pacer, turn = self._pacers[direction]
        began = pacer.begin()
        try:
            with self._changed:
                if self._closing:
                    raise DiskError(f"cannot {direction}: {self._file} is closed")
                self._callers.add(threading.current_thread())
            requests = self._requests(pieces, writing=direction == "write")
            if direction == "write":
                self._check_length()
            self._spread(direction, requests)
            if self.enabled and pacer.bytes_per_s is not None:
                total = sum(request.num_bytes for request in requests)
                step = max(1, round(pacer.bytes_per_s * PACE_STEP_S))
                for done in range(0, total, step):  # sleep for the pace, from the call's beginning
                    if self._closing:
                        raise DiskError(f"{self._file} was closed during a {direction}")
                    with turn:
                        pacer.end(began, min(step, total - done))
        finally:
            with self._changed:
                self._callers.discard(threading.current_thread())
                self._changed.notify_all()

    def _requests(self, pieces: Sequence[Piece], writing: bool) -> list[_Request]:
        """Divide pieces into requests: direct ones for aligned bytes; neighbours in the file are joined."""
        parts: list[_Part] = []
        for offset, memory in pieces:
            if memory.device.type != "cpu" or not memory.is_contiguous():
                raise ValueError(f"a disk transfers contiguous CPU tensors, not {memory.device} {memory.stride()}")
            array, address = memory.detach().view(-1).view(torch.uint8).numpy(), memory.data_ptr()
            size = array.size
            if offset < 0 or offset + size > self.num_bytes:
                raise ValueError(f"bytes {offset} to {offset + size} are outside the {self.num_bytes} of {self._file}")
            first = last = 0  # [first, last) is aligned; the rest are unaligned ends
            if self.direct and (address - offset) % ALIGN == 0:
                first = min(-offset % ALIGN, size)
                last = first + (size - first) // ALIGN * ALIGN
            if first:
                parts.append((offset, False, array[:first].data))
            if last > first:
                parts.append((offset + first, True, array[first:last].data))
            if size > last:
                parts.append((offset + last, False, array[last:].data))
        parts.sort(key=itemgetter(0))
        if writing:
            for (offset, _, memory), (following, _, _) in zip(parts, parts[1:], strict=False):
                if offset + len(memory) > following:
                    raise ValueError(f"two pieces of one write overlap at byte {following} of {self._file}")
        return _joined(parts)

    def _check_length(self) -> None:
        """Raise DiskError if the file was shortened. A write past its end would fill the lost data with zeros."""
        length = os.fstat(self._file.fd).st_size
        if length < self._file.num_bytes:
            raise DiskError(f"{self._file} was shortened: {length:,} of {self._file.num_bytes:,} bytes are left")

    def _spread(self, direction: str, requests: list[_Request]) -> None:
        """Perform all requests on this thread and the workers. Raise the first error."""
        waiting = deque(requests)
        errors: list[Exception] = []

        def take() -> None:
            while not errors and not self._closing:
                try:
                    request = waiting.popleft()
                except IndexError:
                    return
                try:
                    _move(self._file, direction, request)
                except Exception as error:
                    errors.append(error)  # raised below, on the calling thread

        helpers = [self._workers.submit(take) for _ in range(min(len(requests), NUM_WORKERS) - 1)]
        try:
            take()
            closed = len(waiting) > 0
        finally:
            waiting.clear()
            for helper in helpers:
                if not helper.cancel():
                    helper.result()  # no buffer may be accessed after this call has returned
        if errors:
            try:
                raise errors[0]
            finally:
                errors.clear()  # the traceback holds this frame: a reference cycle, which would keep the buffers alive
        if closed:
            raise DiskError(f"{self._file} was closed during a {direction}")


def _release(file: ScratchFile, workers: ThreadPoolExecutor) -> None:
    workers.shutdown(wait=False)
    file.close()


def _move(file: ScratchFile, direction: str, request: _Request) -> None:
    """Perform a request. Raise DiskError if it fails."""
    call = os.preadv if direction == "read" else os.pwritev
    done = 0
    try:
        if request.direct and file.direct_fd is not None:
            done = call(file.direct_fd, request.buffers, request.offset)
        while done < request.num_bytes:  # the rest of a short direct request is not aligned
            moved = call(file.fd, _after(request.buffers, done), request.offset + done)
            if moved == 0:
                break
            done += moved
    except OSError as error:
        advice = "; free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise DiskError(
            f"cannot {direction} {request.num_bytes:,} bytes at offset {request.offset:,} of {file}: "
            f"{error.strerror or error}{advice}"
        ) from None
    if done < request.num_bytes:
        raise DiskError(
            f"short {direction} of {file}: {done:,} of {request.num_bytes:,} bytes at offset "
            f"{request.offset:,}; the file was shortened while it was in use"
        )


def _joined(parts: list[_Part]) -> list[_Request]:
    """Join parts, sorted by offset, to requests."""
    requests: list[_Request] = []
    last = _Request(-1, False, [], 0)  # no part can follow it
    for offset, direct, memory in parts:
        position, size = 0, len(memory)
        while position < size:
            follows = offset + position == last.offset + last.num_bytes and direct == last.direct
            if not follows or last.num_bytes == REQUEST_BYTES or len(last.buffers) == MOST_BUFFERS:
                last = _Request(offset + position, direct, [], 0)
                requests.append(last)
            taken = min(size - position, REQUEST_BYTES - last.num_bytes)
            last.buffers.append(memory[position : position + taken])
            last.num_bytes += taken
            position += taken
    return requests


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """Return the buffers without their first ``done`` bytes."""
    remaining = []
    for buffer in buffers:
        if done < len(buffer):
            remaining.append(buffer[done:])
        done = max(0, done - len(buffer))
    return remaining


def checked_rate(name: str, gb_per_s: float | None) -> float | None:
    """Return a pace. Raise InputError, with ``name``, unless it is None or at least SLOWEST_PACE."""
    if gb_per_s is not None and not (is_number(gb_per_s) and SLOWEST_PACE <= gb_per_s < float("inf")):
        raise InputError(f"{name} is {gb_per_s!r}; it must be a number of at least {SLOWEST_PACE} GB/s")
    return gb_per_s
