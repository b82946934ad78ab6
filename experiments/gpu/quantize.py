"""Bench rows of quantization on a GPU: the Triton kernels against a plain copy, plain torch and torch.compile."""

import statistics
from collections.abc import Callable
from functools import partial

import torch

from experiments.bench.harness import Table
from flexhybrid.core.policy import GROUP_ELEMENTS
from flexhybrid.runtime.kernels import quantize as quantizer
from flexhybrid.runtime.kernels.quantize import dequantize, packed_bytes, quantize

ROWS = COLUMNS = 4096
SETS = 8  #: sets of operands, used in turn: together larger than a GPU's cache
TURNS = 40
#: Share of a plain copy's speed. A copy reads and writes once; quantizing reads half of its operands twice (the second
#: time from the cache), and on the GPUs with the fastest memory computes about as long as it moves data.
BARS = {"quantize": 0.5, "dequantize": 0.8}


def bench_quantize_cuda(table: Table) -> None:
    """Rows [4096, 4096] of bfloat16 in 8 and 4 bits: seconds of the alternatives over seconds of the kernels.

    torch.compile is compared by its speed alone: some of its bytes differ.
    """
    rows = torch.randn(SETS, ROWS, COLUMNS, device="cuda").bfloat16()
    for bits in (8, 4):
        proven = quantizer._kernels_for(rows, bits, GROUP_ELEMENTS)
        name = f"GPU, {bits} bits"
        table.at_least(f"{name}: Triton's kernels give the bits of plain torch", proven is not None, 1, "of 1")
        packed = torch.stack([quantize(operand, bits) for operand in rows])
        restored = torch.empty_like(rows)
        for operation, calls in _calls(rows, packed, restored, bits).items():
            seconds = median_seconds(calls)
            ours = seconds["triton"]
            gb_per_s = ROWS * (2 * COLUMNS + packed_bytes(COLUMNS, bits)) / ours / 1e9
            conditions = {"gb_per_s": gb_per_s, "seconds": seconds}
            row = f"{name}: {operation}: speed of a plain copy"
            table.at_least(row, seconds["copy"] / ours, BARS[operation], "x", **conditions)
            table.at_least(f"{name}: {operation}: speed of plain torch", seconds["torch"] / ours, 1.0, "x")
            if "compiled" in seconds:
                table.at_least(f"{name}: {operation}: speed of torch.compile", seconds["compiled"] / ours, 1.0, "x")


def _calls(rows: torch.Tensor, packed: torch.Tensor, restored: torch.Tensor, bits: int) -> dict[str, dict]:
    """Return {"quantize" or "dequantize": {implementation: function of a set's number}}."""
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
    for implementations in calls.values():
        plain_torch = implementations["torch"]
        compiled = partial(plain_torch, function=torch.compile(plain_torch.keywords["function"]))
        try:
            compiled(0)
        except Exception as error:  # a compiler may raise anything; the row is then left out
            print(f"     torch.compile does not compile the quantization: {str(error).splitlines()[0]}")
        else:
            implementations["compiled"] = compiled
    return calls


def median_seconds(calls: dict[str, Callable[[int], None]]) -> dict[str, float]:
    """Return the median seconds on the device of each call, timed in turn, without the first turns."""
    samples = {name: [] for name in calls}
    for turn in range(TURNS):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)  # cycles, a millisecond: all launches are enqueued before the first begins
            start.record()
            call(turn % SETS)
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) / 1e3)
    return {name: statistics.median(seconds[TURNS // 4 :]) for name, seconds in samples.items()}
