"""Test ``flexhybrid hardware`` (machines listed, shown and written), rates on the command line, and their sources."""

import csv
import json
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest

from flexhybrid import cli
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import CACHED_DISK, crosses_link, resource_of_line
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.jobs.rates import with_given_rates
from policy_search.systems import Setting, run_system
from sim import catalogue
from sim.datasheet import SHARES, Datasheet, load_datasheet

PEAKS = ["--tflops", "71", "--memory-gb-per-s", "936", "--link-gb-per-s", "31.5", "--device-memory", "24GiB"]
RUN = ["--model", "opt-6.7b", "--batch", "8", "--input-len", "64", "--output-len", "8"]


def test_the_catalogue_is_listed_and_shown(capsys, as_json):
    assert [row["name"] for row in as_json("hardware")["machines"]] == catalogue.names()
    assert cli.main(["hardware", "T4"]) == 0
    said = capsys.readouterr().out
    assert "65 TFLOP/s" in said and "rates of t4" in said and "Google Cloud" in said


def test_a_machine_is_written_from_a_datasheet(tmp_path, capsys, as_json):
    """The file's numbers count, also after an edit by hand."""
    path = str(tmp_path / "mine.json")
    written = as_json("hardware", *PEAKS, "--gemm-share", "0.5", "--out", path)
    assert written["path"] == path and written["tflops"] == 71
    mine = catalogue.load(path)
    assert mine.name == "mine" and mine.device_memory == 24 * 2**30 and mine.host_memory is None
    assert mine.line("project", "compute").s_per_flop == pytest.approx(1 / 35.5e12)
    assert mine.line("load_kv", "h2d").s_per_byte == pytest.approx(1 / (0.8 * 31.5e9))
    Path(path).write_text(Path(path).read_text().replace('"tflops": 71.0', '"tflops": 142.0'))
    assert catalogue.load(path).line("project", "compute").s_per_flop == pytest.approx(1 / 71e12)
    as_json("hardware", "--like", path, "--link-gb-per-s", "63", "--out", str(tmp_path / "faster.json"))
    faster = catalogue.load(tmp_path / "faster.json")
    assert faster.line("load_kv", "h2d").s_per_byte == pytest.approx(1 / (0.8 * 63e9))
    assert faster.lines["compute"] == catalogue.load(path).lines["compute"]
    again = ["hardware", "--like", "t4", "--out", path]
    assert cli.main(again) == 2 and "overwrite it with --overwrite" in capsys.readouterr().err
    assert json.loads(Path(path).read_text())["tflops"] == 142
    assert cli.main([*again, "--overwrite"]) == 0 and json.loads(Path(path).read_text())["tflops"] == 65


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--tflops", "71"], "--tflops describes a machine to write: name its file with --out"),
        (["--like", "t4"], "--like describes a machine to write"),
        (["--tflops", "71", "--out", "OUT"], "a machine needs --memory-gb-per-s, --link-gb-per-s, --device-memory"),
        (["t4", "--out", "OUT"], "use --like t4"),
        ([*PEAKS, "--gemm-share", "1.5", "--out", "OUT"], "the share gemm is 1.5; it must be a share"),
        ([*PEAKS, "--disk-memory", "1TB", "--out", "OUT"], "a disk has disk_memory, disk_read_gb_per_s"),
        (["--like", "t4", "--tflops", "-1", "--out", "OUT"], "tflops is -1.0; it must be a number above 0"),
        (["--like", "t5", "--out", "OUT"], "unknown hardware 't5'"),
        (["--like", "t4", "--out", "y.txt"], "--out y.txt: a machine is a .json file, not .txt"),
        (["t5"], "unknown hardware 't5'"),
    ],
)
def test_wrong_machines_are_refused(arguments, words, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert cli.main(["hardware", *[str(out) if text == "OUT" else text for text in arguments]]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and not out.exists()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"tflop": 3}, "unknown field 'tflop'; did you mean tflops"),
        ({"tflops": None}, "tflops is None; it must be a number above 0"),
        ({"tflops": "71"}, "tflops is '71'; it must be a number above 0"),
        ({"device_memory": "much"}, "memory size 'much' is not understood"),
        ({"shares": {"gem": 0.5}}, "did you mean gemm"),
        ({"lines": {"kv_generation": {"tflops": 3}}}, "neither a resource nor a verb"),
        ({"lines": {"kv_gen": {"tflops": 0}}}, "it must be a number above 0"),
        ({"rates": {"kind": "guessed"}}, "did you mean"),
        ({"format": None}, "it lacks"),
        ({"tflops": ...}, "the field 'tflops' is missing"),
    ],
)
def test_a_broken_datasheet_names_file_and_field(change, words, tmp_path):
    data = json.loads((catalogue.FOLDER / "t4.json").read_text()) | change
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))
    assert cli.main(["hardware", str(path)]) == 2
    with pytest.raises(ValueError, match=r"mine\.json") as error:
        catalogue.load(path)
    assert words in str(error.value) or words == "did you mean"


def test_an_answer_has_its_inputs_and_the_source_of_its_rates(capsys, as_json):
    plain = as_json("simulate", "--hardware", "t4", *RUN)
    assert plain["inputs"] == {"system": "capture", "model": "opt-6.7b", "hardware": "t4", "batch": 8, "prompt_len": 64,
                               "gen_len": 8, "clock": "closed"}  # fmt: skip
    assert plain["rates"]["kind"] == catalogue.load("t4").rates["kind"]
    assert cli.main(["simulate", "--hardware", "t4", *RUN]) == 0
    assert "rates of t4: " in capsys.readouterr().out
    found = as_json("search", "--hardware", "l4", *RUN, "--lossless", "--link-gb-per-s", "9")
    assert found["inputs"]["lossless"] and found["rates"] == {
        "hardware": "l4", "kind": "assumed", "on": "shares of datasheet peaks", "given": {"link_gb_per_s": 9.0}
    }  # fmt: skip


def test_rates_and_memories_are_set_on_the_command_line(as_json):
    def run(*arguments):
        return as_json("simulate", "--system", "kv_only", "--hardware", "l4", *RUN, *arguments)

    base, slow = run("--link-gb-per-s", "20"), run("--link-gb-per-s", "10")
    assert slow["decode_s"] == pytest.approx(2 * base["decode_s"], rel=0.05)
    assert run("--gemm-tflops", "1")["prefill_s"] > 2 * run("--gemm-tflops", "100")["prefill_s"]
    assert run("--host-memory", "20GiB")["inputs"]["host_memory"] == 20 * 2**30


def test_the_share_of_a_rate_that_copies_reach_is_reported(capsys):
    assert cli.main(["simulate", "--system", "kv_only", *RUN, "--hardware", "l4", "--link-gb-per-s", "9"]) == 0
    assert "but --link-gb-per-s 9 (of which copies reach 7.2)" in capsys.readouterr().out


def counted(machine) -> tuple:
    """Return the parts of a machine that predictions use."""
    memories = machine.device_memory, machine.device_reserve, machine.host_memory, machine.disk_memory
    return machine.lines, memories, machine.notes["watts"], machine.notes.get(CACHED_DISK)


def numbers_of(value, *place):
    """Yield the places of numbers and sizes in a file."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers_of(inner, *place, key)
    elif isinstance(value, float) or place[-1].endswith(("_memory", "_reserve")):
        yield place


@pytest.mark.parametrize(
    "name", ["l4", "a6000-infinigen", "rtx4090-capture", "rtx5000-kvpr", "a100-kvpr", "t4-flexgen"]
)
def test_no_number_of_a_file_is_ignored(name, tmp_path):
    """Each edited number changes the machine. Without the field that lines replace, the file is refused."""
    text, path, own = (catalogue.FOLDER / f"{name}.json").read_text(), tmp_path / "mine.json", catalogue.load(name)
    without_texts = {key: value for key, value in json.loads(text).items() if key not in ("sources", "published_fit")}
    for *where, last in numbers_of(without_texts):
        data = json.loads(text)
        inner = reduce(dict.__getitem__, where, data)
        inner[last] = inner[last] / 2 if isinstance(inner[last], float) else "2GB"
        path.write_text(json.dumps(data))
        if inner[last]:
            assert counted(catalogue.load(path)) != counted(own), (where, last)
    if own.rates["kind"] == "fitted":
        data = json.loads(text)
        del data["in_place_of"]
        path.write_text(json.dumps(data))
        with pytest.raises(InputError, match=r"has \w+ [\d.]+, but peaks and shares give [\d.]+: remove it"):
            catalogue.load(path)


def test_fitted_lines_change_with_their_peaks(tmp_path):
    """With half of the link's rate all copies take twice as long; with 10 % of the tensor cores products take ten
    times."""
    own, path = catalogue.load("a100-kvpr"), tmp_path / "mine.json"
    data = json.loads((catalogue.FOLDER / "a100-kvpr.json").read_text())
    path.write_text(json.dumps(data | {"link_gb_per_s": 15.75, "tflops": 31.2}))
    for key, line in catalogue.load(path).lines.items():
        assert line.s_per_byte == pytest.approx((2 if crosses_link(key) else 1) * own.lines[key].s_per_byte)
        assert key == "attend_host" or line.s_per_flop == pytest.approx(10 * own.lines[key].s_per_flop)


@pytest.mark.parametrize(
    "like, flags, same",
    [
        ("l4", ["--link-gb-per-s", "9"], None),
        ("rtx4090-capture", ["--link-gb-per-s", "9"], None),
        ("rtx5000-kvpr", ["--link-gb-per-s", "31.5"], None),
        ("a100-kvpr", ["--host-memory", "100GiB"], None),
        ("t4-flexgen", ["--disk-read-gb-per-s", "1", "--disk-write-gb-per-s", "1"], ["--disk-gb-per-s", "1"]),
    ],
)
def test_a_number_means_the_same_in_a_file_and_as_a_flag(like, flags, same, tmp_path, as_json):
    as_json("hardware", "--like", like, *flags, "--out", str(tmp_path / "mine.json"))
    policy = tmp_path / "policy.json"
    disk = like == "t4-flexgen"
    policy.write_text(Policy("x", cache={"kv@disk" if disk else "kv@host": 1.0}).to_json())
    run = ["simulate", "--policy", str(policy), *RUN]
    of_file = as_json(*run, "--hardware", str(tmp_path / "mine.json"))
    of_flag = as_json(*run, "--hardware", like, *(same or flags))
    assert of_flag["tokens_per_s"] == pytest.approx(of_file["tokens_per_s"], rel=1e-9)


def test_cards_are_compared_beside_one_host(tmp_path):
    """The host's lines depend on the card only by its link, which reads the same memory as attention on the host; the
    card's lines do not depend on the host."""
    own, other = (catalogue.load(name, "desktop-128g") for name in ("t4-flexgen", "rtx5090"))
    hosts = {key for key in own.lines if resource_of_line(key) not in ("compute", "h2d", "d2h")}
    assert (
        {"attend_host", "scatter", "disk_read", "disk_write"}
        <= hosts
        == {key for key in other.lines if resource_of_line(key) not in ("compute", "h2d", "d2h")}
    )
    reads = {"attend_host", "host_compute"}
    assert all(own.lines[key] == other.lines[key] for key in hosts - reads)
    for key in reads:
        assert own.lines[key].s_per_byte == pytest.approx(1 / (SHARES["host_memory"] * 89.6e9))
        assert other.lines[key].s_per_byte == pytest.approx(1e-9 / (0.8 * 89.6 - 0.8 * 63.0))
    assert own.host_memory == other.host_memory == 128 * 2**30 and own.disk_memory == other.disk_memory
    alone = catalogue.load("t4-flexgen")
    assert {k: v for k, v in own.lines.items() if k not in hosts} == {
        k: v for k, v in alone.lines.items() if k in own.lines and k not in hosts
    }
    own.save(tmp_path / "measured.json")
    with pytest.raises(InputError, match="measured with its own host"):
        catalogue.load(tmp_path / "measured.json", "desktop-128g")
    with pytest.raises(InputError, match="did you mean desktop-64g"):
        catalogue.load("t4", "dsktop-64g")


RTX4090 = load_datasheet(catalogue.FOLDER / "rtx4090.json")


def run_on(sheet: Datasheet, system: str, clock: str = "closed", **changes):
    problem = Problem(shape=shape_by_name("opt-125m"), hardware=replace(sheet, **changes).hardware())
    return run_system(system, Setting(problem, 8, 64, 4), clock)


@pytest.mark.parametrize("clock", ["closed", "virtual"])
def test_memory_of_the_far_node_is_a_slower_link(clock):
    """Half of the bytes are on the far node, at a third of the rate: a byte takes (1 + 3) / 2 times as long."""
    plain = run_on(RTX4090, "kv_only", clock)
    nodes = {"host_near_memory": str(plain.peak_bytes["host"] // 2), "host_far_share": 1 / 3}
    slower = run_on(RTX4090, "kv_only", clock, link_gb_per_s=RTX4090.link_gb_per_s / 2)
    assert slower.total_s > 1.5 * plain.total_s
    assert run_on(RTX4090, "kv_only", clock, **nodes).total_s == pytest.approx(slower.total_s)
    assert run_on(RTX4090, "resident", clock, **nodes).total_s == run_on(RTX4090, "resident", clock).total_s
    with pytest.raises(InputError, match="host_near_memory and host_far_share"):
        replace(RTX4090, host_near_memory="1GiB")


@pytest.mark.parametrize("clock", ["closed", "virtual"])
def test_cached_pages_are_read_faster_only_through_the_page_cache(clock):
    """Half of the weights fit the free host memory: half of the bytes come eight times as fast."""
    disk = replace(RTX4090, disk_memory="1TB", disk_read_gb_per_s=1.0, disk_write_gb_per_s=1.0)
    weights = "accelerate(weights_disk=1)"
    peaks = run_on(disk, weights, clock).peak_bytes
    half = str(peaks["host"] + peaks["disk"] // 2)
    faster = run_on(disk, weights, clock, disk_read_gb_per_s=1 / (0.5 + 0.5 / 8))
    cached = run_on(disk, weights, clock, disk_cached_gb_per_s=8.0, host_memory=half)
    assert cached.total_s == pytest.approx(faster.total_s)
    for direct in ("offloaded(weights_disk=1, weights_device=0)", "deepspeed(weights_disk=1)"):
        assert run_on(disk, direct, clock, disk_cached_gb_per_s=8.0).total_s == run_on(disk, direct, clock).total_s


def test_a_hosts_memory_of_another_peak(as_json):
    own = catalogue.load("l4")
    slower = with_given_rates(own, {"host_memory_gb_per_s": own.notes["host_memory_bytes_per_s"] / 2e9})
    assert slower.lines["attend_host"].s_per_byte == pytest.approx(2 * own.lines["attend_host"].s_per_byte)
    assert slower.lines["scatter"] == own.lines["scatter"] and slower.lines["h2d"] == own.lines["h2d"]
    run = ["simulate", "--system", "fastdecode", "--hardware", "l4", *RUN]
    assert as_json(*run, "--host-memory-gb-per-s", "20")["tokens_per_s"] < as_json(*run)["tokens_per_s"]
    found = as_json(*run, "--host", "server-1t")
    assert found["inputs"]["host"] == "server-1t" and found["rates"]["host"] == "server-1t"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--policy", "here.json", "--system", "kv_only"], "give one of them"),
        (["--link-gb-per-s", "0"], "--link-gb-per-s is 0.0; it must be a number above 0"),
        (["--gemm-tflops", "nan"], "--gemm-tflops is nan; it must be a number above 0"),
        (["--disk-memory", "1TB"], "rtx4090 has no disk; give its rate too, --disk-gb-per-s"),
        (["--disk-gb-per-s", "2"], "rtx4090 has no disk; give its size too, --disk-memory"),
    ],
)
def test_flags_that_contradict_are_refused(arguments, words, capsys):
    assert cli.main(["simulate", "--hardware", "rtx4090", *RUN, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_sweep_has_the_source_of_its_rates(tmp_path):
    (tmp_path / "grid.json").write_text(
        '{"system": "kv_only", "model": "opt-6.7b", "hardware": ["t4-flexgen", "l4"], "batch": 1, "prompt_len": 8, '
        '"gen_len": 2}'
    )
    assert cli.main(["sweep", str(tmp_path / "grid.json"), "--workers", "1", "--quiet"]) == 0
    rows = list(csv.DictReader((tmp_path / "grid.csv").read_text().splitlines()))
    assert [row["rates"] for row in rows] == ["fitted", "assumed"]
