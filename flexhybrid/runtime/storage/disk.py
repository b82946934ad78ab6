"""Scratch space on a disk for weights and caches: preallocated, moved by large parallel requests, gone at the end.

Never mapped: whoever shortens a mapped file kills the process, whereas a short pread is an error that can be told. The
file is unnamed where the system has that (O_TMPFILE), so that nothing is left whatever ends the process.

Reads bypass the page cache (O_DIRECT) where the filesystem can and offset, length and memory address lie on multiples
of ``ALIGN``; so do writes. The ragged ends of a piece, and pieces whose memory lies at another remainder than their
offset, go through the page cache. A page is moved past the cache only as a whole, so the two ways never meet in one
page, and Linux writes a dirty page back before it reads it directly.
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

import numpy as np
import torch

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import cache_folder
from flexhybrid.runtime.links import Pacer
from flexhybrid.runtime.storage.host_memory import HostMemory
from flexhybrid.runtime.storage.scratch_file import MEMORY_FILESYSTEMS, ScratchFile, filesystem_of

#: What O_DIRECT wants offsets, lengths and addresses to be multiples of; never less than a page, see above.
ALIGN = max(4096, mmap.PAGESIZE)

#: Bytes of one request: enough to reach a disk's rate, small enough to spread over the workers.
SMALLEST_REQUEST, LARGEST_REQUEST = 1 << 20, 8 << 20

#: Buffers that one preadv or pwritev may name.
MOST_BUFFERS = 1024

#: A paced call sleeps in steps of this many seconds, so that closing ends it soon.
PACE_STEP_S = 0.1

SLOWEST_DISK = 0.01  #: GB/s; slower, nothing would ever end

#: (offset in bytes, contiguous CPU memory: a tensor, or anything with a buffer)
Piece = tuple[int, torch.Tensor | memoryview]


class DiskError(InputError):
    """The disk did not do what was asked: full, shortened under way, failing, or closed."""


_Part = tuple[int, bool, np.ndarray]  #: (offset, direct, bytes)


@dataclass(slots=True)
class _Request:
    """One system call: buffers that follow each other in the file from ``offset`` on."""

    offset: int
    direct: bool
    buffers: list[np.ndarray]
    num_bytes: int


class DiskSpace:
    """``num_bytes`` of scratch space in a folder of the user's choice.

    directory: made with mode 0700 if it is not there; None takes "scratch" in the user's cache folder. gb_per_s paces
    reads and writes, each direction by itself; None leaves the disk its own speed. num_workers: requests of one call
    that are under way at once, the calling thread's among them.

    Any number of threads may read and write at the same time. Calls that touch the same bytes at once, one of them
    writing, are the caller's to keep apart. An error ends only the call that meets it. ``enabled`` False leaves the
    reads and the pace out and keeps everything else, which is how the ideal compute time is measured.

    Raises InputError when the folder cannot be used, has no room for ``num_bytes``, or the pace is no rate.
    """

    def __init__(
        self, directory: Path | str | None, num_bytes: int, gb_per_s: float | None = None, num_workers: int = 4
    ):
        if num_bytes < 0 or num_workers < 1:
            raise ValueError(f"num_bytes must be >= 0 and num_workers >= 1, not {num_bytes} and {num_workers}")
        self.set_rate(gb_per_s)
        folder = cache_folder() / "scratch" if directory is None else Path(directory).expanduser()
        if directory is None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.num_bytes = num_bytes
        self.enabled = True
        self.num_workers = num_workers
        # Whole pages, so that a direct request at the end stays inside the file.
        self._file = ScratchFile(folder, num_bytes + -num_bytes % ALIGN)
        self._workers = ThreadPoolExecutor(max(1, num_workers - 1), thread_name_prefix="flexhybrid-disk")
        self._closing = False
        self._callers: set[threading.Thread] = set()
        self._changed = threading.Condition()
        # Runs at close, when the space is forgotten, and at the interpreter's exit; it never waits.
        self._release = weakref.finalize(self, _release, self._file, self._workers)
        self.direct = self._file.direct_fd is not None and self._direct_reads_work()

    def set_rate(self, gb_per_s: float | None) -> None:
        """Pace both directions; None lifts the pace."""
        self.gb_per_s = checked_rate(gb_per_s)
        rate = None if gb_per_s is None else gb_per_s * 1e9
        self._pacers = {"read": (Pacer(rate), threading.Lock()), "write": (Pacer(rate), threading.Lock())}

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fill every piece's memory from its offset on; all done on return. Raises DiskError."""
        if self.enabled:
            self._transfer("read", pieces)

    def write(self, pieces: Sequence[Piece]) -> None:
        """Write every piece's memory at its offset; all done on return. Pieces may not overlap. Raises DiskError."""
        self._transfer("write", pieces)

    def flush(self) -> None:
        """Wait until what went through the page cache is on the disk. Raises DiskError where that failed."""
        try:
            os.fsync(self._file.fd)
        except OSError as error:
            raise DiskError(f"cannot write back {self._file}: {error.strerror or error}") from None

    def drop_page_cache(self) -> None:
        """Make the next reads come from the disk itself, where the system offers that: for measurements."""
        self.flush()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def describe(self) -> str:
        """One line for people: size, folder, filesystem, and what serves the reads."""
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
        """Make calls under way end soon, with a DiskError, and further ones at once. Returns at once; close follows."""
        self._closing = True

    def close(self) -> None:
        """Give the space back. Calls under way end soon, with a DiskError; threads are joined. May be called again."""
        with self._changed:
            self._closing = True
            # Ctrl-C may have left this thread's own name behind: whoever is here is in no other call.
            while any(one.is_alive() for one in self._callers - {threading.current_thread()}):
                self._changed.wait(timeout=0.1)
        self._workers.shutdown(wait=True)
        self._release()

    def __enter__(self) -> DiskSpace:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _direct_reads_work(self) -> bool:
        """Some filesystems open a file with O_DIRECT and refuse, or want larger alignment, only when it is read."""
        page = aligned_host_bytes(ALIGN).numpy()
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
                self._pace(direction, pacer, turn, began, sum(request.num_bytes for request in requests))
        finally:
            with self._changed:
                self._callers.discard(threading.current_thread())
                self._changed.notify_all()

    def _pace(self, direction: str, pacer: Pacer, turn: threading.Lock, began: float, num_bytes: int) -> None:
        """Sleep what the set rate asks, step by step, all steps counted from the call's beginning."""
        step = max(1, round(pacer.bytes_per_s * PACE_STEP_S))
        for done in range(0, num_bytes, step):
            if self._closing:
                raise DiskError(f"{self._file} was closed during a {direction}")
            with turn:
                pacer.end(began, min(step, num_bytes - done))

    def _requests(self, pieces: Sequence[Piece], writing: bool) -> list[_Request]:
        """Cut and join pieces into requests: direct where aligned, neighbours in the file together, of even sizes."""
        parts: list[_Part] = []
        total = 0
        for offset, memory in pieces:
            array, address = flat_bytes(memory, writable=not writing)
            size = array.size
            if offset < 0 or offset + size > self.num_bytes:
                raise ValueError(
                    f"bytes {offset} to {offset + size} lie outside of the {self.num_bytes} of {self._file}"
                )
            total += size
            first = last = 0  # [0, first) and [last, size) of the array are ragged ends
            if self.direct and (address - offset) % ALIGN == 0:
                first = min(-offset % ALIGN, size)
                last = first + (size - first) // ALIGN * ALIGN
            if first:
                parts.append((offset, False, array[:first]))
            if last > first:
                parts.append((offset + first, True, array[first:last]))
            if size > last:
                parts.append((offset + last, False, array[last:]))
        parts.sort(key=itemgetter(0))
        if writing:
            for (before, _, array), (after, _, _) in zip(parts, parts[1:], strict=False):
                if before + array.size > after:
                    raise ValueError(f"two pieces of one write overlap at byte {after} of {self._file}")
        even = -(-total // self.num_workers)
        return _joined(parts, min(max(even + -even % ALIGN, SMALLEST_REQUEST), LARGEST_REQUEST))

    def _check_length(self) -> None:
        """A write past the end of a shortened file would make it long again, with zeros where data was."""
        length = os.fstat(self._file.fd).st_size
        if length < self._file.num_bytes:
            raise DiskError(f"{self._file} was shortened: {length:,} of {self._file.num_bytes:,} bytes are left")

    def _spread(self, direction: str, requests: list[_Request]) -> None:
        """Move all requests, this thread and the workers taking them in turn; raises the first error of any."""
        waiting = deque(requests)
        errors: list[Exception] = []

        def take() -> None:
            while not errors and not self._closing:
                try:
                    request = waiting.popleft()
                except IndexError:
                    return
                try:
                    self._move(direction, request)
                except Exception as error:
                    errors.append(error)  # raised below, on the calling thread

        helpers = [self._workers.submit(take) for _ in range(min(len(requests), self.num_workers) - 1)]
        try:
            take()
            closed = len(waiting) > 0
        finally:
            waiting.clear()
            for helper in helpers:
                if not helper.cancel():
                    helper.result()  # its buffers must not be touched once this call has returned
        if errors:
            raise errors[0]
        if closed:
            raise DiskError(f"{self._file} was closed during a {direction}")

    def _move(self, direction: str, request: _Request) -> None:
        call = os.preadv if direction == "read" else os.pwritev
        done = 0
        try:
            if request.direct:
                done = call(self._file.direct_fd, request.buffers, request.offset)
            while done < request.num_bytes:  # the rest of a short direct request is no longer aligned
                moved = call(self._file.fd, _after(request.buffers, done), request.offset + done)
                if moved == 0:
                    break
                done += moved
        except OSError as error:
            advice = "; free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise DiskError(
                f"cannot {direction} {request.num_bytes:,} bytes at offset {request.offset:,} of {self._file}: "
                f"{error.strerror or error}{advice}"
            ) from None
        if done < request.num_bytes:
            raise DiskError(
                f"short {direction} of {self._file}: {done:,} of {request.num_bytes:,} bytes at offset "
                f"{request.offset:,}; the file was shortened while it was in use"
            )


def _release(file: ScratchFile, workers: ThreadPoolExecutor) -> None:
    workers.shutdown(wait=False)
    file.close()


def _joined(parts: list[_Part], most_bytes: int) -> list[_Request]:
    """Parts, in the file's order, as requests of up to this size."""
    requests: list[_Request] = []
    last, end = None, -1  # the latest request, and where the file goes on after it
    for offset, direct, array in parts:
        position, size = 0, array.size
        while position < size:
            follows = last is not None and offset + position == end and direct == last.direct
            if not follows or last.num_bytes == most_bytes or len(last.buffers) == MOST_BUFFERS:
                last = _Request(offset + position, direct, [], 0)
                requests.append(last)
            taken = min(size - position, most_bytes - last.num_bytes)
            last.buffers.append(array[position : position + taken])
            last.num_bytes += taken
            position += taken
            end = offset + position
    return requests


def _after(buffers: list[np.ndarray], done: int) -> list[np.ndarray]:
    """The buffers without their first ``done`` bytes."""
    rest = []
    for buffer in buffers:
        if done < buffer.size:
            rest.append(buffer[done:])
        done = max(0, done - buffer.size)
    return rest


def flat_bytes(memory: torch.Tensor | memoryview, writable: bool) -> tuple[np.ndarray, int]:
    """The bytes of contiguous CPU memory, as they lie, and their address. Raises ValueError for any other memory."""
    if isinstance(memory, torch.Tensor):
        if memory.device.type != "cpu" or not memory.is_contiguous():
            raise ValueError(f"a disk reads and writes contiguous CPU tensors, not {memory.device} {memory.stride()}")
        if memory.dtype is not torch.uint8 or memory.dim() != 1:
            memory = memory.detach().reshape(-1).view(torch.uint8)
        return memory.numpy(), memory.data_ptr()
    array = np.frombuffer(memory, dtype=np.uint8)
    if writable and not array.flags.writeable:
        raise ValueError("a disk cannot read into read-only memory")
    return array, array.ctypes.data


def aligned_host_bytes(num_bytes: int, host_memory: HostMemory | None = None) -> torch.Tensor:
    """A zeroed uint8 tensor that direct reads can fill, page-locked and counted by ``host_memory`` if that is given."""
    return (host_memory or HostMemory(pinned=False)).bytes(num_bytes)


def checked_rate(gb_per_s: float | None) -> float | None:
    """A disk's pace as it came. Raises InputError when it is neither None nor a rate."""
    if gb_per_s is not None:
        number = isinstance(gb_per_s, (int, float)) and not isinstance(gb_per_s, bool)
        if not number or not SLOWEST_DISK <= gb_per_s < float("inf"):
            raise InputError(f"disk_gb_per_s is {gb_per_s!r}; it must be a number of at least {SLOWEST_DISK} GB/s")
    return gb_per_s
