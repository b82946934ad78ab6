"""What of the processor's time this process did not get."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

STEAL = 7  #: of the first line of /proc/stat, its name not counted
MOST_STOLEN = 0.75  #: beyond it cores stand still at the same time, and the sum of what they lose says nothing
MOST_OTHERS = 0.05  #: share of the cores that others may use in a clean round (the house bar)


@dataclass(frozen=True)
class CpuUse:
    """Processor time since boot, in seconds; None where /proc does not tell."""

    everyone_s: float | None  #: used by all processes here, or taken by the host
    stolen_s: float | None  #: taken by the host while a process here was ready to run
    own_s: float  #: used by this process
    at_s: float

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
        """Share of all cores that other processes, and the host, used between the two readings."""
        if self.everyone_s is None or before.everyone_s is None:
            return None
        stolen = self.stolen_s - before.stolen_s
        # Some kernels count what was stolen from a process as used by it.
        others = max(stolen, self.everyone_s - before.everyone_s - (self.own_s - before.own_s))
        return max(0.0, others) / max(1e-9, (self.at_s - before.at_s) * (os.cpu_count() or 1))

    def left_since(self, before: CpuUse) -> float:
        """Share of the time between two readings that a task would have taken had the host stolen nothing, in (0, 1].

        A virtual machine's core stands still while its host runs somebody else on it, and threads that work on one task
        wait for the one that does: the seconds stolen from any of them are lost to it one after the other. Products of
        48 rows on two stolen cores took 1,240 to 1,970 µs at 9 to 27 % of them stolen, this share of it 860 to 1,010.
        """
        if self.stolen_s is None or before.stolen_s is None:
            return 1.0
        return 1 - min(MOST_STOLEN, (self.stolen_s - before.stolen_s) / max(1e-9, self.at_s - before.at_s))
