"""Loads of cache blocks: one call of CUDA a run, against numpy's copy of the same runs, byte by byte."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flexhybrid.core.schedule.steps import BlockRun, block_runs
from flexhybrid.runtime import cuda
from flexhybrid.runtime.cuda import CudaCopies
from flexhybrid.runtime.links import as_bytes, copy_runs

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


def test_what_the_runtime_refuses_is_told(monkeypatch):
    target, pool, runs = case(0, even=True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(cuda, "memcpy_2d", lambda: lambda *_: 700)
    with pytest.raises(RuntimeError, match="cudaMemcpy2DAsync refused .* error 700"):
        CudaCopies().copy_blocks_h2d(target, pool, runs)


def test_a_torch_without_cuda_has_no_such_call():
    assert torch.version.cuda is not None or cuda.memcpy_2d() is None
