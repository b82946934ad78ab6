"""The result of a run: its last printed lines and its record."""

from collections.abc import Callable
from typing import NamedTuple

from flexhybrid.core.schedule.scheduler import stores_exactly
from flexhybrid.core.units import counted
from flexhybrid.jobs.run.forecast import duration, predicted_time
from flexhybrid.jobs.run.lines import JobLines
from flexhybrid.jobs.run.options import RunOptions
from flexhybrid.runtime.profiling.cpu_use import MOST_OTHERS

FAR_OFF = 1.5  #: ratio of measured and predicted seconds above which a new profile is advised
LEAST_JUDGED_S = 10.0  #: runs of fewer seconds, measured and predicted, say nothing about the profile
STOPPED = 130  #: exit status of a run stopped by a signal


def resume_command(options: RunOptions) -> str:
    """Return a description of the command that continues this run."""
    return "the same command again" + (", without --overwrite," if options.restart else "")


class Effort(NamedTuple):
    """Measured and predicted time of answering the requests."""

    predicted_s: float | None  #: predicted seconds of the plan; None: no prediction
    seconds: float  #: without ``compiling_s``
    others_cpu_share: float | None  #: share of the cores used by other processes; None: unknown
    unfinished_tokens: int  #: generated tokens of answers that were not complete at the end
    predicted_of_these_s: float | None  #: for the actual answer lengths, which the plan did not know
    compiling_s: float = 0.0  #: seconds of compiling kernels for this processor


def is_far_off(seconds: float, predicted_s: float | None) -> bool:
    """Return whether measured and predicted seconds of the same tokens differ by more than a factor of FAR_OFF.
    False without a prediction, and if both are below LEAST_JUDGED_S."""
    if not predicted_s or max(seconds, predicted_s) < LEAST_JUDGED_S:
        return False
    return max(seconds / predicted_s, predicted_s / seconds) > FAR_OFF


def predicted_text(work: Effort) -> str:
    """Return the predicted times as text: for the actual answer lengths, and for the plan's if those differ."""
    own, most = (predicted_time(s) if s else "" for s in (work.predicted_of_these_s, work.predicted_s))
    than = "at most" if (work.predicted_of_these_s or 0.0) <= (work.predicted_s or 0.0) else "for those expected"
    longest = f" for answers as long as these, {most} {than}" if most != own else ""
    return own and f" (predicted {own}{longest})"


class Outcome(NamedTuple):
    """The result of a run."""

    lines: JobLines
    counts: dict[str, int]  #: number of "lines", and of those "answered", "refused", "left", "blank", "done_before"
    work: Effort | None  #: None: no request was pending
    traced: bool  #: whether there is a trace

    @property
    def stopped(self) -> bool:
        return self.counts["left"] > 0

    @property
    def dropped(self) -> int:
        """Tokens of unfinished answers, which a stop loses."""
        return self.work.unfinished_tokens if self.work and self.stopped else 0

    @property
    def tokens_per_s(self) -> float:
        """Rate of all generated tokens, with those of unfinished answers."""
        return (self.lines.tokens + self.dropped) / self.work.seconds if self.work else 0.0

    def say(self, say: Callable[[str], None], total_s: float) -> None:
        """Print the last lines of a run. ``total_s``: seconds of the whole command."""
        options, counts, work, stopped = self.lines.options, self.counts, self.work, self.stopped
        before = f" ({counts['done_before']:,} before this run)" if counts["done_before"] else ""
        blank = f", {counts['blank']:,} of them blank" if counts["blank"] else ""
        say("")
        say(
            f"{counts['answered']:,} answered, {counts['refused']:,} refused, {counts['left']:,} left of "
            f"{counts['lines']:,} lines{blank}{before}"
        )
        if work:
            predicted = (
                "" if stopped else predicted_text(work)
            )  # a stop leaves the shortest requests, unlike the prediction
            unfinished = f" and {work.unfinished_tokens:,} of unfinished answers" if self.dropped else ""
            tokens = f"{counted(self.lines.tokens, 'token')}{unfinished} in {duration(work.seconds)}"
            say(f"{tokens}: {self.tokens_per_s:.1f} tokens/s{predicted}; the whole command {duration(total_s)}")
            if work.compiling_s:
                say(f"compiled   new kernels in another {duration(work.compiling_s)}; later runs reuse them")
            if work.others_cpu_share and work.others_cpu_share > MOST_OTHERS:
                used = f"other processes used {work.others_cpu_share:.0%} of the cores"
                say(f"busy       {used}; predictions assume an idle machine")
            blamed = options.llm.hardware is None and not stopped
            if blamed and self.lines.tokens and is_far_off(work.seconds, work.predicted_of_these_s):
                say("profile    the time is far from the prediction: --reprofile measures the machine again")
        if shared := self.lines.llm.num_shared:
            saved = "computed" if stores_exactly(self.lines.llm.settled_policy) else "stored"
            say(f"shared     {shared:,} prompt tokens were not {saved} again: other prompts begin with them")
        if self.lines.llm.graphs:
            say(f"graphs     {self.lines.llm.graphs}")
        if trial := self.lines.trial:
            say(f"trials     {trial}{'' if self.lines.replanned else '; the policy stays'}")
        for change in self.lines.replanned:
            say(f"replanned  {change}")
        table = f"{options.table}, " if options.table and not stopped else ""
        say(f"answers    {table}{options.output}")
        if counts["refused"]:
            codes = ", ".join(f"{code} ({count:,})" for code, count in self.lines.refused_codes.most_common(3))
            where = options.errors or f"{options.output}, lines of status_code 400"
            say(f"refused    {where}{f'; most of them: {codes}' if codes else ''}")
        if options.trace:
            say(f"trace      {options.trace} (open it at ui.perfetto.dev)" if self.traced else "trace      nothing ran")
        if options.report:
            kept = "" if work or not options.report.exists() else " (of an earlier run: nothing ran)"
            say(f"report     {options.report}{kept}")
        if stopped:
            lost = f"; {counted(self.dropped, 'token')} of unfinished answers are lost (see --max-num-seqs)"
            say(f"stopped: give {resume_command(options)} to continue{lost if self.dropped else ''}")
            if work and not (self.lines.tokens or self.dropped):
                say(
                    "           no answer could be there yet: the first iteration computes the prompts of all requests "
                    "in the batch; with a smaller --max-num-seqs the first answers come sooner"
                )

    def record(self) -> dict:
        """Return the record of a run, with its exit_status."""
        work, stopped = self.work, self.stopped
        return {
            **self.counts,
            "tokens": self.lines.tokens,
            "shared_prompt_tokens": self.lines.llm.num_shared,
            "cuda_graphs": self.lines.llm.graphs or None,
            "tokens_dropped": self.dropped,
            "seconds": work.seconds if work else 0.0,
            "tokens_per_s": self.tokens_per_s,
            "compiling_s": work.compiling_s if work else 0.0,
            "predicted_s": work.predicted_s if work else None,
            "predicted_of_these_s": work.predicted_of_these_s if work else None,
            "profile_in_company": self.lines.llm.hardware.company if self.lines.llm.hardware else None,
            "others_cpu_share": work.others_cpu_share if work else None,
            "policy": self.lines.llm.settled_policy.to_dict(),
            "replanned": self.lines.replanned,
            "trials": self.lines.trial,
            "output": str(self.lines.options.output),
            "errors": str(self.lines.options.errors) if self.lines.options.errors else None,
            "exit_status": STOPPED if stopped else 0,
        }
