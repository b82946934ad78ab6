"""Bench rows of the quantiser on a GPU: its Triton kernels against a plain copy, plain torch and torch.compile."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch

from flexhybrid.runtime.kernels import quantize as quantizer
from flexhybrid.runtime.kernels.quantize import dequantize, packed_bytes, quantize

ROWS = COLUMNS = 4096
SETS = 8  #: of operands, in turn: together more than a GPU's cache holds
TURNS = 40
#: Of a plain copy. A copy is one access in and one out; packing reads half its operands a second time from the cache,
#: and computes about as long as it moves on the GPUs with the fastest memory.
BARS = {"quantize": 0.5, "dequantize": 0.8}


def bench_quantize_cuda(table) -> None:
    """Rows [4096, 4096] of bfloat16, 8 and 4 bits: seconds of others over seconds of the kernels, with all seconds.

    torch.compile is here for its speed alone: of what it packs, some bytes differ.
    """
    rows = torch.randn(SETS, ROWS, COLUMNS, device="cuda").bfloat16()
    for bits in (8, 4):
        proven = quantizer._proven_kernels(rows.device, rows.dtype, bits)
        name = f"GPU, {bits} bits"
        table.add(f"{name}: Triton's kernels give the bits of plain torch", proven is not None, 1, "of 1")
        packed = torch.stack([quantize(one, bits) for one in rows])
        restored = torch.empty_like(rows)
        for what, calls in _calls(rows, packed, restored, bits).items():
            seconds = _median_seconds(calls)
            ours = seconds["triton"]
            gb_per_s = ROWS * (2 * COLUMNS + packed_bytes(COLUMNS, bits)) / ours / 1e9
            table.add(f"{name}: {what}: speed of a plain copy", seconds["copy"] / ours, BARS[what], "x",
                      gb_per_s=gb_per_s, seconds=seconds)  # fmt: skip
            table.add(f"{name}: {what}: speed of plain torch", seconds["torch"] / ours, 1.0, "x")
            if "compiled" in seconds:
                table.add(f"{name}: {what}: speed of torch.compile", seconds["compiled"] / ours, 1.0, "x")


def _calls(rows: torch.Tensor, packed: torch.Tensor, restored: torch.Tensor, bits: int) -> dict[str, dict]:
    """{"quantize" or "dequantize": {contender: function of a set's number}}"""
    half = (rows[0].nbytes + packed[0].nbytes) // 2  # a copy reads and writes each byte
    plain = torch.empty(2, SETS, half, dtype=torch.uint8, device=rows.device)

    def copy(i: int) -> None:
        plain[1, i].copy_(plain[0, i])

    def with_torch(i: int, function: Callable, source: torch.Tensor, target: torch.Tensor) -> None:
        function(source[i], bits, target[i])

    calls = {
        "quantize": {
            "copy": copy,
            "triton": lambda i: quantize(rows[i], bits, packed[i]),
            "torch": partial(with_torch, function=quantizer._quantize, source=rows, target=packed),
        },
        "dequantize": {
            "copy": copy,
            "triton": lambda i: dequantize(packed[i], bits, rows.dtype, restored[i]),
            "torch": partial(with_torch, function=quantizer._dequantize, source=packed, target=restored),
        },
    }
    for by_contender in calls.values():
        compiled = partial(by_contender["torch"], function=torch.compile(by_contender["torch"].keywords["function"]))
        try:
            compiled(0)
        except Exception as error:  # whatever a compiler raises: the row is then left out
            print(f"     torch.compile does not compile the quantiser: {str(error).splitlines()[0]}")
        else:
            by_contender["compiled"] = compiled
    return calls


def _median_seconds(calls: dict[str, Callable[[int], None]]) -> dict[str, float]:
    """Seconds on the device of a call of each, one after another in turn, the first turns left out."""
    samples = {name: [] for name in calls}
    for turn in range(TURNS):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)  # cycles, a millisecond: all launches are under way before the first begins
            start.record()
            call(turn % SETS)
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) / 1e3)
    return {name: statistics.median(one[TURNS // 4 :]) for name, one in samples.items()}
