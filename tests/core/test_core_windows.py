"""Layers with a window read the blocks of their window alone."""

from dataclasses import replace

import numpy as np
import pytest
from toy_machine import SHAPE

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.model.attention import PLAIN, AttentionKind
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload


@pytest.mark.parametrize("window", [1, 16, 33])
@pytest.mark.parametrize("cache", [{"kv@host": 1.0}, {"act@host": 0.4, "kv@host": 0.3, "kv@disk": 0.3}])
def test_a_layer_loads_the_blocks_in_which_a_new_token_sees_something(window, cache):
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
