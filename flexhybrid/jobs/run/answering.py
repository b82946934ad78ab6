"""The executor of this process at work on a job: wave after wave, with as much memory as there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.errors import InputError
from flexhybrid.jobs.progress import Progress, StopAsked
from flexhybrid.jobs.run.forecast import WINDOW
from flexhybrid.llm import LLM, OnTrace, RequestOutput

if TYPE_CHECKING:
    from flexhybrid.jobs.run.job import Job


def load_weights(llm: LLM, planned: dict[str, int]) -> None:
    """Raises InputError where the device cannot hold them, or where they come to lie elsewhere than planned: tier ->
    bytes of the layers."""
    try:
        placed = llm.load()
    except torch.OutOfMemoryError as error:
        raise InputError(f"the device has too little memory for the weights: {error}; name --device-memory") from None
    if placed != planned:
        raise InputError(f"the layers' weights take {placed} bytes, not the {planned} that were planned")


def answer_pending(job: Job, progress: Progress, stop: StopAsked, on_trace: OnTrace | None = None) -> None:
    """Answer until nothing is pending or a stop is asked for. ``on_trace`` hears of the first wave."""
    most = WINDOW  # requests of a wave
    while len(pending := job.pending()) and not stop.asked:
        job.check_input_unchanged()
        window = pending[:most]
        count, _ = job.llm.first_wave(job.workload(window))
        try:
            _answer_wave(job, window[:count] + 1, progress, stop, on_trace)
            on_trace = None
        except torch.OutOfMemoryError as error:
            most = _take_smaller(job.llm, count, error, progress.note)


def _answer_wave(
    job: Job, numbers: np.ndarray, progress: Progress, stop: StopAsked, on_trace: OnTrace | None
) -> None:  # fmt: skip
    requests = [job.request(number) for number in numbers.tolist()]
    answered: list[tuple[int, bytes, int]] = []

    def on_answer(place: int, output: RequestOutput) -> None:
        number = int(numbers[place])
        answered.append((number, job.line(number, requests[place], output), len(output.outputs[0].token_ids)))

    def write() -> None:
        """All answers of an iteration at once."""
        done, answered[:] = list(answered), []
        job.write(done, progress)

    def on_tokens(count: int) -> None:
        write()
        progress.advance(count)

    try:
        job.llm.generate(
            [one.token_ids for one in requests], [one.params for one in requests], on_tokens, on_answer,
            lambda: stop.asked, on_trace,
        )  # fmt: skip
    finally:
        write()


def _take_smaller(llm: LLM, count: int, error: torch.OutOfMemoryError, note: Callable[[str], None]) -> int:
    """Go on with half the mini-batch after the device had too little memory for ``count`` requests; returns how many to
    run at a time from now on, half as many."""
    tokens = llm.policy.max_mini_batch_tokens // 2
    if count == 1 and tokens < BLOCK_TOKENS:
        raise InputError(f"the device has too little memory for one request: {error}") from None
    tokens, most = max(tokens, BLOCK_TOKENS), max(1, count // 2)
    note(f"the device is out of memory: on with mini-batches of {tokens} tokens, {most} requests at a time")
    llm.use(replace(llm.policy, max_mini_batch_tokens=tokens))
    if llm.device.type == "cuda":
        torch.cuda.empty_cache()
    return most
