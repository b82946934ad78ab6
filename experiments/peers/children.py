"""One way to run a side of a comparison in a process of its own: a JSON request on its standard input, a JSON answer on
its standard output.

``ask`` is the parent's half, ``serve`` the child's. Standard library only, so that a peer meets no library of this
project.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
Side = Callable[[dict], dict]  #: from a request to an answer


def ask(
    child: Path, request: dict, limit_s: float, folders: Sequence[Path] = (), variables: Mapping[str, str] | None = None
) -> dict:
    """Return the answer to ``request`` of a child, a Python file that calls ``serve``.

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


def serve(sides: Mapping[str, Side]) -> None:
    """Answer the request on standard input with the side that its field "side" names.

    The answer is {"missing": …} for an import that failed and {"error": …} for any other failure: a peer may fail in
    any way. What a side prints goes to standard error.
    """
    request = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer = sides[request["side"]](request)
        except ImportError as error:
            answer = {"missing": str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    json.dump(answer, sys.stdout, default=float)
