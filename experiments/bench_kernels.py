"""Bench rows of single kernels: each against a plain operation that moves or multiplies as much, timed in turn."""

from __future__ import annotations

import statistics
import time
from itertools import cycle

import numpy as np
import torch

from flexhybrid.core.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.core.steps import Segment, block_runs
from flexhybrid.core.stream import stream
from flexhybrid.jobs.speed import Contender
from flexhybrid.runtime import attention
from flexhybrid.runtime.quantize import dequantize, packed_bytes, quantize
from flexhybrid.runtime.rotary import rotate_
from flexhybrid.runtime.verbs.attending import gather_blocks

REPEATS = 7
LARGE_BYTES = 2**28  #: far more than the caches hold
#: A mini-batch of the timing model: requests, heads, head size, context; new tokens of a chunk.
BATCH, HEADS, HEAD_DIM, CONTEXT, CHUNK = 8, 16, 64, 520, 256


def median_seconds(function, repeats: int = 15) -> float:
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def times_as_fast(plain, ours) -> float:
    """Seconds of the one over seconds of the other: the median of several turns."""
    return statistics.median(median_seconds(plain) / median_seconds(ours) for _ in range(REPEATS))


def memory_share(operands: torch.Tensor, ours) -> float:
    """Bytes a second that ``ours(operands)`` reads of them, over what reading costs at best here: a sum over a large
    buffer. Copies of the operands take turns, as layers do, so that none is still in a cache when it comes again."""
    large = torch.ones(LARGE_BYTES // 8, dtype=torch.int64)
    turns = cycle([operands.clone() for _ in range(-(-LARGE_BYTES // operands.nbytes))])
    shares = []
    for _ in range(REPEATS):
        bandwidth = LARGE_BYTES / median_seconds(lambda: large.sum(), 5)
        shares.append(operands.nbytes / median_seconds(lambda: ours(next(turns))) / bandwidth)
    return statistics.median(shares)


def bench_kernels(table, contender: Contender) -> None:
    """``contender``: a mix of the timing model, whose KV-Gen is timed as the executor runs it."""
    dtype = contender.executor.weights.dtype
    bench_kv_gen(table, contender, dtype)
    bench_attention(table, dtype)
    bench_gather(table, dtype)
    bench_rotation(table, dtype)
    bench_quantize(table)


def bench_kv_gen(table, contender: Contender, dtype: torch.dtype) -> None:
    tasks = {t.verb: t for t in stream(contender.wave, first_iteration=1) if t.layer == 1 and t.iteration == 2}
    task, executor = tasks["kv_gen"], contender.executor
    executor.begin_step(task)
    rows, shape = task.work.tokens, executor.shape
    a, w = torch.randn(rows, shape.hidden).to(dtype), torch.randn(shape.kv_width, shape.hidden).to(dtype)
    out = torch.empty(rows, shape.kv_width, dtype=dtype)
    ratio = times_as_fast(lambda: torch.mm(a, w.t(), out=out), lambda: executor.perform(task))
    table.add("KV-Gen against a plain matrix product of its shape", ratio, 0.85, "x")


def bench_attention(table, dtype: torch.dtype) -> None:
    """One new token over keys and values side by side, or over blocks as they lie (on the host, one thread); a chunk.

    A chunk is measured against its two products alone: softmax, mask and scale pass over scores that have as many
    bytes as the products read, which for heads of 64 takes up to as long again.
    """
    keys, values = context = torch.randn(2, BATCH, HEADS, CONTEXT, HEAD_DIM).to(dtype)
    query = torch.randn(BATCH, HEADS, HEAD_DIM).to(dtype)
    share = memory_share(context, lambda one: attention.attend_decode(query, *one, None))
    table.add("attend: share of the measured memory bandwidth", share, 0.6, "x")

    num_blocks = ceil_blocks(CONTEXT)
    blocks = torch.randn(BATCH * num_blocks, 2, HEADS, BLOCK_TOKENS, HEAD_DIM).to(dtype)
    tokens, out = np.full(BATCH, CONTEXT), torch.empty_like(query)
    runs = block_runs(np.arange(BATCH) * num_blocks, np.full(BATCH, num_blocks), np.zeros(BATCH, dtype=int))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        share = memory_share(blocks, lambda one: attention.attend_blocks(query, one, runs, tokens, out))
    finally:
        torch.set_num_threads(threads)
    table.add("attend_host: share of one core's memory bandwidth", share, 0.6, "x")

    new = torch.randn(BATCH, CHUNK, HEADS, HEAD_DIM).to(dtype)
    folded, scores = new.transpose(1, 2).contiguous(), torch.randn(BATCH, HEADS, CHUNK, CONTEXT).to(dtype)

    def products() -> None:
        torch.matmul(folded, keys.transpose(-1, -2))
        torch.matmul(scores, values)

    ratio = times_as_fast(products, lambda: attention.attend_chunk(new, keys, values, None))
    table.add("attend, chunk of a prompt: speed of its two products", ratio, 0.5, "x")
    bench_prompt(table, new)


def bench_prompt(table, new: torch.Tensor) -> None:
    """A whole prompt over itself against the two products of all with all, of which it needs half."""
    heads = new.transpose(1, 2).contiguous()
    scores = torch.randn(*heads.shape[:3], heads.shape[2]).to(new.dtype)

    def products() -> None:
        torch.matmul(heads, heads.transpose(-1, -2))
        torch.matmul(scores, heads)

    ratio = times_as_fast(products, lambda: attention.attend_prefill(new, new, new))
    table.add("attend, whole prompt: speed of the two products of all with all", ratio, 1.0, "x")


def bench_gather(table, dtype: torch.dtype) -> None:
    """Blocks of requests of mixed lengths laid side by side, against a plain copy of as many bytes."""
    generator = np.random.default_rng(0)
    held = generator.integers(ceil_blocks(CONTEXT) // 2, ceil_blocks(CONTEXT) + 1, 4 * BATCH)
    nothing, tokens = np.zeros_like(held), held * BLOCK_TOKENS
    segment = Segment("kv@device", "kv", "device", np.cumsum(held) - held, tokens, nothing, held)
    pool = torch.randn(int(held.sum()), 2, HEADS, BLOCK_TOKENS, HEAD_DIM).to(dtype)
    targets = torch.empty(2, len(held), HEADS, segment.max_tokens, HEAD_DIM, dtype=dtype)
    copied, blocks = torch.empty_like(targets), torch.from_numpy(segment.block_table)
    width = segment.max_tokens - 1  # the last block in part
    ratio = times_as_fast(lambda: copied.copy_(targets), lambda: gather_blocks(pool, blocks, targets, 0, width))
    table.add("assemble, requests of mixed lengths: speed of a plain copy", ratio, 0.5, "x")


def bench_rotation(table, dtype: torch.dtype) -> None:
    """Keys turned in place against a plain copy of them. torch takes seven passes over halves, each a copy's time at
    most, and half as much again for the angles that it reads."""
    rows = BATCH * CONTEXT
    keys, angles = torch.randn(rows, HEADS, HEAD_DIM).to(dtype), torch.randn(rows, HEAD_DIM).to(dtype)
    cos, sin, copied = angles.cos(), angles.sin(), torch.empty_like(keys)
    ratio = times_as_fast(lambda: copied.copy_(keys), lambda: rotate_(keys, cos, sin))
    table.add("rotation of keys: speed of a plain copy", ratio, 1 / 6, "x")


def bench_quantize(table) -> None:
    """Packing and unpacking [4096, 2048] of bfloat16 against a plain copy that reads and writes as many bytes.

    The bars: torch takes eight passes to pack (convert, min, max, subtract, scale, clamp, round, narrow) and four to
    unpack (convert, scale, add, round), each about a copy's time; a third is left for the passes over 4-bit codes.
    """
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(4096, 2048, generator=generator).bfloat16() for _ in range(4)]  # more than the caches hold
    for bits in (8, 4):
        num_bytes = rows[0].nbytes + 4096 * packed_bytes(2048, bits)
        seconds = quantize_seconds(rows, bits, num_bytes)
        copied = np.array(seconds.pop("copy"))
        for name, bar in (("quantize", 1 / 12), ("dequantize", 1 / 6)):
            gb_per_s = num_bytes / statistics.median(seconds[name]) / 1e9
            ratio = float(np.median(copied / np.array(seconds[name])))
            table.add(f"{name}, {bits} bits: speed of a plain copy", ratio, bar, "x", gb_per_s=gb_per_s)


def quantize_seconds(rows: list[torch.Tensor], bits: int, num_bytes: int) -> dict[str, list[float]]:
    """Seconds of "quantize", "dequantize" and "copy" (``num_bytes`` read and written), one after another in turn."""
    sets = len(rows)
    packed, restored = [quantize(one, bits) for one in rows], [torch.empty_like(one) for one in rows]
    plain = torch.ones(2, sets, num_bytes // 2, dtype=torch.uint8)
    calls = {
        "copy": lambda i: plain[1, i].copy_(plain[0, i]),
        "quantize": lambda i: quantize(rows[i], bits, packed[i]),
        "dequantize": lambda i: dequantize(packed[i], bits, rows[i].dtype, restored[i]),
    }
    seconds = {name: [] for name in calls}
    for turn in range(REPEATS * sets):
        for name, call in calls.items():
            start = time.perf_counter()
            call(turn % sets)
            seconds[name].append(time.perf_counter() - start)
    return seconds
