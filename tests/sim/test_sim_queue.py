"""Test prices of refilled queues against the executor's plan on the virtual clock, and counts against an oracle."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexhybrid.core.admission import Places, batch_size, open_batch
from flexhybrid.core.context.packing import chunk_tokens
from flexhybrid.core.errors import InputError
from flexhybrid.core.memory import memory_plan, total_bytes
from flexhybrid.core.policy import Bits, Placement, Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes, holds_lengths, running_sizes
from flexhybrid.core.schedule.scheduler import Scheduler, stores_exactly
from flexhybrid.core.workload import Prefixes, Workload
from sim import queue_clock, virtual_clock
from sim.queue_clock import IterationCost, iteration_loads, least_seconds, price_queue, walk_queue
from sim.queue_counts import RunIntervals, intervals
from tests.toy_machine import SHAPE, machine

MIXES = (
    {"kv@device": 1.0}, {"kv@host": 1.0}, {"kv@host": 0.5, "act@host": 0.5}, {"act@host": 1.0},
    {"kv@device": 0.5, "kv@host": 0.5},
)  # fmt: skip


def queue_of(seed: int) -> tuple[Problem, Policy, Workload, int]:
    """Return a random machine, policy, queue and number of places. Prompts are similar, so that buffers seldom decide
    which request joins: with a toy's few places one such request would matter much."""
    rng = np.random.default_rng(seed)
    count, places = int(rng.integers(10, 30)), int(rng.integers(4, 10))
    prompts, limits = rng.integers(40, 60, count), rng.integers(2, 30, count)
    answers = limits if seed % 3 == 0 else np.minimum(limits, np.exp(rng.normal(2.2, 0.8, count)).astype(int) + 1)
    order = np.lexsort((prompts, limits))[::-1]
    policy = Policy(
        "queue",
        Placement(host=1) if seed % 4 else Placement(device=1),
        cache=MIXES[seed % len(MIXES)],
        max_mini_batch_tokens=int(rng.choice([512, 1024, 4096])),
        schedule="row" if seed % 7 == 0 else "column",
    )
    shape = replace(SHAPE, num_layers=int(rng.choice([2, 4, 9])))
    link, gflops = np.exp(rng.uniform(-2, 2)), np.exp(rng.uniform(2, 5))
    problem = Problem(shape=shape, dtype="float32", hardware=machine(link=float(link), gflops=float(gflops)))
    return problem, policy, Workload(prompts[order], limits[order], answers[order]), places


def test_no_resource_is_busy_for_more_than_the_time():
    """The price interpolates work and seconds separately; here the link's work is 0.7 % more than the seconds."""
    rng = np.random.default_rng(38)
    count = int(rng.integers(4, 80))
    workload = Workload(rng.integers(8, 120, count), rng.integers(2, 30, count))
    policy = Policy(weights=Placement(host=1.0), cache={"kv@host": 1.0}, max_mini_batch_tokens=1024)
    problem = Problem(shape=SHAPE, hardware=machine(0.12221467, 16.75948169, 13.09909372, 0.1651985))
    run = price_queue(problem, policy, workload, 3)
    assert run.busy[run.binding] == 1.0


def test_a_few_iterations_price_a_queue_as_all_of_its_tasks_do():
    errors = []
    for seed in range(1, 6):
        priced, walked = price_queue(*queue_of(seed)), walk_queue(*queue_of(seed))
        assert priced.total_tokens == walked.total_tokens == queue_of(seed)[2].answers.sum()
        errors.append(abs(priced.total_s / walked.total_s - 1))
    assert np.median(errors) < 0.01 and max(errors) < 0.03


@pytest.mark.parametrize("limits", [[64], [32, 64, 128, 256]])
def test_the_pace_of_a_queue_holds_if_answers_end_early(limits):
    """Requests then join one by one. The pace is from answers at their limits, where all or a quarter join at once."""
    for seed in (1,):
        rng = np.random.default_rng(seed)
        prompts, most = rng.integers(20, 200, 80), np.sort(rng.choice(limits, 80))[::-1].copy()
        workload = Workload(prompts, most)
        known = replace(workload, answer_tokens=np.minimum(most, rng.geometric(1 / 40, 80)))
        policy = Policy("plain", Placement(device=1), cache={"kv@device": 1.0}, max_mini_batch_tokens=2048)
        problem = Problem(shape=SHAPE, dtype="float32", hardware=machine(link=10.0, gflops=30.0))
        pace = price_queue(problem, policy, workload, 25).pace
        counted = intervals(open_batch(problem, policy, known, batch_size(problem, policy, known, 25)), known)
        assert pace and min(factors.min() for factors in pace.factors.values()) >= 0
        assert pace.seconds(counted).sum() == pytest.approx(walk_queue(problem, policy, known, 25).total_s, rel=0.5)


def test_no_queue_ends_before_its_least_seconds():
    """``least_seconds`` is compared with every task of the queue."""
    for seed in range(1, 8):
        problem, policy, workload, places = queue_of(seed)
        walked = walk_queue(problem, policy, workload, places)
        share = least_seconds(problem, policy, workload, walked.at_a_time) / walked.total_s
        assert 0 < share <= 1, seed


@pytest.mark.parametrize("seed", (0,))
def test_blocks_as_needed_are_priced_with_preemptions(seed):
    rng = np.random.default_rng(seed)
    answers = np.clip(rng.normal(60, 40, 50), 1, 160).astype(int)
    workload = Workload(rng.integers(16, 100, 50), np.full(50, 160), answers)
    problem = Problem(shape=SHAPE, dtype="float32", hardware=machine(), budgets=Budgets(host=24e6))
    policy = Policy("grows", Placement(host=1), cache={"kv@host": 1.0}, max_mini_batch_tokens=2048)
    priced, walked = price_queue(problem, policy, workload, 64), walk_queue(problem, policy, workload, 64)
    assert priced.at_a_time < 50  # memory decides
    assert priced.total_s == pytest.approx(walked.total_s, rel=0.06)
    # the drain begins where the last of those who stepped back joins again: one request, too chancy to compare
    assert priced.phases["steady"].running == pytest.approx(walked.phases["steady"].running, rel=0.15)


def test_blocks_as_needed_hold_twice_the_requests_of_reservations():
    """Limits are 1,024 tokens and answers 200 on average; pools hold 64 requests with the longest answers."""
    problem = Problem(shape=SHAPE, dtype="float32", device="cpu")
    policy = Policy("device", Placement(device=1), cache={"kv@host": 1.0}, max_mini_batch_tokens=1 << 15)
    answers = np.clip(np.exp(np.random.default_rng(0).normal(np.log(140), 0.9, 1000)), 1, 1024).astype(int)
    workload, reserved = Workload.uniform(1000, 256, 1024), 64
    sizes = buffer_sizes(open_batch(problem, policy, workload.select(slice(reserved)), reserved))
    limit = total_bytes(memory_plan(problem, policy, sizes))["host"]
    problem = replace(problem, budgets=Budgets(host=limit))
    batch = open_batch(problem, policy, workload, batch_size(problem, policy, workload, 1000))
    counted = intervals(batch, replace(workload, answer_tokens=answers))
    iterations = np.arange(counted.left.max() // 4, counted.left.max() // 2)
    running = ((counted.joined <= iterations[:, None]) & (iterations[:, None] < counted.left)).sum(axis=1)
    assert np.median(running) >= 2 * reserved
    assert len(counted.request) <= 1.1 * 1000  # a request that is preempted joins again


def planned(
    problem: Problem, policy: Policy, workload: Workload, places: int
) -> tuple[RunIntervals, list[tuple[int, int]]]:
    """Return the forecast of a queue, and (iteration, request) of every token in the executor's own plan."""
    found = batch_size(problem, policy, workload, places)
    counted = intervals(open_batch(problem, policy, workload, found), workload)
    wave, tokens = open_batch(problem, policy, workload, found), []
    for task in virtual_clock.answered(wave, workload.answers):
        if task.verb == "sample":
            tokens += [(task.iteration, request) for request in task.payload.step.queued.tolist()]
    return counted, tokens


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.booleans())
def test_a_forecast_has_every_token_in_the_iteration_of_the_plan(seed, shares):
    problem, policy, workload, places = (sharing_queue_of if shares else queue_of)(seed)
    counted, tokens = planned(problem, policy, workload, places)
    spans = zip(counted.request, counted.joined, counted.left, strict=True)
    assert sorted(tokens) == sorted((i, request) for request, joined, left in spans for i in range(joined, left))
    assert counted.surplus.sum() == len(tokens) - workload.answers.sum()


@pytest.mark.parametrize("answers", ("all their limits", "by themselves"))
def test_preemptions_are_those_of_the_plan(answers):
    """Answers that reach their limits fill the pools between two ends."""
    rng = np.random.default_rng(0)
    limits = np.full(80, 160)
    ends = limits if answers == "all their limits" else np.where(rng.random(80) < 0.7, 160, rng.integers(1, 40, 80))
    workload = Workload(rng.integers(16, 100, 80), limits, ends)
    problem = Problem(shape=SHAPE, dtype="float32", hardware=machine(), budgets=Budgets(host=24e6))
    policy = Policy("grows", Placement(host=1), cache={"kv@host": 1.0}, max_mini_batch_tokens=1 << 13)
    counted, tokens = planned(problem, policy, workload, 64)
    assert counted.returned.any()
    spans = zip(counted.request, counted.joined, counted.left, strict=True)
    assert sorted(tokens) == sorted((i, request) for request, joined, left in spans for i in range(joined, left))


def test_cached_contexts_are_not_computed():
    """Request 0 is preempted with a context of 50 tokens; only prompt tokens cost time, a second each."""
    nobody, none = np.zeros(3, bool), np.zeros(3, int)
    counted = RunIntervals(
        request=np.array([0, 1, 0]),
        mini_batch=none,
        prompt_tokens=np.array([40, 30, 50]),
        joined=np.array([0, 0, 12]),
        left=np.array([10, 20, 20]),
        surplus=nobody,
        shared_tokens=none,
        found_tokens=none,
    )
    assert counted.returned.tolist() == [False, False, True]
    pace = IterationCost({"compute": np.array([0.0] * 6 + [1.0] + [0.0] * 3)}, 1, (1.0, 1.0))
    assert pace.seconds(counted).sum() == 40 + 30 + 50
    assert pace.seconds(counted, cached=counted.returned).sum() == 40 + 30
    context = iteration_loads(counted, 1, cached=counted.returned)[12:14, 4]  # it decodes at once
    assert context.tolist() == [30 + 12 + 50, 30 + 13 + 51]


def growing_queue() -> tuple[Problem, Policy, Workload]:
    """Return a queue whose answers reach their limits in half of the cases, with device memory for a few requests."""
    rng = np.random.default_rng(0)
    answers = np.where(rng.random(30) < 0.5, 100, 12)
    workload = Workload(rng.integers(16, 100, 30), np.full(30, 100), answers)
    shape, budgets = replace(SHAPE, num_layers=2), Budgets(device=24.3e6)
    problem = Problem(shape=shape, dtype="float32", hardware=machine(link=8.0, gflops=20), budgets=budgets)
    policy = Policy("grows", Placement(device=1), cache={"kv@device": 1.0})
    return problem, policy, workload


def test_a_request_that_returns_is_expected_to_end_as_one_that_never_left():
    """Most answers have 12 tokens; this one already has 50."""
    problem, policy, workload = growing_queue()
    expected = {}
    for way in ("preempted", "never left"):
        batch = Scheduler(open_batch(problem, policy, workload, Places(4, 0.2)))
        for _ in range(20):
            batch.answers.end(12)
        batch.answers.end(100)
        batch.now, place, request = 60, np.array([0]), int(batch.wave.request[0])
        batch.wave.joined[0] = 10
        if way != "never left":
            [*batch.steps(0, set())]
            batch.wave.joined[0] = 10
            batch._preempt(0, 60, np.array([0]))
            batch.now = 62
            batch._enter(place, [request], 62)
        expected[way] = batch._expected(place).tolist()
    assert expected["preempted"] == expected["never left"]


def test_a_request_that_is_stopped_while_it_waits_leaves_its_length_and_nothing_else():
    problem, policy, workload = growing_queue()
    batch = Scheduler(open_batch(problem, policy, workload, Places(4, 0.2)))
    [*batch.steps(0, set())]
    request = int(batch.wave.request[0])
    batch.groups[0] = batch._preempt(0, 7, np.array([1, 2, 3, 0]))
    assert batch.queue.given == {request: 7} and request in batch.not_before
    [*batch.steps(8, {request})]
    assert request not in {*batch.queue.given, *batch.not_before}
    assert batch.answers.ended[7] == 1


def bound_on_moving(cache: dict[str, float], link: float) -> float:
    """Return the share of time that free swapping of preempted caches would save, for a queue whose answers reach their
    limits in half of the cases, with memory for a few requests."""
    rng = np.random.default_rng(0)
    answers = np.where(rng.random(120) < 0.5, 160, 12)
    workload = Workload(rng.integers(16, 100, 120), np.full(120, 160), answers)
    budgets = Budgets(device=26e6) if "kv@device" in cache else Budgets(host=24e6 if "kv@host" in cache else 16e6)
    problem = Problem(shape=SHAPE, dtype="float32", hardware=machine(link=link, gflops=60), budgets=budgets)
    policy = Policy("grows", Placement(host=1), cache=cache, max_mini_batch_tokens=2048)
    run = price_queue(problem, policy, workload, 64)
    assert run.preemptions >= 10 and run.binding == ("h2d" if link < 1 else "compute")
    return run.recomputing


@pytest.mark.parametrize("cache", ({"kv@host": 1.0}, {"act@host": 1.0}, {"kv@device": 1.0}))
def test_free_swapping_would_save_little_time(cache):
    """This is why preempted contexts are recomputed, not swapped: docs/simulating.md."""
    assert 0 < bound_on_moving(cache, link=0.4) < 0.005
    assert 0 < bound_on_moving(cache, link=100.0) < 0.035


def test_counts_are_those_of_a_list_of_places():
    """If memory holds all requests, each takes the first free place. A request that stops in a decode step leaves at
    once if prompts are computed after it, and otherwise an iteration late."""
    rng = np.random.default_rng(1)
    limits = np.full(60, 30)
    answers = rng.integers(1, 31, 60)
    workload = Workload(np.full(60, 16), limits, answers)
    problem = Problem(shape=SHAPE, dtype="float32", hardware=machine())
    policy = Policy("plain", Placement(host=1), cache={"kv@host": 1.0}, max_mini_batch_tokens=1 << 14)
    counted = intervals(open_batch(problem, policy, workload, 7), workload)
    waiting, given, running, ends, late = list(range(60)), Counter(), [], {}, set()
    for iteration in itertools.count():
        joining, waiting = waiting[: 7 - len(running)], waiting[7 - len(running) :]
        given.update([*running, *joining])
        done = [request for request in (*running, *joining) if given[request] >= answers[request]]
        known = [request for request in done if request in late or answers[request] == 30]
        known += [request for request in done if request not in known and request in running and joining]
        late.update(done)
        ends |= dict.fromkeys(known, iteration + 1)
        running = [request for request in (*running, *joining) if request not in known]
        if not running and not waiting:
            break
    assert dict(zip(counted.request.tolist(), counted.left.tolist(), strict=True)) == ends
    late_ends = [given[request] > answers[request] for request in counted.request.tolist()]
    assert counted.surplus.tolist() == late_ends and 0 < sum(late_ends) < 50
    assert counted.num_iterations == max(ends.values())
    assert counted.per_iteration().max() == 7


@pytest.mark.parametrize("longest", (24, 400))
def test_a_long_queue_is_thinned_in_its_steady_part_alone(monkeypatch, longest):
    """Prompts of up to ``longest`` tokens come longest first, as a job sorts them; they determine the mini-batches."""
    rng = np.random.default_rng(2)
    prompts = np.sort(rng.integers(16, longest + 1, 900))[::-1].copy()
    workload = Workload(prompts, np.full(900, 24), rng.integers(1, 25, 900))
    problem = Problem(shape=SHAPE, dtype="float32", hardware=machine())
    policy = Policy("plain", Placement(host=1), cache={"kv@device": 1.0}, max_mini_batch_tokens=1024)
    whole = price_queue(problem, policy, workload, 8)
    monkeypatch.setattr(queue_clock, "MOST_COUNTED", 150)
    thin = price_queue(problem, policy, workload, 8)
    assert len(thin.seconds) < len(whole.seconds) / 4
    assert thin.total_tokens == pytest.approx(workload.answers.sum())
    assert thin.total_s == pytest.approx(whole.total_s, rel=0.03)


def test_answers_are_no_longer_than_their_limits():
    with pytest.raises(InputError, match="at most max_tokens"):
        Workload(np.array([3]), np.array([4]), np.array([5]))


def sharing_queue_of(seed: int) -> tuple[Problem, Policy, Workload, int]:
    """Return ``queue_of`` with a random tree of prefixes before its prompts."""
    problem, policy, lengths, places = queue_of(seed)
    rng, count = np.random.default_rng(1000 + seed), lengths.num_requests
    parents = [-1, *(int(rng.integers(-1, i)) for i in range(1, rng.integers(2, 7)))]
    tokens = np.zeros(len(parents), np.int64)
    for i, parent in enumerate(parents):
        tokens[i] = rng.integers(8, 120) + (tokens[parent] if parent >= 0 else 0)
    prefixes = Prefixes(tokens, np.array(parents), rng.integers(-(seed % 2), len(parents), count))
    before = np.where(prefixes.of_request < 0, 0, tokens[prefixes.of_request])
    workload = replace(lengths, prompt_tokens=before + lengths.prompt_tokens - 30, prefixes=prefixes)
    order = np.lexsort((workload.prompt_tokens, workload.max_tokens))[::-1]
    return problem, policy, workload.select(order), places


def test_shared_prefixes_are_priced_as_all_tasks_do():
    """Trees of prefixes are compared with the executor's own plan; without them the price is off by 50 %."""
    errors, ignorant = [], []
    for seed in range(1, 4):
        problem, policy, workload, places = sharing_queue_of(seed)
        walked = walk_queue(problem, policy, workload, places)
        for known, into in ((workload, errors), (replace(workload, prefixes=None), ignorant)):
            priced = price_queue(problem, policy, known, places)
            assert priced.total_tokens == walked.total_tokens
            into.append(abs(priced.total_s / walked.total_s - 1))
    assert np.median(errors) < 0.01 and max(errors) < 0.06 < np.median(ignorant)


@pytest.mark.parametrize("bits", (Bits(), Bits(kv=8)))
def test_prompts_are_counted_as_computed_where_the_plan_computes_them(bits):
    """With few bits only memory is shared: each prompt is computed whole."""
    prefixes = Prefixes(np.array([64, 176]), np.array([-1, 0]), np.arange(20) % 2)
    lengths = np.full(20, 9)
    workload = Workload(prefixes.tokens[prefixes.of_request] + 20, lengths, lengths, prefixes)
    problem = Problem(shape=SHAPE, dtype="float32", hardware=machine())
    policy = Policy("plain", Placement(host=1), cache={"kv@host": 1.0}, max_mini_batch_tokens=1024, bits=bits)
    counted = intervals(open_batch(problem, policy, workload, 6), workload)
    loads = iteration_loads(counted, 1, prefixes, stores_exactly(policy))
    steps, tokens = np.zeros((2, len(loads)))
    for task in virtual_clock.answered(open_batch(problem, policy, workload, 6), lengths):
        if task.verb == "embed" and not task.payload.step.decodes:
            steps[task.iteration] += 1
            tokens[task.iteration] += task.payload.step.new_tokens.sum()
    assert loads[:, 6].tolist() == tokens.tolist()
    assert (loads[:, 2] > 0).tolist() == (steps > 0).tolist() and loads[:, 2].sum() <= steps.sum()


@settings(max_examples=50)
@given(st.integers(0, 10_000))
def test_the_batch_that_surely_fits_is_that_of_the_buffers(seed):
    """``holds_lengths`` skips the exact sizes of a mini-batch that is no longer than another one in each request."""
    rng = np.random.default_rng(seed)
    lengths = Workload(rng.integers(1, 120, 12), rng.integers(1, 60, 12))
    policy = Policy("any", Placement(host=1), cache=MIXES[seed % len(MIXES)], max_mini_batch_tokens=512)
    problem = Problem(shape=SHAPE, dtype="float32", hardware=machine())
    wave = open_batch(problem, policy, Workload(np.r_[lengths.prompt_tokens, 5], np.r_[lengths.max_tokens, 5]), 12)
    for group in map(wave.workload.select, wave.mini_batches):
        assert wave.limits.holds(running_sizes(wave, group.cached_tokens, group.prompt_tokens))
    most = wave.workload.select(wave.mini_batches[0])
    cached, joining = rng.integers(1, 170, int(rng.integers(1, 6))), rng.integers(1, 110, int(rng.integers(0, 5)))
    joining = joining[: len(cached)]
    if holds_lengths(most, cached, joining, chunk_tokens(policy.max_mini_batch_tokens)):
        assert wave.limits.holds(running_sizes(wave, cached, joining))
