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
TASKS_OF_HARNESS = ("next_line", "earlier_name")  #: of lm-evaluation-harness, made by ``experiments.studies.tasks``
PROMPT_SHARE = 15 / 16  #: of a text: the paper's 1,920 of 2,048 tokens
SHARES = (0.05, 0.1, 0.2)  #: of the context, in layers that choose
ALPHAS = (1.0, 2.0, 4.0, 6.0, 9.0)
RATIOS = (0.1, 0.3, 1.0)  #: of columns, at the paper's threshold (Fig. 17b)
SKEWED_RATIOS, SKEWED_SHARES = (0.1, 0.2), (0.05, 0.2)  #: with and without skewing, beside PARTIAL (Fig. 13)
POOL = 0.8  #: less than a prompt
VICTIMS = ("fifo", "lru", "counter")
KEPT = 64  #: tokens that Fig. 19(b) retains at every length
WEIGHT = 0.9  #: of a query's attention (Fig. 5)
BIN = 16  #: key tokens (Fig. 5)
QUIET, LOUD = 0.001, 0.01  #: attention weights of a key that hardly matters, and of one that does (Fig. 20b)
PARTIAL = 0.3  #: the share of columns that the paper keeps
RATIOS_OF_COLUMNS = (*SKEWED_RATIOS, PARTIAL)
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


def task_policies() -> dict[str, tuple[bool, str]]:
    """Return name -> (whether the checkpoint is skewed, policy) of the tasks' policies: the full cache first.

    H2O's prompt is the first half of each context, so that it keeps half of its budget's share.
    """
    return {
        "full cache": (False, "kv_only"),
        "4 bits": (False, quantized(4)),
        "H2O 20 %": (False, "h2o(0.4,whole_layers=2)"),
        "H2O 5 %": (False, "h2o(0.1,whole_layers=2)"),
        "InfiniGen 20 %": (True, infinigen(cap=0.2)),
        "InfiniGen 5 %": (True, infinigen(cap=0.05)),
    }
