"""Bytes and floating-point operations of each verb: the one home of these formulas.

Both clocks and the closed form use them. A multiply-add counts as two operations. All counts are of one layer and
include padding, because padding is computed and moved too. Arguments may be numpy arrays: the closed form evaluates
many policies at once. What is left out: index tensors, masks, kernel launches (a line's overhead covers those).
"""

from __future__ import annotations

from flexhybrid.core.blocks import BLOCK_TOKENS
from flexhybrid.core.shape import ModelShape
from flexhybrid.core.task import Work

MIN_KV_GEN_ROWS = 16  #: fewer rows than this take other float32 kernels, whose sums differ from the prefill's


def load_blocks(shape: ModelShape, p: int, representation: str, num_blocks, num_copies) -> Work:
    """Copy whole blocks of "kv" or "act" to the device."""
    token_bytes = shape.kv_token_bytes(p) if representation == "kv" else shape.act_token_bytes(p)
    return Work(link_bytes=num_blocks * BLOCK_TOKENS * token_bytes, num_copies=num_copies)


def store_rows(shape: ModelShape, p: int, representation: str, rows) -> Work:
    """Copy the new tokens' rows to the host's landing strip."""
    token_bytes = shape.kv_token_bytes(p) if representation == "kv" else shape.act_token_bytes(p)
    return Work(link_bytes=rows * token_bytes, num_copies=1, tokens=rows)


def scatter_rows(shape: ModelShape, p: int, kv_rows, act_rows) -> Work:
    """Move new rows to their blocks: read and write."""
    moved = kv_rows * shape.kv_token_bytes(p) + act_rows * shape.act_token_bytes(p)
    return Work(memory_bytes=2 * moved, tokens=kv_rows + act_rows)


def kv_gen(shape: ModelShape, p: int, rows) -> Work:
    """Keys and values from ACT: 4·h·G·d operations a token, one matrix product."""
    h, kv = shape.hidden, shape.kv_width
    return Work(memory_bytes=(rows * (h + kv) + h * kv) * p, flops=2 * h * kv * rows, tokens=rows)


def project(shape: ModelShape, p: int, rows) -> Work:
    """Norm and the query, key and value projections of new tokens."""
    h, width = shape.hidden, shape.query_width + shape.kv_width
    return Work(memory_bytes=(rows * (3 * h + width) + h * width) * p, flops=2 * h * width * rows, tokens=rows)


def assemble(shape: ModelShape, p: int, tokens) -> Work:
    """Bring loaded and recomputed keys and values, head-major, into the attention buffer: read and write."""
    return Work(memory_bytes=2 * tokens * shape.kv_token_bytes(p), tokens=tokens)


def attend_decode(shape: ModelShape, p: int, batch, context) -> Work:
    """One query a request over ``context`` (padded) keys and values: 4·H·d·context operations, all KV read once."""
    tokens = batch * context
    return Work(memory_bytes=tokens * shape.kv_token_bytes(p), flops=4 * shape.query_width * tokens, tokens=tokens)


def attend_prefill(shape: ModelShape, p: int, batch, width) -> Work:
    """Causal attention of ``width`` (padded) new tokens over themselves."""
    rows = batch * width
    flops = 2 * shape.query_width * rows * (width + 1)
    return Work(memory_bytes=rows * (2 * shape.query_width + shape.kv_width) * p, flops=flops, tokens=rows)


def finish(shape: ModelShape, p: int, rows) -> Work:
    """Output projection and feed-forward network."""
    mlp_matrices = 3 if shape.gated_mlp else 2
    weights = shape.hidden * (shape.query_width + mlp_matrices * shape.ffn)
    moved = rows * (6 * shape.hidden + 2 * shape.ffn) + weights
    return Work(memory_bytes=moved * p, flops=2 * weights * rows, tokens=rows)


def embed(shape: ModelShape, p: int, rows) -> Work:
    """Token and position rows."""
    return Work(memory_bytes=3 * rows * shape.hidden * p, tokens=rows)


def head(shape: ModelShape, p: int, rows) -> Work:
    """Final norm and output head for one row a request."""
    width = shape.embed_dim or shape.hidden
    return Work(
        memory_bytes=(shape.vocab * width + rows * shape.vocab) * p, flops=2 * shape.vocab * width * rows, tokens=rows
    )


def sample(shape: ModelShape, p: int, rows) -> Work:
    """Choose a token a request from its logits."""
    return Work(memory_bytes=rows * shape.vocab * p, tokens=rows)


def store_out(rows) -> Work:
    """Token ids to the host."""
    return Work(link_bytes=8 * rows, num_copies=1, tokens=rows)
