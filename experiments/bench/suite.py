"""``make bench``: every figure the project promises, in one table and in results/bench.json.

Each row is {name: {value, bar, unit, ok}}. A figure that misses its bar stays in, as ok: false. Speeds are ratios from
one run: against the bound, against a plain kernel of the same shape, or predicted against measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from tqdm import tqdm

from experiments.bench.cascade import bench_cascade
from experiments.bench.cluster import bench_cluster
from experiments.bench.compression import bench_compression
from experiments.bench.copies import bench_copies
from experiments.bench.kernels import bench_kernels
from experiments.bench.launch import bench_launch
from experiments.bench.overlap import bench_overlap
from experiments.bench.run import bench_run
from experiments.bench.selection import bench_selection
from experiments.bench.simulator import bench_classes, bench_papers, bench_peer, bench_search_time
from experiments.bench.table import Table
from flexhybrid import shipped
from flexhybrid.core.memory import buffer_sizes, memory_plan, total_bytes
from flexhybrid.core.model.shape import DTYPE_BYTES, shape_by_name
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.trace import TraceEvent, check_trace
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.exactness import Reference, compare_tokens
from flexhybrid.jobs.compare.job import INSIDE, LINK_LADDER, MIXES, virtual_decode
from flexhybrid.jobs.compare.speed import Bench, Contender, Measured
from flexhybrid.jobs.machine import device_name
from flexhybrid.jobs.profile.job import PROFILE_STEPS, TIMING_SHAPE, fastest_dtype, measure_hardware
from flexhybrid.llm import LLM
from flexhybrid.requests import load_tokenizer
from flexhybrid.runtime.profiling.cpu_use import MOST_OTHERS
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import Weights
from flexhybrid.runtime.threads import torch_threads
from flexhybrid.sampling_params import SamplingParams
from policy_search.search import SearchSettings, search
from sim.array_clock import predict
from sim.candidates import Candidates
from sim.catalogue import load
from sim.presets import hybrid
from sim.virtual_clock import RunSummary, summarize

BATCH, CONTEXT, MAX_TOKENS, MINI_BATCH = 32, 512, 6, 8
BOUND = MINI_BATCH * (34 * 16 + 1)
RATES = (0.3, 0.4, 0.6)
RESIDENT_RATE = 0.3
ROUNDS = 3
JUDGED_BALANCE = 0.7  #: design section 11: the smaller ideal over the larger
BUDGETS = Budgets(host=8 * 2**30)
SEARCHED = (("opt-30b", "t4"), ("opt-30b", "rtx4090"), ("opt-175b", "t4"))


# ---- cheap figures ---------------------------------------------------------------------------------------------------


def bench_closed_form(table: Table) -> None:
    """The speed of the closed form and of the search."""
    with torch_threads(1):
        bench_predictions(table, np.random.default_rng(11))
        for model, machine in SEARCHED:
            bench_search(table, model, machine)


def bench_predictions(table: Table, generator: np.random.Generator) -> None:
    """How many policies a second the closed form prices, and how many its bound alone."""
    shape, hardware, count = shape_by_name("opt-30b"), load("rtx4090"), 100_000
    shares = generator.random(count)
    candidates = Candidates(
        hybrid(0.5), batch=generator.integers(1, 257, count), prompt_tokens=generator.integers(64, 1920, count),
        max_tokens=generator.integers(10, 129, count), cache={"act@host": shares, "kv@host": 1.0 - shares},
    )  # fmt: skip
    for name, walk, bar in (("closed form", True, 1e4), ("closed form without waiting", False, 1e6)):
        predict(shape, hardware, 2, candidates, walk=walk)  # the first call of a process touches its memory first
        start = time.perf_counter()
        predict(shape, hardware, 2, candidates, walk=walk)
        rate = count / (time.perf_counter() - start)
        table.add(f"{name}, policies a second on one core", rate, bar, "1/s")


def bench_search(table: Table, model: str, machine: str) -> None:
    """The whole search over all that a policy says. The first of a process builds what later ones find built."""
    problem, workload = Problem(shape=shape_by_name(model), hardware=load(machine)), Workload.uniform(1, 512, 32)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        found = search(problem, workload)
        times.append(time.perf_counter() - start)
    more = {**found.counts, "again_s": statistics.median(times[1:]), "gap": found.gap}
    table.add(f"search, {model} on {machine}, first of its kind", times[0], 1.0, "s", False, **more)
    solved = 100 * (1 - found.num_bounded_out / found.num_choices)
    table.add(f"search, {model} on {machine}, choices whose LP is solved", solved, 3, "%", False)


def bench_exactness(table: Table) -> None:
    """Tokens of every policy on the shipped checkpoint against transformers', float32."""
    folder = shipped.CHECKPOINT
    with torch_threads(1):
        reference = Reference(folder)
        tokenizer = load_tokenizer(folder)
        prompts = [tokenizer(text)["input_ids"] for text in shipped.prompts()]
        expected = reference.generate(prompts, 24)
        total = equal = excused = wrong = 0
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            for bound in (512, 2048):
                llm = LLM(folder, hybrid(share, bound), device="cpu", dtype="float32")
                answers = llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0))
                outcome = compare_tokens(reference, prompts, expected, [a.outputs[0].token_ids for a in answers])
                total, equal = total + outcome.num_tokens, equal + outcome.num_equal
                excused, wrong = excused + outcome.num_excused, wrong + bool(outcome.first_wrong)
        table.add("exactness: unexcused differences over 10 policies", wrong, 0, "policies", False)
        table.add("exactness: tokens equal to transformers'", 100 * equal / total, 99.9, "%")
        table.add("exactness: excused tokens of 10,000", 1e4 * excused / total, 1, "tokens", False)


# ---- speed -----------------------------------------------------------------------------------------------------------


def best_of_smooth_fit(shares: list[float], values: list[float]) -> float:
    """Maximum over [0, 1] of a cubic through the sweep's medians: no single lucky point sets the bar."""
    fit = np.polynomial.Polynomial.fit(shares, values, 3)
    return float(fit(np.linspace(0, 1, 201)).max())


def make_bench(dtype: str) -> Bench:
    """The timing model with its prompts; weights are placed as each policy says."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, TIMING_SHAPE.vocab, CONTEXT).tolist() for _ in range(BATCH)]
    source, device = RandomWeights(TIMING_SHAPE), torch.device("cpu")
    return Bench(lambda policy: Weights(TIMING_SHAPE, source, dtype, device, policy), prompts, MAX_TOKENS, 2.0, BUDGETS)


class SpeedBench:
    """Prediction, choice and overlap of one placement of weights, at one link rate after another."""

    def __init__(self, table: Table, bar: tqdm, dtype: str, weights_share: float):
        self.table, self.bar, self.dtype, self.weights_share = table, bar, dtype, weights_share
        self.shape, self.device = TIMING_SHAPE, torch.device("cpu")
        self.workload = Workload.uniform(BATCH, CONTEXT, MAX_TOKENS)
        self.bench = make_bench(dtype)
        # The device has room for what the sweep needs, but not for all keys and values: that would end the question.
        problem = Problem(shape=self.shape, dtype=dtype, device="cpu")
        sizes = buffer_sizes(admit(problem, hybrid(0.5, BOUND), self.workload))
        placed = memory_plan(problem, self._policy(0.5), sizes)
        self.device_memory = total_bytes(placed)["device"] + 64 * 2**20
        self.bad_traces, self.disturbed = 0, []
        self.last_trace: list[TraceEvent] = []
        self.shares = [i / 8 for i in range(9)]
        self.sweep = [self._contender(share) for share in self.shares]

    def _policy(self, share: float) -> Policy:
        return hybrid(share, BOUND, Placement(device=self.weights_share, host=1 - self.weights_share))

    def _contender(self, share: float) -> Contender:
        self._progress(f"prefill {share:.3f}")
        return Contender(self.bench, self._policy(share))

    def _progress(self, what: str) -> None:
        self.bar.set_description(what)
        self.bar.update()

    def profile(self, rate: float):
        self.bar.set_description(f"profile at {rate} GB/s")
        path = Path("results/bench-hardware.json")
        return measure_hardware(self.shape, self.dtype, self.device, rate, path, self.bar.update)[0]

    def search(self, hardware):
        budgets = replace(BUDGETS, device=self.device_memory)
        settings = SearchSettings(
            batch=BATCH,
            objective="decode_throughput",
            space=MIXES,
            mini_batch_tokens=(BOUND,),
            weights_device=self.weights_share,
        )
        problem = Problem(shape=self.shape, dtype=self.dtype, hardware=hardware, budgets=budgets)
        return search(problem, self.workload, settings)

    def run(self, rate: float, where: str) -> tuple[list[float], float]:
        """Measure at a rate; returns (signed errors of the virtual clock, searched ACT share)."""
        hardware = self.profile(rate)
        found = self.search(hardware)
        contenders = [*self.sweep, self._contender(found.act_share)]
        predicted = [self._virtual(hardware, contender.policy) for contender in contenders]
        # Overlap is judged where the two ideals are near each other; elsewhere anyone scores high.
        level = min(predicted, key=lambda s: abs(s.busy.get("compute", 0) - s.busy.get("h2d", 0)))
        judged = contenders[predicted.index(level)].policy
        self.bench.set_link(rate, contenders)
        measured = self.bench.measure(contenders, ROUNDS, lambda policy: policy is judged, self._progress)
        speeds = [m.median_tokens_per_s for m in measured]
        best = best_of_smooth_fit(self.shares, speeds[:-1])
        self.table.add(f"choice, {where}: searched over best of the sweep", speeds[-1] / best, 0.95, "x", rate=rate)
        self._add_overlap(next(m for m in measured if m.policy is judged), rate, where)
        errors = [p.decode_tokens_per_s / speed - 1 for p, speed in zip(predicted, speeds, strict=True)]
        tqdm.write(
            f"     {where}: searched ACT share {found.act_share:.3f}; "
            "tokens/s (virtual clock's error) of shares 0, 1/8 … 1 and the searched: "
            + ", ".join(f"{speed:.1f} ({error:+.0%})" for speed, error in zip(speeds, errors, strict=True))
        )
        for m in measured:
            self.bad_traces += sum(bool(check_trace(trace)) for trace in (m.prefill_trace, *m.traces))
            self.disturbed += [share for share in m.others_cpu_share if share is not None]
        self.last_trace = measured[-1].traces[0]
        return errors, found.act_share

    def _virtual(self, hardware, policy: Policy) -> RunSummary:
        p = DTYPE_BYTES[self.dtype]
        return summarize(virtual_decode(self.shape, hardware, p, policy, self.workload))

    def _add_overlap(self, m: Measured, rate: float, where: str) -> None:
        overlap, balance = m.overlap(rate * 1e9), m.balance(rate * 1e9)
        share = m.policy.share("act")
        if balance >= JUDGED_BALANCE:
            self.table.add(f"overlap, {where}", overlap, 0.92, "x", balance=balance, act_share=share, rate=rate)
        else:
            tqdm.write(
                f"     overlap, {where}: {overlap:.3f}, not judged: the smaller ideal is {balance:.2f} of the larger"
            )


def bench_speed(table: Table, bar: tqdm, dtype: str) -> None:
    """Streamed weights at three rates, and at a fourth where the best policy is a mix; then resident weights."""
    streamed = SpeedBench(table, bar, dtype, 0.0)
    errors, shares = [], []
    for rate in RATES:
        more, share = streamed.run(rate, f"weights streamed at {rate} GB/s")
        errors, shares = errors + more, [*shares, share]
    _add_errors(table, errors, f"{len(RATES)} rates")

    def mixes(share: float) -> bool:
        return INSIDE[0] < share < INSIDE[1]

    if not any(map(mixes, shares)):
        hardware = streamed.profile(RATES[-1])
        rates = (rate for rate in LINK_LADDER if mixes(streamed.search(hardware.with_link_rate(rate)).act_share))
        if rate := next(rates, None):
            more, share = streamed.run(rate, "weights streamed, at a rate where the best is a mix")
            _add_errors(table, more, "where the best is a mix")
    bench_mutations(table, streamed.last_trace)
    bad, disturbed = streamed.bad_traces, streamed.disturbed
    del streamed
    resident = SpeedBench(table, bar, dtype, 1.0)
    resident.run(RESIDENT_RATE, f"weights resident at {RESIDENT_RATE} GB/s")
    table.add("real traces in which a read saw a wrong version", bad + resident.bad_traces, 0, "traces", False)
    disturbed += resident.disturbed
    table.add(
        "rounds with others on more than 5 % of the cores", sum(x > MOST_OTHERS for x in disturbed), 0, "rounds", False
    )


def bench_mutations(table: Table, trace: list[TraceEvent]) -> None:
    """A real trace, damaged in one place at a time: does the checker see it?"""
    generator = np.random.default_rng(0)
    by_resource: dict[str, list[int]] = {}
    for number, event in enumerate(trace):
        by_resource.setdefault(event.task.resource, []).append(number)
    loads = [n for n in by_resource["h2d"] if trace[n].task.verb in ("load_kv", "load_act")]
    seen = tried = 0
    for number in generator.choice(loads[4:-4], 20, replace=False):
        event = trace[number]
        readers = [n for n in range(number + 1, len(trace)) if set(event.task.writes) & set(trace[n].task.reads)]
        earlier = [n for n in range(number) if set(event.task.writes) & set(trace[n].task.reads)]
        late = trace[readers[0]]
        mutants = [
            # read after write: the load ends after its reader has begun
            {number: event._replace(end_s=(late.start_s + late.end_s) / 2)},
            # write after read: the load begins while the last reader of the slot's old content is at work
            {number: event._replace(start_s=(trace[earlier[-1]].start_s + trace[earlier[-1]].end_s) / 2)},
            # write after write: two loads of one slot change places in time
            {number: event._replace(start_s=late.end_s + 1.0, end_s=late.end_s + 2.0)},
        ]
        for mutant in mutants:
            tried += 1
            seen += bool(check_trace([mutant.get(n, e) for n, e in enumerate(trace)]))
    table.add("mutations of a real trace that the checker sees", 100 * seen / tried, 100, "%")


def _add_errors(table: Table, errors: list[float], where: str) -> None:
    absolute = [abs(error) for error in errors]
    table.add(f"virtual clock vs measured, {where}, median error", 100 * statistics.median(absolute), 8, "%", False)
    table.add(f"virtual clock vs measured, {where}, worst error", 100 * max(absolute), 15, "%", False)


def bench_simulator(table: Table, dtype: str) -> None:
    bench_classes(table)
    bench_papers(table)
    bench_peer(table)
    bench_search_time(table)


def bench_model(table: Table, dtype: str) -> None:
    bench_closed_form(table)
    bench_launch(table)
    bench_copies(table)


def bench_speeds(table: Table, dtype: str) -> None:
    with tqdm(total=9 + 9 + 6 * PROFILE_STEPS + 5 * (ROUNDS * 10 + 2), unit="step", leave=False) as bar:
        bench_speed(table, bar, dtype)


def bench_cascades(table: Table, dtype: str) -> None:
    bench_cascade(table)
    bench_cluster(table)


#: What ``--only`` names, in the order of a whole run; ``dtype`` is the timing runs' compute dtype.
PARTS: dict[str, Callable[[Table, str], None]] = {
    "simulator": bench_simulator,
    "model": bench_model,
    "exactness": lambda table, dtype: bench_exactness(table),
    "compression": lambda table, dtype: bench_compression(table),
    "kernels": lambda table, dtype: bench_kernels(table, Contender(make_bench(dtype), hybrid(0.75, BOUND))),
    "executor": bench_overlap,
    "selection": bench_selection,
    "run": lambda table, dtype: bench_run(table),
    "speed": bench_speeds,
    "cascade": bench_cascades,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--only", choices=PARTS, nargs="+", help="renew the rows of these parts in bench.json alone")
    args = parser.parse_args()
    out = args.out / "bench.json"
    table = Table()
    if out.is_file():
        earlier = json.loads(out.read_text(encoding="utf-8"))
        table.rows = {name: row for name, row in earlier.items() if row.get("part") in PARTS}
    dtype = fastest_dtype(TIMING_SHAPE, torch.device("cpu"))
    for part in args.only or PARTS:
        table.renew(part)
        PARTS[part](table, dtype)
        table.save(out)  # what a run that is cut has measured stays
    missed = [name for name, row in table.rows.items() if not row["ok"]]
    print(f"\n{device_name(torch.device('cpu'))}: {len(table.rows) - len(missed)} of {len(table.rows)} figures hold.")
    for name in missed:
        print(f"  missed: {name}")


if __name__ == "__main__":
    main()
