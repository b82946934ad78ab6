"""What the prompts of a file begin with alike, found while its lines are counted: for the forecast, which needs to know
who shares with whom, and how many tokens.

The prompts of a chunk of lines are sorted, together with what earlier chunks began with: prompts that begin alike then
follow each other, and what neighbours have in common makes a tree. A beginning ends before a space, so that its words
are words of the whole prompts, and have their tokens.
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

WORDS = re.compile(r"(.*\S)\s+\S", re.DOTALL)  #: a text's words but for the last one, which may go on
LEAST = 2 * BLOCK_TOKENS  #: characters, or token ids, by which a beginning is longer than the one that it continues
KEPT, KEPT_CHARACTERS = 256, 1 << 22  #: beginnings, at most, that later chunks are compared with


class Beginnings:
    """Those of the prompts so far, by number: a tree. ``count(drafts)``: how many tokens their prompts have."""

    def __init__(self, count: Callable[[list[Draft]], list[int]]):
        self._count = count
        self.tokens, self.parents = array("i"), array("i")
        self._known: dict[str, int] = {}  # text -> number; those of the latest chunks, the latest last

    def find(self, drafts: Sequence[Draft]) -> list[int]:
        """Return the longest beginning that each prompt has in common with another, -1 without one."""
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
        """Return the number of a beginning; ``parent`` where it has no block more than that. Those that end at the same
        word are one."""
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
        """Return them as those of these requests, by number; None where nobody has one."""
        tokens, parents = np.array(self.tokens, dtype=np.int64), np.array(self.parents, dtype=np.int64)
        return Prefixes(tokens[: len(parents)], parents[: len(tokens)], of_request) if (of_request >= 0).any() else None


def _text(draft: Draft) -> str:
    return draft.prompt if isinstance(draft.prompt, str) else "".join(map(chr, draft.prompt))


def _common(a: str, b: str) -> int:
    """Return how many of the first characters of two texts are alike; 0 for fewer than LEAST."""
    low, high = 0, min(len(a), len(b))
    if high < LEAST or a[:LEAST] != b[:LEAST]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _runs(common: list[int], first: int, last: int, least: int) -> Iterator[tuple[int, int]]:
    """Yield [first, last) of those within these that have ``least`` in common with their neighbours; two at least."""
    begin = first
    for at in range(first + 1, last + 1):
        if at == last or common[at] < least:
            if at - begin > 1:
                yield begin, at
            begin = at
