"""What the accuracy experiments of InfiniGen compare: shares, thresholds, and the policies' names.

What is compared at a share f loads equal bytes in equal layers. Layers 0 and 1 are whole, as in the authors' code of
both. In each of the others InfiniGen fetches f of the context so far, and H2O keeps f of the decode's mean context: its
budget is a share of the prompt and stays what it is while the context grows, so it is f · h2o_growth, in whole blocks.
"""

from __future__ import annotations

import math
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "results" / "accuracy"
TASK_RESULTS, LATENCY_RESULTS, CHOICE_RESULTS = (RESULTS / part for part in ("tasks", "latency", "choice"))
PROMPT_SHARE = 15 / 16  #: of a text: the paper's 1,920 of 2,048 tokens
SHARES = (0.05, 0.1, 0.2)  #: of the context, in layers that choose
ALPHAS = (1.0, 2.0, 4.0, 6.0, 9.0)
RATIOS = (0.1, 0.3, 1.0)  #: of columns, at the paper's threshold (Fig. 17b)
SKEWED_RATIOS, SKEWED_SHARES = (0.1, 0.2), (0.05, 0.2)  #: with and without skewing, beside PARTIAL (Fig. 13)
POOL = 0.8  #: less than a prompt
VICTIMS = ("fifo", "lru", "counter")
KEPT = 64  #: tokens that Fig. 19(b) retains at every length
PARTIAL = 0.3  #: the share of columns that the paper keeps
BITS = (8, 4, 2)  #: of keys and values, as in Figs. 11 and 19


def h2o(share: float, whole_layers: int = 2, prompt_share: float = PROMPT_SHARE) -> str:
    """Return H2O with a mean share of the context, in layers that drop tokens; of texts with prompts of that share."""
    growth = (1 + prompt_share) / 2 / prompt_share  # mean context of the decode over the prompt
    return f"h2o({min(1.0, round(growth * share, 4))},whole_layers={whole_layers})"


def quantized(bits: int) -> str:
    return f"quantized({bits})"


def infinigen(alpha=math.inf, cap: float = 1.0, **more) -> str:
    return "infinigen(" + ",".join(f"{k}={v}" for k, v in {"alpha": alpha, "cap": cap, **more}.items()) + ")"


def at_ratio(share: float, ratio: float) -> str:
    """Return InfiniGen that fetches a share, guessed from a share of the columns."""
    return infinigen(cap=share) if ratio == PARTIAL else infinigen(cap=share, partial_ratio=ratio)
