"""CAPTURE and HybridServe (KAIST, IEEE CAL 2025 and arXiv 2501.01792): their tables and figures about speed, by name.

``capture_setup`` has the testbed, constants and systems; the other modules have the experiments.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from experiments.reproduce.capture import setup
from experiments.reproduce.capture.figures import (
    figure3,
    figure4,
    figure6,
    figure11,
    figure13,
    figure14,
    traffic_reduction,
)
from experiments.reproduce.capture.systems import figure12, flexgen_link, headline_rows
from experiments.reproduce.capture.table3 import table3
from experiments.reproduce.experiment import Experiment, table

#: The ratios that the papers' abstracts, introductions and section leads quote, once each.
HEADLINES = ("ch020", "ch022", "ch023", "ch021", "ch026", "ch073", "ch074", "ch075", "ch076")


def headline_table() -> pd.DataFrame:
    """HEADLINES beside ours; context, for each is judged in its own experiment."""
    rows = headline_rows()
    for batch, row_id in ((32, "ch075"), (64, "ch076")):
        what = f"cache traffic of FlexGen over hybrid_full, batch {batch}"
        rows += setup.headlines(row_id, traffic_reduction(batch), what)
    chosen = {row["source"].split()[0]: row for row in rows}
    return table([chosen[row_id] | {"role": "context", "aside": ""} for row_id in HEADLINES])


def error_factor(rows: pd.DataFrame) -> float:
    """Geometric mean of the larger over the smaller of ours and the paper's, less 1."""
    return float(np.exp(np.abs(np.log(rows["ours"] / rows["paper"])).mean()) - 1)


def headlines() -> Experiment:
    rows = headline_table()
    worst = rows.loc[rows["error"].abs().idxmax()]
    return Experiment(
        "capture-headlines", setup.PAPER, "The headline ratios at a glance",
        "What the whole system gains over FlexGen and over ACT alone, and the traffic that it saves.",
        rows, (), setup.all_constants(),
        notes=(
            f"Nine ratios: they are off by a factor of {1 + error_factor(rows):.3f} on average (geometric mean of the "
            f"larger over the smaller); geometric mean of the errors {setup.geomean(rows['error'].abs()):.1%}; "
            f"furthest off {worst['error']:+.1%} ({worst['what']}).",
        ),
    )  # fmt: skip


EXPERIMENTS: dict[str, Callable[[], Experiment]] = {
    "capture-headlines": headlines,
    "capture-table3": table3,
    "capture-fig12": figure12,
    "capture-flexgen": flexgen_link,
    "capture-fig13": figure13,
    "capture-fig14": figure14,
    "capture-fig3": figure3,
    "capture-fig4": figure4,
    "capture-fig6": figure6,
    "capture-fig11": figure11,
}
