"""The state of a GPU during a measurement: clock, power and what limits them by NVML, seconds of its kernels by CUPTI.

NVML is read on a thread of its own. CUPTI follows a run that is not timed otherwise.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from experiments.bench.harness import seconds_of

EVERY_S = 0.2  #: from one reading of NVML to the next
#: Bits of NVML's reasons for a clock below the highest (nvml.h, nvmlClocksEventReasons); bit 0 is an idle GPU.
REASONS = ("set clocks", "power cap", "slowdown", "sync boost", "heat", "heat, hardware", "power brake", "display")
TURNS = 40

Reading = tuple[float, float, int]  #: MHz of the SMs, watts, bits of NVML's reasons


def gpu() -> Any:
    """Return torch's device of the GPU; on a machine without one its CPU, for tests of what runs on a GPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def nvml_reader() -> tuple[str, Callable[[], Reading]]:
    """Return the first GPU's name and a function that reads it. Raise what NVML raises where it is missing."""
    import pynvml as nvml  # pyright: ignore[reportMissingImports]

    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    name = nvml.nvmlDeviceGetName(gpu)

    def read() -> Reading:
        mhz, milliwatts = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM), nvml.nvmlDeviceGetPowerUsage(gpu)
        return mhz, milliwatts / 1e3, nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)

    return name.decode() if isinstance(name, bytes) else name, read


class Watcher:
    """Reads a GPU every EVERY_S during the life of the process, by ``read`` (None: by NVML, if it is installed)."""

    def __init__(self, read: Callable[[], Reading] | None = None):
        self._read, self._readings = read, []
        with suppress(Exception):  # rows without clocks are better than none, whatever is wrong with NVML
            self._read = read or nvml_reader()[1]
            threading.Thread(target=self._watch, name="nvml", daemon=True).start()

    def _watch(self) -> None:
        while self._read:
            time.sleep(EVERY_S)
            with suppress(Exception):
                self._readings.append(self._read())

    def since_last(self) -> dict[str, Any]:
        """Return {"gpu": what was read since the last call}: the lowest, median and highest clock and power, and each
        reason of a lower clock with its share of the readings."""
        seen, self._readings = self._readings, []
        with suppress(Exception):
            seen = seen or ([self._read()] if self._read else [])
        if not seen:
            return {"gpu": "NVML is not there"}
        told: dict[str, Any] = {"readings": len(seen)}
        for name, values in zip(("sm_mhz", "watts"), zip(*seen, strict=True), strict=False):
            told[name] = [min(values), statistics.median(values), max(values)]
        shares = {name: sum(one[2] >> bit & 1 for one in seen) / len(seen) for bit, name in enumerate(REASONS, 1)}
        return {"gpu": told | {"lower clocks by": {name: share for name, share in shares.items() if share}}}


class Span(NamedTuple):
    """What ran on the device, in nanoseconds."""

    name: str
    start: int
    end: int


def busy_seconds(spans: Iterable[Span]) -> dict[str, float]:
    """Return the seconds in which a kernel ran ("kernels_s"; copies within the device and fills count), and in which a
    copy crossed the link to the device ("h2d_s") and from it ("d2h_s"). What runs at a time counts once."""
    busy, until = dict.fromkeys(("kernels_s", "h2d_s", "d2h_s"), 0), dict.fromkeys(("kernels_s", "h2d_s", "d2h_s"), 0)
    for name, start, end in sorted(spans, key=lambda span: span.start):
        kind = "h2d_s" if "Memcpy HtoD" in name else "d2h_s" if "Memcpy DtoH" in name else "kernels_s"
        busy[kind] += max(0, end - max(start, until[kind]))
        until[kind] = max(end, until[kind])
    return {kind: nanoseconds / 1e9 for kind, nanoseconds in busy.items()}


def under_cupti(run: Callable[[], object], on_cuda: bool = True) -> dict[str, Any]:
    """Run once under CUPTI; return "wall_s" and ``busy_seconds``. On a CPU "wall_s" alone; where CUPTI or the run
    fails, "error" alone: the figures around it are worth more."""
    if not on_cuda:
        return {"wall_s": seconds_of(run)}
    import torch
    from torch.profiler import ProfilerActivity, profile

    try:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as traced:
            wall_s = seconds_of(lambda: (run(), torch.cuda.synchronize()))
        return {"wall_s": wall_s} | busy_seconds(spans_of(traced))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def spans_of(traced: Any, device: str = "CUDA") -> list[Span]:
    """Return what a torch.profiler.profile saw on a type of device, without parsing its events into trees."""
    events = traced.profiler.kineto_results.events()
    found = (event for event in events if event.device_type().name == device)
    return [Span(event.name(), event.start_ns(), event.start_ns() + event.duration_ns()) for event in found]


def device_seconds(calls: Mapping[str, Callable[[], object]], on_cuda: bool = True) -> dict[str, float]:
    """Return the median seconds on the device of each call, timed in turn, without the first turns; of a CPU, of one
    call."""
    if not on_cuda:
        return {name: seconds_of(call) for name, call in calls.items()}
    import torch

    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)  # cycles, a millisecond: all launches are enqueued before the first begins
            start.record()
            call()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) / 1e3)
    return {name: statistics.median(seconds[TURNS // 4 :]) for name, seconds in samples.items()}
