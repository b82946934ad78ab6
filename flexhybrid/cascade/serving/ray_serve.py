"""``flexhybrid cascade run --engine ray``: a cascade as an application of Ray Serve.

    HTTP, or a file ──▶ router ──▶ process with model i ──▶ router ──▶ answer, or a process with a larger model

If all models are in one process (``processes``), so is the router. If a process dies, another one, or its replacement,
gets its requests. If the router dies, a file's requests are sent again, and current HTTP requests get Ray Serve's
status 500.
"""

import functools
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass

import numpy as np

from flexhybrid.cascade.options import ServeOptions
from flexhybrid.cascade.routes import Cascade
from flexhybrid.cascade.serving.answers import Answer
from flexhybrid.cascade.serving.processes import Process, actor_options, processes_of
from flexhybrid.cascade.serving.router import ASK_AGAIN, Load, LocalRouter, RemoteRouter, Worker
from flexhybrid.core.errors import InputError

ROUTER = "router"  #: name of the router's deployment
HOST = "127.0.0.1"  #: the endpoint serves only this machine, as it has no access control
LOADS = 2  #: attempts to load a model before the deployment fails
START_S = 120  #: seconds in which Ray Serve's HTTP endpoint must start
HEALTH_S = 2.0  #: seconds between two health checks of a process, and for ending one
IDLE_S = 0.5  #: seconds between two checks whether a process that is to end still has requests; Ray's default: 2
FILE_REQUESTS = 10_000  #: most requests of a file at the router at a time


@dataclass(frozen=True)
class Serving:
    """A running cascade."""

    #: Returns the answers to requests, given with the index of the first one.
    answer: Callable[[Sequence | np.ndarray, int], list[Answer]]
    #: Returns the joules of its machines since the start (None: not measured), and the source of the joules.
    energy: Callable[[], tuple[float | None, str]]
    #: Returns the counts (``Counts.record``) of a cascade with an HTTP endpoint.
    status: Callable[[], dict] | None = None
    url: str | None = None  #: address of the HTTP endpoint


@contextmanager
def deployed(
    cascade: Cascade, loads: Sequence[Load], options: ServeOptions, say: Callable[[str], None]
) -> Iterator[Serving]:
    """Serve the cascade at http://HOST:port/route within the block. Other applications of the cluster keep running.

    Raise InputError if Ray is not installed, the name, route or port is in use, the cluster is too small, or a model
    cannot be loaded.
    """
    from flexhybrid.jobs.ray_cluster import check_stays, cluster

    processes = processes_of(cascade, options.plan, options.isolate)
    if options.detach:
        check_stays("--detach")
    # Ray's default of 5 s is too short for a busy machine.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", str(START_S))
    with redirect_stdout(sys.stderr), cluster(say) as ray:  # Ray prints to stdout, which is for the result
        from ray import serve
        from ray.serve.exceptions import RayServeException

        status = serve.status()
        was_served = bool(status.proxies)
        if options.name in status.applications:
            raise InputError(
                f"this cluster already has an application {options.name!r}: give another --name, or end it with "
                f"`flexhybrid cascade stop --name {options.name}`"
            )
        port = _port_of_serve() if was_served else options.port
        if not was_served:
            _check_free(port)
        application = _application(cascade, loads, processes, options, ray)
        stays = False
        try:
            _start(serve, port)
            try:
                handle = serve.run(application, name=options.name, route_prefix=options.route)
            except (RuntimeError, ValueError, RayServeException, ray.exceptions.RayError) as error:
                raise InputError(f"Ray Serve could not deploy the cascade: {_cause(error)}") from error
            url = f"http://{HOST}:{port}{options.route}"
            say(f"cascade    {url}, {len(cascade.models)} models in {len(processes)} processes")
            yield Serving(
                answer=lambda requests, first: _answer_all(handle, requests, first),
                energy=lambda: _energy(handle),
                status=lambda: handle.status.remote().result(),
                url=url,
            )
            stays = options.detach
        finally:
            if not stays:
                _end(serve, options.name, was_served)


def stop(name: str, say: Callable[[str], None]) -> dict:
    """End a detached application; return its name. Raise InputError if there is none of this name."""
    from flexhybrid.jobs.ray_cluster import check_stays, cluster

    check_stays("cascade stop")
    with redirect_stdout(sys.stderr), cluster(say):
        from ray import serve

        served = sorted(serve.status().applications)
        if name not in served:
            raise InputError(f"this cluster has no application {name!r}; it has {', '.join(served) or 'none'}")
        serve.delete(name)
    return {"ended": name}


def _end(serve, name: str, was_served: bool) -> None:
    """End the application, and Ray Serve too if it was started for it and has no other application."""
    if name in serve.status().applications:
        serve.delete(name)
    if not was_served and not serve.status().applications:
        serve.shutdown()


def _check_free(port: int) -> None:
    """Raise InputError if the port cannot be used."""
    try:
        socket.create_server((HOST, port)).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"--port {port}: {error}") from None


def _port_of_serve() -> int:
    """Return the port of Ray Serve's running endpoint, which cannot be changed. Raise InputError if Serve is ending."""
    from ray.serve.context import _get_global_client  # there is no public function for it

    client = _get_global_client()
    if client is None:
        raise InputError("Ray Serve is ending on this cluster: try again")
    return client.http_config.port


def _start(serve, port: int) -> None:
    """Start Ray Serve with its HTTP endpoint, and wait for it. Raise InputError after START_S."""
    from ray.exceptions import RayError

    until = time.monotonic() + START_S
    with suppress(RayError, TimeoutError):
        serve.start(http_options={"host": HOST, "port": port})
    while {"HEALTHY"} != {status.value for status in serve.status().proxies.values()}:
        if time.monotonic() > until:
            raise InputError(f"Ray Serve's HTTP endpoint did not start within {START_S} s")
        time.sleep(0.2)


def _application(cascade: Cascade, loads: Sequence[Load], processes: Sequence[Process], options: ServeOptions, ray):
    """Return the application for ``serve.run``: the router and a deployment for each process."""
    from ray import serve

    from flexhybrid.jobs.ray_cluster import ENVIRONMENT

    installed = (sys.prefix, sys.base_prefix)  # other folders may have modules with models
    own_folders = [folder or os.getcwd() for folder in sys.path if not folder.startswith(installed)]
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(own_folders)}
    free = ray.available_resources()
    if options.device == "cpu":
        free.pop("GPU", None)
    routing = {"max_ongoing_requests": FILE_REQUESTS + options.queue, "max_queued_requests": FILE_REQUESTS}
    shared = {
        "health_check_period_s": HEALTH_S,
        "graceful_shutdown_timeout_s": HEALTH_S,
        "graceful_shutdown_wait_loop_s": IDLE_S,
        "max_constructor_retry_count": LOADS,
    }
    bound = []
    for process, given in zip(processes, actor_options(processes, free, _machines(ray)), strict=True):
        # With device "auto", a model then uses the GPU that Ray assigns, or else the CPU.
        blind = {} if given["num_gpus"] else {"CUDA_VISIBLE_DEVICES": ""}
        actor = {**given, "runtime_env": {"env_vars": {**environment, **blind}}}
        held = {place: loads[place] for place in process.batch}
        for place, size in process.memory.items() if given["num_gpus"] else ():
            held[place] = functools.partial(loads[place], device_memory=size)  # type: ignore[call-arg]: load_model's
        if len(processes) == 1:
            whole = serve.deployment(LocalRouter).options(name=ROUTER, ray_actor_options=actor, **routing, **shared)
            return whole.bind(cascade, held, process.batch, options)
        most = 2 * sum(process.batch.values())
        worker = serve.deployment(Worker).options(
            name=process.name, ray_actor_options=actor, max_ongoing_requests=most, **shared
        )
        bound.append(worker.bind(cascade, held, process.batch, options.timeout_s))
    router = serve.deployment(RemoteRouter).options(
        name=ROUTER,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=HEALTH_S,
        graceful_shutdown_wait_loop_s=IDLE_S,
        **routing,
    )
    return router.bind(cascade, [list(process.batch) for process in processes], options, *bound)


def _machines(ray) -> dict[str, float]:
    """Return Ray's resource name of a machine -> its number of GPUs, for machines with GPUs."""
    machines = {}
    for node in ray.nodes():
        has = node["Resources"]
        names = [name for name in has if name.startswith("node:") and name != "node:__internal_head__"]
        if node["Alive"] and names and has.get("GPU"):
            machines[names[0]] = has["GPU"]
    return machines


def _cause(error: Exception) -> str:
    """Return the reason of a failed deployment: the last error line of the traceback in Serve's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception): ", line)), lines[0])


def _energy(handle) -> tuple[float | None, str]:
    """Return the router's joules and their source."""
    from ray.exceptions import RayError

    try:
        return handle.energy.remote().result()
    except RayError as error:  # not worth losing answers
        return None, f"not measured: the router did not answer ({type(error).__name__})"


def _answer_all(handle, requests: Sequence | np.ndarray, first: int) -> list[Answer]:
    """Return the router's answers. Raise InputError if it dies ASK_AGAIN times."""
    from ray.exceptions import RayActorError

    answers: dict[int, Answer] = {}
    for _ in range(ASK_AGAIN):
        missing = (i for i in range(len(requests)) if i not in answers)
        waiting = {i: handle.answer.remote(requests[i], first + i) for i in missing}
        for i, response in waiting.items():
            with suppress(RayActorError):  # the router died: ask its replacement
                answers[i] = response.result()
        if len(answers) == len(requests):
            return [answers[i] for i in range(len(requests))]
    raise InputError(f"the router of the cascade died {ASK_AGAIN} times")


def stop_command(args) -> dict:
    """Run the command ``stop``."""
    result = stop(args.name, functools.partial(print, file=sys.stderr))
    args.show(f"ended: {result['ended']}")
    return result
