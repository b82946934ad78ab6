"""Predicts the energy of a simulated GPU from idle and busy power. ``flexhybrid.cascade.metering`` measures energy."""

from __future__ import annotations

from dataclasses import dataclass

from flexhybrid.core.errors import InputError


@dataclass(frozen=True)
class PowerModel:
    """The power of a GPU, which grows linearly with the share of time that kernels run."""

    idle_w: float
    busy_w: float
    source: str

    def __post_init__(self):
        if not 0 <= self.idle_w <= self.busy_w < float("inf"):
            raise InputError(f"a GPU's power is {self.idle_w!r} W idle and {self.busy_w!r} W busy; 0 <= idle <= busy")

    def joules(self, span_s: float, busy_s: float) -> float:
        """Return the joules of a GPU that was on for ``span_s`` seconds and computed during ``busy_s`` of them."""
        return self.idle_w * span_s + (self.busy_w - self.idle_w) * busy_s


#: Machine of the catalogue -> power. Busy: the limit of the board by datasheet. Idle, with a loaded context: assumed,
#: as datasheets lack it; the reading of nvidia-smi is better (``cascade simulate --idle-w``).
POWER = {
    "t4": PowerModel(10.0, 70.0, "T4: 70 W board limit (datasheet); 10 W idle assumed"),
    "rtx-a6000": PowerModel(25.0, 300.0, "RTX A6000: 300 W board limit (datasheet); 25 W idle assumed"),
    "rtx4090": PowerModel(25.0, 450.0, "RTX 4090: 450 W board limit (datasheet); 25 W idle assumed"),
    "rtx5000": PowerModel(20.0, 230.0, "Quadro RTX 5000: 230 W board limit (datasheet); 20 W idle assumed"),
    "a100-40g": PowerModel(50.0, 400.0, "A100 SXM: 400 W board limit (datasheet); 50 W idle assumed"),
    "h100": PowerModel(70.0, 700.0, "H100 SXM: 700 W board limit (datasheet); 70 W idle assumed"),
    "h200": PowerModel(75.0, 700.0, "H200 SXM: 700 W board limit (datasheet); 75 W idle assumed"),
}
