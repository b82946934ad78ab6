"""Asks the operating system for this machine's properties, and returns freed memory to it."""

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from flexhybrid.core.problem import Budgets
from flexhybrid.core.units import gib

#: Files with a container's memory limit, in control groups of version 2 and 1.
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
#: Default budgets as shares of the free host memory. A CPU's device tier is host memory too.
FREE_SHARES = {"cuda": {"host": 0.9}, "cpu": {"device": 0.45, "host": 0.45}}
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  #: glibc's malloc.h
LARGEST_KEPT_BYTES = 1 << 20  #: freed blocks from this size on are returned at once
KEPT_PRODUCTS = 64  #: matrix products that oneDNN keeps compiled, 0.1 MB each (its default: 1,024)


def device_name(device: torch.device) -> str:
    """Return the device's name; for a CPU, with its instructions and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as info:
        model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "")
    # The instructions matter because virtual machines often hide the model.
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return f"{model or platform.processor() or 'CPU'} ({capability}), {threads} thread{'s' * (threads > 1)}"


def machine_memories(device: torch.device) -> dict[str, int | None]:
    """Return the bytes of this machine's device_memory and host_memory; None if unknown.

    A container's limit counts as the host's memory. On a CPU, each of the two tiers gets half of the host's memory.
    """
    host = host_memory_bytes()
    if device.type == "cuda":
        return {"device_memory": torch.cuda.get_device_properties(device).total_memory, "host_memory": host}
    half = None if host is None else host // 2
    return {"device_memory": half, "host_memory": half}


def notes_on(device: torch.device, budgets: Budgets, disk_dir: Path | str | None) -> Iterator[str]:
    """Yield warnings about budgets that exceed this machine's memory, and a scratch folder that does not exist."""
    memories, host = machine_memories(device), host_memory_bytes()
    named = {f"{tier}_memory": size for tier, size in budgets.items() if size is not None and tier != "disk"}
    if device.type == "cpu" and len(named) == 2:  # both tiers are parts of one memory
        memories["device_memory and host_memory together"] = host
        named = {"device_memory and host_memory together": sum(named.values())}
    elif device.type == "cpu":
        memories = dict.fromkeys(memories, host)
    for name, size in named.items():
        if (most := memories[name]) is not None and size > most:
            yield f"{name}, {gib(size)}, is more than the {gib(most)} that this machine has: it may run out of memory"
    if disk_dir is not None and not Path(disk_dir).expanduser().exists():
        yield f"the scratch folder {disk_dir} does not exist; it is created if the policy uses a disk"


def host_memory_bytes(limits: tuple[Path, ...] = CGROUP_LIMITS) -> int | None:
    """Return the bytes of physical memory, or a container's lower limit by the files ``limits``; None if unknown."""
    try:
        sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (ValueError, OSError, AttributeError):
        return None
    for path in limits:
        with contextlib.suppress(OSError, ValueError):  # no such file in this version of control groups, or "max"
            sizes.append(int(path.read_text(encoding="ascii")))
    return min(sizes)


def free_host_bytes() -> int | None:
    """Return the bytes of host memory that are free now, within a container's limit; None if unknown."""
    size = host_memory_bytes()
    try:
        with open("/proc/meminfo", encoding="ascii") as info:
            free = next(int(line.split()[1]) * 1024 for line in info if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return size
    for limit in CGROUP_LIMITS:
        used = limit.with_name("memory.current" if limit.name == "memory.max" else "memory.usage_in_bytes")
        with contextlib.suppress(OSError, ValueError):
            free = min(free, int(limit.read_text(encoding="ascii")) - int(used.read_text(encoding="ascii")))
    return max(free, 1)


def free_budgets(device: torch.device, sharers: int = 1) -> dict[str, int | None]:
    """Return tier -> free host bytes for one of ``sharers`` executors; empty if unknown."""
    return host_budgets(device, free_host_bytes(), sharers)


def host_budgets(device: torch.device, num_bytes: int | None, sharers: int = 1) -> dict[str, int | None]:
    """Return tier -> the bytes that each of ``sharers`` executors may use of ``num_bytes`` of host memory.
    Empty if ``num_bytes`` is None."""
    if num_bytes is None:
        return {}
    return {tier: int(num_bytes * share / sharers) for tier, share in FREE_SHARES[device.type].items()}


def return_freed_memory() -> None:
    """Make glibc return every freed block of LARGEST_KEPT_BYTES or more to the system at once.

    By default, glibc raises this size to the largest block freed so far, up to 32 MiB, and keeps twice as much: reading
    a layer's tensors would leave tens of megabytes per thread outside the budgets. Without glibc, do nothing. Call this
    in our own processes only, before the first matrix product.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KEPT_PRODUCTS))
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for setting in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            libc.mallopt(setting, LARGEST_KEPT_BYTES)


def trim_memory() -> None:
    """Make glibc return free pages between used blocks; without this call they reach 150 MB over time."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
