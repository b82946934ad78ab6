"""Texts of multi-query associative recall (MQAR; Arora et al. 2023, "Zoology"): facts, filler, then queries.

A text is ``</s>``, M facts (a name and its number), filler words, and queries (a name of the facts and its number
again)::

    </s> bano 17 pero 84 … veg zit vom … pero 84 bano 17 …
         facts              filler       queries: asked in the decode alone

Names of a text differ. Each number is drawn independently and uniformly, so that a model without the fact answers
right with probability 1 / NUM_VALUES. Each fact is asked once at most: a query tells
its answer to those behind it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

#: OPT's own: its </s> (2) begins and ends a text.
SPECIAL_TOKENS, EOS_ID = ["<s>", "<pad>", "</s>", "<unk>"], 2
NUM_KEYS, NUM_VALUES, NUM_FILLER = 512, 100, 64
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
FIRST_KEY = len(SPECIAL_TOKENS)
FIRST_VALUE = FIRST_KEY + NUM_KEYS
FIRST_FILLER = FIRST_VALUE + NUM_VALUES
VOCAB_SIZE = FIRST_FILLER + NUM_FILLER


def words() -> list[str]:
    """Return the vocabulary in the order of its ids: special tokens, names (two syllables), numbers, filler words (one
    syllable and a consonant)."""
    syllables = ["".join(pair) for pair in itertools.product(CONSONANTS, VOWELS)]
    pairs = ["".join(pair) for pair in itertools.product(syllables, syllables)]
    names = [pairs[i * len(pairs) // NUM_KEYS] for i in range(NUM_KEYS)]
    closed = ["".join(pair) for pair in itertools.product(syllables, CONSONANTS)]
    filler = [closed[i * len(closed) // NUM_FILLER] for i in range(NUM_FILLER)]
    return [*SPECIAL_TOKENS, *names, *(f"{value:02}" for value in range(NUM_VALUES)), *filler]


@dataclass(frozen=True)
class Sizes:
    """How long a text is, in facts, filler tokens and queries."""

    facts: int
    filler: int
    queries: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first query."""
        return 1 + 2 * self.facts + self.filler

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + 2 * self.queries

    @property
    def mean_context(self) -> float:
        """Cached tokens at a step of the decode, on average: the last token of a text is never fed."""
        return self.prompt_tokens + self.queries - 1


def draw_texts(sizes: Sizes, num_texts: int, rng: np.random.Generator) -> np.ndarray:
    """Return token ids of texts, int64 [num_texts, sizes.tokens]. Raise ValueError for more facts than there are names
    or more queries than facts."""
    if not 1 <= sizes.queries <= sizes.facts <= NUM_KEYS:
        raise ValueError(f"{sizes}: at most {NUM_KEYS} facts, and of these at most all are asked, at least one")
    shape = (num_texts, sizes.facts)
    names = rng.random((num_texts, NUM_KEYS)).argsort(axis=1)[:, : sizes.facts] + FIRST_KEY
    numbers = rng.integers(FIRST_VALUE, FIRST_FILLER, shape)
    facts = np.stack([names, numbers], axis=-1)
    asked = rng.random(shape).argsort(axis=1)[:, : sizes.queries]
    parts = [
        np.full((num_texts, 1), EOS_ID),
        facts.reshape(num_texts, -1),
        rng.integers(FIRST_FILLER, VOCAB_SIZE, (num_texts, sizes.filler)),
        np.take_along_axis(facts, asked[..., None], axis=1).reshape(num_texts, -1),
    ]
    return np.concatenate(parts, axis=1)
