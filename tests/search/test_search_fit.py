"""Test line fitting: known lines are recovered, bad samples are refused by name, and fits are reported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import load_hardware
from policy_search import fit
from policy_search.fit import fit_hardware, fit_line, fit_report


def samples_of(overhead_s, s_per_flop, s_per_byte, noise=0.0):
    rng = np.random.default_rng(0)
    sizes = [(10.0 ** rng.uniform(6, 10), 10.0 ** rng.uniform(4, 8)) for _ in range(12)]
    return [(f, b, (overhead_s + s_per_flop * f + s_per_byte * b) * (1 + noise * rng.normal())) for f, b in sizes]


@given(st.floats(0, 1e-4), st.floats(1e-13, 1e-9), st.floats(1e-12, 1e-9))
def test_exact_samples_give_their_line(overhead_s, s_per_flop, s_per_byte):
    samples = samples_of(overhead_s, s_per_flop, s_per_byte)
    line = fit_line(samples)
    for flops, num_bytes, seconds in samples:
        assert line.at(flops, num_bytes) == pytest.approx(seconds, rel=1e-5)
    assert line.r2 == pytest.approx(1.0, abs=1e-6)


def test_noisy_samples_give_nearly_their_line():
    line = fit_line(samples_of(2e-5, 1e-11, 5e-10, noise=0.01))
    assert line.s_per_flop == pytest.approx(1e-11, rel=0.05)
    assert line.s_per_byte == pytest.approx(5e-10, rel=0.05)
    assert 0.99 < line.r2 <= 1 and len(line.samples) == 12


def test_short_tasks_count_as_much_as_long_ones():
    """Without relative weights, the long samples' errors would hide the overhead."""
    samples = [(0, 1e3, 1.1e-5), (0, 1e4, 2e-5), (0, 1e9, 1.05), (0, 1e9, 0.95)]
    assert fit_line(samples).overhead_s == pytest.approx(1e-5, rel=0.01)


def test_terms_without_variation_are_dropped():
    line = fit_line([(0.0, size, 1e-5 + size * 1e-9) for size in (1e4, 1e5, 1e6)])
    assert line.s_per_flop == 0 and line.s_per_byte == pytest.approx(1e-9)
    constant = fit_line([(5.0, 7.0, 1e-3), (5.0, 7.0, 3e-3)])
    assert (constant.s_per_flop, constant.s_per_byte) == (0, 0)
    assert constant.overhead_s == pytest.approx(2e-3)  # the mean: nearer to what came early, all would be early
    assert fit_line([(5.0, 7.0, 2e-3)]).r2 is None


def test_no_term_is_negative():
    """Times that fall with size would otherwise give a negative slope."""
    line = fit_line([(0.0, 1e6, 2e-3), (0.0, 2e6, 1e-3)])
    assert line.s_per_byte == 0 and line.overhead_s > 0


@given(st.integers(1, 7), st.floats(8, 100), st.floats(1e-6, 1e-4), st.floats(1e-12, 1e-9), st.randoms())
def test_sizes_of_a_second_slower_cluster_are_not_fitted(num_slow, ratio, overhead_s, s_per_byte, random):
    """All sizes but the largest may wait; the record keeps their samples."""
    sizes = [1e4 * 4**i for i in range(8)]
    times = [(overhead_s + s_per_byte * size) * random.uniform(0.95, 1.05) for size in sizes]
    slow = set(random.sample(range(7), num_slow))
    slow = {i for i in slow if ratio * times[i] > 6 * times[-1]}  # the others may be work
    samples = [(0.0, b, s * (ratio if i in slow else 1)) for i, (b, s) in enumerate(zip(sizes, times, strict=True))]
    line = fit_line(samples, on_gpu=True)
    assert line.samples == tuple(samples)
    fitted = fit_line([sample for i, sample in enumerate(samples) if i not in slow])
    assert (line.overhead_s, line.s_per_byte, line.r2) == (fitted.overhead_s, fitted.s_per_byte, fitted.r2)


@given(st.lists(st.floats(0.46, 2.2), min_size=12, max_size=12))
def test_noise_of_one_cluster_is_fitted_whole(noise):
    """Samples within a factor of five are all used."""
    flops = np.linspace(1e9, 1e10, 12).tolist()
    samples = [(f, 0.0, 1e-3 * of) for f, of in zip(flops, noise, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "TROUBLED", float("inf"))
        whole = fit_line(samples, on_gpu=True)
    assert fit_line(samples, on_gpu=True) == fit_line(samples) == whole


def test_a_gpus_line_alone_is_no_slower_than_beside_a_busy_link():
    """Slower samples contain waits for the host. A CPU's samples count, and so do those that agree, so noise does not
    bias the line."""
    beside = [(0.0, b, 2e-5 + 1e-12 * b) for b in (1e6, 1e7, 1e8)]
    agree = [(0.0, b, 0.9 * s * noise) for (_, b, s), noise in zip(beside, (1.3, 0.7, 1.0), strict=True)]
    waits = [(0.0, 5e7, 2.5e-4), (0.0, 9e7, 2.4e-4)]

    def alone(samples, device):
        return fit_hardware({"attend_alone": samples, "attend": beside}, name="x", device=device).lines["attend_alone"]

    for samples in (agree, agree + waits):
        line = alone(samples, "cuda")
        assert replace(line, samples=()) == replace(fit_line(agree), samples=())
        assert len(line.samples) == len(samples) and alone(samples, "cpu") == fit_line(samples)
    assert alone(waits, "cuda").overhead_s == pytest.approx(2e-5)


@pytest.mark.parametrize("samples", [[], [(1, 1, 0.0)], [(1, 1, -1.0)], [(1, float("nan"), 1.0)], [(-1, 1, 1.0)]])
def test_bad_samples_are_refused_by_key(samples):
    with pytest.raises(InputError, match="line 'kv_gen'"):
        fit_hardware({"kv_gen": samples}, name="x", device="cpu")


def test_a_fitted_record_is_saved_and_reported(tmp_path):
    good = samples_of(2e-5, 1e-11, 5e-10)
    poor = [(0, 1e6, 1e-3), (0, 2e6, 1e-3), (0, 3e6, 5e-3), (0, 4e6, 2e-3)]
    hardware = fit_hardware({"kv_gen": good, "h2d": poor}, name="x", device="cpu", host_memory=1 << 30)
    hardware.save(tmp_path / "x.json")
    assert load_hardware(tmp_path / "x.json") == hardware
    rows = {row["key"]: row for row in fit_report(hardware)}
    assert rows["kv_gen"]["gflop_per_s"] == pytest.approx(100, rel=1e-3)
    assert rows["kv_gen"]["gb_per_s"] == pytest.approx(2, rel=1e-3)
    assert rows["kv_gen"]["overhead_us"] == pytest.approx(20, rel=1e-2)
    assert not rows["kv_gen"]["worse_than_papers"]
    assert rows["h2d"]["worse_than_papers"] and rows["h2d"]["gflop_per_s"] is None
    assert rows["h2d"]["num_samples"] == 4 and rows["h2d"]["worst_error"] > 0.5
