"""A bench row of the memory of pools on the host."""

import os

from experiments.bench.harness import Table, seconds_in_turn
from flexhybrid.runtime.storage import host_memory

TOUCHED_BYTES, TOUCHING_BAR = 1 << 30, 1.3


def bench_touching(table: Table) -> None:
    """Memory for pools whose pages several threads touch first, against one thread; on one core there is no row."""
    if (os.cpu_count() or 1) == 1:
        return
    most = host_memory.TOUCHING_THREADS

    def touched(threads: int) -> None:
        host_memory.TOUCHING_THREADS = threads
        try:
            host_memory.HostMemory(pinned=False).bytes(TOUCHED_BYTES)
        finally:
            host_memory.TOUCHING_THREADS = most

    seconds = seconds_in_turn({"one": lambda _: touched(1), "all": lambda _: touched(most)}, 5, 1)
    ratio = min(seconds["one"]) / min(seconds["all"])
    a_gib = min(seconds["all"]) / (TOUCHED_BYTES / 2**30)
    table.at_least(
        "memory: pages touched by all cores, times as fast as by one", ratio, TOUCHING_BAR, "x", s_a_gib=a_gib
    )
