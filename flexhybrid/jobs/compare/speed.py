"""Measured speed of policies side by side: interleaved runs over the same prompts, and their ideals.

One ``Bench`` holds the weights; each policy has an engine of its own, or all share one. Prefill runs once a policy;
decoding is then repeated from the filled cache, so that rounds are short and can be interleaved: when the machine slows
down, every policy slows down.
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

LAST = -2  #: iteration that ends a window (``TraceWindow``): the last one's loads end early, as none follows
ALONE_ROUNDS = 3  #: decode rounds without the link, of which the best is the ideal compute


@dataclass
class MeasuredPolicy:
    """Figures of one policy. Windows leave out the first decode iteration, which overlaps with nothing, and the last
    (LAST)."""

    policy: Policy
    tokens: list[list[int]]
    prefill_trace: list[TraceEvent]  #: of the run from the prompts on
    traces: list[list[TraceEvent]]  #: of the decode rounds
    summaries: list[MeasuredSummary]
    ideal_compute_s: float | None  #: the same steps without the link, over the same window
    others_cpu_share: list[float | None]  #: of each round: share of the cores that other processes used

    @property
    def decode_tokens_per_s(self) -> list[float]:
        """One figure a round."""
        return [summary.decode_tokens_per_s for summary in self.summaries]

    @property
    def median_tokens_per_s(self) -> float:
        return statistics.median(self.decode_tokens_per_s)

    @property
    def median_round(self) -> int:
        """Index of the round nearest to the median."""
        return int(np.argmin(np.abs(np.array(self.decode_tokens_per_s) - self.median_tokens_per_s)))

    def ideal_link_s(self, bytes_per_s: float) -> float:
        """Seconds of the window's bytes from the host at the link's full rate; median over rounds."""
        return statistics.median(TraceWindow(trace, LAST).moved_bytes("h2d") for trace in self.traces) / bytes_per_s

    def overlap(self, bytes_per_s: float) -> float | None:
        """max(ideal link, ideal compute) / wall, median over rounds (design section 11)."""
        if self.ideal_compute_s is None:
            return None
        ideal = max(self.ideal_link_s(bytes_per_s), self.ideal_compute_s)
        return statistics.median(ideal / summary.decode_s for summary in self.summaries)

    def balance(self, bytes_per_s: float) -> float | None:
        """The smaller ideal over the larger: overlap is judged where this is at least 0.7."""
        if self.ideal_compute_s is None:
            return None
        low, high = sorted((self.ideal_link_s(bytes_per_s), self.ideal_compute_s))
        return low / high if high else None


class PolicyRun:
    """A policy with its wave, an engine, and its cache filled by a prefill."""

    def __init__(self, bench: Bench, policy: Policy, engine: Engine | None = None):
        self.bench, self.policy = bench, policy
        self.engine = engine or bench.make_engine([policy])
        self.wave = bench.admit(policy)
        self.session = Session(self.engine, self.wave, bench.prompts)
        result = self.session.generate()
        self.tokens = result.tokens
        self.prefill_trace = result.trace

    def decode(self) -> tuple[list[TraceEvent], float | None]:
        """Run all decode iterations over the cache as the prefill left it; return the trace, and the share of the cores
        that other processes used."""
        before = CpuUse.now()
        trace = self.session.decode()
        return trace, CpuUse.now().others_since(before)

    def compute_alone_s(self, rounds: int = ALONE_ROUNDS) -> float:
        """Return the wall time of the window's steps while nothing crosses the link; the best of some rounds."""
        with self.engine.without_copies():
            return min(summarize_measured(self.decode()[0], LAST).decode_s for _ in range(rounds))

    def measured(
        self, rounds: list[tuple[list[TraceEvent], float | None]], with_ideal: bool, on_progress: Callable[[str], None]
    ) -> MeasuredPolicy:
        """Return the record of these rounds; ``with_ideal`` measures the ideal compute now."""
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
    """Runs policies side by side on the same prompts. Raises InputError when one is over the budgets.

    ``make_weights(policy)`` loads the weights; policies that place and pack them alike use the same ones. ``problem``'s
    hardware decides the split points of both(…). ``close()``, or leaving a ``with`` block, gives disk space back.
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
        """Return a policy's run; its prompts are computed once, until ``close``."""
        if policy not in self._runs:
            self._runs[policy] = PolicyRun(self, policy)
        return self._runs[policy]

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def weights_of(self, policy: Policy) -> tuple[Weights, WeightSlots]:
        """Return the weights at a policy's placement, and slots for their streamed layers."""
        key = (policy.weights, policy.bits.weights)
        if key not in self._weights:
            weights = self._make_weights(policy)
            self._weights[key] = (weights, weights.make_slots())
        return self._weights[key]

    def make_engine(self, policies: list[Policy]) -> Engine:
        """Return an engine whose buffers serve any of these policies, which share them (``_grouped``)."""
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
        """Change the link's pace; caches stay filled (CPU)."""
        self.paced = replace(self.paced, link_gb_per_s=gb_per_s)
        for run in runs:
            if not isinstance(run.engine.copies, CpuCopies):
                raise TypeError("the link of a GPU has its own pace")
            run.engine.copies.set_rate(gb_per_s)

    def measure(
        self,
        runs: list[PolicyRun],
        rounds: int,
        with_ideal: Callable[[Policy], bool],
        on_progress: Callable[[str], None],
    ) -> list[MeasuredPolicy]:
        """Decode in ``rounds`` interleaved rounds, then measure the ideal compute where ``with_ideal(policy)``."""
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
        on_measured: Callable[[MeasuredPolicy], None] = lambda measured: None,
    ) -> list[MeasuredPolicy]:
        """Decode one policy after another, for pools too large to keep one for every policy: a single set of weights is
        held at a time, and policies of one group share a set of buffers. Results are in the order of ``policies``;
        ``on_measured`` takes each as soon as it is there."""
        measured: dict[str, MeasuredPolicy] = {}
        for group in _grouped(policies):
            self.close()  # the old buffers go before the new ones come
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
    """Return groups of policies that share weights and buffers: they differ in pools and sizes alone."""
    groups: dict[tuple, list[Policy]] = {}
    for policy in policies:
        groups.setdefault((policy.weights, policy.bits, policy.attending_tier, policy.hidden), []).append(policy)
    return list(groups.values())
