"""Sensitivity: whether a choice depends on rates of the machine that were not measured.

A datasheet's machine reaches assumed shares of its peaks, each with a plausible range. At both ends of a range the
choice is priced again, against the best of a search of the same kinds of policies, unless none can be fast enough. If
another policy wins by more than TOLERANCE, bisection finds the rate from which it does. Task overheads and a host
core's scattering are not varied.
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
from sim.datasheet import SHARES

TOLERANCE = 0.03  #: share by which another policy must be faster for the choice to depend on a rate
BISECTIONS = 5  #: of a range, each on a logarithmic scale


@dataclass(frozen=True)
class Rate:
    """A rate that is a share of a peak."""

    words: str
    peak: str  #: key of a record's notes; with flops in it, operations a second, else bytes
    lines: tuple[str, ...]  #: of which a coefficient is one over this rate
    low: float  #: least and largest share that is plausible
    high: float

    @property
    def coefficient(self) -> str:
        """The field of a ``Line``."""
        return "s_per_flop" if "flops" in self.peak else "s_per_byte"

    @property
    def unit(self) -> tuple[str, float]:
        """A unit for people, and how much of the peak's it is."""
        return ("TFLOP/s", 1e12) if "flops" in self.peak else ("GB/s", 1e9)


#: Share of ``sim.datasheet.SHARES`` -> the rate that it makes. Ranges: matrix products reach 0.33 of the peak on a card
#: of 70 W (FlexGen's fit of a T4) and 0.81 on an RTX 4090 (CAPTURE's act_only rows); streaming reads 0.91 there, and
#: decode attention 0.39 with its copies; links 0.76 to 0.88 (KVPR, CAPTURE, FlexGen). Of the host no published run is
#: fitted: from one memory controller in three to nearly all of them, and vector units from a tenth to 0.6.
RATES = {
    "gemm": Rate("matrix products", "peak_flops", ("compute", "attend", "attend_prefill"), 0.33, 0.85),
    "memory": Rate("the device's memory", "memory_bytes_per_s", ("compute", "attend_prefill"), 0.65, 0.92),
    "attention_memory": Rate("the device's memory in attention", "memory_bytes_per_s", ("attend",), 0.35, 0.85),
    "link": Rate("the link", "link_bytes_per_s", ("h2d", "d2h"), 0.65, 0.88),
    "host_memory": Rate(
        "the host's memory in attention", "host_memory_bytes_per_s", ("host_compute", "attend_host"), 0.3, 0.85
    ),
    "host_flops": Rate("the host's cores in attention", "host_peak_flops", ("attend_host",), 0.1, 0.6),
}


@dataclass(frozen=True)
class Sensitivity:
    """A rate that decides the choice: elsewhere in its plausible range another policy is faster."""

    rate: str  #: key of RATES
    words: str
    unit: str
    value: float  #: as assumed
    plausible: tuple[float, float]
    from_value: float  #: where the other policy is faster by more than TOLERANCE (or the margin of a device's favour)
    loses: float  #: at the end of the range, by how much the choice is slower than the other: 0.2 takes 20 % longer
    other: Policy
    batch: int


def assumed_rates(hardware: Hardware) -> dict[str, float]:
    """Return the shares of peaks that are assumed for a machine: as usual, and no line fitted or given instead."""
    if hardware.rates["kind"] not in ("assumed", "fitted"):
        return {}
    shares = hardware.notes.get("efficiency", {})
    assumed = (name for name in RATES if shares.get(name) == SHARES[name] and hardware.notes.get(RATES[name].peak))
    return {name: shares[name] for name in assumed if _changed(hardware, name, 1.0)}


def with_share(hardware: Hardware, name: str, share: float) -> Hardware:
    """Return the machine at another share of a peak."""
    changed = _changed(hardware, name, hardware.notes["efficiency"][name] / share)
    return replace(hardware, lines={**hardware.lines, **changed})


def _changed(hardware: Hardware, name: str, times: float) -> dict[str, Line]:
    """Return the lines that a peak's share makes, slower by a factor."""
    rate, lines = RATES[name], {}
    own = 1.0 / (hardware.notes[rate.peak] * hardware.notes["efficiency"][name])
    for key in rate.lines:
        line = hardware.lines.get(key)
        if line is not None and np.isclose(getattr(line, rate.coefficient), own, rtol=1e-6, atol=0.0):
            lines[key] = replace(line, **{rate.coefficient: own * times})
    return lines


def sensitivity_of(result: SearchResult, settings: SearchSettings) -> list[Sensitivity]:
    """Return the assumed rates that decide a search's choice. ``settings``: those of the search."""
    problem, machine = result.problem, hardware_of(result.problem)
    margin = result.margin or 0.0
    tolerance, found = max(TOLERANCE, margin), list[Sensitivity]()
    least = _seconds(problem, result.policy, result.batch) / (1 + margin) if result.complete else 0.0
    for name, share in assumed_rates(machine).items():
        rate, worst = RATES[name], None
        for end in (rate.low, rate.high):
            there = replace(problem, hardware=with_share(machine, name, end))
            # No policy gains more than the rate does: where that is too little, none needs to be looked for.
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
    one = np.array([float(batch)])
    return float(counted_seconds(problem, predict(problem, problem.candidates(policy, one)), one)[0])


def _loses(problem: SearchProblem, result: SearchResult, other: EvaluatedPolicy) -> float:
    """Return by how much the choice takes longer than another policy on the problem's machine."""
    own = _seconds(problem, result.policy, result.batch)
    return own / _seconds(problem, other.policy, other.batch) - 1.0


def _best_of(
    problem: SearchProblem, result: SearchResult, settings: SearchSettings, tolerance: float
) -> EvaluatedPolicy | None:
    """Return the fastest policy in the choice's and the contenders' batches, in powers of two, and between those around
    it; None where none is faster than the choice by more than a third of ``tolerance`` before that."""
    solver = BranchAndBound(problem)
    choice = EvaluatedPolicy(result.policy, result.batch, _seconds(problem, result.policy, result.batch))
    first = replace(choice, seconds=choice.seconds / (1 + tolerance / 3))  # so that little else need be looked at
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
    solver.exchange()
    return solver.best
