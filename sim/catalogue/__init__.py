"""The hardware catalogue: machines known from their datasheets, one JSON file each beside this module.

Each file is a ``sim.datasheet``: peaks, the shares of them that are reached, and a source for every number. A record's
``rates`` say whether the shares are fitted to published runs on that machine or assumed; where a machine is at hand,
profile it: ``local()`` is what was measured here. An entry is a paper's testbed, host and all, where a paper has one.
GB of memory are read as GiB, GB of a disk and all rates as 10^9.
"""

from dataclasses import replace
from pathlib import Path

from flexhybrid.core.errors import InputError, unknown
from flexhybrid.core.files import OF_MODELS, cache_folder, newest_profile
from flexhybrid.core.hardware import COMPANY, Hardware, load_hardware
from sim.catalogue.hosts import beside
from sim.datasheet import is_record, load_datasheet, load_machine

SHIPPED = Path(__file__).parent
FOLDER = SHIPPED  #: the one that is read: `flexhybrid reproduce --set` has a copy with changes
READ: set[str] = set()  #: names of the entries that this process has loaded

#: The name of this machine's own profile.
LOCAL = "local"

#: What the driver calls a GPU -> its entry, where that is not the name without its maker ("NVIDIA GeForce RTX 4090").
#: Only exact names: an "RTX 4090 D" or a "GH200" is another machine, and an "RTX 3060" may be the one of 8 GB.
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
    """The machines of the catalogue; "local" is not among them."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def path_of(name_or_path: str | Path) -> Path | None:
    """The datasheet of a machine by name (any case), or a file's path as it was given; None for another name, and for a
    file that is a measured record."""
    text = str(name_or_path)
    if text.lower() in names():
        return FOLDER / f"{text.lower()}.json"
    if text.lower() != LOCAL and (isinstance(name_or_path, Path) or text.endswith(".json") or "/" in text):
        return None if is_record(text) else Path(text)
    return None


def load(name_or_path: str | Path, host: str | None = None) -> Hardware:
    """A catalogue entry by name (any case), "local", or a hardware file by path; else InputError with the names.
    ``host``: one of ``hosts.HOSTS``, in place of the entry's own; InputError for a measured record, which has none."""
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
    """The machine of ``newest_profile``, without the pace at which a CPU's link was imitated meanwhile. One that a run
    kept for its model says so, as ``company``. InputError where there is none."""
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
    """The entry of a GPU by the driver's name for it (``torch.cuda.get_device_name``), or None.

    Without what belongs to the testbed's host alone: its memory's size and its disk. The link and the host's rates
    stay the testbed's until this machine is profiled.
    """
    plain = device_name.removeprefix("NVIDIA ").removeprefix("GeForce ").replace(" ", "").lower()
    name = GPU_NAMES.get(device_name, plain)
    if name not in names():
        return None
    entry = load(name)
    lines = {key: line for key, line in entry.lines.items() if not key.startswith("disk_")}
    return replace(entry, lines=lines, host_memory=None, disk_memory=None)
