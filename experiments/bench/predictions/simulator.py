"""Bench rows of the simulator and the search: errors against the papers, and seconds."""

import json
import re
import statistics
import subprocess
import sys

import numpy as np

from experiments.bench.harness import Table
from experiments.peers import compare_search, flexgen_search
from experiments.reproduce import registry
from experiments.reproduce.experiment import summary
from experiments.reproduce.paper import compared


def errors_of(experiment: str, pattern: str, role: str | None = "validate", column: str = "what") -> np.ndarray:
    """Return the absolute errors, in percent, of an experiment's rows whose ``column`` matches a pattern."""
    frame = registry.run(experiment).rows
    chosen = np.array([bool(re.search(pattern, text)) for text in frame[column]])
    if role is not None:
        chosen &= np.array(frame["role"] == role)
    return 100 * np.abs(np.array(frame["error"], dtype=float)[chosen])


def bench_papers(table: Table) -> None:
    """The errors of the reproduced papers, from the rows of their experiments."""
    ablation = errors_of("capture-table3", "^OPT-(30B|66B) (act_only|hybrid_static|hybrid_full)$")
    table.at_most("CAPTURE table III, 30b and 66b, mean error", float(ablation.mean()), 5, "%")
    table.at_most("CAPTURE table III, 30b and 66b, worst error", float(ablation.max()), 12, "%")
    for rule, pattern in (("Algorithm 1's", "Algorithm 1 for this batch"), ("fastest", "fastest of a dense scan$")):
        worst = float(errors_of("capture-table3", f"^KV:ACT bytes, .*{pattern}").max())
        table.at_most(f"CAPTURE best KV:ACT bytes, {rule} for 30b and 66b, worst error", worst, 30, "%")
    headlines = summary(compared(map(registry.run, registry.names("capture"))), "validate")
    table.at_most("CAPTURE, all held-out rows, median error", 100 * headlines.median, 10, "%")
    table.at_most("CAPTURE, all held-out rows, mean error", 100 * headlines.mean, 15, "%")
    for rows, pattern, bar, role in (
        ("FlexGen rows", "^FlexGen, ", 8, "calibrate"),
        ("paper's rule", "^KVPR, paper rule, ", 15, "validate"),
        ("pipeline rule", "^KVPR, pipeline rule, ", 15, "validate"),
    ):
        worst = float(errors_of("kvpr-table5", pattern, role).max())
        table.at_most(f"KVPR table 5, {rows}, worst error", worst, bar, "%")
    speedups = np.concatenate([errors_of(name, "^speedup ") for name in ("kvpr-table3", "kvpr-table4")])
    table.at_most("KVPR tables 3 and 4, speedups, median error", float(np.median(speedups)), 15, "%")
    worst = float(errors_of("infinigen-fig15", "ih044|ih046|ih048", None, "source").max())
    table.at_most("InfiniGen, INT4, H2O at batch 20, worst error", worst, 20, "%")


def bench_peer(table: Table) -> None:
    """Our search against the recorded policies of FlexGen's search."""
    runs = json.loads(compare_search.RECORDED.read_text(encoding="utf-8"))["runs"]
    for run in runs:
        row = compare_search.compare(run["model"], run["hardware"], run)
        name = f"search, {run['model']} on {run['hardware']}, lossless"
        table.at_least(f"{name}, over FlexGen's policy ({run['constants']} rates)", row["ratio"], 1.0, "x")


#: A process that only imports and searches.
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


def bench_search_time(table: Table) -> None:
    """Seconds of the full search over all discrete choices: a process's first call, and the median of the next two."""
    for model, hardware in flexgen_search.MACHINES:
        case = json.dumps([model, hardware, compare_search.PROMPT, compare_search.GENERATED])
        run = subprocess.run([sys.executable, "-c", _ONE_SEARCH, case], capture_output=True, text=True, check=True)
        first, *later = json.loads(run.stdout)
        name = f"full search, {model} on {hardware}"
        table.at_most(f"{name}, first call of a process", first, 1.0, "s")
        table.at_most(f"{name}, later calls", statistics.median(later), 1.0, "s", samples=later)
