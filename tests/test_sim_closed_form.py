"""The closed form against the virtual clock, the packer and the memory plan that it stands for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexhybrid.core.blocks import BlockKinds
from flexhybrid.core.errors import InputError
from flexhybrid.core.memory import buffer_sizes, memory_plan, total_bytes
from flexhybrid.core.packing import pack
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.shape import shape_by_name
from flexhybrid.core.stream import stream
from flexhybrid.core.trace import check_trace
from flexhybrid.core.workload import Workload
from sim import catalogue
from sim.closed_form import Candidates, candidates_of, predict
from sim.loads import num_mini_batches
from sim.presets import hybrid, kv_only
from sim.validation import errors, random_case
from sim.virtual_clock import run, summarize

SHAPE, HARDWARE = shape_by_name("opt-30b"), catalogue.load("rtx4090")


@pytest.mark.parametrize(
    "kind, count, median, worst", [("column", 110, 0.01, 0.05), ("row", 60, 0.01, 0.08), ("serial", 60, 0.05, 0.15)]
)
def test_whole_runs_agree_with_the_virtual_clock(kind, count, median, worst):
    gaps = np.abs(errors(count, 5, kind))
    print(f"{kind}: median {np.median(gaps):.2e}, worst {gaps.max():.2%}")
    assert np.median(gaps) <= median and gaps.max() <= worst


def cases(count: int, seed: int, *kinds: str):
    rng = np.random.default_rng(seed)
    return [random_case(rng, kinds[number % len(kinds)]) for number in range(count)]


def test_streams_of_all_kinds_mean_what_they_say():
    for case in cases(24, 8, "column", "row", "serial"):
        assert check_trace(run(stream(case.wave()), case.hardware), 1e-15) == []


def test_the_bound_is_a_bound_and_tokens_add_up():
    for case in cases(20, 9, "column", "row"):
        closed = predict(case.shape, case.hardware, case.bytes_per_element, case.candidate).row()
        virtual = summarize(run(stream(case.wave()), case.hardware))
        bound = predict(case.shape, case.hardware, case.bytes_per_element, case.candidate, walk=False).row()
        assert bound["total_s"] == bound["bound_s"] <= virtual.total_s * 1.005  # but for the stairs of whole blocks
        assert closed["tokens_per_s"] * closed["total_s"] == pytest.approx(virtual.generated_tokens)
        assert closed["prefill_s"] + closed["decode_s"] == pytest.approx(closed["total_s"])
        assert closed["num_mini_batches"] == len(case.wave().mini_batches)


def test_memory_is_the_memory_plans():
    for case in cases(40, 10, "column", "row", "serial"):
        wave, device = case.wave(), case.hardware.device
        plan = total_bytes(memory_plan(case.shape, case.policy, case.bytes_per_element, buffer_sizes(wave), device))
        closed = predict(case.shape, case.hardware, case.bytes_per_element, case.candidate).row()["peak_bytes"]
        assert {tier: round(size) for tier, size in closed.items()} == pytest.approx(
            {"disk": 0, **plan}, rel=1e-6, abs=2
        ), case


@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 40), st.integers(1, 6000))
def test_mini_batches_are_those_of_the_packer(batch, prompt, generated, bound):
    tokens = np.full(batch, prompt + generated - 1)
    groups = pack(tokens, BlockKinds({"kv@host": 0.6, "act@host": 0.4}), bound)
    count, size = num_mini_batches(np.array([batch]), prompt, generated, bound)
    assert count[0] == len(groups)
    assert size[0] == max(map(len, groups))


def test_many_at_once_are_the_same_as_one_by_one():
    rng = np.random.default_rng(2)
    share = np.array([0.0, 0.3, 1.0, 0.5, 0.5, 0.7])
    numbers = dict(
        batch=rng.integers(1, 200, 6), prompt_tokens=rng.integers(20, 1500, 6),
        max_tokens=np.array([1, 2, 7, 8, 40, 90]),
        max_mini_batch_tokens=np.array([100, 8192, 4096, 1024, 8192, 8192]),
        weights_device=np.array([0.0, 0.1, 0.2, 0.0, 1.0, 0.0]), weights_disk=np.zeros(6),
    )  # fmt: skip
    cache = {"act@host": share, "kv@host": 1 - share}
    together = predict(SHAPE, HARDWARE, 2, Candidates(hybrid(0.5), **numbers, cache=cache))
    for i in range(6):
        alone = Candidates(
            hybrid(0.5), **{k: v[i] for k, v in numbers.items()}, cache={k: v[i] for k, v in cache.items()}
        )
        one = predict(SHAPE, HARDWARE, 2, alone).row()
        assert _same(together.row(i), one)


def _same(a, b) -> bool:
    if isinstance(a, dict):
        return all(_same(a.get(k, 0.0), b.get(k, 0.0)) for k in {**a, **b})
    return a == b if isinstance(a, str) else a == pytest.approx(b, rel=1e-9, abs=1e-9)


@settings(max_examples=40)
@given(st.floats(0, 1), st.integers(1, 300), st.integers(1, 1500), st.integers(1, 60), st.floats(1.05, 4))
def test_a_better_machine_is_never_slower(share, batch, prompt, generated, factor):
    candidate = Candidates(hybrid(share), batch, prompt, generated)
    base = predict(SHAPE, HARDWARE, 2, candidate).row()["total_s"]
    for term in ("s_per_flop", "s_per_byte", "overhead_s"):
        lines = {key: replace(line, **{term: getattr(line, term) / factor}) for key, line in HARDWARE.lines.items()}
        better = predict(SHAPE, replace(HARDWARE, lines=lines), 2, candidate).row()["total_s"]
        assert better <= base * (1 + 1e-6)


def test_a_policy_becomes_its_candidate():
    policy = kv_only(weights=Placement(device=0.25, host=0.75))
    candidate = candidates_of(policy, Workload(np.array([100, 200]), np.array([10, 30])))
    assert (candidate.batch, candidate.prompt_tokens, candidate.max_tokens) == (2, 150, 20)
    row = predict(SHAPE, HARDWARE, 2, candidate).row()
    explicit = Candidates(policy, 2, 150, 20, 8192, {"kv@host": 1.0}, 0.25, 0.0)
    assert row == predict(SHAPE, HARDWARE, 2, explicit).row()


@pytest.mark.parametrize("cache", [{"tok": 1.0}, {"act@host": 1.0}])
def test_what_cannot_be_planned_is_refused(cache):
    from flexhybrid.core.policy import Selection

    selection = Selection("heavy_hitter", budget=0.2) if "act@host" in cache else Selection()
    with pytest.raises(InputError, match="cannot be planned"):
        predict(SHAPE, HARDWARE, 2, Candidates(Policy(cache=cache, selection=selection), 1, 100, 10))
