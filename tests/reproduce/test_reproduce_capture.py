"""Test the reproduction of CAPTURE and HybridServe: constants from calibrate rows, and held-out rows."""

from __future__ import annotations

import pytest

from experiments import reference
from experiments.reproduce import gate, registry
from experiments.reproduce.calibrate import MOST_CONSTANTS
from experiments.reproduce.capture import figures as capture_figures
from experiments.reproduce.capture import setup as capture_setup
from experiments.reproduce.capture import table3 as capture_table3
from sim import catalogue

experiment = registry.run


def test_constants_are_few_and_possible():
    constants = capture_setup.all_constants()
    assert len(constants) <= MOST_CONSTANTS
    assert len({constant.name for constant in constants}) == len(constants)
    peak = catalogue.load("rtx4090").notes
    found = capture_setup.values_of(constants)
    assert found["link_gb_per_s"] < peak["link_bytes_per_s"] / 1e9
    assert found["gemm_tflops"] <= peak["peak_flops"] / 1e12
    assert found["kv_memory_gb_per_s"] <= found["memory_gb_per_s"] <= peak["memory_bytes_per_s"] / 1e9
    fitted = [constant for constant in constants if constant.fitted_on]
    assert {constant.name for constant in constants} - {constant.name for constant in fitted} == {
        "memory_gb_per_s",
        "overhead_us",
    }
    # an experiment lists every constant that went into it, and no other testbed's
    assert experiment("capture-table3").constants == constants


def test_hybrid_full_is_the_whole_system():
    """The approximate share used in fits equals the policy's share."""
    hardware = capture_setup.hardware()
    for model, batch, prompt in (("OPT-6.7B", 128, 1920), ("OPT-66B", 128, 1920), ("OPT-30B", 32, 896)):
        cache_of = capture_setup.full_policy(model, hardware, batch, prompt).cache
        assert cache_of["act@host"] == pytest.approx(
            capture_setup.share_of("hybrid_full", model, hardware, batch, prompt)
        )


def test_why_66b_is_slower_than_it_could_be():
    """At the paper's ratio our model gives the paper's speed; another ratio is faster."""
    measured = reference.value("capture_table3", model="OPT-66B", variant="hybrid_full")
    share, at_printed = capture_table3.at_printed_ratio("OPT-66B")
    best_share, best = capture_table3.optimum("OPT-66B")
    assert at_printed == pytest.approx(measured, rel=0.05)
    assert best > 1.1 * at_printed and best_share < share
    own = capture_setup.share_of("hybrid_full", "OPT-66B", capture_setup.hardware())
    assert best_share < own < share


def test_no_row_is_worse_or_stale():
    assert gate.check("capture") == []


def test_recomputing_from_token_ids_costs_more_the_faster_the_copies():
    for model in capture_figures.RECOMPUTE_SETTINGS:
        relayed, alike, locked = (
            capture_figures.recompute_factors(model, way) for way in ("cache relayed", "all relayed", "page-locked")
        )
        assert locked[-1] > relayed[-1] > alike[-1] > 1
        assert relayed[2] < 1  # a fifth of the tokens hides behind the loads: CAPTURE's reading cannot be
