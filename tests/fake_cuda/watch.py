"""Watches every access to memory of a run, on a GPU or on the fake one, and checks them against the order of events.

``watching`` patches torch's streams and events (the real ones, or those of ``device``), the lanes of the clock and the
disk, and pushes a dispatch mode on each of the run's threads. Kernels of numba, whose accesses would not be seen, are
left out; not seen are those of threads that the run does not watch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from fake_cuda.accesses import Plain, Watch, Watching, span_of
from fake_cuda.arrays import Arrays
from fake_cuda.order import Place

from flexhybrid.runtime import engine as engine_module
from flexhybrid.runtime import token_masks
from flexhybrid.runtime.clock import HostLane, Lane, LaneThreads
from flexhybrid.runtime.issuing import StreamLane
from flexhybrid.runtime.kernels import compiled
from flexhybrid.runtime.storage import host_memory
from flexhybrid.runtime.storage.disk import DiskSpace


class Threads(LaneThreads):
    """Threads of lanes under watch."""

    def __init__(self, enter: Callable[[], None]):
        super().__init__()
        self._enter = enter

    def __missing__(self, name: str) -> ThreadPoolExecutor:
        thread = self[name] = ThreadPoolExecutor(1, f"flexhybrid-{name}", self._enter)
        return thread


class Helper(ThreadPoolExecutor):
    """A thread that makes masks for the lanes, under watch; it learns the clocks of its callers."""

    def __init__(self, watch: Watch, enter: Callable[[], None], count: int, name: str):
        super().__init__(count, name, enter)
        self._watch = watch

    def submit(self, function, /, *args, **kwargs):
        watch, known = self._watch, self._watch.order.now(self._watch.thread())

        def asked():
            watch.order.learn(watch.thread(), known)
            watch.here.verb = "masks"
            return function(*args, **kwargs)

        return super().submit(asked)


def watched_lane(kind: type[Lane], watch: Watch) -> type[Lane]:
    """Return a lane class that carries the clocks of threads to those that wait for it."""
    order = watch.order

    class WatchedLane(kind):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.given, self.done = deque(), {}

        def submit(self, task, waits):
            self.given.append(order.now(watch.thread()))
            return super().submit(task, waits)

        def _run(self, task, *others):
            self._watched([task], super()._run, task, *others)

        def enqueue(self, tasks, waits):
            watch.streams[watch.thread()] = watch.stream(torch.cuda.current_stream())
            self._watched(tasks, super().enqueue, tasks, waits)

        def _watched(self, tasks, run, *arguments):
            for _ in tasks:
                order.learn(watch.thread(), self.given.popleft())
            watch.here.verb = " and ".join(task.verb for task in tasks)
            run(*arguments)
            watch.here.verb = "-"

        def _pass(self):
            self.done[self.passed] = watch.passed()
            super()._pass()

        def _block(self, ordinal):
            super()._block(ordinal)
            order.learn(watch.thread(), self.done[ordinal])

        def join(self):
            super().join()
            order.learn(watch.thread(), self.done.get(self.passed - 1, []))

    return WatchedLane


def _watch_events(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """Give streams and events clocks; an event has the clock of its latest record, or none."""
    order, (stream_type, event_type) = watch.order, (torch.cuda.Stream, torch.cuda.Event)
    record, wait, synchronize = event_type.record, event_type.wait, event_type.synchronize
    finish = stream_type.synchronize

    def recorded(event, stream=None):
        stream = stream or torch.cuda.current_stream()
        agent = watch.stream(stream)
        order.learn(agent, order.now(watch.thread()))
        event.known = order.now(agent)
        record(event, stream)

    def waited(event, stream=None):
        stream = stream or torch.cuda.current_stream()
        wait(event, stream)
        order.learn(watch.stream(stream), getattr(event, "known", []))

    def synchronized(event):
        known = getattr(event, "known", [])
        synchronize(event)
        order.learn(watch.thread(), known)

    def finished(stream):
        finish(stream)
        order.learn(watch.thread(), order.now(watch.stream(stream)))

    for name, function in (("record", recorded), ("wait", waited), ("synchronize", synchronized)):
        monkeypatch.setattr(event_type, name, function)
    monkeypatch.setattr(stream_type, "wait_event", lambda stream, event: event.wait(stream))
    monkeypatch.setattr(stream_type, "synchronize", finished)


def _watch_graphs(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """Keep the accesses that graphs capture, and repeat them at each replay."""
    graph_type = torch.cuda.CUDAGraph
    begin, end, replay = graph_type.capture_begin, graph_type.capture_end, graph_type.replay

    def begun(graph, *args, **kwargs):
        begin(graph, *args, **kwargs)
        watch.here.captured = graph.accesses = []

    def ended(graph):
        watch.here.captured = None
        graph.accesses = _without_repeats(graph.accesses)
        end(graph)

    def replayed(graph):
        watch.all_by_stream(torch.cuda.current_stream(), getattr(graph, "accesses", ()))
        replay(graph)

    for name, function in (("capture_begin", begun), ("capture_end", ended), ("replay", replayed)):
        monkeypatch.setattr(graph_type, name, function)


def _without_repeats(accesses: list[tuple[Place, bool, str]]) -> list[tuple[Place, bool, str]]:
    """Return one of several accesses to the same bytes, a writing one if any: the others conflict alike."""
    kept: dict[Place, tuple[Place, bool, str]] = {}
    for access in accesses:
        place, write, _ = access
        if write or place not in kept:
            kept[place] = access
    return [*kept.values()]


class Registering:
    """The CUDA runtime's binding; page-locked memory is watched."""

    def __init__(self, runtime, watch: Watch):
        self._runtime, self._watch = runtime, watch

    def cudaHostRegister(self, address: int, size: int, flags: int):  # noqa: N802
        self._watch.register(address, size)
        return self._runtime.cudaHostRegister(address, size, flags)

    def cudaHostUnregister(self, address: int):  # noqa: N802
        self._watch.unregister(address)
        return self._runtime.cudaHostUnregister(address)


@contextmanager
def watching(runs: Plain | None = None, modes: Callable[[Watch], Arrays] = Arrays) -> Iterator[Watch]:
    """Watch the runs of engines that are made in the block, on ``Watch.threads``."""
    watch = Watch(runs or Plain())

    def enter() -> None:
        watch.runs.enter_thread()
        modes(watch).__enter__()
        Watching(watch).__enter__()

    with pytest.MonkeyPatch.context() as monkeypatch:
        _watch_events(monkeypatch, watch)
        _watch_graphs(monkeypatch, watch)
        monkeypatch.setattr(compiled, "has_numba", lambda: False)
        runtime = host_memory._cuda_runtime()
        monkeypatch.setattr(host_memory, "_cuda_runtime", lambda: Registering(runtime, watch))
        monkeypatch.setattr(engine_module, "HostLane", watched_lane(HostLane, watch))
        monkeypatch.setattr(engine_module, "StreamLane", watched_lane(StreamLane, watch))
        monkeypatch.setattr(engine_module, "LaneThreads", lambda: Threads(enter))
        monkeypatch.setattr(token_masks, "ThreadPoolExecutor", partial(Helper, watch, enter))
        for name, write in (("read", True), ("write", False)):
            monkeypatch.setattr(DiskSpace, name, _watched_transfer(getattr(DiskSpace, name), write, watch))
        with modes(watch), Watching(watch):
            yield watch


def _watched_transfer(transfer: Callable, write: bool, watch: Watch) -> Callable:
    def watched(space, pieces):
        for _, memory in pieces:
            watch.on_host(span_of(memory), write, "disk")
        transfer(space, pieces)

    return watched
