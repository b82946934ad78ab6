"""A cache of limited size under a speculative selection (InfiniGen, Sec. 4.4): whose place a new token takes.

When a request holds as many tokens as its pool has places, each key/value head drops one: the oldest (fifo), the one
that was fetched longest ago (lru), or the one that was fetched least often (counter); among equals the oldest. A
counter that is full halves all counters of its head. A new token counts as fetched: under lru just now, under counter
once more than the token whose place it takes. The paper does not say where a counter begins; from one, the newest
tokens would be dropped first as soon as all others were fetched twice. Layers that read every token count as fetched
those that they would have chosen by the weights of their attention.

The tokens of a prompt enter the pool one after the other by the same rule, in every layer: each query of the prompt,
from the first to the last, counts the tokens of the pool as a layer that reads every token does. So a prompt that is
longer than the pool keeps what a decode of the same tokens would keep, except that its own attention reads all of it.
The paper counts what "query tokens" select, and the authors' accuracy code drops tokens at every position of a text.

Shapes: T places, B requests, G key/value heads; tables of a mini-batch in a layer are [T, B, G].
"""

from __future__ import annotations

import numpy as np
import torch

COUNTER_FULL = 255


class Uses:
    """How often or how lately the token in every place was fetched, and its position, in all layers.

    ``places`` gives for each mini-batch the places of its requests; all are empty at first.
    """

    def __init__(self, victim: str, num_layers: int, places: list[np.ndarray], groups: int, device):
        longest = [int(counts.max()) for counts in places]
        sizes = [tokens * len(counts) for tokens, counts in zip(longest, places, strict=True)]
        self.lately = victim == "lru"
        self.table = torch.zeros(2, num_layers, sum(sizes), groups, dtype=torch.int32, device=device)
        self.sections = [
            rows.unflatten(2, (tokens, -1))
            for rows, tokens in zip(self.table.split(sizes, dim=2), longest, strict=True)
        ]

    def of(self, layer: int, mini_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (uses, positions) of the tokens in all places of a layer, [T, B, G] each."""
        uses, born = self.sections[mini_batch]
        return uses[layer], born[layer]

    def put(self, layer: int, mini_batch: int, places, rows, heads, positions) -> None:
        """Enter new tokens. Indices of places, requests and heads, and the tokens' positions, broadcast together."""
        uses, born = self.of(layer, mini_batch)
        born[places, rows, heads] = positions
        uses[places, rows, heads] = positions if self.lately else uses[places, rows, heads] + 1

    def fetched(self, layer: int, mini_batch: int, rows_B, index_BGS, positions_B) -> None:
        """Count tokens that were just chosen: places [B, G, S], -1 for none, by requests at these positions."""
        uses, _ = self.of(layer, mini_batch)
        now = uses[:, rows_B]
        chosen = torch.zeros(len(now) + 1, *now.shape[1:], dtype=torch.bool, device=now.device)
        place = index_BGS.long().permute(2, 0, 1)
        chosen.scatter_(0, place.masked_fill(place < 0, len(now)), True)  # the last row takes those of -1
        if self.lately:
            now = torch.where(chosen[:-1], positions_B[:, None].int(), now)
        else:
            now = now + chosen[:-1]
            now = torch.where((now >= COUNTER_FULL).any(0), now // 2, now)
        uses[:, rows_B] = now

    def victims(self, layer: int, mini_batch: int, rows_B, held_B) -> torch.Tensor:
        """Return the places [B, G] of the tokens to drop, among the first ``held_B`` of each request."""
        uses, born = (table[:, rows_B].long() for table in self.of(layer, mini_batch))
        held = torch.arange(len(uses), device=uses.device, dtype=torch.int64)[:, None] < held_B
        return ((uses << 32) + born).masked_fill(~held[:, :, None], torch.iinfo(torch.int64).max).argmin(0)
