"""A cascade on a cluster in virtual time: queues, batches, hops, replicas, GPUs shared by several models.

- Each model has one queue. A GPU that is free takes the oldest work among the queues of the models whose first
  partition it holds and the batches that earlier partitions have sent it: as many requests as wait, at most max_batch.
- With ``batch_wait_s`` a batch that is not full starts only once its first request has waited that long.
- A GPU computes one batch at a time (§V-B); a batch of b takes seconds(b)/S on each of S partitions.
- A request's way is drawn beforehand from the flow's shares.

Left out: requests that are refused or fail, time to load models, links that are shared (a transfer takes its bytes over
the rate, whatever else is on the way), and power that depends on the clock rate.

Events are tuples in one heap, requests are numbers; nothing is allocated per request but a place in an array.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from heapq import heappop, heappush

import numpy as np

from flexhybrid.cascade.cluster.deployment import Deployment
from flexhybrid.cascade.cluster.energy import PowerModel
from flexhybrid.core.errors import InputError

SERVICE = ("fixed", "exponential")
TAIL = 99.9  #: percentile of the paper's tail latency
_ANSWERED = 255  #: in the place of a next model
_DONE, _STAGE, _ARRIVE, _TIMER = range(4)


@dataclass(frozen=True, eq=False)
class Served:
    """What a simulated run took. Seconds, joules, shares 0..1."""

    num_requests: int
    span_s: float  #: from the first arrival to the last answer
    mean_latency_s: float
    median_latency_s: float
    tail_latency_s: float  #: 99.9 %
    throughput: float  #: answers / span_s
    joules_per_request: float
    idle_joules_per_request: float  #: of those, what the powered GPUs would have drawn without any request
    power: str  #: where the watts come from
    rho: float  #: of the busiest GPU at the mean rate of arrivals, batches full
    answered: dict[str, float]  #: model -> share of requests
    mean_batch: dict[str, float]  #: model -> requests
    busy: np.ndarray  #: share of span_s that each GPU computes [GPUs]
    num_powered: int  #: GPUs that hold a model, whose idle power counts
    latency_s: np.ndarray  #: of each request [requests]

    def to_dict(self) -> dict:
        """Plain JSON, without the requests one by one."""
        plain = {name: value for name, value in asdict(self).items() if name != "latency_s"}
        return {**plain, "busy": self.busy.tolist()}


def simulate(
    deployment: Deployment,
    arrivals_s: np.ndarray,
    power: PowerModel,
    batch_wait_s: float = 0.0,
    service: str = "fixed",
    seed: int = 0,
    num_powered: int | None = None,
) -> Served:
    """Serve requests that arrive at ``arrivals_s`` [requests, not falling].

    ``service``: "fixed" (the models' lines) or "exponential" (with those means). ``num_powered``: GPUs whose idle power
    counts, where it is not those that hold a model. The same arguments give the same result.
    """
    arrivals_s = np.asarray(arrivals_s, dtype=float)
    _check(arrivals_s, batch_wait_s, service)
    if num_powered is None:
        num_powered = len(deployment.powered)
    rate = (len(arrivals_s) - 1) / np.ptp(arrivals_s) if np.ptp(arrivals_s) > 0 else 0.0
    rho = deployment.rho(max(rate, 1e-12))  # also says whether every model that is visited lies somewhere
    ways = draw_ways(deployment, len(arrivals_s), seed)
    run = _Run(deployment, arrivals_s, ways, batch_wait_s, service, seed)
    run.walk()
    latency = np.array(run.done_s) - arrivals_s
    span = float(max(run.done_s) - arrivals_s[0])
    count, busy = len(arrivals_s), np.array(run.busy_s)
    joules = power.joules(num_powered * span, float(busy.sum())) / count
    names = [model.name for model in deployment.models]
    answered = np.bincount(run.answered_by, minlength=len(names)) / count
    median, tail = np.percentile(latency, (50, TAIL))
    return Served(
        num_requests=count, span_s=span, mean_latency_s=float(latency.mean()), median_latency_s=float(median),
        tail_latency_s=float(tail), throughput=count / span, joules_per_request=joules,
        idle_joules_per_request=power.idle_w * num_powered * span / count, power=power.source, rho=rho,
        answered=dict(zip(names, answered.tolist(), strict=True)),
        mean_batch={name: run.computed[m] / run.batches[m] for m, name in enumerate(names) if run.batches[m]},
        busy=busy / span, num_powered=num_powered, latency_s=latency,
    )  # fmt: skip


def describe(served: Served) -> str:
    """A run for people."""
    s = served
    answers = ", ".join(f"{name} {share:.1%}" for name, share in s.answered.items() if share)
    batches = ", ".join(f"{name} {size:.2f}" for name, size in s.mean_batch.items())
    return "\n".join([
        f"{s.num_requests} requests in {s.span_s:.4g} s: {s.throughput:.4g} requests/s, busiest GPU rho {s.rho:.2f}",
        f"  latency: mean {1e3 * s.mean_latency_s:.4g} ms, median {1e3 * s.median_latency_s:.4g} ms, "
        f"{TAIL:g} % {1e3 * s.tail_latency_s:.4g} ms",
        f"  energy: {s.joules_per_request:.4g} J a request, {s.idle_joules_per_request:.4g} J of it the idle power of "
        f"{s.num_powered} GPUs (predicted: {s.power})",
        f"  answered by {answers}; batches of {batches}",
    ])  # fmt: skip


def check_stable(deployment: Deployment, rate: float) -> None:
    """InputError where a rate, requests/s, is more than the cluster can ever answer."""
    rho = deployment.rho(rate)
    if rho >= 1:
        raise InputError(
            f"unstable: at {rate:.4g} requests/s the busiest GPU has rho = {rho:.3g} >= 1 with full batches; this "
            f"placement carries less than {rate / rho:.4g} requests/s"
        )


def draw_ways(deployment: Deployment, count: int, seed: int) -> tuple[np.ndarray, list[bytes]]:
    """(first model of each request [count], for each model where each request goes from it, 255: nowhere)."""
    rng = np.random.default_rng([seed, 2])
    last = len(deployment.models) - 1
    first = np.searchsorted(np.cumsum(deployment.flow.entry), rng.random(count), side="right")
    ways = []
    for row in deployment.flow.onward:
        bounds = np.cumsum(row)
        to = np.searchsorted(bounds, rng.random(count), side="right")
        ways.append(np.where(to > last, _ANSWERED, to).astype(np.uint8).tobytes())
    return np.minimum(first, last), ways


def _check(arrivals_s: np.ndarray, batch_wait_s: float, service: str) -> None:
    if arrivals_s.ndim != 1 or not len(arrivals_s):
        raise InputError("there must be at least one arrival")
    if not np.isfinite(arrivals_s).all() or (np.diff(arrivals_s) < 0).any():
        raise InputError("arrivals must be finite seconds that do not go back in time")
    if not 0 <= batch_wait_s < float("inf"):
        raise InputError(f"batch_wait_s is {batch_wait_s!r}; it must be a number of seconds >= 0")
    if service not in SERVICE:
        raise InputError(f"unknown service {service!r}; known: {', '.join(SERVICE)}")


class _Run:
    """The event loop and its state."""

    def __init__(self, deployment: Deployment, arrivals_s, ways, wait_s: float, service: str, seed: int):
        self.deployment, self.wait_s = deployment, wait_s
        self.arrivals, (first, self.next_of) = arrivals_s.tolist(), ways
        self.first = first.astype(np.uint8).tobytes()
        models = range(len(deployment.models))
        self.line = [(m.seconds.at_zero, m.seconds.per_request, m.max_batch) for m in deployment.models]
        self.hop = deployment.hop_s.tolist()
        self.queue: list[deque] = [deque() for _ in models]
        self.since = list(self.arrivals)  # when each request joined the queue it is in
        self.gpus_of = [sorted({replica[0] for replica in model}) for model in deployment.gpus]
        gpus = range(deployment.num_gpus)
        #: (model, replica) of the first partitions on each GPU, one replica of a model
        self.holds = [
            [(m, next(r for r, replica in enumerate(deployment.gpus[m]) if replica[0] == g))
             for m in models if g in self.gpus_of[m]]
            for g in gpus
        ]  # fmt: skip
        self.sent: list[deque] = [deque() for _ in gpus]  # (seconds, batch) from earlier partitions
        self.free = [True] * deployment.num_gpus
        self.busy_s = [0.0] * deployment.num_gpus
        self.done_s = [0.0] * len(self.arrivals)
        self.answered_by = np.zeros(len(self.arrivals), dtype=np.uint8)
        self.batches, self.computed = [0] * len(models), [0] * len(models)
        self.heap: list[tuple] = []
        self.serial = 0  # of events: ties go in the order in which they were made
        self.draw = _draws(seed) if service == "exponential" else None

    def walk(self) -> None:
        """All events in order of time."""
        heap, arrivals, count, at = self.heap, self.arrivals, len(self.arrivals), 0
        first = self.first
        while True:
            if at < count and (not heap or arrivals[at] <= heap[0][0]):
                self.join(arrivals[at], first[at], (at,))
                at += 1
                continue
            if not heap:
                return
            now, _, kind, where, what = heappop(heap)
            if kind == _DONE:
                self.finish(now, where, what)
            elif kind == _ARRIVE:
                self.join(now, where, what)
            elif kind == _STAGE:
                self.sent[where].append((now, what))
                if self.free[where]:
                    self.take(now, where)
            else:
                self.offer(now, where)

    def push(self, when: float, kind: int, where: int, what) -> None:
        self.serial += 1
        heappush(self.heap, (when, self.serial, kind, where, what))

    def join(self, now: float, model: int, requests) -> None:
        """Requests join a model's queue."""
        queue, since = self.queue[model], self.since
        if self.wait_s and not queue:
            self.push(now + self.wait_s, _TIMER, model, None)
        for request in requests:
            since[request] = now
        queue.extend(requests)
        self.offer(now, model)

    def offer(self, now: float, model: int) -> None:
        """Let free GPUs take what is ready in a model's queue."""
        for gpu in self.gpus_of[model]:
            if not self.queue[model]:
                return
            if self.free[gpu]:
                self.take(now, gpu)

    def take(self, now: float, gpu: int) -> None:
        """A free GPU begins the oldest work that is ready for it, if any."""
        oldest, chosen = (self.sent[gpu][0][0], None) if self.sent[gpu] else (float("inf"), None)
        for held in self.holds[gpu]:
            queue = self.queue[held[0]]
            if queue:
                since = self.since[queue[0]]
                # the sum, as the timer has it: a difference could fall short of wait_s by rounding
                if since < oldest and (since + self.wait_s <= now or len(queue) >= self.line[held[0]][2]):
                    oldest, chosen = since, held
        if chosen is not None:
            self.begin(now, gpu, chosen[0], chosen[1], 0, self.fetch(chosen[0]))
        elif self.sent[gpu]:
            self.begin(now, gpu, *self.sent[gpu].popleft()[1])

    def fetch(self, model: int) -> tuple[int, ...]:
        """A batch off a queue."""
        queue, most = self.queue[model], self.line[model][2]
        if len(queue) <= most:
            requests = tuple(queue)
            queue.clear()
        else:
            requests = tuple(queue.popleft() for _ in range(most))
            if self.wait_s:
                self.push(self.since[queue[0]] + self.wait_s, _TIMER, model, None)
        self.batches[model] += 1
        self.computed[model] += len(requests)
        return requests

    def begin(self, now: float, gpu: int, model: int, replica: int, stage: int, requests: tuple[int, ...]) -> None:
        at_zero, per_request, _ = self.line[model]
        took = (at_zero + per_request * len(requests)) / len(self.deployment.gpus[model][replica])
        if self.draw is not None:
            took *= next(self.draw)
        self.free[gpu] = False
        self.busy_s[gpu] += took
        self.push(now + took, _DONE, gpu, (model, replica, stage, requests))

    def finish(self, now: float, gpu: int, batch: tuple) -> None:
        """A batch leaves a GPU: to the next partition, or each request to its answer or its next model."""
        model, replica, stage, requests = batch
        self.free[gpu] = True
        path = self.deployment.gpus[model][replica]
        if stage + 1 < len(path):
            hop = self.deployment.hidden_s[model][replica][stage] * len(requests)
            self.push(now + hop, _STAGE, path[stage + 1], (model, replica, stage + 1, requests))
        else:
            next_of, going = self.next_of[model], {}
            for request in requests:
                to = next_of[request]
                if to == _ANSWERED:
                    self.done_s[request] = now
                    self.answered_by[request] = model
                elif to in going:
                    going[to].append(request)
                else:
                    going[to] = [request]
            for to, some in going.items():
                self.push(now + self.hop[model][to], _ARRIVE, to, some)
        self.take(now, gpu)


def _draws(seed: int, block: int = 1 << 16):
    """Exponential factors of mean 1, one at a time out of blocks."""
    rng = np.random.default_rng([seed, 3])
    while True:
        yield from rng.exponential(1.0, block).tolist()
