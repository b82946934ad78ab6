"""Test `flexhybrid run`: every line of the input is answered once; formats, errors, interrupts and order."""

import base64
import contextlib
import errno
import json
import os
import re
import shutil
import signal
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import faults
import numpy as np
import pytest
import torch
import warm_python
from forced_machine import ATTENTION
from models import save_opt
from runs import by_id, line, read, run

from flexhybrid import LLM, SamplingParams, cli, shipped
from flexhybrid import resolve as machine
from flexhybrid.batch import answers as answers_module
from flexhybrid.batch.answers import FAILED, AnswerFile
from flexhybrid.batch.manifest import manifest_path
from flexhybrid.batch.openai import Refused
from flexhybrid.batch.replies import error_line
from flexhybrid.batch.requests import line_seed
from flexhybrid.core.admission import wave_plan
from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.schedule.scheduler import AnswerLengths
from flexhybrid.core.trace import iteration_ends
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.jobs import machine as memory_here
from flexhybrid.jobs.run import job as run_module
from flexhybrid.jobs.run import opening
from flexhybrid.jobs.run import report as report_module
from flexhybrid.jobs.run.forecast import forecast, sorted_by_length
from flexhybrid.jobs.run.report import Samples
from flexhybrid.runtime.engine import Engine
from sim.presets import CAPTURE_MINI_BATCH_TOKENS
from tests.forced.run_memory import answer_at_once

ROOT = Path(__file__).parents[2]
SHIPPED = shipped.CHECKPOINT


@pytest.fixture(autouse=True)
def no_profile(tmp_path, monkeypatch):
    """Use an empty cache folder: no profile of this machine affects these tests."""
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))


def requests(path: Path, count=12) -> Path:
    generator = np.random.default_rng(1)
    lines = [
        line(f"r{i}", prompt=generator.integers(3, 61, 1 + i % 7).tolist(), max_tokens=1 + i % 5, temperature=i % 2)
        for i in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def source(tmp_path) -> Path:
    return requests(tmp_path / "in.jsonl")


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out.jsonl"


def known_machine() -> Hardware:
    """Return a machine with made-up speeds, so that predictions exist."""
    lines = {key: Line(1e-4, 1e-12, 1e-10) for key in ("compute", "h2d", "d2h", "host_compute")}
    return Hardware("local", "cpu", lines, dtype="float32")


def test_answers_are_those_of_generate_in_openais_form(tiny, source, out, tiny_llm, capsys):
    assert run(source, out, tiny, "--seed", "4") == 0
    told = capsys.readouterr().out
    assert "12 answered, 0 refused, 0 left of 12 lines" in told and "tokens of answers in all; " in told
    assert "no speed: this machine is not profiled" in told and "limited by" not in told
    assert "tokens/s; the whole command " in told
    asked = read(source)
    assert len({line_seed(seed, number) for seed in (0, 4) for number in (1, 2)}) == 4
    params = [
        SamplingParams(
            max_tokens=one["body"]["max_tokens"], temperature=one["body"]["temperature"], seed=line_seed(4, number)
        )
        for number, one in enumerate(asked, 1)
    ]
    expected = tiny_llm.generate([one["body"]["prompt"] for one in asked], params)
    rows = {row["id"]: row for row in read(out)}
    for number, (one, answer) in enumerate(zip(asked, expected, strict=True), 1):
        row, completion = rows[f"batch_req_{number:08d}"], answer.outputs[0]
        assert (row["custom_id"], row["error"], row["response"]["status_code"]) == (one["custom_id"], None, 200)
        body = row["response"]["body"]
        assert body["object"] == "text_completion" and body["model"] == tiny_llm.shape.name
        (choice,) = body["choices"]
        assert choice["token_ids"] == completion.token_ids and choice["finish_reason"] == completion.finish_reason
        prompt = len(one["body"]["prompt"])
        tokens = len(completion.token_ids)
        assert body["usage"] == {
            "prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens,
        }  # fmt: skip


def test_killed_anywhere_and_resumed_nothing_is_lost_or_changed():
    """SIGKILL comes at one point of each of the nine kinds; ``make soak`` tries more."""
    amounts = {"--requests": 12, "--points": 11, "--timed": 0, "--batch": 8, "--disk-step": 0}
    words = [sys.executable, str(ROOT / "tests/soak.py"), *(str(one) for pair in amounts.items() for one in pair)]
    done = warm_python.run(words, timeout=280)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["killed"] >= 10


def test_a_resumed_run_expects_answers_as_long_as_those_that_ended(tiny, tmp_path, capsys, monkeypatch):
    """12 of 24 answers are there. Their limits are 3 to 5 tokens; the file says that each has 2 tokens."""
    source, out = requests(tmp_path / "in.jsonl", 24), tmp_path / "out.jsonl"
    assert run(source, out, tiny) == 0
    lines = [answered for answered in read(out) if int(answered["custom_id"][1:]) % 5 >= 2][:12]
    for answered in lines:
        answered["response"]["body"]["usage"]["completion_tokens"] = 2
    out.write_text("".join(json.dumps(answered) + "\n" for answered in lines))
    predicted, admitted, forecast_of, made = [], [], run_module.forecast, AnswerLengths.__init__

    def learns(self, *arguments):
        made(self, *arguments)
        admitted.append(self.ended.copy())

    monkeypatch.setattr("flexhybrid.jobs.run.lines.WINDOW", 12)
    monkeypatch.setattr(run_module, "forecast", lambda llm, known: predicted.append(known) or forecast_of(llm, known))
    monkeypatch.setattr(AnswerLengths, "__init__", learns)
    assert run(source, out, tiny, "--max-num-seqs", "3") == 0 and len(by_id(out)) == 24
    assert "3 answers at a time" in capsys.readouterr().out
    assert admitted[0][:6].tolist() == [0, 0, 12, 0, 0, 0]
    assert predicted[0].max_tokens.max() > 2 and predicted[0].answers.tolist() == [
        min(2, limit) for limit in predicted[0].max_tokens.tolist()
    ]


def test_answers_are_on_the_disk_while_the_batch_runs(tiny, tmp_path, monkeypatch):
    """Each answer is written in the iteration of its last token, before longer answers end."""
    limits = [1, 3, 30, 2, 9]  # of one batch
    source, out, there = tmp_path / "in.jsonl", tmp_path / "out.jsonl", []
    source.write_text(
        "".join(line(f"r{i}", prompt=[5 + i], max_tokens=n, ignore_eos=True) + "\n" for i, n in enumerate(limits))
    )

    def advance(self, count, advance=run_module.JobLines.advance):
        there.append(set(by_id(out)))
        advance(self, count)

    monkeypatch.setattr(run_module.JobLines, "advance", advance)
    assert run(source, out, tiny) == 0
    assert len(there) == 30
    for iteration, names in enumerate(there, 1):
        assert names == {f"batch_req_{i:08d}" for i, limit in enumerate(limits, 1) if limit <= iteration}


def test_a_tail_torn_at_any_byte_is_repaired(tiny, tmp_path):
    """Any truncation within the last two lines keeps all whole lines."""
    lines = [error_line(n, Refused("c", f"text {n} “é”")) for n in range(1, 5)]
    path = tmp_path / "out.jsonl"
    for cut in range(len(b"".join(lines[:2])), len(b"".join(lines)) + 1):
        data = b"".join(lines)[:cut]
        path.write_bytes(data)
        states = np.zeros(4, dtype=np.uint8)
        file = AnswerFile(path)
        file.check(states)
        assert path.read_bytes() == data  # not yet
        file.repair()
        kept = [one for n, one in enumerate(lines) if len(b"".join(lines[: n + 1])) - 1 <= cut]
        assert path.read_bytes() == b"".join(kept)
        assert (states == FAILED).sum() == len(kept)
        rest = lines[len(kept) :]
        file.append(rest)
        file.close()
        assert path.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("damage", ["cut", "zeros", "twice", "beyond", "foreign"])
def test_damage_before_the_tail_is_refused_and_nothing_touched(tiny, source, out, capsys, damage):
    assert run(source, out, tiny) == 0
    rows = out.read_bytes().splitlines(keepends=True)
    rows[4] = {
        "cut": rows[4][:50] + b"\n", "zeros": bytes(len(rows[4]) - 1) + b"\n", "twice": rows[2],
        "beyond": rows[4].replace(b"batch_req_000000", b"batch_req_000009"), "foreign": b'{"id": 3}\n',
    }[damage]  # fmt: skip
    rows[-1] = rows[-1][:-30]
    out.write_bytes(b"".join(rows))
    before = out.read_bytes()
    assert run(source, out, tiny) == 2
    assert "line 5" in (error := capsys.readouterr().err) and "nothing was changed" in error
    assert out.read_bytes() == before
    assert run(source, out, tiny, "--overwrite") == 0 and len(by_id(out)) == 12


def test_a_disk_failure_gives_one_line_and_loses_no_answer(tiny, tmp_path, capsys, monkeypatch):
    """This covers some of the faults of ``make soak``; answers come at once."""
    monkeypatch.setattr(Engine, "run", answer_at_once)
    monkeypatch.setattr(answers_module, "ROOM_WAIT_S", 0.0)
    job = tmp_path / "job"
    more = ["--ordered", "--errors", str(job / "errors.jsonl"), "--report", str(job / "report.md")]
    job.mkdir()
    source = requests(job / "in.jsonl", 4)
    with faults.Faults(job) as whole:
        assert run(source, job / "out.parquet", tiny, *more) == 0
    chosen, points = [], faults.points(whole.seen)
    for kind in ("error", "no space", "full", "short"):
        of_kind = [point for point in points if point[0] == kind]
        chosen += of_kind[:: len(of_kind) // 4]
    chosen += [point for point in points if point[0] == "error" and whole.seen[point[1] - 1] == ("read", str(source))]
    names, expected = {path.name for path in job.iterdir()}, by_id(job / "out.parquet.jsonl")
    for point in chosen:
        shutil.rmtree(job)
        job.mkdir()
        requests(source, 4)
        (job / "out.parquet.jsonl.manifest.json.partial").touch()  # a kill's
        capsys.readouterr()
        with faults.Faults(job, *point) as failing:
            status = run(source, job / "out.parquet", tiny, *more)
        assert faults.is_one_line(status, capsys.readouterr().err, failing.happened), point
        assert run(source, job / "out.parquet", tiny, *more) == 0
        assert by_id(job / "out.parquet.jsonl") == expected and {path.name for path in job.iterdir()} == names, point


@pytest.mark.parametrize("kind", ["full", "left", "ascii", "none"])
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_broken_output_streams_do_not_end_a_command(tiny, tmp_path, monkeypatch, kind, more):
    """stdout and stderr are on a full disk, have no reader, cannot encode a name, or are closed."""
    source, out = requests(tmp_path / "é.jsonl", 2), tmp_path / "é.out"
    simulate = ["simulate", "--system", "kv_only", "--model", "opt-1.3b", "--hardware", "t4", "--batch", "8"]
    simulate += ["--input-len", "64", "--output-len", "8"]
    statuses = []
    for command in (lambda: run(source, out, tiny, *more), lambda: cli.main([*simulate, *more])):
        with monkeypatch.context() as patch, contextlib.ExitStack() as stack:  # closed as Python does at its end
            for name in ("stdout", "stderr"):
                reader, writer = os.pipe()
                os.close(reader)
                place = {"full": "/dev/full", "left": writer, "ascii": tmp_path / name}.get(kind)
                opened = stack.enter_context(open(place, "a", encoding="ascii")) if place else None
                patch.setattr(sys, name, opened)
            statuses.append(command())
    assert statuses == [0, 1 if kind == "full" else 0], "what simulate says is all it does"
    assert len(by_id(out)) == 2
    assert kind != "ascii" or more or "\\xe9.out" in (tmp_path / "stdout").read_text()


@pytest.mark.parametrize("short", [False, True])
def test_while_a_disk_is_full_answers_wait_and_the_run_goes_on(tiny, source, out, tmp_path, capsys, monkeypatch, short):
    """Some attempts to write fail, up to after the batch's end; then every line is written once."""
    assert run(source, tmp_path / "whole.jsonl", tiny) == 0
    expected, write = by_id(tmp_path / "whole.jsonl"), os.write
    monkeypatch.setattr(answers_module, "RETRY_S", 1e-6)
    for attempts in (1, 3, 40):
        left = [attempts]

        def failing(fd, data, left=left):
            left[0] -= 1
            if left[0] < 0:
                return write(fd, data)
            if short and left[0] % 2:
                return write(fd, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

        out.unlink(missing_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(answers_module.os, "write", failing)
            assert run(source, out, tiny) == 0
        assert by_id(out) == expected and left[0] < 0
        told = capsys.readouterr().err
        assert told.count("answers wait in memory: make room") == told.count("the waiting answers are written") == 1


def test_too_many_waiting_answers_end_the_run_with_whole_lines(tiny, source, out, capsys, monkeypatch):
    monkeypatch.setattr(answers_module, "MOST_WAITING_BYTES", 500)

    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(answers_module.os, "write", full)
        assert run(source, out, tiny) == 1
    assert "make room; nothing was written; give the same" in capsys.readouterr().err and out.read_bytes() == b""
    assert run(source, out, tiny) == 0 and len(by_id(out)) == 12


def test_a_file_has_one_writer(tiny, source, out, capsys):
    file = AnswerFile(out)
    assert run(source, out, tiny) == 2 and "another run is writing" in capsys.readouterr().err
    file.close()
    assert run(source, out, tiny) == 0


def test_a_resume_with_other_options_is_refused_and_names_them(tiny, source, out, tmp_path, capsys):
    assert run(source, out, tiny, "--verify") == 0
    before = out.read_bytes()
    assert run(source, out, tiny, "--seed", "5") == 2
    assert "sampling.seed was 0, is 5 (--seed)" in capsys.readouterr().err
    source.write_text(source.read_text() + line("more", prompt=[5]) + "\n")
    assert out.read_bytes() == before
    assert run(source, out, tiny) == 0 and len(by_id(out)) == 13
    assert "the input was changed: 12 answers kept; new lines" in capsys.readouterr().out


def test_a_run_without_any_answer_can_be_corrected(tiny, source, out, capsys):
    source.write_text("texts that are\nno JSON\n")
    assert run(source, out, tiny) == 2
    assert "line 1: the line is not JSON" in (message := capsys.readouterr().err) and "--format text" in message
    requests(source)
    assert run(source, out, tiny, "--seed", "4") == 0 and len(by_id(out)) == 12
    assert run(source, out, tiny, "--seed", "5") == 2  # from now on there is something to lose


def test_limits_beyond_the_models_positions_are_reported(tiny, source, out, capsys):
    limits = {"within": 90, "beyond": 91, "far": 10**6, "all": None}  # the model takes 96 tokens
    lines = [line(name, prompt=[5] * 6, max_tokens=limit, stop=[]) for name, limit in limits.items()]
    source.write_text("\n".join(lines) + "\n")
    assert run(source, out, tiny) == 0
    said = capsys.readouterr().out
    assert "2 requests may end before max_tokens: prompt and max_tokens exceed the model's context of 96 tokens" in said
    source.write_text(lines[0] + "\n")
    assert run(source, out, tiny, "--overwrite") == 0 and "sooner than asked" not in capsys.readouterr().out


def test_bad_lines_become_errors_with_their_number_and_the_rest_runs(tiny, tmp_path, capsys):
    bad = {
        "{broken": "invalid_json", "": None, '["a"]': "invalid_json", '{"x": NaN}': "invalid_json",
        "[" * 100_000: "invalid_json",
        json.dumps({"method": "POST", "url": "/v1/completions", "body": {"prompt": [5]}}): "missing_custom_id",
        json.dumps({"custom_id": 7, "method": "POST", "url": "/v1/completions", "body": {}}): "invalid_custom_id",
        json.dumps({"custom_id": "g", "method": "GET", "url": "/v1/completions"}): "invalid_method",
        json.dumps({"custom_id": "bare", "method": "POST", "url": "/v1/completions"}): "invalid_body",
        json.dumps({"custom_id": "null", "method": "POST", "url": "/v1/completions", "body": None}): "invalid_body",
        json.dumps({"custom_id": "nowhere", "method": "POST"}): "invalid_url",
        line("emb", "/v1/embeddings", input="x"): "invalid_url",
        line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "x"}]): "invalid_url",
        line("none"): "missing_required_parameter",
        json.dumps({"prompts": [5], "n": 1}): "missing_required_parameter",  # a body alone, but for a letter
        line("stream", prompt=[5], stream=True): "unsupported_parameter",
        line("tools", prompt=[5], tools=[{}]): "unsupported_parameter",
        line("slip", promt="x"): "missing_required_parameter",
        line("typo", prompt=[5], max_token=3): "unknown_parameter",
        line("misspelt", prompt=[5], temperature=0, top_P=3): "unknown_parameter",
        line("n", prompt=[5], n=2, best_of=3): "invalid_value",
        line("hot", prompt=[5], temperature="hot"): "invalid_value",
        line("long", prompt=[5] * 96): "invalid_value",
        line("word", prompt=[61]): "invalid_value",
        line("many", prompt=[[5], [6]]): "invalid_value",
        line("text", prompt="no tokenizer"): "invalid_value",
        line("\ud800", prompt=[5], stop="x"): "invalid_utf8",
        line("r1", prompt=[5]): "duplicate_custom_id",
    }  # fmt: skip
    source, out, errors = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    lines = [line("r1", prompt=[5, 6], max_tokens=2), *bad, line("r2", prompt=[7], user="u", metadata={"a": "b"})]
    source.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe")
    assert run(source, out, tiny, "--errors", str(errors)) == 0
    assert "errors.jsonl; most of them: invalid_value (6), invalid_json (4), " in capsys.readouterr().out
    assert [row["custom_id"] for row in read(out)] in (["r1", "r2"], ["r2", "r1"])
    params = {row["custom_id"]: row["response"]["body"]["error"]["param"] for row in read(errors)}
    wrong = {"typo": "max_token", "misspelt": "top_P", "hot": "temperature", "n": "best_of", "tools": "tools"}
    assert {name: params[name] for name in wrong} == wrong
    told = {row["custom_id"]: row["response"]["body"]["error"]["message"] for row in read(errors)}
    assert "unless the line is a body alone" not in told["g"]
    assert "prompt is missing; unknown field 'promt': did you mean 'prompt'?" in told["slip"]
    assert [text for text in told.values() if 'no prompt and no messages, but "prompts", "n"' in text]
    assert "body is missing" in told["bare"] and "body is null" in told["null"] and "url is missing" in told["nowhere"]
    found = {row["id"]: row["response"] for row in read(errors)}
    for number, code in enumerate([*bad.values(), None, "invalid_utf8"], 2):
        if code:
            response = found.pop(f"batch_req_{number:08d}")
            error = response["body"]["error"]
            assert (response["status_code"], error["code"]) == (400, code), error
            assert error["message"].startswith(f"line {number}: ") and error["type"] == "invalid_request_error"
    assert not found
    assert run(source, out, tiny, "--errors", str(errors)) == 0  # and both files are read again
    assert "30 before this run" in capsys.readouterr().out
    before = errors.read_bytes()
    assert run(source, out, tiny, "--overwrite") == 0 and len(read(out)) == 30
    assert "errors.jsonl, with the refused lines of the run before, is left as it is" in capsys.readouterr().out
    assert errors.read_bytes() == before
    assert run(source, out, tiny, "--overwrite") == 0 and "left as it is" not in capsys.readouterr().out
    source.write_text("\n\n")
    assert run(source, tmp_path / "none.jsonl", tiny) == 2 and not read(tmp_path / "none.jsonl")
    source.write_text("")
    assert run(source, tmp_path / "empty.jsonl", tiny) == 2


def test_chat_lines_go_through_the_tokenizers_template(source, out, tmp_path, capsys):
    from transformers import AutoTokenizer

    model = tmp_path / "chat"
    model.mkdir()
    for path in SHIPPED.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "import"}]}]
    url = "/v1/chat/completions"
    lines = [
        line("a", url, messages=messages, max_completion_tokens=4, temperature=0),
        line("b", url, messages=[{"role": "user", "content": 5}]),
        line("c", url, messages=[{"role": "odd", "content": "x"}]),
    ]
    source.write_text("\n".join(lines))
    assert run(source, out, model) == 2 and "no chat template" in capsys.readouterr().err
    completion = line("d", "/v1/completions", prompt="import", max_tokens=2)
    for mixed in ([lines[0], completion], [completion, lines[0]]):  # whichever comes first
        source.write_text("\n".join(mixed))
        assert run(source, out, model) == 0
        of = {row["custom_id"]: row for row in read(out)}
        assert "no chat template" in json.dumps(of["a"]) and of["d"]["response"]["status_code"] == 200
        out.unlink()
        out.with_name("out.jsonl.manifest.json").unlink()
    source.write_text("\n".join(lines))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'odd' %}{{ raise_exception('odd role') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.save_pretrained(model)
    assert run(source, out, model) == 0
    rows = {row["custom_id"]: row["response"] for row in read(out)}
    text = "system: be\nuser: import\nassistant:"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with LLM(SHIPPED, "kv_only", device="cpu", dtype="float32") as llm:
        expected = llm.generate([ids], SamplingParams(max_tokens=4, temperature=0))[0].outputs[0]
    body = rows["a"]["body"]
    assert body["choices"][0]["message"] == {"role": "assistant", "content": expected.text}
    assert body["object"] == "chat.completion" and body["usage"]["prompt_tokens"] == len(ids)
    assert rows["b"]["status_code"] == rows["c"]["status_code"] == 400
    assert "odd role" in rows["c"]["body"]["error"]["message"]


def test_sampling_defaults_are_the_commands_then_the_checkpoints(tmp_path, capsys):
    save_opt(tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0, "max_new_tokens": 3, "eos_token_id": 60}))
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join([line("a", prompt=[5, 6]), line("b", prompt=[7], max_tokens=2)]))

    def tokens(*flags) -> list[int]:
        assert run(source, tmp_path / "out.jsonl", tmp_path / "model", "--overwrite", *flags) == 0
        return [row["response"]["body"]["usage"]["completion_tokens"] for row in read(tmp_path / "out.jsonl")]

    assert sorted(tokens()) == [2, 3]
    assert "sampling   max_tokens 3, temperature 0, of the checkpoint's" in capsys.readouterr().out
    assert sorted(tokens("--max-tokens", "5")) == [2, 5]
    assert "sampling   temperature 0, of the checkpoint's" in capsys.readouterr().out
    assert sorted(tokens("--generation-config", "none", "--temperature", "0", "--max-tokens", "4")) == [2, 4]
    assert "sampling   " not in capsys.readouterr().out
    assert run(source, tmp_path / "out.jsonl", tmp_path / "model") == 2
    assert "max_tokens was 4, is 3" in capsys.readouterr().err
    assert run(source, tmp_path / "other.jsonl", tmp_path / "model", "--chat-template-kwargs", "[]") == 2
    assert "--chat-template-kwargs is '[]'; it must be an object like" in capsys.readouterr().err


def test_a_shared_system_prompt_is_computed_once_with_equal_answers(tiny, tmp_path, capsys):
    system = np.random.default_rng(0).integers(3, 61, 40).tolist()
    lines = [line(f"r{i}", prompt=[*system, 3 + i], max_tokens=4, temperature=i % 2, n=1 + i % 3) for i in range(8)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    answers = []
    for flags in ((), ("--no-enable-prefix-caching",)):
        assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", tiny, "--overwrite", *flags) == 0
        answers.append(by_id(tmp_path / "out.jsonl"))
        # of 15 requests all but one find two blocks
        assert (f"{14 * 32} prompt tokens were not computed" in capsys.readouterr().out) == (not flags)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_ends_the_iteration_and_the_next_run_goes_on(
    tiny, source, out, tmp_path, capsys, monkeypatch, times
):
    lines = [line(f"r{i}", prompt=[5 + i], max_tokens=[2, 40][i % 2], temperature=0, ignore_eos=True) for i in range(8)]
    source.write_text("\n".join(lines))
    known_machine().save(tmp_path / "cache/hardware-cpu.json")
    monkeypatch.setattr(run_module.CpuUse, "others_since", lambda after, before: 0.2)
    assert run(source, tmp_path / "whole.jsonl", tiny) == 0
    told = capsys.readouterr().out
    assert "(predicted " in told and "other processes used 20% of the cores" in told
    heard = []

    def interrupted(self, count, advance=run_module.Progress.advance):
        advance(self, count)
        if self.title == "tokens":
            heard.append(count)
            if len(heard) == 5:
                for _ in range(times):
                    os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run_module.Progress, "advance", interrupted)
    assert run(source, out, tiny, "--overwrite") == 130
    assert len(heard) == 5 if times == 2 else 5 < len(heard) < 10
    told, warned = capsys.readouterr()
    again = "give the same command again, without --overwrite, to continue"
    assert (again in told) == ("tokens of unfinished answers are lost" in told) == (times == 1)
    assert "(predicted " not in told and "no answer could be there yet" not in told
    lost = re.search(r"(?m)^8 tokens and (\d+) of unfinished answers in .*tokens/s; the whole command", told)
    assert bool(lost) == (times == 1) and (lost is None or f"{lost[1]} tokens of unfinished answers are lost" in told)
    assert (f"answers written so far are kept; {again}" in warned) == (times == 2)
    assert len(by_id(out)) == 4  # the short ones
    assert run(source, out, tiny) == 0
    assert by_id(out) == by_id(tmp_path / "whole.jsonl")


def test_the_whole_command_is_timed_from_its_beginning(tiny, tmp_path, capsys, monkeypatch):
    """The time includes imports, which are done before a run begins."""
    monkeypatch.setattr(cli, "time", SimpleNamespace(time=lambda: time.time() - 3600))
    assert run(requests(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", tiny) == 0
    assert "the whole command 60 min" in capsys.readouterr().out


def test_compile_time_is_reported_apart_from_the_speed(tiny, tmp_path, capsys, monkeypatch):
    event = pytest.importorskip("numba.core.event")

    def compiles(self, *given, answer=LLM.answer, **more):
        with event.trigger_event("numba:compile"), event.trigger_event("numba:compile"):
            time.sleep(0.5)  # and what it calls, too
        return answer(self, *given, **more)

    source = requests(tmp_path / "in.jsonl")
    assert run(source, tmp_path / "out.jsonl", tiny) == 0  # by now all kernels are compiled
    capsys.readouterr()
    assert run(source, tmp_path / "out.jsonl", tiny, "--overwrite") == 0 and "compiled" not in capsys.readouterr().out
    monkeypatch.setattr(LLM, "answer", compiles)
    began = time.monotonic()
    assert run(source, tmp_path / "out.jsonl", tiny, "--overwrite", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert 0.5 <= record["compiling_s"] <= time.monotonic() - began - record["seconds"]
    assert record["tokens_per_s"] == pytest.approx(record["tokens"] / record["seconds"])
    assert run(source, tmp_path / "out.jsonl", tiny, "--overwrite") == 0
    assert "compiled   new kernels in another 0." in capsys.readouterr().out


def test_copied_weights_with_another_time_are_refused_with_advice(tiny, source, out, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    assert run(source, out, copy) == 0
    os.utime(copy / "model.safetensors", (5, 5))
    assert run(source, out, copy) == 2
    assert "mtime_ns was" in (error := capsys.readouterr().err) and "touch -d @SECONDS" in error


def test_an_output_of_another_model_is_refused_with_its_changed_files(tiny, source, out, tmp_path, capsys, monkeypatch):
    """The refusal comes before the machine is measured."""
    assert run(source, out, tiny) == 0
    before, other = out.read_bytes(), tmp_path / "other"
    save_opt(other, layers=3)
    monkeypatch.setattr(opening, "measure_for_model", lambda *_: pytest.fail("measured"))
    assert run(source, out, other, policy="auto") == 2
    error = capsys.readouterr().err
    assert "another model than --model (config.json, model.safetensors differ)" in error and "--overwrite" in error
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    "more, words",
    [
        (["--dtype", "bfloat16"], 'numbers.dtype was "float32", is "bfloat16"'),
        (["--seed", "3"], "sampling.seed was 0, is 3"),
        (["--errors", "ERRORS"], 'errors was null, is "errors" (--errors)'),
        (["--no-manifest"], "no manifest next to"),
    ],
)
@pytest.mark.parametrize("measures", [["--reprofile"], ["--link-gb-per-s", "2"]])
def test_an_output_of_another_run_is_refused_before_the_machine_is_measured(
    more, words, measures, tiny, source, out, tmp_path, capsys, monkeypatch
):
    assert run(source, out, tiny) == 0
    if more == ["--no-manifest"]:
        manifest_path(out).unlink()
        more = []
    monkeypatch.setattr(opening, "measure_for_model", lambda *_: pytest.fail("measured"))
    more = [str(tmp_path / "errors") if text == "ERRORS" else text for text in more]
    assert run(source, out, tiny, *measures, *more, policy="auto") == 2
    assert words in capsys.readouterr().err


def test_the_machine_is_measured_only_if_a_policy_is_searched(tiny, tmp_path, capsys, monkeypatch):
    source, out, measured = requests(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", []
    monkeypatch.setattr(opening, "measure_for_model", lambda *_: measured.append(1) or known_machine())
    assert run(source, out, tiny, policy="auto") == 0 and not measured
    assert "not measured, as all requests fit the device (--reprofile does that)" in capsys.readouterr().out
    for more in (["--link-gb-per-s", "2"], ["--reprofile"]):
        measured.clear()
        assert run(source, out, tiny, "--overwrite", *more, policy="auto") == 0 and measured == [1]
        assert "tokens/s" in capsys.readouterr().out
    measured.clear()
    monkeypatch.setattr(opening, "resident_at_once", lambda *_: None)  # not all fit the device
    assert run(source, out, tiny, "--overwrite", policy="auto") == 0 and measured == [1]


def test_a_device_too_small_for_anything_is_refused_before_it_is_measured(tiny, source, out, capsys, monkeypatch):
    monkeypatch.setattr(opening, "measure_for_model", lambda *_: pytest.fail("measured"))
    assert run(source, out, tiny, "--device-memory", "1KiB", policy="auto") == 2
    assert "device memory: model" in (error := capsys.readouterr().err) and "the budget is" in error
    assert not out.exists()


def test_a_device_out_of_memory_halves_the_mini_batch_and_loses_nothing(
    tiny, source, out, tmp_path, capsys, monkeypatch
):
    assert run(source, tmp_path / "whole.jsonl", tiny) == 0
    seen = []

    def limited(self, executor, *rest, engine_run=Engine.run, **options):
        wave = executor.wave
        seen.append((wave.workload.num_requests, wave.policy.max_mini_batch_tokens))
        if wave.workload.num_requests > 3:
            raise torch.OutOfMemoryError("not on this device")
        return engine_run(self, executor, *rest, **options)

    monkeypatch.setattr(Engine, "run", limited)
    assert run(source, out, tiny) == 0
    most = CAPTURE_MINI_BATCH_TOKENS
    assert seen == [(12, most), (6, most // 2), (3, most // 4)]  # the others join those three
    assert by_id(out) == by_id(tmp_path / "whole.jsonl")
    monkeypatch.setattr(Engine, "run", lambda *a, **b: (_ for _ in ()).throw(torch.OutOfMemoryError("never")))
    assert run(source, tmp_path / "x.jsonl", tiny) == 2 and "too little memory" in capsys.readouterr().err


def test_conflicting_paths_are_refused(tiny, tmp_path, capsys):
    source = requests(tmp_path / "in.jsonl")
    before = source.read_bytes()
    assert run(source, source, tiny) == 2 and "the same file" in capsys.readouterr().err
    assert run(source, tmp_path / "no" / "out.jsonl", tiny) == 2
    assert run(source, tmp_path / "out.jsonl", tiny, "--host-memory", "1KiB") == 2
    assert run(tmp_path / "none.jsonl", tmp_path / "out.jsonl", tiny) == 2
    for place in ("/dev/null", "/dev/stdout"):  # a regular file, where the shell sends it to one
        assert run(source, Path(place), tiny) == 2 and "not a regular file" in capsys.readouterr().err
    assert (
        cli.main(["run", "-i", "/dev/null", "--format", "jsonl", "-o", str(tmp_path / "o"), "--model", str(tiny)]) == 2
    )
    os.link(source, tmp_path / "other.jsonl")
    assert run(source, tmp_path / "other.jsonl", tiny) == 2 and "the same file" in capsys.readouterr().err
    (tmp_path / "policy.json").write_text('{"name": "mine"}')
    trace = ["--trace", str(tmp_path / "policy.json")]
    assert run(source, tmp_path / "o.jsonl", tiny, *trace, policy=str(tmp_path / "policy.json")) == 2
    assert "the same file" in capsys.readouterr().err
    assert source.read_bytes() == before


@pytest.mark.parametrize("option", ["-o", "--errors", "--trace", "--report"])
def test_an_output_path_must_have_the_ending_of_its_format(tiny, tmp_path, capsys, option):
    """Every other ending of data, text and packed files is refused in one line."""
    own = {"-o": ".jsonl", "--errors": ".jsonl", "--trace": ".json", "--report": ".md"}[option]
    source = requests(tmp_path / "in.jsonl", 1)
    for ending in (".csv", ".tsv", ".xlsx", ".html", ".pdf", ".jsonl.gz", ".zst", ".parquet", ".md", ".jsonl", ".json"):
        path = tmp_path / f"answers{ending}"
        out = path if option == "-o" else tmp_path / "out.jsonl"
        tables = {"-o": (".parquet", ".csv"), "--report": (".html",)}.get(option, ())
        if ending in (own, own[:5], *tables):
            continue
        assert run(source, out, tiny, *([] if option == "-o" else [option, str(path)])) == 2
        error = capsys.readouterr().err
        assert f"choose the ending {own}\n" in error and str(path) in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("policy", ["kv_only", "auto"])
def test_a_request_that_fits_no_budget_is_refused_alone(tiny, source, out, tmp_path, capsys, monkeypatch, policy):
    monkeypatch.setattr(opening, "measure_for_model", lambda *_: known_machine())
    short = [line(f"a{number}", prompt=[5, 7 + number], max_tokens=30 - number) for number in range(4)]
    large = [line("b", prompt=[5] * 90, max_tokens=2), line("c", prompt=[6] * 90, max_tokens=2)]
    source.write_text("\n".join([short[0], *large, *short[1:]]))
    with LLM(tiny, "kv_only", device="cpu", dtype="float32") as llm:
        need = wave_plan(llm.problem, llm.settled_policy, Workload(np.array([2]), np.array([30])))
    memory = [
        arg for tier in ("host", "device") for arg in (f"--{tier}-memory", str(int(1.05 * sum(need[tier].values()))))
    ]
    for _ in range(1 if policy == "auto" else 2):  # the second time nothing is left
        assert run(source, out, tiny, *memory, policy=policy) == 0
        answers = {answer["custom_id"]: answer["response"] for answer in map(json.loads, out.read_text().splitlines())}
        assert [answers.pop(f"a{number}")["status_code"] for number in range(4)] == [200] * 4
        alike = []
        for name in "bc":
            error = answers.pop(name)["body"]["error"]
            assert error["code"] == "insufficient_memory" and "memory: one request of 9" in error["message"]
            alike.append("it is at least as large as line " in error["message"])
        assert not answers and sorted(alike) == [False, True], "one was tried for both"
    source.write_text("\n".join(large))
    none = tmp_path / "none.jsonl"
    assert run(source, none, tiny, *memory, policy=policy) == 2
    assert not none.exists() or not none.read_text()
    error = capsys.readouterr().err
    assert "memory: one request of 9" in error or policy == "auto" and "no policy fits 1 request" in error
    assert run(source, tmp_path / "other.jsonl", tiny, policy="no_such") == 2
    assert not (tmp_path / "other.jsonl").exists(), "it never began"


def test_an_unwritable_cache_is_reported_before_the_measurement(tiny, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("flexhybrid.jobs.profile.job.profile", None)
    assert run(requests(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", tiny, "--reprofile", policy="auto") == 2
    assert f"cannot keep profiles in {tmp_path}/file/cache: " in capsys.readouterr().err


def test_an_unclosed_quote_is_an_error(tiny, tmp_path, capsys):
    (tmp_path / "in.csv").write_text('n,q\n1,one\n2,"two\n3,three\n')
    assert run(tmp_path / "in.csv", tmp_path / "out.jsonl", SHIPPED, "--column", "q") == 2
    assert "in.csv, line 4: unexpected end of data (a quote not closed" in capsys.readouterr().err


@pytest.mark.parametrize("free_bytes", [None, 1 << 24, 1 << 45])
def test_free_memory_is_the_default_budget_and_changes_no_answer(tiny, tmp_path, monkeypatch, free_bytes):
    loaded, from_arguments = [], LLM.from_arguments
    monkeypatch.setattr(LLM, "from_arguments", lambda given: loaded.append(from_arguments(given)) or loaded[-1])
    monkeypatch.setattr(memory_here, "free_host_bytes", lambda: free_bytes)
    source = requests(tmp_path / "in.jsonl")
    assert run(source, tmp_path / "out.jsonl", tiny) == 0
    budget = None if free_bytes is None else int(0.45 * free_bytes)
    assert (loaded[0].problem.budgets.of("device"), loaded[0].problem.budgets.of("host")) == (budget, budget)
    monkeypatch.setattr(memory_here, "free_host_bytes", lambda: 1 << 33)
    assert run(source, tmp_path / "as_ever.jsonl", tiny) == 0
    assert by_id(tmp_path / "out.jsonl") == by_id(tmp_path / "as_ever.jsonl")


def test_too_little_free_memory_is_an_error_with_the_need(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory_here, "free_host_bytes", lambda: 1 << 12)
    assert run(requests(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", tiny) == 2
    assert "needs at least" in capsys.readouterr().err


def test_a_resumed_run_computes_in_the_dtype_it_began_with(cpu_dtype, tmp_path, monkeypatch, capsys):
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("import os\n")
    command = ["run", "-i", str(source), "-o", str(out), "--model", str(SHIPPED), "--policy", "kv_only"]
    command += ["--device", "cpu"]
    monkeypatch.setenv(ATTENTION, "products")
    assert cli.main([*command, "--quiet"]) == 0
    numbers = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["numbers"]
    assert numbers["dtype"] == cpu_dtype and set(numbers["attention"].values()) - {False} == {"products"}
    monkeypatch.setenv(ATTENTION, "fused")
    other = {"float32": "bfloat16", "bfloat16": "float32"}[cpu_dtype]
    measured = Hardware("local", "cpu", {"compute": Line(1e-5)}, dtype=other, faster_dtype=other)
    measured.save(tmp_path / "cache/hardware-cpu.json")
    assert cli.main([*command, "--quiet"]) == 0
    assert cli.main([*command, "--quiet", "--dtype", other]) == 2
    assert f"numbers.dtype was {json.dumps(cpu_dtype)}, is {json.dumps(other)}" in capsys.readouterr().err


LENGTHS = {
    "uniform": (np.full(24, 20), np.full(24, 30)), "one token": (np.full(6, 30), np.full(6, 1)),
    "two ends": (np.full(24, 20), np.repeat([2, 40], 12)), "two tokens": (np.full(6, 30), np.full(6, 2)),
    "mixed": (np.arange(24) * 7 % 40 + 2, np.arange(24) * 11 % 50 + 1),
    "a long tail": (np.arange(24) + 3, np.minimum(60, 2 + 80 // (1 + np.arange(24)))),
}  # fmt: skip


#: Each of LENGTHS with two policies, each policy with three of LENGTHS.
FORECASTS = [
    *[("uniform", "kv_only"), ("one token", "resident"), ("two ends", "hybrid(0.5)"), ("two tokens", "disk")],
    *[("mixed", "kv_only"), ("a long tail", "resident"), ("two tokens", "hybrid(0.5)"), ("mixed", "disk")],
    *[("one token", "kv_only"), ("uniform", "resident"), ("a long tail", "hybrid(0.5)"), ("two ends", "disk")],
]


@pytest.mark.parametrize("lengths, policy", FORECASTS)
def test_a_forecast_agrees_with_the_virtual_clock_for_the_whole_run(tiny, policy, lengths):
    """The forecast prices a few steps, for any mix of lengths and any ends of mini-batches."""
    from sim import catalogue, virtual_clock

    if policy == "disk":
        cache = {"kv@host": 0.5, "act@host": 0.5}
        policy = Policy("disk", Placement(host=0.5, disk=0.5), cache=cache, schedule="row", max_mini_batch_tokens=400)
    with LLM(tiny, policy, device="cpu", dtype="float32", hardware=catalogue.load("t4")) as llm:
        prompt_tokens, max_tokens = LENGTHS[lengths]
        order = sorted_by_length(prompt_tokens, max_tokens)
        workload = Workload(prompt_tokens[order], max_tokens[order])
        llm.settle(workload)
        wave = admit(llm.problem, llm.policy, workload)
        trace = virtual_clock.run(stream(wave), llm.hardware)
        assert forecast(llm, workload).seconds == pytest.approx(iteration_ends(trace)[-1], rel=0.04)


def test_weights_placed_otherwise_than_planned_are_an_error(tiny, tmp_path, capsys, monkeypatch):
    def load(self, load=LLM.load):
        placed = load(self)
        return placed | {"device": placed["host"], "host": 0}

    monkeypatch.setattr(LLM, "load", load)
    assert run(requests(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", tiny) == 2
    assert "that were planned" in capsys.readouterr().err and (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_trace_and_a_report_on_request(tiny, source, out, tmp_path, capsys):
    source.write_text(source.read_text() + "{broken\n" + line("r0", prompt=[5]) + "\n")
    asked = ["--trace", str(tmp_path / "trace.json"), "--report", str(tmp_path / "report.md")]
    known_machine().save(tmp_path / "cache/hardware-cpu.json")
    assert run(source, out, tiny, *asked) == 0
    told = capsys.readouterr().out
    written = json.loads((tmp_path / "trace.json").read_text())
    events, threads = written["traceEvents"], written["otherData"]["lanes"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    verbs = [[e["name"] for e in events if e["ph"] == "X" and e["pid"] == pid] for pid in (1, 2)]
    assert names == ["predicted", "measured"] and verbs[0] == verbs[1] and verbs[0].count("store_out") == 5
    page = (tmp_path / "report.md").read_text()
    assert all(text in page for text in told.splitlines()) and "| invalid_json | 1 |" in page
    assert "| duplicate_custom_id | 1 |" in page and "| step | s |" in page and '"transformers"' in page
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 2}
    assert threads.keys() == rows and sum(lane["tasks"] for lane in threads.values()) == len(verbs[1])
    assert all(f"| {name} | {lane['tasks']:,} | " in page for name, lane in threads.items())
    (tmp_path / "trace.json").unlink()
    assert run(source, out, tiny, *asked) == 0 and "trace      nothing ran" in capsys.readouterr().out
    assert not (tmp_path / "trace.json").exists() and (tmp_path / "report.md").read_text() == page, "nothing ran"
    assert run(source, out, tiny, "--trace", str(source)) == 2 and "the same file" in capsys.readouterr().err


class _Page(HTMLParser):
    """The open elements, and all texts and attributes, of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.texts, self.tags = list[str](), list[str](), list[tuple[str, dict]]()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open += [tag] if tag not in ("meta", "img") else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_a_report_in_html_needs_nothing_else_and_escapes_the_input(tiny, source, out, tmp_path):
    evil = "<script>alert('x')</script>"
    source.write_text(
        source.read_text() + json.dumps({**json.loads(line("r98")), "custom_id": evil, "url": "/v2"}) + "\n"
    )
    known_machine().save(tmp_path / "cache/hardware-cpu.json")
    assert run(source, out, tiny, "--report", str(tmp_path / "report.html")) == 0
    page = _Page((tmp_path / "report.html").read_text())
    assert page.open == [] and evil in page.texts and "script" not in {tag for tag, _ in page.tags}
    pictures = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    assert len(pictures) >= 3 and all(source.startswith("data:image/svg+xml;base64,") for source in pictures)
    for picture in pictures:
        ElementTree.fromstring(base64.b64decode(picture.partition(",")[2]))
    assert not any({"href", "onload"} & attrs.keys() for _, attrs in page.tags)
    assert any("answered" in text for text in page.texts) and "step" in page.texts


def test_samples_stay_few_and_evenly_apart(monkeypatch):
    seconds = iter(range(100_000))
    monkeypatch.setattr(report_module.time, "monotonic", lambda: float(next(seconds)))
    samples = Samples()
    for number in range(50_000):
        samples.add(number)
    apart = np.diff([row[0] for row in samples.rows])
    assert 200 < len(samples.rows) <= 601 and apart.max() <= 2 * apart.min()
    assert samples.rows[0][1] == 0 and all(row[2] > 0 for row in samples.rows)


@pytest.mark.parametrize(
    "policy, cache, said",
    [
        ("auto", {"kv@host": 0.5, "kv@device": 0.5}, True),
        ("auto", {"kv@host": 0.5, "act@host": 0.5}, False),
        ("auto", {"kv@host": 0.5, "tok": 0.5}, False),
        ("kv_only", {}, False),
    ],
)
def test_the_plan_says_if_no_mix_would_be_faster(tiny, tmp_path, capsys, monkeypatch, policy, cache, said):
    monkeypatch.setattr(machine, "best_policy", lambda *setting: Policy("searched", Placement(host=1.0), cache=cache))
    known_machine().save(tmp_path / "machine.json")
    asked = ["--hardware", str(tmp_path / "machine.json")]
    assert run(requests(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", tiny, *asked, policy=policy) == 0
    plan = capsys.readouterr().out.splitlines()[0]
    assert plan.endswith("; a mix with recomputed context would not be faster") == said


def test_an_interrupt_says_what_is_kept(tiny, tmp_path, capsys, monkeypatch):
    """Before the first answer nothing is kept; later, the answers of earlier runs are kept as well."""
    source, out = requests(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("flexhybrid.jobs.run.job.index_requests", stopped)
        assert run(source, out, tiny) == 130
        assert "stopped: nothing was written; give the same command again" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(opening, "measure_for_model", stopped)
        assert run(source, out, tiny, "--reprofile", policy="auto") == 130
        assert "stopped: nothing was written" in capsys.readouterr().err and not [*tmp_path.glob("out*")]
    assert run(source, out, tiny) == 0
    capsys.readouterr()
    with source.open("a") as more:
        more.write("\n" + line("later", prompt=[5], max_tokens=1))
    monkeypatch.setattr("flexhybrid.jobs.run.job.index_requests", stopped)
    assert run(source, out, tiny) == 130
    assert "stopped: answers written so far are kept" in capsys.readouterr().err
