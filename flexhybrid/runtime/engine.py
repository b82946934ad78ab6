"""The engine: weights, buffers and lanes that run waves of requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from flexhybrid.core.errors import InputError
from flexhybrid.core.memory import HOST_THREADS
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import BufferSizes, without_graphs
from flexhybrid.core.schedule.positions import Stops
from flexhybrid.core.task import Task, Work
from flexhybrid.core.trace import LaneTimes, LineKey, LineTimes, TraceEvent
from flexhybrid.core.wave import Wave
from flexhybrid.runtime.buffers import Buffers
from flexhybrid.runtime.clock import Around, Clock, HostLane, Lane, LaneThreads
from flexhybrid.runtime.cuda import CudaClock, CudaCopies, CudaStream, lane_events, lane_streams
from flexhybrid.runtime.executor import Executor
from flexhybrid.runtime.issuing import Issuer, StreamLane
from flexhybrid.runtime.kernels.compiled import Share
from flexhybrid.runtime.kernels.sampling import NO_TOKEN
from flexhybrid.runtime.links import CpuCopies
from flexhybrid.runtime.logprob_log import Noted
from flexhybrid.runtime.models.coroutines import hosted
from flexhybrid.runtime.process_settings import NO_CUDNN_ATTENTION, NO_TF32
from flexhybrid.runtime.runnable import check_runnable
from flexhybrid.runtime.selections.heavy_hitters import HeavyHitters
from flexhybrid.runtime.selections.hooks import SelectionHooks
from flexhybrid.runtime.selections.speculative import Speculation
from flexhybrid.runtime.step_tensors import Prompts, SamplingPlans
from flexhybrid.runtime.storage.weights import ANYWHERE, DiskPlace, Weights, WeightSlots
from flexhybrid.runtime.verbs import verbs_under
from flexhybrid.runtime.verbs.graphed import Graphs, JointLaunch, attach

BROKEN_REQUESTS = 16  #: the model is broken if this number of requests, and no others, have non-finite logits
LAG = 2  #: number of iterations after a request has left in which its last step or token may still appear

#: Takes a request (its index in the queue). Returns a function of its next token, which returns the stop text that the
#: token completes, or None; or returns None if no text can stop the request.
StopText = Callable[[int], Callable[[int], str | None] | None]
#: Takes a finished request: its index in the queue, its tokens, and its stop (``WaveResult.stops``) or a Failure.
OnFinish = Callable[[int, list[int], int | str | None], None]
#: Takes a token's log probabilities: the request's index in the wave, and the ``Noted`` record.
OnNoted = Callable[[int, Noted], None]


class Failure(str):
    """The reason why the tokens of one request are not an answer."""


@dataclass(frozen=True, kw_only=True)
class RunControl:
    """When the requests of a run end, which functions are called meanwhile, and how much of the trace is kept.

    ``on_tokens(n)`` takes the number of new tokens, after ``on_finish`` has taken the requests that they finished. When
    ``should_stop()`` is true, no further iteration begins, and requests may be left unfinished.
    """

    num_given: Sequence[int] | None = None  #: number of first tokens of each request that are given (``force_tokens``)
    #: number of earlier answers that ended at each length; they predict the lengths of others
    num_ended: np.ndarray | None = None
    answer_of: Callable[[int], list[int]] = lambda request: []  #: the list that a request's tokens are appended to
    stop_ids: Callable[[int], Collection[int]] = lambda request: ()  #: token ids that end a request
    stop_text: StopText = lambda request: None
    on_join: Callable[[int, int], None] | None = None  #: takes a joining request and its mini-batch; ``RequestQueue``
    on_start: Callable[[Callable[[], float]], None] | None = None  #: takes a function: progress of the first iteration
    on_tokens: Callable[[int], None] | None = None
    #: Called before ``on_tokens``. Takes the busy seconds of host lanes so far, and a function that returns a copy of
    #: the times of all lanes' lines so far.
    on_busy: Callable[[dict[str, float], Callable[[], dict[LineKey, LineTimes]]], None] | None = None
    on_finish: OnFinish | None = None
    on_noted: OnNoted | None = None
    should_stop: Callable[[], bool] | None = None
    should_drain: Callable[[], bool] | None = None  #: when true, no more requests join; running ones finish
    forget: bool = False  #: drop a request's tokens after ``on_finish``: the result has none
    keep_trace: bool | int = False  #: True: trace all tasks; a number n: the first n tasks
    #: A GPU launches the tasks of this many first iterations one by one, and times them, for ``on_busy``.
    timed_iterations: int = 0


@dataclass
class WaveResult:
    """The tokens of each request up to its stop, in the wave's order; and the trace."""

    tokens: list[list[int]]
    stops: list[int | str | None]  #: the token id or text that ended each request; None: its length limit did
    trace: list[TraceEvent]
    lanes: dict[str, LaneTimes] = field(default_factory=dict)  #: by resource with tasks; {} without a trace
    launch_s: float = 0.0  #: ``Clock.launch_s``
    graphs: str = ""  #: on a GPU: a line about its CUDA graphs, or why there are none


class Engine:
    """Runs waves that fit ``sizes``, with one placement of weights. The constructor allocates all buffers.

    ``link_gb_per_s`` paces both link directions of a CPU (default: no pace). Raise InputError for a pace on CUDA, whose
    link has its own rate. ``lane_threads``: threads shared with other engines (default: new ones).
    """

    def __init__(
        self,
        weights: Weights,
        policy: Policy,
        sizes: BufferSizes,
        link_gb_per_s: float | None = None,
        slots: WeightSlots | None = None,
        num_threads: int | None = None,
        disk: DiskPlace = ANYWHERE,
        lane_threads: LaneThreads | None = None,
    ):
        self.weights, self.device = weights, weights.device
        on_cuda = self.device.type == "cuda"
        if on_cuda and link_gb_per_s is not None:
            raise InputError("link_gb_per_s paces the copies of a CPU; a CUDA device runs at the rate of its own link")
        self.sizes = sizes
        self.closed = False
        self.graphs: Graphs | None = None  #: CUDA graphs, shared by its waves
        self.num_threads = num_threads or torch.get_num_threads()
        self.host_threads = min(HOST_THREADS[self.device.type], max(1, self.num_threads // 2))
        self.host_workers = ThreadPoolExecutor(self.host_threads, "flexhybrid-host", _compute_with, (1,))
        self.compute_workers = ThreadPoolExecutor(
            self.num_threads, "flexhybrid-compute"
        )  # starts no thread before its first use
        self.host_share: Share = self.host_workers.map if self.host_threads > 1 else map
        self.compute_share: Share = self.compute_workers.map if self.num_threads > 1 else map
        self._own_threads = LaneThreads()
        self.lane_threads = self._own_threads if lane_threads is None else lane_threads
        self.disk = None
        try:
            self.buffers = Buffers(weights.shape, policy, sizes, weights.dtype, self.device)
            self.disk = self.buffers.disk = disk.space(self.buffers.disk_bytes)
            self.slots = weights.make_slots() if slots is None else slots
        except BaseException:
            self.close()
            raise
        self.copies: CpuCopies | CudaCopies = CudaCopies() if on_cuda else CpuCopies(link_gb_per_s)

    def close(self) -> None:
        """Free the cache's disk space, and end the threads."""
        self.closed = True
        self.host_workers.shutdown()
        self.compute_workers.shutdown()
        self._own_threads.end()
        if self.disk:
            self.disk.close()

    def _abort(self, executor: Executor) -> None:
        """Make waits inside verbs end: for copies, token masks, and the disk spaces of cache and weights."""
        self.copies.abort()
        executor.masks.abort()
        for space in (self.disk, self.weights.disk):
            if space:
                space.abort()

    def executor(self, wave: Wave, prompts: Prompts, plan: SamplingPlans) -> Executor:
        """Return an executor for a wave. ``prompts``: token ids by request; ``plan``: how each request samples."""
        check_runnable(wave.shape, wave.policy)
        executor = Executor(self, wave, prompts, plan, self._selection(wave))
        executor.verbs = verbs_under(executor.selection)
        if self.device.type == "cuda" and without_graphs(wave.problem, wave.policy) is None:
            self.graphs = attach(executor, self.graphs)
        return executor

    def _selection(self, wave: Wave) -> SelectionHooks:
        """Return the hooks of the policy's selection method."""
        if wave.policy.selection.method == "heavy_hitter":
            return HeavyHitters(wave, self.device)
        if wave.policy.selection.method == "speculative":
            return Speculation(wave, self.weights)
        return SelectionHooks()

    def lanes(self, executor: Executor) -> list[Lane]:
        """Return a lane for each resource: stream lanes for a CUDA device, host lanes for all else.

        OpenMP stores its number of threads separately for each calling thread. So each lane sets its own number, and
        engines in one process do not disturb each other.
        """
        perform = executor.perform
        # A model's own modules run in coroutines, which ``infer_hosted`` allows.
        around_compute = infer if executor.modules is None else infer_hosted

        def host_lane(name: str, num_threads: int | None = None, around: Around = infer) -> Lane:
            on_start = partial(_compute_with, num_threads) if num_threads else None
            return HostLane(name, perform, on_start, self.lane_threads[name], around)

        lanes = [host_lane("host_compute", self.host_threads), host_lane("disk_read"), host_lane("disk_write")]
        if self.device.type == "cuda":
            clock, events, issuer = CudaClock(self.device), lane_events(self.device), Issuer(around_compute)
            streams = lane_streams(self.device).items()
            joint = {"compute": JointLaunch(executor)} if executor.graphs else {}
            on_device = [
                StreamLane(name, perform, CudaStream(of, clock, events), issuer, joint.get(name))
                for name, of in streams
            ]
        else:
            on_device = [host_lane("compute", self.num_threads, around_compute), host_lane("h2d"), host_lane("d2h")]
        return [*on_device, *lanes]

    @contextmanager
    def without_copies(self) -> Iterator[None]:
        """Skip all copies to and from the device inside the context."""
        self.copies.enabled = False
        try:
            yield
        finally:
            self.copies.enabled = True

    @contextmanager
    def process_settings(self) -> Iterator[None]:
        """Keep the process settings that a run on this device needs, inside the context."""
        with ExitStack() as held:
            if self.device.type == "cuda":
                held.enter_context(_current_stream_kept(self.device))
                held.enter_context(NO_CUDNN_ATTENTION.held())
                if self.weights.dtype == torch.float32:
                    held.enter_context(NO_TF32.held())
            yield

    def run(
        self, executor: Executor, control: RunControl = RunControl(), tasks: Iterable[Task] | None = None
    ) -> WaveResult:
        """Run the executor's wave to its end. ``tasks`` replace the wave's plan, for measurements of a part of it.

        An error in a lane is raised here after all threads have ended. It closes the engine; weights that are partly on
        the disk cannot be used again. Raise ValueError if the engine is closed.
        """
        if self.closed:
            raise ValueError("this engine is closed, or a run of it failed: make a new one")
        resolved = executor.resolved = {} if control.keep_trace else None
        clock = Clock(self.lanes(executor), on_fail=partial(self._abort, executor))
        collector = _Collector(executor, clock, control)
        if control.on_start:
            control.on_start(collector.first_share)
        tasks = stream(executor.wave, Stops(collector.stops_until, collector.may_stop)) if tasks is None else tasks
        if self.device.type == "cuda":
            # Buffers and index tensors were created on the default stream; lanes read them on other streams.
            torch.cuda.current_stream(self.device).synchronize()
        try:
            with self.process_settings():
                trace = clock.run(tasks, collector.submitted, control.keep_trace, control.timed_iterations)
            collector.collect()
        except BaseException:
            self.close()
            raise
        trace = [_resolved(event, resolved or {}) for event in trace]
        lanes = {name: lane.times for name, lane in clock.lanes.items() if trace and lane.submitted}
        return WaveResult(*collector.results(), trace, lanes, clock.launch_s, self._graphs_summary(executor))

    def _graphs_summary(self, executor: Executor) -> str:
        if self.device.type != "cuda":
            return ""
        if executor.graphs:
            return executor.graphs.summary()
        return f"no CUDA graphs: {without_graphs(executor.wave.problem, executor.policy)}"


_SETTING_THREADS = threading.Lock()


def _compute_with(num_threads: int) -> None:
    """Make torch use ``num_threads`` threads for operations of the calling thread.

    A thread's first parallel operation takes the number last set by any thread, unless the thread has read its number
    before. Without the lock, a lane that starts at the same time could set the number in between.
    """
    with _SETTING_THREADS:
        torch.set_num_threads(num_threads)
        torch.get_num_threads()


@contextmanager
def _current_stream_kept(device: torch.device) -> Iterator[None]:
    """Restore this thread's current stream at the end; the planning thread switches to the lanes' streams."""
    stream = torch.cuda.current_stream(device)
    try:
        yield
    finally:
        torch.cuda.set_stream(stream)


def infer(tasks: Callable[[], None]) -> None:
    """Run a thread's tasks in inference mode, entered only once: entering takes as long as some operations."""
    with torch.inference_mode():
        tasks()


def infer_hosted(tasks: Callable[[], None]) -> None:
    infer(partial(hosted, tasks))


def _resolved(event: TraceEvent, resolved: dict[tuple, Work]) -> TraceEvent:
    """Return the event with the work of its task, if that was known only after the task ran."""
    work = resolved.get(event.task.key)
    return event if work is None else event._replace(task=event.task._replace(work=work))


class _Answers(dict[int, list[int]]):
    """Tokens by request, in the lists that ``answer_of`` returns."""

    def __init__(self, answer_of: Callable[[int], list[int]]):
        super().__init__()
        self._answer_of = answer_of

    def __missing__(self, request: int) -> list[int]:
        return self.setdefault(request, self._answer_of(request))


def _forgetting(stopped: set[int], on_leave: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Return an ``on_leave`` (``RequestQueue``) that also forgets stopped requests, LAG iterations later.

    A long queue would otherwise keep all of them.
    """
    left: deque[tuple[int, int]] = deque()

    def leave(request: int, iteration: int) -> None:
        on_leave(request, iteration)
        left.append((iteration, request))
        while left[0][0] + LAG < iteration:
            stopped.discard(left.popleft()[1])

    return leave


class _Collector:
    """Collects sampled tokens when their copies to the host complete, and tells which requests have stopped."""

    def __init__(self, executor: Executor, clock: Clock, control: RunControl):
        queue = executor.wave.queue
        workload = queue.workload if queue else executor.wave.workload
        count = workload.num_requests
        self.executor, self.clock, self.control = executor, clock, control
        self.num_given = {request: given for request, given in enumerate(control.num_given or ()) if given}
        self.max_tokens = workload.max_tokens
        if self.num_given:
            self.max_tokens = workload.max_tokens - np.array(control.num_given)
        self.num_requests = count
        self.tokens = _Answers(control.answer_of)  #: by request that has begun
        executor.answers = self.tokens
        self.stops: dict[int, int | str | None] = {}
        self._pending: list[tuple[Task, int]] = []  # store_out tasks not yet collected, in plan order
        self._num_collected = 0  # number of collected store_out tasks
        self._iteration = self._reported = -1  # latest iteration with a collected, and with a reported, token
        self._fresh = 0  # number of tokens not yet reported
        self._num_finite = 0  # number of tokens whose logits were finite
        self._not_finite: dict[int, Failure] = {}  # running requests with non-finite logits
        self._stopped_requests: set[int] = set()
        if queue:
            queue.on_leave = _forgetting(self._stopped_requests, queue.on_leave)
        self._first: list[tuple[int, int]] = []  # (layer, ordinal) of the last task of each step of the first iteration

    def first_share(self) -> float:
        """Return the share of the first iteration that is computed, in layers of steps."""
        wave, passed = self.executor.wave, self.clock.lanes["compute"].passed
        steps = max(len(wave.mini_batches), sum(layer == 0 for layer, _ in self._first))
        return sum(ordinal < passed for _, ordinal in self._first) / (steps * wave.shape.num_layers)

    def submitted(self, task: Task, ordinal: int) -> None:
        if task.iteration == 0 and task.verb == "finish":
            self._first.append((task.layer, ordinal))
        if task.verb == "store_out":
            self._pending.append((task, ordinal))

    def may_stop(self, requests: Iterable[int]) -> bool:
        """Return whether one of these requests may end before its limit."""
        control = self.control
        return any(control.stop_ids(request) or control.stop_text(request) for request in requests)

    def stops_until(self, _iteration: int, num_steps: int) -> Collection[int]:
        """Wait for ``num_steps`` sampling steps; return the requests that have stopped (all, if the run shall stop)."""
        self.collect(num_steps)
        if self.control.should_stop and self.control.should_stop():
            return range(self.num_requests)
        return self._stopped_requests

    def collect(self, num_steps: int | None = None) -> None:
        """Wait for the tokens of the first ``num_steps`` sampling steps (default: all), and store them.

        Tokens are reported once per iteration. Tokens of its last steps may be reported with the next iteration.
        """
        while self._pending and (num_steps is None or self._num_collected < num_steps):
            task, ordinal = self._pending.pop(0)
            self._num_collected += 1
            if task.iteration > self._iteration:
                self._report()
                self._iteration = task.iteration
            self.clock.wait(task.resource, ordinal)
            step = task.payload.step
            sampled, noted = self.executor.tokens_of(step), self.executor.logprobs.take(step)
            for request, token in zip(step.queued.tolist(), sampled.tolist(), strict=True):
                if request in self._stopped_requests:
                    continue  # a token computed before its request's stop was known
                if self.num_given.get(request):
                    self.num_given[request] -= 1
                    continue
                if token == NO_TOKEN:
                    token = self._no_token(request)
                else:
                    self._num_finite += 1
                self.tokens[request].append(token)
                if request in noted and self.control.on_noted:
                    self.control.on_noted(request, noted[request])
                self._fresh += 1
                stop = self.stops[request] = self._stop_with(request, token)
                if stop is not None:
                    self._stopped_requests.add(request)
                finished = stop is not None or len(self.tokens[request]) == self.max_tokens[request]
                if finished and self.control.on_finish:
                    failure = self._not_finite.pop(request, None) or self._broken_form(request)
                    self.control.on_finish(request, self.tokens[request], failure or stop)
                if finished:
                    self.executor.masks.finished.append(request)
                if finished and self.control.forget:
                    del self.tokens[request], self.stops[request]
        self._report(num_steps is None)

    def _no_token(self, request: int) -> int:
        """Record that a request's logits are not finite; return a placeholder token.

        Raise InputError if this happened to BROKEN_REQUESTS requests and no token of any request was finite.
        """
        name = self.executor.weights.dtype_name
        text = (
            f"the model's logits are not finite numbers in {name}: the checkpoint holds weights that are not, or "
            "values overflow. Check its files, or name another dtype"
        )
        self._not_finite[request] = Failure(text)
        if not self._num_finite and len(self._not_finite) == BROKEN_REQUESTS:
            raise InputError(text)
        return 0

    def _broken_form(self, request: int) -> Failure | None:
        error = self.executor.masks.errors.get(request)
        return None if error is None else Failure(f"the structured output cannot go on: {error}")

    def _report(self, is_last: bool = False) -> None:
        """Report the number of new tokens, once per iteration; ``is_last``: also if this iteration was reported."""
        if self._iteration == self._reported and not is_last or not self._fresh:
            return
        count, self._fresh, self._reported = self._fresh, 0, self._iteration
        if self.control.on_busy:
            busy_s = {name: lane.busy_s for name, lane in self.clock.lanes.items() if lane.busy_s}
            self.control.on_busy(busy_s, self.clock.line_times)
        if self.control.on_tokens:
            self.control.on_tokens(count)

    def _stop_with(self, request: int, token: int) -> int | str | None:
        """Return the stop that a token causes: the token id, the stop text that it completes, or None."""
        if token in self.control.stop_ids(request):
            return token
        stop_text = self.control.stop_text(request)
        return stop_text(token) if stop_text else None

    def results(self) -> tuple[list[list[int]], list[int | str | None]]:
        """Return the tokens and stops of all requests; nothing if ``control.forget``."""
        if self.control.forget:
            return [], []
        requests = range(self.num_requests)
        return [self.tokens[request] for request in requests], [self.stops.get(request) for request in requests]
