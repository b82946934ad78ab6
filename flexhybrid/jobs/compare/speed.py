"""Measures the speed of policies over the same prompts, and the ideal compute time of each.

A ``Bench`` holds the weights; each policy has its own engine, or several share one. The prefill runs once per policy.
Decode rounds start from the filled cache, so they are short, and the policies' rounds alternate: when the machine
slows down, every policy slows down.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from flexhybrid.core.memory import check_budget, memory_plan
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.trace import TraceEvent, TraceWindow
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Workload
from flexhybrid.resolve import PacedDevice
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.links import CpuCopies
from flexhybrid.runtime.profiling.cpu_use import CpuUse
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.weights import Weights, WeightSlots
from sim.virtual_clock import MeasuredSummary, summarize_measured

LAST = -2  #: last measured iteration (``TraceWindow``): the very last one loads nothing for a next one
ALONE_ROUNDS = 3  #: decode rounds without the link; the fastest is the ideal compute time


@dataclass
class MeasuredPolicy:
    """The measurements of one policy, over the decode iterations without the first and the last (LAST)."""

    policy: Policy
    tokens: list[list[int]]
    prefill_trace: list[TraceEvent]  #: trace of the first run, with the prefill
    traces: list[list[TraceEvent]]  #: trace of each decode round
    summaries: list[MeasuredSummary]  #: summary of each decode round
    ideal_compute_s: float | None  #: seconds of the same iterations without copies; None: not measured
    others_cpu_share: list[float | None]  #: share of the cores that other processes used in each round

    @property
    def decode_tokens_per_s(self) -> list[float]:
        """The rate of each round."""
        return [summary.decode_tokens_per_s for summary in self.summaries]

    @property
    def median_tokens_per_s(self) -> float:
        return statistics.median(self.decode_tokens_per_s)

    @property
    def median_round(self) -> int:
        """Index of the round nearest to the median."""
        return int(np.argmin(np.abs(np.array(self.decode_tokens_per_s) - self.median_tokens_per_s)))

    def ideal_link_s(self, bytes_per_s: float) -> float:
        """Return the seconds that the measured copies to the device take at the link's full rate; median of rounds."""
        return statistics.median(TraceWindow(trace, LAST).moved_bytes("h2d") for trace in self.traces) / bytes_per_s

    def overlap(self, bytes_per_s: float) -> float | None:
        """Return max(ideal link, ideal compute) / wall time, the median of the rounds."""
        if self.ideal_compute_s is None:
            return None
        ideal = max(self.ideal_link_s(bytes_per_s), self.ideal_compute_s)
        return statistics.median(ideal / summary.decode_s for summary in self.summaries)

    def balance(self, bytes_per_s: float) -> float | None:
        """Return the smaller ideal time over the larger; ``overlap`` is meaningful from 0.7 on."""
        if self.ideal_compute_s is None:
            return None
        low, high = sorted((self.ideal_link_s(bytes_per_s), self.ideal_compute_s))
        return low / high if high else None


class PolicyRun:
    """A policy with its wave and its engine, whose cache is filled by a prefill."""

    def __init__(self, bench: Bench, policy: Policy, engine: Engine | None = None):
        self.bench, self.policy = bench, policy
        self.engine = engine or bench.make_engine([policy])
        self.wave = bench.admit(policy)
        self.session = Session(self.engine, self.wave, bench.prompts)
        result = self.session.generate()
        self.tokens = result.tokens
        self.prefill_trace = result.trace

    def decode(self) -> tuple[list[TraceEvent], float | None]:
        """Run all decode iterations from the prefilled cache.
        Return the trace, and the share of the cores that other processes used."""
        before = CpuUse.now()
        trace = self.session.decode()
        return trace, CpuUse.now().others_since(before)

    def compute_alone_s(self) -> float:
        """Return the seconds of the measured iterations without copies over the link, in the fastest round."""
        with self.engine.without_copies():
            return min(summarize_measured(self.decode()[0], LAST).decode_s for _ in range(ALONE_ROUNDS))

    def measured(
        self, rounds: list[tuple[list[TraceEvent], float | None]], with_ideal: bool, on_progress: Callable[[str], None]
    ) -> MeasuredPolicy:
        """Return the measurements of these rounds; ``with_ideal`` also measures the ideal compute time."""
        if with_ideal:
            on_progress(f"compute alone {self.policy.name}")
        traces = [trace for trace, _ in rounds]
        return MeasuredPolicy(
            policy=self.policy,
            tokens=self.tokens,
            prefill_trace=self.prefill_trace,
            traces=traces,
            summaries=[summarize_measured(trace, LAST) for trace in traces],
            ideal_compute_s=self.compute_alone_s() if with_ideal else None,
            others_cpu_share=[share for _, share in rounds],
        )


class Bench:
    """Runs policies on the same prompts. Methods raise InputError for a policy that exceeds the budgets.

    ``make_weights(policy)`` loads weights, which policies of equal placement and bits share. ``problem``'s hardware
    decides the split points of both(…). ``close()``, or leaving a ``with`` block, frees memory and disk space.
    """

    def __init__(
        self,
        make_weights: Callable[[Policy], Weights],
        problem: Problem,
        prompts: list[list[int]],
        max_tokens: int,
        paced: PacedDevice,
    ):
        self.problem, self.prompts, self.paced = problem, prompts, paced
        lengths = np.array([len(prompt) for prompt in prompts])
        self.workload = Workload(lengths, np.full(len(prompts), max_tokens))
        self._make_weights = make_weights
        self._weights: dict[tuple, tuple[Weights, WeightSlots]] = {}
        self._engines: list[Engine] = []
        self._runs: dict[Policy, PolicyRun] = {}

    def admit(self, policy: Policy) -> Wave:
        """Return all requests as one wave."""
        return admit(self.problem, policy, self.workload)

    def close(self) -> None:
        """Close all weights and engines."""
        for resource in (*self._engines, *(weights for weights, _ in self._weights.values())):
            resource.close()
        self._engines, self._weights, self._runs = [], {}, {}

    def run_of(self, policy: Policy) -> PolicyRun:
        """Return a policy's run, whose prompts are computed once until ``close``."""
        if policy not in self._runs:
            self._runs[policy] = PolicyRun(self, policy)
        return self._runs[policy]

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def weights_of(self, policy: Policy) -> tuple[Weights, WeightSlots]:
        """Return the weights placed as the policy says, and slots for the streamed layers."""
        key = (policy.weights, policy.bits.weights)
        if key not in self._weights:
            weights = self._make_weights(policy)
            self._weights[key] = (weights, weights.make_slots())
        return self._weights[key]

    def make_engine(self, policies: list[Policy]) -> Engine:
        """Return an engine whose buffers are large enough for each of these policies (a group of ``_grouped``)."""
        weights, slots = self.weights_of(policies[0])
        sizes = buffer_sizes(self.admit(policies[0]))
        for policy in policies[1:]:
            sizes = sizes.merge(buffer_sizes(self.admit(policy)))
        plan = memory_plan(self.problem, policies[0], sizes)
        check_budget(plan, self.problem.budgets, "policy " + ", ".join(policy.name for policy in policies))
        rate, place = self.paced.link_gb_per_s, self.paced.disk
        engine = Engine(weights, policies[0], sizes, rate, slots=slots, disk=place)
        self._engines.append(engine)
        return engine

    def set_link(self, gb_per_s: float, runs: list[PolicyRun]) -> None:
        """Change the rate of a CPU's imitated link; caches stay filled."""
        self.paced = replace(self.paced, link_gb_per_s=gb_per_s)
        for run in runs:
            if not isinstance(run.engine.copies, CpuCopies):
                raise TypeError("the rate of a GPU's link cannot be set")
            run.engine.copies.set_rate(gb_per_s)

    def measure(
        self,
        runs: list[PolicyRun],
        rounds: int,
        with_ideal: Callable[[Policy], bool],
        on_progress: Callable[[str], None],
    ) -> list[MeasuredPolicy]:
        """Decode in ``rounds`` alternating rounds, then measure the ideal compute times if ``with_ideal(policy)``."""
        kept: list[list] = [[] for _ in runs]
        for _ in range(rounds):
            for run, traces in zip(runs, kept, strict=True):
                on_progress(f"decode {run.policy.name}")
                traces.append(run.decode())
        return [run.measured(traces, with_ideal(run.policy), on_progress) for run, traces in zip(runs, kept)]

    def measure_in_turn(
        self,
        policies: list[Policy],
        rounds: int,
        with_ideal: Callable[[Policy], bool],
        on_progress: Callable[[str], None],
        on_measured: Callable[[MeasuredPolicy], None],
    ) -> list[MeasuredPolicy]:
        """Decode one policy after another, if the pools of all policies would not fit the memory together.
        Only one set of weights is in memory at a time, and policies of a group share buffers. Results are in the order
        of ``policies``; ``on_measured`` is called with each result as soon as it exists."""
        measured: dict[str, MeasuredPolicy] = {}
        for group in _grouped(policies):
            self.close()  # free the old buffers before new ones are allocated
            engine = self.make_engine(group)
            for policy in group:
                on_progress(f"prefill {policy.name}")
                (measured[policy.name],) = self.measure(
                    [PolicyRun(self, policy, engine)], rounds, with_ideal, on_progress
                )
                on_measured(measured[policy.name])
            engine = None
        return [measured[policy.name] for policy in policies]


def _grouped(policies: list[Policy]) -> list[list[Policy]]:
    """Return groups of policies that can share weights and buffers: they differ only in pools and sizes."""
    groups: dict[tuple, list[Policy]] = {}
    for policy in policies:
        groups.setdefault((policy.weights, policy.bits, policy.attending_tier, policy.hidden), []).append(policy)
    return list(groups.values())
