"""The policy for a queue: what is found for one link is hardly worse there than what is found for another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from flexhybrid.core.model.shape import shape_from_config
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.workload import Workload
from policy_search.queue_search import best_for_queue
from policy_search.search import LOSSLESS, SearchSettings
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
