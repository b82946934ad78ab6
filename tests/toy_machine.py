"""A small model, and a machine whose rates can all be chosen."""

from __future__ import annotations

from flexhybrid.core.hardware import Hardware, Line
from flexhybrid.core.model.shape import ModelShape

SHAPE = ModelShape("small", "opt", 4, 256, 4, 4, 64, 1024, 2048, 1024)
MIB = 2**20


def machine(link=0.3, gflops=60.0, memory=8.0, disk=0.1) -> Hardware:
    """Return a machine with these rates in GB/s and GFLOP/s."""
    link_line, disk_line = Line(2e-5, 0.0, 1e-9 / link), Line(1e-4, 0.0, 1e-9 / disk)
    lines = {
        "compute": Line(2e-5, 1e-9 / gflops, 1e-9 / memory),
        "h2d": link_line,
        "d2h": link_line,
        "host_compute": Line(2e-5, 1e-9 / 20, 1e-10),
        "disk_read": disk_line,
        "disk_write": disk_line,
    }
    return Hardware("toy", "cpu", lines)
