"""Test CAPTURE's Algorithm 1 against brute force over whole blocks, and properties stated in the paper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexhybrid.core import work
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import NO_BUDGETS, Budgets, Problem
from flexhybrid.core.workload import Workload
from policy_search.papers.algorithm1 import (
    BALANCES,
    LayerTimes,
    Linear,
    allocate,
    host_allocation,
    host_blocks,
    layer_times,
    share_for_batch,
)
from policy_search.papers.capture import CaptureOptions, capture_policy
from sim import catalogue, presets
from sim.array_clock import predict
from sim.candidates import candidates_of, num_mini_batches
from sim.cost import price
from sim.presets import CAPTURE_MINI_BATCH_TOKENS

rates = st.floats(-7, -4).map(lambda exponent: 10.0**exponent)
fixed = st.sampled_from([0.0, 1e-5, 1e-4])


@st.composite
def times(draw) -> LayerTimes:
    load_kv = draw(rates)
    return LayerTimes(
        load_w_s=draw(st.floats(0, 0.02)),
        kv_gen=Linear(draw(rates), draw(fixed)),
        load_kv=Linear(load_kv, draw(fixed)),
        load_act=Linear(load_kv * draw(st.sampled_from([0.5, 1.0, 2.0])), draw(fixed)),
        forward_s=draw(st.floats(0, 0.01)),
    )


def gap(t: LayerTimes, balance: str, act: int, kv: int, act_gpu: int = 0) -> float:
    """Return |T_PCIe − T_Computation| (eq. 4)."""
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
        assert (
            max(found.link_s, found.compute_s)
            <= min(layers) + max(t.load_kv.per_block_s, t.load_act.per_block_s) + 3e-4
        )


@settings(max_examples=100)
@given(times(), st.integers(0, 60_000), st.sampled_from(BALANCES), st.integers(0, 50))
def test_allocation_is_brute_forces(t, room, balance, act_gpu):
    act_bytes, kv_bytes, weight_bytes = 100, 200, 5_000
    found = allocate(t, weight_bytes + room, weight_bytes, act_bytes, kv_bytes, balance=balance, act_gpu_blocks=act_gpu)
    assert act_bytes * found.act_blocks + kv_bytes * found.kv_blocks <= room
    best = min(
        gap(t, balance, act, (room - act * act_bytes) // kv_bytes, act_gpu) for act in range(room // act_bytes + 1)
    )
    assert gap(t, balance, found.act_blocks, found.kv_blocks, act_gpu) == pytest.approx(best, abs=1e-12)


def test_layer_times_are_the_cost_functions():
    shape, hardware = shape_by_name("opt-6.7b"), catalogue.load("a100-40g")
    t = layer_times(Problem(shape=shape, hardware=hardware))
    assert t.kv_gen.seconds(10) == pytest.approx(price(hardware, "kv_gen", "compute", work.kv_gen(shape, 2, 160)))
    kv = work.load_blocks(shape, 2, "kv", 10, 1)
    assert t.load_kv.seconds(10) == pytest.approx(price(hardware, "load_kv", "h2d", kv))
    assert t.forward_s == 0 and t.kv_gen.seconds(0) == 0
    assert layer_times(Problem(shape=shape, hardware=hardware), weights_device=1.0).load_w_s == 0


def test_bad_input_is_one_line():
    t = LayerTimes(1.0, Linear(1.0), Linear(1.0), Linear(0.5))
    with pytest.raises(InputError, match="balance"):
        allocate(t, 10, 0, 1, 2, balance="half")
    with pytest.raises(InputError, match="balance"):
        share_for_batch(t, 10, "half")
    with pytest.raises(InputError, match="host memory"):
        allocate(t, 10, 20, 1, 2)
    with pytest.raises(InputError):
        layer_times(Problem(shape=shape_by_name("opt-125m"), hardware=Hardware("x", "cpu", {"h2d": Line()})))


GIB = 2**30
OPT_30B = shape_by_name("opt-30b")
RTX4090 = catalogue.load("rtx4090").with_gemm_rate(99)  # compute and link are near balance there
USABLE = RTX4090.usable_memory("device")
PAPERS = Workload.uniform(128, 1920, 128)
ENTRIES = ("act@host", "kv@host")
PROBLEM = Problem(shape=OPT_30B, hardware=RTX4090)


def capture(
    problem: Problem = PROBLEM, workload: Workload = PAPERS, budgets: Budgets = NO_BUDGETS, **options
) -> Policy:
    return capture_policy(replace(problem, budgets=budgets), workload, CaptureOptions(**options))


def peak(policy: Policy, workload: Workload = PAPERS, shape=OPT_30B, machine: Hardware = RTX4090) -> dict[str, float]:
    return predict(Problem(shape=shape, hardware=machine), candidates_of(policy, workload), walk=False).row()[
        "peak_bytes"
    ]


def on_host(policy: Policy) -> float:
    """Return the ACT share of the tokens on the host."""
    act, kv = policy.cache.get("act@host", 0.0), policy.cache.get("kv@host", 0.0)
    return act / (act + kv)


def one_block_each(workload: Workload = PAPERS, shape=OPT_30B) -> int:
    """Return the bytes of one ACT block of every request in all layers, by which a pool grows."""
    return workload.num_requests * 16 * shape.act_token_bytes(2) * shape.num_layers


@pytest.mark.parametrize("balance", BALANCES)
def test_capture_fills_the_device_and_keeps_algorithm_1s_ratio(balance):
    policy = capture(balance=balance)
    bytes_of = peak(policy)
    assert USABLE - one_block_each() < bytes_of["device"] <= USABLE
    assert bytes_of["host"] <= RTX4090.host_memory and bytes_of["disk"] == 0
    times = layer_times(PROBLEM, batch=128, context_tokens=1984, num_mini_batches=32)
    blocks = host_blocks(128, 1984)
    on_device = round(policy.cache["act@device"] * blocks)
    expected = share_for_batch(times, blocks - on_device, balance, on_device)
    assert on_host(policy) == pytest.approx(expected.act_share, rel=1e-9)
    assert expected.link_s == pytest.approx(expected.compute_s, rel=1e-3)
    assert (policy.packing, policy.max_mini_batch_tokens, policy.max_batch) == (
        "balanced",
        CAPTURE_MINI_BATCH_TOKENS,
        128,
    )
    assert policy.weights.host == 1 and policy.schedule == "column"


def test_each_part_of_capture_can_be_left_out():
    plain = capture(ratio=False, packing=False, device_act=False)
    assert plain.cache == pytest.approx(presets.hybrid_static(OPT_30B).cache)
    assert plain.packing == "fifo"
    assert plain.name == "capture(ratio=false,packing=false,device_act=false)"
    no_ratio = capture(ratio=False)
    assert no_ratio.cache["act@device"] > 0.05 and on_host(no_ratio) == pytest.approx(2 / 3)
    no_device = capture(device_act=False)
    assert "act@device" not in no_device.cache
    whole = capture()
    # the papers' balance counts ACT blocks wherever they lie
    in_all = whole.cache["act@device"] + whole.cache["act@host"]
    assert in_all == pytest.approx(no_device.cache["act@host"], abs=1e-4)
    in_order = capture(packing=False)
    assert in_order == replace(whole, name="capture(packing=false)", packing="fifo")
    half = capture(weights_device=0.1)
    assert half.weights.device == 0.1 and half.cache["act@device"] < whole.cache["act@device"]


def test_a_full_host_takes_act_for_kv():
    whole = capture()
    assert peak(whole)["host"] > 240 * GIB
    policy = capture(budgets=Budgets(host=240 * GIB))
    assert 0.9 * 240 * GIB < peak(policy)["host"] <= 240 * GIB
    assert on_host(policy) > on_host(whole)
    assert policy.cache["act@device"] >= whole.cache["act@device"] - 1 / 128
    with pytest.raises(InputError, match="host memory: 128 requests need at least 20.*budget is 200.00 GiB"):
        capture(budgets=Budgets(host=200 * GIB))
    with pytest.raises(InputError, match="host memory"):  # the static split has no second choice
        capture(budgets=Budgets(host=240 * GIB), ratio=False)


def test_a_small_device_moves_hidden_states_to_the_host():
    policy = capture(budgets=Budgets(device=7 * GIB))
    assert policy.hidden == "host" and peak(policy)["device"] <= 6 * GIB
    assert capture().hidden == "device"
    with pytest.raises(InputError, match="device memory: 128 requests need at least .* budget is 4.00 GiB"):
        capture(budgets=Budgets(device=4 * GIB))


def test_a_small_batch_keeps_no_more_act_than_algorithm_1_wants():
    """All ACT would fit the device, but recomputing it takes longer than loading the few streamed weights."""
    shape, few = shape_by_name("opt-6.7b"), Workload.uniform(16, 1920, 128)
    policy = capture(Problem(shape=shape, hardware=RTX4090), few, weights_device=0.5)
    assert peak(policy, few, shape)["device"] < USABLE - 2 * one_block_each(few, shape)
    assert policy.cache["kv@host"] > 0.1 and policy.cache.get("act@host", 0.0) < 1 / 64
    times = layer_times(Problem(shape=shape, hardware=RTX4090), 16, 1984, 6, 0.5)
    blocks = host_blocks(16, 1984)
    on_device, kv = policy.cache["act@device"] * blocks, policy.cache["kv@host"] * blocks
    assert times.compute_s("paper", 0, on_device) == pytest.approx(times.link_s("paper", 0, kv), rel=0.02)
    assert (
        capture(Problem(shape=shape, hardware=RTX4090), few, weights_device=0.5, ratio=False).cache["act@device"] == 1
    )


def decode_rate(policy: Policy, workload: Workload) -> float:
    """Return the decode's tokens/s by the array clock."""
    prediction = predict(Problem(shape=OPT_30B, hardware=RTX4090), candidates_of(policy, workload))
    return float(prediction.decode_tokens_per_s[0])


def test_the_full_balance_is_nearest_to_the_best_share():
    """The paper's balance ignores other compute, so it keeps too much ACT. A scan over the share finds nothing
    better."""
    workload = Workload.uniform(128, 1994, 6)
    policies = {balance: capture(workload=workload, balance=balance, device_act=False) for balance in BALANCES}
    policies["static"] = capture(workload=workload, ratio=False, device_act=False)
    rates = {name: decode_rate(policy, workload) for name, policy in policies.items()}
    full = policies["full"]
    caches = [{"act@host": share, "kv@host": 1 - share} for share in np.arange(1, 64) / 64]
    optimum = max(decode_rate(replace(full, cache=cache), workload) for cache in caches)
    assert rates["static"] < rates["paper"] < rates["full"] <= optimum * 1.005
    assert optimum <= rates["full"] * 1.005
    num, _ = num_mini_batches(128, 1994, 6, full.max_mini_batch_tokens)
    times, blocks = layer_times(PROBLEM, 128, 1997, int(num)), host_blocks(128, 1997)
    act, kv = ({name: policy.cache[entry] * blocks for name, policy in policies.items()} for entry in ENTRIES)
    assert times.link_s("full", act["full"], kv["full"]) == pytest.approx(
        times.compute_s("full", act["full"]), rel=1e-3
    )
    assert times.compute_s("full", act["paper"]) > 1.01 * times.link_s("full", act["paper"], kv["paper"])
    with_device = capture(workload=workload, balance="full")
    assert with_device.cache["act@device"] > 0.05 and decode_rate(with_device, workload) > rates["full"]


def test_algorithm_1_over_the_whole_host_memory():
    found = host_allocation(PROBLEM, act_gpu_blocks=500)
    layer_bytes, act = OPT_30B.layer_bytes(2), 48 * 16 * OPT_30B.act_token_bytes(2)
    used = 48 * layer_bytes + act * (found.act_blocks + 2 * found.kv_blocks)
    assert RTX4090.host_memory - 3 * act < used <= RTX4090.host_memory
    assert found.link_s == pytest.approx(found.compute_s, rel=1e-3)
    assert host_allocation(PROBLEM, act_gpu_blocks=2500).act_blocks < found.act_blocks
    assert host_allocation(replace(PROBLEM, budgets=Budgets(host=100 * GIB))).act_share > found.act_share
    with pytest.raises(InputError, match="host memory"):
        host_allocation(replace(PROBLEM, hardware=replace(RTX4090, host_memory=None)))
    with pytest.raises(InputError, match="host memory"):
        host_allocation(replace(PROBLEM, budgets=Budgets(host=10 * GIB)))


def test_bad_input_of_capture_is_one_line():
    for options, match in (
        ({"batch": 0}, "batch is 0"), ({"balance": "half"}, "balance"), ({"weights_device": 1.5}, "weights"),
        ({"max_mini_batch_tokens": 0}, "max_mini_batch_tokens"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=match):
            capture(**options)
