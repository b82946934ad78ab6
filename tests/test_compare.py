"""The main job at a small size: every step, every file, every column."""

import json
import subprocess
import sys
import time

import pandas as pd
import pytest
import torch

from flexhybrid.core.hardware import load_hardware
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.shape import ModelShape
from flexhybrid.jobs.compare import CompareOptions, compare
from flexhybrid.jobs.speed import CpuUse, moved_in_window
from sim.presets import hybrid

SMALL = ModelShape("small", "opt", 2, 64, 2, 2, 32, 128, 200, 600)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    policy = folder / "mine.json"
    placement = Placement(device=0.4, host=0.6)
    policy.write_text(Policy("mine", placement, cache={"act@host": 0.3, "kv@host": 0.7}).to_json())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXHYBRID_CACHE", str(folder / "cache"))
        torch.set_num_threads(1)
        result = compare(
            CompareOptions(
                device="cpu", link_gb_per_s=0.5, shape=SMALL, batch=4, context=48, max_tokens=4, mini_batch=2, rounds=3,
                exact_tokens=3, policy=policy, out=folder / "out",
            ),
            quiet=True,
        )  # fmt: skip
    return folder, result


def test_every_policy_is_exact_and_measured(run):
    _, result = run
    assert all(row["exact"] for row in result["exactness"])
    assert [row["policy"] for row in result["speed"]] == ["kv_only", "act_only", "hybrid_static", "hybrid", "mine"]
    assert [row["act_share"] for row in result["sweep"]] == [i / 8 for i in range(9)]
    for row in result["speed"]:
        assert row["measured_tokens_per_s"] > 0 and len(row["measured_rounds"]) == 3
        assert row["closed_form_tokens_per_s"] > 0 and row["virtual_clock_tokens_per_s"] > 0
        assert row["overlap"] > 0 and 0 < row["busy_h2d"] <= 1.01 and 0 < row["busy_compute"] <= 1.01
    assert result["trace_violations"] == []
    assert result["completions"], "the text of a few completions is part of the job"


def test_act_moves_fewer_bytes_than_kv(run):
    """Multi-head attention: a token's ACT is half its KV; weights cross in both."""
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
    load_hardware(run[0] / "out" / "hardware-cpu.json").save(cache / "hardware-cpu.json")
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(cache))
    llm = LLM(tmp_path, device="cpu", link_gb_per_s=0.5)
    answer = llm.generate([[5, 6, 7]], params)
    assert llm.policy.name == "searched"
    expected = LLM(tmp_path, hybrid(0.5), device="cpu").generate([[5, 6, 7]], params)
    assert answer[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "empty"))
    with pytest.raises(InputError, match="flexhybrid profile"):
        LLM(tmp_path, device="cpu", link_gb_per_s=0.5).generate([[5, 6, 7]], params)


def test_bytes_of_a_window_count_what_moved_in_it():
    from flexhybrid.core.task import Task, Work
    from flexhybrid.core.trace import TraceEvent

    def event(verb, resource, iteration, start, end, size=0):
        return TraceEvent(Task(iteration, 0, 0, verb, resource, Work(link_bytes=size), (), ()), start, end)

    trace = [
        event("sample", "compute", 1, 0.0, 1.0),
        event("load_kv", "h2d", 2, 0.5, 1.5, 100),  # half of it before the window
        event("load_kv", "h2d", 2, 1.5, 2.0, 40),
        event("load_kv", "h2d", 3, 2.5, 4.5, 80),  # a quarter of it inside
        event("sample", "compute", 2, 2.0, 3.0),
    ]
    assert moved_in_window(trace, "h2d") == pytest.approx(50 + 40 + 20)


def test_idle_check_is_a_share():
    before = CpuUse.now()
    other = subprocess.Popen([sys.executable, "-c", "import time; t = time.time()\nwhile time.time() - t < 2: pass"])
    time.sleep(0.6)
    share = CpuUse.now().others_since(before)
    other.kill()
    other.wait()
    assert share is None or share > 0.1, "a busy stranger must be seen"


def test_a_profile_records_what_the_machine_has(tmp_path):
    from flexhybrid.jobs.measure import host_memory_bytes, machine_memories

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
    from flexhybrid.jobs.report import is_disturbed

    row = {"measured_rounds": rounds, "others_cpu_share": others, "measured_tokens_per_s": sorted(rounds)[1]}
    assert is_disturbed(row) == disturbed
