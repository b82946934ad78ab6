"""Measures the energy of this machine: NVIDIA GPUs by NVML, processors and memory by RAPL (Linux's powercap files).

Both count everything on the machine, with idle time, as HybridServe does (VI-C). If they cannot be read, a meter gives
the reason instead of a number.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

INTERVAL_S = 10.0  #: seconds between two readings, as a counter of RAPL wraps around after minutes
MEASURED_S = 1.0  #: seconds for which a measured task is repeated, as counters change every 1 to 100 ms
POWERCAP = Path("/sys/class/powercap")


class Counter:
    """A hardware counter of joules, which wraps around at ``range_j`` (None: never)."""

    def __init__(self, read_j: Callable[[], float], range_j: float | None = None):
        self.read_j, self.range_j = read_j, range_j
        self.last, self.joules = read_j(), 0.0

    def update(self) -> None:
        """Read the counter. Raise ValueError if it went back."""
        value = self.read_j()
        if value < self.last and self.range_j is None:
            raise ValueError(f"an energy counter went back from {self.last:g} J to {value:g} J")
        self.joules += value - self.last + (self.range_j or 0.0 if value < self.last else 0.0)
        self.last = value


class Meter:
    """Counts joules from its start: ``with Meter(device) as meter: …``.

    On "cuda" it reads the GPUs visible to this process, and the processors if possible; on "cpu" only the processors.
    ``joules`` is None if the device cannot be read. ``source`` begins with "measured:" or "not measured:", and has the
    counters or the reason. A thread reads every ``interval_s``, so that a counter wraps around at most once in between.
    """

    def __init__(self, device: str = "cpu", powercap: Path | None = None, interval_s: float = INTERVAL_S):
        self._counters, self._source = rapl_counters(POWERCAP if powercap is None else powercap)
        if device == "cuda":
            gpus, of_gpus = nvml_counters()
            self._counters = [*gpus, *self._counters] if gpus else []
            self._source = f"{of_gpus}; {self._source}" if gpus else of_gpus
        self._failure = ""
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._read_on, args=(interval_s,), name="energy meter", daemon=True)
        if self._counters:
            self._thread.start()

    @property
    def is_measured(self) -> bool:
        return bool(self._counters) and not self._failure

    @property
    def joules(self) -> float | None:
        """The joules since the start; None if not measured."""
        self._update()
        return sum(counter.joules for counter in self._counters) if self.is_measured else None

    @property
    def source(self) -> str:
        return f"measured: {self._source}" if self.is_measured else f"not measured: {self._failure or self._source}"

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _update(self) -> None:
        with self._lock:
            try:
                for counter in self._counters if not self._failure else ():
                    counter.update()
            except Exception as error:  # for example after the driver ended; pynvml has its own types
                self._failure = f"reading failed after a while: {error}"

    def _read_on(self, interval_s: float) -> None:
        while not self._stop.wait(interval_s):
            self._update()


def rapl_counters(powercap: Path) -> tuple[list[Counter], str]:
    """Return counters of the processors' packages and memory, and a text with their names, or with an error.

    A package includes cores and graphics, but not memory ("dram"). "psys", and the copies of packages under
    intel-rapl-mmio, would count the same joules twice. AMD's processors use the same names.
    """
    counters, names = [], []
    try:
        for zone in sorted(powercap.glob("intel-rapl:*")):
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                energy, range_j = zone / "energy_uj", _joules_in(zone / "max_energy_range_uj")
                counters.append(Counter(lambda energy=energy: _joules_in(energy), range_j))
                names.append(name)
    except PermissionError as error:
        return [], f"RAPL: only root may read {error.filename} (chmod a+r it)"
    except (OSError, ValueError) as error:
        return [], f"RAPL: {error}"
    if not counters:
        return [], f"RAPL: no processor under {powercap} counts its energy"
    return counters, f"RAPL, {' + '.join(names)}"


def _joules_in(file: Path) -> float:
    """Return the joules of a file with microjoules."""
    return int(file.read_text()) * 1e-6


def nvml_counters() -> tuple[list[Counter], str]:
    """Return a counter of each visible GPU, and a text with their number, or with an error.
    Visible are the numbers or UUIDs in CUDA_VISIBLE_DEVICES, or all GPUs if it is not set. GPUs before Volta have no
    counters."""
    try:
        nvml = importlib.import_module("pynvml")  # an extra: nvidia-ml-py
        nvml.nvmlInit()
    except Exception as error:  # pynvml's own error type is unknown if the import fails
        return [], f"NVML: {error} (pip install nvidia-ml-py)"
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            visible = ",".join(map(str, range(nvml.nvmlDeviceGetCount())))
        names = takewhile(lambda name: not name.startswith("-"), map(str.strip, visible.split(",")))  # as CUDA does
        counters = []
        for name in filter(None, names):
            by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
            handle = by_index(int(name)) if name.isdigit() else by_uuid(name)
            counters.append(Counter(lambda handle=handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3))
    except Exception as error:
        return [], f"NVML: {error}"
    return counters, f"NVML, {len(counters)} GPU{'s' * (len(counters) > 1)}" if counters else "NVML: no GPU"


@dataclass(frozen=True)
class Energy:
    """The energy of some requests."""

    joules: float | None
    source: str  #: begins with "measured:", "stated:" or "not measured:"
    num_requests: int
    num_tokens: int | None = None  #: tokens of the answers; None: not generated

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
    """Return a record of ``Energy`` as one line."""
    tokens = f"{record['tokens']} tokens, " if record["tokens"] is not None else ""
    if record["joules"] is None:
        return f"{tokens}energy {record['energy_source']}"
    per_token = f", {record['joules_per_token']:.4g} J per token" if record["joules_per_token"] is not None else ""
    return f"{tokens}energy {record['joules_per_request']:.4g} J per request{per_token} ({record['energy_source']})"
