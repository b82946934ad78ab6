"""Test the model of CUDA's caching allocator against torch's documentation, worked out by hand."""

from __future__ import annotations

import random

import pytest
from fake_cuda.caching import MIB, CachingAllocator, OutOfMemory


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB, 34 * MIB),  # a rest of 1 MiB stays with the block
    ],
)
def test_a_first_allocation_reserves_its_segment(size, allocated, reserved):
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


@pytest.mark.parametrize(
    ("size", "reserved"), [(1, 2 * MIB), (MIB + 1, 20 * MIB), (33 * MIB, 40 * MIB), (40 * MIB + 1, 60 * MIB)]
)
def test_an_expandable_segment_grows_by_pages(size, reserved):
    allocator = CachingAllocator(expandable=True)
    allocator.allocate(size)
    assert (allocator.allocated, allocator.reserved) == (-(-size // 512) * 512, reserved)


def test_the_smallest_block_that_is_large_enough_is_cut():
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(24 * MIB)
    keep = [allocator.allocate(12 * MIB)]
    allocator.free(large)
    allocator.free(small)
    keep.append(allocator.allocate(20 * MIB))  # in the 24
    keep.append(allocator.allocate(4 * MIB))  # in its rest
    assert allocator.reserved == 76 * MIB
    keep.append(allocator.allocate(39 * MIB + 512))  # the rest, below 1 MiB, stays with it
    assert allocator.reserved == 76 * MIB and allocator.allocated == 76 * MIB


def test_streams_have_caches_of_their_own():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(64 * MIB, "default"))
    allocator.allocate(64 * MIB, "compute")
    assert allocator.reserved == 128 * MIB
    allocator.allocate(64 * MIB, "default")
    assert allocator.reserved == 128 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_memory_in_use_by_another_stream_is_free_after_its_work(expandable):
    allocator = CachingAllocator(expandable=expandable)
    block = allocator.allocate(20 * MIB, "compute")
    allocator.record_stream(block, "d2h")
    allocator.free(block)
    assert allocator.allocated == 20 * MIB
    allocator.allocate(20 * MIB, "compute")
    assert allocator.reserved == 40 * MIB
    allocator.synchronize("d2h")
    allocator.allocate(20 * MIB, "compute")
    assert allocator.reserved == 40 * MIB and allocator.allocated == 40 * MIB


def test_a_full_allocator_frees_its_cache_before_it_fails():
    allocator = CachingAllocator(limit=100 * MIB)
    kept, gone = allocator.allocate(40 * MIB), allocator.allocate(50 * MIB)
    allocator.free(gone)
    allocator.allocate(60 * MIB)
    assert allocator.retries == 1 and allocator.reserved == 100 * MIB and not kept.free
    with pytest.raises(OutOfMemory):
        allocator.allocate(2 * MIB, "compute")
    assert allocator.retries == 2


def test_free_pages_between_tensors_are_given_back():
    allocator = CachingAllocator(expandable=True)
    first, middle, last = (allocator.allocate(size * MIB) for size in (30, 60, 30))
    allocator.free(middle)
    allocator.empty_cache()  # of 30 to 90 MiB the pages from 40 to 80
    assert allocator.reserved == 80 * MIB and not (first.free or last.free)
    allocator.allocate(50 * MIB)  # its pages come back where they were
    assert allocator.reserved == 120 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_never_overlap_and_all_memory_comes_back(expandable):
    generator, allocator, held = random.Random(0), CachingAllocator(expandable=expandable), []
    for turn in range(3000):
        if held and generator.random() < 0.5:
            block = held.pop(generator.randrange(len(held)))
            assert all(abs(other.address - block.address) >= min(other.size, block.size) for other in held)
            allocator.free(block)
        else:
            size = int(2 ** generator.uniform(0, 27))
            held.append(allocator.allocate(size, generator.choice("ab")))
            assert size <= held[-1].size
        assert allocator.allocated == sum(block.size for block in held) <= allocator.reserved
        if turn % 500 == 499:
            allocator.empty_cache()
    for block in held:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 0)
