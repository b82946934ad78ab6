"""Bench rows of the search: its policies against FlexGen's recorded ones, and its seconds."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

from experiments.bench.harness import Table
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.workload import Workload
from policy_search.search import LOSSLESS, SearchSettings, search
from sim import catalogue
from sim.simulate import simulate

#: What FlexGen's own search chose (PyPI flexgen==0.1.8, run as published on the rates of our hardware records or on its
#: own fit of a T4), as policies of ours. Commit b18005f has the code that ran it (experiments/peers/flexgen_search.py).
RECORD = Path(__file__).parents[1] / "results" / "peers" / "flexgen-0.1.8.json"
MACHINES = (("opt-30b", "t4"), ("opt-30b", "rtx4090"), ("opt-175b", "t4"))  #: model and hardware of the cases
PROMPT, GENERATED = 512, 32


def bench_peer(table: Table) -> None:
    """Our search against the recorded policies of FlexGen's search, which are priced unchanged (in waves where our
    account of memory requires them)."""
    for run in json.loads(RECORD.read_text(encoding="utf-8"))["runs"]:
        shape, hardware = shape_by_name(run["model"]), catalogue.load(run["hardware"])
        problem, theirs = Problem(shape=shape, hardware=hardware), Policy.from_dict(run["policy"])
        batch = run["gpu_batch_size"] * run["num_gpu_batches"]
        priced = simulate(problem, theirs, batch, PROMPT, GENERATED).tokens_per_s
        ours = search(problem, Workload.uniform(1, PROMPT, GENERATED), SearchSettings(space=LOSSLESS))
        row = f"search, {run['model']} on {run['hardware']}, lossless, over FlexGen's policy ({run['constants']} rates)"
        table.at_least(row, ours.prediction["tokens_per_s"] / priced, 1.0, "x")


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
