"""One run of one system on one machine: throughput, latency, memory, traffic and utilisation.

A batch that does not fit is cut into waves, one after the other, as large as fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexhybrid.core.context.cache_entries import TIERS
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import LINKS, Hardware
from flexhybrid.core.memory import buffer_sizes, memory_plan, total_bytes
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import problem_of
from flexhybrid.core.units import gib
from flexhybrid.core.verbs import VERBS
from flexhybrid.core.wave import admit
from flexhybrid.core.waves import wave_plan
from flexhybrid.core.workload import Workload
from sim.array_clock import predict
from sim.candidates import Candidates
from sim.virtual_clock import run, summarize

CLOCKS = ("closed", "virtual")
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
    disk = hardware.disk_memory if hardware.has_disk else 0
    return {"device": hardware.usable_memory("device"), "host": hardware.usable_memory("host"), "disk": disk}


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
    if clock not in CLOCKS:
        raise InputError(f"unknown clock {clock!r}; known: {', '.join(CLOCKS)}")
    lengths = ((batch, prompt_tokens, max_tokens),)
    one = simulate_many(shape, hardware, policy, lengths, bytes_per_element, budgets)[0]
    if isinstance(one, InputError):
        raise one
    if clock == "closed":
        return one
    sizes = _waves(batch, one.wave)
    runs = {size: _walk(shape, hardware, policy, size, prompt_tokens, max_tokens, bytes_per_element) for size in sizes}
    return _outcome(policy, batch, max_tokens, one.wave, [(runs[size], count) for size, count in sizes.items()], clock)


def simulate_many(
    shape: ModelShape,
    hardware: Hardware,
    policy: Policy,
    lengths: Sequence[tuple[int, int, int]],
    bytes_per_element: int = 2,
    budgets: dict[str, float | None] | None = None,
) -> list[Outcome | InputError]:
    """One policy on many workloads (batch, prompt tokens, generated tokens), by the closed form, all at once.

    A workload of which not one request fits has the InputError in its place.
    """
    for batch, prompt, generated in lengths:
        _check(batch, prompt, generated)
    budgets = budgets_of(hardware) if budgets is None else budgets
    batch, prompt, generated = np.array(lengths, dtype=np.int64).reshape(-1, 3).T

    def run_of(sizes, chosen, walk: bool = True):
        some = Candidates(policy, sizes[chosen], prompt[chosen], generated[chosen])
        return predict(shape, hardware, bytes_per_element, some, walk=walk)

    wave = _largest_waves(batch, policy, budgets, run_of)
    results: list[Outcome | InputError | None] = [None] * len(batch)
    for index in np.flatnonzero(wave == 0):
        what = policy, int(prompt[index]), int(generated[index]), bytes_per_element, budgets
        results[index] = _does_not_fit(shape, hardware, *what)
    runs: dict[int, list] = {index: [] for index in np.flatnonzero(wave)}
    rest = np.where(wave > 0, batch % np.maximum(wave, 1), 0)
    for sizes, counts in ((wave, batch // np.maximum(wave, 1)), (rest, np.ones_like(batch))):
        chosen = np.flatnonzero(sizes)
        if len(chosen):
            prediction = run_of(sizes, chosen)
            for place, index in enumerate(chosen):
                runs[index].append((prediction.row(place), int(counts[index])))
    for index, parts in runs.items():
        results[index] = _outcome(policy, int(batch[index]), int(generated[index]), int(wave[index]), parts, "closed")
    return results


def _waves(batch: int, wave: int) -> dict[int, int]:
    """Requests at a time -> how often."""
    sizes = {wave: batch // wave}
    if batch % wave:
        sizes[batch % wave] = 1
    return sizes


def _outcome(
    policy: Policy, batch: int, max_tokens: int, wave: int, parts: list[tuple[dict, int]], clock: str
) -> Outcome:
    """Waves one after the other."""
    prefill, decode = (sum(n * r[key] for r, n in parts) for key in ("prefill_s", "decode_s"))
    spans = [n * (r["decode_s"] if max_tokens > 1 else r["prefill_s"]) for r, n in parts]
    whole = max(sum(spans), 1e-300)
    busy = {
        resource: sum(span * r["busy"].get(resource, 0.0) for span, (r, _) in zip(spans, parts, strict=True)) / whole
        for resource in dict.fromkeys(key for r, _ in parts for key in r["busy"])
    }
    traffic: dict[str, dict[str, float]] = {link: {} for link in LINKS}
    for result, n in parts:
        for link, kinds in result["traffic_bytes"].items():
            for kind, moved in kinds.items():
                if moved:
                    traffic[link][kind] = traffic[link].get(kind, 0.0) + n * moved
    return Outcome(
        tokens_per_s=batch * max_tokens / max(prefill + decode, 1e-300),
        decode_tokens_per_s=batch * (max_tokens - 1) / decode if decode > 0 else 0.0,
        prefill_s=prefill, decode_s=decode,
        peak_bytes={tier: int(max(r["peak_bytes"].get(tier, 0) for r, _ in parts)) for tier in TIERS},
        traffic_bytes=traffic, busy=busy, policy=policy, batch=batch, wave=wave,
        num_waves=sum(n for _, n in parts), num_mini_batches=int(parts[0][0]["num_mini_batches"]), clock=clock,
    )  # fmt: skip


def _check(batch: int, prompt_tokens: int, max_tokens: int) -> None:
    for name, value in (("batch", batch), ("prompt_len", prompt_tokens), ("gen_len", max_tokens)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise InputError(f"{name} is {value!r}; it must be a whole number >= 1")


def _largest_waves(batch, policy: Policy, budgets: dict[str, float | None], run_of) -> np.ndarray:
    """The most requests of each workload that run together within the budgets; 0 where not one does."""

    def fits(sizes, chosen) -> np.ndarray:
        peak = run_of(sizes, chosen, walk=False).peak_bytes
        inside = np.ones(len(chosen), dtype=bool)
        for tier, budget in budgets.items():
            if budget is not None:
                inside &= peak[tier] <= budget
        return inside

    most = np.minimum(batch, policy.max_batch or batch)
    everyone = np.arange(len(batch))
    low = np.where(fits(most, everyone), most, 0)
    open_ = np.flatnonzero(low == 0)
    if len(open_):
        one = np.ones_like(batch)
        low[open_[fits(one, open_)]] = 1
    high = most.copy()  # low fits, or is 0; high does not, or is low
    while len(open_ := np.flatnonzero((low > 0) & (high - low > 1))):
        middle = (low + high) // 2
        inside = fits(middle, open_)
        low[open_[inside]], high[open_[~inside]] = middle[open_[inside]], middle[open_[~inside]]
    return low


def _does_not_fit(shape, hardware, policy: Policy, prompt_tokens: int, max_tokens: int, p: int, budgets) -> InputError:
    plan = wave_plan(problem_of(shape, p, hardware), policy, Workload.uniform(1, prompt_tokens, max_tokens))
    lacking = []
    for tier, needed in total_bytes(plan).items():
        budget = budgets.get(tier)
        if budget is not None and needed > budget:
            part = max(plan[tier], key=plan[tier].get)
            lacking.append(
                f"{tier} memory: one request needs {gib(needed)}, there are {gib(budget)} "
                f"({gib(needed - budget)} short; the largest part is {part} with {gib(plan[tier][part])})"
            )
    return InputError(
        f"{policy.name} on {hardware.name}: {shape.name} with {prompt_tokens} + {max_tokens} tokens does not fit. "
        + "; ".join(lacking)
    )


def _walk(shape, hardware, policy: Policy, batch: int, prompt_tokens: int, max_tokens: int, p: int) -> dict:
    """One wave on the virtual clock."""
    problem = problem_of(shape, p, hardware)
    wave = admit(problem, policy, Workload.uniform(batch, prompt_tokens, max_tokens))
    tasks = 14 * shape.num_layers * len(wave.mini_batches) * max_tokens
    if tasks > MOST_TASKS:
        raise InputError(
            f"the virtual clock would walk some {tasks / 1e6:.0f} million tasks (limit {MOST_TASKS / 1e6:.0f}): "
            "use the closed form, fewer generated tokens or a smaller batch"
        )
    summary = summarize(run(stream(wave), hardware))
    return {
        "prefill_s": summary.prefill_s, "decode_s": summary.decode_s, "busy": summary.busy,
        "peak_bytes": total_bytes(memory_plan(problem, policy, buffer_sizes(wave))),
        "traffic_bytes": {link: _by_kind(by_verb) for link, by_verb in summary.link_bytes.items()},
        "num_mini_batches": len(wave.mini_batches),
    }  # fmt: skip


def _by_kind(by_verb: dict[str, float]) -> dict[str, float]:
    kinds: dict[str, float] = {}
    for verb, moved in by_verb.items():
        cargo = VERBS[verb].cargo
        kinds[cargo] = kinds.get(cargo, 0.0) + moved
    return kinds
