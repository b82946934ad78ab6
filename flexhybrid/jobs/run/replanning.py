"""Searches again, while a batch runs, if measurements depart from the prediction for long.

A batch under the new policy then follows the running one, in the same job, with the weights in place. Running requests
move to it with their tokens and recomputed contexts, or end in their old blocks while places stay empty, whichever
costs less. The gain must exceed the cost. Tokens are those of any other policy.

The first iterations of a job are its trial: they correct the lines of the machine's record, and if times differ from
the prediction the search runs once more, early (``Replanner._try``).
"""

from __future__ import annotations

import pickle
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from threading import Thread

from flexhybrid.core.admission import check_longest
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.scheduler import may_grow
from flexhybrid.core.trace import LineKey, LineTimes
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.run.outlook import LEAST_BUSY, MOST_COUNTED, ChangeCosts, Outlook, change_costs
from flexhybrid.llm import LLM
from flexhybrid.resolve import auto_settings
from flexhybrid.runner import MOST_AT_A_TIME
from sim.correction import corrected, in_words, resource_ratios
from sim.queue_clock import QueueRun, price_queue
from sim.queue_counts import RunIntervals

PARTED = 1.1  #: ratio of measured seconds, or answers, to the prediction that counts as a difference
WINDOW_S, WINDOW_ITERATIONS = 20.0, 16  #: least iterations of a window
WINDOWS = 3  #: consecutive windows that must differ to one side; a batch's first one does not count
LEAST_ANSWERS = 64  #: ended answers before their lengths count
LEAST_GAIN = 0.1  #: least share of the remaining seconds that a new policy must save, cost included
MOST_CHANGES, MOST_SEARCHES = 3, 6  #: of a job
ACT_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  #: shares of mixes that are priced with the search's result
SEARCH_S = 90.0  #: seconds of a search during a batch: a third for each length of requests
SETTLED, TRIED, TRIED_S = 2, 6, 0.5  #: iterations of a job's trial, and their least seconds
TRIAL_SHARE, TRIAL_S, LEAST_TRIAL_S = 0.05, 20.0, 1.5  #: shares of the job for a search after the trial: most and least


@dataclass(frozen=True)
class Change:
    """A policy for the waiting requests, and the reason for the search."""

    policy: Policy
    run: QueueRun
    reason: str
    moves: bool  #: running requests move to it; otherwise they end before it


class Watch:
    """Detects that a batch has left its prediction."""

    def __init__(self):
        self.begin(0)

    def begin(self, iteration: int) -> None:
        """Start over, with a window in which a batch settles."""
        self.first, self.settled = iteration, False
        self.before: list[dict[LineKey, LineTimes]] = []  #: the lines' times before the latest windows, and after
        self.slower: list[float] = []  #: of the latest windows, ratio to the prediction
        self.longer: list[float] = []  #: the same ratio of the waiting requests' answers

    def look(self, outlook: Outlook) -> str | None:
        """Take the end of an iteration; return in words what differed from the prediction for WINDOWS windows, or
        None."""
        now = outlook.num_iterations
        if now - self.first < WINDOW_ITERATIONS or outlook.ends[now] - outlook.ends[self.first] < WINDOW_S:
            return None
        waits, answers = outlook.waiting(MOST_COUNTED)
        if not len(waits):
            return None
        mean, assumed = float(answers.mean()), float(outlook.assumed[waits].mean())
        if self.settled:
            longer = mean / assumed if outlook.answers.num_ended >= LEAST_ANSWERS else 1.0
            self.slower = [*self.slower, outlook.slower(self.first)][-WINDOWS:]
            self.longer = [*self.longer, longer][-WINDOWS:]
        self.first, self.settled = now, True
        self.before = [*self.before, outlook.line_times()][-WINDOWS - 1 :]
        if parted(self.slower):
            return f"iterations took {statistics.median(self.slower):.2f} times as long as predicted"
        if parted(self.longer):
            return f"answers have {mean:.0f} tokens on average, not {assumed:.0f}"
        return None


def parted(ratios: list[float]) -> bool:
    """Return whether WINDOWS ratios differ from 1 by more than PARTED, all on one side."""
    return len(ratios) == WINDOWS and (min(ratios) > PARTED or max(ratios) < 1 / PARTED)


class Replanner:
    """Watches the batches of a job with a searched policy. ``trials``: whether the first iterations correct record and
    search."""

    def __init__(self, llm: LLM, run: QueueRun, max_batch: int | None = None, trials: bool = True):
        self.llm, self.run, self.watch = llm, run, Watch()
        self.max_batch = max_batch  #: the user's limit of requests at a time; None: any number
        self.change: Change | None = None  #: that waits for the end of the batch
        self.num_changes = self.num_searches = 0
        self.hardware = llm.problem.hardware  #: as it was measured so far
        self.trial: str | None = None  #: what it changed, in words
        self._search: Thread | None = None
        self._process: Popen | None = None  #: that searches
        limit_s = min(TRIAL_S, TRIAL_SHARE * run.total_s)
        self._trial_s = limit_s if trials and self.hardware and limit_s >= LEAST_TRIAL_S else 0.0  #: 0: no trial
        self._before: dict[LineKey, LineTimes] = {}  #: the trial

    def look(self, outlook: Outlook) -> None:
        """Take the end of an iteration; search in a separate thread after the trial, and after a long difference from
        the prediction."""
        if self.change or self.num_changes == MOST_CHANGES or self.num_searches == MOST_SEARCHES:
            return
        if self._search:
            if self._search.is_alive():
                return
            self._search = None  # which used a part of the machine: times measured meanwhile do not count
            outlook.pace = self.run.pace or outlook.pace
            self.watch.begin(outlook.num_iterations)
        if self._trial_s:
            self._try(outlook)
            return
        if (reason := self.watch.look(outlook)) is None:
            return
        hardware = self.hardware
        if parted(self.watch.slower):
            hardware, _ = self._measured(outlook, self.watch.before[0], statistics.median(self.watch.slower))
        since = f"after {outlook.answers.num_ended:,} answers, {outlook.num_iterations:,} iterations: {reason}"
        self._ask(outlook, hardware, since, SEARCH_S)

    def _try(self, outlook: Outlook) -> None:
        """Take the end of one of the first iterations. After the trial, correct the record's lines, and search again
        if times differ."""
        now = outlook.num_iterations
        if now <= SETTLED:
            self._before = outlook.line_times()
        if now < TRIED or outlook.ends[now] - outlook.ends[SETTLED] < TRIED_S or self.hardware is None:
            return
        limit_s, self._trial_s = self._trial_s, 0.0
        slower = outlook.slower(SETTLED)
        run = self.llm.settled_policy, self._times(outlook, self._before)
        ratios = resource_ratios(self.hardware, run, LEAST_BUSY * (outlook.ends[now] - outlook.ends[SETTLED]))
        hardware, words = self._measured(outlook, self._before, slower)
        self.trial = words
        if any(max(ratio, 1 / ratio) > PARTED for ratio in (slower, *ratios.values())):
            self._ask(outlook, hardware, f"after {now} iterations: {words}", limit_s)
        else:
            self.hardware = hardware
        self.watch.begin(now)

    def _measured(
        self, outlook: Outlook, before: dict[LineKey, LineTimes], slower: float
    ) -> tuple[Hardware | None, str]:
        """Return the machine with the lines' times since ``before``, and the changes in words. Without measured lines
        (a GPU times those of a batch's first iterations alone), the resource that limits the run takes ``slower`` times
        as long."""
        times = self._times(outlook, before)
        if self.hardware is None or times:
            hardware = self.hardware and corrected(self.hardware, [(self.llm.settled_policy, times)])
            return hardware, in_words(hardware) if hardware else ""
        binding = self.run.binding
        return self.hardware.scaled({binding: slower}), f"{binding} takes {slower:.2f} of the profile's time"

    @staticmethod
    def _times(outlook: Outlook, before: dict[LineKey, LineTimes]) -> dict[LineKey, LineTimes]:
        """Return the times of lines with tasks since ``before``."""
        times = {key: of.since(before.get(key, LineTimes())) for key, of in outlook.line_times().items()}
        return {key: of for key, of in times.items() if of.tasks}

    def _ask(self, outlook: Outlook, hardware: Hardware | None, reason: str, limit_s: float) -> None:
        """Search for the queued requests, if any, in a separate thread. The outlook then assumes the search's answer
        lengths."""
        waits, answers = outlook.waiting()
        if not len(waits):
            return
        outlook.assumed = outlook.assumed.copy()
        outlook.assumed[waits] = answers
        self.num_searches += 1
        lengths = outlook.workload.select(waits)
        waiting = replace(lengths, answer_tokens=answers).behind(outlook.given[waits])
        known = hardware, waiting, outlook.rest(), int(outlook.workload.cached_tokens.max()), reason, limit_s
        self._search = Thread(target=self._seek, args=known, name="replan", daemon=True)
        self._search.start()

    def made(self) -> Change:
        """Take the change as made. Raise ValueError without one."""
        change, self.change = self.change, None
        if change is None:
            raise ValueError("there is nothing to change")
        self.run, self.num_changes, self._search = change.run, self.num_changes + 1, None
        self.watch.begin(0)
        return change

    def _seek(  # noqa: PLR0913
        self,
        hardware: Hardware | None,
        waiting: Workload,
        rest: RunIntervals | None,
        longest: int,
        reason: str,
        limit_s: float,
    ) -> None:
        """Search for a policy that finishes sooner, on the machine as measured. ``rest``: of the running requests;
        ``longest``: tokens of the longest request."""
        began, problem, current = time.monotonic(), self.llm.problem, self.llm.settled_policy
        problem = replace(problem, hardware=hardware)
        try:
            now = price_queue(problem, current, waiting, MOST_AT_A_TIME)
            policy, run = self._best(problem, current, waiting, limit_s)
        except InputError:  # nothing else fits
            return
        self.hardware, self.run = hardware, now
        costs = ChangeCosts(0.0, 0.0, 0.0)
        if rest is not None and now.pace and run.pace:
            costs = change_costs(rest, now.pace, run.pace)
        moves = costs.move_s < costs.drain_s and can_return(problem, policy, longest)
        left_s = run.total_s + (costs.move_s if moves else costs.drain_s) + time.monotonic() - began
        if policy.weights == current.weights and left_s < (1.0 - LEAST_GAIN) * (now.total_s + costs.stay_s):
            self.change = Change(policy, run, reason, moves)

    def _best(self, problem: Problem, current: Policy, waiting: Workload, limit_s: float) -> tuple[Policy, QueueRun]:
        """Return the policy of ``auto`` for them, with the weights in place, and its run.

        A separate process searches: a thread would delay the lanes, through the interpreter's lock, for three times as
        long. Raise InputError if nothing fits, or the search was ended.
        """
        if problem.hardware is None:
            raise InputError("nothing is known of the machine")
        share = current.weights.device
        settings = auto_settings(problem.hardware, waiting, weights_device=share, margin=0.0, time_limit=limit_s / 3)
        settings = replace(settings, max_batch=min(settings.max_batch, self.max_batch or settings.max_batch))
        asked = pickle.dumps((problem, waiting, settings, [current, *other_mixes(current)]))
        command = [sys.executable, "-m", "flexhybrid.jobs.run.searching"]
        with Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL) as self._process:
            try:
                found = self._process.communicate(asked, limit_s)[0]
            except TimeoutExpired:
                self._process.kill()
        if self._process.returncode:
            raise InputError("no policy was found")
        return pickle.loads(found)

    def end(self) -> None:
        """End a search that is under way."""
        if self._process:
            self._process.kill()


def other_mixes(policy: Policy) -> list[Policy]:
    """Return the policy with other mixes of KV and ACT in host memory, with the most requests that fit. The search
    takes requests of one length: with little memory, the longest ones need more room than it assumes."""
    plain = replace(policy, attention="device", hidden="device", max_batch=None)
    shares = [{"kv@host": 1.0 - act, "act@host": act} for act in ACT_SHARES]
    return [replace(plain, name="searched", cache={k: v for k, v in mix.items() if v}) for mix in shares]


def can_return(problem: Problem, policy: Policy, tokens: int) -> bool:
    """Return whether a request's context of about this many tokens can be recomputed within the budgets."""
    with suppress(InputError):
        check_longest(problem, policy, Workload.uniform(1, tokens, 1))
        return may_grow(policy)
    return False
