"""What the bench's rows are made of, against what they stand for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.bench import compression as bench_compression
from experiments.bench import host_kernels
from experiments.bench import selection as bench_selection
from experiments.bench.harness import Table
from experiments.bench.kernels import Sizes, bench_kernels
from experiments.gpu import bench as bench_gpu
from experiments.gpu import logits, overlap
from experiments.gpu.setting import Setting, make_bench
from flexhybrid import shipped
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.task import Task, Work
from flexhybrid.core.trace import TraceEvent
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.speed import PolicyRun
from flexhybrid.runtime.storage.loader import Checkpoint, RandomWeights
from flexhybrid.runtime.storage.weights import Weights
from flexhybrid.runtime.threads import torch_threads

SHAPE = ModelShape("opt-tiny", "opt", num_layers=2, hidden=64, num_heads=1, num_kv_heads=1, head_dim=64, ffn=64,
                   vocab=64, max_positions=2048)  # fmt: skip


def test_forced_logits_are_those_of_the_text_whatever_is_sampled(monkeypatch):
    """In native bits they are transformers' for the same text in one pass."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(bench_compression, "PROMPT", 20)
    monkeypatch.setattr(bench_compression, "STEPS", 5)
    folder = shipped.CHECKPOINT
    checkpoint = Checkpoint(folder)
    texts = np.random.default_rng(0).integers(3, checkpoint.shape.vocab, (2, 25)).tolist()
    logits = bench_compression.forced_logits(checkpoint, Policy("exact", cache=bench_compression.CACHE), texts)
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor(texts)).logits
    torch.testing.assert_close(logits, expected[:, 19:24], rtol=1e-4, atol=1e-4)


def test_the_selection_s_moved_share_is_that_of_its_layers():
    """Two of five layers load whole blocks, the others the cap's share of each head's tokens."""
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
    assert all(run.num_violated == 0 for run in found.values())


def timed(resource: str, verb: str, iteration: int, start_s: float, end_s: float) -> TraceEvent:
    return TraceEvent(Task(iteration, 0, 0, verb, resource, Work(), (), ()), start_s, end_s)


def test_a_task_starves_that_ends_as_soon_as_it_is_enqueued():
    """Two iterations of the window, a task of each kind before it, and one on another resource."""
    trace = [
        timed("compute", "attend", 1, 0.0, 1.0), timed("compute", "sample", 1, 1.0, 2.0),
        timed("h2d", "load_kv", 2, 0.0, 0.5),
        timed("compute", "attend", 2, 2.0, 3.0), timed("compute", "finish", 2, 3.5, 4.0),
        timed("compute", "sample", 2, 4.0, 5.0),
    ]  # fmt: skip
    # Enqueued long before; while the device is at it, and ended with it; long before.
    issued = [(0, 0.1), (0.1, 0.2), (0.2, 0.4), (3.2, 3.99999), (4.1, 4.2)]
    found = bench_gpu.launch_of(trace, issued)
    assert (found.seconds, found.num_tasks) == (3.0, 3)
    assert found.starved == {"attend": 0, "finish": 1, "sample": 0}
    assert found.starved_percent == pytest.approx(100 / 3)
    assert found.idle_s == pytest.approx({"attend": 0.0, "finish": 0.5 + 0.49999, "sample": 0.0})
    assert found.idle_percent == pytest.approx(100 / 3, rel=1e-4)
    assert found.issuing_s == pytest.approx(0.2 + 0.79999 + 0.1)


def test_the_bench_of_the_hosts_kernels_fills_its_rows(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr("experiments.bench.kernels.LARGE_BYTES", 2**20)
    monkeypatch.setattr("experiments.bench.kernels.REPEATS", 1)
    monkeypatch.setattr(host_kernels, "PACKED", (16, 128))
    table = Table()
    with torch_threads(2):
        host_kernels.bench_host_kernels(table, Sizes(2, 4, 64, 40, 32))
    assert all(row["value"] > 0 for row in table.rows.values())
    for name in ("attend_host", "quantize", "dequantize", "scatter", "gather"):
        rows = [row for row in table.rows if row.startswith(name)]
        assert any("one core" in row for row in rows) and any("2 cores" in row for row in rows)


def test_the_gpu_bench_fills_its_rows(monkeypatch):
    """On a CPU, whose lane is done with a task when it has issued it: each ends at the launcher's heels there."""
    monkeypatch.setattr("experiments.bench.kernels.LARGE_BYTES", 2**20)
    monkeypatch.setattr("experiments.bench.kernels.REPEATS", 1)
    monkeypatch.setattr(bench_gpu, "AT_THE_HEELS_S", 60.0)  # however busy this machine is
    setting = Setting("tiny", "float32", 4, 40, 8, 2)
    monkeypatch.setattr(bench_gpu, "SETTING", setting)
    shape = replace(SHAPE, hidden=128, num_heads=2, num_kv_heads=2)
    for number, policy in enumerate(bench_gpu.policies()):
        table = Table()
        with make_bench(shape, torch.device("cpu"), setting) as bench:
            contender = PolicyRun(bench, policy)
            if not number:
                bench_kernels(table, contender, Sizes(2, 4, 64, 40, 32))
                assert all(row["value"] > 0 for row in table.rows.values()) and "KV-Gen" in " ".join(table.rows)
            bench_gpu.bench_launcher(table, contender)
        starved = table.rows[f"launch, {policy.name}: tasks that starved"]
        assert starved["value"] == 100 and set(starved["idle_s_by_verb"]) >= {"embed", "project", "attend", "sample"}
        assert 0 < starved["issuing_share"] <= 1


def test_the_gpu_rows_of_overlap_have_ideals_of_kernels_and_of_launched_steps(monkeypatch):
    setting = Setting("tiny", "float32", 4, 40, 6, 2)
    monkeypatch.setattr(overlap, "shape_by_name", lambda name: replace(SHAPE, hidden=128, num_heads=2, num_kv_heads=2))
    table = Table()
    overlap.bench_overlap_cuda(table, {"tiny": setting}, lambda said: None)
    assert len(table.rows) == 2 * 4 and all(row["value"] > 0 for row in table.rows.values())
    for policy in overlap.policies(setting.mini_batch_tokens):
        ideals = table.rows[f"GPU, tiny, {policy.name}: balance of link and kernels"]
        by_kernels = table.rows[f"GPU, tiny, {policy.name}: overlap, by kernels"]["value"]
        assert by_kernels == pytest.approx(max(ideals["link_s"], ideals["kernels_s"]) / ideals["wall_s"])


def test_recomputed_keys_and_values_change_logits_less_than_bfloat16_does():
    shape, setting = replace(SHAPE, hidden=128, num_heads=2, num_kv_heads=2), Setting("tiny", "bfloat16", 4, 40, 5, 2)
    table = Table()
    logits.bench_logits(table, shape, setting, lambda said: None)
    assert len(table.rows) == 2 and all(row["ok"] and row["own_error"] > 0 for row in table.rows.values())
    exact = logits.forced_logprobs(shape, setting._replace(dtype="float32"), "KV")
    assert torch.allclose(exact.exp().sum(-1), torch.ones(4, 5), atol=1e-4)
    assert torch.allclose(exact, logits.forced_logprobs(shape, setting._replace(dtype="float32"), "ACT"), atol=1e-4)
