"""Test `flexhybrid run` on generated, damaged and malformed input: each line is answered or refused."""

import io
import json
import re
import threading
from hashlib import sha256

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import save_opt
from runs import answered, line, lines_of, read, run

from flexhybrid import LLM, InputError, shipped
from flexhybrid.batch import request_index as index_module
from flexhybrid.batch.formats import Columns, open_lines
from flexhybrid.batch.openai import Refused
from flexhybrid.batch.request_index import CustomIds, find_lines, index_requests, read_lines
from flexhybrid.batch.requests import LineReader, LineRules
from flexhybrid.runtime import engine
from flexhybrid.sampling_params import SamplingParams
from flexhybrid.structured_outputs import Grammars

MANY = settings(max_examples=260, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture(scope="module")
def text_llm():
    return LLM(shipped.CHECKPOINT, "kv_only", device="cpu", dtype="float32")


def valid(name: str) -> bytes:
    return line(name, prompt=[5, 6], max_tokens=2, temperature=0, stop_token_ids=[7], user="Zoë").encode()


def parquet_bytes() -> bytes:
    import pandas as pd

    with io.BytesIO() as file:
        pd.DataFrame({"q": ["import os", "def f():", None], "n": [1, 2, 3]}).to_parquet(file)
        return file.getvalue()


WHOLE = {
    "jsonl": valid("a") + b"\n" + valid("b") + b"\n", "text": "import os\n“é”\n".encode(),
    "csv": b'q,n\n"import\nos",1\ndef f():,2\n', "parquet": parquet_bytes(),
}  # fmt: skip


@st.composite
def files(draw, form: str) -> bytes:
    """Draw arbitrary bytes, or a valid file damaged in some places."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=60))
    data = WHOLE[form]
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        data = data[:start] + draw(st.binary(max_size=3)) + data[start + draw(st.integers(0, 3)) :]
    return data


@pytest.mark.parametrize("form", WHOLE)
def test_any_file_is_read_or_refused_in_one_line(form, text_llm, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "in"
    read_one = LineReader(LineRules(form, {"max_tokens": 4}, 0), text_llm.codec)
    seen = {"read": 0, "refused": 0}

    @MANY
    @given(files(form))
    def read(data):
        path.write_bytes(data)
        try:
            lines = open_lines(path, form, Columns("q") if form in ("csv", "parquet") else None)
        except InputError as error:
            assert "\n" not in str(error)
            seen["refused"] += form in ("csv", "parquet") or "--encoding" not in str(error)
            return
        with lines:
            index = index_requests(lines, read_one, text_llm.shape.max_context)
        seen["read"] += 1
        if form in ("jsonl", "text") and not data.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0")):
            assert index.offsets[-1] == len(data)
            assert index.num_lines == data.count(b"\n") + (data[-1:] not in (b"", b"\n"))
        assert (index.prompt_tokens + index.max_tokens <= text_llm.shape.max_context).all()
        assert (index.max_tokens[index.valid] >= 1).all()

    read()
    assert seen["read"] > 0 and (seen["refused"] > 0) == (form in ("csv", "parquet"))


def test_a_text_of_many_megabytes_is_refused_by_its_beginning(text_llm, monkeypatch):
    """To tokenize all of it would take a minute and gigabytes."""
    lengths = []

    class Counting:
        def __call__(self, text, **options):
            lengths.append(len(text))
            return {"input_ids": [5] * len(text)}

    monkeypatch.setattr(text_llm.codec, "tokenizer", Counting())
    with pytest.raises(InputError, match="has 16777216 characters, more than 1280 tokens; .* has 640 positions"):
        text_llm.codec.check("a" * (1 << 24), SamplingParams())
    assert max(lengths) < 1 << 16


NAMES = st.sampled_from(["a", "b", "\ud800", "\ud801"]) | st.text(max_size=2)


@pytest.mark.parametrize("hashing", [hash, lambda name: 7, lambda name: -len(name)])
def test_duplicate_names_are_those_of_a_plain_search(monkeypatch, hashing):
    """The result must not depend on hashes, which agree by chance once in 2**64."""
    monkeypatch.setattr(index_module, "hash", hashing, raising=False)

    @given(st.lists(st.none() | NAMES, max_size=20))
    def search(names):
        table = CustomIds(len(names), lambda number: names[number - 1])
        found = [name is not None and table.stands_before(name, number) for number, name in enumerate(names, 1)]
        assert found == [name is not None and name in names[:i] for i, name in enumerate(names)]

    search()


@given(st.lists(st.text(st.characters(codec=None), max_size=30) | st.sampled_from(["", "a " * 700]), max_size=12))
def test_prompts_encoded_together_equal_those_encoded_alone(text_llm, texts):
    """Texts that are not valid or too long do not affect others."""
    codec, params = text_llm.codec, SamplingParams()
    for special in (True, False):
        for text, found in zip(texts, codec.check_all([(text, params) for text in texts], special_tokens=special)):
            if isinstance(found, InputError):
                with pytest.raises(InputError) as error:
                    codec.check(text, params, special_tokens=special)
                assert str(error.value) == str(found)
            else:
                assert found == codec.tokenizer(text, add_special_tokens=special)["input_ids"]


@given(st.lists(st.binary(max_size=9) | st.just(b"\n"), max_size=30).map(b"".join), st.integers(1, 40))
def test_lines_and_their_offsets_are_those_of_split(data, size):
    """Blocks and chunks have any size, and some lines are longer than the maximum."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("BLOCK_BYTES", size), ("CHUNK_BYTES", size), ("CHUNK_LINES", 3), ("MAX_LINE_BYTES", 50)):
            patch.setattr(index_module, name, value)
        offsets, digest = find_lines(io.BytesIO(data))
        chunks = list(read_lines(io.BytesIO(data), offsets, 0, len(offsets) - 1))
    plain = [line + b"\n" for line in data.split(b"\n")[:-1]] + [data.split(b"\n")[-1]] * (
        data[-1:] not in (b"", b"\n")
    )
    assert np.diff(offsets).tolist() == [len(line) for line in plain] and digest == sha256(data).hexdigest()
    assert [line for chunk in chunks for line in chunk] == [line[:51] for line in plain]
    assert all(len(chunk) == 1 or len(chunk) <= 3 and sum(map(len, chunk)) <= size for chunk in chunks)


@pytest.mark.parametrize("chunk", [1, 3, 1024])
def test_a_request_index_agrees_with_reading_each_line_alone(text_llm, monkeypatch, chunk):
    """The file has completions, chats, lines refused for every reason, and duplicate names."""
    monkeypatch.setattr(index_module, "CHUNK_LINES", chunk)
    monkeypatch.setattr(text_llm.tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    chat = {"messages": [{"role": "user", "content": "def f():"}], "max_tokens": 3}
    bodies = [
        {"prompt": "import os", "max_tokens": 1}, {"prompt": "import os", "max_tokens": True}, chat,
        {"prompt": [5, 6], "max_tokens": 1000, "user": "u"}, {"prompt": "x" * 9000}, {"prompt": "\ud800"},
        {"prompt": ""}, {"prompt": [5] * 700}, {"prompt": [5000]}, chat | {"tools": [{}]}, {"prompt": "“é” \ufeff"},
    ]  # fmt: skip
    lines = [
        {"custom_id": f"r{i % 17}", "method": "POST", "url": f"/v1/{'chat/' * ('messages' in body)}completions"}
        | {"body": body}
        for i, body in enumerate(bodies * 3)
    ]
    raws = [json.dumps(line).encode() + b"\n" for line in lines] + [b"{\n", b"\n", b"[1]"]
    read = LineReader(LineRules("jsonl", {}, 0), text_llm.codec)
    index, names = index_requests(io.BytesIO(b"".join(raws)), read, text_llm.shape.max_context), set()
    for place, raw in enumerate(raws):
        try:
            request = read(raw, place + 1)
            name, prompt, limit = request.custom_id, len(request.token_ids), request.params.max_tokens
            lengths = [prompt, min(limit, text_llm.shape.max_context - prompt)]
        except Refused as refused:
            name, lengths = refused.custom_id, [0, 0]
        if name in names:
            lengths = [0, 0]
        assert [index.prompt_tokens[place], index.max_tokens[place]] == lengths, raw
        assert index.duplicates[place] == (name in names)
        names |= {name} - {None}
    assert 0 < index.valid.sum() < len(raws) and index.duplicates.sum() > 10


def test_a_long_file_is_answered_while_it_is_indexed(tiny, tmp_path, monkeypatch, capsys):
    """Answers come before the last lines are indexed. The index is the same as made at once, also on resuming."""
    from flexhybrid.jobs.run import job

    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    lines = [valid(f"v{i % 40}") if i % 7 else b"{broken" for i in range(60)]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n")

    def answer(out):
        assert run(tmp_path / "in.jsonl", tmp_path / out, tiny) == 0
        rows = read(tmp_path / out)
        for row in rows:
            row["response"]["body"].pop("created", None)
        return sorted(rows, key=lambda row: row["id"]), capsys.readouterr().out

    whole, _ = answer("whole.jsonl")
    monkeypatch.setattr(index_module, "CHUNK_LINES", 5)
    monkeypatch.setattr(job, "INDEXING_S", 0.0)
    monkeypatch.setattr("flexhybrid.jobs.run.lines.WINDOW", 3)
    released, counted, write = threading.Event(), [], job.JobLines.write
    count_on = index_module.RequestIndex.count_on

    def slow(index):
        counted.append(index.counted)
        assert len(counted) < 4 or released.wait(60)  # the third chunk waits for the first answer
        return count_on(index)

    def noted(self, answered):
        write(self, answered)
        if answered:
            assert released.is_set() or self.index.counted < 60
            released.set()

    monkeypatch.setattr(index_module.RequestIndex, "count_on", slow)
    monkeypatch.setattr(job.JobLines, "write", noted)
    rows, told = answer("out.jsonl")
    assert rows == whole and re.search(r"predicted from the first (5|10|15) lines", told) and released.is_set()
    kept = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(b"".join(kept[:30]))
    again, _ = answer("out.jsonl")
    assert again == whole


def test_a_request_index_that_fails_ends_the_run(tiny, tmp_path, monkeypatch):
    """The thread that indexes fails while requests are answered."""
    from flexhybrid.jobs.run import job

    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(valid(f"v{i}") for i in range(9)))
    monkeypatch.setattr(index_module, "CHUNK_LINES", 3)
    monkeypatch.setattr(job, "INDEXING_S", 0.0)
    monkeypatch.setattr("flexhybrid.jobs.run.lines.WINDOW", 3)
    monkeypatch.setattr(index_module.LineReader, "take_own_tokenizer", lambda read: setattr(read, "draft", None))
    with pytest.raises(TypeError):
        run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", tiny)
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 3


FOUR = ("--overwrite", "--max-num-seqs", "4")


def test_logits_that_are_not_finite_are_the_error_of_their_line(tmp_path, monkeypatch):
    """Only long prompts reach a position whose embedding is NaN."""
    model = save_opt(tmp_path / "model", layers=2)
    bodies = {f"r{i}": {"prompt": [5 + i] * (3 + 8 * i), "max_tokens": 4, "temperature": 0} for i in range(9)}
    whole = answered(tmp_path, tmp_path / "model", lines_of(bodies), *FOUR)
    with torch.no_grad():
        model.model.decoder.embed_positions.weight[2 + 48] = float("nan")
    model.save_pretrained(tmp_path / "model")
    found = answered(tmp_path, tmp_path / "model", lines_of(bodies), *FOUR)
    for name, body in bodies.items():
        if len(body["prompt"]) + body["max_tokens"] - 1 <= 48:
            assert found[name]["choices"] == whole[name]["choices"]
        else:
            error = found[name]["error"]
            assert "logits are not finite numbers in float32" in error["message"] and error["code"] == "invalid_value"
    assert sum("error" in body for body in found.values()) == 3
    with torch.no_grad():
        model.model.decoder.embed_positions.weight[:] = float("nan")
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(engine, "BROKEN_REQUESTS", 3)
    with pytest.raises(AssertionError):
        answered(tmp_path, tmp_path / "model", lines_of(bodies), *FOUR)


@pytest.mark.parametrize("failing", ["begin", "fill", "advance"])
def test_a_failing_grammar_is_the_error_of_its_line(failing, tmp_path, monkeypatch):
    pytest.importorskip("llguidance")
    form = {"guided_regex": "[a-y ]{9}"}
    bodies = {f"r{i}": {"prompt": "def f(", "max_tokens": 12, **(form if i % 2 else {})} for i in range(4)}
    bodies["bad"] = bodies["r1"] | {"guided_regex": "z{9}"}
    whole, compiled = answered(tmp_path, shipped.CHECKPOINT, lines_of(bodies), *FOUR), Grammars._compile
    assert "z" * 9 in whole["bad"]["choices"][0]["text"]

    class Failing:
        """A grammar whose function ``failing`` raises at its second call."""

        def __init__(self, inner):
            self.inner, self.calls = inner, 0

        def called(self, name):
            self.calls += name == failing
            if self.calls > (failing != "begin"):
                raise RuntimeError("the parser\nhas had enough")

        def begin(self):
            self.called("begin")
            return Failing(self.inner.begin())

        def fill(self, words):
            self.called("fill")
            self.inner.fill(words)

        def advance(self, token):
            self.called("advance")
            self.inner.advance(token)

    def compile_(grammars, params):
        return Failing(compiled(grammars, params)) if params.regex == "z{9}" else compiled(grammars, params)

    monkeypatch.setattr(Grammars, "_compile", compile_)
    found = answered(tmp_path, shipped.CHECKPOINT, lines_of(bodies), *FOUR)
    assert found["bad"]["error"]["message"].endswith("cannot go on: the parser has had enough")
    for name in bodies.keys() - {"bad"}:
        assert found[name]["choices"] == whole[name]["choices"]
