"""Finds the beginnings that prompts of a file share, while its lines are counted. Forecasts need their tokens.

The prompts of a chunk of lines are sorted together with the beginnings of earlier chunks, so that prompts with a common
beginning are neighbours. The common beginnings of neighbours form a tree. A beginning ends before a space, so that it
has the same words, and the same tokens, as in the whole prompt.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from flexhybrid.batch.openai import Draft
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.prefixes import LEAST_BLOCKS
from flexhybrid.core.workload import Prefixes

WORDS = re.compile(r"(.*\S)\s+\S", re.DOTALL)  #: a text without its last word, which may be incomplete
LEAST = 2 * BLOCK_TOKENS  #: least characters, or token ids, that a beginning adds to the one that it continues
KEPT, KEPT_CHARACTERS = 256, 1 << 22  #: most beginnings, and characters, that later chunks are compared with


class Beginnings:
    """The tree of shared beginnings so far, by number. ``count(drafts)`` returns the tokens of their prompts."""

    def __init__(self, count: Callable[[list[Draft]], list[int]]):
        self._count = count
        self.tokens, self.parents = array("i"), array("i")
        self._known: dict[str, int] = {}  # text -> number of beginnings in the latest chunks, the latest last

    def find(self, drafts: Sequence[Draft]) -> list[int]:
        """Return the number of each prompt's longest shared beginning; -1: none."""
        found = [-1] * len(drafts)
        texts = [(_text(draft), place) for place, draft in enumerate(drafts) if draft.params.prompt_logprobs is None]
        texts = sorted([*texts, *((text, -1) for text in self._known)])
        common = [0, *(_common(before[0], text[0]) for before, text in zip(texts, texts[1:])), 0]
        left = [(first, last, -1, 0) for first, last in _runs(common, 0, len(texts), LEAST)]
        while left:
            first, last, parent, length = left.pop()
            deepest = min(common[first + 1 : last])
            place = max(place for _, place in texts[first:last])
            if place < 0:
                continue
            if deepest - length >= LEAST:
                number = self._number(texts[first][0][:deepest], parent, drafts[place])
                if number != parent:
                    parent, length = number, deepest
            for _, place in texts[first:last]:
                if place >= 0:
                    found[place] = parent
            left += [(*run, parent, length) for run in _runs(common, first, last, deepest + 1)]
        while len(self._known) > KEPT or sum(map(len, self._known)) > KEPT_CHARACTERS:
            del self._known[next(iter(self._known))]
        return found

    def _number(self, text: str, parent: int, draft: Draft) -> int:
        """Return the number of a beginning; ``parent`` if it is not longer than that by a block.
        Beginnings that end at the same word are the same."""
        if isinstance(draft.prompt, str) and text not in self._known:
            whole = WORDS.match(text)
            text = whole[1] if whole else ""
        number, counted = self._known.get(text), isinstance(draft.prompt, str) and text
        if number is not None:
            tokens = self.tokens[number]
        else:
            tokens = self._count([draft._replace(prompt=text)])[0] if counted else len(text)
        if tokens // BLOCK_TOKENS <= (self.tokens[parent] // BLOCK_TOKENS if parent >= 0 else LEAST_BLOCKS - 1):
            return parent
        if number is None:
            number = len(self.tokens)
            self.tokens.append(tokens)
            self.parents.append(parent)
        elif parent >= 0:
            self.parents[number] = parent
        self._known.pop(text, None)
        self._known[text] = number
        return number

    def prefixes(self, of_request: np.ndarray) -> Prefixes | None:
        """Return the beginnings as prefixes of requests; None if no request has one. ``of_request``: their numbers."""
        tokens, parents = np.array(self.tokens, dtype=np.int64), np.array(self.parents, dtype=np.int64)
        return Prefixes(tokens[: len(parents)], parents[: len(tokens)], of_request) if (of_request >= 0).any() else None


def _text(draft: Draft) -> str:
    """Return the prompt as a text, with one character per token id."""
    return draft.prompt if isinstance(draft.prompt, str) else "".join(map(chr, draft.prompt))


def _common(a: str, b: str) -> int:
    """Return the length of the common beginning of two texts; 0 if it is less than LEAST."""
    low, high = 0, min(len(a), len(b))
    if high < LEAST or a[:LEAST] != b[:LEAST]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _runs(common: list[int], first: int, last: int, least: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of at least two texts within [first, last) that share ``least`` characters.
    ``common``: number of characters that each text shares with the one before it."""
    begin = first
    for at in range(first + 1, last + 1):
        if at == last or common[at] < least:
            if at - begin > 1:
                yield begin, at
            begin = at
