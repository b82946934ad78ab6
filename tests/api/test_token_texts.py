"""Test texts of tokens for all kinds of tokenizers: offsets in the text, bytes, and stop texts."""

import functools

import numpy as np
import pytest
from models import save_llama
from runs import answered, lines_of
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from flexhybrid import SamplingParams
from flexhybrid.requests import RequestCodec
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.text import StopWatch, TokenTexts, answer_text

WORDS = [
    *("he", "llo", "wor", "ld", "it", "'", "s", "t", "do", "not", ".", ",", "!", "re", "ve", "n't"),
    *("a", "b", "true", "好", "é"),
]
SPECIAL = ["<s>", "</s>", "<|end|>"]


def byte_level() -> Tokenizer:
    vocab = {letter: place for place, letter in enumerate(sorted(ByteLevel.alphabet()))}
    merges = [("h", "e"), ("l", "l"), ("Ġ", "w"), ("Ġ", "t"), ("t", "h"), ("Ġ", "ð"), ("Ġð", "Ł"), ("ð", "Ł")]
    vocab |= {a + b: len(vocab) + place for place, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Return a tokenizer like those of Llama 2 and Mistral."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *WORDS, *(f"▁{word}" for word in WORDS), "▁▁"]
    vocab = {piece: place for place, piece in enumerate(["<unk>", *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return tokenizer


def unigram() -> Tokenizer:
    """Return a tokenizer like those of T5 and XLNet."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), *((f"{space}{word}", -3.0) for word in WORDS for space in ("", "▁"))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    """Return a tokenizer like BERT's, which drops spaces before punctuation."""
    pieces = ["[UNK]", *WORDS, *(f"##{word}" for word in WORDS if word.isalpha())]
    tokenizer = Tokenizer(models.WordPiece({piece: place for place, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def word_ends() -> Tokenizer:
    """Return a tokenizer like those of the first GPT and CLIP, whose words end in a mark."""
    pieces = [*WORDS, *(f"{word}</w>" for word in WORDS)]
    vocab = {piece: place for place, piece in enumerate(["<unk>", *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[], unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder("</w>")
    return tokenizer


KINDS = (byte_level, byte_fallback, unigram, word_piece, word_ends)


@functools.cache
def tokenizer_of(kind, clean_up: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = kind()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=clean_up)


def random_ids(tokenizer, generator, count: int) -> list[int]:
    """Return random tokens, including characters made of several tokens."""
    groups = [[token] for token in range(len(tokenizer))]
    bytes_of = {tokenizer.convert_ids_to_tokens(token): token for token in range(len(tokenizer))}
    if "<0xF0>" in bytes_of:
        groups += [[bytes_of[f"<0x{byte:02X}>"] for byte in text.encode()] for text in "😀é日" for _ in range(20)]
    groups += [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("😀", " 日", "it's")] * 9
    return [token for place in generator.integers(0, len(groups), count) for token in groups[place]]


@pytest.mark.parametrize("clean_up", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_the_texts_of_tokens_are_cut_from_the_text(kind, clean_up):
    tokenizer, generator = tokenizer_of(kind, clean_up), np.random.default_rng(4)
    texts = TokenTexts(tokenizer)
    names = tokenizer.convert_ids_to_tokens(list(texts.special))
    assert sorted(names) == sorted(SPECIAL) == sorted(texts.special.values())
    for case in range(60):
        ids, before = random_ids(tokenizer, generator, 30), random_ids(tokenizer, generator, 9)[: case % 5]
        for skip in (True, False):
            whole = answer_text(functools.partial(tokenizer.decode, skip_special_tokens=skip), before, ids)
            places = texts.along(before, ids, skip)
            shown = [(token, *place) for token, place in zip(ids, places) if not (skip and token in texts.special)]
            assert "".join(text for _, text, _ in shown) == whole
            assert all(whole.startswith(text, start) for _, text, start in shown)
            assert all(
                text == tokenizer.decode([token])
                for token, (text, _) in zip(ids, places)
                if skip and token in texts.special
            )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("clean_up", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_text_ends_where_the_decoded_text_first_holds_it(kind, clean_up, seed):
    """The stop may lie before the window that is decoded again with each token."""
    tokenizer, generator = tokenizer_of(kind, clean_up), np.random.default_rng(seed)
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    before, ids = random_ids(tokenizer, generator, 9)[: seed % 7], random_ids(tokenizer, generator, 40)
    texts = [answer_text(decode, before, ids[:count]) for count in range(len(ids) + 1)]
    starts = generator.integers(0, len(texts[-1]), 30)
    stops = {texts[-1][start : start + 1 + start % 4] for start in starts} | {"it", "'s", "don't", "n't", ".", "<tool>"}
    for stop in sorted(stop for stop in stops if "\ufffd" not in stop):
        watch = StopWatch(decode, before, (stop,))
        found = next((count for count, token in enumerate(ids, 1) if watch.push(token)), None)
        assert found == next((count for count, text in enumerate(texts) if stop in text), None), (stop, texts[-1])
        if found:
            assert watch.start(stop, texts[found]) == texts[found].index(stop)


@pytest.mark.parametrize("kind", (byte_level, byte_fallback))
def test_the_bytes_of_tokens_are_those_of_another_reader(kind):
    from llguidance.hf import from_tokenizer

    tokenizer = tokenizer_of(kind)
    texts, other = TokenTexts(tokenizer), from_tokenizer(tokenizer, len(tokenizer), None)
    for token in set(range(len(tokenizer))).difference(texts.special):
        text, part = texts.alone(token)
        if part == b"\xff":  # by which llguidance marks special tokens
            continue
        assert (part or text.encode()) == other.decode_bytes([token]), tokenizer.convert_ids_to_tokens(token)
        assert (part is None) == ("\ufffd" not in text)


# ---- in answers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a model with more rows than its vocabulary, and a tokenizer like Llama 2's with two tokens for "b"."""
    folder, tokenizer = tmp_path_factory.mktemp("tokens"), tokenizer_of(byte_fallback)
    save_llama(folder, vocab=len(tokenizer) + 5, eos=tokenizer.convert_tokens_to_ids("</s>"))
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


def test_logprobs_in_files_are_openais(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    tokenizer, greedy = tokenizer_of(byte_fallback), {"temperature": 0, "return_token_ids": True}
    prompt, two_of_b = "it true 😀 he", tokenizer.convert_tokens_to_ids(["b", "<0x62>"])
    words, end = list(range(260, len(tokenizer) + 5)), tokenizer.convert_tokens_to_ids("<|end|>")
    asked = {
        "echo": {"echo": True, "logprobs": 5, "max_tokens": 20, "allowed_token_ids": words, "seed": 1},
        "ids": {"prompt": tokenizer(prompt)["input_ids"], "echo": True, "logprobs": 5, "max_tokens": 0},
        "same": {"logprobs": 5, "max_tokens": 1, "allowed_token_ids": two_of_b},
        "stop": {"logprobs": 0, "max_tokens": 9, "logit_bias": {str(two_of_b[1]): 100}, "stop": "bbb"},
        "special": {"max_tokens": 9, "logit_bias": {str(end): 100}, "stop": ["<|end|>"]},
    }
    bodies_of = {name: {"prompt": prompt, **greedy, "ignore_eos": True, **body} for name, body in asked.items()}
    bodies_of["echo"]["temperature"] = 1
    got = {name: body["choices"][0] for name, body in answered(tmp_path, folder, lines_of(bodies_of)).items()}
    for name in ("echo", "ids", "same"):
        text, logprobs = got[name]["text"], got[name]["logprobs"]
        ids = tokenizer.convert_ids_to_tokens(got[name]["token_ids"])
        for piece, token, start, top in zip(ids, *(logprobs[key] for key in ("tokens", "text_offset", "top_logprobs"))):
            if token.startswith("bytes:"):
                assert token == f"bytes:\\x{piece[3:5].lower()}"
            elif piece is not None and piece not in SPECIAL:
                assert text.startswith(token, start)
                assert token.removeprefix(" ") == tokenizer.convert_tokens_to_string([piece])
            assert top is None or token in top and len(top) in (5, 6)
    for name in ("echo", "ids"):
        parts = [token for token in got[name]["logprobs"]["tokens"] if token.startswith("bytes:")]
        assert got[name]["text"].startswith(prompt) and parts == [f"bytes:\\x{byte:02x}" for byte in "😀".encode()]
    assert got["stop"]["text"] == "" and got["stop"]["logprobs"]["tokens"] == ["b"] * 3
    assert got["stop"]["logprobs"]["text_offset"] == [0, 1, 2]
    assert [got["special"][key] for key in ("text", "finish_reason", "token_ids")] == ["", "stop", [end]]
    (folder / "chats").mkdir()
    asked = {"messages": [{"role": "user", "content": "it"}], "logprobs": True, "top_logprobs": 20, **greedy}
    lines = lines_of({"chat": asked | {"guided_choice": [" w 😀"]}}, "/v1/chat/completions")
    chat = answered(folder / "chats", folder, lines)["chat"]
    (choice,) = chat["choices"]
    *places, end = choice["logprobs"]["content"]
    assert choice["message"]["content"] == bytes(byte for one in places for byte in one["bytes"]).decode() == " w 😀"
    assert places[-1]["token"] == "\\x80" and places[0]["token"].startswith(" ") and end["token"] == "</s>"
    assert all(len(one["top_logprobs"]) == 20 for one in places)


@pytest.mark.parametrize(
    "asked, text, count, stop",
    (
        ({"stop": "<|end|>"}, " it true", 3, "<|end|>"),
        ({"stop": "<|end|>", "include_stop_str_in_output": True}, " it true<|end|>", 3, "<|end|>"),
        ({"stop": "<|end|>", "skip_special_tokens": False}, " it true", 3, "<|end|>"),
        ({"stop": ["zz", "rue<|end|> b"]}, " it t", 4, "rue<|end|> b"),
        ({"stop": ["<|end|>", "e b"]}, " it true", 3, "<|end|>"),
        ({"stop": ["<|end|>", "b"], "min_tokens": 3}, " it true ", 4, "b"),
        ({"stop": "<|end|> b", "include_stop_str_in_output": True}, " it true<|end|> b", 4, "<|end|> b"),
        ({"stop": "e<|end|>", "skip_special_tokens": False}, " it tru", 3, "e<|end|>"),
        ({"stop": "b<tool>"}, " it true ", 5, "b<tool>"),
        ({"stop": "<|end"}, " it true b<tool>", 5, None),
    ),
)
def test_stop_texts_with_special_tokens(folder, asked, text, count, stop):
    tokenizer = tokenizer_of(byte_fallback)
    codec = RequestCodec(Checkpoint(folder).shape, folder, tokenizer)
    generated, _ = codec.open(tokenizer("he")["input_ids"], SamplingParams(**asked), 0)
    for token in tokenizer.convert_tokens_to_ids(["▁it", "▁true", "<|end|>", "▁b", "<tool>"]):
        generated.token_ids.append(token)
        if (ended := generated.watch.push(token)) is not None:
            generated.stop = ended
            break
    answer = codec.completion(generated)
    assert (answer.text, len(answer.token_ids), answer.stop_reason) == (text, count, stop)
    assert answer.finish_reason == ("length" if stop is None else "stop")
