"""Test selections in the search: only on request, priced by their expected share, with or without ACT."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from flexhybrid.core.context.selection import most_selected, selected_tokens
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Placement, Policy, Selection
from flexhybrid.core.problem import Problem
from flexhybrid.core.workload import Workload
from policy_search.search import FULL, LOSSLESS, SearchSettings, TooSlowError, search
from sim import catalogue
from sim.presets import infinigen
from sim.simulate import simulate

SHAPE = ModelShape("opt-mid", "opt", 12, 2048, 32, 32, 64, 8192, 5000, 2048)
MACHINE = catalogue.load("t4")
PROBLEM = Problem(shape=SHAPE, hardware=MACHINE)
WORKLOAD = Workload.uniform(1, 1536, 32)


def found_with(expected: float | None, **settings):
    selection = None if expected is None else infinigen(4.0, expected=expected).selection
    return search(PROBLEM, WORKLOAD, SearchSettings(batch=32, selection=selection, **settings))


@pytest.fixture(scope="module")
def results():
    return {expected: found_with(expected) for expected in (None, 0.02, 0.2)}


def test_no_selection_without_request(results):
    assert results[None].policy.selection == Selection() and results[None].selected is None


def test_the_fewer_tokens_are_expected_the_faster(results):
    few, many = (results[expected].selected.value for expected in (0.02, 0.2))
    assert few > many


def test_the_winner_is_the_better_of_both(results):
    plain = results[None].prediction["tokens_per_s"]
    for expected in (0.02, 0.2):
        result = results[expected]
        used = result.policy.selection.method == "speculative"
        assert used == (result.selected.value > plain)
        assert result.prediction["tokens_per_s"] == pytest.approx(max(plain, result.selected.value))
        assert result.selected.value == pytest.approx(
            max(v for v in (result.selected.with_act, result.selected.without_act) if v is not None)
        )


def test_nothing_of_its_space_is_faster_by_hand(results):
    """Some policies with the selection are priced one by one."""
    selected = results[0.02].selected
    for act in (0.0, 0.5):
        for device in (0.0, 1.0):
            cache = {kind: share for kind, share in {"act@host": act, "kv@host": 1 - act}.items() if share}
            policy = Policy("by hand", Placement(device=device, host=1 - device), cache=cache,
                            selection=selected.policy.selection, max_mini_batch_tokens=8192)  # fmt: skip
            outcome = simulate(Problem(shape=SHAPE, hardware=MACHINE), policy, 32, 1536, 32)
            if outcome.wave == 32:  # it fits
                assert outcome.tokens_per_s <= selected.value * (1 + 1e-9)


def test_a_selection_keeps_the_limits_of_latency_too(results):
    limit = 0.995 * results[0.02].prediction["prefill_s"]
    found = found_with(0.02, max_ttft_s=limit)
    assert found.prediction["prefill_s"] <= limit * (1 + 1e-8)
    assert 0 < found.selected.value < results[0.02].selected.value


def test_a_limit_that_only_a_selection_keeps():
    space = replace(FULL, entries=("kv@host",), attention=("device",))
    with pytest.raises(TooSlowError, match="TPOT of at most 0.08 s"):
        found_with(None, space=space, max_tpot_s=0.08)
    found = found_with(0.02, space=space, max_tpot_s=0.08)
    assert found.policy.selection.method == "speculative" and found.prediction["decode_s"] / 31 <= 0.08


@pytest.mark.parametrize(
    "kept", [{"entries": ("act@host",)}, {"attention": ("host",)}, {"kept": (("packing", "balance"),)}]
)
def test_kept_fields_bind_the_selection_too(kept):
    found = found_with(0.02, space=replace(FULL, **kept), weights_device=1.0)
    assert found.selected is None and found.policy.selection == Selection()


def test_lossless_and_a_selection_contradict_each_other():
    with pytest.raises(InputError, match="lossy"):
        found_with(0.1, space=LOSSLESS)
    with pytest.raises(InputError, match="speculative"):
        SearchSettings(selection=Selection("heavy_hitter", budget=0.2))


@pytest.mark.parametrize("alpha, expected, wanted", [(4.0, 0.1, 100), (4.0, 0.9, 200), (math.inf, None, 200)])
def test_the_fetched_share_is_measured_or_all_for_an_infinite_threshold(alpha, expected, wanted):
    selection = infinigen(alpha, expected=expected).selection
    assert selected_tokens(selection, 1000) == wanted <= most_selected(selection, 1000)
    assert (np.diff(selected_tokens(selection, np.arange(1, 3000))) >= 0).all()
