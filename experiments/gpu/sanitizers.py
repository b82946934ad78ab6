"""One small case under torch's CUDA sanitizer and under NVIDIA's compute-sanitizer, where that is installed.

torch's follows which stream reads and writes which tensor, per thread: its dispatch mode is pushed in each lane's. It
sees device tensors by their first address alone, and no host memory; the fake device's check (tests/fake_cuda) sees
both. compute-sanitizer finds accesses out of bounds in kernels, Triton's among them.
"""

import os
import shutil
import subprocess
import sys
import threading

from experiments.bench.harness import Table
from experiments.peers.children import ROOT

TEST = "tests/runtime/test_cuda.py"
CASE = "float32_tokens_equal and policy2"
TOOL = "compute-sanitizer"
ARGUMENTS = ["-q", "-p", "no:cacheprovider", "-m", "cuda", TEST, "-k", CASE]


def run_sanitizers(table: Table) -> None:
    """Run the case under each; add the worst exit status (pytest's 5, no test of that name, is a failure, too)."""
    own = [sys.executable, "-m", __name__]
    codes = [subprocess.run([*own, "torch"], cwd=ROOT).returncode]
    if shutil.which(TOOL):
        # Its threads report by exit status; caching hides accesses out of a tensor but within the allocator's segment.
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        command = [TOOL, "--tool", "memcheck", "--error-exitcode", "9", *own, TOOL]
        codes.append(subprocess.run(command, cwd=ROOT, env=environment).returncode)
    else:
        print(f"{TOOL} is not installed: not run")
    table.at_most("sanitizers: worst exit status", max(map(abs, codes)), 0, "")


def under_torchs() -> int:
    """Run the case in this process with the sanitizer's mode in every thread that issues to a stream."""
    import pytest
    import torch.cuda._sanitizer as sanitizer

    from flexhybrid.runtime.cuda import CudaStream

    enter, here = CudaStream.enter, threading.local()

    def watched(self: CudaStream) -> None:
        enter(self)
        if not hasattr(here, "is_watched"):
            here.is_watched = True
            sanitizer.cuda_sanitizer.dispatch.__enter__()  # modes are a thread's own

    CudaStream.enter = watched
    sanitizer.enable_cuda_sanitizer()
    return int(pytest.main(ARGUMENTS))


def without_graphs() -> int:
    """Run the case in this process kernel by kernel: a capture needs memory that is cached."""
    import pytest

    from flexhybrid.runtime import engine

    engine.attach = lambda state: None
    return int(pytest.main(ARGUMENTS))


if __name__ == "__main__":
    sys.exit(without_graphs() if TOOL in sys.argv else under_torchs())
