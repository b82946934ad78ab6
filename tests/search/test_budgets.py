"""Test that policies planned by ``search`` and ``simulate`` for a GPU memory budget are admitted by a run, and that
searches keep limits of TTFT and TPOT."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from toy_machine import MIB, SHAPE, machine

from flexhybrid import resolve
from flexhybrid.arguments import LLMArguments
from flexhybrid.core.admission import batch_size
from flexhybrid.core.errors import InputError
from flexhybrid.core.memory import memory_plan, total_bytes
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import AttentionPaths, Budgets, Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.units import parse_bytes
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.jobs import search as searches
from flexhybrid.jobs.search import (
    PolicySearchOptions,
    describe_found,
    describe_rivals,
    run_search,
    search_queue,
    search_record,
    settings_of,
)
from flexhybrid.jobs.simulate import named_system, setting_of, simulate_system
from policy_search.search import PLAIN, SearchSettings, TooSlowError, search
from policy_search.systems import Setting
from sim.array_clock import predict
from sim.candidates import Candidates

H200 = str(Path(__file__).parents[2] / "experiments/results/nvidia-h200/profiles/hardware-cuda.json")
MODELS = ("opt-1.3b", "opt-6.7b", "opt-13b", "llama-2-7b", "llama-3-8b")
MACHINES = (H200, "h100", "rtx4090", "t4")


@pytest.fixture(autouse=True)
def proved(monkeypatch):
    """Declare Triton's kernels usable."""
    monkeypatch.setattr(resolve, "proved_on_gpu", lambda *of: True)


def run_problems(setting: Setting, hardware: str, budgets: dict) -> list[Problem]:
    """Return the problems that ``LLM`` makes of these budgets; an unmeasured machine has both attention paths."""
    ways = (True,) if setting.problem.hardware.attends_in_place else (True, False)
    paths = [AttentionPaths("fused", "products", "fused", in_place=way, on_host=True) for way in ways]
    asked = [LLMArguments("", "auto", "cuda", hardware=hardware, budgets=budgets, attention=of) for of in paths]
    paced = resolve.PacedDevice(torch.device("cuda"))
    return [resolve.resolve_problem(arguments, setting.problem.shape, paced) for arguments in asked]


def check_admitted(problem: Problem, policy: Policy, workload: Workload) -> dict[str, int]:
    """Raise AssertionError if the run's plan exceeds a budget; return its bytes."""
    planned = total_bytes(memory_plan(problem, policy, buffer_sizes(admit(problem, policy, workload))))
    for tier, budget in problem.budgets.items():
        assert budget is None or planned[tier] <= budget, (tier, planned[tier], budget, policy)
    return planned


@pytest.mark.parametrize("seed", [1, 2])
def test_a_searched_policy_is_admitted_by_a_run(seed):
    """The batch is the searched one; a named system is tried with the simulated batch."""
    rng, count = np.random.default_rng(100 + seed), 0
    while count < 2:
        model, hardware = str(rng.choice(MODELS)), str(rng.choice(MACHINES))
        prompt, generated, most = (int(2 ** rng.uniform(*ends)) for ends in ((5, 10), (2, 6), (0, 6)))
        budgets = {"device": f"{2 ** rng.uniform(1, 5):.3f}GiB", "host": f"{2 ** rng.uniform(4, 6):.2f}GiB"}
        point = {"model": model, "hardware": hardware, "prompt_len": prompt, "gen_len": generated}
        point |= {f"{tier}_memory": size for tier, size in budgets.items()}
        options = PolicySearchOptions(point, max_batch=most, lossless=bool(seed % 2))
        setting = setting_of({**point, "batch": most})
        try:
            found = search(setting.problem, setting.workload, settings_of(options, setting))
            simulated = simulate_system(setting, named_system("hybrid(0.5)", setting))
        except InputError:  # nothing fits
            continue
        count += 1
        for problem in run_problems(setting, hardware, budgets):
            check_admitted(problem, found.policy, Workload.uniform(found.batch, prompt, generated))
            check_admitted(problem, simulated.policy, Workload.uniform(simulated.wave, prompt, generated))


def test_a_policy_searched_for_18_gib_fits_18_gib():
    """A run once took 18.91 GiB with 15 requests at a time: the context and the allocator's segments were not
    counted."""
    budgets, workload = {"device": "18GiB", "host": "96GiB"}, Workload.uniform(128, 512, 32)
    machine = {"model": "opt-6.7b", "hardware": H200, "device_memory": "18GiB", "host_memory": "96GiB"}
    point = {**machine, "prompt_len": 512, "gen_len": 32}
    options = PolicySearchOptions(point, max_batch=128, lossless=True)
    setting = setting_of({**point, "batch": 128})
    found = search(setting.problem, setting.workload, settings_of(options, setting))
    (problem,) = run_problems(setting, H200, budgets)
    planned = check_admitted(problem, found.policy, Workload.uniform(found.batch, 512, 32))
    assert planned["device"] > 0.95 * parse_bytes("18GiB") and found.batch == 12
    with pytest.raises(AssertionError):
        check_admitted(problem, found.policy, Workload.uniform(15, 512, 32))
    queue = search_queue(PolicySearchOptions(machine, lengths=workload, max_batch=128, lossless=True))
    places = batch_size(problem, queue.system.policy, workload, 128).count
    assert queue.run.at_a_time <= places and queue.peak_bytes["device"] <= parse_bytes("18GiB")


# ---- limits of latency

PROMPT, TOKENS, MOST, SIZES = 150, 8, 10, (1024,)
SPACE = replace(PLAIN, entries=("kv@device", "kv@host", "act@host"))
TOY = Problem(shape=SHAPE, hardware=machine(0.3), budgets=Budgets(device=20 * MIB, host=40 * MIB))


@pytest.fixture(scope="module")
def enumerated():
    """Return (tokens/s, TTFT, TPOT) of fitting policies: all batches, cache in quarters, weights in halves."""
    mixes = np.array([(a, b, 4 - a - b) for a in range(5) for b in range(5 - a) if 0 in (a, b, 4 - a - b)]) / 4
    axes = np.meshgrid(np.arange(1, MOST + 1), SIZES, np.arange(3) / 2, np.arange(len(mixes)), indexing="ij")
    batch, sizes, device, mix = (axis.reshape(-1) for axis in axes)
    columns = []
    for kinds in np.unique(mixes > 0, axis=0):
        of = np.flatnonzero(((mixes[mix] > 0) == kinds).all(axis=1))
        cache = {entry: mixes[mix[of], i] for i, entry in enumerate(SPACE.entries) if kinds[i]}
        policy = Policy(cache={entry: float(share[0]) for entry, share in cache.items()})
        run = predict(TOY, Candidates(policy, batch[of], PROMPT, TOKENS, sizes[of], cache, device[of], 0.0))
        fits = (run.peak_bytes["device"] <= TOY.budgets.device) & (run.peak_bytes["host"] <= TOY.budgets.host)
        columns.append(np.stack([run.tokens_per_s, run.prefill_s, run.decode_s / (TOKENS - 1)])[:, fits])
    return np.concatenate(columns, axis=1)


def found_within(ttft=np.inf, tpot=np.inf, **options):
    """Search; an infinite limit means no limit."""
    asked = {"max_ttft_s": ttft if ttft < np.inf else None, "max_tpot_s": tpot if tpot < np.inf else None}
    asked |= {"max_batch": MOST, "space": SPACE, "mini_batch_tokens": SIZES, "margin": 0.0} | options
    return search(TOY, Workload.uniform(1, PROMPT, TOKENS), SearchSettings(**asked))


@pytest.mark.parametrize("shares", [(0.55, np.inf), (np.inf, 0.8), (0.8, 0.75), (0.4, 0.75)])
def test_the_answer_keeps_the_limits_and_is_the_best_that_does(enumerated, shares):
    """Limits are shares of the latencies of the fastest policy."""
    rates, *times = enumerated
    limits = np.array(shares) * [of[rates.argmax()] for of in times]
    best = rates[np.all(np.array(times) <= limits[:, None], axis=0)].max()
    for prune in (True, False):
        found = found_within(*limits, prune=prune)
        latencies = found.prediction["prefill_s"], found.prediction["decode_s"] / (TOKENS - 1)
        assert (latencies <= limits * (1 + 1e-8)).all() and best < rates.max()
        assert best * (1 - 3e-3) <= found.prediction["tokens_per_s"] <= best * 1.1
        assert best <= found.prediction["tokens_per_s"] * (1 + found.gap + 3e-3), "what is proved"


def test_limits_that_do_not_bind_change_nothing():
    free, loose = found_within(), found_within(1e6, 1e6)
    assert (free.policy, free.gaps) == (loose.policy, loose.gaps)


def test_impossible_limits_are_refused_with_the_least_possible(enumerated):
    with pytest.raises(TooSlowError, match="TTFT of at most 0.0001 s and TPOT of at most 0.0001 s") as refused:
        found_within(1e-4, 1e-4)
    said = re.search(r"TTFT (\S+) s and TPOT (\S+) s$", str(refused.value)).groups()
    for seconds, times, name in zip(map(float, said), enumerated[1:], ("ttft", "tpot"), strict=True):
        assert 0.8 * times.min() <= seconds <= 1.003 * times.min()
        assert found_within(**{name: 1.001 * seconds}).batch == 1
        with pytest.raises(TooSlowError, match=f"{name.upper()} of at most"):
            found_within(**{name: 0.99 * seconds})
    others = {"batch": 8, "mini_batch_tokens": (256, 1024)}  # the least TPOT is with mini-batches between these
    with pytest.raises(TooSlowError) as refused:
        found_within(tpot=1e-4, **others)
    least = float(re.search(r"TPOT (\S+) s$", str(refused.value))[1])
    assert found_within(tpot=1.001 * least, **others).prediction["decode_s"] == pytest.approx(7 * least, rel=2e-3)
    with pytest.raises(InputError, match="no policy fits .* memory"):
        search(replace(TOY, budgets=Budgets(MIB, MIB)), Workload.uniform(1, 9, 9), SearchSettings(max_ttft_s=1.0))


def test_a_limit_of_latency_may_be_kept_in_waves(monkeypatch):
    """All requests at once exceed the limit. The compared systems ignore it."""
    monkeypatch.setattr(searches, "LOSSLESS_RIVALS", ("kv_only", "act_only"))
    monkeypatch.setattr(searches, "LONGEST", "kv_only")
    point = {"model": "opt-1.3b", "hardware": "t4", "prompt_len": 512, "gen_len": 8, "batch": 64}
    options = PolicySearchOptions(point, max_ttft=2.0, confirm=False)
    report = run_search(options)
    assert report.best.num_waves > 1 and report.best.batch == 64 and 1.0 < report.best.ttft_s <= 2.0
    record = search_record(report)
    assert record["not_of_rivals"] == ["--max-ttft"] and record["ttft_s"] == report.best.ttft_s
    assert [row["exceeds"] for row in record["rivals"]] == [["ttft_s"]] * 2
    assert describe_rivals(report).count("is over the limit") == 2 and "binds the search alone" in describe_rivals(
        report
    )
    assert "keep different shares of the weights" in describe_rivals(report)
    assert "first tokens of the first wave after" in describe_found(report)
    for gap, said in ((0.002, False), (0.08, True)):  # the margin decides nothing where nothing can be faster
        unproved = report._replace(found=replace(report.found, gaps={"device": gap}))
        assert report.found.margin and ("stays on the device" in describe_found(unproved)) == said
    for name, value in (("max_ttft", 0.0), ("max_tpot", np.nan)):
        with pytest.raises(InputError, match=f"--{name.replace('_', '-')} is .*; it must be above 0"):
            run_search(replace(options, **{name: value}))
    with pytest.raises(InputError, match="--max-ttft is of requests of one length"):
        search_queue(replace(options, lengths=Workload.uniform(1, 9, 9)))
