"""``make gpu``: measurements on a GPU, in steps of under eight minutes, each of which writes its results row by row.

Runs with the machine's own python3: torch, numpy, scipy, pandas, matplotlib, safetensors, transformers, tqdm, pytest.
The steps: the tests marked cuda; the smallest of them under torch's CUDA sanitizer, and under compute-sanitizer where
it is installed; overlap at balanced settings (experiments.gpu.overlap); the logits of recomputed caches
(experiments.gpu.logits); the profile that our side of the peers goes by; the peers, installed for this python3 or
carried along in PEER_FOLDER, in two cases (experiments.peers.gpu_peers); the bench of kernels and launches
(experiments.gpu.bench); and the comparison on OPT shapes with random weights, the device budget enforced by the
allocator so that offloading is real. Results go to experiments/results/<GPU>/, profiles too: with that folder carried
from call to call, each step may run on a bare machine.
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
from functools import partial
from pathlib import Path

from experiments.gpu.sanitizers import run_sanitizers
from flexhybrid.core.units import parse_bytes

ROOT = Path(__file__).resolve().parents[2]
STEP_SECONDS = 450
END_SECONDS = 15  #: that a step has to end in once it is told to
#: What `make gpu-peers` installs, for a machine without a network.
PEER_FOLDER = ROOT / "experiments" / "peers" / "installed"
COMPARISONS = {
    # name: batch, context, tokens, requests a mini-batch, host budget
    "opt-6.7b": (64, 512, 6, 16, "64GiB"),
    "opt-13b": (48, 512, 6, 12, "96GiB"),
    "opt-30b": (32, 512, 6, 8, "96GiB"),
}
PEERS = {"peers": "18GiB", "peers-both-offload": "12GiB"}  #: step -> case
#: Most important first: a machine may be lent.
STEPS = ("tests", "sanitizers", "overlap", "logits", "profile", *PEERS, "bench", *COMPARISONS)
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


def run_rows(part: str) -> int:
    """Write the rows of a part of the GPU bench. Rows that miss their bar are kept, and are no failure."""
    import torch

    from experiments.bench.harness import Table
    from experiments.gpu.bench import bench_gpu
    from experiments.gpu.logits import bench_logits
    from experiments.gpu.overlap import bench_overlap_cuda

    path, parts = results_folder() / "bench.json", {"bench": "gpu", "overlap": "gpu overlap", "logits": "gpu logits"}
    table = Table(torch.cuda.get_device_name(), path=path)
    table.read(path, set(parts.values()))
    table.renew(parts[part])
    {"bench": bench_gpu, "overlap": bench_overlap_cuda, "logits": bench_logits}[part](table)
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


def run_profile() -> int:
    """Measure the machine at the layer sizes of the peers' model: "auto" goes by the record."""
    import torch

    from flexhybrid.core.model.shape import shape_by_name
    from flexhybrid.jobs.profile.job import measure_hardware
    from flexhybrid.resolve import PacedDevice

    _, disagreements = measure_hardware(shape_by_name("opt-6.7b"), "float16", PacedDevice(torch.device("cuda")))
    print(*disagreements, sep="\n")
    return 0


def run_peers(step: str) -> int:
    """Run one case beside its peers; print the claims of the cases that have results."""
    from experiments.peers import gpu_peers

    folder = results_folder() / "peers"
    out, seconds = folder / f"{PEERS[step]}.json", str(STEP_SECONDS - 20)  # less than the step's own limit
    carried = ["--peers", str(PEER_FOLDER)] if PEER_FOLDER.is_dir() else []
    code = gpu_peers.main(["--case", PEERS[step], "--seconds", seconds, "--out", str(out), *carried])
    files = [file for case in PEERS.values() if (file := folder / f"{case}.json").is_file()]
    claims = gpu_peers.claims([json.loads(file.read_text(encoding="utf-8")) for file in files])
    for peer, ratio in claims.items():
        print(f"claim: {ratio:.2f} times {peer}, the smallest ratio of {len(files)} of {len(PEERS)} cases")
    return code


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


def run_inside(step: str) -> int:
    """Do a step's work in this process."""
    if step in PEERS:
        return run_peers(step)
    if step in COMPARISONS:
        return run_comparison(step)
    own = {"tests": run_tests, "sanitizers": run_sanitizers, "profile": run_profile}
    return own.get(step, partial(run_rows, step))()


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
    os.environ.setdefault("FLEXHYBRID_CACHE", str(results_folder() / "profiles"))
    if args.inside:
        end_when_told()
        return run_inside(args.inside)
    worst = 0
    for step in args.step:
        print(f"== {step}", flush=True)
        worst = max(worst, run_step(step))
    return worst


if __name__ == "__main__":
    sys.exit(main())
