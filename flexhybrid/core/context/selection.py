"""The numbers of cached tokens that a selection loads and keeps.

A speculative selection's number depends on the model, its text and alpha. selected_tokens.csv has measured
(``flexhybrid accuracy``) and reported values by model and alpha. A policy can have its own share.
"""

import csv
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Selection

#: Default number of first layers that attend to all tokens. A layer's tokens are predicted from the layer before, so at
#: least one is needed. InfiniGen's code has two, and a model without outlier channels needs two: the inputs of its
#: layers 0 and 1 have nothing in common (``experiments.studies.accuracy_study``).
WHOLE_LAYERS = 2

_ROUNDING = 1e-9  #: allowance for rounding errors of a share times a count: 0.2 of 35 tokens are 7

#: A model that is not in the file has InfiniGen's reported values (Sec. 5.3) at REPORTED_ALPHA, scaled with alpha like
#: those of GROWS_AS, the measured model with the nearest family and length.
REPORTED, REPORTED_ALPHA, GROWS_AS = "opt-13b", 4.0, "opt-stdlib-deep"


@cache
def counted_tokens() -> Mapping[str, Mapping[float, tuple[list[float], list[float]]]]:
    """Return model -> alpha -> (context lengths from 0, tokens with scores above max - alpha at each length). The
    tokens are means over the heads of all layers that select."""
    counted: dict[str, dict[float, tuple[list[float], list[float]]]] = {}
    with (Path(__file__).parent / "selected_tokens.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            lengths, tokens = counted.setdefault(row["model"], {}).setdefault(float(row["alpha"]), ([0.0], [0.0]))
            lengths.append(float(row["context"]))
            tokens.append(float(row["tokens"]))
    return counted


def _tokens_at(model: str, alpha: float, context: np.ndarray) -> np.ndarray:
    """Return a model's tokens with high scores at an alpha of the file. Beyond the longest measured context, their
    share is constant."""
    lengths, tokens = counted_tokens()[model][alpha]
    return np.interp(context, lengths, tokens) + np.maximum(context - lengths[-1], 0.0) * tokens[-1] / lengths[-1]


def _scored_tokens(model: str, alpha: float, context: np.ndarray) -> np.ndarray:
    """Return a model's tokens with scores above max - alpha, interpolated between the alphas of the file. There are
    none at alpha 0; beyond the largest alpha, the last line continues."""
    alphas = [0.0, *sorted(counted_tokens()[model])]
    i = int(np.clip(np.searchsorted(alphas, alpha), 1, len(alphas) - 1))
    low, high = (_tokens_at(model, at, context) if at else 0.0 * context for at in alphas[i - 1 : i + 1])
    return low + (high - low) * (alpha - alphas[i - 1]) / (alphas[i] - alphas[i - 1])


def _given(number: float | None) -> float:
    """Return a number that the selection's method requires. Raise ValueError if it is missing."""
    if number is None:
        raise ValueError("the selection's method does not have this field")
    return number


def selected_tokens(selection: Selection, context, model: str = ""):
    """Return the mean tokens of a context that a speculative selection loads in a layer; a number or an array.

    They come from ``expected_fraction`` if the selection has it, else from selected_tokens.csv (see REPORTED).
    ``max_fraction`` limits them.
    """
    context = np.asarray(context, dtype=np.float64)
    if selection.expected_fraction is not None:
        expected = np.ceil(selection.expected_fraction * context - _ROUNDING)
        return np.clip(expected, 1.0, most_selected(selection, context))
    alpha = _given(selection.alpha)
    if alpha == math.inf:
        return most_selected(selection, context)
    if model in counted_tokens() and model != REPORTED:
        scored = _scored_tokens(model, alpha, context)
    else:
        one = np.ones(())  # a share: the growth is that of the longest context
        growth = _scored_tokens(GROWS_AS, alpha, one) / _scored_tokens(GROWS_AS, REPORTED_ALPHA, one)
        scored = _tokens_at(REPORTED, REPORTED_ALPHA, context) * growth
    return np.clip(np.ceil(scored - _ROUNDING), 1.0, most_selected(selection, context))


def most_selected(selection: Selection, context):
    """Return the most tokens of a context that a speculative selection loads in a layer, at least 1; a number or an
    array."""
    return np.maximum(1.0, np.ceil(_given(selection.max_fraction) * np.asarray(context, dtype=np.float64) - _ROUNDING))


def first_choosing(selection: Selection) -> float:
    """Return the first layer with selected tokens, which the layer before predicts; infinity if there is none."""
    if selection.method != "speculative":
        return math.inf
    return WHOLE_LAYERS if selection.whole_layers is None else selection.whole_layers


def layers_by_window(shape: ModelShape, selection: Selection) -> dict[int | None, int]:
    """Return window -> number of attending layers with it; None: layers that cache all tokens. Under a selection, all
    layers count as None, because it chooses among all tokens."""
    if selection.method != "none":
        return {None: shape.num_layers}
    windows = [shape.layer_kinds[layer].window for layer in shape.attending]
    if not windows:
        return {None: 0}
    return {window: windows.count(window) for window in sorted(set(windows), key=lambda window: window or math.inf)}


def num_keeping(selection: Selection, num_layers: int) -> int:
    """Return the number of first layers that keep all tokens while the others drop some. They have separate blocks."""
    return min(num_layers, selection.whole_layers or 0) if selection.method == "heavy_hitter" else 0


def num_whole(selection: Selection, num_layers: int) -> int:
    """Return the number of first layers that attend to all tokens while the others attend to selected ones."""
    if selection.method == "speculative":
        return num_layers - num_choosing(selection, num_layers)
    return num_keeping(selection, num_layers)


def num_choosing(selection: Selection, num_layers: int) -> int:
    """Return the number of layers for which a speculative selection chooses tokens."""
    return num_layers - int(min(num_layers, first_choosing(selection)))


def partial_columns(shape: ModelShape, selection: Selection) -> int:
    """Return the number of columns of each head's queries and keys from which a speculative selection predicts."""
    return max(1, math.ceil(_given(selection.partial_ratio) * shape.head_dim - _ROUNDING))


def partial_share(shape: ModelShape, selection: Selection) -> float:
    """Return ``partial_columns`` as a share of a head's columns."""
    return partial_columns(shape, selection) / shape.head_dim


def whole_queries(shape: ModelShape, selection: Selection) -> bool:
    """Return whether speculation computes whole queries and then takes the chosen columns of them. Rotary models must
    rotate whole queries; and if each request chooses its own columns, together they need all query weights."""
    return shape.rotary or selection.columns == "request"


def limits_cache(selection: Selection) -> bool:
    """Return whether new tokens replace cached ones from some length on."""
    limited = selection.pool_bytes is not None or selection.pool != 1
    return selection.method == "heavy_hitter" or selection.method == "speculative" and limited


def num_limited(selection: Selection, num_layers: int) -> int:
    """Return the number of layers in which new tokens replace cached ones from some length on."""
    return num_layers - num_keeping(selection, num_layers) if limits_cache(selection) else 0


def counts_uses(selection: Selection) -> bool:
    """Return whether the dropped token depends on how often or how recently tokens were loaded."""
    return selection.method == "speculative" and limits_cache(selection) and selection.victim != "fifo"


ALMOST_ALL = 1 - 1e-9  #: share of a pool that counts as limited, but holds every request completely


def pool_blocks(shape: ModelShape, selection: Selection, element_bytes: float) -> int:
    """Return the number of blocks, each in all layers, that ``pool_bytes`` holds. Raise InputError if none fits."""
    block_bytes = shape.num_layers * BLOCK_TOKENS * shape.kv_token_bytes(element_bytes)
    blocks = int(_given(selection.pool_bytes) // block_bytes)
    if not blocks:
        raise InputError(
            f"policy: selection.pool_bytes is {selection.pool_bytes}; {BLOCK_TOKENS} tokens of one request of "
            f"{shape.name} take {block_bytes:.0f} bytes, and a pool needs at least that"
        )
    return blocks


def with_pool_share(shape: ModelShape, selection: Selection, element_bytes: float, cached: np.ndarray) -> Selection:
    """Return the selection with a share ``pool`` instead of ``pool_bytes``. The share is the largest with which
    requests that cache ``cached`` [requests] tokens fit ``pool_bytes`` together, in whole blocks. Raise InputError if
    there are more requests than blocks."""
    if selection.pool_bytes is None:
        return selection
    blocks = pool_blocks(shape, selection, element_bytes)
    if len(cached) > blocks:
        raise InputError(
            f"policy: selection.pool_bytes is {selection.pool_bytes}, room for {blocks} blocks of {BLOCK_TOKENS} "
            f"tokens; {len(cached)} requests at a time need one each: give more bytes, or a smaller max_batch"
        )

    def limited(share: float) -> Selection:
        return replace(selection, pool=share, pool_bytes=None)

    def fits(share: float) -> bool:
        return ceil_blocks(kept_tokens(limited(share), cached, cached, cached)).sum() <= blocks

    low, high = 0.0, ALMOST_ALL
    if fits(high):
        return limited(high)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return limited(low)


def kept_tokens(selection: Selection, prompt, context, cached):
    """Return the tokens of a context that stay cached; numbers or arrays.

    ``prompt``, ``context``: tokens of the prompt and of the context; ``cached``: tokens of the request at its limit. A
    heavy-hitter selection keeps a share of the prompt (H2O). A limited pool keeps a share of all tokens (InfiniGen,
    Sec. 4.4); a limit in bytes must have been converted (``with_pool_share``). Both keep whole blocks, at least one.
    Other selections keep everything.
    """
    if not limits_cache(selection):
        return context
    share, tokens = (selection.budget, prompt) if selection.method == "heavy_hitter" else (selection.pool, cached)
    budget = np.ceil(_given(share) * np.asarray(tokens) / BLOCK_TOKENS) * BLOCK_TOKENS
    return np.minimum(context, np.maximum(budget, BLOCK_TOKENS).astype(np.asarray(context).dtype))
