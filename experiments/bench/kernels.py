"""Bench rows of single kernels, each against a plain operation that moves or multiplies as much, timed in turn."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch

from experiments.bench.harness import Table, seconds_of
from flexhybrid.core.context.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.core.plan import stream
from flexhybrid.core.schedule.steps import Segment
from flexhybrid.jobs.compare.speed import PolicyRun
from flexhybrid.runtime.buffers import SharedPart
from flexhybrid.runtime.kernels import in_place
from flexhybrid.runtime.kernels.attention import Assembled, Path, ScoreRule
from flexhybrid.runtime.kernels.rotary import rotate_
from flexhybrid.runtime.kernels.shared_attention import attend_in_parts
from flexhybrid.runtime.step_tensors import mask_of
from flexhybrid.runtime.storage.host_memory import HostMemory
from flexhybrid.runtime.verbs.attending import gather_blocks

REPEATS = 7
LARGE_BYTES = 2**28  #: far more than a processor's caches hold


class KernelSizes(NamedTuple):
    """Sizes of a mini-batch; ``chunk``: new tokens of a chunk."""

    batch: int
    heads: int
    head_dim: int
    context: int
    chunk: int


TIMING = KernelSizes(8, 16, 64, 520, 256)  #: of the timing model


def median_seconds(function, repeats: int = 15) -> float:
    function()
    return statistics.median(seconds_of(function) for _ in range(repeats))


def times_as_fast(plain, ours) -> float:
    """Return seconds of ``plain`` over seconds of ``ours``, the median of REPEATS turns."""
    turns = ((median_seconds(plain), median_seconds(ours)) for _ in range(REPEATS))
    return statistics.median(theirs / own for theirs, own in turns)


def laid_in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pages like those of a run's pools: huge ones where the system has them."""
    return HostMemory(pinned=False).zeros(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def memory_share(operands: torch.Tensor, ours) -> float:
    """Return the read bandwidth of ``ours(operands)`` over the best of this machine, that of a sum over a large buffer.

    Copies of the operands take turns, like layers, so that none is still in a cache when its turn comes.
    """
    large = laid_in_host_memory(torch.ones(LARGE_BYTES // 8, dtype=torch.int64))
    turns = cycle([laid_in_host_memory(operands) for _ in range(-(-LARGE_BYTES // operands.nbytes))])
    shares = []
    for _ in range(REPEATS):
        bandwidth = LARGE_BYTES / median_seconds(lambda: large.sum(), 5)
        seconds = median_seconds(lambda: ours(next(turns)))
        shares.append(operands.nbytes / seconds / bandwidth)
    return statistics.median(shares)


def bench_kernels(table: Table, contender: PolicyRun, sizes: KernelSizes = TIMING) -> None:
    """Add all rows; ``contender`` runs a mix whose KV-Gen is timed in the executor."""
    weights = contender.session.executor.weights
    like = {"dtype": weights.dtype, "device": weights.device}
    bench_kv_gen(table, contender, like)
    bench_attention(table, sizes, like, contender.session.executor.attention)
    bench_attention_shared(table, sizes, like)
    bench_gather(table, sizes, like)
    bench_rotation(table, sizes, like)
    bench_in_place(table, sizes, like, contender.session.executor.attention["decode"])


def bench_kv_gen(table: Table, contender: PolicyRun, like: dict) -> None:
    tasks = {t.verb: t for t in stream(contender.wave, first_iteration=1) if t.layer == 1 and t.iteration == 2}
    task, executor = tasks["kv_gen"], contender.session.executor
    executor.begin_step(task)
    rows, shape = task.work.tokens, executor.shape
    a, w = torch.randn(rows, shape.hidden, **like), torch.randn(shape.kv_width, shape.hidden, **like)
    out = torch.empty(rows, shape.kv_width, **like)
    plain, ours = lambda: torch.mm(a, w.t(), out=out), lambda: executor.perform(task)
    ratio = times_as_fast(plain, ours)
    table.at_least("KV-Gen against a plain matrix product of its shape", ratio, 0.85, "x")


def bench_attention(table: Table, sizes: KernelSizes, like: dict, paths: dict[str, Path]) -> None:
    """Attention of one new token, of a chunk of a prompt, and of a full prompt, by the executor's path of each phase.

    A chunk is measured against its two products alone: softmax, mask and scale pass over scores that have as many bytes
    as the products read, which for heads of 64 takes up to as long again.
    """
    batch, heads, head_dim, context, chunk = sizes
    keys, values = keys_values = torch.randn(2, batch, heads, context, head_dim, **like)
    query, decode = torch.randn(batch, 1, heads, head_dim, **like), paths["decode"]
    share = memory_share(keys_values, lambda kv: decode(query, Assembled(kv[0], kv[1])))
    table.at_least("attend: share of the measured memory bandwidth", share, 0.6, "x")
    hidden = np.arange(context) < np.arange(batch)[:, None]
    mask = mask_of(hidden, **like)
    share = memory_share(keys_values, lambda kv: decode(query, Assembled(kv[0], kv[1], mask)))
    table.at_least("attend, requests of mixed lengths: share of the measured memory bandwidth", share, 0.6, "x")
    grouped = keys_values[:, :, : heads // 4].contiguous()
    share = memory_share(grouped, lambda kv: decode(query, Assembled(kv[0], kv[1], mask)))
    table.at_least("attend, mixed lengths, 4 query heads a key head: share of the bandwidth", share, 0.6, "x")

    new = torch.randn(batch, chunk, heads, head_dim, **like)
    folded, scores = new.transpose(1, 2).contiguous(), torch.randn(batch, heads, chunk, context, **like)

    def products() -> None:
        torch.matmul(folded, keys.transpose(-1, -2))
        torch.matmul(scores, values)

    ratio = times_as_fast(products, lambda: paths["chunk"](new, Assembled(keys, values)))
    table.at_least("attend, chunk of a prompt: speed of its two products", ratio, 0.5, "x")
    bench_prompt(table, new, paths["prompt"])


def bench_attention_shared(table: Table, sizes: KernelSizes, like: dict) -> None:
    """Attention of a chunk of prompts over itself and a shared prefix, against its products alone."""
    batch, heads, head_dim, context, chunk = sizes
    new = torch.randn(batch, chunk, heads, head_dim, **like)
    own, common = new.transpose(1, 2), torch.randn(2, 1, heads, context, head_dim, **like)
    rows, folded = torch.arange(batch)[None], new.permute(2, 0, 1, 3).flatten(1, 2)[None]
    scores = torch.randn(1, heads, batch * chunk, context, **like)
    of_own, rule = torch.randn(batch, heads, chunk, chunk, **like), ScoreRule(head_dim**-0.5)

    def products() -> None:
        for left, right in ((folded, common[0].mT), (scores, common[1]), (own, own.mT), (of_own, own)):
            torch.matmul(left, right)

    def ours() -> None:
        attend_in_parts(new, Assembled(own, own), [SharedPart(rows, common[0], common[1], None)], rule)

    ratio = times_as_fast(products, ours)
    table.at_least("attend_chunk, behind a shared beginning: speed of its products", ratio, 0.5, "x")


def bench_prompt(table: Table, new: torch.Tensor, prompt: Path) -> None:
    """Attention of a full prompt against two full products; a causal one needs half of them."""
    views = new.transpose(1, 2)
    heads = views.contiguous()
    scores = torch.randn(*heads.shape[:3], heads.shape[2], dtype=new.dtype, device=new.device)

    def products() -> None:
        torch.matmul(heads, heads.transpose(-1, -2))
        torch.matmul(scores, heads)

    ratio = times_as_fast(products, lambda: prompt(new, Assembled(views, views)))
    table.at_least("attend, whole prompt: speed of the two products of all with all", ratio, 1.0, "x")


def bench_gather(table: Table, sizes: KernelSizes, like: dict) -> None:
    """Gathering blocks of requests of mixed lengths, against a plain copy of as many bytes."""
    generator, max_blocks = np.random.default_rng(0), ceil_blocks(sizes.context)
    held = generator.integers(max_blocks // 2, max_blocks + 1, 4 * sizes.batch)
    nothing, tokens = np.zeros_like(held), held * BLOCK_TOKENS
    blocks_held = (np.cumsum(held) - held)[:, None] + np.arange(max_blocks)
    segment = Segment("kv@device", "kv", "device", blocks_held, tokens, start_block=nothing, reserved=held)
    pool = torch.randn(int(held.sum()), 2, sizes.heads, BLOCK_TOKENS, sizes.head_dim, **like)
    targets = torch.empty(2, len(held), sizes.heads, segment.max_tokens, sizes.head_dim, **like)
    copied, blocks = torch.empty_like(targets), torch.from_numpy(segment.block_table).to(like["device"])
    width = segment.max_tokens - 1  # a part of the last block
    plain, ours = lambda: copied.copy_(targets), lambda: gather_blocks(pool, blocks, (targets[0], targets[1]), 0, width)
    ratio = times_as_fast(plain, ours)
    table.at_least("assemble, requests of mixed lengths: speed of a plain copy", ratio, 0.5, "x")


def bench_in_place(table: Table, sizes: KernelSizes, like: dict, decode: Path) -> None:
    """Attention that reads blocks where they lie, for requests of 1 to twice the context's tokens: its bandwidth, and
    its time against that of laying them side by side, padded, and attending to that."""
    generator, width = np.random.default_rng(0), sizes.heads * sizes.head_dim
    tokens = generator.integers(1, 2 * sizes.context, 4 * sizes.batch)
    held = ceil_blocks(tokens)
    table_of = np.minimum((np.cumsum(held) - held)[:, None] + np.arange(held.max()), held.sum() - 1)
    pool = torch.randn(int(held.sum()), 2, sizes.heads, BLOCK_TOKENS, sizes.head_dim, **like)
    query = torch.randn(len(tokens), sizes.heads, sizes.head_dim, **like)
    head = BLOCK_TOKENS * sizes.head_dim
    strides = sizes.head_dim, head, BLOCK_TOKENS * width
    extent = in_place.Extent(table_of * 2 * BLOCK_TOKENS * width, tokens, *strides)
    num_threads = torch.get_num_threads()
    layout = in_place.layout_of([extent], sizes.heads, num_threads, sizes.head_dim)
    with ThreadPoolExecutor(num_threads) as workers:
        layout, rule = layout._replace(share=workers.map), ScoreRule(sizes.head_dim**-0.5)

        def attend(memory: torch.Tensor) -> torch.Tensor:
            return layout.attend(query, [memory], rule)

        share = memory_share(pool, attend)
        table.at_least("attend in place, mixed lengths: share of the measured memory bandwidth", share, 0.6, "x")
        targets = torch.empty(2, len(tokens), sizes.heads, int(tokens.max()), sizes.head_dim, **like)
        mask, blocks = mask_of(np.arange(tokens.max()) >= tokens[:, None], **like), torch.from_numpy(table_of)

        def assembled() -> None:
            gather_blocks(pool, blocks, (targets[0], targets[1]), 0, int(tokens.max()))
            decode(query[:, None], Assembled(targets[0], targets[1], mask))

        ratio = times_as_fast(assembled, lambda: attend(pool))
        table.at_least("attend in place, mixed lengths: times as fast as side by side", ratio, 1.5, "x")


def bench_rotation(table: Table, sizes: KernelSizes, like: dict) -> None:
    """Rotation of keys in place against a plain copy of them.

    torch takes seven passes over halves, each at most a copy's time; reading the angles adds half of that.
    """
    rows = sizes.batch * sizes.context
    keys, angles = torch.randn(rows, sizes.heads, sizes.head_dim, **like), torch.randn(rows, sizes.head_dim, **like)
    cos, sin, copied = angles.cos(), angles.sin(), torch.empty_like(keys)
    ratio = times_as_fast(lambda: copied.copy_(keys), lambda: rotate_(keys, cos, sin))
    table.at_least("rotation of keys: speed of a plain copy", ratio, 1 / 6, "x")
