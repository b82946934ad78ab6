"""Runs parts of the GPU's measurements in order, each in a process of its own, within a time limit.

    python -m experiments.gpu [--time-limit SECONDS] [PART …]

A part is a name, or a name with options that are parts of their own: "mix:long,streamed" is mix:long, then
mix:streamed. With a time limit, a part whose estimate is longer than the time left is skipped and named, one that takes
more than twice its estimate is ended, and the program ends MARGIN_S before the limit, whatever a part does.

Results go to the folder that the environment variable OUT names, else to experiments/results/<GPU>/: <part>.json with a
part's rows, each written as soon as it is measured; log.txt with what the parts print; run.json with what became of
each part.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.bench.harness import Table
from experiments.gpu.watch import Watcher, nvml_reader
from flexhybrid.core.errors import InputError, unknown
from flexhybrid.core.files import write_by_rename

ROOT = Path(__file__).resolve().parents[2]
MARGIN_S = 15.0  #: by which the program ends before its limit
END_S = 5.0  #: that a part has to end in once it is told to; then all its processes are killed
PATIENCE = 2.0  #: times its estimate that a part may take with a time limit; without one, times more
UNLIMITED_PATIENCE = 10.0
SHOWN = 6000  #: characters of what a part has printed that are printed again
TIMED_OUT = 124  #: exit status
WITHOUT_GRAPHS = "FLEXHYBRID_WITHOUT_GRAPHS"  #: environment variable; where it is set, runs have no CUDA graphs


class Part(NamedTuple):
    """A measurement: a function that adds rows to a table, named with its module, which is loaded when the part runs.
    With options it takes the option and the seconds left besides. What fails raises, or is a row."""

    function: str
    estimates: Mapping[str, float]  #: option -> seconds with the start of the process, in order; "" without options


class Chosen(NamedTuple):
    """A part with one option."""

    name: str
    option: str
    estimate_s: float

    @property
    def full_name(self) -> str:
        return f"{self.name}:{self.option}" if self.option else self.name


def choose(texts: Sequence[str], parts: Mapping[str, Part]) -> list[Chosen]:
    """Return the parts that these texts name, in their order; all parts without a text. Raise InputError for an unknown
    name or option."""
    chosen = []
    for text in texts or parts:
        name, colon, options = text.partition(":")
        if name not in parts:
            raise unknown("part", name, parts)
        estimates = parts[name].estimates
        for option in options.split(",") if colon else estimates:
            if option not in estimates:
                raise unknown(f"option of {name}", option, estimates)
            chosen.append(Chosen(name, option, estimates[option]))
    return chosen


def results_folder(gpu: str) -> Path:
    """Return experiments/results/<GPU's name>."""
    return ROOT / "experiments" / "results" / re.sub(r"[^A-Za-z0-9]+", "-", gpu).strip("-").lower()


def gpu_name() -> str | None:
    """Return the first GPU's name, None where there is none."""
    with contextlib.suppress(Exception):
        return nvml_reader()[0]
    with contextlib.suppress(ImportError):
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return None


def run_parts(chosen: Sequence[Chosen], folder: Path, command: Sequence[str], limit_s: float | None) -> int:
    """Run parts one after the other by ``command`` --inside PART; return the worst exit status of those that ran."""
    end_s = None if limit_s is None else time.monotonic() + limit_s - MARGIN_S
    outcomes: list[dict] = []
    for part in chosen:
        began = time.monotonic()
        left = float("inf") if end_s is None else end_s - began
        outcome: dict = {"part": part.full_name, "estimate_s": part.estimate_s}
        if part.estimate_s > left:
            outcome["skipped"] = f"takes about {part.estimate_s:.0f} s, of which {max(0.0, left):.0f} s are left"
            print(f"== {part.full_name}: skipped, {outcome['skipped']}", flush=True)
        else:
            print(f"== {part.full_name}, about {part.estimate_s:.0f} s", flush=True)
            patience = UNLIMITED_PATIENCE if end_s is None else PATIENCE
            seconds = max(0.0, min(left - END_S, patience * part.estimate_s))
            inside = [*command, "--inside", part.full_name, "--seconds", f"{seconds:.1f}"]
            code = run_limited(inside, folder / "log.txt", seconds)
            if code and part.name == "smoke":  # without graphs a mix may still be measured
                os.environ[WITHOUT_GRAPHS] = "1"
            outcome |= {"exit_code": code, "timed_out": code == TIMED_OUT, "seconds": time.monotonic() - began}
        outcomes.append(outcome)
        write_by_rename(folder / "run.json", json.dumps(outcomes, indent=1))
    return max((outcome.get("exit_code", 0) for outcome in outcomes), default=0)


def run_limited(command: Sequence[str], log: Path, seconds: float) -> int:
    """Run a command in a process group of its own, with its output added to ``log``; print the end of that, and return
    its exit status. After so many seconds it is told to end, and TIMED_OUT is returned: it has END_S for that before
    all its processes are killed."""
    start = log.stat().st_size if log.exists() else 0
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # what a process that is killed has printed is in the log
    with open(log, "ab") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        code = abs(process.wait(timeout=seconds))
    except subprocess.TimeoutExpired:
        code = TIMED_OUT
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=END_S)
    finally:  # no process of its own, a peer's for one, goes on after it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver outlives its killing
        process.wait(timeout=END_S / 5)
    print(log.read_bytes()[start:].decode("utf-8", "replace")[-SHOWN:], flush=True)
    return code


def run_inside(part: Chosen, parts: Mapping[str, Part], folder: Path, seconds: float) -> int:
    """Run a part in this process; return 1 if it raises, with the error as a row."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TIMED_OUT))  # by way of every "finally"
    path = folder / f"{part.full_name.replace(':', '-')}.json"
    table = Table(gpu_name() or "no GPU", path, Watcher().since_last)
    table.renew(part.full_name)
    table.save(path)  # without the rows of an earlier run
    module, _, name = parts[part.name].function.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
        function(table, part.option, seconds) if part.option else function(table)
    except InputError as error:
        table.failed(part.full_name, str(error))
        return 1
    except Exception as error:
        table.failed(part.full_name, f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    return 0


def main(arguments: Sequence[str], parts: Mapping[str, Part], command: Sequence[str]) -> int:
    """Run the command line; ``command`` starts this program again. Return 2 for invalid input."""
    estimates = {name: sum(part.estimates.values()) for name, part in parts.items()}
    told = "  ".join(f"{name}{_options(parts[name])} ({seconds:.0f} s)" for name, seconds in estimates.items())
    text = f"{__doc__}\nParts, the most valuable first: {told}"
    parser = argparse.ArgumentParser("experiments.gpu", description=text, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="in this order (default: all)")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="of all parts together (default: none)")
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # the process of one part
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)  # that are left for it
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        chosen = choose([options.inside] if options.inside else options.parts, parts)
        if options.time_limit is not None and options.time_limit <= MARGIN_S:
            raise InputError(f"--time-limit is {options.time_limit:g}; the program ends {MARGIN_S:g} s before it")
        if (gpu := gpu_name()) is None:
            raise InputError("experiments.gpu finds no CUDA device here")
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    folder = Path(os.environ.get("OUT") or results_folder(gpu))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("FLEXHYBRID_CACHE", str(results_folder(gpu) / "profiles"))
    if options.inside:
        return run_inside(chosen[0], parts, folder, options.seconds)
    return run_parts(chosen, folder, command, options.time_limit)


def _options(part: Part) -> str:
    return f":{','.join(part.estimates)}" if list(part.estimates) != [""] else ""
