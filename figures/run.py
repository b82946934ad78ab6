"""Figures of one run's report, as SVG: speed and memory over time, lengths, where things are stored, an iteration."""

import io
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib import pyplot as plt

from figures.compare import draw_timeline
from figures.style import COLORS, METADATA, style

BLUE, RED, GREEN, _, SKY, ORANGE, _, GREY, *_ = COLORS
TIER_COLORS = {"device": GREEN, "host": ORANGE, "disk": GREY}
MOST_BINS = 40
GIB = 2**30


def svg(draw: Callable) -> Callable[..., bytes]:
    """Return the drawing function with its figure rendered as an SVG file, in the project's style."""

    def rendered(*arguments) -> bytes:
        with style():
            figure, buffer = draw(*arguments), io.BytesIO()
            figure.savefig(buffer, format="svg", metadata=METADATA["svg"])
            plt.close(figure)
        return buffer.getvalue()

    return rendered


@svg
def over_time(samples: Sequence[tuple[float, int, int, int]], predicted_rate: float | None):
    """Draw tokens/s and memory in use over time. ``samples``: (seconds, tokens so far, host bytes, device bytes; 0
    without a GPU). ``predicted_rate``: tokens/s of the whole run; None: no prediction."""
    seconds, tokens, host, device = np.array(samples, dtype=float).T
    figure, (speed, memory) = plt.subplots(2, 1, sharex=True, figsize=(8, 4.6), constrained_layout=True)
    rates = np.diff(tokens) / np.maximum(np.diff(seconds), 1e-9)
    speed.stairs(rates, seconds, color=BLUE, label="measured")
    if predicted_rate:
        speed.axhline(predicted_rate, color=RED, ls="--", lw=1, label="predicted mean")
    speed.set_ylabel("generated tokens/s")
    memory.plot(seconds, host / GIB, color=ORANGE, label="process, host memory")
    if device.any():
        memory.plot(seconds, device / GIB, color=GREEN, label="allocated on the device")
    memory.set_ylabel("memory, GiB")
    memory.set_xlabel("seconds since the first request began")
    for axes in (speed, memory):
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure


@svg
def lengths(prompt_tokens: np.ndarray, answer_tokens: np.ndarray):
    """Draw how many answered requests have which prompt and answer lengths, in tokens."""
    figure, panels = plt.subplots(1, 2, sharey=True, figsize=(8, 2.8), constrained_layout=True)
    for axes, tokens, name, color in zip(
        panels, (prompt_tokens, answer_tokens), ("prompt", "answer"), (SKY, BLUE), strict=True
    ):
        axes.hist(tokens, bins=min(MOST_BINS, max(1, int(np.ptp(tokens)) + 1)), color=color)
        axes.set_xlabel(f"tokens of the {name}: mean {tokens.mean():.4g}, most {tokens.max():,}")
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("requests")
    return figure


@svg
def tiers(shares: Mapping[str, Mapping[str, float]]):
    """Draw where a policy keeps things. ``shares``: such as "weights" -> {place: share}, a place is a tier, or a name
    that has one, such as "kv@host"."""
    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.5 * len(shares)), constrained_layout=True)
    for row, places in enumerate(shares.values()):
        left = 0.0
        for place, share in places.items():
            tier = next((tier for tier in TIER_COLORS if tier in place.rpartition("@")[2]), "")
            axes.barh(-row, share, left=left, color=TIER_COLORS.get(tier, SKY), edgecolor="white", height=0.8)
            if share > 0.06:
                axes.text(left + share / 2, -row, f"{place}\n{share:.0%}", ha="center", va="center", fontsize=7)
            left += share
    axes.set_yticks([-row for row in range(len(shares))], list(shares))
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    return figure


@svg
def iteration(traces: Mapping[str, list]):
    """Draw the second iteration of each trace, or the only one: link and compute tasks over time. ``traces``: clock ->
    events."""
    return draw_timeline(traces, 1, "")
