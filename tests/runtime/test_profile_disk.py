"""Test a disk's lines in the hardware record: measured, paced, added and carried over."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from experiments.bench import overlap as bench_overlap
from flexhybrid import cli
from flexhybrid.core.errors import InputError
from flexhybrid.core.files import profile_file
from flexhybrid.core.hardware import Hardware, Line, load_hardware
from flexhybrid.core.plan import stream
from flexhybrid.jobs.profile import disk as measure_disk
from flexhybrid.jobs.profile import job as profile_job
from flexhybrid.runtime.profiling import profile_disk
from flexhybrid.runtime.storage.weights import DiskPlace

LINES = {"h2d": Line(s_per_byte=1e-9), "compute": Line(s_per_flop=1e-12)}
RECORD = Hardware(name="local", device="cpu", lines=LINES, notes={"hidden": 64})
MIB = 1 << 20


@pytest.fixture
def small_profile(monkeypatch):
    """Set profiling runs of 2 MiB and two sizes."""
    real = profile_disk.profile_disk
    small = {"space_bytes": 2 * MIB, "sizes": (1 << 14, 1 << 18)}
    monkeypatch.setattr(measure_disk, "profile_disk", lambda directory, rate: real(directory, rate, **small))


def test_samples_of_a_paced_disk_and_of_the_same_without_its_pace(tmp_path):
    """Both directions have samples at every size; a paced call takes at least its bytes' time at the pace."""
    result, description = profile_disk.profile_disk(tmp_path, 0.1, 4 * MIB, (1 << 16, 1 << 20))
    assert set(result.samples) == {f"disk_{way}{suffix}" for way in ("read", "write") for suffix in ("", "_unpaced")}
    for key, samples in result.samples.items():
        assert [(flops, num_bytes) for flops, num_bytes, _ in samples] == [(0, 1 << 16), (0, 1 << 20)]
        if not key.endswith("_unpaced"):
            assert all(seconds >= num_bytes / 0.1e9 for _, num_bytes, seconds in samples)
    assert str(tmp_path) in description and "paced at 0.1 GB/s" in description
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_not_asked_for_larger_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(profile_disk, "SLOW_CALL_S", 0.0)
    result, _ = profile_disk.profile_disk(tmp_path, None, 2 * MIB, (1 << 14, 1 << 18))
    assert {key: len(samples) for key, samples in result.samples.items()} == {"disk_read": 1, "disk_write": 1}


def test_without_direct_reads_the_page_cache_is_emptied_and_writes_reach_the_disk(tmp_path, monkeypatch):
    """The cache is dropped before the reads of every size; every run of writes ends with a flush."""
    steps: list[str] = []
    space = profile_disk.DiskSpace
    monkeypatch.setattr(space, "_direct_reads_work", lambda self: False)
    for name in ("flush", "drop_page_cache", "read", "write"):
        real = getattr(space, name)
        monkeypatch.setattr(space, name, lambda self, *args, _n=name, _r=real: (steps.append(_n), _r(self, *args))[1])
    profile_disk.profile_disk(tmp_path, None, 2 * MIB, (1 << 18,))
    runs = [step for i, step in enumerate(steps) if i == 0 or step != steps[i - 1]]
    assert runs.count("drop_page_cache") == 4  # two passes, two directions
    reads = [place for place, step in enumerate(runs) if step == "read"]
    assert len(reads) == 2 and all(runs[place - 2 : place] == ["drop_page_cache", "flush"] for place in reads)
    writes = [place for place, step in enumerate(runs) if step == "write"]
    assert all(runs[place + 1] == "flush" for place in writes[1:])  # all but the first, which only fills the space


def disk_of(hardware: Hardware) -> tuple[dict, dict, int | None]:
    """Return lines and notes of a record's disk, and its bytes."""
    lines = {key: line for key, line in hardware.lines.items() if "disk" in key}
    return lines, {key: note for key, note in hardware.notes.items() if "disk" in key}, hardware.disk_memory


def test_a_measured_disk_goes_into_the_record_and_stays_there(tmp_path, small_profile):
    disk, _ = measure_disk.measure_disk(DiskPlace(tmp_path, 0.1))
    assert disk.lines["disk_read"].s_per_byte >= 1e-8 and disk.disk_memory > 0
    path = tmp_path / "hardware.json"
    measure_disk.with_disk(RECORD, disk).save(path)
    saved = load_hardware(path)
    assert saved.disk_memory == disk.disk_memory and saved.notes["disk_gb_per_s"] == 0.1 and saved.notes["hidden"] == 64
    assert saved.line("read_weights", "disk_read") == disk.lines["disk_read"]
    assert saved.line("write_kv", "disk_write") == disk.lines["disk_write"]

    again = measure_disk.with_earlier_disk(RECORD, path)  # a new profile, made without a disk
    assert disk_of(again) == disk_of(disk) and again.lines["h2d"] == LINES["h2d"]
    other = Hardware("m", "cpu", {"disk_read": Line(1.0)}, disk_memory=5, notes={"disk": "another"})
    renewed = measure_disk.with_disk(RECORD, other)
    assert measure_disk.with_earlier_disk(renewed, path) is renewed  # its own disk wins
    assert disk_of(measure_disk.with_disk(saved, other)) == disk_of(other)  # nothing of the old one stays


def test_without_an_earlier_record_nothing_is_carried_over(tmp_path):
    assert measure_disk.with_earlier_disk(RECORD, tmp_path / "none.json") is RECORD
    (tmp_path / "broken.json").write_text("{")
    assert measure_disk.with_earlier_disk(RECORD, tmp_path / "broken.json") is RECORD
    RECORD.save(tmp_path / "without.json")
    assert measure_disk.with_earlier_disk(RECORD, tmp_path / "without.json") is RECORD


def test_another_pace_for_a_measured_disk():
    """A pace slower than the disk is kept, a faster one has no effect, and None lifts it. Other lines stay."""
    fast, paced = Line(1e-4, s_per_byte=5e-10), Line(1e-4, s_per_byte=1e-8)
    lines = {**LINES, "disk_read": paced, "disk_read_unpaced": fast, "disk_write": fast, "read_kv": fast}
    hardware = Hardware(name="m", device="cpu", lines=lines)
    slow = hardware.with_disk_rate(0.5).lines
    assert {key: slow[key].s_per_byte for key in slow} == {
        "h2d": 1e-9, "compute": 0, "disk_read": 2e-9, "disk_read_unpaced": 5e-10, "disk_write": 2e-9, "read_kv": 2e-9,
    }  # fmt: skip
    assert hardware.with_disk_rate(100).lines["disk_read"] == fast
    free = hardware.with_disk_rate(None)
    assert free.lines["disk_read"] == fast and free.notes["disk_gb_per_s"] is None
    for rate in (0, -1, "fast", float("nan")):
        with pytest.raises(InputError, match="disk's rate"):
            hardware.with_disk_rate(rate)


def test_the_command_measures_a_folders_disk(tmp_path, monkeypatch, small_profile, capsys):
    """``profile --disk`` shows the disk's lines and keeps them; a profile without --disk does not remove them."""
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))

    fields = {"samples": {}, "disagreements": [], "contention": {}, "after_pause": {}}
    nothing = SimpleNamespace(**fields, faster_dtype=None, attends_in_place=False)
    monkeypatch.setattr(profile_job, "profile", lambda *_, **__: nothing)
    monkeypatch.setattr(profile_job, "fit_hardware", lambda *_, **__: RECORD)
    monkeypatch.setattr(profile_job, "fastest_dtype", lambda shape, device: "float32")
    command = ["profile", "--device", "cpu", "--json"]
    assert cli.main([*command, "--disk", str(tmp_path / "scratch"), "--disk-gb-per-s", "0.2"]) == 0
    shown = {row["key"]: row for row in json.loads(capsys.readouterr().out)["lines"]}
    assert shown["disk_read"]["gb_per_s"] <= 0.2 and "disk_write_unpaced" in shown
    kept = load_hardware(profile_file("cpu"))
    assert kept.notes["disk_gb_per_s"] == 0.2 and str(tmp_path / "scratch") in kept.notes["disk"]
    assert cli.main(command) == 0
    assert load_hardware(profile_file("cpu")).lines == kept.lines
    assert cli.main(["profile", "--device", "cpu", "--disk-gb-per-s", "0.2"]) == 2
    assert "name its folder with --disk" in capsys.readouterr().err
    assert cli.main([*command, "--disk", str(tmp_path), "--disk-gb-per-s", "0"]) == 2
    assert "disk_gb_per_s is 0.0" in capsys.readouterr().err


def test_the_bench_of_overlap_prices_every_task_of_its_cases(tmp_path, small_profile):
    """The record lacks the disk, so the case with weights there has it measured."""
    machine = Hardware("m", "cpu", {key: Line(s_per_byte=1e-9) for key in ("h2d", "d2h", "compute", "host_compute")})
    read = set()
    for case in bench_overlap.cases():
        hardware = bench_overlap.with_its_disk(case, machine, tmp_path)
        for task in stream(bench_overlap.wave_of(case, 2, hardware)):
            assert hardware.line(task.verb, task.resource)
            read |= {case.name} if task.resource == "disk_read" else set()
    assert read == {"weights from a paced disk"}
