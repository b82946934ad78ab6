"""The documents' predictions of mixes on an H200 are those of the simulator by the committed record."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from flexhybrid.core.hardware import load_hardware
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.problem import AttentionPaths, Budgets, Problem
from flexhybrid.core.units import parse_bytes
from flexhybrid.core.workload import Workload
from policy_search.search import LOSSLESS, SearchSettings, search

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "experiments/results/nvidia-h200/profiles/hardware-cuda.json"
KV, ACT = ("kv@device", "kv@host"), ("act@device", "act@host")
LONG = replace(shape_by_name("llama-2-7b"), max_positions=32768)


def test_the_long_context_is_predicted_as_the_page_says():
    (row,) = re.findall(r"^\| Llama-2-7B-32K, .*$", (ROOT / "docs/results.md").read_text(encoding="utf-8"), re.M)
    cells = [[float(number) for number in re.findall(r"[\d.]+", cell)] for cell in row.split("|")[2:-1]]
    problem = Problem(
        shape=LONG,
        hardware=load_hardware(RECORD),
        budgets=Budgets(parse_bytes("27GiB"), parse_bytes("64GiB")),
        attention=AttentionPaths("fused", "fused", "fused", in_place=True),
    )
    found = []
    for entries in (KV, ACT, (*KV, *ACT)):
        space = replace(LOSSLESS, entries=entries, both=(), attention=("device",))
        run = search(problem, Workload.uniform(1, 30_000, 128), SearchSettings(batch=1, space=space)).prediction
        found.append([run["tokens_per_s"], run["decode_tokens_per_s"]])
    kv, act, mix = found
    found += [[a / b for a, b in zip(mix, other, strict=True)] for other in (act, kv)]
    for cell, numbers in zip(cells, found, strict=True):
        assert cell == pytest.approx(numbers, rel=0.03)
