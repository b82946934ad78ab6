"""Figures of the reproduced papers: our values solid, the paper's hollow and dashed, in one colour per series."""

import textwrap
from pathlib import Path
from typing import BinaryIO

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

#: Colours for colour-blind readers (Okabe and Ito); markers differ as well.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999", "#7f4fc9", "#8c6d1f")
MARKERS = "osD^vPX*<>"
PAPER = "#222222"
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.parse_math": False,  # shows a $ as a dollar sign
}
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")  # powers of ten would need math text
WIDTH, HEIGHT, DPI = 7.2, 4.2, 130
MAX_TICKS = 12
MAX_MARKERS = 25
#: Characters that fit along a chart's x axis; longer labels are wrapped, or else rotated.
LABEL_ROOM = 72


def draw(figure, target: Path | BinaryIO) -> None:
    """Draw a record with name, kind (line | bar), frame, x, y, series, title, labels, paper, log_x, log_y as a PNG.

    Equal records give equal bytes, whatever a user's matplotlib settings are.
    """
    with plt.style.context(["default", STYLE]):
        keys = _values(figure, figure.series) if figure.series else [None]
        rows = 0 if len(keys) < 2 and figure.paper is None else 1 + (len(keys) - 1) // 4
        canvas, axes = plt.subplots(figsize=(WIDTH, HEIGHT + 0.22 * rows), constrained_layout=True)
        try:
            xs = _values(figure, figure.x)
            is_text = figure.kind == "bar" or not all(_is_number(x) for x in xs)
            place = {x: float(index) if is_text else float(x) for index, x in enumerate(xs)}
            (_bars if figure.kind == "bar" else _lines)(axes, figure, keys, place)
            _x_axis(axes, figure, place, is_text)
            _y_axis(axes, figure)
            axes.set_xlabel(figure.x_label)
            axes.set_ylabel(figure.y_label)
            axes.set_title(figure.title, loc="left", wrap=True)
            _legend(canvas, figure, keys)
            canvas.savefig(target, format="png", dpi=DPI, metadata={"Software": None})
        finally:
            plt.close(canvas)


def _values(figure, column: str) -> list:
    """Return the values of a column in order of appearance, ours first; sorted for numbers of the x column."""
    frames = [figure.frame, *([figure.paper] if figure.paper is not None else [])]
    values = list(pd.concat([pd.Series(frame[column]) for frame in frames], ignore_index=True).unique())
    return sorted(values) if column == figure.x and all(_is_number(value) for value in values) else values


def _is_number(value) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _part(frame: pd.DataFrame | None, figure, key, place: dict) -> tuple[np.ndarray, np.ndarray]:
    """Return (x places, y values) of one series, sorted by x."""
    if frame is None:
        return np.array([]), np.array([])
    chosen = np.array(frame[figure.series] == key) if figure.series else np.ones(len(frame), dtype=bool)
    x = np.array([place[value] for value in frame[figure.x]], dtype=float)[chosen]
    order = np.argsort(x, kind="stable")
    return x[order], np.array(frame[figure.y], dtype=float)[chosen][order]


def _look(index: int) -> tuple[str, str]:
    return COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]


def _lines(axes, figure, keys: list, place: dict) -> None:
    for index, key in enumerate(keys):
        color, marker = _look(index)
        x, y = _part(figure.paper, figure, key, place)
        axes.plot(x, y, ls="--", lw=1.1, color=color, marker=marker, ms=8, mfc="none", mec=color, mew=1.3, zorder=4)
        x, y = _part(figure.frame, figure, key, place)
        axes.plot(x, y, ls="-", lw=1.6, color=color, marker=marker if len(x) <= MAX_MARKERS else "", ms=4.5, zorder=3)


def _bars(axes, figure, keys: list, place: dict) -> None:
    """Draw our values as filled bars side by side, and the paper's as a hollow bar around each."""
    width = min(0.5, 0.82 / len(keys))
    for index, key in enumerate(keys):
        color, _ = _look(index)
        shift = (index - (len(keys) - 1) / 2) * width
        x, y = _part(figure.frame, figure, key, place)
        axes.bar(x + shift, y, 0.66 * width, color=color, zorder=2)
        x, y = _part(figure.paper, figure, key, place)
        axes.bar(x + shift, y, 0.92 * width, fill=False, ec=PAPER, ls=(0, (3, 1.5)), lw=1.1, zorder=3)


def _x_axis(axes, figure, place: dict, is_text: bool) -> None:
    if is_text:
        labels = [textwrap.fill(str(x), max(8, LABEL_ROOM // len(place)), break_on_hyphens=False) for x in place]
        axes.set_xticks(list(place.values()), labels)
        longest = max(len(line) for label in labels for line in label.split("\n"))
        if longest * len(labels) > LABEL_ROOM + 10 or max(label.count("\n") for label in labels) > 2:
            axes.set_xticks(list(place.values()), [str(x) for x in place])
            plt.setp(axes.get_xticklabels(), rotation=30, ha="right", rotation_mode="anchor")
        axes.set_xlim(-0.6, len(labels) - 0.4)
        return
    if figure.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(_PLAIN)
    if len(place) <= MAX_TICKS and (figure.log_x or _spread(list(place.values()))):
        axes.set_xticks(list(place.values()), [f"{x:g}" for x in place])
        axes.minorticks_off()


def _spread(values: list[float]) -> bool:
    """Return whether labels at these places do not overlap on a linear axis."""
    values = sorted(values)
    return len(values) < 2 or float(min(np.diff(values))) > 0.06 * (values[-1] - values[0])


def _y_axis(axes, figure) -> None:
    axes.grid(axis="y" if figure.kind == "bar" else "both", alpha=0.3)
    values = np.concatenate(
        [frame[figure.y].to_numpy(float) for frame in (figure.frame, figure.paper) if frame is not None]
    )
    if figure.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_PLAIN)
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif np.nanmin(values) >= 0:
        axes.set_ylim(bottom=0)


def _legend(canvas, figure, keys: list) -> None:
    """Draw the legend below the axes: the meaning of solid and hollow, and every series."""

    def ours(color: str, marker: str, label: str) -> Patch | Line2D:
        if figure.kind == "bar":
            return Patch(fc=color, label=label)
        return Line2D([], [], color=color, marker=marker, ms=4.5, lw=1.6, label=label)

    handles = [] if keys == [None] else [ours(*_look(index), str(key)) for index, key in enumerate(keys)]
    if figure.paper is not None:
        first = _look(0)[0] if len(keys) == 1 else "#777777"
        paper = Line2D([], [], color=first, marker="o", ms=8, mfc="none", mew=1.3, ls="--", lw=1.1, label="paper")
        if figure.kind == "bar":
            paper = Patch(fc="none", ec=PAPER, ls=(0, (3, 1.5)), lw=1.1, label="paper")
        handles = [ours(first, "o", "ours"), paper, *handles]
    if len(handles) > 1:
        longest = max(len(str(handle.get_label())) for handle in handles)
        columns = max(1, min(len(handles), 5, 80 // (longest + 7)))
        canvas.legend(handles=handles, ncol=columns, loc="outside lower center", fontsize=9, frameon=False)
