"""The job of ``flexhybrid run``: answers a file of requests into a file of answers.

The output file alone records which requests are answered (``flexhybrid.batch.answers``). However a run ended, the same
command reads the file and answers the remaining requests.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from flexhybrid.batch.answers import ANSWERED, BLANK, FAILED, PENDING
from flexhybrid.batch.formats import format_of, open_lines
from flexhybrid.batch.manifest import NOTHING_SERVED, save_manifest
from flexhybrid.batch.openai import BLANK_LINE, check_template
from flexhybrid.batch.request_index import RequestFile, file_state, index_requests
from flexhybrid.batch.requests import LineReader, LineRules
from flexhybrid.batch.table import write_table
from flexhybrid.core.errors import DiskError, InputError, stray_error
from flexhybrid.core.hardware import Hardware, load_hardware
from flexhybrid.core.memory import kept_shares
from flexhybrid.core.policy import Policy
from flexhybrid.core.trace import LaneTimes, TraceEvent, save_chrome_trace
from flexhybrid.core.units import counted
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.profile.job import model_profile_path
from flexhybrid.jobs.progress import Progress, stop_on_signal
from flexhybrid.jobs.rates import company_note
from flexhybrid.jobs.ray_cluster import Replicas, cluster, replicas_of
from flexhybrid.jobs.run.answering import answer_pending, load_weights
from flexhybrid.jobs.run.forecast import WINDOW, Forecast, forecast, plan_lines
from flexhybrid.jobs.run.lines import JobLines
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
from flexhybrid.jobs.run.outcome import Effort, Outcome, resume_command
from flexhybrid.jobs.run.replanning import Replanner
from flexhybrid.jobs.run.report import Refusals, RunReport, Samples, clocks
from flexhybrid.jobs.run.resuming import resume
from flexhybrid.llm import LLM
from flexhybrid.resolve import settle_policy
from flexhybrid.runtime.engine import WaveResult
from flexhybrid.runtime.kernels.compiled import compile_timer
from flexhybrid.runtime.profiling.cpu_use import MOST_OTHERS, CpuUse
from sim.correction import TRIALS

INDEXING_S = 5.0  #: seconds of reading the input before the first requests are answered
REFILLS = 4  #: requests that represent a queue in which others replace ended ones, as a multiple of the running ones


def run(options: RunOptions, say: Callable[[str], None] = print, began: float | None = None) -> dict:
    """Answer every request that has no answer yet; return the record of the run, with its exit_status.

    ``say`` prints the lines of the plan and the summary. ``began``: ``time.time()`` at the command's start; None: now.
    Raise InputError if the run is impossible. On Ctrl-C, raise KeyboardInterrupt with advice on how to continue; the
    answers written so far stay on the disk.
    """
    began = time.time() if began is None else began
    check_options(options)
    file_format = format_of(options.input, options.format)

    def advice() -> str:
        if any(path.exists() and path.stat().st_size for path in (options.output, options.errors) if path):
            return f"answers written so far are kept; give {resume_command(options)} to continue"
        return "nothing was written; give the same command again"

    with _hint(advice), contextlib.ExitStack() as stack:
        state = file_state(options.input)
        opened = open_lines(options.input, file_format, options.columns, options.encoding)
        lines = stack.enter_context(contextlib.closing(opened))
        if file_format == "jsonl":
            check_array(options.input, lines)
        files = {path: open_answers(stack, path, options.output) for path in (options.output, options.errors) if path}
        remove_partial_files(options)
        replicas = None
        if options.engine == "ray":
            device = paced_device(options.llm).device.type
            replicas = replicas_of(stack.enter_context(cluster(say)), device, options.actors)
        numbers = {} if options.restart else earlier_numbers(options.output)
        arguments, measure = model_arguments(options, numbers, replicas)
        llm = stack.enter_context(LLM.from_arguments(arguments))
        rules = LineRules(
            file_format, options.sampling, options.seed, options.chat_rules(), options.id_column is not None
        )
        if rules.chat.template:
            check_template(rules.chat.template, f"--chat-template {options.chat_template}")
        check_chats(rules, lines, llm)
        read, counts = LineReader(rules, llm.codec), LineReader(rules, llm.codec)
        with Progress(state[0], "reading", "B", options.quiet) as progress:
            index = index_requests(
                lines, counts, llm.shape.max_context, progress.advance, math.inf if replicas else INDEXING_S
            )
        stack.enter_context(index.count_meanwhile(counts))
        source = RequestFile(options.input, state, lines, index, rules, read)
        return Job(JobLines(options, llm, source, files), replicas, measure).run(say, began)


@contextlib.contextmanager
def _hint(advice: Callable[[], str]) -> Iterator[None]:
    """Add advice to a KeyboardInterrupt without a text, and to disk errors."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(*stop.args or (advice(),)) from None
    except (OSError, DiskError) as error:
        text = stray_error(error) if isinstance(error, OSError) else error
        raise DiskError(f"{text}; {advice()}") from None


class Job:
    """One run over an open input and locked output files."""

    def __init__(
        self, lines: JobLines, replicas: Replicas | None = None, measure: Callable[[], Hardware] | None = None
    ):
        self.lines, self.options, self.llm, self.replicas = lines, lines.options, lines.llm, replicas
        self.measure = measure  #: measures the machine; None if that is not needed
        self._earlier = 0  #: number of lines that earlier runs answered or refused
        self.manifest: dict = {}
        self.trace: list[TraceEvent] = []  #: trace of the first wave, for a requested trace or report
        self.lanes: dict[str, LaneTimes] = {}  #: times of the first wave's lanes, for the same

    def run(self, print_line: Callable[[str], None], began: float) -> dict:
        """Run the job; return its record. ``print_line`` prints the lines of the plan and the summary."""
        printed: list[str] = []

        def say(text: str) -> None:
            printed.append(text)
            print_line(text)

        options, lines, index = self.options, self.lines, self.lines.index
        if not index.num_lines:
            raise InputError(f"{options.input} " + ("has a header and no rows" if options.column else "is empty"))
        self.manifest = resume(lines, self._settle_policy, say)
        lines.created = self.manifest["created"]
        self._earlier = int((lines.states != PENDING).sum())
        if not len(lines.pending()) and not index.valid.any():
            told = lines.source.refusals(range(1, index.num_lines + 1))
            number, refused = next((one for one in told if one[1].code != BLANK_LINE), (0, None))
            if refused is None:
                raise InputError(f"{options.input} has only blank lines")
            hint = " (texts, one a line, need --format text)" if refused.code == "invalid_json" else ""
            save_manifest(options.output, self.manifest | {NOTHING_SERVED: True})
            raise InputError(
                f"{options.input} has no request that can be served; line {number}: {refused.message}{hint}. All the "
                f"reasons are in {lines.errors.path}"
            )
        work = self._answer(say) if len(lines.pending()) else None
        outcome = self._outcome(work)
        stopped = outcome.stopped
        for file in lines.files.values():
            file.finish()
            if (options.ordered or options.table) and not stopped:
                file.sort(index.num_lines)
        if options.table and not stopped:
            write_table(lines.answers.path, options.table)
        outcome.say(say, time.time() - began)
        machine, policy = self.llm.hardware, self.llm.policy
        traces = clocks(self.trace, machine.at_work(policy) if machine and policy else None)
        if options.trace and traces:
            save_chrome_trace(options.trace, traces, self.lanes)
        if options.report and (work or not options.report.exists()):
            self._report(printed, traces, began).save(options.report)
        return outcome.record()

    def _report(self, printed: list[str], traces: dict[str, list[TraceEvent]], began: float) -> RunReport:
        """Return the run's report. ``printed``: lines of the plan and the summary. ``began``: as in ``run``."""
        lines, plan, policy = self.lines, self.lines.plan, self.llm.settled_policy
        shares = {"weights": kept_shares(self.llm.problem, policy)}
        shares |= {"context": dict(policy.cache)} if self.llm.shape.attending else {}
        answered = np.flatnonzero(lines.answer_tokens)
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(began))
        return RunReport(
            title=f"{self.options.llm.model} answers {self.options.input}, begun at {at}",
            printed=printed,
            manifest=self.manifest,
            refusals=Refusals.of(lines.errors.path),
            traces=traces,
            lanes=self.lanes,
            policy=policy.to_dict(),
            shares=shares,
            samples=lines.samples or Samples(),
            predicted_rate=plan.expected_tokens / plan.seconds if plan and plan.seconds else None,
            lengths=(lines.index.prompt_tokens[answered], lines.answer_tokens[answered]),
        )

    def _outcome(self, work: Effort | None) -> Outcome:
        states = {"answered": ANSWERED, "refused": FAILED, "left": PENDING, "blank": BLANK}
        lines = self.lines
        counts = {"lines": lines.index.num_lines} | {name: lines.count(state) for name, state in states.items()}
        return Outcome(lines, counts | {"done_before": self._earlier}, work, traced=bool(self.trace))

    def _keep_trace(self, result: WaveResult) -> None:
        self.trace, self.lanes = result.trace, result.lanes

    def _answer(self, say: Callable[[str], None]) -> Effort:
        """Plan and answer the pending requests, until a stop is requested."""
        options, lines, plan = self.options, self.lines, self._plan(say)
        lines.plan, lines.samples = plan, Samples() if options.report else None
        if plan.run and self.replicas is None and options.llm.policy == "auto" and options.replan:
            lines.replanner = Replanner(self.llm, plan.run, options.max_batch, options.trials)
        if self.replicas is None:
            load_weights(self.llm, plan.layer_bytes)
        started, failed, compiling = CpuUse.now(), lines.count(FAILED), list[float]()
        with (
            compile_timer(compiling),
            stop_on_signal() as stop,
            Progress(
                plan.tokens, "tokens", "tok", options.quiet, plan.seconds, failed=failed, answers=lines.count(PENDING)
            ) as lines.progress,
        ):
            lines.progress.predicted_rate = plan.expected_tokens / plan.seconds if plan.seconds else None
            if self.replicas is None:
                answer_pending(lines, stop, self._keep_trace if options.trace or options.report else None)
            else:
                from flexhybrid.jobs.run.remote import actor_config, answer_on_cluster

                config = actor_config(self.llm, lines.source, plan, self.manifest["created"])
                answer_on_cluster(lines, lines.source, self.replicas, config, stop)
        if lines.replanner:
            lines.replanner.end()
        generated, ended = lines.progress.count, CpuUse.now()
        others = None if self.replicas else ended.others_since(started)
        if lines.replanner and lines.replanner.trial and (others or 0.0) <= MOST_OTHERS:
            self._keep_corrected(lines.replanner.hardware)
        seconds, unfinished = ended.at_s - started.at_s - sum(compiling), generated - lines.tokens
        return Effort(plan.seconds, seconds, others, unfinished, plan.seconds_of(generated), sum(compiling))

    def _keep_corrected(self, hardware: Hardware | None) -> None:
        """Save the lines that the trial corrected in the kept machine record of the model, if there is one."""
        asked = self.options.llm
        kept = model_profile_path(self.llm.checkpoint.shape, asked.dtype, self.llm.paced)
        if asked.hardware is None and kept.is_file() and hardware and (note := hardware.notes.get(TRIALS)):
            known = load_hardware(kept).contended  # the corrected lines include contention too
            lines = known.lines | {name: hardware.lines[name] for name in note["lines"]}
            replace(known, lines=lines, notes=known.notes | {TRIALS: note}).save(kept)

    def _settle_policy(self) -> None:
        """Choose the policy for the lines read so far, if any can be served."""
        if not self.lines.index.valid.any():
            return
        asked = self.options.max_batch
        max_batch = min(WINDOW, asked or WINDOW)
        places = self.lines.in_order(self.lines.index.valid)
        lengths = self.lines.expected(places)
        begins = _begins(lengths, max_batch)
        always = self.options.reprofile or self.replicas or not self.lines.index.complete
        if self.measure and (always or not needs_no_search(self.llm, begins)):
            self.llm.know(self.measure())
        try:
            policy = self.llm.settle(begins)
        except InputError:
            policy = self._settle_for_most(places, max_batch)
        if asked:
            self.llm.use(replace(policy, max_batch=min(max_batch, policy.max_batch or max_batch)))

    def _settle_for_most(self, places: np.ndarray, max_batch: int) -> Policy:
        """Choose and return the policy for the largest number of shortest lines that fit the budgets.
        Raise InputError if not even the shortest line fits."""
        llm, index = self.llm, self.lines.index
        by_size = places[np.argsort(index.prompt_tokens[places] + index.max_tokens[places], kind="stable")]

        def policy_of(count: int) -> Policy:
            workload = _begins(self.lines.expected(by_size[:count]), max_batch)
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

    def _plan(self, say: Callable[[str], None]) -> Forecast:
        """Print and return the forecast for the pending requests. Raise InputError if not even one fits the budgets."""
        lines = self.lines
        pending = lines.pending()
        plan = forecast(self.llm, lines.expected(pending))
        if self.replicas and plan.seconds is not None:
            plan = replace(plan, seconds=plan.seconds / self.replicas.size)
        refused, left = lines.count(FAILED), lines.count(PENDING)
        counts = f"{left:,}" + (f" ({refused:,} refused)" if refused else "")
        if not lines.index.complete:
            scale = left / len(pending)
            tokens, expected = int(plan.tokens * scale), int(plan.expected_tokens * scale)
            plan = replace(plan, tokens=tokens, expected_tokens=expected, seconds=plan.seconds and plan.seconds * scale)
            counts += f" (predicted from the first {lines.index.counted:,} lines; the others are still being read)"
        counts += f", {self._earlier:,} lines done before" if self._earlier else ""
        searched = self.options.llm.policy == "auto" and self.llm.settled_policy.name == "searched"
        for line in plan_lines(self.llm, plan, counts, searched):
            say(line)
        if beyond := lines.index.num_beyond:
            room = f"prompt and max_tokens exceed the model's context of {self.llm.shape.max_context:,} tokens"
            say(f"limits     {counted(beyond, 'request')} may end before max_tokens: {room}")
        if plan.seconds and (note := company_note(self.llm.hardware)):
            say(f"profile    {note}")
        asked = self.options
        if taken := sorted(asked.checkpoint_sampling.keys() - asked.named_sampling.keys()):
            values = ", ".join(f"{name} {asked.sampling[name]}" for name in taken)
            say(f"sampling   {values}, of the checkpoint's generation_config.json, unless a request sets its own")
        if self.replicas:
            kept = "; actors keep this policy to the end" if asked.llm.policy == "auto" and asked.replan else ""
            say(f"ray        {self.replicas}{kept}")
        return plan


def _begins(workload: Workload, max_batch: int) -> Workload:
    """Return evenly spaced requests that represent all, with the longest: ``max_batch``, or REFILLS times that.
    The larger number is for answers of different lengths, whose places in the batch are refilled."""
    count = max_batch * (1 if workload.answer_tokens is None else REFILLS)
    places = np.linspace(0, workload.num_requests - 1, count).round().astype(int)
    places = np.unique([*places, workload.prompt_tokens.argmax(), workload.cached_tokens.argmax()])
    return workload.select(places)
