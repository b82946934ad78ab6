"""A run's result: its final lines, and its record."""

from collections.abc import Callable
from typing import NamedTuple

from flexhybrid.core.schedule.scheduler import stores_exactly
from flexhybrid.core.units import counted
from flexhybrid.jobs.run.forecast import duration, predicted_time
from flexhybrid.jobs.run.lines import JobLines
from flexhybrid.jobs.run.options import RunOptions
from flexhybrid.runtime.profiling.cpu_use import MOST_OTHERS

PARTED = 1.5  #: times by which speed and prediction differ before a new profile is advised
TELLING_S = 10.0  #: seconds of a run, measured or predicted, from which its speed says something of the profile
STOPPED = 130  #: exit status of a run that was asked to stop


def again(options: RunOptions) -> str:
    """Return the command that continues this run, in words."""
    return "the same command again" + (", without --overwrite," if options.restart else "")


class Effort(NamedTuple):
    """What answering took, without compiling."""

    predicted_s: float | None
    seconds: float
    others_cpu_share: float | None  #: of the cores, used by other processes; None: not known
    unfinished_tokens: int  #: that were generated of answers that were not complete at the end
    predicted_of_these_s: float | None  #: for answers as long as those that came, whose lengths nobody knew
    compiling_s: float = 0.0  #: of kernels for this processor, besides


def parted(seconds: float, predicted_s: float | None) -> bool:
    """Return whether the seconds of the same tokens, measured and predicted, differ by more than PARTED times; False
    where nothing was predicted, and for a run that neither took nor should have taken TELLING_S seconds."""
    if not predicted_s or max(seconds, predicted_s) < TELLING_S:
        return False
    return max(seconds / predicted_s, predicted_s / seconds) > PARTED


def against(work: Effort) -> str:
    """Return the prediction of a run in words: for its actual answer lengths and their limits, or for expected ones."""
    own, most = (predicted_time(s) if s else "" for s in (work.predicted_of_these_s, work.predicted_s))
    than = "at most" if (work.predicted_of_these_s or 0.0) <= (work.predicted_s or 0.0) else "for those expected"
    longest = f" for answers as long as these, {most} {than}" if most != own else ""
    return own and f" (predicted {own}{longest})"


class Outcome(NamedTuple):
    """The end of a run."""

    lines: JobLines
    counts: dict[str, int]  #: lines, and how many of them were "answered", "refused", "left" and "done_before" it
    work: Effort | None  #: None: nothing was left to answer
    traced: bool

    @property
    def stopped(self) -> bool:
        return self.counts["left"] > 0

    @property
    def dropped(self) -> int:
        """Tokens of answers that a stop left unfinished."""
        return self.work.unfinished_tokens if self.work and self.stopped else 0

    @property
    def tokens_per_s(self) -> float:
        """Of all generated tokens, including unfinished answers'."""
        return (self.lines.tokens + self.dropped) / self.work.seconds if self.work else 0.0

    def say(self, say: Callable[[str], None], total_s: float) -> None:
        """Say the last lines of a run; ``total_s``: of the whole command."""
        options, counts, work, stopped = self.lines.options, self.counts, self.work, self.stopped
        before = f" ({counts['done_before']:,} before this run)" if counts["done_before"] else ""
        blank = f", {counts['blank']:,} of them blank" if counts["blank"] else ""
        say("")
        say(
            f"{counts['answered']:,} answered, {counts['refused']:,} refused, {counts['left']:,} left of "
            f"{counts['lines']:,} lines{blank}{before}"
        )
        if work:
            predicted = "" if stopped else against(work)  # nothing for a part of the requests: the longest come first
            unfinished = f" and {work.unfinished_tokens:,} of unfinished answers" if self.dropped else ""
            tokens = f"{counted(self.lines.tokens, 'token')}{unfinished} in {duration(work.seconds)}"
            say(f"{tokens}: {self.tokens_per_s:.1f} tokens/s{predicted}; the whole command {duration(total_s)}")
            if work.compiling_s:
                say(f"compiled   new kernels in {duration(work.compiling_s)} besides that, kept for later runs")
            if work.others_cpu_share and work.others_cpu_share > MOST_OTHERS:
                say(f"busy       others used {work.others_cpu_share:.0%} of the cores; predictions assume none")
            blamed = options.llm.hardware is None and not stopped
            if blamed and self.lines.tokens and parted(work.seconds, work.predicted_of_these_s):
                say("profile    that is far from the prediction: --reprofile measures the machine again")
        if shared := self.lines.llm.num_shared:
            saved = "computed" if stores_exactly(self.lines.llm.settled_policy) else "stored again"
            say(f"shared     {shared:,} prompt tokens were not {saved}: other prompts begin alike")
        if self.lines.llm.graphs:
            say(f"graphs     {self.lines.llm.graphs}")
        if trial := self.lines.trial:
            say(f"trials     {trial}{'' if self.lines.replanned else '; the policy stays'}")
        for change in self.lines.replanned:
            say(f"replanned  {change}")
        table = f"{options.parquet}, " if options.parquet and not stopped else ""
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
            say(f"stopped: give {again(options)} to go on{lost if self.dropped else ''}")
            if work and not (self.lines.tokens or self.dropped):
                say(
                    "           no answer could be there yet: the first iteration reads the prompts of all requests "
                    "that begin together; with a smaller --max-num-seqs the first answers come sooner"
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
