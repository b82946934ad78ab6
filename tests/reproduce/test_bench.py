"""Test the rows of the benches against what they measure."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from experiments.bench import __main__ as command
from experiments.bench import harness, host_kernels
from experiments.bench import selection as bench_selection
from experiments.bench.harness import Table
from experiments.bench.kernels import KernelSizes, bench_kernels
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.speed import Bench, PolicyRun
from flexhybrid.resolve import PacedDevice
from flexhybrid.runtime.process_settings import torch_threads
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import Weights
from sim.presets import hybrid

SHAPE = ModelShape("opt-tiny", "opt", num_layers=2, hidden=64, num_heads=1, num_kv_heads=1, head_dim=64, ffn=64,
                   vocab=64, max_positions=2048)  # fmt: skip


def test_the_selection_s_moved_share_is_that_of_its_layers():
    """Two of five layers load whole blocks; the others load the capped share of each head's tokens."""
    shape, prompt, batch = replace(SHAPE, num_layers=5, num_heads=2, num_kv_heads=2, head_dim=32), 100, 2
    workload = Workload.uniform(batch, prompt, bench_selection.MAX_TOKENS)
    device = Placement(device=1.0)
    weights = Weights(shape, RandomWeights(shape), "float32", torch.device("cpu"), Policy(weights=device))
    try:
        found = {
            name: bench_selection.measure(policy, weights, workload, num_rounds=1, rate=50.0)
            for name, policy in bench_selection.policies().items()
        }
    finally:
        weights.close()
    contexts = [prompt + i for i in (1, 2, 3)]  # the window's iterations: all but the first and the last
    whole = sum(-(-n // BLOCK_TOKENS) * BLOCK_TOKENS for n in contexts) / sum(contexts)
    chosen = sum(-(-n * bench_selection.CAP // 1) for n in contexts) / sum(contexts)
    assert found["full cache"].moved == pytest.approx(whole)
    assert found["InfiniGen"].moved == pytest.approx((2 * whole + 3 * chosen) / 5)
    assert found["full cache"].own_s == dict.fromkeys(bench_selection.OWN_COST, 0.0)
    assert min(found["InfiniGen"].own_s.values()) > 0


def test_the_bench_of_the_hosts_kernels_fills_its_rows(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr("experiments.bench.kernels.LARGE_BYTES", 2**20)
    monkeypatch.setattr("experiments.bench.kernels.REPEATS", 1)
    monkeypatch.setattr(host_kernels, "PACKED", (16, 128))
    table = Table()
    with torch_threads(2):
        host_kernels.bench_host_kernels(table, KernelSizes(2, 4, 64, 40, 32))
    assert all(row["value"] > 0 for row in table.rows.values())
    for name in ("attend_host", "quantize", "dequantize", "unpack FP8", "unpack int4", "scatter", "gather"):
        rows = [row for row in table.rows if row.startswith(name)]
        assert any("one core" in row for row in rows) and any("2 cores" in row for row in rows)


def test_the_bench_of_kernels_fills_its_rows(monkeypatch):
    monkeypatch.setattr("experiments.bench.kernels.LARGE_BYTES", 2**20)
    monkeypatch.setattr("experiments.bench.kernels.REPEATS", 1)
    shape, prompts = replace(SHAPE, hidden=128, num_heads=2, num_kv_heads=2), [[3] * 40] * 4
    make_weights = partial(Weights, shape, RandomWeights(shape), "float32", torch.device("cpu"))
    table, problem = Table(), Problem(shape=shape, dtype="float32")
    with Bench(make_weights, problem, prompts, 8, PacedDevice(torch.device("cpu"))) as bench:
        bench_kernels(table, PolicyRun(bench, hybrid(0.5, 200)), KernelSizes(2, 4, 64, 40, 32))
    assert all(row["value"] > 0 for row in table.rows.values()) and "KV-Gen" in " ".join(table.rows)


def test_a_part_renews_only_its_rows(tmp_path, monkeypatch):
    """Modules in the folder and below it register; the measurement of "layers" is replaced."""
    command.load()
    assert {"search", "layer_kinds", "refill"} <= {
        f.__module__.split(".")[-1] for of in harness.BENCHES.values() for f in of
    }
    (tmp_path / "bench.json").write_text('{"old": {"part": "run", "ok": true}, "gone": {"part": "layers", "ok": true}}')
    monkeypatch.setitem(harness.BENCHES, "layers", [lambda table: table.at_most("new", 3, 2, "x")])
    monkeypatch.setattr("sys.argv", ["bench", "--out", str(tmp_path), "--only", "layers"])
    command.main()
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert {name: (row["part"], row["ok"]) for name, row in rows.items()} == {
        "old": ("run", True),
        "new": ("layers", False),
    }
