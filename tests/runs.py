"""Helpers that run models in tests: one wave, its trace, logits along a given text, and files of requests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from flexhybrid import cli
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.engine import Engine, WaveResult
from flexhybrid.runtime.executor import force_tokens
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.weights import DiskPlace, Weights


def run_wave(
    checkpoint, policy, prompts, max_tokens, *, dtype="float32", hardware=None, disk_dir=None,
    edit=lambda executor: None,
) -> WaveResult:  # fmt: skip
    """Run one wave of a checkpoint greedily. ``edit(executor)`` may change its verbs before the run."""
    disk = DiskPlace(disk_dir)
    workload = Workload(np.array([len(prompt) for prompt in prompts]), np.full(len(prompts), max_tokens))
    weights = Weights(checkpoint.shape, checkpoint, dtype, torch.device("cpu"), policy, disk)
    make_engine = partial(Engine, num_threads=1, disk=disk)
    try:
        with Session.of(weights, policy, workload, prompts, hardware, make_engine) as session:
            edit(session.executor)
            return session.generate()
    finally:
        weights.close()


def admitted(shape, policy, prompts, max_tokens, **machine) -> Wave:
    """Return the wave of these prompts in float32; ``max_tokens`` is a number for each prompt, or one for all."""
    workload = Workload(np.array([*map(len, prompts)]), np.broadcast_to(max_tokens, len(prompts)).copy())
    return admit(Problem(shape=shape, dtype="float32", **machine), policy, workload)


@contextmanager
def engine_of(checkpoint, wave: Wave, device: torch.device | str = "cpu", num_threads: int = 1) -> Iterator[Engine]:
    """Yield an engine for a wave in float32, with its weights; close both at the end."""
    weights = Weights(checkpoint.shape, checkpoint, "float32", torch.device(device), wave.policy)
    engine = Engine(weights, wave.policy, buffer_sizes(wave), num_threads=num_threads)
    with closing(weights), closing(engine):
        yield engine


def stopping(stops: Sequence[int]) -> Callable:
    """Return a ``RunControl.stop_text`` that ends request i after ``stops[i]`` tokens."""
    counts = Counter()

    def of(request: int) -> Callable:
        def stop(_token):
            counts[request] += 1
            return "end" if counts[request] == stops[request] else None

        return stop

    return of


def some_requests(seed: int, count: int, longest: int = 70, vocab: int = 61) -> tuple[list, list, list]:
    """Draw prompts, limits of their answers, and the number of tokens after which each ends by itself."""
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(3, vocab, generator.integers(1, longest)).tolist() for _ in range(count)]
    max_tokens = generator.integers(1, 20, count).tolist()
    return prompts, max_tokens, [int(generator.integers(1, length + 5)) for length in max_tokens]


def forced_logits(checkpoint, policy, texts, steps, **options) -> list[torch.Tensor]:
    """Return logits [steps, vocab] of each text's last ``steps`` tokens; the text is fed instead of sampled tokens."""
    prompts = [text[:-steps] for text in texts]
    recorded: list[list[torch.Tensor]] = [[] for _ in texts]

    def hear(step, logits, targets):
        for row, request in enumerate(step.requests.tolist()):
            recorded[request].append(logits[row].float())

    run_wave(checkpoint, policy, prompts, steps, edit=lambda executor: force_tokens(executor, texts, hear), **options)
    return [torch.stack(rows) for rows in recorded]


def line(custom_id, url: str = "/v1/completions", **body) -> str:
    """Return a line of a file of requests."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def lines_of(bodies: dict[str, dict], url: str = "/v1/completions") -> list[str]:
    """Return the lines of a file of requests; ``bodies`` maps custom_id to body."""
    return [line(name, url, **body) for name, body in bodies.items()]


def run(source, out, model, *more, policy="kv_only", dtype="float32") -> int:
    """``flexhybrid run`` on the CPU; return its exit status."""
    words = ("run", "-i", source, "-o", out, "--model", model, "--policy", policy, "--device", "cpu")
    return cli.main([*map(str, words), "--dtype", dtype, "--quiet", *map(str, more)])


def read(path: Path) -> list[dict]:
    """Return the lines of a file of answers."""
    return [json.loads(raw) for raw in path.read_bytes().splitlines()]


def by_id(path: Path) -> dict[str, dict]:
    """Return id -> response, without the job's time, of a file of answers; each id may occur once."""
    rows = read(path)
    found = {row["id"]: row["response"] for row in rows}
    assert len(found) == len(rows), "a line is answered twice"
    for response in found.values():
        response["body"].pop("created", None)
    return found


def answered(folder: Path, model, lines: Sequence[str], *options) -> dict[str, dict]:
    """Answer a file of these lines by ``flexhybrid run``; return custom_id -> body of its answers."""
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    assert run(folder / "in.jsonl", folder / "out.jsonl", model, *options) == 0
    rows = read(folder / "out.jsonl")
    assert len({row["id"] for row in rows}) == len(rows), "a line is answered twice"
    return {row["custom_id"]: row["response"]["body"] for row in rows}
