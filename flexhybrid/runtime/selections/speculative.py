"""InfiniGen's choice of tokens (Lee et al. 2024, Sec. 4.3): a layer's attention guessed one layer ahead.

After the prompt each layer that chooses (``core.selection.first_choosing`` and those behind it) picks, of every
key/value head, the C columns in which its queries and keys are largest, over all requests of the mini-batch, and keeps
those columns of the query weights and of the keys. In the decode the attention input of layer i - 1 times the partial
query weights of layer i guesses the queries, and these times the partial keys the scores. Per head, scores above the
largest one less alpha count; every head of a request then fetches as many tokens as its heads have on average, at most
a share of the context, at least one.

Where we differ from the paper: requests are counted each by itself; the query heads of a group (GQA) share their key
head's columns, and a token is as wanted as by the query head that wants it most. Models with rotary positions turn
whole queries before they are skewed (``runtime.skew``), so their query weights are used as a whole.

Shapes: B requests of a mini-batch, R rows, H query heads, G key/value heads, r = H/G, d head size, C columns, T cached
tokens, S most tokens chosen, h hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from flexhybrid.core.context.selection import (
    first_choosing,
    kept_tokens,
    limits_cache,
    most_selected,
    num_choosing,
    partial_columns,
)
from flexhybrid.core.memory import index_cells, index_rows
from flexhybrid.core.schedule.steps import MiniBatchStep, Segment
from flexhybrid.core.task import Task
from flexhybrid.core.wave import Wave
from flexhybrid.runtime.kernels.attention import split_heads
from flexhybrid.runtime.kernels.rotary import rotate_
from flexhybrid.runtime.selections.hooks import SelectionHooks
from flexhybrid.runtime.selections.pool import Uses
from flexhybrid.runtime.step_tensors import Rotation, position_tables, to_device
from flexhybrid.runtime.storage.weights import Parts, Weights, linear


def choose_columns(q_RHd: torch.Tensor, k_RGd: torch.Tensor, real_R: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` columns of each key/value head with the largest sums of |Q| + |K|: [G, C], ascending.

    Of the query heads of a group it is the mean that counts beside their keys. Rows that are not ``real`` are padding.
    """
    rows, groups, d = k_RGd.shape
    sums = q_RHd.float().abs().view(rows, groups, -1, d).mean(2) + k_RGd.float().abs()
    return (sums * real_R[:, None, None]).sum(0).topk(count, dim=-1).indices.sort(dim=-1).values


def relative_scores(q_BGrC: torch.Tensor, keys_TBGC: torch.Tensor, scale: float, held_BT: torch.Tensor) -> torch.Tensor:
    """How far each token's guessed score is below its query head's largest, of r heads the least: float32 [B, G, T].

    Tokens that a request does not hold are at minus infinity.
    """
    scores = torch.matmul(q_BGrC * scale, keys_TBGC.permute(1, 2, 3, 0)).float()
    scores = scores.masked_fill(~held_BT[:, None, None], -torch.inf)
    return (scores - scores.amax(-1, keepdim=True)).amax(2)


def choose_tokens(
    relative_BGT: torch.Tensor, alpha: float, most_B: torch.Tensor, width: int, each_head: bool
) -> torch.Tensor:
    """Tokens to fetch: int32 [B, G, width] for ``each_head`` by itself, else [B, 1, width] for all heads together;
    ascending, -1 behind the last one.

    As many of a request as its heads have within ``alpha`` of the largest on average, rounded up, at least one and at
    most ``most_B``. For all heads together those with the largest sums of exp(score - the head's largest) are the best:
    what they would weigh in attention.
    """
    groups, tokens = relative_BGT.shape[1:]
    within = (relative_BGT > -alpha).sum((1, 2))
    count_B = torch.minimum((-(-within // groups)).clamp_(min=1), most_B)
    worth = relative_BGT if each_head else relative_BGT.exp().sum(1, keepdim=True)
    best = worth.topk(width, dim=-1).indices
    surplus = torch.arange(width, device=best.device) >= count_B[:, None, None]
    chosen = best.masked_fill_(surplus, tokens).sort(dim=-1).values
    return chosen.masked_fill_(chosen == tokens, -1).int()


class Fetched(NamedTuple):
    """Chosen tokens of a mini-batch, of one representation, whose rows lie side by side: by request, and head by head
    where each has chosen for itself."""

    representation: str
    heads: int  #: G where each key/value head has chosen for itself; 1: all heads together
    counts_B: np.ndarray  #: tokens of each request
    positions: np.ndarray | None  #: of all rows, where the model has rotary positions

    @property
    def tokens(self) -> int:
        return int(self.counts_B.sum())

    @property
    def most(self) -> int:
        return int(self.counts_B.max())

    def padded_rows(self) -> np.ndarray:
        """[B, heads, most]: the row of each token of each head. Padding repeats the last, or is any row."""
        counts, heads = self.counts_B[:, None, None], self.heads
        starts = heads * (np.cumsum(self.counts_B) - self.counts_B)[:, None, None]
        within = np.minimum(np.arange(self.most), np.maximum(counts - 1, 0))
        rows = starts + np.arange(heads)[:, None] * counts + within
        return np.minimum(rows, heads * self.tokens - 1)


class Choice(NamedTuple):
    """Which tokens of a representation a decode step may choose from, and where the choice is written down."""

    segment: Segment
    each_head: bool  #: each key/value head chooses for itself
    cells: slice  #: of the index
    size: tuple[int, int, int]  #: of those cells: [B, heads, S]
    most_B: torch.Tensor  #: tokens that each may fetch; this and what follows on the device
    positions: torch.Tensor | None  #: in their requests; None: all there are
    held_BT: torch.Tensor | None  #: whom each request holds of them; None: as the guess says

    def of(self, index: torch.Tensor) -> torch.Tensor:
        """Its part of an index, on the device or the host."""
        return index[self.cells].view(self.size)


class Guess(NamedTuple):
    """What a decode step's guesses need: made once an iteration, used by every layer. Tensors are on the device."""

    rows_B: torch.Tensor  #: which requests of the mini-batch
    positions_B: torch.Tensor  #: of their new tokens
    held_B: torch.Tensor  #: tokens that each request holds
    held_BT: torch.Tensor  #: the same as a mask of places
    places_B: torch.Tensor  #: of their new tokens, where the oldest make room
    full_B: torch.Tensor | None  #: who has no place left; None: nobody
    choices: dict[str, Choice]  #: by representation


class Speculation(SelectionHooks):
    """Partial query weights and partial keys of a wave, in all layers that choose, and the tokens chosen last.

    Partial keys of a mini-batch are [T, B, G, C]: what it holds so far is one run of memory.
    """

    def __init__(self, wave: Wave, weights: Weights):
        super().__init__()
        shape, selection, cached = wave.shape, wave.policy.selection, wave.workload.cached_tokens
        self.wave, self.shape, self.device, self.alpha = wave, shape, weights.device, selection.alpha
        self.count = partial_columns(shape, selection)
        self.first, self.groups = int(first_choosing(selection)), shape.num_kv_heads
        self.layers = num_choosing(selection, shape.num_layers)
        self.scale = shape.head_dim**-0.5
        number = len(wave.mini_batches)
        #: all of W_Q lies on the device already
        self.resident = shape.rotary and weights.bits == "native" and weights.streamed_from >= weights.layout.qkv_end

        def zeros(*size: int, of: torch.dtype = weights.dtype) -> torch.Tensor:
            return torch.zeros(self.layers, *size, dtype=of, device=self.device)

        self.columns = zeros(number, self.groups, self.count, of=torch.int64)
        rows = shape.query_width if shape.rotary else shape.num_heads * self.count
        copies = 1 if shape.rotary else number
        self.query_weights = zeros(0 if self.resident else copies, rows, shape.hidden)
        self.query_bias = zeros(0 if self.resident else copies, rows)
        self.skew: torch.Tensor | None = None
        if shape.rotary:
            self.skew = zeros(self.groups, shape.head_dim, shape.head_dim)
            for layer, matrices in enumerate(weights.skewing[self.first :]):
                self.skew[layer] = torch.eye(shape.head_dim) if matrices is None else matrices
        self.kept = kept_tokens(selection, wave.workload.prompt_tokens, cached, cached)
        tokens = [int(self.kept[group].max()) for group in wave.mini_batches]
        sizes = [most * len(group) for most, group in zip(tokens, wave.mini_batches, strict=True)]
        self.keys = zeros(sum(sizes), self.groups, self.count)
        self.sections = [
            part.unflatten(1, (most, -1)) for part, most in zip(self.keys.split(sizes, dim=1), tokens, strict=True)
        ]
        self.uses: Uses | None = None
        if limits_cache(selection) and selection.victim != "fifo":
            prompts, places = (
                [of_all[group] for group in wave.mini_batches] for of_all in (wave.workload.prompt_tokens, self.kept)
            )
            self.uses = Uses(selection.victim, shape.num_layers, prompts, places, self.groups, self.device)
        cells = [index_cells(shape, wave.policy, rows) for rows in index_rows(wave)]
        self.index_start = np.cumsum([0, *cells]).astype(np.int64)
        self.index = torch.zeros(int(self.index_start[-1]) * (self.layers > 0), dtype=torch.int32, device=self.device)
        self.positions = position_tables(wave.kinds, int(cached.max()) + 1)
        self.each_head = {"kv": wave.policy.bits.kv == "native", "act": False}
        self.limits_cache = limits_cache(selection)
        self._guesses: dict[int, Guess] = {}  # of the decode step of each mini-batch
        # The tokens that were fetched, by representation and slot: gathered on the host, then on the device; and by
        # representation those that the compute lane took from there: a slot is free before attention is over.
        self.gathered: dict[tuple[str, int], Fetched] = {}
        self.fetched: dict[tuple[str, int], Fetched] = {}
        self.taken: dict[str, Fetched] = {}

    # ---- hooks

    def begin_step(self, step: MiniBatchStep) -> None:
        if not step.prefill:
            self._guesses[step.mini_batch] = self._make_guess(step)

    def chooses(self, task: Task) -> bool:
        return task.layer >= self.first

    def after_project(self, task: Task, kvq: torch.Tensor) -> None:
        if not task.payload.step.prefill:
            keys, _, _ = split_heads(self.shape, kvq)
            self.places[task.payload.slot] = self.take_places(task.layer, task.payload.step, keys)

    def weighs(self, task: Task) -> bool:
        """In layers that look at every token, the victims of ``Uses`` depend on how much attention each one gets."""
        return self.uses is not None and not self.chooses(task) and not task.payload.step.prefill

    def after_attend(self, task: Task, weights_BGrT: torch.Tensor) -> None:
        self.looked_at(task.layer, task.payload.step, weights_BGrT, self.places[task.payload.slot])

    def chooses_places(self, step: MiniBatchStep) -> bool:
        return self.limits_cache and not step.prefill

    # ---- for its verbs

    def guess(self, step: MiniBatchStep) -> Guess:
        """What the guesses of a decode step need."""
        return self._guesses[step.mini_batch]

    def take(self, representation: str, slot: int) -> Fetched:
        """Return the tokens that were fetched to a slot; from now on they are ``taken``."""
        fetched = self.taken[representation] = self.fetched[representation, slot]
        return fetched

    # ---- the prompt

    def after_prompt(
        self, layer: int, step: MiniBatchStep, w: dict[str, Parts], q_RHd: torch.Tensor, k_RGd: torch.Tensor
    ) -> None:
        """Choose a layer's columns; keep them of its keys and query weights. ``w``: the layer's weights."""
        real = to_device((np.arange(step.width) < step.new_tokens[:, None]).reshape(-1), self.device)
        columns = choose_columns(self._skewed_queries(layer, q_RHd), self._skewed(layer, k_RGd), real, self.count)
        self.columns[layer - self.first, step.mini_batch] = columns
        keys = self.partial_keys(layer, step.mini_batch, k_RGd)
        section, keys = self.sections[step.mini_batch][layer - self.first], keys.view(-1, step.width, *keys.shape[1:])
        if (step.new_tokens <= self.kept[step.requests]).all():
            section[: step.width].copy_(keys.transpose(0, 1))
        else:  # the newest, each in the place that its position names
            requests, tokens = self._newest(step)
            section[tokens % self._kept_of(step)[requests], requests] = keys[requests, tokens]
        if not self.resident:
            self._keep_query_weights(layer, step.mini_batch, columns, w)

    def _kept_of(self, step: MiniBatchStep) -> torch.Tensor:
        return to_device(self.kept[step.requests], self.device)

    def _newest(self, step: MiniBatchStep) -> tuple[torch.Tensor, torch.Tensor]:
        """(request, token) of those tokens of the prompts that there are places for."""
        tokens, lengths = np.arange(step.width), step.new_tokens[:, None]
        newest = (tokens < lengths) & (tokens >= lengths - self.kept[step.requests][:, None])
        requests, tokens = np.nonzero(newest)
        return to_device(requests, self.device), to_device(tokens, self.device)

    def _skewed(self, layer: int, heads_RGd: torch.Tensor) -> torch.Tensor:
        """Rows of each key/value head times its skewing matrix; where that is folded into the weights, as they are."""
        if self.skew is None:
            return heads_RGd
        return torch.einsum("rgd,gde->rge", heads_RGd, self.skew[layer - self.first])

    def _skewed_queries(self, layer: int, q_RHd: torch.Tensor) -> torch.Tensor:
        if self.skew is None:
            return q_RHd
        grouped = q_RHd.unflatten(1, (self.groups, -1))
        return torch.einsum("rgmd,gde->rgme", grouped, self.skew[layer - self.first]).flatten(1, 2)

    def _keep_query_weights(self, layer: int, mini_batch: int, columns_GC: torch.Tensor, w: dict[str, Parts]) -> None:
        shape, first = self.shape, self.shape.kv_width
        rows = torch.arange(shape.query_width, device=self.device)
        if not shape.rotary:
            heads = rows.view(self.groups, -1, shape.head_dim)  # [G, r, d]
            index = columns_GC[:, None].expand(-1, heads.shape[1], -1)
            rows = heads.gather(2, index).reshape(-1)
        copy = 0 if shape.rotary else mini_batch
        take_rows(w["kvq.weight"], first + rows, self.query_weights[layer - self.first, copy])
        if "kvq.bias" in w:
            self.query_bias[layer - self.first, copy] = w["kvq.bias"][0][first + rows]

    # ---- the decode

    def _make_guess(self, step: MiniBatchStep) -> Guess:
        rows = np.flatnonzero(np.isin(self.wave.mini_batches[step.mini_batch], step.requests))
        kept = self.kept[step.requests]
        held = np.minimum(step.context, kept)
        held_BT, full = np.arange(held.max()) < held[:, None], step.context >= kept
        arrays = (rows, step.context, held, held_BT, step.context % kept, full if full.any() else None)
        on_device = (None if array is None else to_device(array, self.device) for array in arrays)
        return Guess(*on_device, self._choices(step))

    def _choices(self, step: MiniBatchStep) -> dict[str, Choice]:
        choices, start, batch = {}, int(self.index_start[step.mini_batch]), len(step.requests)
        for segment in step.segments:
            if not segment.max_tokens:
                continue
            most = most_selected(self.wave.policy.selection, segment.num_tokens)
            most = np.where(segment.num_tokens > 0, most, 0).astype(np.int64)
            each_head = self.each_head[segment.representation]
            size = batch, self.groups if each_head else 1, int(most.max())
            end = start + batch * size[1] * size[2]
            positions = held = None
            if len(self.wave.kinds.kinds) > 1:
                positions = to_device(self.positions[segment.kind][: segment.max_tokens], self.device)
                held = to_device(np.arange(segment.max_tokens) < segment.num_tokens[:, None], self.device)
            choices[segment.representation] = Choice(
                segment, each_head, slice(start, end), size, to_device(most, self.device), positions, held
            )
            start = end
        return choices

    def partial_keys(self, layer: int, mini_batch: int, k_RGd: torch.Tensor) -> torch.Tensor:
        """The chosen columns of keys: [R, G, C]."""
        columns = self.columns[layer - self.first, mini_batch]
        if self.skew is not None:
            return torch.einsum("rgd,gdc->rgc", k_RGd, self._skew_columns(layer, mini_batch))
        return k_RGd.gather(2, columns.expand(len(k_RGd), -1, -1))

    def _skew_columns(self, layer: int, mini_batch: int) -> torch.Tensor:
        index = self.columns[layer - self.first, mini_batch][:, None].expand(-1, self.shape.head_dim, -1)
        return self.skew[layer - self.first].gather(2, index)  # [G, d, C]

    def take_places(self, layer: int, step: MiniBatchStep, k_BGd: torch.Tensor) -> torch.Tensor:
        """Places [B, G] of the new tokens; in layers that choose their partial keys go there."""
        guess = self.guess(step)
        mini_batch, rows, heads = step.mini_batch, guess.rows_B[:, None], torch.arange(self.groups, device=self.device)
        places = guess.places_B[:, None].repeat(1, self.groups)
        if self.uses and guess.full_B is not None:
            victims = self.uses.victims(layer, mini_batch, guess.rows_B, guess.held_B)
            places = torch.where(guess.full_B[:, None], victims, places)
        if self.uses:
            self.uses.put(layer, mini_batch, places, rows, heads, guess.positions_B[:, None].int().expand_as(places))
        if layer >= self.first:
            partial = self.partial_keys(layer, mini_batch, k_BGd)
            self.sections[mini_batch][layer - self.first][places, rows, heads] = partial
        return places

    def looked_at(self, layer: int, step: MiniBatchStep, weights_BGrT: torch.Tensor, places_BG: torch.Tensor) -> None:
        """In a layer that looks at every token: count those as fetched that it would have chosen by these weights of
        its attention, but for the one whose place the new token has taken."""
        guess = self.guess(step)
        choice = guess.choices["kv"]  # a limited pool holds nothing else
        weights = weights_BGrT[..., : guess.held_BT.shape[1]].float()
        relative = (weights / weights.amax(-1, keepdim=True)).log_().amax(2)
        index = choose_tokens(relative, self.alpha, choice.most_B, choice.size[-1], True)
        index.masked_fill_(index == places_BG[..., None], -1)
        self.uses.fetched(layer, step.mini_batch, guess.rows_B, index, guess.positions_B)

    def choose(self, layer: int, step: MiniBatchStep, act_Bh: torch.Tensor, rotation: Rotation | None, w) -> None:
        """Guess a layer's scores from the attention input of the layer before, and write down whom to fetch.

        ``w``: the layer's weights, as far as they are resident.
        """
        guess, query = self.guess(step), self._guessed_queries(layer, step.mini_batch, act_Bh, rotation, w)
        section = self.sections[step.mini_batch][layer - self.first]
        keys = section[: guess.held_BT.shape[1]]
        if len(step.requests) < section.shape[1]:
            keys = keys[:, guess.rows_B]
        relative = relative_scores(query, keys, self.scale, guess.held_BT)
        for choice in guess.choices.values():
            scores, index = relative, choice.of(self.index)
            if choice.positions is not None:
                scores = relative[..., choice.positions].masked_fill(~choice.held_BT[:, None], -torch.inf)
            index.copy_(choose_tokens(scores, self.alpha, choice.most_B, choice.size[-1], choice.each_head))
            if self.uses:
                self.uses.fetched(layer, step.mini_batch, guess.rows_B, index, guess.positions_B)

    def _guessed_queries(self, layer: int, mini_batch: int, act_Bh: torch.Tensor, rotation, w) -> torch.Tensor:
        """[B, G, r, C]."""
        if not self.shape.rotary:
            which = layer - self.first, mini_batch
            query = F.linear(act_Bh, self.query_weights[which], self.query_bias[which])
            return query.view(len(act_Bh), self.groups, -1, self.count)
        if self.resident:
            (rows,), first = w["kvq.weight"], self.shape.kv_width
            bias = w["kvq.bias"][0][first:] if "kvq.bias" in w else None
            query = linear(act_Bh, (rows[first:],), bias)
        else:
            query = F.linear(act_Bh, self.query_weights[layer - self.first, 0], self.query_bias[layer - self.first, 0])
        query = rotate_(query.view(len(act_Bh), self.shape.num_heads, -1), *rotation)
        return torch.matmul(query.unflatten(1, (self.groups, -1)), self._skew_columns(layer, mini_batch))

    def positions_of(self, layer: int, step: MiniBatchStep, places: torch.Tensor) -> torch.Tensor:
        """Positions of the tokens in these places [B, ., .] of a layer, [B, G, .] where heads give up others each; -1
        stays -1."""
        if self.uses:
            born = self.uses.positions(layer, step.mini_batch)[:, self.guess(step).rows_B].permute(1, 2, 0).long()
            index = places.clamp(min=0).expand(len(born), self.groups, -1)
            return torch.where(places < 0, places, born.gather(-1, index))
        context, kept = to_device(step.context, self.device)[:, None, None], self._kept_of(step)[:, None, None]
        return torch.where(places < 0, places, places + kept * ((context - 1 - places) // kept))

    def chosen_positions(self, layer: int, step: MiniBatchStep) -> dict[str, torch.Tensor]:
        """Representation -> positions [B, heads, S] of the tokens that ``choose`` has just chosen for a layer; behind
        the last one -1."""
        positions = {}
        for representation, choice in self.guess(step).choices.items():
            places = choice.of(self.index).long()
            if choice.positions is not None:
                places = torch.where(places < 0, places, choice.positions[places])
            positions[representation] = self.positions_of(layer, step, places)
        return positions


def take_rows(parts: Parts, rows: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = the ``rows[i]``-th row of a matrix given in row parts; nobody waits for the device."""
    if len(parts) == 1:
        torch.index_select(parts[0], 0, rows, out=out)
        return
    first = 0
    for part in parts:
        inside = (rows >= first) & (rows < first + len(part))
        found = part[(rows - first).clamp(0, len(part) - 1)]
        torch.where(inside[:, None], found, out, out=out)
        first += len(part)
