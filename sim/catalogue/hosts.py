"""Hosts: memory, cores and disk of a machine without its GPU, so that GPUs can be compared on the same host."""

from dataclasses import dataclass, replace

from flexhybrid.core.errors import unknown
from flexhybrid.core.hardware import is_of_disk, resource_of_line
from sim.datasheet import SCATTER_GB_PER_S, Datasheet


@dataclass(frozen=True)
class Host:
    """A host's sizes and peak rates."""

    memory: str  #: size as text, such as "64GiB"
    memory_gb_per_s: float  #: 10^9 bytes/s, from the number and speed of memory channels
    tflops: float  #: 10^12 FP32 operations/s, from the number and clock of cores
    source: str
    disk: tuple[str, float, float] | None = None  #: (size as text, GB/s of reading, GB/s of writing)


_NVME = ("1TB", 7.0, 5.0)  #: a PCIe 4.0 x4 NVMe drive by its datasheet (7,000 and 5,000 MB/s, sequential)
_DESKTOP = "two channels of DDR5-5600 (89.6 GB/s); 8 cores x 32 FP32 operations of AVX2 x 4 GHz"
_WORKSTATION = "8 channels of DDR4-3200 (204.8 GB/s); 32 cores x 32 x 2.5 GHz"
_SERVER = "{} socket of an EPYC 9354: 12 channels of DDR5-4800 (460.8 GB/s), 32 cores x 32 x 3.25 GHz"

#: Name -> host. All numbers follow from standards and datasheets; a profile of the machine is more accurate.
HOSTS = {
    "desktop-64g": Host("64GiB", 89.6, 1.02, _DESKTOP, _NVME),
    "desktop-128g": Host("128GiB", 89.6, 1.02, _DESKTOP, _NVME),
    "workstation-256g": Host("256GiB", 204.8, 2.56, _WORKSTATION, _NVME),
    "server-512g": Host("512GiB", 460.8, 3.33, _SERVER.format("one"), _NVME),
    "server-1t": Host("1TiB", 921.6, 6.66, _SERVER.format("two times one"), _NVME),
}


def beside(sheet: Datasheet, name: str) -> Datasheet:
    """Return a machine's datasheet with another host, at the default shares of the host's peaks. Rates that were fitted
    to the old host and its disk are dropped. Raise InputError for an unknown host."""
    if name not in HOSTS:
        raise unknown("host", name, HOSTS)
    host = HOSTS[name]
    size, reads, writes = host.disk or (None, None, None)

    def of_device(table: dict) -> dict:
        return {k: v for k, v in table.items() if not (resource_of_line(k) == "host_compute" or is_of_disk(k))}

    return replace(
        sheet,
        host_memory=host.memory,
        host_memory_gb_per_s=host.memory_gb_per_s,
        host_tflops=host.tflops,
        disk_memory=size,
        disk_read_gb_per_s=reads,
        disk_write_gb_per_s=writes,
        disk_cached_gb_per_s=SCATTER_GB_PER_S / 2,  # a core reads and writes each byte
        host_near_memory=None,
        host_far_share=None,
        shares={key: value for key, value in sheet.shares.items() if not key.startswith("host_")},
        lines=of_device(sheet.lines),
        in_place_of=of_device(sheet.in_place_of),
        rates={"kind": "assumed", **sheet.hardware().rates, "host": name},
        testbed=f"{sheet.gpu or sheet.name} beside the host {name}",
        sources={**sheet.sources, "host_memory": host.source},
    )
