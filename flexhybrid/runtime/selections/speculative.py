"""InfiniGen's choice of tokens (Lee et al. 2024, Sec. 4.3): guess a layer's attention scores one layer ahead.

In the decode, the attention input of layer i - 1 times the partial query weights of layer i gives guessed queries.
These times the partial keys (``selections.partial``) give guessed scores. For each head, tokens are counted whose score
is above the largest score - alpha. Every head of a request then fetches the mean of these counts: at least one token,
and at most a share of the context. The first layers read every token (``first_choosing``).

Differences from the paper: requests are counted separately, and the highest score of a group's query heads (GQA) counts
for a token.

Shapes: B requests of a mini-batch, R rows, H query heads, G key/value heads, r = H/G, d head size, C columns, T cached
tokens, S maximum of chosen tokens, h hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from flexhybrid.core.context.selection import first_choosing, kept_tokens, limits_cache, most_selected
from flexhybrid.core.memory import index_cells
from flexhybrid.core.schedule.buffer_sizes import mini_batch_sizes
from flexhybrid.core.schedule.steps import MiniBatchStep, Segment
from flexhybrid.core.task import Task
from flexhybrid.core.wave import Wave
from flexhybrid.runtime.kernels.attention import split_heads
from flexhybrid.runtime.selections.hooks import SelectionHooks
from flexhybrid.runtime.selections.partial import PartialCopies
from flexhybrid.runtime.selections.pool import Uses
from flexhybrid.runtime.step_tensors import Rotation, position_tables, to_device
from flexhybrid.runtime.storage.parts import Parts
from flexhybrid.runtime.storage.weights import Weights

RANKED_QUERIES = 16  #: number of prompt tokens scored at a time; takes less memory than the later feed-forward rows
TIE = 1e-12  #: subtracted per place, so that earlier places win ties; below the rounding of any score except zero


def relative_scores(q_BGrC: torch.Tensor, keys_TBGC: torch.Tensor, scale: float, held_BT: torch.Tensor) -> torch.Tensor:
    """Return guessed scores [B, G, T], as in ``relative_to_best``."""
    return relative_to_best(torch.matmul(q_BGrC * scale, keys_TBGC.permute(1, 2, 3, 0)).float(), held_BT)


def relative_to_best(scores_BGrT: torch.Tensor, held_BT: torch.Tensor) -> torch.Tensor:
    """Return scores minus the best score of their query head; of these, the maximum over a group: float32 [B, G, T].

    They are at most 0, and -inf for tokens that a request does not hold. ``TIE`` makes the first of several best tokens
    the best one.
    """
    scores = scores_BGrT.masked_fill(~held_BT[:, None, None], -torch.inf)
    relative = (scores - scores.amax(-1, keepdim=True)).amax(2)
    return relative - torch.arange(relative.shape[-1], device=relative.device, dtype=torch.float32) * TIE


def choose_tokens(
    relative_BGT: torch.Tensor, alpha: float, most_B: torch.Tensor, width: int, each_head: bool
) -> torch.Tensor:
    """Return the tokens to fetch, ascending, then -1: int32 [B, G, width] if each head chooses, else [B, 1, width].

    A request fetches the mean number, rounded up, of tokens within ``alpha`` of its heads' largest scores: at least 1
    and at most ``most_B``. If heads choose together, they take the tokens with the largest sums of exp(relative score),
    which are proportional to attention weights.
    """
    groups, tokens = relative_BGT.shape[1:]
    within = (relative_BGT > -alpha).sum((1, 2))
    count_B = torch.minimum((-(-within // groups)).clamp_(min=1), most_B)
    worth = relative_BGT if each_head else relative_BGT.exp().sum(1, keepdim=True)
    best = worth.topk(width, dim=-1).indices
    surplus = torch.arange(width, device=best.device, dtype=torch.int64) >= count_B[:, None, None]
    chosen = best.masked_fill_(surplus, tokens).sort(dim=-1).values
    return chosen.masked_fill_(chosen == tokens, -1).int()


class Fetched(NamedTuple):
    """Chosen tokens of a mini-batch in one representation. Rows are contiguous: by request, then by head."""

    representation: str
    heads: int  #: G if each key/value head chooses; 1 if all heads choose together
    counts_B: np.ndarray  #: number of tokens of each request
    positions: np.ndarray | None  #: positions of all rows, if their keys are recomputed and rotated

    @property
    def tokens(self) -> int:
        return int(self.counts_B.sum())

    @property
    def most(self) -> int:
        return int(self.counts_B.max())

    def padded_rows(self) -> np.ndarray:
        """Return the row of each token of each head: [B, heads, most]. Padding repeats the last row, or is any row."""
        counts, heads = self.counts_B[:, None, None], self.heads
        starts = heads * (np.cumsum(self.counts_B) - self.counts_B)[:, None, None]
        within = np.minimum(np.arange(self.most), np.maximum(counts - 1, 0))
        rows = starts + np.arange(heads)[:, None] * counts + within
        return np.minimum(rows, heads * self.tokens - 1)


class Choosable(NamedTuple):
    """The tokens of a representation that a decode step may choose from, and the index cells for the chosen ones."""

    segment: Segment
    each_head: bool  #: whether each key/value head chooses its own tokens
    cells: slice  #: cells of the index
    size: tuple[int, int, int]  #: shape of these cells: [B, heads, S]
    most_B: torch.Tensor  #: maximum of tokens that each request may fetch, on the device
    #: positions [T] of the representation's cached tokens, and which of them each request holds [B, T], on the device;
    #: None if all cached tokens have this representation
    among: tuple[torch.Tensor, torch.Tensor] | None

    def of(self, index: torch.Tensor) -> torch.Tensor:
        """Return its cells of an index, on the device or the host: [B, heads, S]."""
        return index[self.cells].view(self.size)


class Guess(NamedTuple):
    """Device tensors with which all layers of a decode step guess scores and choose tokens."""

    rows_B: torch.Tensor  #: indices of the requests in their mini-batch
    positions_B: torch.Tensor  #: positions of the new tokens
    held_B: torch.Tensor  #: number of tokens that each request holds
    held_BT: torch.Tensor  #: bool: whether a place holds a token
    places_B: torch.Tensor  #: places of the new tokens, if they replace the oldest ones
    full_B: torch.Tensor | None  #: bool: requests without an empty place; None: all have one
    choices: dict[str, Choosable]  #: by representation


class Speculation(SelectionHooks):
    """Chooses the tokens that each layer of a wave reads, and the tokens that new ones replace."""

    def __init__(self, wave: Wave, weights: Weights):
        super().__init__()
        selection, workload = wave.policy.selection, wave.workload
        self.wave, self.shape, self.device = wave, wave.shape, weights.device
        self.groups, self.scale = wave.shape.num_kv_heads, wave.shape.head_dim**-0.5
        self.alpha = 0.0 if selection.alpha is None else selection.alpha  # ``Selection.check`` requires it
        self.first_layer = int(first_choosing(selection))
        cached = workload.cached_tokens
        kept = kept_tokens(selection, workload.prompt_tokens, cached, cached)
        self.partial = PartialCopies(wave, weights, kept)
        self.limits_cache = limits_cache(selection)
        self.uses: Uses | None = None
        if self.limits_cache and selection.victim in ("lru", "counter"):
            places = [kept[group] for group in wave.mini_batches]
            self.uses = Uses(selection.victim, wave.shape.num_layers, places, self.groups, self.device)
        cells = [index_cells(wave.shape, wave.policy, sizes.selected_rows) for sizes, _ in mini_batch_sizes(wave)]
        self.index_start = np.cumsum([0, *cells]).astype(np.int64)
        num_cells = int(self.index_start[-1]) if self.first_layer < wave.shape.num_layers else 0
        self.index = torch.zeros(num_cells, dtype=torch.int32, device=self.device)
        self.positions = position_tables(wave.entries, int(workload.cached_tokens.max()) + 1)
        self.each_head = {"kv": wave.policy.bits.kv == "native", "act": False}
        self._guesses: dict[int, Guess] = {}  # by mini-batch, of its decode step
        # Fetched tokens by (representation, slot), first on the host, then on the device. ``taken``: by representation,
        # the tokens that the compute lane works on, because a slot may be reused before attention ends.
        self.gathered: dict[tuple[str, int], Fetched] = {}
        self.fetched: dict[tuple[str, int], Fetched] = {}
        self.taken: dict[str, Fetched] = {}

    # ---- hooks

    def begin_step(self, step: MiniBatchStep) -> None:
        if not step.prefill:
            self._guesses[step.mini_batch] = self._make_guess(step)

    def chooses(self, task: Task) -> bool:
        return task.layer >= self.first_layer

    def after_project(self, task: Task, kvq: torch.Tensor) -> None:
        """Choose places for the new tokens of a decode step; in layers that choose tokens, store their partial keys."""
        layer, step = task.layer, task.payload.step
        if step.prefill:
            return
        guess, heads = self.guess(step), torch.arange(self.groups, device=self.device, dtype=torch.int64)
        rows, places = guess.rows_B[:, None], guess.places_B[:, None].repeat(1, self.groups)
        if self.uses and guess.full_B is not None:
            victims = self.uses.victims(layer, step.mini_batch, guess.rows_B, guess.held_B)
            places = torch.where(guess.full_B[:, None], victims, places)
        if self.uses:
            positions = guess.positions_B[:, None].int().expand_as(places)
            self.uses.put(layer, step.mini_batch, places, rows, heads, positions)
        if self.chooses(task):
            keys, _, _ = split_heads(self.shape, kvq)
            partial = self.partial.of_keys(layer, step.mini_batch, keys, guess.rows_B)
            self.partial.section(layer, step.mini_batch)[places, rows, heads] = partial
        self.places[task.payload.slot] = places

    def stages_rows(self, step: MiniBatchStep) -> bool:
        """If uses are counted, ``rank`` stages the rows of a prompt instead."""
        return self.uses is None or not step.prefill

    def weighs(self, task: Task) -> bool:
        """``Uses`` counts tokens by their attention weights in layers that read every token."""
        return self.uses is not None and not self.chooses(task) and not task.payload.step.prefill

    def after_attend(self, task: Task, weights_BGrT: torch.Tensor) -> None:
        """Count a use of the tokens that the layer would choose by these weights, except the one just replaced."""
        guess = self.guess(task.payload.step)
        choice = guess.choices["kv"]  # a limited pool has only KV
        relative = relative_to_best(weights_BGrT[..., : guess.held_BT.shape[1]].float().log(), guess.held_BT)
        index = choose_tokens(relative, self.alpha, choice.most_B, choice.size[-1], True)
        index.masked_fill_(index == self.places[task.payload.slot][..., None], -1)
        self._count_uses(task.layer, task.payload.step, index)

    def chooses_places(self, step: MiniBatchStep) -> bool:
        return self.limits_cache and not step.prefill

    # ---- for its verbs

    def after_prompt(
        self, layer: int, step: MiniBatchStep, w: dict[str, Parts], queries_RHd: torch.Tensor, keys_RGd: torch.Tensor
    ) -> None:
        """Choose a layer's columns; keep these columns of its keys and query weights. ``w``: the layer's weights."""
        mini_batch = step.mini_batch
        real = to_device((np.arange(step.width) < step.new_tokens[:, None]).reshape(-1), self.device)
        rows = self._rows(step)
        self.partial.keep_columns(layer, mini_batch, queries_RHd, keys_RGd, real, rows)
        keys = self.partial.of_keys(layer, mini_batch, keys_RGd, rows).unflatten(0, (-1, step.width))
        section = self.partial.section(layer, mini_batch)
        if self.uses:
            born = self.uses.of(layer, mini_batch)[1][:, rows]
            requests, heads = (torch.arange(count, device=self.device, dtype=torch.int64) for count in born.shape[1:])
            section[:, rows] = keys[requests[:, None], born.long(), heads]
        elif (step.new_tokens <= step.most_kept).all():
            section[: step.width, rows] = keys.transpose(0, 1)
        else:  # the newest tokens, each in place (position modulo places)
            requests, tokens = self._newest(step)
            section[tokens % self._kept_of(step)[requests], rows[requests]] = keys[requests, tokens]
        self.partial.keep_query_weights(layer, mini_batch, w)

    def rank_prompt(
        self, layer: int, step: MiniBatchStep, queries_BPHd: torch.Tensor, keys_BPGd: torch.Tensor
    ) -> torch.Tensor:
        """Add the prompts' tokens to a layer's pool, one after another (``selections.pool``).

        Return the position of the token in each place: [B, G, T]; arbitrary for empty places.
        """
        if self.uses is None:
            raise ValueError("this pool does not count uses")
        uses = self.uses
        queries_BGrPd = (queries_BPHd * self.scale).unflatten(2, (self.groups, -1)).permute(0, 2, 3, 1, 4)
        keys_BG1dP = keys_BPGd.permute(0, 2, 3, 1)[:, :, None]
        lengths, kept = step.new_tokens, step.most_kept
        heads = torch.arange(self.groups, device=self.device, dtype=torch.int64)
        used, born = uses.of(layer, step.mini_batch)
        all_rows = self._rows(step)
        for table in (used, born):  # reset earlier tokens of these places
            table.index_fill_(1, all_rows, 0)
        places = torch.arange(len(born), device=self.device, dtype=torch.int64)
        scores_BGrCP = queries_BGrPd  # scores of a chunk of queries, set below
        for position in range(step.width):
            if position % RANKED_QUERIES == 0:
                chunk = slice(position, position + RANKED_QUERIES)
                scores_BGrCP = torch.matmul(queries_BGrPd[:, :, :, chunk], keys_BG1dP).float()
            rows = np.flatnonzero(lengths > position)
            held, full = np.minimum(position, kept[rows]), position >= kept[rows]
            query_rows, held_B = to_device(rows, self.device), to_device(held, self.device)
            rows_B = all_rows[query_rows]
            taken = torch.full((len(rows), self.groups), position, device=self.device, dtype=torch.int64)
            scores = scores_BGrCP[query_rows, :, :, position % RANKED_QUERIES]
            tokens = born[: max(1, held.max()), rows_B].permute(1, 2, 0).long()[:, :, None]
            tokens = tokens.expand(-1, -1, scores.shape[2], -1)
            relative = relative_to_best(scores.gather(-1, tokens), places[: tokens.shape[-1]] < held_B[:, None])
            if full.any():
                victims = uses.victims(layer, step.mini_batch, rows_B, held_B)
                taken = torch.where(to_device(full, self.device)[:, None], victims, taken)
            now = torch.full_like(rows_B, position)
            uses.put(layer, step.mini_batch, taken, rows_B[:, None], heads, now[:, None].int().expand_as(taken))
            if position:
                most = most_selected(self.wave.policy.selection, held).astype(np.int64)
                index = choose_tokens(relative, self.alpha, to_device(most, self.device), int(most.max()), True)
                uses.fetched(layer, step.mini_batch, rows_B, index.masked_fill_(index == taken[..., None], -1), now)
        return born[:, all_rows].permute(1, 2, 0).long()

    def guess(self, step: MiniBatchStep) -> Guess:
        """Return the ``Guess`` of a decode step."""
        return self._guesses[step.mini_batch]

    def choose(
        self, layer: int, step: MiniBatchStep, act_Bh: torch.Tensor, rotation: Rotation | None, w: dict[str, Parts]
    ) -> None:
        """Guess a layer's scores from the previous layer's attention input; write the chosen tokens to ``index``.

        ``w``: the layer's resident weights.
        """
        guess, section = self.guess(step), self.partial.section(layer, step.mini_batch)
        query = self.partial.guess_queries(layer, step.mini_batch, act_Bh, rotation, w, guess.rows_B)
        keys = section[: guess.held_BT.shape[1]]
        if len(step.requests) < section.shape[1]:
            keys = keys[:, guess.rows_B]
        relative = relative_scores(query, keys, self.scale, guess.held_BT)
        for choice in guess.choices.values():
            scores, index = relative, choice.of(self.index)
            if choice.among is not None:
                positions, held_BT = choice.among
                scores = relative[..., positions].masked_fill(~held_BT[:, None], -torch.inf)
            index.copy_(choose_tokens(scores, self.alpha, choice.most_B, choice.size[-1], choice.each_head))
            self._count_uses(layer, step, index)

    def take(self, representation: str, slot: int) -> Fetched:
        """Move the tokens fetched to a slot to ``taken``, and return them."""
        fetched = self.taken[representation] = self.fetched[representation, slot]
        return fetched

    # ---- for observers of attention

    def positions_of(self, layer: int, step: MiniBatchStep, places: torch.Tensor) -> torch.Tensor:
        """Return the positions of the tokens in places [B, ·, ·] of a layer; [B, G, ·] if heads drop tokens separately.

        A place of -1 gives -1.
        """
        if self.uses:
            born = self.uses.of(layer, step.mini_batch)[1][:, self.guess(step).rows_B].permute(1, 2, 0).long()
            index = places.clamp(min=0).expand(len(born), self.groups, -1)
            return torch.where(places < 0, places, born.gather(-1, index))
        context, kept = to_device(step.context, self.device)[:, None, None], self._kept_of(step)[:, None, None]
        return torch.where(places < 0, places, places + kept * ((context - 1 - places) // kept))

    def chosen_positions(self, layer: int, step: MiniBatchStep) -> dict[str, torch.Tensor]:
        """Return {representation: positions [B, heads, S] of the tokens that ``choose`` chose}; -1: none."""
        positions = {}
        for representation, choice in self.guess(step).choices.items():
            places = choice.of(self.index).long()
            if choice.among is not None:
                places = torch.where(places < 0, places, choice.among[0][places])
            positions[representation] = self.positions_of(layer, step, places)
        return positions

    # ----

    def _count_uses(self, layer: int, step: MiniBatchStep, index: torch.Tensor) -> None:
        """Count a use of tokens that a layer fetched, if uses are counted."""
        if self.uses:
            guess = self.guess(step)
            self.uses.fetched(layer, step.mini_batch, guess.rows_B, index, guess.positions_B)

    def _kept_of(self, step: MiniBatchStep) -> torch.Tensor:
        return to_device(step.most_kept, self.device)

    def _newest(self, step: MiniBatchStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (requests, tokens): the indices of the prompts' newest tokens, one for each place."""
        tokens, lengths = np.arange(step.width), step.new_tokens[:, None]
        newest = (tokens < lengths) & (tokens >= lengths - step.most_kept[:, None])
        requests, tokens = np.nonzero(newest)
        return to_device(requests, self.device), to_device(tokens, self.device)

    def _rows(self, step: MiniBatchStep) -> torch.Tensor:
        """Return the indices of the step's requests in their mini-batch, on the device: [B]."""
        rows = np.flatnonzero(np.isin(self.wave.mini_batches[step.mini_batch], step.requests))
        return to_device(rows, self.device)

    def _make_guess(self, step: MiniBatchStep) -> Guess:
        kept = step.most_kept
        held, full = np.minimum(step.context, kept), step.context >= kept
        return Guess(
            rows_B=self._rows(step),
            positions_B=to_device(step.context, self.device),
            held_B=to_device(held, self.device),
            held_BT=to_device(np.arange(held.max()) < held[:, None], self.device),
            places_B=to_device(step.context % kept, self.device),
            full_B=to_device(full, self.device) if full.any() else None,
            choices=self._choices(step),
        )

    def _choices(self, step: MiniBatchStep) -> dict[str, Choosable]:
        choices, start, batch = {}, int(self.index_start[step.mini_batch]), len(step.requests)
        for segment in step.segments:
            if not segment.max_tokens:
                continue
            limit = most_selected(self.wave.policy.selection, segment.num_tokens)
            limit = np.where(segment.num_tokens > 0, limit, 0).astype(np.int64)
            each_head = self.each_head[segment.representation]
            size = batch, self.groups if each_head else 1, int(limit.max())
            cells = slice(start, start + batch * size[1] * size[2])
            among = None
            if len(self.wave.entries.names) > 1:
                held = np.arange(segment.max_tokens) < segment.num_tokens[:, None]
                positions = self.positions[segment.entry][: segment.max_tokens]
                among = to_device(positions, self.device), to_device(held, self.device)
            most_B = to_device(limit, self.device)
            choices[segment.representation] = Choosable(segment, each_head, cells, size, most_B, among)
            start = cells.stop
        return choices
