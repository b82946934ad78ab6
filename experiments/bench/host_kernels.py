"""Bench rows of the host's kernels, on one core and on all: attention over the host's blocks against the bandwidth of
memory; packing, unpacking, scattering and gathering against a plain copy that reads and writes as many bytes.

All operands are larger than the caches, or take turns that are: a host's blocks are in no cache when their turn comes.
They, and what a plain copy copies, lie in pages like a run's pools (``laid_in_host_memory``).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product

import numpy as np
import torch

from experiments.bench import kernels
from experiments.bench.harness import Table, bench, seconds_in_turn
from experiments.bench.kernels import TIMING, KernelSizes, laid_in_host_memory, memory_share, times_as_fast
from flexhybrid.core.context.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.core.model.packing import PackedRun, Packing, default_packing
from flexhybrid.runtime.kernels.attention import Extent, ScoreRule
from flexhybrid.runtime.kernels.compiled import Share
from flexhybrid.runtime.kernels.in_place import Parts, layout_of
from flexhybrid.runtime.kernels.quantize import dequantize, quantize
from flexhybrid.runtime.kernels.shared_attention import add_part
from flexhybrid.runtime.kernels.unpack import typed, unpack
from flexhybrid.runtime.process_settings import torch_threads
from flexhybrid.runtime.verbs.moving import put_tokens, take_rows

DTYPES = torch.float32, torch.bfloat16, torch.float16
QUERIES = 1, 4  #: for each key head
BARS = {"quantize": 1 / 4, "dequantize": 1 / 2}  #: share of a plain copy's speed
COPY_BAR = 1 / 2
SETS = 4  #: of operands that take turns
PACKED = 4096, 2048  #: rows, and elements of each


@bench("host kernels")
def bench_host_kernels(table: Table, sizes: KernelSizes = TIMING) -> None:
    """Add all rows, on one core and, where there are more, on all."""
    most = torch.get_num_threads()
    for threads in dict.fromkeys((1, most)):
        where = "one core" if threads == 1 else f"{threads} cores"
        with ExitStack() as held:
            held.enter_context(torch_threads(threads))
            share: Share = held.enter_context(ThreadPoolExecutor(threads)).map if threads > 1 else map
            for batch, dtype, queries in product((sizes.batch, 4 * sizes.batch), DTYPES, QUERIES):
                bench_attention(table, sizes._replace(batch=batch), (dtype, queries), share, where)
            bench_packing(table, share, where)
            bench_stored_bits(table, share, where)
            bench_moving(table, sizes, share, where)
    with torch_threads(1):
        bench_attention_together(table, sizes)


def bench_attention(table: Table, sizes: KernelSizes, kind: tuple[torch.dtype, int], share: Share, where: str) -> None:
    """Attention of one new token over blocks in place. ``kind``: dtype and queries per key head. For few requests the
    row includes what precedes the kernel, and for two threads waking the second."""
    (dtype, queries), (batch, heads, head_dim, _, _) = kind, sizes
    blocks, held = _blocks(sizes, dtype)
    query = torch.randn(batch, heads * queries, head_dim).to(dtype)
    layout, rule = _layout(sizes, held, torch.get_num_threads(), queries, share), ScoreRule(head_dim**-0.5)
    found = memory_share(blocks, lambda copy: layout.attend_and_sum(query, [copy], rule))
    name = f"attend_host, {batch} requests, {str(dtype)[6:]}, query heads a key head {queries}, {where}"
    table.at_least(f"{name}: share of the memory bandwidth", found, 0.6, "x")


def _blocks(sizes: KernelSizes, dtype: torch.dtype) -> tuple[torch.Tensor, np.ndarray]:
    """Return blocks of contexts, and which each request holds [B, n]."""
    count = sizes.batch * ceil_blocks(sizes.context)
    blocks = torch.randn(count, 2, sizes.heads, BLOCK_TOKENS, sizes.head_dim).to(dtype)
    return blocks, np.arange(count).reshape(sizes.batch, -1)


def _layout(sizes: KernelSizes, held: np.ndarray, threads: int, queries: int, share: Share = map) -> Parts:
    """Return the layout of full contexts in the blocks that requests hold [B, n]."""
    block = 2 * sizes.heads * BLOCK_TOKENS * sizes.head_dim
    strides = sizes.head_dim, BLOCK_TOKENS * sizes.head_dim, block // 2
    extent = Extent(held * block, np.full(len(held), sizes.context), *strides)
    return layout_of([extent], sizes.heads, threads, queries * sizes.head_dim, share)


def bench_attention_together(table: Table, sizes: KernelSizes) -> None:
    """Attention over blocks that all requests share, against each attending to them by itself."""
    batch, heads, head_dim, _, _ = sizes
    blocks, held = _blocks(sizes, torch.float32)
    query, rule = torch.randn(batch, heads, head_dim), ScoreRule(head_dim**-0.5)
    of_each, alike, of_all = (_layout(sizes, which, 1, 1) for which in (held, held[:1].repeat(batch, 0), held[:1]))
    together, rows = query.transpose(0, 1).flatten(0, 1)[None], torch.arange(batch)[None]
    alone = of_each.attend_and_sum(query, [blocks], rule)

    def shared() -> None:
        add_part(alone, query[:, :, None, None], rows, lambda _: of_all.attend_and_sum(together, [blocks], rule))

    ratio = times_as_fast(lambda: alike.attend_and_sum(query, [blocks], rule), shared)
    table.at_least(f"attend_host_shared, {batch} requests: times as fast as each by itself", ratio, 1, "x")


def bench_packing(table: Table, share: Share, where: str) -> None:
    """Rows of bfloat16 in 8 and 4 bits."""
    generator = torch.Generator().manual_seed(0)
    rows = [laid_in_host_memory(torch.randn(*PACKED, generator=generator).bfloat16()) for _ in range(SETS)]
    for bits in (8, 4):
        packed = [laid_in_host_memory(quantize(one, bits)) for one in rows]
        restored = [laid_in_host_memory(one) for one in rows]
        calls = {
            "quantize": lambda n, bits=bits, packed=packed: quantize(rows[n], bits, packed[n], share=share),
            "dequantize": lambda n, bits=bits, packed=packed, restored=restored: dequantize(
                packed[n], bits, restored[n].dtype, restored[n], share=share
            ),
        }
        num_bytes = (rows[0].nbytes + packed[0].nbytes) // 2
        for name, call in calls.items():
            _against_a_copy(table, f"{name}, {bits} bits, {where}", call, num_bytes, BARS[name])


#: Format of a checkpoint -> its name in ``packing.FORMATS``, bits, and rows and columns that share a scale.
STORED = {
    "FP8 in blocks of 128 x 128": ("block", 8, (128, 128)),
    "int4 in groups of 128": ("grouped", 4, (1, 128)),
    "MXFP4": ("mxfp4", 4, (1, 32)),
}
UNPACK_BAR = 1.2  #: most nanoseconds an element on one core


def bench_stored_bits(table: Table, share: Share, where: str) -> None:
    """Unpack matrices of a checkpoint to bfloat16."""
    out = [laid_in_host_memory(torch.zeros(1, *PACKED, dtype=torch.bfloat16)) for _ in range(SETS)]
    for title, (form, bits, block) in STORED.items():
        packing = default_packing(Packing(form, *PACKED, bits, block), "BF16", zeros=False, order=False)
        run = PackedRun(packing)
        parts = [torch.full((part.num_bytes,), 120, dtype=torch.uint8) for part in packing.parts]
        sets = [typed(run, list(map(laid_in_host_memory, parts))) for _ in range(SETS)]
        name, num_bytes = f"unpack {title}, {where}", (out[0].nbytes + sum(part.nbytes for part in parts)) // 2

        def call(turn: int, packing=packing, sets=sets) -> None:
            unpack(packing, sets[turn], out[turn], share)

        seconds = seconds_in_turn({name: lambda turn, call=call: call(turn % SETS)}, kernels.REPEATS * SETS, SETS)
        ns = 1e9 * statistics.median(seconds[name]) / out[0].numel()
        table.at_most(f"{name}: nanoseconds an element", ns, UNPACK_BAR, "ns")
        _against_a_copy(table, name, call, num_bytes, 1 / 4)


def bench_moving(table: Table, sizes: KernelSizes, share: Share, where: str) -> None:
    """New rows of bfloat16 put into blocks: a prompt's, side by side, and one of each request, anywhere. And rows taken
    from anywhere: of single heads, and of all."""
    tokens, width = kernels.LARGE_BYTES // 2**16, 2 * sizes.heads * sizes.head_dim
    num_blocks = SETS * tokens // BLOCK_TOKENS * 4
    shape = num_blocks, 2, sizes.heads, BLOCK_TOKENS, sizes.head_dim
    pool, rows = (laid_in_host_memory(torch.ones(size, dtype=torch.bfloat16)) for size in (shape, (tokens, width)))
    places, anywhere = np.arange(tokens), np.random.default_rng(0).permutation(num_blocks)

    def of_prompts(turn: int) -> None:
        blocks = anywhere[turn * tokens // BLOCK_TOKENS :][: tokens // BLOCK_TOKENS]
        put_tokens(pool, rows, blocks[places // BLOCK_TOKENS], places % BLOCK_TOKENS, share)

    few = num_blocks // SETS

    def of_a_step(turn: int) -> None:
        blocks = anywhere[turn * few :][: min(few, tokens)]
        put_tokens(pool, rows[: len(blocks)], blocks, blocks % BLOCK_TOKENS, share)

    _against_a_copy(table, f"scatter, rows of prompts, {where}", of_prompts, rows.nbytes, COPY_BAR)
    _against_a_copy(table, f"scatter, a row a request, {where}", of_a_step, min(few, tokens) * width * 2, COPY_BAR)
    for name, piece in (("single heads", sizes.head_dim), ("whole tokens", width)):
        source = pool.view(-1, piece)
        count = rows.numel() // piece
        taken = np.random.default_rng(0).integers(0, len(source), (SETS, count))
        target = laid_in_host_memory(torch.zeros(SETS, count, piece, dtype=pool.dtype))
        _against_a_copy(
            table,
            f"gather, rows of {name}, {where}",
            lambda turn, source=source, taken=taken, target=target: take_rows(source, taken[turn], target[turn], share),
            rows.nbytes,
            COPY_BAR,
        )


def _against_a_copy(table: Table, name: str, call: Callable[[int], object], num_bytes: int, bar: float) -> None:
    """Add the speed of a call, which reads and writes ``num_bytes`` each on average, as a share of a plain copy's."""
    plain = laid_in_host_memory(torch.ones(2, SETS, num_bytes, dtype=torch.uint8))
    calls = {
        "copy": lambda turn: plain[1, turn % SETS].copy_(plain[0, turn % SETS]),
        "ours": lambda turn: call(turn % SETS),
    }
    seconds = seconds_in_turn(calls, kernels.REPEATS * SETS, SETS)
    ratio = float(np.median(np.array(seconds["copy"]) / np.array(seconds["ours"])))
    gb_per_s = 2 * num_bytes / statistics.median(seconds["ours"]) / 1e9
    table.at_least(f"{name}: speed of a plain copy", ratio, bar, "x", gb_per_s=gb_per_s)
