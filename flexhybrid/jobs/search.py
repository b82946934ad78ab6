"""``flexhybrid search``: the best policy with its prediction and sensitivity, and other systems for comparison."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

from flexhybrid.core.errors import InputError, check, flag
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.memory import kept_shares
from flexhybrid.core.policy import Bits, Policy, Selection
from flexhybrid.core.problem import Problem
from flexhybrid.core.units import counted
from flexhybrid.jobs.options import WHERE, PolicySearchOptions
from flexhybrid.jobs.simulate import (
    Note,
    SimulatedQueue,
    describe,
    queue_setting,
    setting_of,
    shares_text,
    simulate_queue,
    simulate_system,
    unlike_weights,
)
from flexhybrid.jobs.sweep.side_by_side import SystemRun, by_system
from policy_search.keep import with_kept
from policy_search.papers.at_best import at_best
from policy_search.queue_search import best_for_queue
from policy_search.search import FULL, LOSSLESS, SearchResult, SearchSettings, TooSlowError, confirmed, search
from policy_search.search_problem import SearchProblem, measured_space
from policy_search.sensitivity import TOLERANCE, Sensitivity, assumed_rates, sensitivity_of
from policy_search.systems import SYSTEMS, Setting, System, system
from sim.presets import infinigen
from sim.queue_clock import QueueRun
from sim.simulate import SimulatedRun

LATENCIES = ("max_ttft", "max_tpot")  #: options that limit latencies
LEAST_GAP = 0.005  #: optimality gap above which the margin for staying on the device is mentioned

#: Systems that the best policy is compared with.
LOSSLESS_RIVALS = (
    *("kv_only", "act_only", "hybrid_static", "capture", "flexgen", "flexgen(host_attention=true)", "deepspeed"),
    *("accelerate", "kvpr_row", "kvpr_column", "token_recompute", "fastdecode", "neo", "apt_serve"),
    "resident",
)
LONGEST = "capture"  #: the system that takes longest to price; the searching process does it, a second one the rest
#: Systems that change the tokens, shown only with --lossy.
LOSSY_RIVALS = ("int4", "xquant", "deepspeed(bits=4)", "flexgen(compress=true)", "h2o", "infinigen")
#: Systems that are also priced in the bits of a policy found with --lossy.
IN_ANY_BITS = tuple(name for name in LOSSLESS_RIVALS if SYSTEMS[name.partition("(")[0]].batches == "together")
#: Systems whose policies are made without a search. They start the search, whose result is never slower than they are.
SEEDS = ("kv_only", "act_only", "hybrid_static", "deepspeed", "accelerate", "fastdecode", "token_recompute(0.2)")


class SearchReport(NamedTuple):
    """The best policy with its predicted run and sensitivity, and the rows of other systems."""

    best: SimulatedRun
    found: SearchResult
    hardware: Hardware
    search_s: float
    sensitivity: Sequence[Sensitivity] = ()
    rivals: Sequence[SystemRun] = ()
    rivals_s: float = 0.0
    bounds: tuple[str, ...] = ()  #: flags that limit the search but not the other systems


def run_search(
    options: PolicySearchOptions, note: Note | None = None, show: Callable[[str], object] = lambda text: None
) -> SearchReport:
    """Search for the best policy, and price other systems at their best settings. Raise InputError if nothing fits.

    ``note``: as in ``setting_of``. ``show`` is called with each part of the report as text, as soon as it is known.
    """
    for name in ("max_batch", "time_limit", "max_ttft", "max_tpot"):
        value = getattr(options, name)
        check(flag(name), value, value is None or value > 0, "above 0")
    batch = 1 if options.batch is None and options.objective == "latency" else options.batch
    setting = setting_of({**options.point, "batch": options.max_batch if batch is None else batch}, note)
    seeds = []
    for name in SEEDS:
        with contextlib.suppress(InputError):  # _rivals gives the reason why a system does not fit
            seeds.append(system(name, setting).policy)
    settings = settings_of(options, setting)
    settings = replace(settings, seeds=seeds, write_lp=options.lp, selection=_selection_of(options, setting))
    at_a_time = settings.batch  # of --keep, or None

    def simulated(result: SearchResult, batch: int) -> SimulatedRun:
        return simulate_system(replace(setting, batch=batch), System("", result.policy, setting.machine))

    free = options.batch is None and options.objective == "throughput"
    names = LOSSLESS_RIVALS + (() if options.lossless else LOSSY_RIVALS)
    priced = in_second_process(lambda: [_rival(name, setting, free) for name in names if name != LONGEST])
    tried = [replace(settings, batch=batch if at_a_time is None else at_a_time)]
    if batch is not None and batch > 1 and options.objective == "throughput" and at_a_time is None:
        tried.append(replace(settings, max_batch=batch))  # smaller waves of the same requests may be faster
    answers = []
    for settings in tried:
        with contextlib.nullcontext() if settings is tried[-1] and not answers else contextlib.suppress(TooSlowError):
            result = search(setting.problem, setting.workload, settings)
            answers.append((simulated(result, batch or result.batch), result, settings))
    best, result, settings = max(answers, key=lambda answer: answer[0].tokens_per_s)
    search_s = sum(found.search_s for _, found, _ in answers)
    given = {"--keep": bool(options.keep), "--attention": options.attention != "any"}
    given |= {flag(name): getattr(options, name) is not None for name in LATENCIES}
    bounds = tuple(name for name, binds in given.items() if binds)
    report = SearchReport(best, result, setting.machine, search_s, bounds=bounds)
    show(describe_found(report))
    if options.confirm:
        virtual = confirmed(result)
        report = report._replace(found=replace(result, virtual=virtual))
        some = " (some of its iterations)" if isinstance(virtual, QueueRun) else ""
        show(f"  virtual clock{some}: {virtual.tokens_per_s:.4g} tokens/s")
    report = report._replace(sensitivity=sensitivity_of(result, settings))
    show(describe_sensitivity(report))
    began = time.perf_counter()
    bits = result.policy.bits
    packed = () if bits.native else IN_ANY_BITS
    priced_in_bits = in_second_process(lambda: [_rival(name, setting, free, bits) for name in packed])
    rivals = [_rival(LONGEST, setting, free), *priced(), *(rival for rival in priced_in_bits() if rival.run)]
    rivals.sort(key=lambda rival: -rival.tokens_per_s)
    report = report._replace(rivals=rivals, rivals_s=time.perf_counter() - began)
    show(describe_rivals(report))
    return report


def settings_of(options: PolicySearchOptions, setting: Setting) -> SearchSettings:
    """Return the search's settings. Raise InputError for a field that cannot be kept or is given twice."""
    if options.selection and options.lossless:
        raise InputError(f"--selection {options.selection} changes the tokens: add --lossy to allow that")
    space = measured_space(LOSSLESS if options.lossless else FULL, setting.machine)
    check("--attention", options.attention, options.attention in WHERE, f"one of {', '.join(WHERE)}")
    kept = [text.partition("=")[0].strip() for text in options.keep]
    placed = options.attention != "any"
    given = {"--attention": placed and "attention", "--batch": options.batch is not None and "max_batch"}
    for name, field in given.items():
        if field in kept:
            raise InputError(f"{name} and --keep {field}=…: give one of them")
    if placed:
        if options.attention not in space.attention:
            raise InputError(
                f"--attention {options.attention}: this machine's profile has no rate for it: run `flexhybrid profile`"
            )
        space = replace(space, attention=(options.attention,))
    same = {name: getattr(options, name) for name in ("max_batch", "objective", "time_limit")}
    settings = SearchSettings(space=space, max_ttft_s=options.max_ttft, max_tpot_s=options.max_tpot, **same)
    return with_kept(settings, options.keep)


def search_queue(options: PolicySearchOptions, note: Note | None = None) -> SimulatedQueue:
    """Search for the best policy of a queue of requests; return the predicted run.
    Raise InputError if nothing fits, or for options that need requests of one length."""
    if options.lengths is None:
        raise ValueError("no queue was given")
    sizes = [text for text in options.keep if text.startswith(("max_batch", "max_mini_batch_tokens"))]
    alone = {"--objective latency": options.objective != "throughput", "--selection": options.selection is not None}
    alone |= {"--lp": options.lp is not None, f"--keep {''.join(sizes[:1])}": bool(sizes)}
    alone |= {flag(name): getattr(options, name) is not None for name in LATENCIES}
    if refused := [name for name, given in alone.items() if given]:
        raise InputError(f"{refused[0]} is of requests of one length: give --input-len and --output-len, not --lengths")
    at_most = options.batch or options.max_batch
    setting = queue_setting({**options.point, "batch": at_most}, options.lengths, note)
    settings = replace(settings_of(options, setting), max_batch=setting.batch)
    given = []
    for name in LOSSLESS_RIVALS[:3]:
        with contextlib.suppress(InputError):  # the system does not fit
            policy = system(name, setting).policy
            given += [policy] if settings.space.allows(policy) and not options.keep else []
    choice = best_for_queue(setting.problem, options.lengths, settings, given)
    best = replace(setting, batch=choice.run.at_a_time)
    return simulate_queue(best, System("", choice.policy, setting.machine), options.lengths, run=choice.run)


def _selection_of(options: PolicySearchOptions, setting: Setting) -> Selection | None:
    """Return the selection that the search may use; None without --lossy. Raise InputError for other methods."""
    if options.lossless:
        return None
    text = options.selection
    selection = (system(text, setting).policy if text else infinigen()).selection
    if selection.method != "speculative":
        raise InputError(f"--selection {text!r}: the search supports only infinigen(…)")
    return selection


def _rival(name: str, setting: Setting, free: bool, bits: Bits | None = None) -> SystemRun:
    """Return a system's run with its best batch and settings, or its error. ``bits``: None for its own."""
    point = {"system": f"{name}, same bits" if bits else name}
    try:
        return SystemRun(point, setting, *at_best(name, setting, free, bits))
    except InputError as error:
        return SystemRun(point, error=str(error))


def _exceeded(problem: SearchProblem, rival: SystemRun) -> dict[str, float]:
    """Return the latencies of a system's run that exceed a limit of the search, by name."""
    limits = {"ttft_s": problem.max_ttft_s, "tpot_s": problem.max_tpot_s}
    latencies = {name: getattr(rival.run, name) for name, limit in limits.items() if rival.run and limit}
    return {name: latency for name, latency in latencies.items() if latency > limits[name]}


def _rival_record(report: SearchReport, rival: SystemRun) -> dict:
    """Return plain JSON. "loses": the share by which the system is slower than the best policy."""
    loses = 1 - rival.tokens_per_s / report.best.tokens_per_s if rival.run else None
    exceeds = list(_exceeded(report.found.problem, rival))
    return rival.to_dict(None) | {"error": rival.error or None, "loses": loses, "exceeds": exceeds}


def in_second_process(work: Callable[[], list]) -> Callable[[], list]:
    """Start ``work`` in a second process; return a function that waits for the result.

    That function does the work itself with one core, without fork, or if the process fails.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if cores < 2 or not hasattr(os, "fork"):
        return work
    forking = multiprocessing.get_context("fork")
    inlet, outlet = forking.Pipe(duplex=False)

    def answer() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # end on Ctrl-C like the parent, without a message
        with contextlib.suppress(Exception):  # the parent then repeats the work and raises the error
            outlet.send(work())

    def wait() -> list:
        with inlet:
            try:
                return inlet.recv()
            except EOFError:
                return work()

    try:
        forking.Process(target=answer, daemon=True).start()
    except OSError:
        return work
    outlet.close()
    return wait


def search_record(report: SearchReport) -> dict:
    """Return the report as plain JSON."""
    found = report.found
    return {
        **report.best.to_dict(),
        "counts": found.counts,
        "gaps": found.gaps,
        "complete": found.complete,
        "margin": found.margin,
        "search_s": report.search_s,
        "rivals_s": report.rivals_s,
        "rivals": [_rival_record(report, rival) for rival in report.rivals],
        "not_of_rivals": list(report.bounds),
        "assumed": sorted(assumed_rates(report.hardware)),
        "hangs_on": [asdict(rate) | {"other": rate.other.to_dict()} for rate in report.sensitivity],
        "virtual_tokens_per_s": found.virtual.tokens_per_s if found.virtual else None,
    }


def describe_policy(policy: Policy, at_a_time: int) -> list[str]:
    """Return two lines of text with the fields of a policy that the lines of its prediction lack."""
    bits = ", ".join(f"{name} {getattr(policy.bits, name)}" for name in ("weights", "kv", "act"))
    changes = "" if policy.bits == Bits() else " (these change the tokens)"
    hidden = f", hidden states on the {policy.hidden}" * (policy.hidden != "device")
    return [
        f"  policy: {counted(at_a_time, 'request')} at a time; bits {bits}{changes}",
        f"          {policy.schedule} schedule, {policy.cut}, attention on the {policy.attending_tier}{hidden}",
    ]


def describe_found(report: SearchReport) -> str:
    """Return the search's result as lines of text."""
    found, policy, lines = report.found, report.found.policy, [describe(report.best)]
    lines += describe_policy(policy, found.batch)
    if found.selected:
        used = "is used and changes the tokens" if policy.selection.method == "speculative" else "makes nothing faster"
        pays = "is" if found.selected.act_pays else "is not"
        lines.append(f"  the selection {used}; with it, a mix with ACT {pays} faster than keys and values alone")
    elif not found.problem.space.lossless:
        lines.append("  no selection is used: no policy with one is allowed and fits this batch")
    counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in found.counts.items())
    lines.append(f"  searched in {report.search_s:.2f} s ({counts})")
    lines.append(f"  {found.proof}")
    if found.margin and found.gap > LEAST_GAP:
        lines.append(
            f"  stays on the device: other policies may be faster, but by less than the largest known error of a "
            f"prediction, {found.margin:.0%}"
        )
    return "\n".join(lines)


def _bits_text(bits: Bits) -> str:
    return f"{bits.weights}/{bits.kv}/{bits.act}"


def describe_sensitivity(report: SearchReport) -> str:
    """Return the assumed rates that the choice depends on, as lines of text."""
    assumed = assumed_rates(report.hardware)
    if not assumed:
        return "  the choice depends on no assumed rate"
    lines = []
    for rate in report.sensitivity:
        low, high = rate.plausible
        side = "below" if rate.from_value < rate.value else "above"
        lines.append(
            f"  depends on the assumed rate of {rate.words}, {rate.value:.3g} {rate.unit} (plausibly {low:.3g} to "
            f"{high:.3g}): {side} {rate.from_value:.3g} another policy is faster, by up to {rate.loses:.0%}: "
            f"{_brief(report.found.problem, rate.other, rate.batch)}"
        )
    if not lines:
        within = max(TOLERANCE, report.found.margin or 0.0)
        rates = f"each of {len(assumed)} assumed rates"
        return f"  stays within {within:.0%} of the best over the plausible range of {rates}"
    return "\n".join(lines)


def _brief(problem: Problem, policy: Policy, batch: int) -> str:
    """Return a policy as a short line of text."""
    bits = "" if policy.bits.native else f", bits {_bits_text(policy.bits)}"
    where = f"weights {shares_text(kept_shares(problem, policy))}; cache {shares_text(policy.cache)}"
    return f"{where}; attention on the {policy.attending_tier}, {counted(batch, 'request')} at a time{bits}"


def describe_rivals(report: SearchReport) -> str:
    """Return the other systems as lines of text."""
    binds = "binds" if len(report.bounds) == 1 else "bind"
    bound = f" ({' and '.join(report.bounds)} {binds} the search alone, not these)" if report.bounds else ""
    rivals = []
    for rival in report.rivals:
        exceeded = _exceeded(report.found.problem, rival).items()
        notes = [f"{name[:4].upper()} {latency:.4g} s is over the limit" for name, latency in exceeded]
        if rival.made and rival.made.policy.bits != report.found.policy.bits:
            notes.append(f"bits {_bits_text(rival.made.policy.bits)}")
        rivals.append(rival._replace(notes=tuple(notes)))
    lines = [
        f"Other systems, each with its best batch and settings, found in {report.rivals_s:.2f} s{bound}:",
        by_system(rivals, report.best.tokens_per_s),
    ]
    runs = [report.best, *(rival.run for rival in rivals if rival.run)]
    return "\n".join(lines + unlike_weights(run.kept_weights["device"] for run in runs))
