"""The parts of a served cascade that run on Ray: processes with models, and the router that sends requests to them.

A process computes requests in batches, and returns each one's output and confidence, but no logits. If a model fails,
does not answer in time, or cannot be reached, its requests go on to the next larger model.
"""

import asyncio
import functools
import math
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from flexhybrid.cascade.data import request_of
from flexhybrid.cascade.metering import Meter
from flexhybrid.cascade.models import Model, first_line
from flexhybrid.cascade.options import ServeOptions
from flexhybrid.cascade.routes import Cascade
from flexhybrid.cascade.serving.answers import Answer, Judgement, judge, note
from flexhybrid.cascade.serving.counts import Counts

AGAIN_S = 0.002  #: seconds before another process is asked after one died
ASK_AGAIN = 8  #: number of processes that may die during a request before it goes on to the next larger model
METER_S = 10.0  #: seconds in which a process must return its machine's meter reading

#: Loads a model in the process that will run it.
Load = Callable[[], Model]
#: A model's output, its confidence (NaN if it failed), the reason of a failure, and the number of output tokens.
ModelAnswer = tuple[object, float, str | None, int]
#: Sends a request to a process with a model.
Ask = Callable[[object], Awaitable[ModelAnswer]]
#: A machine's name, the joules of its meter (None: not measured), and the source of the joules.
Reading = tuple[str, float | None, str]


class Worker:
    """A process with models. Requests that arrive while a model computes are its next batch; no batch waits to fill."""

    def __init__(self, cascade: Cascade, loads: dict[int, Load], batch: dict[int, int], timeout_s: float):
        self.cascade, self.timeout_s = cascade, timeout_s
        self.models = {place: load() for place, load in loads.items()}
        on_gpu = any(getattr(model, "device", "cpu") == "cuda" for model in self.models.values())
        self.meter = Meter("cuda" if on_gpu else "cpu")
        self.threads = {place: ThreadPoolExecutor(1, f"model {cascade.names[place]}") for place in loads}
        self.since: dict[int, float] = {}  # model -> start time of its current batch
        self.batch, self.at_work = batch, set()
        self.waiting: dict[int, list[tuple[object, asyncio.Future]]] = {place: [] for place in loads}
        self.tasks: set[asyncio.Task] = set()  # references that the event loop does not keep

    async def ask(self, place: int, request) -> ModelAnswer:
        """Return the answer of model ``place``."""
        answer = asyncio.get_running_loop().create_future()
        self.waiting[place].append((request, answer))
        if place not in self.at_work:
            self.at_work.add(place)
            task = asyncio.ensure_future(self._answer_waiting(place))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        return await answer

    async def energy(self) -> Reading:
        return socket.gethostname(), self.meter.joules, self.meter.source

    def check_health(self) -> None:
        """Raise RuntimeError if a model's batch exceeds the time limit: Serve then replaces the process.
        A thread that hangs cannot be ended otherwise."""
        for place, since in list(self.since.items()):
            if (took := time.monotonic() - since) > self.timeout_s:
                raise RuntimeError(f"model {self.cascade.names[place]} has computed a batch for {took:.0f} s")

    async def _answer_waiting(self, place: int) -> None:
        while waiting := [(request, answer) for request, answer in self.waiting[place] if not answer.done()]:
            now, self.waiting[place] = waiting[: self.batch[place]], waiting[self.batch[place] :]
            answers: list[ModelAnswer]
            try:
                answers = await self.compute(place, [request for request, _ in now])
            except Exception as error:  # so that no request waits forever
                answers = [(None, math.nan, f"{type(error).__name__}: {first_line(error)}", 0)] * len(now)
            for (_, answer), value in zip(now, answers, strict=True):
                if not answer.done():  # the caller may have cancelled it
                    answer.set_result(value)
        self.waiting[place].clear()
        self.at_work.discard(place)

    async def compute(self, place: int, requests: Sequence) -> list[ModelAnswer]:
        """Return a model's answers to a batch, or failures if it takes too long."""
        late: list[ModelAnswer] = [(None, math.nan, f"no answer within {self.timeout_s:g} s", 0)] * len(requests)
        if place in self.since:  # the thread still computes a batch that timed out
            return late
        # A thread, so that the process still answers Serve's controller.
        job = functools.partial(judge, self.cascade, place, self.models[place], stacked(requests))
        self.since[place] = time.monotonic()
        work = asyncio.get_running_loop().run_in_executor(self.threads[place], job)
        work.add_done_callback(lambda _: self.since.pop(place, None))
        try:
            judgement = await asyncio.wait_for(asyncio.shield(work), self.timeout_s)
        except TimeoutError:
            return late
        return list(zip(judgement.outputs, judgement.sure.tolist(), judgement.reasons, judgement.tokens, strict=True))


def stacked(requests: Sequence) -> list | np.ndarray:
    """Return requests as one array if they are arrays of one shape, else as a list, whose parts a model may refuse."""
    shapes = {request.shape if isinstance(request, np.ndarray) else None for request in requests}
    return list(requests) if len(shapes) > 1 or None in shapes else np.stack(requests)


class Router:
    """Sends each request from model to model until one is confident.

    ``asks`` [models][processes]: functions that send a request to a process with the model; the process with the fewest
    requests is chosen. ``meters``: functions that return the reading of a process's machine.
    """

    def __init__(
        self,
        cascade: Cascade,
        asks: Sequence[Sequence[Ask]],
        limits: ServeOptions,
        meters: Sequence[Callable[[], Awaitable[Reading]]] = (),
    ):
        self.cascade, self.asks, self.limits, self.meters = cascade, asks, limits, meters
        self.asked = [[0] * len(holders) for holders in asks]  # number of requests at each process
        self.under_way, self.counts = 0, Counts(cascade)

    async def answer(self, request, index: int, patience_s: float | None = None) -> Answer:
        """Answer request ``index`` of a file. ``patience_s``: seconds after which a model counts as failed."""
        answer, i = Answer(index), 0
        while i < len(self.asks):
            output, sure, reason, tokens = await self._ask(i, request, patience_s)
            i = int(note(self.cascade, i, [answer], Judgement([output], np.array([sure]), [reason], [tokens]))[0])
        self.counts.add([answer])
        return answer

    async def _ask(self, i: int, request, patience_s: float | None) -> ModelAnswer:
        from ray.exceptions import RayActorError, RayError
        from ray.serve.exceptions import RayServeException

        asked, refused = self.asked[i], 0
        while refused < ASK_AGAIN:
            holder = min(range(len(asked)), key=lambda place: (asked[place], (place - refused) % len(asked)))
            asked[holder] += 1
            try:
                return await asyncio.wait_for(self.asks[i][holder](request), patience_s)
            except RayActorError:  # the process died: ask another one, or its replacement
                refused += 1
                await asyncio.sleep(AGAIN_S)
            except TimeoutError:
                return None, math.nan, f"no answer within {patience_s or 0:g} s", 0
            except (RayError, RayServeException) as error:
                return None, math.nan, f"{type(error).__name__}: {first_line(error)}", 0
            finally:
                asked[holder] -= 1
        return None, math.nan, f"{ASK_AGAIN} processes of the model died during the request", 0

    async def energy(self) -> tuple[float | None, str]:
        """Return the joules of all machines with models since the models were loaded, and the source of the joules."""
        readings: dict[str, Reading] = {}
        shown = await asyncio.gather(
            *(asyncio.wait_for(meter(), METER_S) for meter in self.meters), return_exceptions=True
        )
        for reading in shown:
            if isinstance(reading, BaseException):
                return None, f"not measured: a process did not return its machine's meter reading ({reading!r})"
            name, joules, source = reading
            if joules is None:
                return None, f"{source} ({name})" if len(self.meters) > 1 else source
            if name not in readings or joules > (readings[name][1] or 0.0):  # the oldest process has the most joules
                readings[name] = reading
        if not readings:
            return None, "not measured: no process has a meter"
        total = sum(joules or 0.0 for _, joules, _ in readings.values())
        sources = sorted({source for _, _, source in readings.values()})
        more = f", {len(readings)} machines" if len(readings) > 1 else ""
        return total, "; ".join(sources) + more

    async def status(self) -> dict:
        """Return the counts since the router started, as plain JSON values."""
        return {"under_way": self.under_way, **self.counts.record(*await self.energy())}

    async def __call__(self, http):
        """Answer a POST of {"x": …}, {"text": …}, or for generation {"prompt": …}, with the Answer as JSON.

        Answer a GET with the ``status``. The HTTP status is 503 if no model could answer, or if too many requests run
        (then with Retry-After), and 400 for a wrong body.
        """
        from starlette.responses import JSONResponse

        if http.method == "GET":
            return JSONResponse(await self.status())
        if self.under_way >= self.limits.queue:
            full = {"error": f"{self.under_way} requests are under way, and no more are accepted: try again later"}
            return JSONResponse(full, status_code=503, headers={"Retry-After": "1"})
        self.under_way += 1
        try:
            try:
                request = request_of(await http.json(), self.cascade.task, self.cascade.x_dtype)
            except ValueError as error:  # InputError, or not JSON
                return JSONResponse({"error": f"the body is no request: {error}"}, status_code=400)
            answer = await self.answer(request, 0, self.limits.timeout_s)
        finally:
            self.under_way -= 1
        return JSONResponse(answer.__dict__, status_code=503 if answer.model is None else 200)


class RemoteRouter(Router):
    """A router for processes of Ray. ``held`` [processes]: the models of each."""

    def __init__(self, cascade: Cascade, held: Sequence[Sequence[int]], limits: ServeOptions, *handles):
        asks: list[list[Ask]] = [[] for _ in cascade.models]
        for places, handle in zip(held, handles, strict=True):
            for place in places:
                asks[place].append(functools.partial(handle.ask.remote, place))
        super().__init__(cascade, asks, limits, [handle.energy.remote for handle in handles])


class LocalRouter(Router):
    """A router in the same process as all models."""

    def __init__(self, cascade: Cascade, loads: dict[int, Load], batch: dict[int, int], limits: ServeOptions):
        self.worker = Worker(cascade, loads, batch, limits.timeout_s)
        asks = [[functools.partial(self.worker.ask, place)] for place in range(len(cascade.models))]
        super().__init__(cascade, asks, limits, [self.worker.energy])

    def check_health(self) -> None:
        self.worker.check_health()
