"""Token counts by words are those of the tokenizers library's own encoding."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from flexhybrid import shipped
from flexhybrid.token_counts import CHECKED, TokenCounter

#: How Llama 3 and Qwen2 cut a text (tokenizer.json of their repositories).
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def split(expression: str) -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(expression), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


def trained(cut, normalizer=None, model=None) -> Tokenizer:
    """Return a small tokenizer that adds a special token at the start."""
    tokenizer = Tokenizer(model or models.BPE())
    tokenizer.pre_tokenizer, tokenizer.normalizer = cut, normalizer
    text = shipped.CHECKPOINT.with_name("held_out.txt").read_text(encoding="utf-8")[:50_000]
    tokenizer.train_from_iterator([text, CHECKED], trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    ))  # fmt: skip
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def with_added(*tokens: AddedToken) -> Tokenizer:
    tokenizer = trained(split(LLAMA3))
    tokenizer.add_tokens(list(tokens))
    return tokenizer


KINDS = {
    "added": lambda: with_added(*(AddedToken(text, normalized=False) for text in ("<|end|>>", " def", "34"))),
    "opt": lambda: Tokenizer.from_file(str(shipped.CHECKPOINT / "tokenizer.json")),
    "gpt2": lambda: trained(pre_tokenizers.ByteLevel(False)),
    "llama3": lambda: trained(split(LLAMA3)),
    "qwen2": lambda: trained(split(QWEN2), normalizers.NFC()),
}
PIECES = st.sampled_from(
    ["'s", "'LL", " ", "  ", "\n", "\r\n", "\t", "\x0b", "\x1f", "<s>", "<|end|>", ">", "é", "def ", "1234"]
)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_those_of_the_encoding(kind):
    tokenizer = KINDS[kind]()
    counter, counted = TokenCounter(tokenizer), []

    @settings(max_examples=150)
    @given(st.lists(st.text(string.printable, max_size=6) | PIECES, max_size=12).map("".join), st.booleans())
    def count(text, special):
        found = counter.count(text, special)
        counted.append(found is not None)
        assert found in (None, len(tokenizer.encode(text, add_special_tokens=special)))
        assert (
            found is not None or not text.isascii() or any(piece in text for piece in ("\x1f", "<s>", "<|end|>", "</"))
        )

    count()
    assert sum(counted) > 40


@pytest.mark.parametrize(
    "kind",
    [
        lambda: trained(pre_tokenizers.ByteLevel(True)),
        lambda: trained(pre_tokenizers.Metaspace()),
        lambda: with_added(AddedToken("<tool>", lstrip=True, normalized=False)),
        lambda: with_added(AddedToken("<|end|>>", normalized=True)),
        lambda: trained(pre_tokenizers.ByteLevel(False), normalizers.Lowercase()),
        lambda: trained(split(r"\p{Lu}?\p{Ll}+|.|\n")),
        lambda: trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])),
        lambda: Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
    ],
)
def test_tokenizers_of_other_kinds_are_left_to_encode(kind):
    with pytest.raises((ValueError, KeyError, TypeError)):
        TokenCounter(kind())
