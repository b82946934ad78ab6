"""Test that layers with a window read and hold only the blocks of their window."""

from dataclasses import replace

import numpy as np
import pytest
from toy_machine import SHAPE, machine

from flexhybrid.core.admission import batch_size, open_batch
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.memory import memory_plan, total_bytes
from flexhybrid.core.model.attention import PLAIN, AttentionKind
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.schedule.steps import make_step
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload


@pytest.mark.parametrize("window", [1, 16, 33])
@pytest.mark.parametrize("cache", [{"kv@host": 1.0}, {"act@host": 0.4, "kv@host": 0.3, "kv@disk": 0.3}])
def test_a_layer_loads_only_blocks_that_a_new_token_sees(window, cache):
    shape = replace(SHAPE, max_positions=4096, attention=(AttentionKind(window), PLAIN))
    prompts = np.array([8 * window, 40, 300])
    policy = Policy(cache=cache, max_mini_batch_tokens=1 << 20)
    problem = Problem(shape=shape, dtype="float32", device="cpu")
    wave = admit(problem, policy, Workload(prompts, np.full(3, 5)))
    rows = {"kv": shape.kv_token_bytes(4), "act": shape.act_token_bytes(4)}
    for task in stream(wave):
        if task.verb not in ("load_kv", "load_act") or not task.iteration:
            continue
        representation, expected = task.verb[5:], 0
        for cached in prompts + task.iteration - 1:  # tokens in the cache; the new one is at this position
            first = max(0, cached + 1 - window) if task.layer % 2 == 0 else 0
            seen = np.arange(first // BLOCK_TOKENS, -(-cached // BLOCK_TOKENS))
            entries = [wave.entries.names[i] for i in wave.entries.entry_of(seen * BLOCK_TOKENS)]
            expected += sum(entry.startswith(representation) for entry in entries) * BLOCK_TOKENS * rows[representation]
        assert task.work.link_bytes == expected


WINDOW, LAYERS, BATCH = 512, 12, 3
CACHES = (
    {"kv@host": 1.0},
    {"act@device": 1.0},
    {"act@host": 0.5, "kv@host": 0.5},
    {"act@disk": 0.3, "kv@device": 0.7},
    {"both(kv@host,act@device)": 1.0},
)


@pytest.mark.parametrize("kinds", [(WINDOW,), (WINDOW,) * 5 + (None,), (WINDOW, None)])
@pytest.mark.parametrize("cache", CACHES)
def test_pools_at_eight_windows_of_context_hold_little_more_than_the_windows(kinds, cache):
    """Layers are those of Mistral, Gemma 3 and gpt-oss; pools take up to 1.1 times the bytes of visible tokens."""
    attention = tuple(AttentionKind(window) for window in kinds)
    shape = replace(SHAPE, num_layers=LAYERS, max_positions=8192, attention=attention)
    context = 8 * WINDOW
    problem, policy = Problem(shape=shape, dtype="float32", hardware=machine()), Policy(cache=cache)
    wave = admit(problem, policy, Workload.uniform(BATCH, context - 99, 100))
    plan = memory_plan(problem, policy, buffer_sizes(wave))
    held = sum(size for parts in plan.values() for part, size in parts.items() if part.endswith(" pool"))
    rows = {"kv": shape.kv_token_bytes(4), "act": shape.act_token_bytes(4)}
    row = sum(share * size for entry, share in cache.items() for r, size in rows.items() if f"{r}@" in entry)
    tokens = sum(window or context for window in kinds) * LAYERS / len(kinds)
    assert tokens * BATCH * row <= held <= 1.1 * tokens * BATCH * row


@pytest.mark.parametrize("window", [1, 16, 17, 33, 100])
@pytest.mark.parametrize(
    "cache",
    [*CACHES, {"tok": 0.3, "kv@host": 0.4, "act@device": 0.3}, {"tok": 0.6, "kv@host": 0.4}, {
        "act@host": 0.2, "kv@host": 0.3, "kv@disk": 0.1, "both(kv@host,act@host)": 0.4,
    }],
)  # fmt: skip
def test_a_step_reads_only_stored_tokens(window, cache):
    """A plain account follows each block token by token, for prompts computed whole and in chunks."""
    shape = replace(SHAPE, max_positions=4096, attention=(AttentionKind(window),))
    problem = Problem(shape=shape, dtype="float32", hardware=machine())
    for prompt, chunk in ((1, 4096), (150, 4096), (150, 48)):
        wave = admit(problem, Policy(cache=cache, max_mini_batch_tokens=chunk), Workload.uniform(1, prompt, 60))
        entries = wave.entries
        pieces = [(0, piece) for piece in range(-(-prompt // chunk))]
        holds: dict[tuple[str, int], int] = {}  # block of a pool -> which of its request's blocks
        for iteration, piece in [*pieces, *((i, 0) for i in range(1, 60))]:
            step = make_step(wave, iteration, 0, np.array([0]), piece, window=window)
            context = int(step.context[0])
            read = [] if step.recomputed is None else list(range(int(step.recomputed[0])))
            for segment in step.segments:
                tokens, first = int(segment.num_tokens[0]), int(segment.start_block[0]) * BLOCK_TOKENS
                ever = entries.positions(entries.names.index(segment.entry), first + tokens)[first:]
                for index, position in enumerate(ever.tolist()):
                    block = int(segment.block_table[0, index // BLOCK_TOKENS])
                    assert holds[segment.entry, block] == position // BLOCK_TOKENS
                read += ever.tolist()
            assert len(read) == len(set(read)) and set(read) >= set(range(max(0, context + 1 - window), context))
            for store in step.stores:
                for row, block in zip(store.rows.tolist(), store.blocks.tolist(), strict=True):
                    holds[store.entry, block] = (context + row) // BLOCK_TOKENS


def test_more_requests_fit_a_budget_if_most_layers_have_windows():
    """Five of six layers hold 1/8 of the tokens: (5/8 + 1) / 6 of the bytes, and 3.7 times as many requests."""
    shape = replace(SHAPE, num_layers=6, max_positions=8192)
    workload, policy = Workload.uniform(400, 8 * WINDOW - 100, 100), Policy(cache={"kv@host": 1.0})
    problem = Problem(shape=shape, dtype="float32", hardware=machine())
    needed = total_bytes(memory_plan(problem, policy, buffer_sizes(open_batch(problem, policy, workload, 40))))
    problem = replace(problem, budgets=Budgets(host=needed["host"]))
    windowed = replace(shape, attention=(AttentionKind(WINDOW),) * 5 + (PLAIN,))
    # under a static cache requests take all their blocks at once
    (plain, _, _), (many, share, _) = (
        batch_size(replace(problem, shape=one), replace(policy, static_cache=True), workload, 400)
        for one in (shape, windowed)
    )
    assert share == 1 and 3.4 * plain <= many <= 3.7 * plain
