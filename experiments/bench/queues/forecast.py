"""Bench rows of what was foretold of a refilled queue: at its start, after a tenth of its answers, and by the virtual
clock that knows every length, each against what the queue then took."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.bench.harness import Table
from experiments.bench.queues.refill import LINK_GB_PER_S, MODEL, End
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.workload import Prefixes, Workload
from flexhybrid.jobs.profile.disk import measure_disk, with_disk
from flexhybrid.jobs.profile.job import measure_for_model
from flexhybrid.jobs.run.outlook import Outlook, batches
from flexhybrid.llm import LLM
from flexhybrid.requests import Generated
from flexhybrid.resolve import pick_device
from flexhybrid.runtime.engine import RunControl
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.sampling_params import SamplingParams
from sim.answer_lengths import with_mean
from sim.queue_clock import price_queue, walk_queue

#: After a tenth the mean of 200 answers is known to 6 %: of fewer requests the mean alone would miss the bar.
NUM_REQUESTS, AT_A_TIME, LIMIT, DISK_GB_PER_S = 2_000, 24, 96, 0.3
POLICIES = (
    Policy("kv@device", Placement(host=1), cache={"kv@device": 1.0}, max_batch=AT_A_TIME),
    Policy("kv@host", Placement(host=1), cache={"kv@host": 1.0}, max_batch=AT_A_TIME),
    Policy("hybrid(0.5)", Placement(host=1), cache={"act@host": 0.5, "kv@host": 0.5}, max_batch=AT_A_TIME),
    Policy("act_only", Placement(host=1), cache={"act@host": 1.0}, max_batch=AT_A_TIME),
    Policy("disk", Placement(host=0.5, disk=0.5), cache={"kv@host": 1.0}, max_batch=AT_A_TIME),
)
#: Prompts that begin alike, in a mix: buffers decide who joins as well as places.
SYSTEM, SHARING_REQUESTS = 400, 1_000
BARS = {"at the start": (None, 20), "after a tenth": (None, 10), "by the virtual clock": (8, 15)}


def bench_forecast(table: Table, num_requests: int = NUM_REQUESTS, hardware: Hardware | None = None) -> None:
    """Add the rows: the worst, or the median and the worst, over POLICIES. ``hardware``: measured now where None."""
    paced = pick_device("cpu", LINK_GB_PER_S, disk_gb_per_s=DISK_GB_PER_S)
    if hardware is None:
        hardware = measure_for_model(Checkpoint(MODEL).shape, "float32", paced)
        hardware = with_disk(hardware, measure_disk(paced.disk)[0])
    errors: dict[str, list[float]] = {name: [] for name in BARS}
    for policy in POLICIES:
        with LLM(
            MODEL,
            policy,
            device="cpu",
            dtype="float32",
            link_gb_per_s=LINK_GB_PER_S,
            disk_gb_per_s=DISK_GB_PER_S,
            hardware=hardware,
        ) as llm:
            for name, error in queue_errors(llm, num_requests).items():
                errors[name].append(error)
            print(f"{policy.name:12s}", {name: f"{error[-1]:+.1%}" for name, error in errors.items()}, flush=True)
    for name, bars in BARS.items():
        table.errors(f"refilled queue foretold {name}", errors[name], *bars)
    bench_forecast_of_prefixes(table, hardware)


def bench_forecast_of_prefixes(table: Table, hardware: Hardware, num_requests: int = SHARING_REQUESTS) -> None:
    """Add the rows of prompts that begin with one system prompt, in a mix of KV and ACT."""
    mix = POLICIES[2]
    with LLM(MODEL, mix, device="cpu", dtype="float32", link_gb_per_s=LINK_GB_PER_S, hardware=hardware) as llm:
        errors = queue_errors(llm, num_requests, SYSTEM)
    print(f"{mix.name}, a system prompt", {name: f"{error:+.1%}" for name, error in errors.items()}, flush=True)
    for name, (_, worst) in BARS.items():
        table.errors(f"refilled queue of a system prompt foretold {name}", [errors[name]], None, worst)


def queue_errors(llm: LLM, num_requests: int, system: int = 0) -> dict[str, float]:
    """Run a queue; return the relative error of each forecast of its end. ``system``: tokens with which all prompts
    begin."""
    rng = np.random.default_rng(0)
    prompt_tokens, limits = rng.integers(16, 65, num_requests), np.full(num_requests, LIMIT)
    ends = np.clip(np.exp(rng.normal(np.log(10), 0.8, num_requests)), 1, LIMIT).astype(np.int64)
    prompts = [rng.integers(3, llm.shape.vocab, count).tolist() for count in prompt_tokens]
    prefixes = None
    if system:
        common = rng.integers(3, llm.shape.vocab, system).tolist()
        prompts, prompt_tokens = [[*common, *prompt] for prompt in prompts], prompt_tokens + system
        prefixes = Prefixes(np.array([system]), np.array([-1]), np.zeros(num_requests, np.int64))
    unknown = Workload(prompt_tokens, limits, prefixes=prefixes)
    known = replace(unknown, answer_tokens=ends)
    at_start = price_queue(llm.problem, llm.settled_policy, with_mean(unknown, float(ends.mean())), AT_A_TIME)
    foretold = {
        "at the start": at_start.total_s,
        "by the virtual clock": walk_queue(llm.problem, llm.settled_policy, known, AT_A_TIME).total_s,
    }
    _answer(llm, unknown.select(slice(AT_A_TIME)), prompts, np.full(AT_A_TIME, 2))  # weights and buffers are there now
    outlook = Outlook(at_start.pace, unknown, open_wave=batches(llm, unknown)) if at_start.pace else None
    began, told = time.perf_counter(), {}

    def ended(num_ended: int) -> None:
        if outlook and num_ended >= num_requests / 10 and not told:
            left = outlook.seconds_left() or 0.0
            told["after a tenth"] = time.perf_counter() - began + left
            tenth = ends[outlook.ended_in >= 0]
            known_to = tenth.std() / len(tenth) ** 0.5 / tenth.mean()
            print(f"{len(tenth)} answers have ended; their mean alone is known to {known_to:.1%}", flush=True)

    seconds = _answer(llm, unknown, prompts, ends, outlook, ended)
    return {name: told_s / seconds - 1 for name, told_s in (foretold | told).items()}


def _answer(llm: LLM, workload: Workload, prompts, ends, outlook: Outlook | None = None, ended=None) -> float:
    """Answer a queue; return its seconds. ``ended`` takes the number of complete answers after each iteration."""
    params, num_ended = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), 0

    def begin(index: int) -> tuple[Generated, Any]:
        generated, plan = llm.codec.open(prompts[index], params, 0)
        generated.watch = End(int(ends[index]))  # pyright: ignore[reportAttributeAccessIssue]
        return generated, plan

    def completed(index: int, generated: Generated) -> None:
        nonlocal num_ended
        num_ended += 1
        if outlook:
            outlook.end(index, len(generated.token_ids))

    def on_tokens(_count: int) -> None:
        if outlook:
            outlook.advance()
        if ended:
            ended(num_ended)

    began = time.perf_counter()
    joins, busy = (outlook.begin, outlook.note_busy) if outlook else (None, None)
    llm.answer(workload, begin, completed, RunControl(on_join=joins, on_busy=busy, on_tokens=on_tokens))
    return time.perf_counter() - began
