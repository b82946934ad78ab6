"""Loads of cache blocks: one CUDA call a run, against numpy byte by byte; and copies of OPT-6.7B."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.plan import stream
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.schedule.steps import BlockRun, block_runs
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime import buffers, cuda
from flexhybrid.runtime.cuda import CudaCopies
from flexhybrid.runtime.links import as_bytes, copy_runs
from flexhybrid.runtime.selections.hooks import SelectionHooks
from flexhybrid.runtime.verbs import VERB_FUNCTIONS
from sim.presets import act_only, hybrid, kv_only

STREAM = 77


class Runtime:
    """cudaMemcpy2DAsync as CUDA documents it, over memory of the host; what lies outside of the tensors is refused."""

    def __init__(self, target: torch.Tensor, pool: torch.Tensor):
        self.target, self.pool, self.calls = target, pool, 0

    def copy(self, to, to_pitch, source, source_pitch, width, height, kind, stream) -> int:
        self.calls += 1
        assert kind == 1 and stream == STREAM
        if width > min(to_pitch, source_pitch) or max(to_pitch, source_pitch) >= 2**31:
            return 12  # cudaErrorInvalidPitchValue
        for start, pitch, tensor in ((to, to_pitch, self.target), (source, source_pitch, self.pool)):
            begin = tensor.data_ptr()
            assert begin <= start and start + (height - 1) * pitch + width <= begin + tensor.nbytes
        for row in range(height):
            ctypes.memmove(to + row * to_pitch, source + row * source_pitch, width)
        return 0


@pytest.fixture
def copied(monkeypatch):
    """Return a function that loads runs by way of the fake runtime, and returns it with what came."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))

    def copy(target: torch.Tensor, pool: torch.Tensor, runs: tuple[BlockRun, ...]) -> Runtime:
        runtime = Runtime(target, pool)
        monkeypatch.setattr(cuda, "memcpy_2d", lambda: runtime.copy)
        CudaCopies().copy_blocks_h2d(target, pool, runs)
        return runtime

    return copy


def case(seed: int, even: bool) -> tuple[torch.Tensor, torch.Tensor, tuple[BlockRun, ...]]:
    """A pool of blocks, and the runs of some requests' blocks in it."""
    generator = np.random.default_rng(seed)
    batch, columns = generator.integers(1, 9, 2).tolist()
    counts = np.full(batch, columns) if even else generator.integers(0, columns + 1, batch)
    spare = int(generator.integers(0, 3))
    table = np.arange(batch)[:, None] * (columns + spare) + np.arange(columns) + generator.integers(0, 4)
    if not even and generator.random() < 0.5:
        table = generator.permutation(batch * columns + 4)[: batch * columns].reshape(batch, columns)
    pool = torch.randint(0, 256, (int(table.max()) + 1, 2, 3, 16, 4), dtype=torch.uint8).view(torch.float16)
    return torch.zeros(batch, columns, 2 * 3 * 16 * 2, dtype=torch.float16), pool, block_runs(table, counts)


@pytest.mark.parametrize("seed", range(40))
def test_a_load_is_one_call_a_run_and_copies_what_numpy_copies(copied, seed):
    target, pool, runs = case(seed, even=seed % 2 == 0)
    wanted, plain = target.clone(), target.clone()
    copy_runs(as_bytes(wanted), as_bytes(pool.flatten(1)), runs)
    assert copied(target, pool, runs).calls == len(runs)
    cuda._copy_by_requests(plain, pool.flatten(1), runs)  # where torch has no such call
    for found in (target, plain):
        assert np.array_equal(as_bytes(found), as_bytes(wanted))
    if seed % 2 == 0:
        assert len(runs) == 1


def test_rows_that_overlap_or_lie_too_far_apart_are_copied_one_by_one(copied, monkeypatch):
    """CUDA takes no pitch below a row's width, and none of 2 GiB."""
    pool = torch.randint(0, 256, (12, 1, 1, 16, 4), dtype=torch.uint8)
    for run, pitches in ((BlockRun(0, 3, 0, 1, 2, 3), 2**31), (BlockRun(0, 3, 0, 0, 4, 3), 4 * 64)):
        monkeypatch.setattr(cuda, "PITCHES", pitches)
        target, wanted = torch.zeros(2, 3, 3, 64, dtype=torch.uint8)
        copy_runs(as_bytes(wanted), as_bytes(pool.flatten(1)), (run,))
        assert copied(target, pool, (run,)).calls == 3 and torch.equal(target, wanted)


def test_a_refusal_of_the_runtime_is_reported(monkeypatch):
    target, pool, runs = case(0, even=True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(cuda, "memcpy_2d", lambda: lambda *_: 700)
    with pytest.raises(RuntimeError, match="cudaMemcpy2DAsync refused .* error 700"):
        CudaCopies().copy_blocks_h2d(target, pool, runs)


SHAPE = ModelShape(
    "opt-tiny",
    "opt",
    num_layers=2,
    hidden=64,
    num_heads=1,
    num_kv_heads=1,
    head_dim=64,
    ffn=64,
    vocab=64,
    max_positions=2048,
)
BATCH, PROMPTS, GENERATED = 32, (256, 512), 128
TURN = 2 * BLOCK_TOKENS  #: iterations in which a half-and-half cache fills a block of both entries
LOADS, STORES = ("load_kv", "load_act"), ("store_kv", "store_act")
LEAST = {"loads": 2**20, "stores": 2**16}  #: bytes


class CountCopies(TorchDispatchMode):
    """Collects the bytes of every copy."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def rows(self, *sizes: int) -> int:
        """Stand in for ``cuda.memcpy_2d``: a call copies a run of blocks."""
        _, _, _, _, width, height, _, _ = sizes
        self.sizes.append(width * height)
        return 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].nbytes)
        return function(*args, **(kwargs or {}))


def copies_of(wave: Wave) -> dict[str, list[int]]:
    """Return the bytes of each copy call of TURN iterations in one layer: {"loads": […], "stores": […]}."""
    meta = SimpleNamespace(zeros=lambda size, dtype: torch.empty(size, dtype=dtype, device="meta"))
    with patch.object(buffers, "HostMemory", lambda pinned: meta):
        held = buffers.Buffers(wave.shape, wave.policy, buffer_sizes(wave), torch.float16, torch.device("meta"))
    executor = SimpleNamespace(buffers=held, copies=CudaCopies(), selection=SelectionHooks())
    sizes: dict[str, list[int]] = {"loads": [], "stores": []}
    for task in stream(wave, first_iteration=GENERATED):
        if task.layer != 1:
            continue
        for direction, verbs in (("loads", LOADS), ("stores", STORES)):
            if task.verb in verbs:
                counted = CountCopies()
                calls = patch.object(cuda, "memcpy_2d", lambda counted=counted: counted.rows)
                with calls, patch.object(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0)), counted:
                    VERB_FUNCTIONS[task.verb](executor, task)
                sizes[direction] += counted.sizes
    return sizes


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
    wave = admit(Problem(shape=SHAPE, dtype="float16"), policy, workload)
    found = copies_of(wave)
    assert sum(found["stores"]) == 3 * stored
    tasks = [task for task in stream(wave, first_iteration=GENERATED) if task.layer == 1]
    assert sum(found["loads"]) == sum(task.work.link_bytes for task in tasks if task.verb in LOADS)
    assert len(found["stores"]) == sum(task.work.num_copies for task in tasks if task.verb in STORES)
