"""Test parts of ``make gpu`` on the fake device: their CUDA branches, with graphs and caches that cross the link."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_cuda.device import DEVICE, fake_cuda
from oracles import attend_table
from toy_machine import machine

from experiments.bench.harness import Table
from experiments.gpu import mix, resident
from experiments.gpu.cases import Case
from experiments.gpu.runner import WITHOUT_GRAPHS
from flexhybrid.core.memory import GRAPH_BYTES
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.runtime.profiling import attention_paths
from flexhybrid.runtime.storage.loader import RandomWeights

attend_triton = pytest.importorskip("flexhybrid.runtime.kernels.attend_triton", reason="triton is not installed")
SIZES = {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 97}
OPT = {"model_type": "opt", "max_position_embeddings": 128, "word_embed_proj_dim": 64, "torch_dtype": "float32"} | SIZES


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a tiny model on the fake device, with given readings of the allocator and CUPTI."""
    (tmp_path / "config.json").write_text(json.dumps(OPT))
    told = {"memory_reserved": 0, "max_memory_reserved": 1 << 20, "mem_get_info": (1 << 30, 1 << 31)}
    told |= {"reset_peak_memory_stats": None, "empty_cache": None, "synchronize": None}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    limits = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda of: SimpleNamespace(total_memory=64 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    monkeypatch.setattr(attend_triton, "launch", attend_table.launch)
    monkeypatch.setattr(attention_paths, "proved_on_gpu", lambda *_: True)
    monkeypatch.setattr(mix, "RandomWeights", lambda shape, device: RandomWeights(shape))
    monkeypatch.setattr(resident, "GRAPH_TURNS", 1)
    for module in (mix, resident):
        monkeypatch.setattr(module, "under_cupti", lambda action, on_cuda: (action(), {"kernels_s": 0.0})[1])
        monkeypatch.setattr(module, "named_hardware", lambda *_: replace(machine(), device="cuda"))

    def make(device: str, most: int, kinds: tuple[str, ...]):
        shape = str(tmp_path / "config.json")
        case = Case(shape, device, "1GiB", 40, 5, most, 3, kinds, bars={}, together=True, dtype="float32")
        return mix.Run(Table(), "tiny", case, DEVICE, replace(machine(), device="cuda")), limits

    return make


def test_a_mix_runs_by_graphs_within_its_memory(run, monkeypatch):
    """Policies are given, so that caches cross the link; a search for a tiny model would keep all resident."""

    def searched(problem, workload, settings):
        cache = {"kv@host": 1.0} if "act@host" not in settings.space.entries else {"kv@device": 0.5, "act@host": 0.5}
        policy = Policy("told", Placement(device=1.0), cache=cache, max_mini_batch_tokens=500)
        return SimpleNamespace(policy=policy, batch=2, prediction={"tokens_per_s": 1, "decode_tokens_per_s": 1})

    monkeypatch.setattr(mix, "search", searched)
    of, limits = run("2GiB", 2, ("mix", "kv"))
    released: list[bool] = []
    monkeypatch.setattr(mix, "release_cached", lambda _: of._weights and released.append(True))
    with fake_cuda():
        mix.run_case(of)
    monkeypatch.setenv(WITHOUT_GRAPHS, "1")
    assert of.problem.cuda_graphs and not replace(of, name="anew").problem.cuda_graphs
    rows = of.table.rows
    assert not [row for row in rows.values() if "error" in row], rows
    assert limits == [pytest.approx((2 * 2**30 - mix.CONTEXT_BYTES) / 2**36)]
    assert released == 2 * [True]  # behind each kind, before the weights go
    for kind in ("mix", "kv"):
        assert "CUDA graphs" in rows[f"tiny, {kind}: decode, measured"]["graphs"]
        assert rows[f"tiny, {kind}: memory over the budget"]["ok"]
    assert rows["tiny: tokens of kv that are those of mix"]["value"] == 1


def test_a_resident_run_tells_what_graphs_save_and_keep(run, monkeypatch):
    """The driver's memory is given: half of the planned memory for graphs of two layers."""
    of, _ = run("2GiB", 3, ())
    free = iter((1 << 30, (1 << 30) - GRAPH_BYTES))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 1 << 31))
    with fake_cuda():
        resident.measure_resident(of)
    rows = {name.removeprefix("CUDA graphs, resident: "): row for name, row in of.table.rows.items()}
    assert rows["bytes that the driver keeps of a graph, over those that the plan counts"]["value"] == 0.5
    launching = rows["a decode's time to launch without them, over with them"]
    seconds = launching["seconds and those of launching"]
    assert launching["value"] == pytest.approx(seconds["none"][1] / seconds["joint"][1])
    assert "11 CUDA graphs" in launching["graphs"]  # of two layers, four verbs, together and apart, and of the step
    apart = rows["a decode's time with a graph a verb, over one for verbs with nothing between them"]
    assert apart["value"] == pytest.approx(seconds["a verb"][0] / seconds["a layer"][0])
    whole = rows["a decode's time with a graph a layer, over one a step where steps may have one"]
    assert whole["value"] == pytest.approx(seconds["a layer"][0] / seconds["joint"][0])
    assert rows["resident: idle GPU in a decode"]["value"] == 100
