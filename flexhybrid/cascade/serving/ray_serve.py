"""``flexhybrid cascade run --engine ray``: a deployment of Ray Serve for each model, and a router before them.

    HTTP, or a file ──▶ router ──▶ replica of model i ──▶ router ──▶ answer, or a replica of a larger model

A replica holds a model, computes requests in batches, and returns each request's output and confidence; logits stay in
the replica. No request is lost with a replica that dies: the router asks another one. If the router itself dies, a
file's requests are sent again; HTTP requests under way get Ray Serve's status 500.
"""

import asyncio
import math
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flexhybrid.cascade.data import request_of
from flexhybrid.cascade.models import Model, first_line
from flexhybrid.cascade.routes import Cascade, read_json
from flexhybrid.cascade.serving.answers import BATCH, Answer, Judgement, judge, note
from flexhybrid.core.errors import InputError

APPLICATION, ROUTER = "cascade", "router"
HOST = "127.0.0.1"  #: the endpoint serves this machine alone: it has no access control
BATCH_WAIT_S = 0.002  #: for which a replica waits for a batch to fill
ASK_AGAIN = 8  #: replicas that may die during a request before it goes on to the next larger model
LOADS = 2  #: attempts to load a model before the deployment fails
START_S = 120  #: until which Ray Serve's HTTP endpoint must be up
HEALTH_S = 2.0  #: between two health checks of a replica, and for which one that ends may finish

#: Returns a model, in the process that will hold it.
Load = Callable[[], Model]
#: A model's output, its confidence (NaN where it failed), and the reason of a failure.
ModelAnswer = tuple[object, float, str | None]


@dataclass(frozen=True)
class Size:
    """How a model is deployed."""

    replicas: int = 1
    batch: int = BATCH
    gpu_share: float | None = None  #: of a GPU, a replica, where the cluster has any; None: shared out evenly


def sizes_of(cascade: Cascade, plan: Path | None) -> list[Size]:
    """Return each model's replicas, batch and GPU share by a file of ``flexhybrid cascade plan``; else a replica each.

    A model that the plan leaves out, since no request should visit it, has one replica: requests of models that fail
    go to it. Raises InputError for a plan of other models, or one with partitions, which no executor here runs.
    """
    if plan is None:
        return [Size() for _ in cascade.models]
    record = read_json(plan)
    try:
        planned = {model["name"]: model for model in record["models"]}
        sharers = {gpu["name"]: len(gpu["holds"]) for gpu in record["gpus"]}
        return [_size(planned[name], sharers) for name in cascade.names]
    except (KeyError, TypeError) as error:
        raise InputError(f"{plan} is no plan of the cascade {', '.join(cascade.names)}: {error} is missing") from None


def _size(planned: dict, sharers: dict[str, int]) -> Size:
    if planned["partitions"] > 1:
        raise InputError(
            f"model {planned['name']} is planned in {planned['partitions']} partitions, and a replica here is one "
            "executor: plan it in one partition, with its weights offloaded"
        )
    crowd = max((sharers[gpu] for replica in planned["gpus"] for gpu in replica), default=1)
    return Size(max(1, planned["replicas"]), max(1, planned["batch"]), 1 / crowd)


class Replica:
    """A model and its judgement; requests that come at about the same time are computed together."""

    def __init__(self, cascade: Cascade, place: int, load: Load, batch: int):
        from ray import serve

        self.cascade, self.place, self.model = cascade, place, load()

        @serve.batch(max_batch_size=batch, batch_wait_timeout_s=BATCH_WAIT_S)
        async def together(requests: list) -> list[ModelAnswer]:
            # on a thread, so that the replica still answers its controller
            judgement = await asyncio.to_thread(judge, self.cascade, self.place, self.model, _stacked(requests))
            return list(zip(judgement.outputs, judgement.sure.tolist(), judgement.reasons, strict=True))

        self._together = together

    async def ask(self, request) -> ModelAnswer:
        return await self._together(request)


def _stacked(requests: list) -> list | np.ndarray:
    """Stack arrays of one shape; of several shapes, each request is judged alone, and the model may refuse it."""
    shapes = {request.shape if isinstance(request, np.ndarray) else None for request in requests}
    return requests if len(shapes) > 1 or None in shapes else np.stack(requests)


class Router:
    """Sends each request from model to model until one is sure. ``asks`` [models]: asks a replica of a model."""

    def __init__(self, cascade: Cascade, *handles):
        self.cascade = cascade
        self.asks = [handle.ask.remote for handle in handles]

    async def answer(self, request, index: int) -> Answer:
        """Answer a request; ``index`` is its place in the file."""
        answer, i = Answer(index), 0
        while i < len(self.asks):
            output, sure, reason = await self._ask(i, request)
            i = int(note(self.cascade, i, [answer], Judgement([output], np.array([sure]), [reason]))[0])
        return answer

    async def _ask(self, i: int, request) -> ModelAnswer:
        from ray.exceptions import RayActorError, RayError

        for _ in range(ASK_AGAIN):
            try:
                return await self.asks[i](request)
            except RayActorError:  # its replica died: another one is asked
                await asyncio.sleep(BATCH_WAIT_S)
            except RayError as error:
                return None, math.nan, f"{type(error).__name__}: {first_line(error)}"
        return None, math.nan, f"{ASK_AGAIN} of its replicas died of it"

    async def __call__(self, http):
        """Answer a POST of {"x": …}, or for generation {"prompt": …}, with the Answer as JSON (``request_of``).

        The status is 503 where no model could answer, and 400 for a body that is no request.
        """
        from starlette.responses import JSONResponse

        try:
            request = request_of(await http.json(), self.cascade.task, self.cascade.x_dtype)
        except ValueError as error:  # InputError, or no JSON
            return JSONResponse({"error": f"the body is no request: {error}"}, status_code=400)
        answer = await self.answer(request, 0)
        return JSONResponse(answer.__dict__, status_code=503 if answer.model is None else 200)


@contextmanager
def deployed(
    cascade: Cascade, loads: Sequence[Load], sizes: Sequence[Size], port: int, say: Callable[[str], None]
) -> Iterator[Callable[[Sequence | np.ndarray, int], list[Answer]]]:
    """Serve the cascade at http://HOST:port/; yield a function from (requests, index of the first) to their answers.

    Raises InputError where Ray is not installed or serves another application, the port is taken, the cluster cannot
    hold the replicas, or a model cannot be loaded.
    """
    from flexhybrid.jobs.ray_cluster import cluster

    try:
        socket.create_server((HOST, port)).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"--port {port}: {error}") from None
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", str(START_S))  # 5 s: too short on a busy machine
    with redirect_stdout(sys.stderr), cluster(say) as ray:  # Ray prints its processes' output; stdout is for the result
        from ray import serve

        if serve.status().proxies:  # to shut Serve down ends all of its applications
            raise InputError("Ray Serve is at work on this cluster already: end it first, with `serve shutdown`")
        router = _application(cascade, loads, sizes, ray)
        try:
            _start(serve, port)
            try:
                handle = serve.run(router, name=APPLICATION, route_prefix="/")
            except RuntimeError as error:
                raise InputError(f"Ray Serve could not deploy the cascade: {_cause(error)}") from error
            num = sum(size.replicas for size in sizes)
            say(f"cascade    http://{HOST}:{port}/, {num} replicas of {len(sizes)} models")
            yield lambda requests, first: _answer_all(handle, requests, first)
        finally:
            serve.shutdown()


def _start(serve, port: int) -> None:
    """Start Ray Serve with its HTTP endpoint. Serve itself replaces an endpoint that is slow to come up."""
    from ray.exceptions import RayError

    until = time.monotonic() + START_S
    with suppress(RayError, TimeoutError):
        serve.start(http_options={"host": HOST, "port": port})
    while {"HEALTHY"} != {status.value for status in serve.status().proxies.values()}:
        if time.monotonic() > until:
            raise InputError(f"Ray Serve's HTTP endpoint did not come up within {START_S} s")
        time.sleep(0.2)


def _application(cascade: Cascade, loads: Sequence[Load], sizes: Sequence[Size], ray):
    """Return the router with a deployment of each model behind it, ready for ``serve.run``."""
    from ray import serve

    from flexhybrid.jobs.ray_cluster import ENVIRONMENT

    installed = (sys.prefix, sys.base_prefix)  # modules that are not installed may be models
    own_folders = [folder or os.getcwd() for folder in sys.path if not folder.startswith(installed)]
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(own_folders)}
    free = ray.available_resources()
    if cascade.task != "generation":
        free.pop("GPU", None)  # torch modules compute on the CPU
    cpus, shares = shared_out(sizes, free)
    handles = []
    for place, (name, load, size) in enumerate(zip(cascade.names, loads, sizes, strict=True)):
        options = {"num_cpus": cpus, "num_gpus": shares[place], "runtime_env": {"env_vars": environment}}
        replica = serve.deployment(Replica).options(
            name=name,
            num_replicas=size.replicas,
            ray_actor_options=options,
            health_check_period_s=HEALTH_S,
            max_ongoing_requests=2 * size.batch,
            graceful_shutdown_timeout_s=HEALTH_S,
            max_constructor_retry_count=LOADS,
        )
        handles.append(replica.bind(cascade, place, load, size.batch))
    router = serve.deployment(Router).options(
        name=ROUTER, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=10_000, health_check_period_s=HEALTH_S
    )
    return router.bind(cascade, *handles)


def shared_out(sizes: Sequence[Size], free: dict[str, float]) -> tuple[float, list[float]]:
    """Return (CPUs of each replica, GPU share of a replica of each model), out of the cluster's ``free`` resources.

    Raises InputError where a plan asks for more GPUs than are free: Serve would wait for ever.
    """
    num, gpus = sum(size.replicas for size in sizes), free.get("GPU", 0.0)
    cpus = min(1.0, math.floor(100 * free.get("CPU", 1.0) / (num + 1)) / 100)
    if not gpus:
        return cpus, [0.0] * len(sizes)
    even = 1 / math.ceil(num / gpus)
    shares = [even if size.gpu_share is None else size.gpu_share for size in sizes]
    needed = sum(share * size.replicas for share, size in zip(shares, sizes, strict=True))
    if needed > gpus + 1e-6:
        raise InputError(f"the replicas need {needed:.4g} GPUs, and the Ray cluster has {gpus:g} free: plan for those")
    return cpus, shares


def _cause(error: Exception) -> str:
    """Return the line with a failed deployment's reason: the last one of the traceback that Serve passes on."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception): ", line)), lines[0])


def _answer_all(handle, requests: Sequence | np.ndarray, first: int) -> list[Answer]:
    from ray.exceptions import RayActorError

    answers: dict[int, Answer] = {}
    for _ in range(ASK_AGAIN):
        missing = (i for i in range(len(requests)) if i not in answers)
        waiting = {i: handle.answer.remote(requests[i], first + i) for i in missing}
        for i, response in waiting.items():
            with suppress(RayActorError):  # the router died: its successor is asked
                answers[i] = response.result()
        if len(answers) == len(requests):
            return [answers[i] for i in range(len(requests))]
    raise InputError(f"the router of the cascade died {ASK_AGAIN} times")
