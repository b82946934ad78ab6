"""Test the representation of each block, and the owners of physical blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexhybrid.core.context.blocks import (
    BLOCK_TOKENS,
    BlockEntries,
    BlockManager,
    BlockPool,
    BlockSpan,
    ceil_blocks,
    most_dealt,
    window_blocks,
)
from flexhybrid.core.errors import InputError
from flexhybrid.core.schedule.steps import block_runs

ENTRIES = ("act@device", "act@host", "kv@device", "kv@host")


@st.composite
def token_shares(draw):
    """Draw shares of one to four entries that add up to 1; entries with a share of zero remain."""
    weights = draw(st.lists(st.integers(0, 100), min_size=4, max_size=4).filter(any))
    return {entry: weight / sum(weights) for entry, weight in zip(ENTRIES, weights)}


@given(token_shares(), st.integers(1, 40))
def test_no_run_of_blocks_has_more_of_an_entry_than_is_reserved_for_it(shares, span):
    entries = BlockEntries(shares)
    dealt = entries.dealt(np.arange(400 + span))
    most = (dealt[span:] - dealt[:-span]).max(axis=0)
    reserved = np.array(most_dealt(entries.names, [shares[entry] for entry in entries.names], span))
    assert (most <= reserved).all() and (reserved <= most + 1).all() and (len(most) > 1 or most == reserved)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 18, 33, 128])
def test_a_window_spans_at_most_window_blocks(window):
    first = np.arange(BLOCK_TOKENS)
    assert window_blocks(window) == ((first + window - 1) // BLOCK_TOKENS + 1).max()


@given(token_shares(), st.integers(1, 300))
def test_every_kind_stays_within_one_block_or_so_of_its_share(shares, num_blocks):
    entries = BlockEntries(shares)
    assert entries.names == tuple(entry for entry in ENTRIES if shares[entry] > 0)
    wanted = np.arange(num_blocks + 1)[:, None] * np.array([shares[entry] for entry in entries.names])
    given_blocks = entries.held(np.arange(num_blocks + 1) * BLOCK_TOKENS)
    assert (given_blocks.sum(1) == np.arange(num_blocks + 1)).all()
    # ACT against KV is rounded once: half a block. Within a representation its share of that, and half a block again.
    assert np.abs(given_blocks - wanted).max() <= 1 + 1e-6
    for representation in ("act", "kv"):
        members = [i for i, entry in enumerate(entries.names) if entry.startswith(representation)]
        assert np.abs((given_blocks - wanted)[:, members].sum(1)).max() <= 0.5 + 1e-6
    assert (np.diff(given_blocks, axis=0) >= 0).all()


@given(token_shares(), st.lists(st.integers(0, 700), min_size=1, max_size=5))
def test_counts_agree_with_counting_token_by_token(shares, lengths):
    entries = BlockEntries(shares)
    kind_of_token = entries.entry_of(np.arange(max(lengths) + 1))
    for first in range(0, max(lengths) + 1, BLOCK_TOKENS):  # one entry a block
        assert len(set(kind_of_token[first : first + BLOCK_TOKENS].tolist())) == 1
    expected = [np.bincount(kind_of_token[:length], minlength=len(entries.names)).tolist() for length in lengths]
    assert entries.tokens(np.array(lengths)).tolist() == expected
    assert [entries.tokens(length).tolist() for length in lengths] == expected
    blocks = ceil_blocks(np.array(lengths))
    first_tokens = kind_of_token[::BLOCK_TOKENS]
    assert entries.held(blocks * BLOCK_TOKENS).tolist() == [
        np.bincount(first_tokens[:count], minlength=len(entries.names)).tolist() for count in blocks
    ]


@given(token_shares(), st.integers(0, 90))
def test_positions_undo_kind_of_and_stored(shares, num_tokens):
    entries = BlockEntries(shares)
    for entry in range(len(entries.names)):
        positions = entries.positions(entry, num_tokens)
        assert positions.shape == (num_tokens,)
        assert (entries.entry_of(positions) == entry).all()
        assert (entries.stored(positions)[:, entry] == np.arange(num_tokens)).all()
        assert (np.diff(positions) > 0).all()


# --- pools ------------------------------------------------------------------------------------------------------------


def blocks_of(runs) -> list[int]:
    return [block for run in runs for block in range(run.first, run.end)]


@given(st.integers(0, 40), st.integers(0, 9), st.data())
def test_random_takes_keep_the_pool_whole(num_blocks, first, data):
    pool, held = BlockPool(num_blocks, first), {}
    for _ in range(data.draw(st.integers(1, 25))):
        request, count = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 12))
        if data.draw(st.booleans()):
            before, free, gaps = held.get(request, []), pool.num_free, [gap.count for gap in pool.free]
            if count > free:
                with pytest.raises(InputError, match=f"{count} blocks asked for, {free} are free"):
                    pool.take(request, count)
            else:
                runs = pool.take(request, count)
                held[request] = blocks_of(runs)
                assert held[request][: len(before)] == before and len(held[request]) == len(before) + count
                if not before and count and count <= max(gaps):
                    assert len(runs) == 1  # no copy more than the gaps make necessary
        elif data.draw(st.booleans()):
            pool.give_up(request, count := min(count, len(held.get(request, []))))
            held[request] = held.get(request, [])[: len(held.get(request, [])) - count]
            assert blocks_of(pool.held.get(request, [])) == held[request]
        else:
            pool.release(request)
            held.pop(request, None)
        pool.check()
        blocks = sorted(block for of_request in held.values() for block in of_request)
        assert len(blocks) == len(set(blocks)) and all(first <= block < first + num_blocks for block in blocks)
        assert pool.num_free == num_blocks - len(blocks)
    for request in list(held):
        pool.release(request)
    pool.check()
    assert [gap.count for gap in pool.free] == [num_blocks] * (num_blocks > 0)  # neighbours merged again


def test_a_request_grows_in_place_where_it_can():
    pool = BlockPool(12)
    assert blocks_of(pool.take(1, 2)) == [0, 1] and blocks_of(pool.take(2, 2)) == [2, 3]
    assert blocks_of(pool.take(2, 3)) == [2, 3, 4, 5, 6] and len(pool.held[2]) == 1
    assert blocks_of(pool.take(1, 1)) == [0, 1, 7]
    pool.release(2)
    assert blocks_of(pool.take(1, 2)) == [0, 1, 7, 8, 9]  # behind its last block, not in front of it
    assert blocks_of(pool.take(3, 6)) == [2, 3, 4, 5, 6, 10]  # of two gaps that are both too small


@pytest.mark.parametrize("spoil", ["leak", "twice", "outside", "count"])
def test_the_integrity_check_sees_damage(spoil):
    pool = BlockPool(8)
    pool.take(1, 4)
    if spoil == "leak":
        del pool.held[1]
    elif spoil == "count":
        pool.num_free += 1
    else:
        pool.held[2] = [BlockSpan(0, 4) if spoil == "twice" else BlockSpan(8, 1)]
    with pytest.raises(AssertionError):
        pool.check()


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=8), st.integers(0, 15), st.integers(0, 15))
def test_a_manager_gives_all_or_nothing(requests, kv_blocks, act_blocks):
    manager = BlockManager({"kv@host": kv_blocks, "act@host": act_blocks})
    for request, (kv, act) in enumerate(requests):
        before, counts = {e: pool.num_free for e, pool in manager.pools.items()}, {"kv@host": kv, "act@host": act}
        if kv <= before["kv@host"] and act <= before["act@host"]:
            manager.take(request, counts)
            assert [len(manager.blocks_of(entry, request)) for entry in ("kv@host", "act@host")] == [kv, act]
        else:
            with pytest.raises(InputError, match=f"request {request}: no room in pool"):
                manager.take(request, counts)
            assert {entry: pool.num_free for entry, pool in manager.pools.items()} == before
        manager.check()
    for request in range(len(requests)):
        manager.release(request)
    manager.check()
    assert [pool.num_free for pool in manager.pools.values()] == [kv_blocks, act_blocks]


@given(st.lists(st.lists(st.integers(0, 30), unique=True, max_size=9), min_size=1, max_size=6), st.integers(1, 9))
def test_runs_bring_each_block_to_its_column(rows, width):
    """The result is compared with reading a table cell by cell."""
    counts = np.array([min(len(row), width) for row in rows])
    table = np.array([[*row, *[0] * 9][:width] for row in rows])
    brought = {}
    for run in block_runs(table, counts):
        for i in range(run.rows):
            for j in range(run.blocks):
                place = run.row + i, run.column + j
                assert place not in brought
                brought[place] = run.first + i * run.stride + j
    assert brought == {(r, c): int(table[r, c]) for r in range(len(rows)) for c in range(counts[r])}
