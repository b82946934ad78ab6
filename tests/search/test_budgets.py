"""What ``search`` and ``simulate`` plan in a budget of a GPU's memory, a run in that budget has room for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flexhybrid import resolve
from flexhybrid.arguments import LLMArguments
from flexhybrid.core.errors import InputError
from flexhybrid.core.memory import memory_plan, total_bytes
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import AttentionPaths, Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.units import parse_bytes
from flexhybrid.core.wave import admit
from flexhybrid.core.waves import batch_size
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.search import PolicySearchOptions, search_queue, settings_of
from flexhybrid.jobs.simulate import named_system, setting_of, simulate_system
from policy_search.search import search
from policy_search.systems import Setting

H200 = str(Path(__file__).parents[2] / "experiments/results/nvidia-h200/profiles/hardware-cuda.json")
MODELS = ("opt-1.3b", "opt-6.7b", "opt-13b", "llama-2-7b", "llama-3-8b")
MACHINES = (H200, "h100", "rtx4090", "t4")


@pytest.fixture(autouse=True)
def proved(monkeypatch):
    """Triton's kernels run, as far as a run knows."""
    monkeypatch.setattr(resolve, "proved_on_gpu", lambda *of: True)


def run_problems(setting: Setting, hardware: str, budgets: dict) -> list[Problem]:
    """Return what ``LLM`` makes of these budgets on that machine; on one that was not measured it attends in place or
    side by side."""
    ways = (True,) if setting.problem.hardware.attends_in_place else (True, False)
    paths = [AttentionPaths("fused", "products", "fused", in_place=way, on_host=True) for way in ways]
    asked = [LLMArguments("", "auto", "cuda", hardware=hardware, budgets=budgets, attention=of) for of in paths]
    paced = resolve.PacedDevice(torch.device("cuda"))
    return [resolve.resolve_problem(arguments, setting.problem.shape, paced) for arguments in asked]


def check_admitted(problem: Problem, policy: Policy, workload: Workload) -> dict[str, int]:
    """Raise AssertionError where the run's plan is over a budget; return its bytes."""
    planned = total_bytes(memory_plan(problem, policy, buffer_sizes(admit(problem, policy, workload))))
    for tier, budget in problem.budgets.items():
        assert budget is None or planned[tier] <= budget, (tier, planned[tier], budget, policy)
    return planned


@pytest.mark.parametrize("seed", [1, 2])
def test_a_searched_policy_is_admitted_by_a_run(seed):
    """With as many requests at a time as it was searched for; as is a named system's with as many as were simulated."""
    rng, count = np.random.default_rng(100 + seed), 0
    while count < 2:
        model, hardware = str(rng.choice(MODELS)), str(rng.choice(MACHINES))
        prompt, generated, most = (int(2 ** rng.uniform(*ends)) for ends in ((5, 10), (2, 6), (0, 6)))
        budgets = {"device": f"{2 ** rng.uniform(1, 5):.3f}GiB", "host": f"{2 ** rng.uniform(4, 6):.2f}GiB"}
        options = PolicySearchOptions(model, hardware, prompt, generated, max_batch=most, lossless=bool(seed % 2))
        point = {"model": model, "hardware": hardware, "prompt_len": prompt, "gen_len": generated, "batch": most}
        setting = setting_of(point, budgets)
        try:
            found = search(setting.problem, setting.workload, settings_of(options, setting))
            simulated = simulate_system(setting, named_system("hybrid(0.5)", setting))
        except InputError:  # nothing fits
            continue
        count += 1
        for problem in run_problems(setting, hardware, budgets):
            check_admitted(problem, found.policy, Workload.uniform(found.batch, prompt, generated))
            check_admitted(problem, simulated.policy, Workload.uniform(simulated.wave, prompt, generated))


def test_what_was_searched_for_18_gib_takes_no_more():
    """It took 18.91 GiB in a run once: 15 requests at a time, without the context and what the allocator holds."""
    budgets, workload = {"device": "18GiB", "host": "96GiB"}, Workload.uniform(128, 512, 32)
    options = PolicySearchOptions("opt-6.7b", H200, 512, 32, max_batch=128, lossless=True, budgets=budgets)
    setting = setting_of(
        {"model": "opt-6.7b", "hardware": H200, "prompt_len": 512, "gen_len": 32, "batch": 128}, budgets
    )
    found = search(setting.problem, setting.workload, settings_of(options, setting))
    (problem,) = run_problems(setting, H200, budgets)
    planned = check_admitted(problem, found.policy, Workload.uniform(found.batch, 512, 32))
    assert planned["device"] > 0.95 * parse_bytes("18GiB") and found.batch == 12
    with pytest.raises(AssertionError):
        check_admitted(problem, found.policy, Workload.uniform(15, 512, 32))
    lengths = PolicySearchOptions("opt-6.7b", H200, lengths=workload, max_batch=128, lossless=True, budgets=budgets)
    queue = search_queue(lengths)
    places, _ = batch_size(problem, queue.system.policy, workload, 128)
    assert queue.run.at_a_time <= places and queue.peak_bytes["device"] <= parse_bytes("18GiB")
