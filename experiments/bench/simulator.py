"""Bench rows of the simulator and the search: how near to the virtual clock, to the papers, and how fast."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys

import numpy as np

from experiments.peers import compare_search
from experiments.reproduce import registry
from experiments.studies.random_cases import errors

CASES = {"column": (300, 0.01, 0.05), "row": (150, None, 0.08), "serial": (100, None, 0.15)}  #: number, median, worst


def bench_classes(table) -> None:
    """Closed form against virtual clock by kind of policy."""
    for kind, (count, median, worst) in CASES.items():
        found = np.abs(errors(count, 7, kind))
        name = f"closed form vs virtual clock, {count} {kind} policies"
        if median is not None:
            table.add(f"{name}, median error", 100 * float(np.median(found)), 100 * median, "%", False)
        table.add(f"{name}, worst error", 100 * float(found.max()), 100 * worst, "%", False)


def bench_papers(table) -> None:
    """The reproductions' promises, from the rows of their experiments."""

    def errors_of(name: str, pattern: str, role: str | None = "validate") -> np.ndarray:
        rows = registry.run(name).rows
        rows = rows[[bool(re.search(pattern, what)) for what in rows["what"]]]
        return 100 * (rows if role is None else rows[rows["role"] == role])["error"].abs().to_numpy()

    ablation = errors_of("capture-table3", "^OPT-(30B|66B) (act_only|hybrid_static|hybrid_full)$")
    table.add("CAPTURE table III, 30b and 66b, mean error", float(ablation.mean()), 5, "%", False)
    table.add("CAPTURE table III, 30b and 66b, worst error", float(ablation.max()), 12, "%", False)
    for what, pattern in (("Algorithm 1's", "Algorithm 1 for this batch"), ("fastest", "fastest of a dense scan$")):
        ratios = errors_of("capture-table3", f"^KV:ACT bytes, .*{pattern}")
        table.add(
            f"CAPTURE best KV:ACT bytes, {what} for 30b and 66b, worst error", float(ratios.max()), 30, "%", False
        )
    headlines = errors_of("capture-headlines", "", None)
    mean = float(np.exp(np.log(np.maximum(headlines, 1e-3)).mean()))
    table.add("CAPTURE headline ratios, geometric mean of the errors", mean, 15, "%", False)
    for what, pattern, bar in (
        ("FlexGen rows", "^FlexGen, ", 8), ("paper's rule", "^KVPR, paper rule, ", 15),
        ("pipeline rule", "^KVPR, pipeline rule, ", 15),
    ):  # fmt: skip
        role = "calibrate" if what == "FlexGen rows" else "validate"
        table.add(
            f"KVPR table 5, {what}, worst error", float(errors_of("kvpr-table5", pattern, role).max()), bar, "%", False
        )
    speedups = np.concatenate([errors_of(name, "^speedup ") for name in ("kvpr-table3", "kvpr-table4")])
    table.add("KVPR tables 3 and 4, speedups, median error", float(np.median(speedups)), 15, "%", False)
    rows = registry.run("infinigen-fig15").rows
    held_out = rows[rows["source"].str.contains("ih044|ih046|ih048")]["error"].abs()
    table.add("InfiniGen, INT4, H2O at batch 20, worst error", 100 * float(held_out.max()), 20, "%", False)


def bench_peer(table) -> None:
    """Our search beside the recorded policies of FlexGen's own."""
    runs = json.loads(compare_search.RECORDED.read_text(encoding="utf-8"))["runs"]
    for run in runs:
        row = compare_search.compare(run["model"], run["hardware"], run)
        name = f"search, {run['model']} on {run['hardware']}, lossless"
        table.add(f"{name}, over FlexGen's policy ({run['constants']} rates)", row["ratio"], 1.0, "x")


#: One search of a process that has done nothing else; only the imports come before.
_ONE_SEARCH = """
import json, sys
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.problem import Problem
from flexhybrid.core.workload import Workload
from policy_search.search import search
from sim import catalogue
model, hardware, prompt, generated = json.loads(sys.argv[1])
workload = Workload.uniform(1, prompt, generated)
problem = Problem(shape=shape_by_name(model), hardware=catalogue.load(hardware))
print(json.dumps([search(problem, workload).search_s for _ in range(3)]))
"""


def bench_search_time(table) -> None:
    """The full search, all discrete choices, inside a process: its first call, and the median of the next two."""
    for model, hardware in compare_search.CASES:
        case = json.dumps([model, hardware, compare_search.PROMPT, compare_search.GENERATED])
        run = subprocess.run([sys.executable, "-c", _ONE_SEARCH, case], capture_output=True, text=True, check=True)
        first, *later = json.loads(run.stdout)
        name = f"full search, {model} on {hardware}"
        table.add(f"{name}, first call of a process", first, 1.0, "s", False)
        table.add(f"{name}, later calls", statistics.median(later), 1.0, "s", False)
