"""Connects a job to a Ray cluster: one that is running, or a local one that ends with the job."""

import contextlib
import logging
import math
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flexhybrid.core.errors import InputError

OBJECT_STORE_BYTES = 256 << 20  #: object store of a local cluster; a job's messages are small
LISTENS_WITHIN_S = 2.0  #: seconds in which a cluster must answer; Ray itself would try for minutes
MAX_RETRIES = 8  #: retries of work whose process died; limited, as the work may be the cause
#: Makes idle OpenMP threads of actors sleep instead of spin. Ray itself sets OMP_NUM_THREADS.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class Replicas:
    """The actors of a job, each with its own executor."""

    size: int  #: number of actors
    actors_per_node: int  #: most actors that share a node's memory and cores
    cpus: float  #: CPUs of each actor
    gpus: int  #: GPUs of each actor

    def __str__(self) -> str:
        holds = "1 GPU" if self.gpus else f"{self.cpus:g} CPU"
        return f"{self.size} actor{'s' * (self.size > 1)} with {holds} each"


@contextlib.contextmanager
def cluster(say: Callable[[str], None]) -> Iterator:
    """Yield the module ``ray``, connected to a cluster; ``say`` prints its name.

    The cluster is the one that this process uses already, else the one at RAY_ADDRESS, else this user's on this
    machine, else a local one that ends with the block. Raise InputError if Ray is not installed, or if there is no
    cluster at RAY_ADDRESS.
    """
    try:
        import ray
        import ray.data
    except ImportError:
        raise InputError(
            "--engine ray needs Ray, which is not installed: pip install 'ray[data,serve]>=2.50,<2.64'"
        ) from None
    ray.data.DataContext.get_current().enable_progress_bars = False  # the job has its own progress bar
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # no warnings about Ray's internals on stderr
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    if ray.is_initialized():
        yield ray
        return
    address = os.environ.get("RAY_ADDRESS")
    if address and address.startswith("ray://"):
        raise InputError(
            f"RAY_ADDRESS={address} would use Ray Client, which is not supported: start the job on a machine of the "
            "cluster"
        )
    options = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        try:
            head = _listening(address)
            ray.init(head, **options)
            say(f"ray        the cluster at {head} ({'RAY_ADDRESS' if address else 'your own `ray start`'})")
        except ConnectionError as error:
            if address:
                raise InputError(f"no Ray cluster at RAY_ADDRESS={address}: {error}") from None
            say(f"ray        no cluster (RAY_ADDRESS, or `ray start` on this machine): {error}; a local one is started")
            start_local(ray, **options)
        yield ray
    finally:
        ray.shutdown()


def _listening(asked: str | None) -> str:
    """Return the address ``asked`` (RAY_ADDRESS), else that of this user's last `ray start` on this machine.

    Raise ConnectionError if there is no address, or if nothing listens there. The last address remains after its
    cluster has ended, and only a private module of Ray reads it. Ray's address "auto" would also choose another user's
    cluster, or one that ends with another job.
    """
    from ray._private.services import canonicalize_bootstrap_address, find_bootstrap_address

    try:
        known = asked or find_bootstrap_address(None)
        address = canonicalize_bootstrap_address(known) if known else None
    except Exception as error:  # not an address, an unknown host name, or an unreadable last address
        raise ConnectionError(str(error)) from None
    if address is None:
        raise ConnectionError("none is known")
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), LISTENS_WITHIN_S).close()
    except (OSError, ValueError) as error:
        raise ConnectionError(f"nothing listens at {address} ({error})") from None
    if not asked and known not in _own_clusters():
        raise ConnectionError(f"the cluster at {address} has no process on this machine that is this user's")
    return address


def check_stays(what: str) -> None:
    """Raise InputError if no cluster outlives this process. ``what``: name of the command that needs one."""
    try:
        import ray
    except ImportError:
        return  # ``cluster`` raises the error
    try:
        if not ray.is_initialized():
            _listening(os.environ.get("RAY_ADDRESS"))
    except ConnectionError as error:
        raise InputError(f"{what} needs a cluster that stays (`ray start --head` starts one): {error}") from None


def _own_clusters() -> set[str]:
    """Return the addresses of clusters with a node on this machine whose process is this user's."""
    addresses = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or may not be read
            command, *options = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if Path(command).name == "raylet" and folder.stat().st_uid == os.getuid():
                addresses |= {option.partition("=")[2] for option in options if option.startswith("--gcs-address=")}
    return addresses


def start_local(ray, **options) -> None:
    """Start a cluster on this machine that ends with this process. ``options``: arguments for ``ray.init``.

    Raise InputError if it does not start in two attempts; Ray waits 30 s for its processes in each.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for last in (False, True):
        try:
            ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **options)
            return
        except Exception as error:  # Ray raises no specific type
            ray.shutdown()
            if last:
                raise InputError(f"a local Ray cluster did not start: {error}") from error


def replicas_of(ray, device: str, actors: int | None) -> Replicas:
    """Return the actors of a job: ``actors``, or by default one per GPU, or per node on "cpu".
    Raise InputError if the cluster has fewer GPUs (CPUs) than that."""
    key = "GPU" if device == "cuda" else "CPU"
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get(key, 0) >= 1]
    if not nodes:
        raise InputError(f"the Ray cluster has no {key}" + ("; --device cpu runs without" if key == "GPU" else ""))
    max_actors = int(sum(node[key] for node in nodes))
    size = actors if actors is not None else max_actors if device == "cuda" else len(nodes)
    if not 1 <= size <= max_actors:
        raise InputError(f"--num-replicas {size}: the Ray cluster has {max_actors} {key}s; an actor needs one")
    actors_per_node = min(
        size, int(max(node["GPU"] for node in nodes)) if device == "cuda" else math.ceil(size / len(nodes))
    )
    cpus = min(node.get("CPU", 1) for node in nodes) / actors_per_node
    return Replicas(size, actors_per_node, math.floor(cpus) if cpus >= 1 else cpus, int(device == "cuda"))
