"""The parts of ``make gpu``, the most valuable first. Estimates are those of an H200 with 16 cores, starts included.

Runs with the machine's own python3: torch, numpy, scipy, pandas, matplotlib, safetensors, transformers, tqdm, pytest,
and where they are there nvidia-ml-py (clocks) and cuda-bindings (the part partition).
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from experiments.bench.harness import Table, seconds_of
from experiments.gpu.runner import ROOT, Part

#: pytest -k: tests that tokens are equal under ten policies (one with joint graphs), and of Triton's kernels.
SMOKE = "float32_tokens_equal or gpu_runs_by_the_kernels or a_gpu_gives_what_plain_torch_does"
QUIET = ("-q", "-p", "no:cacheprovider")
SANITIZER = "compute-sanitizer"
WITHOUT_GRAPHS = """import sys, pytest
from flexhybrid.runtime import engine
engine.without_graphs = lambda *_: "a sanitizer follows each kernel"
sys.exit(pytest.main(sys.argv[1:]))"""


def cuda_test_files() -> list[Path]:
    """Return the files with tests marked cuda. The others are not imported: they may need what this python3 lacks."""
    files = sorted((ROOT / "tests").glob("**/test_*.py"))
    return [
        file for file in files if re.search(r"^(@|pytestmark = .*)pytest\.mark\.cuda\b", file.read_text("utf-8"), re.M)
    ]


def run_tests(table: Table, selected: str = "") -> int:
    """Run the tests marked cuda (``selected``: pytest's -k); add and return pytest's exit status."""
    import pytest

    began = time.perf_counter()
    chosen = ["-k", selected] if selected else []
    code = int(pytest.main(["-m", "cuda", *QUIET, *chosen, *map(str, cuda_test_files())]))
    table.at_most("tests: pytest's exit status", code, 0, "", wall_s=time.perf_counter() - began)
    return code


def run_smoke(table: Table) -> None:
    """Run the few tests that decide whether measuring is worth while; exit with their status."""
    sys.exit(run_tests(table, SMOKE))


def run_profile(table: Table) -> None:
    """Measure the machine at OPT-6.7B's layer sizes; save the record for the other parts, and with the results."""
    import torch

    from flexhybrid.core.files import profile_file
    from flexhybrid.core.model.shape import shape_by_name
    from flexhybrid.jobs.profile.job import measure_hardware
    from flexhybrid.resolve import PacedDevice

    paced, found = PacedDevice(torch.device("cuda")), []
    seconds = seconds_of(lambda: found.append(measure_hardware(shape_by_name("opt-6.7b"), "float16", paced)))
    table.at_most("profile: seconds", seconds, 60, "s", disagreements=found[0][1])
    if table.path:
        shutil.copy(profile_file("cuda"), table.path.with_name("hardware-cuda.json"))


def run_sanitizer(table: Table) -> None:
    """Add the exit status of a small case under compute-sanitizer, which finds accesses out of bounds in kernels."""
    if not shutil.which(SANITIZER):
        table.failed("sanitizer", f"{SANITIZER} is not installed")
        return
    # Caching hides accesses out of a tensor but within the allocator's segment, and graphs need memory that is cached.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    tests = [*QUIET, "-m", "cuda", "tests/runtime/test_cuda.py", "-k", "float32_tokens_equal and policy2"]
    command = [SANITIZER, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", WITHOUT_GRAPHS, *tests]
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    table.at_most("sanitizer: exit status", abs(code), 0, "")


PEERS = {"m3": 92.0, "m2": 43.0, "m1": 33.0, "18": 30.0}
PEERS |= {"m3-more": 325.0, "m2-more": 120.0, "m2-waves": 120.0, "18-more": 245.0}
PARTS = {
    "smoke": Part(f"{__name__}.run_smoke", {"": 45.0}),
    "attend": Part("experiments.gpu.attend.bench_attend_cuda", {"": 25.0}),
    "mix": Part("experiments.gpu.mix.run_mix", {"long": 85.0, "at-once": 55.0, "streamed": 85.0}),
    "peers": Part("experiments.peers.gpu_peers.run_peers", PEERS),
    "resident": Part("experiments.gpu.resident.run_resident", {"": 42.0}),
    "overlap": Part("experiments.gpu.overlap.run_overlap", {"48": 42.0}),
    "partition": Part("experiments.gpu.partition.run_partition", {"48": 92.0}),
    "profile": Part(f"{__name__}.run_profile", {"": 75.0}),
    "attend-sizes": Part("experiments.gpu.attend.bench_attend_sizes", {"": 45.0}),
    "tests": Part(f"{__name__}.run_tests", {"": 250.0}),
    "sanitizer": Part(f"{__name__}.run_sanitizer", {"": 90.0}),
}
