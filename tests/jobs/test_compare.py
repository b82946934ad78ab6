"""Test `flexhybrid compare` at a small size: every step, every file and every column."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from forced_machine import DTYPES, FASTER_DTYPE
from matplotlib import pyplot as plt
from random_cases import random_case

from figures import compare as draw
from flexhybrid.arguments import split_names
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, Line, load_hardware
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.trace import busy_seconds, iteration_ends
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare import job
from flexhybrid.jobs.compare.breakdown import CARGO, KINDS, bytes_per_step, kind_of, seconds_per_step
from flexhybrid.jobs.compare.job import compare
from flexhybrid.jobs.compare.predicted import closed_decode, virtual_decode
from flexhybrid.jobs.compare.report import Report, speed_line, verdict
from flexhybrid.jobs.compare.setting import LEAST_TOKENS, SIZES, TABLE_SECONDS, CompareOptions, settle
from flexhybrid.jobs.compare.speed import LAST, Bench, PolicyRun
from flexhybrid.resolve import PacedDevice
from flexhybrid.runtime.links import CpuCopies
from flexhybrid.runtime.profiling import profile
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import DiskPlace, Weights
from sim import virtual_clock
from sim.array_clock import predict
from sim.candidates import candidates_of
from sim.correction import TRIALS
from sim.presets import hybrid, kv_only

SMALL = ModelShape("small", "opt", 2, 64, 2, 2, 32, 128, 200, 600)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run the whole job on a machine that multiplies float32 faster; ``systems_run`` covers the other dtype."""
    folder = tmp_path_factory.mktemp("compare")
    policy = folder / "mine.json"
    placement = Placement(device=0.4, host=0.6)
    policy.write_text(Policy("mine", placement, cache={"act@host": 0.3, "kv@host": 0.7}).to_json())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXHYBRID_CACHE", str(folder / "cache"))
        patch.setenv(FASTER_DTYPE, "float32")
        patch.setattr(profile, "DECODE_SECONDS", 0.0)  # what the lines say is not what this is about
        patch.setattr(profile, "LINK_SECONDS", 0.0)
        patch.setattr(profile, "num_passes", lambda device: 1)
        patch.setattr(profile, "CPU_SECONDS", 0.0)
        patch.setattr(profile, "LAUNCHED_SHAPE", replace(profile.LAUNCHED_SHAPE, num_layers=4))
        patch.setattr(profile.gc, "collect", lambda: 0)  # what a run leaves is small
        torch.set_num_threads(1)
        short = replace(SMALL, max_positions=100)  # which cuts the contexts of the profile
        result = compare(
            CompareOptions(
                device="cpu", link_gb_per_s=0.5, shape=short, batch=4, prompt_len=48, gen_len=4, mini_batch=2, rounds=2,
                exact_tokens=3, exact_prompts=4, policy=policy, out=folder / "out",
            ),
        )  # fmt: skip
    return folder, result


def test_every_policy_is_exact_and_measured(run):
    _, result = run
    assert result["dtype"] == "float32"
    assert all(row["exact"] for row in result["exactness"])
    assert [row["policy"] for row in result["speed"]] == ["kv_only", "act_only", "hybrid_static", "hybrid", "mine"]
    assert [row["act_share"] for row in result["sweep"]] == [i / 8 for i in range(9)]
    for row in result["speed"]:
        assert row["measured_tokens_per_s"] > 0 and len(row["measured_rounds"]) == 2
        assert row["closed_form_tokens_per_s"] > 0 and row["virtual_clock_tokens_per_s"] > 0
        assert row["overlap"] > 0 and 0 < row["busy_h2d"] <= 1.01 and 0 < row["busy_compute"] <= 1.01
    assert result["trace_violations"] == []
    assert result["completions"], "the text of a few completions is part of the job"


def test_trials_correct_the_record_that_is_kept(run):
    folder, result = run
    trials = result["trials"]
    assert 1 <= trials["rounds"] <= 3 and trials["told"] and {"kv_gen", "load_kv"} <= set(trials["lines"])
    kept, profiled = load_hardware(folder / "out" / "hardware-cpu.json"), result["speed"][0]
    assert kept.notes[TRIALS] == {name: trials[name] for name in ("lines", "waiting")}
    assert profiled["virtual_clock_before_trials_tokens_per_s"] > 0
    assert "before trials" in speed_line(profiled)


def test_act_moves_fewer_bytes_than_kv(run):
    """With multi-head attention, ACT of a token is half the size of its KV. The bytes include the weights."""
    _, result = run
    by_name = {row["policy"]: row["h2d_bytes_per_iteration"] for row in result["speed"]}
    assert by_name["act_only"] < by_name["hybrid_static"] < by_name["kv_only"]


def test_files_are_written_and_agree(run):
    folder, result = run
    out = folder / "out"
    written = json.loads((out / "compare.json").read_text())
    assert written["speed"] == result["speed"]
    assert len(pd.read_csv(out / "sweep.csv")) == 9 and len(pd.read_csv(out / "exactness.csv")) == 7
    for picture in ("throughput.png", "timeline.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    trace = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in trace if e["name"] == "process_name"} == {"predicted", "measured"}
    assert not (folder / "cache").exists(), "lines of a tiny model must not become the machine's"
    kept = load_hardware(out / "hardware-cpu.json")
    assert kept.host_memory and kept.device_memory
    for key in ("h2d", "d2h", "h2d_both", "d2h_both", "load_weights", "load_kv", "load_act", "kv_gen", "project",
                "assemble", "attend", "attend_prefill", "finish", "head", "attend_host", "attend_recomputed",
                "quantize", "dequantize_weights", "dequantize_kv", "dequantize_act", "scatter_device",
                "load_hidden"):  # fmt: skip
        assert len(kept.lines[key].samples) >= 2, key


def test_auto_uses_the_saved_profile(run, monkeypatch, tmp_path):
    from models import save_opt

    from flexhybrid import LLM, InputError, SamplingParams

    save_opt(tmp_path)
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    cache = run[0] / "kept"
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(cache))
    expected = LLM(tmp_path, hybrid(0.5), device="cpu").generate([[5, 6, 7]], params)
    for faster_dtype in DTYPES:
        kept = load_hardware(run[0] / "out" / "hardware-cpu.json")
        replace(kept, faster_dtype=faster_dtype).save(cache / "hardware-cpu.json")
        llm = LLM(tmp_path, device="cpu", link_gb_per_s=0.5)
        answer = llm.generate([[5, 6, 7]], params)
        assert llm.policy.name == "searched"
        assert answer[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "empty"))
    with pytest.raises(InputError, match="flexhybrid profile"):
        LLM(tmp_path, device="cpu", link_gb_per_s=0.5).generate([[5, 6, 7]], params)


def test_bytes_of_a_window_count_what_moved_in_it():
    from flexhybrid.core.task import Task, Work
    from flexhybrid.core.trace import TraceEvent, TraceWindow

    def event(verb, resource, iteration, start, end, size=0):
        return TraceEvent(Task(iteration, 0, 0, verb, resource, Work(link_bytes=size), (), ()), start, end)

    trace = [
        event("sample", "compute", 1, 0.0, 1.0),
        event("load_kv", "h2d", 2, 0.5, 1.5, 100),  # half of it before the window
        event("load_kv", "h2d", 2, 1.5, 2.0, 40),
        event("load_kv", "h2d", 3, 2.5, 4.5, 80),  # a quarter of it inside
        event("sample", "compute", 2, 2.0, 3.0),
    ]
    assert TraceWindow(trace).moved_bytes("h2d") == pytest.approx(50 + 40 + 20)


def test_a_profile_records_what_the_machine_has(tmp_path):
    from flexhybrid.jobs.machine import host_memory_bytes, machine_memories

    sizes = machine_memories(torch.device("cpu"))
    assert sizes["host_memory"] == sizes["device_memory"] > 2**28
    (tmp_path / "limit").write_text("1048576\n")
    (tmp_path / "none").write_text("max\n")
    assert host_memory_bytes((tmp_path / "limit", tmp_path / "none", tmp_path / "absent")) == 2**20
    assert host_memory_bytes((tmp_path / "none",)) > 2**28


@pytest.mark.parametrize(
    "rounds, others, disturbed",
    [([100, 104, 101], [0.01, 0.0, 0.02], False), ([100, 130, 101], [0.0] * 3, True), ([100] * 3, [0, 0.2, 0], True)],
)
def test_a_busy_machine_is_marked(rounds, others, disturbed):
    from flexhybrid.jobs.compare.report import is_disturbed

    row = {"measured_rounds": rounds, "others_cpu_share": others, "measured_tokens_per_s": sorted(rounds)[1]}
    assert is_disturbed(row) == disturbed


SYSTEMS = ("kv_only", "kvpr_column", "token_recompute(0.25)", "int4", "fastdecode", "accelerate", "h2o(0.5)")


@pytest.fixture(scope="module")
def systems_run(tmp_path_factory):
    """Compare eight systems in bfloat16, one of them with a disk, on made-up lines instead of a profile."""
    folder = tmp_path_factory.mktemp("systems")
    disk = Policy("on_disk", Placement(host=0.5, disk=0.5), cache={"kv@disk": 0.5, "act@host": 0.5})
    (folder / "disk.json").write_text(disk.to_json())
    lines = {key: Line(1e-4, 1e-10, 2e-9) for key in ("compute", "host_compute", "h2d", "d2h")}
    lines |= {key: Line(1e-4, 0.0, 1e-9) for key in ("disk_read", "disk_write")}
    hardware = Hardware("any", "cpu", lines, disk_memory=1 << 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FASTER_DTYPE, "bfloat16")
        patch.setattr(job, "measure_hardware", lambda *rest, **more: (hardware, []))
        result = compare(
            CompareOptions(
                device="cpu", link_gb_per_s=0.5, shape=SMALL, batch=4, prompt_len=48, gen_len=4, rounds=3,
                exact_tokens=3, exact_prompts=8, systems=(*SYSTEMS, str(folder / "disk.json")),
                disk_dir=folder, out=folder / "out",
            ),
        )  # fmt: skip
    return folder, result


def test_lossless_systems_are_exact_and_lossy_ones_are_marked(systems_run):
    _, result = systems_run
    names = [*SYSTEMS, "on_disk"]
    assert result["dtype"] == "bfloat16"
    assert [row["policy"] for row in result["exactness"]] == [row["policy"] for row in result["speed"]] == names
    for row in result["exactness"] + result["speed"]:
        assert row["lossless"] == (row["policy"] not in ("int4", "h2o(0.5)"))
    assert all(row["exact"] for row in result["exactness"] if row["lossless"])
    for row in result["speed"]:
        assert row["reference"] == "kv_only" and row["virtual_clock_tokens_per_s"] > 0
        if row["lossless"]:
            assert row["tokens_equal"] == row["tokens_compared"] == 16, row["policy"]
    assert result["trace_violations"] == [] and result["sweep"] == [] and result["search"] is None


def test_a_breakdown_has_the_parts_of_its_policy(systems_run):
    _, result = systems_run
    of = {one["policy"]: one for one in result["breakdown"]}
    for clock in ("predicted", "measured"):
        assert set(of["kv_only"][clock]["seconds"]) == {
            "load_weights",
            "load_cache",
            "compute",
            "store",
            "host_compute",
        }
        assert {"disk_read", "disk_write"} <= set(of["on_disk"][clock]["seconds"])
        assert "load_cache" not in of["fastdecode"][clock]["seconds"]
        assert "load_weights" not in of["accelerate"][clock]["seconds"]
        for one in of.values():
            assert set(one[clock]["seconds"]) <= set(KINDS) and one[clock]["step_s"] > 0
            assert 0 < max(one[clock]["busy"].values()) <= 1.01
    assert {n: one["predicted"]["bytes"] for n, one in of.items()} == {
        n: one["measured"]["bytes"] for n, one in of.items()
    }
    packed, plain = (of[name]["measured"]["bytes"]["h2d"]["kv"] for name in ("int4", "kv_only"))
    # half a byte and two float16 a group, which is a head of 32, for the 2 bytes of bfloat16
    assert packed == pytest.approx(plain * (4 / 8 + 4 / 32) / 2)


def test_systems_are_written_as_tables_and_figures(systems_run):
    out = systems_run[0] / "out"
    table = pd.read_csv(out / "breakdown.csv")
    assert set(table["policy"]) == {*SYSTEMS, "on_disk"} and set(table["unit"]) == {"s", "bytes", "share"}
    for picture in ("breakdown.png", "traffic.png", "timeline.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    assert not (out / "throughput.png").exists() and not (out / "sweep.csv").exists()


@pytest.mark.parametrize(
    "systems, words",
    [
        (("uvm",), "uvm.*cannot be run.*faults"),
        (("kv_only", "kv_onyl"), "did you mean kv_only"),
        (("kv_only", "kv_only"), "two of the policies.*kv_only"),
        (("DISK",), "--disk-dir"),
        (("absent.json",), "absent.json"),
    ],
)
def test_systems_that_cannot_be_compared_are_refused_before_the_profile(
    systems, words, cpu_dtype, tmp_path, monkeypatch
):
    disk = tmp_path / "disk.json"
    disk.write_text(Policy("on_disk", cache={"kv@disk": 1.0}).to_json())
    monkeypatch.setattr(job, "measure_hardware", lambda *rest, **more: pytest.fail("measured before it was checked"))
    systems = tuple(str(disk) if name == "DISK" else name for name in systems)
    with pytest.raises(InputError, match=words):
        compare(CompareOptions(device="cpu", shape=SMALL, systems=systems, out=tmp_path / "out"), quiet=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (dict(batch=0), "--batch is 0"),
        (dict(mini_batch=-1), "--mini-batch is -1"),
        (dict(gen_len=3), "--output-len is 3; it must be at least 4"),
        (dict(prompt_len=0), "--input-len is 0"),
        (dict(prompt_len=300, gen_len=400), "--input-len 300 and --output-len 400 are 700 .* room for 600"),
        (dict(gen_len=5000), "--output-len 5000"),
    ],
)
def test_impossible_sizes_are_refused_by_their_flags(numbers, words, cpu_dtype):
    with pytest.raises(InputError, match=words):
        settle(CompareOptions(device="cpu", shape=SMALL, **numbers))


def test_a_slow_machine_gets_less_to_do(cpu_dtype):
    """The job sizes itself by its prediction: a slower machine never gets more work. A given context is kept."""
    lines = {"h2d": Line(1e-4, 0.0, 5e-10), "d2h": Line(1e-4, 0.0, 5e-10), "host_compute": Line(1e-4, 0.0, 1e-9)}
    free = settle(CompareOptions(device="cpu"))
    sizes = []
    for flops_per_s in (1e12, 1e11, 1e10, 1e9):
        hardware = Hardware("any", "cpu", {**lines, "compute": Line(1e-5, 1 / flops_per_s, 1e-11)})
        setting = free.measured(hardware).sized()
        sizes.append(SIZES.index((int(setting.workload.prompt_tokens[0]), setting.problem.shape.num_layers)))
        assert setting.table_seconds() <= TABLE_SECONDS or sizes[-1] == len(SIZES) - 1
    assert sizes == sorted(sizes) and sizes[0] == 0 and sizes[-1] == len(SIZES) - 1
    stated = settle(CompareOptions(device="cpu", prompt_len=512))
    assert stated.sized() is stated
    short = settle(CompareOptions(device="cpu", shape=replace(SMALL, max_positions=100)))
    assert short.workload.prompt_tokens[0] == short.measured(hardware).sized().workload.prompt_tokens[0] == 100 - 6


@pytest.mark.parametrize("schedule", ["column", "row"])
def test_no_clock_is_above_the_limit_that_the_table_prints(schedule):
    """The limit is compared with each resource's seconds in the tasks of the measured iterations. With few iterations
    two effects are large: the prefill hides loads of the first one, and the last one loads less."""
    rng, gaps = np.random.default_rng(3), []
    while len(gaps) < 6:
        tokens = int(rng.integers(LEAST_TOKENS, 9))
        case = replace(random_case(rng, schedule), max_tokens=tokens)
        if len(case.wave().mini_batches) * case.shape.num_layers * tokens > 200:
            continue
        workload = Workload.uniform(case.batch, case.prompt_tokens, tokens)
        closed, limit = (float(rate[0]) for rate in closed_decode(case.problem, case.policy, workload))
        virtual = virtual_decode(case.problem, case.policy, workload)
        busy = busy_seconds([event for event in virtual if 1 < event.task.iteration < tokens - 1])
        own = case.batch * (tokens - 3) / max(busy.values())
        rate = virtual_clock.summarize(virtual, LAST).decode_tokens_per_s
        assert limit == pytest.approx(own, rel=0.01) and closed <= limit and rate <= 1.01 * limit
        gaps.append(abs(closed / rate - 1))
    assert max(gaps) < 0.02


def test_the_limit_of_a_paced_link_is_its_bytes():
    """Two layers and six tokens, as on a slow machine: each iteration moves all weights and all KV."""
    lines = {"compute": Line(1e-5, 1e-12), "host_compute": Line(1e-5)} | dict.fromkeys(
        ("h2d", "d2h"), Line(0, 0, 2.5e-9)
    )
    problem = Problem(shape=SMALL, dtype="float32", hardware=Hardware("slow", "cpu", lines))
    workload, policy = Workload.uniform(8, 100, 6), kv_only(400)
    closed, limit = (float(rate[0]) for rate in closed_decode(problem, policy, workload))
    virtual = virtual_decode(problem, policy, workload)
    moved = [sum(of["h2d"].values()) for of in (bytes_per_step([e for e in virtual if 1 < e.task.iteration < 5]),)]
    assert closed <= limit == pytest.approx(8 / (moved[0] * 2.5e-9))
    whole = float(np.ravel(predict(problem, candidates_of(policy, workload)).decode_tokens_per_s)[0])
    assert whole > 1.02 * limit, "what the table showed before"


def test_the_table_and_the_search_report_speeds_and_kinds(capsys):
    row = dict.fromkeys(("act_share", "overlap", "busy_compute", "busy_h2d", "error_virtual"), 0.5)
    row |= {
        "policy": "p",
        "limit_tokens_per_s": 9.0,
        "closed_form_tokens_per_s": 8.0,
        "virtual_clock_tokens_per_s": 7.0,
    }
    row |= {
        "measured_tokens_per_s": 7.5,
        "measured_rounds": [7.5],
        "others_cpu_share": [],
        "h2d_bytes_per_iteration": 1,
    }
    row |= {"reference": "p", "tokens_equal": 1, "tokens_compared": 1, "lossless": True}
    assert speed_line(row)["limit"] == "9.0"
    prediction = {"busy": dict.fromkeys(("compute", "h2d", "d2h", "host_compute"), 0.1), "binding": "h2d"}
    prediction |= {"traffic_bytes": {"h2d": {"kv": 1e9}}}
    found = SimpleNamespace(prediction=prediction, kv_act_bytes_ratio=1.0, num_choices=1, search_s=0.03, act_share=0.5)
    for num_choices, words in (
        (1, "the best mix of KV and ACT, found in 30.0 ms"),
        (3, "ACT among 3 kinds of policies,"),
    ):
        found.num_choices = num_choices
        Report(quiet=False).search(found, {"paper": 0.5, "full": 0.5}, 12.3)
        said = capsys.readouterr().out
        assert words in said and "Predicted 12.3 tokens/s" in said and "candidate" not in said


def test_the_page_names_every_picture():
    page = (Path(__file__).parents[2] / "docs/results.md").read_text()
    assert all(f"`{name}`" in page for name in job.RESULT_FILES if name.endswith(".png"))


@pytest.mark.parametrize("kept, replaced", [(None, True), (0.5, True), (0.0, False)])
def test_a_paced_profile_does_not_replace_one_without_a_pace(kept, replaced, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path))
    lines = {"compute": Line(1e-5), "h2d": Line(0, 0, 1e-9)}
    if kept is not None:
        Hardware("local", "cpu", lines, source="before", notes={"link_gb_per_s": kept or None}).save(
            tmp_path / "hardware-cpu.json"
        )
    machine = Hardware("local", "cpu", lines, source="now", notes={"link_gb_per_s": 0.4})
    said = job._keep_for_auto(SimpleNamespace(paced=PacedDevice(torch.device("cpu"), 0.4), machine=machine))
    assert load_hardware(tmp_path / "hardware-cpu.json").source == ("now" if replaced else "before")
    assert ("0.4 GB/s is left out" in said) == replaced != ("stays as it is" in said)


def test_names_may_hold_commas_in_parentheses():
    given = ["kv_only,kvpr_column(split=paper, hiding=false), int4", "mine.json"]
    assert split_names(given) == ("kv_only", "kvpr_column(split=paper, hiding=false)", "int4", "mine.json")


@pytest.mark.parametrize(
    "policy",
    [
        Policy("mixed", cache={"kv@host": 0.5, "act@host": 0.25, "kv@device": 0.25}),
        Policy("row", Placement(device=0.5, host=0.5), cache={"tok": 0.3, "kv@host": 0.7}, schedule="row"),
        Policy("host", cache={"kv@host": 1.0}, attention="host", hidden="host"),
        Policy("disk", Placement(host=0.5, disk=0.5), cache={"kv@disk": 0.6, "act@host": 0.4}),
    ],
    ids=lambda policy: policy.name,
)
def test_a_breakdown_adds_up_to_busy_time_and_to_moved_bytes(policy, tmp_path, monkeypatch):
    """Seconds are compared with the trace's busy time; bytes with the plan's tasks and with counts in the copies."""
    hardware = Hardware("any", "cpu", {"compute": Line(1e-5)})
    prompts = [[5 + i] * (20 + 9 * i) for i in range(4)]
    moved = {"h2d": 0, "d2h": 0}
    for direction in moved:

        def counted(copies, target, source, _direction=direction):
            moved[_direction] += target.nbytes
            target.copy_(source)

        monkeypatch.setattr(CpuCopies, f"copy_{direction}", counted)
    whole = CpuCopies.copy_blocks_h2d

    def blocks(copies, target, pool, runs):
        moved["h2d"] += sum(run.rows * run.blocks for run in runs) * pool[0].nbytes
        whole(copies, target, pool, runs)

    monkeypatch.setattr(CpuCopies, "copy_blocks_h2d", blocks)

    def make(policy):
        return Weights(SMALL, RandomWeights(SMALL), "float32", torch.device("cpu"), policy, DiskPlace(tmp_path))

    paced = PacedDevice(torch.device("cpu"), disk=DiskPlace(tmp_path))
    problem = Problem(shape=SMALL, dtype="float32", hardware=hardware)
    with Bench(make, problem, prompts, 5, paced) as bench:
        contender = PolicyRun(bench, policy)
        moved.update(h2d=0, d2h=0)
        trace, _ = contender.decode()
        tasks = list(stream(admit(problem, policy, bench.workload), first_iteration=1))
    ends = iteration_ends(trace)
    inside = [
        event._replace(
            start_s=min(max(event.start_s, ends[0]), ends[-1]), end_s=max(min(event.end_s, ends[-1]), ends[0])
        )
        for event in trace
    ]
    busy, seconds = busy_seconds(inside), seconds_per_step(trace)
    for resource, of_resource in busy.items():
        kinds = {kind_of(event.task) for event in trace if event.task.resource == resource}
        total = sum(seconds.get(kind, 0.0) for kind in kinds) * (len(ends) - 1)
        assert total == pytest.approx(of_resource, abs=1e-9), resource
    per_step, steps = bytes_per_step(trace), 4
    for link, of_link in per_step.items():
        assert set(of_link) <= set(CARGO)
        assert sum(of_link.values()) * steps == sum(t.work.link_bytes for t in tasks if t.resource == link), link
    for link, count in moved.items():
        assert sum(per_step[link].values()) * steps == count, link


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"act_only": [106, 107, 108]}, "search missed: act_only was measured 7.0% faster; +3.9% to +10.2%"),
        ({"act_only": [101, 107, 108]}, "searched mix ties with act_only: -6.5%; -9.3% to +1.0%"),
        # the one whose rounds lie apart is named, though another's median is higher
        (
            {"act_only": [101, 107, 108], "kv_only": [103, 104, 105]},
            "missed: kv_only was measured 4.0%; +1.0% to +7.1%",
        ),
        ({"act_only": [90, 92, 94]}, "searched mix is the fastest: 8.7% faster than act_only; +4.3% to +13.3%"),
        ({"act_only": [100.9] * 3, "hybrid": [100] * 3}, "ties with act_only: -0.9%; -0.9% to -0.9%"),
        ({}, ""),
    ],
    ids=["apart", "overlap", "apart and overlap", "slower", "within a percent", "alone"],
)
def test_the_search_missed_only_if_rounds_do_not_overlap(others, told):
    measured = {"hybrid": [98, 100, 102], **others}
    rows = [
        {"policy": name, "measured_tokens_per_s": rounds[1], "measured_rounds": rounds, "lossless": True}
        for name, rounds in measured.items()
    ]
    faster = dict(rows[0], policy="few bits", measured_rounds=[300] * 3, lossless=False)
    result = {"search": {"policy": "hybrid"}, "speed": [*rows[:1], faster], "sweep": rows[1:]}
    sentence, _, interval = told.partition("; ")
    assert sentence in verdict(result) and f"(rounds: {interval})" in verdict(result) or verdict(result) == told
    assert verdict(result | {"search": None}) == ""


def test_figures_are_labelled(monkeypatch, tmp_path):
    """Titles name machine, model and link; the virtual curve includes the star; no bar is higher than its step."""
    drawn = {}
    monkeypatch.setattr(draw, "save", lambda figure, path: drawn.setdefault(path.stem, figure.axes[0]))
    row = {"virtual_clock_tokens_per_s": 9, "measured_tokens_per_s": 9, "measured_rounds": [8, 9]}
    sweep = [{"act_share": share, **row} for share in (0, 1)]
    star = dict(sweep[0], act_share=0.3, virtual_clock_tokens_per_s=12)
    draw.throughput(tmp_path / "throughput", sweep, [0, 1], [9, 9], star, "here")
    curve = next(line for line in drawn["throughput"].lines if "virtual" in str(line.get_label()))
    assert curve.get_xydata().tolist() == [[0, 9], [0.3, 12], [1, 9]]
    step = {"step_s": 0.2, "seconds": {"compute": 0.15, "load_weights": 0.1, "load_cache": 0.08, "store": 1e-4}}
    draw.breakdown(tmp_path / "breakdown", [{"policy": "mine", "predicted": step, "measured": step}], "here")
    bars = drawn["breakdown"].patches
    tops = {round(bar.get_x(), 6): bar.get_y() + bar.get_height() for bar in bars}  # the last of a stack
    assert list(tops.values()) == pytest.approx([200, 150, 180])
    ticks = [text.get_text() for text in drawn["breakdown"].get_xticklabels(minor=True)]
    assert ticks == ["step", "compute", "to device"]
    for axes in drawn.values():
        assert axes.get_title(loc="left").startswith("here")
        plt.close(axes.figure)
