"""A language model without a neural network: counts of the corpus's n-grams, as the smallest model of a cascade.

The chance of the next token mixes the counts behind the last 4, 3, 2, 1 and 0 tokens, longer contexts before shorter
ones (Witten and Bell 1991, as Chen and Goodman 1999 have it, Eq. 19 and 20):

    p(w | c) = (count(c w) + distinct(c) p(w | c without its first token)) / (count(c) + distinct(c))

``distinct(c)`` is the number of tokens that were seen behind c. The prompt's own n-grams are counted with those of the
corpus: names come back (a cache, as Kuhn and De Mori 1990 have it). The corpus is the files from which the checkpoints
learned, with their tokenizer; commit b18005f has the code that counted it. An answer costs lookups and a few
multiply-adds a token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments import CHECKPOINTS, token_ids, tokenizer
from flexhybrid.cascade.models import TOP_K, ModelOutputs

FILE = CHECKPOINTS / "ngrams-stdlib.npz"
BITS = 11  #: of a token id: the vocabulary has 2,048


@dataclass(frozen=True)
class NGrams:
    """Counted n-grams. For contexts of each length, growing ``keys`` (context and token, BITS each) and ``counts``."""

    keys: tuple[np.ndarray, ...]
    counts: tuple[np.ndarray, ...]

    @classmethod
    def load(cls, path: Path = FILE) -> NGrams:
        """Read a file, which has the keys as differences. Behind 2 and 3 tokens it has what the corpus has twice or
        more, behind 4 tokens three times."""
        with np.load(path) as file:
            lengths = range(len(file.files) // 2)
            keys = tuple(np.cumsum(file[f"steps{length}"]) for length in lengths)
            return cls(keys, tuple(file[f"counts{length}"].astype(np.int64) for length in lengths))

    def chances(self, context: Sequence[int]) -> np.ndarray:
        """Return p(w | context) of every token w [2 ** BITS], by the counts of corpus and context together."""
        size, context = 1 << BITS, [int(token) for token in context]
        chances = np.full(size, 1.0 / size)
        for length, (keys, counts) in enumerate(zip(self.keys, self.counts, strict=True)):
            last = context[len(context) - length :]
            packed = 0
            for token in last:
                packed = packed << BITS | token
            first, end = np.searchsorted(keys, (packed << BITS, packed + 1 << BITS))
            behind = np.zeros(size)
            behind[keys[first:end] & size - 1] = counts[first:end]
            for place in range(len(context) - length):
                if context[place : place + length] == last:
                    behind[context[place + length]] += 1
            distinct = np.count_nonzero(behind)
            if length > len(context) or not distinct:
                break  # what was never seen has no longer context that was
            chances = (behind + distinct * chances) / (behind.sum() + distinct)
        return chances


class NGramModel:
    """The n-grams as a model of a cascade: texts or token ids in, greedy answers of ``max_tokens`` tokens out."""

    def __init__(self, name: str, ngrams: NGrams, max_tokens: int = 1):
        self.name, self.ngrams, self.max_tokens = name, ngrams, max_tokens

    def predict(self, batch: Sequence) -> ModelOutputs:
        size = (len(batch), self.max_tokens, TOP_K)
        logits, classes, outputs = np.zeros(size), np.zeros(size, dtype=np.int64), []
        for i, prompt in enumerate(batch):
            ids = token_ids(prompt) if isinstance(prompt, str) else list(prompt)
            for slot in range(self.max_tokens):
                chances = self.ngrams.chances(ids)
                likeliest = np.argsort(-chances, kind="stable")[:TOP_K]
                logits[i, slot], classes[i, slot] = np.log(chances[likeliest]), likeliest
                ids.append(int(likeliest[0]))
            outputs.append(tokenizer().decode(ids[-self.max_tokens :]))
        return ModelOutputs(outputs, logits, np.ones(size[:2], dtype=bool), classes)

    def close(self) -> None:
        """Nothing is held open."""


def model() -> NGramModel:
    """Return the counted n-grams as a model: ``--models ngrams=experiments.training.ngrams:model``."""
    return NGramModel("ngrams", NGrams.load())
