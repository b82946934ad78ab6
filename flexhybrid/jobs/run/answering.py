"""Answering pending requests with the executor of this process: wave after wave, within the memory that is free."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from flexhybrid.batch.openai import Request
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.errors import InputError
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.progress import StopAsked
from flexhybrid.jobs.run.forecast import WINDOW
from flexhybrid.llm import LLM, OnTrace
from flexhybrid.requests import RequestOutput


class Answered(NamedTuple):
    """A complete answer."""

    number: int  #: of the input line, from 1
    line: bytes  #: of the output
    num_tokens: int  #: of all its choices


class PendingRequests(Protocol):
    """Lines of an input that are to be answered: those of a job (``job.Job``) or of a batch on a Ray cluster
    (``remote.RemoteBatch``)."""

    llm: LLM

    def pending(self) -> np.ndarray:
        """Return the line numbers less one of unanswered requests, in the order in which they are to run."""
        ...

    def workload(self, places: np.ndarray) -> Workload:
        """Return the lengths of all answers of the lines at ``places`` (line numbers less one)."""
        ...

    def num_answers(self, places: np.ndarray) -> np.ndarray:
        """Return how many answers each of these lines gets."""
        ...

    def request(self, number: int) -> Request:
        """Return the request of a line, counted from 1."""
        ...

    def line(self, number: int, request: Request, output: RequestOutput) -> bytes:
        """Return the output line that answers a request."""
        ...

    def check_input_unchanged(self) -> None:
        """Raise InputError when the input was written to."""

    def write(self, answered: list[Answered]) -> None:
        """Take complete answers; they are pending no longer."""

    def advance(self, num_tokens: int) -> None:
        """Take the number of tokens that an iteration has generated."""

    def note(self, text: str) -> None:
        """Tell the user something."""


def load_weights(llm: LLM, planned: dict[str, int]) -> None:
    """Load the weights. Raise InputError when the device cannot hold them, or when the layers take other sizes than
    ``planned`` (tier -> bytes)."""
    try:
        placed = llm.load()
    except torch.OutOfMemoryError as error:
        raise InputError(f"the device has too little memory for the weights: {error}; name --device-memory") from None
    if placed != planned:
        raise InputError(f"the layers' weights take {placed} bytes, not the {planned} that were planned")


def answer_pending(requests: PendingRequests, stop: StopAsked, on_trace: OnTrace | None = None) -> None:
    """Answer until nothing is pending or a stop is asked for. ``on_trace`` takes the first wave's result."""
    max_requests = WINDOW
    while len(pending := requests.pending()) and not stop.asked:
        requests.check_input_unchanged()
        window, count = first_lines(requests, pending[:max_requests])
        try:
            _answer_wave(requests, (window + 1).tolist(), stop, on_trace)
            on_trace = None
        except torch.OutOfMemoryError as error:
            max_requests = _shrink(requests.llm, count, error, requests.note)


def first_lines(requests: PendingRequests, window: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the first of these lines whose answers run together, one at least, and how many answers do."""
    count, _ = requests.llm.first_wave(requests.workload(window))
    count = min(count, len(window))
    num_lines = int(np.searchsorted(requests.num_answers(window).cumsum(), count, side="right"))
    return window[: max(1, num_lines)], count


def _answer_wave(requests: PendingRequests, numbers: list[int], stop: StopAsked, on_trace: OnTrace | None) -> None:
    wave = [requests.request(number) for number in numbers]
    answered: list[Answered] = []

    def on_answer(place: int, output: RequestOutput) -> None:
        line = requests.line(numbers[place], wave[place], output)
        answered.append(Answered(numbers[place], line, sum(len(one.token_ids) for one in output.outputs)))

    def write() -> None:
        """Write all answers of an iteration at once."""
        complete, answered[:] = list(answered), []
        requests.write(complete)

    def on_tokens(count: int) -> None:
        write()
        requests.advance(count)

    try:
        requests.llm.generate(
            [request.token_ids for request in wave],
            [request.params for request in wave],
            on_tokens=on_tokens,
            on_answer=on_answer,
            should_stop=lambda: stop.asked,
            on_trace=on_trace,
        )
    finally:
        write()


def _shrink(llm: LLM, count: int, error: torch.OutOfMemoryError, note: Callable[[str], None]) -> int:
    """Halve the mini-batches after the device had too little memory for ``count`` requests; return half of ``count``,
    the most requests to run at a time."""
    policy = llm.settled_policy
    tokens = policy.max_mini_batch_tokens // 2
    if count == 1 and tokens < BLOCK_TOKENS:
        raise InputError(f"the device has too little memory for one request: {error}") from None
    tokens, max_requests = max(tokens, BLOCK_TOKENS), max(1, count // 2)
    note(f"the device is out of memory: on with mini-batches of {tokens} tokens, {max_requests} requests at a time")
    llm.use(replace(policy, max_mini_batch_tokens=tokens))
    if llm.device.type == "cuda":
        torch.cuda.empty_cache()
    return max_requests
