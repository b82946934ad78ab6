"""One run of one system on one machine: throughput, latency, memory, traffic and utilisation.

A batch that does not fit is cut into waves, one after the other, as large as fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.kinds import TIERS
from flexhybrid.core.memory import buffer_sizes, gib, memory_plan, total_bytes
from flexhybrid.core.plan import admit
from flexhybrid.core.policy import Policy
from flexhybrid.core.shape import ModelShape
from flexhybrid.core.stream import stream
from flexhybrid.core.workload import Workload
from sim.closed_form import TRAFFIC_OF, Candidates, predict
from sim.virtual_clock import run, summarize

CLOCKS = ("closed", "virtual")
LINKS = ("h2d", "d2h", "disk_read", "disk_write")
MOST_TASKS = 20_000_000  #: of a run on the virtual clock: a few minutes


@dataclass(frozen=True)
class Outcome:
    """What a run takes. Seconds, bytes, shares 0..1; tokens are generated tokens."""

    tokens_per_s: float  #: generated tokens / (prefill + decode)
    decode_tokens_per_s: float  #: tokens after each request's first / decode
    prefill_s: float
    decode_s: float
    peak_bytes: dict[str, int]  #: tier -> bytes
    traffic_bytes: dict[str, dict[str, float]]  #: link -> weights, kv, act, hidden -> bytes of the whole run
    busy: dict[str, float]  #: resource -> share of the decode (of the prefill without one)
    policy: Policy
    batch: int
    wave: int  #: requests at a time
    num_waves: int
    num_mini_batches: int  #: of a full wave
    clock: str

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def binding(self) -> str:
        """The busiest resource."""
        return max(self.busy, key=self.busy.get)

    def to_dict(self) -> dict:
        """Plain JSON."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "policy"}
        return {**plain, "total_s": self.total_s, "binding": self.binding, "policy": self.policy.to_dict()}


def budgets_of(hardware: Hardware) -> dict[str, float | None]:
    """Bytes of each tier; None where there is no limit. A machine without disk lines has no disk."""
    disk = hardware.disk_memory if "disk_read" in hardware.lines else 0
    return {"device": hardware.device_memory, "host": hardware.host_memory, "disk": disk}


def simulate(
    shape: ModelShape,
    hardware: Hardware,
    policy: Policy,
    batch: int,
    prompt_tokens: int,
    max_tokens: int,
    bytes_per_element: int = 2,
    clock: str = "closed",
    budgets: dict[str, float | None] | None = None,
) -> Outcome:
    """Run ``batch`` requests of one length. ``clock``: "closed" (milliseconds) or "virtual" (the executor's stream).

    ``budgets``: bytes per tier, None for no limit; by default the machine's. Raises InputError where not even one
    request fits, naming the tier, the largest part and what would do.
    """
    _check(clock, batch, prompt_tokens, max_tokens)
    budgets = budgets_of(hardware) if budgets is None else budgets
    wave = fitting_batch(shape, hardware, policy, batch, prompt_tokens, max_tokens, bytes_per_element, budgets)
    sizes = [wave] * (batch // wave) + ([batch % wave] if batch % wave else [])
    count = max(1, sizes.count(wave))
    results = [
        _one(shape, hardware, policy, size, prompt_tokens, max_tokens, bytes_per_element, clock)
        for size in dict.fromkeys(sizes)
    ]
    times = [count, 1][: len(results)]
    prefill, decode = (
        sum(n * r[key] for n, r in zip(times, results, strict=True)) for key in ("prefill_s", "decode_s")
    )
    span = [n * (r["decode_s"] if max_tokens > 1 else r["prefill_s"]) for n, r in zip(times, results, strict=True)]
    whole = max(sum(span), 1e-300)
    busy = {
        resource: sum(s * r["busy"].get(resource, 0.0) for s, r in zip(span, results, strict=True)) / whole
        for resource in dict.fromkeys(key for r in results for key in r["busy"])
    }
    traffic: dict[str, dict[str, float]] = {link: {} for link in LINKS}
    for n, result in zip(times, results, strict=True):
        for link, kinds in result["traffic_bytes"].items():
            for kind, moved in kinds.items():
                traffic[link][kind] = traffic[link].get(kind, 0.0) + n * moved
    return Outcome(
        tokens_per_s=batch * max_tokens / max(prefill + decode, 1e-300),
        decode_tokens_per_s=batch * (max_tokens - 1) / decode if decode > 0 else 0.0,
        prefill_s=prefill, decode_s=decode,
        peak_bytes={tier: int(max(r["peak_bytes"].get(tier, 0) for r in results)) for tier in TIERS},
        traffic_bytes=traffic, busy=busy, policy=policy, batch=batch, wave=wave, num_waves=len(sizes),
        num_mini_batches=int(results[0]["num_mini_batches"]), clock=clock,
    )  # fmt: skip


def _check(clock: str, batch: int, prompt_tokens: int, max_tokens: int) -> None:
    if clock not in CLOCKS:
        raise InputError(f"unknown clock {clock!r}; known: {', '.join(CLOCKS)}")
    for name, value in (("batch", batch), ("prompt_len", prompt_tokens), ("gen_len", max_tokens)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise InputError(f"{name} is {value!r}; it must be a whole number >= 1")


def fitting_batch(
    shape: ModelShape,
    hardware: Hardware,
    policy: Policy,
    batch: int,
    prompt_tokens: int,
    max_tokens: int,
    p: int,
    budgets: dict[str, float | None],
) -> int:
    """The most requests, up to ``batch`` and the policy's max_batch, that run together within the budgets."""
    most = min(batch, policy.max_batch or batch)
    sizes = np.arange(1, most + 1) if most <= 512 else np.unique(np.geomspace(1, most, 512).astype(int))
    peak = predict(shape, hardware, p, Candidates(policy, sizes, prompt_tokens, max_tokens), walk=False).peak_bytes
    fits = np.ones(len(sizes), dtype=bool)
    for tier, budget in budgets.items():
        if budget is not None:
            fits &= peak[tier] <= budget
    if fits.any():
        return int(sizes[np.flatnonzero(fits)[-1]])
    wave = admit(shape, policy, Workload.uniform(1, prompt_tokens, max_tokens), p, hardware=hardware)
    plan = memory_plan(shape, policy, p, buffer_sizes(wave), hardware.device)
    lacking = []
    for tier, needed in total_bytes(plan).items():
        budget = budgets.get(tier)
        if budget is not None and needed > budget:
            part = max(plan[tier], key=plan[tier].get)
            lacking.append(
                f"{tier} memory: one request needs {gib(needed)}, there are {gib(budget)} "
                f"({gib(needed - budget)} short; the largest part is {part} with {gib(plan[tier][part])})"
            )
    raise InputError(
        f"{policy.name} on {hardware.name}: {shape.name} with {prompt_tokens} + {max_tokens} tokens does not fit. "
        + "; ".join(lacking)
    )


def _one(shape, hardware, policy: Policy, batch: int, prompt_tokens: int, max_tokens: int, p: int, clock: str) -> dict:
    closed = predict(shape, hardware, p, Candidates(policy, batch, prompt_tokens, max_tokens)).row()
    if clock == "closed":
        return closed
    tasks = 14 * shape.num_layers * closed["num_mini_batches"] * max_tokens
    if tasks > MOST_TASKS:
        raise InputError(
            f"the virtual clock would walk some {tasks / 1e6:.0f} million tasks (limit {MOST_TASKS / 1e6:.0f}): "
            "use the closed form, fewer generated tokens or a smaller batch"
        )
    wave = admit(shape, policy, Workload.uniform(batch, prompt_tokens, max_tokens), p, hardware=hardware)
    summary = summarize(run(stream(wave), hardware))
    plan = total_bytes(memory_plan(shape, policy, p, buffer_sizes(wave), hardware.device))
    traffic = {link: _by_kind(by_verb) for link, by_verb in summary.link_bytes.items()}
    return {
        "prefill_s": summary.prefill_s, "decode_s": summary.decode_s, "busy": summary.busy, "peak_bytes": plan,
        "traffic_bytes": traffic, "num_mini_batches": len(wave.mini_batches),
    }  # fmt: skip


def _by_kind(by_verb: dict[str, float]) -> dict[str, float]:
    kinds: dict[str, float] = {}
    for verb, moved in by_verb.items():
        kind = TRAFFIC_OF[verb.split("_")[1]]
        kinds[kind] = kinds.get(kind, 0.0) + moved
    return kinds


def unlimited(hardware: Hardware) -> Hardware:
    """The same machine with a device that holds anything (the papers' Ideal)."""
    return replace(hardware, device_memory=None)


def mean_kv_bytes(shape: ModelShape, batch: int, prompt_tokens: int, max_tokens: int, p: int = 2) -> float:
    """Keys and values of a batch at the decode's mean context, all layers."""
    return shape.num_layers * batch * shape.kv_token_bytes(p) * (prompt_tokens + math.ceil((max_tokens - 1) / 2))
