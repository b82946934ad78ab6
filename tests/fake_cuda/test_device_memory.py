"""Test CUDA's allocator: its settings, and the bytes it reserves for real models (``fake_cuda.reserved``)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_cuda.caching import MIB
from fake_cuda.reserved import AUTO, GIB, auto_case, check_policies, reserved_by

from flexhybrid.core.memory import CONTEXT_BYTES, GRAPH_BYTES, MOST_GRAPHS, memory_plan
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import AttentionPaths, Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.storage.weights import SETTINGS, allow_expandable_segments

IN_PLACE = AttentionPaths("fused", "flash", "fused", in_place=True)


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    given: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append, raising=False)
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    return given


def test_segments_may_grow_on_cuda_alone(asked):
    allow_expandable_segments(torch.device("cpu"))
    assert not asked
    allow_expandable_segments(torch.device("cuda"))
    assert asked == ["expandable_segments:True"]


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_user_stay(asked, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64")
    allow_expandable_segments(torch.device("cuda"))
    assert asked == ["max_split_size_mb:64,expandable_segments:True"]
    monkeypatch.setenv(name, "expandable_segments:False")
    allow_expandable_segments(torch.device("cuda"))
    assert len(asked) == 1


def test_without_such_segments_the_run_goes_on(monkeypatch, asked):
    def refuse(settings: str) -> None:
        raise RuntimeError("the allocator is another one")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse)
    with pytest.warns(UserWarning, match="segments of fixed size: the allocator is another one"):
        allow_expandable_segments(torch.device("cuda"))


def test_an_older_torch_has_another_name_for_it(monkeypatch, asked):
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", asked.append)
    allow_expandable_segments(torch.device("cuda"))
    assert asked == ["expandable_segments:True"]


@pytest.mark.parametrize(("name", "expandable"), [*((name, True) for name in AUTO), ("opt-6.7b", False)])
def test_auto_leaves_three_percent_of_the_budget(name, expandable):
    """Policies use their whole plan; weights are drawn on the device."""
    wave, budget = auto_case(name)
    found = reserved_by(wave, expandable, limit=budget - CONTEXT_BYTES)
    assert found.retries == 0
    assert found.unused < 48 * MIB  # the rest of a page or segment of each kind; no tensor lies in a larger one's
    assert found.reserved + CONTEXT_BYTES <= 0.97 * budget, f"{found.reserved / GIB:.3f} GiB of {budget / GIB:.3f}"


def test_graphs_of_recomputed_prefixes_take_what_is_planned():
    """Steps have 485 rows of the 512 that have graphs."""
    shape = replace(shape_by_name("opt-6.7b"), num_layers=2)
    policy, found = Policy(cache={"tok": 0.25, "kv@host": 0.75}), []
    for cuda_graphs in (False, True):
        machine = {"device": "cuda", "attention": IN_PLACE, "cuda_graphs": cuda_graphs}
        wave = admit(Problem(shape=shape, **machine), policy, Workload.uniform(5, 390, 6))
        found.append(reserved_by(wave, expandable=True, iterations=6))
    planned = memory_plan(wave.problem, policy, buffer_sizes(wave))["device"]["CUDA graphs"] - MOST_GRAPHS * GRAPH_BYTES
    assert found[1].kept and 0.5 * planned < found[1].reserved - found[0].reserved <= planned


def test_random_policies_stay_within_their_plans():
    """These are the first policies of ``make reserved``."""
    assert max(check_policies(3)) <= 1
