"""Measured speed of policies side by side: interleaved runs over the same prompts, with what the bound allows.

One ``Bench`` holds the weights; each policy has an engine of its own, or all share one. Prefill runs once a policy;
decoding is then repeated from the filled cache, so that rounds are short and can be interleaved: when the machine slows
down, every policy slows down.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import buffer_sizes, check_budget, memory_plan
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Budgets, Problem, problem_of
from flexhybrid.core.trace import TraceEvent, Window
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.profiling.cpu_use import CpuUse
from flexhybrid.runtime.session import Session
from flexhybrid.runtime.storage.weights import ANYWHERE, DiskPlace, Weights, WeightSlots
from sim.virtual_clock import RunSummary, summarize

ALONE_ROUNDS = 3  #: decode rounds without the link, of which the best is the ideal compute


@dataclass
class Measured:
    """One policy's figures. Windows leave out the first decode iteration: there is nothing to overlap it with."""

    policy: Policy
    tokens: list[list[int]]
    prefill_trace: list[TraceEvent]  #: of the one whole run
    traces: list[list[TraceEvent]]  #: of the decode rounds
    summaries: list[RunSummary]
    ideal_compute_s: float | None  #: the same steps without the link, over the same window
    others_cpu_share: list[float | None]  #: of each round: what other processes used of the cores

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
        """What the window moved from the host, at the link's full rate."""
        return statistics.median(Window(trace).moved_bytes("h2d") for trace in self.traces) / bytes_per_s

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


class Contender:
    """A policy with its wave, an engine, and its cache filled by a prefill."""

    def __init__(self, bench: Bench, policy: Policy, engine: Engine | None = None):
        self.bench, self.policy = bench, policy
        self.engine = engine or bench.make_engine([policy])
        weights = self.engine.weights
        self.wave: Wave = bench.admit(policy, weights)
        self.session = Session(self.engine, self.wave, bench.prompts)
        result = self.session.generate()
        self.tokens = result.tokens
        self.prefill_trace = result.trace

    def decode(self) -> tuple[list[TraceEvent], float | None]:
        """All decode iterations again, over the cache as the prefill left it; (trace, others' share of the cores)."""
        before = CpuUse.now()
        trace = self.session.decode()
        return trace, CpuUse.now().others_since(before)

    def compute_alone_s(self) -> float:
        """Wall time of the window's steps when nothing crosses the link; the best of a few runs."""
        self.engine.copies.enabled = False
        try:
            return min(summarize(self.decode()[0]).decode_s for _ in range(ALONE_ROUNDS))
        finally:
            self.engine.copies.enabled = True

    def measured(self, rounds: list[tuple[list[TraceEvent], float | None]], with_ideal: bool) -> Measured:
        """The record of these rounds; measures the ideal compute now, if asked."""
        traces = [trace for trace, _ in rounds]
        ideal = self.compute_alone_s() if with_ideal else None
        return Measured(
            self.policy, self.tokens, self.prefill_trace, traces, [summarize(trace) for trace in traces], ideal,
            [share for _, share in rounds],
        )  # fmt: skip


class Bench:
    """Runs policies side by side on the same prompts. Raises InputError when one is over the budgets.

    ``make_weights(policy)`` loads the weights; policies that place and pack them alike use the same ones. ``hardware``
    decides the split points of both(…), ``disk`` is where caches on a disk lie. ``close()``, or leaving a ``with``
    block, gives disk space back.
    """

    def __init__(
        self,
        make_weights: Callable[[Policy], Weights],
        prompts: list[list[int]],
        max_tokens: int,
        link_gb_per_s: float | None,
        budgets: Budgets,
        hardware: Hardware | None = None,
        disk: DiskPlace = ANYWHERE,
    ):
        self.prompts, self.link_gb_per_s, self.budgets = prompts, link_gb_per_s, budgets
        self.hardware, self.disk = hardware, disk
        lengths = np.array([len(prompt) for prompt in prompts])
        self.workload = Workload(lengths, np.full(len(prompts), max_tokens))
        self._make_weights = make_weights
        self._weights: dict[tuple, tuple[Weights, WeightSlots]] = {}
        self._engines: list[Engine] = []

    def _problem(self, weights: Weights) -> Problem:
        return problem_of(weights.shape, weights.bytes_per_element, self.hardware, weights.device.type)

    def admit(self, policy: Policy, weights: Weights) -> Wave:
        """All requests as one wave."""
        return admit(self._problem(weights), policy, self.workload)

    def close(self) -> None:
        """Give back what was made: weights and engines cannot be used any more."""
        for one in (*self._engines, *(weights for weights, _ in self._weights.values())):
            one.close()
        self._engines, self._weights = [], {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def weights_of(self, policy: Policy) -> tuple[Weights, WeightSlots]:
        """(weights, slots for their streamed layers) of a policy's placement."""
        key = (policy.weights, policy.bits.weights)
        if key not in self._weights:
            weights = self._make_weights(policy)
            self._weights[key] = (weights, weights.make_slots())
        return self._weights[key]

    def make_engine(self, policies: list[Policy]) -> Engine:
        """An engine whose buffers serve any of these policies, which share them (``_grouped``)."""
        weights, slots = self.weights_of(policies[0])
        sizes = None
        for policy in policies:
            needed = buffer_sizes(self.admit(policy, weights))
            sizes = needed if sizes is None else sizes.merge(needed)
        plan = memory_plan(self._problem(weights), policies[0], sizes)
        check_budget(plan, self.budgets, "policy " + ", ".join(policy.name for policy in policies))
        engine = Engine(weights, policies[0], sizes, self.link_gb_per_s, slots=slots, disk=self.disk)
        self._engines.append(engine)
        return engine

    def set_link(self, gb_per_s: float, contenders: list[Contender]) -> None:
        """Another pace for the same filled caches (CPU)."""
        self.link_gb_per_s = gb_per_s
        for contender in contenders:
            contender.engine.copies.set_rate(gb_per_s)

    def measure(
        self,
        contenders: list[Contender],
        rounds: int,
        with_ideal: Callable[[Policy], bool],
        on_progress: Callable[[str], None],
    ) -> list[Measured]:
        """``rounds`` interleaved rounds of decoding, then the ideal compute of those that ``with_ideal`` names."""
        kept: list[list] = [[] for _ in contenders]
        for _ in range(rounds):
            for contender, traces in zip(contenders, kept, strict=True):
                on_progress(f"decode {contender.policy.name}")
                traces.append(contender.decode())
        measured = []
        for contender, traces in zip(contenders, kept, strict=True):
            if with_ideal(contender.policy):
                on_progress(f"compute alone {contender.policy.name}")
            measured.append(contender.measured(traces, with_ideal(contender.policy)))
        return measured

    def measure_in_turn(
        self,
        policies: list[Policy],
        rounds: int,
        with_ideal: Callable[[Policy], bool],
        on_progress: Callable[[str], None],
    ) -> list[Measured]:
        """One policy after another, those that are alike in one set of buffers, and only one set of weights at a time:
        for pools too large to keep one for every policy. Results are in the order of ``policies``."""
        measured: dict[str, Measured] = {}
        for group in _grouped(policies):
            self.close()  # the old buffers go before the new ones come
            engine = self.make_engine(group)
            for policy in group:
                on_progress(f"prefill {policy.name}")
                contender = Contender(self, policy, engine)
                traces = []
                for _ in range(rounds):
                    on_progress(f"decode {policy.name}")
                    traces.append(contender.decode())
                if with_ideal(policy):
                    on_progress(f"compute alone {policy.name}")
                measured[policy.name] = contender.measured(traces, with_ideal(policy))
            engine = contender = None
        return [measured[policy.name] for policy in policies]


def _grouped(policies: list[Policy]) -> list[list[Policy]]:
    """Policies that can share weights and buffers: they place and pack alike, and differ in pools and sizes only."""
    groups: dict[tuple, list[Policy]] = {}
    for policy in policies:
        groups.setdefault((policy.weights, policy.bits, policy.attention, policy.hidden), []).append(policy)
    return list(groups.values())
