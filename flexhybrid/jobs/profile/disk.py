"""Measures a disk, and moves the lines of a disk from one hardware record to another."""

from dataclasses import replace
from pathlib import Path

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, is_of_disk, load_hardware
from flexhybrid.runtime.profiling.profile_disk import profile_disk
from flexhybrid.runtime.storage.scratch_file import free_bytes
from flexhybrid.runtime.storage.weights import DiskPlace
from policy_search.fit import fit_line

NOTES = ("disk", "disk_gb_per_s")  #: notes of a record that belong to the disk


def measure_disk(disk: DiskPlace) -> tuple[Hardware, list[str]]:
    """Measure the disk under a folder; return a record of the disk, and the sizes on which two passes disagreed.

    Raise InputError if the folder cannot be used or lacks space.
    """
    directory, gb_per_s = Path(disk.directory or "."), disk.gb_per_s
    result, description = profile_disk(directory, gb_per_s)
    lines = {key: fit_line(samples) for key, samples in result.samples.items()}
    if gb_per_s:  # noise may make a fitted line faster than the rate that limits the disk
        for key in ("disk_read", "disk_write"):
            lines[key] = replace(lines[key], s_per_byte=max(lines[key].s_per_byte, 1e-9 / gb_per_s))
    notes = {"disk": description, "disk_gb_per_s": gb_per_s}
    memory = free_bytes(directory.expanduser()) or None
    return Hardware("disk", "cpu", lines, disk_memory=memory, notes=notes), result.disagreements


def with_disk(hardware: Hardware, disk: Hardware) -> Hardware:
    """Return the record with the disk of another record in place of its own."""
    lines = {key: line for key, line in hardware.lines.items() if not is_of_disk(key)}
    lines |= {key: line for key, line in disk.lines.items() if is_of_disk(key)}
    notes = {key: value for key, value in hardware.notes.items() if key not in NOTES}
    notes |= {key: disk.notes[key] for key in NOTES if key in disk.notes}
    return replace(hardware, lines=lines, notes=notes, disk_memory=disk.disk_memory)


def with_earlier_disk(hardware: Hardware, path: Path) -> Hardware:
    """Return the record, with the disk of the record at ``path`` if it has none itself."""
    try:
        earlier = load_hardware(path)
    except InputError:  # there is no earlier record, or it cannot be read
        return hardware
    own, others = (any(map(is_of_disk, record.lines)) for record in (hardware, earlier))
    return hardware if own or not others else with_disk(hardware, earlier)
