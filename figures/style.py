"""One style for all figures: colours for colour-blind readers, looks that no two series share, three file formats."""

import io
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import AutoLocator, FuncFormatter, Locator, LogLocator, NullFormatter, NullLocator

from figures import FORMATS

DPI = 130
#: Okabe and Ito's colours, and two more.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999", "#7f4fc9", "#8c6d1f")
MARKERS = "osD^vPX*<>"
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++", "oo", "||", "**")
RC = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
    "text.parse_math": False,  # shows a $ as a dollar sign
    "svg.hashsalt": "flexhybrid",  # equal figures give equal bytes
    "pdf.fonttype": 42,
}
#: What a file says of itself: nothing that differs from run to run.
METADATA = {
    "png": {"Software": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    "svg": {"Date": None, "Creator": None},
}
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")  # powers of ten would need math text
LEAST_TICKS = 3  #: numbers on a log axis


class Look(NamedTuple):
    """How a series is drawn."""

    color: str
    marker: str
    hatch: str


def look(index: int) -> Look:
    """Return the look of a figure's series by its number: the first hundred share neither colour with marker nor
    colour with hatch."""
    shifted = (index + index // len(COLORS)) % len(MARKERS)
    return Look(COLORS[index % len(COLORS)], MARKERS[shifted], HATCHES[shifted])


def style():
    """Return a context in which figures are drawn, whatever a user's matplotlib settings are."""
    return plt.style.context(["default", RC])


def rendered(figure) -> dict[str, bytes]:
    """Return a matplotlib figure as a file of each of FORMATS, and close it. Equal figures give equal bytes."""
    files = {}
    for ending in FORMATS:
        buffer = io.BytesIO()
        figure.savefig(buffer, format=ending, dpi=DPI, metadata=METADATA[ending])
        files[ending] = buffer.getvalue()
    plt.close(figure)
    return files


def save(figure, path: Path) -> None:
    """Write a matplotlib figure to ``path`` in each of FORMATS, and close it."""
    for ending, content in rendered(figure).items():
        path.with_suffix(f".{ending}").write_bytes(content)


def log_scale(axis, name: str, values, base: int = 10) -> None:
    """Make an axis (``axes.xaxis``, name "x") logarithmic, with LEAST_TICKS numbers on it or more: powers of the base,
    their 1, 2 and 5 times, or round numbers over less than that. ``values``: what is drawn."""
    getattr(axis.axes, f"set_{name}scale")("log", base=base)
    shown = np.asarray(values, dtype=float)
    shown = shown[np.isfinite(shown) & (shown > 0)]
    if not len(shown):
        return
    low, high = getattr(axis.axes, f"get_{name}lim")()
    locators: tuple[Locator, ...] = (LogLocator(base), LogLocator(base, subs=(1.0, 2.0, 5.0)), AutoLocator())
    for locator in locators:
        axis.set_major_locator(locator)
        if sum(low <= tick <= high for tick in axis.get_majorticklocs()) >= LEAST_TICKS:
            break
    axis.set_major_formatter(_PLAIN)
    axis.set_minor_formatter(NullFormatter())
    if isinstance(axis.get_major_locator(), AutoLocator):
        axis.set_minor_locator(NullLocator())
