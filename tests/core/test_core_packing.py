"""Test packing: every request is kept, the bound holds, and there are no more mini-batches than in order of arrival."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexhybrid.core.context.blocks import BLOCK_TOKENS, BlockEntries
from flexhybrid.core.context.packing import imbalance, pack, packed, padded_tokens, split_representations
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.work import kv_gen
from sim.candidates import num_mini_batches

MIXES = [
    {"kv@host": 1.0},
    {"act@host": 1.0},
    {"kv@host": 0.5, "act@host": 0.5},
    {"kv@host": 0.3, "act@host": 0.4, "act@device": 0.3},
    {"kv@host": 0.7, "act@device": 0.1, "kv@device": 0.2},
]
LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=24)


def padded_by_hand(entries: BlockEntries, lengths) -> int:
    """Return B·max(KV) + B·max(ACT) + B, each in whole blocks, counted token by token."""
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
    assert padded_tokens(kv[:0], act[:0]) == 0


# ---- CAPTURE's F_b: a token of ACT takes 3 s to recompute, one of KV 2 s to load

SHAPE = shape_by_name("opt-30b")
LINES = {
    "compute": Line(s_per_flop=3.0 / kv_gen(SHAPE, 2, 1).flops),
    "h2d": Line(s_per_byte=2.0 / SHAPE.kv_token_bytes(2)),
}
PROBLEM = Problem(shape=SHAPE, hardware=Hardware("toy", "cuda", LINES))


def by_imbalance(mix: dict, lengths, bound: int) -> list[list[int]]:
    policy = Policy(cache=mix, packing="balance", max_mini_batch_tokens=bound)
    return [group.tolist() for group in packed(PROBLEM, policy, np.array(lengths))]


def test_imbalance_is_f_b_of_capture():
    assert imbalance(2.0, 2.0) == imbalance(0, 0) == 1
    assert imbalance(3.0, 2.0) == imbalance(2.0, 3.0) == 1.5
    assert imbalance(0, 1.0) == imbalance(1.0, 0) == math.inf


@given(LENGTHS, st.sampled_from(MIXES), st.integers(1, 3000))
def test_f_bs_greedy_skips_only_requests_that_worsen_it_or_do_not_fit(lengths, mix, bound):
    """The paper's loop is repeated over the remaining requests, counted token by token."""
    entries, left = BlockEntries(mix), list(range(len(lengths)))

    def worst(group) -> float:
        kv, act = split_representations(entries, np.array(lengths)[group])
        return imbalance(3.0 * act.sum(), 2.0 * kv.sum())

    for group in by_imbalance(mix, lengths, bound):
        assert group[0] == left[0]
        taken = group[:1]
        for request in left[1:]:
            wider = [*taken, request]
            joins = padded_by_hand(entries, np.array(lengths)[wider]) <= bound and worst(wider) <= worst(taken) + 1e-9
            assert joins == (request in group)
            taken = wider if joins else taken
        left = [request for request in left if request not in group]
    assert not left


@given(st.integers(1, 40), st.integers(1, 300), st.sampled_from(MIXES[:2]), st.integers(100, 3000))
def test_requests_of_one_length_are_cut_as_predictions_count_them(num_requests, length, mix, bound):
    sizes = [len(group) for group in by_imbalance(mix, [length] * num_requests, bound)]
    assert sizes == [len(group) for group in pack(np.full(num_requests, length), BlockEntries(mix), bound, "fifo")]
    assert (len(sizes), max(sizes)) == num_mini_batches(num_requests, length, 1, bound, "balance")


def test_f_b_needs_the_machines_seconds():
    with pytest.raises(InputError, match="run `flexhybrid profile` once.*--hardware.*hardware="):
        packed(Problem(shape=SHAPE), Policy(packing="balance"), np.array([8]))
