"""Requests into mini-batches under the buffer bounds: even and balanced by CAPTURE's F_b, or in order of arrival."""

import math

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, BlockEntries, ceil_blocks
from flexhybrid.core.context.cache_entries import representation_of
from flexhybrid.core.policy import Policy


def imbalance(kv_gen_s, load_kv_s):
    """F_b = max(balance, 1/balance) with balance = T_kv_gen / T_load_kv (CAPTURE eq. 6 and 7); 1 is perfect.

    A mini-batch with nothing to recompute or nothing to load has no balance to speak of: infinity, unless it has
    neither. Works on arrays.
    """
    longer, shorter = np.maximum(kv_gen_s, load_kv_s), np.minimum(kv_gen_s, load_kv_s)
    balance = np.divide(longer, shorter, out=np.full(np.shape(longer), np.inf), where=np.asarray(shorter) > 0)
    return np.where(longer > 0, balance, 1.0)[()]


def padded_tokens(kv_tokens: np.ndarray, act_tokens: np.ndarray) -> int:
    """B·max(KV) + B·max(ACT) + B: rows of the attention buffer of these requests and their new tokens.

    Both counts are rounded up to whole blocks, as the buffers are.
    """
    if len(kv_tokens) == 0:
        return 0
    widest = ceil_blocks(int(np.max(kv_tokens))) + ceil_blocks(int(np.max(act_tokens)))
    return len(kv_tokens) * (widest * BLOCK_TOKENS + 1)


def split_representations(entries: BlockEntries, tokens) -> tuple[np.ndarray, np.ndarray]:
    """(kv, act) tokens of requests that cache ``tokens`` tokens each, summed over tiers."""
    counts = entries.tokens(np.asarray(tokens))
    is_act = np.array([representation_of(entry) == "act" for entry in entries.names])
    recomputed = entries.tok_tokens(np.asarray(tokens))  # chunk rows beside the new token
    return counts[..., ~is_act].sum(-1) + recomputed, counts[..., is_act].sum(-1)


def pack(
    tokens: np.ndarray,
    entries: BlockEntries,
    max_mini_batch_tokens: int,
    packing: str = "balanced",
    seconds_per_token: tuple[float, float] = (1.0, 1.0),
) -> list[np.ndarray]:
    """Cut requests into mini-batches whose padded tokens stay within the bound.

    ``tokens``: the most tokens each request will ever cache. ``seconds_per_token``: (T_kv_gen of an ACT token,
    T_load_kv of a KV token), used by the balanced packing only. A request that alone exceeds the bound gets a
    mini-batch of its own. Returns arrays of request indices.

    balanced: requests sorted by length, so that padding is small, and cut into the fewest mini-batches of nearly equal
    size; then requests change places between mini-batches while that lowers the worse F_b (CAPTURE's second condition)
    and pads no more. With one ratio for all requests (eq. 5) F_b is the same for every grouping but for partial blocks,
    so equal sizes decide: a pipeline of equal steps has no bubbles.
    """
    tokens = np.asarray(tokens)
    kv, act = split_representations(entries, tokens)
    if packing == "fifo":
        return _first_come(kv, act, max_mini_batch_tokens)
    order = np.argsort(-tokens, kind="stable")
    bins = _even_cut(order, kv, act, max_mini_batch_tokens)
    return _exchange(bins, kv, act, max_mini_batch_tokens, seconds_per_token)


def _first_come(kv, act, bound: int) -> list[np.ndarray]:
    """Consecutive runs in order of arrival, each as long as the bound allows."""
    bins: list[list[int]] = []
    for request in range(len(kv)):
        candidate = [*bins[-1], request] if bins else None
        if candidate and padded_tokens(kv[candidate], act[candidate]) <= bound:
            bins[-1] = candidate
        else:
            bins.append([request])
    return [np.array(group) for group in bins]


def _even_cut(order, kv, act, bound: int) -> list[np.ndarray]:
    """The fewest runs of ``order`` (longest request first) within the bound, of sizes as equal as it allows.

    The first request of a run sets its padding, so it alone says how many fit. Later runs are of shorter requests and
    have more room: taking less than fits from an early one never costs a run more.
    """

    def room(start: int) -> int:
        first = order[start : start + 1]
        return max(1, bound // padded_tokens(kv[first], act[first]))

    fewest, start = 0, 0
    while start < len(order):
        fewest, start = fewest + 1, start + room(start)
    bins, start = [], 0
    for runs_left in range(fewest, 0, -1):
        size = min(room(start), math.ceil((len(order) - start) / runs_left))
        bins.append(np.sort(order[start : start + size]))
        start += size
    return bins


def _exchange(bins, kv, act, bound: int, seconds_per_token) -> list[np.ndarray]:
    """Swap requests between mini-batches while that lowers the worst F_b (a pass or two; often nothing to do)."""
    gen_s, load_s = seconds_per_token
    seconds = np.stack([gen_s * act, load_s * kv])  # [T_kv_gen and T_load_kv, requests]
    costs = [imbalance(*seconds[:, group].sum(axis=1)) for group in bins]
    for _ in range(len(bins)):
        worst = int(np.argmax(costs))
        if not math.isfinite(costs[worst]) or costs[worst] < 1.05:
            break
        for other in range(len(bins)):
            swap = None if other == worst else _better_swap(bins[worst], bins[other], seconds, kv, act, bound)
            if swap:
                for place, group in zip((worst, other), swap, strict=True):
                    bins[place], costs[place] = group, imbalance(*seconds[:, group].sum(axis=1))
                break
        else:
            break
    return bins


def _better_swap(a, b, seconds, kv, act, bound: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The two mini-batches after the first exchange of one request each, in the order of ``a`` and then of ``b``, that
    lowers the worse F_b by 1 % and pads no more; None without one. All exchanges are weighed at once: [a, b]."""
    change = seconds[:, None, b] - seconds[:, a, None]  # of what a holds
    sums_a, sums_b = seconds[:, a].sum(axis=1), seconds[:, b].sum(axis=1)
    worse = np.maximum(imbalance(*(sums_a[:, None, None] + change)), imbalance(*(sums_b[:, None, None] - change)))
    padded_a, padded_b = _padded_after(a, b, kv, act), _padded_after(b, a, kv, act).T
    padding = padded_tokens(kv[a], act[a]) + padded_tokens(kv[b], act[b])
    better = (worse < 0.99 * max(imbalance(*sums_a), imbalance(*sums_b))) & (padded_a + padded_b <= padding)
    better &= np.maximum(padded_a, padded_b) <= bound
    if not better.any():
        return None
    i, j = np.unravel_index(better.argmax(), better.shape)
    return np.sort(np.r_[np.delete(a, i), b[j]]), np.sort(np.r_[np.delete(b, j), a[i]])


def _padded_after(group, others, kv, act) -> np.ndarray:
    """``padded_tokens`` of ``group`` with each of its requests replaced by each of ``others``: [group, others]."""
    blocks = 0
    for tokens in (kv, act):
        longest = np.sort(tokens[group])[-2:]
        # Without its longest request the next one is the longest; alone, none is.
        others_longest = np.where(tokens[group] == longest[-1], longest[0] if len(longest) > 1 else 0, longest[-1])
        blocks = blocks + ceil_blocks(np.maximum(others_longest[:, None], tokens[others]))
    return len(group) * (blocks * BLOCK_TOKENS + 1)


def num_chunks(policy: Policy, prompts: np.ndarray) -> int:
    """Pieces in which a mini-batch's prompts (their tokens, [B]) are computed: more than one where a single prompt is
    longer than a mini-batch may be.

    A selection, and attention on the host, take a prompt whole.
    """
    if len(prompts) > 1 or takes_prompts_whole(policy):
        return 1
    return -(-int(prompts[0]) // chunk_tokens(policy.max_mini_batch_tokens))


def takes_prompts_whole(policy: Policy) -> bool:
    """Whether no prompt is cut, however long."""
    return policy.attention == "host" or policy.selection.method != "none"


def chunk_tokens(max_mini_batch_tokens):
    """Tokens of a piece of a long prompt: whole blocks within the bound of a mini-batch; works on arrays."""
    blocks = max_mini_batch_tokens // BLOCK_TOKENS
    return (np.maximum(blocks, 1) if np.ndim(blocks) else max(blocks, 1)) * BLOCK_TOKENS


def longest_piece(policy: Policy, prompts: np.ndarray) -> int:
    """Prompt tokens that a mini-batch takes of a request in one step, at most."""
    longest = int(prompts.max())
    return longest if num_chunks(policy, prompts) == 1 else chunk_tokens(policy.max_mini_batch_tokens)
