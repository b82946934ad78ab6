"""Packing: nobody lost, the bound kept, no more mini-batches than first come first served would make."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flexhybrid.core.context.blocks import BLOCK_TOKENS, BlockEntries
from flexhybrid.core.context.packing import pack, padded_tokens, split_representations

MIXES = [
    {"kv@host": 1.0},
    {"act@host": 1.0},
    {"kv@host": 0.5, "act@host": 0.5},
    {"kv@host": 0.3, "act@host": 0.4, "act@device": 0.3},
    {"kv@host": 0.7, "act@device": 0.1, "kv@device": 0.2},
]
LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=24)


def padded_by_hand(entries: BlockEntries, lengths) -> int:
    """B·max(KV) + B·max(ACT) + B, each in whole blocks, counted token by token."""
    most = {"kv": 0, "act": 0}
    for length in lengths:
        names = [entries.names[entry].split("@")[0] for entry in entries.entry_of(np.arange(length))]
        for name in most:
            most[name] = max(most[name], math.ceil(names.count(name) / BLOCK_TOKENS))
    return len(lengths) * ((most["kv"] + most["act"]) * BLOCK_TOKENS + 1)


@given(LENGTHS, st.sampled_from(MIXES), st.integers(1, 3000), st.sampled_from(["fifo", "balanced"]))
def test_every_request_once_and_the_bound_kept(lengths, mix, bound, packing):
    lengths, entries = np.array(lengths), BlockEntries(mix)
    groups = pack(lengths, entries, bound, packing)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or padded_by_hand(entries, lengths[group]) <= bound


@given(LENGTHS, st.sampled_from(MIXES), st.integers(1, 3000))
def test_balanced_never_needs_more_mini_batches_than_first_come(lengths, mix, bound):
    lengths, entries = np.array(lengths), BlockEntries(mix)
    balanced = pack(lengths, entries, bound, "balanced")
    assert len(balanced) <= len(pack(lengths, entries, bound, "fifo"))


def test_one_long_request_does_not_cut_up_the_short_ones():
    groups = pack(np.array([300] + [10] * 8), BlockEntries({"kv@host": 1.0}), 320)
    assert sorted(map(len, groups)) == [1, 8]


@given(st.integers(1, 60), st.integers(1, 300), st.sampled_from(MIXES), st.integers(100, 3000))
def test_uniform_lengths_make_mini_batches_of_equal_size(num_requests, length, mix, bound):
    sizes = [len(group) for group in pack(np.full(num_requests, length), BlockEntries(mix), bound)]
    assert max(sizes) - min(sizes) <= 1


@given(LENGTHS, st.integers(17, 1000))
def test_first_come_first_served_keeps_the_order_of_arrival(lengths, bound):
    groups = pack(np.array(lengths), BlockEntries({"kv@host": 1.0}), bound, "fifo")
    assert np.concatenate(groups).tolist() == list(range(len(lengths)))


@given(LENGTHS, st.sampled_from(MIXES))
def test_padded_tokens_agree_with_counting(lengths, mix):
    entries = BlockEntries(mix)
    kv, act = split_representations(entries, np.array(lengths))
    assert (kv + act).tolist() == lengths
    assert padded_tokens(kv, act) == padded_by_hand(entries, lengths)


def test_padded_tokens_worked_by_hand():
    # KV widest 17 -> 32, ACT widest 3 -> 16: two requests of 48 columns, and a new token each
    assert padded_tokens(np.array([17, 5]), np.array([0, 3])) == 2 * (32 + 16) + 2
    assert padded_tokens(np.array([]), np.array([])) == 0
