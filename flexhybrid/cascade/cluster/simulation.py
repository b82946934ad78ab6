"""Simulates a cascade on a cluster in virtual time: queues, batches, transfers, replicas, and models that share GPUs.

- Each model has one queue. A free GPU takes the oldest of two kinds of work: requests in the queues of models whose
  first partition it has (all that wait, at most max_batch), and batches sent by earlier partitions.
- With ``batch_wait_s``, a batch that is not full starts only after its first request has waited that long.
- A GPU computes one batch at a time (§V-B); a batch of b requests takes seconds(b)/S on each of S partitions.
- A request's route is drawn in advance from the flow's shares.

Not simulated: requests that are refused or fail, the time to load models, contention for links (a transfer takes bytes
over rate), and power that depends on the clock rate.

For speed, events are tuples in one heap, requests are numbers, and all data of requests is in arrays.
"""

from collections import deque
from dataclasses import asdict, dataclass
from heapq import heappop, heappush

import numpy as np

from flexhybrid.cascade.cluster.deployment import Deployment
from flexhybrid.core.errors import InputError, check, unknown

SERVICE = ("fixed", "exponential")
TAIL = 99.9  #: percentile of the paper's tail latency
_ANSWERED = 255  #: in place of a next model: the request is answered
_DONE, _STAGE, _ARRIVE, _TIMER = range(4)


@dataclass(frozen=True)
class PowerModel:
    """The power of a GPU, which grows linearly with the share of time that kernels run."""

    idle_w: float
    busy_w: float
    source: str

    def __post_init__(self):
        if not 0 <= self.idle_w <= self.busy_w < float("inf"):
            raise InputError(f"a GPU's power is {self.idle_w!r} W idle and {self.busy_w!r} W busy; 0 <= idle <= busy")

    def joules(self, span_s: float, busy_s: float) -> float:
        """Return the joules of a GPU that was on for ``span_s`` seconds and computed during ``busy_s`` of them."""
        return self.idle_w * span_s + (self.busy_w - self.idle_w) * busy_s


#: Machine of the catalogue -> power. Busy: the limit of the board by datasheet. Idle, with a loaded context: assumed,
#: as datasheets lack it; the reading of nvidia-smi is better (``cascade simulate --idle-w``).
POWER = {
    "t4": PowerModel(10.0, 70.0, "T4: 70 W board limit (datasheet); 10 W idle assumed"),
    "rtx-a6000": PowerModel(25.0, 300.0, "RTX A6000: 300 W board limit (datasheet); 25 W idle assumed"),
    "rtx4090": PowerModel(25.0, 450.0, "RTX 4090: 450 W board limit (datasheet); 25 W idle assumed"),
    "rtx5000": PowerModel(20.0, 230.0, "Quadro RTX 5000: 230 W board limit (datasheet); 20 W idle assumed"),
    "a100-40g": PowerModel(50.0, 400.0, "A100 SXM: 400 W board limit (datasheet); 50 W idle assumed"),
    "h100": PowerModel(70.0, 700.0, "H100 SXM: 700 W board limit (datasheet); 70 W idle assumed"),
    "h200": PowerModel(75.0, 700.0, "H200 SXM: 700 W board limit (datasheet); 75 W idle assumed"),
}


@dataclass(frozen=True, eq=False)
class Served:
    """The results of a simulated run: seconds, joules, shares 0..1."""

    num_requests: int
    span_s: float  #: seconds from the first arrival to the last answer
    mean_latency_s: float
    median_latency_s: float
    tail_latency_s: float  #: 99.9th percentile
    throughput: float  #: answers / span_s
    joules_per_request: float
    idle_joules_per_request: float  #: the part that the powered GPUs would draw without requests
    power: str  #: source of the watts
    rho: float  #: utilisation of the busiest GPU at the mean arrival rate, with full batches
    answered: dict[str, float]  #: model -> share of requests
    mean_batch: dict[str, float]  #: model -> mean requests of a batch
    busy: np.ndarray  #: [GPUs], share of span_s that each GPU computes
    num_powered: int  #: number of GPUs with a model, whose idle power counts
    latency_s: np.ndarray  #: [requests]

    def to_dict(self) -> dict:
        """Return plain JSON values, without the latency of each request."""
        plain = {name: value for name, value in asdict(self).items() if name != "latency_s"}
        return {**plain, "busy": self.busy.tolist()}


def simulate(
    deployment: Deployment,
    arrivals_s: np.ndarray,
    power: PowerModel,
    batch_wait_s: float = 0.0,
    service: str = "fixed",
    seed: int = 0,
) -> Served:
    """Simulate requests that arrive at ``arrivals_s`` [requests], which must not decrease; return the results.

    ``service``: service times, "fixed" (the models' lines) or "exponential" (with those means). Equal arguments give
    equal results. Raise InputError for wrong arguments, and if a visited model is on no GPU.
    """
    arrivals_s = np.asarray(arrivals_s, dtype=float)
    _check(arrivals_s, batch_wait_s, service)
    num_powered = len({gpu for model in deployment.gpus for replica in model for gpu in replica})
    rate = (len(arrivals_s) - 1) / np.ptp(arrivals_s) if np.ptp(arrivals_s) > 0 else 0.0
    rho = deployment.rho(max(rate, 1e-12))
    loop = _EventLoop(deployment, arrivals_s, batch_wait_s, seed, service == "exponential")
    loop.walk()
    count, latency = len(arrivals_s), np.array(loop.done_s) - arrivals_s
    span = float(max(loop.done_s) - arrivals_s[0])
    busy = np.array([gpu.busy_s for gpu in loop.gpus])
    names = [model.name for model in deployment.models]
    answered = np.bincount(loop.answered_by, minlength=len(names)) / count
    median, tail = np.percentile(latency, (50, TAIL))
    return Served(
        num_requests=count,
        span_s=span,
        mean_latency_s=float(latency.mean()),
        median_latency_s=float(median),
        tail_latency_s=float(tail),
        throughput=count / span,
        joules_per_request=power.joules(num_powered * span, float(busy.sum())) / count,
        idle_joules_per_request=power.idle_w * num_powered * span / count,
        power=power.source,
        rho=rho,
        answered=dict(zip(names, answered.tolist(), strict=True)),
        mean_batch={name: m.computed / m.batches for name, m in zip(names, loop.models, strict=True) if m.batches},
        busy=busy / span,
        num_powered=num_powered,
        latency_s=latency,
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms" if seconds < 10 else f"{1e3 * seconds:.0f} ms"


def describe(served: Served) -> str:
    """Return the results of a run as text."""
    s = served
    answers = ", ".join(f"{name} {share:.1%}" for name, share in s.answered.items() if share)
    batches = ", ".join(f"{name} {size:.2f}" for name, size in s.mean_batch.items())
    mean, median, tail = map(_milliseconds, (s.mean_latency_s, s.median_latency_s, s.tail_latency_s))
    return (
        f"{s.num_requests} requests in {s.span_s:.4g} s: {s.throughput:.4g} requests/s, busiest GPU rho {s.rho:.2f}\n"
        f"  latency: mean {mean}, median {median}, {TAIL:g} % {tail}\n"
        f"  energy: {s.joules_per_request:.4g} J per request, of which {s.idle_joules_per_request:.4g} J are the idle "
        f"power of {s.num_powered} GPUs (predicted: {s.power})\n"
        f"  answered by {answers}; batches of {batches}"
    )


def check_stable(deployment: Deployment, rate: float) -> None:
    """Raise InputError if ``rate`` requests/s exceed the capacity of the cluster."""
    rho = deployment.rho(rate)
    if rho >= 1:
        raise InputError(
            f"unstable: at {rate:.4g} requests/s the busiest GPU has rho = {rho:.3g} >= 1 with full batches; this "
            f"placement serves less than {rate / rho:.4g} requests/s"
        )


def draw_ways(deployment: Deployment, count: int, seed: int) -> tuple[np.ndarray, list[bytes]]:
    """Draw each request's route; return its first model [count], and for each model the next one as bytes [count].
    255 (_ANSWERED) means that there is no next model."""
    rng = np.random.default_rng([seed, 2])
    last = len(deployment.models) - 1
    first = np.searchsorted(np.cumsum(deployment.flow.entry), rng.random(count), side="right")
    ways = []
    for row in deployment.flow.onward:
        to = np.searchsorted(np.cumsum(row), rng.random(count), side="right")
        ways.append(np.where(to > last, _ANSWERED, to).astype(np.uint8).tobytes())
    return np.minimum(first, last), ways


def _check(arrivals_s: np.ndarray, batch_wait_s: float, service: str) -> None:
    if arrivals_s.ndim != 1 or not len(arrivals_s):
        raise InputError("there must be at least one arrival")
    if not np.isfinite(arrivals_s).all() or (np.diff(arrivals_s) < 0).any():
        raise InputError("arrivals must be finite seconds that do not decrease")
    check("batch_wait_s", batch_wait_s, 0 <= batch_wait_s < float("inf"), "a number of seconds >= 0")
    if service not in SERVICE:
        raise unknown("service", service, SERVICE)


class _ServedModel:
    """A model in the event loop, with its queue and the GPUs of its first partitions."""

    __slots__ = ("at_zero", "per_request", "max_batch", "hop_s", "next_of", "gpus", "queue", "batches", "computed")

    def __init__(self, deployment: Deployment, m: int, next_of: bytes):
        model = deployment.models[m]
        self.at_zero, self.per_request = model.seconds.at_zero, model.seconds.per_request
        self.max_batch, self.hop_s, self.next_of = model.max_batch, deployment.hop_s[m].tolist(), next_of
        self.gpus = sorted({replica[0] for replica in deployment.gpus[m]})
        self.queue: deque[int] = deque()
        self.batches = self.computed = 0


class _GpuState:
    """A GPU in the event loop."""

    __slots__ = ("holds", "sent", "is_free", "busy_s")

    def __init__(self, deployment: Deployment, g: int, models: list[_ServedModel]):
        #: (model, replica) of the first partitions on this GPU, at most one per model
        self.holds = [
            (m, next(r for r, replica in enumerate(deployment.gpus[m]) if replica[0] == g))
            for m, model in enumerate(models)
            if g in model.gpus
        ]
        self.sent: deque[tuple] = deque()  # (time, batch) sent by earlier partitions
        self.is_free, self.busy_s = True, 0.0


class _EventLoop:
    """The simulation of one run."""

    def __init__(self, deployment: Deployment, arrivals_s: np.ndarray, wait_s: float, seed: int, exponential: bool):
        first, next_of = draw_ways(deployment, len(arrivals_s), seed)
        self.deployment, self.wait_s = deployment, wait_s
        self.models = [_ServedModel(deployment, m, ways) for m, ways in enumerate(next_of)]
        self.gpus = [_GpuState(deployment, g, self.models) for g in range(deployment.num_gpus)]
        self.arrivals_s: list[float] = arrivals_s.tolist()
        self.since = list(self.arrivals_s)  # time at which each request joined its current queue
        self.first_model = first.astype(np.uint8).tobytes()
        self.done_s = [0.0] * len(arrivals_s)
        self.answered_by = np.zeros(len(arrivals_s), dtype=np.uint8)
        self.heap: list[tuple] = []  # events: (time, number, kind, target, load)
        self.serial = 0  # number of the latest event, which orders events at equal times
        self.draw = _draws(seed) if exponential else None

    def walk(self) -> None:
        """Process all arrivals and events in order of time."""
        heap, arrivals, first = self.heap, self.arrivals_s, self.first_model
        count, at = len(arrivals), 0
        while True:
            if at < count and (not heap or arrivals[at] <= heap[0][0]):
                self.join(arrivals[at], first[at], (at,))
                at += 1
                continue
            if not heap:
                return
            now, _, kind, target, load = heappop(heap)
            if kind == _DONE:
                self.finish(now, target, load)
            elif kind == _ARRIVE:
                self.join(now, target, load)
            elif kind == _STAGE:
                self.gpus[target].sent.append((now, load))
                if self.gpus[target].is_free:
                    self.take(now, target)
            else:
                self.offer(now, target)

    def push(self, when: float, kind: int, target: int, load) -> None:
        """Add an event. ``target``: a GPU or a model. ``load``: a batch or requests."""
        self.serial += 1
        heappush(self.heap, (when, self.serial, kind, target, load))

    def join(self, now: float, model: int, requests) -> None:
        """Put requests into a model's queue."""
        queue, since = self.models[model].queue, self.since
        if self.wait_s and not queue:
            self.push(now + self.wait_s, _TIMER, model, None)
        for request in requests:
            since[request] = now
        queue.extend(requests)
        self.offer(now, model)

    def offer(self, now: float, model: int) -> None:
        """Let free GPUs take requests from a model's queue."""
        for gpu in self.models[model].gpus:
            if not self.models[model].queue:
                return
            if self.gpus[gpu].is_free:
                self.take(now, gpu)

    def take(self, now: float, gpu: int) -> None:
        """Start the oldest work that is ready for a free GPU, if there is any."""
        sent = self.gpus[gpu].sent
        oldest, chosen = (sent[0][0], None) if sent else (float("inf"), None)
        for held in self.gpus[gpu].holds:
            model = self.models[held[0]]
            if model.queue:
                since = self.since[model.queue[0]]
                # The same sum as for the timer: rounding could make a difference smaller than wait_s.
                if since < oldest and (since + self.wait_s <= now or len(model.queue) >= model.max_batch):
                    oldest, chosen = since, held
        if chosen is not None:
            self.begin(now, gpu, (*chosen, 0, self.fetch(chosen[0])))
        elif sent:
            self.begin(now, gpu, sent.popleft()[1])

    def fetch(self, model: int) -> tuple[int, ...]:
        """Remove a batch from a model's queue and return it."""
        served = self.models[model]
        queue, limit = served.queue, served.max_batch
        if len(queue) <= limit:
            requests = tuple(queue)
            queue.clear()
        else:
            requests = tuple(queue.popleft() for _ in range(limit))
            if self.wait_s:
                self.push(self.since[queue[0]] + self.wait_s, _TIMER, model, None)
        served.batches += 1
        served.computed += len(requests)
        return requests

    def begin(self, now: float, gpu: int, batch: tuple[int, int, int, tuple[int, ...]]) -> None:
        """Start a batch (model, replica, stage, requests) on a free GPU."""
        model, replica, _, requests = batch
        served, state = self.models[model], self.gpus[gpu]
        took = (served.at_zero + served.per_request * len(requests)) / len(self.deployment.gpus[model][replica])
        if self.draw is not None:
            took *= next(self.draw)
        state.is_free = False
        state.busy_s += took
        self.push(now + took, _DONE, gpu, batch)

    def finish(self, now: float, gpu: int, batch: tuple[int, int, int, tuple[int, ...]]) -> None:
        """End a batch on a GPU: send it to the next partition, or each request to its next model if it has one."""
        model, replica, stage, requests = batch
        self.gpus[gpu].is_free = True
        path = self.deployment.gpus[model][replica]
        if stage + 1 < len(path):
            hop = self.deployment.hidden_s[model][replica][stage] * len(requests)
            self.push(now + hop, _STAGE, path[stage + 1], (model, replica, stage + 1, requests))
        else:
            served, going = self.models[model], {}
            for request in requests:
                to = served.next_of[request]
                if to == _ANSWERED:
                    self.done_s[request] = now
                    self.answered_by[request] = model
                else:
                    going.setdefault(to, []).append(request)
            for to, leaving in going.items():
                self.push(now + served.hop_s[to], _ARRIVE, to, leaving)
        self.take(now, gpu)


def _draws(seed: int):
    """Yield exponentially distributed factors of mean 1."""
    rng = np.random.default_rng([seed, 3])
    while True:
        yield from rng.exponential(1.0, 1 << 16).tolist()
