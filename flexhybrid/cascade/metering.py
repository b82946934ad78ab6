"""Joules that this machine takes: NVIDIA GPUs by NVML, processors and their memory by RAPL (Linux's powercap tree).

Both count all that runs on the machine, idle time included, as HybridServe does (VI-C). Where nothing can be read the
meter says why, and no number.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTERVAL_S = 0.1  #: between two readings (HybridServe, VI-C); a counter of RAPL begins again after minutes
MEASURED_S = 1.0  #: for which something is repeated to measure it: counters move in steps of 1 to 100 ms
POWERCAP = Path("/sys/class/powercap")


class Counter:
    """Joules that hardware counts; past ``range_j`` (None: never) it begins again at 0."""

    def __init__(self, read_j: Callable[[], float], range_j: float | None = None):
        self.read_j, self.range_j = read_j, range_j
        self.last, self.joules = read_j(), 0.0

    def update(self, _now_s: float) -> None:
        value = self.read_j()
        if value < self.last and self.range_j is None:
            raise ValueError(f"a counter of energy went back from {self.last:g} J to {value:g} J")
        self.joules += value - self.last + (self.range_j or 0.0 if value < self.last else 0.0)
        self.last = value


class Power:
    """Joules from watts, which are taken to change evenly between two readings."""

    def __init__(self, read_w: Callable[[], float], now_s: float):
        self.read_w, self.last_w, self.last_s, self.joules = read_w, read_w(), now_s, 0.0

    def update(self, now_s: float) -> None:
        watts = self.read_w()
        self.joules += (watts + self.last_w) / 2 * (now_s - self.last_s)
        self.last_w, self.last_s = watts, now_s


class Meter:
    """``with Meter(device) as meter: …`` counts joules from here on.

    On "cuda" it reads the GPUs that this process may see, and the processors too where they can be read; on "cpu" the
    processors alone. ``joules`` is None where the device itself cannot be read; ``source`` begins with "measured:" or
    "not measured:" and says by what, or why not. A thread reads every ``interval_s``, so that no counter begins again
    unseen.
    """

    def __init__(self, device: str = "cpu", powercap: Path | None = None, interval_s: float = INTERVAL_S):
        processors, of_processors = rapl_counters(POWERCAP if powercap is None else powercap)
        self._nvml, gpus, of_gpus = nvml_sensors() if device == "cuda" else (None, [], "")
        can_be_read = bool(gpus if device == "cuda" else processors)
        self._sensors: list[Counter | Power] = [*gpus, *processors] if can_be_read else []
        parts = [of_gpus, of_processors] if device == "cuda" else [of_processors]
        self._source = "; ".join(parts if can_be_read else parts[:1])
        self._failure = ""
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._read_on, args=(interval_s,), name="energy meter", daemon=True)
        if self._sensors:
            self._thread.start()

    @property
    def is_measured(self) -> bool:
        return bool(self._sensors) and not self._failure

    @property
    def joules(self) -> float | None:
        """Return the joules since the meter was opened; None where they are not measured."""
        self._update()
        return sum(sensor.joules for sensor in self._sensors) if self.is_measured else None

    @property
    def source(self) -> str:
        return f"measured: {self._source}" if self.is_measured else f"not measured: {self._failure or self._source}"

    def close(self) -> None:
        """Stop reading."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _update(self) -> None:
        with self._lock:
            try:
                for sensor in self._sensors if not self._failure else ():
                    sensor.update(time.perf_counter())
            except Exception as error:  # a driver that is gone; pynvml has its own kinds
                self._failure = f"reading failed after a while: {error}"

    def _read_on(self, interval_s: float) -> None:
        while not self._stop.wait(interval_s):
            self._update()


def rapl_counters(powercap: Path) -> tuple[list[Counter], str]:
    """Return counters of the processors' packages and their memory, and their names or why there are none.

    A package holds its cores and its graphics; memory ("dram") counts beside it. "psys" and the copies of a package
    under intel-rapl-mmio would count the same joules again. AMD's processors use the same names.
    """
    counters, names = [], []
    try:
        for zone in sorted(powercap.glob("intel-rapl:*")):
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                range_j = _joules_in(zone / "max_energy_range_uj")
                counters.append(Counter(_reader(zone / "energy_uj"), range_j))
                names.append(name)
    except PermissionError as error:
        return [], f"RAPL: {error.filename} may be read by root alone (chmod a+r it)"
    except (OSError, ValueError) as error:
        return [], f"RAPL: {error}"
    if not counters:
        return [], f"RAPL: no processor under {powercap} counts its energy"
    return counters, f"RAPL, {' + '.join(names)}"


def _joules_in(file: Path) -> float:
    return int(file.read_text()) * 1e-6


def _reader(file: Path) -> Callable[[], float]:
    return lambda: _joules_in(file)


def nvml_sensors() -> tuple[Any, list[Counter | Power], str]:
    """Return (pynvml, or None where nothing is read; a sensor of each GPU; what they are, or why there are none).

    The GPU's own counter of energy is read; where it has none (before Volta), its power.
    """
    try:
        pynvml = importlib.import_module("pynvml")  # an extra: nvidia-ml-py
        pynvml.nvmlInit()
    except Exception as error:  # pynvml's own kind, which is not known where the import fails
        return None, [], f"NVML: {error} (pip install nvidia-ml-py)"
    try:
        handles = _visible(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
        sensors = [_gpu_sensor(pynvml, handle) for handle in handles]
        if sensors:
            counts = " (their power)" * any(isinstance(sensor, Power) for sensor in sensors)
            return pynvml, sensors, f"NVML, {len(sensors)} GPU{'s' * (len(sensors) > 1)}{counts}"
        reason = "no GPU"
    except Exception as error:  # some boards report neither
        reason = str(error)
    pynvml.nvmlShutdown()
    return None, [], f"NVML: {reason}"


def _visible(pynvml, names: str | None) -> list:
    """Return the handles of the GPUs that CUDA_VISIBLE_DEVICES names, by number or UUID; all where it is not set."""
    if names is None:
        return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    handles = []
    for name in filter(None, map(str.strip, names.split(","))):
        number = name.lstrip("-").isdigit()
        if number and int(name) < 0:
            break  # as CUDA: no more after it
        handles.append(
            pynvml.nvmlDeviceGetHandleByIndex(int(name)) if number else pynvml.nvmlDeviceGetHandleByUUID(name)
        )
    return handles


def _gpu_sensor(pynvml, handle) -> Counter | Power:
    try:
        return Counter(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)
    except pynvml.NVMLError:
        return Power(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3, time.perf_counter())


# ---- what is reported


@dataclass(frozen=True)
class Energy:
    """Joules of some requests, and tokens of their answers (None: they are no language)."""

    joules: float | None
    source: str  #: begins with "measured:", "stated:" or "not measured:"
    num_requests: int
    num_tokens: int | None = None

    def record(self) -> dict:
        """Return plain JSON values."""
        joules, tokens = self.joules, self.num_tokens
        return {
            "joules": joules,
            "joules_per_request": joules / self.num_requests if joules is not None and self.num_requests else None,
            "tokens": tokens,
            "joules_per_token": joules / tokens if joules is not None and tokens else None,
            "energy_source": self.source,
        }


def describe_energy(record: dict) -> str:
    """Return the fields of ``Energy.record`` as one line."""
    tokens = f"{record['tokens']} tokens, " if record["tokens"] is not None else ""
    if record["joules"] is None:
        return f"{tokens}energy {record['energy_source']}"
    per_token = f", {record['joules_per_token']:.4g} J a token" if record["joules_per_token"] is not None else ""
    return f"{tokens}energy {record['joules_per_request']:.4g} J a request{per_token} ({record['energy_source']})"
