"""``make gpu``: measurements on a GPU, in steps of at most eight minutes, each of which writes its results row by row.

Runs with the machine's own python3: torch, numpy, scipy, pandas, matplotlib, safetensors, transformers, tqdm, pytest.
The steps: the tests marked cuda; the GPU bench (experiments.gpu.bench); the comparison on OPT-6.7B and OPT-13B shapes
with random weights, the device budget enforced by the allocator so that offloading is real; and the peers installed for
this python3 (experiments.peers.gpu_peers). Results go to experiments/results/<GPU>/.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from flexhybrid.core.units import parse_bytes

ROOT = Path(__file__).resolve().parents[2]
STEP_SECONDS = 480
END_SECONDS = 15  #: that a step has to end in once it is told to
COMPARISONS = {
    # name: batch, context, tokens, requests a mini-batch, host budget
    "opt-6.7b": (64, 512, 6, 16, "64GiB"),
    "opt-13b": (48, 512, 6, 12, "96GiB"),
}
STEPS = ("tests", "bench", "opt-6.7b", "peers", "opt-13b")  #: most important first: a machine may be lent
DEVICE_MEMORY = "12GiB"


def results_folder() -> Path:
    """Return experiments/results/<GPU's name>, created where it is missing."""
    import torch

    name = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name()).strip("-").lower()
    folder = ROOT / "experiments" / "results" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_tests() -> int:
    import pytest

    return int(pytest.main(["-m", "cuda", "-q", "-p", "no:cacheprovider", *map(str, cuda_test_files())]))


def cuda_test_files() -> list[Path]:
    """Return the files that have tests marked cuda: all others stay unread, and may import what this python3 lacks."""
    files = sorted((ROOT / "tests").glob("**/test_*.py"))
    return [
        file for file in files if re.search(r"^(@|pytestmark = .*)pytest\.mark\.cuda\b", file.read_text("utf-8"), re.M)
    ]


def run_bench() -> int:
    """Write the rows of the GPU bench. Rows that miss their bar are kept, and are no failure."""
    import torch

    from experiments.bench.harness import Table
    from experiments.gpu.bench import bench_gpu

    table = Table(torch.cuda.get_device_name(), path=results_folder() / "bench.json")
    table.renew("gpu")
    bench_gpu(table)
    return 0


def run_comparison(name: str) -> int:
    import torch

    from flexhybrid.core.files import write_by_rename
    from flexhybrid.core.memory import CONTEXT_BYTES
    from flexhybrid.core.model.shape import shape_by_name
    from flexhybrid.jobs.compare.job import compare
    from flexhybrid.jobs.compare.setting import CompareOptions

    budget = parse_bytes(DEVICE_MEMORY) or 0
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (budget - CONTEXT_BYTES) / total))
    batch, context, tokens, mini_batch, host_memory = COMPARISONS[name]
    out = results_folder() / name
    result = compare(
        CompareOptions(
            device="cuda",
            shape=shape_by_name(name),
            batch=batch,
            prompt_len=context,
            gen_len=tokens,
            mini_batch=mini_batch,
            budgets={"device": DEVICE_MEMORY, "host": host_memory},
            out=out,
        )
    )
    result |= {
        "device_peak_bytes": torch.cuda.max_memory_allocated(),
        "device_reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_budget_bytes": budget,
    }
    write_by_rename(out / "compare.json", json.dumps(result, indent=1, default=float))
    inexact = any(not row["exact"] for row in result["exactness"])
    over = result["device_reserved_bytes"] + CONTEXT_BYTES > budget
    return 1 if result["trace_violations"] or inexact or over else 0


def run_peers() -> int:
    from experiments.peers import gpu_peers

    out = results_folder() / "peers" / "compare.json"
    return gpu_peers.main(["--seconds", str(STEP_SECONDS - 20), "--out", str(out)])  # less than the step's own limit


def run_limited(command: list[str], log: Path, seconds: float) -> int:
    """Run a command in a process group of its own, with its output in ``log``; return its exit status. After so many
    seconds it is told to end, and 124 is returned: it has END_SECONDS for that before all its processes are killed."""
    with open(log, "w", encoding="utf-8") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=END_SECONDS)
            return 124
        finally:  # no process of its own, a peer's for one, goes on after it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def end_when_told() -> None:
    """Let SIGTERM end this process by way of every "finally"."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))


def run_step(step: str) -> int:
    """Run a step in its own process group, and write its outcome whatever happens."""
    log = results_folder() / f"{step}.log"
    began = time.perf_counter()
    code = run_limited([sys.executable, "-m", "experiments.gpu", "--inside", step], log, STEP_SECONDS)
    print(log.read_text(encoding="utf-8", errors="replace")[-6000:])
    outcome = {"step": step, "exit_code": code, "timed_out": code == 124, "seconds": time.perf_counter() - began}
    (results_folder() / f"{step}.json").write_text(json.dumps(outcome), encoding="utf-8")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", choices=STEPS, nargs="+", default=STEPS, help="these steps alone (default: all)")
    parser.add_argument("--inside", choices=STEPS, help=argparse.SUPPRESS)  # the process of one step
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        import torch
    except ImportError:
        print("experiments.gpu.steps needs torch in this python3", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("experiments.gpu.steps: torch finds no CUDA device here", file=sys.stderr)
        return 2
    if args.inside:
        end_when_told()
        runs = {"tests": run_tests, "bench": run_bench, "peers": run_peers}
        return runs[args.inside]() if args.inside in runs else run_comparison(args.inside)
    worst = 0
    for step in args.step:
        print(f"== {step}", flush=True)
        worst = max(worst, run_step(step))
    return worst


if __name__ == "__main__":
    sys.exit(main())
