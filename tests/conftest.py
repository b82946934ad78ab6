"""Settings and fixtures of all tests: one thread for torch, skipped GPU tests, and a hypothesis profile."""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import os
import re
import signal
import sys
from pathlib import Path

# Before anything loads torch: else small kernels spin, and every process has as many threads as this machine has cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OMP_NUM_THREADS"] = "1"

import forced_machine
import pytest

# No test may hang on the machine it meets: not here, and not in the processes that tests start.
forced_machine.install()
forced = str(Path(forced_machine.__file__).parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [forced, os.environ.get("PYTHONPATH")]))

# A worker of pytest-xdist has a core to itself. The lanes of a run hand tasks on, and the interpreter's lock with them:
# between two cores that takes a quarter more of processor time than on one.
CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
if CORES and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
    os.sched_setaffinity(0, {sorted(CORES)[int(worker.removeprefix("gw")) % len(CORES)]})

# A shell's background job ignores SIGINT, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `make gpu` runs the tests marked cuda with the machine's own Python, which may lack hypothesis.
if importlib.util.find_spec("hypothesis") is None:
    _imports_hypothesis = re.compile(r"^\s*(?:from|import) hypothesis\b", re.MULTILINE)
    collect_ignore = [
        str(path.relative_to(Path(__file__).parent))
        for path in Path(__file__).parent.rglob("test_*.py")
        if _imports_hypothesis.search(path.read_text(encoding="utf-8"))
    ]
else:
    from hypothesis import HealthCheck, settings

    # A busy machine draws slowly; that says nothing about a test.
    settings.register_profile(
        "flexhybrid", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow], print_blob=True
    )
    settings.register_profile("flexhybrid-ci", settings.get_profile("flexhybrid"), derandomize=True)
    settings.load_profile("flexhybrid-ci" if os.environ.get("CI") else "flexhybrid")


#: Seconds of a core, roughly, that the tests of a file and what they start take: of the longest files.
SECONDS = {
    **{"graphs": 17, "ray": 31, "run": 40, "docs": 23, "counted_steps": 10, "search_optimum": 20, "speculative": 17},
    **{"kinds_of_requests": 14, "streams": 15, "sim_queue": 11, "reproduce_kvpr": 12, "refill": 9},
    **{"published_models": 4, "attend_triton": 10, "sim_closed_form": 14, "states": 11, "device_memory": 6},
    **{"interpreted": 13, "wheel": 8, "compare": 13, "reproduce_capture": 12, "models": 9, "whatif": 11},
    **{"exactness": 9, "lending": 6},
    **{"accuracy": 8, "checkpoint_files": 9, "faults": 12, "queue_search": 9, "fuzz": 22, "replanning": 12},
    **{"attention_in_place": 6, "cli": 8, "outlook": 8, "run_memory": 8, "structured": 8, "api": 8, "gpu_parts": 7},
    **{"profile": 4, "run_malformed": 7, "lm_eval": 6, "prefixes": 5, "published": 6},
    **{"accuracy_study": 7, "quantize_triton": 5, "runtime_disk": 6, "search_lp": 5, "selection_product": 5},
    "sim_launcher": 3,
}


def dealt(items: list, num_workers: int) -> list:
    """Order tests so that pytest-xdist gives each worker long files of equal total time first, then short files. Tests
    of a file stay together, since they share fixtures."""
    files: dict[str, list] = {}
    for item in items:
        files.setdefault(item.path.stem.removeprefix("test_"), []).append(item)
    parts, seconds = [[] for _ in range(num_workers)], [0] * num_workers
    for name in sorted(files.keys() & SECONDS.keys(), key=lambda name: (-SECONDS[name], name)):
        least = seconds.index(min(seconds))
        parts[least] += files.pop(name)
        seconds[least] += SECONDS[name]
    short, ordered = [item for file in files.values() for item in file], []
    for place, part in enumerate(parts):
        room = max(0, (len(items) - len(ordered)) // (num_workers - place) - len(part))
        ordered += part + short[:room]
        short = short[room:]
    return ordered


def pytest_collection_modifyitems(items):
    """Order the tests for the workers; skip GPU tests without a GPU. Torch is loaded only for GPU tests."""
    items[:] = dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
    gpu_items = [item for item in items if item.get_closest_marker("cuda")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """Fork the workers from a process that has already loaded the libraries of the tests."""
    if sys.platform == "linux":
        import tempfile

        import warm_python

        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        warm_python.test_workers(Path(folder.name))


def pytest_collectstart():
    """Switch off the garbage collector: imports allocate much memory and free none."""
    gc.disable()


def pytest_collection_finish():
    """Freeze the objects that imports made, and collect garbage less often. Plans and traces are many small objects
    without cycles; Python's default of a collection per 700 objects takes 10 % of a plan's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Freeze what a file's tests leave behind: hundreds of later garbage collections would scan it."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture
def as_json(capsys):
    """Return a function that runs a command with ``--json`` and returns its output."""
    from flexhybrid import cli

    def run(*words) -> dict:
        assert cli.main([*map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Use one thread, which is fastest for tiny shapes. Tests that never load torch are not affected."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def two_passes(monkeypatch):
    """Profile each run twice at most: on a busy machine, passes would differ until the time limit."""
    if profiling := sys.modules.get("flexhybrid.runtime.profiling.profile"):
        monkeypatch.setattr(profiling, "CPU_SECONDS", 0.0)


@pytest.fixture
def short_profile(monkeypatch):
    """Profile with the fewest measurements, and float32 as the faster dtype: no seconds matter to the test."""
    from flexhybrid.runtime.profiling import profile as profiling

    monkeypatch.setenv(forced_machine.FASTER_DTYPE, "float32")
    for name, value in {"LINK_SECONDS": 0.0, "LINK_SIZES": (1 << 12, 1 << 16), "DECODE_SECONDS": 0.0}.items():
        monkeypatch.setattr(profiling, name, value)


@pytest.fixture
def every_core():
    """Let the threads of a test run on all cores at the same time."""
    if not CORES:
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES)
    yield
    os.sched_setaffinity(0, own)


@pytest.fixture
def warm_processes(monkeypatch):
    """Start the product's processes with torch already loaded."""
    import subprocess

    import warm_python

    monkeypatch.setattr(subprocess, "Popen", warm_python.Popen)


@pytest.fixture(params=forced_machine.DTYPES)
def cpu_dtype(request, monkeypatch) -> str:
    """Return the dtype that "auto" chooses for a 16-bit checkpoint on a CPU: each one in turn."""
    monkeypatch.setenv(forced_machine.FASTER_DTYPE, request.param)
    return request.param


@pytest.fixture
def attention_path(request, monkeypatch) -> str:
    """Force one attention path in all phases, by its name (an indirect parameter)."""
    monkeypatch.setenv(forced_machine.ATTENTION, request.param)
    return request.param


@pytest.fixture(params=[1, 2, 16])
def num_cores(request, monkeypatch) -> int:
    """Set the number of cores that this process believes it may use."""
    monkeypatch.setattr(os, "cpu_count", lambda: request.param)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(request.param)), raising=False)
    return request.param


@pytest.fixture(scope="module")
def tiny_opt(tmp_path_factory) -> tuple:
    """Return the folder of a tiny random OPT, and transformers' model of it."""
    from models import save_opt

    folder = tmp_path_factory.mktemp("tiny")
    return folder, save_opt(folder)


@pytest.fixture(scope="module")
def tiny(tiny_opt) -> Path:
    return tiny_opt[0]


@pytest.fixture(scope="module")
def tiny_of(tmp_path_factory):
    """Return the checkpoint of a tiny model of a type, and the model; each is made once."""
    from tiny_models import save_tiny

    from flexhybrid.runtime.storage.loader import Checkpoint

    pytest.importorskip("greenlet")

    @functools.cache
    def of(model_type: str) -> tuple:
        model = save_tiny(folder := tmp_path_factory.mktemp(model_type), model_type)
        return Checkpoint(folder), model

    return of


@pytest.fixture(scope="module")
def tiny_llm(tiny):
    from flexhybrid import LLM

    return LLM(tiny, "kv_only", device="cpu", dtype="float32")


@pytest.fixture
def batches(monkeypatch):
    """Return the batches that run during a test; their blocks are checked after every iteration."""

    from flexhybrid.core.schedule import positions
    from flexhybrid.core.schedule.scheduler import Scheduler

    class Checked(Scheduler):
        def steps(self, iteration, stopped):
            yield from super().steps(iteration, stopped)
            if self.wave.sharing:
                self.wave.sharing.check()
            for k, part in enumerate(self.wave.blocks):
                part.check()
                holders = {place for pool in part.pools.values() for place, runs in pool.held.items() if runs}
                assert holders <= set(self.groups[k].tolist())  # nobody who has left holds blocks

    started: list[Scheduler] = []

    def start(wave):
        started.append(Checked(wave))
        return started[-1]

    monkeypatch.setattr(positions, "Scheduler", start)
    return started
