"""Dependencies of tasks, derived from what they read and write.

Tasks come in stream order, and each resource runs its tasks in that order. "Task n of resource R is complete" therefore
implies all tasks before it on R. A dependency is a pair (resource, ordinal); only the latest per resource counts, and
the task's own resource needs none.
"""

from collections.abc import Iterable

from flexhybrid.core.task import Access, Task

HAZARDS = ("read_after_write", "write_after_read", "write_after_write")

#: (resource, ordinal): wait until the resource has completed the task with this ordinal, counted from 0.
Mark = tuple[str, int]


class _Span:
    """Cells [lo, hi) with one last writer and the readers since: resource -> latest ordinal."""

    __slots__ = ("lo", "hi", "writer", "written", "readers")

    def __init__(self, lo: int, hi: int, writer: str | None, written: int, readers: dict[str, int]):
        self.lo, self.hi, self.readers = lo, hi, readers
        self.writer, self.written = writer, written  #: resource and ordinal of the last task that wrote


class _Space:
    """The spans of a space, by their first cells, and the accesses whose spans are known.

    Spans are split where an access begins or ends, and never joined: a run repeats the same few accesses.
    """

    __slots__ = ("spans", "accesses")

    def __init__(self):
        self.spans: list[_Span] = []
        self.accesses: list[Access] = []


Accesses = tuple[Access, ...]
Spans = tuple[_Span, ...]

#: Limit of kept footprints: 100 layers, 100 mini-batches, 12 tasks each.
MOST_FOOTPRINTS = 1 << 17


class Dependencies:
    """Derives dependencies: ``add`` takes tasks in stream order and returns what each must wait for.

    ``hazards`` leaves out a kind of dependency, with which tests show that the trace checker fails.
    """

    def __init__(self, hazards: Iterable[str] = HAZARDS):
        hazards = set(hazards)
        self._hazards = tuple(hazard in hazards for hazard in HAZARDS)
        self._spaces: dict[tuple, _Space] = {}
        self._covered: dict[Access, Spans] = {}  # of all spaces
        # Keyed by the identity of the tuples of reads and writes, which tasks of one form share. The tuples are kept,
        # so that identities stay valid.
        self._footprints: dict[tuple[int, int], tuple[Spans, Spans, Accesses, Accesses]] = {}
        self._issued: dict[str, int] = {}

    def add(self, task: Task) -> tuple[Mark, ...]:
        own, reads, writes = task.resource, task.reads, task.writes
        ordinal = self._issued.get(own, 0)
        self._issued[own] = ordinal + 1
        footprint = self._footprints.get((id(reads), id(writes)))
        read, written, _, _ = footprint or self._footprint(reads, writes)
        after_write, after_read, write_after_write = self._hazards
        waits: dict[str, int] = {}
        for span in read:
            resource = span.writer
            if resource is not None and resource != own and after_write and waits.get(resource, -1) < span.written:
                waits[resource] = span.written
            span.readers[own] = ordinal
        for span in written:
            resource, readers = span.writer, span.readers
            if (
                resource is not None
                and resource != own
                and write_after_write
                and waits.get(resource, -1) < span.written
            ):
                waits[resource] = span.written
            if readers:
                if after_read:
                    for resource, number in readers.items():
                        if resource != own and waits.get(resource, -1) < number:
                            waits[resource] = number
                readers.clear()
            span.writer, span.written = own, ordinal
        return tuple(waits.items()) if waits else ()

    def _footprint(self, reads: Accesses, writes: Accesses) -> tuple[Spans, Spans, Accesses, Accesses]:
        """Return the spans that a task reads, and those that it writes."""
        try:
            read, written = self._spans(reads), self._spans(writes)
        except KeyError:
            for access in (*reads, *writes) * 2:  # twice: one may split the other's spans
                if access not in self._covered:
                    self._cover(access)
            read, written = self._spans(reads), self._spans(writes)
        if len(self._footprints) >= MOST_FOOTPRINTS:
            self._footprints.clear()
        footprint = read, written, reads, writes
        self._footprints[id(reads), id(writes)] = footprint
        return footprint

    def _spans(self, accesses: Accesses) -> Spans:
        """Return the spans of accesses. Raise KeyError for cells without a span."""
        covered = self._covered
        return tuple([span for access in accesses for span in covered[access]])

    def _cover(self, access: Access) -> None:
        """Record the spans that cover an access exactly, made or split where needed."""
        space = self._spaces.get(access.space)
        if space is None:
            space = self._spaces[access.space] = _Space()
        if _split(space.spans, access.lo, access.hi):
            for known in space.accesses:
                del self._covered[known]
            space.accesses.clear()
            self._footprints.clear()
        space.accesses.append(access)
        self._covered[access] = tuple(span for span in space.spans if access.lo <= span.lo < access.hi)


def _split(spans: list[_Span], lo: int, hi: int) -> bool:
    """Make whole spans cover [lo, hi) exactly; return whether one was split."""
    if lo >= hi:
        return False
    if not spans or spans[-1].hi <= lo:  # the common case
        spans.append(_Span(lo, hi, None, 0, {}))
        return False
    beyond = [
        _Span(cell, span.hi, span.writer, span.written, dict(span.readers))
        for cell in (hi, lo)  # hi first: where one span holds both, the part from lo on ends at hi
        for span in spans
        if span.lo < cell < span.hi
    ]
    position, gaps = lo, []
    for span in spans:
        if lo < span.hi and span.lo < hi:
            if position < span.lo:
                gaps.append(_Span(position, span.lo, None, 0, {}))
            position = span.hi
    if position < hi:
        gaps.append(_Span(position, hi, None, 0, {}))
    spans += [*beyond, *gaps]
    spans.sort(key=lambda span: span.lo)
    for span, following in zip(spans, spans[1:], strict=False):
        span.hi = min(span.hi, following.lo)
    return bool(beyond)
