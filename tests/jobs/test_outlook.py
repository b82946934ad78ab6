"""What is foretold of a queue whose answers end by themselves: lengths from those so far, and the time that is left."""

from __future__ import annotations

import numpy as np
import pytest

from flexhybrid.core.workload import Workload
from flexhybrid.jobs.run import outlook as outlook_module
from flexhybrid.jobs.run.outlook import Outlook
from sim.answer_lengths import ObservedAnswers, with_mean
from sim.queue_clock import Pace

ONE_SECOND = Pace({"compute": np.array([1.0, *[0] * 9])}, 1, (1.0, 1.0))  #: an iteration


def log_normal(count: int, limit: int, seed: int = 0) -> np.ndarray:
    return np.clip(np.exp(np.random.default_rng(seed).normal(np.log(limit / 7), 0.9, count)), 1, limit).astype(int)


def test_survival_is_the_product_of_the_shares_that_go_on():
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


def test_expected_answers_have_the_lengths_of_those_that_ended():
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


def test_answers_of_a_mean_have_it_as_far_as_their_limits_allow():
    limits = np.repeat([16, 64, 256], 300)
    for mean in (3, 40, 90):
        answers = with_mean(Workload(np.full(900, 5), limits), mean).answers
        assert answers.mean() == pytest.approx(mean, rel=0.01) and (answers <= limits).all()
    assert (with_mean(Workload(np.full(9, 5), np.full(9, 8)), 100).answers == 8).all()


@pytest.mark.parametrize("slower", [0.5, 1.0, 3.0])
def test_the_end_is_foretold_after_a_tenth(monkeypatch, slower):
    """1,500 answers, 48 at a time, an iteration in ``slower`` seconds where one was predicted."""
    clock, count, limit, places = [0.0], 1500, 700, 48
    monkeypatch.setattr(outlook_module.time, "monotonic", lambda: clock[0])
    lengths = log_normal(count, limit)
    outlook = Outlook(ONE_SECOND, Workload(np.full(count, 9), np.full(count, limit)))
    waiting, running, told = list(range(count))[::-1], {}, {}
    while waiting or running:
        while waiting and len(running) < places:
            running[waiting.pop()] = 0
            outlook.begin(max(running))
        clock[0] += slower
        for request in list(running):
            running[request] += 1
            if running[request] == lengths[request] + 1:  # its end is known an iteration late
                del running[request]
            elif running[request] == lengths[request]:
                outlook.end(request, int(lengths[request]))
        outlook.advance(len(running))
        done = int((outlook.ended_in >= 0).sum())
        if done >= count // 10 and "tenth" not in told or done >= count // 2 and "half" not in told:
            told["tenth" if "tenth" not in told else "half"] = clock[0] + outlook.seconds_left()
    assert told["tenth"] == pytest.approx(clock[0], rel=0.15)
    assert told["half"] == pytest.approx(clock[0], rel=0.06)
    assert outlook.seconds_left() == 0.0


def test_a_batch_of_many_iterations_keeps_the_latest_ends_alone(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(outlook_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(outlook_module, "KEPT_ENDS", 8)
    outlook = Outlook(ONE_SECOND, Workload.uniform(1, 4, 50))
    outlook.begin(0)
    for _ in range(30):
        clock[0] += 2.0
        outlook.advance(1)
    assert len(outlook.ends) <= 8 and outlook.slower(25) == pytest.approx(2.0)
