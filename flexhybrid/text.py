"""From tokens to text: an answer's text after its prompt, stop texts found in the stream, each token's own text."""

import functools
import itertools
import os
import re
from collections.abc import Callable
from typing import Any

#: Tokens decoded before an answer's: many tokenizers drop the space of the first word that they decode.
CONTEXT_TOKENS = 5
#: Tokens decoded again with each new one, at most, before the window moves on; where its end is no character yet, or
#: has no text, LONGEST_WINDOW.
WINDOW_TOKENS, LONGEST_WINDOW = 12, 64
INCOMPLETE = "\ufffd"  #: a character that is not complete yet ends so

Decode = Callable[[list[int]], str]


def answer_text(decode: Decode, prompt_ids: list[int], token_ids: list[int]) -> str:
    """The text that the tokens add to the prompt's."""
    context = prompt_ids[-CONTEXT_TOKENS:]
    before, after = decode(context) if context else "", decode(context + token_ids)
    # A prompt that ends within a character reads otherwise when the answer completes it.
    return after[len(before) :] if after.startswith(before) else decode(token_ids)


class StopWatch:
    """One answer's text (``answer_text``), token by token, until one of the stop texts is complete in it, as vLLM finds
    it.

    Of stop texts completed by the same token, the one that ends first wins. Text of the first ``min_tokens`` tokens may
    begin a stop text, not end one. Each token decodes a short window, so the cost does not grow with the answer. Its
    text may still change: " do" and " not" become " don't".
    """

    def __init__(self, decode: Decode, prompt_ids: list[int], stop: tuple[str, ...] = (), min_tokens: int = 0):
        self.decode, self.stop, self.min_tokens = decode, stop, min_tokens
        self.settled, self.tail, self.num_tokens = "", "", 0  #: the answer so far: before the window, and the window's
        self._prompt, self._window = prompt_ids[-CONTEXT_TOKENS:], []
        self._held = 0  # characters of the first min_tokens tokens

    def push(self, token: int) -> str | None:
        """The stop text that is complete with this token, or None."""
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
        """Return where a stop text may begin in the text without its first ``begin`` characters; without one, its
        length."""
        start = text.find(stop, max(0, self._held - begin - len(stop) + 1))
        return start if start >= 0 else len(text)

    def _move(self) -> None:
        """Shorten the window if its last tokens decode equally alone."""
        longest = len(self._window) > LONGEST_WINDOW
        for kept in range(CONTEXT_TOKENS, len(self._window) if longest or self.tail[-1:] != INCOMPLETE else 0):
            tail = self.decode(self._window[-kept:])
            if (tail.strip() or longest) and self.tail.endswith(tail):
                self.settled += self.tail[: len(self.tail) - len(tail)]
                self.tail, self._window, self._prompt = tail, self._window[-kept:], []
                return


class TokenTexts:
    """The text of each token of transformers' ``tokenizer``, alone and within a text."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.decoders = [functools.partial(tokenizer.decode, skip_special_tokens=skip) for skip in (False, True)]
        added = {token: str(one) for token, one in tokenizer.added_tokens_decoder.items() if one.special}
        #: token ids that skip_special_tokens leaves out -> their names
        self.special = added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens))
        #: a token's text, with its leading space, and its bytes if it is a part of a character
        self.alone: Callable[[int], tuple[str, bytes | None]] = functools.cache(self._alone)

    def _alone(self, token: int) -> tuple[str, bytes | None]:
        text = self.special.get(token) or answer_text(self.tokenizer.decode, [token], [token])  # shows its space
        raw = _bytes(self.tokenizer.convert_ids_to_tokens(token) or text) if INCOMPLETE in text else b""
        return text, raw if raw != raw.decode(errors="ignore").encode() else None

    def along(self, before: list[int], ids: list[int], skip_special_tokens: bool) -> list[tuple[str, int]]:
        """Return the text that each token adds to the previous ones, and its position in ``answer_text``; for a special
        token that the text omits, its name."""
        decode, hidden = self.decoders[skip_special_tokens], self.special if skip_special_tokens else ()
        whole, texts = (
            answer_text(decode, before, ids),
            ["" if token in hidden else self.alone(token)[0] for token in ids],
        )
        if "".join(texts) == whole:  # as of most texts, in a tenth of the time
            return self._cut(ids, whole, [*itertools.accumulate(map(len, texts))])
        growing, ends = StopWatch(decode, before), []
        for token in ids:
            growing.push(token)
            begin = len(growing.settled)
            ends.append(begin + len(os.path.commonprefix([growing.tail, whole[begin : begin + len(growing.tail)]])))
        return self._cut(ids, whole, [*ends[:-1], len(whole)])

    def of_prompt(self, ids: list[int], text: str | None) -> list[tuple[str, int]]:
        """Return the same for a prompt's tokens, from the encoded ``text`` if it is known."""
        for special in (True, False) if text and self.tokenizer.is_fast else ():
            encoded = self.tokenizer(text, verbose=False, add_special_tokens=special, return_offsets_mapping=True)
            if encoded["input_ids"] == ids:
                ends, limit = [], len(text or "")
                for begin, end in reversed(encoded["offset_mapping"]):  # (0, 0): a token that the text has not
                    ends.append(min(end, limit))
                    limit = min(limit, begin) if end else limit
                return self._cut(ids, text or "", ends[::-1])
        return self.along([], ids, False)

    def _cut(self, ids: list[int], text: str, ends: list[int]) -> list[tuple[str, int]]:
        """Cut a text where its tokens end; a character of several tokens belongs to the last."""
        starts = [0, *itertools.accumulate(ends, max)]
        return [(text[a:b] or self.special.get(token, ""), a) for token, a, b in zip(ids, starts, starts[1:])]


def _bytes(piece: str) -> bytes:
    """Return the bytes of a vocabulary entry that is not text by itself (SentencePiece's, GPT-2's)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if match := re.fullmatch("<0x([0-9A-F]{2})>", piece):
        return bytes.fromhex(match[1])
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return bytes(map(letters.__getitem__, piece)) if letters.keys() >= set(piece) else piece.encode()
