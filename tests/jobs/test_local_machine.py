"""Test how commands read this machine: a profile for each model, and notes about disturbed profiles."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import answered, line

from flexhybrid import LLM, InputError, cli
from flexhybrid.core.hardware import PACE, Hardware, Line, load_hardware
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import WHOLE_BATCH
from flexhybrid.core.problem import NO_BUDGETS, Budgets, Problem
from flexhybrid.core.units import counted
from flexhybrid.core.workload import Workload
from flexhybrid.jobs import machine as memory_here
from flexhybrid.jobs.profile import job as profile_job
from flexhybrid.jobs.run.forecast import Estimate, Forecast, describe, duration, plan_lines
from flexhybrid.jobs.run.outcome import FAR_OFF, LEAST_JUDGED_S, Effort, Outcome, is_far_off, predicted_text
from flexhybrid.resolve import PacedDevice, best_policy
from flexhybrid.runtime.profiling.attention_paths import can_attend_in_place
from flexhybrid.runtime.profiling.cpu_use import CpuUse
from flexhybrid.runtime.profiling.profile import ProfileSamples
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.storage.scratch_file import ScratchFile
from sim.presets import kv_only

SHAPE = shape_by_name("opt-125m")
CPU = PacedDevice(torch.device("cpu"))
LENGTHS = ("--input-len", "30", "--output-len", "9")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(profile_job, "pick_device", lambda *paces: CPU)


def machine(slower: float = 1.0, overhead_s: float = 1e-6) -> Hardware:
    """Return a machine with one line for all resources."""
    line = Line(slower * overhead_s, slower * 1e-10, slower * 1e-9)
    lines: dict[str, Line] = {resource: line for resource in ("compute", "h2d", "d2h", "host_compute")}
    in_place = can_attend_in_place("float32")
    return Hardware("local", "cpu", lines, dtype="float32", faster_dtype="float32", attends_in_place=in_place)


def own_profile(model: Path) -> Path:
    return profile_job.model_profile_path(Checkpoint(model).shape, "auto", CPU)


def asked(model: Path, folder: Path, count: int) -> list[str]:
    """Write equal requests; return the arguments of a run that answers them."""
    lines = [line(str(number), prompt=[5] * 30, max_tokens=9, temperature=0) + "\n" for number in range(count)]
    (folder / "in.jsonl").write_text("".join(lines))
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    return [*files, "--model", str(model), "--device", "cpu"]


def answer_one(model: Path, folder: Path) -> int:
    return cli.main(["run", *asked(model, folder, 1), "--policy", "kv_only", "--quiet"])


def test_doctor_search_simulate_and_run_predict_the_same(tiny, tmp_path, as_json):
    """All read the model's own profile, which is 100 times as fast as the machine's general profile."""
    machine(slower=100).save(tmp_path / "cache/hardware-cpu.json")
    machine().save(own_profile(tiny))
    config, few = str(tiny / "config.json"), 12
    local = ("--model", config, "--hardware", "local", *LENGTHS)
    simulated = as_json("simulate", "--system", "resident", *local, "--batch", "1024")
    told = as_json("doctor", "--device", "cpu", "--models", config, *LENGTHS)["models"][0]
    assert told["tokens_per_s"] == pytest.approx(simulated["tokens_per_s"], rel=1e-9) and told["own_profile"]
    assert f"mini-batches of {simulated['policy']['max_mini_batch_tokens']} tokens" in told["how"]
    assert told["how"].startswith("1024 at a time, weights 100% device; context 100% kv@device")
    done = as_json("run", *asked(tiny, tmp_path, few), "--policy", "auto")
    searched = as_json("search", *local, "--lossless", "--batch", str(few))
    for key in ("cache", "weights", "schedule", "max_mini_batch_tokens", "hidden", "attention"):
        assert done["policy"][key] == searched["policy"][key], key
    assert done["predicted_s"] == pytest.approx(searched["total_s"], rel=0.05)


def test_local_reads_the_models_profile_then_the_general_one_then_any_other(tiny, tmp_path, capsys, as_json):
    """Each profile is ten times slower than the one before it. simulate, search and sweep read the same one."""
    shape, config = Checkpoint(tiny).shape, str(tiny / "config.json")
    kept = [profile_job.model_profile_path(shape, dtype, CPU) for dtype in ("float32", "auto")]
    paths = [*kept, tmp_path / "cache/hardware-cpu.json", tmp_path / "cache/models/cpu-of-another.json"]
    grid, command = tmp_path / "grid.json", ["--model", config, *LENGTHS, "--batch", "2", "--dtype", "float32"]
    command += ["--device-memory", "1GiB", "--host-memory", "1GiB"]  # not what is free at the moment
    point = {"system": "kv_only", "model": config, "hardware": "local", "dtype": "float32", "batch": 2}
    point |= {"prompt_len": 30, "gen_len": 9, "device_memory": "1GiB", "host_memory": "1GiB"}
    grid.write_text(json.dumps(point))
    for number, path in enumerate(paths):
        machine(slower=10**number).save(path)
    seconds = []
    for path in paths:
        run = as_json("simulate", "--system", "kv_only", *command, "--hardware", "local")
        seconds.append(run["total_s"])
        as_json("sweep", str(grid), "--out", str(tmp_path / "t.csv"), "--overwrite", "--workers", "1")
        (row,) = csv.DictReader((tmp_path / "t.csv").open())
        assert float(row["tokens_per_s"]) == pytest.approx(run["tokens_per_s"])
        if path == paths[-1]:
            assert cli.main(["search", *command, "--hardware", "local"]) == 0
            assert "measured only for another model, dtype or link" in capsys.readouterr().err
        path.unlink()
    assert seconds == pytest.approx([seconds[0] * 10**number for number in range(len(paths))], rel=1e-3)


USED = "Other processes used the CPU during profiling (43% of the cores)"
VARIED = "Times varied during profiling (two passes disagreed on 5 of 20 sizes)"


@pytest.mark.parametrize(
    "others, differ, company", [(0.43, 0, USED), (0.01, 0, None), (None, 0, None), (0.01, 5, VARIED), (None, 1, None)]
)
def test_a_disturbed_profile_is_marked_with_the_cause(
    tiny, tmp_path, monkeypatch, capsys, others, differ, company, as_json
):
    samples = [(1e6 * n, 1e5 * n, 1e-3 * n) for n in range(1, 5)]
    taken = {key: samples for key in ("compute", "h2d", "d2h", "host_compute", "finish")}
    result = ProfileSamples(taken, [f"size {n}" for n in range(differ)], "float32")
    monkeypatch.setattr(profile_job, "profile", lambda *rest, **more: result)
    monkeypatch.setattr(CpuUse, "others_since", lambda self, before: others)
    shape = Checkpoint(tiny).shape
    profile_job.measure_hardware(shape, "float32", CPU)
    kept = load_hardware(tmp_path / "cache/hardware-cpu.json")
    assert (kept.company is None) == (company is None) and (company is None or company in str(kept.company))
    config = str(tiny / "config.json")
    simulate, search = ("simulate", "--system", "kv_only", "--batch", "2"), ("search", "--batch", "2")
    for command in (simulate, search) if others == 0.43 else (simulate,):
        assert cli.main([*command, "--model", config, "--hardware", "local", *LENGTHS]) == 0
        said = capsys.readouterr().err
        assert ((company or "during profiling") in said) == ("--reprofile" in said) == (company is not None)
    record = as_json("doctor", "--device", "cpu", "--models", config, *LENGTHS)
    assert record["models"][0]["in_company"] == (company is not None) == any("disturbed" in a for a in record["advice"])
    kept.save(own_profile(tiny))
    assert answer_one(tiny, tmp_path) == 0
    assert capsys.readouterr().out.count("during profiling") == (company is not None)  # once for all models


def test_an_older_record_is_marked_by_its_differing_passes():
    old = replace(machine(), notes={"sizes that two passes disagreed on": ["a", "b"]})
    assert "2 sizes" in str(old.company) and machine().company is None


def test_far_from_the_prediction_means_a_factor_above_PARTED():
    measured_s = (100 * FAR_OFF + 1, 100 / FAR_OFF - 1, 149.0, 67.0)
    assert [is_far_off(seconds, 100.0) for seconds in measured_s] == [True, True, False, False]
    assert not is_far_off(100.0, None)
    assert not is_far_off(LEAST_JUDGED_S / 2, LEAST_JUDGED_S / 10)  # a run so short says nothing of the machine


def test_shorter_answers_are_compared_with_an_interpolated_prediction():
    """The estimate is on the line through both predictions, at most the longer one."""
    plan = Forecast(39.0, 100_000, 100_000, 16, {}, {}, other=Estimate(29.0, 25_000))
    assert plan.seconds_of(100_000) == 39.0 and plan.seconds_of(25_000) == pytest.approx(29.0)
    assert plan.seconds_of(26_747) == pytest.approx(29.0 + 10 * 1_747 / 75_000)
    assert plan.seconds_of(0) == pytest.approx(29.0 - 10 / 3) and plan.seconds_of(200_000) == 39.0
    assert replace(plan, other=None).seconds_of(5) == 39.0
    # a mean that the user gave, or that the run before has shown: up to the limits of all
    expected = replace(plan, other=Estimate(99.0, 250_000))
    assert [expected.seconds_of(tokens) for tokens in (100_000, 175_000, 250_000, 999_999)] == [39.0, 69.0, 99.0, 99.0]
    assert replace(plan, seconds=None).seconds_of(5) is None
    work = Effort(39.0, 34.0, None, 0, plan.seconds_of(26_747))
    assert predicted_text(work) == " (predicted 29 s for answers as long as these, 39 s at most)"
    assert not is_far_off(work.seconds, work.predicted_of_these_s)
    assert predicted_text(work._replace(predicted_of_these_s=39.0)) == " (predicted 39 s)"


@pytest.mark.parametrize("overhead_s, said", [(10.0, True), (None, False)])
def test_a_run_far_from_its_prediction_suggests_a_new_profile(tiny, tmp_path, capsys, overhead_s, said):
    """One machine needs ten seconds more per task than profiled; of the other there is no profile."""
    if overhead_s:
        machine(overhead_s=overhead_s).save(own_profile(tiny))
    assert answer_one(tiny, tmp_path) == 0
    assert ("--reprofile measures the machine again" in capsys.readouterr().out) == said


@pytest.mark.parametrize("left", [0, 7])
def test_a_stopped_run_counts_all_tokens_and_suggests_no_profile(left):
    """Its 2,000 tokens came at the predicted rate, but few answers were complete."""
    options = SimpleNamespace(llm=SimpleNamespace(hardware=None), restart=False, output="out.jsonl")
    vars(options).update(dict.fromkeys(("table", "errors", "trace", "report")))
    counts = {"lines": 9, "answered": 9 - left, "refused": 0, "left": left, "blank": 0, "done_before": 0}
    work = Effort(1000.0, 20.0, None, 1900 if left else 0, 1000.0)
    llm, said = SimpleNamespace(num_shared=0, graphs=""), []
    lines = SimpleNamespace(options=options, llm=llm, tokens=100, refused_codes=Counter(), replanned=[], trial=None)
    Outcome(lines, counts, work, traced=False).say(said.append, 21.0)  # type: ignore[arg-type]
    told = "\n".join(said)
    if left:
        assert "100 tokens and 1,900 of unfinished answers in 20 s: 100.0 tokens/s; the whole" in told
        assert "1,900 tokens of unfinished answers are lost" in told
    else:
        assert "100 tokens in 20 s: 5.0 tokens/s (predicted 17 min)" in told
    assert ("--reprofile" in told) == (left == 0)


def test_local_ignores_the_link_pace_of_its_profile(tiny, tmp_path, capsys, as_json):
    """A profile measured with a paced link is used as if its link had no pace, and every command says so."""
    own = machine()
    unpaced = {"h2d_unpaced": own.lines["h2d"], "d2h_unpaced": own.lines["d2h"]}
    paced = replace(own, lines={**own.lines, **unpaced}, notes={PACE: None}).with_link_rate(0.01)
    paced.save(tmp_path / "cache/hardware-cpu.json")
    own.save(tmp_path / "own.json")
    config = str(tiny / "config.json")
    asked_of = ("--model", config, *LENGTHS, "--batch", "2", "--host-memory", "1GiB", "--device-memory", "1GiB")
    asked_of += ("--dtype", "float32")

    def rate(hardware, *more):
        command = ("simulate", "--system", "kv_only", *asked_of, "--hardware", str(hardware), *more)
        found = as_json(*command)
        assert cli.main(list(command)) == 0
        return found["tokens_per_s"], found["rates"].get("paced"), capsys.readouterr().out

    (plain, nothing, said), (local, lifted, told) = rate(tmp_path / "own.json"), rate("local")
    assert local == plain and nothing is None and "paced" not in said
    assert "measured with a link paced at 0.01 GB/s, which predictions leave out" in told and str(lifted) in told
    slow, as_it_was, told = rate(tmp_path / "cache/hardware-cpu.json")
    assert slow < plain / 10 and as_it_was == "the link is imitated, paced at 0.01 GB/s" and str(as_it_was) in told
    given, nothing, told = rate(tmp_path / "cache/hardware-cpu.json", "--link-gb-per-s", "0.01")
    assert given == pytest.approx(slow) and nothing is None and "; but --link-gb-per-s 0.01" in told
    assert cli.main(["search", *asked_of, "--hardware", "local", "--lossless"]) == 0
    assert "paced at 0.01 GB/s, which predictions leave out" in capsys.readouterr().out
    doctor = ["doctor", "--device", "cpu", "--models", config, *LENGTHS]
    assert cli.main(doctor) == 0
    assert "paced at 0.01 GB/s, which predictions leave out" in capsys.readouterr().out
    assert as_json(*doctor)["gb_per_s"]["h2d"] == pytest.approx(1.0)


def test_a_plan_is_described_in_plain_words():
    """There is no bound that binds nothing, no "1 tokens" and no run of "0.0 s"."""
    whole, cut = kv_only(WHOLE_BATCH), kv_only(4096)
    assert whole.cut == "all in one mini-batch" and cut.cut == "mini-batches of 4096 tokens"
    assert describe(whole, Problem(shape=SHAPE)).endswith("; column, all in one mini-batch")
    on_host = describe(replace(cut, attention="host", hidden="host"), Problem(shape=SHAPE))
    assert on_host.endswith("tokens; attention on the host; hidden states on the host")
    assert [counted(number, "token") for number in (0, 1, 2000)] == ["0 tokens", "1 token", "2,000 tokens"]
    assert [duration(seconds) for seconds in (0.01, 0.5, 20)] == ["less than 0.1 s", "0.5 s", "20 s"]
    problem = Problem(shape=SHAPE, dtype="float32")
    llm = SimpleNamespace(
        settled_policy=cut, problem=problem, arguments=SimpleNamespace(enable_prefix_caching=False, policy="auto")
    )
    run = SimpleNamespace(binding="h2d", busy={"h2d": 0.5})
    for seconds, shorter, words in (
        (5.0, 0.01, "or         less than 1 s after its start with answers of 1 token on average: done by "),
        (0.02, 0.01, ""),
    ):
        plan = Forecast(seconds, 1, 1, 1, {}, {}, run, Estimate(shorter, 1))  # type: ignore[arg-type]
        (requests,) = (line for line in plan_lines(llm, plan, "1", False) if line.startswith("requests"))
        assert requests == "requests   1, at most 1 token of answers in all; 1 answer at a time"
        others = [line for line in plan_lines(llm, plan, "1", False) if line.startswith("or ")]
        assert others[0].startswith(words) if words else not others
    llm.problem = replace(problem, budgets=Budgets(device=100, host=100))
    waiting = Forecast(5.0, 1, 1, 1, {"device": 40, "host": 99}, {}, run, num_requests=2)  # type: ignore[arg-type]
    assert "1 answer at a time (host memory has no room for a second)" in "".join(plan_lines(llm, waiting, "2", False))
    llm.settled_policy = replace(cut, max_batch=1)
    assert "1 answer at a time (max_batch 1 of the policy)" in "".join(plan_lines(llm, waiting, "2", False))


def test_auto_on_requests_that_do_not_all_fit_at_once_still_fits(tiny):
    shape, lengths = Checkpoint(tiny).shape, Workload(np.array([3, 30]), np.array([9, 9]))
    problem = Problem(shape=shape, hardware=machine(), budgets=NO_BUDGETS)
    assert best_policy(problem, lengths).stays_on_device
    assert best_policy(replace(problem, hardware=None), lengths).stays_on_device
    assert best_policy(replace(problem, budgets=Budgets(device=2**30)), lengths, True).cache


def test_budgets_beyond_the_machine_and_new_folders_are_noted(tiny, tmp_path, capsys):
    """Notes come before the run, which continues."""
    asked = [line("a", prompt=[5], max_tokens=1)]
    answered(tmp_path, tiny, asked, "--device-memory", "900TiB", "--disk-dir", tmp_path / "scratc")
    told = capsys.readouterr().err
    assert "device_memory, 921600.00 GiB, is more than the" in told and "scratc does not exist" in told
    answered(tmp_path, tiny, asked, "--device-memory", "64MiB", "--disk-dir", tmp_path, "--overwrite")
    assert capsys.readouterr().err == ""


def test_two_budgets_on_a_cpu_share_one_memory(monkeypatch, tiny):
    """Each budget alone is within the machine's 10 GiB. An LLM warns as a run does."""
    monkeypatch.setattr(memory_here, "host_memory_bytes", lambda: 10 * 2**30)
    six, four = 6 * 2**30, 4 * 2**30
    assert not list(memory_here.notes_on(CPU.device, Budgets(device=six, host=four, disk=2**60), None))
    (note,) = memory_here.notes_on(CPU.device, Budgets(device=six, host=six), None)
    assert note.startswith("device_memory and host_memory together, 12.00 GiB, is more than the 10.00 GiB")
    with pytest.warns(UserWarning, match="host_memory, 11.00 GiB, is more than the 10.00 GiB"):
        LLM(tiny, "kv_only", "cpu", host_memory="11GiB")


def test_a_folder_that_cannot_be_made_is_named():
    with pytest.raises(InputError, match="no folder can be made in /proc to keep scratch space in /proc/flexhybrid"):
        ScratchFile(Path("/proc/flexhybrid"), 4096)
