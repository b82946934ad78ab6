"""The catalogue's machines: each number follows from a stated peak and efficiency, each of which has a source."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from flexhybrid.core.errors import InputError
from flexhybrid.core.files import profile_file
from flexhybrid.core.hardware import Hardware, Line
from sim import catalogue

GIB = 2**30
GB = 10**9

#: GiB of device and host memory, GB/s of the link, GB of the disk: as the testbeds' papers state, or as assumed.
MACHINES = {
    "rtx4090": (24, 882, 31.5, None),
    "a100-40g": (40, 512, 31.5, None),  # the host is assumed
    "rtx-a6000": (48, 96, 15.75, None),
    "rtx5000": (16, 256, 15.75, None),  # the host is assumed
    "t4": (16, 208, 15.75, 1500),
    "h100": (80, 256, 63.0, None),  # no testbed; the host is assumed
    "h200": (141, 256, 63.0, None),
}


def test_these_machines_and_no_others():
    assert set(catalogue.names()) == set(MACHINES)


@pytest.mark.parametrize("name", MACHINES)
def test_capacities_are_the_papers(name):
    device, host, link, disk = MACHINES[name]
    hardware = catalogue.load(name)
    assert hardware.name == name and hardware.device == "cuda"
    assert hardware.device_memory == device * GIB and hardware.host_memory == host * GIB
    assert hardware.disk_memory == (disk and disk * GB)
    assert hardware.notes["link_bytes_per_s"] == link * GB


@pytest.mark.parametrize("name", MACHINES)
def test_every_line_is_a_stated_peak_times_a_stated_efficiency(name):
    hardware = catalogue.load(name)
    notes, efficiency, lines = hardware.notes, hardware.notes["efficiency"], hardware.lines
    overhead = efficiency["overhead_s"]

    def line(where: str, flops: float = 0.0, bytes_per_s: float = 0.0) -> Line:
        return Line(overhead[where], 1 / flops if flops else 0.0, 1 / bytes_per_s if bytes_per_s else 0.0)

    flops, memory = notes["peak_flops"] * efficiency["gemm"], notes["memory_bytes_per_s"]
    link = line("link", bytes_per_s=notes["link_bytes_per_s"] * efficiency["link"])
    host = notes["host_memory_bytes_per_s"] * efficiency["host_memory"]
    expected = {
        "compute": line("compute", flops, memory * efficiency["memory"]),
        "attend": line("compute", flops, memory * efficiency["attention_memory"]),
        "attend_prefill": line("compute", flops, memory * efficiency["memory"]),
        "h2d": link,
        "d2h": link,
        "host_compute": line("host", bytes_per_s=host),
        "attend_host": line("host", notes["host_peak_flops"] * efficiency["host_flops"], host),
        "scatter": line("host", bytes_per_s=efficiency["scatter_bytes_per_s"]),
    }
    if hardware.disk_memory:
        expected["disk_read"] = line("disk", bytes_per_s=notes["disk_read_bytes_per_s"])
        expected["disk_write"] = line("disk", bytes_per_s=notes["disk_write_bytes_per_s"])
    assert lines.keys() == expected.keys()
    for key, want in expected.items():
        got = lines[key]
        assert (got.overhead_s, got.s_per_flop, got.s_per_byte) == pytest.approx(
            (want.overhead_s, want.s_per_flop, want.s_per_byte)
        ), key
        assert got.r2 is None and not got.samples  # nothing was measured


@pytest.mark.parametrize("name", MACHINES)
def test_every_number_has_a_source(name):
    hardware = catalogue.load(name)
    notes = hardware.notes
    numbers = {key for key, value in notes.items() if isinstance(value, float)}
    numbers |= {"device_memory", "device_reserve", "host_memory"}
    if hardware.disk_memory:
        numbers.add("disk_memory")
    assert numbers | {"efficiency"} == notes["sources"].keys()
    assert all(len(text) > 20 for text in notes["sources"].values())
    assert "https://" in hardware.source and "assumed by this project" in notes["sources"]["efficiency"]


@pytest.mark.parametrize("name", MACHINES)
def test_the_host_attends_more_slowly_than_the_device(name):
    hardware = catalogue.load(name)
    device, host = hardware.line("attend", "compute"), hardware.line("attend_host", "host_compute")
    assert host.s_per_flop > device.s_per_flop and host.s_per_byte > device.s_per_byte


def test_host_rates_worked_by_hand():
    """KAIST's host: two sockets of eight DDR4-3200 channels; 32 cores with two 512-bit units at 2.9 GHz."""
    notes = catalogue.load("rtx4090").notes
    assert notes["host_memory_bytes_per_s"] == 2 * 8 * 3200e6 * 8
    assert notes["host_peak_flops"] == pytest.approx(32 * 2 * 2 * 16 * 2.9e9)
    infinigen = catalogue.load("rtx-a6000").notes
    assert infinigen["host_memory_bytes_per_s"] == pytest.approx(6 * 2666e6 * 8)
    assert infinigen["host_peak_flops"] == pytest.approx(12 * 2 * 2 * 16 * 3.0e9)


def test_flexgens_disk_reads_2_gb_a_second_and_writes_1():
    t4 = catalogue.load("t4")
    assert t4.line("read_kv", "disk_read").seconds(0, 2e9) == pytest.approx(1.0, rel=1e-3)
    assert t4.line("write_kv", "disk_write").seconds(0, 1e9) == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(InputError, match="'h100' has no line for 'read_kv' nor for 'disk_read'"):
        catalogue.load("h100").line("read_kv", "disk_read")


@pytest.mark.parametrize("name", ["v100", "a100", "", "..", None, 7, 1.5, ["t4"], "x" * 5000])
def test_unknown_machines_list_the_known(name):
    with pytest.raises(InputError) as error:
        catalogue.load(name)
    for known in (*MACHINES, "local"):
        assert known in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_the_nearest_names_come_first():
    with pytest.raises(InputError, match=r"unknown hardware 'a100-40gb'; did you mean a100-40g\b.* known: a100-40g"):
        catalogue.load("a100-40gb")


def test_a_record_of_any_path_loads(tmp_path):
    path = tmp_path / "mine.json"
    catalogue.load("T4").save(path)
    assert catalogue.load(path) == catalogue.load(str(path)) == catalogue.load("t4")
    with pytest.raises(InputError, match="none.json"):
        catalogue.load(tmp_path / "none.json")
    path.write_text(path.read_text().replace('"name": "t4"', '"name": 4'))
    with pytest.raises(InputError, match="mine.json: hardware: name is .*must be text"):
        catalogue.load(path)


def test_local_is_the_newest_profile_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InputError, match=r"no profile in .*cache.*run `flexhybrid profile` once"):
        catalogue.load("local")
    older = Hardware("here", "cpu", {"compute": Line(1e-5)})
    newer = replace(older, name="here too", device="cuda")
    for age, hardware in ((100, older), (50, newer)):
        path = profile_file(hardware.device)
        hardware.save(path)
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "cache" / "hardware-cpu.json.partial").write_text("{")
    assert catalogue.local() == catalogue.load("LOCAL") == newer
    os.utime(profile_file("cpu"), (1e9, 1e9))
    assert catalogue.local() == older
    profile_file("cpu").write_text("{")
    with pytest.raises(InputError, match="hardware-cpu.json: line 1, column 2"):
        catalogue.local()


def test_a_gpu_found_here_brings_its_rates_but_not_the_testbeds_memories():
    assert set(catalogue.GPU_NAMES.values()) == set(catalogue.names())
    assert catalogue.for_gpu("NVIDIA GH200 480GB") is None
    found, testbed = catalogue.for_gpu("Tesla T4"), catalogue.load("t4")
    assert found.host_memory is None and found.disk_memory is None and "disk_read" not in found.lines
    assert found.device_memory == testbed.device_memory and found.lines["compute"] == testbed.lines["compute"]


def test_entries_are_written_as_records_are(tmp_path):
    """A field that the record gains later is in every file, so that a reader sees what is not known."""
    for path in catalogue.FOLDER.glob("*.json"):
        assert json.loads(path.read_text()) == json.loads(catalogue.load(path.stem).to_json())
