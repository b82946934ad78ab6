"""Test trials: they recover lines that differ from the record, and choose the best of a grid on the true machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.trace import TraceEvent
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.trials import MOST_ROUNDS, MOST_TRIED, Priced, Trials, rivals, run_trials
from policy_search.search import PLAIN, SearchSettings, search
from sim import virtual_clock
from sim.correction import TRIALS, corrected, in_words, times_of, with_waiting
from sim.cost import price as seconds_of
from sim.presets import hybrid
from tests import toy_machine

WORKLOAD, TOKENS = Workload.uniform(8, 128, 6), 4 * 161
GRID = [hybrid(i / 16, TOKENS) for i in range(17)]
LINES = ("kv_gen", "load_kv", "load_act", "load_weights", "project", "attend", "finish", "assemble")


def known_machine() -> Hardware:
    """Return a machine with own lines for most verbs, on which mixes are fastest."""
    machine = toy_machine.machine(link=0.1, gflops=20.0)
    of = {key: machine.lines["h2d" if key.startswith("load") else "compute"] for key in LINES}
    return replace(machine, lines=machine.lines | of)


def planted(factors: dict[str, float]) -> Hardware:
    """Return the true machine: some lines of the known one take other times."""
    known = known_machine()

    def times(line: Line, factor: float) -> Line:
        return Line(factor * line.overhead_s, factor * line.s_per_flop, factor * line.s_per_byte)

    return replace(known, lines=known.lines | {key: times(known.lines[key], of) for key, of in factors.items()})


def problem_on(hardware: Hardware) -> Problem:
    return Problem(shape=replace(toy_machine.SHAPE, num_layers=2), dtype="float32", hardware=hardware)


def run_on(hardware: Hardware, policy: Policy, seed: int | None = None) -> list[TraceEvent]:
    """Return a trial's trace; with a seed, tasks vary by 3 %, and 10 % take five times as long."""
    rng = np.random.default_rng(seed)

    def taken(task):
        disturbed = 1.0 if seed is None else rng.normal(1, 0.03) * (5.0 if rng.random() < 0.1 else 1.0)
        return disturbed * seconds_of(hardware, task.verb, task.resource, task.work)

    tasks = (
        task for task in stream(admit(problem_on(hardware), policy, WORKLOAD), first_iteration=1) if task.iteration <= 4
    )
    return virtual_clock.run(tasks, hardware, seconds_of=taken)


def price(hardware: Hardware, policy: Policy) -> Priced:
    summary = virtual_clock.summarize(run_on(hardware, policy), -2)
    return Priced(summary.decode_tokens_per_s, summary.binding)


def choose(hardware: Hardware) -> Policy:
    space = replace(PLAIN, entries=("act@host", "kv@host"))
    settings = SearchSettings(
        batch=8, objective="decode_throughput", space=space, mini_batch_tokens=(TOKENS,), weights_device=0.0
    )
    return replace(search(problem_on(hardware), WORKLOAD, settings).policy, name="hybrid")


def try_on(true: Hardware, limit_s: float = 1e9) -> tuple[Trials, list[Policy]]:
    ran: list[Policy] = []
    run = lambda policy: ran.append(policy) or run_on(true, policy)  # noqa: E731
    return run_trials(known_machine(), choose(known_machine()), choose, price, GRID[::2], run, -2, limit_s), ran


@pytest.mark.parametrize("seed", range(6))
def test_the_choice_becomes_the_best_of_a_grid_on_the_true_machine(seed):
    rng = np.random.default_rng(seed)
    true = planted({key: float(np.exp(rng.uniform(-1.1, 1.1))) for key in LINES})
    trials, ran = try_on(true)
    best = max(price(true, policy).tokens_per_s for policy in GRID)
    assert price(true, trials.policy).tokens_per_s > 0.98 * best
    assert trials.rounds <= MOST_ROUNDS and len(ran) == len(set(ran)) < MOST_TRIED + MOST_ROUNDS


def test_lines_are_recovered_though_tasks_scatter_and_some_are_disturbed():
    factors = {"kv_gen": 0.44, "load_kv": 1.3, "attend": 2.0, "finish": 0.8}
    true, known = planted(factors), known_machine()
    runs = [(policy, times_of(run_on(true, policy, seed=1), known)) for policy in GRID[2:12:4]]
    found = corrected(known, runs)
    for key in LINES:
        task = 5e6, 1e6
        assert found.lines[key].at(*task) == pytest.approx(true.lines[key].at(*task), rel=0.05), key
        assert found.notes[TRIALS]["lines"][key] == pytest.approx(factors.get(key, 1.0), rel=0.05)
    assert "kv_gen takes 0.4" in in_words(found) and "project" not in in_words(found)


def test_an_overhead_is_told_from_a_slope_where_sizes_differ():
    known = known_machine()
    line = replace(known.lines["kv_gen"], overhead_s=5e-3)
    true = replace(known, lines=known.lines | {"kv_gen": line})
    runs = [(policy, times_of(run_on(true, policy), known)) for policy in (GRID[2], GRID[14])]
    found = corrected(known, runs).lines["kv_gen"]
    assert (found.overhead_s, found.s_per_flop) == pytest.approx((5e-3, line.s_per_flop), rel=0.05)


def test_waiting_that_no_line_explains_is_a_factor_of_the_limiting_resource():
    """Every iteration begins 20 ms late."""
    known, policies = known_machine().scaled({"compute": 4.0}), (GRID[0], GRID[16])
    late = [
        (
            policy,
            [TraceEvent(task, *(s + 0.02 * task.iteration for s in span)) for task, *span in run_on(known, policy)],
        )
        for policy in policies
    ]
    found = corrected(known, [(policy, times_of(trace, known)) for policy, trace in late])
    assert found.notes[TRIALS]["lines"] == pytest.approx(dict.fromkeys(found.notes[TRIALS]["lines"], 1.0))
    found = with_waiting(found, late, -2)
    assert set(found.notes[TRIALS]["waiting"]) == {"h2d", "compute"} and "limited by h2d takes 1." in in_words(found)
    for policy, trace in late:
        measured = virtual_clock.summarize_measured(trace, -2).decode_tokens_per_s
        assert price(known, policy).tokens_per_s > 1.02 * measured
        assert price(found, policy).tokens_per_s == pytest.approx(measured, rel=0.03)


def test_no_trial_begins_beyond_the_limit_and_a_right_record_has_none_too_many():
    assert len(try_on(planted({"kv_gen": 0.5}), limit_s=1e-6)[1]) == 1
    trials, ran = try_on(known_machine())
    assert trials.rounds == 1 and trials.policy == ran[0] == choose(known_machine()) and len(ran) <= MOST_TRIED
    assert in_words(trials.hardware) == "tasks take the profile's time"


def test_a_policy_measured_faster_than_the_choice_is_taken():
    """All other policies wait for 100 ms in an iteration, which the median of waits does not show."""
    known, favoured = known_machine(), GRID[2]

    def run(policy: Policy) -> list[TraceEvent]:
        wait = 0.0 if policy == favoured else 0.1
        return [TraceEvent(task, *(s + wait * task.iteration for s in span)) for task, *span in run_on(known, policy)]

    assert run_trials(known, choose(known), choose, price, [GRID[2], GRID[4]], run, -2).policy.cache == favoured.cache


def test_rivals_differ_in_what_limits_them():
    by = {GRID[i]: Priced(100.0 - i, "h2d" if i < 9 else "compute") for i in range(16)}
    assert rivals(GRID[0], by) == [GRID[9], GRID[1], GRID[2]]


def test_a_slower_resource_is_slower_in_all_of_its_tasks_alone():
    known = known_machine()
    busy = known.scaled({"h2d": 3.0})
    for key, line in known.lines.items():
        times = 3.0 if key in ("h2d", "load_kv", "load_act", "load_weights") else 1.0
        assert busy.lines[key].at(1e6, 1e6) == pytest.approx(times * line.at(1e6, 1e6))
