"""Bench rows of the search and of the closed form that it prices policies by: seconds, and policies a second."""

import json
import statistics
import subprocess
import sys
from functools import partial

import numpy as np

from experiments.bench.harness import Table, bench, seconds_of
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.problem import Problem
from flexhybrid.runtime.process_settings import torch_threads
from sim.array_clock import predict
from sim.candidates import Candidates
from sim.catalogue import load
from sim.presets import hybrid

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


@bench("model")
def bench_predictions(table: Table) -> None:
    """Add the policies per second that the array clock prices, with and without walking the template run."""
    generator = np.random.default_rng(11)
    shape, hardware, count = shape_by_name("opt-30b"), load("rtx4090"), 100_000
    shares = generator.random(count)
    candidates = Candidates(
        hybrid(0.5),
        batch=generator.integers(1, 257, count),
        prompt_tokens=generator.integers(64, 1920, count),
        max_tokens=generator.integers(10, 129, count),
        cache={"act@host": shares, "kv@host": 1.0 - shares},
    )
    with torch_threads(1):
        for name, walk, bar in (("closed form", True, 1e4), ("closed form without waiting", False, 1e6)):
            call = partial(predict, Problem(shape=shape, hardware=hardware), candidates, walk=walk)
            call()  # the first call of a process touches its memory
            rate = count / seconds_of(call)
            table.at_least(f"{name}, policies a second on one core", rate, bar, "1/s")
