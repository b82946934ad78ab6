"""Bench rows of one model at several rates of a paced link: prediction, choice and overlap."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from experiments.bench.harness import Table, bench
from experiments.bench.kernels import bench_kernels
from flexhybrid.core.memory import memory_plan, total_bytes
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.trace import check_trace
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.job import INSIDE, LINK_LADDER
from flexhybrid.jobs.compare.predicted import virtual_decode
from flexhybrid.jobs.compare.setting import MIXES
from flexhybrid.jobs.compare.speed import LAST, Bench, MeasuredPolicy, PolicyRun
from flexhybrid.jobs.profile.job import TIMING_SHAPE, fastest_dtype, measure_hardware, profile_steps
from flexhybrid.resolve import PacedDevice
from flexhybrid.runtime.session import random_prompts
from flexhybrid.runtime.storage.loader import RandomWeights
from flexhybrid.runtime.storage.weights import Weights
from policy_search.search import SearchSettings, search
from sim.presets import hybrid
from sim.virtual_clock import summarize

BATCH, CONTEXT, MAX_TOKENS, MINI_BATCH = 32, 512, 6, 8
BOUND = MINI_BATCH * (34 * 16 + 1)
RATES, RESIDENT_RATE = (0.3, 0.4, 0.6), 0.3  #: GB/s
WORKLOAD = Workload.uniform(BATCH, CONTEXT, MAX_TOKENS)
ROUNDS = 3
JUDGED_BALANCE = 0.7  #: design section 11: the smaller ideal over the larger
BUDGETS = Budgets(host=8 * 2**30)


def make_bench(dtype: str) -> Bench:
    """Return a bench of the timing model."""
    prompts = random_prompts(WORKLOAD, TIMING_SHAPE.vocab)
    source, device = RandomWeights(TIMING_SHAPE), torch.device("cpu")
    problem = Problem(shape=TIMING_SHAPE, dtype=dtype, budgets=BUDGETS, device="cpu")
    make_weights = partial(Weights, TIMING_SHAPE, source, dtype, device)
    return Bench(make_weights, problem, prompts, MAX_TOKENS, PacedDevice(device, 2.0))


@bench("kernels")
def bench_kernels_of_timing_model(table: Table) -> None:
    """Add the rows of single kernels at the sizes of the timing model."""
    dtype = fastest_dtype(TIMING_SHAPE, torch.device("cpu"))
    bench_kernels(table, PolicyRun(make_bench(dtype), hybrid(0.75, BOUND)))


class SpeedBench:
    """Prediction, choice and overlap of one placement of weights, at one link rate after another."""

    def __init__(self, table: Table, bar: tqdm, dtype: str, weights_share: float):
        self.table, self.bar, self.dtype, self.weights_share = table, bar, dtype, weights_share
        self.shape, self.device = TIMING_SHAPE, torch.device("cpu")
        self.bench = make_bench(dtype)
        # Room on the device for the sweep, but not for all keys and values, which would leave nothing to choose.
        problem = Problem(shape=self.shape, dtype=dtype, device="cpu")
        sizes = buffer_sizes(admit(problem, hybrid(0.5, BOUND), WORKLOAD))
        placed = memory_plan(problem, self._policy(0.5), sizes)
        self.device_memory = total_bytes(placed)["device"] + 64 * 2**20
        self.num_violated, self.others_cpu_share = 0, []
        self.shares = [i / 8 for i in range(9)]
        self.sweep = [self._contender(share) for share in self.shares]

    def _policy(self, share: float) -> Policy:
        weights = Placement(device=self.weights_share, host=1 - self.weights_share)
        return replace(hybrid(share, BOUND), weights=weights)

    def _contender(self, share: float) -> PolicyRun:
        self._progress(f"prefill {share:.3f}")
        return PolicyRun(self.bench, self._policy(share))

    def _progress(self, step: str) -> None:
        self.bar.set_description(step)
        self.bar.update()

    def profile(self, rate: float):
        self.bar.set_description(f"profile at {rate} GB/s")
        path = Path("results/bench-hardware.json")
        return measure_hardware(self.shape, self.dtype, PacedDevice(self.device, rate), path, self.bar.update)[0]

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
        return search(problem, WORKLOAD, settings)

    def run(self, rate: float, where: str) -> tuple[list[float], float]:
        """Measure at a link rate; return the virtual clock's signed errors and the searched ACT share."""
        hardware = self.profile(rate)
        searched = self.search(hardware)
        contenders = [*self.sweep, self._contender(searched.act_share)]
        problem = Problem(shape=self.shape, dtype=self.dtype, hardware=hardware)
        predicted = [summarize(virtual_decode(problem, contender.policy, WORKLOAD), LAST) for contender in contenders]
        # Overlap is judged where the two ideals are near each other; elsewhere every executor scores high.
        gaps = [abs(summary.busy.get("compute", 0) - summary.busy.get("h2d", 0)) for summary in predicted]
        judged = contenders[gaps.index(min(gaps))].policy
        self.bench.set_link(rate, contenders)
        measured = self.bench.measure(contenders, ROUNDS, lambda policy: policy is judged, self._progress)
        speeds = [row.median_tokens_per_s for row in measured]
        smooth = np.polynomial.Polynomial.fit(self.shares, speeds[:-1], 3)  # no single outlier decides its maximum
        best = float(smooth(np.linspace(0, 1, 201)).max())
        name = f"choice, {where}: searched over best of the sweep"
        self.table.at_least(name, speeds[-1] / best, 0.95, "x", rate=rate, samples=measured[-1].decode_tokens_per_s)
        self._add_overlap(next(row for row in measured if row.policy is judged), rate, where)
        errors = [summary.decode_tokens_per_s / speed - 1 for summary, speed in zip(predicted, speeds, strict=True)]
        tqdm.write(
            f"     {where}: searched ACT share {searched.act_share:.3f}; "
            "tokens/s (virtual clock's error) of shares 0, 1/8 … 1 and the searched: "
            + ", ".join(f"{speed:.1f} ({error:+.0%})" for speed, error in zip(speeds, errors, strict=True))
        )
        for row in measured:
            self.num_violated += sum(bool(check_trace(trace)) for trace in (row.prefill_trace, *row.traces))
            self.others_cpu_share += row.others_cpu_share
        return errors, searched.act_share

    def _add_overlap(self, row: MeasuredPolicy, rate: float, where: str) -> None:
        overlap, balance = row.overlap(rate * 1e9), row.balance(rate * 1e9)
        if overlap is None or balance is None:
            raise ValueError("overlap is judged only where the ideal compute time was measured")
        conditions = {"balance": balance, "act_share": row.policy.share("act"), "rate": rate}
        if balance >= JUDGED_BALANCE:
            self.table.at_least(f"overlap, {where}", overlap, 0.92, "x", **conditions)
        else:
            tqdm.write(
                f"     overlap, {where}: {overlap:.3f}, not judged: the smaller ideal is {balance:.2f} of the larger"
            )


@bench("speed")
def bench_speed(table: Table) -> None:
    """Measure streamed weights at three rates, at a fourth where the best policy is a mix, and resident weights."""
    dtype = fastest_dtype(TIMING_SHAPE, torch.device("cpu"))
    bar = tqdm(total=9 + 9 + 6 * profile_steps(torch.device("cpu")) + 5 * (ROUNDS * 10 + 2), unit="step", leave=False)
    streamed = SpeedBench(table, bar, dtype, 0.0)
    errors, shares = [], []
    for rate in RATES:
        rate_errors, share = streamed.run(rate, f"weights streamed at {rate} GB/s")
        errors, shares = errors + rate_errors, [*shares, share]
    table.errors(f"virtual clock vs measured, {len(RATES)} rates", errors, 8, 15)

    def mixes(share: float) -> bool:
        return INSIDE[0] < share < INSIDE[1]

    if not any(map(mixes, shares)):
        hardware = streamed.profile(RATES[-1])
        rates = (rate for rate in LINK_LADDER if mixes(streamed.search(hardware.with_link_rate(rate)).act_share))
        if rate := next(rates, None):
            errors, _ = streamed.run(rate, "weights streamed, at a rate where the best is a mix")
            table.errors("virtual clock vs measured, where the best is a mix", errors, 8, 15)
    num_violated, others = streamed.num_violated, streamed.others_cpu_share
    del streamed
    resident = SpeedBench(table, bar, dtype, 1.0)
    resident.run(RESIDENT_RATE, f"weights resident at {RESIDENT_RATE} GB/s")
    table.at_most("real traces in which a read saw a wrong version", num_violated + resident.num_violated, 0, "traces")
    table.disturbed("rounds", [*others, *resident.others_cpu_share])
    bar.close()
