"""Test the programs of discrete choices against the closed form, and three solvers against each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.programs import solve_with_pulp
from toy_machine import MIB, SHAPE, machine

from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Placement
from flexhybrid.core.problem import AttentionPaths, Budgets
from flexhybrid.core.workload import Workload
from flexhybrid.resolve import auto_settings
from policy_search.audit import write_lp
from policy_search.grid import NUM_TIME_ROWS, ROWS, ChoiceGrid
from policy_search.lower_bound import INFEASIBLE, OPEN, OPTIMAL, LowerBounds, simple_bounds, solve_side_by_side
from policy_search.lp import least_memory, solve
from policy_search.rounding import (
    UnplacedPolicy,
    candidates_of,
    final_blocks,
    place_weights,
    roundings,
)
from policy_search.search import search
from policy_search.search_problem import FULL, LOSSLESS, SearchProblem, batch_grid, pairs_of
from sim import catalogue
from sim.array_clock import predict
from sim.candidate_memory import peak_bytes
from sim.verb_seconds import resource_sums


def problem_with(
    space=FULL, device=24, host=48, disk=64, prompt=100, tokens=8, hardware=None, **fields
) -> SearchProblem:
    """Return the toy problem with budgets in MiB."""
    budgets = Budgets(device * MIB, host * MIB, disk * MIB)
    return SearchProblem(
        shape=SHAPE,
        hardware=hardware or machine(),
        budgets=budgets,
        prompt_tokens=prompt,
        max_tokens=tokens,
        space=space,
        **fields,
    )


def gpu_problem(model: str, paths: AttentionPaths, budget: float) -> SearchProblem:
    """Return the problem of an H200 with this memory budget in bytes, for prompts of 1,536 and answers of 32 tokens."""
    return SearchProblem(
        shape=shape_by_name(model),
        dtype="float16",
        device="cuda",
        hardware=catalogue.load("h200"),
        budgets=Budgets(budget, 2.0**40),
        attention=paths,
        prompt_tokens=1536,
        max_tokens=32,
        space=LOSSLESS,
    )


def grid_of(problem: SearchProblem, batches=(1, 4, 9), mini_batch_tokens=(512, 2048)) -> ChoiceGrid:
    return ChoiceGrid(problem, problem.options, *pairs_of(problem, np.array(batches), mini_batch_tokens))


def some_choices(grid: ChoiceGrid, count: int, seed: int = 0) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).choice(grid.num_choices, count, replace=False))


# ---- what a program says


@pytest.mark.parametrize("cache", [{"kv@host": 0.5, "kv@device": 0.5}, {"act@host": 0.25, "kv@disk": 0.75},
                                   {"act@device": 0.5, "kv@host": 0.25, "act@disk": 0.25}])  # fmt: skip
@pytest.mark.parametrize("weights", [(0.0, 1.0, 0.0), (0.0, 0.25, 0.75)])
def test_the_sums_of_a_mixture_are_the_programs_rows(cache, weights):
    """Prompts are long, so that rounding to blocks has no effect; only mixtures have further overheads."""
    problem = problem_with(prompt=1600, tokens=40)
    grid = grid_of(problem, batches=(6,), mini_batch_tokens=(4096,))
    option = next(o for o in problem.options if o.attention == "device" and (o.kv_bits, o.act_bits) == (8, 4))
    program = grid.program(problem.options.index(option) * len(grid.batch))
    policy = replace(option.policy(cache, Placement(*weights)), max_mini_batch_tokens=4096)
    candidates = replace(candidates_of(problem, [UnplacedPolicy.of(option, 6, 4096, cache)]), policy=policy)
    measured = resource_sums(problem, candidates).T
    said = program.constant + sum(share * program.cache[entry] for entry, share in cache.items())
    said = said + sum(
        share * program.weights[tuple(float(tier == one) for one in TIERS)]
        for tier, share in zip(TIERS, weights, strict=True)
    )
    busiest = max(float(seconds[0]) for seconds in measured[:NUM_TIME_ROWS])
    for row, (name, value) in enumerate(zip(ROWS, measured, strict=True)):
        slack = 0.01 * busiest if row < NUM_TIME_ROWS else 0.02 * float(value[0])
        assert said[row] == pytest.approx(float(value[0]), abs=slack + 1e-9), name
        if row < NUM_TIME_ROWS:
            assert said[row] <= float(value[0]) + 0.002 * busiest, "overheads that a program leaves out only add"


def test_no_rounded_policy_is_faster_than_its_program():
    """Waiting and whole blocks only add to the bound, up to the share of one block."""
    problem = problem_with(LOSSLESS, prompt=200)
    grid = grid_of(problem)
    known = LowerBounds.of(grid)
    known.tighten(np.inf)
    rng = np.random.default_rng(0)
    compared = 0
    for choice in some_choices(grid, 12):
        number, pair = grid.split(choice)
        option = grid.options[number]
        shares = {"kv@host": 0.5, "kv@disk": 0.5} if compared % 2 else {"kv@host": 1.0}
        if option.attention == "device":
            shares = dict(zip(rng.permutation(problem.entries)[:2], rng.dirichlet([1, 1]), strict=True))
        unplaced = UnplacedPolicy.of(option, grid.batch[pair], grid.mini_batch_tokens[pair], shares)
        candidates = candidates_of(problem, [unplaced])
        device, disk, fits = place_weights(problem, candidates)
        if fits[0]:
            found = predict(problem, replace(candidates, weights_device=device, weights_disk=disk))
            compared += 1
            assert known.value[choice] <= float(found.total_s[0]) / problem.tokens(unplaced.batch) * 1.005
    assert compared >= 5


def test_bits_schedule_and_hidden_states_add_up_independently():
    """Terms are evaluated separately; their sum must be the policy's value."""
    problem = problem_with(prompt=320, tokens=20)
    grid = grid_of(problem, batches=(5,), mini_batch_tokens=(1024,))
    for number in some_choices(grid, 25, seed=3):
        option, program = grid.options[number], grid.program(number)
        entry = ("kv@host", "kv@disk")[number % 2] if option.attention == "host" else "act@disk"
        unplaced = UnplacedPolicy.of(option, 5, 1024, {entry: 1.0})
        policy = replace(unplaced.option.policy({entry: 1.0}, Placement(host=1.0)), max_mini_batch_tokens=1024)
        measured = resource_sums(problem, replace(candidates_of(problem, [unplaced]), policy=policy)).T
        said = program.constant + program.cache[entry] + program.weights[0.0, 1.0, 0.0]
        assert said == pytest.approx(np.concatenate(measured), rel=1e-9, abs=1e-9), option


# ---- how it is solved


@pytest.mark.parametrize("seed, limited", [(0, ()), (1, ()), (2, ()), (1, ("max_ttft_s",)), (2, ("max_tpot_s",))])
def test_three_solvers_agree(seed, limited):
    """Batched tableaus, batched HiGHS and PuLP agree, also with given weights. Latency limits are below the median."""
    rng = np.random.default_rng(seed)
    hardware = machine(*np.exp(rng.uniform(np.log([0.05, 10, 2, 0.02]), np.log([5, 500, 50, 1]))))
    given = {} if seed else {"weights_device": 0.25, "objective": "decode_throughput"}
    budgets = {"device": int(rng.integers(10, 60)), "host": int(rng.integers(10, 80))}
    problem = problem_with(hardware=hardware, **budgets, **given)
    grid = grid_of(problem)
    choices = some_choices(grid, 40, seed)
    mine = solve_side_by_side(grid.programs(choices))
    if limited:
        free, phases_s = mine, mine.z[:, -2:] / grid.unit[grid.split(choices)[1], None]
        limits = dict(zip(("max_ttft_s", "max_tpot_s"), 0.97 * np.median(phases_s, axis=0) / (1, 8), strict=True))
        grid = grid_of(replace(problem, **{name: float(limits[name]) for name in limited}))
        mine = solve_side_by_side(grid.programs(choices))
        assert (np.isinf(mine.value) & np.isfinite(free.value)).any(), "a choice that cannot keep the limit"
        slower = (mine.value > free.value * (1 + 1e-6)) & np.isfinite(mine.value)
        assert slower.any() == ("max_ttft_s" in limited), "a choice that keeps it with another mix"
        assert (simple_bounds(grid)[choices] <= mine.value * (1 + 1e-9)).all()
    theirs = solve(grid, choices)
    infeasible = mine.state == INFEASIBLE
    assert set(mine.state) <= {OPTIMAL, INFEASIBLE}
    assert np.array_equal(infeasible, np.isinf(theirs.value)) and np.array_equal(infeasible, theirs.lacking > 1e-7)
    assert theirs.value[~infeasible] == pytest.approx(mine.value[~infeasible], rel=1e-7)
    for i, choice in enumerate(choices[:6]):
        program = grid.program(int(choice))
        if infeasible[i]:
            with pytest.raises(ValueError):
                solve_with_pulp(program)
        else:
            seconds = mine.value[i] * problem.tokens(program.batch)
            assert solve_with_pulp(program) == pytest.approx(seconds, rel=1e-7)


def test_programs_are_given_up_only_above_the_cutoff():
    grid = grid_of(problem_with())
    choices = np.arange(grid.num_choices)
    programs = grid.programs(choices)
    exact = solve_side_by_side(programs).value
    cutoff = np.quantile(exact[np.isfinite(exact)], 0.2)
    some = solve_side_by_side(programs, cutoff)
    assert (some.value <= exact * (1 + 1e-9)).all(), "a bound"
    assert np.array_equal(exact <= cutoff, (some.state == OPTIMAL) & (some.value <= cutoff))
    assert (some.value[some.state == OPEN] > cutoff).all() and (some.state == OPEN).any()
    assert (simple_bounds(grid) <= exact * (1 + 1e-9)).all()


def test_the_best_bound_is_found_without_solving_all():
    grid = grid_of(problem_with(), batches=batch_grid(40))
    known = LowerBounds.of(grid)
    best = known.find_best(0.03)
    solved = int((known.state == OPTIMAL).sum())
    assert solved < grid.num_choices / 4
    exact = LowerBounds.of(grid)
    exact.tighten(np.inf)
    assert best == pytest.approx(exact.value.min(), rel=1e-9)
    near = np.flatnonzero(exact.value <= best * 1.03)
    assert (known.state[near] == OPTIMAL).all()


def test_keeping_the_weights_streamed_is_a_program_too():
    grid = grid_of(problem_with(LOSSLESS, device=40))
    choices = some_choices(grid, 10)
    free, streamed = solve(grid, choices), solve(grid, choices, all_streamed=True)
    assert (streamed.value >= free.value * (1 - 1e-9)).all() and (streamed.weights[:, 0] < 1e-7).all()
    assert (free.weights[:, 0] > 0.01).any()


def test_the_least_memory_is_what_makes_a_program_feasible():
    problem = problem_with(LOSSLESS, device=4, host=10, disk=1)
    grid = grid_of(problem, batches=(8,))
    choices = np.arange(grid.num_choices)
    assert (solve_side_by_side(grid.programs(choices)).state == INFEASIBLE).all()
    more = least_memory(grid, choices, TIERS).value.min()
    for factor, feasible in ((1.01, True), (0.95, False)):
        budgets = {tier: size * (1 + more * factor) for tier, size in problem.limits.items()}
        larger = replace(problem, budgets=Budgets(**budgets))
        grown = ChoiceGrid(larger, larger.options, grid.batch, grid.mini_batch_tokens)
        lacking = solve(grown, choices, grown.cut_bytes[grown.split(choices)[1]]).lacking
        assert (lacking.min() <= 1e-7) == feasible


# ---- what a reader sees


def test_the_file_names_its_rows(tmp_path):
    grid = grid_of(problem_with())
    path = write_lp(grid.program(0), tmp_path / "winner.lp")
    text = path.read_text()
    for row in ("decode_h2d_within_T", "prefill_compute_within_T", "decode_disk_read_within_T", "device_memory_fits",
                "host_memory_fits", "disk_memory_fits", "cache_shares_add_up", "weight_shares_add_up"):  # fmt: skip
        assert f"{row}:" in text
    assert "seconds: T_decode + T_prefill" in text and "weights_on_disk" in text and "cache_act_on_device" in text
    with pytest.raises(InputError, match="cannot write"):
        write_lp(grid.program(0), tmp_path / "nowhere" / "winner.lp")


def test_a_tier_without_a_limit_has_no_row(tmp_path):
    problem = problem_with(disk=0)
    problem = replace(problem, budgets=replace(problem.budgets, host=None))
    text = write_lp(grid_of(problem).program(0), tmp_path / "winner.lp").read_text()
    assert "host_memory" not in text and "disk" not in text and "device_memory_fits" in text


# ---- from shares to policies


def test_roundings_are_whole_blocks_that_add_up():
    rng = np.random.default_rng(0)
    for _ in range(200):
        count, blocks = int(rng.integers(1, 8)), int(rng.integers(1, 130))
        shares = rng.dirichlet([0.4] * count)
        ways = roundings(shares, blocks)
        assert ways.sum(axis=1) == pytest.approx(np.ones(len(ways)))
        assert ways * blocks == pytest.approx(np.round(ways * blocks))
        assert (np.abs(ways - shares).max(axis=1) <= 1 / blocks + 1e-9).any(), "one of them is near"


def test_weights_fill_the_device_and_the_host_but_no_more():
    plain = problem_with(LOSSLESS)
    unplaced = [
        UnplacedPolicy.of(plain.options[0], batch, 2048, {"kv@host": 0.5, "act@host": 0.5}) for batch in (1, 4, 8)
    ]
    candidates = candidates_of(plain, unplaced)
    streamed = peak_bytes(plain, candidates)
    budgets = {"device": streamed["device"][1] + MIB, "host": streamed["host"][1] - 2 * MIB, "disk": 64.0 * MIB}
    problem = replace(plain, budgets=Budgets(**{tier: float(size) for tier, size in budgets.items()}))
    device, disk, fits = place_weights(problem, candidates)
    assert list(fits) == [True, True, False] and 0 < device[1] < device[0] == 1 and disk[1] > disk[0] == 0
    candidates = candidates_of(problem, unplaced[1:2])
    device, disk = device[1:2], disk[1:2]
    peaks = peak_bytes(problem, replace(candidates, weights_device=device, weights_disk=disk))
    more = peak_bytes(problem, replace(candidates, weights_device=device + 0.004, weights_disk=disk))
    less = peak_bytes(problem, replace(candidates, weights_device=device, weights_disk=disk - 0.004))
    assert (peaks["device"] <= problem.limits["device"]).all() and (peaks["host"] <= problem.limits["host"]).all()
    assert (more["device"] > problem.limits["device"]).all()
    assert (less["host"] > problem.limits["host"]).all()


@settings(max_examples=40)
@given(
    model=st.sampled_from(["opt-1.3b", "opt-6.7b", "opt-30b"]),
    share=st.floats(0.05, 0.98),
    cache=st.sampled_from([{"kv@host": 1.0}, {"act@host": 1.0}, {"act@device": 0.1, "kv@host": 0.9}]),
    batch=st.integers(1, 64),
    in_place=st.booleans(),
)
def test_weights_fill_a_gpu_whose_allocator_takes_whole_segments(model, share, cache, batch, in_place):
    """Nearly all of any budget between no and all weights is used, and never more."""
    paths = AttentionPaths("fused", "products", "fused", in_place, False)
    problem = gpu_problem(model, paths, budget=float("inf"))
    candidates = candidates_of(problem, [UnplacedPolicy.of(problem.options[0], batch, 4096, cache)])

    def peak(device: float) -> float:
        return float(peak_bytes(problem, replace(candidates, weights_device=np.array([device])))["device"][0])

    none, whole = peak(0.0), peak(1.0)
    budget = none + share * (whole - none)
    device, _, fits = place_weights(gpu_problem(model, paths, budget), candidates)
    assert fits[0] and peak(float(device[0])) <= budget
    assert peak(min(1.0, float(device[0]) + 0.04)) > budget


@pytest.mark.parametrize("budget, batch", [(11, 24), (12, 48)])
def test_a_search_for_a_gpu_with_room_for_most_weights_ends_near_its_bound(budget, batch):
    """Rounded programs must fit. When none did, the answer was a policy 20 times slower than the best."""
    paths = AttentionPaths("fused", "products", "fused", True, True)
    problem, workload = gpu_problem("opt-6.7b", paths, budget * 2.0**30), Workload.uniform(batch, 1536, 32)
    assert search(problem, workload, auto_settings(problem.hardware, workload)).gaps["device"] < 0.1


def test_a_prompt_in_chunks_is_another_choice_than_a_whole_one():
    """With one request at a time, mini-batches that hold its prompt were once taken for those that do not."""
    problem = problem_with(LOSSLESS, prompt=900)
    batch, tokens = pairs_of(problem, np.array([1]), (256, 512, 1024, 2048))
    assert list(zip(batch, tokens, strict=True)) == [(1, 1024), (1, 512), (1, 256)]


def test_equal_policies_are_equal_values():
    problem = problem_with()
    wide = next(o for o in problem.options if (o.attention, o.kv_bits, o.act_bits) == ("device", "native", 4))
    plain = wide._replace(act_bits="native")
    assert UnplacedPolicy.of(wide, 3, 512, {"kv@host": 1.0, "act@host": 0.0}) == UnplacedPolicy.of(
        plain, 3, 512, {"kv@host": 1.0}
    )
    assert final_blocks(problem) == 7
