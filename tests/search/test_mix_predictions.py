"""The documents' predictions of mixes on an H200 are those of the GPU's part by the committed record."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from experiments.bench.harness import Table
from experiments.gpu import mix
from flexhybrid.core.hardware import load_hardware
from flexhybrid.core.problem import AttentionPaths

ROOT = Path(__file__).parents[2]
RECORD = load_hardware(ROOT / "experiments/results/nvidia-h200/profiles/hardware-cuda.json")


@pytest.mark.skipif("2026-11-26" not in RECORD.source, reason="the page's predictions are by an earlier record")
def test_the_long_context_is_predicted_as_the_page_says(monkeypatch):
    (row,) = re.findall(
        r"^\| Llama-2-7B-32K, .*$", (ROOT / "experiments/results/NOTES.md").read_text(encoding="utf-8"), re.M
    )
    cells = [[float(number) for number in re.findall(r"[\d.]+", cell)] for cell in row.split("|")[2:-1]]
    monkeypatch.setattr(
        mix, "fastest_paths", lambda *of: AttentionPaths("fused", "fused", "fused", in_place=True, on_host=True)
    )
    run = mix.Run(Table(), "long", mix.CASES["long"], torch.device("cuda"), RECORD)
    found = []
    for kind in ("kv", "act", "mix"):
        run.policy(kind)
        rows = (run.table.rows[f"long, {kind}: {what}predicted"] for what in ("", "decode, "))
        found.append([of["value"] for of in rows])
    found += [[a / b for a, b in zip(found[2], other, strict=True)] for other in (found[1], found[0])]
    for cell, numbers in zip(cells, found, strict=True):
        assert cell == pytest.approx(numbers, rel=0.03)
