"""Figures of the comparison: throughput against ACT share, an iteration's timeline, the parts of a decode step."""

from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from figures.style import COLORS, HATCHES, look, save, style

BLUE, RED, GREEN, PINK, SKY, ORANGE, BLACK, GREY, VIOLET, BROWN = COLORS
VERB_COLORS = {
    "load_weights": GREY,
    "load_act": ORANGE,
    "load_kv": BLUE,
    "kv_gen": RED,
    "project": GREEN,
    "assemble": BROWN,
    "attend": PINK,
    "attend_prefill": PINK,
    "finish": VIOLET,
    "head": BLACK,
}
KIND_COLORS = {
    "load_weights": GREY,
    "load_cache": BLUE,
    "load_activation": ORANGE,
    "load_other": SKY,
    "compute": GREEN,
    "host_compute": PINK,
    "store": VIOLET,
    "disk_read": BROWN,
    "disk_write": RED,
}
CARGO_COLORS = {"weights": GREY, "kv": BLUE, "act": ORANGE, "hidden": SKY, "state": GREEN}
LINK_HATCHES = dict(zip(("h2d", "d2h", "disk_read", "disk_write"), HATCHES, strict=False))
RESOURCES = ("compute", "h2d", "d2h", "host_compute", "disk_read", "disk_write")
SHOWN_ROWS = (("h2d", "link"), ("compute", "compute"))


@style()
def throughput(
    path: Path, sweep: list[dict], curve_shares: list[float], curve_tokens_per_s: list[float], chosen: dict
) -> None:
    """Plot decode tokens/s against the ACT share: both predictions, measured points with their range, the choice.

    ``sweep`` and ``chosen``: rows with act_share, virtual_clock_tokens_per_s, measured_tokens_per_s (the median) and
    measured_rounds.
    """
    figure, axes = plt.subplots(figsize=(7, 4.2), constrained_layout=True)
    shares = [row["act_share"] for row in sweep]
    measured = [row["measured_tokens_per_s"] for row in sweep]
    low = [row["measured_tokens_per_s"] - min(row["measured_rounds"]) for row in sweep]
    high = [max(row["measured_rounds"]) - row["measured_tokens_per_s"] for row in sweep]
    axes.plot(curve_shares, curve_tokens_per_s, color=GREY, lw=1.2, label="predicted, closed form")
    virtual = [row["virtual_clock_tokens_per_s"] for row in sweep]
    axes.plot(shares, virtual, "s--", color=BLUE, ms=4, lw=1, label="predicted, virtual clock")
    points = {"fmt": "o", "color": RED, "capsize": 3, "label": "measured (median, range)"}
    axes.errorbar(shares, measured, yerr=[low, high], **points)
    axes.axvline(chosen["act_share"], color=GREEN, lw=1.2, ls=":")
    best = [chosen["act_share"]], [chosen["measured_tokens_per_s"]]
    axes.plot(*best, "*", color=GREEN, ms=14, label="searched policy, measured")
    axes.set_xlabel("ACT share of tokens (0: kv_only, 1: act_only)")
    axes.set_ylabel("decode tokens/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)


@style()
def timeline(path: Path, traces: dict, iteration: int) -> None:
    """Draw one iteration and the edges of its neighbours: link and compute rows, the first trace above the second.

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
                drawn = {"color": VERB_COLORS.get(task.verb, "#cccccc"), "height": 0.72, "lw": 0}
                drawn["alpha"] = 1.0 if task.iteration == iteration else 0.35
                axes.barh(-y, (stop - start) * 1e3, left=(start - begin) * 1e3, **drawn)
                used.add(task.verb)
        for edge in (0.0, (end - begin) * 1e3):
            axes.axvline(edge, color=BLACK, lw=0.8, ls="--")
        left, right = min(left, -margin * 1e3), max(right, (end - begin + margin) * 1e3)
        axes.set_yticks([-y for y in range(len(SHOWN_ROWS))], [label for _, label in SHOWN_ROWS])
        axes.set_title(f"{name}: iteration {iteration}, {(end - begin) * 1e3:.0f} ms", fontsize=9, loc="left")
    panels[-1].set_xlim(left, right)
    panels[-1].set_xlabel("ms; paler bars belong to the neighbouring iterations")
    shown = [Patch(color=color, label=verb) for verb, color in VERB_COLORS.items() if verb in used]
    figure.legend(handles=shown, ncol=len(shown), loc="outside lower center", fontsize=8, frameon=False)
    save(figure, path)


@style()
def breakdown(path: Path, systems: list[dict]) -> None:
    """Draw the seconds of a decode step by kind of task, predicted beside measured for each system (KVPR's Fig. 10).

    ``systems``: {"policy", "predicted": {"step_s", "seconds": {kind: s}}, "measured": the same}. Kinds are stacked
    though they overlap in time; the black tick is the step's length, "step_rounds_s" its error bar.
    """
    figure, axes = plt.subplots(figsize=(1.6 + 1.3 * len(systems), 4.4), constrained_layout=True)
    used = []
    for x, system in enumerate(systems):
        for offset, clock, drawn in ((-0.2, "predicted", {"alpha": 0.55, "hatch": "//"}), (0.2, "measured", {})):
            bottom = 0.0
            for kind, color in KIND_COLORS.items():
                height = system[clock]["seconds"].get(kind, 0.0) * 1e3
                if height:
                    axes.bar(x + offset, height, 0.36, bottom=bottom, color=color, edgecolor="white", lw=0, **drawn)
                    bottom += height
                    used.append(kind)
            step, rounds = system[clock]["step_s"] * 1e3, [s * 1e3 for s in system[clock].get("step_rounds_s", ())]
            axes.plot([x + offset - 0.18, x + offset + 0.18], [step, step], color=BLACK, lw=1.6)
            if rounds:
                reach = [[step - min(rounds)], [max(rounds) - step]]
                axes.errorbar([x + offset], [step], reach, fmt="none", ecolor=BLACK, capsize=3)
    _name_systems(axes, systems)
    axes.set_ylabel("ms a decode step")
    axes.set_title(
        "left, hatched: predicted; right: measured; black: the step, bars: its rounds", fontsize=9, loc="left"
    )
    shown = [Patch(color=color, label=kind.replace("_", " ")) for kind, color in KIND_COLORS.items() if kind in used]
    figure.legend(handles=shown, ncol=3, loc="outside lower center", fontsize=8, frameon=False)
    save(figure, path)


@style()
def traffic(path: Path, systems: list[dict]) -> None:
    """Draw the bytes of a decode step by link and cargo, and busy shares of resources (HybridServe's Fig. 13 and 14).

    ``systems``: as for ``breakdown``, with "bytes": {link: {cargo: bytes}} and "busy": {resource: share}.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(3.2 + 2.4 * len(systems), 4.4), constrained_layout=True)
    cargoes, links = [], []
    for x, system in enumerate(systems):
        bottom = 0.0
        for link, hatch in LINK_HATCHES.items():
            for cargo, color in CARGO_COLORS.items():
                height = system["measured"]["bytes"].get(link, {}).get(cargo, 0.0) / 1e6
                if height:
                    left.bar(x, height, 0.6, bottom=bottom, color=color, hatch=hatch, edgecolor="white", lw=0)
                    bottom += height
                    cargoes.append(cargo)
                    links.append(link)
    left.margins(y=0.08)
    left.set_ylabel("MB a decode step")
    _name_systems(left, systems)
    shown = [Patch(color=color, label=cargo) for cargo, color in CARGO_COLORS.items() if cargo in cargoes]
    hatches = {link: hatch for link, hatch in LINK_HATCHES.items() if link in links}
    grey = {"facecolor": "#dddddd", "edgecolor": "black", "lw": 0}
    shown += [Patch(hatch=hatch, label=link, **grey) for link, hatch in hatches.items()]
    figure.legend(handles=shown, fontsize=7, ncol=4, loc="outside lower left", frameon=False)
    busy = [r for r in RESOURCES if any(r in system["measured"]["busy"] for system in systems)]
    width = 0.8 / max(1, len(busy))
    for x, system in enumerate(systems):
        for i, resource in enumerate(busy):
            place = x + (i - (len(busy) - 1) / 2) * width
            share = system["measured"]["busy"].get(resource, 0.0)
            color, _, hatch = look(RESOURCES.index(resource))
            right.bar(place, share, width, color=color, hatch=hatch, ec="white", lw=0, label="" if x else resource)
            right.plot([place], [system["predicted"]["busy"].get(resource, 0.0)], "_", color=BLACK, ms=9)
    right.set_ylabel("busy share of a decode step")
    right.set_ylim(0, 1.05)
    right.set_title("bars: measured; ticks: predicted", fontsize=9, loc="left")
    _name_systems(right, systems)
    figure.legend(
        *right.get_legend_handles_labels(), fontsize=7, ncol=len(busy), loc="outside lower right", frameon=False
    )
    save(figure, path)


def _name_systems(axes, systems: list[dict]) -> None:
    axes.set_xticks(range(len(systems)), [system["policy"] for system in systems], rotation=25, ha="right", fontsize=8)
    axes.grid(axis="y", alpha=0.3)
