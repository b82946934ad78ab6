"""Which representation each block has, and who owns the physical ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexhybrid.core.context.blocks import BLOCK_TOKENS, BlockEntries, BlockManager, BlockPool, Extent, ceil_blocks
from flexhybrid.core.errors import InputError

ENTRIES = ("act@device", "act@host", "kv@device", "kv@host")


@st.composite
def token_shares(draw):
    """Shares over one to four entries that add up to 1; entries of zero stay in."""
    weights = draw(st.lists(st.integers(0, 100), min_size=4, max_size=4).filter(any))
    return {entry: weight / sum(weights) for entry, weight in zip(ENTRIES, weights)}


def test_ceil_blocks():
    assert [ceil_blocks(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]
    assert ceil_blocks(np.array([0, 33])).tolist() == [0, 3]


def test_half_and_half_alternates_with_act_first():
    entries = BlockEntries({"kv@host": 0.5, "act@host": 0.5})
    assert entries.names == ("act@host", "kv@host")
    assert entries.entry_of(np.arange(4) * BLOCK_TOKENS).tolist() == [0, 1, 0, 1]
    assert entries.tokens(20).tolist() == [16, 4]  # the partial block is the second, a KV block


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


def test_positions_by_hand():
    entries = BlockEntries({"kv@host": 0.5, "act@host": 0.5})
    assert entries.positions(0, 18).tolist() == [*range(16), 32, 33]
    assert entries.positions(1, 17).tolist() == [*range(16, 32), 48]
    assert entries.positions(1, 0).tolist() == []


@given(token_shares(), st.lists(st.integers(0, 400), min_size=2, max_size=6))
def test_the_order_of_questions_does_not_matter(shares, lengths):
    asked_before = BlockEntries(shares)
    for length in lengths:
        asked_before.tokens(length)
    assert BlockEntries(shares).tokens(np.array(lengths)).tolist() == asked_before.tokens(np.array(lengths)).tolist()


# --- pools ------------------------------------------------------------------------------------------------------------


def owned_blocks(extents) -> list[int]:
    return [block for extent in extents for block in range(extent.first, extent.first + extent.count)]


@given(st.integers(0, 40), st.data())
def test_random_admissions_keep_the_pool_whole(num_blocks, data):
    pool, held = BlockPool(num_blocks), {}
    for request in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["reserve", "reserve", "grow", "release"]))
        if action == "reserve":
            count, gap = data.draw(st.integers(0, 12)), pool.largest_free()
            if count <= gap:
                held[request] = pool.reserve(request, count)
                assert held[request].count == count
            else:
                with pytest.raises(InputError, match=f"{count} neighbouring blocks .* {gap}"):
                    pool.reserve(request, count)
        elif held:
            owner = data.draw(st.sampled_from(sorted(held)))
            if action == "grow":
                before, count = held[owner], held[owner].count + data.draw(st.integers(0, 6))
                try:
                    held[owner] = pool.grow(owner, count)
                except InputError:
                    assert count - before.count > 0
                else:
                    assert held[owner].count == count and (not before.count or held[owner].first == before.first)
            else:
                pool.release(owner)
                del held[owner]
        pool.check()
        blocks = owned_blocks(held.values())
        assert len(blocks) == len(set(blocks)) <= num_blocks
        assert all(0 <= block < num_blocks for block in blocks)
        assert pool.num_free == num_blocks - len(blocks)
    for owner in list(held):
        pool.release(owner)
    pool.check()
    assert pool.largest_free() == num_blocks  # neighbours merged again


def test_no_blocks_can_be_reserved_from_a_full_and_from_an_empty_pool():
    pool = BlockPool(2)
    pool.reserve(1, 2)
    assert pool.reserve(2, 0).count == BlockPool(0).reserve(1, 0).count == 0
    pool.check()
    pool.release(2)
    pool.release(3)  # holds nothing: left alone
    pool.check()


def test_misuse_of_a_pool():
    pool = BlockPool(8)
    pool.reserve(1, 4)
    with pytest.raises(ValueError, match="already holds"):
        pool.reserve(1, 1)
    with pytest.raises(ValueError, match="cannot grow to 3"):
        pool.grow(1, 3)
    with pytest.raises(KeyError):
        pool.grow(2, 0)
    assert pool.reserve(2, 2) == Extent(4, 2) and pool.grow(2, 4) == Extent(4, 4)
    with pytest.raises(InputError, match="cannot grow to 5 blocks: those behind its 4 are taken"):
        pool.grow(1, 5)
    pool.check()


@pytest.mark.parametrize("spoil", ["leak", "twice", "outside"])
def test_the_integrity_check_sees_damage(spoil):
    pool = BlockPool(8)
    extent = pool.reserve(1, 4)
    if spoil == "leak":
        del pool._used[1]
    elif spoil == "twice":
        pool._used[2] = extent
    else:
        pool._used[2] = Extent(8, 1)
    with pytest.raises(AssertionError):
        pool.check()


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=8), st.integers(0, 15), st.integers(0, 15))
def test_admission_is_all_or_nothing(requests, kv_blocks, act_blocks):
    manager = BlockManager({"kv@host": kv_blocks, "act@host": act_blocks})
    admitted = {}
    for request, (kv, act) in enumerate(requests):
        before = {entry: pool.num_free for entry, pool in manager.pools.items()}
        if kv <= before["kv@host"] and act <= before["act@host"]:  # no releases, so no gaps
            admitted[request] = manager.admit(request, {"kv@host": kv, "act@host": act})
            assert [admitted[request][entry].count for entry in ("kv@host", "act@host")] == [kv, act]
        else:
            with pytest.raises(InputError, match=f"request {request}: no room in pool"):
                manager.admit(request, {"kv@host": kv, "act@host": act})
            assert {entry: pool.num_free for entry, pool in manager.pools.items()} == before
        manager.check()
    for request in range(len(requests)):
        manager.release(request)
    manager.check()
    assert {entry: pool.largest_free() for entry, pool in manager.pools.items()} == {
        "kv@host": kv_blocks,
        "act@host": act_blocks,
    }
