"""The running batch of a server. Here the event loop's thread and the engine's thread meet.

The loop's thread submits and cancels answers. The engine's thread takes them into the batch between iterations, and
after each iteration sends new tokens to the loop. The batch ends when no answer runs or waits; the next answer begins
another one with the same buffers.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flexhybrid.core.admission import batch_size, check_longest
from flexhybrid.core.errors import InputError
from flexhybrid.core.schedule.scheduler import state_of_all
from flexhybrid.core.wave import RequestQueue
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.machine import trim_memory
from flexhybrid.llm import LLM
from flexhybrid.requests import Generated
from flexhybrid.runner import MOST_AT_A_TIME, answer_arrivals
from flexhybrid.runtime.engine import RunControl
from flexhybrid.runtime.kernels.sampling import SamplingPlan
from flexhybrid.text import StopWatch

CAPACITY = 1 << 18  #: answers of one batch; after these, a new batch begins, once all of them are complete
TAKEN_AHEAD = 64, 16  #: most answers that wait inside the batch: of HTTP requests, of lines of a file
TRIM_S = 1.0  #: seconds between two calls of ``trim_memory``


class News(NamedTuple):
    """What an iteration added to an answer."""

    token_ids: list[int]
    records: bytes  #: log probabilities of these tokens (``Generated.records``)
    complete: bool  #: the answer is complete: ``LiveAnswer.generated`` does not change any more


@dataclass(eq=False)
class LiveAnswer:
    """One answer of a request. The engine's thread changes ``generated`` until it is complete."""

    generated: Generated
    plan: SamplingPlan
    max_tokens: int
    on_news: Callable[[News], None]  #: called in the loop's thread
    streams: bool = False  #: whether every iteration brings news, not only the last one
    behind: bool = False  #: whether it waits behind the answers of HTTP requests, as lines of a file do
    cancelled: bool = False
    num_sent: int = 0  #: number of tokens in the news so far
    submitted_s: float = field(default_factory=time.monotonic)
    begun_s: float = 0.0  #: when it joined the batch
    first_s: float = 0.0  #: when its first token was sampled

    def take_news(self, complete: bool) -> News:
        """Return the tokens since the last news, as copies. Called in the engine's thread."""
        token_ids, records = self.generated.token_ids, self.generated.records
        each = len(records) // max(1, len(token_ids))
        news = News(token_ids[self.num_sent :], bytes(records[each * self.num_sent :]), complete)
        self.num_sent = len(token_ids)
        return news


class _Cancelled(StopWatch):
    """Ends an answer with its next token."""

    def __init__(self):
        super().__init__(lambda _: "", [])

    def push(self, token: int) -> str:  # noqa: ARG002
        return ""


class LiveBatch:
    """Runs answers that arrive at any time, in a thread of its own.

    ``sizes``: the lengths that the batch has room for, CAPACITY entries, the longest requests among them.
    ``on_tokens(n)``: called in the loop's thread with the number of new tokens of an iteration. Raise InputError if the
    longest request does not fit the budgets, or requests cannot join one by one under the policy.
    """

    def __init__(self, llm: LLM, sizes: Workload, on_tokens: Callable[[int], None]):
        self.llm, self.sizes, self.on_tokens = llm, sizes, on_tokens
        if reason := state_of_all(llm.settled_policy):
            raise InputError(
                f"policy {llm.settled_policy.name} cannot be served: with {reason}, requests of a mini-batch begin "
                "together; give another --policy, such as kv_only, or answer a file with `flexhybrid run`"
            )
        check_longest(llm.problem, llm.settled_policy, sizes)
        self.places = batch_size(llm.problem, llm.settled_policy, sizes, MOST_AT_A_TIME)
        self.error: BaseException | None = None  #: error that ended the thread
        self.num_waiting = [0, 0]  #: waiting answers: of HTTP requests, of lines of a file
        self._changed = threading.Condition()  # guards the fields that both threads change
        self._submitted: tuple[deque[LiveAnswer], ...] = deque(), deque()
        self._closed = False
        # What follows belongs to the engine's thread.
        self._queue: RequestQueue | None = None
        self._taken: dict[int, LiveAnswer] = {}  # number in the batch -> answer that waits in it
        self._running: dict[int, LiveAnswer] = {}
        self._num_taken, self._trimmed_s = 0, 0.0
        self._news: list[tuple[LiveAnswer, News]] = []

    def start(self, on_end: Callable[[], None]) -> None:
        """Start the thread; news arrive in the running event loop. ``on_end``: called there if an error ends it."""
        self._loop, self._on_end = asyncio.get_running_loop(), on_end
        self._thread = threading.Thread(target=self._run, name="flexhybrid-engine", daemon=True)
        self._thread.start()

    # ---- the loop's thread

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, answers: list[LiveAnswer]) -> None:
        """Queue answers. Raise RuntimeError if the engine has failed."""
        if self.error:
            raise RuntimeError("the engine has failed") from self.error
        with self._changed:
            for answer in answers:
                self._submitted[answer.behind].append(answer)
                self.num_waiting[answer.behind] += 1
            self._changed.notify()

    def cancel(self, answers: list[LiveAnswer]) -> None:
        """Drop answers that wait, and end those that run with their next token. Complete ones are unchanged."""
        with self._changed:
            for answer in answers:
                answer.cancelled = True
                answer.generated.watch = _Cancelled()
                if answer in self._submitted[answer.behind]:
                    self._submitted[answer.behind].remove(answer)
                    self.num_waiting[answer.behind] -= 1

    def close(self) -> None:
        """End the thread after the current iteration; answers that are not complete are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _deliver(self, news: list[tuple[LiveAnswer, News]], count: int) -> None:
        self.on_tokens(count)
        for answer, of_answer in news:
            if not answer.cancelled:
                answer.on_news(of_answer)

    # ---- the engine's thread

    def _run(self) -> None:
        control = RunControl(on_tokens=self._send, should_stop=lambda: self._closed)
        try:
            while self._wait():
                answer_arrivals(
                    self.llm, self.sizes, self.places, self._begin, self._open, self._complete, callbacks=control
                )
                self._send(0)
                if self._taken and not self._closed:
                    raise RuntimeError("no request fits an empty batch")
        except BaseException as error:
            self.error = error
            self._loop.call_soon_threadsafe(self._on_end)

    def _wait(self) -> bool:
        """Wait for an answer; return False when the batch is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or any(self._submitted))
            return not self._closed

    def _begin(self, queue: RequestQueue) -> None:
        self._queue, self._num_taken, queue.on_iteration = queue, 0, self._take

    def _take(self) -> bool:
        """Take submitted answers into the batch's queue; return whether there were any. Called before each iteration,
        as soon as the tokens of the last one are known; ``on_tokens`` would come an iteration later."""
        assert self._queue
        self._send(0)
        before, workload = self._num_taken, self._queue.workload
        with self._changed:
            gone = {number for number, answer in self._taken.items() if answer.cancelled}
            for number in gone:
                self.num_waiting[self._taken.pop(number).behind] -= 1
            for submitted, most in zip(self._submitted, TAKEN_AHEAD):
                while submitted and len(self._taken) < most and self._num_taken < CAPACITY:
                    answer = self._taken[self._num_taken] = submitted.popleft()
                    workload.prompt_tokens[self._num_taken] = len(answer.generated.prompt_ids)
                    workload.max_tokens[self._num_taken] = answer.max_tokens
                    self._num_taken += 1
        self._queue.arrived = self._num_taken
        if gone:
            self._queue.first(CAPACITY)  # considers all, as ``remove`` needs
            self._queue.remove(gone)
        return self._num_taken > before

    def _open(self, number: int) -> tuple[Generated, SamplingPlan]:
        """Return the state and the sampling of an answer that joins."""
        with self._changed:
            answer = self._running[number] = self._taken.pop(number)
            self.num_waiting[answer.behind] -= 1
        answer.begun_s = time.monotonic()
        return answer.generated, answer.plan

    def _complete(self, number: int, _generated: Generated) -> None:
        answer = self._running.pop(number)
        answer.first_s = answer.first_s or time.monotonic()
        self._news.append((answer, answer.take_news(complete=True)))

    def _send(self, count: int) -> None:
        """Send the news since the last call to the loop's thread. ``count``: new tokens of an iteration."""
        now = time.monotonic()
        for answer in self._running.values():
            if len(answer.generated.token_ids) > answer.num_sent and (answer.streams or not answer.first_s):
                answer.first_s = answer.first_s or now
                if answer.streams:
                    self._news.append((answer, answer.take_news(complete=False)))
        news, self._news = self._news, []
        if news or count:
            self._loop.call_soon_threadsafe(self._deliver, news, count)
        if now > self._trimmed_s + TRIM_S:
            trim_memory()
            self._trimmed_s = now


def sizes_of(max_context: int, prompt_tokens: int, answer_tokens: int, noted: tuple[int, int] = (0, 0)) -> Workload:
    """Return the lengths for a LiveBatch: CAPACITY requests of the expected lengths, within the context of
    ``max_context`` tokens, and the longest prompt and the longest answer that the context allows."""
    prompt = min(prompt_tokens, max(1, max_context - answer_tokens), max_context - 1)
    prompts = np.full(CAPACITY, prompt)
    answers = np.full(CAPACITY, min(answer_tokens, max_context - prompt))
    prompts[-2:], answers[-2:] = (max_context - 1, 1), (1, max_context - 1)
    return Workload(prompts, answers, noted=noted)
