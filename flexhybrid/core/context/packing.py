"""Requests into mini-batches under the buffer bounds: by length in even parts, as they arrive, or by CAPTURE's F_b.

CAPTURE (Sec. IV.B, eq. 6 and 7) forms mini-batches by F_b = max(T_kv_gen / T_load_kv, its inverse). Requests that keep
the ratio of the pools (eq. 5) have one F_b however they are grouped, except for blocks cut in two. So F_b tells nothing
apart, and its greedy makes slower mini-batches than even parts (`flexhybrid reproduce --only capture-table3`).
"""

import math

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS, BlockEntries, ceil_blocks
from flexhybrid.core.context.cache_entries import representation_of
from flexhybrid.core.context.split import split_lines
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem


def padded_tokens(kv_tokens: np.ndarray, act_tokens: np.ndarray) -> int:
    """B·max(KV) + B·max(ACT) + B: rows of the attention buffer of these requests and their new tokens.

    Both counts are rounded up to whole blocks, as the buffers are.
    """
    return _padded(len(kv_tokens), int(np.max(kv_tokens)), int(np.max(act_tokens))) if len(kv_tokens) else 0


def _padded(count: int, kv_tokens: int, act_tokens: int) -> int:
    """``padded_tokens`` of requests of which none caches more than this."""
    return count * ((ceil_blocks(kv_tokens) + ceil_blocks(act_tokens)) * BLOCK_TOKENS + 1)


def split_representations(entries: BlockEntries, tokens) -> tuple[np.ndarray, np.ndarray]:
    """(kv, act) tokens of requests that cache ``tokens`` tokens each, summed over tiers."""
    counts = entries.tokens(np.asarray(tokens))
    is_act = np.array([representation_of(entry) == "act" for entry in entries.names])
    recomputed = entries.tok_tokens(np.asarray(tokens))  # chunk rows beside the new token
    return counts[..., ~is_act].sum(-1) + recomputed, counts[..., is_act].sum(-1)


def packed(problem: Problem, policy: Policy, tokens: np.ndarray) -> list[np.ndarray]:
    """Cut requests that cache at most ``tokens`` tokens each into a policy's mini-batches: ``pack``, or, for "balance",
    CAPTURE's greedy with the machine's seconds. Raises InputError where these are needed and not known."""
    entries, bound = BlockEntries(policy.cache), policy.max_mini_batch_tokens
    if policy.packing != "balance":
        return pack(tokens, entries, bound, policy.packing)
    lines = split_lines(problem, policy, "both(kv@host,act@host)")
    kv, act = split_representations(entries, tokens)
    return _by_imbalance(kv.tolist(), act.tolist(), lines.gen_s, lines.load_kv_s, bound)


def imbalance(kv_gen_s: float, load_kv_s: float) -> float:
    """F_b = max(balance, 1/balance) with balance = T_kv_gen / T_load_kv (CAPTURE, eq. 6 and 7); 1 is perfect. With
    nothing to recompute or nothing to load it is infinity, with neither 1."""
    longer, shorter = max(kv_gen_s, load_kv_s), min(kv_gen_s, load_kv_s)
    if not longer:
        return 1.0
    return longer / shorter if shorter else math.inf


def _by_imbalance(kv: list[int], act: list[int], gen_s: float, load_s: float, bound: int) -> list[np.ndarray]:
    """CAPTURE's greedy as printed, with the seconds a token: in order of arrival a request joins the mini-batch where
    it fits and F_b does not rise; where no more does, the next one begins."""
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
    """Cut requests into mini-batches whose padded tokens stay within the bound.

    ``tokens``: the most tokens each request will ever cache. A request that alone exceeds the bound gets a mini-batch
    of its own. Returns arrays of request indices.

    balanced: requests sorted by length, so that padding is small, and cut into the fewest mini-batches of nearly equal
    size: a pipeline of equal steps has no bubbles.
    """
    tokens = np.asarray(tokens)
    kv, act = split_representations(entries, tokens)
    if packing == "fifo":
        return _first_come(kv, act, max_mini_batch_tokens)
    return _even_cut(np.argsort(-tokens, kind="stable"), kv, act, max_mini_batch_tokens)


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
