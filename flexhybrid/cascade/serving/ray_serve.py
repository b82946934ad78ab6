"""``flexhybrid cascade run --engine ray``: a cascade as an application of Ray Serve.

    HTTP, or a file ──▶ router ──▶ process with model i ──▶ router ──▶ answer, or a process with a larger model

Where all models are in one process (``processes``), the router is in it too. No request of a file is lost with a
process that dies: another one, or its successor, is asked. If the router dies, a file's requests are sent again; HTTP
requests under way get Ray Serve's status 500.
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

ROUTER = "router"
HOST = "127.0.0.1"  #: the endpoint serves this machine alone: it has no access control
LOADS = 2  #: attempts to load a model before the deployment fails
START_S = 120  #: until which Ray Serve's HTTP endpoint must be up
HEALTH_S = 2.0  #: between two health checks of a process, and for which one that ends may finish
IDLE_S = 0.5  #: between two looks for requests under way of a process that is to end; Ray's own are 2 s apart
FILE_REQUESTS = 10_000  #: of a file that the router may have at a time


@dataclass(frozen=True)
class Serving:
    """A cascade at work."""

    #: Takes requests and the index of the first, returns their answers.
    answer: Callable[[Sequence | np.ndarray, int], list[Answer]]
    #: Returns the joules that its machines took since it is at work, or None, and by what they were measured.
    energy: Callable[[], tuple[float | None, str]]
    #: Returns what was counted (``Counts.record``), where requests may come from elsewhere too.
    status: Callable[[], dict] | None = None
    url: str | None = None


@contextmanager
def deployed(
    cascade: Cascade, loads: Sequence[Load], options: ServeOptions, say: Callable[[str], None]
) -> Iterator[Serving]:
    """Serve the cascade at http://HOST:port/route; other applications of the cluster are left alone.

    Raises InputError where Ray is not installed, an application of this name or route is served already, the port is
    taken, the cluster cannot hold the processes, or a model cannot be loaded.
    """
    from flexhybrid.jobs.ray_cluster import check_stays, cluster

    processes = processes_of(cascade, options.plan, options.isolate)
    if options.detach:
        check_stays("--detach")
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", str(START_S))  # 5 s: too short on a busy machine
    with redirect_stdout(sys.stderr), cluster(say) as ray:  # Ray prints its processes' output; stdout is for the result
        from ray import serve
        from ray.serve.exceptions import RayServeException

        status = serve.status()
        was_served = bool(status.proxies)
        if options.name in status.applications:
            raise InputError(
                f"an application {options.name!r} is served on this cluster already: give another --name, or end it "
                f"with `flexhybrid cascade stop --name {options.name}`"
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
    """End an application that was detached; InputError where there is none of this name."""
    from flexhybrid.jobs.ray_cluster import check_stays, cluster

    check_stays("cascade stop")
    with redirect_stdout(sys.stderr), cluster(say):
        from ray import serve

        served = sorted(serve.status().applications)
        if name not in served:
            raise InputError(f"no application {name!r} is served on this cluster; it has {', '.join(served) or 'none'}")
        serve.delete(name)
    return {"ended": name}


def _end(serve, name: str, was_served: bool) -> None:
    """End the application, and Serve with it where it began with it and has no other."""
    if name in serve.status().applications:
        serve.delete(name)
    if not was_served and not serve.status().applications:
        serve.shutdown()


def _check_free(port: int) -> None:
    try:
        socket.create_server((HOST, port)).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"--port {port}: {error}") from None


def _port_of_serve() -> int:
    """Return the port of the endpoint that the cluster has; it cannot be changed while Serve is at work."""
    from ray.serve.context import _get_global_client  # Serve has no public name for it

    client = _get_global_client()
    if client is None:
        raise InputError("Ray Serve is ending on this cluster: try again")
    return client.http_config.port


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


def _application(cascade: Cascade, loads: Sequence[Load], processes: Sequence[Process], options: ServeOptions, ray):
    """Return the router with a deployment of each process behind it, ready for ``serve.run``."""
    from ray import serve

    from flexhybrid.jobs.ray_cluster import ENVIRONMENT

    installed = (sys.prefix, sys.base_prefix)  # modules that are not installed may be models
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
        # "auto" of a model is then the GPU that Ray gives, and without one the CPU
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
    """Return Ray's resource that names a machine -> its GPUs, of the cluster's machines that have any."""
    machines = {}
    for node in ray.nodes():
        has = node["Resources"]
        names = [name for name in has if name.startswith("node:") and name != "node:__internal_head__"]
        if node["Alive"] and names and has.get("GPU"):
            machines[names[0]] = has["GPU"]
    return machines


def _cause(error: Exception) -> str:
    """Return the line with a failed deployment's reason: the last one of the traceback that Serve passes on."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception): ", line)), lines[0])


def _energy(handle) -> tuple[float | None, str]:
    from ray.exceptions import RayError

    try:
        return handle.energy.remote().result()
    except RayError as error:  # answers are not lost for it
        return None, f"not measured: the router did not say ({type(error).__name__})"


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


def stop_command(args) -> dict:
    """Do what the arguments of the command line ask for."""
    result = stop(args.name, functools.partial(print, file=sys.stderr))
    args.show(f"ended: {result['ended']}")
    return result
