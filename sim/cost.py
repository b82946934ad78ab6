"""The price of a task: the one place where work and a hardware line become seconds.

The virtual clock prices single tasks, the array clock arrays of them. What is left out: a link slowed by the other
direction (h2d_both and d2h_both are measured and shown, but price nothing: stores are a trickle beside loads) or by a
busy memory (profile under load, so that the lines contain it), caches that stay warm between tasks, and the time to
enqueue a task.
"""

from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import LINKS, Hardware, Line
from flexhybrid.core.policy import Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.task import Work

CALL_S = 4e-6  #: what Python takes to issue a small operation: numpy 2 to 4 us, a kernel on CUDA 4 to 5


def hardware_of(problem: Problem, policy: Policy | None = None) -> Hardware:
    """The machine to price on; with a policy, as that leaves it (``Hardware.at_work``). Raises InputError where the
    problem names none."""
    if problem.hardware is None:
        raise InputError(f"{problem.shape.name}: without a hardware record nothing can be predicted")
    return problem.hardware.at_work(policy) if policy else problem.hardware


def price(hardware: Hardware, verb: str, resource: str, work: Work):
    """Seconds of one task. The work's counts may be numpy arrays, then so is the result."""
    return line_seconds(hardware.line(verb, resource, work.line), resource, work)


def line_seconds(line: Line, resource: str, work: Work):
    """Seconds of a task whose hardware line is known."""
    seconds = line.seconds(work.flops, work.link_bytes if resource in LINKS else work.memory_bytes)
    return seconds + CALL_S * work.calls
