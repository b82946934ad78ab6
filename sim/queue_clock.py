"""Prices a queue whose places are refilled as answers end, in about a second for any length.

``sim.queue_counts`` counts which requests run in which iteration. A few iterations are walked on the virtual clock,
with the planner's own tasks. Their work per resource gives that of the others in proportion to requests, context tokens
and prompts. An iteration takes its busiest resource's time, times the walked iterations' ratio of the two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from flexhybrid.core.admission import Places, batch_size, open_batch
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.packing import chunk_tokens
from flexhybrid.core.context.prefixes import Build, PromptTree, SharedBlocks
from flexhybrid.core.context.selection import num_whole
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.positions import Stops
from flexhybrid.core.schedule.scheduler import stores_exactly
from flexhybrid.core.task import Task
from flexhybrid.core.trace import TraceEvent, iteration_ends
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Prefixes, Workload
from sim import virtual_clock
from sim.array_clock import predict
from sim.candidates import Candidates
from sim.cost import hardware_of_wave
from sim.queue_counts import RunIntervals, intervals
from sim.template_run import layer_loop

MOST_COUNTED = 3_000  #: requests; a longer queue is sampled
ROUGH_COUNTED = 1_000  #: likewise, for a price that only ranks
RUN = 64  #: of them, consecutive ones
WALKED_TASKS = 40_000  #: tasks of a price: about a second
ROUGH_TASKS, ROUGH_WINDOWS = 8_000, 12  #: tasks of a price that only ranks
LEAST_WINDOWS, MOST_WINDOWS = 5, 60  #: pairs of iterations that are walked
THINNED = 2  #: iterations with many joins walked again with fewer, if answers may end early
WALKED_LAYERS, PACE_LAYERS = 6, 2  #: walked layers of a model, and those that give the rate of the others
MIXED_POSITIONS = 3  #: mini-batches for which ``layer_loop`` counts the walked layers of several kinds
MANY_MINI_BATCHES = 16  #: if more share a layer, two layers fewer show the rate
PHASES = ("ramp", "steady", "drain")


@dataclass(frozen=True)
class Phase:
    """A phase of a queue: until a place is first refilled; until no request waits; until the end."""

    iterations: float
    seconds: float
    tokens: float  #: generated
    running: float  #: running requests, mean over iterations

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class IterationCost:
    """Cost of an iteration in seconds, from what it does."""

    factors: dict[str, np.ndarray]  #: resource -> seconds of work per unit of each of ``iteration_loads``
    num_mini_batches: int
    waiting: tuple[float, float]  #: ratio to the busiest resource, without and with joining requests
    exact: bool = True  #: ``SharedBlocks.exact``: shared blocks are computed once

    def seconds(
        self, counted: RunIntervals, prefixes: Prefixes | None = None, cached: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the seconds of each iteration of these intervals, of requests that share ``prefixes``. ``cached``
        [intervals]: contexts that need no computation (None: none)."""
        loads = iteration_loads(counted, self.num_mini_batches, prefixes, self.exact, cached)
        longest = np.max(list(self._work(loads).values()), axis=0)
        return longest * np.where(loads[:, JOINING] > 0, self.waiting[1], self.waiting[0])

    def slowed(self, times: Mapping[str, float]) -> IterationCost:
        """Return the cost on a machine whose resources take ``times`` as long."""
        return replace(self, factors={r: times.get(r, 1.0) * factors for r, factors in self.factors.items()})

    def work(self, counted: RunIntervals, prefixes: Prefixes | None = None) -> dict[str, np.ndarray]:
        """Return resource -> seconds of its work in each iteration."""
        return self._work(iteration_loads(counted, self.num_mini_batches, prefixes, self.exact))

    def _work(self, loads: np.ndarray) -> dict[str, np.ndarray]:
        return {resource: loads @ factors for resource, factors in self.factors.items()}


JOINING = 5  #: column of ``iteration_loads``


def iteration_loads(
    counted: RunIntervals,
    num_mini_batches: int,
    prefixes: Prefixes | None = None,
    exact: bool = True,
    cached: np.ndarray | None = None,
) -> np.ndarray:
    """Return the loads of each iteration, [iterations, loads]: 1, decode steps, prompt steps, decoding requests, their
    own context tokens, joining requests, computed prompt tokens, pairs that these attend to, shared context tokens
    attended to, and loaded.

    ``exact``: see ``IterationCost``; ``cached``: see ``IterationCost.seconds``.
    """
    ones = np.ones(len(counted.request)) if cached is None else 1.0 - cached
    tokens = counted.prompt_tokens.astype(float)
    shared, found = counted.shared_tokens.astype(float), counted.found_tokens * float(exact)
    running, joining = counted.per_iteration(), counted.joining(ones)  # requests whose prompts are computed
    iterations, steps = np.arange(len(running)), np.zeros((2, len(running)))
    attended = counted.per_iteration(shared) - counted.joining(shared * ones)
    own = tokens - shared
    context = counted.per_iteration(own - counted.joined) + running * iterations - counted.joining(own * ones)
    for k in range(num_mini_batches):
        of_group = counted.mini_batch == k
        if of_group.any():
            part, computes = counted.select(of_group), ones[of_group]
            present, begins = part.per_iteration(), part.joining(computes)
            builds = part.joining(exact * computes * (part.found_tokens < part.shared_tokens))
            steps[0, : len(present)] += present > begins
            steps[1, : len(begins)] += (begins > 0).astype(float) + (builds > 0)
    columns = (
        np.ones(len(running)),
        *steps,
        running - joining,
        context,
        joining,
        counted.joining((tokens - found) * ones),
        counted.joining((tokens**2 - found**2) * ones),
        attended,
        counted.loads_of_shared(prefixes),
    )
    return np.stack(columns, axis=1)


@dataclass(frozen=True)
class QueueRun:
    """A queue's predicted run. Arrays [iterations]; of a sampled queue an iteration stands for ``times`` as many."""

    seconds: np.ndarray
    running: np.ndarray  #: requests
    tokens: np.ndarray  #: generated
    steady_from: int  #: first iteration that refilled a place
    drain_from: int  #: first iteration without waiting requests
    times: np.ndarray
    busy: dict[str, float]  #: resource -> share of the time
    at_a_time: int  #: places
    pace: IterationCost | None = None  #: prices other lengths; None on the virtual clock
    preemptions: float = 0.0  #: number of preemptions
    #: upper bound of the time share of recomputing preempted contexts: what free swapping would save
    recomputing: float = 0.0

    @property
    def phases(self) -> dict[str, Phase]:
        begins, ends = (0, self.steady_from, self.drain_from), (self.steady_from, self.drain_from, len(self.seconds))
        phases = {}
        for name, begin, end in zip(PHASES, begins, ends, strict=True):
            times = self.times[begin:end]
            seconds, tokens = (float(times @ of[begin:end]) for of in (self.seconds, self.tokens))
            running = float(self.running[begin:end].mean()) if end > begin else 0.0
            phases[name] = Phase(float(times.sum()), seconds, tokens, running)
        return phases

    @property
    def total_s(self) -> float:
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def total_tokens(self) -> float:
        return sum(phase.tokens for phase in self.phases.values())

    @property
    def tokens_per_s(self) -> float:
        return self.total_tokens / max(self.total_s, 1e-300)

    @property
    def binding(self) -> str:
        """The busiest resource."""
        return max(self.busy, key=lambda resource: self.busy[resource])


def price_queue(
    problem: Problem,
    policy: Policy,
    workload: Workload,
    at_most: int,
    places: Places | None = None,
    walked_tasks: int = WALKED_TASKS,
) -> QueueRun:
    """Price requests that run at most ``at_most`` at a time, in this order, with answers of ``workload.answers``.
    ``places``: their ``batch_size``, if known. ``walked_tasks``: fewer are faster and rougher.

    Raise InputError if not one request fits the budgets, or a verb has no line.
    """
    places = places or batch_size(problem, policy, workload, at_most)
    few, times = _thinned(workload, places.count, MOST_COUNTED if walked_tasks >= WALKED_TASKS else ROUGH_COUNTED)
    wave = open_batch(problem, policy, few, places)
    return _Price(wave, few, times).run(walked_tasks)


def least_seconds(problem: Problem, policy: Policy, workload: Workload, at_a_time: int) -> float:
    """Return a lower bound in seconds: each resource's work in the fewest iterations. 0 if prompts share beginnings."""
    if workload.prefixes is not None:
        return 0.0
    answers, prompts = workload.answers.astype(float), workload.prompt_tokens
    # Loads grow with the context in each iteration: the mean over running requests, not over all.
    prompt = max(1.0, min(prompts.mean(), prompts @ answers / answers.sum()) - BLOCK_TOKENS)
    wave = Candidates(policy, at_a_time, prompt, max(1.0, np.floor(answers.mean())))
    return float(predict(problem, wave, walk=False).least_s[0]) * workload.num_requests / at_a_time


def walk_queue(problem: Problem, policy: Policy, workload: Workload, at_most: int) -> QueueRun:
    """Price a queue on the virtual clock, task by task. Requests too large for the batch's buffers run in a batch after
    it, as in a run."""
    left, runs, begun = np.arange(workload.num_requests), [], []
    while len(left):
        lengths = workload.select(left)
        places = batch_size(problem, policy, lengths, at_most)
        wave = open_batch(problem, policy, lengths, places)
        trace = virtual_clock.run(virtual_clock.answered(wave, lengths.answers), hardware_of_wave(wave))
        runs.append(_of_trace(trace, lengths, places.count))
        begun.append(sum(len(run.seconds) for run in runs[:-1]))
        left = left[wave.queue.waiting] if wave.queue else left[:0]
    seconds, running, tokens = (
        np.concatenate([getattr(run, name) for run in runs]) for name in ("seconds", "running", "tokens")
    )
    resources = dict.fromkeys(resource for run in runs for resource in run.busy)
    return QueueRun(
        seconds=seconds,
        running=running,
        tokens=tokens,
        steady_from=runs[0].steady_from or (begun[1] if len(runs) > 1 else 0),
        drain_from=begun[-1] + runs[-1].drain_from,
        times=np.ones(len(seconds)),
        busy={r: sum(run.busy.get(r, 0.0) * run.total_s for run in runs) / seconds.sum() for r in resources},
        at_a_time=runs[0].at_a_time,
    )


def _of_trace(trace: list[TraceEvent], workload: Workload, count: int) -> QueueRun:
    seconds = np.diff(iteration_ends(trace), prepend=0.0)
    running, tokens = np.zeros((2, len(seconds)))
    given = np.zeros(workload.num_requests, np.int64)
    joined: dict[int, int] = {}
    work: dict[str, float] = {}
    for task, start, end in trace:
        work[task.resource] = work.get(task.resource, 0.0) + end - start
        if task.verb == "sample":
            requests = task.payload.step.queued
            running[task.iteration] += len(requests)
            tokens[task.iteration] += np.count_nonzero(given[requests] < workload.answers[requests])
            given[requests] += 1
            for request in requests.tolist():
                joined.setdefault(request, task.iteration)
    return QueueRun(
        seconds=seconds,
        running=running,
        tokens=tokens,
        **_bounds(np.array(list(joined.values())), len(seconds)),
        times=np.ones(len(seconds)),
        busy={resource: spent / seconds.sum() for resource, spent in work.items()},
        at_a_time=count,
    )


def _bounds(joined: np.ndarray, num_iterations: int) -> dict[str, Any]:
    """Return where the steady part begins and ends; without one, the first end of an answer, as all of it is drain."""
    later = joined[joined > 0]
    if not len(later):
        return {"steady_from": 0, "drain_from": 0}
    return {"steady_from": int(later.min()), "drain_from": min(int(later.max()) + 1, num_iterations)}


def evenly_spaced(count: int, most: int, in_runs: bool) -> np.ndarray:
    """Return about ``most`` of ``count`` places, evenly spread; ``in_runs``: consecutive ones, because neighbours share
    prefixes."""
    if not in_runs:
        return np.linspace(0, count - 1, most).astype(np.int64)
    runs = np.linspace(0, count - RUN, most // RUN).astype(np.int64)
    return np.unique(runs[:, None] + np.arange(RUN))


def _thinned(workload: Workload, count: int, most: int) -> tuple[Workload, float]:
    """Return about ``most`` requests of a long queue, of which ``count`` run at a time, and the thinning factor.

    All of the first requests are kept, which decide how the batch is cut into mini-batches, and of the last, with which
    it drains. Those between are sampled evenly, in contiguous runs if requests share prefixes.
    """
    last = workload.num_requests - count
    most = max(most, 8 * count)
    if workload.num_requests <= most:
        return workload, 1.0
    between = count + evenly_spaced(last - count, most - 2 * count, workload.prefixes is not None)
    chosen = np.r_[:count, between, last : workload.num_requests]
    return workload.select(chosen), float(workload.answers.sum() / workload.answers[chosen].sum())


class _Walk:
    """Walks single iterations of a queue on the virtual clock."""

    def __init__(self, wave: Wave, workload: Workload):
        self.wave, self.workload, self.num_tasks = wave, workload, 0
        self.hardware = hardware_of_wave(wave)
        self.intervals = intervals(wave, workload)  # changes the wave
        self.layers, self.late, self.pace_layers = self._walked_layers()
        self.more_layers = wave.shape.num_layers - len(self.layers)

    def _walked_layers(self) -> tuple[list[int], int, int]:
        """Return the walked layers, the last of them whose rate the others have, and the number of such layers: two, or
        the period of kinds of layers."""
        wave, shape = self.wave, self.wave.shape
        whole, kinds = num_whole(wave.policy.selection, shape.num_layers), list(dict.fromkeys(shape.layer_kinds))
        if len(kinds) == 1:
            few = WALKED_LAYERS - PACE_LAYERS * (len(wave.mini_batches) > MANY_MINI_BATCHES)
            count = min(shape.num_layers, whole + few)
            return list(range(count)), count - 2, PACE_LAYERS
        loop = layer_loop(tuple(map(kinds.index, shape.layer_kinds)), MIXED_POSITIONS, whole)
        before, layers = loop.before_skip or shape.num_layers, list(range(shape.num_layers))
        more = shape.num_layers - loop.num_rounds
        return layers[:before] + layers[before + more :], before - 1, loop.pace_rounds

    def around(self, start: int) -> np.ndarray:
        """Return the intervals of iterations ``start`` to ``start`` + 2."""
        return np.flatnonzero((self.intervals.joined <= start + 2) & (self.intervals.left > start))

    def walked(self, start: int, chosen: np.ndarray) -> dict[int, tuple[float, dict[str, float]]]:
        """Walk iterations ``start`` and ``start`` + 1 of some intervals, and the beginning of the next one. Return the
        seconds of the second, whose end does not depend on how the first began, and of iteration 0; and each resource's
        work in them."""
        wave, stops = self._members(start, chosen)

        def both(task: Task) -> bool:
            return task.iteration <= start + 1 or task.verb != "finish"

        tasks = takewhile(both, stream(wave, stops, first_iteration=start))
        trace = virtual_clock.run(tasks, self.hardware)
        self.num_tasks = len(trace)
        ends, walked = np.diff(iteration_ends(trace), prepend=0.0), {}
        for iteration, seconds in list(enumerate(ends, start=start))[:2]:
            if iteration > start or not iteration:
                of_iteration = [event for event in trace if event.task.iteration == iteration]
                in_all = float(seconds) + self.more_layers * self._pace(of_iteration)
                walked[iteration] = in_all, self._work(of_iteration)
        return walked

    def _members(self, start: int, chosen: np.ndarray) -> tuple[Wave, Stops]:
        """Return the batch of some intervals in iterations ``start`` to ``start`` + 2, and the requests that leave
        before each."""
        all_intervals, wave = self.intervals, self.wave
        of_group = (np.flatnonzero(all_intervals.mini_batch[chosen] == k) for k in range(len(wave.mini_batches)))
        groups = [group for group in of_group if len(group)]
        requests, left = all_intervals.request[chosen], all_intervals.left[chosen]
        given = all_intervals.prompt_tokens[chosen] - self.workload.prompt_tokens[requests]
        lengths = Workload(all_intervals.prompt_tokens[chosen], self.workload.max_tokens[requests] - given)
        problem = replace(wave.problem, shape=wave.shape.of_layers(self.layers))
        depth = all_intervals.shared_tokens[chosen] // BLOCK_TOKENS
        shared = depth if depth.any() else None
        room = {} if shared is None else dict.fromkeys(wave.entries.names, int(depth.max()) * len(depth))
        members = admit(problem, wave.policy, lengths, mini_batches=groups, shared=shared, room=room)
        joined = all_intervals.joined[chosen]
        members = replace(members, joined=joined, whole=members.whole and replace(members.whole, joined=joined))
        if depth.any():
            members = replace(members, sharing=self._shared(members, room, chosen, start))

        def until(iteration: int, _num_steps: int) -> Collection[int]:
            return set(np.flatnonzero(left <= iteration).tolist())

        may_come = bool((self.workload.answers < self.workload.max_tokens).any())
        return members, Stops(until, lambda requests: may_come and bool(requests))

    def _shared(self, members: Wave, room: dict[str, int], chosen: np.ndarray, start: int) -> SharedBlocks:
        """Return the shared blocks of the chosen intervals, including those computed from iteration ``start`` on."""
        prefixes, counted = self.workload.prefixes, self.intervals.select(chosen)
        if prefixes is None:
            raise ValueError("requests share unknown blocks")
        paths = [
            prefixes.blocks(int(prefixes.of_request[request]))[: tokens // BLOCK_TOKENS].tolist()
            for request, tokens in zip(counted.request.tolist(), counted.shared_tokens.tolist(), strict=True)
        ]
        piece = chunk_tokens(members.policy.max_mini_batch_tokens) // BLOCK_TOKENS
        tree, exact = PromptTree(lambda _: None), stores_exactly(members.policy)
        sharing = SharedBlocks(tree, members.entries, room, len(paths), piece, exact)
        for place, path in enumerate(paths):
            sharing.attach(place, path)
        sharing.take_builds(range(len(paths)))
        sharing.stored_before[:] = counted.found_tokens // BLOCK_TOKENS
        for place in np.flatnonzero(
            (counted.joined >= start) & (counted.found_tokens < counted.shared_tokens)
        ).tolist():
            first, last = int(counted.found_tokens[place]) // BLOCK_TOKENS, len(paths[place])
            pieces = enumerate(range(first, last, piece), start=first)
            sharing.builds += [Build(place, at, min(at + piece, last), level) for level, at in pieces]
        return sharing

    def _pace(self, events: list[TraceEvent]) -> float:
        """Return the seconds of one more layer: those of the last ones walked, over all mini-batches, together or (row
        schedule) one after another."""
        if not self.more_layers:
            return 0.0
        late, early = self.late, self.late - self.pace_layers
        ends: dict[tuple, float] = {}
        by_row = self.wave.policy.schedule == "row"
        for task, _, end in events:
            if task.verb == "finish" and task.layer in (late, early):
                key = (task.mini_batch if by_row else 0), task.layer
                ends[key] = max(end, ends.get(key, 0.0))
        return sum(end - ends[k, early] for (k, layer), end in ends.items() if layer == late) / self.pace_layers

    def _work(self, events: list[TraceEvent]) -> dict[str, float]:
        """Return resource -> seconds of its tasks, of all layers."""
        work: dict[str, float] = {}
        late, pace = self.late, self.pace_layers
        for task, start, end in events:
            repeats = self.more_layers / pace if late - pace < task.layer <= late else 0.0
            work[task.resource] = work.get(task.resource, 0.0) + (1.0 + repeats) * (end - start)
        return work


class _Price:
    """The iterations of a queue, some of them walked."""

    def __init__(self, wave: Wave, workload: Workload, times: float):
        self.wave, self.workload, self.times = wave, workload, times
        self.walk = _Walk(wave, workload)
        self.intervals = self.walk.intervals
        self.num_iterations = self.intervals.num_iterations
        self.bounds = _bounds(self.intervals.joined, self.num_iterations)
        self.exact = stores_exactly(wave.policy)
        computed = self.intervals.prompt_tokens - self.intervals.found_tokens * self.exact
        self.joining_tokens = self.intervals.joining(computed.astype(float))
        self.walked: dict[int, float] = {}  # iteration -> seconds
        self.work: dict[int, dict[str, float]] = {}  # iteration -> resource -> seconds of work
        #: of iterations walked with fewer joins: their loads, ``work``, and ``walked``
        self.thinner: list[tuple[np.ndarray, dict[str, float], float]] = []

    def run(self, walked_tasks: int) -> QueueRun:
        self._walk(0)
        per_window = max(1, self.walk.num_tasks)
        only_ranks = walked_tasks < WALKED_TASKS
        least, most = (1, ROUGH_WINDOWS) if only_ranks else (LEAST_WINDOWS, MOST_WINDOWS)
        windows = self._windows(int(np.clip(walked_tasks // per_window, least, most)))
        for start in windows:
            self._walk(start)
        if self.workload.answer_tokens is None and not only_ranks:
            self._walk_thinner(windows)
        seconds, work, pace = self._spread()
        running = self.intervals.per_iteration()
        surplus = np.bincount(self.intervals.left[self.intervals.surplus] - 1, minlength=self.num_iterations)
        tokens = running - surplus
        return QueueRun(
            seconds=seconds,
            running=running,
            tokens=tokens,
            **self.bounds,
            times=self._times(tokens),
            # Both are interpolated between walked iterations, independently.
            busy={resource: min(1.0, float(spent.sum() / seconds.sum())) for resource, spent in work.items()},
            at_a_time=self.wave.workload.num_requests,
            pace=pace,
            preemptions=self.times * float(self.intervals.returned.sum()),
            recomputing=self._recomputing(pace),
        )

    def _times(self, tokens: np.ndarray) -> np.ndarray:
        """Return how many iterations each stands for: more than one from when the first requests have left until the
        last ones join (``_thinned``)."""
        times, counted, count = np.ones(len(tokens)), self.intervals, self.wave.workload.num_requests
        if self.times > 1:
            begin = int(counted.left[counted.request < count].max())
            end = int(counted.joined[counted.request >= self.workload.num_requests - count].min())
            inside = slice(begin, end) if begin < end else slice(*self.bounds.values())
            times[inside] += (self.times - 1.0) * tokens.sum() / max(tokens[inside].sum(), 1.0)
        return times

    def _recomputing(self, pace: IterationCost) -> float:
        """Return ``QueueRun.recomputing``."""
        if not (returned := self.intervals.returned).any():
            return 0.0
        computed, cached = (pace.seconds(self.intervals, self.workload.prefixes, of) for of in (None, returned))
        return float(np.maximum(computed - cached, 0.0).sum() / computed.sum())

    def _windows(self, count: int) -> list[int]:
        """Return the iterations to walk: evenly over each phase, and in each part of it one with many joins."""
        if self.num_iterations - 1 <= count:
            return list(range(1, self.num_iterations - 1))
        begin, end = self.bounds.values()
        chosen: set[int] = set()
        for first, last, share in ((1, begin, 0.2), (max(begin, 1), end, 0.5), (max(end, 1), self.num_iterations, 0.3)):
            if last <= first:
                continue
            parts = max(2 if count >= LEAST_WINDOWS else 1, int(share * count / 2))
            edges = np.linspace(first, last, parts + 1).astype(int)
            for low, high in zip(edges, edges[1:]):
                if high > low:
                    chosen |= {int(low + high) // 2, low + int(self.joining_tokens[low:high].argmax())}
            chosen |= {last - 1} if count >= LEAST_WINDOWS else set()
        return sorted(iteration - 1 for iteration in chosen if iteration > 1)

    def _walk(self, start: int) -> None:
        """Walk iterations ``start`` and ``start`` + 1."""
        for iteration, (seconds, work) in self.walk.walked(start, self.walk.around(start)).items():
            self.walked[iteration], self.work[iteration] = seconds, work

    def _walk_thinner(self, windows: list[int]) -> None:
        """Walk the iterations with the most joins again, with fewer. If answers end early, requests join one by one; at
        their limits many join at once, which does not separate the cost of a join from that of a step."""
        counts = {start: int((self.intervals.joined == start + 1).sum()) for start in windows}
        for start in sorted((start for start in windows if counts[start] > 1), key=counts.__getitem__)[-THINNED:]:
            around = self.walk.around(start)
            joining = around[self.intervals.joined[around] == start + 1]
            others = around[self.intervals.joined[around] <= start]
            for kept in {1, -(-len(joining) // 4)}:  # the first of them: others share their blocks
                chosen = np.sort(np.r_[others, joining[np.linspace(0, len(joining) - 1, kept).astype(int)]])
                seconds, work = self.walk.walked(start, chosen)[start + 1]
                loads = self._loads(self.intervals.select(chosen))[start + 1]
                self.thinner.append((loads, work, seconds))

    def _loads(self, counted: RunIntervals) -> np.ndarray:
        """Return ``iteration_loads`` of intervals of the queue."""
        return iteration_loads(counted, len(self.wave.mini_batches), self.workload.prefixes, self.exact)

    def _spread(self) -> tuple[np.ndarray, dict[str, np.ndarray], IterationCost]:
        """Return the seconds of all iterations, of each resource's work in them, and the cost behind both."""
        from scipy.optimize import nnls  # takes 0.25 s to load

        known = np.array(sorted(self.walked))
        seconds = np.array([self.walked[i] for i in known.tolist()])
        loads = self._loads(self.intervals)
        rows = np.array([*loads[known], *(of for of, _, _ in self.thinner)])
        scale = np.maximum(np.maximum(loads.max(axis=0), rows.max(axis=0)), 1e-300)
        works = [*(self.work[i] for i in known.tolist()), *(work for _, work, _ in self.thinner)]
        lengths = np.array([*seconds, *(length for _, _, length in self.thinner)])
        weights = 1.0 / np.maximum(lengths, 1e-12)  # so that a long first iteration does not dominate
        work, factors = {}, {}
        for resource in sorted({resource for work in self.work.values() for resource in work}):
            spent = np.array([work.get(resource, 0.0) for work in works])
            # Not negative: loads that occurred together in the walked iterations occur apart in others.
            fitted, _ = nnls(rows / scale * weights[:, None], spent * weights)
            factors[resource] = fitted / scale
            work[resource] = loads @ factors[resource]
        longest = np.maximum(np.max(list(work.values()), axis=0), 1e-12)
        result, joins = np.zeros(self.num_iterations), self.joining_tokens > 0
        everything, waiting = np.arange(self.num_iterations), []
        for kind in (~joins, joins):
            of_kind = known[kind[known]] if kind[known].any() else known
            ratio = np.array([self.walked[i] for i in of_kind.tolist()]) / longest[of_kind]
            result[kind] = (longest * np.interp(everything, of_kind, ratio))[kind]
            waiting.append(float(np.median(ratio)))
        result[known] = seconds
        return result, work, IterationCost(factors, len(self.wave.mini_batches), (waiting[0], waiting[1]), self.exact)
