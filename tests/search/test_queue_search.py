"""The policy for a queue: what is found for one link is hardly worse there than what is found for another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from flexhybrid.core.model.shape import shape_from_config
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.workload import Workload
from policy_search.queue_search import best_for_queue
from policy_search.search import LOSSLESS, PLAIN, SearchSettings
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


def test_other_mini_batches_are_tried_where_the_longest_requests_decide_how_many_run():
    """What a search finds for the mean lengths, priced in half and twice as many tokens a mini-batch, is no better."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(16, 150, 30), rng.integers(8, 150, 30)
    order = np.lexsort(lengths)[::-1]
    workload = Workload(*(of[order] for of in lengths))
    settings = SearchSettings(max_batch=30, space=replace(PLAIN, weights=("host",)))
    problem = Problem(
        shape=shape_from_config(MODEL),
        dtype="bfloat16",
        hardware=machine(link=0.8, gflops=100),
        budgets=Budgets(device=11 * MIB, host=1 << 30),
    )
    found = best_for_queue(problem, workload, settings)
    assert found.run.at_a_time < 0.75 * 30
    for times in (0.5, 0.75, 4 / 3, 2):
        tokens = int(times * found.policy.max_mini_batch_tokens)
        other = replace(found.policy, max_mini_batch_tokens=tokens, max_batch=None)
        assert found.run.total_s <= 1.03 * price_queue(problem, other, workload, 30).total_s
