"""The printed output of ``flexhybrid compare``: each result as soon as it is known, above the progress bar."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from flexhybrid.core.hardware import AFTER_PAUSE, CONTENTION, LINKS, Hardware
from flexhybrid.core.memory import kept_shares
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import WHOLE_BATCH, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.task import RESOURCES
from flexhybrid.core.units import counted, gib
from flexhybrid.core.verbs import VERBS
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.breakdown import KINDS
from flexhybrid.jobs.compare.trials import TIE, Trials
from flexhybrid.jobs.rates import company_note
from flexhybrid.jobs.run.forecast import duration
from flexhybrid.runtime.links import MOST_LATE_S
from flexhybrid.runtime.profiling.cpu_use import MOST_OTHERS
from policy_search.fit import PAPERS_R2, fit_report
from policy_search.search import SearchResult
from sim.correction import in_words

#: Lines of a profile that the report shows: all but an unpaced link's, and those for verbs without a line of their own.
SHOWN_LINES = ("h2d", "d2h", "h2d_both", "d2h_both", "disk_read", "disk_write", *VERBS)
BUSY = "*"  #: marks a rate that was measured on a busy machine
MOST_SPREAD = 0.15  #: an idle machine's highest (fastest - slowest) / median of a policy's rounds


def is_disturbed(row: dict) -> bool:
    """Return whether other processes disturbed a row's rounds, by their CPU use or by the spread of the rounds."""
    rounds = row["measured_rounds"]
    spread = (max(rounds) - min(rounds)) / row["measured_tokens_per_s"]
    return spread > MOST_SPREAD or any(share > MOST_OTHERS for share in row["others_cpu_share"])


class Report:
    """Prints the results to stdout, unless ``quiet``."""

    def __init__(self, quiet: bool):
        self.quiet = quiet

    def say(self, text: str) -> None:
        if not self.quiet:
            tqdm.write(text, file=sys.stdout)

    def table(self, rows: list[dict]) -> None:
        self.say(pd.DataFrame(rows).to_string(index=False))

    def profile(self, hardware: Hardware, disagreements: list[str]) -> None:
        self.say(f"1. Profile: {hardware.source}, {hardware.dtype}\n")
        rows = {row["key"]: row for row in fit_report(hardware)}
        self.table([profile_line(rows[key]) for key in SHOWN_LINES if key in rows])
        self.say(f"\nThe papers report R² ≥ {PAPERS_R2} for T_kv_gen and T_load_kv; a worse fit is marked.")
        for resource, of in hardware.notes.get(CONTENTION, {}).items():
            wait = f"{1e6 * of['wait_s']:.0f} µs a task and {of['factor'] - 1:.1%}"
            self.say(f"While copies and other threads run, {resource} takes {wait} longer than these lines predict.")
        if paused := {key: of for key, of in hardware.notes.get(AFTER_PAUSE, {}).items() if key in SHOWN_LINES}:
            ratios = ", ".join(f"{key} {of:.2f}" for key, of in paused.items())
            self.say(f"Slowdown of a task after a pause, which predictions do not include: {ratios}.")
        if disagreements:
            self.say(f"Two passes disagreed by more than 15 % on {len(disagreements)} sizes.")
        if note := company_note(hardware):
            self.say(f"Note: {note}.")

    def faster_link(self, slow: float, link: float) -> None:
        self.say(
            f"\nAt {slow} GB/s recomputing is faster on this machine than copying KV, so the best policy is no mix of "
            f"both. The link is set to {link} GB/s; --link-gb-per-s {slow} keeps the lower rate.\n"
        )

    def search(self, result: SearchResult, algorithm1: dict[str, float], tokens_per_s: float) -> None:
        p, ratio = result.prediction, result.kv_act_bytes_ratio
        ratio = f"{ratio:.2f}:1" if np.isfinite(ratio) else "no ACT"
        busy = ", ".join(f"{name} {p['busy'][name]:.0%}" for name in ("compute", "h2d", "d2h", "host_compute"))
        among = f" among {result.num_choices} kinds of policies" if result.num_choices > 1 else ""
        self.say(
            f"\n2. Search: the best mix of KV and ACT{among}, found in {result.search_s * 1e3:.1f} ms\n\n"
            f"ACT share by tokens {result.act_share:.3f}, KV:ACT by bytes {ratio}. "
            f"Algorithm 1: {algorithm1['paper']:.3f} by the papers' balance, "
            f"{algorithm1['full']:.3f} by the full one.\n"
            f"Predicted {tokens_per_s:.1f} tokens/s; {gib(sum(p['traffic_bytes']['h2d'].values()))} to the "
            f"device in the whole run; busy: {busy}; limited by {p['binding']}."
        )

    def trials(self, before: Policy, tried: Trials) -> None:
        """Print how trials changed the predictions and the choice."""
        was, now = before.share("act"), tried.policy.share("act")
        choice = f"the ACT share goes from {was:.2f} to {now:.2f}" if tried.policy != before else "the choice stays"
        num = counted(len(tried.tried), "candidate")
        self.say(f"\nTrials of {num}: {in_words(tried.hardware)}; {choice}.")

    def systems(self, policies: list[Policy], problem: Problem) -> None:
        self.say("\n2. Systems: the policy of each name\n")
        self.table([policy_line(policy, problem) for policy in policies])

    def exactness(self, exact: dict) -> None:
        self.say(f"\n3. Exactness: float32, {exact['num_prompts']} prompts, against transformers\n")
        rows = []
        for row in exact["rows"]:
            equal, exactly = f"{row['equal']} of {row['tokens']}", f"NO: {row['first_wrong']}"
            if row["exact"]:
                exactly = "yes"
            if not row["lossless"]:
                exactly = f"lossy: {row['equal'] / max(1, row['tokens']):.0%} agree"
            rows.append({"policy": row["policy"], "tokens equal": equal, "excused": row["excused"], "exact": exactly})
        self.table(rows)
        for prompt, text in exact["completions"]:
            self.say(f"\n  {prompt!r}\n    → {text!r}")

    def about_to_measure(self, workload: Workload, shape: ModelShape, num_policies: int, seconds: float) -> None:
        self.say(
            f"\nRunning {num_policies} policies side by side: {workload.num_requests} requests of "
            f"{int(workload.prompt_tokens[0])} tokens, {shape.num_layers} layers of {shape.name}; "
            f"about {duration(seconds)} by the prediction."
        )

    def speed(self, result: dict) -> None:
        self.say("\n4. Speed: decode tokens/s, median of interleaved rounds\n")
        reference = result["speed"][0]["reference"]
        self.table([speed_line(row) for row in result["speed"]])
        self.say(
            "\nAll columns are about the decode iterations, without the first and the last.\n"
            "limit: if the busiest resource never waited, by the profile; noise may exceed it. closed form, virtual:\n"
            "predictions. before trials: virtual with the uncorrected profile. error: virtual over measured. MB/iter:\n"
            "10^6 bytes to the device per iteration. overlap: the larger of ideal link and compute time over wall\n"
            "time, if only link and device work; noise may exceed 1. compute, link: busy shares.\n"
            f"= {reference}: tokens equal to {reference}'s; in {result['dtype']} rounding may change tokens."
        )
        if any(is_disturbed(row) for row in result["speed"] + result["sweep"]):
            self.say(
                f"{BUSY} The machine was busy: other processes used more than {MOST_OTHERS:.0%} of the cores in a "
                f"round, or rounds of\none policy differ by more than {MOST_SPREAD:.0%}. Run again on an idle machine."
            )
        if result["sweep"]:
            self.say("\nSweep over ACT shares\n")
            self.table([speed_line(row) for row in result["sweep"]])
        if words := verdict(result):
            self.say(f"\n{words}")
        violations = result["trace_violations"]
        self.say(f"\nTRACE VIOLATIONS: {violations[:3]}" if violations else "\nTraces: every task read the right data.")

    def breakdown(self, breakdowns: list[dict]) -> None:
        self.say("\n5. A decode step: ms by kind of task, predicted / measured\n")
        self.table(clock_pairs(breakdowns, _step_ms, ("step", *map(_words, KINDS)), digits=1))
        self.say(
            "\nKinds of one resource add up to its busy time; link, device, host and disk work in parallel. A paced\n"
            f"link catches up delays of up to {MOST_LATE_S * 1e3:.0f} ms: single copies may be faster than its rate.\n"
        )
        self.say("Traffic of a decode step in MB, equal on both clocks\n")
        self.table(traffic_table(breakdowns))
        self.say("\nBusy share of the decode, predicted / measured\n")
        self.table(clock_pairs(breakdowns, lambda step: step["busy"], RESOURCES, digits=2))

    def end(self, result: dict, out: Path) -> None:
        tables = "exactness.csv, speed.csv" + (", sweep.csv, throughput.png" if result["sweep"] else "")
        self.say(
            f"\nWritten to {out}: compare.json, {tables}, breakdown.csv, timeline.png, breakdown.png, traffic.png (and "
            "as PDF and SVG), trace.json (open it at ui.perfetto.dev), and hardware-"
            f"{result['device']}.json, this machine's profile (for --hardware). {result['seconds']:.0f} s."
        )


def profile_line(row: dict) -> dict:
    """Return a fitted line as a row of the printed table."""
    return {
        "line": row["key"],
        "GFLOP/s": _number(row["gflop_per_s"]),
        "GB/s": _number(row["gb_per_s"]),
        "intercept µs": f"{row['overhead_us']:.0f}",
        "R²": "" if row["r2"] is None else f"{row['r2']:.4f}" + (" worse" if row["worse_than_papers"] else ""),
        "points": row["num_samples"],
    }


def verdict(result: dict) -> str:
    """Return a sentence that compares the searched mix with the fastest other lossless policy; "" without a search.
    A policy beats another one if its median is more than TIE higher and its slowest round beats the other's fastest.
    Otherwise the two tie. The sentence ends with the range of the rounds' ratios."""
    rows = {row["policy"]: row for row in result["sweep"] + result["speed"] if row["lossless"]}
    searched = rows.pop("hybrid", None)
    if not result["search"] or not searched or not rows:
        return ""

    def ahead(row: dict, of: dict) -> float:
        """Return by which share a policy's median exceeds that of a policy it beats; 0 if it does not beat it."""
        share = row["measured_tokens_per_s"] / of["measured_tokens_per_s"] - 1
        return share if share > TIE and min(row["measured_rounds"]) > max(of["measured_rounds"]) else 0.0

    best = max(rows.values(), key=lambda row: (ahead(row, searched), row["measured_tokens_per_s"]))
    first, second = (best, searched) if ahead(best, searched) else (searched, best)
    low = min(first["measured_rounds"]) / max(second["measured_rounds"]) - 1
    high = max(first["measured_rounds"]) / min(second["measured_rounds"]) - 1
    rounds = f"(rounds: {low:+.1%} to {high:+.1%})"
    if share := ahead(best, searched):
        return f"The search missed: {best['policy']} was measured {share:.1%} faster than the searched mix {rounds}."
    if share := ahead(searched, best):
        return f"The searched mix is the fastest: {share:.1%} faster than {best['policy']} {rounds}."
    share = searched["measured_tokens_per_s"] / best["measured_tokens_per_s"] - 1
    return f"The searched mix ties with {best['policy']}: {share:+.1%} at the median {rounds}."


def speed_line(row: dict) -> dict:
    """Return a row of the printed speed table."""

    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    before = row.get("virtual_clock_before_trials_tokens_per_s")
    return {
        "policy": row["policy"],
        "ACT": f"{row['act_share']:.3f}",
        "limit": f"{row['limit_tokens_per_s']:.1f}",
        "closed form": f"{row['closed_form_tokens_per_s']:.1f}",
        **({"before trials": f"{before:.1f}"} if before else {}),
        "virtual": f"{row['virtual_clock_tokens_per_s']:.1f}",
        "measured": f"{row['measured_tokens_per_s']:.1f}{BUSY if is_disturbed(row) else ''}",
        "error": f"{row['error_virtual']:+.1%}",
        "MB/iter": f"{row['h2d_bytes_per_iteration'] / 1e6:.0f}",
        "overlap": share(row["overlap"]),
        "compute": share(row["busy_compute"]),
        "link": share(row["busy_h2d"]),
        f"= {row['reference']}": f"{row['tokens_equal']} of {row['tokens_compared']}"
        + ("" if row["lossless"] else " (lossy)"),
    }


def policy_line(policy: Policy, problem: Problem) -> dict:
    """Return a policy as a row of the printed table."""
    bits = policy.bits
    packed = {"weights": bits.weights, "kv": bits.kv, "act": bits.act}
    return {
        "policy": policy.name,
        "weights": _shares(kept_shares(problem, policy)),
        "context": _shares(policy.cache),
        "bits": " ".join(f"{name} {size}" for name, size in packed.items() if size != "native") or "native",
        "schedule": policy.schedule + ("" if policy.overlap == "full" else ", nothing at once"),
        "attention": policy.attending_tier,
        "mini-batch": "all" if policy.max_mini_batch_tokens >= WHOLE_BATCH else str(policy.max_mini_batch_tokens),
    }


def clock_pairs(
    breakdowns: list[dict], values_of: Callable[[dict], dict[str, float]], columns: Sequence[str], digits: int
) -> list[dict]:
    """Return a row per policy with "predicted / measured" in each of ``columns`` that ``values_of`` a breakdown has."""
    pairs = [[values_of(row[clock]) for clock in ("predicted", "measured")] for row in breakdowns]
    used = [column for column in columns if any(column in values for pair in pairs for values in pair)]

    def cell(pair: list[dict[str, float]], column: str) -> str:
        texts = [f"{values.get(column, 0.0):.{digits}f}" for values in pair]
        return " / ".join(texts) if any(column in values for values in pair) else ""

    cells = [{column: cell(pair, column) for column in used} for pair in pairs]
    return [{"policy": row["policy"], **texts} for row, texts in zip(breakdowns, cells, strict=True)]


def _step_ms(step: dict) -> dict[str, float]:
    return {_words(kind): seconds * 1e3 for kind, seconds in {"step": step["step_s"], **step["seconds"]}.items()}


def _words(name: str) -> str:
    return name.replace("_", " ")


def traffic_table(breakdowns: list[dict]) -> list[dict]:
    """Return a row per policy: MB per step by used link and cargo."""
    moved = [row["measured"]["bytes"] for row in breakdowns]
    used = [link for link in LINKS if any(size >= 5e3 for links in moved for size in links.get(link, {}).values())]
    rows = []
    for row, links in zip(breakdowns, moved, strict=True):
        cells = {"policy": row["policy"]}
        for link in used:
            sizes = links.get(link, {}).items()
            cells[link] = " ".join(f"{cargo} {size / 1e6:.2f}" for cargo, size in sizes if size >= 5e3)
        rows.append(cells)
    return rows


def _shares(shares: Mapping[str, float]) -> str:
    return " ".join(name if share == 1 else f"{name} {share:.2f}" for name, share in shares.items() if share > 0)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
