"""H2O's cache: against a plain account of it that keeps every weight of every head in a dictionary."""

import functools
import math

import numpy as np
import pytest
import torch
from models import save_llama, save_opt
from runs import run_wave

from flexhybrid.core.context.blocks import BlockEntries
from flexhybrid.core.policy import Placement, Policy, Selection
from flexhybrid.core.trace import check_trace
from flexhybrid.jobs.compare.exactness import Reference, compare_tokens
from flexhybrid.runtime.kernels.rotary import rotary_tables, rotate_
from flexhybrid.runtime.models import architecture
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.runtime.storage.weights import Weights, linear


def policy(budget, cache=None, **more) -> Policy:
    return Policy(cache=cache or {"kv@host": 1.0}, selection=Selection("heavy_hitter", budget=budget), **more)


@torch.inference_mode()
def plain_h2o(checkpoint, prompt: list[int], max_tokens: int, budget: float, cache=None) -> list[int]:
    """One request, one token at a time, head by head: half of the budget newest, half with the largest sums. Places lie
    in the pools of ``cache`` as a context's tokens do, and a token that goes leaves its place to one of its pool."""
    entries = BlockEntries(cache or {"kv@host": 1.0})
    shape, model = checkpoint.shape, architecture(checkpoint.shape)
    weights = Weights(shape, checkpoint, "float32", torch.device("cpu"), Policy(weights=Placement(device=1.0)))
    groups, heads, d = shape.num_kv_heads, shape.num_heads, shape.head_dim
    rotary = rotary_tables(shape, len(prompt) + max_tokens, torch.float32, "cpu") if shape.rotary else None
    most = min(len(prompt) + max_tokens - 1, max(16, math.ceil(round(budget * len(prompt) / 16, 9)) * 16))
    recent = most - most // 2
    #: position -> [key, value, sum, place]
    caches = [[{} for _ in range(groups)] for _ in range(shape.num_layers)]
    answer: list[int] = []

    def layer_step(layer, hidden, positions):
        w = weights.views(layer, None)
        kvq = linear(
            model.attention_input(shape, w, hidden), w["kvq.weight"], w["kvq.bias"][0] if "kvq.bias" in w else None
        )
        k, v, q = (x.unflatten(-1, (-1, d)) for x in kvq.split([groups * d, groups * d, heads * d], dim=-1))
        if rotary:
            k, q = (rotate_(x.contiguous(), rotary[0][positions], rotary[1][positions]) for x in (k, q))
        out = torch.zeros(len(positions), heads, d)
        for g in range(groups):
            cache = caches[layer][g]
            for row, position in enumerate(positions.tolist()):
                cache[position] = [k[row, g], v[row, g], 0.0, position]
            held = sorted(cache)
            keys = torch.stack([cache[p][0] for p in held])
            values = torch.stack([cache[p][1] for p in held])
            later = torch.tensor(held)[None] > positions[:, None]
            for head in range(g * heads // groups, (g + 1) * heads // groups):
                scores = q[:, head] @ keys.T / d**0.5
                probabilities = torch.softmax(scores.masked_fill_(later, -torch.inf), dim=-1)
                out[:, head] = probabilities @ values
                for p, looked_at in zip(held, probabilities.sum(0).tolist(), strict=True):
                    cache[p][2] += looked_at
            now = int(positions[-1])
            if len(positions) > 1:
                rest = sorted((p for p in held if p <= now - recent), key=lambda p: -cache[p][2])
                for p in rest[max(most - recent, 0) :] if len(held) > most else []:
                    del cache[p]
                for place, p in enumerate(sorted(cache)):
                    cache[p][3] = place
            elif len(cache) > most:
                pool = entries.entry_of(now % most)
                old = (p for p in cache if p <= now - recent and entries.entry_of(cache[p][3]) == pool)
                cache[now][3] = cache.pop(min(old, key=lambda p: cache[p][2]))[3]
        return model.finish(shape, w, hidden, out.flatten(1))

    tokens, start = prompt, 0
    for _ in range(max_tokens):
        positions = torch.arange(start, start + len(tokens))
        hidden = model.embed(shape, weights.outer, torch.tensor(tokens), positions)
        for layer in range(shape.num_layers):
            hidden = layer_step(layer, hidden, positions)
        answer.append(int(model.head(shape, weights.outer, hidden[-1:]).argmax()))
        start, tokens = start + len(tokens), answer[-1:]
    return answer


MAX_TOKENS = 30


@pytest.fixture(scope="module", params=["opt", "llama"])
def accounts(request, tmp_path_factory):
    """(checkpoint, prompts, function: budget, shares of the pools -> tokens of the plain account, computed once)"""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "opt":
        save_opt(folder, layers=3, heads=4, positions=160, scale=0.15)
    else:
        save_llama(folder, layers=3, heads=4, kv_heads=2, positions=160, scale=0.15)
    checkpoint, generator = Checkpoint(folder), np.random.default_rng(6)
    prompts = [generator.integers(3, 61, n).tolist() for n in (90, 33, 90, 20, 64)]

    @functools.cache
    def tokens(budget: float, *shares: float) -> list[list[int]]:
        pools = dict(zip(("kv@host", "kv@device"), shares, strict=False))  # where they lie changes no token
        return [plain_h2o(checkpoint, prompt, MAX_TOKENS, budget, pools) for prompt in prompts]

    return checkpoint, prompts, tokens


@pytest.mark.parametrize("cache", [{"kv@host": 1.0}, {"kv@device": 1.0}, {"kv@host": 0.4, "kv@device": 0.6}])
@pytest.mark.parametrize("budget", [0.2, 0.5])
def test_tokens_are_those_of_a_plain_account(accounts, cache, budget):
    checkpoint, prompts, tokens = accounts
    result = run_wave(checkpoint, policy(budget, cache, max_mini_batch_tokens=300), prompts, MAX_TOKENS)
    assert check_trace(result.trace) == []
    assert result.tokens == tokens(budget, *cache.values())


@pytest.mark.parametrize("schedule", ["column", "row"])
def test_a_budget_that_drops_nothing_is_exact(tmp_path, schedule):
    save_opt(tmp_path, layers=3, heads=4, positions=160)
    prompts = [np.random.default_rng(n).integers(3, 61, n).tolist() for n in (90, 33, 20)]
    mixed = policy(1.0, {"kv@host": 0.6, "kv@device": 0.4}, schedule=schedule, max_mini_batch_tokens=300)
    result = run_wave(Checkpoint(tmp_path), mixed, prompts, 6)
    reference = Reference(tmp_path)
    outcome = compare_tokens(reference, prompts, reference.generate(prompts, 6, True), result.tokens)
    assert outcome.exact, outcome.first_wrong
