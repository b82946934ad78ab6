"""Bench rows of ``flexhybrid serve``: its throughput under 64 clients, over that of the same requests as a file.

Both run as processes of their own, in turn, with at most CLIENTS answers at a time. Weights are streamed over a paced
link, which is the case that the product is for. Each client sends its next request when it has its answer.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory
from urllib.request import Request, urlopen

import numpy as np
import torch
from transformers import OPTConfig, OPTForCausalLM

from experiments.bench.harness import Table, bench
from flexhybrid import shipped

CLIENTS, REQUESTS, ROUNDS = 64, 256, 3
PROMPT, ANSWER = (16, 96), (16, 96)  #: least and most tokens
SIZES = dict(hidden_size=512, ffn_dim=2048, num_hidden_layers=4, num_attention_heads=8, word_embed_proj_dim=512)
OPTIONS = f"--policy kv_only --device cpu --dtype float32 --link-gb-per-s 2 --max-num-seqs {CLIENTS}".split()
BAR = 0.95  #: of the file's tokens per second
TTFT = "vllm:time_to_first_token_seconds"


def checkpoint(folder: Path) -> Path:
    """Save an OPT with random weights and the tokenizer of the shipped one."""
    shape = json.loads((shipped.CHECKPOINT / "config.json").read_text())
    vocab = {"vocab_size": shape["vocab_size"], "max_position_embeddings": 512, "eos_token_id": shape["eos_token_id"]}
    torch.manual_seed(0)
    OPTForCausalLM(OPTConfig(**SIZES, **vocab)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy(shipped.CHECKPOINT / name, folder)
    return folder


def bodies() -> list[dict]:
    """Return the requests' bodies."""
    draw, common = np.random.default_rng(0), {"temperature": 0, "ignore_eos": True}
    prompts = [draw.integers(5, 500, draw.integers(*PROMPT)).tolist() for _ in range(REQUESTS)]
    limits = draw.integers(*ANSWER, REQUESTS).tolist()
    return [{"prompt": prompt, "max_tokens": limit, **common} for prompt, limit in zip(prompts, limits)]


def file_seconds(model: Path, folder: Path) -> float:
    """Return the seconds in which ``flexhybrid run`` answers the requests, without loading the model."""
    (folder / "in.jsonl").write_text("".join(json.dumps(body) + "\n" for body in bodies()))
    command = ["run", "-i", folder / "in.jsonl", "-o", folder / "out.jsonl", "--model", model, "--overwrite", "--json"]
    words = [sys.executable, "-m", "flexhybrid", *map(str, command), *OPTIONS]
    record = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return record["seconds"]


@contextmanager
def server(model: Path) -> Iterator[str]:
    """Yield the address of a server."""
    words = [sys.executable, "-m", "flexhybrid", "serve", "--model", str(model), "--port", "0", *OPTIONS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield next(found[1] for text in process.stdout if (found := re.search(r"at (http://\S+)/v1", text)))
        finally:
            process.terminate()


def ask(url: str, body: dict) -> int:
    """Return the tokens of the answer to a request."""
    asked = Request(f"{url}/v1/completions", json.dumps(body).encode())
    with urlopen(asked) as answer:
        return json.load(answer)["usage"]["completion_tokens"]


def first_token_seconds(url: str) -> tuple[float, float]:
    """Return the sum of the seconds to the first token, and the number of answers, so far."""
    with urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    total, count = (re.search(rf"^{TTFT}_{of}{{.*}} (\S+)$", text, re.M) for of in ("sum", "count"))
    return (float(total[1]), float(count[1])) if total and count else (0.0, 0.0)


@bench("serving")
def bench_serving(table: Table) -> None:
    """Add the ratio of a server's throughput to a file's, and the time to the first token under load."""
    ratios, waits = [], []
    with TemporaryDirectory() as name, ThreadPoolExecutor(CLIENTS) as clients:
        folder = Path(name)
        model = checkpoint(folder / "model")
        tokens = sum(body["max_tokens"] for body in bodies())
        with server(model) as url:
            ask(url, bodies()[0])
            for _ in range(ROUNDS):
                of_file = file_seconds(model, folder)
                total, count = first_token_seconds(url)
                began = time.perf_counter()
                assert sum(clients.map(lambda body: ask(url, body), bodies())) == tokens
                ratios.append(of_file / (time.perf_counter() - began))
                later = first_token_seconds(url)
                waits.append((later[0] - total) / (later[1] - count))
                tokens_per_s = tokens / of_file
    conditions = {"clients": CLIENTS, "requests": REQUESTS, "file_tokens_per_s": tokens_per_s}
    ratio = statistics.median(ratios)
    table.at_least(f"server, {CLIENTS} clients / the same file", ratio, BAR, "x", samples=ratios, **conditions)
    table.tell("server, mean time to the first token under load", statistics.median(waits), "s", samples=waits)
