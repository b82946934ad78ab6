"""Find the best policy and batch for a queue, in which a request starts when another one ends.

``policy_search.search`` assumes equal requests that start together. It runs for two answer lengths: the mean answer,
and the mean over running requests, which is longer. With shared prefixes, it runs for prompts with and without them.
The policies that it finds, and given policies, are then priced on the queue:

- with the most requests that fit, and with the search's batch;
- with hidden states on the device, if hidden states on the host prevent sharing;
- with other mini-batch sizes, if padding limits the number of running requests.

Each price comes from a few iterations; policies near the best are priced again from more.
"""

from __future__ import annotations

import pickle
import sys
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

SMALLER, MOST_SIZES = 0.75, 3  #: factor between mini-batch sizes, and most larger and most smaller sizes that are tried
FEWER = 0.75  #: other mini-batch sizes are tried if fewer than this share of the possible requests run
NEAR, MOST_NEAR = 0.03, 2  #: relative error of a price from few iterations; most policies that are priced again


@dataclass(frozen=True)
class QueueChoice:
    """A policy for a queue and the queue's predicted run."""

    policy: Policy  #: its ``max_batch`` is the number of requests that run together
    run: QueueRun
    found: SearchResult | None  #: the search that found the policy; None: it was given


def best_for_queue(
    problem: Problem, workload: Workload, settings: SearchSettings, given: Iterable[Policy] = (), rough: bool = False
) -> QueueChoice:
    """Return the policy under which the queue ends first. ``rough``: skip the second, more accurate price if no other
    policy is near, which saves a second. Raise InputError if nothing fits."""
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
        free = replace(found.policy, max_batch=None)  # the search sets max_batch to its own batch
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
    """A choice that is priced from a few iterations."""

    choice: QueueChoice
    policy: Policy  #: the policy without ``max_batch``
    places: int  #: most requests that may run together
    size: Places  #: requests that run together


def _seconds(ranked: _Ranked) -> float:
    return ranked.choice.run.total_s


class _Ranking:
    """Policies that are priced on a queue, from a few iterations each."""

    def __init__(self, problem: Problem, workload: Workload):
        self.problem, self.workload = problem, workload
        self.choices: list[_Ranked] = []
        self.priced: dict[tuple[Policy, int], int] = {}  # (policy, places) -> requests that run together
        self.error = InputError("no policy was given")  # error of the latest policy that does not fit

    def add(self, policy: Policy, places: int, found: SearchResult | None, size: Places | None = None) -> int:
        """Price a policy with at most ``places`` requests together; return the number that run together. It is not
        priced again, and not priced if its lower bound is not near the best. ``size``: the known ``Places``."""
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
        except InputError as too_long:  # one request is too long for the policy
            self.error = too_long
            return places
        taken = replace(limited, max_batch=run.at_a_time) if found else limited
        self.choices.append(_Ranked(QueueChoice(taken, run, found), policy, places, size))
        self.priced[key] = run.at_a_time
        return run.at_a_time

    def try_sizes(self, places: int) -> None:
        """If padding limits the number of running requests, price other mini-batch sizes. Found policies get the
        largest size that leaves room for most of the search's batch. The best policy then gets larger and smaller sizes
        while they are better."""
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
        """Yield the policy with mini-batches of ``factor``, ``factor``², … times its tokens. The smallest size that is
        tried holds just the longest request."""
        longest = self.workload.cached_tokens.max(keepdims=True)
        width = padded_tokens(*split_representations(BlockEntries(policy.cache), longest))
        while (tokens := max(width, int(factor * policy.max_mini_batch_tokens))) != policy.max_mini_batch_tokens:
            yield (policy := replace(policy, max_mini_batch_tokens=tokens))

    def best(self, rough: bool) -> QueueChoice:
        """Return the best choice. Choices near it are priced again from more iterations first."""
        self.choices.sort(key=_seconds)
        limit = (1 + NEAR) * _seconds(self.choices[0])
        near = [ranked for ranked in self.choices[:MOST_NEAR] if _seconds(ranked) <= limit]
        if rough and len(near) == 1:
            return near[0].choice
        runs = (price_queue(self.problem, one.choice.policy, self.workload, one.places, one.size) for one in near)
        priced = [replace(one.choice, run=run) for one, run in zip(near, runs, strict=True)]
        return min(priced, key=lambda choice: choice.run.total_s)


def mean_answer(workload: Workload) -> int:
    """Return the tokens of the mean answer."""
    return max(1, round(float(workload.answers.mean())))


def running_answer(workload: Workload) -> int:
    """Return the mean answer tokens of a running request. Long answers run for longer, so they have more weight."""
    answers = workload.answers.astype(float)
    return max(1, round(float(np.square(answers).sum() / answers.sum())))


if __name__ == "__main__":  # a process that searches during a run (``jobs.run.replanning``), from stdin to stdout
    asked = pickle.load(sys.stdin.buffer)
    try:
        best = best_for_queue(*asked)
    except InputError:
        sys.exit(1)
    pickle.dump((best.policy, best.run), sys.stdout.buffer)
