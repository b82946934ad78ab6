"""Test the memory of a job: it stays within its budgets, and a longer file needs no more."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python

from experiments.peers.random_opt import make_checkpoint
from flexhybrid.core.model.shape import ModelShape
from tests.forced.run_memory import held_bytes, peak_bytes, write_requests

ROOT = Path(__file__).parents[2]
MIB = 2**20
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the kernel tells nothing here")


def command(folder: Path, model: Path, policy: str) -> list[str]:
    names = {"-i": folder / "in.jsonl", "-o": folder / "out.jsonl", "--model": model, "--policy": policy}
    return [*(str(part) for pair in names.items() for part in pair), "--device", "cpu", "--dtype", "float32"]


#: Frees 16 MiB, whereupon glibc keeps blocks of that size; then keeps something small above 12 MiB that it frees.
FREED = """
import os, sys
from tests.forced.run_memory import held_bytes
from flexhybrid.jobs.machine import return_freed_memory
if sys.argv[1] == "returned":
    return_freed_memory()
before = held_bytes(os.getpid())
bytearray(b"x" * (16 << 20))
freed = [bytearray(b"x" * (12 << 20)), bytearray(b"x" * 5000)]
del freed[0]
print(held_bytes(os.getpid()) - before)
"""


def test_freed_memory_returns_to_the_system():
    held = {}
    for how in ("kept", "returned"):
        done = subprocess.run([sys.executable, "-c", FREED, how], cwd=ROOT, capture_output=True, text=True, check=True)
        held[how] = int(done.stdout)
    assert held["returned"] < 2 * MIB
    if platform.libc_ver()[0] == "glibc":
        assert held["kept"] > 8 * MIB


def test_a_model_beyond_the_budget_is_run_within_it(tmp_path, monkeypatch, warm_processes):
    """Weights are on the disk, and the requests run in two waves."""
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    shape = ModelShape("large", "opt", 8, 512, 8, 8, 64, 2048, 2000, 128)
    model = make_checkpoint(tmp_path / "large", shape, "float32")
    policy = {"name": "disk", "weights": {"host": 0.2, "disk": 0.8}, "cache": {"kv@host": 1.0}, "max_batch": 3}
    (tmp_path / "policy.json").write_text(json.dumps(policy))
    write_requests(tmp_path / "in.jsonl", 6, 30, 2, shape.vocab)
    budgets = {"--device-memory": 40 * MIB, "--host-memory": 50 * MIB}
    more = ["--disk-dir", str(tmp_path / "scratch"), *(str(part) for pair in budgets.items() for part in pair)]
    assert (model / "model.safetensors").stat().st_size > sum(budgets.values())
    peak = peak_bytes([*command(tmp_path, model, str(tmp_path / "policy.json")), *more])
    assert 20 * MIB < peak <= 1.05 * sum(budgets.values())


def test_a_longer_file_takes_no_more_than_its_request_index(tmp_path, monkeypatch, warm_processes):
    """Answers come at once, without the model."""
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    model = make_checkpoint(tmp_path / "tiny", ModelShape("tiny", "opt", 1, 64, 1, 1, 64, 64, 100, 64), "float32")
    peaks = []
    for count in (5000, 10000):  # both hold what a batch has open: a window of lines, and those that have just ended
        write_requests(tmp_path / "in.jsonl", count, 8, 4, 100)
        peaks.append(peak_bytes([*command(tmp_path, model, "kv_only"), "--overwrite"], fake=True))
        assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == count
    assert peaks[1] - peaks[0] < 5000 * 64 + 2 * MIB


#: Prints, after so many answers: bytes held, live tensors but for views, and the threads that have run a task so far.
ANSWERS = """
import gc, json, os, sys, threading
import numpy as np, torch
from tests.forced.run_memory import held_bytes
from flexhybrid import LLM, SamplingParams
from flexhybrid.runtime.executor import Executor
torch.set_num_threads(1)
threads, perform, generator = set(), Executor.perform, np.random.default_rng(0)
def noted(executor, task):
    threads.add(threading.get_native_id())
    perform(executor, task)
Executor.perform = noted
with LLM(sys.argv[1], policy=sys.argv[2], device="cpu", dtype="float32", disk_dir=sys.argv[3]) as llm:
    for answers in range(2, 122, 2):
        prompts = [generator.integers(5, 99, length).tolist() for length in generator.integers(30, 900, 2)]
        llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
        if answers in (20, 60, 90, 120):
            gc.collect()
            kept = (each for each in gc.get_objects() if type(each) is torch.Tensor)
            memories = {each.untyped_storage().data_ptr() for each in kept}
            print(json.dumps([held_bytes(os.getpid()), len(memories), len(threads)]))
"""


def test_a_hundred_and_twenty_answers_take_no_more_than_twenty(tmp_path):
    """Feed-forward rows take up to 15 MB. The same few threads run all tasks: each thread may keep twice as much."""
    shape = ModelShape("wide", "opt", 1, 64, 1, 1, 64, 2048, 100, 1024)
    model = make_checkpoint(tmp_path / "wide", shape, "float32")
    (tmp_path / "policy.json").write_text(json.dumps({"weights": {"disk": 1.0}, "cache": {"kv@disk": 1.0}}))
    arguments = [str(model), str(tmp_path / "policy.json"), str(tmp_path / "scratch")]
    done = warm_python.run([sys.executable, "-c", ANSWERS, *arguments], cwd=ROOT, check=True)
    held, tensors, threads = zip(*map(json.loads, done.stdout.splitlines()))
    assert len(held) == 4 and len(set(tensors[1:])) == 1
    assert threads[0] == threads[-1] <= 6
    assert held[-1] - held[0] < 80 * MIB


def test_the_memory_of_a_process_is_read_from_the_kernel():
    before = held_bytes(os.getpid())
    block = bytearray(os.urandom(64 * MIB))
    assert 60 * MIB < held_bytes(os.getpid()) - before < 160 * MIB and len(block) == 64 * MIB
    assert held_bytes(2**30) == 0
