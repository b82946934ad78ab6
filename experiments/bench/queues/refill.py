"""Bench rows of a refilled batch against waves, whose requests run together until the last one ends.

Answers end by themselves, at lengths drawn from a log-normal distribution or at those of labels, far below their
limits. Weights pass a paced link once an iteration, so that what counts is how many iterations the queue takes. Waves
are timed by a sample: each is independent of the others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.bench.harness import Table, bench, seconds_of
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.wave import stored_layers
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.run.forecast import sorted_by_length
from flexhybrid.llm import LLM
from flexhybrid.requests import Generated
from flexhybrid.runtime.engine import RunControl
from flexhybrid.sampling_params import SamplingParams

MODEL = "experiments/checkpoints/opt-stdlib-2k"
LINK_GB_PER_S, NUM_REQUESTS, SAMPLED_WAVES = 0.4, 2_000, 2
LOG_NORMAL, LABELS = "log-normal answers", "labels of 1 to 8 tokens"
#: Answers, places, times as fast as waves. Of labels, 64 places end a dozen answers an iteration: the prompts of those
#: who join then take longer to compute than weights to come, on a queue and in waves alike.
CASES = ((LOG_NORMAL, 64, 3.0), (LABELS, 16, 1.5), (LABELS, 64, 1.5))
OVERLAP = 0.92
RUNNING = 0.9  #: least share of the batch's places in use in the middle half of the iterations
#: Iterations by which overlap is judged, timed in turn with the paced link and without: the first fill the batch, and a
#: queue of labels takes some 150.
WINDOW, ROUNDS = slice(40, 120), 3


@dataclass
class End:
    """Ends an answer after ``left`` tokens, in the place of a ``StopWatch``."""

    left: int

    def push(self, _token: int) -> str | None:
        self.left -= 1
        return "end" if self.left == 0 else None


def ending_after(llm: LLM, prompts: Sequence[list[int]], ends: np.ndarray) -> Callable[[int], tuple[Generated, Any]]:
    """Return what ``LLM.answer`` opens a request with: the answer to prompts[i] ends by itself after ends[i] tokens."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)

    def begin(index: int) -> tuple[Generated, Any]:
        generated, plan = llm.codec.open(prompts[index], params, 0)
        generated.watch = End(int(ends[index]))  # pyright: ignore[reportAttributeAccessIssue]
        return generated, plan

    return begin


@dataclass
class QueueCase:
    """A queue of requests, with the lengths at which their answers end."""

    workload: Workload
    ends: np.ndarray
    prompts: list[list[int]]
    tokens_by_iteration: list[int] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)  #: when each iteration ended

    @classmethod
    def of(cls, name: str, vocab: int, num_requests: int = NUM_REQUESTS) -> QueueCase:
        generator = np.random.default_rng(0)
        prompt_tokens = generator.integers(16, 65, num_requests)
        if name == LOG_NORMAL:
            ends = np.clip(np.exp(generator.normal(np.log(150), 0.9, num_requests)), 1, 1024).astype(np.int64)
            limits = np.full(num_requests, 1024)
        else:
            ends, limits = generator.integers(1, 9, num_requests), np.full(num_requests, 8)
        order = sorted_by_length(prompt_tokens, limits)
        prompts = [generator.integers(3, vocab, prompt_tokens[i]).tolist() for i in order]
        return cls(Workload(prompt_tokens[order], limits[order]), ends[order], prompts)

    def seconds(self, llm: LLM, requests: np.ndarray, joining: bool, most_iterations: int = 1 << 30) -> float:
        """Answer some of the requests, for at most ``most_iterations``; return the seconds."""
        self.tokens_by_iteration.clear()
        self.ends_s.clear()
        ends, prompts = self.ends[requests], [self.prompts[i] for i in requests]

        def completed(index: int, generated: Generated) -> None:
            assert len(generated.token_ids) == ends[index]

        def on_tokens(count: int) -> None:
            self.tokens_by_iteration.append(count)
            self.ends_s.append(time.perf_counter())

        hears = RunControl(on_tokens=on_tokens, should_stop=lambda: len(self.ends_s) >= most_iterations)
        begin = ending_after(llm, prompts, ends)
        return seconds_of(lambda: llm.answer(self.workload.select(requests), begin, completed, hears, joining=joining))


def streamed(at_a_time: int) -> Policy:
    """Return the policy of all cases: weights pass the link, the context stays, one mini-batch holds all requests."""
    tokens = at_a_time * (QueueCase.of(LOG_NORMAL, 10).workload.cached_tokens.max() + 16)
    kept: dict[str, float] = {"kv@device": 1.0}
    return Policy(
        "weights streamed", Placement(host=1), cache=kept, max_batch=at_a_time, max_mini_batch_tokens=int(tokens)
    )


@bench("refill")
def bench_refill(table: Table, num_requests: int = NUM_REQUESTS) -> None:
    """Add the rows of each case."""
    for name, at_a_time, bar in CASES:
        with LLM(MODEL, streamed(at_a_time), device="cpu", dtype="float32", link_gb_per_s=LINK_GB_PER_S) as llm:
            case = QueueCase.of(name, llm.shape.vocab, num_requests)
            case.seconds(llm, np.arange(at_a_time), joining=True)  # buffers and weights are there from now on
            refilled_s = case.seconds(llm, np.arange(num_requests), joining=True)
            rate = case.ends.sum() / refilled_s
            middle = case.tokens_by_iteration[len(case.tokens_by_iteration) // 4 : -len(case.tokens_by_iteration) // 4]
            waves = np.array_split(np.arange(num_requests), -(-num_requests // at_a_time))
            sampled = waves[:: max(1, len(waves) // SAMPLED_WAVES)][:SAMPLED_WAVES]
            waves_s = sum(case.seconds(llm, wave, joining=False) for wave in sampled)
            waves_rate = sum(case.ends[wave].sum() for wave in sampled) / waves_s
        where, running = f"refill, {name}, {at_a_time} places", float(np.mean(middle)) / at_a_time
        table.at_least(f"{where}: tokens/s against waves", rate / waves_rate, bar, "x")
        table.at_least(f"{where}: in use in the middle half", running, RUNNING, "")


@bench("refill")
def bench_queue_overlap(table: Table) -> None:
    """Add the overlap of each case (design section 11): the longer of the seconds that the link needs for the weights
    and of those that a window takes with nothing to wait for, over those that it takes."""
    for name, at_a_time, _ in CASES:
        window_s: dict[float | None, list[float]] = {LINK_GB_PER_S: [], None: []}
        with ExitStack() as stack:
            runs = {}
            for rate in window_s:
                llm = LLM(MODEL, streamed(at_a_time), device="cpu", dtype="float32", link_gb_per_s=rate)
                runs[rate] = stack.enter_context(llm), QueueCase.of(name, llm.shape.vocab)
            for _ in range(ROUNDS):
                for rate, (llm, case) in runs.items():
                    case.seconds(llm, np.arange(NUM_REQUESTS), joining=True, most_iterations=WINDOW.stop + 1)
                    window_s[rate].append(case.ends_s[WINDOW.stop] - case.ends_s[WINDOW.start])
            (placed,) = stored_layers(Problem(shape=llm.shape, dtype="float32", device="cpu"), streamed(at_a_time))
        num_bytes = placed.layout.total_bytes * llm.shape.num_layers * (WINDOW.stop - WINDOW.start)
        link_s = num_bytes / (LINK_GB_PER_S * 1e9)
        paced_s, compute_s = statistics.median(window_s[LINK_GB_PER_S]), statistics.median(window_s[None])
        balance = min(link_s, compute_s) / max(link_s, compute_s)
        overlap = max(link_s, compute_s) / paced_s
        conditions = {"link_s": link_s, "compute_s": compute_s, "wall_s": paced_s, "balance": balance}
        where = f"refill, {name}, {at_a_time} places: overlap"
        if compute_s <= paced_s:
            table.at_least(where, overlap, OVERLAP, "x", **conditions)
        else:
            tqdm.write(f"     {where} not judged: slower without the link than with it, the machine was busy")
        tqdm.write(f"     link {link_s:.2f} s, compute without the link {compute_s:.2f} s, both {paced_s:.2f} s")
