"""Presets and the hardware catalogue: names, shares, JSON, and numbers that follow from their stated sources."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexhybrid.core.errors import InputError
from flexhybrid.core.plan import check_planned
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.shape import shape_by_name
from sim import catalogue, presets

SHAPE = shape_by_name("opt-125m")


@pytest.mark.parametrize("name", ["kv_only", "act_only", "hybrid_static", "resident", "hybrid(0.4)", " hybrid( 1 ) "])
def test_presets_round_trip_and_can_be_run(name):
    policy = presets.preset(name, SHAPE, max_mini_batch_tokens=512, weights=Placement(device=0.25, host=0.75))
    assert Policy.from_json(policy.to_json()) == policy
    assert policy.max_mini_batch_tokens == 512
    assert policy.weights.device == 0.25
    check_planned(policy)


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


@pytest.mark.parametrize("name", ["rtx4090", "a100-40g", "h200"])
def test_catalogue_numbers_follow_from_their_sources(name):
    hardware = catalogue.load(name.upper())
    notes, efficiency = hardware.notes, hardware.notes["efficiency"]
    assert hardware.name == name and hardware.device == "cuda"
    compute, link = hardware.line("kv_gen", "compute"), hardware.line("load_kv", "h2d")
    assert compute.s_per_flop == pytest.approx(1 / (notes["peak_flops"] * efficiency["gemm"]))
    assert compute.s_per_byte == pytest.approx(1 / (notes["memory_bytes_per_s"] * efficiency["memory"]))
    attend = hardware.line("attend", "compute")
    assert attend.s_per_byte == pytest.approx(1 / (notes["memory_bytes_per_s"] * efficiency["attention_memory"]))
    assert link.s_per_byte == pytest.approx(1 / (notes["link_bytes_per_s"] * efficiency["link"]))
    for key in ("peak_flops", "memory_bytes_per_s", "link_bytes_per_s", "device_memory", "efficiency"):
        assert notes["sources"][key]


def test_catalogue_loads_paths_and_refuses_the_unknown(tmp_path):
    catalogue.load("h200").save(tmp_path / "mine.json")
    assert catalogue.load(tmp_path / "mine.json") == catalogue.load("h200")
    with pytest.raises(InputError, match="a100-40g, h200, rtx4090"):
        catalogue.load("v100")
    with pytest.raises(InputError, match="cannot read"):
        catalogue.load(tmp_path / "none.json")


def test_a_gpu_is_known_by_its_drivers_name():
    assert catalogue.for_gpu("NVIDIA H200").name == "h200"
    assert catalogue.for_gpu("NVIDIA GH200 480GB") is None
    assert set(catalogue.GPU_NAMES.values()) == set(catalogue.names())
