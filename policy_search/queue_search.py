"""The best policy and batch for a queue whose places are refilled as answers end.

``policy_search.search`` takes equal requests that begin together. It runs for the mean answer and for the mean
remaining answer of a running request, which is longer; with shared prefixes, for prompts without them and whole ones.
Its results and the given policies are priced on the queue itself, with the most requests that fit and with the search's
batch; where hidden states on the host prevent sharing, also with these on the device. If padding keeps requests from
running, they are also priced with other mini-batches. Prices come from a few iterations each, then from more for
those near the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import NamedTuple

import numpy as np

from flexhybrid.core.admission import Places, batch_size
from flexhybrid.core.context.blocks import BlockEntries
from flexhybrid.core.context.packing import padded_tokens, split_representations
from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.scheduler import may_share
from flexhybrid.core.workload import Workload
from policy_search.search import SearchResult, SearchSettings, search
from sim.queue_clock import ROUGH_TASKS, QueueRun, least_seconds, price_queue

SMALLER, MOST_SIZES = 0.75, 3  #: factor between the mini-batches that are tried, and how often up and down
FEWER = 0.75  #: of the requests that might run: where so few do, other mini-batches are tried
NEAR, MOST_NEAR = 0.03, 2  #: share by which such a price may be off, and how many that are so near the best count


@dataclass(frozen=True)
class QueueChoice:
    """A policy, whose ``max_batch`` is the number of running requests, and the queue's run under it."""

    policy: Policy
    run: QueueRun
    found: SearchResult | None  #: by the search; None: it was given


def best_for_queue(
    problem: Problem, workload: Workload, settings: SearchSettings, given: Iterable[Policy] = (), rough: bool = False
) -> QueueChoice:
    """Return the policy under which the queue ends first. ``rough``: its price may be, which saves a second. Raise
    InputError when nothing fits."""
    problem = replace(problem, budgets=problem.effective_budgets)
    ranking = _Ranking(problem, workload)
    prompts = dict.fromkeys(max(1, round(mean)) for mean in (workload.mean_prompt, workload.prompt_tokens.mean()))
    answers = dict.fromkeys((mean_answer(workload), running_answer(workload)))
    for prompt, answer in product(prompts, answers):
        try:
            found = search(problem, Workload.uniform(1, prompt, answer), settings)
        except InputError as refused:
            ranking.error = refused
            continue
        free = replace(found.policy, max_batch=None)  # a search limits it to the batch that it took
        if found.batch < ranking.add(free, settings.max_batch, found):
            ranking.add(free, found.batch, found)
        if (
            workload.prefixes
            and may_share(sharing := replace(free, hidden="device"), problem.shape)
            and sharing != free
        ):
            ranking.add(sharing, found.batch, found)
    for policy in given:
        ranking.add(policy, settings.max_batch, None)
    if not ranking.choices:
        raise ranking.error
    ranking.try_sizes(settings.max_batch)
    return ranking.best(rough)


class _Ranked(NamedTuple):
    """A choice, roughly priced."""

    choice: QueueChoice
    policy: Policy  #: without the limit of its requests
    places: int  #: requests at a time, at most
    size: Places  #: of them

    def exact(self, problem: Problem, workload: Workload) -> QueueChoice:
        """Return the choice with a price from more iterations."""
        run = price_queue(problem, self.choice.policy, workload, self.places, self.size)
        return replace(self.choice, run=run)


def _seconds(ranked: _Ranked) -> float:
    return ranked.choice.run.total_s


class _Ranking:
    """Policies, roughly priced on a queue."""

    def __init__(self, problem: Problem, workload: Workload):
        self.problem, self.workload = problem, workload
        self.choices: list[_Ranked] = []
        self.priced: dict[tuple[Policy, int], int] = {}  #: by policy and most requests at a time: how many these were
        self.error = InputError("no policy was given")  #: of the latest one that does not fit

    def add(self, policy: Policy, places: int, found: SearchResult | None, size: Places | None = None) -> int:
        """Price a policy with this number of places, of which ``size`` run if that is known, unless it was priced or
        cannot come near the best; return how many requests run."""
        key, limited = (policy, places), replace(policy, max_batch=min(places, policy.max_batch or places))
        if key in self.priced:
            return self.priced[key]
        self.priced[key] = places
        try:
            size = size or batch_size(self.problem, limited, self.workload, places)
            self.priced[key], best = size.count, min(map(_seconds, self.choices), default=np.inf)
            if least_seconds(self.problem, limited, self.workload, size.count) > (1 + NEAR) * best:
                return size.count
            run = price_queue(self.problem, limited, self.workload, places, size, ROUGH_TASKS)
        except InputError as too_long:  # a single request, for it
            self.error = too_long
            return places
        taken = replace(limited, max_batch=run.at_a_time) if found else limited
        self.choices.append(_Ranked(QueueChoice(taken, run, found), policy, places, size))
        self.priced[key] = run.at_a_time
        return run.at_a_time

    def try_sizes(self, places: int) -> None:
        """Where padding limits the running requests, price found policies also with mini-batches that leave room for
        the search's batch, and the best with larger and smaller ones, while they are better."""
        most, limited = min(places, self.workload.num_requests), False
        for ranked in tuple(self.choices):
            if (found := ranked.choice.found) and ranked.size.count < (enough := FEWER * min(found.batch, most)):
                limited = True
                for policy in self._with_sizes(ranked.policy, SMALLER):
                    if (size := batch_size(self.problem, policy, self.workload, places)).count >= enough:
                        self.add(policy, places, found, size)
                        break
        best = min(self.choices, key=_seconds)
        if limited and best.choice.found:
            for factor in (1 / SMALLER, SMALLER):
                for policy in islice(self._with_sizes(best.policy, factor), MOST_SIZES):
                    before = min(self.choices, key=_seconds)
                    self.add(policy, places, best.choice.found)
                    if min(self.choices, key=_seconds) is before:
                        break

    def _with_sizes(self, policy: Policy, factor: float) -> Iterator[Policy]:
        """Yield the policy with mini-batches of ``factor`` times its tokens, of that times ``factor``, …; the least
        holds the longest request."""
        longest = self.workload.cached_tokens.max(keepdims=True)
        width = padded_tokens(*split_representations(BlockEntries(policy.cache), longest))
        while (tokens := max(width, int(factor * policy.max_mini_batch_tokens))) != policy.max_mini_batch_tokens:
            yield (policy := replace(policy, max_mini_batch_tokens=tokens))

    def best(self, rough: bool) -> QueueChoice:
        """Return the best by a more exact price, among those near it."""
        self.choices.sort(key=_seconds)
        near = [
            ranked for ranked in self.choices[:MOST_NEAR] if _seconds(ranked) <= (1 + NEAR) * _seconds(self.choices[0])
        ]
        if rough and len(near) == 1:
            return near[0].choice
        return min(
            (ranked.exact(self.problem, self.workload) for ranked in near), key=lambda choice: choice.run.total_s
        )


def mean_answer(workload: Workload) -> int:
    """Return the tokens of the mean answer."""
    return max(1, round(float(workload.answers.mean())))


def running_answer(workload: Workload) -> int:
    """Return the tokens of the answer that a running request has on average: a long one runs for longer."""
    answers = workload.answers.astype(float)
    return max(1, round(float(np.square(answers).sum() / answers.sum())))
