"""The price of a task: the one place where work and a hardware line become seconds.

The virtual clock prices single tasks, the closed form arrays of them; both call ``price``. What is left out: a link
slowed by the other direction (h2d_both and d2h_both are measured and shown, but price nothing: stores are a trickle
beside loads) or by a busy memory (profile under load, so that the lines contain it), caches that stay warm between
tasks, and the time to enqueue a task.
"""

from __future__ import annotations

from flexhybrid.core.hardware import LINKS, Hardware
from flexhybrid.core.task import Task, Work


def price(hardware: Hardware, verb: str, resource: str, work: Work):
    """Seconds of one task. The work's counts may be numpy arrays, then so is the result."""
    return hardware.line(verb, resource).seconds(
        work.flops, work.link_bytes if resource in LINKS else work.memory_bytes
    )


def task_seconds(task: Task, hardware: Hardware) -> float:
    """Seconds that one task of a stream takes on this machine."""
    return price(hardware, task.verb, task.resource, task.work)
