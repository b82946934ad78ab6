"""The best policy and batch for a queue of requests whose places are taken anew as answers end.

The search (``policy_search.search``) takes requests of one length that begin together. It is asked for the mean answer
and for the answer that a running request has on average, which is longer; where prompts share what they begin with, for
prompts of their own tokens alone and for whole ones. What it finds, and the policies that are given, are priced on the
queue itself with as many requests at a time as fit and with as many as the search took; a policy under which prompts
share nothing because hidden states lie on the host is priced with these on the device as well. Where fewer requests run
than might, because buffers are padded to the longest ones, the best are priced in smaller mini-batches too. All this is
done by a few iterations of each; those that come out near the best are then priced by more.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.refill import may_share
from flexhybrid.core.waves import batch_size
from flexhybrid.core.workload import Workload
from policy_search.search import SearchResult, SearchSettings, search
from sim.queue_clock import QueueRun, price_queue

MOST_SEARCHES = 3  #: for each length of prompts
SMALLER = (0.8, 0.6)  #: mini-batches that are tried too, where fewer requests run than might
SMALLER_OF = 2  #: of the policies found, the best, that are priced in them
FEWER = 0.75  #: of the requests that might run: where so few do, what is found for others is tried
ROUGH_TASKS = 8_000  #: of a price (``sim.queue_clock.WALKED_TASKS``) that only ranks
NEAR, MOST_NEAR = 0.05, 3  #: share by which such a price may be off, and how many that are so near the best count


@dataclass(frozen=True)
class QueueChoice:
    """A policy, whose ``max_batch`` says how many requests run at a time, and the queue's run under it."""

    policy: Policy
    run: QueueRun
    found: SearchResult | None  #: by the search; None: it was given


def best_for_queue(
    problem: Problem, workload: Workload, settings: SearchSettings, given: Iterable[Policy] = ()
) -> QueueChoice:
    """Return the policy under which the queue ends first. Raise InputError when nothing fits."""
    problem = replace(problem, budgets=problem.effective_budgets)
    error, choices = InputError("no policy was given"), list[_Ranked]()
    prompts = dict.fromkeys(max(1, round(mean)) for mean in (workload.mean_prompt, workload.prompt_tokens.mean()))
    answers = dict.fromkeys((mean_answer(workload), running_answer(workload)))
    asked = [(prompt, answer, settings.max_batch) for prompt in prompts for answer in answers]
    priced: dict[tuple[Policy, int], int] = {}  # by policy and the most requests at a time: how many that were

    def add(policy: Policy, places: int, found: SearchResult | None) -> int:
        """Price a policy with so many places, unless it was; return how many requests run at a time."""
        if (policy, places) not in priced:
            limited = replace(policy, max_batch=min(places, policy.max_batch or places))
            priced[policy, places] = places
            with suppress(InputError):  # a single request is too long for it
                size = batch_size(problem, limited, workload, places)
                run = price_queue(problem, limited, workload, places, size, ROUGH_TASKS)
                taken = replace(limited, max_batch=run.at_a_time) if found else limited
                choices.append(_Ranked(QueueChoice(taken, run, found), policy, places, size))
                priced[policy, places] = run.at_a_time
        return priced[policy, places]

    for policy in given:
        add(policy, settings.max_batch, None)
    for number in range(MOST_SEARCHES * len(prompts)):
        if number == len(asked):
            break
        prompt, answer, most = asked[number]
        try:
            found = search(problem, Workload.uniform(1, prompt, answer), replace(settings, max_batch=most))
        except InputError as refused:
            error = refused
            continue
        free = replace(found.policy, max_batch=None)  # a search limits it to the batch that it took
        at_a_time = add(free, most, found)
        if found.batch < at_a_time:
            at_a_time = add(free, found.batch, found)
        if (
            workload.prefixes
            and may_share(sharing := replace(free, hidden="device"), problem.shape)
            and sharing != free
        ):
            add(sharing, found.batch, found)
        if at_a_time < FEWER * found.batch and (prompt, answer, at_a_time) not in asked:
            asked.append((prompt, answer, at_a_time))  # the longest requests, or the limits, leave room for fewer
    for ranked in sorted((ranked for ranked in choices if ranked.choice.found), key=_seconds)[:SMALLER_OF]:
        most = min(settings.max_batch, workload.num_requests)
        if ranked.size[0] < FEWER * most:  # what is padded to the longest requests may leave no room for more
            for part in SMALLER:
                tokens = max(BLOCK_TOKENS, int(part * ranked.policy.max_mini_batch_tokens))
                add(replace(ranked.policy, max_mini_batch_tokens=tokens), settings.max_batch, ranked.choice.found)
    if not choices:
        raise error
    choices.sort(key=_seconds)
    near = [ranked for ranked in choices[:MOST_NEAR] if _seconds(ranked) <= (1 + NEAR) * _seconds(choices[0])]
    return min((ranked.exact(problem, workload) for ranked in near), key=lambda choice: choice.run.total_s)


class _Ranked(NamedTuple):
    """A choice, roughly priced."""

    choice: QueueChoice
    policy: Policy  #: without the limit of its requests
    places: int  #: requests at a time, at most
    size: tuple[int, float]  #: ``batch_size`` of them

    def exact(self, problem: Problem, workload: Workload) -> QueueChoice:
        """Return the choice with a price from more iterations."""
        run = price_queue(problem, self.choice.policy, workload, self.places, self.size)
        return replace(self.choice, run=run)


def _seconds(ranked: _Ranked) -> float:
    return ranked.choice.run.total_s


def mean_answer(workload: Workload) -> int:
    """Return the tokens of the mean answer."""
    return max(1, round(float(workload.answers.mean())))


def running_answer(workload: Workload) -> int:
    """Return the tokens of the answer that a running request has on average: a long one runs for longer."""
    answers = workload.answers.astype(float)
    return max(1, round(float(np.square(answers).sum() / answers.sum())))
