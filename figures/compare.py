"""The pictures of the comparison: throughput against ACT share, and one iteration's timeline."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

VERB_COLORS = {
    "load_weights": "#7f7f7f",
    "load_act": "#ff9f40",
    "load_kv": "#1f77b4",
    "kv_gen": "#d95f02",
    "project": "#66a61e",
    "assemble": "#a6cee3",
    "attend": "#e7298a",
    "attend_prefill": "#e7298a",
    "finish": "#7570b3",
    "head": "#b2182b",
}
SHOWN_ROWS = (("h2d", "link"), ("compute", "compute"))


def throughput(
    path: Path,
    sweep: list[dict],
    curve_shares: list[float],
    curve_tokens_per_s: list[float],
    chosen: dict,
) -> None:
    """Decode tokens/s against the ACT share of tokens: both predictions, measured points with their range, the choice.

    ``sweep`` and ``chosen``: rows with act_share, virtual_clock_tokens_per_s, measured_tokens_per_s (the median) and
    measured_rounds.
    """
    figure, axes = plt.subplots(figsize=(7, 4.2), constrained_layout=True)
    shares = [row["act_share"] for row in sweep]
    measured = [row["measured_tokens_per_s"] for row in sweep]
    low = [row["measured_tokens_per_s"] - min(row["measured_rounds"]) for row in sweep]
    high = [max(row["measured_rounds"]) - row["measured_tokens_per_s"] for row in sweep]
    axes.plot(curve_shares, curve_tokens_per_s, color="#888888", lw=1.2, label="predicted, closed form")
    axes.plot(
        shares, [row["virtual_clock_tokens_per_s"] for row in sweep], "s--", color="#1f77b4", ms=4, lw=1,
        label="predicted, virtual clock",
    )  # fmt: skip
    axes.errorbar(
        shares, measured, yerr=[low, high], fmt="o", color="#d95f02", capsize=3, label="measured (median, range)"
    )
    axes.axvline(chosen["act_share"], color="#66a61e", lw=1.2, ls=":")
    axes.plot(
        [chosen["act_share"]], [chosen["measured_tokens_per_s"]], "*", color="#66a61e", ms=14, label="searched policy"
    )
    axes.set_xlabel("ACT share of tokens (0: kv_only, 1: act_only)")
    axes.set_ylabel("decode tokens/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def timeline(path: Path, traces: dict, iteration: int) -> None:
    """One iteration with its neighbours' edges: link and compute rows, the first trace above the second.

    ``traces``: name -> events (task, start_s, end_s) in stream order. Iteration i begins where the last sample of
    iteration i - 1 ends; a tenth of its length is shown on either side.
    """
    figure, panels = plt.subplots(
        len(traces), 1, sharex=True, figsize=(11, 2.0 * len(traces) + 0.6), constrained_layout=True
    )
    used: set[str] = set()
    left = right = 0.0
    for axes, (name, trace) in zip(panels, traces.items(), strict=True):
        ends = {}
        for task, _, end in trace:
            if task.verb == "sample":
                ends[task.iteration] = max(end, ends.get(task.iteration, 0.0))
        iteration = min(iteration, max(ends))
        begin, end = ends.get(iteration - 1, 0.0), ends[iteration]
        margin = 0.1 * (end - begin)
        for y, (resource, _) in enumerate(SHOWN_ROWS):
            for task, start, stop in trace:
                if task.resource != resource or stop < begin - margin or start > end + margin:
                    continue
                color = VERB_COLORS.get(task.verb, "#cccccc")
                axes.barh(
                    -y, (stop - start) * 1e3, left=(start - begin) * 1e3, height=0.72, color=color,
                    alpha=1.0 if task.iteration == iteration else 0.35, lw=0,
                )  # fmt: skip
                used.add(task.verb)
        for edge in (0.0, (end - begin) * 1e3):
            axes.axvline(edge, color="black", lw=0.8, ls="--")
        left, right = min(left, -margin * 1e3), max(right, (end - begin + margin) * 1e3)
        axes.set_yticks([-y for y in range(len(SHOWN_ROWS))], [label for _, label in SHOWN_ROWS])
        axes.set_title(f"{name}: iteration {iteration}, {(end - begin) * 1e3:.0f} ms", fontsize=9, loc="left")
    panels[-1].set_xlim(left, right)
    panels[-1].set_xlabel("ms; paler bars belong to the neighbouring iterations")
    shown = [Patch(color=color, label=verb) for verb, color in VERB_COLORS.items() if verb in used]
    figure.legend(handles=shown, ncol=len(shown), loc="outside lower center", fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
