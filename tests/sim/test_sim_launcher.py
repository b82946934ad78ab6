"""Test the cost of launching tasks in Python: both clocks price it, and a profile measures it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from random_cases import UniformCase, compare, random_case
from toy_machine import SHAPE, machine

from flexhybrid.core.hardware import LAUNCHER, Line
from flexhybrid.core.plan import stream
from flexhybrid.runtime.profiling import profile as profiling
from flexhybrid.runtime.profiling.profile import ProfileRun
from policy_search.fit import fit_hardware
from sim.presets import hybrid, kvpr_column
from sim.simulate import simulate
from sim.virtual_clock import run, summarize


def launched(case: UniformCase, launch_s: float) -> UniformCase:
    lines = {**case.hardware.lines, LAUNCHER: Line(overhead_s=launch_s)}
    return replace(case, hardware=replace(case.hardware, lines=lines))


@pytest.mark.parametrize("kind", ["column", "row"])
def test_both_clocks_agree_where_launching_counts(kind):
    """Launching takes 0.5 to 2 times the seconds of a task on the busiest resource."""
    rng, gaps = np.random.default_rng(11), []
    for _ in range(5):
        case = random_case(rng, kind)
        num_tasks = sum(1 for _ in stream(case.wave()))
        closed, virtual = compare(launched(case, compare(case)[1] / num_tasks * rng.uniform(0.3, 2.0)))
        gaps.append(abs(closed / virtual - 1))
    assert np.median(gaps) <= 0.003 and max(gaps) <= 0.02, gaps


@pytest.mark.parametrize("policy", [hybrid(0.5, 600), kvpr_column("pipeline", max_mini_batch_tokens=600)])
def test_a_run_that_launching_binds_takes_as_long_as_launching(policy):
    case = UniformCase(SHAPE, machine(link=100.0, gflops=1e5, memory=1e4), 4, policy, 8, 100, 12)
    num_tasks, launch_s = sum(1 for _ in stream(case.wave())), 1e-3
    bound = launched(case, launch_s)
    closed, virtual = compare(bound)
    assert num_tasks * launch_s == pytest.approx(virtual, rel=0.01) and closed == pytest.approx(virtual, rel=0.01)
    for clock in ("closed", "virtual"):
        found = simulate(bound.problem, policy, 8, 100, 12, clock=clock)
        assert found.binding == LAUNCHER and found.busy[LAUNCHER] == pytest.approx(1.0, abs=0.02)
        assert LAUNCHER not in simulate(case.problem, policy, 8, 100, 12, clock=clock).busy


def test_no_task_starts_before_it_is_launched():
    case = UniformCase(SHAPE, machine(), 4, hybrid(0.5, 600), 8, 100, 3)
    trace = run(stream(case.wave()), launched(case, 1e-4).hardware)
    assert all(event.start_s >= 0.9999e-4 * (number + 1) for number, event in enumerate(trace))
    unlaunched = summarize(run(stream(case.wave()), case.hardware))
    assert summarize(trace).total_s == unlaunched.total_s  # the link is slower than Python


def test_a_profile_has_what_launching_a_task_takes(monkeypatch, short_profile):
    monkeypatch.setattr(profiling, "LAUNCHED_SHAPE", replace(profiling.LAUNCHED_SHAPE, num_layers=4))
    clock = iter(range(1 << 20))
    monkeypatch.setattr("flexhybrid.runtime.clock.time.thread_time", lambda: next(clock) * 1e-6)
    runs = (ProfileRun(2, 32, 2, {"kv@host": 0.5, "act@host": 0.5}),)
    small = replace(SHAPE, num_layers=2, hidden=64, num_heads=2, num_kv_heads=2, head_dim=32, ffn=128, vocab=100)
    samples = profiling.profile(small, "float32", torch.device("cpu"), runs=runs).samples
    ((flops, moved, seconds),) = samples[LAUNCHER]
    assert (flops, moved) == (0.0, 0.0) and seconds > 0
    assert fit_hardware(samples, name="here", device="cpu").launch_s == pytest.approx(seconds)
