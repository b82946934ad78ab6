"""The links of a CPU: copies that are right, and a pace that is kept however late the thread wakes."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexhybrid.core.schedule.steps import Segment, block_runs
from flexhybrid.runtime.links import BACK_TO_BACK_S, CpuCopies, Pacer, copy_runs


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=8), st.integers(0, 3))
def test_block_copies_equal_a_plain_loop(extents, first_column):
    """Extents of any size and order, with gaps, against copying block by block."""
    generator = np.random.default_rng(0)
    first = np.cumsum([gap for gap, _ in extents]) + np.cumsum([0] + [count for _, count in extents[:-1]])
    count = np.array([count for _, count in extents])
    source = generator.integers(0, 255, (int((first + count).max()) + 1, 3, 4), dtype=np.uint8)
    target = np.zeros((len(extents), first_column + int(count.max()) + 1, 3, 4), dtype=np.uint8)
    expected = target.copy()
    for row in range(len(extents)):
        for block in range(count[row]):
            expected[row, first_column + block] = source[first[row] + block]
    copy_runs(target, source, block_runs(first, count, np.full_like(count, first_column)))
    assert (target == expected).all()


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8), st.booleans()
)
def test_a_block_table_names_the_blocks_that_its_runs_copy(extents, moves_all):
    """Rings that have turned by any number of blocks; padding is some block that is there."""
    tokens, spare, turned = (np.array(column) for column in zip(*extents, strict=True))
    reserved = -(-tokens // 16) + spare
    first = np.cumsum(np.r_[0, reserved[:-1] + 1])
    segment = Segment("kv@device", "kv", "device", first, tokens, turned, reserved, moves_all)
    table, pool = segment.block_table, np.arange(first[-1] + reserved[-1] + 1)[:, None]
    assert table.shape == (len(tokens), segment.buffer_blocks) and (table >= 0).all() and (table < len(pool)).all()
    copied = np.full((*table.shape, 1), -1)
    copy_runs(copied, pool, segment.runs)
    held = reserved if moves_all else segment.num_blocks
    there = np.arange(segment.buffer_blocks) < held[:, None]
    assert (table[there] == copied[..., 0][there]).all() and (copied[~there] == -1).all()


def test_evenly_spaced_extents_are_one_run():
    nowhere = np.zeros(4, dtype=int)
    assert block_runs(np.array([0, 10, 20, 30]), np.array([7, 7, 7, 7]), nowhere) == ((0, 4, 0, 0, 10, 7),)
    assert len(block_runs(np.array([0, 10, 21, 30]), np.array([7, 7, 7, 6]), nowhere)) == 3
    assert len(block_runs(np.array([0, 10, 20, 30]), np.array([7, 7, 7, 7]), np.array([0, 0, 1, 1]))) == 2


@pytest.mark.parametrize("size", (20_000, 200_000))
def test_back_to_back_copies_keep_the_rate(size):
    """0.9 to 1.02 of the pace over 50 ms of copies; a ratio, so a slow machine does not matter."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    best = 0.0
    for _ in range(5):
        copies = CpuCopies(0.1)
        start, count = time.perf_counter(), max(4, 5_000_000 // size)
        for _ in range(count):
            copies.copy_h2d(target, source)
        rate = size * count / (time.perf_counter() - start) / 0.1e9
        assert rate < 1.02, "no copy may outrun its pace"
        best = max(best, rate)
    assert best > 0.9
    assert (target == 1).all()


def test_a_late_wake_up_is_made_up_for():
    """The best of several tries: a busy machine may wake this thread late too."""
    shortest = 1.0
    for _ in range(8):
        pacer = Pacer(1e6)
        pacer.end(pacer.begin(), 10_000)  # 10 ms
        late = time.perf_counter() + 0.004
        while time.perf_counter() < late:  # the thread comes back 4 ms late
            pass
        pacer._ended = time.perf_counter()
        start = pacer.begin()
        pacer.end(start, 10_000)
        shortest = min(shortest, time.perf_counter() - start)
    assert shortest < 0.0085


def test_a_pause_earns_nothing():
    pacer = Pacer(1e6)
    pacer.end(pacer.begin(), 10_000)
    time.sleep(0.02 + 2 * BACK_TO_BACK_S)  # the link is idle
    start = pacer.begin()
    pacer.end(start, 10_000)
    assert time.perf_counter() - start >= 0.0099


def test_without_a_pace_nothing_sleeps():
    copies = CpuCopies()
    source, target = torch.ones(1000), torch.zeros(1000)
    start = time.perf_counter()
    copies.copy_h2d(target, source)
    copies.copy_d2h(source, target)
    assert time.perf_counter() - start < 0.05 and (target == 1).all()
