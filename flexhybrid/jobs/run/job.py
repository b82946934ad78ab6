"""The run job: a file of requests in, a file of answers out, nothing lost.

The output file alone says what is done (``flexhybrid.batch.answers``): the same command given again, after any end of
the one before, reads it and goes on with the rest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import transformers

from flexhybrid import __version__
from flexhybrid.batch.answers import ANSWERED, FAILED, PENDING, AnswerFile
from flexhybrid.batch.manifest import check_same, load_manifest, manifest_path, model_record, save_manifest
from flexhybrid.batch.openai import ReadLine, Request, answer_line, error_line
from flexhybrid.batch.requests import (
    Census,
    file_state,
    file_url,
    format_of,
    open_lines,
    read_line,
    reader,
    refusals,
    take_census,
)
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import load_hardware
from flexhybrid.core.memory import parse_bytes
from flexhybrid.core.trace import TraceEvent
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.profile.disk import measure_disk, with_disk
from flexhybrid.jobs.profile.job import PROFILE_STEPS, free_host_bytes, measure_for_model, model_profile_path
from flexhybrid.jobs.progress import Progress, stop_on_signal
from flexhybrid.jobs.ray_cluster import Crew, cluster, crew_of
from flexhybrid.jobs.run.answering import answer_pending, load_weights
from flexhybrid.jobs.run.forecast import WINDOW, Forecast, duration, forecast, plan_lines, sorted_by_length
from flexhybrid.jobs.run.options import RunOptions, check_options
from flexhybrid.jobs.run.report import clocks, refusal_codes, write_report, write_trace
from flexhybrid.llm import LLM, RequestOutput
from flexhybrid.resolve import named_hardware, pick_device
from flexhybrid.runtime.profiling.cpu_use import MOST_OTHERS, CpuUse
from flexhybrid.runtime.storage.loader import Checkpoint

ERRORS_AT_ONCE = 256  #: lines of refused requests that are written together
STOPPED = 130  #: exit status of a run that was asked to stop


def run(options: RunOptions, say=print, began: float | None = None) -> dict:
    """Answer every request that is not answered yet; returns what is to be told of it, exit_status among it.

    ``say`` hears the plan and the summary; ``began`` is ``time.time()`` when the command did (now). Raises InputError
    for what stands in the way, and KeyboardInterrupt with what to do next; what was answered before is on the disk.
    """
    began = time.time() if began is None else began
    check_options(options)
    form = format_of(options.input, options.format)
    with _hint("nothing was written; give the same command again"), contextlib.ExitStack() as stack:
        before = file_state(options.input)
        lines = stack.enter_context(contextlib.closing(open_lines(options.input, form, options.column)))
        files = {path: _open(stack, path, options.output) for path in (options.output, options.errors) if path}
        crew = stack.enter_context(_crew(options, say)) if options.engine == "ray" else None
        earlier_dtype = None if options.restart else _earlier_dtype(options.output)
        llm = stack.enter_context(_load(options, earlier_dtype, crew.a_node if crew else 1))
        url = file_url(lines, form)
        if url == "/v1/chat/completions" and not getattr(llm.tokenizer, "chat_template", None):
            raise InputError(f"{options.model} has no chat template: it cannot serve {url}")
        read = reader(form, url, llm, options.sampling, options.seed)
        with Progress(before[0], "reading", "B", options.quiet) as progress:
            census = take_census(lines, read, llm.shape.max_context, progress.advance)
        job = Job(options, llm, lines, census, read, url or "", files, before, crew)
        with _hint(f"what was answered is kept; give {_again(options)} to go on"):
            return job.run(say, began)


@contextlib.contextmanager
def _hint(text: str) -> Iterator[None]:
    """What a user who stops the work at once is told, where nothing inside has said it."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(*stop.args or (text,)) from None


def _again(options: RunOptions) -> str:
    """What goes on with this run."""
    return "the same command again" + (", without --restart," if options.restart else "")


def _open(stack: contextlib.ExitStack, path: Path, output: Path) -> AnswerFile:
    """The file, locked; one that was not there goes again where the run is refused before it began."""
    existed = path.exists()

    def leave(error_type, *error) -> None:
        if error_type and not existed and not manifest_path(output).exists():
            path.unlink(missing_ok=True)

    file = AnswerFile(path)
    stack.callback(file.close)
    stack.push(leave)  # runs first, under the lock
    return file


@contextlib.contextmanager
def _crew(options: RunOptions, say) -> Iterator[Crew]:
    """The actors to be had, on a cluster that is connected."""
    with cluster(say) as ray:
        yield crew_of(ray, pick_device(options.device, options.link_gb_per_s).type, options.actors)


def _earlier_dtype(output: Path) -> str | None:
    """What the run to be continued computed in: a profile measured since then must not change it."""
    numbers = (load_manifest(output) or {}).get("numbers")
    return numbers.get("dtype") if isinstance(numbers, dict) else None


def _load(options: RunOptions, earlier_dtype: str | None, sharers: int) -> LLM:
    """The model, with a profile of this machine where the policy hangs on one, and with memory that is free: the part
    of one of ``sharers`` executors on a machine like this one."""
    device = pick_device(options.device, options.link_gb_per_s)
    budgets, free = {tier: parse_bytes(size) for tier, size in options.budgets.items()}, free_host_bytes()
    # On a CPU both tiers are host memory.
    shares = {"host": 0.9} if device.type == "cuda" else {"device": 0.45, "host": 0.45}
    for tier, share in shares.items():
        if budgets.get(tier) is None and free is not None:
            budgets[tier] = int(free * share / sharers)
    hardware, dtype = options.hardware, options.dtype
    if hardware is None:
        shape = Checkpoint(options.model).shape
        kept = model_profile_path(shape, dtype, device, options.link_gb_per_s)
        if options.reprofile or (options.policy == "auto" and not kept.is_file()):
            rate = options.link_gb_per_s
            with Progress(PROFILE_STEPS, "profile", " runs", options.quiet) as progress:
                progress.note("measuring this machine at the model's layer sizes; later runs take the record")
                hardware = measure_for_model(shape, dtype, device, rate, lambda: progress.advance(1), budgets)
        elif kept.is_file():
            hardware = load_hardware(kept)
        if hardware is not None:
            dtype = hardware.dtype
    if options.dtype == "auto" and earlier_dtype:
        dtype = earlier_dtype
    if hardware is not None and options.policy == "auto" and options.disk_dir:
        hardware = with_disk(hardware, measure_disk(options.disk_dir, options.disk_gb_per_s)[0])
    hardware = named_hardware(hardware, device, options.link_gb_per_s)
    return LLM(
        options.model, options.policy, options.device, options.link_gb_per_s, budgets.get("device"),
        budgets.get("host"), dtype, hardware, options.disk_dir, options.disk_gb_per_s, budgets.get("disk"),
    )  # fmt: skip


class Job:
    """One run over an open input and open, locked output files."""

    def __init__(
        self, options: RunOptions, llm: LLM, lines: BinaryIO, census: Census, read: ReadLine, url: str,
        files: dict[Path, AnswerFile], input_state: tuple[int, int], crew: Crew | None = None,
    ):  # fmt: skip
        self.options, self.llm, self.lines, self.census, self.read = options, llm, lines, census, read
        self.url, self.files, self.input_state, self.crew = url, files, input_state, crew
        self.answers = files[options.output]
        self.errors = files[options.errors or options.output]
        self.states = np.full(census.num_lines, PENDING, dtype=np.uint8)
        self._order = np.empty(0, dtype=np.int64)
        self.created = 0
        self.tokens = 0  #: that this run has generated, of answers that it has written
        self.dropped = 0  #: that it has generated of answers that were not complete when it was stopped
        self.manifest: dict = {}
        self.trace: list[TraceEvent] = []  #: of the first wave, where it was asked for

    def run(self, tell, began: float) -> dict:
        said: list[str] = []

        def say(text: str) -> None:
            said.append(text)
            tell(text)

        options = self.options
        if not self.census.num_lines:
            raise InputError(f"{options.input} is empty")
        self._resume(say)
        earlier = int((self.states != PENDING).sum())
        self._write_refusals()
        if not self.census.valid.any():
            reason = next(refusals(self.lines, self.census, self.read, [1]))[1].message
            raise InputError(
                f"{options.input} has no request that can be served; line 1: {reason}. All the "
                f"reasons are in {self.errors.path}"
            )
        self._order = self._sorted(np.flatnonzero(self.census.valid & (self.states == PENDING)))
        pending, failed = self.pending(), int((self.states == FAILED).sum())
        found, seconds, others, stopped = None, 0.0, None, False
        if len(pending):
            found = self._plan(pending, earlier, say)
            if self.crew is None:
                load_weights(self.llm, found.layer_bytes)
            started = CpuUse.now()
            with (
                stop_on_signal() as stop,
                Progress(found.tokens, "tokens", "tok", options.quiet, found.seconds, failed) as progress,
            ):
                if self.crew is None:
                    watch = self.trace.extend if options.trace or options.report else None
                    answer_pending(self, progress, stop, watch)
                else:
                    from flexhybrid.jobs.run.remote import answer_pending_on

                    answer_pending_on(self.crew, self, found, progress, stop)
            ended, stopped = CpuUse.now(), bool(len(self.pending()))
            seconds, others = ended.at_s - started.at_s, None if self.crew else ended.others_since(started)
            self.dropped = progress.count - self.tokens if stopped else 0
        for file in self.files.values():
            file.sync()
            if options.ordered and not stopped:
                file.sort(self.census.num_lines)
        result = self._summary(say, found, earlier, seconds, others, stopped, time.time() - began)
        machine = self.llm.hardware
        traces = clocks(self.trace, machine.at_work(self.llm.policy) if machine else None)
        if options.trace and traces:
            write_trace(options.trace, traces)
        if options.report and (found or not options.report.exists()):
            write_report(options.report, said, self.manifest, refusal_codes(self.errors.path), traces)
        return result

    def _resume(self, say) -> None:
        """Take over what an earlier run left, if it was the same run; else begin anew where that loses nothing."""
        options, llm = self.options, self.llm
        pending = self.census.valid
        if pending.any():
            most = min(WINDOW, options.max_batch or WINDOW)
            policy = llm.settle(_thin(self.workload(self._sorted(np.flatnonzero(pending))), most))
            if options.max_batch:
                llm.use(replace(policy, max_batch=min(most, policy.max_batch or most)))
        now = {
            "created": int(time.time()),
            "input": {"sha256": self.census.sha256, "lines": self.census.num_lines},
            "model": model_record(llm.checkpoint.path, options.verify),
            "sampling": {**options.sampling, "seed": options.seed},
            "errors": options.errors.name if options.errors else None,
            "numbers": {
                "dtype": llm.dtype, "device": llm.device.type,
                "bits": [llm.policy.bits.weights, llm.policy.bits.kv, llm.policy.bits.act] if llm.policy else None,
                "selection": str(llm.policy.selection) if llm.policy else None,
            },
            "versions": {
                "flexhybrid": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
            },
        }  # fmt: skip
        earlier = load_manifest(options.output)
        used = [file.path for file in self.files.values() if not file.is_empty]
        if options.restart or not used:
            if (left := (earlier or {}).get("errors")) and left != now["errors"]:
                # Its folder is not known: a file of that name may be another's.
                say(f"restarted  the run before kept its refused lines in {left}, which is left as it is")
            for file in self.files.values():
                file.clear()
            save_manifest(options.output, now)
            self.manifest = now
            self.created = now["created"]
            return
        if earlier is None:
            raise InputError(f"{used[0]} holds something, but no manifest is beside {options.output}: it was not "
                             "written by a run; choose another output, or overwrite it with --restart")  # fmt: skip
        check_same(options.output, earlier, now)
        self.manifest = earlier
        self.created = earlier["created"]
        states = self.states.copy()
        for file in self.files.values():
            file.check(states)
        for file in self.files.values():
            file.repair()
        self.states = states

    def _write_refusals(self) -> None:
        """The lines that cannot be served, with the reason."""
        missing = np.flatnonzero(~self.census.valid & (self.states == PENDING)) + 1
        batch: list[bytes] = []
        for number, refused in refusals(self.lines, self.census, self.read, map(int, missing)):
            batch.append(error_line(number, refused))
            if len(batch) == ERRORS_AT_ONCE:
                self.errors.append(batch)
                batch = []
        self.errors.append(batch)
        self.states[missing - 1] = FAILED

    def pending(self) -> np.ndarray:
        """Places of the lines to be answered, in the order of the work."""
        self._order = self._order[self.states[self._order] == PENDING]
        return self._order

    def _sorted(self, places: np.ndarray) -> np.ndarray:
        return places[sorted_by_length(self.census.prompt_tokens[places], self.census.max_tokens[places])]

    def workload(self, places: np.ndarray) -> Workload:
        return Workload(self.census.prompt_tokens[places], self.census.max_tokens[places])

    def _plan(self, pending: np.ndarray, earlier: int, say) -> Forecast:
        """The forecast, told in five lines. Raises InputError where the largest requests do not fit the budgets."""
        lengths = self.workload(pending)
        for largest in {int(lengths.prompt_tokens.argmax()), int(lengths.cached_tokens.argmax())}:
            try:
                self.llm.first_wave(self.workload(pending[largest : largest + 1]))
            except InputError as error:
                raise InputError(f"line {pending[largest] + 1}: {error}") from None
        found = forecast(self.llm, lengths)
        if self.crew and found.seconds is not None:
            found = replace(found, seconds=found.seconds / self.crew.size)
        refused = int((self.states == FAILED).sum())
        counts = f"{len(pending):,}" + (f" ({refused:,} refused)" if refused else "")
        counts += f", {earlier:,} lines done before" if earlier else ""
        searched = self.options.policy == "auto" and self.llm.policy.name == "searched"
        for line in plan_lines(self.llm, found, counts, searched):
            say(line)
        if self.crew:
            say(f"ray        {self.crew}")
        return found

    def check_input_unchanged(self) -> None:
        if file_state(self.options.input) != self.input_state:
            raise InputError(f"{self.options.input} was changed under way; what is answered is kept")

    def request(self, number: int) -> Request:
        """Of a line that can be served, from 1."""
        return read_line(self.lines, self.census, self.read, number)

    def line(self, number: int, request: Request, output: RequestOutput) -> bytes:
        """What the output will hold of an answer to line ``number``."""
        return answer_line(number, request, output, self.url, self.created)

    def write(self, answered: list[tuple[int, bytes, int]], progress: Progress) -> None:
        """Complete answers: (line number, the line to write, tokens generated)."""
        self.answers.append([line for _, line, _ in answered])
        for number, _, tokens in answered:
            self.states[number - 1] = ANSWERED
            self.tokens += tokens
            progress.finished(int(self.census.max_tokens[number - 1]) - tokens)
        self.answers.sync_if_due()

    def _summary(
        self, say, found, earlier: int, seconds: float, others: float | None, stopped: bool, total_s: float
    ) -> dict:
        options, states = self.options, self.states
        counts = {"lines": self.census.num_lines, "answered": int((states == ANSWERED).sum()),
                  "refused": int((states == FAILED).sum()), "left": int((states == PENDING).sum()),
                  "done_before": earlier}  # fmt: skip
        rate = self.tokens / seconds if seconds else 0.0
        predicted = found.seconds if found else None
        say("")
        say(f"{counts['answered']:,} answered, {counts['refused']:,} refused, {counts['left']:,} left of "
            f"{counts['lines']:,} lines" + (f" ({earlier:,} before this run)" if earlier else ""))  # fmt: skip
        if seconds:
            # Of a part nothing was predicted: the longest requests come first.
            against = f" (predicted {duration(predicted)})" if predicted and not stopped else ""
            speed = f"{self.tokens:,} tokens in {duration(seconds)}: {rate:.1f} tokens/s"
            say(f"{speed}{against}; the whole command {duration(total_s)}")
            if others and others > MOST_OTHERS:
                say(f"busy       others took {others:.0%} of the cores meanwhile, which no prediction knows of")
        say(f"answers    {options.output}")
        if counts["refused"]:
            say(f"refused    {options.errors or f'{options.output}, lines of status_code 400'}")
        if options.trace:
            say(f"trace      {options.trace} (open it at ui.perfetto.dev)" if self.trace else "trace      nothing ran")
        if options.report:
            kept = "" if found or not options.report.exists() else " (of an earlier run: nothing ran)"
            say(f"report     {options.report}{kept}")
        if stopped:
            lost = f"; {self.dropped:,} tokens of unfinished answers are lost (see --max-batch)" if self.dropped else ""
            say(f"stopped: give {_again(options)} to go on{lost}")
        return {
            **counts, "tokens": self.tokens, "tokens_dropped": self.dropped,
            "seconds": seconds, "tokens_per_s": rate, "predicted_s": predicted,
            "others_cpu_share": others,
            "policy": self.llm.policy.to_dict(), "output": str(options.output),
            "errors": str(options.errors) if options.errors else None, "exit_status": STOPPED if stopped else 0,
        }  # fmt: skip


def _thin(workload: Workload, count: int) -> Workload:
    """A workload of about ``count`` requests whose lengths stand for all, the longest among them."""
    places = np.linspace(0, workload.num_requests - 1, count).round().astype(int)
    places = np.unique([*places, workload.prompt_tokens.argmax(), workload.cached_tokens.argmax()])
    return Workload(workload.prompt_tokens[places], workload.max_tokens[places])
