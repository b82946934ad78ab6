"""Test predictions for a queue with unknown answer lengths: lengths from finished answers, and the time left."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from flexhybrid.core.admission import Places, open_batch
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.scheduler import Scheduler
from flexhybrid.core.workload import Prefixes, Workload
from flexhybrid.jobs.run import outlook as outlook_module
from flexhybrid.jobs.run.outlook import CountedQueue, Outlook
from sim.answer_lengths import ObservedAnswers, with_mean
from sim.queue_clock import IterationCost
from tests.toy_machine import SHAPE, machine

PROBLEM = Problem(shape=SHAPE, dtype="float32", hardware=machine())
ONE_SECOND = IterationCost({"compute": np.array([1.0, *[0] * 9])}, 1, (1.0, 1.0))  #: an iteration


def log_normal(count: int, limit: int, seed: int = 0) -> np.ndarray:
    return np.clip(np.exp(np.random.default_rng(seed).normal(np.log(limit / 7), 0.9, count)), 1, limit).astype(int)


def test_survival_is_the_product_of_the_shares_that_continue():
    rng = np.random.default_rng(4)
    lengths, ages = rng.integers(1, 13, 200), rng.integers(1, 13, 40)
    observed = ObservedAnswers(12)
    for length in lengths.tolist():
        observed.end(length, 12)
    survival, left = observed.survival(ages), 1.0
    for tokens in range(1, 12):  # with a plain count of everybody at every length
        reached = sum(length >= tokens for length in lengths) + sum(age >= tokens for age in ages)
        left *= 1 - sum(length == tokens for length in lengths) / reached
        assert survival[tokens] == pytest.approx(left)


def test_expected_answers_have_the_lengths_of_finished_ones():
    lengths = log_normal(4000, 512)
    observed = ObservedAnswers(512)
    for length in lengths.tolist():
        observed.end(length, 512)
    drawn = observed.expected(np.full(4000, 512))
    assert drawn.mean() == pytest.approx(lengths.mean(), rel=0.02)
    assert np.quantile(drawn, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(lengths, [0.1, 0.5, 0.9]), rel=0.05)
    older = observed.expected(np.full(4000, 512), np.full(4000, 100))
    assert older.min() > 100
    # the others do not count where all of them have reached 100
    assert older.mean() == pytest.approx(lengths[lengths > 100].mean(), rel=0.05)


def test_answers_of_a_given_mean_stay_within_their_limits():
    limits = np.repeat([16, 64, 256], 300)
    for mean in (3, 40, 90):
        answers = with_mean(Workload(np.full(900, 5), limits), mean).answers
        assert answers.mean() == pytest.approx(mean, rel=0.01) and (answers <= limits).all()
    assert (with_mean(Workload(np.full(9, 5), np.full(9, 8)), 100).answers == 8).all()


PLAIN = Policy("plain", Placement(host=1), cache={"kv@host": 1.0}, max_mini_batch_tokens=1 << 15)


def predicted(
    monkeypatch, policy, known: Workload, places, slower, shares, pace=ONE_SECOND, work=None, each=None, clock=None
) -> list[float]:
    """Run a batch by the executor's own account, an iteration in ``slower`` seconds (or ``slower(iteration)``); return
    the seconds to its end that are predicted once so many of the answers have ended, over those that it takes in all.
    ``work``: instead, what says the busy seconds of each resource in an iteration in which so many requests decode.
    ``each`` is called with the outlook after every iteration."""
    clock, count, told = [0.0] if clock is None else clock, known.num_requests, []
    opened = partial(open_batch, PROBLEM, policy, known, places)
    monkeypatch.setattr(outlook_module.time, "monotonic", lambda: clock[0])
    unknown = replace(known, answer_tokens=None)
    pace, busy = replace(pace, num_mini_batches=len(opened().mini_batches)), dict.fromkeys(pace.factors, 0.0)
    outlook, wave = Outlook(pace, unknown, open_wave=opened), opened()
    batch, num_given, stopped = Scheduler(wave), np.zeros(count, int), set()
    wave.queue.on_join = outlook.begin
    for k, group in enumerate(wave.mini_batches):
        for request in wave.request[group].tolist():
            outlook.begin(request, k)
    for iteration in itertools.count():
        steps, ended = list(batch.steps(iteration, set(stopped))), []
        if not steps:
            break
        for *_, piece, built, places in steps:
            if built is None and not piece:
                requests = wave.request[places]
                num_given[requests] += 1
                ended += requests[num_given[requests] == known.answers[requests]].tolist()
        spent = {"compute": slower(iteration) if callable(slower) else slower}
        if work:
            spent = work(sum(len(places) for _, chunk, _, _, places in steps if not chunk and iteration))
            busy = {resource: busy[resource] + seconds for resource, seconds in spent.items()}
            outlook.note_busy(busy, dict)
        clock[0] += max(spent.values())
        stopped.update(ended)
        for request in ended:
            outlook.end(request, int(known.answers[request]))
        outlook.advance()
        if each:
            each(outlook)
        if len(told) < len(shares) and (outlook.ended_in >= 0).sum() >= count * shares[len(told)]:
            outlook._queue = None
            told.append(clock[0] + (outlook.seconds_left() or 0.0))
    outlook._queue = None
    assert outlook.seconds_left() == 0.0 and (work or each or clock[0] == pytest.approx(slower * iteration))
    return [seconds / clock[0] for seconds in told]


@pytest.mark.parametrize("slower", [0.5, 3.0])
def test_the_end_is_predicted_after_a_tenth(monkeypatch, slower):
    """1,000 answers, 48 at a time; an iteration takes ``slower`` times the predicted second."""
    count, limit = 1000, 350
    workload = Workload(np.full(count, 9), np.full(count, limit), log_normal(count, limit))
    tenth, half = predicted(monkeypatch, PLAIN, workload, 48, slower, (0.1, 0.5))
    assert tenth == pytest.approx(1.0, rel=0.15)  # the mean of 100 such answers is known to 11 %
    assert half == pytest.approx(1.0, rel=0.06)


def test_a_drain_is_predicted_by_the_resource_that_binds_it(monkeypatch):
    """Compute takes twice the predicted time and limits a full batch; the link limits the last three requests."""
    limits = np.r_[np.full(197, 20), np.full(3, 400)]
    workload = Workload(np.full(200, 9), limits, limits)
    factors = {"h2d": np.array([1.0, *[0] * 9]), "compute": np.array([0, 0, 0, 0.1, *[0] * 6])}
    pace, policy = IterationCost(factors, 1, (1.0, 1.0)), replace(PLAIN, max_mini_batch_tokens=1 << 17)
    spent = lambda decoding: {"h2d": 1.0, "compute": 0.2 * decoding}  # noqa: E731
    told = predicted(monkeypatch, policy, workload, 40, 1.0, (0.1, 0.5), pace, spent)
    assert told == pytest.approx([1.0, 1.0], rel=0.02)


@pytest.mark.parametrize("common", (0, 200))
def test_the_end_is_predicted_if_buffers_limit_the_batch(monkeypatch, common):
    """Answers have known lengths. The first requests are short, and buffers are sized for them."""
    rng = np.random.default_rng(2)
    prompts, limits = common + np.r_[rng.integers(8, 24, 12), rng.integers(8, 90, 190)], rng.integers(1, 41, 202)
    prefixes = Prefixes(np.array([common]), np.array([-1]), np.zeros(202, int)) if common else None
    workload = Workload(prompts, limits, limits, prefixes)
    policy = Policy("mixed", Placement(host=1), cache={"kv@host": 0.5, "act@host": 0.5}, max_mini_batch_tokens=1 << 12)
    told = predicted(monkeypatch, policy, workload, 12, 1.0, (0.05, 0.5))
    assert told == pytest.approx([1.0, 1.0], rel=0.05)


def test_a_sample_of_many_queued_requests_is_simulated(monkeypatch):
    """The time of all is scaled by their tokens."""
    monkeypatch.setattr(outlook_module, "MOST_COUNTED", 64)
    limits = np.random.default_rng(3).integers(1, 30, 400)
    workload = Workload(np.full(400, 20), limits, limits)
    told = predicted(monkeypatch, PLAIN, workload, 16, 2.0, (0.05, 0.5))
    assert told == pytest.approx([1.0, 1.0], rel=0.1)  # 64 stand for all


def test_preempted_requests_are_predicted(monkeypatch):
    """Memory holds a quarter of the answers' limits, and every answer reaches its limit."""
    workload = Workload(np.random.default_rng(1).integers(16, 100, 200), np.full(200, 120))
    policy = replace(PLAIN, max_mini_batch_tokens=1 << 13)
    told = predicted(monkeypatch, policy, workload, Places(20, 0.25), 1.0, (0.1, 0.5))
    assert told == pytest.approx([1.0, 1.0], rel=0.12)  # runs of blocks are left out


def test_a_long_batch_keeps_only_the_latest_iteration_ends(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(outlook_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(outlook_module, "KEPT_ENDS", 8)
    outlook = Outlook(ONE_SECOND, Workload.uniform(1, 4, 50))
    outlook.begin(0)
    for _ in range(30):
        clock[0] += 2.0
        outlook.advance()
    assert len(outlook.ends) <= 8 and outlook.slower(25) == pytest.approx(2.0)


def test_the_queue_is_simulated_again_after_half_of_the_rest(monkeypatch):
    """Simulate again after half of the time left, but not before three times the last simulation's seconds have passed.
    Only one thread simulates at a time."""
    clock, lefts, inside = [100.0], [60, 20, 4], []
    monkeypatch.setattr(outlook_module.time, "monotonic", lambda: clock[0])
    outlook = Outlook(ONE_SECOND, Workload.uniform(4, 8, 8), open_wave=lambda: pytest.fail("nobody counts here"))

    def count(_self) -> CountedQueue:
        clock[0] += 1.0
        inside.append(outlook.seconds_left())
        return CountedQueue(np.ones(outlook.num_iterations + lefts.pop(0)), 0, outlook.num_iterations, 0, 1.0)

    monkeypatch.setattr(Outlook, "_count", count)
    assert outlook.seconds_left() is None
    clock[0] += 1.0
    outlook.advance()
    assert outlook.seconds_left() == 59.0 and inside == [None]  # an iteration of 1 s, and 1 s of counting since
    clock[0] = 104.5  # it took 1 s: not before 105
    assert outlook.seconds_left() == 56.5 and len(inside) == 1
    clock[0] = 105.0
    assert outlook.seconds_left() == 15.0 and inside == [None, 55.0]  # of 20, 5 s since the last iteration
    clock[0] = 110.0  # the first iteration ended at 101, the second count at 106
    assert outlook.seconds_left() == 11.0 and len(inside) == 2
    clock[0] = 111.0
    assert outlook.seconds_left() == 0.0 and inside == [None, 55.0, 9.0] and not lefts


@pytest.mark.parametrize(
    "slower, start, later, tail",
    [(0.05, 0.0, 1.0, 0), (20.0, 0.25, 1.0, 3), (0.05, 0.0, 4.0, 0), (20.0, 0.0, 4.0, 0), (20.0, 0.0, 0.3, 3)],
)
def test_the_time_left_corrects_itself(slower, start, later, tail, monkeypatch):
    """An iteration takes ``slower`` times the predicted second, and ``later`` times that after an eighth of all
    iterations. The first one also takes the share ``start`` of the run, as compiling does. The last ``tail`` answers
    are far longer. A simulation of the queue takes 1 % of the run. After 10 % of the run the estimate is within a
    factor of 1.5 of the time left. After a change it is again, once as much time has passed as before it."""
    answers = np.maximum(log_normal(120, 60), 4)
    answers[len(answers) - tail :] = 90
    workload = Workload(np.full(120, 9), answers, answers)
    told, count, clock = [], Outlook._count, [0.0]
    predicted(monkeypatch, PLAIN, workload, 8, lambda _: 1.0, (), each=lambda _: told.append(0))
    iterations, told = len(told), []
    change = iterations // 8
    plain = slower * (change + later * (iterations - change))

    def counted(self) -> CountedQueue:
        clock[0] += plain / 100
        return count(self)

    def seconds(iteration: int) -> float:
        compiling = start / (1 - start) * plain if not iteration else 0.0
        return compiling + slower * (later if iteration >= change else 1.0)

    monkeypatch.setattr(Outlook, "_count", counted)
    each = lambda outlook: told.append((clock[0], outlook.seconds_left()))  # noqa: E731
    predicted(monkeypatch, PLAIN, workload, 8, seconds, (), each=each, clock=clock)
    end, settled = clock[0], 0.1 * clock[0] if later == 1.0 else 2.2 * told[change][0]
    known = [(left, end - when) for when, left in told if when > settled + start / (1 - start) * plain]
    assert len(known) > iterations / 4
    for left, true in known:
        assert abs(left - true) < 0.03 * end + (0.5 * true if left > true else true / 3)
