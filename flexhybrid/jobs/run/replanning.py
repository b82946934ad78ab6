"""Searches for a better policy during a batch if measured times or answer lengths differ from the prediction.

The search runs in a second process. If its policy saves enough time, a new batch with that policy follows in the same
job; the weights stay in place. The running requests either end in the old batch while no requests join, or begin again
in the new one, whichever costs less. The tokens do not depend on the policy.

The first iterations of a job are a trial: they correct the lines of the machine's record. If times differ from the
prediction, the search runs once more, early in the job (``Replanner._try``).
"""

from __future__ import annotations

import pickle
import statistics
import sys
import time
from dataclasses import dataclass, replace
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from threading import Thread

import numpy as np

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.trace import LineKey, LineTimes
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.run.outlook import LEAST_BUSY, MOST_COUNTED, ChangeCosts, Outlook, change_costs
from flexhybrid.llm import LLM
from flexhybrid.resolve import auto_settings
from flexhybrid.runner import MOST_AT_A_TIME
from sim.correction import corrected, in_words, resource_ratios
from sim.queue_clock import QueueRun, price_queue
from sim.queue_counts import RunIntervals

PARTED = 1.1  #: ratio of measured to predicted seconds, or answer lengths, above which they differ
WINDOW_S, WINDOW_ITERATIONS = 20.0, 16  #: least seconds and iterations of a window of measurements
WINDOWS = 3  #: number of consecutive windows that must differ in one direction; a batch's first one does not count
LEAST_ANSWERS = 64  #: number of ended answers from which their lengths are used
LEAST_GAIN = 0.1  #: least share of the remaining seconds that a new policy must save, after the cost of the change
MOST_CHANGES, MOST_SEARCHES = 3, 6  #: per job
ACT_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  #: ACT shares of mixes that are priced along with the search's result
SEARCH_S = 90.0  #: limit of a search during a batch: a third for each of three request lengths
SETTLED, TRIED, TRIED_S = 2, 6, 0.5  #: the trial's first and last iteration, and its least seconds
#: Limits of the search after the trial: share of the predicted job, most seconds, and least seconds for a trial at all.
TRIAL_SHARE, TRIAL_S, LEAST_TRIAL_S = 0.05, 20.0, 1.5


@dataclass(frozen=True)
class Change:
    """A new policy for the waiting requests, and the reason for the search."""

    policy: Policy
    run: QueueRun
    reason: str
    restarts: bool  #: whether running requests begin again in the new batch, or end in the old one


class Watch:
    """Detects that a batch differs from its prediction."""

    def __init__(self):
        self.begin(0)

    def begin(self, iteration: int) -> None:
        """Forget all windows; the next one, in which the batch settles, will not count."""
        self.first, self.settled = iteration, False
        self.before: list[dict[LineKey, LineTimes]] = []  #: the lines' times between the latest windows
        self.slower: list[float] = []  #: measured over predicted time in the latest windows
        self.longer: list[float] = []  #: expected over assumed length of waiting requests' answers in these windows

    def look(self, outlook: Outlook) -> str | None:
        """Note the end of an iteration; return a text about a difference over WINDOWS windows, or None."""
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


def _times(outlook: Outlook, before: dict[LineKey, LineTimes]) -> dict[LineKey, LineTimes]:
    """Return the times of lines with tasks since ``before``."""
    times = {key: of.since(before.get(key, LineTimes())) for key, of in outlook.line_times().items()}
    return {key: of for key, of in times.items() if of.tasks}


class Replanner:
    """Watches the batches of a job whose policy was searched, and searches again if they differ from the prediction.
    ``run``: the policy's prediction. ``trials``: whether the job's first iterations are a trial."""

    def __init__(self, llm: LLM, run: QueueRun, max_batch: int | None = None, trials: bool = True):
        self.llm, self.run, self.watch = llm, run, Watch()
        self.max_batch = max_batch  #: the user's limit of requests at a time; None: any number
        self.change: Change | None = None  #: the change to make after the running batch
        self.num_changes = self.num_searches = 0
        self.hardware = llm.problem.hardware  #: with the corrections so far
        self.trial: str | None = None  #: description of the trial's corrections
        self._search: Thread | None = None
        self._process: Popen | None = None  #: process of the search
        limit_s = min(TRIAL_S, TRIAL_SHARE * run.total_s)
        tries = trials and self.hardware and limit_s >= LEAST_TRIAL_S
        self.trial_s = limit_s if tries else 0.0  #: limit of the trial's search; 0: no trial
        self._before: dict[LineKey, LineTimes] = {}  #: the lines' times before the trial

    def look(self, outlook: Outlook) -> None:
        """Note the end of an iteration; start a search after the trial, or after a long difference."""
        if self.change or self.num_changes == MOST_CHANGES or self.num_searches == MOST_SEARCHES:
            return
        if self._search:
            if self._search.is_alive():
                return
            self._search = None  # the search used the CPU: times measured meanwhile do not count
            outlook.pace = self.run.pace or outlook.pace
            self.watch.begin(outlook.num_iterations)
        if self.trial_s:
            self._try(outlook)
            return
        if (reason := self.watch.look(outlook)) is None:
            return
        hardware = self.hardware
        if parted(self.watch.slower):
            times = _times(outlook, self.watch.before[0])
            hardware, _ = self._measured(times, statistics.median(self.watch.slower))
        since = f"after {outlook.answers.num_ended:,} answers, {outlook.num_iterations:,} iterations: {reason}"
        self._ask(outlook, hardware, since, SEARCH_S)

    def _try(self, outlook: Outlook) -> None:
        """Note the end of one of the first iterations. At the trial's end, correct the record's lines.
        Search again if times differ from the prediction by more than a factor of PARTED."""
        now = outlook.num_iterations
        if now <= SETTLED:
            self._before = outlook.line_times()
        if now < TRIED or outlook.ends[now] - outlook.ends[SETTLED] < TRIED_S or self.hardware is None:
            return
        limit_s, self.trial_s = self.trial_s, 0.0
        slower, times = outlook.slower(SETTLED), _times(outlook, self._before)
        least_s = LEAST_BUSY * (outlook.ends[now] - outlook.ends[SETTLED])
        ratios = resource_ratios(self.hardware, (self.llm.settled_policy, times), least_s)
        hardware, words = self._measured(times, slower)
        self.trial = words
        if any(max(ratio, 1 / ratio) > PARTED for ratio in (slower, *ratios.values())):
            self._ask(outlook, hardware, f"after {now} iterations: {words}", limit_s)
        else:
            self.hardware = hardware
        self.watch.begin(now)

    def _measured(self, times: dict[LineKey, LineTimes], slower: float) -> tuple[Hardware | None, str]:
        """Return the machine corrected by the ``times`` of lines, and a description of the changes. Without measured
        lines (a GPU measures only the trial), the times of the resource that limits the run are multiplied by
        ``slower``."""
        if self.hardware is None or times:
            hardware = self.hardware and corrected(self.hardware, [(self.llm.settled_policy, times)])
            return hardware, in_words(hardware) if hardware else ""
        binding = self.run.binding
        return self.hardware.scaled({binding: slower}), f"{binding} takes {slower:.2f} of the profile's time"

    def _ask(self, outlook: Outlook, hardware: Hardware | None, reason: str, limit_s: float) -> None:
        """Start a search for the waiting requests, if any, in a thread. The outlook takes their new answer lengths."""
        waits, answers = outlook.waiting()
        if not len(waits):
            return
        outlook.assumed = outlook.assumed.copy()
        outlook.assumed[waits] = answers
        self.num_searches += 1
        waiting = replace(outlook.workload.select(waits), answer_tokens=answers)
        known = hardware, waiting, outlook.rest(), reason, limit_s
        self._search = Thread(target=self._seek, args=known, name="replan", daemon=True)
        self._search.start()

    def made(self) -> Change:
        """Return the change and count it as made. Raise ValueError without one."""
        change, self.change = self.change, None
        if change is None:
            raise ValueError("there is no change to make")
        self.run, self.num_changes, self._search = change.run, self.num_changes + 1, None
        self.watch.begin(0)
        return change

    def _seek(
        self,
        hardware: Hardware | None,
        waiting: Workload,
        rest: tuple[RunIntervals, np.ndarray] | None,
        reason: str,
        limit_s: float,
    ) -> None:
        """Search for a policy that ends sooner on the machine ``hardware``; set ``change`` if the gain is large enough.
        ``rest``: ``Outlook.rest``."""
        began, problem, current = time.monotonic(), self.llm.problem, self.llm.settled_policy
        problem = replace(problem, hardware=hardware)
        try:
            now = price_queue(problem, current, waiting, MOST_AT_A_TIME)
            policy, run = self._best(problem, current, waiting, limit_s)
        except InputError:  # no other policy fits
            return
        self.hardware, self.run = hardware, now
        costs = ChangeCosts(0.0, 0.0, 0.0)
        if rest is not None and now.pace and run.pace:
            costs = change_costs(*rest, now.pace, run.pace)
        left_s = run.total_s + min(costs.restart_s, costs.drain_s) + time.monotonic() - began
        if policy.weights == current.weights and left_s < (1.0 - LEAST_GAIN) * (now.total_s + costs.stay_s):
            self.change = Change(policy, run, reason, costs.restart_s < costs.drain_s)

    def _best(self, problem: Problem, current: Policy, waiting: Workload, limit_s: float) -> tuple[Policy, QueueRun]:
        """Return the best policy for the waiting requests with the same weights on the device, and its run.

        The search runs in a separate process: a thread would hold Python's interpreter lock and delay the lanes three
        times as long. Raise InputError if nothing fits, or if the search was ended.
        """
        if problem.hardware is None:
            raise InputError("the machine has no profile")
        share = current.weights.device
        settings = auto_settings(problem.hardware, waiting, weights_device=share, margin=0.0, time_limit=limit_s / 3)
        settings = replace(settings, max_batch=min(settings.max_batch, self.max_batch or settings.max_batch))
        asked = pickle.dumps((problem, waiting, settings, [current, *other_mixes(current)]))
        command = [sys.executable, "-m", "policy_search.queue_search"]
        with Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL) as self._process:
            try:
                found = self._process.communicate(asked, limit_s)[0]
            except TimeoutExpired:
                self._process.kill()
        if self._process.returncode:
            raise InputError("no policy was found")
        return pickle.loads(found)

    def end(self) -> None:
        """End a running search."""
        if self._process:
            self._process.kill()


def other_mixes(policy: Policy) -> list[Policy]:
    """Return the policy with each of ACT_SHARES in host memory, for all requests that fit.
    They complement the search, which assumes requests of one length: with little memory, the longest requests need more
    room than it assumes."""
    plain = replace(policy, attention="device", hidden="device", max_batch=None)
    shares = [{"kv@host": 1.0 - act, "act@host": act} for act in ACT_SHARES]
    return [replace(plain, name="searched", cache={k: v for k, v in mix.items() if v}) for mix in shares]
