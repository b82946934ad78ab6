"""Test `flexhybrid serve` with openai's client: its tokens, its limits, and that no client harms another."""

import asyncio
import json
import re
import signal
import socket
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx2
import openai
import pytest
from served import (
    CHAT,
    COMPLETION,
    ask_all,
    bodies,
    comparable,
    expected,
    line,
    plain,
    rss_mib,
    serving,
    split,
    unlike,
)

from flexhybrid import cli, shipped

COUNT = 60
LONG = {"prompt": "def f(self):", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def served(checkpoint):
    with serving(checkpoint, "--max-body-size", "64KiB") as one:
        yield one


@pytest.fixture(scope="module")
def wanted(folder, checkpoint):
    """The answers to ``bodies(COUNT)`` by ``flexhybrid run``."""
    return [[comparable(plain(one)) for one in body["choices"]] for body in expected(folder, checkpoint, bodies(COUNT))]


def test_answers_of_all_kinds_are_those_of_a_file(served, wanted):
    """Bodies of all kinds, half of them streamed, by 16 openai clients at a time."""
    assert not unlike(asyncio.run(ask_all(served, bodies(COUNT), 16, "qwen")), wanted)
    served.wait_until(served.idle)


def test_a_load_of_200_clients_gets_every_answer_once(served, wanted):
    asked = (bodies(COUNT) * 4)[:200]
    before = served.metric("vllm:request_success_total")
    answers = asyncio.run(ask_all(served, asked, 200, "qwen"))
    assert not unlike(answers, (wanted * 4)[:200])
    served.wait_until(served.idle)
    assert served.metric("vllm:request_success_total") - before == sum(len(answer) for answer in answers)


def test_usage_models_and_health(served):
    with served.client() as client:
        assert [one.id for one in client.models.list()] == ["qwen"]
        assert client.models.retrieve("qwen").id == "qwen"
        asked = {"model": "qwen", "prompt": "def", "max_tokens": 5, "temperature": 0, "n": 2}
        usage = client.completions.create(**asked).usage
        assert (usage.completion_tokens, usage.total_tokens) == (10, 10 + usage.prompt_tokens)
        chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert chunks[-1].usage == usage and not chunks[-1].choices
        assert all(chunk.usage is None for chunk in chunks[:-1])
    assert served.http.get("/health").status_code == 200


def test_chunks_come_while_the_answer_is_generated(served):
    with served.client() as client:
        stream = client.completions.create(model="qwen", stream=True, **split(LONG | {"max_tokens": 100}))
        first = next(iter(stream))
        assert first.choices[0].finish_reason is None
        assert served.metric("vllm:num_requests_running") == 1
        assert sum(1 for _ in stream) > 20


# ---- clients that would harm others


def malformed() -> list[tuple[str, bytes]]:
    """Return 50 bodies that cannot be served."""
    deep = b"[" * 5000
    chat = {"messages": [{"role": "user", "content": "x"}]}
    broken = [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": ', deep, b'{"prompt": NaN}', b"{}", b"\x00" * 99]
    wrong = [
        {"prompt": 3},
        {"prompt": []},
        {"prompt": [-1]},
        {"prompt": [10**9]},
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "max_tokens": "many"},
        {"prompt": "x", "temperature": -1},
        {"prompt": "x", "n": 0},
        {"prompt": "x", "n": 16384},
        {"prompt": "x", "n": 10**9},
        {"prompt": "x", "logprobs": 10**6},
        {"prompt": "x", "stream": "yes"},
        {"prompt": "x", "stream_options": {"include_usage": True}},
        {"prompt": "x", "model": "another"},
        {"prompt": "x", "strange": 1},
        {"prompt": "x" * 60_000},
        {"prompt": "x", "stop": 5},
        {"prompt": "x", "top_p": 2},
        {"prompt": "\ud800"},
        {"prompt": "x", "seed": "s"},
        {"prompt": "x", "structured_outputs": {"regex": "("}},
        {"prompt": "x", "structured_outputs": {"json": 3}},
        {"prompt": "x", "logit_bias": {"a": 1}},
        {"prompt": "x", "logit_bias": {"999999999": 1}},
        {"prompt": {"a": 1}},
        {"prompt": ["a", "b"]},
        {"prompt": "x", "suffix": "y"},
    ]
    wrong_chats = [
        {},
        {"messages": []},
        {"messages": "x"},
        {"messages": [3]},
        {"messages": [{"role": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {**chat, "tools": 3},
        {**chat, "tools": [{"type": "function"}]},
        {**chat, "tool_choice": "required"},
        {**chat, "top_logprobs": 2},
        {**chat, "response_format": {"type": "other"}},
        {**chat, "chat_template_kwargs": 3},
    ]
    made = [(COMPLETION, one) for one in broken]
    made += [(COMPLETION, json.dumps(one).encode()) for one in wrong]
    return (
        made
        + [(CHAT, json.dumps(one).encode()) for one in wrong_chats]
        + [(COMPLETION, b'{"prompt": "' + b"x" * 200_000)]
    )


def test_malformed_and_large_bodies_get_4xx_and_harm_nobody(served, wanted):
    assert len(malformed()) == 50

    async def send() -> list:

        async with httpx2.AsyncClient(base_url=served.url, timeout=60) as client:
            return await asyncio.gather(*(client.post(url, content=body) for url, body in malformed()))

    async def both():
        return await asyncio.gather(ask_all(served, bodies(COUNT), 8, "qwen"), send())

    answers, refused = asyncio.run(both())
    for (url, body), answer in zip(malformed(), refused):
        assert 400 <= answer.status_code < 500, (url, body[:80], answer.text)
        assert answer.json()["error"]["message"], body[:80]
        assert "the line" not in answer.text
    assert refused[-1].status_code == 413
    assert not unlike(answers, wanted)


def opened(served, body: dict, **headers: str) -> socket.socket:
    """Send a request over a socket of our own."""
    raw = json.dumps({"model": "qwen", **body}).encode()
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    connection.sendall(
        f"POST {COMPLETION} HTTP/1.1\r\nhost: x\r\n{lines}content-length: {len(raw)}\r\n\r\n".encode() + raw
    )
    return connection


def test_a_client_that_leaves_frees_its_place(served):
    for stream in (False, True):
        before = served.metric("vllm:request_success_total")
        with opened(served, {**LONG, "max_tokens": 400, "stream": stream}):
            served.wait_until(lambda: served.metric("vllm:num_requests_running") == 1)
        served.wait_until(served.idle)
        assert served.metric("vllm:request_success_total") == before


def test_clients_that_do_not_read_harm_nobody(served, wanted):
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(opened(served, {**LONG, "stream": True, "logprobs": 5}))
        assert not unlike(asyncio.run(ask_all(served, bodies(COUNT)[:30], 8, "qwen")), wanted[:30])
        served.wait_until(served.idle)


def test_half_of_a_request_harms_nobody(served, wanted):
    host, port = served.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        for text in (b"POST /v1/comple", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999\r\n\r\n{"):
            for _ in range(20):
                connection = stack.enter_context(socket.create_connection((host, int(port))))
                connection.sendall(text)
        assert not unlike(asyncio.run(ask_all(served, bodies(COUNT)[:20], 8, "qwen")), wanted[:20])


def test_memory_does_not_grow_with_requests(served):
    asked = bodies(COUNT)
    asyncio.run(ask_all(served, asked, 32, "qwen"))
    before = rss_mib(served.process.pid)
    for _ in range(2):
        asyncio.run(ask_all(served, asked, 32, "qwen"))
    assert rss_mib(served.process.pid) < before + 20


# ---- limits, and the end


def test_queue_time_and_key_are_limited(checkpoint):
    options = ("--max-queue-len", 3, "--max-num-seqs", 1, "--request-timeout", 2.0, "--api-key", "secret")
    with serving(checkpoint, *options, "--served-model-name", "small") as served, ExitStack() as stack:
        assert served.http.get("/v1/models").status_code == 401
        with pytest.raises(openai.AuthenticationError):
            served.client().models.list()
        client = served.client(api_key="secret", max_retries=0)
        assert [one.id for one in client.models.list()] == ["small"]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="qwen", prompt="x")
        with pytest.raises(openai.BadRequestError, match="max-queue-len"):
            client.completions.create(model="small", prompt="x", n=4)
        key = {"authorization": "Bearer secret"}
        many = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "temperature": 0, "model": "small"}
        for waiting in range(4):
            stack.enter_context(opened(served, many, **key))
            served.wait_until(lambda count=waiting: served.metric("vllm:num_requests_waiting") == count)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="small", prompt="x")
        served.wait_until(served.idle)
        began = time.monotonic()
        with pytest.raises(openai.InternalServerError, match="request-timeout"):
            client.completions.create(**split(many))
        assert time.monotonic() - began >= 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_for_the_requests_that_run(checkpoint, number):
    with serving(checkpoint) as served:
        connection = opened(served, LONG)
        served.wait_until(lambda: served.metric("vllm:num_requests_running") == 1)
        served.process.send_signal(number)
        with connection:
            text = b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()
        assert json.loads(text.partition("\r\n\r\n")[2])["usage"]["completion_tokens"] == LONG["max_tokens"]
        assert served.process.wait(30) == 0


def test_a_second_signal_answers_the_requests_with_an_error(checkpoint, tmp_path):
    with serving(checkpoint, "--files-dir", tmp_path / "files", "--max-num-seqs", 2) as served:
        requests = [line(str(place), **LONG | {"max_tokens": 8000}) for place in range(64)]
        many = LONG | {"max_tokens": 8000, "n": 64}
        with served.client() as client:
            name = client.files.create(file="\n".join(requests).encode(), purpose="batch").id
            batch = client.batches.create(input_file_id=name, endpoint=COMPLETION, completion_window="24h")
            served.wait_until(lambda: served.metric("vllm:num_requests_running") == 2)
            client.batches.cancel(batch.id)
        with opened(served, many) as one, opened(served, many | {"stream": True}) as other:
            served.wait_until(lambda: served.metric("vllm:num_requests_waiting") >= 150)
            served.http.close()
            served.process.send_signal(signal.SIGINT)
            assert (
                "stopping   2 requests are still running; a second Ctrl-C ends them" in served.process.stdout.readline()
            )
            served.process.send_signal(signal.SIGINT)
            plain_answer, events = (b"".join(iter(partial(of.recv, 1 << 16), b"")).decode() for of in (one, other))
        assert plain_answer.startswith("HTTP/1.1 503")
        assert json.loads(plain_answer.partition("\r\n\r\n")[2])["error"]["message"] == "the server is stopping"
        assert "the server is stopping" in events
        assert served.process.wait(30) == 0
        last = served.process.stdout.read()
        assert last == (
            "stopped    2 requests were ended before the answer; "
            "a batch continues when the server starts with the same --files-dir\n"
        )
        assert "Traceback" not in served.process.stderr.read()


def test_the_page_about_serving_works_as_written(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text(encoding="utf-8")
    first, second = re.findall(r"^\.venv/bin/flexhybrid serve --model (\S+)(.*)$", page, re.MULTILINE)
    assert first[0] == second[0] == "flexhybrid/shipped/qwen3-stdlib-4m" and second[1] == " --chat-template chat.jinja"
    monkeypatch.chdir(tmp_path)
    template = tmp_path / "chat.jinja"
    template.write_text(re.search(r"```jinja\n(.*?)```", page, re.DOTALL)[1])
    (tmp_path / "requests.jsonl").write_text(line("a", prompt="def f():", max_tokens=2) + "\n")
    with serving(shipped.QWEN3, "--chat-template", template, "--files-dir", tmp_path / "files") as served:
        names: dict = {}
        for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            exec(compile(text.replace("http://127.0.0.1:8000", served.url), "docs/serving.md", "exec"), names)
        assert names["chat"].choices[0].finish_reason == "tool_calls"
        names["client"].close()


def test_a_word_without_its_flag_is_named(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "model-folder"])
    assert "did you mean --model model-folder?" in capsys.readouterr().err


def test_a_port_in_use_is_refused_in_one_line(served, checkpoint, capsys):
    port = served.url.rpartition(":")[2]
    assert cli.main(["serve", "--model", str(checkpoint), "--port", port]) == 2
    assert "give another --port" in capsys.readouterr().err


def test_policies_whose_requests_begin_together_are_refused(checkpoint, capsys):
    words = ["serve", "--model", str(checkpoint), "--port", "0", "--device", "cpu"]
    words += ["--dtype", "float32", "--policy", "h2o(0.2)"]
    assert cli.main(words) == 2
    assert "selection heavy_hitter" in capsys.readouterr().err
