"""Test hardware records: exact on disk, strict when read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexhybrid.core.errors import InputError, unknown
from flexhybrid.core.files import cache_folder, newest_profile, profile_file
from flexhybrid.core.hardware import Hardware, Line, load_hardware

NUMBER = st.floats(0, 1e6)
SAMPLES = st.lists(st.tuples(NUMBER, NUMBER, NUMBER)).map(tuple)
LINES = st.builds(Line, NUMBER, NUMBER, NUMBER, r2=st.none() | st.floats(0, 1), samples=SAMPLES)


def small_hardware() -> Hardware:
    lines = {"compute": Line(1e-5, 1e-11, 1e-10), "h2d": Line(2e-5, s_per_byte=1e-9), "d2h": Line(s_per_byte=2e-9)}
    lines["disk_read"] = Line(1e-4, 0.0, 5e-10)
    return Hardware("test", "cpu", {**lines, "kv_gen": Line(3e-5, 2e-11)})


@given(
    st.dictionaries(st.sampled_from(["compute", "h2d", "kv_gen"]), LINES, min_size=1), st.none() | st.integers(1, 2**40)
)
def test_a_saved_record_is_read_back_exactly(tmp_path_factory, lines, memory):
    path = tmp_path_factory.mktemp("hardware") / "folder" / "machine.json"
    more = dict(source="datasheet", faster_dtype="bfloat16", notes={"a": [1]})
    hardware = Hardware("µ", "cuda", lines, memory, host_memory=2**38, disk_memory=memory, **more)
    hardware.save(path)
    assert load_hardware(path) == hardware
    assert [file.name for file in path.parent.iterdir()] == ["machine.json"]  # no partial file left


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), pytest.param(10**400, id="huge"), "1", None, True])
@pytest.mark.parametrize("name", ["overhead_s", "s_per_flop", "s_per_byte"])
def test_a_line_refuses_values_that_are_no_cost(name, value):
    with pytest.raises(InputError, match=name):
        Line(**{name: value})


def test_a_verb_without_its_own_line_takes_its_resources():
    hardware = small_hardware()
    assert hardware.line("kv_gen", "compute") is hardware.lines["kv_gen"]
    assert hardware.line("attend", "compute") is hardware.lines["compute"]
    with pytest.raises(InputError, match="'scatter'.*'host_compute'"):
        hardware.line("scatter", "host_compute")


def test_a_verb_borrows_the_line_of_the_same_kernel_or_loop():
    lines = {key: Line(float(number)) for number, key in enumerate(("compute", "attend", "host_compute", "scatter"))}
    hardware = Hardware("x", "cuda", lines)
    for verb, resource, key in (
        ("attend_prefill", "compute", "attend"),
        ("attend_recomputed", "compute", "attend"),
        ("gather", "host_compute", "scatter"),
        ("attend_host", "host_compute", "host_compute"),  # not the device's "attend"
    ):
        assert hardware.line(verb, resource) is lines[key]


@pytest.mark.parametrize("field", ["device_memory", "host_memory", "disk_memory"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "8GiB", True, [1]])
def test_a_memory_is_a_positive_number_of_bytes_or_unknown(field, value):
    assert getattr(replace(small_hardware(), **{field: None}), field) is None
    with pytest.raises(InputError, match=f"{field} is .*; it must be a number of bytes > 0"):
        replace(small_hardware(), **{field: value})


def test_another_link_rate_changes_the_links_alone():
    before = small_hardware()
    after = before.with_link_rate(0.4)
    for key in ("h2d", "d2h"):
        assert after.lines[key].s_per_byte == pytest.approx(1 / 0.4e9)
        assert after.lines[key].overhead_s == before.lines[key].overhead_s
    assert all(after.lines[key] == before.lines[key] for key in ("compute", "disk_read"))
    assert before == small_hardware()
    for rate in (0, -1, float("nan"), float("inf"), "1"):
        with pytest.raises(InputError, match="link's rate is .*; it must be a number > 0"):
            before.with_link_rate(rate)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda data: data.pop("format"), ["format"]),
        (lambda data: data.update(format="flexhybrid-hardware-9"), ["format"]),
        (lambda data: data.update(memory=3), ["'memory'"]),
        (lambda data: data.pop("device"), ["field 'device' is missing"]),
        (lambda data: data.pop("lines"), ["field 'lines' is missing"]),
        (lambda data: data.update(device="tpu"), ["device is 'tpu'", "cpu, cuda"]),
        (lambda data: data.update(lines=[1]), ["lines", "[1]"]),
        (lambda data: data.update(lines={}), ["no lines"]),
        (lambda data: data.update(notes=[1]), ["notes", "[1]"]),
        (lambda data: data.update(disk_memory=0), ["disk_memory", "0"]),
        (lambda data: data.update(host_memory="96 GB"), ["host_memory", "96 GB"]),
        (lambda data: data["lines"].update(kv_gen=3), ["line 'kv_gen'", "3"]),
        (lambda data: data["lines"]["h2d"].update(gb_per_s=3), ["line 'h2d'", "gb_per_s", "s_per_byte"]),
        (lambda data: data["lines"]["h2d"].update(s_per_byte=-1), ["line 'h2d'", "s_per_byte", "-1"]),
        (lambda data: data["lines"]["h2d"].update(r2="good"), ["line 'h2d'", "r2", "good"]),
        (lambda data: data["lines"]["h2d"].update(samples=3), ["line 'h2d'", "samples", "3"]),
        (lambda data: data["lines"]["h2d"].update(samples=[[1, 2]]), ["line 'h2d'", "sample", "[1, 2]"]),
    ],
)
def test_errors_name_the_file_and_the_field(tmp_path, spoil, words):
    data = json.loads(small_hardware().to_json())
    spoil(data)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(data))
    with pytest.raises(InputError) as error:
        load_hardware(path)
    for word in ["machine.json", *words]:
        assert word in str(error.value)


def test_missing_and_broken_files(tmp_path):
    path = tmp_path / "machine.json"
    with pytest.raises(InputError, match="machine.json"):
        load_hardware(path)
    for content in (b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="machine.json"):
            load_hardware(path)


# --- this machine's profiles ------------------------------------------------------------------------------------------


def test_the_cache_folder_is_the_users(tmp_path, monkeypatch):
    monkeypatch.delenv("FLEXHYBRID_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "flexhybrid"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "flexhybrid"
    monkeypatch.setenv("FLEXHYBRID_CACHE", "~/profiles")
    assert cache_folder() == tmp_path / "profiles"
    assert profile_file("cuda") == tmp_path / "profiles" / "hardware-cuda.json"
    assert newest_profile() is None


def test_without_a_home_the_error_says_what_to_set(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("FLEXHYBRID_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(InputError, match="FLEXHYBRID_CACHE"):
        cache_folder()


# --- unknown names ----------------------------------------------------------------------------------------------------


def test_an_unknown_name_is_refused_with_the_nearest_known_ones():
    known = ("opt-30b", "llama-2-7b", "opt-1.3b")
    assert str(unknown("model", "opt-31b", known)) == (
        "unknown model 'opt-31b'; did you mean opt-30b or opt-1.3b? known: opt-30b, llama-2-7b, opt-1.3b"
    )
    assert str(unknown("preset", "KV-Only", ["kv_only"])) == (
        "unknown preset 'KV-Only'; did you mean kv_only? known: kv_only"
    )
    assert str(unknown("system", "xyz", iter(["a", "b"]), other="a file")) == (
        "unknown system 'xyz'; known: a, b, or a file"
    )
    assert str(unknown("system", "", [])) == "unknown system ''; known: none"


@pytest.mark.parametrize(
    "device, memory, reserve, usable",
    [
        ("cuda", 24 * 2**30, None, 23 * 2**30),  # the driver's and the context's gibibyte
        ("cuda", 8 * 2**30, None, 8 * 2**30 * 15 // 16),
        ("cuda", 24 * 2**30, 0, 24 * 2**30),
        ("cuda", 24 * 2**30, 3 * 2**30, 21 * 2**30),
        ("cpu", 24 * 2**30, None, 24 * 2**30),
        ("cuda", None, None, None),
    ],
)
def test_a_run_may_fill_the_device_but_for_its_reserve(device, memory, reserve, usable):
    lines = small_hardware().lines
    hardware = Hardware("x", device, lines, memory, 2**40, device_reserve=reserve)
    assert hardware.usable_memory("device") == usable
    assert hardware.usable_memory("host") == 2**40 and hardware.usable_memory("disk") is None


@pytest.mark.parametrize("reserve", [-1, "1GiB", 2**30])
def test_a_reserve_is_a_part_of_the_memory(reserve):
    with pytest.raises(InputError, match="device_reserve"):
        Hardware("x", "cuda", small_hardware().lines, 2**30, device_reserve=reserve)
