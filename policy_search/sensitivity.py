"""Sensitivity: find assumed rates of the machine that decide a search's choice.

A datasheet's machine reaches assumed shares of its peaks, each with a plausible range. At both ends of a range, the
choice is compared with the best policy of a new search. If the other policy is faster by more than TOLERANCE, bisection
finds the rate from which it is. Task overheads and a host core's scattering are not varied.
"""

from dataclasses import dataclass, replace

import numpy as np

from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.policy import Policy
from policy_search.branch_and_bound import BranchAndBound
from policy_search.grid import ChoiceGrid
from policy_search.rounding import EvaluatedPolicy, counted_seconds
from policy_search.search import SearchResult, SearchSettings
from policy_search.search_problem import SearchProblem, pairs_of
from sim.array_clock import predict
from sim.cost import hardware_of
from sim.datasheet import SHARES, left_by_link

TOLERANCE = 0.03  #: the choice depends on a rate if another policy is faster by more than this share
BISECTIONS = 5  #: steps of the bisection, on a logarithmic scale


@dataclass(frozen=True)
class Rate:
    """A rate that is a share of a peak."""

    words: str  #: description of what has this rate
    peak: str  #: key of a record's notes; in operations/s if the key contains "flops", else bytes/s
    lines: tuple[str, ...]  #: lines with a coefficient of 1 / rate
    low: float  #: least plausible share
    high: float  #: largest plausible share

    @property
    def coefficient(self) -> str:
        """Return the field of ``Line`` that has this rate."""
        return "s_per_flop" if "flops" in self.peak else "s_per_byte"

    @property
    def unit(self) -> tuple[str, float]:
        """Return (unit for reports, the peak's units in one such unit)."""
        return ("TFLOP/s", 1e12) if "flops" in self.peak else ("GB/s", 1e9)


_HOST_LINES = "host_compute", "attend_host"
#: Key of ``sim.datasheet.SHARES`` -> its rate. Published runs give these ranges: matrix products reach 0.33 of the peak
#: on a T4 of 70 W (FlexGen's fit) and 0.81 on an RTX 4090 (CAPTURE's act_only rows). Streaming reads reach 0.91 there,
#: decode attention with its copies 0.39. Links reach 0.76 to 0.88 (KVPR, CAPTURE, FlexGen). No published run shows the
#: host's rates: assume from a tenth of the memory's peak (beside a fast link) to nearly all of it, and 0.1 to 0.6 of
#: the vector units.
RATES = {
    "gemm": Rate("matrix products", "peak_flops", ("compute", "attend", "attend_prefill"), 0.33, 0.85),
    "memory": Rate("the device's memory", "memory_bytes_per_s", ("compute", "attend_prefill"), 0.65, 0.92),
    "attention_memory": Rate("the device's memory in attention", "memory_bytes_per_s", ("attend",), 0.35, 0.85),
    "link": Rate("the link", "link_bytes_per_s", ("h2d", "d2h"), 0.65, 0.88),
    "host_memory": Rate("the host's memory in attention", "host_memory_bytes_per_s", _HOST_LINES, 0.1, 0.85),
    "host_flops": Rate("the host's cores in attention", "host_peak_flops", ("attend_host",), 0.1, 0.6),
}


#: Key of RATES -> shares that files assume: the default; of the host's memory also half of it for two sockets, 0.6 on
#: InfiniGen's testbed, whose rows were reproduced with it, and what a fast link leaves.
ASSUMED = {name: (SHARES[name],) for name in RATES} | {
    "host_memory": (SHARES["host_memory"], SHARES["host_memory"] / 2, 0.6)
}


@dataclass(frozen=True)
class Sensitivity:
    """A rate that decides the choice: another policy is faster in a part of the plausible range."""

    rate: str  #: key of RATES
    words: str  #: ``Rate.words``
    unit: str  #: unit of the values below
    value: float  #: the assumed rate
    plausible: tuple[float, float]  #: (least, largest) plausible rate
    from_value: float  #: from this rate on, the other policy is faster by more than TOLERANCE or the search's margin
    loses: float  #: relative slowdown of the choice at the end of the range; 0.2: it takes 20 % longer than the other
    other: Policy  #: the policy that is faster there
    batch: int  #: batch of the other policy


def assumed_rates(hardware: Hardware) -> dict[str, float]:
    """Return key of RATES -> share, for a machine's shares that are assumed: the default ones, whose lines were neither
    fitted nor given."""
    if hardware.rates["kind"] not in ("assumed", "fitted"):
        return {}
    shares = hardware.notes.get("efficiency", {})
    assumed = (name for name in RATES if _is_assumed(name, hardware))
    return {name: shares[name] for name in assumed if _changed(hardware, name, 1.0)}


def _is_assumed(name: str, hardware: Hardware) -> bool:
    """Return whether a machine has an assumed share of the peak of rate ``name``."""
    shares, peak = hardware.notes.get("efficiency", {}), hardware.notes.get(RATES[name].peak)
    if not peak or name not in shares:
        return False
    if name != "host_memory":
        return shares[name] in ASSUMED[name]
    return shares[name] in (*ASSUMED[name], left_by_link(hardware.notes["link_bytes_per_s"] * shares["link"], peak))


def with_share(hardware: Hardware, name: str, share: float) -> Hardware:
    """Return the machine with another share of the peak of rate ``name``."""
    changed = _changed(hardware, name, hardware.notes["efficiency"][name] / share)
    return replace(hardware, lines={**hardware.lines, **changed})


def _changed(hardware: Hardware, name: str, times: float) -> dict[str, Line]:
    """Return the lines that follow from the share of rate ``name``, with ``times`` as many seconds."""
    rate, lines = RATES[name], {}
    own = 1.0 / (hardware.notes[rate.peak] * hardware.notes["efficiency"][name])
    for key in rate.lines:
        line = hardware.lines.get(key)
        if line is not None and np.isclose(getattr(line, rate.coefficient), own, rtol=1e-6, atol=0.0):
            lines[key] = replace(line, **{rate.coefficient: own * times})
    return lines


def sensitivity_of(result: SearchResult, settings: SearchSettings) -> list[Sensitivity]:
    """Return the assumed rates that decide a choice, the largest slowdown first. ``settings``: the search's."""
    problem, machine = result.problem, hardware_of(result.problem)
    margin = result.margin or 0.0
    tolerance, found = max(TOLERANCE, margin), list[Sensitivity]()
    least = _seconds(problem, result.policy, result.batch) / (1 + margin) if result.complete else 0.0
    for name, share in assumed_rates(machine).items():
        rate, worst = RATES[name], None
        for end in (rate.low, rate.high):
            there = replace(problem, hardware=with_share(machine, name, end))
            # A policy gains at most what the rate gains. If that is too little, no search is needed.
            if _seconds(there, result.policy, result.batch) <= least * min(1.0, share / end) * (1 + tolerance):
                continue
            other = _best_of(there, result, settings, tolerance)
            if other is None or (loses := _loses(there, result, other)) <= tolerance:
                continue
            if worst is None or loses > worst[0]:
                worst = loses, end, other
        if worst is None:
            continue
        loses, end, other = worst
        inside, outside = share, end
        for _ in range(BISECTIONS):
            middle = float(np.sqrt(inside * outside))
            there = replace(problem, hardware=with_share(machine, name, middle))
            inside, outside = (inside, middle) if _loses(there, result, other) > tolerance else (middle, outside)
        unit, scale = rate.unit
        peak = machine.notes[rate.peak] / scale
        found.append(
            Sensitivity(
                rate=name,
                words=rate.words,
                unit=unit,
                value=peak * share,
                plausible=(peak * rate.low, peak * rate.high),
                from_value=peak * outside,
                loses=loses,
                other=other.policy,
                batch=other.batch,
            )
        )
    return sorted(found, key=lambda rate: -rate.loses)


def _seconds(problem: SearchProblem, policy: Policy, batch: int) -> float:
    """Return a policy's predicted seconds per token."""
    one = np.array([float(batch)])
    return float(counted_seconds(problem, predict(problem, problem.candidates(policy, one)), one)[0])


def _loses(problem: SearchProblem, result: SearchResult, other: EvaluatedPolicy) -> float:
    """Return the relative slowdown of the choice against another policy on the problem's machine."""
    return _seconds(problem, result.policy, result.batch) / _seconds(problem, other.policy, other.batch) - 1.0


def _best_of(
    problem: SearchProblem, result: SearchResult, settings: SearchSettings, tolerance: float
) -> EvaluatedPolicy | None:
    """Return the fastest policy on the problem's machine, or None if none is clearly faster than the choice. The
    batches are those of the choice and the contenders, powers of two, and then those between them near the best.
    "Clearly" means by more than a third of ``tolerance``, before the last batches are tried."""
    solver = BranchAndBound(problem)
    choice = EvaluatedPolicy(result.policy, result.batch, _seconds(problem, result.policy, result.batch))
    first = replace(choice, seconds=choice.seconds / (1 + tolerance / 3))  # excludes most other choices
    solver.take([first])
    for known in result.contenders:
        if known.unplaced is not None:
            solver.take(solver.evaluator.evaluate([known.unplaced], solver.seconds))
    own = [result.batch, *(known.batch for known in result.contenders)]
    batches = np.intersect1d(settings.batches, [*own, *(1 << np.arange(21)), settings.batches.max()])
    solver.explore(ChoiceGrid(problem, problem.options, *pairs_of(problem, batches, settings.mini_batch_tokens)))
    if solver.best is first:
        return None
    solver.finer_batches(batches, settings.mini_batch_tokens)
    solver.try_both()
    return solver.best
