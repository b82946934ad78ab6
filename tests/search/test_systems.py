"""Test systems by name: options, what distinguishes each, and runs with closed-form results."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from flexhybrid.core.admission import wave_plan
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.memory import fits
from flexhybrid.core.model.shape import ModelShape, shape_by_name
from flexhybrid.core.policy import Placement
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.simulate import describe
from flexhybrid.resolve import resolve_policy
from flexhybrid.runtime.runnable import check_runnable
from policy_search import systems
from policy_search.papers.at_best import at_best
from policy_search.systems import Setting, run_system, system
from sim import catalogue
from sim.implementation import Implementation, eager_bytes, on
from sim.simulate import simulate, simulate_many


def setting_of(
    shape: ModelShape, hardware: Hardware | None, batch: int, prompt_tokens: int, max_tokens: int
) -> Setting:
    return Setting(Problem(shape=shape, hardware=hardware), batch, prompt_tokens, max_tokens)


SMALL = replace(shape_by_name("opt-1.3b"), num_layers=3)
SETTING = setting_of(SMALL, catalogue.load("t4"), 6, 100, 5)
PLAIN = [name for name in systems.SYSTEMS if name != "searched"]
REQUIRED = {"token_recompute": "(0.3)", "hybrid": "(0.4)"}


@pytest.mark.parametrize("name", PLAIN)
def test_every_system_runs_on_both_clocks_alike(name):
    shape = replace(SMALL, routed=(True,) * 3) if name == "moe_gen" else SMALL
    setting = replace(SETTING, problem=replace(SETTING.problem, shape=shape))
    closed, virtual = (run_system(name + REQUIRED.get(name, ""), setting, clock) for clock in ("closed", "virtual"))
    assert closed.prefill_s + closed.decode_s == pytest.approx(virtual.prefill_s + virtual.decode_s, rel=0.03)
    assert closed.peak_bytes == pytest.approx(virtual.peak_bytes, rel=1e-6, abs=4096)
    assert closed.tokens_per_s == pytest.approx(6 * 5 / closed.total_s)
    assert closed.decode_tokens_per_s == pytest.approx(6 * 4 / closed.decode_s)
    assert max(closed.busy.values()) <= 1 + 1e-9


@pytest.mark.parametrize(
    "text, words",
    [
        ("flexgn", "did you mean flexgen"),
        ("h2o(bugdet=0.1)", "did you mean budget"),
        ("h2o(2)", "from 0 to 1"),
        ("h2o(whole_layers=-1)", "whole_layers is '-1'; it must be a whole number >= 0"),
        ("h2o(whole_layers=0.5)", "whole_layers is '0.5'; it must be a whole number >= 0"),
        ("h2o(0.1, budget=0.2)", "given twice"),
        ("kv_only(1, 2, 3, none, 4)", "takes"),
        ("token_recompute", "ratio"),
        ("hybrid", "needs share; write hybrid"),
        ("fastdecode(gpus=2.5)", "gpus is '2.5'; it must be a whole number"),
        ("fastdecode(gpus=true)", "whole number"),
        ("fastdecode(gpus=0)", "whole number"),
        ("flexgen(host_attention=3)", "true or false"),
        ("int4(overlap=3)", "full, step, none"),
        ("capture(balance=1)", "a word"),
        ("kv_only(weights_device=0.8, weights_disk=0.5)", "at most 1"),
        ("kv_only(weights_disk=-1)", "a share from 0 to 1"),
        ("kv_only(weights_device=x)", "weights_device is 'x'; it must be a number"),
        ("uvm(fault_gb_per_s=0)", "must be a number > 0"),
        ("kv_only(cache_link=fast)", "must be a number"),
        ("kv_only(cache_link=1.5)", r"\(0, 1\]"),
        ("kvpr_column(split=best)", "split"),
        ("infinigen(alpha=x)", "alpha"),
        ("", "unknown system"),
        ("a b(", "unknown system"),
    ],
)
def test_wrong_systems_are_one_clear_line(text, words):
    with pytest.raises(InputError, match=words) as error:
        system(text, SETTING)
    assert "\n" not in str(error.value)


def test_options_reach_the_policy_and_the_machine():
    made = system("infinigen(alpha=5, cap=0.1, weights_device=0.5)", SETTING)
    assert (made.policy.selection.alpha, made.policy.selection.max_fraction) == (5, 0.1)
    assert made.policy.weights.device == 0.5
    slow = system("kv_only(cache_link=0.5)", SETTING).hardware
    assert slow.line("load_kv", "h2d").s_per_byte == 2 * SETTING.machine.line("load_kv", "h2d").s_per_byte
    assert slow.line("load_weights", "h2d") == SETTING.machine.line("load_weights", "h2d")


def test_implementation_changes_only_what_it_names():
    base = SETTING.machine
    assert on(Implementation(), base) == base
    shared = on(Implementation(sharers=4), base)
    assert (
        shared.line("attend_host", "host_compute").s_per_byte == 4 * base.line("attend_host", "host_compute").s_per_byte
    )
    assert shared.line("finish", "compute") == base.line("finish", "compute")
    barrier = on(Implementation(step_s=1e-3), base)
    assert barrier.line("finish", "compute").overhead_s == base.line("finish", "compute").overhead_s + 1e-3
    waits = on(Implementation(cache_link=0.5, cache_wait_s=1e-3, weights_wait_s=2e-3), base)
    plain = base.line("load_kv", "h2d")
    kv, weights = (waits.line(verb, "h2d") for verb in ("load_kv", "load_weights"))
    assert (kv.overhead_s, kv.s_per_byte) == (plain.overhead_s + 1e-3, 2 * plain.s_per_byte)
    assert (weights.overhead_s, weights.s_per_byte) == (plain.overhead_s + 2e-3, plain.s_per_byte)
    gemm = on(Implementation(gemm=0.5), base)
    assert gemm.line("kv_gen", "compute").s_per_flop == 2 * base.line("kv_gen", "compute").s_per_flop
    assert gemm.line("attend", "compute") == base.line("attend", "compute")


def link_machine() -> Hardware:
    """Return a machine on which only the link costs time: 1 GB/s."""
    lines = {"compute": Line(), "h2d": Line(s_per_byte=1e-9), "d2h": Line(), "host_compute": Line()}
    return Hardware("link", "cuda", lines, device_memory=10**12, host_memory=10**12)


def test_a_link_bound_run_takes_its_bytes():
    """Without other costs, the seconds are those of weights and cache over the link, to the byte."""
    setting = setting_of(SMALL, link_machine(), 4, 64, 17)
    outcome = run_system("kv_only(weights_device=0)", setting)
    weights = SMALL.num_layers * SMALL.layer_bytes(2)
    blocks = sum(-(-(64 + i) // 16) for i in range(16))
    cache = SMALL.num_layers * 4 * blocks * 16 * SMALL.kv_token_bytes(2)
    assert outcome.traffic_bytes["h2d"]["kv"] == pytest.approx(cache, rel=1e-6)
    assert outcome.traffic_bytes["h2d"]["weights"] == pytest.approx(17 * weights, rel=1e-3)
    assert outcome.total_s == pytest.approx((17 * weights + cache) * 1e-9, rel=2e-3)


def test_deepspeeds_batches_are_those_of_its_published_runs():
    """The largest powers of two in memory are those that FlexGen's authors ran on a T4 (bench_hf.py); none is
    fitted."""
    ran = {("opt-6.7b", 256): 32, ("opt-6.7b", 512): 16, ("opt-6.7b", 1024): 8}
    ran |= {("opt-30b", 256): 8, ("opt-30b", 512): 4, ("opt-30b", 1024): 2}
    for (model, prompt), batch in ran.items():
        most = system(
            "deepspeed", setting_of(shape_by_name(model), catalogue.load("t4"), 128, prompt, 32)
        ).policy.max_batch
        assert most and 2 ** int(math.log2(most)) == batch, (model, prompt, most)


def test_a_batch_that_does_not_fit_runs_in_waves():
    hardware = link_machine()
    whole = run_system("deepspeed", setting_of(SMALL, hardware, 32, 512, 8))
    assert whole.num_waves == 1
    less = replace(hardware, device_memory=int(whole.peak_bytes["device"] * 0.4), device_reserve=0)
    waves = run_system("deepspeed", setting_of(SMALL, less, 32, 512, 8))
    assert waves.num_waves == -(-32 // waves.wave) > 1
    assert waves.peak_bytes["device"] <= less.device_memory
    one_more = simulate(Problem(shape=SMALL, hardware=hardware), waves.policy, waves.wave + 1, 512, 8)
    temporaries = (waves.wave + 1) * eager_bytes(SMALL, 512, 8)  # of its code
    assert one_more.peak_bytes["device"] < less.device_memory < one_more.peak_bytes["device"] + temporaries
    assert waves.total_s == pytest.approx(
        (32 // waves.wave) * run_system("deepspeed", setting_of(SMALL, hardware, waves.wave, 512, 8)).total_s
        + (
            run_system("deepspeed", setting_of(SMALL, hardware, 32 % waves.wave, 512, 8)).total_s
            if 32 % waves.wave
            else 0
        )
    )


def test_a_system_that_does_not_fit_names_the_tier_and_its_lack():
    tight = replace(link_machine(), device_memory=2**20)
    with pytest.raises(InputError, match="device memory: one request needs .* short; the largest part is"):
        run_system("kv_only", setting_of(SMALL, tight, 2, 64, 2))


def test_many_at_once_are_the_same_as_one_by_one():
    policy = system("kv_only", SETTING).policy
    lengths = [(3, 40, 2), (64, 700, 9), (1, 5, 1), (500, 1000, 30)]
    tight = replace(SETTING.machine, device_memory=2**31, host_memory=2 * 2**30)
    together = simulate_many(Problem(shape=SMALL, hardware=tight), policy, lengths)
    for lengths_of_one, outcome in zip(lengths, together, strict=True):
        assert outcome == simulate(Problem(shape=SMALL, hardware=tight), policy, *lengths_of_one)
    assert {outcome.num_waves > 1 for outcome in together} == {True, False}


def test_weights_that_do_not_fit_are_kept_in_twelfths():
    big = setting_of(shape_by_name("opt-30b"), catalogue.load("rtx-a6000"), 4, 1920, 128)
    kept = system("infinigen", big).policy.weights.device
    assert 0 < kept < 1 and kept * 12 == pytest.approx(round(kept * 12))
    outcome = run_system("infinigen", big)
    assert outcome.peak_bytes["device"] <= big.machine.device_memory
    more = replace(
        outcome.policy, weights=replace(outcome.policy.weights, device=kept + 1 / 12, host=1 - kept - 1 / 12)
    )
    peak = simulate(
        Problem(shape=big.problem.shape, hardware=replace(big.machine, device_memory=None)), more, 4, 1920, 128
    ).peak_bytes["device"]
    assert peak > big.machine.device_memory


def test_uvm_migrates_all_or_nothing():
    """InfiniGen's Fig. 15: the working set of OPT-13B exceeds 48 GB at a batch of 16."""
    shape, hardware = shape_by_name("opt-13b"), catalogue.load("rtx-a6000")
    small, large = (run_system("uvm", setting_of(shape, hardware, batch, 1920, 128)) for batch in (4, 24))
    assert small.traffic_bytes["h2d"].get("kv", 0) == 0
    assert large.total_s / large.batch > 3 * small.total_s / small.batch


@pytest.mark.parametrize("name", systems.SYSTEMS)
def test_every_system_is_run_or_refused_by_name_with_the_reason(name):
    text = name + REQUIRED.get(name, "")
    workload = Workload(np.array([40, 100]), np.array([5, 3]))
    if systems.SYSTEMS[name].only_simulated:
        with pytest.raises(InputError, match=f"system '{name}' cannot be run: .*simulate"):
            systems.policy_here(text, SETTING.problem, workload)
        return
    policy = systems.policy_here(text, SETTING.problem, workload)
    assert policy.name == text
    if name != "searched":  # may choose attention over packed keys, which is refused by its own name
        check_runnable(SMALL, policy)
    anywhere = systems.policy_anywhere(text, SMALL)
    assert anywhere is None or anywhere == policy


@pytest.mark.parametrize(
    "text, words",
    [("kv_only(cache_link=0.5)", "cache_link"), ("fastdecode(gpus=2)", "one device"), ("flexgn", "did you mean")],
)
def test_systems_of_the_simulator_alone_are_refused_to_run(text, words):
    with pytest.raises(InputError, match=words):
        systems.policy_anywhere(text, SMALL)


def test_a_mistyped_policy_is_answered_with_known_names():
    """A run does not accept all systems; simulate does."""
    with pytest.raises(InputError, match="or a policy file") as error:
        resolve_policy("kv_onyl", SMALL)
    known = str(error.value).partition("known: ")[2].partition(", or")[0].split(", ")
    assert known == ["auto", *(name for name in systems.SYSTEMS if name != "uvm")]
    for name in known:
        resolve_policy(name + REQUIRED.get(name, ""), SMALL)
    with pytest.raises(InputError, match="known: kv_only.* uvm"):
        system("kv_onyl", SETTING)


def test_resident_weights_follow_the_budget():
    """By name, without a machine, all weights are resident. If a budget binds, a system keeps as many as fit."""
    workload = Workload.uniform(2, 40, 4)
    assert systems.policy_here("accelerate", Problem(shape=SMALL), workload).weights.device == 1
    least = SMALL.embedding_bytes(2) + 3 * SMALL.layer_bytes(2)
    tight = systems.policy_here("accelerate", Problem(shape=SMALL, budgets=Budgets(device=least)), workload)
    assert 0 <= tight.weights.device < 1
    assert fits(wave_plan(Problem(shape=SMALL, dtype="float16", device="cpu"), tight, workload), Budgets(device=least))
    with pytest.raises(InputError, match="flexhybrid profile"):
        systems.policy_here("flexgen", Problem(shape=SMALL), workload)


def test_alpha_and_a_measured_file_change_a_prediction(tmp_path):
    longer = setting_of(SMALL, catalogue.load("t4"), 6, 1500, 5)
    seconds = [run_system(f"infinigen(alpha={alpha})", longer).decode_s for alpha in (1, 4, 9)]
    assert seconds == sorted(seconds) and seconds[2] > 1.05 * seconds[0]
    file = tmp_path / "accuracy.json"
    rows = [{"policy": "kv_only"}, {"policy": "a", "alpha": 3.0, "fetched": 0.05}]
    file.write_text(json.dumps({"policies": [*rows, {"policy": "b", "alpha": 5.0, "fetched": 0.15}]}))
    made = system(f"infinigen(alpha=4, expected={file})", SETTING).policy
    assert made.selection.expected_fraction == pytest.approx(0.1)
    with pytest.raises(InputError, match="alphas from 3 to 5, not at 6"):
        system(f"infinigen(alpha=6, expected={file})", SETTING)
    for text, words in (('{"policies": []}', "no infinigen"), ("[]", "no accuracy.json"), ("{", "no accuracy.json")):
        file.write_text(text)
        with pytest.raises(InputError, match=words):
            system(f"infinigen(expected={file})", SETTING)
    with pytest.raises(InputError, match="missing"):
        system(f"infinigen(expected={tmp_path / 'missing.json'})", SETTING)


def test_the_tier_of_a_cache_may_be_given(tmp_path):
    assert dict(system("accelerate(cache=device, weights_device=0)", SETTING).policy.cache) == {"kv@device": 1.0}
    assert dict(system("h2o(0.3, cache=device)", SETTING).policy.cache) == {"kv@device": 1.0}
    assert system("capture(weights_device=0.5)", SETTING).policy.weights == Placement(device=0.5, host=0.5)
    for text, weights in (
        ("kv_only(weights_disk=0.25)", Placement(host=0.75, disk=0.25)),
        ("kvpr_column(weights_device=0.5, weights_disk=0.5)", Placement(device=0.5, disk=0.5)),
        ("deepspeed(weights_disk=1)", Placement(disk=1.0)),
    ):
        assert system(text, SETTING).policy.weights == weights
    there = system("deepspeed(bits=4, cache=host)", SETTING).policy
    assert (there.bits.weights, there.attention, dict(there.cache)) == (4, "host", {"kv@host": 1.0})
    with pytest.raises(InputError, match="cache is 'disk'; it must be device or host"):
        system("h2o(0.3, cache=disk)", SETTING)


def test_deepspeeds_best_batch_is_one_that_its_code_has_memory_for():
    setting = setting_of(shape_by_name("opt-30b"), catalogue.load("t4"), 64, 512, 8)
    made, run = at_best("deepspeed", setting, free=True)
    assert run.batch < 64 and made.policy.max_batch == run.batch
    same = run_system("deepspeed", replace(setting, batch=run.batch))
    assert same.tokens_per_s == pytest.approx(run.tokens_per_s) and same.num_waves == 1


def test_given_rates_replace_those_known_of_flexgens_products():
    setting = setting_of(shape_by_name("opt-6.7b"), catalogue.load("rtx4090"), 8, 512, 8)
    known, all_of_them = (system(text, setting).hardware for text in ("flexgen", "flexgen(gemm=1)"))
    assert all_of_them.line("project", "compute") == setting.machine.line("project", "compute")
    assert known.line("project", "compute").s_per_flop > 2 * all_of_them.line("project", "compute").s_per_flop


def test_a_cache_that_must_lie_on_the_host_is_refused_by_the_hosts_memory():
    setting = setting_of(shape_by_name("opt-30b"), catalogue.load("t4"), 256, 512, 8)
    with pytest.raises(InputError, match=r"FlexGen places nothing: host memory: .* may use 166"):
        system("flexgen(cache=host)", setting)


def test_a_run_in_which_nothing_overlaps_is_described_by_both_clocks():
    for clock in ("closed", "virtual"):
        run = run_system("infinigen(overlap=none, whole_layers=2)", SETTING, clock)
        assert "tokens/s" in describe(run)
