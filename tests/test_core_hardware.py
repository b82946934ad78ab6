"""The hardware record: exact on disk, strict when read."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, Line, load_hardware

NUMBER = st.floats(0, 1e6)
SAMPLES = st.lists(st.tuples(NUMBER, NUMBER, NUMBER)).map(tuple)
LINES = st.builds(Line, NUMBER, NUMBER, NUMBER, r2=st.none() | st.floats(0, 1), samples=SAMPLES)


def small_hardware() -> Hardware:
    lines = {"compute": Line(1e-5, 1e-11, 1e-10), "h2d": Line(2e-5, s_per_byte=1e-9), "d2h": Line(s_per_byte=2e-9)}
    return Hardware("test", "cpu", {**lines, "kv_gen": Line(3e-5, 2e-11)})


@given(
    st.dictionaries(st.sampled_from(["compute", "h2d", "kv_gen"]), LINES, min_size=1), st.none() | st.integers(1, 2**40)
)
def test_a_saved_record_is_read_back_exactly(tmp_path_factory, lines, memory):
    path = tmp_path_factory.mktemp("hardware") / "folder" / "machine.json"
    hardware = Hardware("µ", "cuda", lines, memory, source="datasheet", faster_dtype="bfloat16", notes={"a": [1]})
    hardware.save(path)
    assert load_hardware(path) == hardware
    assert [file.name for file in path.parent.iterdir()] == ["machine.json"]  # no partial file left


def test_line_is_overhead_plus_flops_plus_bytes():
    line = Line(0.5, 0.25, 0.125)
    assert line.seconds(2, 4) == 0.5 + 0.5 + 0.5
    assert line.seconds(np.array([0, 4]), np.array([8, 0])).tolist() == [1.5, 1.5]


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "1", None])
@pytest.mark.parametrize("name", ["overhead_s", "s_per_flop", "s_per_byte"])
def test_a_line_refuses_what_is_no_cost(name, value):
    with pytest.raises(InputError, match=name):
        Line(**{name: value})


def test_a_verb_without_its_own_line_takes_its_resources():
    hardware = small_hardware()
    assert hardware.line("kv_gen", "compute") is hardware.lines["kv_gen"]
    assert hardware.line("attend", "compute") is hardware.lines["compute"]
    with pytest.raises(InputError, match="'scatter'.*'host_compute'"):
        hardware.line("scatter", "host_compute")


def test_another_link_rate_changes_the_links_alone():
    before = small_hardware()
    after = before.with_link_rate(0.4)
    for key in ("h2d", "d2h"):
        assert after.lines[key].s_per_byte == pytest.approx(1 / 0.4e9)
        assert after.lines[key].overhead_s == before.lines[key].overhead_s
    assert after.lines["compute"] == before.lines["compute"]
    assert before == small_hardware()


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda data: data.pop("format"), ["format"]),
        (lambda data: data.update(format="flexhybrid-hardware-9"), ["format"]),
        (lambda data: data.update(memory=3), ["'memory'"]),
        (lambda data: data.pop("device"), ["device"]),
        (lambda data: data.pop("lines"), ["lines"]),
        (lambda data: data.update(lines=[1]), []),
        (lambda data: data["lines"]["h2d"].update(gb_per_s=3), ["gb_per_s"]),
        (lambda data: data["lines"]["h2d"].update(s_per_byte=-1), ["s_per_byte", "-1"]),
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
    for content in (b"{", b"[]", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="machine.json"):
            load_hardware(path)
