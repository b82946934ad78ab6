"""The search against brute force, its memory limits, and how its optimum moves with the machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.memory import buffer_sizes, fits, memory_plan
from flexhybrid.core.plan import admit
from flexhybrid.core.shape import ModelShape, shape_by_name
from flexhybrid.core.workload import Workload
from policy_search.search import batch_grid, search, share_grid
from sim import catalogue
from sim.closed_form import Candidates, predict

SHAPE = ModelShape("small", "opt", 4, 256, 4, 4, 64, 1024, 2048, 1024)


def machine(link_gb_per_s: float = 0.3, gflop_per_s: float = 60.0, memory_gb_per_s: float = 8.0) -> Hardware:
    compute = Line(2e-5, 1e-9 / gflop_per_s, 1e-9 / memory_gb_per_s)
    link = Line(2e-5, 0.0, 1e-9 / link_gb_per_s)
    lines = {"compute": compute, "h2d": link, "d2h": link, "host_compute": Line(2e-5, 0.0, 1e-10)}
    return Hardware("toy", "cpu", lines)


WORKLOAD = Workload.uniform(32, 300, 12)


@pytest.mark.parametrize("link", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("weights_device", [0.0, 1.0])
def test_the_optimum_is_brute_forces(link, weights_device):
    """One candidate at a time, shares finer than any that makes a difference, all batches."""
    hardware = machine(link)
    device, host = 24 << 20, 40 << 20
    found = search(SHAPE, hardware, 2, WORKLOAD, max_batch=20, weights_device=weights_device, device_memory=device,
                   host_memory=host, max_mini_batch_tokens=1024)  # fmt: skip
    best = 0.0
    for batch in range(1, 21):
        for share in share_grid(300, 12):
            row = predict(SHAPE, hardware, 2, Candidates(batch, 300, 12, 1024, share, weights_device=weights_device))
            if row.device_bytes[0] <= device and row.host_bytes[0] <= host:
                best = max(best, row.tokens_per_s[0])
        if weights_device == 1.0:
            row = predict(SHAPE, hardware, 2, Candidates(batch, 300, 12, 1024, 0, 0, 1.0, 1.0))
            if row.device_bytes[0] <= device:
                best = max(best, row.tokens_per_s[0])
    assert found.prediction["tokens_per_s"] == best


def test_no_share_between_the_grids_is_better():
    hardware = machine()
    found = search(SHAPE, hardware, 2, WORKLOAD, batch=32, weights_device=0.0, objective="decode_tokens_per_s")
    fine = predict(SHAPE, hardware, 2, Candidates(32, 300, 12, 8192, np.linspace(0, 1, 20_001)))
    assert found.prediction["decode_tokens_per_s"] >= fine.decode_tokens_per_s.max() * (1 - 1e-3)
    assert 0 < found.act_share < 1
    assert found.kv_act_bytes_ratio == pytest.approx(2 * (1 - found.act_share) / found.act_share)


def test_the_winner_fits_by_the_memory_plan_and_is_confirmed():
    budgets = {"device": 20 << 20, "host": 60 << 20}
    found = search(SHAPE, machine(), 2, WORKLOAD, device_memory=budgets["device"], host_memory=budgets["host"],
                   max_mini_batch_tokens=1024, confirm=True)  # fmt: skip
    wave = admit(SHAPE, found.policy, Workload.uniform(found.batch, 300, 12), 2)
    plan = memory_plan(SHAPE, found.policy, 2, buffer_sizes(wave), "cpu")
    assert fits(plan, budgets)
    assert {tier: sum(parts.values()) for tier, parts in plan.items()} == found.memory
    assert found.virtual.tokens_per_s == pytest.approx(found.prediction["tokens_per_s"], rel=0.08)
    assert found.policy.max_batch == found.batch


def test_everything_resident_wins_where_it_fits():
    found = search(SHAPE, machine(), 2, WORKLOAD, batch=32)
    assert found.policy.weights.device == 1 and found.policy.cache == {"kv@device": 1.0}
    assert found.prediction["h2d_bytes"] == 0 and found.binding == "compute"


def test_opt_30b_gets_a_large_batch_and_a_mix():
    """Every candidate of the dense grid is priced; how fast, `make bench` says."""
    shape, hardware = shape_by_name("opt-30b"), catalogue.load("rtx4090")
    found = search(shape, hardware, 2, Workload.uniform(1, 1024, 32), host_memory=200 << 30)
    assert found.batch > 100 and 0 < found.act_share < 1
    assert found.num_candidates > 10_000


def test_what_does_not_fit_says_what_would_do():
    with pytest.raises(InputError, match="device memory: the least that would do is .* short.*Raise device memory to"):
        search(SHAPE, machine(), 2, WORKLOAD, device_memory=4 << 20)
    with pytest.raises(InputError, match="host memory") as error:
        search(SHAPE, machine(), 2, WORKLOAD, batch=32, weights_device=0.0, host_memory=8 << 20)
    assert "32 requests" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_change_named_is_enough_and_no_smaller_one_is(tier):
    options = {"weights_device": 0.0, "batch": 32, "max_mini_batch_tokens": 1024}
    with pytest.raises(InputError) as error:
        search(SHAPE, machine(), 2, WORKLOAD, **options, **{f"{tier}_memory": 4 << 20})
    needed = int(str(error.value).split(f"{tier} memory to ")[1].split("MiB")[0])
    search(SHAPE, machine(), 2, WORKLOAD, **options, **{f"{tier}_memory": needed << 20})
    with pytest.raises(InputError):
        search(SHAPE, machine(), 2, WORKLOAD, **options, **{f"{tier}_memory": (needed - 1) << 20})


@pytest.mark.parametrize("options", [{"objective": "speed"}, {"weights_device": 1.5}, {"batch": 0}, {"max_batch": 0}])
def test_bad_options_are_refused(options):
    with pytest.raises(InputError):
        search(SHAPE, machine(), 2, WORKLOAD, **options)


@settings(max_examples=25)
@given(st.integers(16, 200), st.integers(16, 400), st.floats(1, 3), st.floats(0.05, 3))
def test_more_memory_never_lowers_the_optimum(device_mib, host_mib, factor, link):
    def best(device, host):
        try:
            return search(SHAPE, machine(link), 2, WORKLOAD, max_batch=48, weights_device=0.0,
                          device_memory=int(device * 2**20), host_memory=int(host * 2**20),
                          max_mini_batch_tokens=2048).prediction["tokens_per_s"]  # fmt: skip
        except InputError:
            return 0.0

    before = best(device_mib, host_mib)
    assert best(device_mib * factor, host_mib) >= before
    assert best(device_mib, host_mib * factor) >= before


@settings(max_examples=25)
@given(st.floats(0.05, 3), st.floats(1, 4), st.sampled_from([0.0, 1.0]))
def test_more_bandwidth_never_lowers_the_optimum(link, factor, weights_device):
    def best(hardware):
        return search(SHAPE, hardware, 2, WORKLOAD, batch=32, weights_device=weights_device, device_memory=40 << 20,
                      max_mini_batch_tokens=2048).prediction["tokens_per_s"]  # fmt: skip

    slow = machine(link)
    assert best(slow.with_link_rate(link * factor)) >= best(slow) * (1 - 1e-9)
    faster = dict(slow.lines) | {"compute": replace(slow.lines["compute"], s_per_byte=1e-9 / (8.0 * factor))}
    assert best(replace(slow, lines=faster)) >= best(slow) * (1 - 1e-9)


def test_resident_weights_fill_the_device_but_no_more():
    """Auto placement: more device memory keeps more weights, and the memory plan agrees that it fits."""
    options = {"batch": 8, "max_mini_batch_tokens": 700}
    streamed = search(SHAPE, machine(0.1), 2, WORKLOAD, weights_device=0.0, **options).memory["device"]
    shares = []
    for extra in (0, 1 << 20, 2 << 20):
        device = streamed + extra
        found = search(SHAPE, machine(0.1), 2, WORKLOAD, device_memory=device, **options)
        assert found.memory["device"] <= device
        shares.append(found.policy.weights.device)
    assert shares == sorted(shares) and shares[0] < shares[-1]


def test_batches_are_dense_then_a_sixteenth_apart():
    grid = batch_grid(300)
    assert grid[:64].tolist() == list(range(1, 65)) and grid[-1] == 300
    assert (np.diff(grid)[64:] <= grid[64:-1] // 16).all()
