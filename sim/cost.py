"""The price of a task: the one place where work and a hardware line become seconds.

The virtual clock prices single tasks, the closed form arrays of them; both call ``price``. What is left out: a link
slowed by the other direction (h2d_both and d2h_both are measured and shown, but price nothing: stores are a trickle
beside loads) or by a busy memory (profile under load, so that the lines contain it), caches that stay
warm between tasks, and the time to enqueue a task.
"""

from __future__ import annotations

from flexhybrid.core.hardware import LINKS, Hardware, Line
from flexhybrid.core.task import Task, Work


def line_for(hardware: Hardware, verb: str, resource: str, prefill: bool = False) -> Line:
    """The line of a verb, else of its resource. Attention over a prompt is another kernel than over a cache: it takes
    "attend_prefill" where the machine has that line. Raises InputError when there is no line at all."""
    if prefill and verb == "attend" and "attend_prefill" in hardware.lines:
        verb = "attend_prefill"
    return hardware.line(verb, resource)


def price(hardware: Hardware, verb: str, resource: str, work: Work, prefill: bool = False):
    """Seconds of one task. The work's counts may be numpy arrays, then so is the result."""
    line = line_for(hardware, verb, resource, prefill)
    return line.seconds(work.flops, work.link_bytes if resource in LINKS else work.memory_bytes)


def task_seconds(task: Task, hardware: Hardware) -> float:
    """Seconds that one task of a stream takes on this machine."""
    return price(hardware, task.verb, task.resource, task.work, prefill=task.iteration == 0)
