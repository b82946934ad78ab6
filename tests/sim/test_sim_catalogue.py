"""Test the catalogue's machines: each number follows from a stated peak and efficiency, which have sources."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from flexhybrid.core.errors import InputError
from flexhybrid.core.files import profile_file
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.jobs.rates import costs
from sim import catalogue
from sim.datasheet import SHARES, load_datasheet


@pytest.mark.parametrize("name", catalogue.names())
def test_every_line_is_a_stated_peak_times_a_stated_share_or_a_stated_rate(name):
    sheet, lines = load_datasheet(catalogue.FOLDER / f"{name}.json"), catalogue.load(name).lines
    shares = SHARES | sheet.shares
    gemm, memory = 1e12 * sheet.tflops * shares["gemm"], 1e9 * sheet.memory_gb_per_s
    link = (1e-5, 0.0, 1e9 * sheet.link_gb_per_s * shares["link"])
    host = 1e9 * sheet.host_memory_gb_per_s
    host = min(host * shares["host_memory"], 0.8 * host - link[2])  # both read the host's memory
    expected = {
        "compute": (1e-5, gemm, memory * shares["memory"]),
        "attend": (1e-5, gemm, memory * shares["attention_memory"]),
        "attend_prefill": (1e-5, gemm, memory * shares["memory"]),
        "h2d": link,
        "d2h": link,
        "host_compute": (2e-5, 0.0, host),
        "attend_host": (2e-5, 1e12 * sheet.host_tflops * shares["host_flops"], host),
        "scatter": (2e-5, 0.0, 20e9),
    }
    if sheet.disk_read_gb_per_s and sheet.disk_write_gb_per_s:
        expected["disk_read"] = (1e-4, 0.0, 1e9 * sheet.disk_read_gb_per_s)
        expected["disk_write"] = (1e-4, 0.0, 1e9 * sheet.disk_write_gb_per_s)
    for key, own in sheet.lines.items():
        before = expected.get(key, expected["d2h" if key == "store_hidden" else "compute"])
        overhead = 1e-6 * own["overhead_us"] if "overhead_us" in own else before[0]
        expected[key] = (overhead, 1e12 * own.get("tflops", 0), 1e9 * own.get("gb_per_s", 0))
    assert lines.keys() == expected.keys()
    for key, (overhead, flops, num_bytes) in expected.items():
        got = lines[key]
        want = overhead, 1 / flops if flops else 0, 1 / num_bytes if num_bytes else 0
        assert (got.overhead_s, got.s_per_flop, got.s_per_byte) == pytest.approx(want), key
        assert got.r2 is None and not got.samples  # nothing was measured here


@pytest.mark.parametrize("name", catalogue.names())
def test_every_number_has_a_source(name):
    sheet = load_datasheet(catalogue.FOLDER / f"{name}.json")
    numbers = {"tflops", "memory_gb_per_s", "link_gb_per_s", "device_memory", "device_reserve", "host_memory"}
    numbers |= {"host_memory_gb_per_s", "host_tflops", "shares", "watts"}
    numbers |= {"disk_memory", "disk_read_gb_per_s", "disk_write_gb_per_s"} if sheet.disk_memory else set()
    numbers |= {"disk_cached_gb_per_s"} if sheet.disk_cached_gb_per_s else set()
    assert numbers == sheet.sources.keys()
    assert all(len(text) > 20 for text in sheet.sources.values()) and len(sheet.source) > 20
    assert "assumed by this project" in sheet.sources["shares"]
    rates = catalogue.load(name).rates
    assert rates["kind"] == "assumed" or rates["kind"] == "fitted" and "%" in rates["held_out"]


@pytest.mark.parametrize("name", catalogue.names())
def test_the_host_attends_more_slowly_than_the_device(name):
    hardware = catalogue.load(name)
    device, host = hardware.line("attend", "compute"), hardware.line("attend_host", "host_compute")
    assert host.at(1e9, 1e9) > device.at(1e9, 1e9)  # an operation a byte: keys and values in FP16


def test_every_machine_says_the_energy_of_a_million_tokens():
    """Power is at its limit: an hour at 100 tokens/s gives 360,000 tokens and takes 0.07 kWh on a T4."""
    for name in catalogue.names():
        found = costs(catalogue.load(name), 100.0)
        assert 0.05 < found["kwh_per_million_tokens"] < 3 and "dollars_per_million_tokens" not in found
    assert costs(catalogue.load("t4"), 100.0)["kwh_per_million_tokens"] == pytest.approx(0.07 / 0.36)


def test_host_rates_worked_by_hand():
    """KAIST's host has two sockets of eight DDR4-3200 channels, and 32 cores with two 512-bit units at 2.9 GHz."""
    notes = catalogue.load("rtx4090").notes
    assert notes["host_memory_bytes_per_s"] == 2 * 8 * 3200e6 * 8
    assert notes["host_peak_flops"] == pytest.approx(32 * 2 * 2 * 16 * 2.9e9)
    infinigen = catalogue.load("rtx-a6000").notes
    assert infinigen["host_memory_bytes_per_s"] == pytest.approx(6 * 2666e6 * 8)
    assert infinigen["host_peak_flops"] == pytest.approx(12 * 2 * 2 * 16 * 3.0e9)


def test_flexgens_disk_reads_2_gb_a_second_and_writes_1():
    t4 = catalogue.load("t4")
    assert (t4.name, t4.device, t4.notes["link_bytes_per_s"]) == ("t4", "cuda", 15.75e9)
    assert (t4.device_memory, t4.host_memory, t4.disk_memory) == (16 * 2**30, 208 * 2**30, 1500 * 10**9)
    assert t4.line("read_kv", "disk_read").at(0, 2e9) == pytest.approx(1.0, rel=1e-3)
    assert t4.line("write_kv", "disk_write").at(0, 1e9) == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(InputError, match="'rtx4090' has no line for 'read_kv' nor for 'disk_read'"):
        catalogue.load("rtx4090").line("read_kv", "disk_read")


@pytest.mark.parametrize("name", ["v100", "a100", "", "..", None, 7, 1.5, ["t4"], "x" * 5000])
def test_unknown_machines_list_the_known(name):
    with pytest.raises(InputError) as error:
        catalogue.load(name)
    for known in (*catalogue.names(), "local"):
        assert known in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 440


def test_the_nearest_names_come_first():
    with pytest.raises(InputError, match=r"unknown hardware 'a100-40gb'; did you mean a100-40g\b.* known: a10"):
        catalogue.load("a100-40gb")


def test_a_record_of_any_path_loads(tmp_path):
    path = tmp_path / "mine.json"
    catalogue.load("T4").save(path)
    assert catalogue.load(path) == catalogue.load(str(path)) == catalogue.load("t4")
    with pytest.raises(InputError, match="none.json"):
        catalogue.load(tmp_path / "none.json")
    path.write_text(path.read_text().replace('"name": "t4"', '"name": 4', 1))
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
    assert set(catalogue.GPU_NAMES.values()) <= set(catalogue.names())
    assert catalogue.for_gpu("NVIDIA GH200 480GB") is None
    found, testbed = catalogue.for_gpu("Tesla T4"), catalogue.load("t4")
    assert found is not None
    assert found.host_memory is None and found.disk_memory is None and "disk_read" not in found.lines
    assert found.device_memory == testbed.device_memory and found.lines["compute"] == testbed.lines["compute"]


def test_entries_are_written_as_datasheets_are():
    for path in catalogue.FOLDER.glob("*.json"):
        assert path.read_text() == load_datasheet(path).to_json() + "\n"
