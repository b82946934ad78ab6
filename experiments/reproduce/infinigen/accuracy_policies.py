"""What the accuracy experiments of InfiniGen compare: shares, thresholds, and the policies' names.

What is compared at a share f loads equal bytes in equal layers. Layers 0 and 1 are whole, as in the authors' code of
both. In each of the others InfiniGen fetches f of the context so far, and H2O keeps f of the decode's mean context: its
budget is a share of the prompt and stays what it is while the context grows, so it is f · H2O_GROWTH, in whole blocks.
With no layer whole, H2O loads as many bytes in all as InfiniGen does at f if its share is ``share_of_all_layers``.
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


BITS = (8, 4, 2, 1)  #: of keys and values, as in Figs. 11 and 19


def h2o(share: float, whole_layers: int = 2) -> str:
    """Return H2O with a mean share of the context, in layers that drop tokens."""
    return f"h2o({min(1.0, round(H2O_GROWTH * share, 4))},whole_layers={whole_layers})"


def quantized(bits: int) -> str:
    return f"quantized({bits})"


def infinigen(alpha=math.inf, cap: float = 1.0, **more) -> str:
    return "infinigen(" + ",".join(f"{k}={v}" for k, v in {"alpha": alpha, "cap": cap, **more}.items()) + ")"


def share_of_all_layers(num_layers: int, share: float) -> float:
    """Return the share of all layers' cache, where layers 0 and 1 look at all of it and the others at ``share``."""
    return (2 + (num_layers - 2) * share) / num_layers
