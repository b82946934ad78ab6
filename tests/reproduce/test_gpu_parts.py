"""Test the parts of ``make gpu`` on a CPU with tiny models; stand-ins replace the GPU."""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import subprocess
import sys
import threading
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from oracles import attend_table
from toy_machine import machine

from experiments.bench.harness import Table
from experiments.gpu import attend, mix, overlap, partition, parts, resident, runner, watch
from experiments.gpu.cases import CASES, PARTITION, RESIDENT, Case
from experiments.gpu.watch import Span, Watcher, busy_seconds, spans_of
from experiments.peers import children, gpu_child, gpu_peers
from experiments.peers.gpu_peers import Against, flexgen, transformers
from flexhybrid.core.hardware import Line, load_hardware
from flexhybrid.core.model.rope import Rope
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.problem import AttentionPaths, Budgets, Problem
from flexhybrid.core.units import parse_bytes
from flexhybrid.core.workload import Workload
from policy_search.papers.flexgen import FlexGenOptions, flexgen_policy

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 97, "max_position_embeddings": 256}
OPT = SIZES | {"architectures": ["OPTForCausalLM"], "model_type": "opt", "torch_dtype": "float32"}
OPT |= {"ffn_dim": 128, "num_attention_heads": 2, "word_embed_proj_dim": 64, "do_layer_norm_before": True}
LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
LLAMA |= {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Case:
    """Return a case of a tiny model on the tests' machine."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(OPT))
    for module in (mix, resident, partition):
        monkeypatch.setattr(module, "named_hardware", lambda *_: machine())
    kinds = ("mix", "act", "kv", "waves")
    bars = {("mix", "act"): 0.1, ("act", "kv"): 1e9}
    return Case(str(path), "2400KiB", "1GiB", 40, 6, 4, 3, kinds, bars, together=True, dtype="float32")


def test_every_part_can_be_loaded_and_its_modules_load_no_torch_before():
    for part in parts.PARTS.values():
        module, _, name = part.function.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))
    told = "import sys, experiments.gpu.parts, experiments.gpu.runner, experiments.peers.gpu_peers; "
    told += "assert not {'torch', 'transformers', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", told], check=True)


def test_the_settings_are_those_of_the_papers_regimes():
    """Llama-2-7B-32K is Llama-2-7B with linearly scaled positions; FlexGen's GPU batches divide the batch."""
    long, seven = CASES["long"].shape, shape_by_name("llama-2-7b")
    assert replace(long, name=seven.name, max_positions=seven.max_positions, rope=seven.rope) == seven
    assert (long.max_positions, long.rope) == (32768, Rope(10_000.0, "linear", 8.0))
    assert CASES["long"].prompt + CASES["long"].answer <= long.max_positions
    assert PARTITION.shape == replace(shape_by_name("opt-30b"), num_layers=12) and not PARTITION.cuda_graphs
    assert RESIDENT.device_bytes == 18 * 2**30
    for setting in gpu_peers.SETTINGS.values():
        assert all(run.batch % run.fields.get("mini_batch", 1) == 0 for run in setting.runs)
    ways = {(run.fields["sep_layer"], run.fields["page_locked"]) for run in gpu_peers.SETTINGS["m3-more"].runs}
    assert ways | {(True, False), (False, True)} == {(a, b) for a in (True, False) for b in (True, False)}
    assert parts.PARTS["peers"].estimates.keys() == gpu_peers.SETTINGS.keys()
    for name, setting in gpu_peers.SETTINGS.items():
        assert 0 <= parts.PARTS["peers"].estimates[name] - sum(run.about_s for run in setting.runs) <= 10


@pytest.mark.parametrize(
    "setting, device, host, chosen",
    [
        ("m3", "12GiB", "30GiB", (4, 10, 72, 0)),
        ("m3-more", "12GiB", "96GiB", (16, 8, 54, 0)),
        ("18-more", "18GiB", "96GiB", (8, 1, 100, 86)),
        ("m2-waves", "26GiB", "96GiB", (4, 1, 100, 100)),
    ],
)
def test_flexgens_settings_are_those_that_its_cost_model_chooses(setting, device, host, chosen):
    """The committed record of an H200 and these memories are used; the search cannot run on that machine, which has no
    PuLP."""
    of, record = gpu_peers.SETTINGS[setting], "experiments/results/nvidia-h200/profiles/hardware-cuda.json"
    problem = Problem(
        shape=of.case.shape,
        hardware=load_hardware(runner.ROOT / record),
        budgets=Budgets(parse_bytes(device), parse_bytes(host)),
        device="cuda",
        attention=AttentionPaths("fused", "products", "fused", in_place=True),
    )
    workload = Workload.uniform(1024, of.case.prompt, of.case.answer)
    found = flexgen_policy(problem, workload, FlexGenOptions(most_requests=1024))
    shares = 100 * found.policy.weights.device, 100 * found.policy.cache.get("kv@device", 0)
    assert (found.gpu_batch, found.num_gpu_batches, *map(int, shares)) == chosen
    names = ("mini_batch", "weight_percent", "cache_percent")
    taken = [tuple(run.fields[name] for name in names) for run in of.runs if run.side == "flexgen"]
    assert (chosen[0], *chosen[2:]) in taken


# ---- mixes


def test_a_mix_is_predicted_before_it_runs_and_compared_with_pure_caches(tiny, monkeypatch):
    monkeypatch.setitem(mix.CASES, "tiny", tiny)
    names: list[str] = []
    table = Table(beside=lambda: names.append("") or {"row": len(names)})
    mix.run_mix(table, "tiny", 10.0)
    rows = table.rows
    for kind in tiny.kinds:
        predicted, measured = rows[f"tiny, {kind}: predicted"], rows[f"tiny, {kind}: measured"]
        assert predicted["row"] < measured["row"]
        allowed = {"mix": ("kv", "act"), "waves": ("kv", "act")}.get(kind, (kind,))
        assert {entry.split("@")[0] for entry in predicted["policy"]["cache"]} <= set(allowed)
        assert measured["value"] == pytest.approx(predicted["batch"] * tiny.answer / measured["wall_s"])
        decode = rows[f"tiny, {kind}: decode, measured"]
        assert decode["value"] == pytest.approx(predicted["batch"] * tiny.decoded / decode["wall_s"])
        traced = rows[f"tiny, {kind}: decode under CUPTI"]
        assert traced["cupti"]["wall_s"] == traced["value"] > 0 and decode["row"] < traced["row"]
        error = rows[f"tiny, {kind}: error of the prediction"]["value"]
        assert error == pytest.approx(100 * abs(predicted["value"] / measured["value"] - 1))
        if kind != "mix":
            assert rows[f"tiny: tokens of {kind} that are those of mix"]["value"] == 1
    assert rows["tiny, decode: mix over act"]["ok"] and not rows["tiny, decode: act over kv"]["ok"]
    both = [rows[f"tiny, {kind}: decode, measured"]["value"] for kind in ("act", "kv")]
    assert rows["tiny, decode: act over kv"]["value"] == pytest.approx(both[0] / both[1])


def test_kinds_are_compared_where_the_time_limit_ends_a_later_one(tiny, monkeypatch):
    measure = mix.Run.measure
    monkeypatch.setattr(mix.Run, "measure", lambda run, kind: sys.exit(124) if kind == "kv" else measure(run, kind))
    run = mix.Run(Table(), "tiny", tiny, torch.device("cpu"), machine())
    with pytest.raises(SystemExit):
        mix.run_case(run)
    assert run.table.rows["tiny, decode: mix over act"]["ok"] and not run._weights


def test_a_failure_of_a_mix_is_a_row_and_the_others_go_on(tiny, monkeypatch):
    """One kind does not fit, one runs out of memory, and one machine has no record."""
    session = mix.Session

    def failing(engine, wave, prompts):
        if set(wave.policy.cache) <= {"act@device", "act@host"}:
            raise torch.OutOfMemoryError("out of memory\nTried to allocate")
        return session(engine, wave, prompts)

    monkeypatch.setattr(mix, "Session", failing)
    table = Table()
    mix.run_case(mix.Run(table, "tiny", replace(tiny, kinds=("act", "kv")), torch.device("cpu"), machine()))
    assert table.rows["tiny, act"]["error"] == "OutOfMemoryError: out of memory"
    assert table.rows["tiny, kv: measured"]["value"] > 0 and "tiny, decode: act over kv" not in table.rows
    small = replace(tiny, device="1KiB", kinds=("kv",))
    for changed, hardware, said in ((small, machine(), "fits"), (replace(small, device="1GiB"), None, "part profile")):
        table = Table()
        mix.run_case(mix.Run(table, "tiny", changed, torch.device("cpu"), hardware))
        (row,) = table.rows.values()
        assert said in row["error"]


def test_a_resident_run_in_waves_and_refilled(tiny, monkeypatch):
    monkeypatch.setattr(resident, "RESIDENT", replace(tiny, most=7, device="2MiB", kinds=()))
    table = Table()
    resident.run_resident(table)
    waves, refilled = (table.rows[f"resident, {way}: measured"] for way in ("waves", "refilled"))
    assert waves["waves"] > 1 and waves["value"] == pytest.approx(7 * tiny.answer / waves["wall_s"])
    assert refilled["value"] == pytest.approx(7 * tiny.answer / refilled["wall_s"])
    assert table.rows["resident: idle GPU in a decode"]["error"] == "no CUPTI on a CPU"


def test_the_idle_share_is_of_the_untraced_time(tiny, monkeypatch):
    """The decode takes 2 s; under CUPTI it takes 3 s, of which kernels take 1.5 s."""
    cupti = {"wall_s": 3.0, "kernels_s": 1.5}
    monkeypatch.setattr(resident, "under_cupti", lambda run, on_cuda: cupti)
    run = mix.Run(Table(), "resident", tiny, torch.device("cpu"), None)
    monkeypatch.setattr(run, "seconds", lambda action: 2.0)
    resident.add_idle_row(run, SimpleNamespace(generate=lambda control: None))
    row = run.table.rows["resident: idle GPU in a decode"]
    assert row["value"] == pytest.approx(25) and not row["ok"]
    assert row["kernels_us_a_layer"] == pytest.approx(1.5e6 / (5 * 2))


# ---- a part of the SMs


class Driver:
    """A stand-in for cuda.bindings.driver that keeps its calls. ``fails``: the call that fails."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM="SMs")
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, fails=""):
        self.calls, self.fails = [], fails

    def __getattr__(self, name):
        group = SimpleNamespace(sm=SimpleNamespace(smCount=48))
        given = {"cuDevSmResourceSplitByCount": ([group], 1, "rest"), "cuGreenCtxStreamCreate": (77,)}

        def call(*arguments):
            self.calls.append((name, arguments))
            return (2, None) if name == self.fails else (0, *given.get(name, (f"of {name}",)))

        return call


def test_a_green_context_has_the_given_number_of_sms(monkeypatch):
    """The driver's calls come in order, each with the result of the one before."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer: ("stream", pointer))
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    driver = Driver()
    monkeypatch.setattr(sys.modules["cuda.bindings"], "driver", driver, raising=False)
    assert partition.green_stream(48) == (("stream", 77), 48)
    names, arguments = zip(*driver.calls, strict=True)
    assert names == (
        "cuDeviceGet",
        "cuDeviceGetDevResource",
        "cuDevSmResourceSplitByCount",
        "cuDevResourceGenerateDesc",
        "cuGreenCtxCreate",
        "cuGreenCtxStreamCreate",
    )
    assert arguments[1] == ("of cuDeviceGet", "SMs") and arguments[2] == (1, "of cuDeviceGetDevResource", 0, 48)
    assert arguments[4] == ("of cuDevResourceGenerateDesc", "of cuDeviceGet", 1)
    assert arguments[5] == ("of cuGreenCtxCreate", 1, 0)
    monkeypatch.setattr(sys.modules["cuda.bindings"], "driver", Driver("cuGreenCtxCreate"))
    with pytest.raises(RuntimeError, match="green contexts: 2"):
        partition.green_stream(48)


def test_a_partition_computes_on_its_stream_by_a_scaled_record(tiny, monkeypatch):
    """Products take three times as long on it and copies twice; the link is unchanged."""
    streams, ran, held = {}, [], []
    monkeypatch.setattr(partition, "PARTITION", tiny)
    monkeypatch.setattr(partition, "green_stream", lambda count: ("a stream", count))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: held.append(stream) or contextlib.nullcontext())
    monkeypatch.setattr(partition, "proved_on_gpu", lambda *case: held.append(case))
    monkeypatch.setattr(partition, "lane_streams", lambda device: streams)
    times = iter(
        (
            {"copy": 1.0} | {f"{n} rows": 1.0 for n in partition.ROWS},
            {"copy": 2.0} | {f"{n} rows": 3.0 for n in partition.ROWS},
        )
    )
    monkeypatch.setattr(partition, "rates", lambda stream, hidden: next(times))
    monkeypatch.setattr(partition, "run_case", ran.append)
    partition.run_partition(Table(), "48", 10.0)
    (run,) = ran
    compute, plain = run.hardware.lines["compute"], machine().lines["compute"]
    assert streams == {"compute": "a stream"} and run.case is tiny
    assert held == ["a stream", ("float32", 1, 32)]  # Triton's kernels are tried on the stream before all else
    assert compute == Line(plain.overhead_s, 3 * plain.s_per_flop, 2 * plain.s_per_byte)
    assert all(run.hardware.lines[name] == line for name, line in machine().lines.items() if name != "compute")
    kept = replace(machine(), lines=machine().lines | {"kv_gen_alone": plain, "load_kv": plain, "attend_host": plain})
    lines = partition.scaled(kept, 3, 2).lines
    assert lines["kv_gen_alone"] == compute and lines["load_kv"] == lines["attend_host"] == plain


def test_rates_are_timed_for_all_sizes(monkeypatch):
    monkeypatch.setattr(partition, "ROWS", (8, 16))
    monkeypatch.setattr(partition, "COPY_BYTES", 1 << 10)
    assert all(seconds > 0 for seconds in partition.rates(None, 16).values())


# ---- peers


def ask_nobody(answers, asked=None):
    """Stand in for ``children.ask``: return the given answers in turn."""
    given = iter(answers)

    def ask(child, request, limit_s, folders, variables):
        (asked if asked is not None else []).append((request, limit_s, folders))
        return next(given)

    return ask


@pytest.mark.parametrize("config", [OPT, LLAMA])
def test_transformers_runs_with_either_cache(tmp_path, tiny, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    setting = Against(tiny, "nothing", ("mix",), 1.0, ())
    for run in (transformers("dynamic", 2, 0), transformers("static", 2, 0)):
        found = gpu_child.run_transformers(gpu_peers.request_of(run, setting, "cpu"))
        assert found["seconds"] > 0 and found["decode_s"] == pytest.approx(found["seconds"] - found["seconds_of_2"])


@pytest.fixture
def table() -> Table:
    """Return a table made before processes are forked from warm ones, because git names its commit."""
    return Table()


def test_a_peer_that_is_not_installed_is_named_with_the_way_to_get_it(tiny, monkeypatch, table, warm_processes):
    """It is looked for in a process of its own; FlexGen is never installed beside the project."""
    run = flexgen(2, 2, 50, 50, 0)
    monkeypatch.setitem(gpu_peers.SETTINGS, "tiny", Against(tiny, "nothing", ("mix",), 1.0, (run,)))
    gpu_peers.run_peers(table, "tiny", 100.0, "cpu")
    ((name, row),) = table.rows.items()
    assert name == f"tiny, {run.name}" and "pip install --no-deps flexgen==0.1.8" in row["error"]


def test_a_peer_is_compared_with_our_fastest_at_its_setting(tmp_path, tiny, monkeypatch):
    """Our rows are those of this call, else the kept ones. Decodes are compared with decodes, by the tokens after the
    second."""
    rows = {"streamed, act: measured": 90, "streamed, mix with tok: measured": 100, "streamed, waves: measured": 1e6}
    rows |= {"streamed, act: decode, measured": 300, "streamed, mix with tok: predicted": 1e7}
    kept = tmp_path / "results"
    kept.mkdir()
    told = json.dumps({"rows": {name: {"value": value} for name, value in rows.items()}})
    (kept / "ours.json").write_text(told)
    monkeypatch.setattr(gpu_peers, "results_folder", lambda gpu: kept)
    run, kinds = flexgen(2, 2, 72, 0, 1, sep_layer=False, page_locked=True), ("act", "mix with tok")
    assert run.name == "FlexGen page-locked and sep_layer=False, 2 x 2, weights 72 %, cache 0 % on the GPU"
    answer = {"seconds": 2.0, "seconds_of_2": 1.5, "decode_s": 0.5, "cupti": {}}
    nothing = Against(tiny, "nothing", kinds, 1.0, (run,))
    monkeypatch.setattr(children, "ask", ask_nobody([answer]))
    monkeypatch.setitem(gpu_peers.SETTINGS, "tiny", nothing)
    gpu_peers.run_peers(table := Table(path=tmp_path / "peers.json"), "tiny", 100.0, "cpu")
    assert "nothing.json" in table.rows[f"tiny, {run.name}: ours over it"]["error"]
    for shorter, ratio in ((None, 100 / (4 * 6 / 2)), (5, 300 / (4 * 3 / 0.5))):
        asked = []
        monkeypatch.setattr(children, "ask", ask_nobody([answer], asked))
        monkeypatch.setitem(gpu_peers.SETTINGS, "tiny", Against(tiny, "ours", kinds, 3.0, (run,), shorter))
        table = Table(path=tmp_path / "peers.json")
        gpu_peers.run_peers(table, "tiny", 100.0, "cpu")
        compared = [row for name, row in table.rows.items() if name.endswith("ours over it")]
        assert [row["value"] for row in compared] == [pytest.approx(ratio)]
        assert asked[0][0]["gen_tokens"] == shorter or tiny.answer and asked[0][0]["page_locked"]
    (tmp_path / "ours.json").write_text(told.replace("100", "200"))
    assert gpu_peers.ours_of(gpu_peers.SETTINGS["tiny"], "measured", [tmp_path, kept]) == 200


def test_runs_beyond_the_time_and_failures_are_rows(tiny, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(children, "ask", ask_nobody([{"error": "did not end"}], asked))
    monkeypatch.setattr(gpu_peers, "INSTALLED", tmp_path)
    runs = (flexgen(2, 1, 50, 50, 200), transformers("static", 2, 90))
    monkeypatch.setitem(gpu_peers.SETTINGS, "tiny", Against(tiny, "ours", ("mix",), 1.0, runs))
    table = Table()
    gpu_peers.run_peers(table, "tiny", 100.0, "cpu")
    assert "not tried" in table.rows[f"tiny, {runs[0].name}"]["error"]
    assert table.rows[f"tiny, {runs[1].name}"]["error"] == "did not end"
    ((request, limit_s, folders),) = asked
    assert 90 < limit_s <= 100 and folders == [tmp_path] and request["device_memory"] == tiny.device_bytes
    generator = random.Random(0)
    assert request["prompts"][0] == [generator.randrange(4, 97) for _ in range(tiny.prompt)]


def test_two_tokens_and_all_are_timed_after_a_short_run():
    """CUPTI may fail. The warm-up has room for the same number of tokens."""
    ran, request = [], {"device": "cpu", "prompts": [list(range(40))] * 3, "gen_tokens": 9}
    found = gpu_child.timed(lambda prompts, count: ran.append((len(prompts), len(prompts[0]), count)), request)
    assert ran == [(3, gpu_child.WARM_TOKENS, gpu_child.WARM_ANSWER), (3, 40, 2), (3, 40, 9)]
    assert found["decode_s"] == pytest.approx(found["seconds"] - found["seconds_of_2"])


def test_flexgens_host_cache_is_page_locked_and_kept(monkeypatch):
    """Stand-ins for FlexGen's classes: only host memory that it requests unlocked is locked; deleted memory is
    reused."""
    backend = ModuleType("flexgen.pytorch_backend")
    backend.DeviceType = SimpleNamespace(CPU="cpu")
    backend.np_dtype_to_torch_dtype = {np.float16: torch.float16}
    backend.TorchTensor = SimpleNamespace(create_from_torch=lambda data, device, name=None: SimpleNamespace(data=data))

    class TorchDevice:
        def __init__(self, kind):
            self.device_type = kind

        def allocate(self, shape, dtype, pin_memory=None, name=None):
            return "as shipped"

    monkeypatch.setitem(sys.modules, "flexgen", ModuleType("flexgen"))
    monkeypatch.setitem(sys.modules, "flexgen.pytorch_backend", backend)
    locked = []

    class HostMemory:
        def __init__(self, pinned):
            assert pinned

        def zeros(self, shape, dtype):
            locked.append(shape)
            return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr("flexhybrid.runtime.storage.host_memory.HostMemory", HostMemory)
    gpu_child.lock_pages(TorchDevice)
    host = TorchDevice("cpu")
    assert host.allocate((2,), np.float16) == "as shipped"
    assert TorchDevice("cuda").allocate((2,), np.float16, False) == "as shipped"
    first, second = host.allocate((2, 3), np.float16, False), host.allocate((2, 3), np.float16, pin_memory=False)
    assert len(locked) == 2 and first.data.data_ptr() != second.data.data_ptr()
    places = {first.data.data_ptr(), second.data.data_ptr()}
    first.data = second.data = None  # FlexGen's delete
    again = [host.allocate((2, 3), np.float16, False) for _ in range(3)]
    assert len(locked) == 3 and len({one.data.data_ptr() for one in again}) == 3
    assert {again[0].data.data_ptr(), again[1].data.data_ptr()} == places


# ---- other parts


def test_attention_is_compared_with_its_yardsticks(monkeypatch):
    """Plain torch replaces the kernels; contiguous contexts have as many bytes as the blocks."""
    attend_triton = pytest.importorskip("flexhybrid.runtime.kernels.attend_triton", reason="triton is not installed")
    seen = []
    monkeypatch.setattr(attend_triton, "launch", attend_table.launch)
    monkeypatch.setattr(attend, "proved_on_gpu", lambda *_: True)
    monkeypatch.setattr(
        attend, "CASES", {"a": attend.AttendCase(3, 40, 2, 1, 16), "b": attend.AttendCase(2, 40, 2, 2, 16)}
    )
    sdpa = attend.sdpa
    monkeypatch.setattr(
        attend, "sdpa", lambda q, k, v, **given: seen.append(k.nbytes + v.nbytes) or sdpa(q, k, v, **given)
    )
    table = Table()
    attend.bench_attend_cuda(table)
    assert len(table.rows) == 2 * 4 and all(row["value"] > 0 for row in table.rows.values())
    for name in ("a", "b"):
        row = table.rows[f"GPU, {name}: attend in place: speed of attention over contiguous contexts"]
        contiguous, num_bytes = row["seconds"]["attention over contiguous contexts"], row["gb_per_s"] * 1e9
        assert row["value"] == pytest.approx(contiguous / row["seconds"]["triton"])
        assert min(seen) <= round(num_bytes * row["seconds"]["triton"]) <= 1.5 * max(seen)
    asked, tile_sizes = [], attend_triton.tile_sizes
    monkeypatch.setattr(attend_triton, "launch", lambda *given: asked.append(attend_triton.tile_sizes(1, 16, 4)[0]))
    attend.bench_attend_sizes(table)
    row = table.rows["GPU, a: attend in place: time over that of the fastest sizes"]
    assert row["fastest"] in row["seconds"] and row["value"] >= 1
    blocks = [tile_sizes(1, 16, 4)[0]["BLOCKS"], *(size[0] for size in attend.SIZES[True])]
    assert [of["BLOCKS"] for of in asked[:7]] == blocks


def test_overlap_has_ideals_of_kernels_and_of_launched_steps(tiny, monkeypatch):
    """By hand: kernels take 3 s in launched steps of 4 s, the link takes 2 s, and both together 5 s."""
    case = replace(tiny, device="1GiB")
    monkeypatch.setattr(overlap, "OVERLAP", case)
    table = Table()
    overlap.run_overlap(table, "6", 10.0)
    assert len(table.rows) == 4 and all(row["value"] > 0 for row in table.rows.values())
    seconds, ran = iter((5.5, 5.0, 4.0, 4.5)), []
    monkeypatch.setattr(overlap, "link_bytes_per_s", lambda device: 30.0)
    monkeypatch.setattr(overlap, "stream", lambda *_, **__: [loaded, computed])
    loaded = SimpleNamespace(resource="h2d", work=SimpleNamespace(link_bytes=60.0))
    computed = SimpleNamespace(resource="compute", work=SimpleNamespace(link_bytes=600.0))
    monkeypatch.setattr(overlap, "under_cupti", lambda run, on_cuda: {"kernels_s": 3.0})
    engine = SimpleNamespace(without_copies=lambda: ran.append("without copies") or contextlib.nullcontext())
    session = SimpleNamespace(engine=engine, wave=None, decode_result=lambda control: None)
    run = mix.Run(Table(), "overlap", case, torch.device("cpu"), None)
    monkeypatch.setattr(run, "seconds", lambda action: ran.append("decode") or next(seconds))
    overlap.add_rows(run, session)
    assert [row["value"] for row in run.table.rows.values()] == pytest.approx([2 / 3, 3 / 5, 4 / 5, 4 / 3])
    assert ran == ["decode", "decode", "without copies", "decode", "decode"]


def test_the_profile_goes_to_where_parts_look_for_it_and_to_the_results(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    asked = []

    def measured(shape, dtype, paced):
        from flexhybrid.core.files import profile_file

        asked.append((shape.name, dtype, paced.device.type))
        profile_file("cuda").parent.mkdir(parents=True)
        profile_file("cuda").write_text("a record")
        return None, ["a size"]

    monkeypatch.setattr("flexhybrid.jobs.profile.job.measure_hardware", measured)
    table = Table(path=tmp_path / "profile.json")
    parts.run_profile(table)
    assert asked == [("opt-6.7b", "float16", "cuda")] and (tmp_path / "hardware-cuda.json").read_text() == "a record"
    assert table.rows["profile: seconds"]["disagreements"] == ["a size"]


def test_pytests_status_is_a_row(monkeypatch):
    asked, codes = [], iter((0, 1, 1))
    monkeypatch.setattr(pytest, "main", lambda arguments: asked.append(arguments) or next(codes))
    for run, ok in ((parts.run_smoke, True), (parts.run_tests, False), (parts.run_smoke, False)):
        table = Table()
        with contextlib.nullcontext() if run is parts.run_tests else pytest.raises(SystemExit) as ended:
            run(table)
        assert table.rows["tests: pytest's exit status"]["ok"] is ok
        assert ended is None or ended.value.code == (not ok)
    smoke, every, _ = asked
    assert smoke[smoke.index("-k") + 1] == parts.SMOKE and "-k" not in every
    assert all(given[given.index("-m") + 1] == "cuda" and str(parts.cuda_test_files()[0]) in given for given in asked)


def test_the_smoke_tests_exist():
    """Every name in the selection is that of tests marked cuda."""
    text = "".join(file.read_text(encoding="utf-8") for file in parts.cuda_test_files())
    assert all(name in text for name in parts.SMOKE.split(" or "))


def test_a_sanitizer_follows_kernels_without_graphs(monkeypatch):
    """It runs the smoke tests; the program it starts switches graphs off."""
    from flexhybrid.runtime import engine

    table, asked = Table(), []
    monkeypatch.setattr(
        parts.subprocess, "run", lambda command, **_: asked.append(command) or SimpleNamespace(returncode=-9)
    )
    for installed in (None, "there"):
        monkeypatch.setattr(parts.shutil, "which", lambda name, installed=installed: installed)
        parts.run_sanitizer(table)
    assert "not installed" in table.rows["sanitizer"]["error"]
    assert table.rows["sanitizer: exit status"]["value"] == 9
    (command,) = asked
    monkeypatch.setattr(engine, "without_graphs", engine.without_graphs)  # taken back
    monkeypatch.setattr(pytest, "main", lambda arguments: int(engine.without_graphs("", "") != ""))
    with pytest.raises(SystemExit) as ended:
        exec(command[command.index("-c") + 1])
    assert ended.value.code == 1


# ---- what is beside a figure


def test_simultaneous_work_counts_once():
    """The result is compared with a count of each nanosecond."""
    generator = random.Random(0)
    names = {"kernels_s": "gemm", "h2d_s": "Memcpy HtoD (Pinned -> Device)", "d2h_s": "Memcpy DtoH (Device -> Pinned)"}
    for _ in range(20):
        busy, spans = {kind: set() for kind in names}, []
        for _ in range(generator.randrange(30)):
            kind, start = generator.choice(list(names)), generator.randrange(200)
            end = start + generator.randrange(20)
            busy[kind] |= set(range(start, end))
            spans.append(
                Span(names[kind] if generator.random() < 0.8 or kind != "kernels_s" else "Memcpy DtoD", start, end)
            )
        assert busy_seconds(spans) == {kind: len(at) / 1e9 for kind, at in busy.items()}


def test_spans_are_read_from_torchs_profiler():
    """CPU operations have the names, starts and ends of torch's own events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as traced:
        torch.randn(64, 64) @ torch.randn(64, 64)
    spans = spans_of(traced, "CPU")
    products = [span for span in spans if span.name == "aten::mm"]
    (event,) = [event for event in traced.events() if event.name == "aten::mm"]
    assert len(products) == 1
    assert (products[0].end - products[0].start) / 1e3 == pytest.approx(event.time_range.elapsed_us(), abs=0.01)


def test_cupti_that_fails_is_named():
    assert watch.under_cupti(lambda: None)["error"]  # no CUDA here
    assert watch.under_cupti(lambda: None, on_cuda=False)["wall_s"] >= 0


def test_clocks_and_power_since_the_row_before(monkeypatch):
    """Bit 2 is the power cap; a failed reading is left out."""
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    watcher = Watcher(lambda: (1200.0, 300.0, 4))
    watcher._readings = [(1980.0, 500.0, 0), (1700.0, 699.0, 4), (1800.0, 690.0, 1)]
    told = watcher.since_last()["gpu"]
    assert told["sm_mhz"] == [1700, 1800, 1980] and told["watts"] == [500, 690, 699]
    assert told["lower clocks by"] == {"power cap": pytest.approx(1 / 3)} and told["readings"] == 3
    assert watcher.since_last()["gpu"]["sm_mhz"] == [1200] * 3  # read now


def test_a_thread_reads_until_the_process_ends(monkeypatch):
    """A failed reading is left out."""
    read, done = iter(((1980, 1.0, 0), (1700, 2.0, 0))), threading.Event()

    def reading():
        try:
            return next(read)
        except StopIteration:
            done.set()
            raise RuntimeError("NVML") from None

    monkeypatch.setattr(watch, "EVERY_S", 0.001)
    watcher = Watcher(reading)
    assert done.wait(60)
    watcher._read = None  # the thread ends
    assert [mhz for mhz, *_ in watcher._readings] == [1980, 1700]
    watcher._readings.clear()
    watcher._read = reading
    assert watcher.since_last()["gpu"] == "NVML is not there"
    watcher._read = None


def test_nvml_is_read_by_its_names(monkeypatch):
    nvml = ModuleType("pynvml")
    given = {"HandleByIndex": "gpu", "Name": b"NVIDIA H200", "ClockInfo": 1980, "PowerUsage": 650_500}
    given |= {"CurrentClocksThrottleReasons": 4}
    for name, value in given.items():
        setattr(nvml, f"nvmlDeviceGet{name}", lambda *_, value=value: value)
    nvml.nvmlInit, nvml.NVML_CLOCK_SM = lambda: None, 1
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    name, read = watch.nvml_reader()
    assert name == "NVIDIA H200" and read() == (1980, 650.5, 4)
