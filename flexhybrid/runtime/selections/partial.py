"""Partial keys and partial query weights: the columns with which a speculative selection guesses attention scores.

After a prompt, each layer that chooses tokens selects C columns for every key/value head: those with the largest
queries and keys, over all requests of the mini-batch (if ``columns`` is "request", for each request separately). It
keeps these columns of the query weights and of the keys (InfiniGen, Lee et al. 2024, Sec. 4.3). The query heads of a
group (GQA) use the columns of their key head. Rotary models rotate whole queries before they are skewed
(``selections.skew``), so they keep all columns of the query weights, and only the guessed queries are reduced to C
columns. The same applies if requests have separate columns.

Shapes: B requests of a mini-batch, R rows, H query heads, G key/value heads, r = H/G, d head size, C columns, T cached
tokens, h hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from flexhybrid.core.context.selection import first_choosing, num_choosing, partial_columns, whole_queries
from flexhybrid.core.wave import Wave
from flexhybrid.runtime.kernels.rotary import norm_and_rotate_
from flexhybrid.runtime.step_tensors import Rotation
from flexhybrid.runtime.storage.parts import Parts, linear
from flexhybrid.runtime.storage.weights import Weights


class PartialCopies:
    """Partial query weights and partial keys of all layers that choose tokens.

    ``sections[mini_batch][i]``: partial keys [T, B, G, C] of the i-th such layer. Places come first, so that the cached
    tokens are contiguous. ``kept``: number of places of each request.
    """

    def __init__(self, wave: Wave, weights: Weights, kept: np.ndarray):
        shape, selection, num_mini_batches = wave.shape, wave.policy.selection, len(wave.mini_batches)
        self.shape, self.device, self.groups = shape, weights.device, shape.num_kv_heads
        self.num_columns = partial_columns(shape, selection)
        self.first_layer = int(first_choosing(selection))
        self.by_request, self.whole = selection.columns == "request", whole_queries(shape, selection)
        num_layers = num_choosing(selection, shape.num_layers)
        #: whether W_Q is wholly on the device, so that no copy is needed
        first = weights.placed[0]
        self.resident = self.whole and weights.bits == "native" and first.streamed_from >= first.layout.qkv_end

        def zeros(*size: int, dtype: torch.dtype = weights.dtype) -> torch.Tensor:
            return torch.zeros(num_layers, *size, dtype=dtype, device=self.device)

        #: by mini-batch: columns of each request, or the shared ones: [layers, B or 1, G, C]
        self.columns = [
            zeros(len(group) if self.by_request else 1, self.groups, self.num_columns, dtype=torch.int64)
            for group in wave.mini_batches
        ]
        rows = shape.query_width if self.whole else shape.num_heads * self.num_columns
        copies = 1 if self.whole else num_mini_batches
        self.query_weights = zeros(0 if self.resident else copies, rows, shape.hidden)
        self.query_bias = zeros(0 if self.resident else copies, rows)
        self.query_norm = zeros(shape.head_dim if shape.qk_norm else 0)
        self.skew: torch.Tensor | None = None  #: [layers, G, d, d]; None: folded into the weights
        if shape.rotary:
            self.skew = zeros(self.groups, shape.head_dim, shape.head_dim)
            for layer, matrices in enumerate(weights.skewing[self.first_layer :]):
                self.skew[layer] = torch.eye(shape.head_dim, dtype=torch.float32) if matrices is None else matrices
        places = [int(kept[group].max()) for group in wave.mini_batches]
        sizes = [count * len(group) for count, group in zip(places, wave.mini_batches, strict=True)]
        self.keys = zeros(sum(sizes), self.groups, self.num_columns)
        self.sections = [
            keys.unflatten(1, (count, -1)) for keys, count in zip(self.keys.split(sizes, dim=1), places, strict=True)
        ]

    # ---- the prompt

    def keep_columns(
        self,
        layer: int,
        mini_batch: int,
        queries_RHd: torch.Tensor,
        keys_RGd: torch.Tensor,
        real_R: torch.Tensor,
        rows_B: torch.Tensor,
    ) -> None:
        """Choose the columns of a layer by the rows of prompts.

        ``real_R``: False for padding. ``rows_B``: indices of the requests in their mini-batch.
        """
        queries, keys = queries_RHd, keys_RGd
        if self.skew is not None:
            skew = self.skew[layer - self.first_layer]
            queries = torch.einsum("rgmd,gde->rgme", queries.unflatten(1, (self.groups, -1)), skew).flatten(1, 2)
            keys = torch.einsum("rgd,gde->rge", keys, skew)
        columns = self.columns[mini_batch][layer - self.first_layer]
        if self.by_request:
            columns[rows_B] = choose_columns(queries, keys, real_R, (len(rows_B), *columns.shape[1:]))
        else:
            columns.copy_(choose_columns(queries, keys, real_R, columns.shape))

    def keep_query_weights(self, layer: int, mini_batch: int, w: dict[str, Parts]) -> None:
        """Keep the chosen columns of a layer's query weights, unless these are on the device, and its query norm."""
        shape, first = self.shape, self.shape.kv_width
        if shape.qk_norm:
            self.query_norm[layer - self.first_layer] = w["q_norm.weight"][0]
        if self.resident:
            return
        rows = torch.arange(shape.query_width, device=self.device, dtype=torch.int64)
        if not self.whole:
            heads = rows.view(self.groups, -1, shape.head_dim)  # [G, r, d]
            columns_GC = self.columns[mini_batch][layer - self.first_layer, 0]
            rows = heads.gather(2, columns_GC[:, None].expand(-1, heads.shape[1], -1)).reshape(-1)
        copy = 0 if self.whole else mini_batch
        take_rows(w["kvq.weight"], first + rows, self.query_weights[layer - self.first_layer, copy])
        if "kvq.bias" in w:
            self.query_bias[layer - self.first_layer, copy] = w["kvq.bias"][0][first + rows]

    # ---- the decode

    def section(self, layer: int, mini_batch: int) -> torch.Tensor:
        """Return the partial keys of a layer: [T, B, G, C]."""
        return self.sections[mini_batch][layer - self.first_layer]

    def of_keys(self, layer: int, mini_batch: int, keys_RGd: torch.Tensor, rows_B: torch.Tensor) -> torch.Tensor:
        """Return the chosen columns of keys, [R, G, C]. Each of the requests ``rows_B`` has equally many rows."""
        if self.skew is not None and not self.by_request:
            return torch.einsum("rgd,gdc->rgc", keys_RGd, self._skew_columns(self.skew, layer, mini_batch))
        if self.skew is not None:
            keys_RGd = torch.einsum("rgd,gde->rge", keys_RGd, self.skew[layer - self.first_layer])
        columns = self._columns(layer, mini_batch, rows_B)
        by_request = keys_RGd.unflatten(0, (len(columns), -1))
        return by_request.gather(3, columns[:, None].expand(-1, by_request.shape[1], -1, -1)).flatten(0, 1)

    def guess_queries(
        self,
        layer: int,
        mini_batch: int,
        act_Bh: torch.Tensor,
        rotation: Rotation | None,
        w: dict[str, Parts],
        rows_B: torch.Tensor,
    ) -> torch.Tensor:
        """Return the chosen columns of a layer's queries, guessed from an attention input: [B, G, r, C].

        ``w``: the layer's resident weights. ``rows_B``: indices of the requests in their mini-batch.
        """
        index = layer - self.first_layer
        if self.resident:
            (rows,), first = w["kvq.weight"], self.shape.kv_width
            bias = w["kvq.bias"][0][first:] if "kvq.bias" in w else None
            query = linear(act_Bh, (rows[first:],), bias)
        else:
            copy = 0 if self.whole else mini_batch
            query = F.linear(act_Bh, self.query_weights[index, copy], self.query_bias[index, copy])
        if not self.whole:
            return query.view(len(act_Bh), self.groups, -1, self.num_columns)
        query = query.view(len(act_Bh), self.shape.num_heads, -1)
        if rotation is not None:
            norm = (self.query_norm[index],) if self.shape.qk_norm else None
            query = norm_and_rotate_(query, norm, self.shape.norm_eps, rotation)
        query = query.unflatten(1, (self.groups, -1))  # [B, G, r, d]
        if self.skew is not None and not self.by_request:
            return torch.matmul(query, self._skew_columns(self.skew, layer, mini_batch))
        if self.skew is not None:
            query = torch.matmul(query, self.skew[index])
        columns = self._columns(layer, mini_batch, rows_B)[:, :, None]
        return query.gather(3, columns.expand(-1, -1, query.shape[2], -1))

    def _columns(self, layer: int, mini_batch: int, rows_B: torch.Tensor) -> torch.Tensor:
        """Return each request's columns, or the shared ones: [B or 1, G, C]."""
        columns = self.columns[mini_batch][layer - self.first_layer]
        return columns[rows_B] if self.by_request else columns

    def _skew_columns(self, skew: torch.Tensor, layer: int, mini_batch: int) -> torch.Tensor:
        """Return the chosen columns of the skewing matrices: [G, d, C]."""
        index = self.columns[mini_batch][layer - self.first_layer, 0][:, None].expand(-1, self.shape.head_dim, -1)
        return skew[layer - self.first_layer].gather(2, index)


def choose_columns(q_RHd: torch.Tensor, k_RGd: torch.Tensor, real_R: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Return the columns of each key/value head with the largest sums of |Q| + |K|, ascending: int64 [S, G, C].

    ``size``: (S, G, C), for S sets of requests with equal numbers of rows. |Q| is the mean over the query heads of a
    group. ``real_R``: False for padding.
    """
    rows, groups, d = k_RGd.shape
    sums = q_RHd.float().abs().view(rows, groups, -1, d).mean(2) + k_RGd.float().abs()
    sums = (sums * real_R[:, None, None]).unflatten(0, (size[0], -1)).sum(1)
    return sums.topk(size[-1], dim=-1).indices.sort(dim=-1).values


def take_rows(parts: Parts, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Copy rows of a matrix, given in row parts, to ``out``, without waiting for the device."""
    if len(parts) == 1:
        torch.index_select(parts[0], 0, rows, out=out)
        return
    first = 0
    for part in parts:
        inside = (rows >= first) & (rows < first + len(part))
        candidates = part[(rows - first).clamp(0, len(part) - 1)]
        torch.where(inside[:, None], candidates, out, out=out)
        first += len(part)
