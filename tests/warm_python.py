"""Python processes that have torch loaded when they start: to load it takes seconds, and to fork some milliseconds.

``Popen`` and ``run`` stand in for those of ``subprocess`` where a test starts ``[sys.executable, "-c", program, …]`` or
``[sys.executable, "script.py", …]``. The process is forked from one that has loaded ``PRELOADED`` and never had a
second thread. It has its own pid, environment, folder and pipes, takes signals, and ends as Python ends. Its parent,
which is the process that it was forked from, tells how it ended.

``ray_workers`` has Ray's workers forked from it, too: Ray starts ``warm_ray_worker.py``, which asks for the fork. Ray's
own messages and recovery stay as they are; the workers of a job load Ray, torch and the product once.

``test_workers`` has pytest-xdist's workers forked as well, from a process that has also loaded the libraries of the
tests (``PRELOADED_FOR_TESTS``), and the processes that fork for each of them. So all of them load torch once.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path

PRELOADED = (
    *("flexhybrid.llm", "flexhybrid.cli", "flexhybrid.jobs.run.job", "flexhybrid.jobs.run.cli"),
    *("policy_search.search", "policy_search.systems", "transformers.models.auto.tokenization_auto"),
)
#: What tests load besides; not pytest, nor its plugins, which it reads anew to show the values in assertions.
PRELOADED_FOR_TESTS = (
    *("matplotlib.pyplot", "pandas", "scipy.stats", "hypothesis", "lm_eval.api.model", "ray", "triton"),
    *("transformers.models.opt.modeling_opt", "transformers.models.llama.modeling_llama"),
    *("flexhybrid.runtime.kernels.in_place", "flexhybrid.runtime.kernels.rows_numba"),
)
PARENT = "WARM_PYTHON_PARENT"  #: the environment's name for the socket of a process that forks parents
#: What Ray's workers load: Ray's own parts, and what the product runs in them.
PRELOADED_ON_RAY = (
    *("ray.data", "ray.serve._private.controller", "ray.serve._private.proxy", "ray.serve._private.replica"),
    *("flexhybrid.jobs.run.remote", "flexhybrid.cascade.serving.ray_serve"),
)
#: Ray keeps their values from the moment it is loaded.
JOB_OF_RAY = ("RAY_JOB_ID", "RAY_RAYLET_PID")
NO_JOB = "ffffffff"  #: the id of Ray for a worker that is started before there is work
REQUEST_BYTES = 1 << 17  #: of a request, at most
ColdPopen = subprocess.Popen


class Popen(ColdPopen):
    """A process of ``arguments``. Options of ``subprocess.Popen`` that concern the fork itself are not supported."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
                       shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *more) -> None:  # fmt: skip
        assert args[0] == sys.executable and not (preexec_fn or pass_fds or shell), f"no warm Python can run {args} so"
        self.report, report = socket.socketpair()
        request = {"arguments": [str(word) for word in args[1:]], "environment": dict(env or os.environ)}
        message = json.dumps(request | {"folder": str(cwd or os.getcwd())}).encode()
        assert len(message) < REQUEST_BYTES
        files = [own if file == -1 else file for own, file in enumerate((p2cread, c2pwrite, errwrite))]
        with report:
            socket.send_fds(parent_connection(), [message], [*files, report.fileno()])
        self.pid = int(self.report.recv(16))
        self._child_created = True
        for file in {p2cread, c2pwrite, errwrite} - {-1}:
            os.close(file)

    def _internal_poll(self, _deadstate=None) -> int | None:
        if self.returncode is None and select.select([self.report], [], [], 0)[0]:
            self._wait(None)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not select.select([self.report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self.report.recv(16))
            self.report.close()
        return self.returncode


def run(arguments: list[str], check: bool = False, timeout: float = 240, **options) -> subprocess.CompletedProcess:
    """Run a process to its end and capture its output as text."""
    pipe = subprocess.PIPE
    with Popen(arguments, stdout=pipe, stderr=pipe, text=True, **options) as process:
        out, errors = process.communicate(timeout=timeout)
    done = subprocess.CompletedProcess(arguments, process.returncode, out, errors)
    if check:
        done.check_returncode()
    return done


def ray_workers(patch, folder: Path) -> None:
    """Fork the workers of Ray clusters that this process starts; the socket for that is in ``folder``. Ray's dashboard,
    autoscaler and log printer are not started, as no test uses them."""
    from ray._private import node, ray_constants, utils

    for unused in ("start_monitor", "start_log_monitor", "start_api_server"):
        patch.setattr(node.Node, unused, lambda self, **options: None)
    patch.setattr(utils, "get_dashboard_dependency_error", lambda: "left out")  # the agent of each node starts small
    patch.setenv("WARM_PYTHON", str(folder / "warm"))
    patch.setenv("RAY_prestart_worker_first_driver", "0")  # without a job yet, they could not be forked
    patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", str(Path(__file__).with_name("warm_ray_worker.py")))
    ask({"listen": str(folder / "warm")})


def test_workers(folder: Path) -> None:
    """Fork the pytest-xdist workers that this process starts; the socket for that is in ``folder``. Another core
    compiles the CPU kernels meanwhile, unless an earlier run has kept them."""
    from execnet import gateway_io

    os.environ[PARENT] = str(folder / "parent")
    connections.append(started_parent())
    ask({"serve": os.environ[PARENT]})
    Popen([sys.executable, str(Path(__file__).with_name("attend_once.py"))])
    connections.append(connected_parent())
    ask({"preload": PRELOADED_FOR_TESTS})
    gateway_io.popen_args = lambda spec: [sys.executable, "-c", gateway_io.popen_bootstrapline]
    subprocess.Popen = Popen  # of this process, which starts nothing else


connections: list[socket.socket] = []  #: to the processes that fork: the last one is asked


def parent_connection() -> socket.socket:
    """Return the connection to the forking process, which ends with this process."""
    if not connections:
        connections.append(connected_parent() if PARENT in os.environ else started_parent())
        ask({"preload": ["attend_once"]})
    return connections[-1]


def ask(request: dict) -> int:
    """Send a request to the forking process; return its process id after the request is done."""
    parent_connection().send(json.dumps(request).encode())
    return int(parent_connection().recv(16))


def connected_parent() -> socket.socket:
    """Return a connection to a process that the one at PARENT forks for this process."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(os.environ[PARENT])
    return connection


def started_parent() -> socket.socket:
    """Return a connection to a new process that loads PRELOADED."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    command, environment = [sys.executable, __file__, str(theirs.fileno())], os.environ | {"PYTHONPATH": paths}
    with theirs:
        process = ColdPopen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
    atexit.register(process.wait)
    atexit.register(ours.close)  # the last to be registered is the first to be called
    return ours


def fork_until_closed(connection: socket.socket) -> dict | None:
    """Fork for each request. Return the request in the fork, and None here once the other side has closed."""
    reports: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, file to report to)
    hearing: dict[str, socket.socket] = {}  # where Ray's workers ask, and who wants a parent of its own
    while True:
        ready, _, _ = select.select([connection, *hearing.values(), *reports], [], [])
        tell_ended(reports, ready)
        if hearing.get("serve") in ready:
            client = hearing["serve"].accept()[0]
            if pid := os.fork():
                reports[os.pidfd_open(pid)] = pid, client.detach()
                continue
            for heard in (connection, *hearing.values()):
                heard.close()
            peer, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            os.sched_setaffinity(0, os.sched_getaffinity(peer))
            return fork_until_closed(client)
        if connection in ready:
            asking = connection
        elif hearing.get("listen") in ready:
            asking = hearing["listen"].accept()[0]
        else:
            continue
        message, files, _, _ = socket.recv_fds(asking, REQUEST_BYTES, 4)
        if not message and asking is connection:
            return None
        if asking is not connection:
            files.append(asking.detach())
        request = json.loads(message)
        if "arguments" not in request:
            preload(request.pop("preload", ()))
            hearing.update({name: listener(path) for name, path in request.items()})
            send(connection.fileno(), os.getpid())
            continue
        pid = os.fork() if asking is connection or knows(request["environment"]) else -1
        if not pid:
            for heard in (connection, *hearing.values()):
                heard.close()
            for own, file in enumerate(files[:3]):
                os.dup2(file, own)
            os.closerange(3, max(*files, *reports, *(report for _, report in reports.values())) + 1)
            return request
        for file in files[:3]:
            os.close(file)
        if pid < 0:
            send(files[3], pid)
            os.close(files[3])
            continue
        reports[os.pidfd_open(pid)] = pid, files[3]
        send(files[3], pid)


def tell_ended(reports: dict[int, tuple[int, int]], ready: Sequence) -> None:
    """Report the exit codes of the processes whose pidfd is ready."""
    for ended in reports.keys() & set(ready):
        pid, report = reports.pop(ended)
        send(report, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os.close(report)
        os.close(ended)


def listener(path: str) -> socket.socket:
    """Return a socket that accepts connections at a path."""
    hearing = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hearing.bind(path)
    hearing.listen(64)
    return hearing


def knows(environment: dict[str, str]) -> bool:
    """Return True if a Ray worker with this environment can be forked; the first such worker loads Ray."""
    job = {name: environment[name] for name in JOB_OF_RAY}
    if "ray" not in sys.modules and job["RAY_JOB_ID"] != NO_JOB:
        os.environ.update(environment)
        preload(PRELOADED_ON_RAY)
    return job == {name: os.environ.get(name) for name in JOB_OF_RAY}


def preload(names: Sequence[str]) -> None:
    """Import those of the modules that are installed; none of them starts a thread."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    with open("/proc/self/status", encoding="ascii") as status:
        assert "Threads:\t1\n" in status.read(), "a fork may wait for ever for what another thread held"
    gc.collect()
    gc.freeze()  # a fork would copy all that a collection looks at


def send(file: int, number: int) -> None:
    """Write a number to the process at the other end, unless it has ended."""
    with contextlib.suppress(BrokenPipeError):
        os.write(file, str(number).encode())


def become(request: dict) -> None:
    """Become the requested process; an exception of its program ends it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    first, *rest = request["arguments"]
    sys.path[0] = "" if first == "-c" else str(Path(first).parent)
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in folders if folder and folder not in sys.path]
    sys.argv = [first, *rest[first == "-c" :]]
    if first == "-c":
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # of pyarrow, which Ray loads
    preload(PRELOADED)
    if request := fork_until_closed(socket.socket(fileno=int(sys.argv[1]))):
        become(request)
