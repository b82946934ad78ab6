"""Bench rows of policy auto against policies named by hand; each job runs from start to end.

The seconds of auto include its trial, its searches and its changes of policy; only the profile is measured before. The
grid holds the policies that a careful user would try one by one. Auto, and every policy of the grid close to the
fastest one, is measured three times; the median counts. A run that is far behind the fastest one is stopped.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import torch
from tqdm import tqdm

from experiments.bench.harness import Table, bench
from experiments.bench.queues.run import profiled, silent, write_lines
from experiments.peers.random_opt import make_checkpoint
from flexhybrid.arguments import LLMArguments
from flexhybrid.core.errors import InputError, check
from flexhybrid.core.model.shape import DTYPE_BYTES
from flexhybrid.jobs.profile.job import TIMING_SHAPE, fastest_dtype
from flexhybrid.jobs.run.job import RunOptions, run

SHAPE = replace(TIMING_SHAPE, name="opt-chosen", vocab=3000)
LINK_GB_PER_S, DISK_GB_PER_S = 0.4, 0.2  #: for a model of two-byte elements, in proportion for others
SMALL = "max_mini_batch_tokens=1024"
GRID = (
    *("kv_only", f"kv_only({SMALL})", f"kv_only({SMALL}, weights_device=0.25)", "fastdecode"),
    *("act_only", f"act_only({SMALL})", f"hybrid(0.5, {SMALL})", f"hybrid(0.25, {SMALL}, weights_device=0.25)"),
)
ON_DISK = tuple(f"{name}{SMALL}, weights_disk=1)" for name in ("kv_only(", "act_only(", "hybrid(0.5, "))
BAR = 0.98
ROUNDS, NEAR = 3, 1.25  #: repetitions of auto and of the policies within this ratio of the fastest one
STOPPED, SETUP_S = 2.0, 10.0  #: a run is stopped after this many times the fastest one's seconds, and these for loading


@dataclass(frozen=True)
class ChosenJob:
    """A kind of job: its requests, its memory budgets, and the policies that a user would try."""

    name: str
    num_requests: int
    prompt_tokens: int
    max_tokens: int
    budgets: dict[str, int]  #: tier -> MiB for a model of two-byte elements, in proportion for others
    grid: tuple[str, ...] = GRID


JOBS = (
    ChosenJob("resident", 128, 256, 48, {}, ("resident",)),
    ChosenJob("streamed", 24, 256, 16, {"device": 96}),
    ChosenJob("long context", 8, 1280, 12, {"device": 192}),
    ChosenJob("short labels", 64, 384, 4, {"device": 96}),
    ChosenJob("weights on the disk", 16, 256, 8, {"device": 96, "host": 90}, ON_DISK),
)


def requests(job: ChosenJob) -> Iterator[dict]:
    """Yield bodies with prompts of half to one and a half times the mean, each answered to its limit."""
    generator = np.random.default_rng(0)
    for _ in range(job.num_requests):
        length = generator.integers(job.prompt_tokens // 2, job.prompt_tokens * 3 // 2)
        limit = int(generator.integers(max(1, job.max_tokens // 2), job.max_tokens * 3 // 2))
        prompt = generator.integers(3, SHAPE.vocab, min(length, SHAPE.max_positions - limit)).tolist()
        yield {"prompt": prompt, "temperature": 0, "max_tokens": limit, "ignore_eos": True}


class Stopped(BaseException):
    """A run took too long. No exception, so that the run does not handle it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise Stopped in the block after ``seconds``; 0: never."""

    def stop(*_) -> None:
        raise Stopped

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@bench("auto")
def bench_auto(table: Table) -> None:
    """Add, for each job, tokens/s of policy auto over those of the best policy of the grid."""
    dtype = fastest_dtype(SHAPE, torch.device("cpu"))
    times = DTYPE_BYTES[dtype] / 2
    with TemporaryDirectory() as name, patch.dict(os.environ, FLEXHYBRID_CACHE=str(Path(name) / "cache")):
        folder = Path(name)
        make_checkpoint(folder / "model", SHAPE, dtype)
        for job in JOBS:
            write_lines(folder / "in.jsonl", requests(job))
            llm = LLMArguments(
                folder / "model",
                "auto",
                "cpu",
                dtype,
                budgets={tier: f"{int(mib * times)}MiB" for tier, mib in job.budgets.items()},
                link_gb_per_s=LINK_GB_PER_S * times if job.budgets else None,  # paced, nothing stays for its own sake
                disk_dir=folder,
                disk_gb_per_s=DISK_GB_PER_S * times,
            )
            options = RunOptions(folder / "in.jsonl", folder / "out.jsonl", llm, restart=True, quiet=True)
            profiled(options)
            seconds: dict[str, list[float]] = {}
            left_out, candidates, least = {}, [*job.grid], math.inf
            for _ in range(ROUNDS):
                for policy in tqdm(("auto", *candidates), desc=job.name, leave=False):
                    try:
                        with at_most(0.0 if math.isinf(least) else SETUP_S + STOPPED * least):
                            record = run(replace(options, llm=replace(llm, policy=policy)), silent)
                    except InputError as error:  # it does not fit, or not every request
                        left_out[policy] = str(error)
                        continue
                    except Stopped:
                        left_out[policy] = f"stopped after {SETUP_S + STOPPED * least:.0f} s"
                        continue
                    check(f"policy {policy}: refused lines", record["refused"], record["refused"] == 0, "none")
                    seconds.setdefault(policy, []).append(record["seconds"])
                    least = min(least, record["seconds"])
                candidates = [name for name in candidates if name in seconds and seconds[name][0] < NEAR * least]
            medians = {name: statistics.median(of) for name, of in seconds.items()}
            own_s = medians.pop("auto")
            best = min(medians, key=medians.__getitem__, default=None)
            value = (medians[best] if best else STOPPED * least) / own_s  # all others stopped: at least this
            table.at_least(
                f"auto, {job.name}: of the tokens/s of the best of a grid",
                value,
                BAR,
                "x",
                best=best,
                seconds=seconds,
                left_out=left_out,
            )
