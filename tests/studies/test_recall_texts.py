"""Test texts of facts and queries: each fact is told once and can be looked up, at any size."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.studies import recall_texts as recall
from experiments.studies.recall_study import MODEL
from experiments.studies.recall_texts import Sizes
from flexhybrid.requests import load_tokenizer


@given(st.integers(1, 40), st.integers(0, 20), st.data(), st.integers(0, 2**32))
def test_a_text_asks_for_different_facts_that_it_has_told(num_facts, num_filler, data, seed):
    sizes = Sizes(num_facts, num_filler, data.draw(st.integers(1, num_facts)))
    texts = recall.draw_texts(sizes, 3, np.random.default_rng(seed))
    assert texts.shape == (3, sizes.tokens)
    words = recall.words()
    for text in texts.tolist():
        begin, *told = (words[token] for token in text[: sizes.prompt_tokens])
        facts, filler = told[: 2 * num_facts], told[2 * num_facts :]
        numbers = dict(zip(facts[::2], facts[1::2], strict=True))
        asked = [words[token] for token in text[sizes.prompt_tokens :]]
        assert begin == "</s>" and len(numbers) == num_facts and len(filler) == num_filler
        assert not set(filler) & set(facts) and all(number.isdigit() for number in numbers.values())
        assert len(set(asked[::2])) == sizes.queries
        assert [numbers[name] for name in asked[::2]] == asked[1::2]


def test_numbers_are_drawn_evenly_and_by_themselves():
    """Two of a text's 40 numbers are often equal, and all 100 come equally often, within 5 standard errors."""
    texts = recall.draw_texts(Sizes(40, 0, 1), 500, np.random.default_rng(3))
    numbers = texts[:, 2:81:2]
    counts = Counter(numbers.ravel().tolist())
    assert len(counts) == recall.NUM_VALUES and all(abs(count - 200) < 5 * 200**0.5 for count in counts.values())
    alike = np.mean([len(set(row)) for row in numbers.tolist()])
    assert alike == pytest.approx(100 * (1 - 0.99**40), abs=0.5)


def test_the_tokenizer_gives_the_words_of_a_text_and_its_tokens_back():
    tokenizer = load_tokenizer(MODEL)
    assert tokenizer is not None and len(set(recall.words())) == recall.VOCAB_SIZE == len(tokenizer)
    (text,) = recall.draw_texts(Sizes(24, 15, 12), 1, np.random.default_rng(0)).tolist()
    words = tokenizer.decode(text, skip_special_tokens=True)
    assert words.split() == [recall.words()[token] for token in text[1:]]
    assert tokenizer(words)["input_ids"] == text


@pytest.mark.parametrize("sizes", [Sizes(4, 0, 5), Sizes(recall.NUM_KEYS + 1, 0, 1), Sizes(4, 0, 0)])
def test_texts_that_cannot_be_drawn_are_refused(sizes):
    with pytest.raises(ValueError, match="facts"):
        recall.draw_texts(sizes, 1, np.random.default_rng(0))
