"""Bench rows of the search: its seconds, and the choices that its bounds leave to be solved."""

import json
import statistics
import subprocess
import sys

from experiments.bench.harness import Table, bench

MACHINES = (("opt-30b", "t4"), ("opt-30b", "rtx4090"), ("opt-175b", "t4"))
PROMPT, GENERATED = 512, 32

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
found = [search(problem, workload) for _ in range(3)]
print(json.dumps([found[0].counts, found[0].gap, [each.search_s for each in found]]))
"""


@bench("simulator")
def bench_search_time(table: Table) -> None:
    """Seconds of the full search over all discrete choices: a process's first call, and the median of the next two;
    and the share of the choices whose LP is solved."""
    for model, hardware in MACHINES:
        case = json.dumps([model, hardware, PROMPT, GENERATED])
        run = subprocess.run([sys.executable, "-c", _ONE_SEARCH, case], capture_output=True, text=True, check=True)
        counts, gap, (first, *later) = json.loads(run.stdout)
        name = f"full search, {model} on {hardware}"
        table.at_most(f"{name}, first call of a process", first, 1.0, "s", **counts, gap=gap)
        table.at_most(f"{name}, later calls", statistics.median(later), 1.0, "s", samples=later)
        solved = 100 * (1 - counts["bounded_out"] / counts["choices"])
        table.at_most(f"{name}, choices whose LP is solved", solved, 3, "%")
