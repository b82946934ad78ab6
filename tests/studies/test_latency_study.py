"""The study of latency over InfiniGen's threshold, on short prompts and a fast link."""

from __future__ import annotations

import pytest

from experiments.reproduce.infinigen import accuracy_policies as studied
from experiments.studies import latency_study
from flexhybrid import shipped


def test_more_of_the_cache_moves_with_alpha_and_all_of_it_without_a_selection(tmp_path, monkeypatch):
    monkeypatch.setattr(latency_study, "RATE", 10.0)
    monkeypatch.setattr(latency_study, "ROUNDS", 1)
    found = latency_study.study(shipped.CHECKPOINT, tmp_path, length=128)
    moved = {name: row["moved"] for name, row in found["policies"].items()}
    assert list(moved) == ["full cache", *(f"alpha {alpha:g}" for alpha in studied.ALPHAS)]
    assert found["prompt_tokens"] == 120 and moved.pop("full cache") == pytest.approx(1, abs=16 / 120)
    assert list(moved.values()) == sorted(moved.values()) and 0.5 < min(moved.values()) < max(moved.values()) < 1.2
    for row in found["policies"].values():
        assert min(row["rounds_s"]) <= row["step_s"] <= max(row["rounds_s"]) and row["step_s"] > 0
