"""Samples of a disk: the scratch space's own reads and writes, whole calls of several sizes back to back.

What is read was written before, as noise (a block never written costs no disk access, and some disks compress), and
where reads go through the page cache it is emptied first and nothing is read twice between: the disk is measured, not
the memory before it. A device's own cache, or that of a machine around this one, cannot be emptied from here.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from flexhybrid.runtime.profiling.profile import ProfileSamples, typical_of_passes
from flexhybrid.runtime.storage.disk import DiskSpace, aligned_host_bytes

SPACE_BYTES = 1 << 28
SIZES = tuple(1 << n for n in range(16, 27, 2))  #: bytes of a call, 64 KiB to 64 MiB
SIZE_SECONDS = 0.1  #: calls of one size go back to back for about this long
SLOW_CALL_S = 1.0  #: no larger call is tried once one took this long


def profile_disk(
    directory: Path | str | None, gb_per_s: float | None = None, space_bytes: int = SPACE_BYTES, sizes=SIZES
) -> tuple[ProfileSamples, str]:
    """Samples of "disk_read" and "disk_write" in this folder, and a line that says what was measured.

    A paced disk is also measured without its pace ("disk_read_unpaced", …), so that one profile serves both ways of
    running. Needs ``space_bytes`` there for as long as it runs. Raises InputError as DiskSpace does.
    """
    with DiskSpace(directory, space_bytes, gb_per_s) as space:
        noise = aligned_host_bytes(max(sizes))
        noise.numpy()[:] = np.frombuffer(np.random.default_rng(0).bytes(len(noise)), dtype=np.uint8)
        space.set_rate(None)
        for start in range(0, space_bytes, len(noise)):
            space.write([(start, noise[: space_bytes - start])])
        passes = []
        for _ in range(2):
            found = {}
            for rate, suffix in ((gb_per_s, ""), (None, "_unpaced")) if gb_per_s else ((None, ""),):
                space.set_rate(rate)
                for direction in ("write", "read"):
                    for size, seconds in _time_calls(space, direction, noise, sizes):
                        found[f"disk_{direction}{suffix}", 0, size] = seconds
            passes.append(found)
        space.set_rate(gb_per_s)
        return typical_of_passes(*passes), space.describe()


def _time_calls(space: DiskSpace, direction: str, memory, sizes) -> list[tuple[int, float]]:
    """(bytes, seconds a call) at each size. The first calls' wake-up is left out.

    A pace makes up for a late wake-up, so a few calls in a row may seem faster than it: they count as at the pace.
    """
    found = []
    for size in sizes:
        space.drop_page_cache()
        places = space.num_bytes // size
        once = _several(space, direction, memory[:size], range(2)) / 2
        count = max(1, min(200, places - 2, round(SIZE_SECONDS / max(once, 1e-6))))
        seconds = _several(space, direction, memory[:size], [(2 + i) % places for i in range(count)]) / count
        paced = size / (space.gb_per_s * 1e9) if space.gb_per_s else 0.0
        found.append((size, max(seconds, paced)))
        if seconds > SLOW_CALL_S:
            break
    return found


def _several(space: DiskSpace, direction: str, memory, places) -> float:
    """Seconds of one call at each of these places, in units of the memory's size; writes end on the disk."""
    start = time.perf_counter()
    for place in places:
        getattr(space, direction)([(place * len(memory), memory)])
    if direction == "write" and not space.direct:
        space.flush()
    return time.perf_counter() - start
