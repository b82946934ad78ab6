"""Bytes and floating-point operations of each verb in one layer. All clocks use these formulas.

A multiply-add counts as two operations. Padding counts, because it is computed and moved too. Arguments may be numbers
or arrays over policies. ``p``: bytes of an element. Not counted: index tensors, masks, and kernel launches, which are a
part of a line's overhead or, if a verb has hundreds, of ``Work.calls``.
"""

import numpy as np

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.hardware import EXPERTS_SUFFIX
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.task import Work

MIN_KV_GEN_ROWS = 16  #: least rows of a product: for fewer, float32 kernels add up in another order than the prefill's


def load_blocks(shape: ModelShape, p: float, representation: str, num_blocks, num_copies) -> Work:
    """Return the work of copying blocks of "kv" or "act" over a link or reading them from the disk."""
    token_bytes = shape.kv_token_bytes(p) if representation == "kv" else shape.act_token_bytes(p)
    return Work(link_bytes=num_blocks * BLOCK_TOKENS * token_bytes, num_copies=num_copies)


def store_rows(shape: ModelShape, p: float, representation: str, rows) -> Work:
    """Return the work of one copy of rows of "kv" or "act": new tokens to the host, or gathered ones to the device."""
    token_bytes = shape.kv_token_bytes(p) if representation == "kv" else shape.act_token_bytes(p)
    return Work(link_bytes=rows * token_bytes, num_copies=1, tokens=rows)


def scatter_rows(shape: ModelShape, kv_element_bytes: float, act_element_bytes: float, kv_rows, act_rows) -> Work:
    """Return the work of moving new rows to their blocks, or gathering selected rows: each is read and written."""
    moved = kv_rows * shape.kv_token_bytes(kv_element_bytes) + act_rows * shape.act_token_bytes(act_element_bytes)
    return Work(memory_bytes=2 * moved, tokens=kv_rows + act_rows)


def kv_gen(shape: ModelShape, p: int, rows) -> Work:
    """Return the work of computing keys and values from ACT: one product with 4·h·G·d operations per token, or fewer
    from a latent row."""
    weights = shape.kv_gen_elements
    moved = rows * (shape.act_width + shape.kv_width) + weights
    return Work(memory_bytes=moved * p, flops=2 * weights * rows, tokens=rows)


def project(shape: ModelShape, p: int, rows) -> Work:
    """Return the work of the norm and the query, key and value projections of new tokens."""
    width = shape.query_width + shape.kv_width
    weights = shape.modules.most("early", outside=True) if shape.modules else shape.hidden * width
    moved = rows * (3 * shape.passed_width + width) + weights
    return Work(memory_bytes=moved * p, flops=2 * weights * rows, tokens=rows)


def move_state(state_bytes, batch, num_tensors) -> Work:
    """Return the work of copying the recurrent states of a mini-batch's requests over the link."""
    return Work(link_bytes=batch * state_bytes, num_copies=num_tensors)


def keep_state(work: Work, state_bytes, batch) -> Work:
    """Return a verb's work with reading and writing the recurrent states of a mini-batch's requests."""
    return work._replace(memory_bytes=work.memory_bytes + 2 * batch * state_bytes)


def together(first: Work, second: Work) -> Work:
    """Return the work of two verbs on the same rows as one verb."""
    return second._replace(memory_bytes=first.memory_bytes + second.memory_bytes, flops=first.flops + second.flops)


def assemble(shape: ModelShape, p: int, tokens) -> Work:
    """Return the work of copying loaded and recomputed keys and values to the attention buffer, ordered by head: each
    is read and written."""
    return Work(memory_bytes=2 * tokens * shape.kv_token_bytes(p), tokens=tokens)


def attend_decode(shape: ModelShape, p: int, batch, context) -> Work:
    """Return the work of attention of one query per request to ``context`` padded tokens: 4·H·d·context operations;
    all keys and values are read once."""
    tokens = batch * context
    return Work(memory_bytes=tokens * shape.kv_token_bytes(p), flops=4 * shape.query_width * tokens, tokens=tokens)


def attend(shape: ModelShape, p: int, batch, width, context) -> Work:
    """Return the work of causal attention of the last ``width`` of each request's ``context`` tokens; all keys and
    values are read once."""
    read = attend_decode(shape, p, batch, context)
    return read._replace(flops=4 * shape.query_width * batch * width * (context - (width - 1) / 2))


def attend_shared(shape: ModelShape, p: int, width, tokens, reads) -> Work:
    """Return the work of attention to shared ``tokens``, each read once. ``reads``: sum over requests of shared tokens;
    ``width``: new tokens of a request."""
    return attend_decode(shape, p, 1, tokens)._replace(flops=4 * shape.query_width * width * reads)


PREFILL_QUERIES = 128  #: tokens of a prompt that attend at a time, so that their scores fit a CPU's caches


def attend_prefill(shape: ModelShape, p: int, batch, width, window: int | None = None) -> Work:
    """Return the work of causal attention of ``width`` padded tokens to themselves: a prompt or a recomputed prefix."""
    rows = batch * width
    flops = 2 * shape.query_width * rows * (width + 1)
    if window is not None:
        flops = np.where(width > window, 4 * shape.query_width * batch * _pairs_in_window(width, window), flops)
        flops = flops if np.ndim(flops) else float(flops)
    return Work(memory_bytes=rows * (2 * shape.query_width + shape.kv_width) * p, flops=flops, tokens=rows)


def _pairs_in_window(width, window: int):
    """Return the pairs of a query and a key that attention with a window computes for a prompt: each run of
    PREFILL_QUERIES queries with all keys that any of them attends to."""
    pairs = 0.0 * width
    for start in range(0, int(np.max(width)), PREFILL_QUERIES):
        end = np.clip(width, start, start + PREFILL_QUERIES)
        pairs = pairs + (end - start) * (end - max(0, start - window + 1))
    return pairs


def finish(shape: ModelShape, p: int, rows) -> Work:
    """Return the work of output projection and feed-forward network. With experts, a row is multiplied with its share
    of them; the expected number of experts that random rows choose is read."""
    mlp_matrices = 3 if shape.gated_mlp else 2
    weights = shape.hidden * (shape.query_width + mlp_matrices * shape.ffn)
    flops = 2 * (shape.modules.multiplied if shape.modules else weights) * rows
    line = ""
    if shape.modules:
        weights, line = shape.modules.read(rows), EXPERTS_SUFFIX * shape.modules.has_experts
    moved = rows * (6 * shape.passed_width + mlp_matrices * shape.ffn) + weights
    return Work(memory_bytes=moved * p, flops=flops, tokens=rows, line=line)


def route(shape: ModelShape, p: int, rows) -> Work:
    """Return the work of a layer after attention up to its experts: ``finish`` with the dense matrices alone."""
    weights = shape.modules.late[0] if shape.modules else 0
    return Work(memory_bytes=(6 * rows * shape.passed_width + weights) * p, flops=2 * weights * rows, tokens=rows)


def experts(shape: ModelShape, p: int, rows) -> Work:
    """Return the work of a layer's experts: ``finish`` with their matrices alone."""
    if not shape.modules:
        return Work(tokens=rows, line=EXPERTS_SUFFIX)
    weights = shape.modules.late[1]
    read = weights * shape.modules.touched(rows)
    flops = 2 * weights * shape.modules.experts_share * rows
    made = (3 if shape.gated_mlp else 2) * rows * shape.ffn
    return Work(memory_bytes=(made + read) * p, flops=flops, tokens=rows, line=EXPERTS_SUFFIX)


def add_experts(shape: ModelShape, p: int, rows) -> Work:
    """Return the work of a layer after its experts: adding their output, and a shared expert's, to hidden states."""
    return Work(memory_bytes=3 * rows * shape.passed_width * p, tokens=rows)


def embed(shape: ModelShape, p: int, rows) -> Work:
    """Return the work of reading token and position embeddings."""
    return Work(memory_bytes=3 * rows * shape.passed_width * p, tokens=rows)


def head(shape: ModelShape, p: int, rows) -> Work:
    """Return the work of final norm, projection to a narrower embedding, and output head, for one row per request."""
    width = shape.embed_dim or shape.hidden
    weights = shape.vocab * width + (width * shape.hidden if width != shape.hidden else 0)
    return Work(memory_bytes=(weights + rows * shape.vocab) * p, flops=2 * weights * rows, tokens=rows)


def sample(shape: ModelShape, p: int, rows) -> Work:
    """Return the work of choosing one token per request from its logits."""
    return Work(memory_bytes=rows * shape.vocab * p, tokens=rows)


def convert(elements, p: int, stored: float) -> Work:
    """Return the work of quantizing or dequantizing. ``stored``: bytes of a packed element."""
    return Work(memory_bytes=elements * (p + stored), tokens=elements)


def unpack_layer(shape: ModelShape, p: int, weights_bits: str | int, stored: float) -> Work:
    """Return the work of unpacking a layer's matrices: all of them, as the policy packs them, with ``stored`` bytes of
    an element; or with native bits those that the checkpoint packs."""
    if weights_bits != "native":
        return convert(shape.layer_matrix_elements, p, stored)
    return convert(shape.packed_elements, p, shape.packed_bytes / shape.packed_elements)


def move_hidden(shape: ModelShape, p: int, rows) -> Work:
    """Return the work of copying hidden states between the device and another tier."""
    return Work(link_bytes=rows * shape.passed_width * p, num_copies=1, tokens=rows)


def store_query(shape: ModelShape, p: int, rows) -> Work:
    """Return the work of copying queries, and new keys and values, to the host for attention there."""
    return Work(link_bytes=rows * (shape.query_width + shape.kv_width) * p, num_copies=1, tokens=rows)


def load_attended(shape: ModelShape, p: int, rows) -> Work:
    """Return the work of copying attention's output from the host."""
    return Work(link_bytes=rows * shape.query_width * p, num_copies=1, tokens=rows)


def load_weighed(shape: ModelShape, rows) -> Work:
    """Return the work of loading the host's part of attention's output: float32 values and a sum for each head."""
    return Work(link_bytes=4 * rows * (shape.query_width + shape.num_heads), num_copies=1, tokens=rows)


def merge_weighed(shape: ModelShape, rows) -> Work:
    """Return the work of merging the host's and the device's parts of attention's output: both are read and one is
    written, in float32."""
    width = shape.query_width
    return Work(memory_bytes=12 * rows * (width + shape.num_heads), flops=8 * rows * width, tokens=rows)


def rank(shape: ModelShape, batch, rows, columns) -> Work:
    """Return the work of adding up each cached token's attention weights (H2O): float32 values of every head, read and
    written once."""
    return Work(memory_bytes=8 * batch * shape.num_heads * rows * columns, tokens=batch * columns)


POOL_CALLS = 30  #: small operations to admit one prompt token to a pool


def fill_pool(shape: ModelShape, batch, prompt, places) -> Work:
    """Return the work of admitting prompt tokens to pools of ``places``, one after another (InfiniGen, Sec. 4.4). Each
    query has its scores over the pool, its loaded tokens, and a place for its own token. Memory is read and written for
    float32 scores of each head, and for scores, order and 8-byte keys of each group of heads."""
    cells = batch * (prompt * places - places * places / 2)  # while a pool fills up, queries have fewer scores
    flops = 2 * shape.query_width * batch * prompt * places
    memory_bytes = (12 * shape.num_heads + 100 * shape.num_kv_heads) * cells
    return Work(memory_bytes=memory_bytes, flops=flops, tokens=batch * prompt, calls=POOL_CALLS * prompt)


def choose_columns(shape: ModelShape, p: int, rows, share: float, whole: bool) -> Work:
    """Return the work of choosing the ``share`` of a head's columns that represents its queries and keys. Columns are
    chosen by sums over the prompts, then copied from the keys and the query weights (``whole``: all query weights;
    InfiniGen, Sec. 4.3). Rotary models also multiply queries and keys by a skewing matrix."""
    queries, keys = shape.query_width, shape.kv_width / 2
    weights = 0 if shape.rotary else 2 * (1 if whole else share) * queries * shape.hidden
    flops = 2 * rows * (queries + keys) * shape.head_dim if shape.rotary else 0
    return Work(memory_bytes=(rows * (queries + keys * (1 + share)) + weights) * p, flops=flops, tokens=rows)


def speculate(shape: ModelShape, p: int, batch, context, share: float, whole: bool) -> Work:
    """Return the work of predicting the next layer's scores from a ``share`` of the query and key columns (InfiniGen,
    Sec. 4.3). ``whole``: all query weights are read (``core.context.selection.whole_queries``)."""
    columns, keys = share * shape.query_width, share * shape.kv_width / 2
    projected = shape.query_width if whole else columns
    flops = 2 * batch * (projected * shape.hidden + columns * context)
    if shape.rotary:
        flops = flops + 2 * batch * columns * shape.head_dim
    memory_bytes = (shape.hidden * projected + batch * context * keys) * p
    return Work(memory_bytes=memory_bytes, flops=flops, tokens=batch * context)


def load_partial_keys(shape: ModelShape, p: int, batch, context, ratio: float) -> Work:
    """Return the work of loading a layer's partial keys from the host."""
    return Work(link_bytes=batch * context * ratio * shape.kv_width / 2 * p, num_copies=1, tokens=batch * context)


def store_index(shape: ModelShape, batch, selected) -> Work:
    """Return the work of copying the indices of selected tokens to the host: 4 bytes for each token and key head."""
    return Work(link_bytes=4 * batch * shape.num_kv_heads * selected, num_copies=1, tokens=batch * selected)


def store_out(rows) -> Work:
    """Return the work of copying sampled token ids to the host."""
    return Work(link_bytes=8 * rows, num_copies=1, tokens=rows)
