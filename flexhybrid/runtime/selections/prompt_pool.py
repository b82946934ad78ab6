"""The prompts of a mini-batch enter limited pools, on a CPU: what ``selections.pool`` says, in numpy.

Every token waits for the one before it, so there is a step for each position, of arrays so small that the calls count.
numpy's take a fraction of torch's time there, and its partition a tenth of torch's topk. A key says who gives way
first: uses in its upper half, the position of birth in its lower one.

Shapes: B requests, G key/value heads, r query heads of a group, P prompt tokens, d head size, T places.
"""

from __future__ import annotations

import numpy as np
import torch

from flexhybrid.core.context.selection import most_selected
from flexhybrid.core.policy import Selection
from flexhybrid.runtime.selections import pool

RANKED_QUERIES = 16  #: of a prompt, whose scores are there at a time: less than the feed-forward rows that come later
TIE = 1e-12  #: of a score and the one in the next place: less than the rounding of any score but zero

_USE = 1 << 32  #: one use, in a key
_EMPTY = np.iinfo(np.int64).max  #: the key of a place that holds no token


def fill_pools(
    selection: Selection,
    queries_BGrPd: torch.Tensor,
    keys_BGPd: torch.Tensor,
    lengths_B: np.ndarray,
    kept_B: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the uses and the positions of the tokens that stay of each prompt: [B, G, T] each, 0 in empty places.

    Prompts have ``lengths_B`` tokens, padded to P; pools have ``kept_B`` places. Queries are scaled by d ** -0.5.
    """
    by_length = np.argsort(-lengths_B, kind="stable")  # those that are not over yet are the first ones
    lengths_B, kept_B = lengths_B[by_length], kept_B[by_length]
    queries_BGrPd, keys_BGPd = queries_BGrPd[by_length], keys_BGPd[by_length]
    batch, groups, num_places = len(lengths_B), keys_BGPd.shape[1], int(kept_B.max())
    most_of = most_selected(selection, np.arange(num_places + 1)).astype(np.int64)
    key = np.full((batch, groups, num_places), _EMPTY)
    pooled_BGTd = keys_BGPd.new_zeros(*key.shape, keys_BGPd.shape[-1])
    heads, highest = np.arange(groups), 0
    scores_BGrCT = own_BGrCC = np.empty(0)
    for position in range(int(lengths_B[0])):
        column, now = position % RANKED_QUERIES, _USE * position
        if not column:
            queries = queries_BGrPd[:, :, :, position : position + RANKED_QUERIES]
            scores_BGrCT, own_BGrCC = _scores(queries, keys_BGPd, pooled_BGTd, key, position)
        running = np.count_nonzero(lengths_B > position)
        rows, held = np.arange(running)[:, None], np.minimum(position, kept_B[:running])
        full = (position >= kept_B[:running])[:, None]
        seen = key[:running, :, : held.max()]
        taken = (
            np.where(full, key[:running].argmin(-1), position) if full.any() else np.full((running, groups), position)
        )
        chosen = None
        if position:
            relative = _relative(scores_BGrCT[:running, :, :, column, : seen.shape[-1]])
            chosen = choose(relative, selection.alpha or 0.0, most_of[held])
        if selection.victim == "lru":
            key[rows, heads, taken] = now + position
            if chosen is not None:
                np.copyto(seen, (seen & (_USE - 1)) + now, where=chosen)
        else:
            worn = np.where(full, key[rows, heads, taken] // _USE, 0)
            if chosen is not None:
                seen += chosen.astype(np.int64) * _USE
            key[rows, heads, taken] = (worn + 1) * _USE + position  # also where it was chosen just now
            highest += 1
            if highest >= pool.COUNTER_FULL:
                highest = _halve(key[:running])
        scores_BGrCT[rows, heads, :, column + 1 :, taken] = own_BGrCC[:running, :, :, column + 1 :, column]
    key = np.where(key == _EMPTY, 0, key)[np.argsort(by_length)]
    return key // _USE, key % _USE


def choose(relative_BGT: np.ndarray, alpha: float, most_B: np.ndarray) -> np.ndarray:
    """Return which tokens ``speculative.choose_tokens`` chooses where each head chooses for itself: bool [B, G, T].
    Among equals those in the first places."""
    _, groups, tokens = relative_BGT.shape
    within_B = np.array([np.count_nonzero(relative) for relative in relative_BGT > -alpha])
    count_B = np.minimum(np.maximum(-(-within_B // groups), 1), most_B)
    chosen = np.empty(relative_BGT.shape, dtype=bool)
    for of_request, relative, last in zip(chosen, relative_BGT, tokens - count_B, strict=True):  # one kth at a time:
        parted = np.partition(relative, last, axis=-1)  # two take six times as long
        np.greater_equal(relative, parted[:, last, None], out=of_request)
    if np.count_nonzero(chosen) > groups * count_B.sum():
        best = np.argsort(-relative_BGT, axis=-1, kind="stable")
        np.put_along_axis(chosen, best, np.arange(tokens) < count_B[:, None, None], axis=-1)
    return chosen


def _scores(
    queries_BGrCd: torch.Tensor, keys_BGPd: torch.Tensor, pooled_BGTd: torch.Tensor, key: np.ndarray, first: int
):
    """Return scores of queries from position ``first`` on: of the tokens in the pools, minus infinity in empty places,
    and of the queries' own tokens. The keys of tokens that came since the last call join ``pooled_BGTd``."""
    count, born = queries_BGrCd.shape[3], np.where(key == _EMPTY, -1, key % _USE)
    requests, heads, places = np.nonzero(born >= first - RANKED_QUERIES)
    pooled_BGTd[requests, heads, places] = keys_BGPd[requests, heads, born[requests, heads, places]]
    in_pool, own = (
        torch.matmul(queries_BGrCd, keys[:, :, None].transpose(-1, -2)).float()
        for keys in (pooled_BGTd, keys_BGPd[:, :, first : first + count])
    )
    return in_pool.masked_fill_(torch.from_numpy(born < 0)[:, :, None, None], -torch.inf).numpy(), own.numpy()


def _relative(scores_BGrT: np.ndarray) -> np.ndarray:
    """What ``speculative.relative_to_best`` returns: [B, G, T]."""
    relative = scores_BGrT - scores_BGrT.max(-1, keepdims=True)
    relative = relative.max(2) if relative.shape[2] > 1 else relative[:, :, 0]
    return relative - TIE * np.arange(relative.shape[-1], dtype=np.float32)


def _halve(key_BGT: np.ndarray) -> int:
    """Halve all uses of the heads one of whose counters is full. Return the highest use that is left."""
    uses = np.where(key_BGT == _EMPTY, 0, key_BGT // _USE)
    heads = np.any(uses >= pool.COUNTER_FULL, axis=-1)
    if heads.any():
        wearing = (key_BGT < _EMPTY) & heads[..., None]
        key_BGT -= np.where(wearing, uses - uses // 2, 0) * _USE
        uses = np.where(heads[..., None], uses // 2, uses)
    return int(uses.max())
