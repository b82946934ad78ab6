"""Bench rows of re-planning: a job whose link becomes slower than predicted searches its policy again.

Each job runs twice, with and without re-planning. The windows in which it looks at what is measured are shorter than
those of a night, as the job is. Attention stays on the device: the host of this "device" is the same cores, where
nothing but weights would cross the link and no mix could help.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
from tqdm import tqdm

from experiments.bench.harness import Table, bench
from experiments.bench.queues.run import write_lines
from experiments.peers.random_opt import make_checkpoint
from flexhybrid.arguments import LLMArguments
from flexhybrid.core.hardware import Hardware
from flexhybrid.jobs.profile.job import TIMING_SHAPE, measure_for_model
from flexhybrid.jobs.run import job, lines, replanning
from flexhybrid.jobs.run.options import RunOptions
from flexhybrid.resolve import pick_device
from flexhybrid.runtime import links

SHAPE = replace(
    TIMING_SHAPE, name="replanned", num_layers=8, hidden=256, num_heads=8, num_kv_heads=8, head_dim=32, ffn=1024,
    vocab=512, max_positions=256,
)  # fmt: skip
MAX_BATCH = 32  #: so that others wait for most of the job
#: So little memory that the mix is one for its link: what is best at its beginning takes 1.6 times as long as the best
#: one at a third of the rate, by prediction. With 24 MiB the two were equally fast.
LINK_GB_PER_S, DEVICE_MEMORY, NUM_REQUESTS = 0.8, "18MiB", 150
SLOWER, SLOW_FROM_S = 3.0, 10.0  #: times by which the link becomes slower, and seconds from the first copy until then
WINDOW_S = 3.0
FASTER = 1.1  #: bar: times as fast as without


class BusyLink(links.Pacer):
    """A direction of a link whose rate falls while it is used."""

    began: float | None = None  #: when the first of all directions was made that a job copies with

    @property
    def bytes_per_s(self) -> float | None:
        busy = BusyLink.began is not None and time.monotonic() - BusyLink.began > SLOW_FROM_S
        return self.rate / SLOWER if busy and self.rate else self.rate

    @bytes_per_s.setter
    def bytes_per_s(self, rate: float | None) -> None:
        self.rate = rate


@contextmanager
def busy_link() -> Iterator[None]:
    """Let the link become slower SLOW_FROM_S after the first iteration of a job."""
    advance, BusyLink.began = lines.JobLines.advance, None

    def begins(self, num_tokens: int) -> None:
        BusyLink.began = BusyLink.began or time.monotonic()
        advance(self, num_tokens)

    with patch.object(links, "Pacer", BusyLink), patch.object(lines.JobLines, "advance", begins):
        yield


def requests() -> Iterator[dict]:
    generator = np.random.default_rng(0)
    for _ in range(NUM_REQUESTS):
        prompt = generator.integers(3, SHAPE.vocab, generator.integers(24, 65)).tolist()
        limit = int(np.clip(np.exp(generator.normal(np.log(40), 0.6)), 4, 160))
        yield {"prompt": prompt, "temperature": 0, "max_tokens": limit, "ignore_eos": True}


@bench("replanning")
def bench_replanning(table: Table, hardware: Hardware | None = None) -> None:
    """Add the row of a link that becomes slower. ``hardware``: measured now where None."""
    hardware = hardware or measure_for_model(SHAPE, "float32", pick_device("cpu", LINK_GB_PER_S))
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_lines(folder / "in.jsonl", requests())
        seconds, answers = {}, {}
        for replan in (False, True):
            with busy_link():
                seconds[replan], answers[replan] = answered(folder, hardware, replan)
    assert answers[True] == answers[False], "other tokens"
    table.at_least(
        "run: a link that falls to a third, times as fast with re-planning", seconds[False] / seconds[True], FASTER, "x"
    )


def answered(folder: Path, hardware: Hardware, replan: bool) -> tuple[float, dict]:
    """Run the job; return its seconds, and the answers by id."""
    make_checkpoint(folder / "model", SHAPE, "float32")
    lines = {key: line for key, line in hardware.lines.items() if key != "attend_host"}
    replace(hardware, lines=lines).save(folder / "machine.json")
    llm = LLMArguments(
        folder / "model", "auto", "cpu", "float32", folder / "machine.json", {"device": DEVICE_MEMORY},
        link_gb_per_s=LINK_GB_PER_S,
    )  # fmt: skip
    out = folder / f"out-{replan}.jsonl"
    options = RunOptions(folder / "in.jsonl", out, llm, restart=True, quiet=True, replan=replan, max_batch=MAX_BATCH)
    with patch.object(replanning, "WINDOW_S", WINDOW_S):
        record = job.run(options, tqdm.write)
    rows = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    return record["seconds"], {row["id"]: row["response"]["body"]["choices"] for row in rows}
