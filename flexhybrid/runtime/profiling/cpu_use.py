"""Measure the processor time used by other processes, and stolen by the host of a virtual machine."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

STEAL = 7  #: index of the stolen time among the numbers in the first line of /proc/stat
MOST_STOLEN = 0.75  #: limit of the subtracted share; above it, cores stop at the same time, and their sum is wrong
MOST_OTHERS = 0.05  #: share of the cores that other processes may use in an undisturbed round


@dataclass(frozen=True)
class CpuUse:
    """Processor time since boot, in seconds; None where /proc/stat is missing."""

    everyone_s: float | None  #: used by all processes of this machine, or stolen by the host
    stolen_s: float | None  #: stolen by the host while a process of this machine was ready to run
    own_s: float  #: used by this process
    at_s: float  #: time of the reading (``time.perf_counter``)

    @staticmethod
    def now() -> CpuUse:
        try:
            with open("/proc/stat", encoding="ascii") as stat:
                seconds = [int(field) / os.sysconf("SC_CLK_TCK") for field in stat.readline().split()[1:9]]
            everyone, stolen = sum(seconds) - seconds[3] - seconds[4], seconds[STEAL]  # without idle and iowait
        except (OSError, ValueError, IndexError):
            everyone = stolen = None
        return CpuUse(everyone, stolen, time.process_time(), time.perf_counter())

    def others_since(self, before: CpuUse) -> float | None:
        """Return the share of all cores that other processes and the host used between two readings."""
        if self.everyone_s is None or before.everyone_s is None or self.stolen_s is None or before.stolen_s is None:
            return None
        stolen = self.stolen_s - before.stolen_s
        # Some kernels count the time stolen from a process as used by it.
        others = max(stolen, self.everyone_s - before.everyone_s - (self.own_s - before.own_s))
        return max(0.0, others) / max(1e-9, (self.at_s - before.at_s) * (os.cpu_count() or 1))

    def left_since(self, before: CpuUse) -> float:
        """Return the share (0, 1] of the time between two readings that a task would take without stolen time.

        A core of a virtual machine stops while the host runs another machine on it. The threads of a task wait for each
        other, so the seconds stolen from all cores add up. Matrix products of 48 rows on two cores took 1,240 to
        1,970 µs while 9 to 27 % of the cores' time was stolen; multiplied by this share, 860 to 1,010 µs.
        """
        if self.stolen_s is None or before.stolen_s is None:
            return 1.0
        return 1 - min(MOST_STOLEN, (self.stolen_s - before.stolen_s) / max(1e-9, self.at_s - before.at_s))


class ThreadAccount(NamedTuple):
    """Linux's counters of a thread, since it started."""

    queued_s: float  #: time in which the thread was ready but had no processor
    wake_ups: int
    preemptions: int

    @staticmethod
    def now(folder: Path = Path("/proc/thread-self")) -> ThreadAccount | None:
        """Return the counters of the calling thread; None if the system has none."""
        try:
            queued_ns = (folder / "schedstat").read_text(encoding="ascii").split()[1]
            fields = dict(line.split(":", 1) for line in (folder / "status").read_text(encoding="utf-8").splitlines())
            wake_ups, preemptions = fields["voluntary_ctxt_switches"], fields["nonvoluntary_ctxt_switches"]
            return ThreadAccount(int(queued_ns) / 1e9, int(wake_ups), int(preemptions))
        except (OSError, ValueError, LookupError):
            return None
