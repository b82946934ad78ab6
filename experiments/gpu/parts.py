"""The parts of ``make gpu``, the most valuable first. Estimates are those of an H200 with 16 cores, starts included.

Runs with the machine's own python3: torch, numpy, scipy, pandas, matplotlib, safetensors, transformers, tqdm, pytest,
and where they are there nvidia-ml-py (clocks) and cuda-bindings (the part partition).
"""

import re
import shutil
from pathlib import Path

from experiments.bench.harness import Table, seconds_of
from experiments.gpu.runner import ROOT, Part

#: pytest's -k: tokens under ten policies, one of which has joint graphs, and Triton's kernels.
SMOKE = "float32_tokens_equal or gpu_runs_by_the_kernels or a_gpu_gives_what_plain_torch_does"


def cuda_test_files() -> list[Path]:
    """Return the files that have tests marked cuda: all others stay unread, and may import what this python3 lacks."""
    files = sorted((ROOT / "tests").glob("**/test_*.py"))
    return [
        file for file in files if re.search(r"^(@|pytestmark = .*)pytest\.mark\.cuda\b", file.read_text("utf-8"), re.M)
    ]


class _Counted:
    """A plugin of pytest that adds a row for each test that fails, and counts the others."""

    def __init__(self, table: Table):
        self.table, self.num_passed, self.seconds = table, 0, 0.0

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            said = str(report.longrepr).strip().splitlines()
            self.table.failed(report.nodeid, said[-1] if said else "failed", when=report.when)
        self.num_passed += report.passed and report.when == "call"
        self.seconds += report.duration


def run_tests(table: Table, selected: str = "", mark: str = "cuda") -> None:
    """Add a row of the tests marked cuda that passed, and one for each that failed. ``selected``: pytest's -k."""
    import pytest

    counted = _Counted(table)
    arguments = ["-m", mark, "-q", "-p", "no:cacheprovider", *(["-k", selected] if selected else [])]
    code = int(pytest.main([*arguments, *map(str, cuda_test_files())], [counted]))
    told = {"exit_code": code, "seconds": counted.seconds}
    if code not in (0, 1):  # pytest's own: nothing was collected, or it could not run
        table.failed("tests", f"pytest ended with status {code}", **told)
    table.at_least("tests that passed", counted.num_passed, 1, "tests", **told)


def run_smoke(table: Table) -> None:
    """Run the few of these tests that say whether measuring is worth while."""
    run_tests(table, SMOKE)


def run_profile(table: Table) -> None:
    """Measure the machine at the layer sizes of OPT-6.7B. The record goes to where the other parts look for it, and to
    the results."""
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


PEERS = {"m3": 96.0, "m2": 46.0, "m1": 36.0, "18": 31.0}
PEERS |= {"m3-more": 325.0, "m2-more": 120.0, "m2-waves": 80.0, "18-more": 210.0}
PARTS = {
    "smoke": Part(f"{__name__}.run_smoke", {"": 45.0}),
    "attend": Part("experiments.gpu.attend.bench_attend_cuda", {"": 25.0}),
    "mix": Part("experiments.gpu.mix.run_mix", {"long": 85.0, "at-once": 55.0, "streamed": 60.0}),
    "peers": Part("experiments.peers.gpu_peers.run_peers", PEERS),
    "resident": Part("experiments.gpu.resident.run_resident", {"": 50.0}),
    "overlap": Part("experiments.gpu.overlap.run_overlap", {"48": 35.0}),
    "partition": Part("experiments.gpu.partition.run_partition", {"48": 90.0}),
    "profile": Part(f"{__name__}.run_profile", {"": 75.0}),
    "attend-sizes": Part("experiments.gpu.attend.bench_attend_sizes", {"": 45.0}),
    "tests": Part(f"{__name__}.run_tests", {"": 250.0}),
    "sanitizers": Part("experiments.gpu.sanitizers.run_sanitizers", {"": 120.0}),
}
