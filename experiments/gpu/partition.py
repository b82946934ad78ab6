"""A mix of KV and ACT where the GPU computes less beside the same link: on some of its SMs (M4).

The compute lane's stream belongs to a CUDA green context, a partition of the SMs. On 48 of an H200's 132 SMs, FLOPs and
the link's bytes are in the ratio of an RTX 4090, on which CAPTURE was measured. It is no RTX 4090: memory and link stay
this GPU's. The machine's record is scaled by what products and copies take there.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from experiments.bench.harness import Table
from experiments.gpu.cases import PARTITION
from experiments.gpu.mix import Run, run_case
from experiments.gpu.watch import device_seconds, gpu
from flexhybrid.core.hardware import ALONE_SUFFIX, EXPERTS_SUFFIX, Hardware
from flexhybrid.core.verbs import RESOURCE_OF
from flexhybrid.resolve import PacedDevice, named_hardware
from flexhybrid.runtime.cuda import lane_streams
from flexhybrid.runtime.profiling.attention_paths import proved_on_gpu

ROWS = (1024, 4096, 16384)  #: tokens of the KV-Gen products that are timed
COPY_BYTES = 1 << 30


def green_stream(num_sms: int) -> tuple[torch.cuda.ExternalStream, int]:
    """Return a stream whose kernels run on this many SMs of the first GPU, and how many the driver gave. It and its
    context live as long as the process. Raise RuntimeError where the driver refuses."""
    from cuda.bindings import driver  # pyright: ignore[reportMissingImports]

    def done(answer: tuple) -> Any:
        status, *values = answer
        if int(status):
            raise RuntimeError(f"CUDA green contexts: {status}")
        return values[0] if len(values) == 1 else values

    torch.cuda.synchronize()  # the primary context is there
    gpu = done(driver.cuDeviceGet(0))
    every = done(driver.cuDeviceGetDevResource(gpu, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    groups, _, _ = done(driver.cuDevSmResourceSplitByCount(1, every, 0, num_sms))
    described = done(driver.cuDevResourceGenerateDesc(groups[:1], 1))
    flag = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = done(driver.cuGreenCtxCreate(described, gpu, int(flag)))
    stream = done(driver.cuGreenCtxStreamCreate(context, int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING), 0))
    return torch.cuda.ExternalStream(int(stream)), groups[0].sm.smCount


def rates(stream: torch.cuda.Stream | None, hidden: int) -> dict[str, float]:
    """Return the seconds of KV-Gen's products by rows (ROWS), and of a copy, on a stream (None: the default one)."""
    device = gpu()
    on_cuda = device.type == "cuda"
    like = {"dtype": torch.float16, "device": device}
    matrix, rows = torch.randn(2 * hidden, hidden, **like), torch.randn(max(ROWS), hidden, **like)
    halves = torch.empty(2, COPY_BYTES // 4, **like)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: halves[0].copy_(halves[1])}
    calls |= {f"{n} rows": lambda n=n: torch.nn.functional.linear(rows[:n], matrix) for n in ROWS}
    if on_cuda:
        torch.cuda.synchronize()  # what the stream reads is there
    with torch.cuda.stream(stream):
        return device_seconds(calls, on_cuda)


def scaled(hardware: Hardware, flops: float, num_bytes: float) -> Hardware:
    """Return the record with the compute lane's seconds a FLOP and a byte multiplied."""

    def line_of(key: str):
        verb, line = key.removesuffix(ALONE_SUFFIX).removesuffix(EXPERTS_SUFFIX), hardware.lines[key]
        if RESOURCE_OF.get(verb, verb) != "compute":
            return line
        return replace(line, s_per_flop=line.s_per_flop * flops, s_per_byte=line.s_per_byte * num_bytes)

    source = f"{hardware.source}, compute scaled by {flops:.2f} a FLOP and {num_bytes:.2f} a byte"
    return replace(hardware, lines={key: line_of(key) for key in hardware.lines}, source=source)


def run_partition(table: Table, option: str, _seconds: float) -> None:
    """Add the rows of M4 on ``option`` SMs. Raise RuntimeError where the driver makes no partition."""
    device, hidden = gpu(), PARTITION.shape.hidden
    stream, count = green_stream(int(option))
    with torch.cuda.stream(stream):  # first of all: where Triton's kernels refuse such a stream, no run takes them
        in_place = proved_on_gpu(PARTITION.dtype, PARTITION.shape.queries_per_key, PARTITION.shape.head_dim)
    whole, part = rates(None, hidden), rates(stream, hidden)
    slower = {name: part[name] / whole[name] for name in whole}
    told = {"sms": count, "attends in place": in_place, "seconds": part, "seconds of all SMs": whole, "times": slower}
    table.tell(
        "partition: KV-Gen's rate", 4 * ROWS[-1] * hidden**2 / part[f"{ROWS[-1]} rows"] / 1e12, "TFLOP/s", **told
    )
    hardware = named_hardware(None, PacedDevice(device))
    scaled_record = hardware and scaled(hardware, slower[f"{ROWS[-1]} rows"], slower["copy"])
    lane_streams(device)["compute"] = stream  # every run of this process shares the lanes' streams
    run_case(Run(table, f"partition of {count} SMs", PARTITION, device, scaled_record))
