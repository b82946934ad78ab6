"""Time reads and writes of a disk's scratch space, in consecutive calls of several sizes.

The file is filled with noise before it is read, because an unwritten block costs no disk access and some disks compress
data. If reads go through the page cache, the cache is emptied first and nothing is read twice. The caches of the disk
itself, and of a virtual machine's host, cannot be emptied.
"""

import time
from pathlib import Path

import numpy as np

from flexhybrid.runtime.profiling.profile import ProfileSamples, typical_of_passes
from flexhybrid.runtime.storage.disk import DiskSpace
from flexhybrid.runtime.storage.host_memory import HostMemory

SPACE_BYTES = 1 << 28
SIZES = tuple(1 << n for n in range(16, 27, 2))  #: bytes per call, 64 KiB to 64 MiB
SIZE_SECONDS = 0.1  #: approximate time of the calls of one size
SLOW_CALL_S = 1.0  #: larger sizes are skipped if a call takes longer than this


def profile_disk(
    directory: Path | str | None, gb_per_s: float | None = None, space_bytes: int = SPACE_BYTES, sizes=SIZES
) -> tuple[ProfileSamples, str]:
    """Return samples of "disk_read" and "disk_write" in a folder, and a line that describes the disk.

    A paced disk is also measured without its pace ("disk_read_unpaced", …), so that one profile is valid for paced and
    unpaced runs. A file of ``space_bytes`` exists meanwhile. Raise InputError if ``DiskSpace`` cannot be created.
    """
    with DiskSpace(directory, space_bytes, gb_per_s) as space:
        noise = HostMemory(pinned=False).bytes(max(sizes))
        noise.numpy()[:] = np.frombuffer(np.random.default_rng(0).bytes(len(noise)), dtype=np.uint8)
        space.set_rate(None)
        for start in range(0, space_bytes, len(noise)):
            space.write([(start, noise[: space_bytes - start])])
        passes = []
        for _ in range(2):
            seconds_of = {}
            for rate, suffix in ((gb_per_s, ""), (None, "_unpaced")) if gb_per_s else ((None, ""),):
                space.set_rate(rate)
                for direction in ("write", "read"):
                    for size, seconds in _time_calls(space, direction, noise, sizes):
                        seconds_of[f"disk_{direction}{suffix}", 0, size] = seconds
            passes.append(seconds_of)
        space.set_rate(gb_per_s)
        return typical_of_passes(*passes), space.describe()


def _time_calls(space: DiskSpace, direction: str, memory, sizes) -> list[tuple[int, float]]:
    """Return (bytes, seconds per call) of each size, without the first calls, which may wake the disk.

    A paced disk catches up after a delay, so a few calls may seem faster than the pace. Count these at the pace.
    """
    samples = []
    for size in sizes:
        space.drop_page_cache()
        places = space.num_bytes // size
        once = _several(space, direction, memory[:size], range(2)) / 2
        count = max(1, min(200, places - 2, round(SIZE_SECONDS / max(once, 1e-6))))
        seconds = _several(space, direction, memory[:size], [(2 + i) % places for i in range(count)]) / count
        paced = size / (space.gb_per_s * 1e9) if space.gb_per_s else 0.0
        samples.append((size, max(seconds, paced)))
        if seconds > SLOW_CALL_S:
            break
    return samples


def _several(space: DiskSpace, direction: str, memory, places) -> float:
    """Return the seconds of one call at each place, flush included. ``places`` count in sizes of ``memory``."""
    start = time.perf_counter()
    for place in places:
        getattr(space, direction)([(place * len(memory), memory)])
    if direction == "write" and not space.direct:
        space.flush()
    return time.perf_counter() - start
