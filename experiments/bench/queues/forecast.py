"""Bench rows of forecasts of a refilled queue's time: at its start, after a tenth of its answers, and by the virtual
clock, which knows every length; each against the measured time."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from experiments.bench.harness import Table, bench, seconds_of
from experiments.bench.queues.refill import LINK_GB_PER_S, MODEL, ending_after
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
#: Prompts that begin alike, under a mix of KV and ACT: free blocks and free places both decide which requests join.
SYSTEM, SHARING_REQUESTS = 400, 1_000
BARS = {"at the start": (None, 20), "after a tenth": (None, 10), "by the virtual clock": (8, 15)}


@bench("refill")
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
    estimates = {
        "at the start": at_start.total_s,
        "by the virtual clock": walk_queue(llm.problem, llm.settled_policy, known, AT_A_TIME).total_s,
    }
    few = unknown.select(slice(AT_A_TIME))  # weights and buffers are there from now on
    llm.answer(few, ending_after(llm, prompts, np.full(AT_A_TIME, 2)), lambda *_: None, RunControl())
    outlook = Outlook(at_start.pace, unknown, open_wave=batches(llm, unknown)) if at_start.pace else None
    control = _listening(outlook, ends, estimates) if outlook else RunControl()

    def completed(index: int, generated: Generated) -> None:
        if outlook:
            outlook.end(index, len(generated.token_ids))

    seconds = seconds_of(lambda: llm.answer(unknown, ending_after(llm, prompts, ends), completed, control))
    return {name: estimate / seconds - 1 for name, estimate in estimates.items()}


def _listening(outlook: Outlook, ends: np.ndarray, estimates: dict[str, float]) -> RunControl:
    """Return the control of a run that tells ``outlook`` of it, and adds its forecast after a tenth of the answers."""
    began = time.perf_counter()

    def on_tokens(_count: int) -> None:
        outlook.advance()
        ended = outlook.ended_in >= 0
        if ended.mean() >= 0.1 and "after a tenth" not in estimates:
            estimates["after a tenth"] = time.perf_counter() - began + (outlook.seconds_left() or 0.0)
            known_to = ends[ended].std() / ended.sum() ** 0.5 / ends[ended].mean()
            print(f"{ended.sum()} answers have ended; their mean alone is known to {known_to:.1%}", flush=True)

    return RunControl(on_join=outlook.begin, on_busy=outlook.note_busy, on_tokens=on_tokens)
