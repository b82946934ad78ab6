"""Packing: nobody lost, the bound kept, no more mini-batches than first come first served would make."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexhybrid.core.context import packing
from flexhybrid.core.context.blocks import BLOCK_TOKENS, BlockEntries
from flexhybrid.core.context.packing import imbalance, pack, padded_tokens, split_representations

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


@given(LENGTHS, st.sampled_from(MIXES), st.integers(1, 3000), st.floats(0.1, 10))
def test_balanced_never_needs_more_mini_batches_than_first_come(lengths, mix, bound, ratio):
    lengths, entries = np.array(lengths), BlockEntries(mix)
    balanced = pack(lengths, entries, bound, "balanced", (ratio, 1.0))
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


def test_imbalance_is_f_b_of_capture():
    assert imbalance(2.0, 2.0) == 1
    assert imbalance(3.0, 2.0) == imbalance(2.0, 3.0) == 1.5
    assert imbalance(0, 1.0) == imbalance(1.0, 0) == math.inf
    assert imbalance(0, 0) == 1


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3))
def test_imbalance_is_at_least_one_and_symmetric(a, b):
    assert imbalance(a, b) >= 1
    assert imbalance(a, b) == pytest.approx(imbalance(b, a))
    assert imbalance(a, b) == pytest.approx(max(a, b) / min(a, b))


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


@given(LENGTHS, st.sampled_from(MIXES), st.integers(300, 3000), st.floats(0.2, 5))
def test_exchanging_requests_never_worsens_the_worst_imbalance(lengths, mix, bound, ratio):
    lengths, entries = np.array(lengths), BlockEntries(mix)
    kv, act = split_representations(entries, lengths)

    def worst(groups) -> float:
        return max(imbalance(ratio * act[group].sum(), kv[group].sum()) for group in groups)

    indifferent = pack(lengths, entries, bound, "balanced", (0.0, 0.0))  # no balance to lower: the plain even cut
    assert worst(pack(lengths, entries, bound, "balanced", (ratio, 1.0))) <= worst(indifferent) + 1e-9


@given(
    st.lists(st.integers(1, 900), min_size=2, max_size=40),
    st.sampled_from([0.0, 0.2, 0.5, 0.9]),
    st.integers(300, 5000),
    st.floats(0.1, 10),
)
def test_balancing_never_pads_more(tokens, act_share, bound, gen_s):
    """Padding is computed and moved: a better F_b must not be bought with it."""
    entries = BlockEntries({"act@host": act_share, "kv@host": 1 - act_share})
    kv, act = split_representations(entries, np.array(tokens))

    def padding(groups):
        return sum(padded_tokens(kv[group], act[group]) for group in groups)

    order = np.argsort(-np.array(tokens), kind="stable")
    assert padding(pack(np.array(tokens), entries, bound, "balanced", (gen_s, 1.0))) <= padding(
        packing._even_cut(order, kv, act, bound)
    )


@given(
    st.lists(st.integers(1, 300), min_size=2, max_size=14),
    st.integers(1, 13),
    st.sampled_from([0.2, 0.5, 0.8]),
    st.integers(200, 3000),
    st.floats(0.1, 10),
)
def test_an_exchange_is_the_first_that_helps(tokens, cut, act_share, bound, gen_s):
    """All exchanges are weighed at once: against trying one after another."""
    entries = BlockEntries({"act@host": act_share, "kv@host": 1 - act_share})
    kv, act = split_representations(entries, np.array(tokens))
    cut = min(cut, len(tokens) - 1)
    a, b = np.arange(cut), np.arange(cut, len(tokens))

    def worse(*groups) -> float:
        return max(imbalance(gen_s * act[group].sum(), kv[group].sum()) for group in groups)

    def helps(new_a, new_b) -> bool:
        padded = [padded_tokens(kv[group], act[group]) for group in (new_a, new_b)]
        pads_no_more = sum(padded) <= padded_tokens(kv[a], act[a]) + padded_tokens(kv[b], act[b])
        return max(padded) <= bound and pads_no_more and worse(new_a, new_b) < 0.99 * worse(a, b)

    exchanges = ((np.sort(np.r_[a[a != i], j]), np.sort(np.r_[b[b != j], i])) for i in a for j in b)
    first = next((pair for pair in exchanges if helps(*pair)), None)
    found = packing._better_swap(a, b, np.stack([gen_s * act, kv * 1.0]), kv, act, bound)
    assert (found is None) == (first is None)
    if first is not None:
        assert [group.tolist() for group in found] == [group.tolist() for group in first]
