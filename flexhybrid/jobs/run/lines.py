"""The lines of a job's input and their states: pending, answered, refused or blank."""

import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from flexhybrid.batch.answers import ANSWERED, BLANK, FAILED, PENDING, AnswerFile
from flexhybrid.batch.openai import BLANK_LINE, Refused, Request
from flexhybrid.batch.replies import answer_line, error_line
from flexhybrid.batch.request_index import RequestFile
from flexhybrid.core.admission import first_wave
from flexhybrid.core.errors import InputError
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.machine import trim_memory
from flexhybrid.jobs.progress import Progress
from flexhybrid.jobs.run.answering import Answered, PendingRequests
from flexhybrid.jobs.run.forecast import WINDOW, Forecast, describe, sorted_by_length
from flexhybrid.jobs.run.options import RunOptions
from flexhybrid.jobs.run.outlook import Outlook, batches
from flexhybrid.jobs.run.replanning import TRIED, Replanner
from flexhybrid.jobs.run.report import Samples
from flexhybrid.llm import LLM
from flexhybrid.requests import RequestOutput
from sim.answer_lengths import ObservedAnswers, with_mean

TRIM_S = 1.0  #: seconds between two calls of ``trim_memory``
ERRORS_AT_ONCE = 256  #: number of refused lines that are written together


class JobLines(PendingRequests):
    """The lines of an open input with their states, and the open output files."""

    def __init__(self, options: RunOptions, llm: LLM, source: RequestFile, files: dict[Path, AnswerFile]):
        self.options, self.llm, self.source, self.files = options, llm, source, files
        self.index = source.index
        self.answers = files[options.output]
        self.errors = files[options.errors or options.output]
        self.states = np.full(self.index.num_lines, PENDING, dtype=np.uint8)
        self._order = np.empty(0, dtype=np.int32)
        self.refused_codes: Counter = Counter()  #: error code -> number of lines that this run refused
        self._taken = 0  #: number of lines of the request index that are in ``_order``, or refused
        self.tokens = 0  #: tokens of the answers that this run has written
        self._trimmed_at = 0.0
        self.lengths: ObservedAnswers | None = None
        self.created = 0  #: Unix time of the job's start
        self.progress = Progress(0, "tokens", "tok", quiet=True)  #: replaced once the answers are planned
        self.plan: Forecast | None = None
        self.outlook: Outlook | None = None  #: estimates for the running batch
        self.replanner: Replanner | None = None  #: None if the policy was not searched
        self.replanned: list[str] = []  #: descriptions of policy changes during the run
        self.samples: Samples | None = None  #: None without a report
        #: [lines] tokens of the answers that this run has written, for a report; empty without one
        self.answer_tokens = np.zeros(self.index.num_lines if options.report else 0, dtype=np.int32)

    @property
    def trial(self) -> str | None:
        """Description of the corrections after the first iterations; None without a trial."""
        return self.replanner and self.replanner.trial

    def count(self, state: int) -> int:
        """Return the number of lines in a state."""
        return int((self.states == state).sum())

    def learn(self, states: np.ndarray, num_tokens: np.ndarray) -> None:
        """Use the answer lengths of the run before, if there are at least WINDOW of them.
        With fewer, its unfinished answers, which are the long ones, would bias the expected length."""
        limits, counts = self.index.max_tokens, self.index.num_answers(slice(None))
        answered = np.flatnonzero((states == ANSWERED) & self.index.valid)
        if len(answered) < WINDOW:
            return
        self.lengths = ObservedAnswers(int(limits.max()), self.options.answer_tokens)
        each = np.repeat(answered, counts[answered])
        for tokens, limit in zip((num_tokens // counts)[each].tolist(), limits[each].tolist(), strict=True):
            self.lengths.end(min(tokens, limit), limit)

    def _write_refusals(self, num_counted: int) -> None:
        """Write the reasons for the refused lines among the first ``num_counted``."""
        missing = np.flatnonzero(~self.index.valid[:num_counted] & (self.states[:num_counted] == PENDING)) + 1
        refusals = self.source.refusals(missing.tolist())
        while batch := list(itertools.islice(refusals, ERRORS_AT_ONCE)):
            self._refuse(batch)

    def _refuse(self, refusals: list[tuple[int, Refused]]) -> None:
        """Mark lines as refused and write the reasons, except for blank lines."""
        reported = [(number, refused) for number, refused in refusals if refused.code != BLANK_LINE]
        self.errors.append([error_line(*refusal) for refusal in reported])
        self.refused_codes.update(refused.code for _, refused in reported)
        for number, refused in refusals:
            self.states[number - 1] = BLANK if refused.code == BLANK_LINE else FAILED

    def expected(self, places: np.ndarray) -> Workload:
        """Return the lengths of the lines at ``places``, with expected answers by the run before, or by the user."""
        lengths, mean = self.workload(places), self.options.answer_tokens
        if self.lengths:
            return replace(lengths, answer_tokens=self.lengths.expected(lengths.max_tokens))
        return lengths if mean is None else with_mean(lengths, mean)

    def in_order(self, chosen: np.ndarray) -> np.ndarray:
        """Return the places (int32) of the lines where ``chosen`` [lines] is True, in running order."""
        places = np.flatnonzero(chosen).astype(np.int32)
        return places[sorted_by_length(self.index.prompt_tokens[places], self.index.max_tokens[places])]

    def pending(self) -> np.ndarray:
        while True:  # until there are enough lines for a batch, or all lines are read
            self._take_counted()
            self._order = self._order[self.states[self._order] == PENDING]
            self._refuse_largest()
            if len(self._order) >= WINDOW or not self.index.wait(self._taken):
                return self._order

    def _refuse_largest(self) -> None:
        """Refuse the pending lines that do not fit the budgets alone under the current policy.
        Raise InputError if no line fits."""
        index, left, refused = self.index, self._order, list[tuple[np.ndarray, int, str]]()
        while len(left):
            problem, policy = self.llm.problem, self.llm.settled_policy
            prompts = index.prompt_tokens[left].astype(np.int64)
            sizes = np.stack([prompts, prompts + index.max_tokens[left], index.noted[left]])
            for largest in dict.fromkeys(int(of.argmax()) for of in sizes):
                try:
                    first_wave(problem, policy, self.workload(left[[largest]]).select(slice(1)))
                except InputError as error:
                    fits = (sizes < sizes[:, [largest]]).any(0)
                    if not fits.any() and index.complete and not (self.states == ANSWERED).any():
                        raise InputError(f"line {left[largest] + 1}: {error}") from None
                    refused.append((left[~fits], int(left[largest]), str(error)))
                    left = left[fits]
                    break
            else:
                break
        self._order = left
        for places, tried, message in refused:
            alike = f"it is at least as large as line {tried + 1}, which does not fit: {message}"
            for some in np.array_split(places, -(-len(places) // ERRORS_AT_ONCE)):
                texts = {number: message if number == tried + 1 else alike for number in (some + 1).tolist()}
                named = [(number, text, self.source.custom_id(number)) for number, text in texts.items()]
                self._refuse([(n, Refused("insufficient_memory", text, None, name)) for n, text, name in named])

    def _take_counted(self) -> None:
        """Add the lines that were read since the last call to the pending ones."""
        if self._taken == (num_counted := self.index.counted):
            return
        self._taken = num_counted
        self._write_refusals(num_counted)
        self._order = self.in_order(self.index.valid[:num_counted] & (self.states[:num_counted] == PENDING))
        if self.index.complete:  # the plan was an estimate from the lines read so far
            most = int(np.dot(self.index.max_tokens[self._order], self.num_answers(self._order).astype(np.int64)))
            self.progress.expect(self.progress.done + len(self._order), self.tokens + most)

    def workload(self, places: np.ndarray) -> Workload:
        lengths = self.index.workload(places)
        return lengths if self.llm.arguments.enable_prefix_caching else replace(lengths, prefixes=None)

    def num_answers(self, places: np.ndarray) -> np.ndarray:
        return self.index.num_answers(places)

    def request(self, number: int) -> Request:
        return self.source.request(number)

    def line(self, number: int, request: Request, output: RequestOutput) -> bytes:
        return answer_line(number, request, output, self.created)

    def check_input_unchanged(self) -> None:
        self.source.check_unchanged()

    def write(self, answered: list[Answered]) -> None:
        """Append answers to the output, without second answers to a line: a cluster may answer a batch twice."""
        answered = [answer for answer in answered if self.states[answer.number - 1] == PENDING]
        self.answers.append([answer.line for answer in answered if not answer.refused])
        self.errors.append([answer.line for answer in answered if answer.refused])
        for number, _, num_tokens, refused in answered:
            self.states[number - 1] = FAILED if refused else ANSWERED
            self.refused_codes.update([refused] if refused else [])
            self.tokens += num_tokens
            if len(self.answer_tokens):
                self.answer_tokens[number - 1] = num_tokens
            most = int(self.index.max_tokens[number - 1]) * (1 + int(self.index.more_answers[number - 1]))
            self.progress.finished(most - num_tokens)
        self.answers.sync_if_due()

    def begins(self, first_share: Callable[[], float]) -> None:
        self.progress.first_share = first_share

    def advance(self, num_tokens: int) -> None:
        self.progress.advance(num_tokens)
        if self.samples:
            self.samples.add(self.progress.count)
        if time.monotonic() - self._trimmed_at > TRIM_S:
            trim_memory()
            self._trimmed_at = time.monotonic()
        if self.replanner and self.outlook:
            self.replanner.look(self.outlook)

    def note(self, text: str) -> None:
        self.progress.note(text)

    def watch(self, workload: Workload) -> Outlook | None:
        outlook, run = None, self.replanner.run if self.replanner else self.plan and self.plan.run
        if run and run.pace:
            open_wave = batches(self.llm, workload)
            outlook = Outlook(run.pace, workload, self.options.answer_tokens, self.lengths, open_wave)
            outlook.timed_iterations = TRIED if self.replanner and self.replanner.trial_s else 0
            self.lengths = outlook.answers
        self.outlook = outlook
        # An outlook ignores lines that are not read yet.
        self.progress.outlook = outlook.seconds_left if outlook and self.index.complete else None
        return outlook

    def drains(self) -> bool:
        return bool(self.replanner and self.replanner.change)

    def restarts(self) -> bool:
        return bool(self.replanner and self.replanner.change and self.replanner.change.restarts)

    def between_batches(self) -> None:
        if not (self.replanner and self.replanner.change):
            return
        change = self.replanner.made()
        limits = [most for most in (self.options.max_batch, change.policy.max_batch) if most]
        self.llm.use(replace(change.policy, max_batch=min(limits, default=None)))
        self.replanned.append(f"{change.reason}; new policy {describe(self.llm.settled_policy, self.llm.problem)}")
        self.note(self.replanned[-1])
