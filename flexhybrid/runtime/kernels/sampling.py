"""From logits to tokens, each request by its own parameters.

The order of the steps is vLLM's: tokens that may not come yet are masked, then temperature, min_p, top_k, top_p, then
one draw. The random numbers are counter-based: the one of (seed, request, position) is the same whatever else is in the
batch, and each row of logits is treated as if it were alone, so that company changes no token.

What is kept depends on the logits' values alone: of tokens with equal logits at the edge of top_k or top_p all are kept
(transformers keeps some of them at the edge of top_p, whichever its sort put last).

Shapes in names: B requests of a mini-batch, V vocabulary, N requests of a wave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

GREEDY_BELOW = 1e-5  #: temperatures too small to divide logits by mean greedy, as in vLLM
DRAW_BLOCK = 256  #: a draw first finds its block of the vocabulary, then its token: far fewer sums to carry along
NO_TOKEN = -1  #: stands for the token of logits that are no numbers
NUCLEUS_PREFIX = 512  #: on a CPU top_p first looks among so many tokens, and sorts the vocabulary only if it must


@dataclass(frozen=True)
class SamplingPlan:
    """How the tokens of a wave's requests are chosen: an entry a request, in the wave's order."""

    temperature: np.ndarray  #: [N]; below GREEDY_BELOW the largest logit is taken and the next three do not count
    top_k: np.ndarray  #: [N] whole numbers; 0: off
    top_p: np.ndarray  #: [N]; 1: off
    min_p: np.ndarray  #: [N]; 0: off
    seeds: np.ndarray  #: [N] uint64
    request_ids: np.ndarray  #: [N] names the request to the random numbers, among those of the same seed
    min_positions: np.ndarray  #: [N] tokens of ``held_ids`` may not come at positions below this one
    held_ids: tuple[tuple[int, ...], ...]  #: [N]

    def select(self, members: np.ndarray) -> SamplingPlan:
        """The plan of some of the requests."""
        return SamplingPlan(
            self.temperature[members], self.top_k[members], self.top_p[members], self.min_p[members],
            self.seeds[members], self.request_ids[members], self.min_positions[members],
            tuple(self.held_ids[i] for i in members),
        )  # fmt: skip


def greedy_plan(num_requests: int) -> SamplingPlan:
    """The largest logit for everyone."""
    zeros = np.zeros(num_requests)
    whole = np.zeros(num_requests, dtype=np.int64)
    seeds = np.zeros(num_requests, dtype=np.uint64)
    return SamplingPlan(zeros, whole, zeros + 1, zeros, seeds, np.arange(num_requests), whole, ((),) * num_requests)


@dataclass(frozen=True)
class StepSampling:
    """What choosing the next token of B requests needs, on the device."""

    #: float64: uniforms, temperature (1 if greedy), min_p, top_k, top_p; None: all greedy
    values_5B: torch.Tensor | None
    greedy_B: torch.Tensor | None  #: which rows are greedy; None when none is
    rows_min_p: torch.Tensor | slice | None  #: rows that ask for it; None: nobody does
    rows_top_k: torch.Tensor | slice | None
    rows_top_p: torch.Tensor | slice | None
    largest_k: int
    held_2M: torch.Tensor | None  #: (row, token id) pairs that may not come yet


def step_sampling(
    plan: SamplingPlan,
    requests: np.ndarray,
    positions: np.ndarray,
    to_device: Callable[[np.ndarray], torch.Tensor],
) -> StepSampling | None:
    """How the requests [B] (places in the plan) choose the tokens at ``positions`` [B]; None: the largest logit, all.

    A token's position counts from the first token of the prompt. ``to_device`` may copy asynchronously.
    """
    temperature = plan.temperature[requests]
    random = temperature >= GREEDY_BELOW
    held = np.flatnonzero(positions < plan.min_positions[requests])
    pairs = [(row, token) for row in held for token in plan.held_ids[requests[row]]]
    if not pairs and not random.any():
        return None

    def rows(wanted: np.ndarray) -> torch.Tensor | slice | None:
        wanted = wanted & random
        if wanted.all():
            return slice(None)
        return to_device(np.flatnonzero(wanted)) if wanted.any() else None

    values = None
    min_p, top_k, top_p = plan.min_p[requests], plan.top_k[requests], plan.top_p[requests]
    if random.any():
        drawn = uniforms(plan.seeds[requests], plan.request_ids[requests], positions)
        values = to_device(np.stack([drawn, np.where(random, temperature, 1.0), min_p, top_k, top_p]))
    return StepSampling(
        values_5B=values,
        greedy_B=None if random.all() or values is None else to_device(~random),
        rows_min_p=rows(min_p > 0),
        rows_top_k=rows(top_k > 0),
        rows_top_p=rows(top_p < 1),
        largest_k=int(top_k.max()),
        held_2M=to_device(np.array(pairs, dtype=np.int64).T) if pairs else None,
    )


def choose(logits_BV: torch.Tensor, step: StepSampling | None) -> torch.Tensor:
    """Token ids [B]; ``step`` from ``step_sampling``. The logits are left as they are."""
    if step is None:
        return logits_BV.argmax(dim=-1)
    warped_BV = warp(logits_BV, step)
    if step.values_5B is None:
        return warped_BV.argmax(dim=-1)
    largest_B = None if step.greedy_B is None else warped_BV.argmax(dim=-1)
    tokens_B = draw(warped_BV, step.values_5B[0])
    return tokens_B if largest_B is None else torch.where(step.greedy_B, largest_B, tokens_B)


def warp(logits_BV: torch.Tensor, step: StepSampling) -> torch.Tensor:
    """New float32 logits [B, V]: divided by the temperature, -inf where a token may not come."""
    if step.values_5B is None:
        logits = logits_BV.to(torch.float32, copy=True)
    else:
        _, temperature_B, min_p_B, top_k_B, top_p_B = step.values_5B
        logits = logits_BV.float() / temperature_B.float()[:, None]
    if step.held_2M is not None:
        # Not by assignment: a number assigned at indices crosses from pageable memory, and the host waits for that.
        logits.index_put_((step.held_2M[0], step.held_2M[1]), logits.new_full((), -torch.inf))
    if step.rows_min_p is not None:
        rows = step.rows_min_p
        keep_from(logits, rows, logits[rows].amax(dim=-1) + min_p_B[rows].log())
    if step.rows_top_k is not None:
        rows = step.rows_top_k
        keep_from(logits, rows, top_k_edge(logits[rows], top_k_B[rows].long(), step.largest_k))
    if step.rows_top_p is not None:
        rows = step.rows_top_p
        keep_from(logits, rows, top_p_edge(logits[rows], top_p_B[rows]))
    return logits


def keep_from(logits_BV: torch.Tensor, rows: torch.Tensor | slice, edge_R: torch.Tensor) -> None:
    """In the given rows, -inf in place of the logits below the row's edge."""
    edge = edge_R.to(logits_BV.dtype)[:, None]
    if isinstance(rows, slice):
        logits_BV.masked_fill_(logits_BV < edge, -torch.inf)
    else:
        kept = logits_BV[rows]
        logits_BV[rows] = kept.masked_fill_(kept < edge, -torch.inf)


def top_k_edge(logits_RV: torch.Tensor, top_k_R: torch.Tensor, largest_k: int) -> torch.Tensor:
    """The k-th largest logit of each row [R]; a k beyond the vocabulary keeps all of it."""
    largest_k = min(largest_k, logits_RV.shape[-1])
    ranked = logits_RV.topk(largest_k, dim=-1).values
    return ranked.gather(1, top_k_R.clamp(max=largest_k)[:, None] - 1).squeeze(1)


def top_p_edge(logits_RV: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
    """The smallest logit of each row's nucleus [R]: the most probable tokens until their probabilities reach top_p."""
    vocab = logits_RV.shape[-1]
    largest = logits_RV.amax(dim=-1, keepdim=True)
    target = top_p_R * (logits_RV - largest).exp_().sum(dim=-1, dtype=torch.float64)
    # Sorting a whole vocabulary takes a GPU little time, and looking whether it was needed would make it wait.
    prefix = vocab if logits_RV.is_cuda else min(NUCLEUS_PREFIX, vocab)
    edge, ends = _nucleus(logits_RV, largest, target, prefix)
    if prefix < vocab and (wide := (~ends).nonzero().squeeze(1)).numel():
        edge[wide] = _nucleus(logits_RV[wide], largest[wide], target[wide], vocab)[0]
    return edge


def _nucleus(logits_RV, largest_R1, target_R, prefix: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Edge [R] as seen among the ``prefix`` largest logits, and whether the nucleus [R] ends among them."""
    if prefix == logits_RV.shape[-1]:
        ranked = logits_RV.sort(dim=-1, descending=True).values
    else:
        ranked = logits_RV.topk(prefix, dim=-1).values
    reached = (ranked - largest_R1).exp_().cumsum(dim=-1, dtype=torch.float64)
    # A token is in when those before it do not reach the target; the first one always is.
    size = 1 + (reached[:, :-1] < target_R[:, None]).sum(dim=-1)
    return ranked.gather(1, size[:, None] - 1).squeeze(1), reached[:, -1] >= target_R


def draw(logits_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Token ids [B] of the softmax of the logits (which are overwritten) at the uniforms, by the inverse of the
    cumulated probabilities in the order of the vocabulary."""
    weights = logits_BV.sub_(logits_BV.amax(dim=-1, keepdim=True)).exp_()
    batch, vocab = weights.shape
    blocks = torch.nn.functional.pad(weights, (0, -vocab % DRAW_BLOCK)).view(batch, -1, DRAW_BLOCK)
    cumulated = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = uniforms_B[:, None] * cumulated[:, -1:]
    block = _first_above(cumulated, target)
    before = torch.where(block > 0, cumulated.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, DRAW_BLOCK)).squeeze(1).double().cumsum(dim=-1)
    return (block * DRAW_BLOCK + _first_above(inside, target - before)).squeeze(1).clamp_(max=vocab - 1)


def _first_above(cumulated: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index [B, 1] of the first entry above the target, which rounding may have lifted to the total itself: without
    the bound the last entry would be taken, whatever its probability."""
    total = cumulated[:, -1:]
    bound = torch.nextafter(total, torch.zeros_like(total))
    # The clamp is for logits that are no numbers: any token then, not one outside the vocabulary.
    return torch.searchsorted(cumulated, torch.minimum(target, bound), right=True).clamp_(max=cumulated.shape[-1] - 1)


# ---- random numbers --------------------------------------------------------------------------------------------------

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)


def philox4x32(counter_4N: np.ndarray, key_2N: np.ndarray) -> np.ndarray:
    """Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    Words of 32 bits in uint64, so that products fit: counters [4, N] and keys [2, N] to random words [4, N].
    """
    even, odd, key = counter_4N[::2], counter_4N[1::2], key_2N
    for _ in range(10):
        product = even * _MULTIPLIERS
        even, odd = (product >> _HALF)[::-1] ^ odd ^ key, (product & _WORD)[::-1]
        key = (key + _KEY_STEPS) & _WORD
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(seeds: np.ndarray, requests: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A uniform in [0, 1) of 53 bits for each (seed, request, position): key and counter of Philox 4x32."""
    seeds, requests, positions = (
        np.asarray(numbers).astype(np.uint64) for numbers in np.broadcast_arrays(seeds, requests, positions)
    )
    counter = np.stack([positions & _WORD, positions >> _HALF, requests & _WORD, requests >> _HALF])
    words = philox4x32(counter, np.stack([seeds & _WORD, seeds >> _HALF]))
    return ((words[0] >> np.uint64(5)) * 2.0**26 + (words[1] >> np.uint64(6))) * 2.0**-53
