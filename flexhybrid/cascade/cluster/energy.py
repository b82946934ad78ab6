"""Joules: read from NVIDIA's power meter where there is one, else predicted by a stated model of power."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexhybrid.core.errors import InputError

INTERVAL_S = 0.1  #: between two readings (HybridServe, VI-C)


@dataclass(frozen=True)
class PowerModel:
    """Watts of an idle GPU and of one whose kernels run all the time; between them in proportion."""

    idle_w: float
    busy_w: float
    source: str

    def __post_init__(self):
        if not 0 <= self.idle_w <= self.busy_w < float("inf"):
            raise InputError(f"a GPU's power is {self.idle_w!r} W idle and {self.busy_w!r} W busy; 0 <= idle <= busy")

    def joules(self, span_s: float, busy_s: float) -> float:
        """Return the joules of a GPU that was on for ``span_s`` seconds and computed during ``busy_s`` of them."""
        return self.idle_w * span_s + (self.busy_w - self.idle_w) * busy_s


#: By the catalogue's names. Busy is the board's limit by datasheet. Idle, a board with its context loaded, is in no
#: datasheet: it is assumed, and better replaced by nvidia-smi's reading (``cascade simulate --idle-w``).
POWER = {
    "t4": PowerModel(10.0, 70.0, "T4: 70 W board limit (datasheet); 10 W idle assumed"),
    "rtx-a6000": PowerModel(25.0, 300.0, "RTX A6000: 300 W board limit (datasheet); 25 W idle assumed"),
    "rtx4090": PowerModel(25.0, 450.0, "RTX 4090: 450 W board limit (datasheet); 25 W idle assumed"),
    "rtx5000": PowerModel(20.0, 230.0, "Quadro RTX 5000: 230 W board limit (datasheet); 20 W idle assumed"),
    "a100-40g": PowerModel(50.0, 400.0, "A100 SXM: 400 W board limit (datasheet); 50 W idle assumed"),
    "h100": PowerModel(70.0, 700.0, "H100 SXM: 700 W board limit (datasheet); 70 W idle assumed"),
    "h200": PowerModel(75.0, 700.0, "H200 SXM: 700 W board limit (datasheet); 75 W idle assumed"),
}


class Meter:
    """Joules of a block of code: ``with Meter(power) as meter: …``, then ``meter.joules`` and ``meter.source``.

    All of this machine's NVIDIA GPUs are read by NVML every INTERVAL_S, their idle time included. Where pynvml or a GPU
    is missing, ``power`` predicts ``num_gpus`` GPUs that are busy for ``busy_s`` seconds (None: all the time).
    ``measured`` tells the two apart, and ``source`` describes the one used.
    """

    def __init__(self, power: PowerModel, num_gpus: int = 1, interval_s: float = INTERVAL_S):
        self.power, self.num_gpus, self.interval_s = power, num_gpus, interval_s
        self.busy_s: float | None = None
        self.measured, self.joules, self.source = False, 0.0, ""
        self.samples: list[tuple[float, float]] = []  #: (seconds, watts of all GPUs)

    def __enter__(self) -> Meter:
        self._nvml, self._gpus = _nvml_gpus()
        self._begun = time.perf_counter()
        if self._gpus:
            self._stop = threading.Event()
            self._read()
            self._thread = threading.Thread(target=self._sample, name="energy meter")
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        span_s = time.perf_counter() - self._begun
        if self._gpus:
            self._stop.set()
            self._thread.join()
            self._read()
            self._nvml.nvmlShutdown()
            at, watts = np.array(self.samples).T
            self.joules = float(np.trapezoid(watts, at))
            self.measured = True
            self.source = f"measured: NVML, {len(self._gpus)} GPUs, every {self.interval_s:g} s"
            return
        busy_s = self.num_gpus * span_s if self.busy_s is None else self.busy_s
        self.joules = self.power.joules(self.num_gpus * span_s, busy_s)
        self.source = f"power model, not measured: {self.power.source}"

    def _read(self) -> None:
        milliwatts = sum(map(self._nvml.nvmlDeviceGetPowerUsage, self._gpus))
        self.samples.append((time.perf_counter(), milliwatts / 1e3))

    def _sample(self) -> None:
        while not self._stop.wait(self.interval_s):
            self._read()


def _nvml_gpus() -> tuple[Any, list]:
    """Return (pynvml, its handles of all GPUs); no handles where pynvml, the driver or a board's power is missing."""
    try:
        pynvml = importlib.import_module("pynvml")  # an extra: nvidia-ml-py
        pynvml.nvmlInit()
    except Exception:  # pynvml's own kind, which is not known where the import fails
        return None, []
    with contextlib.suppress(pynvml.NVMLError):  # some boards report no power: the model of power is used
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        if sum(map(pynvml.nvmlDeviceGetPowerUsage, handles)) > 0:
            return pynvml, handles
    pynvml.nvmlShutdown()
    return None, []
