"""Answering pending requests with the executor of this process, in a batch that they join and leave."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from flexhybrid.batch.in_flight import Tokens
from flexhybrid.batch.openai import Request
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.errors import InputError
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.progress import StopAsked
from flexhybrid.jobs.run.outlook import Outlook
from flexhybrid.llm import LLM, OnTrace
from flexhybrid.requests import Generated, RequestOutput
from flexhybrid.running_requests import Replies
from flexhybrid.runtime.engine import RunControl
from flexhybrid.runtime.kernels.sampling import SamplingPlan

CHECKED_LINES = 1024  #: after so many lines the input is looked at again: nobody may write to it meanwhile


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

    def keep(self, in_flight: Callable[[], Tokens]) -> None:
        """Note now and then how far the lines are that are not answered, for the run after a kill."""

    def note(self, text: str) -> None:
        """Tell the user something."""

    def watch(self, workload: Workload) -> Outlook | None:
        """Return what hears of a batch of these lengths that begins now, to foretell its end; None: nobody asks."""

    def drains(self) -> bool:
        """Return whether nobody shall join the batch any more."""
        ...

    def between_batches(self) -> None:
        """Take the end of a batch: the next one may have another policy."""


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
    """Answer until nothing is pending or a stop is asked for, all in one batch that requests join and leave.
    ``on_trace`` takes its result."""
    while len(places := requests.pending()) and not stop.asked:
        requests.check_input_unchanged()
        try:
            Batch(requests, places, stop).run(on_trace)
        except torch.OutOfMemoryError as error:
            _shrink(requests.llm, error, requests.note)
        requests.between_batches()


class Batch:
    """Lines that are answered together: a line has as many requests as it asks for answers."""

    def __init__(self, requests: PendingRequests, places: np.ndarray, stop: StopAsked):
        self.requests, self.llm, self.stop = requests, requests.llm, stop
        num_answers = requests.num_answers(places)
        self.workload = requests.workload(places)
        self.place = np.repeat(places, num_answers)  #: of each request's line
        self.index = np.arange(len(self.place)) - np.repeat(np.cumsum(num_answers) - num_answers, num_answers)
        self.replies = Replies(self.llm.codec)
        self.open_lines: dict[int, tuple[Request, list[Generated]]] = {}  #: by place, those that run
        self.answered: list[Answered] = []
        self.next_check = CHECKED_LINES
        self.outlook: Outlook | None = None

    def run(self, on_trace: OnTrace | None) -> None:
        self.outlook = self.requests.watch(self.workload)
        joins = self.outlook.begin if self.outlook else None
        stops, drains = lambda: self.stop.asked, self.requests.drains
        hears = RunControl(on_join=joins, on_tokens=self.on_tokens, should_stop=stops, should_drain=drains)
        try:
            self.llm.answer(self.workload, self.begin, self.completed, hears, on_trace)
        finally:
            self.write()

    def begin(self, request: int) -> tuple[Generated, SamplingPlan]:
        """Read a line when the first of its requests joins."""
        place = int(self.place[request])
        if place not in self.open_lines:
            self.next_check -= 1
            if not self.next_check:
                self.requests.check_input_unchanged()
                self.next_check = CHECKED_LINES
            self.open_lines[place] = self.requests.request(place + 1), []
        line, answers = self.open_lines[place]
        generated, plan = self.llm.codec.open(line.token_ids, line.params, int(self.index[request]))
        answers.append(generated)
        return generated, plan

    def completed(self, request: int, generated: Generated) -> None:
        if self.outlook:
            self.outlook.end(request, len(generated.token_ids))
        place = int(self.place[request])
        reply = self.replies.add(place, generated, None, str(place))
        if reply is None:
            return
        line = self.requests.line(place + 1, self.open_lines.pop(place)[0], reply)
        num_tokens = sum(len(output.token_ids) for output in reply.outputs)
        self.answered.append(Answered(place + 1, line, num_tokens))

    def write(self) -> None:
        """Write all answers of an iteration at once."""
        complete, self.answered = self.answered, []
        self.requests.write(complete)

    def on_tokens(self, count: int) -> None:
        self.write()
        if self.outlook:
            self.outlook.advance(count)
        self.requests.advance(count)
        self.requests.keep(self.in_flight)

    def in_flight(self) -> Tokens:
        """Return how far the lines are that are not answered."""
        return {place + 1: sum(len(of.token_ids) for of in open_[1]) for place, open_ in self.open_lines.items()}


def _shrink(llm: LLM, error: torch.OutOfMemoryError, note: Callable[[str], None]) -> None:
    """Halve the mini-batches, and how many requests run at a time, after the device had too little memory."""
    policy, max_batch = llm.settled_policy, llm.at_a_time
    tokens = policy.max_mini_batch_tokens // 2
    if max_batch == 1 and tokens < BLOCK_TOKENS:
        raise InputError(f"the device has too little memory for one request: {error}") from None
    tokens, max_batch = max(tokens, BLOCK_TOKENS), max(1, max_batch // 2)
    note(f"the device is out of memory: on with mini-batches of {tokens} tokens, {max_batch} requests at a time")
    llm.use(replace(policy, max_mini_batch_tokens=tokens, max_batch=max_batch))
    if llm.device.type == "cuda":
        torch.cuda.empty_cache()
