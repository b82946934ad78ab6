"""What a file of requests will take under a policy, before it is run."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from flexhybrid.core.errors import InputError
from flexhybrid.core.memory import gib, total_bytes
from flexhybrid.core.policy import Policy
from flexhybrid.core.workload import Workload
from flexhybrid.llm import LLM
from sim.closed_form import Candidates, predict

WINDOW = 1024  #: requests that are looked at for one wave, and so the most that one holds
PIECES = 6  #: of a decode whose answers end at different lengths
PRICED_WAVES = 16  #: of a longer file, waves at even steps stand for those between them


@dataclass(frozen=True)
class Price:
    """A wave's predicted seconds, and the busiest resource of its longest phase with the share that it is busy."""

    seconds: float
    binding: str
    busy: float


@dataclass(frozen=True)
class Forecast:
    """Predictions for requests that all use up their max_tokens; a run whose answers end earlier is faster."""

    seconds: float | None  #: None: nothing is known of the machine
    tokens: int  #: at most
    wave_requests: int  #: of the first wave
    memory: dict[str, int]  #: tier -> bytes of the first wave, whose requests are the longest
    layer_bytes: dict[str, int]  #: tier -> bytes of the layers' weights
    first_wave: Price | None  #: None: nothing is known of the machine


def forecast(llm: LLM, workload: Workload) -> Forecast:
    """Of requests in the order in which they will run, under the policy in use."""
    stride = -(-workload.num_requests // PRICED_WAVES)
    start, seconds, first, first_price = 0, 0.0, None, None
    while start < workload.num_requests:
        window = _slice(workload, start, start + WINDOW)
        count, plan = llm.first_wave(window)
        wave = _slice(window, 0, count)
        priced = price(llm, wave)
        if first is None:
            first, first_price = (count, plan), priced
        if priced is None:
            seconds = None
            break
        span = _slice(workload, start, start + max(count, stride))
        seconds += priced.seconds * int(span.cached_tokens.sum()) / int(wave.cached_tokens.sum())
        start += span.num_requests
    count, plan = first
    layers = {
        "device": plan["device"].get("resident weights", 0), "host": plan["host"].get("weights", 0),
        "disk": plan["disk"].get("weights", 0),
    }  # fmt: skip
    return Forecast(seconds, int(workload.max_tokens.sum()), count, total_bytes(plan), layers, first_price)


def _slice(workload: Workload, start: int, end: int) -> Workload:
    return Workload(workload.prompt_tokens[start:end], workload.max_tokens[start:end])


def price(llm: LLM, wave: Workload) -> Price | None:
    """The closed form of a wave under the policy in use; None where nothing is known of the machine.

    The closed form knows requests of one length. A wave whose answers end at different lengths is a prefill of all and
    a decode in pieces, each with as many requests as are left on average.
    """
    if llm.hardware is None:
        return None
    ends = np.quantile(wave.max_tokens, np.linspace(0, 1, PIECES + 1), method="higher")
    ends = np.unique(np.concatenate([[1], ends]))  # the prefill gives the first token
    starts, widths = ends[:-1], np.diff(ends)
    running = np.array([
        np.clip(wave.max_tokens - start, 0, width).sum() / width for start, width in zip(starts, widths, strict=True)
    ])  # fmt: skip
    prompt = round(float(wave.prompt_tokens.mean()))
    batch = np.array([wave.num_requests, *np.ceil(running)])
    try:
        found = predict(
            llm.shape, llm.hardware, llm.bytes_per_element,
            Candidates(llm.policy, batch, np.array([prompt, *(prompt + starts - 1)]), np.array([1, *(widths + 1)])),
        )  # fmt: skip
    except InputError:  # a machine without a line for one of the policy's verbs
        return None
    seconds = np.array([found.prefill_s[0], *found.decode_s[1:]])
    row = found.row(int(seconds.argmax()))
    return Price(float(seconds.sum()), row["binding"], row["busy"][row["binding"]])


def plan_lines(llm: LLM, found: Forecast, counts: str) -> list[str]:
    """The plan for people: five lines."""
    memory = []
    for tier, size in found.memory.items():
        if size:
            budget = llm.budgets.get(tier)
            memory.append(f"{tier} {gib(size)}" + (f" of {gib(budget)}" if budget else ""))
    if found.seconds is None:
        unknown = "is not profiled (--policy auto does that)"
        if llm.hardware is not None:
            unknown = "was profiled without some of the policy's tasks (a disk's: flexhybrid profile --disk DIR)"
        predicted, limit = f"nothing: this machine {unknown}", "not known"
    else:
        end = time.strftime("%a %H:%M", time.localtime(time.time() + found.seconds))
        predicted = f"{found.tokens / found.seconds:.1f} tokens/s, {duration(found.seconds)}: done by {end}"
        limit = f"{found.first_wave.binding}, busy {found.first_wave.busy:.0%} of its longest phase"
    return [
        f"policy     {describe(llm.policy)}",
        f"requests   {counts}, up to {found.tokens:,} tokens; {found.wave_requests} at a time",
        f"predicted  {predicted}",
        f"memory     {', '.join(memory)}",
        f"limited by {limit}",
    ]


def describe(policy: Policy) -> str:
    """A policy in a line: where weights and context lie, and how it runs."""

    def shares(places: dict[str, float]) -> str:
        return " + ".join(f"{share:.0%} {place}" for place, share in places.items() if share > 0)

    weights = shares({tier: getattr(policy.weights, tier) for tier in ("device", "host", "disk")})
    bits = "" if policy.bits.native else f", bits {policy.bits.weights}/{policy.bits.kv}/{policy.bits.act}"
    return (
        f"{policy.name}: weights {weights}; context {shares(dict(policy.cache))}; {policy.schedule}, mini-batches of "
        f"{policy.max_mini_batch_tokens} tokens{bits}"
    )


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def sorted_by_length(prompt_tokens: np.ndarray, max_tokens: np.ndarray) -> np.ndarray:
    """Places of the requests, those of alike lengths together so that batches stay full; the longest first, so that
    memory that is too small shows at once."""
    return np.lexsort((prompt_tokens, max_tokens))[::-1]
