"""Predicts the time and the memory of a file of requests under a policy."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from flexhybrid.core.context.cache_entries import TIERS, representation_of
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import total_bytes
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.task import Task
from flexhybrid.core.trace import TraceEvent, iteration_ends
from flexhybrid.core.units import gib
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Workload
from flexhybrid.llm import LLM, MOST_AT_A_TIME
from sim import virtual_clock

WINDOW = MOST_AT_A_TIME  #: requests that are looked at for one wave
PIECES = 6  #: of a decode whose answers end at different lengths
LEAST_WAVES, MOST_WAVES = 4, 16  #: of a longer file, waves at even steps stand for those between them
PRICED_TASKS = 50_000  #: that are walked for a forecast, where LEAST_WAVES need no more: a few seconds


@dataclass(frozen=True)
class WavePrice:
    """A wave's predicted seconds, and the busiest resource of its longest phase with the share that it is busy."""

    seconds: float
    binding: str
    busy: float
    num_tasks: int  #: that were walked for it


@dataclass(frozen=True)
class Forecast:
    """Predictions for requests that all use up their max_tokens; a run whose answers end earlier is faster."""

    seconds: float | None  #: None: nothing is known of the machine
    tokens: int  #: at most
    iterations: int  #: of the first request, whose answer is the longest
    at_a_time: int  #: requests that run together
    memory: dict[str, int]  #: tier -> bytes that they need
    layer_bytes: dict[str, int]  #: tier -> bytes of the layers' weights
    first_wave: WavePrice | None  #: None: nothing is known of the machine


def forecast(llm: LLM, workload: Workload) -> Forecast:
    """Predict requests, given in the order in which they will run, under the policy in use."""
    at_a_time, memory = llm.first_batch(workload)
    count, _ = llm.first_wave(workload.select(slice(WINDOW)))
    first_price = price(llm, workload.select(slice(count)))
    seconds = None if first_price is None else _total_seconds(llm, workload, first_price)
    layers = {tier: memory[tier].get("resident weights" if tier == "device" else "weights", 0) for tier in TIERS}
    return Forecast(
        seconds,
        tokens=int(workload.max_tokens.sum()),
        iterations=int(workload.max_tokens[0]),
        at_a_time=at_a_time,
        memory=total_bytes(memory),
        layer_bytes=layers,
        first_wave=first_price,
    )


def _total_seconds(llm: LLM, workload: Workload, first_price: WavePrice) -> float | None:
    """Return the seconds of all waves: waves at even steps stand for those between them. ``first_price``: of the first
    wave. None when a wave cannot be priced."""
    num_waves = max(LEAST_WAVES, min(MOST_WAVES, PRICED_TASKS // first_price.num_tasks))
    stride, start, seconds = -(-workload.num_requests // num_waves), 0, 0.0
    while start < workload.num_requests:
        window = workload.select(slice(start, start + WINDOW))
        count, _ = llm.first_wave(window)
        wave = window.select(slice(count))
        if (priced := first_price if start == 0 else price(llm, wave)) is None:
            return None
        span = workload.select(slice(start, start + max(count, stride)))
        seconds += priced.seconds * int(span.cached_tokens.sum()) / int(wave.cached_tokens.sum())
        start += span.num_requests
    return seconds


def price(llm: LLM, lengths: Workload) -> WavePrice | None:
    """Price a wave on the virtual clock, under the policy in use; None where nothing is known of the machine.

    The clock runs the tasks of the prefill, of the first decode step and of a few later steps, which stand for those
    between them: mini-batches are padded to their longest requests, and shrink as answers end.
    """
    if llm.hardware is None:
        return None
    wave = admit(llm.problem, llm.settled_policy, lengths)
    last = int(lengths.max_tokens.max()) - 1  # the prefill gives the first token
    hardware = llm.hardware.at_work(llm.settled_policy)
    try:
        trace = _walk(wave, hardware, 0)
        prefill_s, *step_s = np.diff(iteration_ends(trace), prepend=0.0)
        walks = {1: trace}
        for step in _later_steps(wave, max(2, min(PIECES, PRICED_TASKS // (2 * len(trace))))):
            walks[step] = _walk(wave, hardware, step - 1)
            step_s.append(np.diff(iteration_ends(walks[step]))[0])
    except InputError:  # a machine without a line for one of the policy's verbs
        return None
    decode_s = np.interp(np.arange(1, last + 1), list(walks), step_s).sum() if last else 0.0
    slowest = list(walks)[int(np.argmax(step_s))] if decode_s > prefill_s else 1
    prefill = [event for event in trace if event.task.iteration == 0]
    summary = virtual_clock.summarize(walks[slowest] if decode_s > prefill_s else prefill)
    num_tasks = sum(map(len, walks.values()))
    return WavePrice(float(prefill_s + decode_s), summary.binding, summary.busy[summary.binding], num_tasks)


def _walk(wave: Wave, hardware: Hardware, iteration: int) -> list[TraceEvent]:
    """Return the virtual clock's trace of an iteration and the next one, whose end does not depend on how it began."""

    def both(task: Task) -> bool:
        return task.iteration <= iteration + 1 or task.verb != "finish"  # the next one's loads begin before their end

    return virtual_clock.run(takewhile(both, stream(wave, first_iteration=iteration)), hardware)


def _later_steps(wave: Wave, pieces: int) -> list[int]:
    """Return the decode steps after the first that stand for the others: quantiles of the ends of answers and of the
    ends of mini-batches, and the steps after those at which many mini-batches end. The last step is left out: nothing
    is loaded during it for a next one."""
    max_tokens = wave.workload.max_tokens
    last = np.array([max_tokens[members].max() for members in wave.mini_batches]) - 1  # steps of the mini-batches
    shares = np.linspace(0, 1, pieces + 1)
    answers, batches = (np.unique(np.quantile(of, shares, method="higher")) for of in (max_tokens - 1, last))
    behind = [step + 1 for step in batches if 2 * pieces * (last == step).sum() >= len(last)]
    return sorted({min(int(step), int(last.max()) - 1) for step in (*answers, *batches, *behind)} - {-1, 0, 1})


def plan_lines(llm: LLM, plan: Forecast, counts: str, searched: bool) -> list[str]:
    """Return five lines of text; without a profile the reason stands in the place of speed and limit. ``searched``: the
    policy is the best that a search found here, which weighs mixes as well."""
    policy = llm.settled_policy
    plain = searched and set(map(representation_of, policy.cache_entries)) == {"kv"}
    memory = []
    for tier, size in plan.memory.items():
        if size:
            budget = llm.problem.budgets.of(tier)
            memory.append(f"{tier} {gib(size)}" + (f" of {gib(budget)}" if budget else ""))
    if plan.seconds is None or plan.first_wave is None:
        pace = f" at {llm.paced.link_gb_per_s:g} GB/s" if llm.paced.link_gb_per_s else ""
        unknown = f"is not profiled for this model{pace} (--policy auto does that)"
        if llm.hardware is not None:
            unknown = "was profiled without some of the policy's tasks (a disk's: flexhybrid profile --disk DIR)"
        predicted, limit = f"no speed: this machine {unknown}", []
    else:
        end = time.strftime("%a %H:%M", time.localtime(time.time() + plan.seconds))
        predicted = f"{plan.tokens / plan.seconds:.1f} tokens/s, {duration(plan.seconds)}: done by {end}"
        limit = [f"limited by {plan.first_wave.binding}, busy {plan.first_wave.busy:.0%} of its longest phase"]
    note = "; a mix with recomputed context would not be faster" if plain else ""
    return [
        f"policy     {describe(policy)}; in {llm.problem.dtype}{note}",
        f"requests   {counts}, at most {plan.tokens:,} tokens of answers in all; {plan.at_a_time} at a time",
        f"predicted  {predicted}",
        f"memory     {', '.join(memory)}",
        *limit,
    ]


def describe(policy: Policy) -> str:
    """Return a policy in a line: where weights and context lie, and how it runs."""

    def shares(places: Mapping[str, float]) -> str:
        return " + ".join(f"{share:.0%} {place}" for place, share in places.items() if share > 0)

    weights = shares({tier: getattr(policy.weights, tier) for tier in TIERS})
    bits = "" if policy.bits.native else f", bits {policy.bits.weights}/{policy.bits.kv}/{policy.bits.act}"
    return (
        f"{policy.name}: weights {weights}; context {shares(dict(policy.cache))}; {policy.schedule}, mini-batches of "
        f"{policy.max_mini_batch_tokens} tokens{bits}"
    )


def duration(seconds: float) -> str:
    """Return seconds as text, in s, min or h."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def sorted_by_length(prompt_tokens: np.ndarray, max_tokens: np.ndarray) -> np.ndarray:
    """Return the indices of the requests by length, so that batches stay full; the longest first, so that too little
    memory shows at once."""
    return np.lexsort((prompt_tokens, max_tokens))[::-1]
