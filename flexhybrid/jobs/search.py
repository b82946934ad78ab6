"""``flexhybrid search``: the best policy, its prediction, and the papers' systems beside it."""

import contextlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from flexhybrid.core.errors import InputError, check
from flexhybrid.core.policy import Bits, Selection
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.rates import RATES
from flexhybrid.jobs.simulate import (
    WEIGHTS_STREAMED,
    Note,
    SimulatedQueue,
    describe,
    queue_setting,
    setting_of,
    simulate_queue,
    simulate_system,
)
from policy_search.queue_search import best_for_queue
from policy_search.search import FULL, LOSSLESS, SearchResult, SearchSettings, search
from policy_search.search_problem import measured_space
from policy_search.systems import Setting, System, system
from sim.simulate import SimulatedRun

MACHINE_KEYS = ("model", "hardware", "dtype", *RATES)

#: Systems that the best policy is compared with.
LOSSLESS_RIVALS = (
    *("kv_only", "act_only", "hybrid_static", "capture", "flexgen", "flexgen(host_attention=true)", "deepspeed"),
    *("accelerate", "kvpr_row", "kvpr_column", "kvpr_column(split=pipeline)", "token_recompute(0.2)", "fastdecode"),
    "resident",
)
LOSSY_RIVALS = ("int4",)  #: these change the tokens: not with --lossless


@dataclass(frozen=True)
class PolicySearchOptions:
    """What the command was asked for, by the names of its flags."""

    model: str
    hardware: str
    prompt_len: int | None = None
    gen_len: int | None = None
    lengths: Workload | None = None  #: a queue, in place of requests of one length
    batch: int | None = None
    max_batch: int = 1024
    dtype: str | None = None  #: None: float16, or that of this machine's profile
    objective: str = "throughput"
    lossless: bool = False
    selection: str | None = None  #: infinigen(…), which may be used where it is faster
    time_limit: float | None = None
    link_gb_per_s: float | None = None  #: these rates in place of the machine's own
    disk_gb_per_s: float | None = None
    gemm_tflops: float | None = None
    budgets: dict[str, str | None] | None = None
    confirm: bool = True
    lp: Path | None = None


class SearchReport(NamedTuple):
    """The best policy with its predicted run, and how far behind the papers' systems are."""

    best: SimulatedRun
    found: SearchResult
    rivals: list[dict]  #: ``_rivals``
    search_s: float
    rivals_s: float


def run_search(options: PolicySearchOptions, note: Note | None = None) -> SearchReport:
    """Search, and simulate the papers' systems on the batch of the best policy. Raise InputError when nothing fits.

    ``note`` as in ``setting_of``.
    """
    batch = 1 if options.batch is None and options.objective == "latency" else options.batch
    for name, value in (("max_batch", options.max_batch), ("time_limit", options.time_limit)):
        check(name, value, value is None or value > 0, "above 0")
    point = {name: getattr(options, name) for name in ("prompt_len", "gen_len", *MACHINE_KEYS)}
    setting = setting_of({**point, "batch": options.max_batch if batch is None else batch}, options.budgets, note)
    selection = None if options.selection is None else _selection_of(options.selection, setting)
    seeds = []
    for name in LOSSLESS_RIVALS:
        with contextlib.suppress(InputError):  # one that does not fit is listed with its reason by _rivals
            seeds.append(system(name, setting).policy)

    def searched(batch: int | None, max_batch: int) -> SearchResult:
        settings = SearchSettings(
            batch=batch,
            max_batch=max_batch,
            objective=options.objective,
            space=measured_space(LOSSLESS if options.lossless else FULL, setting.machine),
            seeds=seeds,
            time_limit=options.time_limit,
            confirm=options.confirm,
            write_lp=options.lp,
            selection=selection,
        )
        return search(setting.problem, setting.workload, settings)

    def simulated(result: SearchResult, batch: int) -> SimulatedRun:
        return simulate_system(replace(setting, batch=batch), System("", result.policy, setting.machine))

    result = searched(batch, options.max_batch)
    best, search_s = simulated(result, result.batch), result.search_s
    if batch is not None and batch > 1 and options.objective == "throughput":
        waves = searched(None, batch)  # smaller waves of the same requests may be faster
        search_s += waves.search_s
        if (in_waves := simulated(waves, batch)).tokens_per_s > best.tokens_per_s:
            result, best = waves, in_waves
    began = time.perf_counter()
    rivals = _rivals(setting, options, best)
    return SearchReport(best, result, rivals, search_s, time.perf_counter() - began)


def search_queue(options: PolicySearchOptions, note: Note | None = None) -> SimulatedQueue:
    """Search for a queue of requests, and return its run under the best policy. Raise InputError when nothing fits, and
    for what is searched for requests of one length alone."""
    if options.lengths is None:
        raise ValueError("no queue was given")
    alone = {"--objective latency": options.objective != "throughput", "--selection": options.selection is not None}
    if refused := [flag for flag, given in (alone | {"--lp": options.lp is not None}).items() if given]:
        raise InputError(f"{refused[0]} is of requests of one length: give --prompt-len and --gen-len, not --lengths")
    point = {name: getattr(options, name) for name in MACHINE_KEYS}
    at_most = options.batch or options.max_batch
    setting = queue_setting({**point, "batch": at_most}, options.lengths, options.budgets, note)
    settings = SearchSettings(
        max_batch=setting.batch,
        space=measured_space(LOSSLESS if options.lossless else FULL, setting.machine),
        time_limit=options.time_limit,
    )
    given = []
    for name in LOSSLESS_RIVALS[:3]:
        with contextlib.suppress(InputError):  # it does not fit
            given.append(system(name, setting).policy)
    choice = best_for_queue(setting.problem, options.lengths, settings, given)
    best = replace(setting, batch=choice.run.at_a_time)
    return simulate_queue(best, System("", choice.policy, setting.machine), options.lengths)


def _selection_of(text: str, setting: Setting) -> Selection:
    """Return the selection of infinigen(…). Raise InputError for a system with another selection, or none."""
    selection = system(text, setting).policy.selection
    if selection.method != "speculative":
        raise InputError(f"--selection {text!r}: the search knows the selection of infinigen(…) alone")
    return selection


def _rivals(setting: Setting, options: PolicySearchOptions, best: SimulatedRun) -> list[dict]:
    """Return a row a rival on the batch of ``best``, fastest first: its tokens/s, the share by which they are fewer,
    and its weights' share on the device; or the error that keeps it from running."""
    rows = []
    setting = replace(setting, batch=best.batch)
    for name in LOSSLESS_RIVALS + (() if options.lossless else LOSSY_RIVALS):
        row = dict.fromkeys(("system", "tokens_per_s", "total_s", "loses", "error", "weights_on_device"))
        try:
            made = system(name, setting)
            run = simulate_system(setting, made)
            row |= {"tokens_per_s": run.tokens_per_s, "total_s": run.total_s}
            row |= {"loses": 1 - run.tokens_per_s / best.tokens_per_s, "weights_on_device": made.policy.weights.device}
        except InputError as error:
            row["error"] = str(error)
        rows.append(row | {"system": name})
    return sorted(rows, key=lambda row: -(row["tokens_per_s"] or 0))


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
        "rivals": report.rivals,
        "virtual_tokens_per_s": found.virtual.tokens_per_s if found.virtual else None,
    }


def describe_search(report: SearchReport) -> str:
    """Return the report as lines of text."""
    found, policy, lines = report.found, report.found.policy, [describe(report.best)]
    bits = ", ".join(f"{name} {getattr(policy.bits, name)}" for name in ("weights", "kv", "act"))
    changes = "" if policy.bits == Bits() else " (these change the tokens; --lossless keeps to native bits)"
    lines.append(f"  policy: {found.batch} requests at a time; bits {bits}{changes}")
    order = f"{policy.schedule} schedule, mini-batches of {policy.max_mini_batch_tokens} tokens"
    lines.append(f"          {order}, attention on the {policy.attention}")
    if found.selected:
        used = "used" if policy.selection.method == "speculative" else "not used: it would be slower"
        pays = "pays" if found.selected.act_pays else "does not pay"
        lines.append(f"  the selection allowed is {used}; under it ACT {pays} (and tokens change)")
    if found.virtual:
        lines.append(f"  virtual clock: {found.virtual.tokens_per_s:.4g} tokens/s")
    counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in found.counts.items())
    lines.append(f"  searched in {report.search_s:.2f} s ({counts})")
    lines.append(f"  {found.proof}")
    if found.margin:
        lines.append(
            f"  stays on the device: another policy would have to be {found.margin:.0%} faster, the largest error of a "
            "prediction so far"
        )
    lines.append(
        f"The other systems on the same batch, priced in {report.rivals_s:.2f} s, with the share of the weights "
        "that each keeps on the device:"
    )
    for row in report.rivals:
        if row["tokens_per_s"]:
            streamed = row["system"] == "resident" and row["weights_on_device"] < 1
            note = f" ({WEIGHTS_STREAMED})" if streamed else ""
            note += " (changes the tokens)" if row["system"] in LOSSY_RIVALS else ""
            lines.append(
                f"  {row['system']:32s} {row['tokens_per_s']:10.4g} tokens/s   {-row['loses']:+7.1%}   "
                f"weights {row['weights_on_device']:.0%}{note}"
            )
        else:
            reason = row["error"].partition("does not fit. ")[2] or row["error"]
            lines.append(f"  {row['system']:32s} does not run: {reason}")
    return "\n".join(lines)
