"""Price a queue of requests in about a second, for any length of the queue.

A queued request starts as soon as another request ends. The price is computed in three steps:

1. ``sim.queue_counts`` counts which requests run in which iteration.
2. The virtual clock runs the planner's tasks of a few iterations. These iterations are called walked.
3. For each resource, nonnegative least squares fits the seconds of work to an iteration's loads: its requests, context
   tokens and prompts. Each iteration takes the time of its busiest resource times a waiting ratio. The ratio is the
   walked iterations' duration over the busiest resource's time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
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
from flexhybrid.core.trace import TraceEvent, iteration_ends
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Prefixes, Workload
from sim import virtual_clock
from sim.array_clock import predict
from sim.candidates import Candidates
from sim.cost import hardware_of_wave
from sim.queue_counts import RunIntervals, intervals
from sim.template_run import layer_loop
from sim.virtual_clock import BusyResources

MOST_COUNTED = 3_000  #: requests; a longer queue is sampled
ROUGH_COUNTED = 1_000  #: the same limit for a price that only ranks policies
RUN = 64  #: consecutive requests that are sampled together if requests share prefixes
WALKED_TASKS = 40_000  #: tasks walked for a price, which takes about a second
ROUGH_TASKS, ROUGH_WINDOWS = 8_000, 12  #: tasks and windows walked for a price that only ranks policies
LEAST_WINDOWS, MOST_WINDOWS = 5, 60  #: windows that are walked; a window is two consecutive iterations
THINNED = 2  #: windows that are walked again with fewer joining requests, if answers may end early
WALKED_LAYERS, RATE_LAYERS = 6, 2  #: layers that are walked; last of these, whose mean time the other layers take
MIXED_POSITIONS = 3  #: number of mini-batches passed to ``layer_loop`` if a model has several kinds of layers
MANY_MINI_BATCHES = 16  #: with more mini-batches, two fewer layers are walked


@dataclass(frozen=True)
class Phase:
    """A phase of a queue's run.

    ramp: until the first queued request joins; steady: until no request waits; drain: until the end.
    """

    iterations: float
    seconds: float
    tokens: float  #: generated tokens
    running: float  #: mean number of running requests

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class IterationCost:
    """Fitted cost of an iteration: seconds from its loads."""

    factors: dict[str, np.ndarray]  #: resource -> seconds of work per unit of each column of ``iteration_loads``
    num_mini_batches: int
    waiting: tuple[float, float]  #: duration / the busiest resource's time, without and with joining requests
    exact: bool = True  #: ``SharedBlocks.exact``: shared blocks are computed once

    def seconds(
        self, counted: RunIntervals, prefixes: Prefixes | None = None, cached: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the seconds of each iteration, [iterations]. ``prefixes``: what the requests share. ``cached``
        [intervals]: True if the prompt needs no computation (None: all prompts are computed)."""
        loads = iteration_loads(counted, self.num_mini_batches, prefixes, self.exact, cached)
        longest = np.max(list(self._work(loads).values()), axis=0)
        return longest * np.where(loads[:, JOINING] > 0, self.waiting[1], self.waiting[0])

    def slowed(self, times: Mapping[str, float]) -> IterationCost:
        """Return the cost on a slower machine. ``times``: resource -> factor on its seconds (default: 1)."""
        return replace(self, factors={r: times.get(r, 1.0) * factors for r, factors in self.factors.items()})

    def work(self, counted: RunIntervals, prefixes: Prefixes | None = None) -> dict[str, np.ndarray]:
        """Return resource -> seconds of work in each iteration, [iterations]."""
        return self._work(iteration_loads(counted, self.num_mini_batches, prefixes, self.exact))

    def _work(self, loads: np.ndarray) -> dict[str, np.ndarray]:
        return {resource: loads @ factors for resource, factors in self.factors.items()}


JOINING = 5  #: column of ``iteration_loads`` with the number of joining requests


def iteration_loads(
    counted: RunIntervals,
    num_mini_batches: int,
    prefixes: Prefixes | None = None,
    exact: bool = True,
    cached: np.ndarray | None = None,
) -> np.ndarray:
    """Return the loads of each iteration, [iterations, loads].

    The columns: 1; decode steps; prompt steps; decoding requests; context tokens outside shared blocks; joining
    requests; computed prompt tokens; token pairs of prompt attention; context tokens in shared blocks that are attended
    to; tokens of shared blocks that are loaded. ``exact``: see ``IterationCost``; ``cached``: see
    ``IterationCost.seconds``.
    """
    ones = np.ones(len(counted.request)) if cached is None else 1.0 - cached
    tokens = counted.prompt_tokens.astype(float)
    shared, found = counted.shared_tokens.astype(float), counted.found_tokens * float(exact)
    running, joining = counted.per_iteration(), counted.joining(ones)
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
class QueueRun(BusyResources):
    """Predicted run of a queue. Arrays have the shape [iterations]."""

    seconds: np.ndarray
    running: np.ndarray  #: requests that run
    tokens: np.ndarray  #: generated tokens
    steady_from: int  #: first iteration in which a queued request joins
    drain_from: int  #: first iteration without waiting requests
    times: np.ndarray  #: number of iterations that each one represents; above 1 only in a sampled queue
    busy: dict[str, float]  #: resource -> busy share of the time
    at_a_time: int  #: most requests that run together
    pace: IterationCost | None = None  #: prices other answer lengths; None on the virtual clock
    preemptions: float = 0.0  #: number of preemptions
    #: upper bound of the time share that recomputes preempted contexts, which swapping at no cost would save
    recomputing: float = 0.0

    @property
    def phases(self) -> dict[str, Phase]:
        begins, ends = (0, self.steady_from, self.drain_from), (self.steady_from, self.drain_from, len(self.seconds))
        phases = {}
        for name, begin, end in zip(("ramp", "steady", "drain"), begins, ends, strict=True):
            times = self.times[begin:end]
            seconds, tokens = (float(times @ column[begin:end]) for column in (self.seconds, self.tokens))
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


def price_queue(
    problem: Problem,
    policy: Policy,
    workload: Workload,
    at_most: int,
    places: Places | None = None,
    walked_tasks: int = WALKED_TASKS,
) -> QueueRun:
    """Price a queue of requests in this order, with at most ``at_most`` running together.

    Answers have ``workload.answers`` tokens. ``places``: the ``batch_size`` of these requests, if known.
    ``walked_tasks``: fewer tasks are faster and less accurate. Raise InputError if no request fits the budgets or a
    verb has no line.
    """
    places = places or batch_size(problem, policy, workload, at_most)
    few, times = _thinned(workload, places.count, MOST_COUNTED if walked_tasks >= WALKED_TASKS else ROUGH_COUNTED)
    return _Price(open_batch(problem, policy, few, places), few, times).run(walked_tasks)


def least_seconds(problem: Problem, policy: Policy, workload: Workload, at_a_time: int) -> float:
    """Return a lower bound of the queue's seconds: the busiest resource's work in the fewest iterations. The bound is 0
    if prompts share prefixes."""
    if workload.prefixes is not None:
        return 0.0
    answers, prompts = workload.answers.astype(float), workload.prompt_tokens
    # A request counts in each iteration in which it runs, so the mean prompt is weighted by the answer.
    prompt = max(1.0, min(prompts.mean(), prompts @ answers / answers.sum()) - BLOCK_TOKENS)
    wave = Candidates(policy, at_a_time, prompt, max(1.0, np.floor(answers.mean())))
    return float(predict(problem, wave, walk=False).least_s[0]) * workload.num_requests / at_a_time


def walk_queue(problem: Problem, policy: Policy, workload: Workload, at_most: int) -> QueueRun:
    """Price a queue on the virtual clock, task by task. Requests that are too large for the batch's buffers run in a
    later batch, as in the executor."""
    left, runs, begun = np.arange(workload.num_requests), [], []
    while len(left):
        lengths = workload.select(left)
        places = batch_size(problem, policy, lengths, at_most)
        wave = open_batch(problem, policy, lengths, places)
        trace = virtual_clock.run(virtual_clock.answered(wave, lengths.answers), hardware_of_wave(wave))
        runs.append(_of_trace(trace, lengths, places.count))
        begun.append(sum(len(run.seconds) for run in runs[:-1]))
        left = left[wave.queue.waiting] if wave.queue else left[:0]
    parts = zip(*((run.seconds, run.running, run.tokens) for run in runs), strict=True)
    seconds, running, tokens = map(np.concatenate, parts)
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
    """Return the first iterations of the steady and the drain phase; 0 and 0 if no request waits. ``joined``: the
    iteration in which each request joins."""
    later = joined[joined > 0]
    if not len(later):
        return {"steady_from": 0, "drain_from": 0}
    return {"steady_from": int(later.min()), "drain_from": min(int(later.max()) + 1, num_iterations)}


def evenly_spaced(count: int, most: int, in_runs: bool) -> np.ndarray:
    """Return about ``most`` indices below ``count``, evenly spaced. ``in_runs``: choose runs of RUN consecutive indices
    instead, because neighbouring requests share prefixes."""
    if not in_runs:
        return np.linspace(0, count - 1, most).astype(np.int64)
    runs = np.linspace(0, count - RUN, most // RUN).astype(np.int64)
    return np.unique(runs[:, None] + np.arange(RUN))


def _thinned(workload: Workload, count: int, most: int) -> tuple[Workload, float]:
    """Return (a sample of about ``most`` requests of a long queue, all answer tokens / the sample's).

    ``count``: requests that run together. The sample keeps the first ``count`` requests, which decide how the batch is
    cut into mini-batches, and the last ``count``, which run in the drain. The other requests are sampled evenly.
    """
    last = workload.num_requests - count
    most = max(most, 8 * count)
    if workload.num_requests <= most:
        return workload, 1.0
    between = count + evenly_spaced(last - count, most - 2 * count, workload.prefixes is not None)
    chosen = np.r_[:count, between, last : workload.num_requests]
    return workload.select(chosen), float(workload.answers.sum() / workload.answers[chosen].sum())


class _Walk:
    """Runs single iterations of a queue on the virtual clock, in a model with fewer layers."""

    def __init__(self, wave: Wave, workload: Workload):
        self.wave, self.workload, self.num_tasks = wave, workload, 0
        self.hardware = hardware_of_wave(wave)
        self.intervals = intervals(wave, workload)  # changes the wave
        self.layers, self.last_rated, self.num_rated = self._walked_layers()
        self.more_layers = wave.shape.num_layers - len(self.layers)

    def _walked_layers(self) -> tuple[list[int], int, int]:
        """Return (the walked layers, the position in them of the last rated layer, the number of rated layers). Each
        omitted layer takes the mean time of the rated layers: two, or one period of the kinds of layers."""
        wave, shape = self.wave, self.wave.shape
        whole, kinds = num_whole(wave.policy.selection, shape.num_layers), list(dict.fromkeys(shape.layer_kinds))
        if len(kinds) == 1:
            few = WALKED_LAYERS - RATE_LAYERS * (len(wave.mini_batches) > MANY_MINI_BATCHES)
            count = min(shape.num_layers, whole + few)
            return list(range(count)), count - 2, RATE_LAYERS
        loop = layer_loop(tuple(map(kinds.index, shape.layer_kinds)), MIXED_POSITIONS, whole)
        before, layers = loop.before_skip or shape.num_layers, list(range(shape.num_layers))
        more = shape.num_layers - loop.num_rounds
        return layers[:before] + layers[before + more :], before - 1, loop.rate_rounds

    def around(self, start: int) -> np.ndarray:
        """Return the indices of the intervals in iterations ``start`` to ``start`` + 2."""
        return np.flatnonzero((self.intervals.joined <= start + 2) & (self.intervals.left > start))

    def walked(self, start: int, chosen: np.ndarray) -> dict[int, tuple[float, dict[str, float]]]:
        """Walk iterations ``start`` and ``start`` + 1 with the chosen intervals. Return iteration -> (seconds, seconds
        of work by resource), for ``start`` + 1 and for iteration 0. Iteration ``start`` is left out unless it is 0,
        because its walk lacks the loads that the iteration before it had begun."""
        wave, stops = self._members(start, chosen)
        tasks = stream(wave, stops, first_iteration=start)
        tasks = takewhile(lambda task: task.iteration <= start + 1 or task.verb != "finish", tasks)
        trace = virtual_clock.run(tasks, self.hardware)
        self.num_tasks = len(trace)
        ends, walked = np.diff(iteration_ends(trace), prepend=0.0), {}
        for iteration, seconds in list(enumerate(ends, start=start))[:2]:
            if iteration > start or not iteration:
                events = [event for event in trace if event.task.iteration == iteration]
                all_layers_s = float(seconds) + self.more_layers * self._rated_layer_s(events)
                walked[iteration] = all_layers_s, self._work(events)
        return walked

    def _members(self, start: int, chosen: np.ndarray) -> tuple[Wave, Stops]:
        """Return a batch of the chosen intervals, and its stops in iterations ``start`` to ``start`` + 2."""
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

        may_come = bool((self.workload.answers < self.workload.max_tokens).any())
        return members, Stops(
            lambda iteration, _num_steps: set(np.flatnonzero(left <= iteration).tolist()),
            lambda requests: may_come and bool(requests),
        )

    def _shared(self, members: Wave, room: dict[str, int], chosen: np.ndarray, start: int) -> SharedBlocks:
        """Return the shared blocks of the chosen intervals. The builds that are left are those of requests that join
        in iteration ``start`` or later."""
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
        computes = (counted.joined >= start) & (counted.found_tokens < counted.shared_tokens)
        for place in np.flatnonzero(computes).tolist():
            first, last = int(counted.found_tokens[place]) // BLOCK_TOKENS, len(paths[place])
            pieces = enumerate(range(first, last, piece), start=first)
            sharing.builds += [Build(place, at, min(at + piece, last), level) for level, at in pieces]
        return sharing

    def _rated_layer_s(self, events: list[TraceEvent]) -> float:
        """Return the mean seconds of a rated layer in an iteration, for all mini-batches. In the row schedule, sum the
        mini-batches, which pass the layer at different times."""
        if not self.more_layers:
            return 0.0
        last, before = self.last_rated, self.last_rated - self.num_rated
        ends: dict[tuple, float] = {}
        by_row = self.wave.policy.schedule == "row"
        for task, _, end in events:
            if task.verb == "finish" and task.layer in (last, before):
                key = (task.mini_batch if by_row else 0), task.layer
                ends[key] = max(end, ends.get(key, 0.0))
        return sum(end - ends[k, before] for (k, layer), end in ends.items() if layer == last) / self.num_rated

    def _work(self, events: list[TraceEvent]) -> dict[str, float]:
        """Return resource -> seconds of an iteration's tasks in all layers."""
        work: dict[str, float] = {}
        last, rated = self.last_rated, self.num_rated
        for task, start, end in events:
            repeats = self.more_layers / rated if last - rated < task.layer <= last else 0.0
            work[task.resource] = work.get(task.resource, 0.0) + (1.0 + repeats) * (end - start)
        return work


class _Price:
    """Prices all iterations of a queue from the walked ones."""

    def __init__(self, wave: Wave, workload: Workload, times: float):
        self.wave, self.workload, self.times = wave, workload, times
        self.walk = _Walk(wave, workload)
        self.intervals = self.walk.intervals
        self.num_iterations = self.intervals.num_iterations
        self.bounds = _bounds(self.intervals.joined, self.num_iterations)
        self.exact = stores_exactly(wave.policy)
        self.loads_of = partial(
            iteration_loads, num_mini_batches=len(wave.mini_batches), prefixes=workload.prefixes, exact=self.exact
        )
        computed = self.intervals.prompt_tokens - self.intervals.found_tokens * self.exact
        self.joining_tokens = self.intervals.joining(computed.astype(float))
        self.walked: dict[int, float] = {}  # iteration -> seconds
        self.work: dict[int, dict[str, float]] = {}  # iteration -> resource -> seconds of work
        #: iterations walked with fewer joining requests: (loads, resource -> seconds of work, seconds)
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
        returned = self.intervals.returned
        computed, cached = (pace.seconds(self.intervals, self.workload.prefixes, of) for of in (None, returned))
        return QueueRun(
            seconds=seconds,
            running=running,
            tokens=tokens,
            **self.bounds,
            times=self._times(tokens),
            # Work and seconds are interpolated independently, so their ratio may exceed 1.
            busy={resource: min(1.0, float(spent.sum() / seconds.sum())) for resource, spent in work.items()},
            at_a_time=self.wave.workload.num_requests,
            pace=pace,
            preemptions=self.times * float(returned.sum()),
            recomputing=float(np.maximum(computed - cached, 0.0).sum() / computed.sum()),
        )

    def _times(self, tokens: np.ndarray) -> np.ndarray:
        """Return ``QueueRun.times``. Iterations represent more than one from the time that the first requests have left
        until the last requests join, where ``_thinned`` dropped requests."""
        times, counted, count = np.ones(len(tokens)), self.intervals, self.wave.workload.num_requests
        if self.times > 1:
            begin = int(counted.left[counted.request < count].max())
            end = int(counted.joined[counted.request >= self.workload.num_requests - count].min())
            inside = slice(begin, end) if begin < end else slice(*self.bounds.values())
            times[inside] += (self.times - 1.0) * tokens.sum() / max(tokens[inside].sum(), 1.0)
        return times

    def _windows(self, count: int) -> list[int]:
        """Return the first iterations of about ``count`` windows. Each phase is cut into equal parts; each part has a
        window at its middle and one at the iteration that computes the most prompt tokens."""
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
        """Walk the windows with the most joining requests again with fewer of these. If answers end early, requests
        join one by one. In the counted iterations many may join together, which does not separate the cost of a joining
        request from the cost of a prompt step."""
        counts = {start: int((self.intervals.joined == start + 1).sum()) for start in windows}
        for start in sorted((start for start in windows if counts[start] > 1), key=counts.__getitem__)[-THINNED:]:
            around = self.walk.around(start)
            joining = around[self.intervals.joined[around] == start + 1]
            others = around[self.intervals.joined[around] <= start]
            for kept in {1, -(-len(joining) // 4)}:  # always with the first, which computes blocks that others share
                chosen = np.sort(np.r_[others, joining[np.linspace(0, len(joining) - 1, kept).astype(int)]])
                seconds, work = self.walk.walked(start, chosen)[start + 1]
                loads = self.loads_of(self.intervals.select(chosen))[start + 1]
                self.thinner.append((loads, work, seconds))

    def _spread(self) -> tuple[np.ndarray, dict[str, np.ndarray], IterationCost]:
        """Return (seconds, resource -> seconds of work, fitted cost); the first two for all iterations."""
        from scipy.optimize import nnls  # takes 0.25 s to load

        known = np.array(sorted(self.walked))
        seconds = np.array([self.walked[i] for i in known.tolist()])
        loads = self.loads_of(self.intervals)
        rows = np.array([*loads[known], *(thinner for thinner, _, _ in self.thinner)])
        scale = np.maximum(np.maximum(loads.max(axis=0), rows.max(axis=0)), 1e-300)
        works = [*(self.work[i] for i in known.tolist()), *(work for _, work, _ in self.thinner)]
        lengths = np.array([*seconds, *(length for _, _, length in self.thinner)])
        weights = 1.0 / np.maximum(lengths, 1e-12)  # so that a long first iteration does not dominate
        work, factors = {}, {}
        for resource in sorted({resource for work in self.work.values() for resource in work}):
            spent = np.array([work.get(resource, 0.0) for work in works])
            # Factors must not be negative: loads that occur together in walked iterations may occur alone in others.
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
