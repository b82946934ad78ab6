"""Test counted n-grams: chances against a plain count of the text, and the shipped table."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import token_ids
from experiments.training.ngrams import BITS, FILE, NGramModel, NGrams

SIZE = 1 << BITS


def counted(text: list[int], longest: int) -> NGrams:
    """Return the text's n-grams after contexts of up to ``longest`` tokens."""
    keys, counts = [], []
    for length in range(longest + 1):
        packed = [
            sum(token << BITS * (length - i) for i, token in enumerate(text[at : at + length + 1]))
            for at in range(len(text) - length)
        ]
        found, times = np.unique(np.array(packed, dtype=np.int64), return_counts=True)
        keys.append(found)
        counts.append(times)
    return NGrams(tuple(keys), tuple(counts))


def plain_chance(texts: tuple[list[int], list[int]], context: list[int], word: int) -> float:
    """Return the chance by its definition, from the longest context down."""
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
    chances = counted(text, 2).chances(context)
    assert chances.sum() == pytest.approx(1) and (chances > 0).all()
    for word in range(7):
        assert chances[word] == pytest.approx(plain_chance((text, context), context[-2:], word))


def test_the_shipped_table_completes_common_beginnings():
    model = NGramModel("ngrams", NGrams.load(FILE))
    found = model.predict(["    def close(self", token_ids("        else")])
    assert found.outputs == ["):", ":"]
    assert found.logits.shape == (2, 1, 10) and (np.diff(found.logits, axis=-1) <= 0).all()
    np.testing.assert_array_less(np.exp(found.logits).sum(axis=-1), 1)
