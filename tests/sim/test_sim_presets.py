"""Presets: the shares that they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexhybrid.core.model.shape import shape_by_name
from sim import presets

SHAPE = shape_by_name("opt-125m")


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
