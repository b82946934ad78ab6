"""Accesses of torch's operations to memory, and of other code by spans, checked against the order of events."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from fake_cuda.order import Clock, Order, Place, Span
from torch.utils._python_dispatch import TorchDispatchMode

#: Operations that torch would take apart, and that are one kernel or a few of their own here.
WHOLE = {"linear", "matmul", "softmax", "log_softmax", "scaled_dot_product_attention", "layer_norm", "rms_norm"}
#: Operations whose result the host waits for.
WAITING = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "item", "_unique2", "unique_dim"}
FACTORIES = ("new_", "empty", "zeros", "ones", "full", "arange", "eye", "scalar_tensor", "rand", "lift")


class Mixed(RuntimeError):
    """An operation has tensors of host and device."""


class Operation(NamedTuple):
    """What is known of an operation of torch."""

    call: Callable
    name: str
    composite: bool  #: made of others
    view: bool
    writes: tuple[bool, ...]  #: of each argument by place
    writes_by_name: frozenset[str]
    returns: tuple[str, ...]  #: names of the arguments that it returns, where it writes to some
    arguments: tuple[str, ...]  #: all names
    is_void: bool  #: it returns nothing
    makes: bool  #: it makes a tensor from none, or from the form of one


@lru_cache(None)
def operation(func) -> Operation:
    name, arguments = str(func).split(".")[1], func._schema.arguments
    written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    view = func.is_view or name in ("detach", "alias", "as_strided", "_reshape_alias", "lift_fresh", "_unsafe_view")
    names = [a.name for a, is_written in zip(arguments, written, strict=True) if is_written]
    composite, returned = composite and name not in WHOLE, tuple(names)
    every, is_void = tuple(a.name for a in arguments), not func._schema.returns
    makes = not names and (name.startswith(FACTORIES) or name.endswith("_like"))
    return Operation(func, name, composite, view, tuple(written), frozenset(names), returned, every, is_void, makes)


def span_of(tensor: torch.Tensor) -> Span:
    size = tensor.element_size()
    return Span(tensor.data_ptr(), tuple(tensor.shape), tuple([s * size for s in tensor.stride()]), size)


class Plain:
    """Runs operations as torch does, on whatever device there is; ``device.Deferred`` takes its place."""

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def run(self, _stream, info: Operation, args, kwargs) -> Any:
        return info.call(*args, **kwargs)

    def wait(self, info: Operation, args, kwargs) -> Any:
        return info.call(*args, **kwargs)

    def make(self, _stream, info: Operation, args, kwargs) -> Any:
        return info.call(*args, **kwargs)

    def enter_thread(self) -> None: ...


class Watch:
    """What is seen of runs. ``waits`` counts operations for which a thread of the host waited, by name and verb."""

    def __init__(self, runs: Plain):
        self.order, self.runs = Order(), runs
        self.waits: Counter[tuple[str, str]] = Counter()
        self.here = threading.local()
        self._registered: dict[int, int] = {}  #: page-locked memory: address -> the one behind it
        self._sorted: list[
            tuple[list[int], list[int]]
        ] = []  #: the same as two lists, from when they are first asked for
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

    def register(self, address: int, size: int) -> None:
        self._registered[address], self._sorted = address + size, []

    def unregister(self, address: int) -> None:
        self._registered.pop(address, None)
        self._sorted = []

    def is_registered(self, address: int) -> bool:
        if not (kept := self._sorted):
            # a copy: other threads lock pages meanwhile, and making a tuple may collect garbage, which lets them
            known = self._registered.copy()
            kept.append((lows := sorted(known), [known[low] for low in lows]))
        lows, highs = kept[0]
        place = bisect_right(lows, address) - 1
        return place >= 0 and address < highs[place]

    # ---- accesses

    def on_host(self, place: Place, write: bool, what: str = "") -> None:
        """Check an access of the calling thread to page-locked memory; other memory of the host is its owner's."""
        if self.is_registered(place.bounds()[0]):
            self.order.access(self.thread(), place, write, f"{self.verb} ({what})")

    def by_stream(self, stream, place: Place, write: bool, what: str) -> None:
        """Check an access of what the calling thread enqueues now; of what it captures, note it."""
        if (captured := getattr(self.here, "captured", None)) is not None:
            captured.append((place, write, what))
            return
        self.all_by_stream(stream, ((place, write, what),))

    def all_by_stream(self, stream, accesses: Iterable[tuple[Place, bool, str]]) -> None:
        """Check accesses, one after the other, of what the calling thread enqueues now."""
        agent, verb = self.stream(stream), self.verb
        self.order.learn(agent, self.order.now(self.thread()))
        for place, write, what in accesses:
            self.order.access(agent, place, write, f"{verb} ({what})")

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
        if thread != feeder and getattr(self.here, "captured", None) is None:
            at = known[feeder] if feeder < len(known) else 0
            least = max((one for one in self.progress[agent] if one[0] <= at), default=(0, []))[1]
            known = [max(pair) for pair in zip_longest(known, least, fillvalue=0)]
            self.order.access(agent, place, True, "memory of another tensor", known)
        else:
            self.by_stream(stream, place, True, "memory of another tensor")

    def perform(self, info: Operation, args: tuple, kwargs: dict) -> Any:
        """Check an operation's accesses, and run it."""
        runs = self.runs
        reads, writes = _operands(info, args, kwargs)
        operands, written = reads + writes, [False] * len(reads) + [True] * len(writes)
        places = [runs.on_device(tensor) for tensor in operands]
        if info.makes:
            return self._make(info, args, kwargs, any(places))
        if not any(places):
            for tensor, write in zip(operands, written, strict=True):
                if tensor.device.type == "cpu" and self.is_registered(tensor.data_ptr()):
                    self.on_host(span_of(tensor), write, info.name)
            made = info.call(*args, **kwargs)
            if info.name == "_to_copy" and runs.on_device(made):
                self.by_stream(torch.cuda.current_stream(), span_of(made), True, info.name)
            return made
        if info.name in WAITING or _is_masked(info, args) or info.name == "_to_copy" and self._to_host(kwargs):
            return self._wait(info, args, kwargs, operands)
        staged = info.name == "copy_" and not all(places) and not self._is_direct(writes[0], args[1])
        if info.name != "copy_" and any(t.dim() for t, there in zip(operands, places, strict=True) if not there):
            raise Mixed(f"{info.name} in {self.verb} has tensors of host and device")
        stream = torch.cuda.current_stream()
        for tensor, there, write in zip(operands, places, written, strict=True):
            if there or self.is_registered(tensor.data_ptr()):
                self.by_stream(stream, span_of(tensor), write, info.name)
        made = runs.run(stream, info, args, kwargs)
        if staged:
            self._wait_for(info.name)
        if not info.returns:
            for tensor in tensors_of(made):
                self.by_stream(stream, span_of(tensor), True, info.name)
        return made

    def _make(self, info: Operation, args: tuple, kwargs: dict, from_device: bool) -> Any:
        asked, given = getattr(self.here, "asked", None), kwargs.get("device")
        kind = None if given is None else torch.device(given).type
        if kind == "meta":
            return info.call(*args, **kwargs)
        if "cuda" in (asked, kind) or asked is None and from_device:
            stream = torch.cuda.current_stream()
            made = self.runs.make(stream, info, args, kwargs)
            self.by_stream(stream, span_of(made), True, "new memory")
            return made
        return info.call(*args, **kwargs)

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

    def _wait(self, info: Operation, args: tuple, kwargs: dict, operands: list[torch.Tensor]) -> Any:
        self._wait_for(info.name)
        for tensor in operands:
            self.by_stream(torch.cuda.current_stream(), span_of(tensor), False, info.name)
        return self.runs.wait(info, args, kwargs)


def _operands(info: Operation, args: tuple, kwargs: dict) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operation reads and writes; what it writes in place, it reads unless it is a copy."""
    reads, writes = [], []
    for place, value in enumerate(args):
        written = info.writes[place]
        (writes if written else reads).extend(tensors_of(value))
    for name, value in kwargs.items():
        (writes if name in info.writes_by_name else reads).extend(tensors_of(value))
    return reads, writes


def tensors_of(value) -> list[torch.Tensor]:
    """Return the tensors of an argument or a result: itself, or those of a list or tuple."""
    if isinstance(value, torch.Tensor):
        return [value]
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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping takes as long as an operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        info, kwargs = operation(func), kwargs or {}
        if info.composite:
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        with torch._C.DisableTorchFunction():
            if info.view:
                return args[0].view(args[1]) if info.name == "_unsafe_view" else func(*args, **kwargs)
            return self.watch.perform(info, args, kwargs)
