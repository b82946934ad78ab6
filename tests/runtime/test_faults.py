"""Test failures during runs: a clear error, no waiting thread, no file left on the disk, all memory returned. The disk
is slowed to a few bytes a second if a call must be under way when something fails. Such a call would take hours, so a
test that ends shows that the call was ended."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
import warm_python
from models import save_opt
from tiny_models import save_tiny

from flexhybrid import LLM, InputError, Policy, SamplingParams
from flexhybrid.core.policy import Placement
from flexhybrid.runtime import verbs as verbs_module
from flexhybrid.runtime.storage.disk import DiskError

pytestmark = pytest.mark.usefixtures("every_core")

ROOT = Path(__file__).resolve().parents[2]

PROMPTS = [[5, 9, 11], list(range(3, 40)), [7] * 17]
PARAMS = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)

#: Every lane has something to do: weights and cache on all three tiers, ACT and KV.
EVERYWHERE = Policy(
    "everywhere", Placement(device=0.2, host=0.3, disk=0.5),
    cache={"act@disk": 0.3, "kv@disk": 0.4, "kv@host": 0.3}, max_mini_batch_tokens=200,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opt")
    save_opt(folder, layers=3)
    return folder


@pytest.fixture
def llm(checkpoint, tmp_path):
    return LLM(checkpoint, EVERYWHERE, device="cpu", dtype="float32", disk_dir=tmp_path / "scratch")


@pytest.fixture(scope="module")
def expected(checkpoint):
    return tokens(LLM(checkpoint, "kv_only", device="cpu", dtype="float32"))


def tokens(llm) -> list[list[int]]:
    return [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, PARAMS)]


class Held:
    """Threads and open files at a moment; a test checks that only these remain."""

    def __init__(self):
        self.threads, self.files = set(threading.enumerate()), self.open_files()

    @staticmethod
    def open_files() -> list[str]:
        """Return open files on a disk; libraries open devices and pipes at any time."""
        names = []
        for name in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue
            names += [target] if "scratch" in target or "(deleted)" in target else []
        return sorted(names)

    def check(self, scratch: Path) -> None:
        assert set(threading.enumerate()) <= self.threads
        assert self.open_files() == self.files
        assert not scratch.exists() or list(scratch.iterdir()) == []


@pytest.fixture
def no_collector():
    """Switch off the garbage collector: memory must be freed without it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def patch_verb(monkeypatch, name: str, before) -> None:
    """Call ``before(executor, task)`` first whenever this verb is performed."""
    real = verbs_module.VERB_FUNCTIONS[name]

    def patched(ex, task):
        before(ex, task)
        real(ex, task)

    monkeypatch.setitem(verbs_module.VERB_FUNCTIONS, name, patched)


def check_fails_and_recovers(llm, expected, error, words, monkeypatch) -> None:
    """Check that the error comes, that all is freed although the error is kept, and that the next call works."""
    held, buffers = Held(), []
    patch_verb(monkeypatch, "embed", lambda ex, task: buffers.append(weakref.ref(ex.buffers)))
    with pytest.raises(error, match=words) as caught:
        llm.generate(PROMPTS, PARAMS)
    held.check(llm.paced.disk.directory)
    assert buffers and all(reference() is None for reference in buffers)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert tokens(llm) == expected
    llm.close()
    held.check(llm.paced.disk.directory)


def test_an_error_inside_of_transformers_layer_gives_all_back(tmp_path, monkeypatch, no_collector):
    """Layers run interrupted on their own stacks; the error passes through all of them."""
    pytest.importorskip("greenlet")
    save_tiny(tmp_path, "granite")
    expected = tokens(LLM(tmp_path, "kv_only", device="cpu", dtype="float32"))
    llm = LLM(tmp_path, EVERYWHERE, device="cpu", dtype="float32", disk_dir=tmp_path / "scratch")
    silu, calls = torch.nn.functional.silu, []

    def fail(rows, *options, **others):
        calls.append(len(rows))
        return silu(rows, *options, **others) if len(calls) != 4 else torch.dot(torch.ones(2), torch.ones(3))

    monkeypatch.setattr(torch.nn.functional, "silu", fail)
    check_fails_and_recovers(llm, expected, RuntimeError, "inconsistent tensor size", monkeypatch)


LANES = {
    "compute": "attend_prefill", "h2d": "load_weights", "d2h": "store_kv", "host_compute": "scatter",
    "disk_read": "read_weights", "disk_write": "write_act",
}  # fmt: skip


@pytest.mark.parametrize("lane", LANES)
def test_an_exception_in_any_lane_ends_a_slow_write_and_reaches_the_caller(
    llm, expected, lane, monkeypatch, no_collector
):
    def slow_down(ex, task):
        ex.buffers.disk._pacers["write"][0].bytes_per_s = 10

    def fail(ex, task):
        assert task.resource == lane
        if task.layer == 0 and lane != "disk_write":
            return
        while lane != "disk_write" and not ex.buffers.disk._callers:
            time.sleep(0.001)
        raise RuntimeError(f"the {lane} lane broke")

    patch_verb(monkeypatch, "embed", slow_down)
    patch_verb(monkeypatch, LANES[lane], fail)
    check_fails_and_recovers(llm, expected, RuntimeError, f"the {lane} lane broke", monkeypatch)


def test_an_engine_whose_run_failed_says_so(llm, monkeypatch):
    tokens(llm)
    engine = llm.loaded.engine

    def fail(ex, task):
        raise RuntimeError("broke")

    patch_verb(monkeypatch, "head", fail)
    with pytest.raises(RuntimeError, match="broke"):
        llm.generate(PROMPTS, PARAMS)
    with pytest.raises(ValueError, match="this engine is closed, or a run of it failed"):
        engine.run(None)


def test_a_failing_lane_ends_a_slow_copy_over_the_link(checkpoint, expected, monkeypatch):
    """At the first decode step the link becomes so slow that a copy would take hours."""
    policy = Policy(weights=Placement(device=0.2, host=0.8))
    llm = LLM(checkpoint, policy, device="cpu", dtype="float32", link_gb_per_s=1.0)

    def slow_down(ex, task):
        ex.copies.h2d.bytes_per_s = 10

    def fail(ex, task):
        if task.iteration == 1:
            while ex.copies.h2d._deadline < time.perf_counter() + 60:
                time.sleep(0.001)
            raise RuntimeError("broke")

    patch_verb(monkeypatch, "attend", slow_down)
    patch_verb(monkeypatch, "store_kv", fail)
    held = Held()
    with pytest.raises(RuntimeError, match="broke"):
        llm.generate(PROMPTS, PARAMS)
    assert set(threading.enumerate()) <= held.threads
    monkeypatch.undo()
    assert tokens(llm) == expected


@pytest.mark.parametrize("of, words", [("weights", "short read .* shortened"), ("buffers", "shortened")])
def test_a_file_shortened_under_way(llm, expected, monkeypatch, no_collector, of, words):
    """A read of weights finds it. For a cache a write finds it too, which would otherwise extend the file again."""

    def shorten(ex, task):
        if task.iteration == 2:
            os.ftruncate(getattr(ex, of).disk._file.fd, 100)

    patch_verb(monkeypatch, "project", shorten)
    check_fails_and_recovers(llm, expected, DiskError, words, monkeypatch)


@pytest.mark.parametrize("code, words", [(errno.ENOSPC, "No space left.*free some space"), (errno.EIO, "Input/output")])
def test_a_disk_that_refuses_a_write_under_way(llm, expected, monkeypatch, no_collector, code, words):
    real, full = os.pwritev, []

    def write(fd, buffers, offset):
        if full:
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset)

    patch_verb(monkeypatch, "attend", lambda ex, task: full.append(task))
    monkeypatch.setattr(os, "pwritev", write)
    check_fails_and_recovers(llm, expected, DiskError, words, monkeypatch)


@pytest.mark.parametrize("which", [1, 2], ids=["for the weights", "for the cache"])
def test_no_room_on_the_disk(llm, expected, monkeypatch, which):
    real, calls = os.posix_fallocate, []

    def allocate(fd, offset, length):
        calls.append(length)
        if len(calls) == which:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, offset, length)

    held = Held()
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(InputError, match="no room for .* bytes of scratch space in .*scratch.*put less on the disk"):
        llm.generate(PROMPTS, PARAMS)
    held.check(llm.paced.disk.directory)
    monkeypatch.undo()
    assert tokens(llm) == expected


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(tmp_path, value, temperature):
    model = save_opt(tmp_path / "broken", layers=1)
    with torch.no_grad():
        model.model.decoder.layers[0].fc1.weight[0, 0] = value
    model.save_pretrained(tmp_path / "broken")
    broken = LLM(tmp_path / "broken", "kv_only", device="cpu", dtype="float32")
    with pytest.raises(InputError, match="not finite numbers in float32"):
        broken.generate(PROMPTS, SamplingParams(max_tokens=4, temperature=temperature))


def test_an_error_of_the_caller_s_own_function(llm, expected, monkeypatch):
    def on_tokens(count):
        raise RuntimeError("the progress bar broke")

    held = Held()
    with pytest.raises(RuntimeError, match="the progress bar broke"):
        llm.generate(PROMPTS, PARAMS, on_tokens=on_tokens)
    held.check(llm.paced.disk.directory)
    assert tokens(llm) == expected


@pytest.mark.parametrize("how", ["close", "with"])
def test_all_is_given_back_at_the_end(llm, expected, monkeypatch, no_collector, how):
    held, buffers, weights = Held(), [], []

    def watch(ex, task):
        buffers.append(weakref.ref(ex.buffers))
        weights.append(weakref.ref(ex.weights))

    patch_verb(monkeypatch, "embed", watch)
    directory = llm.paced.disk.directory
    if how == "with":
        with llm:
            assert tokens(llm) == expected
    else:
        assert tokens(llm) == expected
        assert Held.open_files() != held.files  # kept for the next call
    if how == "close":
        llm.release()
        assert tokens(llm) == expected  # anew
        llm.close()
        llm.close()
        with pytest.raises(InputError, match="this LLM is closed"):
            tokens(llm)
    assert all(reference() is None for reference in buffers + weights)
    held.check(directory)


def test_a_forgotten_llm_gives_all_back(checkpoint, expected, tmp_path, no_collector):
    held = Held()
    llm = LLM(checkpoint, EVERYWHERE, device="cpu", dtype="float32", disk_dir=tmp_path / "scratch")
    assert tokens(llm) == expected
    gone = [weakref.ref(of) for of in (llm.loaded.engine.buffers, llm.loaded.weights, llm.loaded.engine)]
    workers = set(threading.enumerate()) - held.threads
    del llm
    for worker in workers:  # told to end, not waited for
        worker.join(60)
    assert [reference() for reference in gone] == [None] * 3
    held.check(tmp_path / "scratch")


# ---- signals: a process of its own -----------------------------------------------------------------------------------

#: An LLM whose disk is so slow from the first decode step on that only a signal can end it.
SLOW = """
    import os, signal, sys, threading, time
    from flexhybrid import LLM, Policy, SamplingParams, cli
    from flexhybrid.runtime import verbs
    real, slow = verbs.VERB_FUNCTIONS["attend"], [True]
    def attend(ex, task):
        if slow and not ex.weights.disk._pacers["read"][0].bytes_per_s:
            ex.weights.disk._pacers["read"][0].bytes_per_s = 10
            threading.Thread(target=signal_when_reading, args=(ex.weights.disk,)).start()
        real(ex, task)
    verbs.VERB_FUNCTIONS["attend"] = attend
    def signal_when_reading(disk):
        while not disk._callers:
            time.sleep(0.001)
        reached()
    PROMPTS = {prompts}
    PARAMS = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    POLICY = Policy.from_json(open({policy!r}).read())
    def make():
        return LLM({checkpoint!r}, POLICY, device="cpu", dtype="float32", disk_dir={scratch!r})
    def tokens(llm):
        return [answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, PARAMS)]
"""


def start(checkpoint, tmp_path: Path, program: str) -> subprocess.Popen:
    policy = tmp_path / "policy.json"
    policy.write_text(EVERYWHERE.to_json())
    names = dict(prompts=PROMPTS, policy=str(policy), checkpoint=str(checkpoint), scratch=str(tmp_path / "scratch"))
    source = textwrap.dedent(SLOW).format(**names) + textwrap.dedent(program)
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    environment = {**os.environ, "FLEXHYBRID_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    return warm_python.Popen([sys.executable, "-c", source], cwd=ROOT, env=environment, text=True, **pipes)


def test_ctrl_c_under_way_gives_all_back_and_the_next_call_works(checkpoint, expected, tmp_path):
    program = """
        def reached():
            os.kill(os.getpid(), signal.SIGINT)
        llm = make()
        try:
            llm.generate(PROMPTS, PARAMS)
        except KeyboardInterrupt:
            left = [one.name for one in threading.enumerate() if one.name.startswith("flexhybrid")]
            print(left, os.listdir(llm.paced.disk.directory), llm.loaded.engine, llm.loaded.weights)
        slow.clear()
        print(tokens(llm))
    """
    with start(checkpoint, tmp_path, program) as process:
        out, errors = process.communicate(timeout=240)
    assert (out.splitlines(), errors) == (["[] [] None None", str(expected)], "")
    assert list((tmp_path / "scratch").iterdir()) == []  # the second call's, at the process's end


@pytest.mark.parametrize(
    "interrupt",
    [
        "os.kill(os.getpid(), signal.SIGINT)",
        "signal.pthread_kill(threading.get_ident(), signal.SIGINT)",  # the system may hand a signal to any thread
        "signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)",  # which meets a finalizer
    ],
)
def test_ctrl_c_of_a_command_is_one_line_and_status_130(checkpoint, tmp_path, interrupt):
    program = f"""
        class Dying:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0)
        signal.signal(signal.SIGUSR1, lambda *_: Dying() and None)
        def reached():
            {interrupt}
        cli._compare = lambda args: make().generate(PROMPTS, PARAMS)
        sys.exit(cli.main(["compare"]))
    """
    with start(checkpoint, tmp_path, program) as process:
        out, errors = process.communicate(timeout=240)
    assert (process.returncode, out, errors) == (130, "", "flexhybrid: stopped\n")
    assert list((tmp_path / "scratch").iterdir()) == []
