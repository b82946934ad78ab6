"""The parent's half of a peer's run, in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def ask(
    child: Path, request: dict, limit_s: float, folders: Sequence[Path] = (), variables: Mapping[str, str] | None = None
) -> dict:
    """Return the child's answer to ``request`` (``experiments.peers.child``).

    ``folders`` precede all others in the child's import path; ``variables`` are set in its environment. The answer is
    {"error": …} for a child that dies, is killed for memory, or runs longer than ``limit_s``: a batch that is too large
    is an outcome like any other.
    """
    path = os.pathsep.join(filter(None, (*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment.update(variables or {})
    command = [sys.executable, str(child)]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), env=environment, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return {"error": f"did not end within {limit_s:.0f} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"ended with status {done.returncode}: {last}"}
    return json.loads(done.stdout)
