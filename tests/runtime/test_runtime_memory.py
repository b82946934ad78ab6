"""Test that an engine allocates what the budget check planned: per tier and by the parts' names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import save_llama
from strategies import runnable_policies

from flexhybrid.core.memory import memory_plan
from flexhybrid.core.model.attention import PLAIN, AttentionKind
from flexhybrid.core.model.layout import layer_layout
from flexhybrid.core.model.rope import Rope
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.kernels.sampling import greedy_plan
from flexhybrid.runtime.selections.hooks import SelectionHooks
from flexhybrid.runtime.selections.speculative import Speculation
from flexhybrid.runtime.storage import loader
from flexhybrid.runtime.storage.host_memory import HostMemory
from flexhybrid.runtime.storage.loader import Checkpoint, RandomWeights
from flexhybrid.runtime.storage.weights import DiskPlace, Weights
from sim import catalogue

MACHINE = catalogue.load("t4")  # it has a disk

SHAPES = [
    ModelShape("opt", "opt", 3, 64, 4, 4, 16, 128, 61, 128),
    ModelShape(
        "llama", "llama", 2, 64, 4, 2, 32, 128, 61, 128, gated_mlp=True, rotary=True, tied_head=False, bias=False,
        rope=Rope(),
    ),
]  # fmt: skip


def held_device(engine, executor) -> dict[str, int]:
    """Return bytes of the device's tensors by the plan's names."""
    buffers, weights, pools = engine.buffers, engine.weights, engine.buffers.pools
    on_device = [(space, pool) for space, pool in pools.items() if space not in buffers.strips]
    tables = executor.steps.rotary or ()
    return {
        "resident weights": sum(one.nbytes for one in weights.resident),
        "weight slots": sum(one.nbytes for one in engine.slots.device),
        "plain weights": engine.slots.plain.nbytes,
        "embedding and head": sum(one.nbytes for one in weights.outer.values()),
        "ACT buffers": buffers.loaded["act"].nbytes,
        "KV buffers": buffers.loaded["kv"].nbytes,
        "plain ACT": buffers.plain["act"].nbytes,
        "plain KV": buffers.plain["kv"].nbytes,
        "recomputed keys and values": buffers.generated.nbytes,
        "attention buffer": buffers.attention.nbytes,
        "staging": sum(one.nbytes for one in buffers.staging.values()),
        "attended rows": buffers.attended.nbytes,
        "hidden states": buffers.hidden_slots.nbytes,
        "kv pool": sum(layer.nbytes for space, pool in on_device if "kv" in kept_in(space) for layer in pool),
        "act pool": sum(layer.nbytes for space, pool in on_device if "act" in kept_in(space) for layer in pool),
        "token ids": executor.tokens.ids.nbytes,
        "positions": sum(one.nbytes for one in tables),
    } | held_by_selection(executor.selection)


def held_by_selection(selection: SelectionHooks) -> dict[str, int]:
    if not isinstance(selection, Speculation):
        return {"partial query weights": 0, "partial keys": 0, "indices": 0, "uses": 0}
    copies = selection.partial
    weights = (*copies.columns, copies.query_weights, copies.query_bias, copies.skew)
    return {
        "partial query weights": sum(tensor.nbytes for tensor in weights if tensor is not None),
        "partial keys": copies.keys.nbytes,
        "indices": selection.index.nbytes,
        "uses": selection.uses.table.nbytes if selection.uses else 0,
    }


def kept_in(space: str) -> str:
    """Return the representation of a pool."""
    return space.split(".")[-1].split("@")[0]


@settings(max_examples=60)
@given(
    st.sampled_from(SHAPES), runnable_policies(), st.sampled_from(("float32", "bfloat16")),
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 40)), min_size=1, max_size=6),
    st.sampled_from(((PLAIN,), (AttentionKind(20),), (AttentionKind(20), PLAIN))),
)  # fmt: skip
def test_an_engine_allocates_what_was_planned(tmp_path_factory, shape, policy, dtype, lengths, attention):
    if policy.selection.method == "none":
        shape = replace(shape, attention=attention)
    p = {"float32": 4, "bfloat16": 2}[dtype]
    workload = Workload(*(np.array(numbers) for numbers in zip(*lengths, strict=True)))
    wave = admit(Problem(shape=shape, dtype=dtype, hardware=MACHINE), policy, workload)
    sizes, place = buffer_sizes(wave), DiskPlace(tmp_path_factory.getbasetemp() / "scratch")
    plan = memory_plan(Problem(shape=shape, dtype=dtype, device="cpu"), policy, sizes)
    weights = Weights(shape, RandomWeights(shape), dtype, torch.device("cpu"), policy, place)
    engine = Engine(weights, policy, sizes, num_threads=1, disk=place)
    try:
        prompts = [[3] * prompt for prompt, _ in lengths]
        executor = engine.executor(wave, prompts, greedy_plan(len(prompts)))
        on_host = (weights.host_memory, engine.buffers.host_memory, engine.copies.host_memory)
        kept = {part: size for part, size in plan["host"].items() if part != "workspace"}  # that is of one verb
        assert sum(one.allocated_bytes for one in on_host) == sum(kept.values())
        pages = weights.disk_starts[-1] - plan["disk"].get("weights", 0)  # each layer begins on a page
        on_disk = sum(space.num_bytes for space in (weights.disk, engine.disk) if space)
        assert on_disk - pages == sum(plan["disk"].values())
        for part, size in held_device(engine, executor).items():
            planned = plan["device"].get(part, 0)
            if part in ("hidden states", "positions"):  # beside tensors that live from verb to verb
                assert size <= planned, part
            elif part == "token ids":  # the last token is in the table, and never cached
                assert size == planned + 8 * len(lengths)
            elif part == "embedding and head":
                assert size == shape.embedding_bytes(p)
            else:
                assert size == planned, part
    finally:
        engine.close()
        weights.close()


@pytest.mark.parametrize("size", [1, 4096, 12345])
def test_host_memory_counts_what_it_gives(size):
    memory = HostMemory(pinned=False)
    memory.bytes(size)
    assert memory.allocated_bytes == size


def test_weights_let_the_checkpoint_s_files_go(tmp_path):
    save_llama(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    policy = Policy("host", Placement(host=1.0), cache={"kv@host": 1.0})
    weights = Weights(checkpoint.shape, checkpoint, "float32", torch.device("cpu"), policy)
    del checkpoint
    maps = Path("/proc/self/maps")
    assert weights.outer and not (maps.is_file() and str(tmp_path) in maps.read_text())


@pytest.mark.parametrize("shape", SHAPES)
def test_random_weights_come_some_rows_at_a_time(monkeypatch, shape):
    """No piece on the device is larger than one draw, or than a row."""
    whole = {name: list(tensor.shape) for name, tensor in RandomWeights(shape).outer_tensors()}
    sizes = {spot.name: spot.rows for spot in layer_layout(shape, 2).spots}
    monkeypatch.setattr(loader, "DRAWN_AT_A_TIME", 1000)
    source, rows, drawn = RandomWeights(shape), dict.fromkeys(sizes, 0), []
    own = source._random
    monkeypatch.setattr(source, "_random", lambda name, size: drawn.append(size) or own(name, size))
    for name, _, tensor in source.layer_tensors(0):
        rows[name] += len(tensor)
    assert rows == sizes
    outer = dict(source.outer_tensors())
    assert {name: list(tensor.shape) for name, tensor in outer.items()} == whole
    assert all(tensor.std() > 0.01 for tensor in outer.values() if tensor.dim() > 1)
    assert max(np.prod(size) for size in drawn) <= 1000 and len(drawn) > len(sizes) + len(whole)
