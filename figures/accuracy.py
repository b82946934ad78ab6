"""Figures of accuracy by position in the text."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def by_chunk(path: Path, chunks: list[dict], reference: str) -> None:
    """Plot perplexity over the full cache's, and cosine similarity of attention weights, against the position.

    ``chunks``: rows with policy, first, end (positions), over_full and cosine (None where not measured).
    """
    policies = list(dict.fromkeys(row["policy"] for row in chunks if row["policy"] != reference))
    panels = (("over_full", f"perplexity over {reference}'s"), ("cosine", "cosine of attention weights"))
    figure, axes_pair = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for axes, (key, label) in zip(axes_pair, panels, strict=True):
        for color, policy in enumerate(policies):
            rows = [row for row in chunks if row["policy"] == policy and row[key] is not None]
            middles = [(row["first"] + row["end"]) / 2 for row in rows]
            axes.plot(middles, [row[key] for row in rows], "o-", color=f"C{color}", ms=3, lw=1.2, label=policy)
        axes.set_xlabel("position in the text, tokens")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    axes_pair[0].axhline(1.0, color="black", lw=0.8)
    axes_pair[0].legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=130)
    plt.close(figure)
