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
from sim.closed_form import candidates_of, predict

WINDOW = 1024  #: requests that are looked at for one wave, and so the most that one holds
PRICED_WAVES = 16  #: of a longer file, waves at even steps stand for those between them


@dataclass(frozen=True)
class Forecast:
    """Predictions for requests that all use up their max_tokens; a run whose answers end earlier is faster."""

    seconds: float | None  #: None: nothing is known of the machine
    tokens: int  #: at most
    wave_requests: int  #: of the first wave
    memory: dict[str, int]  #: tier -> bytes of the first wave, whose requests are the longest
    layer_bytes: dict[str, int]  #: tier -> bytes of the layers' weights
    binding: str | None  #: the busiest resource of the first wave
    busy: float | None  #: its share


def forecast(llm: LLM, workload: Workload) -> Forecast:
    """Of requests in the order in which they will run, under the policy in use."""
    stride = -(-workload.num_requests // PRICED_WAVES)
    start, seconds, first, row = 0, 0.0, None, None
    while start < workload.num_requests:
        window = _slice(workload, start, start + WINDOW)
        count, plan = llm.first_wave(window)
        wave = _slice(window, 0, count)
        priced = _price(llm, wave)
        if first is None:
            first, row = (count, plan), priced
        if priced is None:
            seconds = None
            break
        span = _slice(workload, start, start + max(count, stride))
        seconds += priced["total_s"] * int(span.cached_tokens.sum()) / int(wave.cached_tokens.sum())
        start += span.num_requests
    busy = row and row["busy"][row["binding"]]
    count, plan = first
    layers = {
        "device": plan["device"].get("resident weights", 0), "host": plan["host"].get("weights", 0),
        "disk": plan["disk"].get("weights", 0),
    }  # fmt: skip
    return Forecast(
        seconds, int(workload.max_tokens.sum()), count, total_bytes(plan), layers, row and row["binding"], busy
    )


def _slice(workload: Workload, start: int, end: int) -> Workload:
    return Workload(workload.prompt_tokens[start:end], workload.max_tokens[start:end])


def _price(llm: LLM, wave: Workload) -> dict | None:
    if llm.hardware is None:
        return None
    try:
        return predict(llm.shape, llm.hardware, llm.bytes_per_element, candidates_of(llm.policy, wave)).row()
    except InputError:  # a machine without a line for one of the policy's verbs
        return None


def plan_lines(llm: LLM, found: Forecast, counts: str) -> list[str]:
    """The plan for people: five lines."""
    memory = []
    for tier, size in found.memory.items():
        if size:
            budget = llm.budgets.get(tier)
            memory.append(f"{tier} {gib(size)}" + (f" of {gib(budget)}" if budget else ""))
    if found.seconds is None:
        predicted, limit = "nothing: this machine is not profiled (--policy auto does)", "not known"
    else:
        end = time.strftime("%a %H:%M", time.localtime(time.time() + found.seconds))
        predicted = f"{found.tokens / found.seconds:.1f} tokens/s, {duration(found.seconds)}: done by {end}"
        limit = f"{found.binding}, busy {found.busy:.0%} of the decode"
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
