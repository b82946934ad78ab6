"""The hardware catalogue: machines known from their datasheets, one JSON file each in this folder.

Each file is a ``sim.datasheet``: peaks, the shares of them that are reached, and a source for every number. The field
``rates`` says whether the shares are assumed or fitted to published runs on that machine. An entry includes the host of
a paper's testbed if a paper used the GPU. GB of memory are GiB; GB of a disk and of rates are 10^9 bytes.
``local()`` is the measured profile of this machine, which predicts better.
"""

from dataclasses import replace
from pathlib import Path

from flexhybrid.core.errors import InputError, unknown
from flexhybrid.core.files import OF_MODELS, cache_folder, newest_profile
from flexhybrid.core.hardware import COMPANY, Hardware, load_hardware
from sim.catalogue.hosts import beside
from sim.datasheet import is_record, load_datasheet, load_machine

SHIPPED = Path(__file__).parent
FOLDER = SHIPPED  #: the folder that is read; `flexhybrid reproduce --set` sets it to a changed copy
READ: set[str] = set()  #: names of the entries that this process has loaded

#: The name of this machine's own profile.
LOCAL = "local"

#: Driver's name of a GPU -> its entry, if the entry is not the driver's name without "NVIDIA GeForce". Names must match
#: exactly: an "RTX 4090 D" or a "GH200" is another machine, and an "RTX 3060" may be the one of 8 GB.
GPU_NAMES = {
    "NVIDIA A100-SXM4-40GB": "a100-40g",
    "NVIDIA A100-PCIE-40GB": "a100-40g",
    "NVIDIA RTX A6000": "rtx-a6000",
    "Quadro RTX 5000": "rtx5000",
    "NVIDIA Quadro RTX 5000": "rtx5000",
    "Tesla T4": "t4",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA RTX 6000 Ada Generation": "rtx6000-ada",
    "Tesla V100-SXM2-32GB": "v100-32g",
    "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA H100 PCIe": "h100-pcie",
}


def names() -> list[str]:
    """Return the names of the catalogue's machines, without "local"."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def path_of(name_or_path: str | Path) -> Path | None:
    """Return the path of a machine's datasheet, by name (any case) or by the file's path. Return None for an unknown
    name, and for a file that is a measured record."""
    text = str(name_or_path)
    if text.lower() in names():
        return FOLDER / f"{text.lower()}.json"
    if text.lower() != LOCAL and (isinstance(name_or_path, Path) or text.endswith(".json") or "/" in text):
        return None if is_record(text) else Path(text)
    return None


def load(name_or_path: str | Path, host: str | None = None) -> Hardware:
    """Return a machine: a catalogue entry by name (any case), "local", or a hardware file by path. ``host``: one of
    ``hosts.HOSTS`` that replaces the entry's own host. Raise InputError for an unknown name, and for a host with a
    measured record, which includes its own host."""
    text = str(name_or_path)
    READ.add(text.lower())
    if host is not None:
        if (path := path_of(name_or_path)) is None:
            load(name_or_path)  # raises for an unknown name
            raise InputError(f"--host {host}: {text} was measured with its own host; name a machine of the catalogue")
        return beside(load_datasheet(path), host).hardware()
    if text.lower() in names():
        return load_machine(FOLDER / f"{text.lower()}.json")
    if text.lower() == LOCAL:
        return local()
    if isinstance(name_or_path, Path) or (isinstance(name_or_path, str) and (text.endswith(".json") or "/" in text)):
        return load_machine(name_or_path)
    raise unknown("hardware", name_or_path, [*names(), LOCAL], other="the path of a hardware file")


def local() -> Hardware:
    """Return the machine of ``newest_profile``, without the rate at which a CPU imitated a link during profiling. If a
    run measured it for one model only, ``Hardware.company`` says so. Raise InputError if there is no profile."""
    path = newest_profile()
    if path is None:
        raise InputError(
            f"this machine has no profile in {cache_folder()}: run `flexhybrid profile` once, or name a machine of "
            f"the catalogue: {', '.join(names())}"
        )
    hardware = load_hardware(path).with_link_rate(None)
    if path.parent.name != OF_MODELS:
        return hardware
    other = "This machine was measured only for another model, dtype or link"
    return replace(hardware, notes=hardware.notes | {COMPANY: "; ".join(filter(None, (other, hardware.company)))})


def for_gpu(device_name: str) -> Hardware | None:
    """Return the entry of a GPU by the driver's name (``torch.cuda.get_device_name``), or None.

    The result lacks the host's memory size and disk, which are the testbed's. The rates of the link and the host remain
    the testbed's until this machine is profiled.
    """
    plain = device_name.removeprefix("NVIDIA ").removeprefix("GeForce ").replace(" ", "").lower()
    name = GPU_NAMES.get(device_name, plain)
    if name not in names():
        return None
    entry = load(name)
    lines = {key: line for key, line in entry.lines.items() if not key.startswith("disk_")}
    return replace(entry, lines=lines, host_memory=None, disk_memory=None)
