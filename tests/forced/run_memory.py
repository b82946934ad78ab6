"""The memory peak of a ``flexhybrid run`` job, less the memory that it held after its imports.

The job runs in a process of its own, whose anonymous and shared resident memory is read from /proc/PID/status (Linux
only); page cache and mapped files do not count.
"""

import itertools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

SAMPLE_S = 0.002

#: Imports all modules that a run may load, and what numba has compiled; prints "ready", and waits for a line. "fake"
#: answers in the model's place.
CHILD = """
import sys
import flexhybrid.jobs.run.job, flexhybrid.jobs.run.cli, policy_search.search, policy_search.systems, sim.array_clock
from transformers import AutoTokenizer
from tests.forced.run_memory import answer_at_once
from flexhybrid import cli
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.profiling.attention_paths import can_attend_in_place

if can_attend_in_place("float32"):
    import torch
    from flexhybrid.runtime.kernels.in_place import compile_for
    compile_for(torch.float32)
if sys.argv[1] == "fake":
    Engine.run = answer_at_once
print("ready", flush=True)
sys.stdin.readline()
sys.exit(cli.main(sys.argv[2:]))
"""


def answer_at_once(_engine, executor, control, _tasks=None):
    """Stand in for ``Engine.run``: each request stops at its first token; plan, queue and files are real."""
    from flexhybrid.core.schedule.scheduler import Scheduler
    from flexhybrid.runtime.clock import Clock
    from flexhybrid.runtime.engine import WaveResult, _Collector

    collector, batch, stopped = _Collector(executor, Clock([]), control), Scheduler(executor.wave), set()
    for iteration in itertools.count():
        before, stopped = stopped, set()
        for *_, places in batch.steps(iteration, before):
            for request in set(executor.wave.request[places].tolist()) - before - stopped:
                collector.tokens[request].append(5)
                control.on_finish(request, collector.tokens.pop(request), 5)
                stopped.add(request)
        if not stopped:
            return WaveResult([], [], [])
        control.on_tokens(len(stopped))


def held_bytes(pid: int) -> int:
    """Return the anonymous and shared resident memory of a process in bytes; 0 after its end."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields.get(name, "0").split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def peak_bytes(arguments: list[str], fake: bool = False) -> int:
    """Return the memory peak of ``flexhybrid run`` with these arguments, less its memory after the imports, in bytes.

    ``fake``: the answers come at once and take no memory. Raise ValueError when the run fails.
    """
    command = [sys.executable, "-c", CHILD, "fake" if fake else "real", "run", *arguments, "--quiet"]
    environment, pipe = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}, subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as child:
        if child.stdin is None or child.stdout is None or child.stderr is None:
            raise ValueError("the run has no pipes")
        child.stdout.readline()
        before = peak = held_bytes(child.pid)
        child.stdin.write("go\n")
        child.stdin.flush()
        while child.poll() is None:
            peak = max(peak, held_bytes(child.pid))
            time.sleep(SAMPLE_S)
        if child.returncode:
            raise ValueError(f"the run ended with status {child.returncode}: {child.stderr.read()}")
    return peak - before


def write_requests(path: Path, count: int, longest: int, max_tokens: int, vocab: int) -> None:
    """Write ``count`` requests of 1 to ``longest`` token ids, with 1 to ``max_tokens`` tokens to generate."""
    generator = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for index in range(count):
            prompt = [generator.randrange(3, vocab) for _ in range(generator.randint(1, longest))]
            body = {"prompt": prompt, "max_tokens": generator.randint(1, max_tokens), "temperature": 0}
            line = {"custom_id": f"r{index}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
