"""The walk: the tasks of a tiny run (``sim.tiny_run``), each when its resource is free and what it waits for has ended,
with the durations of the real run, many policies at a time. What the tiny run leaves out is skipped: every resource
goes on at the pace that it has reached, and what is walked next waits for the slowest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flexhybrid.core.task import RESOURCES
from sim.tiny_run import Topology

#: Seconds of a task, or None where it has no work; and which policies have it at all (None: all of them).
TimeOf = Callable[[int, tuple], "tuple[np.ndarray | None, np.ndarray | None]"]


@dataclass(frozen=True)
class Skips:
    """What the tiny run leaves out, as numbers of rounds, [policies]."""

    inner: np.ndarray
    outer: np.ndarray
    after: dict[int, np.ndarray]  #: iteration -> how many more like it follow; fewer than none takes walked ones back
    walked: int  #: iterations of each kind in the tiny run
    #: (iteration, "inner", "last inner", "outer" or "iteration") -> seconds of one more round on its busiest resource;
    #: the last inner rounds are those of the last outer one
    least: Callable[[int, str], np.ndarray]


def walk(t: Topology, time_of: TimeOf, skips: Skips):
    """(end of the prefill, end of the run), seconds from the first task's start, [policies]."""
    ends: list = [None] * (len(t.entries) + t.num_moved)
    free_at: list = [0.0] * len(RESOURCES)
    tails = [free_at]  # free_at before each position
    sampled: dict[int, np.ndarray] = {}
    begin = 0
    for position, end in enumerate(t.ends):
        free_at = list(tails[-1])
        for index in range(begin, end):
            resource, iteration, what, waits = t.entries[index]
            seconds, there = time_of(iteration, what)
            free = done = free_at[resource]
            if seconds is None:
                if t.barriers:
                    ends[index] = free
                continue
            for other in waits:
                awaited = ends[other]
                if awaited is not None:
                    done = np.maximum(done, awaited)
            done = done + seconds
            if there is None:
                free_at[resource] = ends[index] = done
            else:
                free_at[resource] = np.where(there, done, free)
                ends[index] = free_at[resource] if t.barriers else np.where(there, done, 0.0)
            if what[0] == "sample":
                sampled[iteration] = ends[index]
        begin = end
        tails.append(free_at)
        _skip(t, position, ends, tails, skips)
        for index in t.unused_after[position]:
            ends[index] = None
    return sampled[0], sampled[max(sampled)]


def _skip(t: Topology, position: int, ends: list, tails: list, skips: Skips) -> None:
    """Move what happened lately on by what the tiny run leaves out after this position."""
    inner, outer = t.inner, t.outer
    iteration, rest = divmod(position, inner.number * outer.number)
    at_outer, at_inner = divmod(rest, inner.number)
    skipped = []
    if at_inner + 1 == inner.before:
        round_ = "last inner" if at_outer + 1 == outer.number else "inner"
        skipped.append(_moves(tails, 1, inner.before, skips.inner, skips.least(iteration, round_)))
    if at_inner + 1 == inner.number and at_outer + 1 == outer.before:
        skipped.append(_moves(tails, inner.number, outer.before, skips.outer, skips.least(iteration, "outer")))
    for moves in skipped:
        for index, name in t.moved_after.get(position, ()):
            if ends[index] is not None:
                ends[name] = ends[index] + moves[t.entries[index].resource]
        tails[-1] = [tail + move for tail, move in zip(tails[-1], moves)]
    if rest + 1 == inner.number * outer.number and iteration in skips.after:
        least = skips.least(iteration, "iteration")
        moves = _moves(tails, rest + 1, skips.walked if skips.walked > 3 else 1, skips.after[iteration], least)
        for index in range(t.ends[max(0, position - 2 * rest - 2)], t.ends[position]):
            if ends[index] is not None:
                ends[index] = ends[index] + moves[t.entries[index].resource]
        tails[-1] = [tail + move for tail, move in zip(tails[-1], moves)]


def _moves(tails: list, stride: int, rounds: int, times, least) -> list:
    """How far ``times`` more rounds of ``stride`` positions move each resource: at the pace that it has reached in the
    ``rounds`` walked.

    The pace is that of the last two rounds (slots go by turns), or of two before if that is less: what happened once,
    late, is not repeated. The first round may be a special one. Of a single round the pace is its own.
    """
    over = min(2, rounds)

    def pace_of(resource: int, back: int):
        return (tails[-1 - back * stride][resource] - tails[-1 - (back + over) * stride][resource]) / over

    paces = [pace_of(resource, 0) for resource in range(len(RESOURCES))]
    if rounds > over:
        back = min(over, rounds - over - 1)
        paces = [np.minimum(pace, pace_of(resource, back)) for resource, pace in enumerate(paces)]
    most = np.maximum(paces[0], least)  # who was idle before and catches up is no slower in the long run
    return [times * np.minimum(pace, most) for pace in paces]


def longest(*values):
    """The elementwise maximum of several arrays or numbers."""
    result = values[0]
    for value in values[1:]:
        result = np.maximum(result, value)
    return result
