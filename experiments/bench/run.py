"""Bench rows of ``flexhybrid run``: what files, resume and progress cost, its prediction, its memory.

The cost is that of a whole job in this process against the same prompts, in the job's own order, through
``LLM.generate``, each side with loading the model, in interleaved rounds. The prediction is judged on requests that use
up their tokens, on a profile that was measured just before.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tqdm import tqdm

from experiments.bench.rounds import least_disturbed, undisturbed
from experiments.bench.run_memory import peak_bytes, write_requests
from experiments.peers.random_opt import make_checkpoint
from flexhybrid import shipped
from flexhybrid.arguments import LLMArguments
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.jobs.run.forecast import sorted_by_length
from flexhybrid.jobs.run.job import RunOptions, run
from flexhybrid.llm import LLM, SamplingParams
from flexhybrid.resolve import pick_device
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.storage.loader import Checkpoint

PAIRS = 5  #: rounds of both sides, of what costs a hundredth
ROUNDS = 3  #: of each row
NUM_REQUESTS = 240
OVERHEAD, ERROR, BEYOND_BUDGET, BYTES_A_LINE = 1.02, 15, 1.05, 64  #: bars
CALLBACKS = ("on_tokens", "on_finish", "should_stop")  #: of an engine's run
LINK_GB_PER_S = 0.4  #: of the run whose context crosses a paced link
SHORT_LINES, LONG_LINES = 2_000, 100_000
MIB = 2**20
LARGE = ModelShape("large", "opt", 16, 1024, 16, 16, 64, 4096, 8000, 512)  #: 838 MiB in float32
BUDGETS = {"--device-memory": 300 * MIB, "--host-memory": 240 * MIB}


def requests() -> list[dict]:
    """Bodies of mixed lengths: the shipped texts cut anywhere, 8 to 96 tokens to generate, all of them used up."""
    generator, texts = np.random.default_rng(0), shipped.prompts()
    bodies = []
    for number in range(NUM_REQUESTS):
        text = texts[number % len(texts)]
        bodies.append({
            "prompt": text[: int(generator.integers(len(text) // 2, len(text) + 1))], "temperature": 0,
            "max_tokens": int(generator.integers(8, 97)), "ignore_eos": True,
        })  # fmt: skip
    return bodies


def bench_run(table) -> None:
    """All rows."""
    model = shipped.CHECKPOINT
    with TemporaryDirectory() as name, _cache(Path(name) / "cache"):
        folder = Path(name)
        bodies = requests()
        write_lines(folder / "in.jsonl", bodies)
        bench_overhead(table, model, folder, bodies)
        bench_prediction(table, model, folder)
        bench_memory(table, folder)


def write_lines(path: Path, bodies: list[dict]) -> None:
    line = {"method": "POST", "url": "/v1/completions"}
    lines = [json.dumps({"custom_id": f"r{i}", **line, "body": body}) for i, body in enumerate(bodies)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    """What is known of this machine is not looked at, and not changed."""
    before = os.environ.get("FLEXHYBRID_CACHE")
    os.environ["FLEXHYBRID_CACHE"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["FLEXHYBRID_CACHE"]
        else:
            os.environ["FLEXHYBRID_CACHE"] = before


def options(folder: Path, model: Path, **arguments) -> RunOptions:
    llm = LLMArguments(model, device="cpu", dtype="float32", **arguments)
    return RunOptions(folder / "in.jsonl", folder / "out.jsonl", llm, restart=True, quiet=True)


def silent(text: str) -> None:
    pass


def bench_overhead(table, model: Path, folder: Path, bodies: list[dict]) -> None:
    """A whole job over the same prompts through generate, each with loading the model: what each takes beside the
    engine's own run. That is the same tasks on both sides, and swings by ten times what is looked for here."""
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

    whole: dict[str, list[float]] = {"generate": [], "job": []}
    beside: dict[str, list[float]] = {"generate": [], "job": []}
    for number in range(PAIRS + 1):
        for name, side in (("generate", generate), ("job", job)):
            with engine_seconds() as computing:
                began = time.perf_counter()
                side()
                seconds = time.perf_counter() - began
            if number:  # the first round loads what the process keeps
                whole[name].append(seconds)
                beside[name].append(seconds - sum(computing))
    more = {name: statistics.median(times) for name, times in beside.items()}
    ratio = 1 + (more["job"] - more["generate"]) / statistics.median(whole["generate"])
    kept = {f"{name}_s": times for name, times in whole.items()}
    kept |= {f"{name}_beside_the_engine_s": times for name, times in beside.items()}
    table.add("run: files, resume and progress against LLM.generate", ratio, OVERHEAD, "x", False, **kept)


@contextmanager
def engine_seconds() -> Iterator[list[float]]:
    """Seconds of each run of an engine under way, but for those that its caller's own functions take in it."""
    found: list[float] = []
    run_whole = Engine.run

    def timed(self, *arguments, **named):
        called = 0.0

        def watched(call):
            def watching(*of):
                nonlocal called
                before = time.perf_counter()
                try:
                    return call(*of)
                finally:
                    called += time.perf_counter() - before

            return call and watching

        named |= {name: watched(named[name]) for name in CALLBACKS if name in named}
        began = time.perf_counter()
        try:
            return run_whole(self, *arguments, **named)
        finally:
            found.append(time.perf_counter() - began - called)

    Engine.run = timed
    try:
        yield found
    finally:
        Engine.run = run_whole


def bench_prediction(table, model: Path, folder: Path) -> None:
    """Seconds that the plan named against those that the answers took, of a machine measured just before each run: the
    median of the least disturbed rounds."""
    for where, more in {
        "policy auto": {"policy": "auto"},
        f"half of the context recomputed, link at {LINK_GB_PER_S} GB/s": {
            "policy": "hybrid(0.5)", "link_gb_per_s": LINK_GB_PER_S,
        },
    }.items():  # fmt: skip
        asked = options(folder, model, **more)

        def measure_and_run(asked=asked) -> dict:
            profiled(asked)
            return run(asked, silent)

        done = undisturbed(measure_and_run, ROUNDS)
        errors = [100 * abs(one["predicted_s"] / one["seconds"] - 1) for _, one in least_disturbed(done, ROUNDS)]
        rounds = {name: [one[name] for _, one in done] for name in ("predicted_s", "seconds")}
        name = f"run: predicted finish, {where}, error"
        others = [share for share, _ in done]
        table.add(name, statistics.median(errors), ERROR, "%", False, **rounds, others=others)


def profiled(options: RunOptions) -> None:
    """Measure this machine at the model's sizes, as policy auto does by itself at its first run."""
    from flexhybrid.jobs.profile.job import measure_for_model

    llm = options.llm
    device = pick_device(llm.device, llm.link_gb_per_s)
    measure_for_model(Checkpoint(llm.model).shape, llm.dtype, device, llm.link_gb_per_s)


def bench_memory(table, folder: Path) -> None:
    """Peak of a model beyond its budgets, and of a file 50 times as long as another."""
    if not Path("/proc/self/status").is_file():
        tqdm.write("     memory of a run: not measured, the kernel tells nothing here")
        return
    large = make_checkpoint(folder / "large", LARGE, "float32")
    policy = {"name": "disk", "weights": {"device": 0.2, "host": 0.1, "disk": 0.7}, "cache": {"kv@host": 1.0}}
    (folder / "policy.json").write_text(json.dumps(policy))
    write_requests(folder / "in.jsonl", 12, 60, 4, LARGE.vocab)
    budgets = [str(part) for pair in BUDGETS.items() for part in pair]
    files = ["-i", folder / "in.jsonl", "-o", folder / "out.jsonl"]
    common = [*files, "--device", "cpu", "--dtype", "float32", "--restart"]
    searched = ["--model", large, "--disk-dir", folder / "scratch", *budgets]
    given, budget = [*searched, "--policy", folder / "policy.json"], sum(BUDGETS.values())
    size = sum(f.stat().st_size for f in large.iterdir())
    for what, arguments in {"": given, ", policy auto, which measures first": searched}.items():
        peak = peak_bytes([str(one) for one in (*common, *arguments)])
        more = {"peak_bytes": peak, "budget_bytes": budget, "model_bytes": size}
        name = f"run: peak memory over the budget, model beyond it{what}"
        table.add(name, peak / budget, BEYOND_BUDGET, "x", False, **more)

    tiny = make_checkpoint(folder / "tiny", ModelShape("tiny", "opt", 1, 64, 1, 1, 64, 64, 100, 64), "float32")
    peaks = []
    for count in (SHORT_LINES, LONG_LINES):
        write_requests(folder / "in.jsonl", count, 8, 4, 100)
        arguments = [*common, "--model", tiny, "--policy", "kv_only"]
        peaks.append(peak_bytes([str(one) for one in arguments], fake=True))
    a_line = (peaks[1] - peaks[0]) / (LONG_LINES - SHORT_LINES)
    name = f"run: memory that a line takes, {LONG_LINES:,} against {SHORT_LINES:,}"
    table.add(name, a_line, BYTES_A_LINE, "bytes", False, peak_bytes=peaks)
