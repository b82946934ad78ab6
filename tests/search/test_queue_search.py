"""Test the policy for a queue: more requests at a time, and other mini-batches, are tried."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np

from flexhybrid.core.model.shape import shape_from_config
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.workload import Workload
from policy_search.queue_search import _Ranking, best_for_queue
from policy_search.search import LOSSLESS, SearchResult, SearchSettings
from sim.queue_clock import price_queue
from tests.toy_machine import MIB, machine

MODEL = Path(__file__).parents[2] / "flexhybrid" / "shipped" / "opt-stdlib-4m"


def test_more_requests_than_a_search_took_are_tried_at_a_time():
    prompts = 256 + np.random.default_rng(3).integers(-150, 150, 200)
    workload = Workload(prompts, np.full(200, 48))
    settings = SearchSettings(max_batch=256, space=replace(LOSSLESS, weights=("host",)), confirm=False)
    shape, budgets = shape_from_config(MODEL), Budgets(device=32 * MIB, host=1 << 32)
    problems = [
        Problem(shape=shape, dtype="bfloat16", hardware=machine(link=link, gflops=100), budgets=budgets)
        for link in (0.4, 0.13)
    ]
    found = [best_for_queue(problem, workload, settings) for problem in problems]
    for problem, own in zip(problems, found, strict=True):
        seconds = [price_queue(problem, choice.policy, workload, 256).total_s for choice in found]
        assert own.run.total_s <= 1.03 * min(seconds)


def test_other_mini_batches_are_tried_if_the_longest_requests_limit_the_batch():
    """A policy that runs 13 of 30 requests is also priced with larger and smaller mini-batches."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(16, 100, 30), rng.integers(8, 100, 30)
    order = np.lexsort(lengths)[::-1]
    workload = Workload(lengths[0][order], lengths[1][order])
    budgets = Budgets(device=12 * MIB, host=1 << 30)
    hardware = machine(link=0.8, gflops=100)
    problem = Problem(shape=shape_from_config(MODEL), dtype="bfloat16", hardware=hardware, budgets=budgets)
    policy = Policy("wide", Placement(host=1), cache={"kv@host": 1.0}, max_mini_batch_tokens=774)
    ranking, found = _Ranking(problem, workload), cast(SearchResult, SimpleNamespace(batch=30))
    assert ranking.add(policy, 30, found) == 13
    ranking.try_sizes(30)
    seconds = min(ranked.choice.run.total_s for ranked in ranking.choices)
    smaller = price_queue(problem, replace(policy, max_mini_batch_tokens=580), workload, 30).total_s
    assert seconds <= 1.03 * smaller
    assert smaller < 0.94 * price_queue(problem, policy, workload, 30).total_s
