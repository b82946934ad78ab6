"""Counts the tokens of a text word by word, with a cache of known words.

Byte-level BPE as in GPT-2 (OPT, Llama 3, Qwen2, …) splits a text into words with a regular expression, and encodes each
word alone. Looking up known words takes a fifth of the time of encoding.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: The regular expression of the pre-tokenizer "ByteLevel" (Radford et al., 2019, encoder.py).
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: Unicode classes -> the same in ASCII. Expressions with other classes are not supported.
ASCII_CLASSES = {r"\p{L}": "a-zA-Z", r"\p{N}": "0-9"}
#: Control characters, which regular expressions of Python and of tokenizers treat differently.
OTHERS = re.compile(r"[\0-\x08\x0e-\x1f\x7f]")
MAX_WORDS, MAX_WORD_LENGTH = 1 << 16, 64  #: limits of the cache
#: Text on which a counter must agree with its tokenizer.
CHECKED = (
    "I'll say: it's 12345 o'clock,  isn't\tit?\r\n\n   def f(x_1):\n        return x**2 - 1 #don't  \n YOU'RE\x0b "
)


class WordCounts(dict[str, int]):
    """Word -> number of its tokens, counted at first access."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, word: str) -> int:
        count = len(self._tokenizer.encode(word, add_special_tokens=False))
        if len(word) <= MAX_WORD_LENGTH:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = count
        return count


class TokenCounter:
    """Counts the tokens of ASCII texts."""

    def __init__(self, tokenizer: Tokenizer):
        """Raise ValueError if the tokenizer does not encode word by word."""
        settings = json.loads(tokenizer.to_str())
        self._words = re.compile(_in_ascii(_words(settings)), re.ASCII)
        self._added = _added_tokens(settings["added_tokens"])
        self._counts = WordCounts(tokenizer)
        self._special = len(tokenizer.encode("a")) - len(tokenizer.encode("a", add_special_tokens=False))
        if self.count(CHECKED) != len(tokenizer.encode(CHECKED)):
            raise ValueError("the tokenizer does not encode word by word")

    def count(self, text: str, special_tokens: bool = True) -> int | None:
        """Return the number of tokens; None for a text that is not plain ASCII and must be encoded."""
        if not text.isascii() or OTHERS.search(text):
            return None
        count = special_tokens * self._special
        parts = self._added.split(text) if self._added else [text]  # every second part is an added token
        for part in parts[::2]:
            count += sum(map(self._counts.__getitem__, self._words.findall(part)))
        return count + len(parts) // 2


def _added_tokens(tokens: list[dict]) -> re.Pattern[str] | None:
    """Return a regular expression of the added tokens, which split a text before its words; None without any.
    Raise ValueError for added tokens with other rules."""
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in tokens):
        raise ValueError("an added token depends on the text around it")
    if len({token["normalized"] for token in tokens}) > 1:
        raise ValueError("a text is split twice at added tokens")
    contents = sorted((token["content"] for token in tokens), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, contents))})") if contents else None


def _words(settings: dict) -> str:
    """Return the regular expression of words in a tokenizer's JSON. Raise ValueError for another kind of tokenizer."""
    normalizer, model, cut = settings["normalizer"], settings["model"], settings["pre_tokenizer"] or {}
    steps = cut["pretokenizers"] if cut.get("type") == "Sequence" else [cut]
    *splits, last = steps
    plain = (normalizer or {"type": "NFC"})["type"] == "NFC"  # NFC does not change ASCII
    if not plain or model["type"] != "BPE" or last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        raise ValueError("not a byte-level BPE")
    if last["use_regex"] == bool(splits) or len(splits) > 1:
        raise ValueError("words are not cut by one expression")
    if not splits:
        return GPT2_WORDS
    (split,) = splits
    if split["type"] != "Split" or split["behavior"] != "Isolated" or split["invert"]:
        raise ValueError("words are not cut by one expression")
    return split["pattern"]["Regex"]


def _in_ascii(expression: str) -> str:
    """Return a regular expression with ASCII_CLASSES in place of Unicode classes. Raise ValueError for others."""
    pieces, inside = re.findall(r"\\p\{\w+\}|\\.|.", expression, re.DOTALL), False
    for place, piece in enumerate(pieces):
        if piece.startswith(r"\p"):
            if piece not in ASCII_CLASSES:
                raise ValueError(f"unknown class {piece}")
            pieces[place] = ASCII_CLASSES[piece] if inside else f"[{ASCII_CLASSES[piece]}]"
        inside = piece == "[" or (inside and piece != "]")
    return "".join(pieces)
