"""The bench's copies: what it counts is what the stream says crosses the link."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.bench_copies import GENERATED, LOADS, STORES, TURN, copies_of
from flexhybrid.core.blocks import BLOCK_TOKENS
from flexhybrid.core.plan import admit
from flexhybrid.core.shape import ModelShape
from flexhybrid.core.stream import stream
from flexhybrid.core.workload import Workload
from sim.presets import act_only, hybrid, kv_only

SHAPE = ModelShape("opt-tiny", "opt", num_layers=2, hidden=64, num_heads=1, num_kv_heads=1, head_dim=64, ffn=64,
                   vocab=64, max_positions=2048)  # fmt: skip
KV_BYTES, ACT_BYTES = 2 * 64 * 2, 64 * 2  #: of a token in a layer, at two bytes an element


@pytest.mark.parametrize(
    ("policy", "stored"),
    [
        (kv_only(), TURN * KV_BYTES),
        (act_only(), TURN * ACT_BYTES),
        (hybrid(0.5), BLOCK_TOKENS * (KV_BYTES + ACT_BYTES)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_copies_of_a_turn_are_its_stores_and_loads(policy, stored):
    workload = Workload(np.array([20, 33, 50]), np.full(3, GENERATED + TURN))
    wave = admit(SHAPE, policy, workload, 2)
    found = copies_of(wave)
    assert sum(found["stores"]) == 3 * stored
    tasks = [task for task in stream(wave, first_iteration=GENERATED) if task.layer == 1]
    assert sum(found["loads"]) == sum(task.work.link_bytes for task in tasks if task.verb in LOADS)
    assert len(found["stores"]) == sum(task.work.num_copies for task in tasks if task.verb in STORES)
