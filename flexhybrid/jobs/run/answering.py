"""Answers pending requests with this process's executor, in a batch that requests join and leave."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from flexhybrid.batch.openai import Refused, Request, refusing
from flexhybrid.batch.replies import answer_tokens, error_line
from flexhybrid.batch.request_index import per_answer
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.errors import InputError
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.progress import StopAsked
from flexhybrid.jobs.run.outlook import Outlook
from flexhybrid.llm import LLM
from flexhybrid.requests import Generated, RequestOutput
from flexhybrid.runner import OnTrace, Replies
from flexhybrid.runtime.engine import Failure, RunControl
from flexhybrid.runtime.kernels.sampling import SamplingPlan
from flexhybrid.sampling_params import SamplingParams
from flexhybrid.text import StopWatch
from sim.answer_lengths import ObservedAnswers

LONG_LINE = 1 << 16  #: bytes above which an answer is written immediately, without the others of its iteration
CHECKED_LINES = 1024  #: number of requests after which the input is checked for changes again


class Answered(NamedTuple):
    """The output line of a complete answer or of a refused request."""

    number: int  #: number of the input line, from 1
    line: bytes  #: output line
    num_tokens: int  #: tokens of all choices
    refused: str | None = None  #: error code of a refused request


class PendingRequests(Protocol):
    """Lines of an input to answer: a job's (``lines.JobLines``), or a Ray actor's (``remote.RemoteBatch``).
    A place is a line number minus one. Methods without a result may do nothing."""

    llm: LLM
    lengths: ObservedAnswers | None = None  #: lengths of ended answers, also of the run before; None: not needed

    def pending(self) -> np.ndarray:
        """Return the places of unanswered requests, in the order in which they will run."""
        ...

    def workload(self, places: np.ndarray) -> Workload:
        """Return the lengths of the requests at ``places``, an entry for each of their answers."""
        ...

    def num_answers(self, places: np.ndarray) -> np.ndarray:
        """Return the number of answers (``n``) of each line."""
        ...

    def request(self, number: int) -> Request:
        """Return the request of a line, counted from 1."""
        ...

    def line(self, number: int, request: Request, output: RequestOutput) -> bytes:
        """Return the output line that answers a request."""
        ...

    def check_input_unchanged(self) -> None:
        """Raise InputError if the input file was changed."""

    def write(self, answered: list[Answered]) -> None:
        """Write complete answers, which are then no longer pending."""

    def begins(self, first_share: Callable[[], float]) -> None:
        """Note that a batch begins; ``first_share`` returns the computed share of its first iteration."""

    def advance(self, num_tokens: int) -> None:
        """Note the number of tokens that an iteration has generated."""

    def note(self, text: str) -> None:
        """Print a message for the user."""

    def watch(self, workload: Workload) -> Outlook | None:
        """Return an Outlook that estimates the end of a batch that begins now; None if no estimate is needed."""

    def drains(self) -> bool:
        """Return True if no more requests may join the batch."""
        return False

    def restarts(self) -> bool:
        """Return True if the batch must stop, and its unanswered requests begin again in the next one."""
        return False

    def between_batches(self) -> None:
        """Prepare the next batch, which may have another policy."""


def load_weights(llm: LLM, planned: dict[str, int]) -> None:
    """Load the weights. Raise InputError if the device cannot hold them, or if their sizes are not as planned.
    ``planned``: tier -> bytes of the layers' weights."""
    try:
        placed = llm.load()
    except torch.OutOfMemoryError as error:
        raise InputError(f"the device has too little memory for the weights: {error}; set --device-memory") from None
    if placed != planned:
        raise InputError(f"the layers' weights take {placed} bytes, not the {planned} that were planned")


def answer_pending(requests: PendingRequests, stop: StopAsked, on_trace: OnTrace | None = None) -> None:
    """Answer requests, batch by batch, until no request is pending or a stop is requested.
    One batch is enough unless the policy changes. ``on_trace`` gets the result of the first wave."""
    while len(places := requests.pending()) and not stop.asked:
        requests.check_input_unchanged()
        try:
            Batch(requests, places, stop).run(on_trace)
        except torch.OutOfMemoryError as error:
            _shrink(requests.llm, error, requests.note)
        else:
            on_trace = None
        requests.between_batches()


class Batch:
    """Answers the lines at ``places`` together, with a request per answer."""

    def __init__(self, requests: PendingRequests, places: np.ndarray, stop: StopAsked):
        self.requests, self.llm, self.stop = requests, requests.llm, stop
        num_answers, workload = requests.num_answers(places), requests.workload(places)
        #: [requests]: place of its line, and number among the line's answers
        self.place = per_answer(places, num_answers)
        self.index = np.broadcast_to(np.int16(0), self.place.shape)  # a view that takes no memory
        if len(self.place) > len(places):
            first = np.repeat(np.cumsum(num_answers, dtype=np.int64) - num_answers, num_answers)
            self.index = (np.arange(len(self.place)) - first).astype(np.int16)
        self.workload, self.outlook = workload, requests.watch(workload)
        self.replies = Replies(self.llm.codec)
        #: place -> its request (None: refused), and its answers that have begun
        self.open_lines: dict[int, tuple[Request | None, list[Generated]]] = {}
        self.refused: dict[int, Refused] = {}  #: place -> error of a line whose other answers still run
        self.running: set[tuple[int, int]] = set()  #: (place, index) of the answers that are not complete
        self.answered: list[Answered] = []
        self.next_check = CHECKED_LINES

    def run(self, on_trace: OnTrace | None) -> None:
        """Answer the lines until all are done, a stop is requested, or a change of the policy ends the batch."""
        outlook, lengths = self.outlook, self.requests.lengths
        callbacks = RunControl(
            num_ended=lengths and lengths.ended + lengths.cut,
            on_busy=outlook and outlook.note_busy,
            timed_iterations=outlook.timed_iterations if outlook else 0,
            on_start=self.requests.begins,
            on_join=outlook and outlook.begin,
            on_tokens=self.on_tokens,
            should_stop=lambda: self.stop.asked or self.requests.restarts(),
            should_drain=self.requests.drains,
        )
        try:
            self.llm.answer(self.workload, self.begin, self.completed, callbacks, on_trace)
        finally:
            self.write()

    def begin(self, request: int) -> tuple[Generated, SamplingPlan]:
        """Return the answer and sampling of a request that joins. Its line is read for the first of its answers."""
        place, index = int(self.place[request]), int(self.index[request])
        if place not in self.open_lines:
            self.next_check -= 1
            if not self.next_check:
                self.requests.check_input_unchanged()
                self.next_check = CHECKED_LINES
            self.open_lines[place] = self._read(place, int(self.workload.prompt_tokens[request])), []
        line, answers = self.open_lines[place]
        if line:
            with self._noting(place):
                opened = self.llm.codec.open(line.token_ids, line.params, index)
        if place in self.refused:  # the request has its place in the batch, so it runs, and ends with its first token
            prompt = [0] * int(self.workload.prompt_tokens[request])
            opened = self.llm.codec.open(prompt, SamplingParams(temperature=0), index)
            opened[0].watch = StopWatch(lambda ids: "." * len(ids), prompt, (".",))
        self.running.add((place, index))
        answers.append(opened[0])
        return opened

    def _read(self, place: int, prompt_tokens: int) -> Request | None:
        """Return the request of a line; None if it is refused at this point."""
        with self._noting(place):
            line = self.requests.request(place + 1)
            if len(line.token_ids) == prompt_tokens:
                return line
            message = f"the prompt has {len(line.token_ids)} tokens, and had {prompt_tokens} when it was counted"
            raise Refused("invalid_value", message, "prompt", line.custom_id)
        self.requests.check_input_unchanged()
        return None

    @contextlib.contextmanager
    def _noting(self, place: int) -> Iterator[None]:
        """Record an error raised by the block as the refusal of the line."""
        line = self.open_lines.get(place, (None,))[0]
        try:
            with refusing(line and line.custom_id):
                yield
        except Refused as refused:
            self.refused.setdefault(place, refused)

    def completed(self, request: int, generated: Generated) -> None:
        if self.outlook:
            self.outlook.end(request, len(generated.token_ids))
        place = int(self.place[request])
        self.running.remove((place, generated.index))
        line, answers = self.open_lines[place]
        if line and place not in self.refused:
            with self._noting(place):
                if isinstance(generated.stop, Failure):
                    raise InputError(generated.stop)
                text = line.echo and line.echo.text
                if (reply := self.replies.add(place, generated, text, str(place))) is None:
                    return
                answer = self.requests.line(place + 1, line, reply)
                self.answered.append(Answered(place + 1, answer, answer_tokens(line, reply)))
                if len(self.answered[-1].line) > LONG_LINE:
                    self.write()
        if place in self.refused:
            num_answers = int(self.requests.num_answers(np.array([place]))[0])
            if len(answers) < num_answers or any((place, one.index) in self.running for one in answers):
                return
            refused = self.refused.pop(place)
            self.answered.append(Answered(place + 1, error_line(place + 1, refused), 0, refused.code))
        del self.open_lines[place]

    def write(self) -> None:
        """Write all complete answers at once."""
        complete, self.answered = self.answered, []
        self.requests.write(complete)

    def on_tokens(self, count: int) -> None:
        self.write()
        if self.outlook:
            self.outlook.advance()
        self.requests.advance(count)


def _shrink(llm: LLM, error: torch.OutOfMemoryError, note: Callable[[str], None]) -> None:
    """Halve the mini-batches and the running requests after the device ran out of memory.
    Raise InputError if both are already minimal."""
    policy, max_batch = llm.settled_policy, llm.at_a_time
    tokens = policy.max_mini_batch_tokens // 2
    if max_batch == 1 and tokens < BLOCK_TOKENS:
        raise InputError(f"the device has too little memory for one request: {error}") from None
    tokens, max_batch = max(tokens, BLOCK_TOKENS), max(1, max_batch // 2)
    note(f"the device is out of memory; trying mini-batches of {tokens} tokens and {max_batch} requests at a time")
    llm.use(replace(policy, max_mini_batch_tokens=tokens, max_batch=max_batch))
    if llm.device.type == "cuda":
        torch.cuda.empty_cache()
