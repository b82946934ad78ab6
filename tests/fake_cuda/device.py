"""A CUDA device on a CPU, for the functions of ``torch.cuda`` that the runtime calls.

Verbs run when they are enqueued, as on CUDA; each tensor operation runs later, on its stream. Nothing runs before a
thread of the host waits for an event; then operations of all streams run in an order drawn at random, as far as the
streams' waits allow, until the event is reached. Memory of the device that Python lets go of is given at once to
whatever its stream does next, and overwritten: with NaN, or with numbers too large for an index.

Tensors of the device are CPU tensors in one arena; a function mode says "cuda" where Python asks for their device.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda.accesses import Operation, Plain, Watch, tensors_of
from fake_cuda.arrays import Arrays
from fake_cuda.order import Span
from fake_cuda.watch import watching
from torch.utils._python_dispatch import _disable_current_modes

from flexhybrid.runtime import cuda
from flexhybrid.runtime.kernels import quantize
from flexhybrid.runtime.verbs import graphed

DEVICE = torch.device("cuda")
DEVICE_OF, IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__
MOVES = torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda
ARENA_BYTES = 1 << 28  #: touched as far as it is used
ALIGNMENT = 64
#: Operations that take what CUDA's take and a CPU's do not.
LACKING: dict[str, Callable] = {"histc": lambda rows, *others: torch.histc(rows.float(), *others)}
SHAPES: dict[Any, Any] = {}  #: of results, on any device
POISON = 0x7FFFFFFF  #: NaN in float32, and in integers beyond every index


class Block(np.ndarray):
    """Memory of a tensor of the device; where it goes when the tensor is gone."""

    freed: deque | None = None
    watch: Watch | None = None

    def __del__(self):
        if self.freed is not None and self.watch is not None:
            thread = self.watch.thread()
            place = Span(self.__array_interface__["data"][0], self.shape, self.strides, 1)
            self.freed.append((place, thread, self.watch.order.now(thread)))


class Illegal(RuntimeError):
    """What CUDA refuses while a stream is captured."""


class Memory:
    """Where the tensors of a stream, or of the graphs of a pool, get their memory from."""

    def __init__(self):
        self.free: defaultdict[int, list[int]] = defaultdict(list)  #: addresses, by size
        #: what Python has let go of since, by which thread, and what that knew
        self.freed: deque[tuple[Span, int, list[int]]] = deque()


class Device(Plain):
    """The device: its memory, its streams, and how operations run on it."""

    def __init__(self, seed: int = 0, deferred: bool = True):
        self.deferred = deferred  #: False: every operation runs when it is enqueued
        whole = np.zeros(ARENA_BYTES + ALIGNMENT, dtype=np.uint8)
        self.arena = whole[-whole.ctypes.data % ALIGNMENT :][:ARENA_BYTES]
        self.base, self.words = self.arena.ctypes.data, self.arena.view(np.int32)
        self.views: dict[torch.dtype, torch.Tensor] = {torch.uint8: torch.from_numpy(self.arena)}
        self.used = 0  #: by blocks that were ever made
        self.reused = self.poisoned = self.run_late = 0
        self.streams: list[Stream] = []
        self.watch: Watch | None = None
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._making = threading.Lock()
        self.here = threading.local()
        self.default = Stream(self)

    # ---- memory

    def on_device(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        if not address:  # it has no elements, or no memory at all
            address = tensor.untyped_storage().data_ptr() if tensor.device.type == "cpu" else 0
        return 0 <= address - self.base < ARENA_BYTES

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return False  # what is page-locked is registered

    def raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same memory without holding it: what a kernel's arguments are."""
        offset = tensor.data_ptr() - self.base
        if not 0 <= offset < ARENA_BYTES or not tensor.numel():
            return tensor
        view = self.views.get(tensor.dtype)
        if view is None:
            view = self.views[tensor.dtype] = self.views[torch.uint8].view(tensor.dtype)
        return view.as_strided(tensor.shape, tensor.stride(), offset // tensor.element_size())

    def new(self, stream: Stream, shape, stride, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of a stream, of the size of an earlier tensor of it where one is gone."""
        elements = 1 + sum([(n - 1) * s for n, s in zip(shape, stride, strict=True)]) if 0 not in shape else 0
        size = max(ALIGNMENT, -(-elements * dtype.itemsize // ALIGNMENT) * ALIGNMENT)
        with self._making:
            if free := stream.memory.free[size]:
                address = free.pop()
                self.reused += 1
            else:
                address = self.base + self.used
                self.used += size
                if self.used > ARENA_BYTES:
                    raise MemoryError("the fake device's arena is full")
        block = self.arena[address - self.base :][:size].view(Block)
        block.freed, block.watch = stream.memory.freed, self.watch
        flat = torch.frombuffer(block, dtype=dtype)
        return flat.as_strided(shape, stride)

    def take_back(self, stream: Stream) -> None:
        """Overwrite what Python has let go of: it may be another tensor's memory from now on."""
        memory = stream.memory
        while memory.freed:
            place, thread, known = memory.freed.popleft()
            (size,) = place.shape
            self.watch.reuse(stream, place, thread, known)
            stream.put(partial(self._poison, place.address, size))
            memory.free[size].append(place.address)
            self.poisoned += 1

    def _poison(self, address: int, size: int) -> None:
        start = (address - self.base) // 4
        self.words[start : start + size // 4] = POISON

    # ---- operations

    def run(self, stream: Stream, info: Operation, args: tuple, kwargs: dict) -> Any:
        """Enqueue an operation; return its results, whose values are not there yet."""
        self.take_back(stream)
        func = info.call
        raw_args, raw_kwargs = _mapped(self.raw, args, kwargs)
        if info.returns:
            stream.put(lambda: func(*raw_args, **raw_kwargs))
            if info.is_void:
                return None
            given = dict(zip(info.arguments, args, strict=False)) | kwargs
            made = [given[name] for name in info.returns]
            return made[0] if len(made) == 1 else tuple(made)
        shapes = self._shapes_of(info, args, kwargs)
        ((made,), _) = _mapped(lambda t: self.new(stream, t.shape, t.stride(), t.dtype), (shapes,), {})
        targets = list(map(self.raw, tensors_of(made)))
        compute = LACKING.get(info.name, func)

        def work() -> None:
            for target, one in zip(targets, tensors_of(compute(*raw_args, **raw_kwargs)), strict=True):
                target.copy_(one)

        stream.put(work)
        return made

    def make(self, stream: Stream, info: Operation, args: tuple, kwargs: dict) -> torch.Tensor:
        """Make a tensor of the device: uninitialized where it is not filled."""
        self.take_back(stream)
        raw_args, raw_kwargs = _mapped(self.raw, args, kwargs)
        shape = self._shapes_of(info, args, kwargs)
        made = self.new(stream, shape.shape, shape.stride(), shape.dtype)
        target = self.raw(made)
        if info.name.startswith(("empty", "new_empty")):
            memory = made.untyped_storage()  # the tensor's own address is 0 where it has no elements
            stream.put(partial(self._poison, memory.data_ptr(), memory.nbytes()))
        else:
            stream.put(lambda: target.copy_(info.call(*raw_args, **raw_kwargs)))
        return made

    def wait(self, info: Operation, args: tuple, kwargs: dict) -> Any:
        """Run an operation whose result the host needs: its stream has come to it."""
        raw_args, raw_kwargs = _mapped(self.raw, args, kwargs)
        found = info.call(*raw_args, **raw_kwargs)
        stream = self.current()

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            made = self.new(stream, tensor.shape, tensor.stride(), tensor.dtype)
            made.copy_(tensor)
            return made

        return _mapped(placed, (found,), {})[0][0]

    def copy_rows(
        self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, height: int, kind: int, stream: int
    ) -> int:
        """``cudaMemcpy2DAsync`` from the host, on the calling thread's stream: a copy a row, each under watch."""
        if kind != 1 or stream != self.current().cuda_stream:
            return 1  # cudaErrorInvalidValue
        if height > 1 and width > min(to_pitch, source_pitch):
            return 12  # cudaErrorInvalidPitchValue
        for row in range(height):
            held = (ctypes.c_char * width).from_address(source + row * source_pitch)
            first = to - self.base + row * to_pitch
            target = self.views[torch.uint8][first : first + width]
            target.copy_(torch.frombuffer(held, dtype=torch.uint8), non_blocking=True)
        return 0

    def _shapes_of(self, info: Operation, args: tuple, kwargs: dict) -> Any:
        """Return an operation's results without values, of which their shapes, strides and dtypes count."""

        def described(value):
            if isinstance(value, torch.Tensor):
                return value.shape, value.stride(), value.dtype
            return tuple(map(described, value)) if isinstance(value, list | tuple) else (type(value), value)

        key = info.call, described(args), tuple([(name, described(value)) for name, value in kwargs.items()])
        if (found := SHAPES.get(key)) is None:
            meta_args, meta_kwargs = _mapped(
                lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), args, kwargs
            )
            if "device" in info.arguments:
                meta_kwargs = dict(meta_kwargs, device="meta")
            meta_kwargs.pop("pin_memory", None)
            found = SHAPES[key] = info.call(*meta_args, **meta_kwargs)
        return found

    # ---- time

    def enter_thread(self) -> None:
        torch.set_num_threads(1)

    def current(self) -> Stream:
        """Return the calling thread's stream."""
        return getattr(self.here, "stream", self.default)

    def run_until(self, mark: Mark) -> None:
        """Run what is enqueued, of all streams, until a mark is reached."""
        if mark.reached:
            return
        with self._lock, _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode():
            while not mark.reached:
                ready = [stream for stream in self.streams if stream.can_run()]
                if not ready:
                    raise RuntimeError("the streams of the device wait for each other")
                stream = self._random.choice(ready)
                for _ in range(self._random.choice((1, 3, 12))):
                    if not stream.can_run():
                        break
                    stream.queue.popleft()()
                    self.run_late += 1


def _mapped(function: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Apply a function to all tensors of an operation's arguments."""

    def mapped(values):
        return [
            function(value)
            if isinstance(value, torch.Tensor)
            else type(value)(mapped(value))
            if type(value) in (list, tuple)
            else value
            for value in values
        ]

    return tuple(mapped(args)), dict(zip(kwargs, mapped(kwargs.values()), strict=True))


class Mark:
    """A place in a stream."""

    def __init__(self):
        self.reached, self.at_s = False, 0.0

    def __call__(self) -> None:
        self.at_s, self.reached = time.perf_counter(), True


class Stream:
    """``torch.cuda.Stream``."""

    numbers = itertools.count(1)

    def __init__(self, device: Device):
        self.cuda_stream = next(Stream.numbers)
        self.device = device
        self.queue: deque[Callable[[], Any]] = deque()
        self.waits: dict[Callable, Mark] = {}
        self.own = Memory()
        self.captured: Graph | None = None
        device.streams.append(self)

    @property
    def memory(self) -> Memory:
        """Where what is made now gets its memory from."""
        return self.captured.memory if self.captured else self.own

    def refuse_in_capture(self, what: str) -> None:
        """Raise Illegal while this stream is captured."""
        if self.captured:
            raise Illegal(f"{what} while the stream is captured")

    def put(self, work: Callable[[], Any]) -> None:
        if self.captured:
            self.captured.work.append(work)
            return
        self.queue.append(work)
        if not self.device.deferred:
            self.run_all()

    def can_run(self) -> bool:
        """Return whether there is work that waits for no other stream."""
        if not self.queue or not self.waits:
            return bool(self.queue)
        awaited = self.waits.get(self.queue[0])
        if awaited is not None and awaited.reached:
            del self.waits[self.queue[0]]
            awaited = None
        return awaited is None

    def wait(self, mark: Mark) -> None:
        def waited() -> None: ...

        self.refuse_in_capture("waiting for work outside of it")
        self.waits[waited] = mark
        self.put(waited)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def synchronize(self) -> None:
        self.run_all()

    def run_all(self) -> None:
        """Run all that is enqueued here."""
        self.refuse_in_capture("waiting for the stream")
        self.queue.append(mark := Mark())
        self.device.run_until(mark)


class Event:
    """``torch.cuda.Event``."""

    device: Device
    made = 0

    def __init__(self, enable_timing: bool = False, blocking: bool = False):
        self.mark: Mark | None = None
        type(self).made += 1

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.device.current()
        stream.refuse_in_capture("recording an event that others wait for")
        self.mark = Mark()
        stream.put(self.mark)

    def wait(self, stream: Stream | None = None) -> None:
        if self.mark:
            (stream or self.device.current()).wait(self.mark)

    def synchronize(self) -> None:
        self.device.current().refuse_in_capture("waiting for an event")
        if self.mark:
            self.device.run_until(self.mark)

    def query(self) -> bool:
        return self.mark is None or self.mark.reached

    def elapsed_time(self, end: Event) -> float:
        return (end.mark.at_s - self.mark.at_s) * 1e3


class GraphPool:
    """Memory that graphs share, and the graphs that hold it."""

    def __init__(self):
        self.memory, self.graphs = Memory(), weakref.WeakSet[Graph]()


class Graph:
    """``torch.cuda.CUDAGraph``: while its stream is captured nothing runs. What is launched then is recorded with its
    addresses and its Python values, and runs with these, and no others, at each replay."""

    device: Device
    pools: dict[object, GraphPool]  #: by their handles
    made: list[SimpleNamespace]  #: of each that was captured, also of those that are gone, its ``counts``

    def __init__(self):
        self.work: list[Callable[[], Any]] = []
        self.memory, self.stream, self.ended, self.counts = Memory(), None, False, SimpleNamespace(replays=0)
        self.pool_id: object = None

    def pool(self) -> object:
        return self.pool_id

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.stream = self.device.current()
        self.stream.refuse_in_capture("beginning another capture")
        if self.stream is self.device.default:
            raise Illegal("the default stream cannot be captured")
        if capture_error_mode == "global":
            raise Illegal("other threads allocate memory and wait for events meanwhile")
        if pool in self.pools and not self.pools[pool].graphs:
            raise Illegal("this pool's graphs have all gone (torch 2.11: use_count > 0 in CachingHostAllocator.h)")
        self.pool_id = object() if pool is None else pool
        of_graph = self.pools.setdefault(self.pool_id, GraphPool())
        of_graph.graphs.add(self)
        self.memory = of_graph.memory
        self.stream.captured = self
        self.made.append(self.counts)

    def capture_end(self) -> None:
        if self.stream is not self.device.current() or self.stream.captured is not self:
            raise Illegal("this graph's capture has not begun on the current stream")
        self.stream.captured, self.ended = None, True

    def replay(self) -> None:
        if not self.ended:
            raise Illegal("a graph that was not captured")
        stream = self.device.current()
        stream.refuse_in_capture("replaying a graph")
        self.counts.replays += 1
        for work in self.work:
            stream.put(work)


class Runtime:
    """The CUDA runtime's binding."""

    def __init__(self, device: Device):
        self.device, self.locked = device, set[int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if address in self.locked:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.locked.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if self.device.current().captured:
            return 900  # cudaErrorStreamCaptureUnsupported
        self.locked.remove(address)
        return 0


#: Functions that are something else where the tensor is on a GPU; and those that name one.
PLACED = {
    DEVICE_OF,
    IS_CUDA,
    torch.Tensor.pin_memory,
    *MOVES,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.from_numpy,
}


class Placed(Arrays):
    """Says that tensors in the device's arena are on a GPU, and makes those that are asked for there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not kwargs and func not in PLACED:
            return func(*args)
        kwargs, device = kwargs or {}, self.watch.runs
        if func == DEVICE_OF:
            return DEVICE if device.on_device(args[0]) else func(*args)
        if func == IS_CUDA:
            return device.on_device(args[0])
        if func is torch.Tensor.pin_memory:
            return self._pinned(args[0].shape, args[0].dtype).copy_(args[0])
        if func in MOVES:
            return self._to(func, args, kwargs)
        if func is torch.Tensor.numpy and device.on_device(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func is torch.Tensor.tolist and device.on_device(args[0]):
            return self._to(torch.Tensor.cpu, args, {}).tolist()
        if kwargs.get("pin_memory"):
            made = func(*args, **dict(kwargs, pin_memory=False))
            return self._pinned(made.shape, made.dtype).copy_(made)
        asked = kwargs.get("device")
        if asked is None or torch.device(asked).type == "meta":
            return self.call(func, args, kwargs)
        earlier, here = getattr(self.watch.here, "asked", None), self.watch.here
        here.asked = torch.device(asked).type
        try:
            return self.call(func, args, dict(kwargs, device="cpu"))
        finally:
            here.asked = earlier

    def _pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return page-locked memory of torch's own allocator, which gives none of it to another tensor too early."""
        self.watch.runs.current().refuse_in_capture("allocating page-locked memory")
        size = -(-max(1, shape.numel()) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        memory = (ctypes.c_char * size)()
        address = ctypes.addressof(memory)
        self.watch.register(address, size)
        self.watch.kept.append(memory)
        return torch.frombuffer(memory, dtype=dtype)[: shape.numel()].view(shape)

    def _to(self, func, args: tuple, kwargs: dict) -> torch.Tensor:
        tensor, *others = args
        device, dtype, keep = self.watch.runs, kwargs.get("dtype"), dict(kwargs)
        target = {torch.Tensor.cpu: "cpu", torch.Tensor.cuda: "cuda"}.get(func, keep.pop("device", None))
        for value in list(others):
            if isinstance(value, torch.device | str):
                target = value
                others.remove(value)
            elif isinstance(value, torch.Tensor):
                target, dtype = ("cuda" if device.on_device(value) else "cpu"), value.dtype
                others[others.index(value)] = dtype
            elif isinstance(value, torch.dtype):
                dtype = value
        there = device.on_device(tensor)
        if target is None or (torch.device(target).type == "cuda") == there or torch.device(target).type == "meta":
            if target is not None and torch.device(target).type == "meta":
                return func(*args, **kwargs)
            return torch.Tensor.to(tensor, *others, **keep) if others or keep else tensor
        source = tensor if dtype is None or there else torch.Tensor.to(tensor, dtype)
        if not there:
            self.watch.here.asked = "cuda"
            try:
                made = torch.empty(source.shape, dtype=source.dtype)
            finally:
                self.watch.here.asked = None
        else:
            made = torch.empty(source.shape, dtype=dtype or source.dtype)
        return made.copy_(source, non_blocking=bool(kwargs.get("non_blocking", False)))


@contextmanager
def fake_cuda(seed: int = 0, deferred: bool = True) -> Iterator[Watch]:
    """Let engines in the block run on ``DEVICE``, watched."""
    device = Device(seed, deferred)
    stream_type = type("Stream", (Stream,), {"__init__": lambda self, *_, **__: Stream.__init__(self, device)})
    event_type = type("Event", (Event,), {"device": device, "made": 0})
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.cuda, "Stream", stream_type)
        monkeypatch.setattr(torch.cuda, "Event", event_type)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(device.here, "stream", stream))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda of=None: device.current())
        graph_type = type("CUDAGraph", (Graph,), {"device": device, "pools": {}, "made": []})
        monkeypatch.setattr(torch.cuda, "CUDAGraph", graph_type)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        runtime = Runtime(device)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(cuda, "memcpy_2d", lambda: device.copy_rows)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda of=None: (7, 5))
        monkeypatch.setattr(quantize, "KERNELS", {})
        device.streams.clear()
        device.default = stream_type()
        kept_ones = (cuda.lane_streams, cuda.lane_events, graphed.pool_keeper)
        for kept in kept_ones:
            kept.cache_clear()
        try:
            with watching(device, Placed) as watch:
                device.watch = watch
                yield watch
        finally:
            for kept in kept_ones:
                kept.cache_clear()
