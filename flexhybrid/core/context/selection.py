"""How many cached tokens a selection looks at, and how many it keeps.

The numbers of a speculative selection depend on the model and its text. Until a policy names the share that was
measured on the model (``flexhybrid accuracy`` has it layer by layer), they are those that InfiniGen reports for OPT-13B
at alpha 4 (Sec. 5.3): 37, 60, 66 and 73 tokens of 512, 1,024, 1,536 and 2,048.
"""

import math
from dataclasses import replace

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.policy import Selection

#: First layers that look at all their tokens, unless a policy names their number. A layer is guessed from the one
#: before, so one would do; InfiniGen's own code has two, and a small model needs them: the inputs of its layers 0 and 1
#: have nothing in common (``experiments.studies.accuracy_study``).
WHOLE_LAYERS = 2

_ROUNDING = 1e-9  #: of a share times a count: 0.2 of 35 tokens are 7

#: (context tokens, tokens scored above max − 4), averages over layers and heads.
INFINIGEN_TOKENS = ((0, 512, 1024, 1536, 2048), (0, 37, 60, 66, 73))


def _given(number: float | None) -> float:
    """A number that the selection's method needs, so that ``Selection.check`` has seen it."""
    if number is None:
        raise ValueError("the selection's method does not have this field")
    return number


def selected_tokens(selection: Selection, context):
    """Tokens of a context that a speculative selection fetches in a layer, on average; arrays allowed.

    Beyond the last measured context the share of the last stays. ``max_fraction`` caps the number.
    """
    lengths, counts = INFINIGEN_TOKENS
    context = np.asarray(context, dtype=np.float64)
    if selection.expected_fraction is not None:
        expected = np.ceil(selection.expected_fraction * context - _ROUNDING)
        return np.clip(expected, 1.0, most_selected(selection, context))
    if selection.alpha == math.inf:
        return most_selected(selection, context)
    inside = np.interp(context, lengths, counts)
    measured = np.where(context > lengths[-1], context * counts[-1] / lengths[-1], inside)
    return np.minimum(np.ceil(measured), most_selected(selection, context))


def most_selected(selection: Selection, context):
    """The most tokens of a context that a speculative selection ever fetches in a layer: at least one; arrays too."""
    return np.maximum(1.0, np.ceil(_given(selection.max_fraction) * np.asarray(context, dtype=np.float64) - _ROUNDING))


def first_choosing(selection: Selection) -> float:
    """The first layer that a speculative selection chooses tokens for; the layer before it is the first that guesses.
    Infinite where no layer does."""
    if selection.method != "speculative":
        return math.inf
    return WHOLE_LAYERS if selection.whole_layers is None else selection.whole_layers


def layers_by_window(shape: ModelShape, selection: Selection) -> dict[int | None, int]:
    """Kinds of layers that attend by what they cache, and how many layers are of each: None, those that keep all
    tokens, or the window that they keep. Under a selection there is one kind: it chooses among all tokens."""
    if selection.method != "none":
        return {None: shape.num_layers}
    windows = [shape.layer_kinds[layer].window for layer in shape.attending]
    if not windows:
        return {None: 0}
    return {window: windows.count(window) for window in sorted(set(windows), key=lambda window: window or math.inf)}


def num_keeping(selection: Selection, num_layers: int) -> int:
    """First layers that keep all tokens although the others drop some: they have blocks of their own."""
    return min(num_layers, selection.whole_layers or 0) if selection.method == "heavy_hitter" else 0


def num_whole(selection: Selection, num_layers: int) -> int:
    """First layers that look at all tokens although the others look at a selection of them."""
    if selection.method == "speculative":
        return num_layers - num_choosing(selection, num_layers)
    return num_keeping(selection, num_layers)


def num_choosing(selection: Selection, num_layers: int) -> int:
    """Layers that a speculative selection chooses tokens for."""
    return num_layers - int(min(num_layers, first_choosing(selection)))


def partial_columns(shape: ModelShape, selection: Selection) -> int:
    """Columns of each head's queries and keys that a speculative selection keeps to guess with."""
    return max(1, math.ceil(_given(selection.partial_ratio) * shape.head_dim - _ROUNDING))


def partial_share(shape: ModelShape, selection: Selection) -> float:
    """The same as a share of a head's columns."""
    return partial_columns(shape, selection) / shape.head_dim


def whole_queries(shape: ModelShape, selection: Selection) -> bool:
    """Whether a speculative selection guesses whole queries and takes columns of them: rotary models turn them first,
    and requests with columns of their own share all query weights."""
    return shape.rotary or selection.columns == "request"


def limits_cache(selection: Selection) -> bool:
    """Whether new tokens take the places of cached ones from some length on."""
    limited = selection.pool_bytes is not None or selection.pool != 1
    return selection.method == "heavy_hitter" or selection.method == "speculative" and limited


def num_limited(selection: Selection, num_layers: int) -> int:
    """Layers in which new tokens take the places of cached ones from some length on."""
    return num_layers - num_keeping(selection, num_layers) if limits_cache(selection) else 0


def counts_uses(selection: Selection) -> bool:
    """Whether tokens give way by their uses, so that the queries of a prompt count them too."""
    return selection.method == "speculative" and limits_cache(selection) and selection.victim != "fifo"


ALMOST_ALL = 1 - 1e-9  #: a share of a limited pool that no request outgrows


def pool_blocks(shape: ModelShape, selection: Selection, element_bytes: float) -> int:
    """Blocks of keys and values in all layers that ``pool_bytes`` holds. Raise InputError when not even one fits."""
    block_bytes = shape.num_layers * BLOCK_TOKENS * shape.kv_token_bytes(element_bytes)
    blocks = int(_given(selection.pool_bytes) // block_bytes)
    if not blocks:
        raise InputError(
            f"policy: selection.pool_bytes is {selection.pool_bytes}; {BLOCK_TOKENS} tokens of one request of "
            f"{shape.name} take {block_bytes:.0f} bytes, and a pool holds as many at least"
        )
    return blocks


def with_pool_share(shape: ModelShape, selection: Selection, element_bytes: float, cached: np.ndarray) -> Selection:
    """Return the selection with the largest ``pool`` of which requests that cache ``cached`` tokens [requests] fit in
    ``pool_bytes`` together, in whole blocks. Raise InputError when they are more than its blocks."""
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
        kept = kept_tokens(limited(share), cached, cached, cached)
        return ceil_blocks(kept).sum() <= blocks

    low, high = 0.0, ALMOST_ALL
    if fits(high):
        return limited(high)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return limited(low)


def kept_tokens(selection: Selection, prompt, context, cached):
    """Tokens of a context that stay cached, of requests that would cache ``cached`` in the end; arrays allowed.

    A heavy-hitter selection keeps a fixed share of the prompt (H2O), a limited pool one of all tokens (InfiniGen, Sec.
    4.4; a limit in bytes is made a share first), both in whole blocks and at least one; every other keeps all.
    """
    if not limits_cache(selection):
        return context
    share, tokens = (selection.budget, prompt) if selection.method == "heavy_hitter" else (selection.pool, cached)
    limit = _given(share) * np.asarray(tokens)
    budget = np.ceil(limit / BLOCK_TOKENS) * BLOCK_TOKENS
    return np.minimum(context, np.maximum(budget, BLOCK_TOKENS).astype(np.asarray(context).dtype))
