"""Figures of accuracy by position in the text."""

from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt

from figures.style import look, save, style


def by_chunk(path: Path, chunks: list[dict], reference: str) -> None:
    """Plot perplexity over the full cache's, and cosine similarity of attention weights, against the position.

    ``chunks``: rows with policy, first, end (positions), over_full and cosine (None where not measured); error bars
    are intervals, from over_full_low to over_full_high, where a row has them.
    """
    policies = list(dict.fromkeys(row["policy"] for row in chunks if row["policy"] != reference))
    panels = (("over_full", f"perplexity over {reference}'s"), ("cosine", "cosine of attention weights"))
    with style():
        figure, axes_pair = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
        for axes, (key, label) in zip(axes_pair, panels, strict=True):
            for index, policy in enumerate(policies):
                rows = [row for row in chunks if row["policy"] == policy and row[key] is not None]
                middles, values = [(row["first"] + row["end"]) / 2 for row in rows], [row[key] for row in rows]
                color, marker, _ = look(index)
                ends = [[row.get(f"{key}_{end}") for row in rows] for end in ("low", "high")]
                reach = np.abs(np.array(ends, dtype=float) - values)  # None is nan: no bar
                looks = {"color": color, "marker": marker, "ms": 4, "lw": 1.2, "capsize": 2, "elinewidth": 0.8}
                axes.errorbar(middles, values, reach, label=policy, **looks)
            axes.set_xlabel("position in the text, tokens")
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
        axes_pair[0].axhline(1.0, color="black", lw=0.8)
        axes_pair[0].legend(fontsize=8, loc="upper left")
        save(figure, path)
