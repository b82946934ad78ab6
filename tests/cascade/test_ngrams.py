"""Counted n-grams: chances against a plain count of the text, and the file that holds them."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import token_ids
from experiments.training.ngrams import BITS, FILE, NGramModel, NGrams

SIZE = 1 << BITS


def plain_chance(texts: tuple[list[int], list[int]], context: list[int], word: int) -> float:
    """The chance by its definition, from the longest context down."""
    behind = Counter(
        text[at + len(context)]
        for text in texts
        for at in range(len(text) - len(context))
        if text[at : at + len(context)] == context
    )
    before = plain_chance(texts, context[1:], word) if context else 1 / SIZE
    if not behind:
        return before
    return (behind[word] + len(behind) * before) / (behind.total() + len(behind))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.lists(st.integers(0, 5), max_size=9))
def test_chances_are_those_of_a_plain_count(text, context):
    chances = NGrams.of(np.array(text), least_count=(1, 1, 1)).chances(context)
    assert chances.sum() == pytest.approx(1) and (chances > 0).all()
    for word in range(7):
        assert chances[word] == pytest.approx(plain_chance((text, context), context[-2:], word))


def test_rare_n_grams_are_left_out_and_the_file_holds_the_rest(tmp_path):
    text = np.random.default_rng(0).integers(0, 30, size=5000) ** 2 % SIZE
    counted = NGrams.of(text, (1, 2, 3))
    assert all(counts.min() >= least for counts, least in zip(counted.counts, (1, 2, 3)))
    counted.save(tmp_path / "x.npz")
    read = NGrams.load(tmp_path / "x.npz")
    for name in ("keys", "counts"):
        assert all(np.array_equal(a, b) for a, b in zip(getattr(read, name), getattr(counted, name), strict=True))
    assert read.num_counts == sum(map(len, counted.keys))


def test_the_shipped_table_finishes_what_is_common():
    model = NGramModel("ngrams", NGrams.load(FILE))
    found = model.predict(["    def close(self", token_ids("        else")])
    assert found.outputs == ["):", ":"]
    assert found.logits.shape == (2, 1, 10) and (np.diff(found.logits, axis=-1) <= 0).all()
    np.testing.assert_array_less(np.exp(found.logits).sum(axis=-1), 1)
