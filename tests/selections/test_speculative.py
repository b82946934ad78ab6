"""Test InfiniGen's selection against a plain account that keeps every key of every head in a dictionary."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import save_llama, save_opt
from oracles.speculative import filled_plainly, plain_tokens
from runs import run_wave

from flexhybrid.core.admission import first_wave, wave_plan
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Bits, Placement, Policy, Selection
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.steps import make_step
from flexhybrid.core.trace import check_trace
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.selections.skew import save_skewed
from flexhybrid.runtime.selections.speculative import Speculation
from flexhybrid.runtime.storage.loader import Checkpoint

EVERYTHING = math.inf  #: an alpha that no score falls behind
LENGTHS = (60, 33, 60, 20, 47)


def policy(
    alpha, cap=1.0, ratio=0.3, pool=1.0, victim="counter", whole_layers=None, pool_bytes=None, columns=None, **more
) -> Policy:
    selection = Selection(
        "speculative", alpha=alpha, partial_ratio=ratio, max_fraction=cap, pool=pool, victim=victim,
        partial_keys="device", whole_layers=whole_layers, pool_bytes=pool_bytes, columns=columns,
    )  # fmt: skip
    return Policy(selection=selection, **({"max_mini_batch_tokens": 250} | more))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return random models, plain and skewed by a sample, with prompts."""
    made, generator = {}, np.random.default_rng(6)
    sample = generator.integers(3, 61, 120).tolist()
    for family in ("opt", "llama"):
        folder = tmp_path_factory.mktemp(family)
        if family == "opt":
            save_opt(folder, layers=4, heads=4, positions=128, scale=0.15)
        else:
            save_llama(folder, layers=4, heads=4, kv_heads=2, positions=128, scale=0.15)
        made[family] = Checkpoint(folder)
        save_skewed(made[family], sample, folder / "skewed")
        made[family, "skewed"] = Checkpoint(folder / "skewed")
    return made


@pytest.fixture(scope="module")
def prompts():
    generator = np.random.default_rng(7)
    return [generator.integers(3, 61, length).tolist() for length in LENGTHS]


def moved_share(trace) -> float | None:
    """Return the share of cached tokens that gathers of a trace moved; None if nothing was cached."""
    gathers = [event.task for event in trace if event.task.verb == "gather"]
    if not gathers:
        return None
    return sum(t.work.tokens for t in gathers) / sum(int(t.payload.step.context.sum()) for t in gathers)


def by_token(kv: float, bits: Bits) -> Policy:
    """Return a policy whose rows serve all heads, so that tokens are chosen for all of them."""
    return policy(1.0, 0.4, cache={kind: of for kind, of in (("kv@host", kv), ("act@host", 1 - kv)) if of}, bits=bits)


PLACED = {"weights": Placement(device=0.3, host=0.7)}


@pytest.mark.parametrize(
    "family, count, chosen",
    [
        (("opt", "skewed"), 5, policy(0.3, whole_layers=3, **PLACED)),
        (("llama", "skewed"), 5, policy(1.0, 0.4, **PLACED)),
        ("llama", 5, policy(4.0, 0.15, whole_layers=1, **PLACED)),
        ("opt", 5, policy(math.inf, 0.2, whole_layers=2, **PLACED)),
        ("opt", 3, by_token(0.6, Bits())),
        ("llama", 3, by_token(0.6, Bits())),
        ("llama", 3, by_token(0.0, Bits())),
        ("opt", 3, by_token(1.0, Bits(kv=8))),
        ("llama", 3, by_token(1.0, Bits(kv=4))),
        ("opt", 3, by_token(0.5, Bits(kv=8))),
    ],
)
def test_tokens_are_those_of_a_plain_account(checkpoints, prompts, family, count, chosen):
    checkpoint, prompts = checkpoints[family], prompts[:count]
    result = run_wave(checkpoint, chosen, prompts, 8)
    wanted, share = plain_tokens(checkpoint, chosen, prompts, 8)
    assert result.tokens == wanted and check_trace(result.trace) == []
    assert 0 < share < 1 and moved_share(result.trace) == pytest.approx(share)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(("lru", "counter")), st.lists(st.integers(1, 50), min_size=1, max_size=3),
    st.sampled_from((0.2, 0.5, 0.9)), st.sampled_from((1, 2, 4)), st.sampled_from((0.2, 1.0, math.inf)),
    st.sampled_from((0.05, 0.4, 1.0)), st.integers(0, 9), st.sampled_from((3, 8, 255)),
)  # fmt: skip
def test_a_prompt_fills_a_pool_as_a_plain_account_does(
    monkeypatch, victim, lengths, share, groups, alpha, most, seed, full
):
    monkeypatch.setattr("flexhybrid.runtime.selections.pool.COUNTER_FULL", full)
    monkeypatch.setattr("oracles.speculative.COUNTER_FULL", full)
    shape = replace(shape_by_name("opt-125m"), num_layers=1, hidden=64, num_heads=4, num_kv_heads=groups, head_dim=16)
    chosen = policy(alpha, most, pool=share, victim=victim, max_mini_batch_tokens=9999)
    wave = admit(Problem(shape=shape, dtype="float32"), chosen, Workload(np.array(lengths), np.full(len(lengths), 9)))
    weights = SimpleNamespace(
        device=torch.device("cpu"), dtype=torch.float32, bits="native", skewing=[None],
        placed=[SimpleNamespace(streamed_from=0, layout=SimpleNamespace(qkv_end=0))],
    )  # fmt: skip
    speculation, step = Speculation(wave, weights), make_step(wave, 0, 0, wave.mini_batches[0])
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (torch.randn(len(lengths), step.width, n, 16, generator=generator) for n in (4, groups))
    filled = speculation.rank_prompt(0, step, queries, keys)
    uses, born = speculation.uses.of(0, 0)
    for b, prompt in enumerate(lengths):
        heads = filled_plainly(shape, chosen.selection, queries[b, :prompt], keys[b, :prompt], int(step.most_kept[b]))
        for g, head in enumerate(heads):
            assert filled[b, g, : head.size].tolist() == head.positions[: head.size].tolist()
            assert born[: head.size, b, g].tolist() == head.positions[: head.size].tolist()
            wanted = head.used_at if victim == "lru" else head.uses
            assert uses[: head.size, b, g].tolist() == wanted[: head.size].tolist()


@pytest.mark.parametrize("family, blocks, victim", [("opt", 6, "counter"), ("llama", 9, "lru"), ("opt", 99, "lru")])
def test_a_limit_in_bytes_is_shared_by_the_requests_of_a_wave(checkpoints, prompts, family, blocks, victim):
    """It is kept by the wave's blocks and by the planned memory."""
    checkpoint, prompts = checkpoints[family], prompts[:3]
    shape = checkpoint.shape
    block_bytes = shape.num_layers * 16 * 2 * shape.num_kv_heads * shape.head_dim * 4
    chosen = policy(1.0, 0.3, pool=None, pool_bytes=blocks * block_bytes + 5, victim=victim)
    result = run_wave(checkpoint, chosen, prompts, 20)
    wanted, _ = plain_tokens(checkpoint, chosen, prompts, 20)
    assert result.tokens == wanted
    problem, workload = Problem(shape=shape, dtype="float32"), Workload(np.array([60, 33, 60]), np.full(3, 20))
    planned = wave_plan(problem, chosen, workload)["host"]["kv pool"]
    assert blocks - 2 <= planned / block_bytes <= blocks or blocks == 99 and planned == 14 * block_bytes
    with pytest.raises(InputError, match="pool_bytes"):
        wave_plan(problem, replace(chosen, selection=replace(chosen.selection, pool_bytes=block_bytes - 1)), workload)


def test_a_wave_has_no_more_requests_than_its_bytes_have_blocks(checkpoints):
    shape, workload = checkpoints["opt"].shape, Workload(np.full(9, 60), np.full(9, 20))
    chosen = policy(1.0, pool=None, pool_bytes=4 * shape.num_layers * 16 * 2 * shape.num_kv_heads * shape.head_dim * 4)
    assert first_wave(Problem(shape=shape, dtype="float32"), chosen, workload) == 4


@settings(max_examples=4)
@given(
    st.sampled_from(("opt", "llama")), st.lists(st.integers(0, 4), min_size=3, max_size=3, unique=True),
    st.sampled_from((16, 130, 8192)), st.sampled_from(("column", "row")), st.sampled_from((1.0, 0.5)),
    st.sampled_from((0.0, 1.0)), st.sampled_from(("lru", "counter", "fifo")),
)  # fmt: skip
def test_the_batch_has_no_effect_if_each_request_has_its_columns(
    checkpoints, prompts, family, order, bound, schedule, pool, resident, victim
):
    """Chunks have no effect either: a selection takes whole prompts for any bound."""
    chosen = policy(
        0.5, 0.3, 0.15, pool=pool, victim=victim, columns="request", max_mini_batch_tokens=bound, schedule=schedule,
        weights=Placement(device=resident, host=1 - resident),
    )  # fmt: skip
    checkpoint, company = checkpoints[family], [prompts[i] for i in order]
    alone = [run_wave(checkpoint, chosen, [prompt], 6).tokens[0] for prompt in company]
    assert run_wave(checkpoint, chosen, company, 6).tokens == alone


@pytest.fixture(scope="module")
def full_cache(checkpoints, prompts):
    return {family: run_wave(checkpoints[family], Policy(), prompts, 6).tokens for family in ("opt", "llama")}


@settings(max_examples=8)
@given(
    st.sampled_from(("opt", "llama")), st.booleans(), st.sampled_from((0.05, 0.3, 1.0)),
    st.sampled_from((16, 130, 250, 8192)), st.sampled_from(("column", "row")), st.sampled_from((0.0, 0.4, 1.0)),
    st.sampled_from(("full", "none", "step")), st.sampled_from(("device", "host")),
    st.sampled_from((1.0, 0.7, 0.4, 0.15, 0.0)), st.sampled_from((1, None, 4)),
)  # fmt: skip
def test_an_alpha_that_leaves_nothing_out_is_exact(
    checkpoints, prompts, full_cache, family, skewed, ratio, bound, schedule, resident, overlap, hidden, kv, whole
):
    checkpoint = checkpoints[family, "skewed"] if skewed else checkpoints[family]
    weights = Placement(device=resident, host=1 - resident)
    every = policy(
        EVERYTHING, 1.0, ratio, whole_layers=whole, max_mini_batch_tokens=bound, schedule=schedule, weights=weights,
        overlap=overlap, hidden=hidden, cache={"kv@host": kv, "act@host": 1 - kv},
    )  # fmt: skip
    result = run_wave(checkpoint, every, prompts, 6)
    assert result.tokens == full_cache[family]
    assert check_trace(result.trace) == []
    assert moved_share(result.trace) == (1.0 if (whole or 2) < 4 else None)
