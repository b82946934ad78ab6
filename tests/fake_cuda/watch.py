"""Watches every access to memory of a run, on a GPU or on the fake one, and checks them against the order of events.

``watching`` patches torch's streams and events (the real ones, or those of ``device``), the lanes of the clock and the
disk, and pushes a dispatch mode on each of the run's threads. Not seen are accesses of numba's kernels, and of threads
that the run does not watch.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fake_cuda.order import Cells, Clock, Order, Place, Span
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from flexhybrid.runtime import engine as engine_module
from flexhybrid.runtime.clock import Lane, LaneThreads, StreamLane
from flexhybrid.runtime.storage import host_memory
from flexhybrid.runtime.storage.disk import DiskSpace

#: Operations that torch would take apart, and that are one kernel or a few of their own here.
WHOLE = {"linear", "matmul", "softmax", "log_softmax", "scaled_dot_product_attention", "layer_norm", "rms_norm"}
#: Operations whose result the host waits for.
WAITING = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "item", "_unique2", "unique_dim"}
FACTORIES = ("new_", "empty", "zeros", "ones", "full", "arange", "eye", "scalar_tensor", "rand", "lift")


class Mixed(RuntimeError):
    """An operation has tensors of host and device."""


class Operation(NamedTuple):
    """What is known of an operation of torch."""

    name: str
    composite: bool  #: made of others
    view: bool
    writes: tuple[bool, ...]  #: of each argument by place
    writes_by_name: frozenset[str]
    returns: tuple[str, ...]  #: names of the arguments that it returns, where it writes to some


@lru_cache(None)
def operation(func) -> Operation:
    name, arguments = str(func).split(".")[1], func._schema.arguments
    written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    view = func.is_view or name in ("detach", "alias", "as_strided", "_reshape_alias", "lift_fresh", "_unsafe_view")
    names = [a.name for a, is_written in zip(arguments, written, strict=True) if is_written]
    return Operation(name, composite and name not in WHOLE, view, tuple(written), frozenset(names), tuple(names))


def span_of(tensor: torch.Tensor) -> Span:
    size = tensor.element_size()
    return Span(tensor.data_ptr(), tuple(tensor.shape), tuple(s * size for s in tensor.stride()), size)


class Plain:
    """Runs operations as torch does, on whatever device there is; ``device.Deferred`` takes its place."""

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def run(self, _stream, func, args, kwargs) -> Any:
        return func(*args, **kwargs)

    def wait(self, func, args, kwargs) -> Any:
        return func(*args, **kwargs)

    def make(self, _stream, func, args, kwargs) -> Any:
        return func(*args, **kwargs)

    def enter_thread(self) -> None: ...


class Watch:
    """What is seen of runs. ``waits`` counts operations for which a thread of the host waited, by name and verb."""

    def __init__(self, runs: Plain):
        self.order, self.runs = Order(), runs
        self.waits: Counter[tuple[str, str]] = Counter()
        self.here = threading.local()
        self.registered: dict[int, int] = {}  #: page-locked memory: address -> the one behind it
        self.streams: dict[int, int] = {}  #: thread -> the stream of its lane
        self.progress: defaultdict[int, list[tuple[int, Clock]]] = defaultdict(list)  #: of streams, by threads' times
        self.kept: list = []  #: page-locked memory of torch's own, as long as the watch

    # ---- who and where

    def thread(self) -> int:
        """Return the agent of the calling thread."""
        agent = getattr(self.here, "agent", None)
        if agent is None:
            agent = self.here.agent = self.order.agent(("thread", threading.get_ident()), thread=True)
        return agent

    def stream(self, stream) -> int:
        """Return the agent of a stream."""
        return self.order.agent(("stream", stream.cuda_stream))

    @property
    def verb(self) -> str:
        return getattr(self.here, "verb", "-")

    def is_registered(self, address: int) -> bool:
        return any(low <= address < high for low, high in self.registered.items())

    # ---- accesses

    def on_host(self, place: Place, write: bool, what: str = "") -> None:
        """Check an access of the calling thread to page-locked memory; other memory of the host is its owner's."""
        if self.is_registered(place.bounds()[0]):
            self.order.access(self.thread(), place, write, f"{self.verb} ({what})")

    def by_stream(self, stream, place: Place, write: bool, what: str) -> None:
        """Check an access of what the calling thread enqueues now."""
        agent = self.stream(stream)
        self.order.learn(agent, self.order.now(self.thread()))
        self.order.access(agent, place, write, f"{self.verb} ({what})")

    def passed(self) -> Clock:
        """Note how far the calling thread's stream has come with a task; return what the thread knows."""
        thread = self.thread()
        if stream := self.streams.get(thread):
            self.progress[stream].append((self.order.step(thread), self.order.now(stream)))
        return self.order.now(thread)

    def reuse(self, stream, place: Place, thread: int, known: Clock) -> None:
        """Check that a stream may have memory that ``thread``, who knew ``known``, has let go of. If that was not the
        thread that feeds the stream, this one may have been as far back as the other one knew."""
        agent, feeder = self.stream(stream), self.thread()
        if thread != feeder:
            at = known[feeder] if feeder < len(known) else 0
            least = max((one for one in self.progress[agent] if one[0] <= at), default=(0, []))[1]
            known = [max(pair) for pair in zip_longest(known, least, fillvalue=0)]
            self.order.access(agent, place, True, "memory of another tensor", known)
        else:
            self.by_stream(stream, place, True, "memory of another tensor")

    def perform(self, func, args: tuple, kwargs: dict) -> Any:
        """Check an operation's accesses, and run it."""
        info, runs = operation(func), self.runs
        if info.view:
            return args[0].view(args[1]) if info.name == "_unsafe_view" else func(*args, **kwargs)
        reads, writes = _operands(info, args, kwargs)
        operands = reads + writes
        places = [runs.on_device(tensor) for tensor in operands]
        factory = info.name.startswith(FACTORIES) or info.name.endswith("_like")
        if factory and not info.writes_by_name:
            return self._make(func, args, kwargs, any(places))
        if not any(places):
            for tensor, write in [(t, False) for t in reads] + [(t, True) for t in writes]:
                if tensor.device.type == "cpu":
                    self.on_host(span_of(tensor), write, info.name)
            made = func(*args, **kwargs)
            if info.name == "_to_copy" and runs.on_device(made):
                self.by_stream(torch.cuda.current_stream(), span_of(made), True, info.name)
            return made
        if info.name in WAITING or _is_masked(info, args) or info.name == "_to_copy" and self._to_host(kwargs):
            return self._wait(func, args, kwargs, operands)
        staged = info.name == "copy_" and not all(places) and not self._is_direct(writes[0], args[1])
        if info.name != "copy_" and any(t.dim() for t, there in zip(operands, places, strict=True) if not there):
            raise Mixed(f"{info.name} in {self.verb} has tensors of host and device")
        stream = torch.cuda.current_stream()
        for tensor, write in [(t, False) for t in reads] + [(t, True) for t in writes]:
            if runs.on_device(tensor) or self.is_registered(tensor.data_ptr()):
                self.by_stream(stream, span_of(tensor), write, info.name)
        made = runs.run(stream, func, args, kwargs)
        if staged:
            self._wait_for(info.name)
        if not info.returns:
            for tensor in pytree.tree_leaves(made):
                if isinstance(tensor, torch.Tensor):
                    self.by_stream(stream, span_of(tensor), True, info.name)
        return made

    def _make(self, func, args: tuple, kwargs: dict, from_device: bool) -> Any:
        asked, given = getattr(self.here, "asked", None), kwargs.get("device")
        kind = None if given is None else torch.device(given).type
        if kind == "meta":
            return func(*args, **kwargs)
        if "cuda" in (asked, kind) or asked is None and from_device:
            stream = torch.cuda.current_stream()
            made = self.runs.make(stream, func, args, kwargs)
            self.by_stream(stream, span_of(made), True, "new memory")
            return made
        return func(*args, **kwargs)

    def _to_host(self, kwargs: dict) -> bool:
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == "cpu" and isinstance(self.runs, Plain)

    def _is_direct(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Return whether a copy over the link needs no help of the host: page-locked, and contiguous on both sides."""
        host = source if self.runs.on_device(target) else target
        alike = target.dtype == source.dtype and target.shape == source.shape
        locked = self.is_registered(host.data_ptr()) or self.runs.is_pinned(host)
        return locked and alike and target.is_contiguous() and source.is_contiguous()

    def _wait_for(self, name: str) -> None:
        self.waits[name, self.verb] += 1
        torch.cuda.current_stream().synchronize()

    def _wait(self, func, args: tuple, kwargs: dict, operands: list[torch.Tensor]) -> Any:
        self._wait_for(operation(func).name)
        for tensor in operands:
            self.by_stream(torch.cuda.current_stream(), span_of(tensor), False, operation(func).name)
        return self.runs.wait(func, args, kwargs)


def _operands(info: Operation, args: tuple, kwargs: dict) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operation reads and writes; what it writes in place, it reads unless it is a copy."""
    reads, writes = [], []
    for place, value in enumerate(args):
        written = info.writes[place]
        for leaf in [value] if isinstance(value, torch.Tensor) else _leaves(value):
            (writes if written else reads).append(leaf)
    for name, value in kwargs.items():
        for leaf in [value] if isinstance(value, torch.Tensor) else _leaves(value):
            (writes if name in info.writes_by_name else reads).append(leaf)
    return reads, writes


def _leaves(value) -> list[torch.Tensor]:
    return [leaf for leaf in value if isinstance(leaf, torch.Tensor)] if isinstance(value, list | tuple) else []


def _is_masked(info: Operation, args: tuple) -> bool:
    """Return whether an index is a mask, whose true elements are counted first."""
    if info.name not in ("index", "index_put_", "index_put"):
        return False
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


class Watching(TorchDispatchMode):
    """The mode of one thread."""

    def __init__(self, watch: Watch):
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if operation(func).composite:
            with self:
                made = func.decompose(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
        with torch._C.DisableTorchFunction():
            return self.watch.perform(func, args, kwargs or {})


# ---- numpy


class Watched(np.ndarray):
    """Page-locked memory as numpy sees it, whose elements are read and written under watch."""

    watch: Watch | None = None

    def __array_finalize__(self, base):
        self.watch = getattr(base, "watch", None)

    @property
    def plain(self) -> np.ndarray:
        return self.view(np.ndarray)

    def seen(self, write: bool, what: str) -> None:
        place = Span(self.__array_interface__["data"][0], self.shape, self.strides, self.itemsize)
        if self.watch:
            self.watch.on_host(place, write, what)

    def _picked(self, key) -> Place | None:
        """Return the place of elements that an index picks; None where it makes a view."""
        if _is_basic(key):
            return None
        addresses = np.array(self.__array_interface__["data"][0])
        for n, stride in zip(self.shape, self.strides, strict=True):
            addresses = addresses[..., None] + stride * np.arange(n)
        return Cells(np.unique(addresses[key]), self.itemsize)

    def __getitem__(self, key):
        place = self._picked(key)
        if place is None:
            found = super().__getitem__(key)
            if isinstance(found, Watched):
                return found
            place = Span(self.__array_interface__["data"][0], self.shape, self.strides, self.itemsize)
        if self.watch:
            self.watch.on_host(place, False, "index")
        return self.plain[key]

    def __setitem__(self, key, value):
        place, plain = self._picked(key), self.plain
        if place is None:
            part = plain[key if isinstance(key, tuple) else (key,)]
            if isinstance(part, np.ndarray):
                place = Span(part.__array_interface__["data"][0], part.shape, part.strides, part.itemsize)
            else:
                place = Span(self.__array_interface__["data"][0], self.shape, self.strides, self.itemsize)
        if self.watch:
            self.watch.on_host(place, True, "assignment")
        plain[key] = _unwatched(value)

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **others):
        for array in out:
            if isinstance(array, Watched):
                array.seen(True, ufunc.__name__)
        others |= {"out": tuple(map(_silent, out))} if out else {}
        return getattr(ufunc, method)(*map(_unwatched, inputs), **others)

    def __array_function__(self, func, types, args, kwargs):
        written = [kwargs.get("out")] + ([args[0]] if func is np.copyto else [])
        for array in written:
            if isinstance(array, Watched):
                array.seen(True, func.__name__)

        def plain(value):
            if any(value is array for array in written):
                return _silent(value)
            return _unwatched(value)

        return func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs))


def _is_basic(key) -> bool:
    """Return whether an index makes a view."""
    keys = key if isinstance(key, tuple) else (key,)
    return all(one is None or one is Ellipsis or isinstance(one, slice | int | np.integer) for one in keys)


def _silent(value):
    return value.plain if isinstance(value, Watched) else value


def _unwatched(value):
    """Return a plain array that is about to be read."""
    if isinstance(value, Watched):
        value.seen(False, "read")
        return value.plain
    return value


def _reading(name: str) -> Callable:
    def method(self, *args, **kwargs):
        self.seen(False, name)
        return getattr(self.plain, name)(*args, **kwargs)

    return method


for _name in ("tolist", "item", "copy", "astype", "sum", "max", "min", "any", "all", "nonzero", "argsort", "tobytes"):
    setattr(Watched, _name, _reading(_name))


class Arrays(torch.overrides.TorchFunctionMode):
    """Hands out page-locked memory to numpy under watch; the mode of one thread."""

    def __init__(self, watch: Watch):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.call(func, args, kwargs or {})

    def call(self, func, args: tuple, kwargs: dict) -> Any:
        if func is torch.Tensor.numpy and self.watch.is_registered(args[0].data_ptr()):
            array = func(*args, **kwargs).view(Watched)
            array.watch = self.watch
            return array
        if func is torch.from_numpy:
            return func(*map(_silent, args), **kwargs)
        if func is torch.Tensor.tolist and not self.watch.runs.on_device(args[0]):
            self.watch.on_host(span_of(args[0]), False, "tolist")
        return func(*args, **kwargs)


# ---- waits


class Threads(LaneThreads):
    """Threads of lanes, under watch."""

    def __init__(self, enter: Callable[[], None]):
        super().__init__()
        self._enter = enter

    def __missing__(self, name: str) -> ThreadPoolExecutor:
        thread = self[name] = ThreadPoolExecutor(1, f"flexhybrid-{name}", self._enter)
        return thread


def watched_lane(kind: type[Lane], watch: Watch) -> type[Lane]:
    """Return a kind of lane that carries the clocks of threads to those that wait for it."""
    order = watch.order

    class WatchedLane(kind):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.given, self.done = deque(), {}

        def submit(self, task, waits):
            self.given.append(order.now(watch.thread()))
            return super().submit(task, waits)

        def _run(self, task, waits, submitted_s):
            order.learn(watch.thread(), self.given.popleft())
            if isinstance(self, StreamLane):
                watch.streams[watch.thread()] = watch.stream(torch.cuda.current_stream())
            watch.here.verb = task.verb
            super()._run(task, waits, submitted_s)
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
    """Let streams and events carry clocks. An event that is recorded again has the clock of the last time; one that was
    never recorded has none, and holds nobody back."""
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


class Registering:
    """The CUDA runtime's binding; what it page-locks is watched."""

    def __init__(self, runtime, watch: Watch):
        self._runtime, self._watch = runtime, watch

    def cudaHostRegister(self, address: int, size: int, flags: int):  # noqa: N802
        self._watch.registered[address] = address + size
        return self._runtime.cudaHostRegister(address, size, flags)

    def cudaHostUnregister(self, address: int):  # noqa: N802
        self._watch.registered.pop(address, None)
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
        runtime = host_memory._cuda_runtime()
        monkeypatch.setattr(host_memory, "_cuda_runtime", lambda: Registering(runtime, watch))
        monkeypatch.setattr(engine_module, "Lane", watched_lane(Lane, watch))
        monkeypatch.setattr(engine_module, "StreamLane", watched_lane(StreamLane, watch))
        monkeypatch.setattr(engine_module, "LaneThreads", lambda: Threads(enter))
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
