"""Packs requests into mini-batches within the buffer bounds: by length, by arrival, or by CAPTURE's F_b.

CAPTURE (Sec. IV.B, eq. 6 and 7) forms mini-batches by F_b = max(T_kv_gen / T_load_kv, its inverse). If requests keep
the pools' ratio (eq. 5), F_b is the same for every grouping, except for rounding to blocks. F_b then distinguishes
nothing, and its greedy makes slower mini-batches than even parts (`flexhybrid reproduce --only capture-table3`).
"""

import math

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, BlockEntries, ceil_blocks
from flexhybrid.core.context.cache_entries import representation_of
from flexhybrid.core.context.split import split_lines
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem


def padded_tokens(kv_tokens: np.ndarray, act_tokens: np.ndarray) -> int:
    """Return B·max(KV) + B·max(ACT) + B: rows of the attention buffer of these requests with their new tokens.

    Both counts are rounded up to whole blocks, as in the buffers.
    """
    return _padded(len(kv_tokens), int(np.max(kv_tokens)), int(np.max(act_tokens))) if len(kv_tokens) else 0


def _padded(count: int, kv_tokens: int, act_tokens: int) -> int:
    """Return ``padded_tokens`` of requests that each cache at most this."""
    return count * ((ceil_blocks(kv_tokens) + ceil_blocks(act_tokens)) * BLOCK_TOKENS + 1)


def split_representations(entries: BlockEntries, tokens) -> tuple[np.ndarray, np.ndarray]:
    """(kv, act) tokens of requests that cache ``tokens`` tokens each, summed over tiers."""
    counts = entries.tokens(np.asarray(tokens))
    is_act = np.array([representation_of(entry) == "act" for entry in entries.names])
    recomputed = entries.tok_tokens(np.asarray(tokens))  # chunk rows and the new token
    return counts[..., ~is_act].sum(-1) + recomputed, counts[..., is_act].sum(-1)


def packed(problem: Problem, policy: Policy, tokens: np.ndarray) -> list[np.ndarray]:
    """Cut requests of at most ``tokens`` tokens each into a policy's mini-batches: ``pack``, or for "balance" CAPTURE's
    greedy. Raise InputError if the machine's seconds are needed and unknown."""
    entries, bound = BlockEntries(policy.cache), policy.max_mini_batch_tokens
    if policy.packing != "balance":
        return pack(tokens, entries, bound, policy.packing)
    lines = split_lines(problem, policy, "both(kv@host,act@host)")
    kv, act = split_representations(entries, tokens)
    return _by_imbalance(kv.tolist(), act.tolist(), lines.gen_s, lines.load_kv_s, bound)


def imbalance(kv_gen_s: float, load_kv_s: float) -> float:
    """Return F_b = max(balance, 1/balance), balance = T_kv_gen / T_load_kv (CAPTURE, eq. 6 and 7); 1 is perfect.
    Infinity if only one of them is 0, else 1 if both are."""
    longer, shorter = max(kv_gen_s, load_kv_s), min(kv_gen_s, load_kv_s)
    if not longer:
        return 1.0
    return longer / shorter if shorter else math.inf


def _by_imbalance(kv: list[int], act: list[int], gen_s: float, load_s: float, bound: int) -> list[np.ndarray]:
    """Pack by CAPTURE's greedy as printed, with seconds per token: in order of arrival, a request joins the mini-batch
    if it fits and F_b does not rise; if none does, the next mini-batch begins."""
    groups, left = [], list(range(len(kv)))
    while left:
        group, others = [left[0]], []
        widest, sums = (kv[left[0]], act[left[0]]), (gen_s * act[left[0]], load_s * kv[left[0]])
        for request in left[1:]:
            wider = max(widest[0], kv[request]), max(widest[1], act[request])
            more = sums[0] + gen_s * act[request], sums[1] + load_s * kv[request]
            fits = _padded(len(group) + 1, *wider) <= bound
            if fits and imbalance(*more) <= imbalance(*sums) * (1 + 1e-12):
                group.append(request)
                widest, sums = wider, more
            else:
                others.append(request)
        groups.append(np.array(group))
        left = others
    return groups


def pack(
    tokens: np.ndarray,
    entries: BlockEntries,
    max_mini_batch_tokens: int,
    packing: str = "balanced",
) -> list[np.ndarray]:
    """Cut requests into mini-batches whose padded tokens stay within the bound; return arrays of request indices.

    ``tokens``: the most tokens each request will ever cache. A request above the bound gets its own mini-batch.
    "balanced": sorted by length, so that padding is small, and cut into the fewest mini-batches of nearly equal size,
    because a pipeline of equal steps has no bubbles.
    """
    tokens = np.asarray(tokens)
    kv, act = split_representations(entries, tokens)
    if packing == "fifo":
        return _first_come(kv, act, max_mini_batch_tokens)
    return _even_cut(np.argsort(-tokens, kind="stable"), kv, act, max_mini_batch_tokens)


def _first_come(kv, act, bound: int) -> list[np.ndarray]:
    """Cut consecutive runs in order of arrival, each as long as the bound allows."""
    bins: list[list[int]] = []
    for request in range(len(kv)):
        candidate = [*bins[-1], request] if bins else None
        if candidate and padded_tokens(kv[candidate], act[candidate]) <= bound:
            bins[-1] = candidate
        else:
            bins.append([request])
    return [np.array(group) for group in bins]


def _even_cut(order, kv, act, bound: int) -> list[np.ndarray]:
    """Cut ``order`` (longest request first) into the fewest runs within the bound, of sizes as equal as possible.

    The first request of a run sets its padding, so it alone limits the run. Later runs have shorter requests: a smaller
    early run never lengthens a later one.
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
    """Return in how many pieces a mini-batch's prompts (tokens, [B]) are computed: more than one if a single prompt
    exceeds the mini-batch bound.

    Under a selection, and with attention on the host, prompts are computed whole.
    """
    if len(prompts) > 1 or takes_prompts_whole(policy):
        return 1
    return -(-int(prompts[0]) // chunk_tokens(policy.max_mini_batch_tokens))


def takes_prompts_whole(policy: Policy) -> bool:
    """Return whether prompts are never cut."""
    return policy.attention == "host" or policy.selection.method != "none"


def chunk_tokens(max_mini_batch_tokens):
    """Return the tokens of a piece of a long prompt: whole blocks within the mini-batch bound; works on arrays."""
    blocks = max_mini_batch_tokens // BLOCK_TOKENS
    return (np.maximum(blocks, 1) if np.ndim(blocks) else max(blocks, 1)) * BLOCK_TOKENS


def longest_piece(policy: Policy, prompts: np.ndarray) -> int:
    """Return the most prompt tokens of a request that a mini-batch computes in one step."""
    longest = int(prompts.max())
    return longest if num_chunks(policy, prompts) == 1 else chunk_tokens(policy.max_mini_batch_tokens)
