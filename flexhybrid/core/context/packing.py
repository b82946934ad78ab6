"""Pack requests into mini-batches of limited size: by length, by arrival, or by CAPTURE's balance, F_b.

CAPTURE (Sec. IV.B, eq. 6 and 7) forms mini-batches by F_b = max(T_kv_gen / T_load_kv, T_load_kv / T_kv_gen). If
requests keep the pools' ratio (eq. 5), F_b is equal for all groupings, except for rounding to blocks. So F_b decides
nothing, and its greedy packing is slower than even parts (`flexhybrid reproduce --only capture-table3`).
"""

import math

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, BlockEntries, ceil_blocks
from flexhybrid.core.context.cache_entries import representation_of
from flexhybrid.core.context.split import split_lines
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem


def padded_tokens(kv_tokens: np.ndarray, act_tokens: np.ndarray) -> int:
    """Return B·max(KV) + B·max(ACT) + B, the rows of the attention buffer of B requests with their new tokens. Both
    maxima are rounded up to whole blocks, as in the buffers."""
    return _padded(len(kv_tokens), int(np.max(kv_tokens)), int(np.max(act_tokens))) if len(kv_tokens) else 0


def _padded(count: int, kv_tokens: int, act_tokens: int) -> int:
    """Return ``padded_tokens`` of ``count`` requests with these most KV and ACT tokens."""
    return count * ((ceil_blocks(kv_tokens) + ceil_blocks(act_tokens)) * BLOCK_TOKENS + 1)


def split_representations(entries: BlockEntries, tokens) -> tuple[np.ndarray, np.ndarray]:
    """Return (KV tokens, ACT tokens) of requests that cache ``tokens`` tokens, summed over tiers. Token ids count as
    KV."""
    counts = entries.tokens(np.asarray(tokens))
    is_act = np.array([representation_of(entry) == "act" for entry in entries.names])
    recomputed = entries.tok_tokens(np.asarray(tokens))
    return counts[..., ~is_act].sum(-1) + recomputed, counts[..., is_act].sum(-1)


def packed(problem: Problem, policy: Policy, tokens: np.ndarray) -> list[np.ndarray]:
    """Cut requests with up to ``tokens`` [requests] cached tokens into a policy's mini-batches. Raise InputError if the
    policy packs by "balance" and the problem has no hardware record."""
    entries, bound = BlockEntries(policy.cache), policy.max_mini_batch_tokens
    if policy.packing != "balance":
        return pack(tokens, entries, bound, policy.packing)
    lines = split_lines(problem, policy, "both(kv@host,act@host)")
    kv, act = split_representations(entries, tokens)
    return _by_imbalance(kv.tolist(), act.tolist(), lines.gen_s, lines.load_kv_s, bound)


def imbalance(kv_gen_s: float, load_kv_s: float) -> float:
    """Return F_b, the longer of T_kv_gen and T_load_kv / the shorter (CAPTURE, eq. 6 and 7); 1 is perfect balance, also
    if both are 0. Return infinity if one of them is 0."""
    longer, shorter = max(kv_gen_s, load_kv_s), min(kv_gen_s, load_kv_s)
    if not longer:
        return 1.0
    return longer / shorter if shorter else math.inf


def _by_imbalance(kv: list[int], act: list[int], gen_s: float, load_s: float, bound: int) -> list[np.ndarray]:
    """Pack by CAPTURE's greedy algorithm, as the paper prints it. ``gen_s``, ``load_s``: seconds per token.

    Requests are taken in order of arrival. One joins the mini-batch if it fits and does not raise the mini-batch's
    ``imbalance``. The requests that do not join form the next mini-batches.
    """
    groups, left = [], list(range(len(kv)))
    while left:
        group, others = [left[0]], []
        widest, sums = (kv[left[0]], act[left[0]]), (gen_s * act[left[0]], load_s * kv[left[0]])
        for request in left[1:]:
            wider = max(widest[0], kv[request]), max(widest[1], act[request])
            more = sums[0] + gen_s * act[request], sums[1] + load_s * kv[request]
            if _padded(len(group) + 1, *wider) <= bound and imbalance(*more) <= imbalance(*sums) * (1 + 1e-12):
                group.append(request)
                widest, sums = wider, more
            else:
                others.append(request)
        groups.append(np.array(group))
        left = others
    return groups


def pack(
    tokens: np.ndarray, entries: BlockEntries, max_mini_batch_tokens: int, packing: str = "balanced"
) -> list[np.ndarray]:
    """Return mini-batches, arrays of request indices, with at most ``max_mini_batch_tokens`` padded tokens.

    ``tokens``: most tokens that each request caches. A request above the bound has a mini-batch of its own.
    ``packing``: "fifo", in order of arrival; or "balanced", sorted by length, so that padding is small, and cut into
    the fewest mini-batches of nearly equal size, because equal steps leave no gaps in a pipeline.
    """
    tokens = np.asarray(tokens)
    kv, act = split_representations(entries, tokens)
    if packing == "fifo":
        return _first_come(kv, act, max_mini_batch_tokens)
    return _even_cut(np.argsort(-tokens, kind="stable"), kv, act, max_mini_batch_tokens)


def _first_come(kv, act, bound: int) -> list[np.ndarray]:
    """Return mini-batches in order of arrival, each as large as the bound allows."""
    bins: list[list[int]] = []
    for request in range(len(kv)):
        candidate = [*bins[-1], request] if bins else None
        if candidate and padded_tokens(kv[candidate], act[candidate]) <= bound:
            bins[-1] = candidate
        else:
            bins.append([request])
    return [np.array(group) for group in bins]


def _even_cut(order, kv, act, bound: int) -> list[np.ndarray]:
    """Cut ``order``, the longest request first, into the fewest runs within the bound, of nearly equal size.

    The first request of a run decides its padding, and so the run's limit. Later runs have shorter requests, so they
    have room for at least as many.
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


def num_chunks(policy: Policy, prompts: np.ndarray) -> int:
    """Return the number of chunks in which a mini-batch's prompts are computed. It is above 1 only for a single prompt
    that exceeds the mini-batch bound. ``prompts``: tokens, [B]."""
    if len(prompts) > 1 or takes_prompts_whole(policy):
        return 1
    return -(-int(prompts[0]) // chunk_tokens(policy.max_mini_batch_tokens))


def takes_prompts_whole(policy: Policy) -> bool:
    """Return whether prompts are never cut into chunks: under a selection, and with attention on the host."""
    return policy.attention == "host" or policy.selection.method != "none"


def chunk_tokens(max_mini_batch_tokens):
    """Return the tokens of a chunk of a long prompt: whole blocks within the mini-batch bound; a number or an array."""
    blocks = max_mini_batch_tokens // BLOCK_TOKENS
    return (np.maximum(blocks, 1) if np.ndim(blocks) else max(blocks, 1)) * BLOCK_TOKENS


def longest_piece(policy: Policy, prompts: np.ndarray) -> int:
    """Return the most prompt tokens of a request that one step of a mini-batch computes."""
    longest = int(prompts.max())
    return longest if num_chunks(policy, prompts) == 1 else chunk_tokens(policy.max_mini_batch_tokens)
