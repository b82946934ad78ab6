"""How much memory a job of ``flexhybrid run`` takes: its peak, less what it held once all was imported.

The job runs in a process of its own, whose anonymous and shared resident memory the kernel tells
(/proc/PID/status); its page cache and its mapped files are not counted. Linux only.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

SAMPLE_S = 0.002

#: Imports all that a run may load, says so, and waits for the word. "fake": answers at once, in the model's place.
CHILD = """
import sys
import flexhybrid.jobs.run.job, flexhybrid.jobs.run.cli, policy_search.search, policy_search.systems, sim.array_clock
from transformers import AutoTokenizer
from flexhybrid import cli, llm

def generate(self, prompts, params, on_tokens, on_answer, **options):
    for place, ids in enumerate(prompts):
        on_answer(place, llm.RequestOutput(None, ids, [llm.CompletionOutput(0, "", [5], "length")]))
        on_tokens(1)

if sys.argv[1] == "fake":
    llm.LLM.generate = generate
print("ready", flush=True)
sys.stdin.readline()
sys.exit(cli.main(sys.argv[2:]))
"""


def held_bytes(pid: int) -> int:
    """Anonymous and shared resident memory of a process; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields.get(name, "0").split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def peak_bytes(arguments: list[str], fake: bool = False) -> int:
    """Peak of ``flexhybrid run`` with these arguments, less what it held after its imports. ValueError where it fails.

    ``fake``: the model's answers come at once, and cost nothing.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, "fake" if fake else "real", "run", *arguments, "--quiet"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
    )  # fmt: skip
    with child:
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
    """Requests of token ids: up to ``longest`` of them, and as many to generate."""
    generator = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            body = {
                "prompt": [generator.randrange(3, vocab) for _ in range(generator.randint(1, longest))],
                "max_tokens": generator.randint(1, max_tokens), "temperature": 0,
            }  # fmt: skip
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
