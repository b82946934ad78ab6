"""Bytes and floating-point operations of each verb: the one home of these formulas.

Both clocks and the closed form use them. A multiply-add counts as two operations. Counts are of one layer and include
padding, which is computed and moved too. Arguments may be numpy arrays over many policies. Left out: index tensors,
masks, kernel launches (in a line's overhead, except where a verb takes hundreds: ``Work.calls``).
"""

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.hardware import EXPERTS_SUFFIX
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.task import Work

MIN_KV_GEN_ROWS = 16  #: fewer rows use other float32 kernels, whose sums differ from the prefill's


def load_blocks(shape: ModelShape, p: float, representation: str, num_blocks, num_copies) -> Work:
    """Copy whole blocks of "kv" or "act" over a link, or read them from the disk."""
    token_bytes = shape.kv_token_bytes(p) if representation == "kv" else shape.act_token_bytes(p)
    return Work(link_bytes=num_blocks * BLOCK_TOKENS * token_bytes, num_copies=num_copies)


def store_rows(shape: ModelShape, p: float, representation: str, rows) -> Work:
    """Copy rows of "kv" or "act" at once: new tokens to the host's landing strip, gathered ones to the device."""
    token_bytes = shape.kv_token_bytes(p) if representation == "kv" else shape.act_token_bytes(p)
    return Work(link_bytes=rows * token_bytes, num_copies=1, tokens=rows)


def scatter_rows(shape: ModelShape, kv_element_bytes: float, act_element_bytes: float, kv_rows, act_rows) -> Work:
    """Move new rows to their blocks, or selected ones side by side: read and write."""
    moved = kv_rows * shape.kv_token_bytes(kv_element_bytes) + act_rows * shape.act_token_bytes(act_element_bytes)
    return Work(memory_bytes=2 * moved, tokens=kv_rows + act_rows)


def kv_gen(shape: ModelShape, p: int, rows) -> Work:
    """Keys and values from ACT: 4·h·G·d operations a token, one matrix product; from a latent fewer."""
    weights = shape.kv_gen_elements
    moved = rows * (shape.act_width + shape.kv_width) + weights
    return Work(memory_bytes=moved * p, flops=2 * weights * rows, tokens=rows)


def project(shape: ModelShape, p: int, rows) -> Work:
    """Norm and the query, key and value projections of new tokens."""
    width = shape.query_width + shape.kv_width
    weights = shape.modules.most("early", outside=True) if shape.modules else shape.hidden * width
    return Work(
        memory_bytes=(rows * (3 * shape.passed_width + width) + weights) * p, flops=2 * weights * rows, tokens=rows
    )


def move_state(state_bytes, batch, num_tensors) -> Work:
    """The states of a mini-batch's requests in one layer, over the link."""
    return Work(link_bytes=batch * state_bytes, num_copies=num_tensors)


def keep_state(work: Work, state_bytes, batch) -> Work:
    """A verb's work that also reads and writes the states of a mini-batch's requests."""
    return work._replace(memory_bytes=work.memory_bytes + 2 * batch * state_bytes)


def together(first: Work, second: Work) -> Work:
    """The work of two verbs on the same rows as one."""
    return second._replace(memory_bytes=first.memory_bytes + second.memory_bytes, flops=first.flops + second.flops)


def assemble(shape: ModelShape, p: int, tokens) -> Work:
    """Bring loaded and recomputed keys and values, head-major, into the attention buffer: read and write."""
    return Work(memory_bytes=2 * tokens * shape.kv_token_bytes(p), tokens=tokens)


def attend_decode(shape: ModelShape, p: int, batch, context) -> Work:
    """One query a request over ``context`` (padded) keys and values: 4·H·d·context operations, all KV read once."""
    tokens = batch * context
    return Work(memory_bytes=tokens * shape.kv_token_bytes(p), flops=4 * shape.query_width * tokens, tokens=tokens)


def attend(shape: ModelShape, p: int, batch, width, context) -> Work:
    """``width`` new tokens a request, the last of its ``context``: causal among themselves, all KV read once."""
    read = attend_decode(shape, p, batch, context)
    return read._replace(flops=4 * shape.query_width * batch * width * (context - (width - 1) / 2))


def attend_shared(shape: ModelShape, p: int, width, tokens, reads) -> Work:
    """Return attention over shared ``tokens``: each is read once, by ``reads`` times ``width`` new tokens."""
    return attend_decode(shape, p, 1, tokens)._replace(flops=4 * shape.query_width * width * reads)


PREFILL_QUERIES = 128  #: tokens of a prompt that attend at a time: a CPU's caches hold their scores


def attend_prefill(shape: ModelShape, p: int, batch, width, window: int | None = None) -> Work:
    """Causal attention of ``width`` (padded) tokens over themselves: a prompt, or a recomputed prefix."""
    rows = batch * width
    flops = 2 * shape.query_width * rows * (width + 1)
    if window is not None:
        flops = np.where(width > window, 4 * shape.query_width * batch * _pairs_in_window(width, window), flops)
        flops = flops if np.ndim(flops) else float(flops)
    return Work(memory_bytes=rows * (2 * shape.query_width + shape.kv_width) * p, flops=flops, tokens=rows)


def _pairs_in_window(width, window: int):
    """Pairs of a query and a key that are computed of a prompt in a window: each run of PREFILL_QUERIES queries with
    all keys that one of them sees."""
    pairs = 0.0 * width
    for start in range(0, int(np.max(width)), PREFILL_QUERIES):
        end = np.clip(width, start, start + PREFILL_QUERIES)
        pairs = pairs + (end - start) * (end - max(0, start - window + 1))
    return pairs


def finish(shape: ModelShape, p: int, rows) -> Work:
    """Return output projection and feed-forward network. With experts, a row meets its share of them; those read are
    the expected number that rows choose at random."""
    mlp_matrices = 3 if shape.gated_mlp else 2
    weights = shape.hidden * (shape.query_width + mlp_matrices * shape.ffn)
    flops = 2 * (shape.modules.multiplied if shape.modules else weights) * rows
    line = ""
    if shape.modules:
        weights, line = shape.modules.read(rows), EXPERTS_SUFFIX * shape.modules.has_experts
    moved = rows * (6 * shape.passed_width + mlp_matrices * shape.ffn) + weights
    return Work(memory_bytes=moved * p, flops=flops, tokens=rows, line=line)


def embed(shape: ModelShape, p: int, rows) -> Work:
    """Token and position rows."""
    return Work(memory_bytes=3 * rows * shape.passed_width * p, tokens=rows)


def head(shape: ModelShape, p: int, rows) -> Work:
    """Return final norm, projection of a narrower embedding, and output head, for one row per request."""
    width = shape.embed_dim or shape.hidden
    weights = shape.vocab * width + (width * shape.hidden if width != shape.hidden else 0)
    return Work(memory_bytes=(weights + rows * shape.vocab) * p, flops=2 * weights * rows, tokens=rows)


def sample(shape: ModelShape, p: int, rows) -> Work:
    """Choose a token a request from its logits."""
    return Work(memory_bytes=rows * shape.vocab * p, tokens=rows)


def convert(elements, p: int, stored: float) -> Work:
    """Between the compute dtype and stored bits: read one, write the other."""
    return Work(memory_bytes=elements * (p + stored), tokens=elements)


def move_hidden(shape: ModelShape, p: int, rows) -> Work:
    """Hidden states between the device and another tier."""
    return Work(link_bytes=rows * shape.passed_width * p, num_copies=1, tokens=rows)


def store_query(shape: ModelShape, p: int, rows) -> Work:
    """Queries, and the new keys and values, to attention on the host."""
    return Work(link_bytes=rows * (shape.query_width + shape.kv_width) * p, num_copies=1, tokens=rows)


def load_attended(shape: ModelShape, p: int, rows) -> Work:
    """Attention's output from the host."""
    return Work(link_bytes=rows * shape.query_width * p, num_copies=1, tokens=rows)


def load_weighed(shape: ModelShape, rows) -> Work:
    """Return what the host's part of the attention moves: float32 outputs, and a sum of exponentials for each head."""
    return Work(link_bytes=4 * rows * (shape.query_width + shape.num_heads), num_copies=1, tokens=rows)


def merge_weighed(shape: ModelShape, rows) -> Work:
    """Return the merge of the host's and the device's parts: both are read and one is written, in float32."""
    return Work(
        memory_bytes=12 * rows * (shape.query_width + shape.num_heads), flops=8 * rows * shape.query_width, tokens=rows
    )


def rank(shape: ModelShape, batch, rows, columns) -> Work:
    """Add up each cached token's attention weights (H2O): float32 of every head, read and written once."""
    return Work(memory_bytes=8 * batch * shape.num_heads * rows * columns, tokens=batch * columns)


POOL_CALLS = 30  #: small operations that a token of a prompt takes on its way into a pool


def fill_pool(shape: ModelShape, batch, prompt, places) -> Work:
    """Return the admission of prompt tokens into pools of ``places``, one after another (InfiniGen, Sec. 4.4): for each
    query its scores over the pool, its fetched tokens, and the place for its token. Passes over float32 scores of each
    head, and over scores, order and 8-byte keys of each group."""
    cells = batch * (prompt * places - places * places / 2)  # a pool fills up first
    flops = 2 * shape.query_width * batch * prompt * places
    memory_bytes = (12 * shape.num_heads + 100 * shape.num_kv_heads) * cells
    return Work(memory_bytes=memory_bytes, flops=flops, tokens=batch * prompt, calls=POOL_CALLS * prompt)


def choose_columns(shape: ModelShape, p: int, rows, share: float, whole: bool) -> Work:
    """Return the choice of the ``share`` of a head's columns that represents its queries and keys (InfiniGen, Sec.
    4.3): sums over the prompts, then those columns of the query weights (all if ``whole``) and of the keys. Rotary
    models skew queries and keys here."""
    queries, keys = shape.query_width, shape.kv_width / 2
    weights = 0 if shape.rotary else 2 * (1 if whole else share) * queries * shape.hidden
    flops = 2 * rows * (queries + keys) * shape.head_dim if shape.rotary else 0
    return Work(memory_bytes=(rows * (queries + keys * (1 + share)) + weights) * p, flops=flops, tokens=rows)


def speculate(shape: ModelShape, p: int, batch, context, share: float, whole: bool) -> Work:
    """The next layer's scores from a ``share`` of the query and key columns (InfiniGen, Sec. 4.3). Where
    ``whole``, query weights are read as a whole (``core.context.selection.whole_queries``)."""
    columns, keys = share * shape.query_width, share * shape.kv_width / 2
    projected = shape.query_width if whole else columns
    flops = 2 * batch * (projected * shape.hidden + columns * context)
    if shape.rotary:
        flops = flops + 2 * batch * columns * shape.head_dim
    memory_bytes = (shape.hidden * projected + batch * context * keys) * p
    return Work(memory_bytes=memory_bytes, flops=flops, tokens=batch * context)


def load_partial_keys(shape: ModelShape, p: int, batch, context, ratio: float) -> Work:
    """Partial keys of a layer that lie on the host."""
    return Work(link_bytes=batch * context * ratio * shape.kv_width / 2 * p, num_copies=1, tokens=batch * context)


def store_index(shape: ModelShape, batch, selected) -> Work:
    """Four bytes for each selected token of each key/value head."""
    return Work(link_bytes=4 * batch * shape.num_kv_heads * selected, num_copies=1, tokens=batch * selected)


def store_out(rows) -> Work:
    """Token ids to the host."""
    return Work(link_bytes=8 * rows, num_copies=1, tokens=rows)
