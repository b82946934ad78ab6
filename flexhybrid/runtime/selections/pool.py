"""Choose the victims of a limited cache under a speculative selection (InfiniGen, Sec. 4.4).

When all places of a request are full, each key/value head drops one token (the victim) for a new one: the oldest
(fifo), the least recently fetched (lru), or the least often fetched (counter); among equals, the oldest. When a counter
reaches its limit, all counters of its head are halved. A new token counts as fetched: now (lru), or once more than its
victim (counter). The paper does not say where a counter begins. If it began at one, the newest tokens would be dropped
first as soon as all others were fetched twice. In layers that read every token, the tokens count as fetched that the
layer would have chosen by its attention weights.

The tokens of a prompt enter the pool one by one, by the same rule, in every layer. Each query of the prompt, from first
to last, counts the pool's tokens like a layer that reads every token. So a prompt that is longer than the pool keeps
the same tokens as a decode of these tokens would, except that its own attention reads all of them. The paper counts
what "query tokens" select, and the authors' accuracy code drops tokens at every position of a text.

Shapes: T places, B requests, G key/value heads; tables of a mini-batch in a layer are [T, B, G].
"""

from __future__ import annotations

import numpy as np
import torch

COUNTER_FULL = 255


class Uses:
    """The number of uses (or the latest use) and the position of the token in each place, in all layers.

    ``places``: number of places of each request, by mini-batch. All places are empty at first.
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
        """Add new tokens at ``positions``. The indices of places, requests and heads, and the positions, broadcast."""
        uses, born = self.of(layer, mini_batch)
        born[places, rows, heads] = positions
        uses[places, rows, heads] = positions if self.lately else uses[places, rows, heads] + 1

    def fetched(self, layer: int, mini_batch: int, rows_B, index_BGS, positions_B) -> None:
        """Count a use of chosen tokens: places [B, G, S] (-1: none) of requests at these positions [B]."""
        uses, _ = self.of(layer, mini_batch)
        now = uses[:, rows_B]
        chosen = torch.zeros(len(now) + 1, *now.shape[1:], dtype=torch.bool, device=now.device)
        place = index_BGS.long().permute(2, 0, 1)
        chosen.scatter_(0, place.masked_fill(place < 0, len(now)), True)  # the last row takes the entries of -1
        if self.lately:
            now = torch.where(chosen[:-1], positions_B[:, None].int(), now)
        else:
            now = now + chosen[:-1]
            now = torch.where((now >= COUNTER_FULL).any(0), now // 2, now)
        uses[:, rows_B] = now

    def victims(self, layer: int, mini_batch: int, rows_B, held_B) -> torch.Tensor:
        """Return the places [B, G] of the victims, among the first ``held_B`` places of each request."""
        uses, born = (table[:, rows_B].long() for table in self.of(layer, mini_batch))
        held = torch.arange(len(uses), device=uses.device, dtype=torch.int64)[:, None] < held_B
        return ((uses << 32) + born).masked_fill(~held[:, :, None], torch.iinfo(torch.int64).max).argmin(0)
