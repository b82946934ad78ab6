"""Test each kind of tokenizer file that transformers reads, and folders without one."""

import base64
import importlib.metadata
import json
import sys

import pytest
from test_token_texts import byte_level
from transformers import AutoTokenizer

from flexhybrid import InputError
from flexhybrid.core.model.generation_config import default_sampling
from flexhybrid.requests import load_tokenizer

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 1842767\n"
WORDS = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhe\n##llo\nworld\n"
RANKS = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))


@pytest.fixture(scope="module")
def sentence_pieces(tmp_path_factory) -> bytes:
    import sentencepiece

    path = tmp_path_factory.mktemp("pieces") / "m"
    texts = iter(["hello world, it is true", "do not tell the whole world"] * 9)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts, model_prefix=str(path), vocab_size=40, model_type="bpe", minloglevel=2
    )
    return path.with_suffix(".model").read_bytes()


def checkpoint(folder, model_type: str, files: dict[str, str | bytes], **settings):
    """Return a checkpoint's folder without weights; ``settings`` are the tokenizer's."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


@pytest.mark.parametrize(
    "model_type, file, tokenizer_class",
    (
        ("llama", "tokenizer.model", "LlamaTokenizer"),
        ("llama", "spiece.model", "T5Tokenizer"),
        ("xlm-roberta", "sentencepiece.bpe.model", "XLMRobertaTokenizer"),
        ("gpt2", "vocab.txt", "BertTokenizer"),
        ("gpt2", "vocab.json", "GPT2Tokenizer"),
        ("llama", None, "ByT5Tokenizer"),  # needs no file
    ),
)
def test_every_tokenizer_that_transformers_loads_is_loaded(
    tmp_path, sentence_pieces, model_type, file, tokenizer_class
):
    content = {None: {}, "vocab.txt": {file: WORDS}, "vocab.json": {}}.get(file, {file: sentence_pieces})
    folder = checkpoint(tmp_path, model_type, content, tokenizer_class=tokenizer_class)
    if file == "vocab.json":
        byte_level().model.save(str(folder))
    expected = AutoTokenizer.from_pretrained(folder)("hello world")["input_ids"]
    tokenizer = load_tokenizer(folder)
    assert tokenizer and tokenizer("hello world")["input_ids"] == expected and len(set(expected)) > 1


@pytest.mark.parametrize(
    "model_type, files, settings",
    (
        ("llama", {}, {}),
        ("gpt2", {}, {"tokenizer_class": "GPT2Tokenizer"}),
        ("llama", {}, {"tokenizer_class": "LlamaTokenizer"}),
        (
            "qwen2",
            {"qwen.tiktoken": RANKS, "own.py": "raise SystemExit"},
            {"auto_map": {"AutoTokenizer": ["own.Own", None]}},
        ),
    ),
)
def test_without_a_vocabulary_prompts_are_token_ids(tmp_path, model_type, files, settings):
    assert load_tokenizer(checkpoint(tmp_path, model_type, files, **settings)) is None


@pytest.mark.parametrize(
    "content, missing, words",
    (
        (None, ["sentencepiece"], "tokenizer.model needs sentencepiece: pip install sentencepiece$"),
        (None, ["sentencepiece", "protobuf"], "needs sentencepiece and protobuf: pip install sentencepiece protobuf$"),
        (RANKS, ["tiktoken"], "tokenizer.model needs tiktoken: pip install tiktoken$"),
        ("<!DOCTYPE html>", [], "tokenizer.model is not a file of SentencePiece or tiktoken; is it complete"),
    ),
)
def test_packages_that_a_vocabulary_needs_are_named(tmp_path, monkeypatch, sentence_pieces, content, missing, words):
    folder = checkpoint(tmp_path, "llama", {"tokenizer.model": content or sentence_pieces})
    installed = importlib.metadata.distributions
    monkeypatch.setattr(
        importlib.metadata, "distributions", lambda name: () if name in missing else installed(name=name)
    )
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=words):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "file", ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.txt", "chat_template.jinja")
)
def test_pointers_of_git_lfs_are_named(tmp_path, file):
    folder = checkpoint(tmp_path, "llama", {"vocab.json": "{}", file: POINTER})
    with pytest.raises(InputError, match=rf"{file} is a git-lfs pointer, .*git lfs pull"):
        load_tokenizer(folder)
    (folder / "generation_config.json").write_text(POINTER)
    with pytest.raises(InputError, match=r"generation_config\.json is a git-lfs pointer"):
        default_sampling(folder)
