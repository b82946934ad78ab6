"""Trials: run the best candidates for a few iterations, correct the machine's lines by them, and search again."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from flexhybrid.core.hardware import Hardware
from flexhybrid.core.policy import Policy
from flexhybrid.core.trace import TraceEvent
from sim.correction import corrected, times_of, with_waiting
from sim.virtual_clock import summarize_measured

MOST_ROUNDS = 3  #: searches with a corrected record
MOST_TRIED = 4  #: candidates of the first round
TIE = 0.01  #: policies whose rates differ by at most this share tie
TRIAL_ITERATIONS = 4  #: decode iterations of a candidate; the first and the last do not count
LIMIT_S = 20.0  #: seconds that all trials may take


class Priced(NamedTuple):
    """A policy's prediction."""

    tokens_per_s: float
    binding: str  #: the busiest resource


@dataclass(frozen=True)
class Trials:
    """The result of trials."""

    hardware: Hardware  #: with corrected lines
    policy: Policy  #: the final choice
    tried: dict[Policy, list[TraceEvent]]  #: trace of each candidate
    rounds: int  #: searches with a corrected record


def run_trials(
    hardware: Hardware,
    choice: Policy,
    search: Callable[[Hardware], Policy],
    price: Callable[[Hardware, Policy], Priced],
    others: Iterable[Policy],
    run: Callable[[Policy], list[TraceEvent]],
    last: int,
    limit_s: float = LIMIT_S,
) -> Trials:
    """Run candidates, correct the machine's lines by their times, and search again, until the choice stays the same.

    Candidates are ``choice``, its rivals among ``others``, and later choices; none starts after ``limit_s``. A search
    changes the choice only to a policy that is predicted to be faster by more than TIE. In the end, a candidate that
    was measured to be faster by more than TIE replaces the choice.
    ``run``: returns the trace of a few decode iterations. ``last``: as in ``TraceWindow``.
    """
    record, rounds = hardware, 0
    tried: dict[Policy, list[TraceEvent]] = {}
    wanted = [choice, *rivals(choice, {policy: price(record, policy) for policy in others})]
    while rounds < MOST_ROUNDS and any(policy not in tried for policy in wanted):
        for policy in wanted:
            if policy not in tried and (limit_s > 0 or not tried):
                tried[policy] = run(policy)
                limit_s -= tried[policy][-1].end_s - tried[policy][0].start_s
        runs = [(policy, times_of(trace, hardware.at_work(policy))) for policy, trace in tried.items()]
        record, rounds = with_waiting(corrected(hardware, runs), tried.items(), last), rounds + 1
        found = search(record)
        if price(record, found).tokens_per_s > (1 + TIE) * price(record, choice).tokens_per_s:
            choice = found
        wanted = [choice]
        if limit_s <= 0:
            break
    measured = {of: summarize_measured(trace, last).decode_tokens_per_s for of, trace in tried.items()}
    fastest = max(measured, key=lambda policy: measured[policy])
    if measured[fastest] > (1 + TIE) * measured.get(choice, math.inf):
        choice = replace(fastest, name=choice.name)
    return Trials(record, choice, tried, rounds)


def rivals(choice: Policy, others: dict[Policy, Priced]) -> list[Policy]:
    """Return up to MOST_TRIED - 1 policies to try against the choice, by prediction.
    First come the fastest policies for each limiting resource, then the fastest others."""
    ranked = sorted(others, key=lambda policy: -others[policy].tokens_per_s)
    ranked = [policy for policy in ranked if policy.cache != choice.cache]
    first = {others[policy].binding: policy for policy in reversed(ranked)}
    return list(dict.fromkeys([*first.values(), *ranked]))[: MOST_TRIED - 1]
