"""Test the reproduction of KVPR's tables and figures: kept rows, constants, and points the paper leaves open."""

from __future__ import annotations

import re
from functools import cache

import pandas as pd
import pytest

from experiments.reproduce import gate, registry
from experiments.reproduce.calibrate import MOST_CONSTANTS
from experiments.reproduce.kvpr import figures as kvpr_figures
from experiments.reproduce.kvpr import latency as kvpr_latency
from experiments.reproduce.kvpr import setup
from experiments.reproduce.paper import KVPR, values_of
from sim import catalogue

EXPERIMENTS = registry.names("kvpr")
experiment = registry.run


@cache
def rows(name: str) -> pd.DataFrame:
    return experiment(name).rows


def ours(name: str, what: str) -> float:
    found = rows(name).set_index("what")["ours"]
    return float(found[what])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_has_its_name_and_says_where_it_misses(name):
    one = experiment(name)
    assert one.name == name and one.paper == KVPR.title and one.figures
    assert not any("67b" in figure.name for figure in one.figures)  # OPT-6.7B is opt-6-7b, as in CAPTURE's
    judged_here = one.rows[one.rows["role"] != "context"]
    if (judged_here["error"].abs() > 0.15).any():
        assert one.mismatches


@pytest.mark.parametrize("constants", [setup.rtx5000_constants, setup.a100_constants, setup.node_constants])
def test_constants_are_few_and_possible(constants):
    found = constants()
    assert len(found) <= MOST_CONSTANTS and len({one.name for one in found}) == len(found)
    for constant in found:
        assert constant.why and 0 < constant.low < constant.high
        if constant.unit.startswith("of "):  # a share of a peak or a standard
            assert constant.high <= 1.0
        if constant.fitted_on:
            assert re.search(r"FlexGen|Accelerate", constant.fitted_on)
            assert 1.05 * constant.low < constant.value < 0.95 * constant.high  # not pressed against its bound
        if constant.name == "link_gb_per_s":
            assert constant.high == setup.link_standard("a100-40g") <= 31.5


def test_a_column_has_eight_mini_batches():
    prompts, generated = setup.lengths(setup.LONG)
    for policy in (setup.flexgen(), setup.kvpr()):
        found = setup.run_column(setup.shape_of("OPT-6.7B"), setup.rtx5000(), policy, prompts, generated)
        assert (found.num_mini_batches == 8).all()


def test_llama_runs_put_kvpr_first():
    for model in kvpr_latency.LLAMAS:
        assert ours("kvpr-fig13", f"{model}: least gain over Accelerate") > 0
        for pair in setup.LONG:
            at = setup.label(*pair)
            assert ours("kvpr-fig13", f"{model}, KVPR, {at}") > ours("kvpr-fig13", f"{model}, DeepSpeed, {at}")


def test_figure9_four_bit_kv_ends_recomputation():
    assert ours("kvpr-fig9", "activations' share of the cache traffic, most: KVPR, KV in 4 bits") == 0
    assert ours("kvpr-fig9", "activations' share of the cache traffic, most: KVPR, KV and ACT in 4 bits") > 10
    assert ours("kvpr-fig9", "gain of compression, least: KVPR, KV in 4 bits") > 0


def test_figure14_one_host_for_all():
    rates = kvpr_figures.figure14_rates()
    alone, at_peak, effective = (rates[name] for name in rates if name.startswith("KVPR"))
    assert rates["FastDecode"][0] / rates["FastDecode"] == pytest.approx([1, 2, 4, 8], rel=0.05)
    assert alone == pytest.approx(alone[0])
    assert 0.9 * alone[-1] < at_peak[-1] < alone[-1] and effective[-1] < 0.7 * alone[-1]


def test_the_a100s_link_is_the_one_that_all_testbeds_share():
    own = values_of(setup.fit_a100())["link_gb_per_s"]  # by its own rows alone a little faster
    assert 1e-9 / catalogue.load("a100-kvpr").lines["h2d"].s_per_byte == pytest.approx(setup.a100_link())
    assert setup.a100_link() < own < 1.03 * setup.a100_link()


def test_no_row_is_worse_or_stale():
    assert gate.check("kvpr") == []
