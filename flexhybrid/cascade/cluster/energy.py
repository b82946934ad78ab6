"""Joules of a simulated GPU, predicted by a stated model of power. ``flexhybrid.cascade.metering`` measures."""

from __future__ import annotations

from dataclasses import dataclass

from flexhybrid.core.errors import InputError


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
