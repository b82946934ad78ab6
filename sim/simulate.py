"""Simulate a run of one policy on one machine: throughput, latency, memory, traffic and utilization.

A batch that does not fit runs in consecutive waves, each of the largest size that fits. For both clocks, the array
clock's memory formulas find this size.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flexhybrid.core.admission import wave_plan
from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.context.split import recomputed_tokens
from flexhybrid.core.errors import InputError, check, is_integer
from flexhybrid.core.hardware import LAUNCHER, LINKS
from flexhybrid.core.memory import kept_shares, memory_plan, total_bytes
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.units import gib
from flexhybrid.core.verbs import VERBS
from flexhybrid.core.wave import admit, check_planned
from flexhybrid.core.workload import Workload
from sim.array_clock import predict
from sim.candidate_memory import peak_bytes
from sim.candidates import Candidates
from sim.cost import hardware_of, hardware_of_wave
from sim.virtual_clock import BusyResources, run, summarize

CLOCKS = ("closed", "virtual")
PHASES_S = ("prefill_s", "decode_s")
TASKS_PER_POSITION = 14  #: rough number of tasks of a mini-batch in a layer
MOST_TASKS = 20_000_000  #: limit of a run on the virtual clock, which then takes a few minutes

#: (requests, prompt tokens, generated tokens) of a workload of equal requests
Lengths = tuple[int, int, int]


@dataclass(frozen=True)
class SimulatedRun(BusyResources):
    """Result of a simulated run in seconds, bytes and shares 0..1."""

    tokens_per_s: float  #: generated tokens / (prefill_s + decode_s)
    decode_tokens_per_s: float  #: generated tokens after each request's first one / decode_s
    prefill_s: float
    decode_s: float
    peak_bytes: dict[str, int]  #: tier -> bytes
    traffic_bytes: dict[str, dict[str, float]]  #: link -> cargo (weights, kv, act, hidden) -> bytes of the whole run
    busy: dict[str, float]  #: resource -> busy share of the decode (of the prefill if there is no decode)
    policy: Policy
    batch: int  #: requests of the run
    wave: int  #: requests that run together
    num_waves: int
    num_mini_batches: int  #: in a full wave
    clock: str  #: one of CLOCKS
    #: both(…) entry -> tokens of each request that the first and the last decode step recompute
    recomputed_tokens: dict[str, list[int]]
    prompt_tokens: int  #: tokens of each request's prompt, the limit of KVPR's eq. 11 on recomputed tokens
    ttft_s: float  #: time to first token in the first wave
    tpot_s: float  #: time between two tokens of a request; 0 without a decode
    kept_weights: dict[str, float]  #: tier -> actual share of the layers' bytes; the policy has the requested share
    limited_by: str = ""  #: why no more requests run together; "" if all run together

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s

    def to_dict(self) -> dict:
        """Return a dict that can be written as JSON."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "policy"}
        plain |= {"total_s": self.total_s, "binding": self.binding}
        return {**plain, "policy": self.policy.to_dict(), "lossless": self.policy.lossless}


_WaveRun = dict[str, Any]  #: one wave on either clock: fields of ``Prediction``, as ``Prediction.row`` has them


def simulate(
    problem: Problem, policy: Policy, batch: int, prompt_tokens: int, max_tokens: int, clock: str = "closed"
) -> SimulatedRun:
    """Simulate ``batch`` requests of one length.

    ``clock``: "closed" (the array clock, which takes milliseconds) or "virtual" (the executor's stream of tasks). Raise
    InputError for another clock, for a length below 1, or if no request fits ``problem.effective_budgets``.
    """
    if clock not in CLOCKS:
        raise InputError(f"unknown clock {clock!r}; known: {', '.join(CLOCKS)}")
    lengths = batch, prompt_tokens, max_tokens
    closed = simulate_many(problem, policy, (lengths,))[0]
    if isinstance(closed, InputError):
        raise closed
    if clock == "closed":
        return closed
    counts = {closed.wave: batch // closed.wave}
    if batch % closed.wave:
        counts[batch % closed.wave] = 1
    waves = [(_run_virtually(problem, policy, (size, *lengths[1:])), count) for size, count in counts.items()]
    return _in_turn(problem, policy, lengths, closed.wave, waves, clock)


def simulate_many(problem: Problem, policy: Policy, lengths: Sequence[Lengths]) -> list[SimulatedRun | InputError]:
    """Simulate one policy on many workloads at once, on the array clock. If no request of a workload fits, its result
    is the InputError."""
    for workload in lengths:
        for name, value in zip(("batch", "prompt_len", "gen_len"), workload, strict=True):
            check(name, value, is_integer(value) and value >= 1, "a whole number >= 1")
    check_planned(policy, problem.shape)
    batch, prompt, generated = np.array(lengths, dtype=np.int64).reshape(-1, 3).T

    def fits(sizes: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        candidates = Candidates(policy, sizes[chosen], prompt[chosen], generated[chosen])
        return problem.effective_budgets.hold(peak_bytes(problem, candidates))

    wave = _largest_fitting(np.minimum(batch, policy.max_batch or batch), fits)
    full_waves, remainder = np.divmod(batch, np.maximum(wave, 1))
    waves_of: list[list[tuple[_WaveRun, int]]] = [[] for _ in lengths]
    for sizes, counts in ((wave, full_waves), (np.where(wave > 0, remainder, 0), np.ones_like(batch))):
        chosen = np.flatnonzero(sizes)
        if len(chosen):
            prediction = predict(problem, Candidates(policy, sizes[chosen], prompt[chosen], generated[chosen]))
            for place, index in enumerate(chosen):
                waves_of[index].append((prediction.row(place), int(counts[index])))
    results: list[SimulatedRun | InputError] = []
    for workload, size, waves in zip(lengths, wave, waves_of, strict=True):
        run_of = _in_turn(problem, policy, workload, int(size), waves, "closed") if waves else None
        results.append(run_of or _too_large(problem, policy, workload))
    return results


def _largest_fitting(most: np.ndarray, fits: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the largest sizes up to ``most`` that fit, [workloads]; 0 if size 1 does not fit. ``fits(sizes, chosen)``:
    whether ``sizes[chosen]`` fit the workloads with these indices; it must be monotonic."""
    low, high = np.zeros_like(most), most + 1  # low fits or is 0, high is too large
    while len(between := np.flatnonzero(high - low > 1)):
        middle = np.where(high > most, most, (low + high) // 2)
        inside = fits(middle, between)
        low[between[inside]], high[between[~inside]] = middle[between[inside]], middle[between[~inside]]
    return low


def _in_turn(
    problem: Problem, policy: Policy, lengths: Lengths, wave: int, waves: list[tuple[_WaveRun, int]], clock: str
) -> SimulatedRun:
    """Return the result of consecutive waves: (one wave's run, number of such waves)."""
    batch, prompt, max_tokens = map(int, lengths)
    num_mini_batches, last = waves[0][0]["num_mini_batches"], prompt + max_tokens - 2
    prefill_s, decode_s = (sum(count * row[phase] for row, count in waves) for phase in PHASES_S)
    spans = [count * row[PHASES_S[max_tokens > 1]] for row, count in waves]
    span_s = max(sum(spans), 1e-300)
    busy = {
        resource: sum(span * row["busy"].get(resource, 0.0) for span, (row, _) in zip(spans, waves, strict=True))
        / span_s
        for resource in dict.fromkeys(resource for row, _ in waves for resource in row["busy"])
    }
    traffic: dict[str, dict[str, float]] = {link: {} for link in LINKS}
    for row, count in waves:
        for link, by_cargo in row["traffic_bytes"].items():
            for cargo, num_bytes in by_cargo.items():
                if num_bytes:
                    traffic[link][cargo] = traffic[link].get(cargo, 0.0) + count * num_bytes
    recomputed = recomputed_tokens(problem, policy, wave, num_mini_batches, prompt, last) if max_tokens > 1 else {}
    return SimulatedRun(
        tokens_per_s=batch * max_tokens / max(prefill_s + decode_s, 1e-300),
        decode_tokens_per_s=batch * (max_tokens - 1) / decode_s if decode_s > 0 else 0.0,
        prefill_s=prefill_s,
        decode_s=decode_s,
        peak_bytes={tier: int(max(row["peak_bytes"].get(tier, 0) for row, _ in waves)) for tier in TIERS},
        traffic_bytes=traffic,
        busy=busy,
        policy=policy,
        batch=batch,
        wave=wave,
        num_waves=sum(count for _, count in waves),
        num_mini_batches=num_mini_batches,
        clock=clock,
        recomputed_tokens=recomputed,
        prompt_tokens=prompt,
        ttft_s=waves[0][0]["prefill_s"],
        tpot_s=waves[0][0]["decode_s"] / max(1, max_tokens - 1),
        kept_weights=kept_shares(problem, policy),
        limited_by=_limit(problem, policy, (wave + 1, prompt, max_tokens)) if wave < batch else "",
    )


def _limit(problem: Problem, policy: Policy, lengths: Lengths) -> str:
    """Return in words what ``lengths`` would exceed: the policy's max_batch, or the budgets of tiers."""
    if policy.max_batch and lengths[0] > policy.max_batch:
        return f"max_batch {policy.max_batch} of the policy"
    needed = {tier: float(peak[0]) for tier, peak in peak_bytes(problem, Candidates(policy, *lengths)).items()}
    return " and ".join(
        f"{tier} memory: {lengths[0]} would take {gib(needed[tier])} of {gib(size)}"
        for tier, size in problem.effective_budgets.limits.items()
        if needed[tier] > size
    )


def _too_large(problem: Problem, policy: Policy, lengths: Lengths) -> InputError:
    """Return an InputError for a workload of which no request fits. It names each tier that is too small, the shortage
    and the largest part."""
    _, prompt_tokens, max_tokens = map(int, lengths)
    plan = wave_plan(problem, policy, Workload.uniform(1, prompt_tokens, max_tokens))
    shortages = []
    for tier, needed in total_bytes(plan).items():
        budget = problem.effective_budgets.of(tier)
        if budget is not None and needed > budget:
            part = max(plan[tier], key=lambda part, sizes=plan[tier]: sizes[part])
            shortages.append(
                f"{tier} memory: one request needs {gib(needed)}, there are {gib(budget)} "
                f"({gib(needed - budget)} short; the largest part is {part} with {gib(plan[tier][part])})"
            )
    if not hardware_of(problem).has_disk and any(shortage.startswith("disk") for shortage in shortages):
        shortages.append("this machine has no disk: --host, or --disk-memory and --disk-gb-per-s, give it one")
    return InputError(
        f"{policy.name} on {hardware_of(problem).name}: {problem.shape.name} with {prompt_tokens} + {max_tokens} "
        "tokens does not fit. " + "; ".join(shortages)
    )


def _run_virtually(problem: Problem, policy: Policy, lengths: Lengths) -> _WaveRun:
    """Run one wave on the virtual clock."""
    wave = admit(problem, policy, Workload.uniform(*lengths))
    tasks = TASKS_PER_POSITION * problem.shape.num_layers * len(wave.mini_batches) * lengths[-1]
    if tasks > MOST_TASKS:
        raise InputError(
            f"the virtual clock would walk some {tasks / 1e6:.0f} million tasks (limit {MOST_TASKS / 1e6:.0f}): "
            "use the closed form, fewer generated tokens or a smaller batch"
        )
    hardware = hardware_of_wave(wave)
    trace = run(stream(wave), hardware)
    summary = summarize(trace)
    traffic: dict[str, Counter[str]] = {link: Counter() for link in LINKS}
    for link, by_verb in summary.link_bytes.items():
        for verb, num_bytes in by_verb.items():
            traffic[link][VERBS[verb].cargo] += num_bytes
    launching = {LAUNCHER: len(trace) * hardware.launch_s / summary.total_s} if hardware.launch_s else {}
    return {
        **asdict(summary),
        "busy": summary.busy | launching,
        "peak_bytes": total_bytes(memory_plan(problem, policy, buffer_sizes(wave))),
        "traffic_bytes": traffic,
        "num_mini_batches": len(wave.mini_batches),
    }
