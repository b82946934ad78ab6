"""Test input and output formats other than JSON lines: tables, datasets, packed files, chats and Parquet."""

import codecs
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import runs
from runs import read

from flexhybrid import LLM, InputError, shipped
from flexhybrid.batch import table as table_module
from flexhybrid.batch.formats import Columns, format_of, open_lines
from flexhybrid.core.errors import InputError as Wrong
from flexhybrid.jobs.run.options import journal_of

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
PROMPTS = ["def close(self):", 'a "quoted", text\nof two lines', "import os"]


@pytest.fixture
def asked(tmp_path, monkeypatch) -> list[str]:
    """Return the prompts given to the model, as texts. Its answers come at once: the prompt's last token."""
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    texts: list[str] = []

    def answer(self, workload, open_request, completed, callbacks, on_trace=None):
        for request in range(workload.num_requests):
            generated, _ = open_request(request)
            texts.append(self.tokenizer.decode(generated.prompt_ids))
            generated.token_ids, generated.stop = generated.prompt_ids[-1:], 5
            completed(request, generated)
        callbacks.on_tokens(workload.num_requests)

    monkeypatch.setattr(LLM, "answer", answer)
    return texts


def run(source, out: Path, *more) -> int:
    return runs.run(source, out, shipped.CHECKPOINT, "--ordered", *more)


def sources(folder: Path) -> dict[str, tuple[Path, list[str]]]:
    """Write the same prompts in every format; return name -> (path, options)."""
    from datasets import Dataset, DatasetDict

    frame = pd.DataFrame({"n": [7, 8, 9], "q": PROMPTS})
    frame.to_csv(folder / "in.csv", index=False)
    frame.to_csv(folder / "in.csv.gz", index=False)
    frame.to_parquet(folder / "in.parquet", row_group_size=2)
    Dataset.from_pandas(frame).save_to_disk(str(folder / "data"), num_shards=2)
    shuffled = Dataset.from_pandas(frame.iloc[[2, 0, 1]]).select([1, 2, 0])  # rows chosen by an index
    DatasetDict({"train": shuffled}).save_to_disk(str(folder / "splits"))
    column = ["--column", "q"]
    files = {name: (folder / f"in.{name}", column) for name in ("csv", "csv.gz", "parquet")}
    return files | {"dataset": (folder / "data", column), "split": (folder / "splits/train", column)}


def test_every_format_gives_the_same_requests(asked, tmp_path):
    for name, (source, column) in sources(tmp_path).items():
        asked.clear()
        assert run(source, tmp_path / f"{name}.jsonl", *column, "--id-column", "n") == 0, name
        rows = read(tmp_path / f"{name}.jsonl")
        assert sorted(asked) == sorted("</s>" + prompt for prompt in PROMPTS)
        assert [(row["id"][-1], row["custom_id"]) for row in rows] == [("1", "7"), ("2", "8"), ("3", "9")], name


def test_a_line_may_be_a_bare_body(asked, tmp_path):
    """The custom_id is then "line-N". A line with any other field of a Batch line must be a whole Batch line."""
    lines = [{"prompt": PROMPTS[0]}, {"custom_id": "b", "prompt": PROMPTS[2], "max_tokens": 3}]
    lines += [{"prompt": "x", "url": "/v1/completions"}, {"text": "x"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl") == 0
    rows = read(tmp_path / "out.jsonl")
    assert sorted(asked) == sorted("</s>" + line["prompt"] for line in lines[:2])
    assert [row["custom_id"] for row in rows[:2]] == ["line-1", "b"]
    assert [row["response"]["status_code"] for row in rows] == [200, 200, 400, 400]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "import"}]}) + "\n")
    assert run(tmp_path / "chat.jsonl", tmp_path / "chats.jsonl") == 2  # the model has no template for chats


def test_packed_lines_and_the_standard_input_are_read(asked, tmp_path, monkeypatch):
    data = (runs.line("a", prompt="import") + "\n").encode()
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(data))
    assert run(tmp_path / "in.jsonl.gz", tmp_path / "a.jsonl") == 0
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    assert run("-", tmp_path / "b.jsonl") == 0
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"import\n")))
    assert run("-", tmp_path / "c.jsonl", "--format", "text") == 0
    assert asked == ["</s>import"] * 3


@pytest.mark.parametrize(
    "name, arguments, said",
    [
        ("in.csv", [], "needs --column; columns of {}: n, q"),
        ("data", [], "needs --column; columns of {}: n, q"),
        ("in.parquet", ["--column", "Q"], "unknown column of {} 'Q'; did you mean q? known: n, q"),
        ("in.csv", ["--column", "q", "--id-column", "m"], "unknown column of {} 'm'"),
        ("in.csv", ["--id-column", "n"], "--id-column needs --column"),
        ("in.csv", ["--column", "q", "--system-prompt", "x"], "--system-prompt needs --chat"),
        ("in.csv", ["--column", "q", "--chat"], "has no chat template: it cannot serve /v1/chat/completions; give one"),
        ("splits", ["--column", "q"], "name one of its splits, {}/train"),
        ("cache", ["--column", "q"], "it has no state.json"),
        ("torn.jsonl.gz", [], "Compressed file ended before"),
        ("header.csv", ["--column", "q"], "{} has a header and no rows"),
        ("blank.jsonl", [], "{} has only blank lines"),
        ("semi.csv", ["--column", "q"], "{} has semicolons between its columns"),
        ("tabs.csv", [], "delimiter='\\t'))\" < {} > commas.csv"),
        ("in.jsonl", ["--max-tokens", "0"], "--max-tokens is 0; it must be at least 1\n"),
        ("in.jsonl", ["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        ("in.jsonl", ["--chat-template", "broken.jinja"], "--chat-template broken.jinja, line 2: Expected"),
        ("in.jsonl", ["--chat"], "--chat is of text and tables"),
        ("in.jsonl", ["--chat-template", "none.jinja"], "cannot read none.jinja"),
        (
            "in.jsonl",
            ["--encoding", "base64"],
            "--encoding is 'base64'; it must be an encoding of text that Python knows",
        ),
        ("in.parquet", ["--column", "q", "--encoding", "cp1252"], "a parquet file needs none"),
        ("latin.csv", ["--column", "ü"], "the header of {} is not UTF-8: name the encoding, like --encoding cp1252"),
        ("long.csv", ["--column", "q"], "{} has a line longer than 16777216 characters"),
    ],
)
def test_unreadable_input_is_reported_with_the_remedy(asked, tmp_path, monkeypatch, capsys, name, arguments, said):
    monkeypatch.chdir(tmp_path)
    sources(tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "header.csv").write_text("n,q\n")
    (tmp_path / "blank.jsonl").write_text("\n  \n\n")
    (tmp_path / "semi.csv").write_text('n;q\n1;"import os"\n')
    (tmp_path / "tabs.csv").write_text("n\tq\n1\timport os\n")
    (tmp_path / "broken.jinja").write_text("{{ bos_token }}\n{{ }}")
    (tmp_path / "in.jsonl").write_text("{}")
    (tmp_path / "latin.csv").write_bytes(b"n,\xfc\n1,import\n")
    (tmp_path / "long.csv").write_bytes(b"n,q\n1," + bytes([120]) * (1 << 24) + b"\n")
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b"x" * 5000)[:-12])
    capsys.readouterr()
    assert run(tmp_path / name, tmp_path / "out.jsonl", *arguments) == 2
    error = capsys.readouterr().err
    assert said.format(tmp_path / name) in error and error.count("\n") == 1 and not asked


TEXT = "n,q\nMüller,Café?\nb,“ü”\n"


@pytest.mark.parametrize(
    "encoding, mark, named",
    [("utf-16-le", codecs.BOM_UTF16_LE, None), ("utf-16-be", codecs.BOM_UTF16_BE, None), ("utf-8", b"", "utf_8")]
    + [("utf-32-le", codecs.BOM_UTF32_LE, None), ("utf-32-be", codecs.BOM_UTF32_BE, None), ("utf-8", b"", None)]
    + [("utf-16-le", codecs.BOM_UTF16_LE, "utf-16-le"), ("cp1252", b"", "cp1252"), ("utf-8", codecs.BOM_UTF8, None)],
)
def test_text_is_read_in_any_encoding(tmp_path, encoding, mark, named):
    """Python's own codecs are the reference, for plain and packed files."""
    lines = [{"custom_id": "Müller", "prompt": "Café?"}, {"custom_id": "b", "prompt": "“ü”"}]
    jsonl = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines)
    for ending, text, columns in (("csv", TEXT, Columns("q", "n")), ("txt", TEXT, None), ("jsonl", jsonl, None)):
        for path in (tmp_path / f"in.{ending}", tmp_path / f"in.{ending}.gz"):
            data = mark + text.encode(encoding)
            path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
            with open_lines(path, format_of(path, "auto"), columns, named) as opened:
                read_again = opened.read().removeprefix(codecs.BOM_UTF8)
            if columns:
                assert [json.loads(raw) for raw in read_again.splitlines()] == [["Müller", "Café?"], ["b", "“ü”"]]
            else:
                assert read_again == text.encode()
            if encoding.startswith("utf-") and encoding != "utf-8":
                path.write_bytes(gzip.compress(data[len(mark) :]) if path.suffix == ".gz" else data[len(mark) :])
                with pytest.raises(InputError, match=f"without a byte order mark: give --encoding {encoding}$"):
                    open_lines(path, format_of(path, "auto"), columns)


def test_wrongly_encoded_lines_are_refused(asked, tmp_path):
    (tmp_path / "in.csv").write_bytes(TEXT.encode("cp1252") + b"c,plain\n")
    (tmp_path / "in.txt").write_bytes("é\nplain\n".encode("cp1252"))
    (tmp_path / "in.jsonl").write_bytes(
        b'{"custom_id": "\\ud800", "prompt": "x"}\n{"custom_id": "c", "prompt": "plain"}\n'
    )
    (tmp_path / "undefined.csv").write_bytes(b"n,q\na,\x81\nc,plain\n")  # cp1252 has no such byte
    columns = ("--column", "q", "--id-column", "n")
    cases = {"in.csv": (columns, ["b", None, "c"]), "in.txt": ((), ["line-1", "line-2"]), "in.jsonl": ((), [None, "c"])}
    cases["undefined.csv"] = (*columns, "--encoding", "cp1252"), ["a", "c"]
    for name, (more, ids) in cases.items():
        out = tmp_path / f"{name}.out"
        assert run(tmp_path / name, out, *more) == 0
        rows = [json.loads(raw.decode()) for raw in out.read_bytes().splitlines()]
        assert sorted(map(str, (row["custom_id"] for row in rows))) == sorted(map(str, ids)), name
        codes = [row["response"]["body"].get("error", {}).get("code") for row in rows]
        assert codes == ["invalid_utf8"] * (len(ids) - 1) + [None] and asked.pop() == "</s>plain" and not asked


@pytest.mark.parametrize("form", ["csv", "parquet", "dataset"])
def test_a_duplicate_column_is_refused_only_if_it_is_used(tmp_path, form):
    import pyarrow as pa
    from pyarrow import ipc, parquet

    table, path = pa.table([["a"], ["import"], ["x"], ["y"]], ["n", "q", "z", "z"]), tmp_path / f"in.{form}"
    if form == "parquet":
        parquet.write_table(table, path)
    elif form == "csv":
        path.write_bytes(codecs.BOM_UTF8 + b"n,q,z,z\na,import,x,y\n")
    else:
        path.mkdir()
        with ipc.new_stream(path / "data.arrow", table.schema) as writer:
            writer.write(table)
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    with open_lines(path, form, Columns("q", "n")) as lines:
        assert json.loads(lines.read()) == ["a", "import"]
    for columns in (Columns("z"), Columns("q", "z")):
        with pytest.raises(InputError, match="has 2 columns 'z': rename all but one of them"):
            open_lines(path, form, columns)


def test_the_advice_for_semicolons_works(asked, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "semi.csv").write_text('n;q\n1;"import os, re"\n')
    assert run("semi.csv", tmp_path / "out.jsonl", "--column", "q") == 2
    advice = capsys.readouterr().err.partition("convert it, ")[2].strip().replace("python3", sys.executable, 1)
    subprocess.run(advice, shell=True, check=True)
    assert run("commas.csv", tmp_path / "out.jsonl", "--column", "q") == 0 and asked == ["</s>import os, re"]


def test_ids_of_a_column_are_checked_like_those_of_lines(asked, tmp_path):
    pd.DataFrame({"i": ["a", None, "a", "b"], "q": ["x", "x", "x", None]}).to_parquet(tmp_path / "in.parquet")
    assert run(tmp_path / "in.parquet", tmp_path / "out.jsonl", "--column", "q", "--id-column", "i") == 0
    codes = [
        (row["custom_id"], row["response"]["body"].get("error", {}).get("code")) for row in read(tmp_path / "out.jsonl")
    ]
    missing = ("b", "missing_required_parameter")
    assert codes == [("a", None), (None, "invalid_custom_id"), ("a", "duplicate_custom_id"), missing]


def test_prompts_of_a_table_become_chats(asked, tmp_path, capsys):
    template, out = tmp_path / "template.jinja", tmp_path / "out.jsonl"
    template.write_text(TEMPLATE)
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "x"},
    ]
    pd.DataFrame({"q": ["import", "def"], "m": [messages, []]}).to_parquet(tmp_path / "in.parquet")
    common = ["--chat", "--chat-template", template]
    assert run(tmp_path / "in.parquet", out, "--column", "q", *common, "--system-prompt", "be") == 0
    assert sorted(asked) == ["<system>be<user>def<assistant>", "<system>be<user>import<assistant>"]
    body = read(out)[0]["response"]["body"]
    assert body["object"] == "chat.completion" and body["choices"][0]["message"]["role"] == "assistant"
    assert run(tmp_path / "in.parquet", out, "--column", "q", *common, "--system-prompt", "two") == 2
    assert 'chat.system was "be", is "two" (--system-prompt)' in capsys.readouterr().err
    pd.DataFrame({"n": ["a"], "q": ["import"]}).to_csv(tmp_path / "ids.csv", index=False)
    named = (tmp_path / "ids.csv", tmp_path / "ids.jsonl", "--column", "q", "--max-tokens", "1")
    assert run(*named, "--id-column", "n") == 0 and run(*named) == 2
    assert 'columns.custom_id was "n", is null (--id-column). Give' in capsys.readouterr().err
    asked.clear()
    assert run(tmp_path / "in.parquet", tmp_path / "b.jsonl", "--column", "m", *common) == 0
    assert asked == ["<user>hi<assistant>ho<user>x<assistant>"]
    assert "must be a list of messages" in read(tmp_path / "b.jsonl")[1]["response"]["body"]["error"]["message"]
    assert run(tmp_path / "in.parquet", tmp_path / "c.jsonl", "--column", "m") == 2
    assert "--chat answers it" in capsys.readouterr().err


def test_an_unused_chat_template_is_noted(asked, tmp_path, capsys):
    from transformers import AutoTokenizer

    model = tmp_path / "chat"
    model.mkdir()
    for path in shipped.CHECKPOINT.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    (tmp_path / "in.txt").write_text("import")
    assert run(tmp_path / "in.txt", tmp_path / "a.jsonl", "--model", model) == 0
    assert "has a chat template, which is not used: see --chat" in capsys.readouterr().err
    assert run(tmp_path / "in.txt", tmp_path / "b.jsonl", "--model", model, "--chat") == 0
    assert "not used" not in capsys.readouterr().err and asked == ["</s>import", "<user>import<assistant>"]


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_answers_in_a_table_are_made_from_the_journal(asked, tmp_path, capsys, monkeypatch, form):
    """The file is complete or absent. After a failure the same command writes it."""
    source, out = tmp_path / "in.txt", tmp_path / f"out.{form}"
    source.write_text("import\n\ndef f():\n")
    write, rows = table_module._row, []

    def failing(raw):
        if len(rows) == 1:
            raise OSError(28, "No space left on device")
        rows.append(raw)
        return write(raw)

    monkeypatch.setattr(table_module, "_row", failing)
    assert run(source, out) == 1 and "No space left" in capsys.readouterr().err
    assert not out.exists() and not list(tmp_path.glob("*.partial")) and len(read(journal_of(out))) == 3
    monkeypatch.setattr(table_module, "_row", write)
    monkeypatch.setattr(table_module, "ROWS", 2)
    assert run(source, out) == 0 and len(asked) == 2
    assert str(out) in capsys.readouterr().out
    frame, journal = getattr(pd, f"read_{form}")(out).fillna({"text": ""}), read(journal_of(out))
    assert frame.line.tolist() == [1, 2, 3] and frame.custom_id.tolist() == ["line-1", "line-2", "line-3"]
    assert frame.status_code.tolist() == [200, 400, 200] and "the prompt is empty" in frame.error[1]
    assert [json.loads(text) for text in frame.response] == [row["response"]["body"] for row in journal]
    for row in (0, 2):
        body = journal[row]["response"]["body"]
        assert frame.text[row] == body["choices"][0]["text"] and frame.finish_reason[row] == "stop"
        assert frame.prompt_tokens[row] == body["usage"]["prompt_tokens"] and frame.completion_tokens[row] == 1


def test_checking_the_options_of_a_run_loads_no_torch():
    code = "import sys, flexhybrid.jobs.run.options; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_malformed_dataset_is_refused_in_one_line(tmp_path):
    for state in (
        "[]",
        '{"_data_files": [{"filename": "x"}]}',
        '{"_data_files": 5}',
        "{}",
        '{"_indices_data_files": [1]}',
    ):
        (tmp_path / "state.json").write_text(state)
        with pytest.raises(Wrong) as error:
            open_lines(tmp_path, "dataset", Columns("q"))
        assert "\n" not in str(error.value) and isinstance(error.value, InputError)
