"""Bench rows of a CUDA device that are known without one: what the tests on models of it find (``tests/fake_cuda``).

A test says its figure by pytest's ``record_property``; its own assertions hold or fail whatever the row's bar is.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from experiments.bench.harness import Table, seconds_in_turn
from flexhybrid.runtime.storage import host_memory

ROOT = Path(__file__).resolve().parents[2]
FAKE = "tests/fake_cuda"
#: Tests of the models of memory: not on the fake device.
OF_MEMORY = [f"{FAKE}/test_{name}.py" for name in ("reserved", "caching", "page_locking", "device_memory")]
FIGURES = [OF_MEMORY[0], "tests/triton_kernels/test_rows_triton.py::test_a_llama_layer_needs_sixteen_launches_at_most"]
#: Figure -> its row's name, bar and unit: the largest of those that tests record counts.
ROWS = {
    "share of the budget": ("memory: a modelled allocator's bytes over the budget, worst of three models", 0.97, "x"),
    "share of the plan": ("memory: a modelled allocator's bytes over the plan, worst of random policies", 1, "x"),
    "launches of a layer": ("launch: kernels of a Llama layer in a decode step", 16, "launches"),
}
SUITE_S = 120  #: of the suite that the fake device's tests may take
TOUCHED_BYTES, TOUCHING_BAR = 1 << 30, 1.3


class Run:
    """Tests that ran in a process of their own: their cases, and the processor seconds of the process."""

    def __init__(self, arguments: Sequence[str]):
        before = _of_children_s()
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
            subprocess.run([*command, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)
            self.cases = list(ElementTree.parse(report).iter("testcase"))
        self.processor_s = _of_children_s() - before

    def figures(self) -> dict[str, list[float]]:
        """Return name -> the values that tests have recorded."""
        found: dict[str, list[float]] = {}
        for case in self.cases:
            for said in case.iter("property"):
                found.setdefault(said.get("name", ""), []).append(float(said.get("value", "nan")))
        return found

    def passed(self, name: str) -> list[bool]:
        """Return of each test with ``name`` in its own whether it passed; those that were skipped are left out."""
        cases = [case for case in self.cases if name in case.get("name", "") and case.find("skipped") is None]
        return [case.find("failure") is None and case.find("error") is None for case in cases]


def _of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def bench_device(table: Table) -> None:
    add_figures(table, FIGURES)
    add_faults(table, [FAKE, *(f"--ignore={file}" for file in OF_MEMORY)])
    bench_touching(table)


def add_figures(table: Table, tests: Sequence[str]) -> None:
    """Add the rows of the figures that these tests record (Triton's only where it is installed)."""
    for figure, values in Run(tests).figures().items():
        name, bar, unit = ROWS[figure]
        table.at_most(name, max(values), bar, unit, samples=values)


def add_faults(table: Table, tests: Sequence[str]) -> None:
    """Add the share of planted faults that are found, and the seconds of the suite that the tests take on its workers,
    one a core."""
    run, workers = Run(tests), os.cpu_count() or 1
    found = run.passed("found")
    table.at_least("fake device: planted faults that are found", 100 * sum(found) / len(found), 100, "%", of=len(found))
    seconds = run.processor_s / workers
    table.at_most(f"fake device: its tests' processor time, on {workers} workers", seconds, SUITE_S, "s")


def bench_touching(table: Table) -> None:
    """Memory for pools whose pages several threads touch first, against one thread; on one core there is no row."""
    if (os.cpu_count() or 1) == 1:
        return
    most = host_memory.TOUCHING_THREADS

    def touched(threads: int) -> None:
        host_memory.TOUCHING_THREADS = threads
        try:
            host_memory.HostMemory(pinned=False).bytes(TOUCHED_BYTES)
        finally:
            host_memory.TOUCHING_THREADS = most

    seconds = seconds_in_turn({"one": lambda _: touched(1), "all": lambda _: touched(most)}, 5, 1)
    ratio = min(seconds["one"]) / min(seconds["all"])
    a_gib = min(seconds["all"]) / (TOUCHED_BYTES / 2**30)
    table.at_least(
        "memory: pages touched by all cores, times as fast as by one", ratio, TOUCHING_BAR, "x", s_a_gib=a_gib
    )
