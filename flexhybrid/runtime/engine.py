"""An engine: weights, buffers and lanes that run waves of requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from flexhybrid.core.errors import InputError
from flexhybrid.core.memory import HOST_THREADS, BufferSizes
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.task import Task
from flexhybrid.core.trace import TraceEvent
from flexhybrid.core.wave import Wave
from flexhybrid.runtime.buffers import Buffers, cache_disk_bytes
from flexhybrid.runtime.clock import Clock, Lane, StreamLane
from flexhybrid.runtime.executor import Executor
from flexhybrid.runtime.kernels.sampling import NO_TOKEN, SamplingPlan
from flexhybrid.runtime.links import CpuCopies
from flexhybrid.runtime.storage.weights import ANYWHERE, DiskPlace, Weights, WeightSlots
from flexhybrid.runtime.wave_state import EngineParts

#: Of a request (by its place in the wave): hears of its tokens, in order; returns the text that ends it, or None.
StopTexts = Mapping[int, Callable[[int], str | None]]
#: Hears of a request (its place in the wave) when it is done: its tokens, and what ended it (``WaveResult.stops``).
OnFinish = Callable[[int, list[int], int | str | None], None]


@dataclass
class WaveResult:
    """Tokens of each request, up to the one that stopped it, in the wave's order, and what ran when."""

    tokens: list[list[int]]
    stops: list[int | str | None]  #: the token id or the text that ended the request; None: its length did
    trace: list[TraceEvent]


class Engine:
    """Runs waves that fit ``sizes`` under one placement of weights. Buffers are allocated here, once.

    ``link_gb_per_s`` paces both link directions of a CPU; None leaves them unpaced. On CUDA it is refused: the real
    link has the rate it has.
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
    ):
        self.weights, self.device = weights, weights.device
        if self.device.type == "cuda" and link_gb_per_s is not None:
            raise InputError("link_gb_per_s paces the copies of a CPU; a CUDA device runs at the rate of its own link")
        self.sizes = sizes
        self.closed = False
        self.num_threads = num_threads or torch.get_num_threads()
        self.host_threads = min(HOST_THREADS[self.device.type], max(1, self.num_threads // 2))
        self.host_workers = ThreadPoolExecutor(self.host_threads, "flexhybrid-host", _compute_with, (1,))
        self.disk = disk.space(cache_disk_bytes(weights.shape, policy, sizes, weights.dtype))
        try:
            self.buffers = Buffers(weights.shape, policy, sizes, weights.dtype, self.device, self.disk)
            self.slots = weights.make_slots() if slots is None else slots
        except BaseException:
            self.close()
            raise
        if self.device.type == "cuda":
            from flexhybrid.runtime.cuda import CudaCopies

            # cuDNN's attention builds a graph for every new context length, on the host, in the middle of a decode.
            torch.backends.cuda.enable_cudnn_sdp(False)
            if weights.dtype == torch.float32:  # exact tokens; an image's environment may have asked for ten bits
                torch.backends.cuda.matmul.allow_tf32 = False
            self.copies = CudaCopies()
        else:
            self.copies = CpuCopies(link_gb_per_s)

    def close(self) -> None:
        """Give the cache's disk space back and end the host's workers; there are no further runs."""
        self.closed = True
        self.host_workers.shutdown()
        if self.disk:
            self.disk.close()

    def _abort(self) -> None:
        """End soon whatever a lane waits for. The weights' disk space goes with it: that, too, may hold a lane."""
        self.copies.abort()
        for space in (self.disk, self.weights.disk):
            if space:
                space.abort()

    def executor(self, wave: Wave, prompts: list[list[int]], plan: SamplingPlan) -> Executor:
        """The verb functions over one wave."""
        share = self.host_workers.map if self.host_threads > 1 else map
        parts = EngineParts(self.weights, self.slots, self.buffers, self.copies, share)
        return Executor(parts, wave, prompts, plan)

    def lanes(self, executor: Executor) -> list[Lane]:
        """One lane a resource: threads on a CPU, streams on CUDA; the host's own and the disk's are threads on both.

        OpenMP keeps its number of threads for each thread that uses it, so each lane sets its own.
        """
        on_host = [
            Lane("host_compute", executor.perform, on_start=partial(_compute_with, self.host_threads)),
            Lane("disk_read", executor.perform),
            Lane("disk_write", executor.perform),
        ]
        if self.device.type == "cuda":
            from flexhybrid.runtime.cuda import CudaClock, CudaStream, lane_streams

            clock = CudaClock(self.device)
            streams = lane_streams(self.device).items()
            return [
                *(StreamLane(name, executor.perform, CudaStream(stream, clock)) for name, stream in streams),
                *on_host,
            ]

        return [
            Lane("compute", executor.perform, on_start=partial(_compute_with, self.num_threads)),
            Lane("h2d", executor.perform),
            Lane("d2h", executor.perform),
            *on_host,
        ]

    def run(
        self,
        wave: Wave,
        prompts: list[list[int]],
        plan: SamplingPlan,
        stop_ids: Sequence[Collection[int]] | None = None,
        stop_texts: StopTexts | None = None,
        keep_trace: bool | int = False,
        on_tokens: Callable[[int], None] | None = None,
        tasks: Iterable[Task] | None = None,
        executor: Executor | None = None,
        on_finish: OnFinish | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> WaveResult:
        """Run a wave to its end. ``on_tokens(n)`` is told about newly finished tokens, for a progress bar, after
        ``on_finish(request, tokens, stop)`` about each request that one of them finished. Once ``should_stop()`` is
        true no further iteration is begun: requests may be left unfinished.

        ``stop_ids``: token ids that end a request, a collection for each request of the wave. ``stop_texts``: for
        requests that a text may end, what hears of their other tokens.
        ``keep_trace``: of all tasks, or of the first so many.
        ``tasks`` and ``executor`` replace the wave's own stream, for measurements that start in the middle.

        An error of any lane is raised here when all threads have ended. It closes the engine, and weights that lie
        partly on the disk can be run no more.
        """
        if self.closed:
            raise ValueError("this engine is closed, or a run of it failed: make a new one")
        executor = executor or self.executor(wave, prompts, plan)
        executor.resolved = {} if keep_trace else None
        clock = Clock(self.lanes(executor), on_fail=self._abort)
        collector = _Collector(wave, executor, clock, stop_ids, stop_texts, on_tokens, on_finish, should_stop)
        tasks = stream(wave, collector.stops_until) if tasks is None else tasks
        if self.device.type == "cuda":
            # Buffers and index tensors were made on the default stream; lanes read them from others.
            torch.cuda.current_stream(self.device).synchronize()
        try:
            trace = clock.run(tasks, on_submit=collector.submitted, keep_trace=keep_trace)
            trace = [_resolved(event, executor) for event in trace]
            collector.collect_all()
        except BaseException:
            self.close()
            raise
        return WaveResult(collector.tokens, collector.stops, trace)


_SETTING_THREADS = threading.Lock()


def _compute_with(num_threads: int) -> None:
    """Let the calling thread compute with so many.

    The first parallel operation of a thread resets its number to the one that any thread has set last, unless it was
    asked for before: another lane that starts at the same time would hand its own number on.
    """
    with _SETTING_THREADS:
        torch.set_num_threads(num_threads)
        torch.get_num_threads()


def _resolved(event: TraceEvent, executor: Executor) -> TraceEvent:
    """The event with what its task really moved, where that was known only as it ran."""
    work = executor.resolved.get(event.task.key)
    return event if work is None else event._replace(task=event.task._replace(work=work))


class _Collector:
    """Gathers sampled tokens as their copies to the host complete, and says who has stopped."""

    def __init__(
        self,
        wave: Wave,
        executor: Executor,
        clock: Clock,
        stop_ids: Sequence[Collection[int]] | None,
        stop_texts: StopTexts | None,
        on_tokens: Callable[[int], None] | None,
        on_finish: OnFinish | None,
        should_stop: Callable[[], bool] | None,
    ):
        count = wave.workload.num_requests
        self.executor, self.clock, self.on_tokens = executor, clock, on_tokens
        self.on_finish, self.should_stop, self.max_tokens = on_finish, should_stop, wave.workload.max_tokens
        self.stop_ids, self.stop_texts = stop_ids or [()] * count, stop_texts or {}
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.stops: list[int | str | None] = [None] * count
        self._pending: list[tuple[Task, int]] = []  # store_out tasks not yet collected, in stream order
        self._stopped_requests: set[int] = set()

    def submitted(self, task: Task, ordinal: int) -> None:
        if task.verb == "store_out":
            self._pending.append((task, ordinal))

    def stops_until(self, iteration: int) -> set[int]:
        """Requests that stopped in iterations up to this one; waits until that is known. All, when the run is to."""
        self._collect(iteration)
        if self.should_stop and self.should_stop():
            return set(range(len(self.tokens)))
        return self._stopped_requests

    def collect_all(self) -> None:
        self._collect(None)

    def _collect(self, last_iteration: int | None) -> None:
        fresh = 0
        while self._pending and (last_iteration is None or self._pending[0][0].iteration <= last_iteration):
            task, ordinal = self._pending.pop(0)
            self.clock.wait(task.resource, ordinal)
            step = task.payload.step
            sampled = self.executor.sampled.on_host(step)
            for request, token in zip(step.requests.tolist(), sampled.tolist(), strict=True):
                if request in self._stopped_requests:
                    continue  # the surplus token of a stop that was seen one iteration late
                if token == NO_TOKEN:
                    dtype = str(self.executor.weights.dtype).removeprefix("torch.")
                    raise InputError(
                        f"the model's logits are not finite numbers in {dtype}: the checkpoint "
                        "holds weights that are not, or values overflow. Check its files, or name another dtype"
                    )
                self.tokens[request].append(token)
                fresh += 1
                self.stops[request] = self._stop_with(request, token)
                if self.stops[request] is not None:
                    self._stopped_requests.add(request)
                finished = self.stops[request] is not None or len(self.tokens[request]) == self.max_tokens[request]
                if finished and self.on_finish:
                    self.on_finish(request, self.tokens[request], self.stops[request])
        if fresh and self.on_tokens:
            self.on_tokens(fresh)

    def _stop_with(self, request: int, token: int) -> int | str | None:
        """What ends the request with this token of it: the token itself, a text that it completes, or nothing."""
        if token in self.stop_ids[request]:
            return token
        return self.stop_texts[request](token) if request in self.stop_texts else None
