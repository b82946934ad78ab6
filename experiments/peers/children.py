"""A peer's run in a process of its own: a request goes in as JSON, an answer or what went wrong comes back."""

from __future__ import annotations

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
    """The child's answer to ``request``. ``folders`` come before all others when it imports; ``variables`` are set in
    its environment.

    What the child itself answers may be {"error": …} or {"missing": …} (an import that failed); a child that dies, is
    killed for memory, or does not end within ``limit_s`` gives {"error": …} too: for a batch that is too large this is
    an outcome like any other.
    """
    path = os.pathsep.join(filter(None, (*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment |= variables or {}
    try:
        done = subprocess.run(
            [sys.executable, str(child)], input=json.dumps(request), env=environment, capture_output=True, text=True,
            timeout=limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"did not end within {limit_s:.0f} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"ended with status {done.returncode}: {last}"}
    return json.loads(done.stdout)
