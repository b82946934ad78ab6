"""The presets that the executor runs: names, shares, JSON."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.shape import shape_by_name
from flexhybrid.runtime.runnable import check_runnable
from sim import presets

SHAPE = shape_by_name("opt-125m")


@pytest.mark.parametrize("name", ["kv_only", "act_only", "hybrid_static", "resident", "hybrid(0.4)", " hybrid( 1 ) "])
def test_presets_round_trip_and_can_be_run(name):
    policy = presets.preset(name, SHAPE, max_mini_batch_tokens=512, weights=Placement(device=0.25, host=0.75))
    assert Policy.from_json(policy.to_json()) == policy
    assert policy.max_mini_batch_tokens == 512
    assert policy.weights.device == 0.25
    check_runnable(SHAPE, policy)


def test_shares():
    assert presets.kv_only().share("kv") == 1 and presets.act_only().share("act") == 1
    assert presets.hybrid(0.4).share("act") == pytest.approx(0.4)
    assert presets.hybrid_static(SHAPE).share("act") == pytest.approx(2 / 3)
    assert presets.resident().weights.device == 1


def test_static_share_takes_equal_bytes_with_grouped_heads():
    """Four query heads a group: an ACT row is twice a KV row, so a third of the tokens."""
    grouped = replace(SHAPE, num_kv_heads=3)
    share = presets.static_share(grouped)
    assert share == pytest.approx(1 / 3)
    assert share * grouped.act_token_bytes(2) == pytest.approx((1 - share) * grouped.kv_token_bytes(2))


@pytest.mark.parametrize("name", ["nothing", "hybrid(x)", "hybrid(1.5)", "hybrid(nan)", "hybrid", ""])
def test_unknown_presets_are_one_clear_line(name):
    with pytest.raises(InputError) as error:
        presets.preset(name, SHAPE)
    assert "\n" not in str(error.value)


def test_unknown_preset_lists_the_known():
    with pytest.raises(InputError, match="kv_only, act_only, hybrid_static, resident, hybrid"):
        presets.preset("flexgen", SHAPE)
