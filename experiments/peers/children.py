"""The parent's half of a peer's run, in a process of its own; and the command line that all comparisons share."""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flexhybrid.core.errors import InputError
from flexhybrid.core.files import write_by_rename

ROOT = Path(__file__).parents[2]


class PeerUnavailable(InputError):
    """The files of a peer, or a library that it imports, are missing."""


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


def command_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every comparison; ``description`` is the module's docstring."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(description or "").split("\n")[0])
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.node()}"
    parser.add_argument("--machine", default=machine, help="named in the file")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    return parser


def run_command(
    parser: argparse.ArgumentParser, arguments: list[str] | None, work: Callable[[argparse.Namespace], dict]
) -> int:
    """Parse the arguments (None: the process's own), write the result of ``work`` to --out, return the exit status.

    0; 1 when a peer is unavailable; 2 for other input that is refused. A refusal is one line on standard error.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    try:
        result = work(options)
    except InputError as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, PeerUnavailable) else 2
    if options.out:
        header = {"command": f"{parser.prog} {shlex.join(arguments)}", "machine": options.machine}
        write_by_rename(options.out, json.dumps(header | result, indent=1) + "\n")
    return 0
