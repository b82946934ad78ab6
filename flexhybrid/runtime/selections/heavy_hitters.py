"""H2O's cache (Zhang et al. 2023): each head keeps the newest tokens, and those with the most attention so far.

A request has a fixed number K of places, divided among the pools like a context of K tokens. Half of them are for the
newest tokens, the others for the tokens with the largest sums of attention weights. Every key/value head chooses
separately; the weights of a group's query heads are added. After the prompt, the best K tokens are kept. Then each new
token replaces the worst token that is not among the newest, in the pool that the plan gives.

Shapes: B requests of a mini-batch, N of the wave, G key/value heads, P prompt tokens, K places, T attention columns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from flexhybrid.core.context.selection import kept_tokens, num_keeping
from flexhybrid.core.schedule.steps import MiniBatchStep
from flexhybrid.core.task import Task
from flexhybrid.core.wave import Wave
from flexhybrid.runtime.kernels.attention import attention_sums
from flexhybrid.runtime.selections.hooks import SelectionHooks
from flexhybrid.runtime.step_tensors import to_device


class StepPlaces(NamedTuple):
    """The places of a decode step's requests, for all layers."""

    requests: torch.Tensor  #: [B]
    columns: torch.Tensor  #: [K] columns of the places' tokens in the attention weights
    held: torch.Tensor  #: [B, 1, K] whether a place holds a token
    own_entry: torch.Tensor  #: [B, 1, K] whether it also belongs to the new token's pool
    planned: torch.Tensor  #: [B, 1] the new token's place if some are empty
    full: torch.Tensor  #: [B, 1] whether no place is empty
    old: torch.Tensor  #: [B, 1, 1] the last position that is not among the newest
    position: torch.Tensor  #: [B, 1, 1] position of the new token


def recent_tokens(step: MiniBatchStep) -> np.ndarray:
    """Return the number of places for the newest tokens, for each request [B]."""
    return step.most_kept - step.most_kept // 2


class HeavyHitters(SelectionHooks):
    """Scores and positions of the tokens in all places, [layer, N, G, K] for the layers that drop tokens."""

    def __init__(self, wave: Wave, device: torch.device):
        super().__init__()
        selection, workload = wave.policy.selection, wave.workload
        self.wave, self.device = wave, device
        cached = workload.cached_tokens
        num_places = int(kept_tokens(selection, workload.prompt_tokens, cached, cached).max())
        self.first = num_keeping(selection, wave.shape.num_layers)  # the first layer that drops tokens
        size = (wave.shape.num_layers - self.first, workload.num_requests, wave.shape.num_kv_heads, num_places)
        self.scores = torch.zeros(size, dtype=torch.float32, device=device)
        self.born = torch.zeros(size, dtype=torch.int32, device=device)  # positions of the places' tokens
        places = np.arange(num_places)
        self.entry_of = wave.entries.entry_of(places)
        self.slot_of = wave.entries.stored(places)[places, self.entry_of]  # place among the places of its entry
        self.slots = to_device(self.slot_of, device)
        self.weights_BGT = torch.empty(0, dtype=torch.float32)  #: attention weights of the new tokens by group
        self._step_places: dict[int, StepPlaces] = {}  #: by mini-batch, of its decode step

    # ---- hooks

    def begin_step(self, step: MiniBatchStep) -> None:
        if not (step.prefill or step.whole):
            self._step_places[step.mini_batch] = self._step_places_of(step)

    def stages_rows(self, step: MiniBatchStep) -> bool:
        """After a prompt, ``rank`` stages the rows that are kept."""
        return step.whole or not step.prefill

    def weighs(self, task: Task) -> bool:
        return not task.payload.step.whole

    def after_attend(self, task: Task, weights_BGrT: torch.Tensor) -> None:
        self.weights_BGT = weights_BGrT.float().sum(2)

    def chooses_places(self, step: MiniBatchStep) -> bool:
        return not (step.prefill or step.whole)

    # ---- for ``rank``

    def rank_prompt(
        self, layer: int, step: MiniBatchStep, queries_BPHd: torch.Tensor, keys_BPGd: torch.Tensor
    ) -> torch.Tensor:
        """Return positions [B, G, K] of the tokens to keep, in ascending order; padding repeats the last one."""
        # attention weights that each token of the prompt gets from all of its tokens
        sums_BGP = attention_sums(queries_BPHd, keys_BPGd, to_device(step.new_tokens, self.device))
        lengths = self._column(step.new_tokens)
        kept, recent = (
            self._column(np.minimum(counts, step.new_tokens)) for counts in (step.most_kept, recent_tokens(step))
        )
        positions = torch.arange(sums_BGP.shape[-1], device=self.device, dtype=torch.int64)
        wanted = sums_BGP.masked_fill(positions >= lengths - recent, torch.inf)
        wanted = wanted.masked_fill(positions >= lengths, -torch.inf)
        num_kept = min(self.scores.shape[-1], sums_BGP.shape[-1])
        order = wanted.topk(num_kept, dim=-1).indices
        places = torch.arange(num_kept, device=self.device, dtype=torch.int64)
        order = order.masked_fill(places >= kept, sums_BGP.shape[-1])
        chosen = torch.minimum(order.sort(dim=-1).values, lengths - 1)
        requests = to_device(step.requests, self.device)
        layer -= self.first
        self.scores[layer, requests, :, :num_kept] = sums_BGP.gather(-1, chosen)
        self.born[layer, requests, :, :num_kept] = chosen.int()
        return chosen

    def after_token(self, layer: int, step: MiniBatchStep, slot: int) -> None:
        """Add the attention weights of every token to its score, and set ``places`` [B, G] for the new tokens.

        Columns of ``weights_BGT`` are the segments' tokens, one segment after another, then the new token.
        """
        at, weights_BGT = self._step_places[step.mini_batch], self.weights_BGT
        layer -= self.first
        scores, born = self.scores[layer, at.requests], self.born[layer, at.requests]
        scores += weights_BGT[..., at.columns].masked_fill_(~at.held, 0.0)
        worst = scores.masked_fill(~(at.own_entry & (born <= at.old)), torch.inf).argmin(dim=-1)
        place = torch.where(at.full, worst, at.planned)[..., None]
        scores.scatter_(-1, place, weights_BGT[..., -1:])
        born.scatter_(-1, place, at.position.expand_as(place))
        self.scores[layer, at.requests], self.born[layer, at.requests] = scores, born
        self.places[slot] = self.slots[place[..., 0]]

    def _step_places_of(self, step: MiniBatchStep) -> StepPlaces:
        kept, recent = step.most_kept, recent_tokens(step)
        planned = step.context % kept
        columns, held = self._columns(step)
        own_entry = to_device(self.entry_of == self.entry_of[planned][:, None], self.device)[:, None]
        return StepPlaces(
            requests=to_device(step.requests, self.device),
            columns=columns,
            held=held,
            own_entry=own_entry & held,
            planned=self._column(planned)[..., 0],
            full=self._column(step.context >= kept)[..., 0],
            old=self._column(step.context - recent),
            position=self._column(step.context).int(),
        )

    def column_positions(self, layer: int, step: MiniBatchStep) -> torch.Tensor:
        """Return each attention column's token position, [B, G, T], before ``after_token``; -1 for padding."""
        columns, held = self._columns(step)
        born = self.born[layer - self.first, to_device(step.requests, self.device)].long()
        positions = born.new_full((*born.shape[:2], step.attention_tokens), -1)
        # An empty place may share a column with a held one: write to the last column instead, which is set below.
        positions.scatter_(-1, columns.where(held, positions.shape[-1] - 1).expand(born.shape), born)
        positions[..., -1] = self._column(step.context)[..., 0]
        return positions

    def _columns(self, step: MiniBatchStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention column of each place's token [K], and which requests hold it [B, 1, K]."""
        start, starts, counts = 0, {}, {}
        for segment in step.segments:
            index = self.wave.entries.names.index(segment.entry)
            starts[index], counts[index] = start, segment.num_tokens
            start += segment.max_tokens
        columns = np.array([starts[entry] for entry in self.entry_of]) + self.slot_of
        held = self.slot_of < np.stack([counts[entry] for entry in self.entry_of], axis=1)
        columns = np.minimum(columns, start)
        return to_device(columns, self.device), to_device(held, self.device)[:, None]

    def _column(self, values: np.ndarray) -> torch.Tensor:
        """Copy values [B] to the device as [B, 1, 1]."""
        return to_device(values, self.device)[:, None, None]
