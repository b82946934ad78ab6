"""A server in a process of its own, clients of it, and bodies of all kinds with the answers that a file run gives them.

As a program: many requests of 64 openai clients against ``flexhybrid serve``, compared with the same file's run.

    PYTHONPATH=.:tests python tests/serving/served.py --requests 2000 --clients 64
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2
import openai
import warm_python
from runs import answered, line

from flexhybrid import shipped

COMMAND = "import sys; from flexhybrid.cli import main; sys.exit(main(sys.argv[1:]))"
TEMPLATE = """{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
<tool_call>{"name": …, "arguments": …}</tool_call>{%- endif %}{% for m in messages %}
{{ m.role }}: {{ m.content }}{% endfor %}
assistant:"""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = r'<tool_call>\{"name": "add", "arguments": \{"x": [0-9]{1,3}\}\}</tool_call>'
SCHEMA = {"name": "n", "schema": {"type": "object", "properties": {"n": {"enum": [1, 22, "é"]}}, "required": ["n"]}}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
EXTRA = ("ignore_eos", "structured_outputs", "top_k")  #: fields that openai's client does not know


def model(folder: Path) -> Path:
    """Make a copy of the shipped Qwen3 with a chat template; its bytes-level tokens cut characters."""
    shutil.copytree(shipped.QWEN3, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def bodies(count: int, seed: int = 0, longest: int = 24) -> list[tuple[str, dict]]:
    """Return endpoints and bodies of all kinds, whose answers are certain: greedy, or seeded and from few tokens. With
    all tokens, one in ten thousand draws is so near the border of two tokens that the rounding of the batch decides."""
    draw, prompts = random.Random(seed), shipped.prompts()
    made = []
    for number in range(count):
        prompt = draw.choice(prompts) + draw.choice(["", " é", " 日本", "\n"])
        common = {"max_tokens": draw.randint(1, longest), "temperature": draw.choice([0, 0, 0.8]), "seed": number}
        common["top_k"] = 4
        messages = [{"role": "user", "content": prompt}]
        kind = draw.randrange(9)
        if kind == 0:
            made.append((COMPLETION, {"prompt": prompt, **common}))
        elif kind == 1:
            made.append((COMPLETION, {"prompt": prompt, **common, "logprobs": 3}))
        elif kind == 2:
            made.append((COMPLETION, {"prompt": prompt, **common, "n": 2, "temperature": 1.5}))
        elif kind == 3:
            made.append((COMPLETION, {"prompt": prompt, **common, "stop": ["e", "self."]}))
        elif kind == 4:
            made.append((COMPLETION, {"prompt": [draw.randrange(3, 400) for _ in range(9)], **common, "echo": True}))
        elif kind == 5:
            made.append((CHAT, {"messages": messages, **common, "temperature": 2.0}))
        elif kind == 6:
            made.append((CHAT, {"messages": messages, **common, "logprobs": True, "top_logprobs": 2}))
        elif kind == 7:
            form = {"regex": CALL}
            tools = {
                "messages": messages,
                "tools": [TOOL],
                "structured_outputs": form,
                "max_tokens": 60,
                "temperature": 0,
            }
            made.append((CHAT, tools))
        else:
            form = {"type": "json_schema", "json_schema": SCHEMA}
            made.append((CHAT, {"messages": messages, "response_format": form, "max_tokens": 40, "temperature": 0}))
    return made


def expected(folder: Path, checkpoint: Path, asked: Sequence[tuple[str, dict]], *options) -> list[dict]:
    """Return the bodies that ``flexhybrid run`` answers."""
    lines = [line(str(place), url, **body) for place, (url, body) in enumerate(asked)]
    found = answered(folder, checkpoint, lines, *options)
    return [found[str(place)] for place in range(len(asked))]


class Served:
    """A server's process and address."""

    def __init__(self, process: subprocess.Popen, url: str):
        self.process, self.url = process, url
        self.http = httpx2.Client(base_url=url, timeout=120)

    def client(self, **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", **{"api_key": "none", "timeout": 120, **options})

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        text = self.http.get("/metrics").text
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M))

    def wait_until(self, condition, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "the condition did not come true"
            time.sleep(0.05)

    def idle(self) -> bool:
        return self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting") == 0


@contextmanager
def serving(checkpoint: Path, *options, policy="kv_only", cold: bool = False):
    """Yield a server of a checkpoint on the CPU in float32; it is killed at the end."""
    words = ("serve", "--model", checkpoint, "--port", 0, "--policy", policy, "--device", "cpu", "--dtype", "float32")
    command = [sys.executable, "-c", COMMAND, *map(str, [*words, *options])]
    popen = subprocess.Popen if cold else warm_python.Popen
    process = popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE if not cold else None, text=True)
    try:
        printed = []
        for text in process.stdout:
            printed.append(text)
            if found := re.search(r"at (http://\S+)/v1", text):
                break
        else:
            raise AssertionError(f"the server ended: {''.join(printed)} {process.stderr and process.stderr.read()}")
        yield Served(process, found[1])
    finally:
        process.kill()
        process.wait()


def split(body: dict) -> dict:
    """Return a body as arguments of openai's methods."""
    known = {name: value for name, value in body.items() if name not in EXTRA}
    return known | {"extra_body": {name: body[name] for name in EXTRA if name in body}}


def joined(chunks: Sequence[dict]) -> list[dict]:
    """Return the choices of a stream's chunks as those of one body."""
    choices: dict[int, dict] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            of = choices.setdefault(piece["index"], {"text": "", "content": [], "finish_reason": None, "calls": []})
            assert of["finish_reason"] is None, "a piece after the end"
            delta = piece.get("delta") or {}
            of["text"] += (piece.get("text") or "") + (delta.get("content") or "")
            of["calls"] += delta.get("tool_calls") or []
            of["finish_reason"] = piece["finish_reason"]
            logprobs = piece.get("logprobs") or {}
            for name in ("content", "tokens", "token_logprobs", "text_offset", "top_logprobs"):
                of.setdefault("log_" + name, []).extend(logprobs.get(name) or [])
    return [choices[index] for index in sorted(choices)]


def plain(choice: dict) -> dict:
    """Return a body's choice in the form of ``joined``."""
    message, logprobs = choice.get("message") or {}, choice.get("logprobs") or {}
    of = {"text": choice.get("text") or message.get("content") or "", "finish_reason": choice["finish_reason"]}
    calls = [{"function": call["function"]} for call in message.get("tool_calls") or []]
    names = ("content", "tokens", "token_logprobs", "text_offset", "top_logprobs")
    return of | {"calls": calls} | {"log_" + name: logprobs.get(name) or [] for name in names}


def comparable(choice: dict) -> dict:
    """Return a joined choice without ids, which differ between a file and a server."""
    calls = [{"function": call["function"]} for call in choice["calls"]]
    kept = {name: value for name, value in choice.items() if not name.startswith("log_") and name != "content"}
    logs = {name: value for name, value in choice.items() if name.startswith("log_")}
    return kept | {"calls": calls} | logs


def alike(one, other) -> bool:
    """Return whether two JSON values are equal, but for the last digits of numbers."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-3
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


def unlike(answers: Sequence, wanted: Sequence) -> list:
    """Return (place, answer, wanted answer) where two lists differ."""
    pairs = zip(range(len(wanted)), answers, wanted, strict=True)
    return [(place, one, other) for place, one, other in pairs if not alike(one, other)]


async def ask(client: openai.AsyncOpenAI, url: str, body: dict, stream: bool, served_name: str) -> list[dict]:
    """Send a body with openai's client; return the choices of the answer."""
    method = client.chat.completions.create if url == CHAT else client.completions.create
    arguments = split(body) | {"model": served_name}
    if not stream:
        return [comparable(plain(choice)) for choice in (await method(**arguments)).model_dump()["choices"]]
    chunks = [chunk.model_dump() async for chunk in await method(**arguments, stream=True)]
    return [comparable(choice) for choice in joined(chunks)]


async def ask_all(served: Served, asked: list[tuple[str, dict]], clients: int, name: str, streams: bool = True) -> list:
    """Send all bodies from ``clients`` openai clients at a time, half of them as streams; return their choices."""
    answers, places = [None] * len(asked), iter(range(len(asked)))
    seen: Counter = Counter()

    async def one() -> None:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="x", timeout=600, max_retries=0) as client:
            for place in places:
                answers[place] = await ask(client, *asked[place], streams and place % 2 == 0, name)
                seen[place] += 1

    await asyncio.gather(*(one() for _ in range(clients)))
    assert set(seen.values()) <= {1}
    return answers


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="rounds of all requests, to see whether memory grows")
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, asked = model(Path(folder) / "qwen"), bodies(args.requests)
        wanted = [
            [comparable(plain(one)) for one in body["choices"]] for body in expected(Path(folder), checkpoint, asked)
        ]
        with serving(checkpoint, cold=True) as served:
            for number in range(args.rounds):
                began = time.monotonic()
                answers = asyncio.run(ask_all(served, asked, args.clients, "qwen"))
                wrong = [place for place, *_ in unlike(answers, wanted)]
                lost = sum(answer is None for answer in answers)
                print(
                    f"round {number}: {len(asked)} requests of {args.clients} clients in "
                    f"{time.monotonic() - began:.1f} s: {lost} lost, {len(wrong)} differ {wrong[:5]}, "
                    f"{served.metric('vllm:request_success_total'):.0f} answers in all, "
                    f"{rss_mib(served.process.pid):.0f} MiB",
                    flush=True,
                )
                for place in wrong[:3]:
                    print(asked[place], "\n  file  ", wanted[place], "\n  server", answers[place], flush=True)


if __name__ == "__main__":
    main()
