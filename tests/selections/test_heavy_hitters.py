"""H2O's cache: against a plain account of it that keeps every weight of every head in a dictionary."""

import functools

import numpy as np
import pytest
from models import save_llama, save_opt
from oracles.heavy_hitters import plain_h2o
from runs import run_wave

from flexhybrid.core.policy import Policy, Selection
from flexhybrid.core.trace import check_trace
from flexhybrid.jobs.compare.exactness import Reference, compare_tokens
from flexhybrid.runtime.storage.loader import Checkpoint


def policy(budget, cache=None, **more) -> Policy:
    return Policy(cache=cache or {"kv@host": 1.0}, selection=Selection("heavy_hitter", budget=budget), **more)


MAX_TOKENS, LENGTHS = 20, (90, 33, 90, 20, 64)


@pytest.fixture(scope="module", params=["opt", "llama"])
def accounts(request, tmp_path_factory):
    """(checkpoint, prompts, cached function: budget, pool shares, whole layers, count -> tokens by the oracle)"""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "opt":
        save_opt(folder, layers=3, heads=4, positions=160, scale=0.15)
    else:
        save_llama(folder, layers=3, heads=4, kv_heads=2, positions=160, scale=0.15)
    checkpoint, generator = Checkpoint(folder), np.random.default_rng(6)
    prompts = [generator.integers(3, 61, n).tolist() for n in LENGTHS]

    @functools.cache
    def tokens(budget: float, *shares: float, whole: int = 0, count: int = len(LENGTHS)) -> list[list[int]]:
        pools = dict(zip(("kv@host", "kv@device"), shares, strict=False))  # where they lie changes no token
        return [plain_h2o(checkpoint, prompt, MAX_TOKENS, budget, pools, whole) for prompt in prompts[:count]]

    return checkpoint, prompts, tokens


@pytest.mark.parametrize(
    "budget, cache",
    [
        (0.2, {"kv@host": 1.0}),
        (0.2, {"kv@device": 1.0}),
        (0.2, {"kv@host": 0.4, "kv@device": 0.6}),
        (0.5, {"kv@host": 0.4, "kv@device": 0.6}),
    ],
)
def test_tokens_are_those_of_a_plain_account(accounts, cache, budget):
    checkpoint, prompts, tokens = accounts
    result = run_wave(checkpoint, policy(budget, cache, max_mini_batch_tokens=300), prompts, MAX_TOKENS)
    assert check_trace(result.trace) == []
    assert result.tokens == tokens(budget, *cache.values())


@pytest.mark.parametrize("whole, shares, schedule", [(1, (1.0,), "column"), (2, (0.4, 0.6), "row")])
def test_whole_layers_drop_nothing(accounts, whole, shares, schedule):
    checkpoint, prompts, tokens = accounts
    cache = dict(zip(("kv@host", "kv@device"), shares, strict=False))
    selection = Selection("heavy_hitter", budget=0.2, whole_layers=whole)
    chosen = Policy(cache=cache, selection=selection, schedule=schedule, max_mini_batch_tokens=300)
    result = run_wave(checkpoint, chosen, prompts[:3], MAX_TOKENS)
    assert check_trace(result.trace) == []
    assert result.tokens == tokens(0.2, *shares, whole=whole, count=3)


def test_where_no_layer_drops_anything_the_tokens_are_the_full_caches(accounts):
    """Each prompt is a mini-batch of its own; with the short answer, none of whole blocks."""
    checkpoint, prompts, _ = accounts
    for max_tokens in (4, 20):
        every = Policy(selection=Selection("heavy_hitter", budget=0.2, whole_layers=3), max_mini_batch_tokens=100)
        result = run_wave(checkpoint, every, prompts[:3], max_tokens)
        assert result.tokens == run_wave(checkpoint, Policy(), prompts[:3], max_tokens).tokens


@pytest.mark.parametrize("schedule", ["column", "row"])
def test_a_budget_that_drops_nothing_is_exact(tmp_path, schedule):
    save_opt(tmp_path, layers=3, heads=4, positions=160)
    prompts = [np.random.default_rng(n).integers(3, 61, n).tolist() for n in (90, 33, 20)]
    mixed = policy(1.0, {"kv@host": 0.6, "kv@device": 0.4}, schedule=schedule, max_mini_batch_tokens=300)
    result = run_wave(Checkpoint(tmp_path), mixed, prompts, 6)
    reference = Reference(tmp_path)
    outcome = compare_tokens(reference, prompts, reference.generate(prompts, 6, True), result.tokens)
    assert outcome.exact, outcome.first_wrong
