"""Decode attention on a CPU that reads keys and values where they lie: in pools, loaded slots and recomputed rows.

No context is laid side by side, and none is padded: a mini-batch may hold requests of any lengths. numba compiles the
kernels (https://numba.pydata.org); the results are kept beside this file, or in the user's cache folder. Compute dtypes
are float32 and bfloat16, sums are in float32. Importing this module imports numba.

Shapes: B requests, G key/value heads, r query heads for each of them, d head size. An item is a request and a key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba.core import types
from numba.extending import intrinsic, overload

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.runtime.kernels.attention import Share, Weighed

DTYPES = (torch.float32, torch.bfloat16)
LOWEST = np.float32(-3e38)
AT_A_TIME = 4  #: tokens whose scores, or values, are summed in one pass over a head's elements
SHARED_TOKENS = 512  #: of all requests and heads, below which one thread does it all

NUMBA: dict[str, Any] = {"nogil": True, "fastmath": True, "error_model": "numpy", "cache": True}


class Extent(NamedTuple):
    """Where the tokens of a part of each context lie in the memory of ``Part``, in elements."""

    blocks: np.ndarray  #: [B, n] int64: the first element of each block of 16 tokens
    tokens: np.ndarray  #: [B] int64
    token_stride: int  #: from a token to the next one of its block
    head_stride: int  #: from a head's keys to the next head's
    values: int  #: from a token's keys to its values


class Part(NamedTuple):
    """A part of each context: its extent in a memory of float32, or of bfloat16 as uint16."""

    memory: np.ndarray
    extent: Extent


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a flat view of contiguous keys and values."""
    flat = tensor.reshape(-1)
    return flat.view(torch.int16).numpy().view(np.uint16) if flat.dtype == torch.bfloat16 else flat.numpy()


def attend(q_BHd: torch.Tensor, parts: Sequence[Part], bounds: Sequence[int], share: Share) -> torch.Tensor:
    """Attend with one query a request over all tokens of its parts; return [B, H·d] in the queries' dtype.

    ``bounds``: of the ranges of items that ``share`` deals to threads (``bounds_of``).
    """
    return attend_and_sum(q_BHd, parts, bounds, share)[0].view(len(q_BHd), -1).to(q_BHd.dtype)


def attend_and_sum(q_BHd: torch.Tensor, parts: Sequence[Part], bounds: Sequence[int], share: Share) -> Weighed:
    """Attend as ``attend`` does; Q = r of what is returned."""
    (batch, heads, d), groups = q_BHd.shape, bounds[-1] // len(q_BHd)
    query = (q_BHd.float() * d**-0.5).view(batch, groups, heads // groups, d).numpy()
    attended = torch.zeros(query.shape, dtype=torch.float32)
    sums, highest = np.zeros(query.shape[:3], np.float32), np.full(query.shape[:3], LOWEST)
    state = highest, sums, attended.numpy()

    def of_items(first: int, end: int) -> None:
        for memory, extent in parts:
            _attend(query, memory, extent, state, first, end)
        _divide(sums, state[2], first, end)

    for _ in share(of_items, bounds[:-1], bounds[1:]):
        pass
    return attended, torch.from_numpy(highest + np.log(sums))


def bounds_of(tokens_B: np.ndarray, groups: int, num_threads: int) -> list[int]:
    """Return bounds of ranges of items, a range a thread, that hold about as many tokens each."""
    if num_threads == 1 or tokens_B.sum() * groups < SHARED_TOKENS:
        return [0, len(tokens_B) * groups]
    until = np.cumsum(np.repeat(tokens_B, groups))
    cuts = np.searchsorted(until, until[-1] * np.arange(1, num_threads) / num_threads) + 1
    return sorted({0, *np.minimum(cuts, len(until)).tolist(), len(until)})


@cache
def compile_for(dtype: torch.dtype) -> None:
    """Compile the kernels for a compute dtype, or load what was compiled before: some 3 seconds, or 0.1."""
    rows = torch.zeros(1, 2 * BLOCK_TOKENS, dtype=dtype)
    extent = Extent(np.zeros((1, 1), np.int64), np.ones(1, np.int64), 1, 1, 0)
    attend(rows.view(1, 1, -1), [Part(memory_of(rows), extent)], [0, 1], map)


@intrinsic
def _from_bfloat16(_context, bits):
    """Widen bfloat16, given as its bits, to float32."""

    def generate(_context, builder, _signature, arguments):
        from llvmlite import ir

        wide = builder.shl(builder.zext(arguments[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(bits), generate


def _wide(element):
    """Return an element of a memory as a float32: for kernels alone."""
    raise NotImplementedError(element)


@overload(_wide, inline="always")
def _wide_of(element):
    if element == types.uint16:
        return lambda element: _from_bfloat16(element)  # pyright: ignore[reportCallIssue]  # numba gives the context
    return lambda element: element


@numba.njit(**NUMBA)
def _attend(query, memory, extent, state, first, end):
    """Add one part to the attention of items [first, end), block by block, with a running softmax. ``state``: of each
    query the highest score so far, the sum of weights relative to it, and that of weighted values."""
    blocks, tokens, token_stride, head_stride, values = extent
    highest, sums, attended = state
    groups, queries, d = query.shape[1:]
    scores = np.empty((queries, BLOCK_TOKENS), np.float32)
    for item in range(first, end):
        request, group = item // groups, item % groups
        for block in range((tokens[request] + BLOCK_TOKENS - 1) // BLOCK_TOKENS):
            keys = blocks[request, block] + group * head_stride
            count = min(BLOCK_TOKENS, tokens[request] - block * BLOCK_TOKENS)
            for head in range(queries):
                _score(query[request, group, head], memory, keys, token_stride, scores[head], count)
            for head in range(queries):
                before, top = highest[request, group, head], highest[request, group, head]
                for token in range(count):
                    top = max(top, scores[head, token])
                out = attended[request, group, head]
                if top > before:
                    scale = np.exp(before - top)
                    highest[request, group, head] = top
                    sums[request, group, head] *= scale
                    for i in range(d):
                        out[i] *= scale
                total = np.float32(0)
                for token in range(count):
                    scores[head, token] = np.exp(scores[head, token] - top)
                    total += scores[head, token]
                sums[request, group, head] += total
                _add_values(scores[head], memory, keys + values, token_stride, out, count)


@numba.njit(**NUMBA)
def _row(memory, at, d):
    """Return a view of ``d`` elements: indices into it are known to be its own, and the loops over it vectorise."""
    return memory[at : at + d]


@numba.njit(**NUMBA)
def _score(query, memory, keys, stride, scores, count):
    """Write the products of a query and ``count`` keys, several keys in one pass over its elements."""
    d, token = len(query), 0
    while token + AT_A_TIME <= count:
        at = keys + token * stride
        k0, k1 = _row(memory, at, d), _row(memory, at + stride, d)
        k2, k3 = _row(memory, at + 2 * stride, d), _row(memory, at + 3 * stride, d)
        s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(d):
            element = query[i]
            s0 += element * _wide(k0[i])
            s1 += element * _wide(k1[i])
            s2 += element * _wide(k2[i])
            s3 += element * _wide(k3[i])
        scores[token], scores[token + 1], scores[token + 2], scores[token + 3] = s0, s1, s2, s3
        token += AT_A_TIME
    while token < count:
        key, score = _row(memory, keys + token * stride, d), np.float32(0)
        for i in range(d):
            score += query[i] * _wide(key[i])
        scores[token] = score
        token += 1


@numba.njit(**NUMBA)
def _add_values(weights, memory, values, stride, out, count):
    """Add ``count`` values, each by its weight, several values in one pass over the sum's elements."""
    d, token = len(out), 0
    while token + AT_A_TIME <= count:
        at = values + token * stride
        v0, v1 = _row(memory, at, d), _row(memory, at + stride, d)
        v2, v3 = _row(memory, at + 2 * stride, d), _row(memory, at + 3 * stride, d)
        w0, w1, w2, w3 = weights[token], weights[token + 1], weights[token + 2], weights[token + 3]
        for i in range(d):
            out[i] += w0 * _wide(v0[i]) + w1 * _wide(v1[i]) + w2 * _wide(v2[i]) + w3 * _wide(v3[i])
        token += AT_A_TIME
    while token < count:
        value, weight = _row(memory, values + token * stride, d), weights[token]
        for i in range(d):
            out[i] += weight * _wide(value[i])
        token += 1


@numba.njit(**NUMBA)
def _divide(sums, attended, first, end):
    """Divide the weighted values of items [first, end) by the sum of their weights."""
    groups, queries = sums.shape[1:]
    for item in range(first, end):
        for head in range(queries):
            out = attended[item // groups, item % groups, head]
            for i in range(len(out)):
                out[i] /= sums[item // groups, item % groups, head]
