"""The task: one entry of the stream that both clocks run."""

from typing import Any, NamedTuple

RESOURCES = ("compute", "h2d", "d2h", "host_compute", "disk_read", "disk_write")

Count = int | Any  #: a number, or an array over the candidates of a search


class Work(NamedTuple):
    """What a task costs in machine-independent units."""

    link_bytes: Count = 0  #: bytes that cross the task's link
    memory_bytes: Count = 0  #: bytes read and written in the computing resource's memory
    flops: Count = 0
    num_copies: Count = 0  #: separate copies behind link_bytes
    tokens: Count = 0  #: rows the task works on, for reading a trace
    calls: Count = (
        0  #: small operations that are issued one after the other, where a line's overhead does not cover them
    )
    line: str = ""  #: what follows the verb in the name of a line of its own, where a machine has one


class Access(NamedTuple):
    """Cells [lo, hi) of a space: slots of a buffer, bytes of a weight slot, blocks of one layer of a pool."""

    space: tuple
    lo: int
    hi: int


class Task(NamedTuple):
    """Key (iteration, layer, mini_batch, verb), the resource that runs it, its work, and what it reads and writes.

    The stream's order is the meaning: run one by one in this order, the tasks are right. Parallel runs must keep every
    dependency that ``flexhybrid.core.schedule.dependencies`` derives from reads and writes. ``payload`` is for the
    executor (a ``Position``, a ``WeightSlice``); clocks ignore it.
    """

    iteration: int
    layer: int
    mini_batch: int
    verb: str
    resource: str
    work: Work
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    payload: Any = None

    @property
    def key(self) -> tuple[int, int, int, str]:
        """Return its identity, except for chunks of a prompt and slices of weights."""
        return self.iteration, self.layer, self.mini_batch, self.verb

    def label(self) -> str:
        return f"{self.verb} i{self.iteration} l{self.layer} m{self.mini_batch}"
