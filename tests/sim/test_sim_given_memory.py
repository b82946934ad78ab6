"""A device memory that is given counts in predictions and searches as it does in a run."""

from dataclasses import replace

import pytest

from flexhybrid.core.memory import total_bytes
from flexhybrid.core.problem import AttentionPaths, Budgets, Problem
from flexhybrid.core.waves import wave_plan
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.simulate import queue_setting, setting_of, simulate_queue
from policy_search.search import LOSSLESS, SearchSettings, search
from policy_search.systems import System
from sim import catalogue
from sim.presets import kv_only
from sim.simulate import simulate


@pytest.mark.parametrize("model, budget, host", [("opt-6.7b", 18, 96), ("llama-3-8b", 12, 64)])
def test_a_policy_for_a_given_device_memory_fits_it_as_a_run_counts(model, budget, host):
    point = {"model": model, "hardware": "h100", "batch": 64, "prompt_len": 512, "gen_len": 32}
    point |= {"device_memory": f"{budget}GiB", "host_memory": f"{host}GiB"}
    setting, size = setting_of(point), int(budget * 2**30)
    found = search(setting.problem, setting.workload, SearchSettings(max_batch=64, space=LOSSLESS))
    policies = [found.policy, kv_only(), replace(kv_only(), cache={"kv@device": 1.0})]
    ways = [None, AttentionPaths("fused", "fused", "fused", in_place=True), AttentionPaths("fused", "fused", "fused")]
    for policy in policies:
        run = simulate(setting.problem, policy, 64, 512, 32)
        for attention in ways:
            own = Problem(
                shape=setting.problem.shape,
                hardware=catalogue.load("h100"),
                attention=attention,
                budgets=Budgets(size, host << 30),
            )
            needed = total_bytes(wave_plan(own, policy, Workload.uniform(run.wave, 512, 32)))
            assert needed["device"] <= size, (policy.name, attention)
            if attention is None:
                assert needed["device"] == pytest.approx(run.peak_bytes["device"], rel=1e-6)
    queue = queue_setting(point, setting.workload)
    made = System("kv_only", kv_only(), queue.machine)
    assert simulate_queue(queue, made, setting.workload).peak_bytes["device"] <= size
