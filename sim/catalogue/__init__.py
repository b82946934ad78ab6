"""The hardware catalogue: machines known from their datasheets, one JSON file each beside this module.

Each line is a datasheet peak times an efficiency that the file states, with a source for every number in its notes.
These are estimates for machines not at hand; where a machine is, profile it.
"""

from __future__ import annotations

from pathlib import Path

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, load_hardware

FOLDER = Path(__file__).parent

#: What the driver calls a GPU -> its entry. Only exact names: an "RTX 4090 D" or a "GH200" is another machine.
GPU_NAMES = {
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA A100-SXM4-40GB": "a100-40g",
    "NVIDIA A100-PCIE-40GB": "a100-40g",
    "NVIDIA H200": "h200",
}


def names() -> list[str]:
    """The machines of the catalogue."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name_or_path: str | Path) -> Hardware:
    """A catalogue entry by name (any case), or a hardware file by path; InputError lists the known names."""
    text = str(name_or_path)
    if text.lower() in names():
        return load_hardware(FOLDER / f"{text.lower()}.json")
    if isinstance(name_or_path, Path) or text.endswith(".json") or "/" in text:
        return load_hardware(name_or_path)
    raise InputError(f"unknown hardware {text!r}; known: {', '.join(names())}, or the path of a hardware file")


def for_gpu(device_name: str) -> Hardware | None:
    """The entry of a GPU by the driver's name for it (``torch.cuda.get_device_name``), or None."""
    name = GPU_NAMES.get(device_name)
    return load(name) if name else None
