"""Measured speed of policies side by side: interleaved runs over the same prompts, with what the bound allows.

One ``Bench`` holds the weights and one engine a policy. Prefill runs once a policy; decoding is then repeated from the
filled cache, so that rounds are short and can be interleaved: when the machine slows down, every policy slows down.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from flexhybrid.core.memory import buffer_sizes, check_budget, memory_plan
from flexhybrid.core.plan import Wave, admit, stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.trace import TraceEvent, iteration_ends
from flexhybrid.core.workload import Workload
from flexhybrid.runtime.engine import Engine
from flexhybrid.runtime.executor import Executor, SamplingPlan
from flexhybrid.runtime.weights import Weights
from sim.virtual_clock import RunSummary, summarize


@dataclass
class Measured:
    """One policy's figures. Windows leave out the first decode iteration: there is nothing to overlap it with."""

    policy: Policy
    tokens: list[list[int]]
    prefill_trace: list[TraceEvent]  #: of the one whole run
    traces: list[list[TraceEvent]]  #: of the decode rounds
    summaries: list[RunSummary]
    ideal_compute_s: float | None  #: the same steps without the link, over the same window

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
        return statistics.median(moved_in_window(trace, "h2d") for trace in self.traces) / bytes_per_s

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


def moved_in_window(trace: list[TraceEvent], resource: str) -> float:
    """Bytes that crossed a link between the end of the trace's first iteration and the end of its last.

    A transfer under way at the edge counts in part: loads run ahead of the iteration they are for, and counting a
    plan's bytes by iteration would credit the window with what moved before it began.
    """
    ends = iteration_ends(trace)
    begin, end = ends[0], ends[-1]
    moved = 0.0
    for task, start, stop in trace:
        if task.resource == resource and stop > begin and start < end:
            inside = (min(stop, end) - max(start, begin)) / (stop - start) if stop > start else 1.0
            moved += task.work.link_bytes * inside
    return moved


class Contender:
    """A policy with its wave, its engine and its cache.

    With an engine of its own the cache stays filled, and each round only decodes. Where pools are too large to keep one
    for every policy (a GPU's host memory), all contenders share ``bench.shared_engine`` and each round prefills first.
    """

    def __init__(self, bench: Bench, policy: Policy):
        weights = bench.weights
        self.policy = policy
        self.wave: Wave = admit(weights.shape, policy, bench.workload, weights.bytes_per_element)
        self.shared = bench.shared_engine is not None
        if self.shared:
            self.engine = bench.shared_engine
        else:
            self.engine = bench.make_engine([policy])
        self.sampling = SamplingPlan(0.0, 0, np.arange(bench.workload.num_requests))
        self.executor: Executor = self.engine.executor(self.wave, bench.prompts, self.sampling)
        result = self.engine.run(self.wave, bench.prompts, self.sampling, keep_trace=True, executor=self.executor)
        self.tokens = result.tokens
        self.prefill_trace = result.trace
        self.first_tokens = torch.tensor([answer[0] for answer in self.tokens])

    def decode(self, bench: Bench) -> list[TraceEvent]:
        """All decode iterations again, over the cache as the prefill left it."""
        if not self.shared:
            self.executor.last_tokens.copy_(self.first_tokens)
        tasks = stream(self.wave, first_iteration=0 if self.shared else 1)
        trace = self.engine.run(
            self.wave, bench.prompts, self.sampling, keep_trace=True, tasks=tasks, executor=self.executor
        ).trace
        return [event for event in trace if event.task.iteration]

    def compute_alone_s(self, bench: Bench) -> float:
        """Wall time of the window's steps when nothing crosses the link; the better of two runs."""
        self.engine.copies.enabled = False
        try:
            return min(summarize(self.decode(bench)).decode_s for _ in range(2))
        finally:
            self.engine.copies.enabled = True


class Bench:
    """Runs policies side by side on shared weights. Raises InputError when one is over the budgets."""

    def __init__(
        self,
        weights: Weights,
        prompts: list[list[int]],
        max_tokens: int,
        link_gb_per_s: float | None,
        budgets: dict[str, int | None],
    ):
        self.weights, self.prompts, self.link_gb_per_s, self.budgets = weights, prompts, link_gb_per_s, budgets
        self.slots = weights.make_slots()
        lengths = np.array([len(prompt) for prompt in prompts])
        self.workload = Workload(lengths, np.full(len(prompts), max_tokens))
        self.shared_engine: Engine | None = None

    def make_engine(self, policies: list[Policy]) -> Engine:
        """An engine whose buffers serve any of the policies. Raises InputError when they are over the budgets."""
        weights, sizes = self.weights, None
        for policy in policies:
            needed = buffer_sizes(admit(weights.shape, policy, self.workload, weights.bytes_per_element))
            sizes = needed if sizes is None else sizes.merge(needed)
        plan = memory_plan(weights.shape, policies[0], weights.bytes_per_element, sizes, weights.device.type)
        check_budget(plan, self.budgets, "policy " + ", ".join(policy.name for policy in policies))
        return Engine(weights, sizes, self.link_gb_per_s, slots=self.slots)

    def set_link(self, gb_per_s: float, contenders: list[Contender]) -> None:
        """Another pace for the same filled caches (CPU)."""
        self.link_gb_per_s = gb_per_s
        for contender in contenders:
            contender.engine.copies.set_rate(gb_per_s)

    def measure(
        self,
        contenders: list[Contender],
        rounds: int,
        with_ideal: Callable[[Policy], bool] = lambda policy: True,
        on_progress: Callable[[str], None] = lambda what: None,
    ) -> list[Measured]:
        """``rounds`` interleaved rounds of decoding, then the ideal compute of those that ``with_ideal`` names."""
        traces: list[list[list[TraceEvent]]] = [[] for _ in contenders]
        for _ in range(rounds):
            for contender, kept in zip(contenders, traces, strict=True):
                on_progress(f"decode {contender.policy.name}")
                kept.append(contender.decode(self))
        measured = []
        for contender, kept in zip(contenders, traces, strict=True):
            ideal = None
            if with_ideal(contender.policy):
                on_progress(f"compute alone {contender.policy.name}")
                ideal = contender.compute_alone_s(self)
            measured.append(
                Measured(
                    contender.policy, contender.tokens, contender.prefill_trace, kept,
                    [summarize(trace) for trace in kept], ideal,
                )
            )  # fmt: skip
        return measured


def others_cpu_share(seconds: float = 0.5) -> float | None:
    """Share of all cores that other processes use right now; None where /proc is not there. A run above 0.05 is
    marked as not idle."""
    try:
        before, own_before = _cpu_jiffies(), time.process_time()
        time.sleep(seconds)
        after, own_after = _cpu_jiffies(), time.process_time()
    except (OSError, ValueError, IndexError):
        return None
    total = sum(after) - sum(before)
    idle = (after[3] + after[4]) - (before[3] + before[4])
    if total <= 0:
        return None
    cores = os.cpu_count() or 1
    own_share = (own_after - own_before) / (seconds * cores)
    return max(0.0, (total - idle) / total - own_share)


def _cpu_jiffies() -> list[int]:
    with open("/proc/stat", encoding="ascii") as stat:
        return [int(field) for field in stat.readline().split()[1:9]]
