"""Figures of the comparison: throughput against ACT share, an iteration's timeline, the parts of a decode step."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from figures.style import COLORS, HATCHES, save, style

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
#: Resource -> the kinds of its tasks, and what its bar is called.
BARS = {
    "compute": ("compute",),
    "h2d": ("load_weights", "load_cache", "load_activation", "load_other"),
    "host_compute": ("host_compute",),
    "d2h": ("store",),
    "disk_read": ("disk_read",),
    "disk_write": ("disk_write",),
}
BAR_NAMES = {"step": "step", "compute": "compute", "h2d": "to device", "host_compute": "host", "d2h": "from device"}
BAR_NAMES |= {"disk_read": "disk read", "disk_write": "disk write"}
LEAST_BAR = 0.01  #: share of a step that gets a bar
CARGO_COLORS = {"weights": GREY, "kv": BLUE, "act": ORANGE, "hidden": SKY, "state": GREEN}
LINK_HATCHES = dict(zip(("h2d", "d2h", "disk_read", "disk_write"), HATCHES, strict=False))
SHOWN_ROWS = (("h2d", "link"), ("compute", "compute"))


@style()
def throughput(
    path: Path, sweep: list[dict], curve_shares: list[float], curve_tokens_per_s: list[float], chosen: dict, title: str
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
    walked = sorted((row["act_share"], row["virtual_clock_tokens_per_s"]) for row in [*sweep, chosen])
    axes.plot(*zip(*walked), "s--", color=BLUE, ms=4, lw=1, label="predicted, virtual clock")
    points = {"fmt": "o", "color": RED, "capsize": 3, "label": "measured (median, range)"}
    axes.errorbar(shares, measured, yerr=[low, high], **points)
    axes.axvline(chosen["act_share"], color=GREEN, lw=1.2, ls=":")
    best = [chosen["act_share"]], [chosen["measured_tokens_per_s"]]
    axes.plot(*best, "*", color=GREEN, ms=14, label="searched policy, measured")
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("ACT share of tokens (0: kv_only, 1: act_only)")
    axes.set_ylabel("decode tokens/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)


@style()
def timeline(path: Path, traces: dict, iteration: int, title: str) -> None:
    """Write the figure of ``draw_timeline``."""
    save(draw_timeline(traces, iteration, title), path)


def draw_timeline(traces: Mapping[str, list], iteration: int, title: str):
    """Draw one iteration and the edges of its neighbours: link and compute rows, the first trace above the second.

    ``traces``: name -> events (task, start_s, end_s) in stream order. Iteration i begins where the last sample of
    iteration i - 1 ends; a tenth of its length is shown on either side.
    """
    size = (11, 2.0 * len(traces) + 0.6)
    figure, panels = plt.subplots(len(traces), 1, sharex=True, figsize=size, constrained_layout=True, squeeze=False)
    used: set[str] = set()
    left = right = 0.0
    for axes, (name, trace) in zip(panels[:, 0], traces.items(), strict=True):
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
    figure.suptitle(title, fontsize=9)
    panels[-1, 0].set_xlim(left, right)
    panels[-1, 0].set_xlabel("ms; paler bars belong to the neighbouring iterations")
    shown = [Patch(color=color, label=verb) for verb, color in VERB_COLORS.items() if verb in used]
    figure.legend(handles=shown, ncol=len(shown), loc="outside lower center", fontsize=8, frameon=False)
    return figure


@style()
def breakdown(path: Path, systems: list[dict], title: str) -> None:
    """Draw a decode step of each system (KVPR's Fig. 10): its wall time, and beside it the busy time of each resource.

    ``systems``: {"policy", "predicted": {"step_s", "seconds": {kind: s}}, "measured": the same}. Bars are measured,
    those of a resource by kind of task; ticks are predicted; "step_rounds_s" are the error bar of a step.
    """
    resources = ["step", *(resource for resource, kinds in BARS.items() if _is_seen(systems, kinds))]
    figure, axes = plt.subplots(figsize=(2.4 + 0.42 * len(systems) * len(resources), 4.8), constrained_layout=True)
    places, used = [], []
    for x, system in enumerate(systems):
        measured, predicted = system["measured"], system["predicted"]
        for i, resource in enumerate(resources):
            place, bottom = x + (i - (len(resources) - 1) / 2) * 0.86 / len(resources), 0.0
            drawn = {"width": 0.76 / len(resources), "edgecolor": "white", "lw": 0}
            kinds = BARS.get(resource, ("step",))
            of_both = [{"step": clock["step_s"], **clock["seconds"]} for clock in (measured, predicted)]
            for kind in kinds:
                height = of_both[0].get(kind, 0.0) * 1e3
                axes.bar(place, height, bottom=bottom, color=KIND_COLORS.get(kind, BLACK), **drawn)
                bottom += height
                used += [kind] if height else []
            axes.plot([place], [1e3 * sum(of_both[1].get(kind, 0.0) for kind in kinds)], "_", color=RED, ms=11, mew=2)
            places.append(place)
        rounds = [s * 1e3 for s in measured.get("step_rounds_s", (measured["step_s"],))]
        step = measured["step_s"] * 1e3
        reach = [[step - min(rounds)], [max(rounds) - step]]
        axes.errorbar(places[-len(resources)], step, reach, fmt="none", ecolor=GREY, capsize=3)
    _name_systems(axes, systems)
    axes.tick_params(axis="x", which="major", pad=46, length=0, rotation=0)
    plt.setp(axes.get_xticklabels(), ha="center")
    names = [BAR_NAMES[resource] for resource in resources] * len(systems)
    axes.xaxis.remove_overlapping_locs = False  # the middle bar and its system have the same place
    axes.set_xticks(places, names, minor=True, rotation=90, fontsize=7)
    axes.set_ylabel("ms of a decode step")
    axes.set_title(
        f"{title}\nWall time of a decode step, and how long of it each resource is busy", fontsize=9, loc="left"
    )
    colors = {"step": BLACK, **KIND_COLORS}
    shown = [Patch(color=color, label=kind.replace("_", " ")) for kind, color in colors.items() if kind in used]
    tick = Line2D([], [], color=RED, marker="_", ls="", ms=11, mew=2, label="predicted")
    figure.legend(handles=[*shown, tick], ncol=4, loc="outside lower center", fontsize=8, frameon=False)
    save(figure, path)


def _is_seen(systems: list[dict], kinds: tuple[str, ...]) -> bool:
    """Return whether tasks of these kinds take a share of a step that a bar can show."""
    measured = [system["measured"] for system in systems]
    return any(sum(of["seconds"].get(kind, 0.0) for kind in kinds) > LEAST_BAR * of["step_s"] for of in measured)


@style()
def traffic(path: Path, systems: list[dict], title: str) -> None:
    """Draw the bytes of a decode step by link and cargo (HybridServe's Fig. 13).

    ``systems``: as for ``breakdown``, with "bytes": {link: {cargo: bytes}}.
    """
    figure, axes = plt.subplots(figsize=(2.6 + 0.9 * len(systems), 4.4), constrained_layout=True)
    cargoes, links = [], []
    for x, system in enumerate(systems):
        bottom = 0.0
        for link, hatch in LINK_HATCHES.items():
            for cargo, color in CARGO_COLORS.items():
                height = system["measured"]["bytes"].get(link, {}).get(cargo, 0.0) / 1e6
                if height:
                    axes.bar(x, height, 0.6, bottom=bottom, color=color, hatch=hatch, edgecolor="white", lw=0)
                    bottom += height
                    cargoes.append(cargo)
                    links.append(link)
    axes.margins(y=0.08)
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_ylabel("MB of a decode step")
    _name_systems(axes, systems)
    shown = [Patch(color=color, label=cargo) for cargo, color in CARGO_COLORS.items() if cargo in cargoes]
    hatches = {link: hatch for link, hatch in LINK_HATCHES.items() if link in links}
    grey = {"facecolor": "#dddddd", "edgecolor": "black", "lw": 0}
    shown += [Patch(hatch=hatch, label=link, **grey) for link, hatch in hatches.items()]
    figure.legend(handles=shown, fontsize=8, ncol=4, loc="outside lower center", frameon=False)
    save(figure, path)


def _name_systems(axes, systems: list[dict]) -> None:
    axes.set_xticks(range(len(systems)), [system["policy"] for system in systems], rotation=25, ha="right", fontsize=8)
    axes.grid(axis="y", alpha=0.3)
