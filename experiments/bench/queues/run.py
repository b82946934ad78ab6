"""Bench rows of ``flexhybrid run``: the cost of files, resume and progress; its prediction.

The cost is that of a job in this process against ``LLM.generate`` of its prompts in its order, both with loading the
model, in interleaved rounds. The prediction is judged on requests that generate all their tokens, with a profile
measured just before.
"""

import json
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np

from experiments.bench.harness import Table, bench, least_disturbed, seconds_of
from flexhybrid import shipped
from flexhybrid.arguments import LLMArguments
from flexhybrid.jobs.profile.job import measure_for_model
from flexhybrid.jobs.run.forecast import sorted_by_length
from flexhybrid.jobs.run.job import RunOptions, run
from flexhybrid.llm import LLM, SamplingParams
from flexhybrid.resolve import pick_device
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.storage.loader import Checkpoint

PAIRS = 5  #: rounds of both sides; the cost looked for is a hundredth
ROUNDS = 3  #: of each prediction
NUM_REQUESTS = 240
OVERHEAD, ERROR = 1.02, 15  #: bars
CALLBACKS = ("on_tokens", "on_finish", "should_stop")  #: of an engine's RunControl
LINK_GB_PER_S = 0.4  #: of the prediction over a paced link


def requests() -> list[dict]:
    """Return bodies of mixed lengths: shipped texts cut at random, and 8 to 96 tokens to generate, all of them used."""
    generator, texts = np.random.default_rng(0), shipped.prompts()
    bodies = []
    for index in range(NUM_REQUESTS):
        text = texts[index % len(texts)]
        prompt, max_tokens = text[: int(generator.integers(len(text) // 2, len(text) + 1))], generator.integers(8, 97)
        bodies.append({"prompt": prompt, "temperature": 0, "max_tokens": int(max_tokens), "ignore_eos": True})
    return bodies


def write_lines(path: Path, bodies: Iterable[dict]) -> None:
    """Write a batch of completions, with the custom_ids r0, r1, …"""
    line = {"method": "POST", "url": "/v1/completions"}
    lines = [json.dumps({"custom_id": f"r{i}", **line, "body": body}) for i, body in enumerate(bodies)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@bench("run")
def bench_run(table: Table) -> None:
    """Add all rows."""
    model = shipped.CHECKPOINT
    with TemporaryDirectory() as name, patch.dict(os.environ, FLEXHYBRID_CACHE=str(Path(name) / "cache")):
        folder = Path(name)
        bodies = requests()
        write_lines(folder / "in.jsonl", bodies)
        bench_overhead(table, model, folder, bodies)
        bench_prediction(table, model, folder)


def options(folder: Path, model: Path, **arguments) -> RunOptions:
    llm = LLMArguments(model, device="cpu", dtype="float32", **arguments)
    return RunOptions(folder / "in.jsonl", folder / "out.jsonl", llm, restart=True, quiet=True)


def silent(text: str) -> None:
    pass


def bench_overhead(table: Table, model: Path, folder: Path, bodies: list[dict]) -> None:
    """The cost of a job over ``LLM.generate``: the seconds of each outside the engine's run.

    The engine's run has equal tasks on both sides, and varies by ten times the cost looked for.
    """
    with LLM(model, "resident", device="cpu", dtype="float32") as llm:
        lengths = np.array([len(llm.tokenizer(body["prompt"])["input_ids"]) for body in bodies])
    order = sorted_by_length(lengths, np.array([body["max_tokens"] for body in bodies]))
    prompts = [bodies[i]["prompt"] for i in order]
    params = [SamplingParams(**{k: v for k, v in bodies[i].items() if k != "prompt"}) for i in order]

    def generate() -> None:
        with LLM(model, "resident", device="cpu", dtype="float32") as llm:
            llm.generate(prompts, params)

    def job() -> None:
        run(options(folder, model, policy="resident"), silent)

    total_s: dict[str, list[float]] = {"generate": [], "job": []}
    outside_s: dict[str, list[float]] = {"generate": [], "job": []}
    for turn in range(PAIRS + 1):
        for name, side in (("generate", generate), ("job", job)):
            with engine_seconds() as computing:
                seconds = seconds_of(side)
            if turn:  # the first round loads what the process keeps
                total_s[name].append(seconds)
                outside_s[name].append(seconds - sum(computing))
    medians = {name: statistics.median(times) for name, times in outside_s.items()}
    ratio = 1 + (medians["job"] - medians["generate"]) / statistics.median(total_s["generate"])
    conditions = {f"{name}_s": times for name, times in total_s.items()}
    conditions |= {f"{name}_beside_the_engine_s": times for name, times in outside_s.items()}
    table.at_most("run: files, resume and progress against LLM.generate", ratio, OVERHEAD, "x", **conditions)


@contextmanager
def engine_seconds() -> Iterator[list[float]]:
    """Collect the seconds of each Engine.run in the block, without those of its callbacks."""
    seconds: list[float] = []
    run_engine = Engine.run

    def timed(self, executor, control, tasks=None):
        callbacks_s = 0.0

        def watched(callback):
            def watching(*arguments):
                nonlocal callbacks_s
                before = time.perf_counter()
                try:
                    return callback(*arguments)
                finally:
                    callbacks_s += time.perf_counter() - before

            return callback and watching

        control = replace(control, **{name: watched(getattr(control, name)) for name in CALLBACKS})
        began = time.perf_counter()
        try:
            return run_engine(self, executor, control, tasks)
        finally:
            seconds.append(time.perf_counter() - began - callbacks_s)

    with patch.object(Engine, "run", timed):
        yield seconds


def bench_prediction(table: Table, model: Path, folder: Path) -> None:
    """Predicted against measured seconds of a job, with a profile measured just before each round."""
    paced = {"policy": "hybrid(0.5)", "link_gb_per_s": LINK_GB_PER_S}
    for where, fields in {
        "policy auto": {"policy": "auto"},
        f"half of the context recomputed, link at {LINK_GB_PER_S} GB/s": paced,
    }.items():
        job = options(folder, model, **fields)

        def measure_and_run(job=job) -> dict:
            profiled(job)
            return run(job, silent)

        rounds = least_disturbed(measure_and_run, ROUNDS)
        conditions: dict[str, list[float]] = {
            name: [done.result[name] for done in rounds] for name in ("predicted_s", "seconds")
        }
        pairs = zip(conditions["predicted_s"], conditions["seconds"], strict=True)
        errors = [100 * abs(predicted_s / seconds - 1) for predicted_s, seconds in pairs]
        conditions |= {"samples": errors, "others": [done.others for done in rounds]}
        name = f"run: predicted finish, {where}, error"
        table.at_most(name, statistics.median(errors), ERROR, "%", **conditions)


def profiled(options: RunOptions) -> None:
    """Measure this machine at the model's sizes, as policy auto does at its first run."""
    llm = options.llm
    measure_for_model(Checkpoint(llm.model).shape, llm.dtype, pick_device(llm.device, llm.link_gb_per_s))
