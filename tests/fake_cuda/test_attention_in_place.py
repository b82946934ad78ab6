"""Test on the fake device attention that reads keys and values in place, by a table. Plain torch stands in for the
kernels, so that each byte in the table is checked against the order of events."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from fake_cuda.device import fake_cuda
from fake_cuda.test_streams import (
    EVERYWHERE,
    FEW,
    LOSSY,
    MAX_TOKENS,
    POLICIES,
    PROMPTS,
    check_clean,
    check_found,
    run_under,
    undeclared,
    without_hazard,
)
from models import save_llama, save_opt
from oracles import attend_table
from tiny_models import greedy, save_tiny

from flexhybrid.core.problem import AttentionPaths
from flexhybrid.runtime.storage.loader import Checkpoint

attend_triton = pytest.importorskip("flexhybrid.runtime.kernels.attend_triton", reason="triton is not installed")

MODELS = ("gemma2", "gpt_oss")  #: with softcaps, and with sinks; both have windows
IN_PLACE = AttentionPaths("fused", "products", "fused", in_place=True)


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Return the kernels' calls, which plain torch computes."""
    made = []
    monkeypatch.setattr(attend_triton, "launch", lambda *given: (made.append(given[3]), attend_table.launch(*given)))
    return made


@pytest.fixture(scope="module")
def checkpoint(tiny_opt):
    return Checkpoint(tiny_opt[0]), greedy(tiny_opt[1], PROMPTS, MAX_TOKENS)


@pytest.mark.parametrize("name", ["mixed tiers", "everywhere"])
def test_policies_with_attention_in_place(checkpoint, launches, name):
    source, expected = checkpoint
    with fake_cuda(seed=len(name)) as watch:
        result = run_under(source, EVERYWHERE if name == "everywhere" else POLICIES[name], attention=IN_PLACE)
    assert result.tokens == expected and launches
    assert "assemble" not in {event.task.verb for event in result.trace}
    check_clean(result, watch)


@pytest.mark.parametrize("kind", ["opt", "mistral"])
def test_recomputed_prefixes_are_read_among_the_projected_rows(tmp_path, launches, monkeypatch, kind):
    """Prompts have zero to three recomputed blocks, and one has a window that begins in such a block."""
    prompts, cache = [[5, 9, 11], [*range(3, 60)], [7] * 90, [*range(10, 45)]], {"tok": 0.6, "kv@host": 0.2}
    policy = replace(POLICIES["hybrid"], cache=cache | {"act@device": 0.2}, max_mini_batch_tokens=900)
    sizes = {"positions": 160} if kind == "opt" else {"kind": kind, "sliding_window": 60}
    model = (save_opt if kind == "opt" else save_llama)(tmp_path, **sizes)
    with fake_cuda() as watch:
        result = run_under(Checkpoint(tmp_path), policy, attention=IN_PLACE, requests=(prompts, MAX_TOKENS))
    assert result.tokens == greedy(model, prompts, MAX_TOKENS) and launches
    assert {"attend_recomputed"} == {event.task.verb for event in result.trace} & {"attend_recomputed", "assemble"}
    check_clean(result, watch)


@pytest.mark.parametrize("kind", ["mistral", *MODELS])
def test_windows_softcaps_and_sinks(tmp_path, launches, kind):
    """All tiers are used; the kernels themselves apply sinks and softcaps."""
    model = save_tiny(tmp_path, kind) if kind in MODELS else save_llama(tmp_path, kind=kind, sliding_window=9)
    with fake_cuda() as watch:
        result = run_under(Checkpoint(tmp_path), EVERYWHERE, attention=IN_PLACE)
    assert result.tokens == greedy(model, PROMPTS, MAX_TOKENS) and launches
    assert any(rule.softcap for rule in launches) == (kind == "gemma2")
    assert any(rule.sinks_H is not None for rule in launches) == (kind == "gpt_oss")
    check_clean(result, watch)


def test_few_bits_give_the_tokens_of_assembled_contexts(tmp_path, launches):
    save_opt(tmp_path, heads=4, ffn=64)
    source = Checkpoint(tmp_path)
    with fake_cuda() as watch:
        result = run_under(source, LOSSY["packed"], attention=IN_PLACE)
    assert launches
    check_clean(result, watch)
    assert run_under(source, LOSSY["packed"], device=torch.device("cpu")).tokens == result.tokens


PLANTED = {
    "write after read": (partial(without_hazard, "write_after_read"), None),
    "attend reads what is loaded": (None, undeclared(reads="attend")),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(checkpoint, name):
    plant, changed = PLANTED[name]
    policy = POLICIES["kv"]
    check_found(lambda: run_under(checkpoint[0], policy, changed, requests=FEW, attention=IN_PLACE), plant)
