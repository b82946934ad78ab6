"""Test layers that attend to other layers' keys and values (Gemma 4, Gemma 3n): no blocks, equal tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from policies import wider_policies
from runs import run_wave
from tiny_models import OWN, save_tiny
from toy_machine import machine

from flexhybrid.core.errors import InputError
from flexhybrid.core.memory import memory_plan
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Bits, Placement, Policy, Selection
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.buffers import Buffers
from flexhybrid.runtime.storage.loader import Checkpoint
from sim.presets import act_only, hybrid, kv_only
from sim.simulate import simulate

pytest.importorskip("greenlet")

WIDER = wider_policies(400, 24, 12)
STORING = ("quantize", "store_kv", "store_act", "scatter", "scatter_device", "write_kv", "write_act")


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma3n_text"])
def test_the_probe_finds_whose_keys_and_values_a_layer_attends_to(tiny_of, model_type):
    shape = tiny_of(model_type)[0].shape
    assert shape.sources == (0, 1, 2, 3, 2, 3)
    assert shape.lending == (2, 3) and shape.attending == (0, 1, 2, 3)
    assert [kind.borrows for kind in shape.layer_kinds] == [False] * 4 + [True] * 2
    assert shape.whole_prompts  # behind a piece, the ring of layer 2 has lost what layer 4 needs
    part = shape.of_layers([0, 1, 2, 4, 5])
    assert part.sources == (0, 1, 2, 2, 1)  # the last full layer stands for the one that is not there


def test_lent_keys_and_values_keep_native_bits(tmp_path, monkeypatch):
    sizes = {"hidden_size_per_layer_input": 64, "intermediate_size": 128}
    monkeypatch.setitem(OWN, "gemma4_text", OWN["gemma4_text"] | sizes)
    save_tiny(tmp_path, "gemma4_text")
    tokens = [
        run_wave(Checkpoint(tmp_path), replace(policy, bits=Bits(weights=8)), [[3, 4, 5, 6] * 9], 6, hardware=machine())
        for policy in (kv_only(), act_only(), replace(hybrid(0.5), weights=Placement(device=1.0)))
    ]
    assert tokens[0].tokens == tokens[1].tokens == tokens[2].tokens


def test_a_borrowing_layer_loads_and_recomputes_but_stores_nothing(tiny_of):
    checkpoint = tiny_of("gemma4_text")[0]
    result = run_wave(checkpoint, hybrid(0.5), [[3, 4, 5] * 15, [6, 7, 8, 9]], 3, hardware=machine())
    verbs = {layer: {} for layer in range(6)}
    for event in result.trace:
        if event.task.iteration == 2:
            verbs[event.task.layer][event.task.verb] = event.task.work
    for borrower, lender in ((4, 2), (5, 3)):
        for verb in ("load_kv", "load_act", "kv_gen"):
            assert verbs[borrower].get(verb) == verbs[lender].get(verb)
        assert verbs[borrower].keys() & {"load_kv", "load_act"}
        assert not verbs[borrower].keys() & set(STORING) and verbs[lender].keys() & set(STORING)


@pytest.mark.parametrize("policy", [hybrid(0.5), WIDER["disk"], Policy(cache={"kv@device": 0.5, "act@device": 0.5})])
def test_the_plan_of_memory_is_what_is_allocated(tiny_of, policy):
    shape = tiny_of("gemma4_text")[0].shape
    problem = Problem(shape=shape, dtype="float32", hardware=machine())
    wave = admit(problem, policy, Workload(np.array([9, 30, 17]), np.array([4, 4, 4])))
    sizes = buffer_sizes(wave)
    plan = memory_plan(problem, policy, sizes)
    buffers = Buffers(shape, policy, sizes, torch.float32, torch.device("cpu"))
    layers = {layer.data_ptr(): layer.nbytes for pool in buffers.pools.values() for layer in pool}
    planned = {tier: sum(size for part, size in plan[tier].items() if part.endswith(" pool")) for tier in plan}
    assert sum(layers.values()) == planned["device"] + planned["host"]
    assert buffers.disk_bytes == planned["disk"]
    assert plan["device"]["lent keys and values"] == 2 * sizes.hidden_rows * shape.kv_token_bytes(4)
    alone = replace(problem, shape=replace(shape, sources=()))
    more = memory_plan(alone, policy, buffer_sizes(admit(alone, policy, wave.workload)))
    for tier, parts in more.items():
        assert sum(size for part, size in parts.items() if part.endswith(" pool")) == 1.5 * planned[tier]


def test_a_prediction_loads_for_each_layer_and_stores_for_those_that_keep(tiny_of):
    shape = tiny_of("gemma4_text")[0].shape
    shape = replace(shape, attention=tuple(replace(kind, window=None) for kind in shape.attention))
    problem = Problem(shape=shape, dtype="float32", hardware=machine())
    moved = simulate(problem, kv_only(), 4, 32, 3).to_dict()["traffic_bytes"]
    row = shape.kv_token_bytes(4)
    assert moved["h2d"]["kv"] == pytest.approx(6 * 4 * (32 + 48) * row)  # whole blocks
    assert moved["d2h"]["kv"] == pytest.approx(4 * 4 * (32 + 2) * row)
    tasks = list(stream(admit(problem, kv_only(), Workload.uniform(4, 32, 3))))
    for verb, way in (("load_kv", "h2d"), ("store_kv", "d2h")):
        assert sum(task.work.link_bytes for task in tasks if task.verb == verb) == pytest.approx(moved[way]["kv"])


def test_borrowed_keys_with_selections_are_refused(tiny_of):
    checkpoint, _ = tiny_of("gemma4_text")
    policy = replace(kv_only(), selection=Selection("heavy_hitter", 0.5))
    with pytest.raises(
        InputError, match="selection heavy_hitter for a model whose layers attend to keys and values of"
    ):
        run_wave(checkpoint, policy, [[3, 4, 5]], 3, hardware=machine())
    shape = checkpoint.shape
    with pytest.raises(InputError, match=r"sources\[3\] is 4; it must be the layer itself, or an earlier one"):
        replace(shape, sources=(0, 1, 2, 4, 2, 3))
