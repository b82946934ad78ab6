"""The run job: a file of requests in, a file of answers out, nothing lost.

The output file alone says what is done (``flexhybrid.batch.answers``): the same command given again, however the run
before has ended, reads it and answers the remaining requests.
"""

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import transformers

import flexhybrid
from flexhybrid.batch.answers import ANSWERED, BLANK, FAILED, PENDING, AnswerFile
from flexhybrid.batch.census import RequestFile, file_state, take_census
from flexhybrid.batch.formats import format_of, open_lines
from flexhybrid.batch.manifest import NOTHING_SERVED, check_same, load_manifest, model_record, save_manifest
from flexhybrid.batch.openai import BLANK_LINE, Refused, Request, check_template
from flexhybrid.batch.replies import answer_line, error_line
from flexhybrid.batch.requests import LineRules
from flexhybrid.batch.table import write_table
from flexhybrid.core.errors import DiskError, InputError, stray_error
from flexhybrid.core.hardware import Hardware, load_hardware
from flexhybrid.core.policy import Policy
from flexhybrid.core.trace import LaneTimes, TraceEvent, save_chrome_trace
from flexhybrid.core.units import counted
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.machine import trim_memory
from flexhybrid.jobs.profile.job import company_note, model_profile_path
from flexhybrid.jobs.progress import Progress, stop_on_signal
from flexhybrid.jobs.ray_cluster import Crew, cluster, crew_of
from flexhybrid.jobs.run.answering import Answered, answer_pending, load_weights
from flexhybrid.jobs.run.forecast import WINDOW, Forecast, describe, forecast, plan_lines, sorted_by_length
from flexhybrid.jobs.run.opening import (
    check_array,
    check_chats,
    earlier_numbers,
    model_arguments,
    needs_no_search,
    open_answers,
    paced_device,
    remove_partial_files,
)
from flexhybrid.jobs.run.options import RunOptions, check_options
from flexhybrid.jobs.run.outcome import Effort, Outcome, again
from flexhybrid.jobs.run.outlook import Outlook, batches
from flexhybrid.jobs.run.replanning import Replanner
from flexhybrid.jobs.run.report import clocks, refusal_codes, write_report
from flexhybrid.llm import LLM
from flexhybrid.requests import RequestOutput
from flexhybrid.resolve import settle_policy
from flexhybrid.runtime.engine import WaveResult
from flexhybrid.runtime.kernels.compiled import compile_timer
from flexhybrid.runtime.profiling.cpu_use import MOST_OTHERS, CpuUse
from flexhybrid.structured_outputs import grammar_version
from sim.answer_lengths import ObservedAnswers, with_mean
from sim.correction import TRIALS

CENSUS_S = 5.0  #: seconds of counting before the first requests are answered
TRIM_S = 1.0  #: seconds between two calls of ``trim_memory``
ERRORS_AT_ONCE = 256  #: lines of refused requests that are written together
REFILLS = 4  #: multiple of the running requests that represents a queue with refilled places
VERSIONED = {"flexhybrid": flexhybrid, "torch": torch, "transformers": transformers}  #: named in the manifest


def run(options: RunOptions, say: Callable[[str], None] = print, began: float | None = None) -> dict:
    """Answer every request that has no answer yet; return the record of the run, with its exit_status.

    ``say`` takes the lines of the plan and the summary; ``began`` is ``time.time()`` at the command's start (now).
    Raise InputError for what makes the run impossible, and KeyboardInterrupt with advice; answers written before are on
    the disk.
    """
    began = time.time() if began is None else began
    check_options(options)
    file_format = format_of(options.input, options.format)

    def advice() -> str:
        if any(path.exists() and path.stat().st_size for path in (options.output, options.errors) if path):
            return f"answers written so far are kept; give {again(options)} to go on"
        return "nothing was written; give the same command again"

    with _hint(advice), contextlib.ExitStack() as stack:
        state = file_state(options.input)
        opened = open_lines(options.input, file_format, options.columns, options.encoding)
        lines = stack.enter_context(contextlib.closing(opened))
        if file_format == "jsonl":
            check_array(options.input, lines)
        files = {path: open_answers(stack, path, options.output) for path in (options.output, options.errors) if path}
        remove_partial_files(options)
        crew = None
        if options.engine == "ray":
            crew = crew_of(stack.enter_context(cluster(say)), paced_device(options.llm).device.type, options.actors)
        numbers = {} if options.restart else earlier_numbers(options.output)
        arguments, measure = model_arguments(options, numbers, crew)
        llm = stack.enter_context(LLM.from_arguments(arguments))
        rules = LineRules(
            file_format, options.sampling, options.seed, options.chat_rules(), options.id_column is not None
        )
        if rules.chat.template:
            check_template(rules.chat.template, f"--chat-template {options.chat_template}")
        check_chats(rules, lines, llm)
        read, counts, seconds = rules.reader(llm.codec), rules.reader(llm.codec), math.inf if crew else CENSUS_S
        with Progress(state[0], "reading", "B", options.quiet) as progress:
            census = take_census(lines, counts, llm.shape.max_context, progress.advance, seconds)
        stack.enter_context(census.count_meanwhile(counts))
        job = Job(options, llm, RequestFile(options.input, state, lines, census, rules, read), files, crew, measure)
        return job.run(say, began)


@contextlib.contextmanager
def _hint(advice: Callable[[], str]) -> Iterator[None]:
    """Add advice to a KeyboardInterrupt without any, and to the error of a disk."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(*stop.args or (advice(),)) from None
    except (OSError, DiskError) as error:
        text = stray_error(error) if isinstance(error, OSError) else error
        raise DiskError(f"{text}; {advice()}") from None


class Job:
    """One run over an open input and open, locked output files (a ``PendingRequests``)."""

    def __init__(
        self,
        options: RunOptions,
        llm: LLM,
        source: RequestFile,
        files: dict[Path, AnswerFile],
        crew: Crew | None = None,
        measure: Callable[[], Hardware] | None = None,
    ):
        self.options, self.llm, self.source, self.files, self.crew = options, llm, source, files, crew
        self.measure = measure  #: the machine; empty if all requests fit the device
        self.census = source.census
        self.answers = files[options.output]
        self.errors = files[options.errors or options.output]
        self.states = np.full(self.census.num_lines, PENDING, dtype=np.uint8)
        self._order = np.empty(0, dtype=np.int32)
        self.refused_codes: Counter = Counter()  #: lines that this run has refused
        self._taken = 0  #: lines of the census that are ordered, or refused
        self._earlier = 0  #: lines that earlier runs have done
        self.tokens = 0  #: tokens that this run has generated, of written answers
        self._trimmed_at = 0.0
        self.lengths: ObservedAnswers | None = None
        self.manifest: dict = {}
        self.trace: list[TraceEvent] = []  #: of the first wave, if a trace or a report is requested
        self.lanes: dict[str, LaneTimes] = {}  #: of the first wave likewise
        self.progress = Progress(0, "tokens", "tok", quiet=True)  #: of the answers, once they are planned
        self.plan: Forecast | None = None
        self.outlook: Outlook | None = None  #: of the batch that runs
        self.replanner: Replanner | None = None  #: if the policy was searched
        self.replanned: list[str] = []  #: changes during the run, with reasons

    def run(self, print_line: Callable[[str], None], began: float) -> dict:
        """Do the job; return its record. ``print_line`` takes the plan and the summary."""
        printed: list[str] = []

        def say(text: str) -> None:
            printed.append(text)
            print_line(text)

        options = self.options
        if not self.census.num_lines:
            raise InputError(f"{options.input} " + ("has a header and no rows" if options.column else "is empty"))
        self._resume(say)
        self._earlier = int((self.states != PENDING).sum())
        if not len(self.pending()) and not self.census.valid.any():
            told = self.source.refusals(range(1, self.census.num_lines + 1))
            number, refused = next((one for one in told if one[1].code != BLANK_LINE), (0, None))
            if refused is None:
                raise InputError(f"{options.input} has only blank lines")
            hint = " (texts, one a line, need --format text)" if refused.code == "invalid_json" else ""
            save_manifest(options.output, self.manifest | {NOTHING_SERVED: True})
            raise InputError(
                f"{options.input} has no request that can be served; line {number}: {refused.message}{hint}. All the "
                f"reasons are in {self.errors.path}"
            )
        work = self._answer(say) if len(self.pending()) else None
        outcome = self._outcome(work)
        stopped = outcome.stopped
        for file in self.files.values():
            file.finish()
            if (options.ordered or options.parquet) and not stopped:
                file.sort(self.census.num_lines)
        if options.parquet and not stopped:
            write_table(self.answers.path, options.parquet)
        outcome.say(say, time.time() - began)
        machine, policy = self.llm.hardware, self.llm.policy
        traces = clocks(self.trace, machine.at_work(policy) if machine and policy else None)
        if options.trace and traces:
            save_chrome_trace(options.trace, traces, self.lanes)
        if options.report and (work or not options.report.exists()):
            write_report(options.report, printed, self.manifest, refusal_codes(self.errors.path), traces, self.lanes)
        return outcome.record()

    def _outcome(self, work: Effort | None) -> Outcome:
        states = {"answered": ANSWERED, "refused": FAILED, "left": PENDING, "blank": BLANK}
        counts = {"lines": self.census.num_lines} | {name: self._count(state) for name, state in states.items()}
        return Outcome(
            options=self.options,
            llm=self.llm,
            counts=counts | {"done_before": self._earlier},
            work=work,
            tokens=self.tokens,
            refused_codes=self.refused_codes,
            replanned=self.replanned,
            trial=self.replanner and self.replanner.trial,
            traced=bool(self.trace),
        )

    def _count(self, state: int) -> int:
        return int((self.states == state).sum())

    def _keep_trace(self, result: WaveResult) -> None:
        self.trace, self.lanes = result.trace, result.lanes

    def _answer(self, say: Callable[[str], None]) -> Effort:
        """Plan and answer the pending requests, until a stop is requested."""
        options, plan = self.options, self._plan(say)
        self.plan = plan
        if plan.run and self.crew is None and options.llm.policy == "auto" and options.replan:
            self.replanner = Replanner(self.llm, plan.run, options.max_batch, options.trials)
        if self.crew is None:
            load_weights(self.llm, plan.layer_bytes)
        started, failed, compiling = CpuUse.now(), self._count(FAILED), list[float]()
        with (
            compile_timer(compiling),
            stop_on_signal() as stop,
            Progress(
                plan.tokens, "tokens", "tok", options.quiet, plan.seconds, failed=failed, answers=self._count(PENDING)
            ) as self.progress,
        ):
            self.progress.predicted_rate = plan.expected_tokens / plan.seconds if plan.seconds else None
            if self.crew is None:
                answer_pending(self, stop, self._keep_trace if options.trace or options.report else None)
            else:
                from flexhybrid.jobs.run.remote import actor_config, answer_on_cluster

                config = actor_config(self.llm, self.source, plan, self.manifest["created"])
                answer_on_cluster(self, self.source, self.crew, config, stop)
        if self.replanner:
            self.replanner.end()
        generated, ended = self.progress.count, CpuUse.now()
        others = None if self.crew else ended.others_since(started)
        if self.replanner and self.replanner.trial and (others or 0.0) <= MOST_OTHERS:
            self._keep_corrected(self.replanner.hardware)
        seconds, unfinished = ended.at_s - started.at_s - sum(compiling), generated - self.tokens
        return Effort(plan.seconds, seconds, others, unfinished, plan.seconds_of(generated), sum(compiling))

    def _keep_corrected(self, hardware: Hardware | None) -> None:
        """Keep the lines that the trial corrected in the machine's record that they came from, if any."""
        asked = self.options.llm
        kept = model_profile_path(self.llm.checkpoint.shape, asked.dtype, self.llm.paced)
        if asked.hardware is None and kept.is_file() and hardware and (note := hardware.notes.get(TRIALS)):
            known = load_hardware(kept).contended  # as the corrected lines are
            lines = known.lines | {name: hardware.lines[name] for name in note["lines"]}
            replace(known, lines=lines, notes=known.notes | {TRIALS: note}).save(kept)

    def _resume(self, say: Callable[[str], None]) -> None:
        """Continue an earlier run of this job, or start over if that loses nothing. Raise InputError for another job's
        output."""
        options = self.options
        earlier, given_input = load_manifest(options.output), self._input()
        used = [file.path for file in self.files.values() if not file.is_empty]
        begins_anew = options.restart or not used or bool((earlier or {}).get(NOTHING_SERVED))
        states, num_tokens = self.states.copy(), np.zeros(self.census.num_lines, np.int32)
        if not begins_anew and earlier and earlier.get("input") == given_input:
            for file in self.files.values():
                file.check(states, num_tokens)
            self._learn(states, num_tokens)
        now = self._identity()
        if not begins_anew:
            if earlier is None:
                raise InputError(
                    f"{used[0]} holds something, but no manifest is next to {options.output}: it was not written by a "
                    "run, or the manifest was removed; choose another output, or overwrite it with --restart"
                )
            if self.llm.policy is None:  # the search chooses these two, after the machine is measured
                now["numbers"] |= {name: earlier_numbers(options.output).get(name) for name in ("bits", "selection")}
            check_same(options.output, earlier | {"input": given_input}, now)
            if earlier.get("input") != given_input:
                self._follow_input(earlier, now, say)
                for file in self.files.values():
                    file.check(states)
            self.manifest = earlier
        self._settle_policy()
        now["numbers"] = self._numbers()
        if begins_anew:
            if (left := (earlier or {}).get("errors")) and left != now["errors"]:
                # Its folder is unknown: a file of that name may be another job's.
                say(f"restarted  the run before kept its refused lines in {left}, which is left as it is")
            for file in self.files.values():
                file.clear()
            save_manifest(options.output, now)
            self.manifest = now
            return
        check_same(options.output, self.manifest, now)
        for file in self.files.values():
            file.repair()
        self.states = states

    def _follow_input(self, earlier: dict, now: dict, say: Callable[[str], None]) -> None:
        """Keep the answers to lines that the changed input still has, at their new places. Raise InputError if it has
        none of them: it is another input. The manifest names no input meanwhile, so that a run after a kill repeats
        this."""
        offsets, places = self.answers.places_in(self.source.digests())
        num_kept, num_gone = int((places >= 0).sum()), int((places < 0).sum())
        if num_gone and not num_kept:
            check_same(self.options.output, earlier, now)
        save_manifest(self.options.output, earlier | {"input": None})
        beside = self.answers.move_to(offsets, places, self.source.custom_id)
        if self.errors is not self.answers:
            self.errors.clear()
        earlier["input"] = now["input"]
        save_manifest(self.options.output, earlier)
        gone = f"; {counted(num_gone, 'answer')} to lines that are not in it any more: {beside}" if num_gone else ""
        say(f"changed    the input was changed: {counted(num_kept, 'answer')} kept{gone}; other lines are answered now")

    def _settle_policy(self) -> None:
        """Choose the policy for the lines counted so far, if any can be served."""
        if not self.census.valid.any():
            return
        asked = self.options.max_batch
        max_batch = min(WINDOW, asked or WINDOW)
        places = self._sorted(self.census.valid)
        lengths = self._expected(places)
        begins = _begins(lengths, max_batch)
        always = self.options.reprofile or self.crew or not self.census.complete
        if self.measure and (always or not needs_no_search(self.llm, begins)):
            self.llm.know(self.measure())
        try:
            policy = self.llm.settle(begins)
        except InputError:
            policy = self._settle_for_most(places, max_batch)
        if asked:
            self.llm.use(replace(policy, max_batch=min(max_batch, policy.max_batch or max_batch)))

    def _settle_for_most(self, places: np.ndarray, max_batch: int) -> Policy:
        """Choose the policy for the largest number of shortest lines that fit the budgets under one. Raise InputError
        if not even the shortest fits."""
        llm, census = self.llm, self.census
        by_size = places[np.argsort(census.prompt_tokens[places] + census.max_tokens[places], kind="stable")]

        def policy_of(count: int) -> Policy:
            workload = _begins(self._expected(by_size[:count]), max_batch)
            return settle_policy(str(llm.requested_policy), llm.problem, workload, llm.paced.link_gb_per_s is not None)

        policy, fitting, beyond = policy_of(1), 1, len(by_size)
        while beyond - fitting > 1:
            count = (fitting + beyond) // 2
            try:
                policy, fitting = policy_of(count), count
            except InputError:
                beyond = count
        llm.use(policy)
        return policy

    def _identity(self) -> dict:
        """Return what the results depend on; a run that continues this one must agree in it."""
        options, llm, chat = self.options, self.llm, asdict(self.source.rules.chat)
        return {
            "created": int(time.time()),
            "input": self._input(),
            "model": model_record(llm.checkpoint.path, options.verify),
            "sampling": {**options.sampling, "seed": options.seed},
            "columns": {"prompt": options.column, "custom_id": options.id_column},
            **({"chat": chat} if any(chat.values()) else {}),
            "errors": options.errors.name if options.errors else None,
            "numbers": self._numbers(),
            "versions": {name: module.__version__ for name, module in VERSIONED.items()} | grammar_version(),
        }

    def _numbers(self) -> dict:
        llm = self.llm
        bits = llm.policy.bits if llm.policy else None
        return {
            "dtype": llm.problem.dtype,
            "attention": llm.problem.attention and llm.problem.attention._asdict(),
            "device": llm.device.type,
            "bits": [bits.weights, bits.kv, bits.act] if bits else None,
            "selection": str(llm.policy.selection) if llm.policy else None,
        }

    def _input(self) -> dict:
        return {"sha256": self.census.sha256, "lines": self.census.num_lines}

    def _learn(self, states: np.ndarray, num_tokens: np.ndarray) -> None:
        """Use the answer lengths of the run before if they outnumber its unfinished answers, which are the long
        ones."""
        limits, counts = self.census.max_tokens, self.census.num_answers(slice(None))
        answered = np.flatnonzero((states == ANSWERED) & self.census.valid)
        if len(answered) < WINDOW:
            return
        self.lengths = ObservedAnswers(int(limits.max()), self.options.answer_tokens)
        each = np.repeat(answered, counts[answered])
        for tokens, limit in zip((num_tokens // counts)[each].tolist(), limits[each].tolist(), strict=True):
            self.lengths.end(min(tokens, limit), limit)

    def _write_refusals(self, num_counted: int) -> None:
        """Write the refused ones of the first ``num_counted`` lines, with the reason."""
        missing = np.flatnonzero(~self.census.valid[:num_counted] & (self.states[:num_counted] == PENDING)) + 1
        refusals = self.source.refusals(missing.tolist())
        while batch := list(itertools.islice(refusals, ERRORS_AT_ONCE)):
            told = [(number, refused) for number, refused in batch if refused.code != BLANK_LINE]
            self.errors.append([error_line(*refusal) for refusal in told])
            self.refused_codes.update(refused.code for _, refused in told)
            for number, refused in batch:
                self.states[number - 1] = BLANK if refused.code == BLANK_LINE else FAILED

    def _expected(self, places: np.ndarray) -> Workload:
        """Return the lengths of the lines at ``places``, with the user's expected answers, or those that the run before
        showed."""
        lengths, mean = self.workload(places), self.options.answer_tokens
        if self.lengths:
            return replace(lengths, answer_tokens=self.lengths.expected(lengths.max_tokens))
        return lengths if mean is None else with_mean(lengths, mean)

    def _sorted(self, chosen: np.ndarray) -> np.ndarray:
        """Return the line numbers less one of the lines ``chosen`` [lines from the first on], in running order;
        int32."""
        places = np.flatnonzero(chosen).astype(np.int32)
        return places[sorted_by_length(self.census.prompt_tokens[places], self.census.max_tokens[places])]

    def _plan(self, say: Callable[[str], None]) -> Forecast:
        """Return the forecast of the pending requests, after printing it. Raise InputError if the largest requests
        exceed the budgets."""
        pending = self.pending()
        plan = forecast(self.llm, self._expected(pending))
        if self.crew and plan.seconds is not None:
            plan = replace(plan, seconds=plan.seconds / self.crew.size)
        refused, left = self._count(FAILED), self._count(PENDING)
        counts = f"{left:,}" + (f" ({refused:,} refused)" if refused else "")
        if not self.census.complete:
            scale = left / len(pending)
            tokens, expected = int(plan.tokens * scale), int(plan.expected_tokens * scale)
            plan = replace(plan, tokens=tokens, expected_tokens=expected, seconds=plan.seconds and plan.seconds * scale)
            counts += f" (predicted by the first {self.census.counted:,} lines; the others are counted meanwhile)"
        counts += f", {self._earlier:,} lines done before" if self._earlier else ""
        searched = self.options.llm.policy == "auto" and self.llm.settled_policy.name == "searched"
        for line in plan_lines(self.llm, plan, counts, searched):
            say(line)
        if beyond := self.census.num_beyond:
            room = f"the {self.llm.shape.max_context:,} tokens that this model takes leave room for"
            say(f"limits     {counted(beyond, 'request')} may end sooner than asked: max_tokens is more than {room}")
        if plan.seconds and (note := company_note(self.llm.hardware)):
            say(f"profile    {note}")
        asked = self.options
        if taken := sorted(asked.checkpoint_sampling.keys() - asked.named_sampling.keys()):
            values = ", ".join(f"{name} {asked.sampling[name]}" for name in taken)
            say(f"sampling   {values}, of the checkpoint's generation_config.json, where a request names no other")
        if self.crew:
            kept = "; actors keep this policy to the end" if asked.llm.policy == "auto" and asked.replan else ""
            say(f"ray        {self.crew}{kept}")
        return plan

    # ---- PendingRequests ---------------------------------------------------------------------------------------------

    def pending(self) -> np.ndarray:
        while True:  # until a batch is full, or all lines are counted
            self._take_counted()
            self._order = self._order[self.states[self._order] == PENDING]
            self._refuse_largest()
            if len(self._order) >= WINDOW or not self.census.wait(self._taken):
                return self._order

    def _refuse_largest(self) -> None:
        """Refuse the pending lines of which not even one request fits the budgets under the current policy. Raise
        InputError if none fits."""
        census, left, refused = self.census, self._order, list[tuple[np.ndarray, int, str]]()
        while len(left):
            prompts = census.prompt_tokens[left].astype(np.int64)
            sizes = np.stack([prompts, prompts + census.max_tokens[left], census.noted[left]])
            for largest in dict.fromkeys(int(of.argmax()) for of in sizes):
                try:
                    self.llm.first_wave(self.workload(left[[largest]]).select(slice(1)))
                except InputError as error:
                    fits = (sizes < sizes[:, [largest]]).any(0)
                    if not fits.any() and census.complete and not (self.states == ANSWERED).any():
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
                named = [(place + 1, self.source.custom_id(place + 1)) for place in some.tolist()]
                reasons = [(number, name, message if number == tried + 1 else alike) for number, name in named]
                told = [(number, Refused("insufficient_memory", text, None, name)) for number, name, text in reasons]
                self.errors.append([error_line(*one) for one in told])
            self.states[places] = FAILED
            self.refused_codes["insufficient_memory"] += len(places)

    def _take_counted(self) -> None:
        """Add the lines that were counted since the last call."""
        if self._taken == (num_counted := self.census.counted):
            return
        self._taken = num_counted
        self._write_refusals(num_counted)
        self._order = self._sorted(self.census.valid[:num_counted] & (self.states[:num_counted] == PENDING))
        if self.census.complete:  # the plan took the counted lines for all
            most = int(np.dot(self.census.max_tokens[self._order], self.num_answers(self._order).astype(np.int64)))
            self.progress.expect(self.progress.done + len(self._order), self.tokens + most)

    def workload(self, places: np.ndarray) -> Workload:
        lengths = self.census.workload(places)
        return lengths if self.llm.arguments.enable_prefix_caching else replace(lengths, prefixes=None)

    def num_answers(self, places: np.ndarray) -> np.ndarray:
        return self.census.num_answers(places)

    def request(self, number: int) -> Request:
        return self.source.request(number)

    def line(self, number: int, request: Request, output: RequestOutput) -> bytes:
        return answer_line(number, request, output, self.manifest["created"])

    def check_input_unchanged(self) -> None:
        self.source.check_unchanged()

    def write(self, answered: list[Answered]) -> None:
        """Append the answers to the output. A second answer to a line is dropped: a cluster may do a batch twice."""
        answered = [answer for answer in answered if self.states[answer.number - 1] == PENDING]
        self.answers.append([answer.line for answer in answered if not answer.refused])
        self.errors.append([answer.line for answer in answered if answer.refused])
        for number, _, num_tokens, refused in answered:
            self.states[number - 1] = FAILED if refused else ANSWERED
            self.refused_codes.update([refused] if refused else [])
            self.tokens += num_tokens
            most = int(self.census.max_tokens[number - 1]) * (1 + int(self.census.more_answers[number - 1]))
            self.progress.finished(most - num_tokens)
        self.answers.sync_if_due()

    def begins(self, first_share: Callable[[], float]) -> None:
        self.progress.first_share = first_share

    def advance(self, num_tokens: int) -> None:
        self.progress.advance(num_tokens)
        if time.monotonic() - self._trimmed_at > TRIM_S:
            trim_memory()
            self._trimmed_at = time.monotonic()
        if self.replanner and self.outlook:
            self.replanner.look(self.outlook)

    def note(self, text: str) -> None:
        self.progress.note(text)

    def watch(self, workload: Workload, given: np.ndarray | None) -> Outlook | None:
        outlook, run = None, self.replanner.run if self.replanner else self.plan and self.plan.run
        if run and run.pace:
            open_wave = batches(self.llm, workload, given)
            outlook = Outlook(run.pace, workload, given, self.options.answer_tokens, self.lengths, open_wave)
            self.lengths = outlook.answers
        self.outlook = outlook
        # it ignores lines that are not counted yet
        self.progress.outlook = outlook.seconds_left if outlook and self.census.complete else None
        return outlook

    def drains(self) -> bool:
        return bool(self.replanner and self.replanner.change)

    def moves(self) -> bool:
        return bool(self.replanner and self.replanner.change and self.replanner.change.moves)

    def between_batches(self) -> None:
        if not (self.replanner and self.replanner.change):
            return
        change = self.replanner.made()
        limits = [most for most in (self.options.max_batch, change.policy.max_batch) if most]
        self.llm.use(replace(change.policy, max_batch=min(limits, default=None)))
        self.replanned.append(f"{change.reason}; on with {describe(self.llm.settled_policy, self.llm.problem)}")
        self.note(self.replanned[-1])


def _begins(workload: Workload, max_batch: int) -> Workload:
    """Return requests whose lengths represent all, the longest included: about ``max_batch``, or REFILLS times that if
    answers end early."""
    count = max_batch * (1 if workload.answer_tokens is None else REFILLS)
    places = np.linspace(0, workload.num_requests - 1, count).round().astype(int)
    places = np.unique([*places, workload.prompt_tokens.argmax(), workload.cached_tokens.argmax()])
    return workload.select(places)
