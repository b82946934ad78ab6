"""Test the links of a CPU: correct copies, and a pace that is kept even if the thread wakes late."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexhybrid.core.schedule.steps import Segment, block_runs
from flexhybrid.runtime import links
from flexhybrid.runtime.links import BACK_TO_BACK_S, CpuCopies, Pacer, copy_runs


def tables(first, count) -> np.ndarray:
    """Draw rows of ``count`` neighbouring blocks from ``first`` on."""
    return np.asarray(first)[:, None] + np.arange(max(1, max(count)))


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8),
    st.booleans(),
    st.sampled_from(("kv", "act")),
)
def test_a_block_table_names_the_blocks_that_its_runs_copy(extents, moves_all, representation):
    """Rings have turned by any number of blocks; padding is any existing block. ACT has no padding."""
    tokens, spare, turned = (np.array(column) for column in zip(*extents, strict=True))
    reserved = -(-tokens // 16) + spare
    first = np.cumsum(np.r_[0, reserved[:-1] + 1])
    held_blocks = tables(first, reserved)
    segment = Segment("any", representation, "device", held_blocks, tokens, turned, reserved, moves_all)
    table, pool = segment.block_table, np.arange(first[-1] + reserved[-1] + 1)[:, None]
    assert (table >= 0).all() and (table < len(pool)).all()
    copied = np.full((*table.shape, 1), -1)
    copy_runs(copied, pool, segment.runs)
    there = copied[..., 0] >= 0
    assert (table[there] == copied[..., 0][there]).all()
    moved = reserved if moves_all else -(-tokens // 16)
    assert there.sum() == moved.sum() and (there.all() or representation == "kv" or len({*moved}) == 1)
    for request, count in enumerate(moved.tolist()):
        ring = [held_blocks[request, (turned[request] + i) % reserved[request]] for i in range(count)]
        assert copied.reshape(-1)[segment.buffer_table[request, :count]].tolist() == ring


def test_evenly_spaced_extents_are_one_run():
    sevens = np.array([7, 7, 7, 7])
    assert block_runs(tables([0, 10, 20, 30], sevens), sevens) == ((0, 4, 0, 0, 10, 7),)
    assert len(block_runs(tables([0, 10, 21, 30], sevens), np.array([7, 7, 7, 6]))) == 3
    halves = np.concatenate([tables([0, 10, 20, 30], [3]), tables([50, 60, 70, 80], [4])], axis=1)
    assert block_runs(halves, sevens) == ((0, 4, 0, 0, 10, 3), (0, 4, 3, 50, 10, 4))


class LateClock:
    """Time that only sleeping advances; every sleep lasts a little longer than requested."""

    def __init__(self, late_s: float = 0.0):
        self.now, self.late_s, self.num_sleeps = 1000.0, late_s, 0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.num_sleeps += 1
        self.now += seconds + self.late_s


@pytest.fixture
def clock(monkeypatch) -> LateClock:
    clock = LateClock()
    monkeypatch.setattr(links, "time", clock)
    return clock


@pytest.mark.parametrize("size", (20_000, 200_000))
def test_back_to_back_copies_keep_the_rate(size, clock):
    """The rate is 0.99 to 1 of the pace over 50 ms, although each sleep of 0.2 to 2 ms lasts 0.1 ms longer."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    clock.late_s = 1e-4
    copies, start, count = CpuCopies(0.1), clock.now, 5_000_000 // size
    for _ in range(count):
        copies.copy_h2d(target, source)
    assert clock.num_sleeps == count
    assert 0.99 < size * count / (clock.now - start) / 0.1e9 <= 1.0, "no copy may outrun its pace"
    assert (target == 1).all()


def test_a_lane_that_comes_late_costs_its_link_nothing(clock, monkeypatch):
    """Copies of 10 ms are each ready when the one before has ended; their thread starts each 3 ms late."""
    pacer, start = Pacer(1e6), clock.now
    for number in range(10):
        monkeypatch.setattr(links.TURN, "ready_s", start + 0.010 * number)
        clock.now += 0.003
        pacer.end(pacer.begin(), 10_000)
    assert clock.now - start == pytest.approx(0.100)
    monkeypatch.setattr(links.TURN, "ready_s", clock.now + 0.002)  # 2 ms in which the link has nothing to copy
    clock.now += 0.004
    pacer.end(pacer.begin(), 10_000)
    assert clock.now - start == pytest.approx(0.112)
    monkeypatch.setattr(links.TURN, "ready_s", clock.now)
    clock.now += 1.0  # the machine was away
    pacer.end(pacer.begin(), 30_000)
    assert clock.now - start == pytest.approx(0.112 + 1.0 + 0.030 - links.MOST_LATE_S)


def test_a_pause_earns_nothing(clock):
    pacer = Pacer(1e6)
    pacer.end(pacer.begin(), 10_000)
    clock.now += 2 * BACK_TO_BACK_S  # the link is idle
    start = pacer.begin()
    pacer.end(start, 10_000)
    assert clock.now - start == pytest.approx(0.010)


def test_without_a_pace_nothing_sleeps(clock):
    copies = CpuCopies()
    source, target = torch.ones(1000), torch.zeros(1000)
    copies.copy_h2d(target, source)
    copies.copy_d2h(source, target)
    assert clock.num_sleeps == 0 and (target == 1).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.int64))
@pytest.mark.parametrize("strided", ("neither", "target", "source", "both"))
def test_copies_do_not_touch_what_lies_between_rows(dtype, strided):
    """Contiguous memory is copied as a whole, rows with gaps are not."""
    memories = [torch.zeros(5, 7, dtype=dtype), torch.arange(35).view(5, 7).to(dtype) + 1]
    target, source = (
        memory[:, :3] if strided in (name, "both") else memory.view(-1)[:15].view(5, 3)
        for name, memory in zip(("target", "source"), memories, strict=True)
    )
    copies = CpuCopies()
    for copy in (copies.copy_h2d, copies.copy_d2h):
        target.zero_()
        copy(target, source)
        assert (target == source).all() and (memories[0] != 0).sum() == 15
