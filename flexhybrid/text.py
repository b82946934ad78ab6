"""Decodes tokens: an answer's text after its prompt, stop texts in it, and the text of each token."""

import functools
import itertools
import os
import re
from collections.abc import Callable
from typing import Any

#: Number of prompt tokens decoded before an answer's: many tokenizers drop the space before the first word.
CONTEXT_TOKENS = 5
#: Most tokens decoded again with each new one before the window moves on. LONGEST_WINDOW applies while the window ends
#: within a character or with tokens without text.
WINDOW_TOKENS, LONGEST_WINDOW = 12, 64
INCOMPLETE = "\ufffd"  #: decoded in place of an incomplete character

Decode = Callable[[list[int]], str]


def answer_text(decode: Decode, prompt_ids: list[int], token_ids: list[int]) -> str:
    """Return the text that the tokens add to the prompt's text."""
    context = prompt_ids[-CONTEXT_TOKENS:]
    before, after = decode(context) if context else "", decode(context + token_ids)
    # If the prompt ends within a character that the answer completes, the text before the answer changes.
    return after[len(before) :] if after.startswith(before) else decode(token_ids)


class StopWatch:
    """Decodes an answer (``answer_text``) token by token until a stop text is complete in it, as in vLLM.

    If a token completes several stop texts, the one that ends first counts. A stop text may begin, but not end, within
    the first ``min_tokens`` tokens. Each token decodes a short window, so that the cost does not grow with the answer.
    Text of the window may still change: " do" and " not" become " don't".
    """

    def __init__(self, decode: Decode, prompt_ids: list[int], stop: tuple[str, ...] = (), min_tokens: int = 0):
        self.decode, self.stop, self.min_tokens = decode, stop, min_tokens
        self.settled, self.tail, self.num_tokens = "", "", 0  #: text before the window, and of the window
        self._prompt, self._window = prompt_ids[-CONTEXT_TOKENS:], []
        self._held = 0  # number of characters of the first min_tokens tokens

    def push(self, token: int) -> str | None:
        """Add a token; return the stop text that it completes, or None."""
        self._window.append(token)
        self.tail = answer_text(self.decode, self._prompt, self._window)
        if len(self._prompt) + len(self._window) > WINDOW_TOKENS:
            self._move()
        self.num_tokens += 1
        begin = max(0, len(self.settled) - max(map(len, self.stop), default=0))
        text = (self.settled[begin:] + self.tail).rstrip(INCOMPLETE)
        if self.num_tokens <= self.min_tokens:
            self._held = begin + len(text)
            return None
        ends = [(at + len(stop), stop) for stop in self.stop if (at := self.start(stop, text, begin)) < len(text)]
        return min(ends, key=lambda end: end[0])[1] if ends else None

    def start(self, stop: str, text: str, begin: int = 0) -> int:
        """Return the first allowed position of a stop text in ``text``; the text's length if there is none.
        ``text`` lacks the first ``begin`` characters of the answer."""
        start = text.find(stop, max(0, self._held - begin - len(stop) + 1))
        return start if start >= 0 else len(text)

    def _move(self) -> None:
        """Shorten the window to its last tokens if these have the same text without the others."""
        longest = len(self._window) > LONGEST_WINDOW
        for kept in range(CONTEXT_TOKENS, len(self._window) if longest or self.tail[-1:] != INCOMPLETE else 0):
            tail = self.decode(self._window[-kept:])
            if (tail.strip() or longest) and self.tail.endswith(tail):
                self.settled += self.tail[: len(self.tail) - len(tail)]
                self.tail, self._window, self._prompt = tail, self._window[-kept:], []
                return


class TokenTexts:
    """Finds the text of each token of transformers' ``tokenizer``, alone and within a text."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.decoders = [functools.partial(tokenizer.decode, skip_special_tokens=skip) for skip in (False, True)]
        added = {token: str(one) for token, one in tokenizer.added_tokens_decoder.items() if one.special}
        #: token id -> name, for special tokens, which skip_special_tokens leaves out
        self.special = added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens))
        #: returns a token's text with its leading space, and its bytes if it is a part of a character
        self.alone: Callable[[int], tuple[str, bytes | None]] = functools.cache(self._alone)

    def _alone(self, token: int) -> tuple[str, bytes | None]:
        text = self.special.get(token) or answer_text(self.tokenizer.decode, [token], [token])  # keeps its space
        raw = _bytes(self.tokenizer.convert_ids_to_tokens(token) or text) if INCOMPLETE in text else b""
        return text, raw if raw != raw.decode(errors="ignore").encode() else None

    def along(self, before: list[int], ids: list[int], skip_special_tokens: bool) -> list[tuple[str, int]]:
        """Return the text that each token adds to the tokens before it, and its position in ``answer_text``.
        A special token that the text leaves out has its name as text."""
        decode, hidden = self.decoders[skip_special_tokens], self.special if skip_special_tokens else ()
        whole = answer_text(decode, before, ids)
        texts = ["" if token in hidden else self.alone(token)[0] for token in ids]
        if "".join(texts) == whole:  # true for most texts, and ten times as fast
            return self._cut(ids, whole, [*itertools.accumulate(map(len, texts))])
        growing, ends = StopWatch(decode, before), []
        for token in ids:
            growing.push(token)
            begin = len(growing.settled)
            ends.append(begin + len(os.path.commonprefix([growing.tail, whole[begin : begin + len(growing.tail)]])))
        return self._cut(ids, whole, [*ends[:-1], len(whole)])

    def of_prompt(self, ids: list[int], text: str | None) -> list[tuple[str, int]]:
        """Return text and position of each token of a prompt, from the offsets of its encoded ``text`` if known."""
        for special in (True, False) if text and self.tokenizer.is_fast else ():
            encoded = self.tokenizer(text, verbose=False, add_special_tokens=special, return_offsets_mapping=True)
            if encoded["input_ids"] == ids:
                ends, limit = [], len(text or "")
                for begin, end in reversed(encoded["offset_mapping"]):  # (0, 0): a token that is not in the text
                    ends.append(min(end, limit))
                    limit = min(limit, begin) if end else limit
                return self._cut(ids, text or "", ends[::-1])
        return self.along([], ids, False)

    def _cut(self, ids: list[int], text: str, ends: list[int]) -> list[tuple[str, int]]:
        """Return the parts of a text that end at ``ends``; a character of several tokens belongs to the last."""
        starts = [0, *itertools.accumulate(ends, max)]
        return [(text[a:b] or self.special.get(token, ""), a) for token, a, b in zip(ids, starts, starts[1:])]


def _bytes(piece: str) -> bytes:
    """Return the bytes of a vocabulary entry that is not text by itself, in SentencePiece's or GPT-2's notation."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if match := re.fullmatch("<0x([0-9A-F]{2})>", piece):
        return bytes.fromhex(match[1])
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return bytes(map(letters.__getitem__, piece)) if letters.keys() >= set(piece) else piece.encode()
