"""Bench rows of decode attention on a GPU: Triton's kernels, which read blocks in place, against the memory's
bandwidth, torch's attention over contiguous contexts with the same bytes, and a copy of the contexts side by side."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from experiments.bench.harness import Table
from experiments.gpu.watch import device_seconds, gpu, under_cupti
from flexhybrid.core.context.blocks import BLOCK_TOKENS, ceil_blocks
from flexhybrid.runtime.kernels.attention import PATHS, Assembled, Extent, ScoreRule
from flexhybrid.runtime.profiling.attention_paths import USUAL, proved_on_gpu
from flexhybrid.runtime.step_tensors import mask_of
from flexhybrid.runtime.verbs.attending import gather_blocks


class AttendCase(NamedTuple):
    """A mini-batch's decode step in one layer."""

    requests: int
    tokens: int  #: of the longest context; the others have half of it at least
    groups: int
    queries: int  #: a key head
    d: int = 128


CASES = {
    "OPT-6.7B, 17 x 512": AttendCase(17, 512, 32, 1),
    "Llama-3-8B, 32 x 512": AttendCase(32, 512, 8, 4),
    "Llama-3-8B, 32 x 2048": AttendCase(32, 2048, 8, 4),
    "Llama-3-8B, 1 x 8192": AttendCase(1, 8192, 8, 4),
}
#: Speed over that of a plain copy, which reads and writes, of torch's attention over contiguous contexts, and of laying
#: them side by side. Cases of 30 to 50 MB take ten microseconds, which a row's seconds tell.
BARS = {"a plain copy": 0.6, "attention over contiguous contexts": 0.9, "side by side": 1.5}
COPY_BARS = {"OPT-6.7B, 17 x 512": 0.65, "Llama-3-8B, 32 x 2048": 0.75}

#: Blocks in work, warps and stages of a program, for one query a key head and for several.
SIZES = {
    True: ((1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 2), (4, 2, 2), (4, 4, 2)),
    False: ((2, 2, 2), (4, 2, 2), (4, 2, 3), (4, 4, 2), (8, 4, 2), (8, 4, 3)),
}


def bench_attend_sizes(table: Table) -> None:
    """Time the attention kernel with SIZES in turn with the sizes it uses."""
    bench_attend_cuda(table, sizes=True)


def bench_attend_cuda(table: Table, sizes: bool = False) -> None:
    """Time attention in bfloat16 over contexts of mixed lengths, with blocks scattered in a pool."""
    for name, case in CASES.items():
        proved = proved_on_gpu("bfloat16", case.queries, case.d)
        table.at_least(f"GPU, {name}: Triton's attention gives the results of plain torch", proved, 1, "of 1")
        if proved:
            _bench(table, name, case, sizes)


def _sweep(table: Table, name: str, one_query: bool, attended: Callable[[], object]) -> None:
    from flexhybrid.runtime.kernels import attend_triton

    usual, calls = attend_triton.tile_sizes, {"in use": attended}

    def under(blocks: int, warps: int, stages: int) -> None:
        def sizes(*of):
            return usual(*of)[0] | {"BLOCKS": blocks}, {"num_warps": warps, "num_stages": stages}

        with patch.object(attend_triton, "tile_sizes", sizes):
            attended()

    for size in SIZES[one_query]:
        calls["{} blocks, {} warps, {} stages".format(*size)] = partial(under, *size)
    seconds = device_seconds(calls, gpu().type == "cuda")
    fastest = min(seconds, key=seconds.__getitem__)
    row, told = f"GPU, {name}: attend in place: time over that of the fastest sizes", {"seconds": seconds}
    table.at_most(row, seconds["in use"] / seconds[fastest], 1.05, "x", fastest=fastest, **told)


def _bench(table: Table, name: str, case: AttendCase, sizes: bool) -> None:
    from flexhybrid.runtime.kernels.attend_triton import table_of

    like, generator = {"dtype": torch.bfloat16, "device": gpu()}, np.random.default_rng(0)
    tokens = generator.integers(case.tokens // 2, case.tokens + 1, case.requests)
    tokens[0] = case.tokens
    held = ceil_blocks(tokens)
    order = generator.permutation(int(held.sum()))
    blocks = order[np.minimum((np.cumsum(held) - held)[:, None] + np.arange(held.max()), held.sum() - 1)]
    width = case.groups * case.d
    pool = torch.randn(len(order), 2, case.groups, BLOCK_TOKENS, case.d, **like)
    query = torch.randn(case.requests, case.groups * case.queries, case.d, **like)
    extent = Extent(blocks * 2 * BLOCK_TOKENS * width, tokens, case.d, BLOCK_TOKENS * case.d, BLOCK_TOKENS * width)

    def to_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(like["device"])

    rule, of_blocks = ScoreRule(case.d**-0.5), table_of([extent], ["pool"], (case.groups, case.d), to_device)
    targets = torch.empty(2, case.requests, case.groups, case.tokens, case.d, **like)
    mask, there = mask_of(np.arange(case.tokens) >= tokens[:, None], **like), to_device(blocks)
    mean = int(held.sum()) * BLOCK_TOKENS // case.requests  # tokens of contexts of one length and as many bytes
    keys, values = torch.randn(2, case.requests, case.groups, mean, case.d, **like)
    half = torch.empty(2, pool.nbytes // 2, dtype=torch.uint8, device=like["device"])

    def side_by_side() -> None:
        gather_blocks(pool, there, (targets[0], targets[1]), 0, case.tokens)
        PATHS[USUAL.decode](query[:, None], Assembled(targets[0], targets[1], mask), rule.scaling)

    grouped = case.queries > 1
    calls = {
        "triton": lambda: of_blocks.attend(query, [pool], rule),
        "a plain copy": lambda: half[0].copy_(half[1]),
        "attention over contiguous contexts": lambda: sdpa(query[:, :, None], keys, values, enable_gqa=grouped),
        "side by side": side_by_side,
    }
    if sizes:
        _sweep(table, name, not grouped, calls["triton"])
        return
    on_cuda = like["device"].type == "cuda"
    seconds = device_seconds(calls, on_cuda)
    cupti = {way: under_cupti(call, on_cuda) for way, call in calls.items()}
    told = {"gb_per_s": pool.nbytes / seconds["triton"] / 1e9, "seconds": seconds, "cupti": cupti}
    for other, bar in BARS.items():
        row = f"GPU, {name}: attend in place: speed of {other}"
        bar = COPY_BARS.get(name, bar) if other == "a plain copy" else bar
        table.at_least(row, seconds[other] / seconds["triton"], bar, "x", **told)
