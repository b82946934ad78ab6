"""Test other people's runs: constants follow from their rows, and every row with a stated batch is simulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments import reference
from experiments.reproduce import gate, machines, published
from experiments.reproduce.calibrate import fit
from experiments.reproduce.experiment import Constant
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.problem import Problem
from policy_search.systems import Setting, run_system, system
from sim import catalogue
from sim.datasheet import load_datasheet
from sim.implementation import MEASURED


def errors(ids) -> np.ndarray:
    rates = published.all_rates()
    return np.array([abs(rates[row_id] / published.record(row_id)["value"] - 1) for row_id in ids])


def test_every_row_with_a_batch_is_simulated():
    rows = reference.load("published")
    stated = set(rows.loc[rows["batch"].notna(), "id"])
    assert set(published.all_rates()) == stated == set(rows["id"]) - {published.NOT_SIMULATED}


@pytest.mark.parametrize("name", machines.ENTRIES)
def test_the_catalogues_entry_is_the_fit(name):
    """The numbers that `simulate` and `search` read are those that the calibrate rows give today."""
    fresh, kept = machines.ENTRIES[name](), load_datasheet(catalogue.FOLDER / f"{name}.json")
    assert replace(fresh, lines={}) == replace(kept, lines={})
    for key, line in fresh.lines.items():
        assert kept.lines[key] == pytest.approx(line, rel=1e-3), key


def refit_baseline(system: str) -> Constant:
    """Fit the share of the link that a baseline's copies of weights reach."""
    free, ids = published.FLEXGEN.constant(f"{system}_weights_link", 0.5), published.FITTED[system]

    def ours(values: dict[str, float]) -> np.ndarray:
        more = f", weights_link={values[free.name]}"
        return np.array([published.baseline_rate(system, row_id, more) for row_id in ids])

    return fit((free,), ours, published._values(ids), f"published T4 runs: {', '.join(ids)}")[0]


@pytest.mark.parametrize("name", published.BASELINE_ROWS)
def test_a_baseline_has_one_constant_of_at_most_two_rows(name):
    assert len(published.FITTED[name]) <= 2
    assert MEASURED[name].weights_link == pytest.approx(refit_baseline(name).value, rel=0.01)
    assert np.median(errors(published.BASELINE_ROWS[name])) <= 0.10


def test_h2os_logs_were_held_out():
    logs = [row_id for row_id in published.H2O_ROWS if published.record(row_id)["role"] == "validate"]
    assert len(logs) == 5 and not set(logs) & {row_id for ids in published.FITTED.values() for row_id in ids}
    wrong = errors(logs)
    assert np.median(wrong) <= 0.06 and wrong.max() <= 0.15
    # without its eviction H2O on the host would be half as fast again
    free = published.flexgen_rate("pb026", catalogue.load(published.ENTRY), {})
    assert free > 1.4 * published.all_rates()["pb026"]


def test_evictions_seconds_are_the_fit():
    kept = [1e6 * seconds for seconds in published.EVICTION.values()]
    assert [one.value for one in published.refit_eviction()] == pytest.approx(kept, rel=0.01)


def test_what_a_change_brings():
    for row in published.ratio_rows():
        assert row["ours"] == pytest.approx(row["paper"], rel=0.10), row["what"]


def test_a_baseline_by_name_is_as_slow_as_it_was_measured():
    """The named system gives the experiment's row; an option replaces the known constant."""
    problem = Problem(shape=shape_by_name("opt-6.7b"), hardware=catalogue.load("t4"))
    setting = Setting(problem, 16, 512, 32)
    rate = run_system("deepspeed", setting).tokens_per_s
    assert rate == pytest.approx(published.all_rates()["pb005"], rel=0.01)
    assert run_system("deepspeed(weights_link=1)", setting).tokens_per_s > 1.5 * rate
    assert system("kv_only", setting).hardware == setting.machine


def test_no_row_is_worse_or_stale():
    assert gate.check("flexgen") == []
