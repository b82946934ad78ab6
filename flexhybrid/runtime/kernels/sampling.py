"""Choose tokens from logits, by the sampling parameters of each request.

The order of the steps is vLLM's: change the logits (``logit_changes``), divide by the temperature, apply min_p, top_k
and top_p, then draw once. Random numbers are counter-based: a number depends only on seed, request and position. Each
row of logits is processed separately. So a request's tokens do not depend on the rest of the batch.

Tokens with a logit equal to the one at the edge of top_k or top_p are all kept. (transformers keeps some of them at the
edge of top_p, depending on its sort.)

Shapes in names: B requests of a mini-batch, V vocabulary, N requests of a wave, R rows that a step applies to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch

from flexhybrid.runtime.kernels.logit_changes import LogitChanges, StepChanges, ToDevice, change_, step_changes

GREEDY_BELOW = 1e-5  #: lower temperatures mean greedy, as in vLLM, because logits cannot be divided by them
DRAW_BLOCK = 256  #: a draw first finds the block of this many tokens, then the token in it, which needs fewer sums
NO_TOKEN = -1  #: replaces the token of logits that are not finite
NUCLEUS_PREFIX = 512  #: on a CPU, top_p first sorts this many of the largest logits, and only if needed all


@dataclass(frozen=True)
class SamplingPlan:
    """How requests choose their tokens: one entry per request, in the wave's order."""

    temperature: np.ndarray  #: [N]; below GREEDY_BELOW the largest logit is taken, and the next three are ignored
    top_k: np.ndarray  #: [N] integers; 0: off
    top_p: np.ndarray  #: [N]; 1: off
    min_p: np.ndarray  #: [N]; 0: off
    seeds: np.ndarray  #: [N] uint64
    request_ids: np.ndarray  #: [N] number of the request among those with its seed, for the random numbers
    num_logprobs: np.ndarray  #: [N] number of most probable tokens recorded with each new token; -1: record nothing
    num_prompt_logprobs: np.ndarray  #: [N] the same for each token of the prompt
    changes: tuple[LogitChanges | None, ...]  #: [N]; None: the logits do not change
    grammars: tuple[Any, ...]  #: [N] ``token_masks.Grammar`` of the answer, or None

    @cached_property
    def changing(self) -> bool:
        """Return whether a request changes its logits."""
        return any(change is not None for change in self.changes)

    def select(self, members: np.ndarray) -> SamplingPlan:
        """Return the plan of the requests with these indices."""
        values: Iterable[Any] = (getattr(self, name) for name in PLAN_FIELDS)
        selected: list[Any] = [tuple(v[i] for i in members) if isinstance(v, tuple) else v[members] for v in values]
        return SamplingPlan(*selected)


PLAN_FIELDS = tuple(field.name for field in fields(SamplingPlan))


def joined_plans(plans: Sequence[SamplingPlan]) -> SamplingPlan:
    """Return the plan of the requests of all plans."""
    fields_of = ([getattr(plan, name) for plan in plans] for name in PLAN_FIELDS)
    joined: list[Any] = [tuple(chain(*of)) if isinstance(of[0], tuple) else np.concatenate(of) for of in fields_of]
    return SamplingPlan(*joined)


def greedy_plan(num_requests: int) -> SamplingPlan:
    """Return a plan with which every request takes the largest logit."""
    zeros, int_zeros = np.zeros(num_requests), np.zeros(num_requests, dtype=np.int64)
    return SamplingPlan(
        temperature=zeros,
        top_k=int_zeros,
        top_p=zeros + 1,
        min_p=zeros,
        seeds=int_zeros.astype(np.uint64),
        request_ids=np.arange(num_requests),
        num_logprobs=int_zeros - 1,
        num_prompt_logprobs=int_zeros - 1,
        changes=(None,) * num_requests,
        grammars=(None,) * num_requests,
    )


@dataclass(frozen=True)
class StepSampling:
    """The device tensors with which B requests choose their next tokens."""

    #: float64: uniform random numbers, temperature (1 if greedy), min_p, top_k, top_p; None: all requests are greedy
    values_5B: torch.Tensor | None
    greedy_B: torch.Tensor | None  #: bool: the greedy rows; None if all rows are greedy, or none is
    rows_min_p: torch.Tensor | slice | None  #: rows with a min_p; None: no row
    rows_top_k: torch.Tensor | slice | None
    rows_top_p: torch.Tensor | slice | None
    largest_k: int
    changes: StepChanges | None


def step_sampling(
    plan: SamplingPlan, positions: np.ndarray, first_cells: np.ndarray, to_device: ToDevice
) -> StepSampling | None:
    """Return the tensors with which a plan's requests choose the tokens at ``positions`` [B]; None if all are greedy.

    Positions count from the first token of the prompt. ``first_cells`` [B]: first cells of the requests in the token
    table. ``to_device`` may copy asynchronously.
    """
    temperature = plan.temperature
    random = temperature >= GREEDY_BELOW
    changes = step_changes(plan.changes, positions, first_cells, to_device) if plan.changing else None
    if changes is None and not random.any():
        return None

    def rows(wanted: np.ndarray) -> torch.Tensor | slice | None:
        wanted = wanted & random
        if wanted.all():
            return slice(None)
        return to_device(np.flatnonzero(wanted)) if wanted.any() else None

    values = None
    min_p, top_k, top_p = plan.min_p, plan.top_k, plan.top_p
    if random.any():
        drawn = uniforms(plan.seeds, plan.request_ids, positions)
        values = to_device(np.stack([drawn, np.where(random, temperature, 1.0), min_p, top_k, top_p]))
    return StepSampling(
        values_5B=values,
        greedy_B=None if random.all() or values is None else to_device(~random),
        rows_min_p=rows(min_p > 0),
        rows_top_k=rows(top_k > 0),
        rows_top_p=rows(top_p < 1),
        largest_k=int(top_k.max()),
        changes=changes,
    )


def choose(logits_BV: torch.Tensor, step: StepSampling | None, tokens: torch.Tensor) -> torch.Tensor:
    """Return token ids [B]. ``tokens``: the token table. The logits stay unchanged.

    A request that forbids every token gets the most probable one.
    """
    if step is None:
        return logits_BV.argmax(dim=-1)
    warped_BV = warp(logits_BV, step, tokens)
    if step.changes is None or not step.changes.forbids:
        return _chosen(warped_BV, step)
    none_left_B = warped_BV.amax(dim=-1).isinf()
    return torch.where(none_left_B, logits_BV.argmax(dim=-1), _chosen(warped_BV, step))


def _chosen(warped_BV: torch.Tensor, step: StepSampling) -> torch.Tensor:
    """Return token ids [B]. Overwrites the logits."""
    if step.values_5B is None:
        return warped_BV.argmax(dim=-1)
    if step.greedy_B is None:
        return draw(warped_BV, step.values_5B[0])
    largest_B = warped_BV.argmax(dim=-1)  # before the draw
    return torch.where(step.greedy_B, largest_B, draw(warped_BV, step.values_5B[0]))


def warp(logits_BV: torch.Tensor, step: StepSampling, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, V] after changes and temperature, in float32, with -inf for tokens that are not kept."""
    if step.changes is None and step.values_5B is not None:
        logits = logits_BV.float() / step.values_5B[1].float()[:, None]
    else:
        logits = logits_BV.to(torch.float32, copy=True)
    if step.changes is not None:
        change_(logits, step.changes, tokens)
    if step.values_5B is None:
        return logits
    _, temperature_B, min_p_B, top_k_B, top_p_B = step.values_5B
    if step.changes is not None:
        logits /= temperature_B.float()[:, None]
    if (rows := step.rows_min_p) is not None:
        keep_from(logits, rows, logits[rows].amax(dim=-1) + min_p_B[rows].log())
    if (rows := step.rows_top_k) is not None:
        keep_from(logits, rows, top_k_edge(logits[rows], top_k_B[rows].long(), step.largest_k))
    if (rows := step.rows_top_p) is not None:
        keep_from(logits, rows, top_p_edge(logits[rows], top_p_B[rows]))
    return logits


def keep_from(logits_BV: torch.Tensor, rows: torch.Tensor | slice, edge_R: torch.Tensor) -> None:
    """Set logits below the edge of their row to -inf. ``rows``: the rows of ``edge_R``."""
    edge = edge_R.to(logits_BV.dtype)[:, None]
    if isinstance(rows, slice):
        logits_BV.masked_fill_(logits_BV < edge, -torch.inf)
    else:
        kept = logits_BV[rows]
        logits_BV[rows] = kept.masked_fill_(kept < edge, -torch.inf)


def top_k_edge(logits_RV: torch.Tensor, top_k_R: torch.Tensor, largest_k: int) -> torch.Tensor:
    """Return the k-th largest logit of each row [R]; the smallest if k exceeds the vocabulary."""
    largest_k = min(largest_k, logits_RV.shape[-1])
    ranked = logits_RV.topk(largest_k, dim=-1).values
    return ranked.gather(1, top_k_R.clamp(max=largest_k)[:, None] - 1).squeeze(1)


def top_p_edge(logits_RV: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
    """Return the smallest logit of each row's nucleus [R]: the most probable tokens whose sum reaches top_p."""
    vocab = logits_RV.shape[-1]
    largest = logits_RV.amax(dim=-1, keepdim=True)
    target = top_p_R * (logits_RV - largest).exp_().sum(dim=-1, dtype=torch.float64)
    # A GPU sorts a whole vocabulary quickly. Checking whether that is needed would make the host wait for the GPU.
    prefix = vocab if logits_RV.is_cuda else min(NUCLEUS_PREFIX, vocab)
    edge, ends = _nucleus(logits_RV, largest, target, prefix)
    if prefix < vocab and (wide := (~ends).nonzero().squeeze(1)).numel():
        edge[wide] = _nucleus(logits_RV[wide], largest[wide], target[wide], vocab)[0]
    return edge


def _nucleus(logits_RV, largest_R1, target_R, prefix: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nucleus' smallest logit [R] among the ``prefix`` largest, and whether it ends there, bool [R]."""
    if prefix == logits_RV.shape[-1]:
        ranked = logits_RV.sort(dim=-1, descending=True).values
    else:
        ranked = logits_RV.topk(prefix, dim=-1).values
    reached = (ranked - largest_R1).exp_().cumsum(dim=-1, dtype=torch.float64)
    # A token belongs to the nucleus if the tokens before it do not reach the target. The first always belongs to it.
    size = 1 + (reached[:, :-1] < target_R[:, None]).sum(dim=-1)
    return ranked.gather(1, size[:, None] - 1).squeeze(1), reached[:, -1] >= target_R


def draw(logits_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Draw token ids [B] from the softmax of the logits, by inverting cumulated probabilities at the uniform numbers.

    Overwrites the logits.
    """
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
    """Return the index [B, 1] of the first entry above the target.

    Rounding may raise the target to the total, which would select the last entry at any probability. So the target is
    limited to less than the total.
    """
    total = cumulated[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    index = torch.searchsorted(cumulated, torch.minimum(target, below_total), right=True)
    return index.clamp_(max=cumulated.shape[-1] - 1)  # logits that are not finite give some token of the vocabulary


# ---- counter-based random numbers: each depends only on its seed, request and position

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)


def philox4x32(counter_4N: np.ndarray, key_2N: np.ndarray) -> np.ndarray:
    """Return random words [4, N] of Philox 4x32 with 10 rounds, for counters [4, N] and keys [2, N].

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. 32-bit words are stored in uint64,
    which holds their products.
    """
    even, odd, key = counter_4N[::2], counter_4N[1::2], key_2N
    for _ in range(10):
        product = even * _MULTIPLIERS
        even, odd = (product >> _HALF)[::-1] ^ odd ^ key, (product & _WORD)[::-1]
        key = (key + _KEY_STEPS) & _WORD
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(seeds: np.ndarray, requests: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a uniform random number in [0, 1) of 53 bits for each (seed, request, position), by Philox 4x32."""
    seeds, requests, positions = (
        np.asarray(values).astype(np.uint64) for values in np.broadcast_arrays(seeds, requests, positions)
    )
    counter = np.stack([positions & _WORD, positions >> _HALF, requests & _WORD, requests >> _HALF])
    words = philox4x32(counter, np.stack([seeds & _WORD, seeds >> _HALF]))
    return ((words[0] >> np.uint64(5)) * 2.0**26 + (words[1] >> np.uint64(6))) * 2.0**-53
