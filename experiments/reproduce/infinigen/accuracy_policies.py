"""What the accuracy experiments of InfiniGen compare: shares, thresholds, and the policies' names.

A share of the cache is of the context so far; H2O's budget is one of the prompt and stays what it is while the context
grows: a mean share f takes a budget of f · H2O_GROWTH.
"""

from __future__ import annotations

import math
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "results" / "accuracy"
PROMPT_SHARE = 0.75  #: of a text
SHARES = (0.05, 0.1, 0.2)  #: of the context, in layers that choose
ALPHAS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
RATIOS = (0.1, 0.3, 0.6, 1.0)
POOL = 0.8
KEPT = 64  #: tokens that Fig. 19(b) retains at every length
WEIGHT = 0.9  #: of a query's attention (Fig. 5)
BIN = 16  #: key tokens (Fig. 5)
QUIET, LOUD = 0.001, 0.01  #: attention weights of a key that hardly matters, and of one that does (Fig. 20b)
H2O_GROWTH = (1 + PROMPT_SHARE) / 2 / PROMPT_SHARE  #: mean context of the decode over the prompt
PARTIAL = 0.3  #: the share of columns that the paper keeps


def h2o(share: float) -> str:
    """Return H2O with a mean share of the context."""
    return f"h2o({min(1.0, round(H2O_GROWTH * share, 4))})"


def infinigen(alpha=math.inf, cap: float = 1.0, **more) -> str:
    return "infinigen(" + ",".join(f"{k}={v}" for k, v in {"alpha": alpha, "cap": cap, **more}.items()) + ")"


def share_of_all_layers(num_layers: int, share: float) -> float:
    """Return the share of all layers' cache, where layers 0 and 1 look at all of it and the others at ``share``."""
    return (2 + (num_layers - 2) * share) / num_layers
