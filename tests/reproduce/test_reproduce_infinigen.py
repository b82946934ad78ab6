"""Test the reproduction of InfiniGen's figures: kept rows, fitted constants, and costs of the runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.reproduce import gate, registry, report
from experiments.reproduce.calibrate import MOST_CONSTANTS
from experiments.reproduce.infinigen import accuracy, accuracy_policies, setup
from experiments.reproduce.paper import INFINIGEN
from flexhybrid.core.context.selection import REPORTED, counted_tokens
from flexhybrid.core.problem import Problem
from sim import catalogue
from sim.simulate import simulate


@pytest.fixture(scope="module")
def done() -> dict:
    """Run every InfiniGen experiment once."""
    return {name: registry.run(name) for name in registry.names("infinigen.performance")}


def row(experiment, row_id: str):
    """Return the row of an experiment that compares with this id, not one that shows it as context."""
    rows = experiment.rows
    found = rows[rows["source"].str.startswith(row_id) & (rows["role"] != "context")]
    assert len(found) == 1, row_id
    return found.iloc[0]


def test_constants_are_few_inside_their_ranges_and_physical():
    constants = {constant.name: constant for constant in setup.constants()}
    assert len(constants) == len(setup.constants()) <= MOST_CONSTANTS
    assert all(0 < c.low < c.high for c in constants.values())
    assert constants["link_gb_per_s"].high <= 15.75  # PCIe 3.0 x16
    assert all(constants[name].high <= 1.0 for name in ("gemm", "memory", "conversion"))  # of the datasheet
    on_rows = [c for c in constants.values() if c.fitted_on]
    assert len(on_rows) < len(setup.CALIBRATE) + len(setup.UVM_ROWS)
    # A fit that ends at the edge of its range would mean that the model is wrong elsewhere.
    assert all(1.02 * c.low < c.value < 0.98 * c.high for c in on_rows)


def test_unified_memorys_rate_is_the_fit_and_no_part_of_the_machine(monkeypatch):
    assert setup.refit_fault_rate().value == pytest.approx(setup.FAULT_GB_PER_S, rel=1e-4)
    monkeypatch.setattr(setup, "testbed", lambda: catalogue.load("rtx-a6000"))
    assert setup.fault_rate().value == setup.FAULT_GB_PER_S


def test_unified_memory_falls_where_the_working_set_passes_the_device(done):
    assert row(done["infinigen-fig15"], "ih042")["ours"] == 16
    assert setup.uvm_working_set_bytes(16) / 2**30 == pytest.approx(48.9, abs=0.1)
    fits, does_not = (sum(setup.uvm(batch)) for batch in (12, 16))
    assert does_not > 20 * fits
    assert sum(setup.uvm(16, h2o=True)) < 0.1 * does_not
    eager, fused = setup.uvm(4)[0], setup.uvm(4, eager=False)[0]
    scores = 40 * 4 * 40 * 1920**2
    link, fill = setup.testbed().line("h2d", "h2d").s_per_byte, 1 / 20e9
    assert eager - fused > 4 * scores * (link + fill) * 0.99


@pytest.mark.parametrize("name", list(setup.POLICIES))
def test_parts_of_a_block_make_up_the_decode_step(name):
    tasks = setup.block_ms(setup.POLICIES[name])
    assert sum(setup.breakdown(tasks).values()) == pytest.approx(sum(tasks.values()))
    policy = replace(setup.POLICIES[name], overlap="none")
    step = simulate(
        Problem(shape=setup.OPT_13B, hardware=setup.testbed()), policy, 8, 2047, 2, clock="virtual"
    ).decode_s
    # the first layers of H2O and InfiniGen load all, and the head stands outside the layers
    assert 40 * 1e-3 * sum(tasks.values()) == pytest.approx(step, rel=0.25 if name in ("H2O", "InfiniGen") else 0.05)


def test_every_run_fits_the_machine():
    """The batches of the figures run at once on 48 GiB and 96 GiB."""
    for name, policy in setup.POLICIES.items():
        outcome = simulate(Problem(shape=setup.OPT_13B, hardware=setup.testbed()), policy, 20, 1920, 128)
        assert outcome.wave == 20, name


def test_figures_have_data_and_context_rows_no_verdict(done):
    assert all(np.isfinite(figure.frame[figure.y]).all() for one in done.values() for figure in one.figures)
    assert all(np.isfinite(one.rows["ours"]).all() for one in done.values())
    assert all(one.figures for one in done.values())


def test_predictions_fetch_what_was_measured():
    """For each model, selected_tokens.csv has the mean share of its selecting layers at each alpha without a cap."""
    assert counted_tokens().keys() == {REPORTED, *accuracy.studies()}
    for model, study in accuracy.studies().items():
        context = (study["prompt_tokens"] + study["length"]) / 2
        rows = {row["policy"]: row["looked_at_by_layer"] for row in study["skewed"]["policies"]}
        for alpha in accuracy_policies.ALPHAS:
            lengths, tokens = counted_tokens()[model][alpha]
            share = np.mean(rows[accuracy_policies.infinigen(alpha)][2:])
            assert (lengths[-1], tokens[-1]) == (context, pytest.approx(share * context, rel=1e-3))


def test_the_report_opens_with_what_holds(done):
    (found,) = report.verdicts(list(done.values()))
    assert found["paper"] is INFINIGEN and len(found["constants"]) == len(setup.constants())
    page = report.page(list(done.values()), [[b""] * len(one.figures) for one in done.values()])
    first = page.split("How to read the rest")[0]
    assert "what holds" in first and "held-out rows" in first and "a6000-infinigen (fitted)" in first
    assert report.verdicts([done["infinigen-fig14"]]) == []  # its numbers are not all there


def test_no_row_is_worse_or_stale():
    assert gate.check("infinigen") == []
