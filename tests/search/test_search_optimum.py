"""Test the search against brute force, against itself without pruning, and against every system it contains."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_machine import MIB, SHAPE, machine

from flexhybrid.core.admission import wave_plan
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import PACKING_BYTES, PACKING_ELEMENTS, fits, total_bytes
from flexhybrid.core.model.layers import LayerTensor, ModuleLayers
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import NO_BUDGETS, Budgets, Problem
from flexhybrid.core.workload import Workload
from flexhybrid.resolve import best_policy
from flexhybrid.runtime.runnable import check_runnable
from policy_search import search as searching
from policy_search import shortage
from policy_search.grid import ChoiceGrid
from policy_search.lp import least_memory
from policy_search.rounding import Evaluator, UnplacedPolicy, final_blocks
from policy_search.search import SearchResult, SearchSettings, search
from policy_search.search_problem import FULL, LOSSLESS, PLAIN, Option, SearchProblem, batch_grid, pairs_of
from policy_search.systems import Setting, system
from sim import catalogue
from sim.array_clock import predict
from sim.candidate_memory import peak_bytes
from sim.candidates import Candidates, candidates_of, padded_width
from sim.presets import hybrid
from sim.simulate import simulate

FLEXGENS = Path(__file__).parents[2] / "experiments" / "results" / "peers" / "flexgen-0.1.8.json"


def mib(device=None, host=None, disk=None, besides_packing=True) -> Budgets:
    """Return budgets in MiB; the device's excludes the workspace of packing, which every policy is charged."""
    packing = PACKING_BYTES * min(PACKING_ELEMENTS["cpu"], SHAPE.ffn * SHAPE.hidden) * besides_packing
    return Budgets(device and device * MIB + packing, host and host * MIB, disk and disk * MIB)


def searched(
    workload: Workload, hardware: Hardware | None = None, shape=SHAPE, budgets=NO_BUDGETS, margin=0.0, **settings
) -> SearchResult:
    """Search; without a margin the fastest policy wins, wherever its data is."""
    problem = Problem(shape=shape, hardware=hardware or machine(), budgets=budgets)
    return search(problem, workload, SearchSettings(margin=margin, **settings))


def seconds_per_token(found) -> float:
    return found.prediction["total_s"] / (found.batch * found.problem.max_tokens)


# ---- brute force


def every_cut(entries, blocks):
    """Yield every way to distribute the blocks of a request over entries, as shares."""
    for cuts in combinations(range(blocks + len(entries) - 1), len(entries) - 1):
        edges = (-1, *cuts, blocks + len(entries) - 1)
        counts = [b - a - 1 for a, b in zip(edges, edges[1:], strict=False)]
        yield {entry: count / blocks for entry, count in zip(entries, counts, strict=True)}


def brute_force(problem: SearchProblem, batches, mini_batch_tokens) -> float:
    """Return the least seconds per token over every option, mini-batch size and distribution of blocks."""
    unplaced = []
    for option in problem.options:
        entries = problem.entries
        if option.attention == "host":
            entries = [entry for entry in entries if entry in ("kv@host", "kv@disk")]
        cuts = [cut for cut in every_cut(entries, final_blocks(problem)) if cut.get("tok", 0) < 1]
        for batch, tokens in zip(*pairs_of(problem, batches, mini_batch_tokens), strict=True):
            unplaced += [UnplacedPolicy.of(option, batch, tokens, cut) for cut in cuts]
    return min(one.seconds for one in Evaluator(problem).evaluate(unplaced))


BRUTE = {
    "runnable": (PLAIN, {"device": 14, "host": 24}),
    "host attention": (replace(LOSSLESS, entries=("kv@device", "kv@host", "act@host"), hidden=("device",)),
                       {"device": 16}),
    "host attention over the disk": (replace(LOSSLESS, entries=("kv@host", "kv@disk"), hidden=("device",),
                                             weights=("host",)), {"device": 12, "host": 7, "disk": 64}),
    "bits and disk": (replace(FULL, entries=("kv@host", "act@host", "kv@disk"), weights_bits=("native", 4),
                              kv_bits=("native", 4), act_bits=("native",), schedules=("column",), hidden=("device",)),
                      {"device": 12, "host": 16, "disk": 64}),
    "split attention": (replace(LOSSLESS, entries=("kv@device", "kv@host", "act@host", "attended(kv@host)"),
                                schedules=("column",), hidden=("device",)), {"device": 16}),
    "split attention or bits": (replace(FULL, entries=("kv@host", "attended(kv@host)"), kv_bits=("native", 4),
                                        weights_bits=("native",), act_bits=("native",), schedules=("column",),
                                        hidden=("device",)), {"device": 12}),
    "token ids": (replace(LOSSLESS, schedules=("column",), hidden=("device",), attention=("device",),
                          entries=("kv@host", "act@host", "tok")), {"device": 14, "host": 20}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name, link",
    [
        ("runnable", 0.1),
        ("host attention", 1.0),
        ("host attention over the disk", 1.0),
        ("bits and disk", 1.0),
        ("split attention", 0.1),
        ("split attention or bits", 0.1),
        ("token ids", 0.1),
    ],
)
def test_the_search_is_as_good_as_brute_force(name, link):
    """The search ignores differences below 0.1 %; shares finer than blocks can make it better."""
    space, budgets = BRUTE[name]
    hardware, workload = machine(link), Workload.uniform(1, 60, 6)
    found = searched(
        workload, hardware, max_batch=4, space=space, budgets=mib(**budgets), mini_batch_tokens=(256, 1024)
    )
    assert space.allows(found.policy)
    assert seconds_per_token(found) <= 1.003 * brute_force(found.problem, batch_grid(4), (256, 1024))


def test_others_are_tried_if_the_bounds_favourite_waits():
    """With host attention and one mini-batch each resource idles while the next works, which no sum contains."""
    space = replace(LOSSLESS, entries=("kv@host", "act@host", "kv@disk"), hidden=("device",))
    hardware, workload = machine(0.33, 280.0, 43.0, 0.2), Workload.uniform(1, 95, 10)
    found = searched(
        workload, hardware, max_batch=4, space=space, budgets=mib(46, 61, 1024), mini_batch_tokens=(256, 1024)
    )
    assert found.gap > 0.1 and found.policy.attention == "host"
    assert seconds_per_token(found) <= 1.003 * brute_force(found.problem, batch_grid(4), (256, 1024))


@pytest.mark.parametrize("link, batch", [(0.5, None), (0.1, 40)])
def test_no_mini_batch_between_the_bounds_is_better(link, batch):
    """Mini-batches of every size are tried, not only those that fit the grid's powers of two."""
    options = {"batch": batch} if batch else {"max_batch": 40}
    hardware, budgets, space = machine(link), mib(24, 48), replace(PLAIN, entries=("kv@host", "act@host"))
    found = searched(Workload.uniform(1, 200, 8), hardware, budgets=budgets, space=space, **options)
    evaluator, shares = Evaluator(found.problem), found.policy.cache
    padded = padded_width(200, 8)
    unplaced = [
        UnplacedPolicy.of(Option.of(found.policy), requests * count, requests * padded, shares)
        for requests in range(1, 41)
        for count in range(1, 40 // requests + 1)
        if batch is None or requests * count == batch
    ]
    best = min(one.seconds for one in evaluator.evaluate(unplaced))
    assert seconds_per_token(found) <= best * 1.001


@pytest.mark.parametrize(
    "rates, objective", [((0.1, 30.0), "throughput"), ((1.0, 200.0), "decode_throughput"), ((4.0, 20.0), "throughput")]
)
def test_pruning_loses_nothing(rates, objective):
    space = replace(FULL, weights_bits=("native", 4), kv_bits=("native", 4), act_bits=("native",), hidden=("device",))
    options = {"max_batch": 2, "mini_batch_tokens": (256,), "budgets": mib(10, 16, 64), "space": space}
    hardware, workload = machine(*rates), Workload.uniform(1, 150, 6)
    pruned = searched(workload, hardware, objective=objective, **options)
    every = searched(workload, hardware, objective=objective, prune=False, **options)
    key = "tokens_per_s" if objective == "throughput" else "decode_tokens_per_s"
    assert pruned.prediction[key] >= every.prediction[key] * 0.997
    assert pruned.num_walked < every.num_walked / 2
    assert every.num_bounded_out < pruned.num_bounded_out < pruned.num_choices
    assert pruned.complete and pruned.gap >= 0


@pytest.mark.parametrize("weights_device", [0.0, 1.0])
def test_no_share_between_the_blocks_is_much_better(weights_device):
    """The case is the main job's: one batch, KV and ACT on the host, decode only. A context has 20 blocks."""
    hardware, workload = machine(), Workload.uniform(32, 300, 12)
    space = replace(PLAIN, entries=("act@host", "kv@host"))
    found = searched(
        workload,
        hardware,
        batch=32,
        weights_device=weights_device,
        space=space,
        objective="decode_throughput",
        mini_batch_tokens=(8192,),
    )
    shares = np.linspace(0, 1, 3001)
    policy = replace(hybrid(0.5, 8192), weights=Placement(device=weights_device, host=1 - weights_device))
    fine = predict(
        Problem(shape=SHAPE, hardware=hardware),
        Candidates(policy, 32, 300, 12, cache={"act@host": shares, "kv@host": 1 - shares}),
    )
    assert found.prediction["decode_tokens_per_s"] >= fine.decode_tokens_per_s.max() * (1 - 1.5e-2)
    assert 0 < found.act_share < 1 and found.policy.weights.device == weights_device
    assert found.kv_act_bytes_ratio == pytest.approx(2 * (1 - found.act_share) / found.act_share)
    assert found.prediction["binding"] == max(found.prediction["busy"], key=found.prediction["busy"].get)


# ---- what others find


@pytest.mark.parametrize("machine_name, batch", [("t4", 64)])
def test_no_system_of_the_papers_is_better(machine_name, batch):
    """Systems are presets, FlexGen's program, Algorithm 1 with both balances, and KVPR with both rules, at the same
    batch and cost model."""
    shape, hardware = shape_by_name("opt-13b"), catalogue.load(machine_name)
    setting = Setting(Problem(shape=shape, hardware=hardware), batch, 512, 32)
    found = searched(setting.workload, hardware, shape, batch=batch, space=LOSSLESS)
    names = ("kv_only", "act_only", "hybrid_static", "hybrid(0.5)", "deepspeed", "accelerate", "offloaded",
             "fastdecode", "token_recompute(0.3)", "kvpr_row(paper)", "kvpr_row(pipeline)", "kvpr_column(paper)",
             "kvpr_column(pipeline)", "flexgen", "flexgen(host_attention=true)", "capture(balance=paper)",
             "capture(balance=full)", "resident", "neo(0.5)", "headinfer", "apt_serve(0.5)")  # fmt: skip
    compared = 0
    for name in names:
        try:
            policy = system(name, setting).policy
        except InputError:
            continue  # its own placement finds nothing that fits
        row = predict(Problem(shape=shape, hardware=hardware), candidates_of(policy, setting.workload)).row()
        limits = {tier: getattr(hardware, f"{tier}_memory") for tier in row["peak_bytes"]}
        if all(limits[tier] is None or size <= limits[tier] for tier, size in row["peak_bytes"].items()):
            compared += 1
            assert found.prediction["tokens_per_s"] >= row["tokens_per_s"] * (1 - 1e-9), name
    assert compared >= 6


@pytest.mark.parametrize("model, machine_name", [("opt-30b", "t4"), ("opt-30b", "rtx4090"), ("opt-175b", "t4")])
def test_flexgens_own_policies_are_not_better(model, machine_name):
    """The search of FlexGen 0.1.8 chose them, with the rates of our records or its own fit of a T4. Commit b18005f has
    the code that ran it (experiments/peers/flexgen_search.py)."""
    shape, hardware = shape_by_name(model), catalogue.load(machine_name)
    found = searched(Workload.uniform(1, 512, 32), hardware, shape, space=LOSSLESS)
    compared = 0
    for run in json.loads(FLEXGENS.read_text(encoding="utf-8"))["runs"]:
        if (run["model"], run["hardware"]) == (model, machine_name):
            compared += 1
            batch = run["gpu_batch_size"] * run["num_gpu_batches"]
            theirs = simulate(Problem(shape=shape, hardware=hardware), Policy.from_dict(run["policy"]), batch, 512, 32)
            assert found.prediction["tokens_per_s"] >= theirs.tokens_per_s * (1 - 1e-9)
    assert compared == 2


def test_a_seed_is_never_worse_and_strangers_are_left_out():
    hardware, workload = machine(), Workload.uniform(1, 200, 8)
    best = searched(workload, hardware, max_batch=64, budgets=mib(24, 48), space=PLAIN)
    narrow = replace(PLAIN, entries=("kv@host",))
    own = {"max_batch": 64, "budgets": mib(24, 48)}
    seeded = searched(
        workload, hardware, seeds=[best.policy], space=replace(narrow, entries=PLAIN.entries), time_limit=0.0, **own
    )
    assert seeded.prediction["tokens_per_s"] >= best.prediction["tokens_per_s"] * (1 - 1e-9)
    assert not seeded.complete
    left_out = searched(
        workload, hardware, seeds=[hybrid(1.0), replace(best.policy, schedule="row")], space=narrow, **own
    )
    assert left_out.policy.cache == {"kv@host": 1.0} and left_out.policy.schedule == "column"


# ---- what a winner is


@pytest.mark.parametrize("space", [FULL, LOSSLESS, PLAIN], ids=["full", "lossless", "runnable"])
def test_the_winner_fits_by_the_memory_plan_and_is_confirmed(space, tmp_path, monkeypatch):
    budgets = mib(16, 24, 64)
    found = searched(
        Workload.uniform(1, 300, 12),
        budgets=budgets,
        space=space,
        max_batch=64,
        mini_batch_tokens=(1024,),
        confirm=True,
        write_lp=tmp_path / "winner.lp",
    )
    assert space.allows(found.policy)
    problem = Problem(shape=SHAPE, hardware=machine())
    plan = wave_plan(problem, found.policy, Workload.uniform(found.batch, 300, 12))
    assert fits(plan, budgets) and total_bytes(plan) == found.prediction["peak_bytes"]
    assert found.virtual.tokens_per_s == pytest.approx(found.prediction["tokens_per_s"], rel=0.05)
    monkeypatch.setattr(searching, "MOST_CONFIRMED", 0)  # too long to walk it all
    assert searching.confirmed(found).tokens_per_s == pytest.approx(found.virtual.tokens_per_s, rel=0.02)
    assert found.policy.max_batch == found.batch <= 64 and found.policy.max_mini_batch_tokens == 1024
    assert "device_memory_fits" in (tmp_path / "winner.lp").read_text()
    assert Policy.from_json(found.policy.to_json()) == found.policy
    assert found.counts == {
        "choices": found.num_choices,
        "bounded_out": found.num_bounded_out,
        "lps": found.num_lps,
        "walked": found.num_walked,
    }
    if space is PLAIN:
        check_runnable(SHAPE, found.policy)


def test_latency_is_the_least_seconds_of_its_batch():
    hardware, workload = machine(), Workload.uniform(1, 200, 8)
    options = {"budgets": mib(12, 48), "space": LOSSLESS}
    fast = searched(workload, hardware, objective="latency", **options)
    many = searched(workload, hardware, **options, max_batch=64)
    assert fast.batch == 1 < many.batch
    assert fast.prediction["total_s"] < many.prediction["total_s"]
    assert many.prediction["tokens_per_s"] > fast.prediction["tokens_per_s"]
    four = searched(workload, hardware, objective="latency", batch=4, **options)
    same = searched(workload, hardware, batch=4, **options)
    assert four.batch == 4 and four.prediction["total_s"] == pytest.approx(same.prediction["total_s"], rel=2e-3)


def test_a_prompt_longer_than_the_bound_is_a_mini_batch_of_its_own():
    found = searched(Workload.uniform(3, 700, 4), batch=3, mini_batch_tokens=(256,), space=PLAIN)
    assert found.prediction["num_mini_batches"] == 3 and found.policy.max_mini_batch_tokens == 256


def test_one_generated_token_is_all_prefill():
    for objective in ("throughput", "decode_throughput"):
        found = searched(Workload.uniform(1, 100, 1), max_batch=4, objective=objective)
        assert found.prediction["decode_s"] == 0 and found.prediction["tokens_per_s"] > 0


# ---- how the optimum moves


@settings(max_examples=4)
@given(
    st.sampled_from(["link", "gflops", "memory", "disk", "device", "host"]), st.floats(1.02, 3), st.floats(0.05, 3),
    st.integers(14, 60), st.integers(20, 100), st.sampled_from([PLAIN, LOSSLESS]),
)  # fmt: skip
def test_more_of_anything_never_lowers_the_optimum(resource, factor, link, device, host, space):
    def best(more: dict) -> float:
        rates = {"link": link, "gflops": 60.0, "memory": 8.0, "disk": 0.1}
        rates = {name: rate * more.get(name, 1.0) for name, rate in rates.items()}
        budgets = Budgets(device * MIB * more.get("device", 1), host * MIB * more.get("host", 1), 2**30)
        return searched(Workload.uniform(1, 200, 8), machine(**rates), max_batch=24, space=space,
                      mini_batch_tokens=(2048,), budgets=budgets).prediction["tokens_per_s"]  # fmt: skip

    assert best({resource: factor}) >= best({}) * (1 - 1e-3)  # what the search does not look for


# ---- what cannot be


@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_advised_change_is_the_least_that_suffices(tier):
    options = {"weights_device": 0.0, "batch": 32, "mini_batch_tokens": (1024,), "space": PLAIN}
    other = {"device": 64, "host": 64}

    def run(size: int, **more):
        return searched(Workload.uniform(1, 300, 12), **{**options, **more},
                      budgets=mib(**{**other, tier: size}, besides_packing=False))  # fmt: skip

    with pytest.raises(
        InputError, match=f"no policy fits 32 requests computed in 16 bits: {tier} memory: at least .* is needed"
    ) as error:
        run(4)
    needed = int(str(error.value).split(f"{tier} memory to ")[1].split("MiB")[0])
    run(needed)
    with pytest.raises(InputError, match=r"\(.* short\)\. Raise ") as error:
        run(needed - 1)
    assert "\n" not in str(error.value)
    if "lower the batch to " in str(error.value):
        fewer = int(str(error.value).split("lower the batch to ")[1])
        assert run(needed - 1, batch=fewer).batch == fewer
        with pytest.raises(InputError):
            run(needed - 1, batch=fewer + 1)
    else:
        assert tier == "host", "fewer requests need less of the device"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_machine_has_the_advised_memory(device):
    """A CPU's tiers share one memory; a GPU has its own, which host memory cannot replace."""
    options = {"batch": 4, "budgets": mib(3, 1), "weights_device": 0.0, "space": replace(PLAIN, entries=("kv@host",))}

    def told(device_mib: int, host_mib: int, **more) -> str:
        has = replace(
            machine(), device=device, device_memory=device_mib * MIB, host_memory=host_mib * MIB, device_reserve=0
        )
        with pytest.raises(InputError) as error:
            searched(Workload.uniform(1, 300, 12), has, **options | more)
        return str(error.value)

    need = [int(size) for size in re.findall(r"memory to (\d+)MiB", told(10_000, 10_000))]
    assert len(need) == 2 and "Raise" in told(*need)
    assert ("Raise" in told(sum(need), 1)) == ("Raise" in told(1, sum(need))) == (device == "cpu")
    for lacks_device, less in ((True, (need[0] - 1, need[1])), (False, (need[0], need[1] - 1))):
        disk = "" if device == "cuda" and lacks_device else ", a disk"  # which holds nothing of the device's
        said = told(*less)
        assert said.endswith(f"more than the machine has. What may help: a smaller model, fewer bits{disk}")
        assert ("in 16 bits: device and host memory: at least" in said) == (device == "cpu")
    fewer_bits = told(1, 1, space=replace(options["space"], weights_bits=(4,)), budgets=mib(3, 1, 1))
    assert "needed with bits 4/native/native, the" in fewer_bits and fewer_bits.endswith("help: a smaller model")


def test_policies_that_a_refusal_compares_are_priced_as_alone():
    problem = searched(Workload.uniform(1, 300, 12), batch=8, budgets=mib(16, 24), space=PLAIN).problem
    grid = ChoiceGrid(problem, problem.options, *pairs_of(problem, np.array([8]), (512, 4096)))
    choices = np.arange(grid.num_choices)
    compared = [*shortage._peaks(grid, choices, least_memory(grid, choices, problem.tiers))]
    assert len({policy.max_mini_batch_tokens for policy, _ in compared}) == 2
    for policy, sizes in compared:
        alone = peak_bytes(problem, problem.candidates(policy, np.array([8.0])))
        assert sizes == pytest.approx({tier: alone[tier][0] for tier in sizes}, rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"objective": "speed"}, {"weights_device": 1.5}, {"batch": 0}, {"max_batch": 0}, {"time_limit": -1},
     {"mini_batch_tokens": (0,)}],
)  # fmt: skip
def test_bad_options_are_refused(options):
    with pytest.raises(InputError, match="objective|share|at least one request|whole number|seconds"):
        searched(Workload.uniform(1, 100, 4), **options)


def test_batches_are_dense_then_a_sixteenth_apart():
    grid = batch_grid(300)
    assert grid[:64].tolist() == list(range(1, 65)) and grid[-1] == 300
    assert (np.diff(grid)[64:] <= grid[64:-1] // 16).all()


def test_the_memory_of_a_refusal_is_enough_for_the_longest_request():
    """The mean lengths, which are searched first, need less."""
    lengths = Workload(np.array([10] * 9 + [1500]), np.full(10, 32))

    def ask(mib: int) -> Policy:
        budgets = Budgets(device=mib << 20, host=64 << 30)
        problem = Problem(shape=shape_by_name("opt-1.3b"), hardware=catalogue.load("rtx4090"), budgets=budgets)
        return best_policy(problem, lengths, None)

    with pytest.raises(InputError, match="Raise device memory to") as refused:
        ask(64)
    assert ask(int(re.search(r"to (\d+)MiB", str(refused.value))[1])).cache


def test_nothing_lies_on_a_disk_that_gains_nothing():
    """If a disk would be as fast as the host, which has room, the cache is on the host."""
    settings = SearchSettings(batch=10, space=replace(LOSSLESS, attention=("device",)))
    problem = Problem(shape=shape_by_name("opt-6.7b"), hardware=catalogue.load("t4"), dtype="float16")
    found = search(problem, Workload.uniform(10, 512, 32), settings)
    assert not any("@disk" in entry for entry in found.policy.cache_entries)


def test_the_search_lets_mini_batches_share_experts_where_that_is_faster():
    """Sixteen mini-batches read every expert from the device's memory, or one task does."""
    layer = (
        LayerTensor("qkv", (3 * SHAPE.hidden, SHAPE.hidden), True),
        LayerTensor("up", (32, 2048, SHAPE.hidden), False, experts=True),
    )
    modules = ModuleLayers("none", (layer,), (0,) * SHAPE.num_layers, SHAPE.vocab * SHAPE.hidden, 1 / 16)
    shape = replace(SHAPE, modules=modules, routed=(True,) * SHAPE.num_layers)
    problem = SearchProblem(shape=shape, hardware=machine(), prompt_tokens=64, max_tokens=16)
    assert {option.experts for option in problem.options} == {0, 1}
    assert {option.experts for option in replace(problem, shape=SHAPE).options} == {0}
    free, alone = (
        searched(
            Workload.uniform(32, 64, 16),
            shape=shape,
            batch=32,
            mini_batch_tokens=(162,),
            space=replace(PLAIN, entries=("kv@device",), experts=experts),
        )
        for experts in ((0, 1), (0,))
    )
    assert free.policy.experts.batch == 1 and alone.policy.experts.batch == 0
    assert seconds_per_token(free) < 0.9 * seconds_per_token(alone)
    assert free.gap < 0.05
