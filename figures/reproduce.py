"""Figures of the reproduced papers: our values solid, the paper's hollow and dashed, in one colour per series."""

import textwrap

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from figures.style import log_scale, look, rendered, style

PAPER = "#222222"
WIDTH, HEIGHT = 7.2, 4.2
MAX_TICKS = 12
MAX_MARKERS = 25
#: Characters that fit along a chart's x axis; longer labels are wrapped, or else rotated.
LABEL_ROOM = 72


def draw(figure) -> dict[str, bytes]:
    """Draw a record with name, kind (line | bar), frame, x, y, series, title, labels, paper, log_x, log_y; return its
    PNG, PDF and SVG by ending. Columns ``low`` and ``high`` of the frame are error bars.

    Equal records give equal bytes. Bars over a log axis, which has no zero to start from, are drawn as points.
    """
    with style():
        keys = _values(figure, figure.series) if figure.series else [None]
        rows = 0 if len(keys) < 2 and figure.paper is None else 1 + (len(keys) - 1) // 4
        canvas, axes = plt.subplots(figsize=(WIDTH, HEIGHT + 0.22 * rows), constrained_layout=True)
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
        return rendered(canvas)


def _values(figure, column: str) -> list:
    """Return the values of a column in order of appearance, ours first; sorted for numbers of the x column."""
    frames = [figure.frame, *([figure.paper] if figure.paper is not None else [])]
    values = list(pd.concat([pd.Series(frame[column]) for frame in frames], ignore_index=True).unique())
    return sorted(values) if column == figure.x and all(_is_number(value) for value in values) else values


def _is_number(value) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _part(frame: pd.DataFrame | None, figure, key, place: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return (x places, y values, how far error bars reach down and up or None) of one series, sorted by x."""
    if frame is None:
        return np.array([]), np.array([]), None
    chosen = np.array(frame[figure.series] == key) if figure.series else np.ones(len(frame), dtype=bool)
    x = np.array([place[value] for value in frame[figure.x]], dtype=float)[chosen]
    order = np.argsort(x, kind="stable")
    y, *ends = (
        np.array(frame[name], dtype=float)[chosen][order]
        for name in (figure.y, "low", "high")
        if name == figure.y or {"low", "high"} <= set(frame.columns)
    )
    return x[order], y, np.array([y - ends[0], ends[1] - y]) if ends else None


def _lines(axes, figure, keys: list, place: dict) -> None:
    """Draw our values solid and the paper's hollow and dashed. Of lines that lie on each other the first is widest."""
    parts = [_part(figure.frame, figure, key, place) for key in keys]
    for index, (key, (x, y, reach)) in enumerate(zip(keys, parts, strict=True)):
        color, marker, _ = look(index)
        paper_x, paper_y, _ = _part(figure.paper, figure, key, place)
        hollow = {"marker": marker, "ms": 8, "mfc": "none", "mec": color, "mew": 1.3}
        axes.plot(paper_x, paper_y, ls="--", lw=1.1, color=color, zorder=4, **hollow)
        same = sum(np.array_equal(x, other[0]) and np.allclose(y, other[1], rtol=1e-3) for other in parts[index + 1 :])
        size = 1 + 1.2 * same
        axes.plot(x, y, ls="-", lw=1.6 * size, color=color, marker=_marker(marker, x), ms=4.5 * size, zorder=3)
        if reach is not None:
            axes.errorbar(x, y, reach, fmt="none", ecolor=color, capsize=2.5, lw=1, zorder=3)


def _marker(marker: str, x) -> str:
    return marker if len(x) <= MAX_MARKERS else ""


def _bars(axes, figure, keys: list, place: dict) -> None:
    """Draw our values as filled bars side by side, and the paper's as a hollow bar around each."""
    width = min(0.5, 0.82 / len(keys))
    for index, key in enumerate(keys):
        color, marker, hatch = look(index)
        shift = (index - (len(keys) - 1) / 2) * width
        x, y, reach = _part(figure.frame, figure, key, place)
        paper_x, paper_y, _ = _part(figure.paper, figure, key, place)
        if figure.log_y:
            axes.plot(x + shift, y, ls="", color=color, marker=marker, ms=6, zorder=3)
            axes.plot(paper_x + shift, paper_y, ls="", color=PAPER, marker=marker, ms=9, mfc="none", zorder=4)
        else:
            axes.bar(x + shift, y, 0.66 * width, color=color, hatch=hatch, ec="white", lw=0, zorder=2)
            axes.bar(paper_x + shift, paper_y, 0.92 * width, fill=False, ec=PAPER, ls=(0, (3, 1.5)), lw=1.1, zorder=3)
        if reach is not None:
            axes.errorbar(x + shift, y, reach, fmt="none", ecolor=PAPER, capsize=2.5, lw=1, zorder=4)


def _x_axis(axes, figure, place: dict, is_text: bool) -> None:
    if is_text:
        room = max(8, LABEL_ROOM // len(place))
        labels = [textwrap.fill(str(x), room, break_on_hyphens=False, break_long_words=False) for x in place]
        axes.set_xticks(list(place.values()), labels)
        longest = max(len(line) for label in labels for line in label.split("\n"))
        if longest * len(labels) > LABEL_ROOM + 10 or max(label.count("\n") for label in labels) > 2:
            axes.set_xticks(list(place.values()), [str(x) for x in place])
            plt.setp(axes.get_xticklabels(), rotation=30, ha="right", rotation_mode="anchor")
        axes.set_xlim(-0.6, len(labels) - 0.4)
        return
    if figure.log_x:
        log_scale(axes.xaxis, "x", list(place.values()), base=2)
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
        log_scale(axes.yaxis, "y", values)
    elif np.nanmin(values) >= 0:
        axes.set_ylim(bottom=0)


def _legend(canvas, figure, keys: list) -> None:
    """Draw the legend below the axes: the meaning of solid and hollow, and every series."""

    nowhere = dict.fromkeys(figure.frame[figure.x], 0.0)
    points = figure.kind == "bar" and figure.log_y

    def ours(index: int, label: str, color: str | None = None) -> Patch | Line2D:
        of_series, x = look(index), _part(figure.frame, figure, keys[index], nowhere)[0]
        color = color or of_series.color
        if figure.kind == "bar" and not points:
            return Patch(fc=color, hatch=of_series.hatch, ec="white", lw=0, label=label)
        drawn = {"marker": _marker(of_series.marker, x), "ms": 4.5, "lw": 1.6, "ls": "" if points else "-"}
        return Line2D([], [], color=color, label=label, **drawn)

    handles = [] if keys == [None] else [ours(index, str(key)) for index, key in enumerate(keys)]
    if figure.paper is not None:
        first = look(0).color if len(keys) == 1 else "#777777"
        paper = Line2D([], [], color=first, marker="o", ms=8, mfc="none", mew=1.3, ls="--", lw=1.1, label="paper")
        if figure.kind == "bar" and not points:
            paper = Patch(fc="none", ec=PAPER, ls=(0, (3, 1.5)), lw=1.1, label="paper")
        handles = [ours(0, "ours", first), paper, *handles]
    if len(handles) > 1:
        longest = max(len(str(handle.get_label())) for handle in handles)
        columns = max(1, min(len(handles), 5, 80 // (longest + 7)))
        canvas.legend(handles=handles, ncol=columns, loc="outside lower center", fontsize=9, frameon=False)
