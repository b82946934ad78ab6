"""Test that what fits the device stays there, in its best mini-batches, at its own price."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from toy_machine import MIB, SHAPE, machine

from flexhybrid import resolve
from flexhybrid.core import admission
from flexhybrid.core.admission import wave_plan
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.resolve import best_policy
from policy_search.search import LOSSLESS, MODEL_ERROR, PLAIN, SearchSettings, search
from policy_search.search_problem import RESIDENT_MINI_BATCH_TOKENS
from policy_search.systems import Setting, system
from sim import presets
from sim.array_clock import predict
from sim.candidates import Candidates
from sim.simulate import simulate

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
ON_HOST = Placement(host=1.0)


def disturbed_machine(slower: float = 3.0) -> Hardware:
    """Return a machine whose kernels take ``slower`` times as long during transfers over the link."""
    alone = machine()
    compute = alone.lines["compute"]
    slow = Line(slower * compute.overhead_s, slower * compute.s_per_flop, slower * compute.s_per_byte)
    verbs = ("embed", "project", "assemble", "attend", "attend_prefill", "finish", "scatter_device", "head", "sample")
    return replace(alone, lines={**alone.lines, "compute": slow} | {f"{verb}_alone": compute for verb in verbs})


@pytest.mark.parametrize("clock", ["closed", "virtual"])
def test_resident_policies_are_priced_undisturbed(clock):
    """Its price is that on a machine that is never disturbed; policies with transfers have the disturbed price."""
    known, lengths = disturbed_machine(), (3, 60, 6)
    never, always = machine(), replace(known, lines={k: v for k, v in known.lines.items() if "_alone" not in k})
    on_link = Policy(cache={"kv@host": 0.5, "kv@device": 0.5}, weights=Placement(device=1.0))
    for policy, as_on in ((presets.resident(), never), (on_link, always), (presets.deepspeed(), always)):
        seconds, expected = (
            simulate(Problem(shape=SHAPE, hardware=hardware), policy, *lengths, clock=clock).total_s
            for hardware in (known, as_on)
        )
        assert seconds == pytest.approx(expected, rel=1e-12), policy.name


def test_candidates_side_by_side_have_each_their_own_lines():
    problem, shares = Problem(shape=SHAPE, hardware=disturbed_machine()), np.array([1.0, 0.5, 1.0])
    kept = np.array([1.0, 1.0, 0.75])
    cache = {"kv@device": kept, "kv@host": 1 - kept}
    policy = Policy(cache={"kv@device": 0.5, "kv@host": 0.5}, weights=ON_HOST)
    together = predict(problem, Candidates(policy, 4, 60, 6, cache=cache, weights_device=shares)).total_s
    for place, seconds in enumerate(together):
        share = float(kept[place])
        own = replace(
            policy,
            cache={"kv@device": share, "kv@host": 1 - share},
            weights=Placement(device=float(shares[place]), host=1 - float(shares[place])),
        )
        assert seconds == pytest.approx(simulate(problem, own, 4, 60, 6).total_s, rel=1e-9)


@pytest.mark.parametrize("known", [machine(), disturbed_machine()], ids=["one line a verb", "lines of their own"])
@pytest.mark.parametrize("space", [PLAIN, LOSSLESS], ids=["plain", "lossless"])
@pytest.mark.parametrize("options", [{"batch": 32}, {"max_batch": 40}, {"objective": "latency"}], ids=str)
def test_everything_that_fits_the_device_stays_there(known, space, options):
    """A share of the keys on the host would save a launch on the device, which binds: less than the error of
    predictions."""
    problem = Problem(shape=SHAPE, hardware=known)
    found = search(problem, Workload.uniform(1, 300, 12), SearchSettings(space=space, **options))
    assert found.policy.name == "resident" and found.policy.stays_on_device and found.margin == MODEL_ERROR
    free = search(problem, Workload.uniform(1, 300, 12), SearchSettings(space=space, margin=0.0, **options))
    seconds, least = (one.prediction["total_s"] / one.batch for one in (found, free))
    assert seconds <= (1 + MODEL_ERROR) * least and seconds <= (1 + found.gap) * least * 1.003


def test_another_policy_must_be_faster_than_resident_by_the_margin():
    """Two margins are just below and above the gain of a machine whose host attends much faster."""
    known = machine(link=50.0)
    slow = replace(known, lines={**known.lines, "attend": Line(4e-3, 0.0, 0.0), "assemble": Line(2e-3, 0.0, 0.0)})
    problem, lengths = Problem(shape=SHAPE, hardware=slow), Workload.uniform(1, 200, 30)
    free = search(problem, lengths, SearchSettings(batch=16, space=LOSSLESS, margin=0.0))
    kept = search(problem, lengths, SearchSettings(batch=16, space=LOSSLESS, margin=1e6))
    gain = kept.prediction["total_s"] / free.prediction["total_s"] - 1
    assert not free.policy.stays_on_device and kept.policy.stays_on_device and gain > MODEL_ERROR
    for margin, stays in ((0.99 * gain, False), (1.01 * gain, True)):
        found = search(problem, lengths, SearchSettings(batch=16, space=LOSSLESS, margin=margin))
        assert found.policy.stays_on_device == stays and (found.margin is not None) == stays


def test_nothing_stays_where_it_does_not_fit_or_is_not_allowed():
    problem = Problem(shape=SHAPE, hardware=machine(), budgets=Budgets(device=48 * MIB, host=400 * MIB))
    found = search(problem, Workload.uniform(1, 900, 12), SearchSettings(batch=32, space=PLAIN))
    assert not found.policy.stays_on_device and found.margin is None
    assert found.prediction["peak_bytes"]["device"] <= 48 * MIB
    streamed = SearchSettings(batch=4, space=PLAIN, weights_device=0.0)
    assert search(Problem(shape=SHAPE, hardware=machine()), Workload.uniform(1, 60, 6), streamed).margin is None


def test_the_margin_is_the_largest_error_that_was_measured():
    """The errors are those of the closed form in the committed comparisons."""
    errors = []
    for path in RESULTS.glob("*/speed.csv"):
        with open(path, encoding="utf-8", newline="") as file:
            errors += [abs(float(row["error_closed"])) for row in csv.DictReader(file)]
    assert len(errors) >= 8 and max(errors) <= MODEL_ERROR <= max(errors) + 0.01


@pytest.mark.parametrize("batch, prompt", [(48, 200), (200, 100), (7, 30)])
def test_resident_takes_the_best_of_its_mini_batches(batch, prompt):
    """Each is tried; ``simulate`` and ``auto`` agree."""
    problem, rates = Problem(shape=SHAPE, hardware=machine()), {}
    for tokens in RESIDENT_MINI_BATCH_TOKENS:
        rates[tokens] = simulate(problem, presets.resident(tokens), batch, prompt, 16).tokens_per_s
    named = system("resident", Setting(problem, batch, prompt, 16)).policy
    auto = best_policy(problem, Workload.uniform(batch, prompt, 16))
    assert rates[named.max_mini_batch_tokens] == max(rates.values()) and auto == named
    assert system("resident(1024)", Setting(problem, batch, prompt, 16)).policy.max_mini_batch_tokens == 1024


def test_no_system_of_the_papers_is_faster_by_larger_mini_batches():
    """FlexGen takes all requests at once; the proof covers it if everything fits the device."""
    problem, lengths = Problem(shape=SHAPE, hardware=machine()), Workload.uniform(700, 100, 8)
    found = search(problem, lengths, SearchSettings(batch=700))
    flexgen = simulate(problem, system("flexgen", Setting(problem, 700, 100, 8)).policy, 700, 100, 8).tokens_per_s
    assert found.policy.max_mini_batch_tokens > found.largest_mini_batch
    assert flexgen <= found.prediction["tokens_per_s"] * (1 + found.gap + 3e-3)


def test_resident_takes_no_mini_batches_that_do_not_fit():
    """Sizes are tried with all weights and every request on the device."""
    lengths = Workload.uniform(64, 120, 8)
    needed = {
        tokens: wave_plan(Problem(shape=SHAPE, hardware=machine()), presets.resident(tokens), lengths)["device"]
        for tokens in RESIDENT_MINI_BATCH_TOKENS
    }
    needed = {tokens: sum(parts.values()) for tokens, parts in needed.items()}
    assert needed[1024] < needed[4096]
    problem = Problem(shape=SHAPE, hardware=machine(), budgets=Budgets(device=needed[4096] - 1))
    assert needed[best_policy(problem, lengths).max_mini_batch_tokens] < needed[4096]


def test_the_optimality_gap_is_reported_by_attention():
    """If each resource idles while the next works, the bound misses most of the time, and the report says where."""
    problem = Problem(shape=SHAPE, hardware=machine(0.33, 280.0, 43.0, 0.2), budgets=Budgets(46 * MIB, 61 * MIB))
    lengths = Workload.uniform(1, 95, 10)
    found = search(problem, lengths, SearchSettings(max_batch=4, space=LOSSLESS, margin=0.0))
    assert set(found.gaps) == {"device", "host"} and found.gap == max(found.gaps.values()) and found.complete
    for where, gap in found.gaps.items():
        assert f"{gap:.1%} with attention on the {where}" in found.proof
        there = replace(LOSSLESS, attention=(where,))
        best = search(problem, lengths, SearchSettings(max_batch=4, space=there, margin=0.0))
        gained = best.prediction["tokens_per_s"] / found.prediction["tokens_per_s"] - 1
        assert gained <= gap + 3e-3, "how whole blocks are dealt can make a policy some thousandths faster"
    assert "time limit" not in found.proof
    cut = search(problem, lengths, SearchSettings(max_batch=4, time_limit=0.0))
    assert not cut.complete and "time limit" in cut.proof


def test_whether_a_thousand_requests_fit_takes_one_plan_per_size(monkeypatch):
    """Their waves are not planned: on a machine with room for a few requests that would take minutes."""
    planned = []
    monkeypatch.setattr(admission, "admit", lambda *wave: planned.append(wave[2].num_requests) or admit(*wave))
    requests = Workload.uniform(1000, 60, 6)
    for device, asked in ((1 << 40, [1000]), (24 * MIB, [1000] * len(RESIDENT_MINI_BATCH_TOKENS))):
        planned.clear()
        problem = Problem(shape=SHAPE, hardware=machine(), budgets=Budgets(device=device, host=1 << 40))
        policy = resolve.resident_at_once(problem, requests)
        assert planned == asked and (policy is None) == (device < 1 << 40)
