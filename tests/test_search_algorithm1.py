"""CAPTURE's Algorithm 1 against brute force over integer blocks, and the properties that the paper states."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexhybrid.core import work
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.shape import shape_by_name
from policy_search.algorithm1 import BALANCES, LayerTimes, Linear, allocate, host_blocks, layer_times, share_for_batch
from sim import catalogue
from sim.cost import price

rates = st.floats(-7, -4).map(lambda exponent: 10.0**exponent)
fixed = st.sampled_from([0.0, 1e-5, 1e-4])


@st.composite
def times(draw) -> LayerTimes:
    load_kv = draw(rates)
    return LayerTimes(
        load_w_s=draw(st.floats(0, 0.02)),
        kv_gen=Linear(draw(rates), draw(fixed)),
        load_kv=Linear(load_kv, draw(fixed)),
        load_act=Linear(load_kv / 2, draw(fixed)),
        forward_s=draw(st.floats(0, 0.01)),
    )


def gap(t: LayerTimes, balance: str, act: int, kv: int, act_gpu: int = 0) -> float:
    """|T_PCIe − T_Computation| (eq. 4), written out."""
    link = t.load_w_s + (t.load_kv.fixed_s + kv * t.load_kv.per_block_s if kv else 0)
    compute = t.kv_gen.fixed_s + (act + act_gpu) * t.kv_gen.per_block_s if act + act_gpu else 0
    if balance == "full":
        link += t.load_act.fixed_s + act * t.load_act.per_block_s if act else 0
        compute += t.forward_s
    return abs(link - compute)


@settings(max_examples=150)
@given(times(), st.integers(0, 400), st.sampled_from(BALANCES), st.integers(0, 50))
def test_batch_share_is_brute_forces(t, total, balance, act_gpu):
    found = share_for_batch(t, total, balance, act_gpu)
    assert found.act_blocks + found.kv_blocks == total
    assert 0 <= found.act_share <= 1
    pairs = [(act, total - act) for act in range(total + 1)]
    if balance == "paper":
        assert gap(t, balance, found.act_blocks, found.kv_blocks, act_gpu) == pytest.approx(
            min(gap(t, balance, *pair, act_gpu) for pair in pairs), abs=1e-12
        )
    else:  # the shortest layer; an overhead that only some counts pay may be missed by one block
        layers = [max(t.link_s(balance, a, k), t.compute_s(balance, a, act_gpu)) for a, k in pairs]
        assert max(found.link_s, found.compute_s) <= min(layers) + t.load_kv.per_block_s + 3e-4


@settings(max_examples=100)
@given(times(), st.integers(0, 60_000), st.sampled_from(BALANCES), st.integers(0, 50))
def test_allocation_is_brute_forces(t, room, balance, act_gpu):
    act_bytes, kv_bytes, weight_bytes = 100, 200, 5_000
    found = allocate(t, weight_bytes + room, weight_bytes, act_bytes, kv_bytes, act_gpu, balance)
    assert act_bytes * found.act_blocks + kv_bytes * found.kv_blocks <= room
    assert found.act_init <= found.act_blocks and found.kv_init <= found.kv_blocks
    best = min(
        gap(t, balance, act, (room - act * act_bytes) // kv_bytes, act_gpu) for act in range(room // act_bytes + 1)
    )
    assert gap(t, balance, found.act_blocks, found.kv_blocks, act_gpu) == pytest.approx(best, abs=1e-12)


def test_the_papers_two_steps_by_hand():
    """No overheads. Weights 100 s, KV-Gen 1 s and KV load 2 s a block, S_ACT = 1, S_KV = 2, 400 bytes for blocks.

    Step 1: ACT_init = 100. Remaining: a + 2k = 300 and a = 2k, so a = 150, k = 75. Together 250 and 75; then
    T_PCIe = 100 + 150 = T_Computation = 250.
    """
    t = LayerTimes(100.0, Linear(1.0), Linear(2.0), Linear(1.0))
    found = allocate(t, 1400, 1000, 1, 2)
    assert (found.act_init, found.kv_init, found.act_blocks, found.kv_blocks) == (100, 0, 250, 75)
    assert found.link_s == found.compute_s == 250


def test_the_papers_other_branch_by_hand():
    """ACT on the GPU takes longer than the weights: 150 blocks, 50 s over. KV_init = 25. Remaining 350 bytes: a = 175,
    2k = 175: 87.5; rounded."""
    t = LayerTimes(100.0, Linear(1.0), Linear(2.0), Linear(1.0))
    found = allocate(t, 1400, 1000, 1, 2, act_gpu_blocks=150)
    assert (found.act_init, found.kv_init) == (0, 25)
    assert (found.act_blocks, found.kv_blocks) in {(175, 112), (174, 113), (176, 112)}
    assert found.link_s == pytest.approx(found.compute_s, abs=2)


def test_what_the_full_balance_adds_moves_the_share():
    """Loading ACT lengthens the link (more ACT balances it), the forward pass lengthens compute (less does)."""
    shape, hardware = shape_by_name("opt-30b"), catalogue.load("rtx4090")
    t = layer_times(shape, hardware, 2, batch=64, context_tokens=1024, num_mini_batches=8)
    blocks = host_blocks(64, 1024)
    paper, full = share_for_batch(t, blocks, "paper"), share_for_batch(t, blocks, "full")
    assert paper.link_s == pytest.approx(paper.compute_s, rel=0.01)
    assert full.link_s == pytest.approx(full.compute_s, rel=0.01)
    loads_only = share_for_batch(replace(t, forward_s=0.0), blocks, "full")
    slow_forward = share_for_batch(replace(t, forward_s=3 * t.forward_s), blocks, "full")
    assert slow_forward.act_share < full.act_share < loads_only.act_share
    assert paper.act_share < loads_only.act_share


def test_layer_times_are_the_cost_functions():
    shape, hardware = shape_by_name("opt-6.7b"), catalogue.load("a100-40g")
    t = layer_times(shape, hardware, 2)
    assert t.kv_gen.seconds(10) == pytest.approx(price(hardware, "kv_gen", "compute", work.kv_gen(shape, 2, 160)))
    kv = work.load_blocks(shape, 2, "kv", 10, 1)
    assert t.load_kv.seconds(10) == pytest.approx(price(hardware, "load_kv", "h2d", kv))
    assert t.forward_s == 0 and t.kv_gen.seconds(0) == 0
    assert layer_times(shape, hardware, 2, weights_device=1.0).load_w_s == 0


def test_grouped_heads_turn_act_off_in_the_full_balance():
    """Four query heads a group: an ACT block is twice a KV block, so every ACT block lengthens the link."""
    t = LayerTimes(0.01, Linear(1e-5), Linear(1e-4), Linear(2e-4), forward_s=0.001)
    assert share_for_batch(t, 100, "full").act_share == 0
    assert share_for_batch(t, 100, "paper").act_share > 0.5


def test_bad_input_is_one_line():
    t = LayerTimes(1.0, Linear(1.0), Linear(1.0), Linear(0.5))
    with pytest.raises(InputError, match="balance"):
        allocate(t, 10, 0, 1, 2, balance="half")
    with pytest.raises(InputError, match="balance"):
        share_for_batch(t, 10, "half")
    with pytest.raises(InputError, match="host memory"):
        allocate(t, 10, 20, 1, 2)
    with pytest.raises(InputError):
        layer_times(shape_by_name("opt-125m"), Hardware("x", "cpu", {"h2d": Line()}), 2)
