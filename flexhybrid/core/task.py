"""Tasks: the entries of the stream that both clocks run."""

from typing import Any, NamedTuple

RESOURCES = ("compute", "h2d", "d2h", "host_compute", "disk_read", "disk_write")

Count = int | Any  #: a number, or an array over the candidates of a search


class Work(NamedTuple):
    """The cost of a task in machine-independent units."""

    link_bytes: Count = 0  #: bytes that cross the task's link
    memory_bytes: Count = 0  #: bytes read and written in the computing resource's memory
    flops: Count = 0
    num_copies: Count = 0  #: separate copies that make up link_bytes
    tokens: Count = 0  #: rows that the task processes, as information in traces
    calls: Count = 0  #: small operations issued one after another that the line's overhead does not include
    line: str = ""  #: suffix of the verb in the key of a separate line, which a machine may have


class Access(NamedTuple):
    """Cells [lo, hi) of a space: slots of a buffer, bytes of a weight slot, or blocks of a pool in one layer."""

    space: tuple
    lo: int
    hi: int


class Task(NamedTuple):
    """A verb for one mini-batch in one layer of one iteration, with its resource, work, reads and writes.

    Run one by one in the order of the stream, tasks give the right result. Parallel runs must keep every dependency
    that ``flexhybrid.core.schedule.dependencies`` derives from reads and writes. ``payload`` is for the executor (a
    ``Position`` or a ``WeightSlice``); the virtual clock ignores it.
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
        """Return (iteration, layer, mini_batch, verb). Only chunks of a prompt and slices of weights can have equal
        keys."""
        return self.iteration, self.layer, self.mini_batch, self.verb

    def label(self) -> str:
        """Return the key as text for messages."""
        return f"{self.verb} i{self.iteration} l{self.layer} m{self.mini_batch}"
